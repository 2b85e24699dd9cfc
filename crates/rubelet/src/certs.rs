//! The node's certificates: requested, stored on disk, and renewed before they expire.
//!
//! Owns: which certificates there are, and which settings they follow. `store` has the files, `request` the CSR contents,
//! `signing` the signing, `rotation` the renewal.
//! Upstream: `buildKubeletClientConfig` and `InitializeTLS` of `cmd/kubelet/app`, `pkg/kubelet/certificate`.

pub(crate) mod bootstrap;
#[cfg(test)]
mod crash_tests;
pub(crate) mod leaf;
mod pending_bootstrap;
mod pending_key;
mod request;
mod rotation;
mod serving;
mod signing;
mod store;
#[cfg(test)]
mod test_authority;

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::Context as _;
use rubelet_core::config::gates::Gate;
use rubelet_host::port::Host;
use rubelet_kube::{
    client::{Client, RateLimit, RateLimits},
    error_chain,
    kubeconfig::{ClientCertificate, Kubeconfig, Source},
    port::ApiServer,
};
use rubelet_tls::MAX_PEM_BYTES;
use tokio::{sync::watch, task::JoinSet};

use self::{
    bootstrap::Bootstrap,
    pending_bootstrap::PendingBootstrap,
    request::{CertificateTemplate, Purpose},
    rotation::Rotation,
    store::Store,
};
use crate::{
    cli::Options,
    metrics::{Metrics, api::observer},
    world::{Clock, World},
};

pub(crate) use self::serving::Files as ServingFiles;
#[cfg(test)]
pub(crate) use self::serving::self_signed;

/// The client of the node's API server, if there is one.
#[derive(Debug)]
pub(crate) enum ClusterClient {
    /// Standalone: no `--kubeconfig`.
    None,
    Ready(Client),
    /// No valid certificate yet.
    Pending(Box<PendingBootstrap>),
}

impl ClusterClient {
    pub(crate) fn api(&self) -> Option<Arc<dyn ApiServer>> {
        match self {
            ClusterClient::None => None,
            ClusterClient::Ready(client) => Some(Arc::new(client.clone())),
            ClusterClient::Pending(pending) => Some(pending.api()),
        }
    }
}

/// The server need not be reachable yet; its address and our credentials must be valid. A node without a certificate bootstraps
/// in the background if `rotateCertificates` is on, and before everything else if it is off, as upstream: that can take as long
/// as an administrator needs to approve the request.
pub(crate) async fn cluster_client(
    options: &Options,
    node_name: &str,
    host: &Arc<dyn Host>,
    clock: &Clock,
    metrics: &Arc<Metrics>,
) -> anyhow::Result<ClusterClient> {
    if options.flags.kubeconfig.is_empty() {
        return Ok(ClusterClient::None);
    }
    if let Some(bootstrap_kubeconfig) = bootstrap_kubeconfig(options)? {
        let bootstrap = Bootstrap {
            host: host.clone(),
            clock: clock.clone(),
            node_name: node_name.to_owned(),
            kubeconfig: kubeconfig_path(options)?,
            bootstrap_kubeconfig,
            cert_dir: cert_dir(options)?,
        };
        if options.config.rotate_certificates && bootstrap.is_needed().await? {
            let (options, host, clock, metrics) = (options.clone(), host.clone(), clock.clone(), metrics.clone());
            let joined = watch::Sender::new(None);
            let pending = PendingBootstrap { options, bootstrap, host, clock, metrics, joined };
            return Ok(ClusterClient::Pending(Box::new(pending)));
        }
        bootstrap.run().await?;
    }
    client(options, &own_kubeconfig(options, host, clock).await?, metrics).map(ClusterClient::Ready)
}

/// The client of a node that has its certificate.
async fn own_kubeconfig(options: &Options, host: &Arc<dyn Host>, clock: &Clock) -> anyhow::Result<Kubeconfig> {
    let kubeconfig = Kubeconfig::read(&kubeconfig_path(options)?).context("--kubeconfig")?;
    if options.config.rotate_certificates { from_store(kubeconfig, options, host, clock).await } else { Ok(kubeconfig) }
}

fn client(options: &Options, kubeconfig: &Kubeconfig, metrics: &Arc<Metrics>) -> anyhow::Result<Client> {
    let config = &options.config;
    let limits = RateLimits {
        ordinary: RateLimit { qps: config.kube_api_qps, burst: config.kube_api_burst },
        events: RateLimit { qps: config.event_record_qps, burst: config.event_burst },
    };
    Client::observed(kubeconfig, limits, Some(observer(metrics))).context("--kubeconfig")
}

