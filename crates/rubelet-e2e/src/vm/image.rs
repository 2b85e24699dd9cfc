//! The machine's system: Debian 12 with systemd, its containerd, runc and CRIU.
//!
//! Owns: its content. Built once, and again when this list or the unit that runs the tests changes.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context as _;
use rubelet_testbed::{
    command::{command, output},
    progress::step,
    project,
};

use crate::debian;

/// With servers of volumes: NFS and iSCSI.
const PACKAGES: &str = "busybox-static,containerd,containernetworking-plugins,criu,dbus,iproute2,iptables,\
                        linux-image-cloud-amd64,nfs-kernel-server,open-iscsi,runc,systemd-sysv,tgt,udev";

/// Servers that only their tests start.
const NOT_AT_BOOT: &[&str] = &[
    "multi-user.target.wants/nfs-server.service",
    "multi-user.target.wants/rpcbind.service",
    "multi-user.target.wants/tgt.service",
    "remote-fs.target.wants/nfs-client.target",
    "sockets.target.wants/iscsid.socket",
    "sockets.target.wants/rpcbind.socket",
    "sysinit.target.wants/open-iscsi.service",
];

/// The second disk has the tests.
const FSTAB: &str = "/dev/vda / ext4 defaults 0 0\n/dev/vdb /tests ext4 defaults 0 0\n";

/// Tests start their own containerd; the rest is housekeeping that only takes time.
const MASKED: &[&str] = &["apt-daily.timer", "apt-daily-upgrade.timer", "containerd.service", "e2scrub_reap.service"];

pub struct Image {
    pub kernel: PathBuf,
    pub initrd: PathBuf,
    pub root: PathBuf,
}

impl Image {
    /// Builds it below `base` unless it exists.
    pub fn ensure(base: &Path) -> anyhow::Result<Self> {
        let image =
            Image { kernel: base.join("vmlinuz"), initrd: base.join("initrd.img"), root: base.join("root.ext4") };
        let unit = fs::read_to_string(project::root().join("testbed/vm/tests.service"))?;
        let content = format!("{PACKAGES}\n{FSTAB}{MASKED:?}{NOT_AT_BOOT:?}\n{unit}");
        let stamp = base.join("stamp");
        if !fs::read_to_string(&stamp).is_ok_and(|made| made == content) {
            step("making the machine's system (some minutes)", || image.make(&base.join("debian"), &unit))?;
            fs::write(stamp, content)?;
        }
        Ok(image)
    }

    fn make(&self, dir: &Path, unit: &str) -> anyhow::Result<()> {
        let root = debian::bootstrap(dir, PACKAGES)?;
        for (name, to) in [("vmlinuz-", &self.kernel), ("initrd.img-", &self.initrd)] {
            let mut files = fs::read_dir(root.join("boot"))?.flatten();
            let file = files.find(|file| file.file_name().to_string_lossy().starts_with(name));
            fs::copy(file.with_context(|| format!("the kernel's package has no {name}"))?.path(), to)?;
        }
        fs::create_dir(root.join("tests"))?;
        fs::write(root.join("etc/fstab"), FSTAB)?;
        let units = root.join("etc/systemd/system");
        fs::write(units.join("tests.service"), unit)?;
        symlink("../tests.service", units.join("multi-user.target.wants/tests.service"))?;
        for name in MASKED {
            symlink("/dev/null", units.join(name)).with_context(|| format!("mask {name}"))?;
        }
        for link in NOT_AT_BOOT {
            fs::remove_file(units.join(link)).with_context(|| format!("disable {link}"))?;
        }
        // Space for all tests at once.
        file_system(&root, &self.root, "8G")?;
        fs::remove_dir_all(root)?;
        Ok(())
    }
}

/// A sparse file system of this size with the content of `dir`.
pub fn file_system(dir: &Path, to: &Path, size: &str) -> anyhow::Result<()> {
    let _ = fs::remove_file(to);
    let mut mkfs = command("mkfs.ext4", ["-q", "-F", "-d"]);
    output(mkfs.arg(dir).arg(to).arg(size), Duration::from_secs(300)).map(drop)
}
