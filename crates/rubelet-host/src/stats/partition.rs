//! The file systems of the node, and the I/O of their disks.
//!
//! Owns: which mounts belong to the node, and reading `/proc/diskstats`. Never: accesses a network file system: a hung share
//! would block the reader.
//! Upstream: `processMounts`, `GetFsInfoForPath` and `getDiskStatsMap` of cAdvisor's `fs`.

use std::{collections::BTreeMap, io, path::Path};

use super::{
    Reader,
    disk::{self, FileSystem},
};
use crate::mount::{Mount, mount_table};

/// A mounted file system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Partition {
    /// `/dev/…`, or where it is mounted if it is in memory.
    pub device: String,
    pub file_system: FileSystem,
    /// Zeros without a disk.
    pub disk: DiskStats,
}

/// The kernel's counters of a disk or a partition since it appeared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskStats {
    pub reads: u64,
    pub reads_merged: u64,
    pub sectors_read: u64,
    pub read_millis: u64,
    pub writes: u64,
    pub writes_merged: u64,
    pub sectors_written: u64,
    pub write_millis: u64,
    pub in_progress: u64,
    pub io_millis: u64,
    pub weighted_io_millis: u64,
}

/// Disk and memory file systems, without those of pods: `agent_dir` holds the agent's mounts for them.
pub fn partitions(agent_dir: &Path, reader: &mut Reader) -> io::Result<Vec<Partition>> {
    let disks = disk_stats(reader.text_at("/proc/diskstats").unwrap_or_default());
    let mounts = own_mounts(mount_table()?, agent_dir);
    let partition = |(device, mount): (String, Mount)| {
        let file_system = disk::file_system(&mount.point).ok()?;
        let disk = disks.get(&(mount.major, mount.minor)).copied().unwrap_or_default();
        Some(Partition { device, file_system, disk })
    };
    Ok(mounts.into_iter().filter_map(partition).collect())
}

/// The first mount of every device.
fn own_mounts(mounts: Vec<Mount>, agent_dir: &Path) -> BTreeMap<String, Mount> {
    let mut found = BTreeMap::new();
    for mount in mounts {
        let device = match mount.fs_type.as_str() {
            // The runtime mounts one for every sandbox.
            "tmpfs" if mount.point.starts_with(agent_dir) || mount.point.ends_with("shm") && is_of_sandbox(&mount) => {
                continue;
            }
            "tmpfs" => mount.point.to_string_lossy().into_owned(),
            _ if mount.source.starts_with("/dev/") && mount.fs_type != "devtmpfs" => mount.source.clone(),
            // A node booted from an image.
            "overlay" if mount.point == Path::new("/") => mount.source.clone(),
            _ => continue,
        };
        found.entry(device).or_insert(mount);
    }
    found
}

fn is_of_sandbox(mount: &Mount) -> bool {
    mount.point.components().any(|part| part.as_os_str() == "sandboxes" || part.as_os_str() == "overlay-containers")
}

/// By major and minor number, from lines as `8 1 sda1 40 0 280 223 7 0 22 108 0 330 330`; newer kernels add columns.
fn disk_stats(text: &str) -> BTreeMap<(u32, u32), DiskStats> {
    let of_line = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let id = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        let mut numbers = words.skip(1).map_while(|word| word.parse::<u64>().ok());
        let mut next = || numbers.next();
        let stats = DiskStats {
            reads: next()?,
            reads_merged: next()?,
            sectors_read: next()?,
            read_millis: next()?,
            writes: next()?,
            writes_merged: next()?,
            sectors_written: next()?,
            write_millis: next()?,
            in_progress: next()?,
            io_millis: next()?,
            weighted_io_millis: next()?,
        };
        Some((id, stats))
    };
    text.lines().filter_map(of_line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_stats_are_read_by_device_number() {
        let text = "   7       0 loop0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0\n 254       1 vda1 1 2 3 4 5 6 7 8 9 10 11 12\nodd\n 8 0 sda 1 2\n";
        let found = disk_stats(text);
        assert_eq!(found.keys().copied().collect::<Vec<_>>(), [(7, 0), (254, 1)]);
        let disk = found[&(254, 1)];
        assert_eq!((disk.reads, disk.reads_merged, disk.sectors_read, disk.read_millis), (1, 2, 3, 4));
        assert_eq!((disk.writes, disk.writes_merged, disk.sectors_written, disk.write_millis), (5, 6, 7, 8));
        assert_eq!((disk.in_progress, disk.io_millis, disk.weighted_io_millis), (9, 10, 11));
    }

    #[test]
    fn only_the_nodes_own_disks_and_memory_file_systems_count() {
        let mount = |point: &str, fs_type: &str, source: &str| Mount {
            point: point.into(),
            fs_type: fs_type.to_owned(),
            source: source.to_owned(),
            major: 8,
            root: "/".into(),
            minor: 1,
            is_shared: false,
            options: "rw".to_owned(),
        };
        let mounts = vec![
            mount("/", "ext4", "/dev/vda1"),
            mount("/var/lib/kubelet/x", "ext4", "/dev/vda1"),
            mount("/dev", "devtmpfs", "/dev/x"),
            mount("/run", "tmpfs", "tmpfs"),
            mount("/dev/shm", "tmpfs", "tmpfs"),
            mount("/run/containerd/io.containerd.grpc.v1.cri/sandboxes/1/shm", "tmpfs", "shm"),
            mount("/var/lib/kubelet/pods/1/volumes/kubernetes.io~empty-dir/m", "tmpfs", "tmpfs"),
            mount("/run/containerd/1/rootfs", "overlay", "overlay"),
            mount("/share", "nfs4", "server:/share"),
            mount("/proc", "proc", "proc"),
        ];
        let found = own_mounts(mounts, Path::new("/var/lib/kubelet"));
        let shown: Vec<_> =
            found.iter().map(|(device, mount)| (device.as_str(), mount.point.to_str().unwrap())).collect();
        assert_eq!(shown, [("/dev/shm", "/dev/shm"), ("/dev/vda1", "/"), ("/run", "/run")]);
    }

    #[test]
    fn this_node_has_a_file_system() {
        let found = partitions(Path::new("/nowhere"), &mut Reader::default()).unwrap();
        assert!(found.iter().any(|partition| partition.file_system.capacity_bytes > 0), "{found:?}");
    }
}
