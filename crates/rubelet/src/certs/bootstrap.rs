//! Gets a node's first certificate, and writes the kubeconfig that uses it.
//!
//! Owns: whether that is needed, and the order: key, request, certificate, kubeconfig, key removed. An interrupted bootstrap resumes
//! at the next start, with the same key and the same request.
//! Upstream: `pkg/kubelet/certificate/bootstrap`.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use rcgen::KeyPair;
use rubelet_host::port::{Host, ReadError};
use rubelet_kube::{
    client::{Client, RateLimit, RateLimits},
    error_chain,
    kubeconfig::{Kubeconfig, Source},
    port::ApiServer,
};
use rubelet_tls::MAX_PEM_BYTES;
use tokio::time::{sleep, timeout};

use super::{
    CertificateTemplate, Purpose,
    leaf::{self, Leaf},
    pending_key,
    signing::{self, Name, SigningError},
    store::{Store, make_missing_dir},
};
use crate::world::Clock;

/// How long an administrator may take to approve.
const PATIENCE: Duration = Duration::from_secs(3600);
const FIRST_PAUSE: Duration = Duration::from_secs(2);
const LAST_PAUSE: Duration = Duration::from_secs(30);

#[derive(Clone)]
pub(crate) struct Bootstrap {
    pub host: Arc<dyn Host>,
    pub clock: Clock,
    pub node_name: String,
    /// Written once the certificate is signed.
    pub kubeconfig: PathBuf,
    /// Its credentials allow only certificate requests.
    pub bootstrap_kubeconfig: PathBuf,
    pub cert_dir: PathBuf,
}

impl std::fmt::Debug for Bootstrap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bootstrap").field("kubeconfig", &self.kubeconfig).finish_non_exhaustive()
    }
}

impl Bootstrap {
    /// Whether the node needs a bootstrap; the bootstrap kubeconfig is checked now.
    pub(crate) async fn is_needed(&self) -> anyhow::Result<bool> {
        if self.is_done().await.is_ok() {
            return Ok(false);
        }
        client(&self.bootstrap_kubeconfig).map(|_| true)
    }

    /// Ensures that the kubeconfig exists and its certificate has not expired.
    pub(crate) async fn run(&self) -> anyhow::Result<()> {
        let kubeconfig = self.kubeconfig.display();
        let Err(reason) = self.is_done().await else {
            tracing::info!(%kubeconfig, "client certificate is valid, no bootstrap needed");
            return Ok(());
        };
        tracing::info!(%kubeconfig, reason, "bootstrapping with {}", self.bootstrap_kubeconfig.display());
        let bootstrap = Kubeconfig::read(&self.bootstrap_kubeconfig).context("--bootstrap-kubeconfig")?;
        let api = client(&self.bootstrap_kubeconfig)?;
        self.join(&api, &bootstrap).await?;
        tracing::info!(%kubeconfig, "bootstrap finished");
        Ok(())
    }

    /// The pending key goes last: until the kubeconfig is on disk, it finds the certificate again.
    pub(super) async fn join(&self, api: &dyn ApiServer, bootstrap: &Kubeconfig) -> anyhow::Result<()> {
        let store = self.get_certificate(api).await?;
        let own = bootstrap.with_client_certificate(&store.current_path());
        let written = self.write_kubeconfig(&own.to_yaml()).await;
        written.with_context(|| format!("write {}", self.kubeconfig.display()))?;
        self.forget_key().await
    }

