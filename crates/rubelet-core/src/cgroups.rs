//! The cgroups of pods and QoS classes: their names and limits.
//!
//! Owns: the names of QoS and pod cgroups, equal to upstream's, and their limits. Never: touches a cgroup.
//! Upstream: `cm/{cgroup_manager,pod_container_manager,qos_container_manager,node_container_manager,helpers}_linux.go`.

use std::{collections::BTreeMap, fmt};

use k8s_openapi::api::core::v1::{Pod, PodSpec};
use serde::{Deserialize, Serialize};

use crate::{
    container::resources::{self, quota, shares},
    id::PodUid,
    qos::{QosClass, qos_class},
    quantity::Quantity,
    settings::{NodeProfile, Settings},
};

/// The cgroup driver, which determines the names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CgroupDriver {
    #[default]
    Cgroupfs,
    Systemd,
}

/// The configuration of pod cgroups; none when `cgroupsPerQOS` is off.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupSettings {
    /// `cgroupRoot`, part by part; empty is the root of the tree.
    pub root: Vec<String>,
    /// `cgroupDriver`: used when the runtime does not report one.
    pub driver: CgroupDriver,
    /// `podPidsLimit`; `None` is no limit.
    pub pod_pids_limit: Option<i64>,
    /// The limits of all pods together (`node_allocatable.rs`).
    pub kubepods_limits: Limits,
    /// `qosReserved`, with the gate QOSReserved: the part of the memory requests that lower QoS classes may not use.
    pub qos_reserved_memory_percent: Option<i64>,
}

impl CgroupSettings {
    /// `root` as in `cgroupRoot`: a path in the cgroup tree.
    pub fn parse_root(root: &str) -> Vec<String> {
        root.split('/').filter(|part| !part.is_empty()).map(str::to_owned).collect()
    }
}

/// A desired cgroup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cgroup {
    /// From the root of the tree, in the driver's form: `/kubepods/burstable`, `/kubepods.slice/kubepods-burstable.slice`.
    pub path: String,
    pub limits: Limits,
}

/// Absent values are left as they are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    pub cpu_shares: Option<u64>,
    pub cpu_quota: Option<CpuQuota>,
    pub memory_bytes: Option<u64>,
    /// If more memory is in use than the limit, the limit is what is in use: processes are not killed for it.
    pub spares_memory_in_use: bool,
    /// The kernel does not reclaim this much memory; version 2 only.
    pub memory_min_bytes: Option<u64>,
    /// The kernel reclaims other memory before this much; version 2 only.
    pub memory_low_bytes: Option<u64>,
    pub pids: Option<u64>,
    /// By page size (`2MB`), in bytes.
    pub huge_pages: BTreeMap<String, u64>,
}

/// A limit that was not set: its file, its value, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnsetLimit {
    /// The node has no such controller: its pods run without the limit.
    NoController(String),
    /// The kernel refused the value: more may be in use than the limit.
    Refused(String),
}

impl fmt::Display for UnsetLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UnsetLimit::NoController(limit) => write!(f, "{limit}: the node has no such controller"),
            UnsetLimit::Refused(problem) => f.write_str(problem),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuQuota {
    /// `None` is no limit.
    pub quota_micros: Option<u64>,
    pub period_micros: u64,
}

/// The cgroup above all pods.
const PODS: &str = "kubepods";
const POD_PREFIX: &str = "pod";
const SLICE_SUFFIX: &str = ".slice";
/// Upstream's value for unlimited huge pages.
const UNBOUNDED_HUGE_PAGES: u64 = 1 << 62;

/// The cgroup tree of this node's pods.
#[derive(Clone, Copy, Debug)]
pub struct CgroupTree<'a> {
    settings: &'a CgroupSettings,
    node: &'a NodeProfile,
    driver: CgroupDriver,
}

impl<'a> CgroupTree<'a> {
    /// `None` when pods have no cgroups of their own. The driver that the runtime reports takes precedence over the configured
    /// one: both must name cgroups alike.
    pub fn new(settings: &'a Settings, runtimes_driver: Option<CgroupDriver>) -> Option<Self> {
        let cgroups = settings.cgroups.as_ref()?;
        Some(CgroupTree { settings: cgroups, node: &settings.node, driver: runtimes_driver.unwrap_or(cgroups.driver) })
    }

