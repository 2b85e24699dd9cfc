//! The resources of containers and pods.
//!
//! Owns: CPU shares and quota, memory, huge page and swap limits in CRI's form; a pod's total requests and limits.
//! Never: pod cgroups (`cgroups.rs`).
//! Upstream: `calculateLinuxResources`, `generateLinuxContainerResources`, `cm/helpers_linux.go`, `component-helpers/resource`.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::{
    api::core::v1::{Container, Pod, PodSpec, ResourceRequirements},
    apimachinery::pkg::api::resource::Quantity as Text,
};
use rubelet_cri::v1::{HugepageLimit, LinuxContainerResources};

use crate::{
    pod_resources,
    qos::{self, QosClass},
    quantity::{Quantity, amount},
    settings::{NodeProfile, SwapController},
};

const MIN_SHARES: i64 = 2;
const MAX_SHARES: i64 = 262_144;
const SHARES_PER_CPU: i64 = 1024;
const MILLIS_PER_CPU: i64 = 1000;
const MIN_QUOTA_MICROS: i64 = 1000;

pub fn of_container(pod: &Pod, spec: &PodSpec, container: &Container, node: &NodeProfile) -> LinuxContainerResources {
    let own = container.resources.as_ref();
    let requests = own.and_then(|resources| resources.requests.as_ref());
    let limit = |name: &str| {
        let of_container = amount(own.and_then(|resources| resources.limits.as_ref()), name);
        // Without a limit of its own, a container has the pod's.
        if of_container.is_zero() { amount(limits(spec.resources.as_ref()), name) } else { of_container }
    };
    let cpu_request = requests.filter(|requests| requests.contains_key("cpu")).map(|_| amount(requests, "cpu"));
    let mut resources = basic(cpu_request, limit("cpu"), limit("memory"), node);
    resources.oom_score_adj = qos::oom_score_adj(pod, container, node.memory_capacity_bytes);
    resources.hugepage_limits = huge_pages(spec, container, node);
    match node.swap_controller {
        SwapController::Absent => {}
        SwapController::CgroupV1 => resources.memory_swap_limit_in_bytes = resources.memory_limit_in_bytes,
        SwapController::CgroupV2 => {
            resources.unified.insert("memory.swap.max".to_owned(), swap_bytes(pod, spec, container, node).to_string());
        }
    }
    resources.unified.extend(memory_qos(spec, container, node));
    resources
}

/// How the kernel protects the container's request, and from which use on it slows the container down. Without either, values of
/// an earlier configuration are reset.
fn memory_qos(spec: &PodSpec, container: &Container, node: &NodeProfile) -> BTreeMap<String, String> {
    let Some(qos) = node.memory_qos else { return BTreeMap::new() };
    let own = container.resources.as_ref();
    let (request, limit) = (amount(requests(own), "memory").value(), amount(limits(own), "memory").value());
    let is_guaranteed = qos::qos_class(spec) == QosClass::Guaranteed;
    let mut files = match (qos.protects_requests && request != 0, is_guaranteed) {
        (false, _) => vec![("memory.min", 0), ("memory.low", 0)],
        (true, true) => vec![("memory.min", request)],
        (true, false) => vec![("memory.low", request)],
    };
    let most = if limit != 0 { limit } else { node.unreserved_memory_bytes };
    if request != limit && most > 0 {
        let high = throttled_from(request, most, qos.throttling_factor, node.page_bytes);
        files.extend((high > request).then_some(("memory.high", high)));
    }
    files.into_iter().map(|(file, bytes)| (file.to_owned(), bytes.to_string())).collect()
}

/// A part of the way from the request to the limit, in whole pages.
#[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "as upstream computes it")]
fn throttled_from(request: i64, limit: i64, factor: f64, page_bytes: usize) -> i64 {
    let bytes = (request as f64 + (limit as f64 - request as f64) * factor).floor();
    let page_bytes = i64::try_from(page_bytes).unwrap_or(i64::MAX).max(1);
    ((bytes / page_bytes as f64) as i64).saturating_mul(page_bytes)
}

