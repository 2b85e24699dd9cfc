//! The real agent in the simulation: its loop, sources, observation and effects over the fakes.
//!
//! Owns: the world made of fakes, and the observer that writes the agent's turns into the trace. Never: starts a part of the
//! agent itself (`rubelet::start` does).

use std::{path::PathBuf, sync::Arc, time::Duration};

use rubelet::{
    node,
    objects::Strategy,
    sources::http::Endpoint,
    start::{Inputs, ManifestDir, ManifestUrl, Running, start},
    sync_loop::TurnObserver,
    world::{Cluster, World},
};
use rubelet_core::{
    effect::Effect,
    event::{Event, Source},
    eviction::{
        EvictionSettings,
        threshold::{Signal, Threshold, ThresholdValue},
    },
    node_status::{Machine, NodeSetup},
    op::{ContainerOp, ImageOp, Op, OpKind, PodOp},
    settings::{LogSettings, Settings},
    volumes::selinux::ContainerLabels,
};
use rubelet_csi::Drivers;
use tokio::runtime::Handle;

use crate::{
    api::FakeApi,
    csi::FakePlugins,
    host::{FakeHost, Files},
    invariants::shutdown_groups,
    memory::THRESHOLD_BYTES,
    play::{MANIFEST_URL, MANIFESTS, predicates::NODE},
    runtime::{FakeRuntime, output::MAX_LOG_BYTES, store::IMAGE_FS_THRESHOLD_BYTES},
    simulation::{Incarnation, Simulation},
};

/// Upstream's `fileCheckFrequency` and `httpCheckFrequency`.
const CHECK_EVERY: Duration = Duration::from_secs(20);
/// The node has one processor for pods.
const ALLOCATABLE_CPU_MILLIS: i64 = 1_000;

/// `evictionPressureTransitionPeriod`: shorter than upstream's five minutes, so that a play has pods after a pressure.
pub(crate) const PRESSURE_TRANSITION: Duration = Duration::from_secs(60);

/// One process of the agent, started by `rubelet::start` over the fakes.
pub(crate) fn launch(simulation: &Arc<Simulation>, incarnation: Incarnation, sources: &[Source]) -> Running {
    let has = |source| sources.contains(&source);
    let endpoint = || Endpoint { url: MANIFEST_URL.to_owned(), headers: Vec::new() };
    let world = world(simulation, incarnation, sources);
    let inputs = Inputs {
        own_files: Arc::new(FakeHost::new(simulation.clone(), incarnation, Files::Own)),
        lease_thread: Handle::current(),
        manifest_dir: has(Source::File)
            .then(|| ManifestDir { path: PathBuf::from(MANIFESTS), check_every: CHECK_EVERY }),
        manifest_url: has(Source::Http).then(|| ManifestUrl { endpoint: endpoint(), check_every: CHECK_EVERY }),
        reporting: Arc::new(reporting()),
        observer: Some(observer(simulation.clone(), incarnation)),
    };
    start(&world, inputs)
}

/// Upstream's frequencies.
fn reporting() -> node::NodeReporting {
    node::NodeReporting {
        setup: NodeSetup {
            name: NODE.to_owned(),
            // Set explicitly, so that no resolver of this machine is used: nothing here may come from outside.
            internal_ips: vec!["10.0.0.7".to_owned()],
            has_configured_ips: true,
            architecture: "amd64".to_owned(),
            max_pods: 110,
            ..NodeSetup::default()
        },
        machine: Machine { cpus: 4, memory_bytes: 8 << 30, ..Machine::default() },
        node_ip: "10.0.0.7".to_owned(),
        registers: true,
        check_every: Duration::from_secs(10),
        report_every: Duration::from_secs(300),
        lease_secs: 40,
    }
}

