//! Preemption: which pods end, so that a critical pod has room.
//!
//! Owns: which pods a critical pod may preempt, and the choice among them by QoS class and requests. Never: ends a pod
//! (`agent/preemption.rs`), or decides that a pod lacks resources (`admission.rs`).
//! Upstream: `preemption/preemption.go`, `types.Preemptable`.

use std::fmt::Write as _;

use k8s_openapi::api::core::v1::Pod;

use crate::{
    admission::requested,
    pod::status::{FailureReason, PodFailure},
    qos::{QosClass, is_critical, qos_class},
};

const MESSAGE: &str = "Preempted in order to admit critical pod";
const DISRUPTION_MESSAGE: &str = "Pod was preempted by Kubelet to accommodate a critical pod.";

/// How much of a resource a pod lacks. CPU is in thousandths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requirement {
    pub resource: String,
    pub quantity: i64,
}

/// Why a preempted pod has failed; the metric counts it by the first resource that was missing.
pub fn failure(missing: &[Requirement]) -> PodFailure {
    let signal = missing.first().map(|first| first.resource.clone()).unwrap_or_default();
    let disruption = Some(DISRUPTION_MESSAGE.to_owned());
    PodFailure { reason: FailureReason::Preempting(signal), message: MESSAGE.to_owned(), disruption }
}

/// Why a critical pod is rejected: all pods it may preempt would leave this missing.
pub fn rejection(missing: &[Requirement]) -> PodFailure {
    let mut list = String::new();
    for Requirement { resource, quantity } in missing {
        let _ = write!(list, "(res: {resource}, q: {quantity}), ");
    }
    let message = format!(
        "Unexpected error while attempting to recover from admission failure: preemption: error finding a set of pods to \
         preempt: no set of running pods found to reclaim resources: [{list}]"
    );
    PodFailure::new(FailureReason::UnexpectedAdmissionError, message)
}

/// Other pods than critical ones, and those of a lower priority.
pub fn is_preemptable(preemptor: &Pod, pod: &Pod) -> bool {
    let (Some(preemptor_spec), Some(spec)) = (&preemptor.spec, &pod.spec) else { return false };
    let outranks = preemptor_spec.priority.zip(spec.priority).is_some_and(|(own, its)| own > its);
    outranks || (is_critical(preemptor, preemptor_spec) && !is_critical(pod, spec))
}

/// The pods whose end gives the preemptor what it lacks: the least harm to guaranteed pods first, then to burstable ones, then
/// to the others. An error is what would still be missing without all of them.
pub fn pods_to_preempt<'a>(
    preemptor: &Pod,
    pods: &[&'a Pod],
    missing: &[Requirement],
) -> Result<Vec<&'a Pod>, Vec<Requirement>> {
    let of_class = |class: QosClass| -> Vec<&'a Pod> {
        let is_meant = |pod: &&&Pod| {
            is_preemptable(preemptor, pod) && pod.spec.as_ref().is_some_and(|spec| qos_class(spec) == class)
        };
        pods.iter().filter(is_meant).copied().collect()
    };
    let best_effort = of_class(QosClass::BestEffort);
    let burstable = of_class(QosClass::Burstable);
    let guaranteed = of_class(QosClass::Guaranteed);

    let lower = remaining(missing, &[&best_effort[..], &burstable].concat());
    let guaranteed = nearest(guaranteed, lower)?;
    let burstable = nearest(burstable, remaining(missing, &[&best_effort[..], &guaranteed].concat()))?;
    let best_effort = nearest(best_effort, remaining(missing, &[&burstable[..], &guaranteed].concat()))?;
    Ok([best_effort, burstable, guaranteed].concat())
}

/// What is still missing when these pods have ended.
pub fn remaining(missing: &[Requirement], ended: &[&Pod]) -> Vec<Requirement> {
    let after = missing.iter().map(|Requirement { resource, quantity }| {
        let released = ended.iter().map(|pod| request(pod, resource)).fold(0, i64::saturating_add);
        Requirement { resource: resource.clone(), quantity: quantity.saturating_sub(released) }
    });
    after.filter(|left| left.quantity > 0).collect()
}

/// Whether the pod's end releases something of this.
pub fn releases_some(pod: &Pod, missing: &[Requirement]) -> bool {
    missing.iter().any(|it| request(pod, &it.resource) > 0)
}

fn request(pod: &Pod, resource: &str) -> i64 {
    pod.spec.as_ref().map_or(0, |spec| requested(spec, resource))
}

/// Again and again the pod that meets most of what is missing; of equal ones the smaller.
fn nearest(mut pods: Vec<&Pod>, mut missing: Vec<Requirement>) -> Result<Vec<&Pod>, Vec<Requirement>> {
    let mut chosen = Vec::new();
    while !missing.is_empty() {
        let size = |pod: &Pod| (request(pod, "memory"), request(pod, "cpu"));
        let order = |one: &(usize, &&Pod), other: &(usize, &&Pod)| {
            let distances = distance(&missing, one.1).total_cmp(&distance(&missing, other.1));
            distances.then_with(|| size(one.1).cmp(&size(other.1)))
        };
        let Some((index, _)) = pods.iter().enumerate().min_by(order) else { return Err(missing) };
        let pod = pods.swap_remove(index);
        missing = remaining(&missing, &[pod]);
        chosen.push(pod);
    }
    Ok(chosen)
}

/// Every resource weighs the same, whatever its unit.
fn distance(missing: &[Requirement], pod: &Pod) -> f64 {
    let parts = missing.iter().map(|Requirement { resource, quantity }| {
        let left = quantity.saturating_sub(request(pod, resource)).max(0);
        (fraction(left, *quantity)).powi(2)
    });
    parts.sum()
}