/// The container's share of the node's swap: that of its request in the node's memory. Only containers of burstable pods that
/// are not critical have one, and only if their request is not their limit.
fn swap_bytes(pod: &Pod, spec: &PodSpec, container: &Container, node: &NodeProfile) -> i64 {
    let Some(swap_bytes) = node.limited_swap_bytes else { return 0 };
    let own = container.resources.as_ref();
    let (request, limit) = (amount(requests(own), "memory"), amount(limits(own), "memory"));
    let is_burstable = qos::qos_class(spec) == QosClass::Burstable && !qos::is_critical(pod, spec);
    let memory_bytes = node.memory_capacity_bytes;
    if !is_burstable || request == limit || memory_bytes <= 0 || request.value() > memory_bytes {
        return 0;
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "as upstream computes it")]
    let share = (request.value() as f64 / memory_bytes as f64 * swap_bytes as f64) as i64;
    share
}

/// All of a pod's containers together, for runtimes that size a virtual machine.
pub fn of_sandbox(spec: &PodSpec, node: &NodeProfile) -> LinuxContainerResources {
    let cpu_limit = pod_total(spec, limits, "cpu").unwrap_or_default();
    let memory_limit = pod_total(spec, limits, "memory").unwrap_or_default();
    basic(pod_total(spec, requests, "cpu"), cpu_limit, memory_limit, node)
}

/// The pod's overhead, from its RuntimeClass.
pub fn of_overhead(spec: &PodSpec, node: &NodeProfile) -> LinuxContainerResources {
    match &spec.overhead {
        None => LinuxContainerResources::default(),
        Some(overhead) => {
            let cpu = amount(Some(overhead), "cpu");
            basic(Some(cpu), cpu, amount(Some(overhead), "memory"), node)
        }
    }
}

fn basic(
    cpu_request: Option<Quantity>,
    cpu_limit: Quantity,
    memory_limit: Quantity,
    node: &NodeProfile,
) -> LinuxContainerResources {
    let mut resources = LinuxContainerResources {
        cpu_shares: shares(cpu_request.unwrap_or(cpu_limit).millis()),
        memory_limit_in_bytes: memory_limit.value(),
        ..LinuxContainerResources::default()
    };
    if let Some(period) = node.cpu_cfs_quota_period {
        resources.cpu_period = i64::try_from(period.as_micros()).unwrap_or(i64::MAX);
        resources.cpu_quota = quota(cpu_limit.millis(), resources.cpu_period);
    }
    if node.oom_kills_whole_container {
        resources.unified.insert("memory.oom.group".to_owned(), "1".to_owned());
    }
    resources
}

/// CPU shares, within the kernel's bounds.
pub fn shares(millis: i64) -> i64 {
    (millis.saturating_mul(SHARES_PER_CPU) / MILLIS_PER_CPU).clamp(MIN_SHARES, MAX_SHARES)
}

/// Zero is no limit.
pub fn quota(millis: i64, period_micros: i64) -> i64 {
    if millis == 0 {
        return 0;
    }
    (millis.saturating_mul(period_micros) / MILLIS_PER_CPU).max(MIN_QUOTA_MICROS)
}

/// From CPU shares to thousandths of a CPU; `None` below the kernel's minimum.
pub fn shares_to_millis(shares: i64) -> Option<i64> {
    let rounded_up = || shares.saturating_mul(MILLIS_PER_CPU).saturating_add(SHARES_PER_CPU - 1) / SHARES_PER_CPU;
    (shares >= MIN_SHARES).then(rounded_up)
}

/// From a quota; `None` without a limit.
pub fn quota_to_millis(quota: i64, period_micros: i64) -> Option<i64> {
    (quota > 0 && period_micros > 0).then(|| quota.saturating_mul(MILLIS_PER_CPU) / period_micros)
}

type List = BTreeMap<String, Text>;

fn requests(resources: Option<&ResourceRequirements>) -> Option<&List> {
    resources.and_then(|resources| resources.requests.as_ref())
}

fn limits(resources: Option<&ResourceRequirements>) -> Option<&List> {
    resources.and_then(|resources| resources.limits.as_ref())
}

