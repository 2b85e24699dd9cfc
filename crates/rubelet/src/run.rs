//! The real agent from its options to its exit: its ports, its sockets, and the signal that stops it.
//!
//! Owns: the servers and the certificate tasks; `start.rs` starts the agent itself. Nothing outside the process changes
//! before the options are validated.
//! Upstream: `run` and `RunKubelet` of `cmd/kubelet/app/server.go`.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    path::Path,
    sync::Arc,
};

use anyhow::{Context as _, bail};
use rubelet_core::{
    config::{self, gates::Gate},
    node_allocatable,
    node_object::NodeObject,
    node_status::{Machine, resources},
    settings::{NodeProfile, Settings},
};
use rubelet_cri::client::CriClient;
use rubelet_csi::{CsiClient, Drivers};
use rubelet_host::{
    lanes::Lanes,
    linux::LinuxHost,
    mount::supports_noswap,
    port::Host,
    watch::{Interest, Watches},
};
use rubelet_kube::port::ApiServer;
use tokio::{
    net::{TcpListener, TcpSocket},
    runtime::Handle,
    signal::unix::{SignalKind, signal},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use crate::{
    certs,
    cli::{self, Options},
    data_dirs,
    metrics::{Metrics, csi::InstrumentedPlugins, runtime::InstrumentedRuntime},
    node::{
        self,
        addresses::{Ask, host_ips},
        lease_thread::LeaseThread,
    },
    notify::Notifier,
    objects::Strategy,
    observe, process,
    server::{
        Addresses, Server, ServerContext, admin,
        secured::{self, Secured},
    },
    shutdown,
    sources::http::Endpoint,
    start::{Inputs, ManifestDir, ManifestUrl, start},
    stats::{
        disk::{DiskCounter, DiskSources},
        persistent_meter::{self, Schedule},
        sample::{NamedCgroups, Sources, Stats},
        sandbox_images::SandboxImages,
    },
    sync_loop::Handles,
    world::{Clock, Cluster, World},
};

/// Connections that wait to be accepted. If a burst of strangers overflows the queue, the kernel drops the first packet of the
/// API server's connection too, and it is sent again only after a second. Linux cuts this at `net.core.somaxconn`, 4096.
const PORT_BACKLOG: u32 = 4096;

/// Runs until SIGTERM or SIGINT. Pods keep running afterwards.
pub async fn run(options: &Options) -> anyhow::Result<()> {
    // Without any source, every pod in the runtime would be an orphan.
    if options.sources().is_empty() {
        bail!("no source of pods: set --kubeconfig, staticPodPath or staticPodURL");
    }
    for warning in &options.warnings {
        tracing::warn!("{warning}");
    }
    let has_cgroup_v2 = cli::this_host() == config::Host::CgroupV2;
    node::kernel::prepare(&options.config, Path::new("/proc"), has_cgroup_v2)?;
    process::apply_limits(options.config.max_open_files, options.config.oom_score_adj);
    let clock = Clock::system();
    let (lanes, own_files) = (Lanes::for_pods(), Arc::new(LinuxHost::default()) as Arc<dyn Host>);
    let host = Arc::new(LinuxHost::new(lanes.clone()));
    let metrics = Arc::new(Metrics::new(options.gates.clone()));
    let cluster_client = certs::cluster_client(options, &node_name(options)?, &own_files, &clock, &metrics).await?;
    let (world, reporting) = world(options, cluster_client.api(), host, clock, metrics).await?;
    let mut start_events = node::reserved::enforce(&world, &options.config).await?;
    let supports_noswap = || supports_noswap(&world.paths.root_dir);
    start_events.extend(node::kernel::swapped_volumes(Path::new("/proc"), supports_noswap));
    let server = Server::bind(&addresses(options, &world)?).await?;
    let port = bind_port(options).await?;
    let lease_thread = LeaseThread::start()?;
    let running = start(&world, inputs(options, reporting.clone(), (own_files.clone(), lease_thread.handle.clone()))?);
    for event in start_events {
        world.events.record(event, world.clock.now().wall);
    }
    let stop = CancellationToken::new();
    let mut servers = JoinSet::new();
    let secured = Secured::new(
        options,
        &world,
        server_context(options, &world, &running.handles, (&reporting.machine, lanes)),
        certs::serving_files(options)?,
    );
    servers.spawn(server.serve(secured.context.clone(), stop.clone()));
    servers.spawn(secured::serve(port, secured, stop.clone()));
    let mut tasks = JoinSet::new();
    tasks.spawn(observe::oom::watch(world.clone()));
    let Handles { snapshots, inbox, .. } = &running.handles;
    tasks.spawn(observe::memory::watch(world.clone(), snapshots.clone(), inbox.clone()));
    if let Some(schedule) = volume_schedule(options) {
        tasks.spawn(persistent_meter::run(world.clone(), snapshots.clone(), schedule));
    }
    // Certificates are the agent's own files: no device of a pod delays them.
    let with_own_files = World { host: own_files, ..world.clone() };
    if !world.settings.shutdown_groups.is_empty() {
        let Handles { inbox, snapshots, .. } = &running.handles;
        let places = shutdown::Places::of_machine();
        tasks.spawn(shutdown::run(with_own_files.clone(), places, inbox.clone(), snapshots.clone()));
    }
    certs::start(options, &with_own_files, cluster_client, &mut tasks).await?;
    let settings = &world.settings;
    tracing::info!(node = settings.node_name, root_dir = %settings.root_dir.display(), "rubelet is running");

    let notifier = Notifier::from_environment();
    if let Some(notifier) = &notifier {
        notifier.ready();
    }
    stopped(notifier.as_ref(), &running.handles, &world.clock).await?;
    if let Some(notifier) = &notifier {
        notifier.stopping();
    }
    tracing::info!("stopping; pods keep running");
    tasks.shutdown().await;
    running.stop().await;
    stop.cancel();
    while servers.join_next().await.is_some() {}
    Ok(())
}

fn node_name(options: &Options) -> anyhow::Result<String> {
    let host_name = cli::host_name().map_err(anyhow::Error::msg)?;
    options.node_name(&host_name).map_err(anyhow::Error::msg)
}

async fn world(
    options: &Options,
    api: Option<Arc<dyn ApiServer>>,
    host: Arc<dyn Host>,
    clock: Clock,
    metrics: Arc<Metrics>,
) -> anyhow::Result<(World, Arc<node::NodeReporting>)> {
    let node_name = node_name(options)?;
    let root_dir = data_dirs::make_root(&options.flags.root_dir).context("--root-dir")?;
    let pod_logs_dir =
        data_dirs::made_and_resolved(Path::new(&options.config.pod_logs_dir), 0o750).context("podLogsDir")?;
    let ask = if options.flags.kubeconfig.is_empty() { Ask::Routes } else { Ask::ResolverAndRoutes };
    let host_ips = host_ips(&options.flags.node_ip, &node_name, ask).await?;
    let setup = node::setup::setup(options, &node_name, &host_ips);
    let machine = observe::node::machine(&*host, &root_dir).await;
    node_allocatable::check(&resources::capacity(&machine, &setup), &setup.reservations).map_err(anyhow::Error::msg)?;
    let told = options.settings(&node_name, host_ips);
    let node = NodeProfile {
        allocatable: node::setup::allocatable(&machine, &setup),
        unreserved_memory_bytes: node::setup::unreserved_memory_bytes(&machine, &setup),
        page_bytes: rustix::param::page_size(),
        ..observe::node::profile(&*host, told.node.clone(), &machine).await
    };
    let mut settings = Settings { root_dir, pod_logs_dir, node, ..told };
    settings.own_node = NodeObject::initial(&setup, node::setup::allocatable_list(&machine, &setup));
    if let Some(cgroups) = &mut settings.cgroups {
        cgroups.kubepods_limits = node::setup::kubepods_limits(options, &machine, &setup);
    }
    let config = &options.config;
    let runtime = CriClient::new(
        &config.container_runtime_endpoint,
        &config.image_service_endpoint,
        config.runtime_request_timeout.as_std(),
    )
    .context("containerRuntimeEndpoint")?;
    let strategy = Strategy::of(&config.config_map_and_secret_change_detection_strategy);
    let runtime = Arc::new(InstrumentedRuntime::new(Arc::new(runtime), metrics.clone(), clock.clone()));
    let cluster = api.map(|api| Cluster::new(api, strategy, &node_name, &clock));
    let plugins = InstrumentedPlugins::new(Arc::new(CsiClient::default()), metrics.clone(), clock.clone());
    let csi = Drivers::over(Arc::new(plugins));
    let world = World { cluster, metrics, csi, ..World::new(runtime, host, clock, settings) };
    Ok((world, node::setup::reporting(options, setup, machine)))
}

async fn bind_port(options: &Options) -> anyhow::Result<TcpListener> {
    let config = &options.config;
    let address = listen_on("address", &config.address, config.port)?.context("port: 0 is no port")?;
    listen(address).with_context(|| format!("listen on the kubelet's port {address}"))
}

/// As `TcpListener::bind`, with a longer queue.
fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(PORT_BACKLOG)
}

