//! Tests on real cgroups below one of the test; version 2 on a directory that imitates its hierarchy.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command},
};

use super::*;
use crate::testing::need_root;

/// A cgroup of the test in every hierarchy, removed on drop.
struct CgroupFixture {
    path: PathBuf,
    trees: Hierarchies,
}

impl CgroupFixture {
    fn new(name: &str) -> Self {
        need_root();
        let path = PathBuf::from(format!("/rubelet-test-{}-{name}", std::process::id()));
        CgroupFixture { path, trees: Hierarchies::mounted().unwrap() }
    }

    fn cgroup(&self, name: &str, limits: Limits) -> Cgroup {
        Cgroup { path: format!("{}/{name}", self.path.display()), limits }
    }

    fn dirs(&self, name: &str) -> Vec<PathBuf> {
        let inside = self.path.strip_prefix("/").unwrap().join(name);
        self.trees.0.iter().map(|tree| tree.mount.join(&inside)).collect()
    }

    /// The value in any hierarchy that has the file.
    fn read(&self, name: &str, file: &str) -> String {
        let found = self.dirs(name).into_iter().find_map(|dir| fs::read_to_string(dir.join(file)).ok());
        found.unwrap_or_default().trim().to_owned()
    }
}

impl Drop for CgroupFixture {
    fn drop(&mut self) {
        for _ in 0..500 {
            if self.trees.remove(&self.path).is_ok() {
                return;
            }
            std::thread::yield_now();
        }
    }
}

/// Ends with the test, however it ends.
struct Sleeper(Child);

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn limits() -> Limits {
    Limits {
        cpu_shares: Some(512),
        cpu_quota: Some(CpuQuota { quota_micros: Some(50_000), period_micros: 100_000 }),
        memory_bytes: Some(64 << 20),
        pids: Some(20),
        ..Limits::default()
    }
}

#[test]
fn cgroup_is_created_in_every_hierarchy_with_limits_and_removed() {
    let place = CgroupFixture::new("made");
    for _ in 0..2 {
        let unset = place.trees.apply(&place.cgroup("burstable/pod1", limits())).unwrap();
        assert_eq!(unset, Vec::<UnsetLimit>::new());
    }
    assert!(place.dirs("burstable/pod1").iter().all(|dir| dir.is_dir()));
    if place.read("burstable/pod1", "cpu.weight").is_empty() {
        let files = ["cpu.shares", "cpu.cfs_quota_us", "cpu.cfs_period_us", "memory.limit_in_bytes", "pids.max"];
        let read = files.map(|file| place.read("burstable/pod1", file));
        assert_eq!(read, ["512", "50000", "100000", "67108864", "20"]);
    } else {
        let read = ["cpu.weight", "cpu.max", "memory.max", "pids.max"].map(|file| place.read("burstable/pod1", file));
        assert_eq!(read, ["20", "50000 100000", "67108864", "20"]);
    }
    assert_eq!(place.trees.children(&place.path.join("burstable")).unwrap().into_iter().collect::<Vec<_>>(), ["pod1"]);
    for _ in 0..2 {
        place.trees.remove(&place.path.join("burstable")).unwrap();
    }
    assert!(place.dirs("burstable").iter().all(|dir| !dir.exists()));
    assert!(place.trees.children(&place.path.join("burstable")).unwrap().is_empty());
}

#[test]
fn cgroup_removal_kills_its_processes() {
    let place = CgroupFixture::new("killed");
    place.trees.apply(&place.cgroup("pod1/inner", Limits::default())).unwrap();
    let mut sleeper = Sleeper(Command::new("sleep").arg("600").spawn().unwrap());
    for dir in place.dirs("pod1/inner") {
        write(&dir.join("cgroup.procs"), &sleeper.0.id().to_string()).unwrap();
    }
    let pod = place.path.join("pod1");
    // Removed at once, or busy until the process is dead.
    let first = place.trees.remove(&pod);
    assert!(first.as_ref().is_ok_and(|()| true) || first.unwrap_err().kind() == io::ErrorKind::ResourceBusy);
    assert!(!sleeper.0.wait().unwrap().success());
    place.trees.remove(&pod).unwrap();
    assert!(place.dirs("pod1").iter().all(|dir| !dir.exists()));
}