#[expect(clippy::cast_precision_loss, reason = "a choice between pods needs no exact fraction")]
fn fraction(part: i64, whole: i64) -> f64 {
    part as f64 / whole as f64
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const SYSTEM_CRITICAL: i32 = 2_000_000_000;

    /// `name class cpu memory`, with a priority if it has one: `a burstable 100m 1Mi 7`.
    fn pod(line: &str) -> Pod {
        let words: Vec<&str> = line.split(' ').collect();
        let amounts = json!({ "cpu": words[2], "memory": words[3] });
        let resources = match words[1] {
            "guaranteed" => json!({ "requests": amounts, "limits": amounts }),
            "burstable" => json!({ "requests": amounts }),
            "best-effort" => json!({}),
            other => panic!("{other}"),
        };
        let priority = words.get(4).map(|text| text.parse::<i32>().unwrap());
        let spec = json!({ "containers": [{ "name": "c", "resources": resources }], "priority": priority });
        serde_json::from_value(json!({ "metadata": { "name": words[0] }, "spec": spec })).unwrap()
    }

    fn critical() -> Pod {
        pod(&format!("critical burstable 1 1Mi {SYSTEM_CRITICAL}"))
    }

    /// `cpu 100 memory 5`
    fn missing(text: &str) -> Vec<Requirement> {
        let words: Vec<&str> = text.split(' ').collect();
        let pairs = words.chunks(2);
        pairs.map(|it| Requirement { resource: it[0].to_owned(), quantity: it[1].parse().unwrap() }).collect()
    }

    fn chosen(lines: &[&str], lacks: &str) -> String {
        let pods: Vec<Pod> = lines.iter().map(|line| pod(line)).collect();
        let pods: Vec<&Pod> = pods.iter().collect();
        match pods_to_preempt(&critical(), &pods, &missing(lacks)) {
            Ok(pods) => pods.iter().map(|pod| pod.metadata.name.clone().unwrap()).collect::<Vec<_>>().join(" "),
            Err(missing) => rejection(&missing).message.rsplit_once(": [").unwrap().1.to_owned(),
        }
    }

    #[test]
    fn guaranteed_pods_are_spared_first_then_burstable_ones() {
        let one_of_each = ["e best-effort 0 0", "b burstable 100m 100", "g guaranteed 100m 100"];
        for (lacks, expected) in [
            ("cpu 100", "b"),
            ("cpu 101", "b g"),
            ("cpu 100 memory 150", "b g"),
            ("cpu 201", "(res: cpu, q: 1), ]"),
            ("pods 1", "e"),
            ("pods 2", "e b"),
            ("pods 3", "e b g"),
            // The best-effort pod goes for the number of pods only if no other must go anyway.
            ("cpu 100 pods 1", "b"),
        ] {
            assert_eq!(chosen(&one_of_each, lacks), expected, "{lacks}");
        }
    }

    #[test]
    fn within_a_class_as_few_and_as_small_pods_as_possible_are_preempted() {
        for (pods, lacks, expected) in [
            (&["a burstable 100m 10", "b burstable 200m 10", "c burstable 300m 10"][..], "cpu 150", "b"),
            (&["a burstable 100m 10", "b burstable 300m 20", "c burstable 200m 10"], "cpu 150", "c"),
            (&["a burstable 100m 10", "b burstable 100m 5"], "cpu 100", "b"),
            (&["a burstable 100m 10", "b burstable 60m 5", "c burstable 50m 5"], "cpu 150", "a c"),
            (&["a burstable 100m 0", "b burstable 0 100", "c burstable 90m 90"], "cpu 100 memory 100", "c a b"),
            (&["a burstable 100m 0", "b burstable 0 100", "c burstable 100m 100"], "cpu 100 memory 100", "c"),
        ] {
            assert_eq!(chosen(pods, lacks), expected, "{pods:?} {lacks}");
        }
    }

    #[test]
    fn only_pods_of_lower_priority_or_not_critical_are_preemptable() {
        let preemptor = critical();
        let mut unranked = critical();
        unranked.spec.as_mut().unwrap().priority = None;
        unranked.metadata.annotations = Some([("kubernetes.io/config.source".to_owned(), "file".to_owned())].into());
        for (line, by_priority, by_static_pod) in [
            ("a burstable 1 1", true, true),
            ("a burstable 1 1 0", true, true),
            ("a burstable 1 1 1999999999", true, true),
            ("a burstable 1 1 2000000000", false, false),
            ("a burstable 1 1 2000001000", false, false),
        ] {
            let pod = pod(line);
            assert_eq!(is_preemptable(&preemptor, &pod), by_priority, "{line}");
            assert_eq!(is_preemptable(&unranked, &pod), by_static_pod, "{line}");
        }
        let higher = pod("critical burstable 1 1 2000001000");
        assert!(is_preemptable(&higher, &preemptor), "a critical pod makes room for one of higher priority");
        assert!(!is_preemptable(&higher, &unranked), "a static pod without priority makes room for none");
    }

    #[test]
    fn messages_are_upstreams() {
        let lacks = missing("cpu 100 memory 5");
        let PodFailure { reason, message, disruption } = failure(&lacks);
        insta::assert_snapshot!(format!("{reason} ({reason:?}): {message}\n{}", disruption.unwrap()), @r#"
        Preempting (Preempting("cpu")): Preempted in order to admit critical pod
        Pod was preempted by Kubelet to accommodate a critical pod.
        "#);
        let PodFailure { reason, message, .. } = rejection(&lacks);
        insta::assert_snapshot!(format!("{reason}: {message}"), @"UnexpectedAdmissionError: Unexpected error while attempting to recover from admission failure: preemption: error finding a set of pods to preempt: no set of running pods found to reclaim resources: [(res: cpu, q: 100), (res: memory, q: 5), ]");
    }
}