fn world(simulation: &Arc<Simulation>, incarnation: Incarnation, sources: &[Source]) -> World {
    let logs = LogSettings { max_bytes: Some(MAX_LOG_BYTES), max_files: 3, ..LogSettings::default() };
    let hard = |signal, bytes, text: &str| Threshold {
        signal,
        value: ThresholdValue::Quantity(bytes, text.to_owned()),
        min_reclaim: None,
        grace: Duration::ZERO,
    };
    let eviction = EvictionSettings {
        thresholds: vec![
            hard(Signal::ImageFsAvailable, IMAGE_FS_THRESHOLD_BYTES, "1Mi"),
            hard(Signal::MemoryAvailable, THRESHOLD_BYTES, "512Mi"),
        ],
        pressure_transition: PRESSURE_TRANSITION,
        ..EvictionSettings::default()
    };
    let shutdown_groups = shutdown_groups();
    let mut settings =
        Settings { sources: sources.to_vec(), logs, eviction, shutdown_groups, ..Settings::for_node(NODE) };
    settings.node.allocatable.cpu_millis = ALLOCATABLE_CPU_MILLIS;
    settings.node.selinux_labels = Some(ContainerLabels {
        process: "system_u:system_r:container_t:s0".to_owned(),
        file: "system_u:object_r:container_file_t:s0".to_owned(),
    });
    let clock = simulation.clock_of_a_new_process();
    let cluster = settings.is_in_cluster().then(|| {
        let api = Arc::new(FakeApi::new(simulation.clone(), incarnation));
        Cluster::new(api, Strategy::Watch, NODE, &clock)
    });
    let runtime = Arc::new(FakeRuntime::new(simulation.clone(), incarnation));
    let host = Arc::new(FakeHost::new(simulation.clone(), incarnation, Files::Pods));
    let csi = Drivers::over(Arc::new(FakePlugins::new(simulation.clone(), incarnation)));
    World { cluster, csi, ..World::new(runtime, host, clock, settings) }
}

/// Tells the rules of every turn, and the trace of those that changed something.
fn observer(simulation: Arc<Simulation>, incarnation: Incarnation) -> TurnObserver {
    Box::new(move |_now, event, effects, agent| {
        simulation.with(|sim| {
            if !sim.is_alive(incarnation) {
                return;
            }
            match event {
                Event::Done { result: Err(error), .. } => sim.log("agent", format!("failed: {:?} {error}", error.kind)),
                Event::Config { source, pods } => sim.log("agent", format!("{source:?} has {} pods", pods.len())),
                Event::ConfigChange { source, pods, removed } => {
                    let (changed, removed) = (pods.len(), removed.len());
                    sim.log("agent", format!("{source:?} changed {changed} pods and removed {removed}"));
                }
                Event::PartialConfig { source, pods } => {
                    sim.log("agent", format!("{source:?} has {} pods and more", pods.len()));
                }
                Event::Unreadable { pods } => sim.log("agent", format!("cannot read {} pods", pods.len())),
                Event::Shutdown(signal) => sim.log("agent", format!("shutdown {signal:?}")),
                Event::RuntimeEvents(_)
                | Event::Done { .. }
                | Event::Hint { .. }
                | Event::LogsWritten { .. }
                | Event::Refresh { .. }
                | Event::Node(_)
                | Event::DriverRegistered { .. }
                | Event::FileSystemAnswered
                | Event::CsiNode { .. }
                | Event::MemoryShort
                | Event::Due => {}
            }
            sim.count_turn();
            sim.stale_entries = agent.entries_of_gone_pods();
            sim.agent_bytes.get_or_insert_with(|| format!("{agent:?}").len());
            // Before the snapshot of this turn: the pods are those that were ranked.
            effects.iter().for_each(|effect| sim.check_eviction(effect));
            let snapshot = agent.snapshot();
            if !Arc::ptr_eq(&snapshot, &sim.snapshot) {
                sim.rules.told(sim.now, sim.wall, &snapshot);
                sim.snapshot = snapshot;
            }
            for effect in effects {
                match effect {
                    Effect::Do { op, reason, .. } if op.kind() != OpKind::Look => {
                        sim.log("agent", format!("{op}: {reason}"));
                        if let Some(uid) = starts_something_for(op) {
                            sim.rules.ordered(sim.now, uid, &op.to_string());
                        }
                    }
                    Effect::Do { .. } => {}
                    Effect::Cancel(id) => sim.log("agent", format!("cancel {}", id.0)),
                    Effect::Recall(id) => sim.log("agent", format!("recall {}", id.0)),
                    Effect::Record(record) => {
                        sim.rules.event_recorded();
                        sim.log("agent", format!("event {}: {}", record.reason, record.message))
                    }
                }
            }
        });
    })
}

fn starts_something_for(op: &Op) -> Option<&str> {
    match op {
        Op::Pod(PodOp::RunSandbox(order)) => Some(order.uid.as_str()),
        Op::Container(ContainerOp::Start(order)) => Some(order.uid.as_str()),
        Op::Container(ContainerOp::Resume { pod, .. }) | Op::Image(ImageOp::Pull { pod, .. }) => Some(pod.uid.as_str()),
        _ => None,
    }
}
