//! How far the certificates of pods are.
//!
//! Owns: upstream's names of states. A certificate that is too old is seen at a scrape.
//! Upstream: `collectors/podcertificate_metrics.go`, `metricsState` of `podcertificatemanager.go`.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use jiff::Timestamp;
use rubelet_core::volumes::pod_certificates::{CertificateKey, CertificateTimes, Refusal};

use super::text::{Labels, Text};

const STATES: &str = "kubelet_podcertificate_states";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CertificateState {
    NotYetIssued,
    Issued(CertificateTimes),
    Denied,
    Failed,
}

impl CertificateState {
    pub(crate) fn refused(refusal: &Refusal) -> Self {
        if refusal.is_denial() { CertificateState::Denied } else { CertificateState::Failed }
    }

    fn name(self, now: Timestamp) -> &'static str {
        match self {
            CertificateState::NotYetIssued => "not_yet_issued",
            CertificateState::Issued(times) if now > times.not_after => "expired",
            CertificateState::Issued(times) if now > times.overdue_at => "overdue_for_refresh",
            CertificateState::Issued(_) => "fresh",
            CertificateState::Denied => "denied",
            CertificateState::Failed => "failed",
        }
    }
}

#[derive(Debug, Default)]
pub struct PodCertificateMetrics(Mutex<BTreeMap<CertificateKey, CertificateState>>);

impl PodCertificateMetrics {
    pub(crate) fn set(&self, key: &CertificateKey, state: CertificateState) {
        self.states().insert(key.clone(), state);
    }

    pub(crate) fn forget(&self, key: &CertificateKey) {
        self.states().remove(key);
    }

    pub(super) fn write(&self, now: Timestamp, text: &mut Text) {
        let mut counts: BTreeMap<(String, &str), u32> = BTreeMap::new();
        for (key, state) in &*self.states() {
            let count = counts.entry((key.signer.clone(), state.name(now))).or_default();
            *count = count.saturating_add(1);
        }
        if !counts.is_empty() {
            let help = "[ALPHA] Gauge vector reporting the number of pod certificate projected volume sources, faceted by signer_name and state.";
            text.head(STATES, "gauge", help);
        }
        for ((signer, state), count) in counts {
            text.sample((STATES, ""), Labels::of(&[("signer_name", &signer), ("state", state)]), f64::from(count));
        }
    }

    fn states(&self) -> MutexGuard<'_, BTreeMap<CertificateKey, CertificateState>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