    /// Or the reason why not.
    pub(super) async fn is_done(&self) -> Result<(), String> {
        match self.host.file_kind(&self.kubeconfig).await {
            Ok(None) => return Err("is not there yet".to_owned()),
            Ok(Some(_)) => {}
            Err(error) => return Err(error.to_string()),
        }
        let kubeconfig = Kubeconfig::read(&self.kubeconfig).map_err(|error| error_chain(&error))?;
        let Some(pair) = kubeconfig.user.certificate else { return Err("names no client certificate".to_owned()) };
        let [mut pem, key] = [self.read(pair.certificate).await?, self.read(pair.key).await?];
        let ends = leaf::first_end(&pem).map_err(|error| error_chain(&error))?;
        pem.push(b'\n');
        Leaf::of_pair(&[pem, key].concat()).map_err(|error| error_chain(&error))?;
        if ends <= self.clock.now().wall { Err(format!("its certificate ended at {ends}")) } else { Ok(()) }
    }

    async fn read(&self, source: Source) -> Result<Vec<u8>, String> {
        match source {
            Source::Data(pem) => Ok(pem),
            Source::File(path) => {
                let read = self.host.read_file(&path, MAX_PEM_BYTES).await;
                read.map_err(|error: ReadError| format!("{}: {error}", path.display()))
            }
        }
    }

    async fn get_certificate(&self, api: &dyn ApiServer) -> anyhow::Result<Store> {
        let Ok(answer) = timeout(PATIENCE, self.ask(api)).await else {
            anyhow::bail!("no certificate within {} minutes", PATIENCE.as_secs() / 60);
        };
        let (chain, key) = answer?;
        let store = Store::new(self.host.clone(), &self.cert_dir, Purpose::Client.prefix());
        store.update(&chain, &key.serialize_pem(), self.clock.now().wall).await?;
        Ok(store)
    }

    /// Retries until the server responds; an unreachable server is waited for.
    async fn ask(&self, api: &dyn ApiServer) -> anyhow::Result<(String, KeyPair)> {
        let template = CertificateTemplate::client(&self.node_name);
        let mut pause = FIRST_PAUSE;
        loop {
            let key = pending_key::load_or_make(self.host.as_ref(), &self.cert_dir)
                .await
                .with_context(|| format!("create a key in {}", self.cert_dir.display()))?;
            match signing::request_certificate(api, &template, &key, Name::Digested, PATIENCE).await {
                Ok(chain) if leaf::first_end(chain.as_bytes()).is_ok_and(|ends| ends <= self.clock.now().wall) => {
                    tracing::info!("certificate of the earlier CSR has expired, creating a new key");
                    self.forget_key().await?;
                }
                Ok(chain) => return Ok((chain, key)),
                Err(error) if error.is_passing() => {
                    tracing::warn!(
                        error = error_chain(&error),
                        "failed to request a certificate, will retry in {} s",
                        pause.as_secs()
                    );
                }
                Err(error @ SigningError::Refused { .. }) => {
                    return Err(error).context("bootstrap denied; to retry, delete the CSR and restart");
                }
                Err(error) => {
                    let asked_with = self.bootstrap_kubeconfig.display();
                    return Err(error).context(format!("request a client certificate with {asked_with}"));
                }
            }
            sleep(pause).await;
            pause = pause.saturating_mul(2).min(LAST_PAUSE);
        }
    }

    async fn forget_key(&self) -> anyhow::Result<()> {
        pending_key::forget(self.host.as_ref(), &self.cert_dir).await.context("remove the pending key")
    }

    async fn write_kubeconfig(&self, yaml: &str) -> std::io::Result<()> {
        if let Some(dir) = self.kubeconfig.parent() {
            make_missing_dir(self.host.as_ref(), dir).await?;
        }
        self.host.write_durably(&self.kubeconfig, yaml.as_bytes(), 0o600).await
    }
}

/// Requests are rare, so there is no rate limit.
pub(crate) fn client(bootstrap_kubeconfig: &Path) -> anyhow::Result<Client> {
    let kubeconfig = Kubeconfig::read(bootstrap_kubeconfig).context("--bootstrap-kubeconfig")?;
    let limits = RateLimits { ordinary: RateLimit::NONE, events: RateLimit::NONE };
    Client::new(&kubeconfig, limits).context("--bootstrap-kubeconfig")
}

#[cfg(test)]
pub(super) mod tests;
