//! A pod in upstream's internal form, which differs slightly from v1.
//!
//! Owns: the conversion from v1. Never: defaults, which come before.
//! Upstream: `apis/core/v1/conversion.go`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Pod, PodIP};
use serde_json::{Map, Value};

use super::{decode, pod_level::Sums};

/// Deprecated init container annotations.
const OLD_ANNOTATIONS: [&str; 4] = [
    "pod.beta.kubernetes.io/init-containers",
    "pod.alpha.kubernetes.io/init-containers",
    "pod.beta.kubernetes.io/init-container-statuses",
    "pod.alpha.kubernetes.io/init-container-statuses",
];
/// Fields of the specification that the internal pod has in its security context.
const HOST_NAMESPACES: [&str; 5] = ["hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace", "hostUsers"];

/// Permanent changes of the conversion: upstream runs the pod with them, too.
pub(super) fn convert(pod: &mut Pod) {
    if let Some(annotations) = &mut pod.metadata.annotations {
        annotations.retain(|name, _| !OLD_ANNOTATIONS.contains(&name.as_str()));
    }
    let spec = pod.spec.get_or_insert_default();
    if spec.service_account_name.as_deref().unwrap_or_default().is_empty() {
        spec.service_account_name.clone_from(&spec.service_account);
    }
    if let Some(seconds) = &mut spec.termination_grace_period_seconds
        && *seconds < 0
    {
        *seconds = 1;
    }
    let Some(status) = &mut pod.status else { return };
    let Some(pod_ip) = status.pod_ip.clone().filter(|ip| !ip.is_empty()) else { return };
    let first = status.pod_ips.iter().flatten().next();
    if first.is_none_or(|first| first.ip != pod_ip) {
        status.pod_ips = Some(vec![PodIP { ip: pod_ip }]);
    }
}

/// The converted pod as JSON, with its fields where the internal types have them.
pub(super) fn encoded(pod: &Pod, sums: &Sums) -> Value {
    let mut pod = decode::encoded(pod);
    if let Value::Object(object) = &mut pod {
        // The internal form has no apiVersion and kind.
        object.remove("apiVersion");
        object.remove("kind");
    }
    if let Some(Value::Object(spec)) = pod.get_mut("spec") {
        let moved: BTreeMap<&str, Value> =
            HOST_NAMESPACES.into_iter().filter_map(|name| Some((name, spec.remove(name)?))).collect();
        let context = spec.entry("securityContext").or_insert_with(|| Value::Object(Map::new()));
        for (name, value) in moved {
            context[name] = value;
        }
        for (list, computed) in [("limits", &sums.limits), ("requests", &sums.requests)] {
            for (name, sum) in computed {
                spec["resources"][list][name] = serde_json::to_value(sum).expect("it has only string keys");
            }
        }
    }
    pod
}