#[test]
fn slice_limits_are_systemd_properties_with_whole_percent_cpu_quota() {
    assert_eq!(slice(Path::new("/a.slice/a-b.slice")), Some("a-b.slice"));
    assert_eq!(slice(Path::new("/a.slice/pod1")), None);
    let words: Vec<String> = properties(&limits()).into_iter().map(|property| format!("{property:?}")).collect();
    assert_eq!(
        words,
        [
            r#"("MemoryMax", Number(67108864))"#,
            r#"("CPUWeight", Number(20))"#,
            r#"("CPUQuotaPeriodUSec", Number(100000))"#,
            r#"("CPUQuotaPerSecUSec", Number(500000))"#,
            r#"("TasksMax", Number(20))"#,
        ]
    );
    let quota = |micros| CpuQuota { quota_micros: micros, period_micros: 100_000 };
    let rounded =
        [Some(50_000), Some(12_345), Some(1000), None].map(|micros| whole_percents(quota(micros)).quota_micros);
    assert_eq!(rounded, [Some(50_000), Some(13_000), Some(1000), None]);
}

#[test]
fn no_name_leads_out_of_the_tree() {
    let trees = Hierarchies(vec![Hierarchy { mount: PathBuf::from("/nowhere"), version: Version::V1 }]);
    for path in ["/", "", "/a/../../b", "..", "/."] {
        assert_eq!(trees.remove(Path::new(path)).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{path}");
    }
}

/// A directory with the files of version 2; the kernel would create them with the directory.
fn unified_tree(files: &[&str]) -> (tempfile::TempDir, Hierarchies) {
    let dir = tempfile::tempdir().unwrap();
    let levels = ["", "kubepods", "kubepods/burstable", "kubepods/burstable/pod1"].map(|level| dir.path().join(level));
    for level in &levels {
        fs::create_dir_all(level).unwrap();
        fs::write(level.join("cgroup.controllers"), "cpuset cpu memory pids").unwrap();
        fs::write(level.join("cgroup.subtree_control"), "").unwrap();
    }
    for file in files {
        fs::write(levels[3].join(file), "").unwrap();
    }
    let tree = Hierarchy { mount: dir.path().to_owned(), version: Version::V2 };
    (dir, Hierarchies(vec![tree]))
}

#[test]
fn cgroup_v2_enables_controllers_in_parents_and_writes_v2_limits() {
    let files = ["cpu.weight", "cpu.max", "memory.max", "pids.max", "hugetlb.2MB.max"];
    let (dir, trees) = unified_tree(&files);
    let huge_pages = BTreeMap::from([("2MB".to_owned(), 4 << 20), ("1GB".to_owned(), 0)]);
    let cgroup = Cgroup { path: "/kubepods/burstable/pod1".into(), limits: Limits { huge_pages, ..limits() } };
    assert_eq!(trees.apply(&cgroup).unwrap(), Vec::<UnsetLimit>::new());
    let read = |file: &str| fs::read_to_string(dir.path().join(file)).unwrap();
    for level in
        ["cgroup.subtree_control", "kubepods/cgroup.subtree_control", "kubepods/burstable/cgroup.subtree_control"]
    {
        assert_eq!(read(level), "+cpuset +cpu +memory +pids", "{level}");
    }
    assert_eq!(read("kubepods/burstable/pod1/cgroup.subtree_control"), "", "the pod's own children are the runtime's");
    let written = files.map(|file| read(&format!("kubepods/burstable/pod1/{file}")));
    assert_eq!(written, ["20", "50000 100000", "67108864", "20", "4194304"]);
}

#[test]
fn a_controller_the_node_lacks_is_named_and_the_rest_is_set() {
    let (dir, trees) = unified_tree(&["cpu.weight", "cpu.max", "pids.max"]);
    let no_quota = CpuQuota { quota_micros: None, period_micros: 100_000 };
    let limits = Limits { cpu_quota: Some(no_quota), ..limits() };
    let cgroup = Cgroup { path: "/kubepods/burstable/pod1".into(), limits };
    assert_eq!(trees.apply(&cgroup).unwrap(), [UnsetLimit::NoController("memory.max = 67108864".to_owned())]);
    assert_eq!(fs::read_to_string(dir.path().join("kubepods/burstable/pod1/cpu.max")).unwrap(), "max 100000");
}

#[test]
fn shares_become_weights_as_upstream_maps_them() {
    assert_eq!([2, 512, 1024, 262_144, 300_000, 0].map(cpu_weight), [1, 20, 39, 10_000, 10_000, 1]);
}

#[test]
fn existing_cgroup_is_updated_and_a_missing_one_named() {
    let place = CgroupFixture::new("reserved");
    let reserved = place.cgroup("system", limits());
    let error = place.trees.update(&reserved).unwrap_err().to_string();
    assert!(error.starts_with("cgroup [\"rubelet-test-"), "{error}");
    let is_v1 = error.contains("\"system\"] has some missing paths: /sys/fs/cgroup/");
    assert!(is_v1 || error.contains("could not read controllers"), "{error}");
    assert!(place.dirs("system").iter().all(|dir| !dir.exists()), "it is not created");
    place.trees.apply(&place.cgroup("system", Limits::default())).unwrap();
    place.trees.update(&reserved).unwrap();
    assert_eq!(place.read("system", "pids.max"), "20");
    let file = if is_v1 { "memory.limit_in_bytes" } else { "memory.max" };
    assert_eq!(place.read("system", file), "67108864");
    if is_v1 {
        fs::remove_dir(
            place
                .trees
                .0
                .iter()
                .find_map(|tree| {
                    let dir = below(&tree.mount, Path::new(&reserved.path)).unwrap();
                    dir.join("pids.max").exists().then_some(dir)
                })
                .unwrap(),
        )
        .unwrap();
        assert!(place.trees.update(&reserved).unwrap_err().to_string().contains("missing paths"));
    }
}

#[test]
fn reserved_cgroup_without_a_controller_of_the_root_is_refused() {
    let files = ["cpu.weight", "cpu.max", "memory.max", "memory.min", "memory.low", "pids.max"];
    let (dir, trees) = unified_tree(&files);
    let limits = Limits { memory_min_bytes: Some(4096), memory_low_bytes: Some(8192), ..limits() };
    let cgroup = Cgroup { path: "/kubepods/burstable/pod1".into(), limits };
    trees.update(&cgroup).unwrap();
    let read = |file: &str| fs::read_to_string(dir.path().join("kubepods/burstable/pod1").join(file)).unwrap();
    assert_eq!((read("memory.min"), read("memory.low")), ("4096".to_owned(), "8192".to_owned()));
    fs::write(dir.path().join("kubepods/burstable/pod1/cgroup.controllers"), "cpu memory").unwrap();
    let error = trees.update(&cgroup).unwrap_err().to_string();
    assert_eq!(error, r#"cgroup ["kubepods" "burstable" "pod1"] has some missing controllers: cpuset, pids"#);
}

#[test]
fn limit_that_spares_memory_in_use_is_not_below_it() {
    for (in_use, expected) in [("1000\n", "67108864"), ("99999999\n", "99999999")] {
        let (dir, trees) = unified_tree(&["cpu.weight", "cpu.max", "memory.max", "pids.max"]);
        let pod = dir.path().join("kubepods/burstable/pod1");
        fs::write(pod.join("memory.current"), in_use).unwrap();
        let limits = Limits { spares_memory_in_use: true, ..limits() };
        trees.apply(&Cgroup { path: "/kubepods/burstable/pod1".into(), limits }).unwrap();
        assert_eq!(fs::read_to_string(pod.join("memory.max")).unwrap(), expected);
    }
}
