//! Results of probes.
//!
//! Owns: counting them while their pod is known. Never: evaluates them; the core has the thresholds.
//! Upstream: `ProberResults` and `ProberDuration` of `prober/prober_manager.go`.

use std::time::Duration;

use rubelet_core::{
    id::PodRef,
    probes::{ProbeKind, ProbeOutcome, ProbeRequest},
};

use super::{
    family::{Counters, DEFAULT_BOUNDS, Histograms},
    text::Text,
};

#[derive(Debug)]
pub(crate) struct Probes {
    total: Counters<6>,
    duration: Histograms<4>,
}

impl Probes {
    pub(super) fn new() -> Self {
        Probes {
            total: Counters::new(
                "prober_probe_total",
                ["probe_type", "result", "container", "pod", "namespace", "pod_uid"],
                "[BETA] Cumulative number of a liveness, readiness or startup probe for a container by result.",
            ),
            duration: Histograms::new(
                "prober_probe_duration_seconds",
                ["probe_type", "container", "pod", "namespace"],
                DEFAULT_BOUNDS,
                "[ALPHA] Duration in seconds for a probe response.",
            ),
        }
    }

    pub(crate) fn probed(&self, order: &ProbeRequest, outcome: &ProbeOutcome, took: Duration) {
        let kind = match order.kind {
            ProbeKind::Startup => "Startup",
            ProbeKind::Readiness => "Readiness",
            ProbeKind::Liveness => "Liveness",
        };
        let PodRef { namespace, name, uid, .. } = &order.pod;
        let result = match outcome {
            ProbeOutcome::Success | ProbeOutcome::Warning(_) => "successful",
            ProbeOutcome::Failure(_) => "failed",
            ProbeOutcome::Discarded(_) | ProbeOutcome::Unknown(_) => "unknown",
        };
        self.total.inc([kind, result, &order.container, name, namespace, uid.as_str()]);
        // Upstream does not record the duration of failures.
        if !matches!(outcome, ProbeOutcome::Failure(_)) {
            self.duration.observe([kind, &order.container, name, namespace], took.as_secs_f64());
        }
    }

    pub(crate) fn forget(&self, pod: &PodRef) {
        self.total.retain(|[.., uid]| &**uid != pod.uid.as_str());
        self.duration.retain(|[.., name, namespace]| **name != *pod.name || **namespace != *pod.namespace);
    }

    pub(crate) fn write(&self, text: &mut Text) {
        self.total.write(text);
        self.duration.write(text);
    }
}

#[cfg(test)]
mod tests {
    use rubelet_core::{id::ContainerId, probes::ProbeAction};

    use super::*;

    #[test]
    fn probe_counters_are_labelled_by_result_and_removed_with_pod() {
        let probes = Probes::new();
        let pod = |name: &str| PodRef {
            uid: format!("uid-{name}").as_str().into(),
            namespace: "ns".into(),
            name: name.into(),
        };
        let order = |name: &str| ProbeRequest {
            pod: pod(name),
            container: "main".to_owned(),
            id: ContainerId::new("c1"),
            kind: ProbeKind::Liveness,
            action: ProbeAction::Exec { command: Vec::new() },
            timeout: Duration::from_secs(1),
        };
        for outcome in [ProbeOutcome::Success, ProbeOutcome::Warning("w".into()), ProbeOutcome::Failure("f".into())] {
            probes.probed(&order("a"), &outcome, Duration::from_secs(2));
        }
        probes.probed(&order("b"), &ProbeOutcome::Unknown("u".into()), Duration::from_secs(2));
        let shown = || {
            let mut text = Text::default();
            probes.write(&mut text);
            let is_told = |line: &&str| line.contains("total{") || line.contains("_sum");
            text.into_string().lines().filter(is_told).collect::<Vec<_>>().join("\n")
        };
        insta::assert_snapshot!(shown(), @r#"
        prober_probe_total{probe_type="Liveness",result="failed",container="main",pod="a",namespace="ns",pod_uid="uid-a"} 1
        prober_probe_total{probe_type="Liveness",result="successful",container="main",pod="a",namespace="ns",pod_uid="uid-a"} 2
        prober_probe_total{probe_type="Liveness",result="unknown",container="main",pod="b",namespace="ns",pod_uid="uid-b"} 1
        prober_probe_duration_seconds_sum{probe_type="Liveness",container="main",pod="a",namespace="ns"} 4
        prober_probe_duration_seconds_sum{probe_type="Liveness",container="main",pod="b",namespace="ns"} 2
        "#);
        probes.forget(&pod("a"));
        assert!(!shown().contains("pod=\"a\"") && shown().contains("pod=\"b\""), "{}", shown());
    }
}
