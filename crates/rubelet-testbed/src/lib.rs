//! A private containerd: its root, state, socket, network and images, in one directory.
//!
//! Owns: starting one and removing it with everything it created. Several run beside each other and beside the
//! machine's containerd, which is never touched. `sweep` cleans up from the directory alone, so it also works after a crash.
//!
//! It also has what the commands of `cargo xtask` share: packages, Go programs and images, running programs, the clock.

pub mod agent;
pub mod cli;
pub mod clock;
pub mod command;
mod containerd;
pub mod go_tools;
pub mod image;
pub mod kept;
mod network;
pub mod packages;
pub mod process;
pub mod progress;
pub mod project;
pub mod sweep;
pub mod tally;

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, TcpListener},
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use anyhow::{Context as _, bail};
use sha2::{Digest as _, Sha256};

use crate::{
    command::{SHORT, command, output},
    process::{Daemon, ProcessId},
};

/// The containerd version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Runtime {
    /// Debian 12's package: no container events, no RuntimeConfig.
    Debian16,
    /// Built from its Go module.
    Containerd24,
}

impl Runtime {
    pub const ALL: [Runtime; 2] = [Runtime::Debian16, Runtime::Containerd24];

    /// As given to `--runtime`.
    pub fn as_str(self) -> &'static str {
        match self {
            Runtime::Debian16 => "debian",
            Runtime::Containerd24 => "2.4",
        }
    }

    pub fn parse(text: &str) -> anyhow::Result<Self> {
        let found = Runtime::ALL.into_iter().find(|runtime| runtime.as_str() == text);
        found.with_context(|| format!("no runtime is called `{text}`; there are `debian` and `2.4`"))
    }
}

/// The cgroup driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CgroupDriver {
    Cgroupfs,
    Systemd,
}

impl CgroupDriver {
    /// As in the agent's configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            CgroupDriver::Cgroupfs => "cgroupfs",
            CgroupDriver::Systemd => "systemd",
        }
    }

    /// The default of this machine.
    pub fn of_machine() -> Self {
        if Path::new("/run/systemd/system").exists() { CgroupDriver::Systemd } else { CgroupDriver::Cgroupfs }
    }
}

/// The runtime's programs.
#[derive(Clone, Debug)]
pub struct Programs {
    runtime: Runtime,
    containerd: PathBuf,
    ctr: PathBuf,
    runc: PathBuf,
    cni_dir: PathBuf,
    images: Vec<PathBuf>,
}

impl Programs {
    pub fn runtime(&self) -> Runtime {
        self.runtime
    }

    /// Installs or builds what is missing.
    pub fn ensure(runtime: Runtime) -> anyhow::Result<Self> {
        packages::require_root()?;
        packages::ensure(packages::COMMON)?;
        let images = image::ensure()?;
        match runtime {
            Runtime::Debian16 => {
                packages::ensure(packages::DEBIAN_CONTAINERD)?;
                Ok(Programs {
                    runtime,
                    containerd: "/usr/bin/containerd".into(),
                    ctr: "/usr/bin/ctr".into(),
                    runc: "/usr/sbin/runc".into(),
                    cni_dir: "/usr/lib/cni".into(),
                    images,
                })
            }
            Runtime::Containerd24 => {
                let bin = go_tools::ensure(go_tools::RUNTIME)?;
                Ok(Programs {
                    runtime,
                    containerd: bin.join("containerd"),
                    ctr: bin.join("ctr"),
                    runc: bin.join("runc"),
                    cni_dir: bin,
                    images,
                })
            }
        }
    }
}

/// The directory of one testbed, and its paths.
#[derive(Clone, Debug)]
pub struct Layout {
    /// Links resolved, as in the kernel's mount table.
    pub dir: PathBuf,
}

