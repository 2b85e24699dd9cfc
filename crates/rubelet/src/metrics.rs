//! Metrics of the agent itself.
//!
//! Owns: every family, and the three pages made of them. Values that the last snapshot has are computed from it at a scrape and
//! not stored. An observation is one line where the thing happens; no metrics task runs in the background.
//! Never: decides; no decision reads a metric. The core counts nothing.
//! Upstream: `pkg/kubelet/metrics`, `legacyregistry`. docs/parity.md has the table of upstream's metrics, and why some are missing.

pub(crate) mod api;
pub(crate) mod certificates;
pub(crate) mod claims;
pub(crate) mod csi;
pub(crate) mod effects;
pub(crate) mod family;
pub(crate) mod http;
pub(crate) mod pod_certificates;
pub(crate) mod pod_lifecycle;
pub(crate) mod pods;
pub(crate) mod probes;
pub(crate) mod process;
pub(crate) mod runtime;
mod selinux;
pub(crate) mod shutdown;
pub(crate) mod slis;
pub(crate) mod storage;
pub(crate) mod text;

use std::path::Path;

use jiff::Timestamp;
use rubelet_core::{
    config::gates::{Gate, Gates, Maturity},
    effect::{EffectError, Facts},
    id::PodRef,
    op::{ApiOp, ContainerOp, ImageOp, Op},
    snapshot::Snapshot,
    time::{Now, Uptime},
};

use self::{
    api::ApiCalls,
    certificates::Certificates,
    effects::EffectMetrics,
    family::{DEFAULT_BOUNDS, Histograms},
    http::HttpMetrics,
    pod_certificates::PodCertificateMetrics,
    pod_lifecycle::PodLifecycleMetrics,
    probes::Probes,
    runtime::RuntimeMetrics,
    shutdown::ShutdownMetrics,
    slis::HealthChecks,
    storage::StorageMetrics,
    text::{Labels, Text},
};

#[derive(Debug)]
pub struct Metrics {
    pub api: ApiCalls,
    pub certificates: Certificates,
    pub pod_certificates: PodCertificateMetrics,
    pub runtime: RuntimeMetrics,
    pub http: HttpMetrics,
    pub slis: HealthChecks,
    pub effects: EffectMetrics,
    pub shutdown: ShutdownMetrics,
    pub storage: StorageMetrics,
    pod_lifecycle: PodLifecycleMetrics,
    eviction_stats_age: Histograms<1>,
    probes: Probes,
    gates: Gates,
}

impl Default for Metrics {
    fn default() -> Self {
        Metrics::new(Gates::default())
    }
}

impl Metrics {
    pub fn new(gates: Gates) -> Self {
        Metrics {
            api: ApiCalls::new(),
            certificates: Certificates::new(),
            pod_certificates: PodCertificateMetrics::default(),
            runtime: RuntimeMetrics::new(),
            http: HttpMetrics::new(),
            slis: HealthChecks::new(),
            effects: EffectMetrics::new(),
            shutdown: ShutdownMetrics::default(),
            storage: StorageMetrics::new(),
            pod_lifecycle: PodLifecycleMetrics::new(),
            eviction_stats_age: Histograms::new(
                "kubelet_eviction_stats_age_seconds",
                ["eviction_signal"],
                DEFAULT_BOUNDS,
                "[ALPHA] Time between when stats are collected, and when pod is evicted based on those stats by eviction signal",
            ),
            probes: Probes::new(),
            gates,
        }
    }

    /// An effect has ended; it began at the given time.
    pub fn effect_ended(&self, op: &Op, result: &Result<Facts, EffectError>, began: Uptime, now: Now) {
        self.effects.ended(op, result, began, now);
        self.storage.effect_ended(op, result, began, now);
        match (op, result) {
            (Op::Container(ContainerOp::Probe(order)), Ok(Facts::Probe(outcome))) => {
                self.probes.probed(order, outcome, now.uptime.since(began));
            }
            (Op::Image(ImageOp::Pull { pod, .. }), _) => self.pod_lifecycle.pulled(&pod.uid, began, now.uptime),
            (Op::Api(ApiOp::PatchStatus { .. }), Ok(Facts::ApiPod(pod))) => self.pod_lifecycle.told(pod, now),
            _ => {}
        }
    }

    /// Compares the snapshots before and after a turn.
    pub fn turned(&self, before: &Snapshot, after: &Snapshot, now: Now) {
        for (uid, view) in self.pod_lifecycle.turned(before, after, now) {
            self.probes.forget(&PodRef { uid, ..PodRef::of(&view.pod) });
        }
        self.storage.turned(before, after, now);
        self.note_ranking(before, after);
    }

    /// At most one ranking ends in a turn.
    fn note_ranking(&self, before: &Snapshot, after: &Snapshot) {
        let ranking = &after.eviction.record.last_ranking;
        if *ranking == before.eviction.record.last_ranking {
            return;
        }
        for (signal, age) in ranking.iter().flat_map(|ranking| &ranking.stats_age) {
            self.eviction_stats_age.observe([signal.as_str()], age.as_secs_f64());
        }
    }

    /// `/metrics`.
    pub fn page(&self, snapshot: &Snapshot, now: Timestamp) -> String {
        let mut text = Text::default();
        pods::write(snapshot, &mut text);
        self.eviction_stats_age.write(&mut text);
        self.pod_lifecycle.write(&mut text);
        self.effects.write(&mut text);
        self.storage.write(&mut text);
        self.runtime.write(&mut text);
        self.api.write(&mut text);
        self.http.write(&mut text);
        self.certificates.write(now, &mut text);
        self.pod_certificates.write(now, &mut text);
        if self.gates.enabled(Gate::GracefulNodeShutdownBasedOnPodPriority) {
            self.shutdown.write(&mut text);
        }
        process::write(&mut text);
        process::write_build_info(&mut text);
        write_gates(&self.gates, &mut text);
        write_cgroup_version(&mut text);
        text.into_string()
    }

    /// `/metrics/probes`.
    pub fn probe_page(&self) -> String {
        let mut text = Text::default();
        self.probes.write(&mut text);
        process::write_start_time(&mut text, process::START_TIME_OF_KUBERNETES);
        text.into_string()
    }

    /// `/metrics/slis`.
    pub fn sli_page(&self) -> String {
        let mut text = Text::default();
        self.slis.write(&mut text);
        process::write_start_time(&mut text, process::START_TIME_OF_KUBERNETES);
        text.into_string()
    }
}

fn write_gates(gates: &Gates, text: &mut Text) {
    const NAME: &str = "kubernetes_feature_enabled";
    text.head(NAME, "gauge", "[BETA] This metric records the data about the stage and enablement of a k8s feature.");
    for (gate, is_on) in gates.all() {
        let stage = match gate.maturity {
            Maturity::Alpha => "ALPHA",
            Maturity::Beta => "BETA",
            Maturity::Stable => "",
            Maturity::Deprecated => "DEPRECATED",
        };
        let labels = [("name", gate.name), ("stage", stage)];
        text.sample((NAME, ""), Labels::of(&labels), f64::from(u8::from(is_on)));
    }
}

/// The kernel shows this file at the root of version 2 only.
fn write_cgroup_version(text: &mut Text) {
    let version = if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() { 2.0 } else { 1.0 };
    text.single("kubelet_cgroup_version", "gauge", "[ALPHA] cgroup version on the hosts.", version);
}

#[cfg(test)]
mod tests;
