//! The real agent on the stage: its loop, sources, observation and effects over the fakes.
//!
//! Owns: wiring, as `rubelet/src/run.rs` does it for the real world, and the witness that writes the agent's turns into
//! the trace. Never: plays a part of the agent itself.

use std::{path::PathBuf, sync::Arc, time::Duration};

use rubelet::{
    event_log::EventLog,
    node::{self, follow::Sight},
    objects::Strategy,
    observe, recorder, sources,
    sync_loop::{Handles, SyncLoop, Witness},
    world::{Cluster, Paths, World},
};
use rubelet_core::{
    effect::Effect,
    event::{Event, Source},
    node_status::{Machine, NodeSetup},
    op::{ContainerOp, ImageOp, Op, OpKind, PodOp},
    settings::Settings,
};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use crate::{
    api::FakeApi,
    host::FakeHost,
    play::{MANIFEST_URL, MANIFESTS, moments::NODE},
    runtime::FakeRuntime,
    stage::{Life, Stage},
};

/// Upstream's `fileCheckFrequency` and `httpCheckFrequency`.
const CHECK_EVERY: Duration = Duration::from_secs(20);

/// Spreads the retries of one node over time.
const RETRY_SEED: u64 = 7;

/// One life of the agent.
#[derive(Debug)]
pub struct AgentRun {
    pub events: EventLog,
    tasks: JoinSet<()>,
}

impl AgentRun {
    pub fn launch(stage: &Arc<Stage>, life: Life, sources: &[Source]) -> Self {
        let world = world(stage, life, sources);
        let (sync_loop, handles) = SyncLoop::new(world.clone());
        let sync_loop = sync_loop.with_witness(witness(stage.clone(), life));
        let mut tasks = JoinSet::new();
        tasks.spawn(sync_loop.run(CancellationToken::new()));
        tasks.spawn(follow_events(world.clone(), handles.inbox.clone()));
        for source in sources {
            match source {
                Source::File | Source::Http => start_source(*source, &world, &handles, &mut tasks),
                Source::Api => join_cluster(&world, &handles, &mut tasks),
            }
        }
        AgentRun { events: world.events, tasks }
    }

    /// Whether some task of it is over, though each should last as long as the agent. Its panic is passed on.
    pub fn has_ended(&mut self) -> bool {
        match self.tasks.try_join_next() {
            None => false,
            Some(Ok(())) => true,
            Some(Err(error)) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Some(Err(_)) => true,
        }
    }

    /// Ends its tasks and waits until they are gone.
    pub async fn end(mut self) {
        self.tasks.shutdown().await;
    }
}

fn start_source(source: Source, world: &World, handles: &Handles, tasks: &mut JoinSet<()>) {
    let (world, node, inbox) = (world.clone(), NODE.to_owned(), handles.inbox.clone());
    if source == Source::File {
        tasks.spawn(sources::file::run(world, PathBuf::from(MANIFESTS), node, CHECK_EVERY, inbox));
    } else {
        let endpoint = sources::http::Endpoint { url: MANIFEST_URL.to_owned(), headers: Vec::new() };
        tasks.spawn(sources::http::run(world, endpoint, node, CHECK_EVERY, inbox));
    }
}

/// Everything a node of a cluster runs beyond a standalone one.
fn join_cluster(world: &World, handles: &Handles, tasks: &mut JoinSet<()>) {
    let api = world.cluster.clone().expect("a world with this source has a cluster").api;
    let (sights, seen) = watch::channel(Sight::Unseen);
    let node = || NODE.to_owned();
    tasks.spawn(node::follow::run(api.clone(), node(), RETRY_SEED, sights, handles.inbox.clone()));
    tasks.spawn(sources::api::run(api.clone(), world.clone(), RETRY_SEED, seen.clone(), handles.inbox.clone()));
    tasks.spawn(recorder::run(api.clone(), world.events.clone(), node(), handles.snapshots.clone()));
    tasks.spawn(node::run(world.clone(), api, Arc::new(duty()), handles.snapshots.clone(), seen));
}

/// Upstream's frequencies.
fn duty() -> node::Duty {
    node::Duty {
        setup: NodeSetup {
            name: NODE.to_owned(),
            // Told, so that no resolver of this machine is asked: nothing here may come from outside.
            internal_ips: vec!["10.0.0.7".to_owned()],
            has_told_ips: true,
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

/// Following may rightly end, where the runtime has no events; the agent goes on.
async fn follow_events(world: World, inbox: mpsc::Sender<Event>) {
    observe::events::follow(&world, &inbox).await;
    std::future::pending().await
}

fn world(stage: &Arc<Stage>, life: Life, sources: &[Source]) -> World {
    let settings = Settings { sources: sources.to_vec(), ..Settings::for_node(NODE) };
    let clock = stage.clock_of_a_new_process();
    let cluster = settings.is_in_cluster().then(|| {
        let api = Arc::new(FakeApi::new(stage.clone(), life));
        Cluster::new(api, Strategy::Watch, NODE, &clock)
    });
    World {
        runtime: Arc::new(FakeRuntime::new(stage.clone(), life)),
        host: Arc::new(FakeHost::new(stage.clone(), life)),
        paths: Paths {
            root_dir: settings.root_dir.clone(),
            pod_logs_dir: settings.pod_logs_dir.clone(),
            container_links_dir: PathBuf::from("/var/log/containers"),
        },
        clock,
        events: EventLog::default(),
        metrics: Arc::default(),
        settings: Arc::new(settings),
        cluster,
        has_runtime_events: Arc::default(),
    }
}

/// Tells the rules of every turn, and the trace of those that changed something.
fn witness(stage: Arc<Stage>, life: Life) -> Witness {
    Box::new(move |_now, event, effects, agent| {
        stage.with(|scene| {
            if !scene.is_alive(life) {
                return;
            }
            match event {
                Event::Done { result: Err(error), .. } => {
                    scene.log("agent", format!("failed: {:?} {error}", error.kind))
                }
                Event::Config { source, pods } => scene.log("agent", format!("{source:?} has {} pods", pods.len())),
                Event::ConfigChange { source, pods, removed } => {
                    let (changed, removed) = (pods.len(), removed.len());
                    scene.log("agent", format!("{source:?} changed {changed} pods and removed {removed}"));
                }
                Event::PartialConfig { source, pods } => {
                    scene.log("agent", format!("{source:?} has {} pods and more", pods.len()));
                }
                Event::Unreadable { pods } => scene.log("agent", format!("cannot read {} pods", pods.len())),
                Event::Done { .. } | Event::Hint { .. } | Event::Refresh { .. } | Event::Node(_) | Event::Due => {}
            }
            scene.count_turn();
            scene.stale_entries = agent.entries_of_gone_pods();
            let snapshot = agent.snapshot();
            if !Arc::ptr_eq(&snapshot, &scene.snapshot) {
                scene.rules.told(scene.now, scene.wall, &snapshot);
                scene.snapshot = snapshot;
            }
            for effect in effects {
                match effect {
                    Effect::Do { op, reason, .. } if op.kind() != OpKind::Look => {
                        scene.log("agent", format!("{op}: {reason}"));
                        if let Some(uid) = starts_something_for(op) {
                            scene.rules.ordered(scene.now, uid, &op.to_string());
                        }
                    }
                    Effect::Do { .. } => {}
                    Effect::Cancel(id) => scene.log("agent", format!("cancel {}", id.0)),
                    Effect::Recall(id) => scene.log("agent", format!("recall {}", id.0)),
                    Effect::Record(record) => {
                        scene.rules.event_recorded();
                        scene.log("agent", format!("event {}: {}", record.reason, record.message))
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