    /// The pod's cgroup, which is also the cgroup parent of its containers.
    pub fn pod_path(self, pod: &PodSpec, uid: &PodUid) -> String {
        self.path_of_pod(qos_class(pod), uid)
    }

    pub fn pod(self, pod: &Pod, uid: &PodUid) -> Option<Cgroup> {
        let spec = pod.spec.as_ref()?;
        let limits = Limits { pids: self.pids(), ..pod_limits(spec, self.node) };
        Some(Cgroup { path: self.pod_path(spec, uid), limits })
    }

    /// All possible paths: the QoS class of a pod that is only in the runtime is unknown.
    pub fn pod_paths(self, uid: &PodUid) -> Vec<String> {
        [QosClass::Guaranteed, QosClass::Burstable, QosClass::BestEffort]
            .map(|class| self.path_of_pod(class, uid))
            .into()
    }

    /// The cgroup above all pods.
    pub fn kubepods_path(self) -> String {
        self.path(&self.qos_cgroup_parts(QosClass::Guaranteed))
    }

    /// The cgroup above all pods and those of the QoS classes, for these pods.
    pub fn qos_cgroups<'p>(self, pods: impl Iterator<Item = &'p PodSpec>) -> Vec<Cgroup> {
        let requests = ClassRequests::of(pods);
        let huge_pages: BTreeMap<_, _> =
            self.node.huge_page_sizes.iter().map(|size| (size.clone(), UNBOUNDED_HUGE_PAGES)).collect();
        let tier = |millis: i64| Limits {
            cpu_shares: positive(shares(millis)),
            huge_pages: huge_pages.clone(),
            ..Limits::default()
        };
        let mut kubepods = self.settings.kubepods_limits.clone();
        let (mut burstable, mut best_effort) = (tier(requests.burstable_cpu_millis), tier(0));
        if let Some(qos) = self.node.memory_qos {
            let protected = |bytes: i64| Some(if qos.protects_requests { positive(bytes).unwrap_or(0) } else { 0 });
            // A cgroup's protection is a part of its parent's.
            kubepods.memory_min_bytes = protected(requests.guaranteed_memory.saturating_add(requests.burstable_memory));
            burstable.memory_low_bytes = protected(requests.burstable_memory);
        }
        let unreserved = self.node.unreserved_memory_bytes;
        if let Some(percent) = self.settings.qos_reserved_memory_percent.filter(|_| unreserved > 0) {
            let without = |bytes: i64, requested: i64| bytes.saturating_sub(requested.saturating_mul(percent) / 100);
            let for_burstable = without(unreserved, requests.guaranteed_memory);
            let for_best_effort = without(for_burstable, requests.burstable_memory);
            for (limits, bytes) in [(&mut burstable, for_burstable), (&mut best_effort, for_best_effort)] {
                limits.memory_bytes = Some(positive(bytes).unwrap_or(0));
                limits.spares_memory_in_use = true;
            }
        }
        let cgroup = |class, limits| Cgroup { path: self.path(&self.qos_cgroup_parts(class)), limits };
        vec![
            cgroup(QosClass::Guaranteed, kubepods),
            cgroup(QosClass::Burstable, burstable),
            cgroup(QosClass::BestEffort, best_effort),
        ]
    }

    /// The pod of this cgroup name below a QoS cgroup; `None` when it is no pod's.
    pub fn uid_of(self, dir_name: &str) -> Option<PodUid> {
        let part = match self.driver {
            CgroupDriver::Cgroupfs => dir_name.to_owned(),
            CgroupDriver::Systemd => unescaped(dir_name.strip_suffix(SLICE_SUFFIX)?.rsplit('-').next()?),
        };
        part.strip_prefix(POD_PREFIX).filter(|uid| !uid.is_empty()).map(PodUid::new)
    }

    /// Whether `named`, read from a cgroup's name, may be `pod`: systemd names do not distinguish `_` from `-`.
    pub fn may_be(self, named: &PodUid, pod: &PodUid) -> bool {
        match self.driver {
            CgroupDriver::Cgroupfs => named == pod,
            CgroupDriver::Systemd => named.as_str() == unescaped(pod.as_str()),
        }
    }

    fn path_of_pod(self, class: QosClass, uid: &PodUid) -> String {
        let mut parts = self.qos_cgroup_parts(class);
        parts.push(format!("{POD_PREFIX}{uid}"));
        self.path(&parts)
    }

    fn qos_cgroup_parts(self, class: QosClass) -> Vec<String> {
        let mut parts = self.settings.root.clone();
        parts.push(PODS.to_owned());
        match class {
            QosClass::Guaranteed => {}
            QosClass::Burstable => parts.push("burstable".to_owned()),
            QosClass::BestEffort => parts.push("besteffort".to_owned()),
        }
        parts
    }

    fn path(self, parts: &[String]) -> String {
        match self.driver {
            CgroupDriver::Cgroupfs => format!("/{}", parts.join("/")),
            CgroupDriver::Systemd => slice_path(parts),
        }
    }

    fn pids(self) -> Option<u64> {
        self.settings.pod_pids_limit.and_then(positive)
    }
}