fn addresses(options: &Options, world: &World) -> anyhow::Result<Addresses> {
    let config = &options.config;
    Ok(Addresses {
        socket: admin::socket_path(&world.paths.root_dir),
        health: listen_on("healthzBindAddress", &config.healthz_bind_address, config.healthz_port)?,
        read_only: listen_on("address", &config.address, config.read_only_port)?,
    })
}

fn listen_on(field: &str, address: &str, port: i32) -> anyhow::Result<Option<SocketAddr>> {
    if port == 0 {
        return Ok(None);
    }
    let ip: IpAddr = address.parse().with_context(|| format!("{field}: {address:?} is not an IP address"))?;
    Ok(Some(SocketAddr::new(ip, u16::try_from(port).context("a checked port")?)))
}

fn server_context(
    options: &Options,
    world: &World,
    handles: &Handles,
    (machine, lanes): (&Machine, Lanes),
) -> ServerContext {
    let period = options.config.volume_stats_agg_period.as_std();
    let disk = DiskCounter::new(DiskSources {
        runtime: world.runtime.clone(),
        host: world.host.clone(),
        volumes: world.volumes.clone(),
        paths: world.paths.clone(),
        clock: world.clock.clone(),
        persistent: world.persistent.clone(),
        volumes_count_for: (!period.is_zero()).then_some(period),
    });
    ServerContext {
        snapshots: handles.snapshots.clone(),
        events: world.events.clone(),
        metrics: world.metrics.clone(),
        paths: world.paths.clone(),
        clock: world.clock.clone(),
        health: handles.health.clone(),
        stats: Stats::new(Sources {
            snapshots: handles.snapshots.clone(),
            settings: world.settings.clone(),
            clock: world.clock.clone(),
            named_cgroups: Arc::new(NamedCgroups {
                runtime: options.flags.runtime_cgroups.clone(),
                system: options.config.system_cgroups.clone(),
            }),
            identity: Arc::new(machine.clone()),
            disk: Arc::new(disk),
            sandbox_images: Arc::new(SandboxImages::new(world.runtime.clone())),
            root_dir: world.paths.root_dir.clone(),
        }),
        log_watches: Watches::new(Interest::Writes, lanes),
    }
}

