//! What the agent counts and times of itself.
//!
//! Owns: every family, and the three pages made of them. What can be told from the last snapshot is told from it when somebody
//! asks, and kept nowhere. Observing is a line where the thing happens; nothing here wakes up by itself.
//! Never: decides; nothing reads a metric back. The core counts nothing.
//! Upstream: `pkg/kubelet/metrics`, `legacyregistry`. docs/parity.md has the table of upstream's metrics, and why some are missing.

pub mod family;
pub mod http;
pub mod pods;
pub mod process;
pub mod runtime;
pub mod slis;
pub mod text;

use rubelet_core::{
    config::gates::{Gates, Maturity},
    snapshot::Snapshot,
};

use self::{
    http::Requests,
    runtime::RuntimeCalls,
    slis::HealthChecks,
    text::{Labels, Text},
};

#[derive(Debug)]
pub struct Metrics {
    pub runtime: RuntimeCalls,
    pub http: Requests,
    pub slis: HealthChecks,
    gates: Gates,
}

impl Default for Metrics {
    fn default() -> Self {
        Metrics::new(Gates::default())
    }
}

impl Metrics {
    pub fn new(gates: Gates) -> Self {
        Metrics { runtime: RuntimeCalls::new(), http: Requests::new(), slis: HealthChecks::new(), gates }
    }

    /// `/metrics`.
    pub fn page(&self, snapshot: &Snapshot) -> String {
        let mut text = Text::default();
        pods::write(snapshot, &mut text);
        self.runtime.write(&mut text);
        self.http.write(&mut text);
        process::write(&mut text);
        process::write_build_info(&mut text);
        write_gates(&self.gates, &mut text);
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

#[cfg(test)]
mod tests;
