//! The node's certificates: asked for, kept on disk, and renewed before they end.
//!
//! Owns: which certificates there are, and which settings they follow. Where they lie is `store`, what is asked for `request`,
//! how it is signed `signing`, when it is renewed `rotation`.
//! Upstream: `buildKubeletClientConfig` and `InitializeTLS` of `cmd/kubelet/app`, `pkg/kubelet/certificate`.

pub mod bootstrap;
mod leaf;
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
    client::Client,
    kubeconfig::{ClientCertificate, Kubeconfig, Source},
};
use tokio::task::JoinSet;

use self::{
    bootstrap::Bootstrap,
    request::{Purpose, Wanted},
    rotation::Rotation,
    serving::Files,
    store::Store,
};
use crate::{
    cli::Options,
    world::{Clock, World},
};

const PEM_MAX_BYTES: u64 = 1 << 20;

/// The kubeconfig to reach the API server with. A node that has no good one yet joins first, which may take as long as a
/// person needs to approve it.
pub async fn kubeconfig(
    options: &Options,
    node_name: &str,
    host: &Arc<dyn Host>,
    clock: &Clock,
) -> anyhow::Result<Kubeconfig> {
    let flags = &options.flags;
    let path = std::path::absolute(&flags.kubeconfig).context("--kubeconfig")?;
    if let Some(bootstrap_kubeconfig) = bootstrap_kubeconfig(options)? {
        let bootstrap = Bootstrap {
            host: host.clone(),
            clock: clock.clone(),
            node_name: node_name.to_owned(),
            kubeconfig: path.clone(),
            bootstrap_kubeconfig,
            cert_dir: cert_dir(options)?,
        };
        bootstrap.run().await?;
    }
    let kubeconfig = Kubeconfig::read(&path).context("--kubeconfig")?;
    if options.config.rotate_certificates { from_store(kubeconfig, options, host, clock).await } else { Ok(kubeconfig) }
}

/// Starts what renews certificates, and leaves the files a server of ours needs.
pub async fn start(
    options: &Options,
    world: &World,
    client: Option<&Client>,
    tasks: &mut JoinSet<()>,
) -> anyhow::Result<()> {
    let config = &options.config;
    if let Some(client) = client
        && config.rotate_certificates
    {
        let wanted = Wanted::client(&world.settings.node_name);
        tasks.spawn(rotation(options, world, client, wanted)?.run());
    }
    let is_requested = config.server_tls_bootstrap && options.gates.enabled(Gate::RotateKubeletServerCertificate);
    let told =
        Files { certificate: config.tls_cert_file.clone().into(), key: config.tls_private_key_file.clone().into() };
    if is_requested {
        match client {
            Some(client) => {
                tasks.spawn(rotation(options, world, client, serving_wanted(world))?.run());
            }
            None => tracing::warn!("serverTLSBootstrap needs an API server to ask, and there is no --kubeconfig"),
        }
    } else if !config.tls_cert_file.is_empty() {
        told.check(world.host.as_ref()).await.context("tlsCertFile and tlsPrivateKeyFile")?;
    } else {
        let (dir, ips) = (cert_dir(options)?, node_ips(world));
        let now = world.clock.now().wall;
        let made = serving::self_signed(world.host.as_ref(), &dir, &world.settings.node_name, &ips, now);
        made.await.context("--cert-dir")?;
    }
    Ok(())
}

/// The pair that is renewed is the one in the store. A kubeconfig that brings another is where the first one comes from.
async fn from_store(
    kubeconfig: Kubeconfig,
    options: &Options,
    host: &Arc<dyn Host>,
    clock: &Clock,
) -> anyhow::Result<Kubeconfig> {
    let Some(pair) = &kubeconfig.user.certificate else {
        tracing::warn!("rotateCertificates has nothing to renew: the kubeconfig names no client certificate");
        return Ok(kubeconfig);
    };
    let store = Store::new(host.clone(), &cert_dir(options)?, Purpose::Client.prefix());
    let now = clock.now().wall;
    let is_good = store.current().await?.is_some_and(|leaf| now < leaf.not_after);
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
            let read = host.read_file(path, PEM_MAX_BYTES).await;
            read.with_context(|| path.display().to_string())?
        }
    };
    String::from_utf8(pem).context("the kubeconfig's certificate or key is not PEM")
}

fn rotation(options: &Options, world: &World, client: &Client, wanted: Wanted) -> anyhow::Result<Rotation> {
    let is_clients = wanted.purpose == Purpose::Client;
    Ok(Rotation {
        api: Arc::new(client.clone()),
        store: Store::new(world.host.clone(), &cert_dir(options)?, wanted.purpose.prefix()),
        clock: world.clock.clone(),
        user: is_clients.then(|| client.clone()),
        bootstrap_kubeconfig: if is_clients { bootstrap_kubeconfig(options)? } else { None },
        wanted,
    })
}

/// The names and addresses under which the node is registered.
fn serving_wanted(world: &World) -> Wanted {
    Wanted {
        purpose: Purpose::Serving,
        dns_names: vec![world.settings.node_name.clone()],
        ips: node_ips(world),
        ..Wanted::client(&world.settings.node_name)
    }
}

fn node_ips(world: &World) -> Vec<IpAddr> {
    world.settings.host_ips.iter().filter_map(|ip| ip.parse().ok()).collect()
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