/// What the pods of each QoS class request together.
#[derive(Clone, Copy, Debug, Default)]
struct ClassRequests {
    burstable_cpu_millis: i64,
    burstable_memory: i64,
    guaranteed_memory: i64,
}

impl ClassRequests {
    fn of<'p>(pods: impl Iterator<Item = &'p PodSpec>) -> Self {
        let mut sums = ClassRequests::default();
        let add = |sum: &mut i64, more: i64| *sum = sum.saturating_add(more);
        for spec in pods {
            let requested = |name: &str| resources::pod_requests(spec, name).unwrap_or_default();
            match qos_class(spec) {
                QosClass::Guaranteed => add(&mut sums.guaranteed_memory, requested("memory").value()),
                QosClass::Burstable => {
                    add(&mut sums.burstable_cpu_millis, requested("cpu").millis());
                    add(&mut sums.burstable_memory, requested("memory").value());
                }
                QosClass::BestEffort => {}
            }
        }
        sums
    }
}

/// The path of a configured cgroup, as upstream reads its name: with systemd only the last part counts, which names the others.
pub fn configured_path(name: &str, driver: CgroupDriver) -> String {
    match driver {
        CgroupDriver::Cgroupfs => format!("/{}", CgroupSettings::parse_root(name).join("/")),
        CgroupDriver::Systemd => {
            let last = name.rsplit('/').next().unwrap_or_default();
            let last = last.strip_suffix(SLICE_SUFFIX).unwrap_or(last);
            slice_path(&last.split('-').map(unescaped).collect::<Vec<_>>())
        }
    }
}

/// The parts of a cgroup's name as upstream's messages show them: `["kube" "reserved"]`.
pub fn quoted_parts(path: &str) -> String {
    let last = path.rsplit('/').next().unwrap_or_default();
    let parts: Vec<String> = match last.strip_suffix(SLICE_SUFFIX) {
        Some(slice) => slice.split('-').map(unescaped).collect(),
        None => CgroupSettings::parse_root(path),
    };
    let quoted: Vec<String> = parts.iter().map(|part| format!("{part:?}")).collect();
    format!("[{}]", quoted.join(" "))
}

/// Every slice has its parents' names in its own: `/a.slice/a-b.slice`.
fn slice_path(parts: &[String]) -> String {
    let mut name = String::new();
    let mut path = String::new();
    for part in parts {
        if !name.is_empty() {
            name.push('-');
        }
        name.push_str(&part.replace('-', "_"));
        path.push('/');
        path.push_str(&name);
        path.push_str(SLICE_SUFFIX);
    }
    path
}

fn unescaped(part: &str) -> String {
    part.replace('_', "-")
}

