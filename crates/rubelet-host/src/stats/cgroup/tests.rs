//! Both versions from files as the kernel writes them.

use std::{fs, path::Path};

use insta::assert_snapshot;

use super::*;

fn lay_out(dir: &Path, files: &[(&str, &str)]) {
    for (name, content) in files {
        let path = dir.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
}

/// Linux 6.1, a container with limits.
const V2: &[(&str, &str)] = &[
    (
        "pod/c1/cpu.stat",
        "usage_usec 2500000\nuser_usec 1500000\nsystem_usec 1000000\ncore_sched.force_idle_usec 0\nnr_periods 50\nnr_throttled 7\nthrottled_usec 123456\nnr_bursts 1\nburst_usec 2000\n",
    ),
    ("pod/c1/cpu.weight", "10\n"),
    ("pod/c1/cpu.max", "30000 100000\n"),
    (
        "pod/c1/cpu.pressure",
        "some avg10=1.50 avg60=0.25 avg300=0.05 total=98765\nfull avg10=0.50 avg60=0.00 avg300=0.00 total=4321\n",
    ),
    ("pod/c1/memory.current", "10485760\n"),
    ("pod/c1/memory.max", "67108864\n"),
    ("pod/c1/memory.min", "0\n"),
    ("pod/c1/memory.peak", "12582912\n"),
    ("pod/c1/memory.swap.current", "4096\n"),
    ("pod/c1/memory.swap.max", "0\n"),
    (
        "pod/c1/memory.stat",
        "anon 4194304\nfile 5242880\nkernel 1048576\nkernel_stack 16384\npagetables 49152\nsock 0\nshmem 0\nfile_mapped 2097152\nfile_dirty 0\ninactive_anon 0\nactive_anon 4194304\ninactive_file 1048576\nactive_file 4194304\nunevictable 0\npgfault 1234\npgmajfault 5\nworkingset_refault_file 0\n",
    ),
    ("pod/c1/memory.events", "low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\noom_group_kill 0\n"),
    (
        "pod/c1/memory.pressure",
        "some avg10=0.00 avg60=0.00 avg300=0.00 total=11\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=10\n",
    ),
    (
        "pod/c1/io.stat",
        "1234:5 rbytes=409600 wbytes=8192 rios=10 wios=2 dbytes=0 dios=0 cost.usage=9 cost.wait=8 cost.indebt=7 cost.indelay=6\n253:1 \n",
    ),
    (
        "pod/c1/io.pressure",
        "some avg10=0.10 avg60=0.20 avg300=0.30 total=77\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=66\n",
    ),
    ("pod/c1/pids.current", "3\n"),
    ("pod/c1/pids.max", "max\n"),
    ("pod/c1/cgroup.procs", "101\n0\n103\n"),
    ("pod/c1/cgroup.events", "populated 1\nfrozen 0\n"),
    // The root: no limits, no memory.current.
    ("cpu.stat", "usage_usec 10\nuser_usec 6\nsystem_usec 4\n"),
    ("memory.stat", "anon 1000\nfile 2000\ninactive_file 500\n"),
    ("io.stat", ""),
];

fn shown(stats: &CgroupStats) -> String {
    let mut stats = stats.clone();
    assert!(stats.created.take().is_some());
    format!("{stats:#?}")
}

#[test]
fn version_2_is_read_as_linux_writes_it() {
    let dir = tempfile::tempdir().unwrap();
    lay_out(dir.path(), V2);
    let trees = Trees::V2(dir.path().to_owned());
    let mut reader = Reader::default();
    let stats = trees.read("/pod/c1", Extent::All, &mut reader).unwrap();
    assert_snapshot!(shown(&stats));
    assert_eq!(trees.cpu_nanos("/pod/c1", &mut reader), Some(2_500_000_000));
    assert_eq!(trees.processes("/pod/c1", &mut reader), [101, 103]);
    assert_eq!(trees.children("/pod"), ["c1"]);
    assert_eq!(trees.of_process("0::/pod/c1\n").as_deref(), Some("/pod/c1"));
    let root = trees.read("/", Extent::Usage, &mut reader).unwrap();
    let memory = root.memory.unwrap();
    assert_eq!((memory.usage_bytes, memory.working_set_bytes, memory.limit_bytes), (3000, 2500, None));
    assert_eq!(trees.read("/pod/gone", Extent::All, &mut reader), None);
    assert_eq!(trees.read("/pod/../pod", Extent::All, &mut reader), None);
}

/// Linux 5.10, each controller in a tree of its own.
const V1: &[(&str, &str)] = &[
    ("cpu,cpuacct/pod/c1/cpuacct.usage", "2500000000\n"),
    ("cpu,cpuacct/pod/c1/cpuacct.stat", "user 150\nsystem 100\n"),
    ("cpu,cpuacct/pod/c1/cpu.stat", "nr_periods 50\nnr_throttled 7\nthrottled_time 123456000\n"),
    ("cpu,cpuacct/pod/c1/cpu.shares", "256\n"),
    ("cpu,cpuacct/pod/c1/cpu.cfs_period_us", "100000\n"),
    ("cpu,cpuacct/pod/c1/cpu.cfs_quota_us", "-1\n"),
    ("memory/pod/c1/memory.usage_in_bytes", "10485760\n"),
    ("memory/pod/c1/memory.limit_in_bytes", "67108864\n"),
    ("memory/pod/c1/memory.memsw.limit_in_bytes", "9223372036854771712\n"),
    ("memory/pod/c1/memory.soft_limit_in_bytes", "9223372036854771712\n"),
    ("memory/pod/c1/memory.max_usage_in_bytes", "12582912\n"),
    ("memory/pod/c1/memory.failcnt", "4\n"),
    ("memory/pod/c1/memory.kmem.usage_in_bytes", "1048576\n"),
    ("memory/pod/c1/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
    (
        "memory/pod/c1/memory.stat",
        "cache 1\nrss 1\npgfault 1\ntotal_cache 5242880\ntotal_rss 4194304\ntotal_mapped_file 2097152\ntotal_swap 4096\ntotal_pgfault 1234\ntotal_pgmajfault 5\ntotal_inactive_file 1048576\ntotal_active_file 4194304\n",
    ),
    ("memory/pod/c1/cgroup.procs", "101\n"),
    ("memory/pod/c1/cgroup.clone_children", "0\n"),
    ("blkio/pod/c1/blkio.bfq.io_service_bytes_recursive", "Total 0\n"),
    (
        "blkio/pod/c1/blkio.throttle.io_service_bytes_recursive",
        "1234:5 Read 409600\n1234:5 Write 8192\n1234:5 Total 417792\nTotal 417792\n",
    ),
    (
        "blkio/pod/c1/blkio.throttle.io_serviced_recursive",
        "1234:5 Read 10\n1234:5 Write 2\n1234:5 Total 12\nTotal 12\n",
    ),
    // A scheduler that counts more.
    ("blkio/pod/c2/blkio.bfq.io_service_bytes_recursive", "8:0 Read 512\n8:0 Total 512\nTotal 512\n"),
    ("blkio/pod/c2/blkio.bfq.io_serviced_recursive", "8:0 Read 1\n8:0 Total 1\nTotal 1\n"),
    ("blkio/pod/c2/blkio.bfq.io_merged_recursive", "8:0 Read 2\n8:0 Total 2\nTotal 2\n"),
    ("blkio/pod/c2/blkio.bfq.sectors_recursive", "8:0 3\n"),
    ("blkio/pod/c2/blkio.bfq.io_service_time_recursive", "8:0 Read 4\n8:0 Total 4\nTotal 4\n"),
    ("blkio/pod/c2/blkio.bfq.io_queued_recursive", "8:0 Read 0\n8:0 Total 5\nTotal 5\n"),
    ("memory/pod/c2/memory.usage_in_bytes", "1\n"),
    ("pids/pod/c1/pids.current", "3\n"),
    ("pids/pod/c1/pids.max", "100\n"),
];

#[test]
fn version_1_is_read_from_the_tree_of_each_controller() {
    let dir = tempfile::tempdir().unwrap();
    lay_out(dir.path(), V1);
    let points = ["cpu,cpuacct", "memory", "blkio", "pids", "systemd"].map(|name| dir.path().join(name));
    let trees = Trees::V1(v1::Mounts::new(points.into_iter()));
    let mut reader = Reader::default();
    let stats = trees.read("/pod/c1", Extent::All, &mut reader).unwrap();
    assert_snapshot!(shown(&stats));
    assert_eq!(trees.cpu_nanos("/pod/c1", &mut reader), Some(2_500_000_000));
    assert_eq!(trees.processes("/pod/c1", &mut reader), [101]);
    let mut children = trees.children("/pod");
    children.sort();
    assert_eq!(children, ["c1", "c2"]);
    let detailed = trees.read("/pod/c2", Extent::All, &mut reader).unwrap();
    let [disk] = detailed.devices.as_slice() else { panic!("{detailed:?}") };
    assert_eq!((&disk.merged[0], &disk.sectors[0]), (&("Read".to_owned(), 2), &("Count".to_owned(), 3)));
    assert_eq!((&disk.service_nanos[1], &disk.queued[1]), (&("Total".to_owned(), 4), &("Total".to_owned(), 5)));
    let table = "5:memory:/pod\n4:cpu,cpuacct:/pod\n0::/\n";
    assert_eq!(trees.of_process(table).as_deref(), Some("/pod"));
    let with_systemd = "5:memory:/\n4:cpu,cpuacct:/\n1:name=systemd:/system.slice/k.service\n";
    assert_eq!(trees.of_process(with_systemd).as_deref(), Some("/system.slice/k.service"));
    assert_eq!(trees.of_process("5:memory:/pod\n4:cpu,cpuacct:/\n"), None);
    assert_eq!(trees.read("/pod/gone", Extent::All, &mut reader), None);
}

#[test]
fn with_less_to_read_only_processor_and_memory_are_read() {
    let dir = tempfile::tempdir().unwrap();
    lay_out(dir.path(), V2);
    let trees = Trees::V2(dir.path().to_owned());
    let stats = trees.read("/pod/c1", Extent::Usage, &mut Reader::default()).unwrap();
    assert!(stats.devices.is_empty() && stats.pids.is_none() && stats.created.is_none());
    let (cpu, memory) = (stats.cpu.unwrap(), stats.memory.unwrap());
    assert_eq!((cpu.usage_nanos, memory.working_set_bytes), (2_500_000_000, 9_437_184));
    assert_eq!((cpu.limits, memory.details), (CpuLimits::default(), MemoryDetails::default()));
}

#[test]
fn a_cgroup_whose_controllers_are_missing_is_still_one() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("bare")).unwrap();
    let trees = Trees::V2(dir.path().to_owned());
    let stats = trees.read("/bare", Extent::Usage, &mut Reader::default()).unwrap();
    assert_eq!(stats, CgroupStats::default());
}

#[test]
fn cgroup_stats_of_this_node_are_read() {
    let trees = Trees::mounted().unwrap();
    let stats = trees.read("/", Extent::All, &mut Reader::default()).unwrap();
    assert!(stats.cpu.unwrap().usage_nanos > 0 && stats.memory.unwrap().working_set_bytes > 0);
}