impl Layout {
    /// Creates the directory, for root alone.
    pub fn create(dir: &Path) -> anyhow::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let layout = Layout { dir: dir.canonicalize()? };
        // The kernel's limit for a socket's path is 107 bytes, and containerd adds `.ttrpc`.
        let length = layout.socket().as_os_str().len();
        if length > 100 {
            bail!("{} is too long for a socket ({length} bytes): use a shorter path", layout.socket().display());
        }
        Ok(layout)
    }

    /// One that is orphaned, and swept, when this process dies.
    pub fn temporary() -> anyhow::Result<Self> {
        let base = base_dir()?;
        let own = ProcessId::of(rustix::process::getpid().as_raw_pid()).context("we are not in /proc")?;
        // Never reused, so that the removal of one testbed cannot affect a new one.
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let layout = Layout::create(&base.join(format!("{}-{number}", own.pid)))?;
        fs::write(layout.owner_file(), own.to_string())?;
        Ok(layout)
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.join("containerd.sock")
    }

    pub fn containerd_log(&self) -> PathBuf {
        self.dir.join("containerd.log")
    }

    /// The cgroup of all pods of this testbed, separate from the machine's.
    pub fn cgroup_root(&self) -> String {
        let digest = Sha256::digest(self.dir.as_os_str().as_encoded_bytes());
        let digest: String = digest.iter().take(6).map(|byte| format!("{byte:02x}")).collect();
        format!("/rubelet-test-{digest}")
    }

    /// The same as a systemd unit.
    pub fn slice_root(&self) -> String {
        self.cgroup_root().trim_start_matches('/').replace('-', "_")
    }

    fn containerd_config(&self) -> PathBuf {
        self.dir.join("containerd.toml")
    }

    fn containerd_pid(&self) -> PathBuf {
        self.dir.join("containerd.pid")
    }

    /// The name of our bridge, which is also the name of our CNI network.
    fn bridge_file(&self) -> PathBuf {
        self.dir.join("bridge")
    }

    /// The process whose death orphans this testbed; `xtask up` has none.
    fn owner_file(&self) -> PathBuf {
        self.dir.join("owner")
    }
}

/// What happens to the testbed on drop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtEnd {
    Sweep,
    Leave,
}

/// Testbeds this process has started.
static STARTED: AtomicU32 = AtomicU32::new(0);

#[derive(Debug)]
pub struct Testbed {
    pub layout: Layout,
    pub driver: CgroupDriver,
    programs: Programs,
    containerd: Option<Daemon>,
    at_end: AtEnd,
}

impl Testbed {
    /// One for a test, in a temporary directory; removed on drop.
    pub fn start(programs: &Programs) -> anyhow::Result<Self> {
        let mut testbed = Testbed::new(Layout::temporary()?, programs, AtEnd::Sweep);
        testbed.prepare()?;
        Ok(testbed)
    }

    /// One that outlives the process, in `dir`; running parts are kept.
    pub fn open(dir: &Path, programs: &Programs) -> anyhow::Result<Self> {
        let mut testbed = Testbed::new(Layout::create(dir)?, programs, AtEnd::Leave);
        match process::from_pid_file(&testbed.layout.containerd_pid()) {
            Some(_) => testbed.wait_ready()?,
            None => testbed.prepare()?,
        }
        Ok(testbed)
    }

    fn new(layout: Layout, programs: &Programs, at_end: AtEnd) -> Self {
        Testbed { layout, driver: CgroupDriver::Cgroupfs, programs: programs.clone(), containerd: None, at_end }
    }

    fn prepare(&mut self) -> anyhow::Result<()> {
        network::set_up(&self.layout)?;
        containerd::write_config(&self.layout, &self.programs, self.driver)?;
        self.start_containerd()?;
        for archive in &self.programs.images {
            self.import(archive)?;
        }
        Ok(())
    }

    pub fn start_containerd(&mut self) -> anyhow::Result<()> {
        let path = std::env::var("PATH").unwrap_or_default();
        let own = self.programs.containerd.parent().expect("a program lies in a directory").display();
        let mut containerd = command(&self.programs.containerd, ["--config"]);
        containerd.arg(self.layout.containerd_config()).env("PATH", format!("{own}:/usr/sbin:/sbin:{path}"));
        self.containerd =
            Some(process::start_daemon(&mut containerd, &self.layout.containerd_log(), &self.layout.containerd_pid())?);
        self.wait_ready()
    }

    /// Another driver for later pods.
    pub fn use_driver(&mut self, driver: CgroupDriver) -> anyhow::Result<()> {
        self.driver = driver;
        containerd::write_config(&self.layout, &self.programs, driver)?;
        self.kill_containerd();
        self.start_containerd()
    }

    /// SIGKILL, as when the runtime crashes; containers keep running.
    pub fn kill_containerd(&mut self) {
        if let Some(mut containerd) = self.containerd.take() {
            containerd.kill();
        }
    }

    /// SIGSTOP and SIGCONT: a runtime that does not respond, with its sockets open.
    pub fn signal_containerd(&mut self, signal: rustix::process::Signal) {
        if let Some(containerd) = &mut self.containerd {
            containerd.signal(signal);
        }
    }

    /// Simulates a reboot: no process and no mount is left, but all files on disk.
    pub fn reboot(&mut self) -> anyhow::Result<()> {
        self.kill_containerd();
        sweep::end_what_runs(&self.layout)?;
        // On a real machine this one is in memory.
        fs::remove_dir_all(self.layout.dir.join("state"))?;
        self.start_containerd()
    }