fn inputs(
    options: &Options,
    reporting: Arc<node::NodeReporting>,
    (own_files, lease_thread): (Arc<dyn Host>, Handle),
) -> anyhow::Result<Inputs> {
    let config = &options.config;
    let manifest_dir = if config.static_pod_path.is_empty() {
        None
    } else {
        let path = std::path::absolute(&config.static_pod_path).context("staticPodPath")?;
        Some(ManifestDir { path, check_every: config.file_check_frequency.as_std() })
    };
    let headers = config.static_pod_url_header.iter();
    let manifest_url = (!config.static_pod_url.is_empty()).then(|| ManifestUrl {
        endpoint: Endpoint {
            url: config.static_pod_url.clone(),
            headers: headers
                .flat_map(|(name, values)| values.iter().map(|value| (name.clone(), value.clone())))
                .collect(),
        },
        check_every: config.http_check_frequency.as_std(),
    });
    Ok(Inputs { manifest_dir, own_files, manifest_url, reporting, lease_thread, observer: None })
}

/// `None`: volumes are not measured.
fn volume_schedule(options: &Options) -> Option<Schedule> {
    let period = options.config.volume_stats_agg_period.as_std();
    let with_health = options.gates.enabled(Gate::CsiVolumeHealth);
    (!period.is_zero()).then_some(Schedule { period, with_health })
}

/// Waits for the signal, and keeps systemd's watchdog quiet meanwhile.
async fn stopped(notifier: Option<&Notifier>, handles: &Handles, clock: &Clock) -> anyhow::Result<()> {
    let Some(notifier) = notifier else { return wait_for_signal().await };
    tokio::select! {
        biased;
        // Cancel-safe: a ping that is not sent is not missed by a process that stops.
        signalled = wait_for_signal() => signalled,
        () = notifier.watch(handles.health.clone(), clock.clone()) => Ok(()),
    }
}

async fn wait_for_signal() -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    tokio::select! {
        biased;
        // Both cancel-safe: a signal not received now ends nothing.
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}