/// The largest amount of a resource needed at one time; `None` when nothing requests it.
fn pod_total(spec: &PodSpec, list: fn(Option<&ResourceRequirements>) -> Option<&List>, name: &str) -> Option<Quantity> {
    if list(spec.resources.as_ref()).is_some_and(|list| list.contains_key(name)) {
        return Some(amount(list(spec.resources.as_ref()), name));
    }
    let asks = |container: &Container| {
        let list = list(container.resources.as_ref());
        list.filter(|list| list.contains_key(name)).map(|list| amount(Some(list), name))
    };
    let mut is_asked_for = false;
    let total = pod_resources::aggregate_containers(spec, |container| {
        let asked = asks(container);
        is_asked_for |= asked.is_some();
        asked.unwrap_or_default()
    });
    is_asked_for.then_some(total)
}

/// The pod's requests, with overhead; `None` when nothing requests it.
pub fn pod_requests(spec: &PodSpec, name: &str) -> Option<Quantity> {
    let asked = pod_total(spec, requests, name);
    let overhead = spec.overhead.as_ref().filter(|overhead| overhead.contains_key(name));
    if asked.is_none() && overhead.is_none() {
        return None;
    }
    Some(asked.unwrap_or_default().saturating_add(amount(overhead, name)))
}

/// The pod's limits, with overhead; `None` without a limit.
pub fn pod_limits(spec: &PodSpec, name: &str) -> Option<Quantity> {
    let limit = pod_total(spec, limits, name)?;
    let overhead = if limit.is_zero() { Quantity::ZERO } else { amount(spec.overhead.as_ref(), name) };
    Some(limit.saturating_add(overhead))
}

/// Only then does the sum of the limits bound the pod.
pub fn every_container_is_limited(spec: &PodSpec, name: &str) -> bool {
    let is_limited = |resources: Option<&ResourceRequirements>| amount(limits(resources), name).is_positive();
    let mut containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    is_limited(spec.resources.as_ref()) || containers.all(|container| is_limited(container.resources.as_ref()))
}

/// Requested bytes of huge pages, by page size (`2MB`).
pub fn pod_huge_pages(spec: &PodSpec) -> BTreeMap<String, u64> {
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    let lists = containers.map(|container| requests(container.resources.as_ref()));
    let lists = lists.chain([requests(spec.resources.as_ref()), spec.overhead.as_ref()]);
    let names: BTreeSet<&str> =
        lists.flatten().flat_map(BTreeMap::keys).filter_map(|name| name.strip_prefix("hugepages-")).collect();
    let mut pages = BTreeMap::new();
    for name in names {
        let Ok(size) = Quantity::parse(name) else { continue };
        let bytes = pod_requests(spec, &format!("hugepages-{name}")).unwrap_or_default().value();
        *pages.entry(page_size_name(size.value())).or_insert(0) += u64::try_from(bytes).unwrap_or(0);
    }
    pages
}

/// Every size the kernel has, zero unless the container or its pod requests it.
fn huge_pages(spec: &PodSpec, container: &Container, node: &NodeProfile) -> Vec<HugepageLimit> {
    let mut wanted: BTreeMap<String, u64> = BTreeMap::new();
    for list in [limits(spec.resources.as_ref()), limits(container.resources.as_ref())].into_iter().flatten() {
        for name in list.keys().filter_map(|name| name.strip_prefix("hugepages-")) {
            let Ok(size) = Quantity::parse(name) else { continue };
            let bytes = amount(Some(list), &format!("hugepages-{name}")).value();
            wanted.insert(page_size_name(size.value()), u64::try_from(bytes).unwrap_or(0));
        }
    }
    node.huge_page_sizes
        .iter()
        .map(|size| HugepageLimit { page_size: size.clone(), limit: wanted.get(size).copied().unwrap_or(0) })
        .collect()
}