    fn wait_ready(&mut self) -> anyhow::Result<()> {
        let answered = clock::poll(Duration::from_secs(60), Duration::from_millis(100), || {
            if self.containerd.as_mut().is_some_and(|containerd| !containerd.is_alive()) {
                return Some(Err(anyhow::anyhow!("containerd ended")));
            }
            self.ctr(["version"]).ok().map(Ok)
        });
        match answered {
            Some(Ok(_)) => Ok(()),
            Some(Err(err)) => Err(err),
            None => Err(anyhow::anyhow!("containerd does not answer")),
        }
        .with_context(|| format!("the end of its log:\n{}", tail(&self.layout.containerd_log(), 20)))
    }

    /// Runs `ctr` in the namespace of Kubernetes.
    pub fn ctr<const N: usize>(&self, args: [&str; N]) -> anyhow::Result<String> {
        output(&mut self.ctr_command(args), SHORT)
    }

    pub fn ctr_command<const N: usize>(&self, args: [&str; N]) -> Command {
        let mut ctr = command(&self.programs.ctr, ["--namespace", "k8s.io", "--address"]);
        ctr.arg(self.layout.socket()).args(args);
        ctr
    }

    pub fn runtime(&self) -> Runtime {
        self.programs.runtime
    }

    /// This node's own address: its end of the pods' bridge.
    pub fn address(&self) -> anyhow::Result<Ipv4Addr> {
        network::address(&self.layout)
    }

    /// One more address of the machine, for the lifetime of this testbed.
    pub fn add_address(&self, ip: IpAddr) -> anyhow::Result<()> {
        network::add_address(&self.layout, ip)
    }

    /// The name of the pods' bridge.
    pub fn bridge(&self) -> anyhow::Result<String> {
        Ok(fs::read_to_string(self.layout.bridge_file())?.trim().to_owned())
    }

    pub fn import(&self, archive: &Path) -> anyhow::Result<()> {
        let mut ctr = self.ctr_command(["images", "import"]);
        output(ctr.arg(archive), Duration::from_secs(600)).map(drop)
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        if self.at_end == AtEnd::Leave {
            return;
        }
        if let Some(mut containerd) = self.containerd.take() {
            containerd.end(Duration::from_secs(5));
        }
        if let Err(err) = sweep::sweep(&self.layout.dir) {
            eprintln!("{}: not everything could be cleaned up: {err:#}", self.layout.dir.display());
        }
    }
}

/// The directory of tests' testbeds. Writable for root only, so that no other user can place a link there.
fn base_dir() -> anyhow::Result<PathBuf> {
    use std::os::unix::fs::MetadataExt as _;
    let base = std::env::temp_dir().join("rubelet-testbed");
    match fs::DirBuilder::new().mode(0o700).create(&base) {
        Err(err) if err.kind() != std::io::ErrorKind::AlreadyExists => return Err(err.into()),
        Ok(()) | Err(_) => {}
    }
    let meta = fs::symlink_metadata(&base)?;
    if !meta.is_dir() || meta.uid() != 0 {
        bail!("{} is not a directory of root's", base.display());
    }
    Ok(base)
}

/// Below those that the kernel gives to outgoing connections, which could take one before its use.
const PORTS: std::ops::Range<u16> = 20_000..30_000;

/// Free now, and not given to another caller in this process.
pub fn free_port() -> anyhow::Result<u16> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let (count, start) = (u32::from(PORTS.end - PORTS.start), std::process::id().wrapping_mul(101));
    for _ in PORTS {
        let place = start.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % count;
        let port = PORTS.start + u16::try_from(place)?;
        if TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok() {
            return Ok(port);
        }
    }
    bail!("no port of {PORTS:?} is free")
}

/// Removes testbeds whose owner died.
pub fn sweep_orphans() -> anyhow::Result<()> {
    let base = base_dir()?;
    // Two processes must not sweep the same one at once.
    let lock = fs::File::open(&base)?;
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive)?;
    for entry in fs::read_dir(&base)? {
        let layout = Layout { dir: entry?.path() };
        let is_new = fs::symlink_metadata(&layout.dir).and_then(|meta| meta.modified()).is_ok_and(|at| {
            at.elapsed().is_ok_and(|age| age < Duration::from_secs(5)) && !layout.owner_file().exists()
        });
        if is_new || process::from_pid_file(&layout.owner_file()).is_some() {
            continue;
        }
        sweep::sweep(&layout.dir)?;
    }
    Ok(())
}

/// The last lines of a file, for failure reports.
pub fn tail(path: &Path, lines: usize) -> String {
    let text = fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}