/// Upstream's ResourceConfigForPod: the pod has a limit only when every container has one.
fn pod_limits(spec: &PodSpec, node: &NodeProfile) -> Limits {
    let class = qos_class(spec);
    let requested_millis = match class {
        QosClass::Guaranteed | QosClass::Burstable => resources::pod_requests(spec, "cpu").unwrap_or_default().millis(),
        QosClass::BestEffort => 0,
    };
    let limit_of = |name: &str| -> Option<Quantity> {
        let is_limited = match class {
            QosClass::Guaranteed => true,
            QosClass::Burstable => resources::every_container_is_limited(spec, name),
            QosClass::BestEffort => false,
        };
        resources::pod_limits(spec, name).filter(|limit| is_limited && limit.is_positive())
    };
    let protects_requests = node.memory_qos.is_some_and(|qos| qos.protects_requests);
    let memory_request = resources::pod_requests(spec, "memory").filter(|_| protects_requests);
    let protected = memory_request.and_then(|request| positive(request.value()));
    // A page size without a request gets the limit zero.
    let asked = resources::pod_huge_pages(spec);
    let sizes = node.huge_page_sizes.iter();
    let huge_pages = sizes.map(|size| (size.clone(), asked.get(size).copied().unwrap_or(0)));
    Limits {
        cpu_shares: positive(shares(requested_millis)),
        cpu_quota: limit_of("cpu").map(|limit| cpu_quota(limit, node)),
        memory_bytes: limit_of("memory").and_then(|limit| positive(limit.value())),
        memory_min_bytes: protected.filter(|_| class == QosClass::Guaranteed),
        memory_low_bytes: protected.filter(|_| class != QosClass::Guaranteed),
        huge_pages: huge_pages.collect(),
        ..Limits::default()
    }
}

fn cpu_quota(limit: Quantity, node: &NodeProfile) -> CpuQuota {
    const DEFAULT_PERIOD_MICROS: i64 = 100_000;
    let period = node.cpu_cfs_quota_period.and_then(|period| i64::try_from(period.as_micros()).ok());
    CpuQuota {
        quota_micros: period.and_then(|period| positive(quota(limit.millis(), period))),
        period_micros: positive(period.unwrap_or(DEFAULT_PERIOD_MICROS)).unwrap_or(1),
    }
}