/// `2MB` for 2 MiB: how cgroups name page sizes.
pub fn page_size_name(bytes: i64) -> String {
    const UNITS: [&str; 6] = ["B", "KB", "MB", "GB", "TB", "PB"];
    let mut size = bytes;
    let mut unit = 0;
    while size >= 1024 && size % 1024 == 0 && unit + 1 < UNITS.len() {
        size /= 1024;
        unit += 1;
    }
    format!("{size}{}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::MemoryQos;

    fn resources(container: &str, node: &NodeProfile) -> String {
        let pod: Pod = serde_json::from_str(&format!(
            r#"{{"metadata":{{"name":"p"}},"spec":{{"containers":[{{"name":"c","resources":{container}}}]}}}}"#
        ))
        .unwrap();
        let spec = pod.spec.as_ref().unwrap();
        let made = of_container(&pod, spec, &spec.containers[0], node);
        format!(
            "shares {} quota {}/{} memory {} oom {}",
            made.cpu_shares, made.cpu_quota, made.cpu_period, made.memory_limit_in_bytes, made.oom_score_adj
        )
    }

    #[test]
    fn reported_shares_and_quota_become_thousandths_of_a_cpu() {
        assert_eq!([1, 2, 512, 1024].map(shares_to_millis), [None, Some(2), Some(500), Some(1000)]);
        assert_eq!([-1, 0, 50_000].map(|quota| quota_to_millis(quota, 100_000)), [None, None, Some(500)]);
        // A runtime may report any number.
        assert_eq!(shares_to_millis(i64::MAX), Some(i64::MAX / SHARES_PER_CPU));
        assert_eq!(quota_to_millis(i64::MAX, 1), Some(i64::MAX));
    }

    #[test]
    fn shares_quota_and_memory_follow_requests_and_limits() {
        let node = NodeProfile { memory_capacity_bytes: 1 << 30, ..NodeProfile::default() };
        for (container, expected) in [
            ("{}", "shares 2 quota 0/100000 memory 0 oom 1000"),
            (r#"{"requests":{"cpu":"500m"}}"#, "shares 512 quota 0/100000 memory 0 oom 999"),
            (r#"{"limits":{"cpu":"500m"}}"#, "shares 512 quota 50000/100000 memory 0 oom 999"),
            (r#"{"requests":{"cpu":"0"},"limits":{"cpu":"2"}}"#, "shares 2 quota 200000/100000 memory 0 oom 999"),
            (r#"{"limits":{"cpu":"5m"}}"#, "shares 5 quota 1000/100000 memory 0 oom 999"),
            (r#"{"requests":{"cpu":"400"}}"#, "shares 262144 quota 0/100000 memory 0 oom 999"),
            (r#"{"requests":{"memory":"512Mi"}}"#, "shares 2 quota 0/100000 memory 0 oom 500"),
            (
                r#"{"requests":{"cpu":"1","memory":"64Mi"},"limits":{"cpu":"1","memory":"64Mi"}}"#,
                "shares 1024 quota 100000/100000 memory 67108864 oom -997",
            ),
        ] {
            assert_eq!(resources(container, &node), expected, "{container}");
        }
    }

    #[test]
    fn burstable_containers_get_their_share_of_swap() {
        let node = NodeProfile {
            memory_capacity_bytes: 1 << 30,
            swap_controller: SwapController::CgroupV2,
            limited_swap_bytes: Some(1 << 28),
            ..NodeProfile::default()
        };
        let swap = |container: &str, priority: i32, node: &NodeProfile| {
            let resources: ResourceRequirements = serde_json::from_str(container).unwrap();
            let container = Container { name: "a".to_owned(), resources: Some(resources), ..Container::default() };
            let spec = PodSpec { containers: vec![container.clone()], priority: Some(priority), ..PodSpec::default() };
            of_container(&Pod::default(), &spec, &container, node).unified["memory.swap.max"].clone()
        };
        for (container, priority, expected) in [
            (r#"{"requests":{"memory":"256Mi"}}"#, 0, "67108864"),
            (r#"{"requests":{"memory":"256Mi"},"limits":{"memory":"512Mi"}}"#, 0, "67108864"),
            (r#"{"requests":{"memory":"256Mi"},"limits":{"memory":"256Mi"}}"#, 0, "0"),
            (r#"{"requests":{"memory":"256Mi"}}"#, 2_000_000_000, "0"),
            (r#"{"requests":{"memory":"2Gi"}}"#, 0, "0"),
            ("{}", 0, "0"),
        ] {
            assert_eq!(swap(container, priority, &node), expected, "{container}");
        }
        let no_swap = NodeProfile { limited_swap_bytes: None, ..node };
        assert_eq!(swap(r#"{"requests":{"memory":"256Mi"}}"#, 0, &no_swap), "0");
    }

    #[test]
    fn memory_is_protected_and_throttled_between_request_and_limit() {
        let mut node = NodeProfile { unreserved_memory_bytes: 1_000_000, page_bytes: 4096, ..NodeProfile::default() };
        let mut lines = Vec::new();
        for text in [
            "{}",
            r#"{"requests":{"memory":"100000"}}"#,
            r#"{"requests":{"memory":"100000"},"limits":{"memory":"200000"}}"#,
            r#"{"requests":{"cpu":"1","memory":"100000"},"limits":{"cpu":"1","memory":"100000"}}"#,
            r#"{"requests":{"memory":"100000"},"limits":{"memory":"100001"}}"#,
            r#"{"requests":{"memory":"2000000"}}"#,
        ] {
            for protects_requests in [false, true] {
                node.memory_qos = Some(MemoryQos { throttling_factor: 0.9, protects_requests });
                let resources: ResourceRequirements = serde_json::from_str(text).unwrap();
                let container = Container { name: "a".to_owned(), resources: Some(resources), ..Container::default() };
                let spec = PodSpec { containers: vec![container.clone()], ..PodSpec::default() };
                let unified = of_container(&Pod::default(), &spec, &container, &node).unified;
                let files = unified.iter().map(|(file, bytes)| format!("{} {bytes}", file.replace("memory.", "")));
                lines.push(files.collect::<Vec<_>>().join(", "));
            }
        }
        insta::assert_snapshot!(lines.join("\n"), @"
        low 0, min 0
        low 0, min 0
        high 909312, low 0, min 0
        high 909312, low 100000
        high 188416, low 0, min 0
        high 188416, low 100000
        low 0, min 0
        min 100000
        low 0, min 0
        low 100000
        low 0, min 0
        low 2000000
        ");
        node.memory_qos = None;
        assert_eq!(memory_qos(&PodSpec::default(), &Container::default(), &node), BTreeMap::new());
    }

    #[test]
    fn no_quota_is_set_when_cfs_quota_is_off() {
        let node = NodeProfile { cpu_cfs_quota_period: None, ..NodeProfile::default() };
        assert_eq!(resources(r#"{"limits":{"cpu":"1"}}"#, &node), "shares 1024 quota 0/0 memory 0 oom 999");
    }

    #[test]
    fn sandbox_counts_what_runs_at_the_same_time() {
        let spec: PodSpec = serde_json::from_str(
            r#"{"initContainers":[
                    {"name":"i","resources":{"requests":{"cpu":"3"}}},
                    {"name":"s","restartPolicy":"Always","resources":{"requests":{"cpu":"1"}}}],
                "containers":[{"name":"a","resources":{"requests":{"cpu":"1"}}},{"name":"b","resources":{"limits":{"memory":"10Mi"}}}]}"#,
        )
        .unwrap();
        assert_eq!(pod_total(&spec, requests, "cpu"), Some(Quantity::from_units(3)));
        assert_eq!(pod_total(&spec, limits, "memory"), Some(Quantity::from_units(10 << 20)));
        assert_eq!(pod_total(&spec, limits, "cpu"), None);
    }

    #[test]
    fn every_size_of_huge_pages_is_forbidden_unless_asked_for() {
        let spec: PodSpec =
            serde_json::from_str(r#"{"containers":[{"name":"a","resources":{"limits":{"hugepages-2Mi":"4Mi"}}}]}"#)
                .unwrap();
        let node = NodeProfile { huge_page_sizes: vec!["2MB".to_owned(), "1GB".to_owned()], ..NodeProfile::default() };
        let limits: Vec<(String, u64)> = huge_pages(&spec, &spec.containers[0], &node)
            .into_iter()
            .map(|limit| (limit.page_size, limit.limit))
            .collect();
        assert_eq!(limits, [("2MB".to_owned(), 4 << 20), ("1GB".to_owned(), 0)]);
    }
}