/// Starts the tasks that request and renew certificates, and writes the files the node's server needs.
pub(crate) async fn start(
    options: &Options,
    world: &World,
    client: ClusterClient,
    tasks: &mut JoinSet<()>,
) -> anyhow::Result<()> {
    let config = &options.config;
    let World { host, clock, metrics, .. } = world;
    let api = client.api();
    match client {
        ClusterClient::Ready(client) if config.rotate_certificates => {
            let template = CertificateTemplate::client(&world.settings.node_name);
            let place = Place { host, clock, metrics };
            let rotation = rotation(options, place, Arc::new(client.clone()), template)?;
            tasks.spawn(rotation.renewing_for(client).run());
        }
        ClusterClient::Pending(pending) => {
            tasks.spawn(pending.run());
        }
        ClusterClient::None | ClusterClient::Ready(_) => {}
    }
    if is_serving_requested(options) {
        match api {
            Some(api) => {
                let place = Place { host, clock, metrics };
                tasks.spawn(rotation(options, place, api, serving_template(world))?.run());
            }
            None => tracing::warn!("serverTLSBootstrap requires --kubeconfig, ignored"),
        }
    } else if !config.tls_cert_file.is_empty() {
        serving_files(options)?.check(world.host.as_ref()).await.context("tlsCertFile and tlsPrivateKeyFile")?;
    } else {
        let (dir, ips) = (cert_dir(options)?, node_ips(world));
        let now = world.clock.now().wall;
        let made = serving::self_signed(world.host.as_ref(), &dir, &world.settings.node_name, &ips, now);
        made.await.context("--cert-dir")?;
    }
    Ok(())
}

/// The path of the serving certificate, which may not be signed yet.
pub(crate) fn serving_files(options: &Options) -> anyhow::Result<ServingFiles> {
    let config = &options.config;
    if is_serving_requested(options) {
        let path = store::current_path(&cert_dir(options)?, Purpose::Serving.prefix());
        Ok(ServingFiles { certificate: path.clone(), key: path })
    } else if config.tls_cert_file.is_empty() {
        Ok(ServingFiles::of_our_own(&cert_dir(options)?))
    } else {
        Ok(ServingFiles {
            certificate: config.tls_cert_file.clone().into(),
            key: config.tls_private_key_file.clone().into(),
        })
    }
}

fn is_serving_requested(options: &Options) -> bool {
    options.config.server_tls_bootstrap && options.gates.enabled(Gate::RotateKubeletServerCertificate)
}

/// The renewed pair is the one in the store. A kubeconfig that names another pair provides the first one.
async fn from_store(
    kubeconfig: Kubeconfig,
    options: &Options,
    host: &Arc<dyn Host>,
    clock: &Clock,
) -> anyhow::Result<Kubeconfig> {
    let Some(pair) = &kubeconfig.user.certificate else {
        tracing::warn!("rotateCertificates ignored: the kubeconfig has no client certificate");
        return Ok(kubeconfig);
    };
    let store = Store::new(host.clone(), &cert_dir(options)?, Purpose::Client.prefix());
    let now = clock.now().wall;
    // An unusable pair is replaced like a missing one.
    let current = store.current().await.unwrap_or_else(|error| {
        tracing::warn!("client certificate not usable: {}", error_chain(&error));
        None
    });
    let is_good = current.is_some_and(|leaf| now < leaf.not_after);
    if !is_good && !is_in(&store.current_path(), pair) {
        let [certificate, key] = [read(&pair.certificate, host).await?, read(&pair.key, host).await?];
        store.update(&certificate, &key, now).await.context("take over the kubeconfig's certificate")?;
    }
    Ok(kubeconfig.with_client_certificate(&store.current_path()))
}

fn is_in(path: &Path, pair: &ClientCertificate) -> bool {
    pair.certificate == Source::File(path.to_owned())
}

async fn read(source: &Source, host: &Arc<dyn Host>) -> anyhow::Result<String> {
    let pem = match source {
        Source::Data(pem) => pem.clone(),
        Source::File(path) => {
            let read = host.read_file(path, MAX_PEM_BYTES).await;
            read.with_context(|| path.display().to_string())?
        }
    };
    String::from_utf8(pem).context("the kubeconfig's certificate or key is not PEM")
}

/// The dependencies of a renewal.
#[derive(Clone, Copy)]
struct Place<'a> {
    host: &'a Arc<dyn Host>,
    clock: &'a Clock,
    metrics: &'a Arc<Metrics>,
}

fn rotation(
    options: &Options,
    place: Place<'_>,
    api: Arc<dyn ApiServer>,
    template: CertificateTemplate,
) -> anyhow::Result<Rotation> {
    let is_clients = template.purpose == Purpose::Client;
    Ok(Rotation {
        api,
        store: Store::new(place.host.clone(), &cert_dir(options)?, template.purpose.prefix()),
        clock: place.clock.clone(),
        metrics: place.metrics.clone(),
        user: None,
        bootstrap_kubeconfig: if is_clients { bootstrap_kubeconfig(options)? } else { None },
        template,
    })
}

/// The names and addresses under which the node is registered.
fn serving_template(world: &World) -> CertificateTemplate {
    CertificateTemplate {
        purpose: Purpose::Serving,
        dns_names: vec![world.settings.node_name.clone()],
        ips: node_ips(world),
        ..CertificateTemplate::client(&world.settings.node_name)
    }
}

fn node_ips(world: &World) -> Vec<IpAddr> {
    world.settings.host_ips.iter().filter_map(|ip| ip.parse().ok()).collect()
}

fn kubeconfig_path(options: &Options) -> anyhow::Result<PathBuf> {
    std::path::absolute(&options.flags.kubeconfig).context("--kubeconfig")
}

fn bootstrap_kubeconfig(options: &Options) -> anyhow::Result<Option<PathBuf>> {
    match options.flags.bootstrap_kubeconfig.as_str() {
        "" => Ok(None),
        path => std::path::absolute(path).map(Some).context("--bootstrap-kubeconfig"),
    }
}

fn cert_dir(options: &Options) -> anyhow::Result<PathBuf> {
    std::path::absolute(&options.flags.cert_dir).context("--cert-dir")
}
