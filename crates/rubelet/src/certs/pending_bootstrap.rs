//! A node that waits for its first certificate and runs static pods meanwhile.
//!
//! Owns: the bootstrap in the background, and the API port until then: every request waits for it, or for its own
//! deadline. Upstream: `buildKubeletClientConfig` with `rotateCertificates`.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use rubelet_host::port::Host;
use rubelet_kube::{
    client::Client,
    error_chain,
    port::{ApiError, ApiErrorKind, ApiServer, Call, Watch, WatchStream},
};
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};

use super::{CertificateTemplate, Place, bootstrap::Bootstrap, client, own_kubeconfig, rotation};
use crate::{cli::Options, metrics::Metrics, world::Clock};

/// As long as a watch may take to open.
const WATCH_PATIENCE: Duration = Duration::from_secs(30);
/// A new API server refuses tokens it has not loaded yet; a wrong token is retried for minutes, until an administrator replaces it.
const PAUSE_AFTER_REFUSAL: Duration = Duration::from_secs(4);
const PAUSE_MAX: Duration = Duration::from_secs(60);

pub(crate) struct PendingBootstrap {
    pub options: Options,
    pub bootstrap: Bootstrap,
    pub host: Arc<dyn Host>,
    pub clock: Clock,
    pub metrics: Arc<Metrics>,
    pub joined: watch::Sender<Option<Client>>,
}

impl std::fmt::Debug for PendingBootstrap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PendingBootstrap").field("bootstrap", &self.bootstrap).finish_non_exhaustive()
    }
}

impl PendingBootstrap {
    pub(crate) fn api(&self) -> Arc<dyn ApiServer> {
        Arc::new(DeferredApi { joined: self.joined.subscribe() })
    }

    /// Bootstraps, then renews the certificate for as long as the agent runs.
    pub(crate) async fn run(self) {
        for refusals in 0.. {
            match self.join().await {
                Ok(client) => {
                    self.joined.send_replace(Some(client.clone()));
                    let template = CertificateTemplate::client(&self.bootstrap.node_name);
                    let place = Place { host: &self.host, clock: &self.clock, metrics: &self.metrics };
                    match rotation(&self.options, place, Arc::new(client.clone()), template) {
                        Ok(rotation) => return rotation.renewing_for(client).run().await,
                        Err(error) => {
                            return tracing::error!(
                                "certificate rotation is disabled: {}",
                                error_chain(error.as_ref())
                            );
                        }
                    }
                }
                Err(error) => {
                    let pause = pause_after(refusals);
                    tracing::error!("bootstrap failed, will retry in {pause:?}: {}", error_chain(error.as_ref()));
                    sleep(pause).await;
                }
            }
        }
    }

    async fn join(&self) -> anyhow::Result<Client> {
        self.bootstrap.run().await?;
        let kubeconfig = own_kubeconfig(&self.options, &self.host, &self.clock).await?;
        client(&self.options, &kubeconfig, &self.metrics)
    }
}

fn pause_after(refusals: u32) -> Duration {
    PAUSE_AFTER_REFUSAL.saturating_mul(2_u32.saturating_pow(refusals)).min(PAUSE_MAX)
}

/// The API port of a node whose bootstrap is pending.
struct DeferredApi {
    joined: watch::Receiver<Option<Client>>,
}

impl DeferredApi {
    async fn client(&self, patience: Duration) -> Result<Client, ApiError> {
        let mut joined = self.joined.clone();
        let client = timeout(patience, joined.wait_for(Option::is_some)).await;
        client
            .ok()
            .and_then(Result::ok)
            .and_then(|client| client.clone())
            .ok_or_else(|| ApiError::new(ApiErrorKind::Unreachable, "the node has not joined its cluster yet"))
    }
}

#[async_trait]
impl ApiServer for DeferredApi {
    async fn call(&self, call: Call) -> Result<Bytes, ApiError> {
        self.client(call.timeout).await?.call(call).await
    }

    async fn watch(&self, watch: Watch) -> Result<WatchStream, ApiError> {
        self.client(WATCH_PATIENCE).await?.watch(watch).await
    }
}

#[cfg(test)]
mod tests {
    use rubelet_kube::port::{Lane, ObjectPath, Verb};
    use tokio::time::Instant;

    use super::*;

    #[test]
    fn rejected_bootstrap_is_retried_with_backoff() {
        assert_eq!([0, 1, 3, 4, u32::MAX].map(|refusals| pause_after(refusals).as_secs()), [4, 8, 32, 60, 60]);
    }

    #[tokio::test(start_paused = true)]
    async fn api_requests_before_bootstrap_wait_until_their_deadline() {
        let (_joined, receiver) = watch::channel(None);
        let api = DeferredApi { joined: receiver };
        let path = ObjectPath::all("v1", "nodes");
        let timeout = Duration::from_secs(10);
        let call = Call { lane: Lane::Heartbeat, verb: Verb::Get, path, query: Vec::new(), body: None, timeout };
        let started = Instant::now();
        let error = api.call(call).await.unwrap_err();
        assert_eq!((error.kind, started.elapsed()), (ApiErrorKind::Unreachable, timeout));
    }
}
