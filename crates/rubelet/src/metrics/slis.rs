//! Results of the agent's health checks.
//!
//! Owns: their last results and counts. Counted when a request runs all checks, as upstream does; a request for one check
//! by name changes nothing.
//! Upstream: `component-base/metrics/prometheus/slis`.

use super::{
    family::{Counters, Gauges},
    text::Text,
};
use crate::server::health::Check;

/// Upstream's type label for the checks of `/healthz`.
const HEALTHZ: &str = "healthz";

#[derive(Debug)]
pub struct HealthChecks {
    last: Gauges<2>,
    total: Counters<3>,
}

impl HealthChecks {
    pub(super) fn new() -> Self {
        HealthChecks {
            last: Gauges::new(
                "kubernetes_healthcheck",
                ["name", "type"],
                "[STABLE] This metric records the result of a single healthcheck.",
            ),
            total: Counters::new(
                "kubernetes_healthchecks_total",
                ["name", "type", "status"],
                "[STABLE] This metric records the results of all healthcheck.",
            ),
        }
    }

    pub fn observe(&self, checks: &[Check]) {
        for (name, result) in checks {
            let (value, status) = if result.is_ok() { (1.0, "success") } else { (0.0, "error") };
            self.last.set([name, HEALTHZ], value);
            self.total.inc([name, HEALTHZ, status]);
        }
    }

    pub fn reset(&self) {
        self.last.retain(|_| false);
        self.total.retain(|_| false);
    }

    pub fn write(&self, text: &mut Text) {
        self.last.write(text);
        self.total.write(text);
    }
}