pub(crate) fn positive(number: i64) -> Option<u64> {
    u64::try_from(number).ok().filter(|number| *number > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::MemoryQos;

    fn settings(root: &str, driver: CgroupDriver) -> Settings {
        let mut settings = Settings::for_node("node");
        let kubepods_limits =
            Limits { cpu_shares: Some(2048), memory_bytes: Some(1 << 30), pids: Some(1000), ..Limits::default() };
        settings.cgroups = Some(CgroupSettings {
            root: CgroupSettings::parse_root(root),
            driver,
            pod_pids_limit: Some(100),
            kubepods_limits,
            qos_reserved_memory_percent: None,
        });
        settings.node.huge_page_sizes = vec!["2MB".to_owned()];
        settings
    }

    fn spec(text: &str) -> PodSpec {
        serde_json::from_str(text).unwrap()
    }

    /// One container with these resources.
    fn one(resources: &str) -> PodSpec {
        spec(&format!(r#"{{"containers":[{{"name":"a","resources":{resources}}}]}}"#))
    }

    #[test]
    fn names_are_upstreams_for_each_driver_class_and_root() {
        let uid = PodUid::new("1234-abcd");
        let (guaranteed, burstable, best_effort) = (
            one(r#"{"requests":{"cpu":"1","memory":"1"},"limits":{"cpu":"1","memory":"1"}}"#),
            one(r#"{"requests":{"cpu":"1"}}"#),
            one("{}"),
        );
        let mut lines = Vec::new();
        for (root, driver) in [
            ("/", CgroupDriver::Cgroupfs),
            ("/a-b/c", CgroupDriver::Cgroupfs),
            ("", CgroupDriver::Systemd),
            ("/a-b", CgroupDriver::Systemd),
        ] {
            let settings = settings(root, driver);
            let tree = CgroupTree::new(&settings, None).unwrap();
            lines.extend([&guaranteed, &burstable, &best_effort].map(|spec| tree.pod_path(spec, &uid)));
        }
        insta::assert_snapshot!(lines.join("\n"), @"
        /kubepods/pod1234-abcd
        /kubepods/burstable/pod1234-abcd
        /kubepods/besteffort/pod1234-abcd
        /a-b/c/kubepods/pod1234-abcd
        /a-b/c/kubepods/burstable/pod1234-abcd
        /a-b/c/kubepods/besteffort/pod1234-abcd
        /kubepods.slice/kubepods-pod1234_abcd.slice
        /kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1234_abcd.slice
        /kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1234_abcd.slice
        /a_b.slice/a_b-kubepods.slice/a_b-kubepods-pod1234_abcd.slice
        /a_b.slice/a_b-kubepods.slice/a_b-kubepods-burstable.slice/a_b-kubepods-burstable-pod1234_abcd.slice
        /a_b.slice/a_b-kubepods.slice/a_b-kubepods-besteffort.slice/a_b-kubepods-besteffort-pod1234_abcd.slice
        ");
    }

    #[test]
    fn cgroup_driver_of_the_runtime_overrides_the_configuration() {
        let settings = settings("/", CgroupDriver::Cgroupfs);
        let tree = CgroupTree::new(&settings, Some(CgroupDriver::Systemd)).unwrap();
        assert_eq!(tree.qos_cgroups(std::iter::empty())[0].path, "/kubepods.slice");
        let off = Settings { cgroups: None, ..settings.clone() };
        assert!(CgroupTree::new(&off, Some(CgroupDriver::Systemd)).is_none());
    }

    #[test]
    fn pod_limit_is_the_sum_if_every_container_has_one() {
        let both = r#""limits":{"cpu":"500m","memory":"64Mi"}"#;
        let mut lines = Vec::new();
        for text in [
            r#"{"containers":[{"name":"a"}]}"#.to_owned(),
            format!(r#"{{"containers":[{{"name":"a","resources":{{"requests":{{"cpu":"250m"}},{both}}}}}]}}"#),
            format!(r#"{{"containers":[{{"name":"a","resources":{{{both}}}}},{{"name":"b"}}]}}"#),
            format!(r#"{{"resources":{{{both}}},"containers":[{{"name":"a"}}]}}"#),
            format!(r#"{{"overhead":{{"cpu":"100m","memory":"1Mi"}},"containers":[{{"name":"a","resources":{{"requests":{{"cpu":"500m","memory":"64Mi"}},{both}}}}}]}}"#),
            r#"{"containers":[{"name":"a","resources":{"requests":{"cpu":"1","hugepages-2Mi":"4Mi"},"limits":{"hugepages-2Mi":"4Mi"}}}]}"#.to_owned(),
        ] {
            let settings = settings("/", CgroupDriver::Cgroupfs);
            let limits = pod_limits(&spec(&text), &settings.node);
            let quota = limits.cpu_quota.map(|quota| (quota.quota_micros, quota.period_micros));
            lines.push(format!("shares {:?} quota {quota:?} memory {:?} huge {:?}", limits.cpu_shares, limits.memory_bytes, limits.huge_pages));
        }
        insta::assert_snapshot!(lines.join("\n"), @r#"
        shares Some(2) quota None memory None huge {"2MB": 0}
        shares Some(256) quota Some((Some(50000), 100000)) memory Some(67108864) huge {"2MB": 0}
        shares Some(2) quota None memory None huge {"2MB": 0}
        shares Some(2) quota Some((Some(50000), 100000)) memory Some(67108864) huge {"2MB": 0}
        shares Some(614) quota Some((Some(60000), 100000)) memory Some(68157440) huge {"2MB": 0}
        shares Some(1024) quota None memory None huge {"2MB": 4194304}
        "#);
    }

    #[test]
    fn without_cfs_quota_a_limit_is_no_limit() {
        let node = NodeProfile { cpu_cfs_quota_period: None, ..NodeProfile::default() };
        let limits = pod_limits(&one(r#"{"limits":{"cpu":"1"}}"#), &node);
        assert_eq!(limits.cpu_quota, Some(CpuQuota { quota_micros: None, period_micros: 100_000 }));
    }

    #[test]
    fn qos_cgroup_shares_follow_the_requests_of_their_pods() {
        let settings = settings("/", CgroupDriver::Cgroupfs);
        let tree = CgroupTree::new(&settings, None).unwrap();
        let pods = [
            one(r#"{"requests":{"cpu":"500m"}}"#),
            one(r#"{"requests":{"cpu":"1"}}"#),
            one("{}"),
            one(r#"{"requests":{"cpu":"1","memory":"1"},"limits":{"cpu":"1","memory":"1"}}"#),
        ];
        let cgroups = tree.qos_cgroups(pods.iter());
        let shown: Vec<_> = cgroups
            .iter()
            .map(|tier| {
                (
                    tier.path.as_str(),
                    tier.limits.cpu_shares,
                    tier.limits.memory_bytes,
                    tier.limits.huge_pages.get("2MB").copied(),
                )
            })
            .collect();
        assert_eq!(
            shown,
            [
                ("/kubepods", Some(2048), Some(1 << 30), None),
                ("/kubepods/burstable", Some(1536), None, Some(1 << 62)),
                ("/kubepods/besteffort", Some(2), None, Some(1 << 62)),
            ]
        );
    }

    const PODS_WITH_MEMORY: [&str; 3] = [
        r#"{"requests":{"memory":"100"}}"#,
        r#"{"requests":{"memory":"40"},"limits":{"memory":"50"}}"#,
        r#"{"requests":{"cpu":"1","memory":"300"},"limits":{"cpu":"1","memory":"300"}}"#,
    ];

    #[test]
    fn memory_requests_are_protected_at_each_level_with_tiered_reservation() {
        let mut settings = settings("/", CgroupDriver::Cgroupfs);
        let pods = PODS_WITH_MEMORY.map(one);
        let mut lines = Vec::new();
        for memory_qos in [None, Some(false), Some(true)] {
            let qos = |protects_requests| MemoryQos { throttling_factor: 0.9, protects_requests };
            settings.node.memory_qos = memory_qos.map(qos);
            let tree = CgroupTree::new(&settings, None).unwrap();
            let of_pods = pods.iter().map(|spec| pod_limits(spec, &settings.node));
            let all = tree.qos_cgroups(pods.iter()).into_iter().map(|cgroup| cgroup.limits).chain(of_pods);
            let shown = all.map(|limits| format!("{:?}/{:?}", limits.memory_min_bytes, limits.memory_low_bytes));
            lines.push(shown.collect::<Vec<_>>().join(" ").replace("Some", "").replace("None", "-"));
        }
        insta::assert_snapshot!(lines.join("\n"), @"
        -/- -/- -/- -/- -/- -/-
        (0)/- -/(0) -/- -/- -/- -/-
        (440)/- -/(140) -/- -/(100) -/(40) (300)/-
        ");
    }

    #[test]
    fn reserved_memory_of_higher_classes_bounds_the_lower_ones() {
        let mut settings = settings("/", CgroupDriver::Cgroupfs);
        settings.node.unreserved_memory_bytes = 1000;
        let pods = PODS_WITH_MEMORY.map(one);
        for (percent, expected) in
            [(None, [None, None]), (Some(100), [Some(700), Some(560)]), (Some(50), [Some(850), Some(780)])]
        {
            settings.cgroups.as_mut().unwrap().qos_reserved_memory_percent = percent;
            let cgroups = CgroupTree::new(&settings, None).unwrap().qos_cgroups(pods.iter());
            let limits = [&cgroups[1].limits, &cgroups[2].limits];
            assert_eq!(limits.map(|limits| limits.memory_bytes), expected, "{percent:?}");
            assert!(limits.iter().all(|limits| limits.spares_memory_in_use == percent.is_some()));
        }
    }

    #[test]
    fn configured_cgroups_have_upstreams_paths() {
        for (name, cgroupfs, systemd) in [
            ("/system.slice", "/system.slice", "/system.slice"),
            ("system.slice", "/system.slice", "/system.slice"),
            ("/a/b-c", "/a/b-c", "/b.slice/b-c.slice"),
            ("/kube.slice/kube-reserved.slice", "/kube.slice/kube-reserved.slice", "/kube.slice/kube-reserved.slice"),
        ] {
            assert_eq!(configured_path(name, CgroupDriver::Cgroupfs), cgroupfs);
            assert_eq!(configured_path(name, CgroupDriver::Systemd), systemd);
        }
    }

    #[test]
    fn a_pods_uid_is_read_back_from_its_cgroups_name() {
        for (driver, name, uid) in [
            (CgroupDriver::Cgroupfs, "pod1-2", Some("1-2")),
            (CgroupDriver::Cgroupfs, "burstable", None),
            (CgroupDriver::Cgroupfs, "pod", None),
            (CgroupDriver::Systemd, "kubepods-burstable-pod1_2.slice", Some("1-2")),
            (CgroupDriver::Systemd, "kubepods-burstable.slice", None),
            (CgroupDriver::Systemd, "cri-containerd-x.scope", None),
        ] {
            let settings = settings("/", driver);
            let tree = CgroupTree::new(&settings, None).unwrap();
            assert_eq!(tree.uid_of(name).as_ref().map(PodUid::as_str), uid, "{name}");
        }
    }
}
