//! `cargo xtask vm`: the end-to-end tests on a machine with systemd, cgroup version 2 and pressure metrics.
//!
//! Owns: the machine's disks, its start and its end. It is emulated, so it is independent of this machine's kernel, and
//! slow. Inside runs this same program (`testbed/vm/run`), with what was built here, at the same paths.

mod image;

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use rubelet_testbed::{
    Runtime,
    command::{SHORT, command, describe, output, wait},
    go_tools::{self, GoTool},
    image as containers,
    packages::{self, Need, program},
    progress::step,
    project, tail,
};
use rustix::fs::{FlockOperation, flock};

use crate::{debian::fresh, e2e, vm::image::Image};

/// `setpriv` kills the machine when this process dies.
const NEEDS: &[Need] = &[
    program("qemu-system-x86_64", "qemu-system-x86"),
    program("mkfs.ext4", "e2fsprogs"),
    program("setpriv", "util-linux"),
];

/// Of a control plane and the tests on it.
const CLUSTER_TOOLS: &[GoTool] = &[
    go_tools::ETCD,
    go_tools::KUBE_APISERVER,
    go_tools::KUBE_CONTROLLER_MANAGER,
    go_tools::KUBE_SCHEDULER,
    go_tools::KUBECTL,
    go_tools::KUBELET,
    go_tools::METRICS_SERVER,
    go_tools::CSI_HOSTPATH,
    go_tools::CSI_SIDECARS,
];

/// For the machine's start and all the tests, on a busy host.
const LIMIT: Duration = Duration::from_secs(2 * 3600);

/// Which tests run there.
#[derive(Debug)]
pub struct Options {
    pub runtimes: Vec<Runtime>,
    pub filter: String,
    pub has_clusters: bool,
}

pub fn run(options: &Options) -> anyhow::Result<ExitCode> {
    ensure!(cfg!(target_arch = "x86_64"), "the machine is an x86-64 one, and runs what is built here");
    packages::require_root()?;
    packages::ensure(NEEDS)?;
    let base = project::target().join("testbed/vm");
    fs::create_dir_all(&base)?;
    let lock = fs::File::open(&base)?;
    flock(&lock, FlockOperation::NonBlockingLockExclusive).context("another `cargo xtask vm` is under way")?;
    let image = Image::ensure(&base)?;
    let work = Work(fresh(&base.join("run"))?);
    let rubelet = work.0.join("rubelet");
    step("building Rubelet (dev)", || e2e::build(&rubelet))?;
    let disk = step("putting the tests on a disk", || disk(&work.0, &rubelet, options))?;
    let console = work.0.join("console");
    let verdict = work.0.join("verdict");
    println!("starting the machine …");
    show(&mut machine(&image, &disk, &console, &verdict))?;
    match fs::read_to_string(&verdict).unwrap_or_default().trim() {
        "0" => Ok(ExitCode::SUCCESS),
        "" => bail!("the machine ended before the tests did; the end of its console:\n{}", tail(&console, 40)),
        _ => Ok(ExitCode::FAILURE),
    }
}

/// Files of one run, removed on drop.
struct Work(PathBuf);

impl Drop for Work {
    fn drop(&mut self) {
        // The next run reports what could not be removed.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A disk with all that the runner needs and cannot build inside.
fn disk(work: &Path, rubelet: &Path, options: &Options) -> anyhow::Result<PathBuf> {
    let tests = work.join("tests");
    let testbed = tests.join("project/target/testbed");
    fs::create_dir_all(&testbed)?;
    fs::rename(rubelet, tests.join("rubelet"))?;
    // As it was started, also if it has been built anew since.
    fs::copy("/proc/self/exe", tests.join("rubelet-e2e"))?;
    copy(&project::root().join("testbed"), &tests.join("project"))?;
    for archive in containers::ensure()? {
        copy(&archive, &testbed.join("images"))?;
    }
    let mut arguments = vec!["--filter".to_owned(), options.filter.clone()];
    if let [runtime] = options.runtimes[..] {
        arguments.extend(["--runtime".to_owned(), runtime.as_str().to_owned()]);
    }
    let mut tools = Vec::new();
    if options.runtimes.contains(&Runtime::Containerd24) {
        tools.extend(go_tools::RUNTIME);
    }
    if options.has_clusters {
        arguments.push("--built-cluster".to_owned());
        tools.extend(CLUSTER_TOOLS);
    }
    let bin = go_tools::ensure(&tools)?;
    for file in go_tools::files(&tools) {
        copy(&bin.join(file), &testbed.join("bin"))?;
    }
    fs::write(tests.join("arguments"), arguments.join("\n"))?;
    fs::write(tests.join("place"), project::root().as_os_str().as_encoded_bytes())?;
    let disk = work.join("tests.ext4");
    image::file_system(&tests, &disk, "2G")?;
    Ok(disk)
}

/// With its times, by which the runner knows what is up to date.
fn copy(from: &Path, into: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(into)?;
    let mut cp = command("cp", ["--archive", "--dereference"]);
    output(cp.arg(from).arg(into), SHORT).map(drop)
}

/// Its disk writes are discarded.
fn machine(image: &Image, tests: &Path, console: &Path, verdict: &Path) -> Command {
    let drive = |path: &Path| format!("file={},format=raw,if=virtio,snapshot=on", path.display());
    let port = |name: &str| format!("virtserialport,chardev={name},name={name}");
    let mut qemu = command("setpriv", ["--pdeathsig", "KILL", "qemu-system-x86_64", "-nodefaults", "-no-reboot"]);
    qemu.args(["-display", "none", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", "3G"]);
    qemu.arg("-kernel").arg(&image.kernel).arg("-initrd").arg(&image.initrd);
    qemu.args(["-append", "root=/dev/vda rw console=ttyS0 panic=-1 systemd.unified_cgroup_hierarchy=1 psi=1"]);
    qemu.args(["-drive", &drive(&image.root), "-drive", &drive(tests)]);
    qemu.args(["-device", "virtio-rng-pci", "-device", "virtio-serial"]);
    qemu.args(["-chardev", "file,id=output,path=/dev/stdout,append=on", "-device", &port("output")]);
    qemu.args(["-chardev", &format!("file,id=verdict,path={}", verdict.display()), "-device", &port("verdict")]);
    qemu.arg("-serial").arg(format!("file:{}", console.display()));
    qemu
}

/// Runs to the end and prints its output line by line.
fn show(machine: &mut Command) -> anyhow::Result<()> {
    let name = describe(machine);
    let mut child = machine.stdout(Stdio::piped()).spawn().with_context(|| format!("cannot run `{name}`"))?;
    let lines = BufReader::new(child.stdout.take().expect("stdout was asked for")).lines();
    let reader = thread::spawn(move || lines.map_while(Result::ok).for_each(|line| println!("{line}")));
    let status = wait(&mut child, LIMIT).context("the machine")?;
    let _ = reader.join();
    ensure!(status.success(), "`{name}` failed");
    Ok(())
}
