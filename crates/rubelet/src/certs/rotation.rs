//! Renews a certificate before it expires, for as long as the agent runs.
//!
//! Owns: when to renew, what to do when that fails, and notifying the client of a new pair.
//! Upstream: the loop of `client-go/util/certificate/certificate_manager.go`.

use std::{path::PathBuf, sync::Arc, time::Duration};

use anyhow::Context as _;
use jiff::{SignedDuration, Timestamp};
use rcgen::KeyPair;
use rubelet_core::time::moved;
use rubelet_kube::{client::Client, error_chain, port::ApiServer};
use sha2::{Digest as _, Sha256};
use tokio::time::sleep;

use super::{
    CertificateTemplate, Purpose, bootstrap,
    leaf::Leaf,
    signing::{self, Name},
    store::Store,
};
use crate::{
    metrics::{Metrics, certificates::Certificate},
    world::Clock,
};

/// A request without a response is made anew after this long.
const PATIENCE: Duration = Duration::from_secs(15 * 60);
const FIRST_PAUSE: Duration = Duration::from_secs(2);
const LAST_PAUSE: Duration = Duration::from_secs(32);
/// The wall clock may be set, or the machine suspended, during a wait for a wall-clock time.
const LONGEST_NAP: Duration = Duration::from_secs(60);
/// A signer whose certificates are due at once must not be called in a loop.
const BETWEEN_ROTATIONS: Duration = Duration::from_secs(1);

pub(super) struct Rotation {
    pub api: Arc<dyn ApiServer>,
    pub store: Store,
    pub template: CertificateTemplate,
    pub clock: Clock,
    pub metrics: Arc<Metrics>,
    /// The client that uses the certificate and reloads a new one.
    pub user: Option<Client>,
    /// The client for when the certificate has expired and the API server rejects it.
    pub bootstrap_kubeconfig: Option<PathBuf>,
}

impl std::fmt::Debug for Rotation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rotation").field("store", &self.store).field("template", &self.template).finish_non_exhaustive()
    }
}

impl Rotation {
    /// The client reloads its own certificate after each renewal.
    #[must_use]
    pub(super) fn renewing_for(self, client: Client) -> Self {
        Rotation { user: Some(client), ..self }
    }

    /// Runs until the task is aborted.
    pub(super) async fn run(self) {
        let mut failures = 0;
        loop {
            let current = self.current().await;
            self.counted().in_use(current.as_ref().map(|leaf| leaf.not_after));
            if failures == 0
                && let Some(leaf) = &current
            {
                let due = due_at(leaf, self.jitter(leaf));
                tracing::info!(signer = self.signer(), ends = %leaf.not_after, renewal = %due, "certificate in use");
                self.sleep_until(due).await;
            }
            match self.rotate(current.as_ref()).await {
                Ok(leaf) => {
                    failures = 0;
                    if let Some(previous) = &current {
                        self.counted().replaced(previous.not_before, self.clock.now().wall);
                    }
                    tracing::info!(signer = self.signer(), ends = %leaf.not_after, "certificate rotated");
                    sleep(BETWEEN_ROTATIONS).await;
                }
                Err(error) => {
                    failures += 1;
                    self.counted().not_renewed();
                    self.tell_failure(current.as_ref(), &error);
                    sleep(pause_after(failures)).await;
                }
            }
        }
    }

    /// The pair in use, if it matches the template.
    async fn current(&self) -> Option<Leaf> {
        match self.store.current().await {
            Ok(Some(leaf)) if self.template.is_met_by(&leaf) => Some(leaf),
            Ok(Some(_)) => {
                tracing::info!(signer = self.signer(), "certificate has other addresses than the node");
                None
            }
            Ok(None) => None,
            Err(error) => {
                tracing::warn!(
                    signer = self.signer(),
                    error = error_chain(&error),
                    "failed to read the current certificate"
                );
                None
            }
        }
    }

    async fn rotate(&self, current: Option<&Leaf>) -> anyhow::Result<Leaf> {
        let key = KeyPair::generate().context("create a key")?;
        let api = self.api(current)?;
        let chain = signing::request_certificate(api.as_ref(), &self.template, &key, Name::Generated, PATIENCE).await?;
        let leaf = self.store.update(&chain, &key.serialize_pem(), self.clock.now().wall).await?;
        if let Some(user) = &self.user {
            user.credentials_changed().await;
        }
        Ok(leaf)
    }

    /// The client that uses the certificate, unless it has expired.
    fn api(&self, current: Option<&Leaf>) -> anyhow::Result<Arc<dyn ApiServer>> {
        let has_ended = current.is_none_or(|leaf| leaf.not_after <= self.clock.now().wall);
        match &self.bootstrap_kubeconfig {
            Some(kubeconfig) if has_ended => Ok(Arc::new(bootstrap::client(kubeconfig)?)),
            _ => Ok(self.api.clone()),
        }
    }

    fn tell_failure(&self, current: Option<&Leaf>, error: &anyhow::Error) {
        let signer = self.signer();
        match current {
            Some(leaf) if leaf.not_after <= self.clock.now().wall => {
                tracing::error!(signer, ended = %leaf.not_after, "certificate expired, rotation failed: {}", error_chain(error.as_ref()));
            }
            Some(leaf) => {
                tracing::warn!(signer, ends = %leaf.not_after, "certificate rotation failed, will retry: {}", error_chain(error.as_ref()));
            }
            None => tracing::warn!(signer, "failed to get a certificate, will retry: {}", error_chain(error.as_ref())),
        }
    }

    async fn sleep_until(&self, due: Timestamp) {
        loop {
            let left = due.duration_since(self.clock.now().wall);
            let Ok(left) = Duration::try_from(left) else { return };
            if left.is_zero() {
                return;
            }
            sleep(left.min(LONGEST_NAP)).await;
        }
    }

    /// Differs between nodes and certificates, and is the same after a restart.
    fn jitter(&self, leaf: &Leaf) -> f64 {
        let seed = format!("{} {} {}", self.template.node_name, self.signer(), leaf.not_after);
        let [a, b, ..] = Sha256::digest(seed).0;
        f64::from(u16::from_be_bytes([a, b])) / f64::from(u16::MAX)
    }

    fn counted(&self) -> &Certificate {
        match self.template.purpose {
            Purpose::Client => &self.metrics.certificates.client,
            Purpose::Serving => &self.metrics.certificates.serving,
        }
    }

    fn signer(&self) -> &'static str {
        self.template.purpose.signer()
    }
}

/// At 70 to 90 per cent of the validity, chosen by `jitter` (0 to 1), so that nodes that joined together do not renew
/// together.
fn due_at(leaf: &Leaf, jitter: f64) -> Timestamp {
    let life = leaf.not_after.duration_since(leaf.not_before);
    let part = life.as_secs_f64() * (0.7 + 0.2 * jitter);
    SignedDuration::try_from_secs_f64(part).map_or(leaf.not_after, |part| moved(leaf.not_before, part))
}

fn pause_after(failures: u32) -> Duration {
    let doublings = failures.saturating_sub(1).min(4);
    FIRST_PAUSE.saturating_mul(1 << doublings).min(LAST_PAUSE)
}

#[cfg(test)]
mod tests;
