//! The agent: all state, and the routing of each event to the code that decides about it.
//!
//! Owns: the one `match` over `Event`. Never: I/O, clocks, decisions of its own; those are in `agent/` and below.
//! Upstream: `Kubelet` as `SyncHandler` (HandlePodAdditions / Updates / Removes / Reconcile / Syncs / Cleanups).

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use crate::{
    agent::{outbox::Outbox, timers::Timers},
    api_requests::ApiRequests,
    effect::Effect,
    event::Event,
    id::PodUid,
    images::Images,
    node::Node,
    pod::PodRecord,
    pod_config::{Completeness, PodConfig},
    pod_manager::PodManager,
    settings::Settings,
    snapshot::Snapshot,
    status_manager::StatusManager,
    time::{Now, Uptime},
    volumes::devices::Devices,
};

mod admission;
mod api;
mod cgroups;
mod cleanups;
mod config;
mod devices;
mod done;
mod eviction;
mod image_gc;
mod logs;
mod outbox;
mod plan;
mod preemption;
mod probes;
mod shutdown;
mod stale;
mod sync;
mod timers;

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub struct Agent {
    settings: Settings,
    /// The latest pods of each source.
    config: PodConfig,
    /// The desired pods.
    pods: PodManager,
    /// Pods that are starting, running, terminating or terminated.
    records: BTreeMap<PodUid, PodRecord>,
    images: Images,
    statuses: StatusManager,
    api_requests: ApiRequests,
    node: Node,
    outbox: Outbox,
    /// Pods to be planned before this turn ends.
    touched: BTreeSet<PodUid>,
    /// When the others are to be planned again.
    timers: Timers,
    snapshot: Arc<Snapshot>,
}

impl Agent {
    pub fn new(settings: Settings, now: Now) -> Self {
        let mut node = Node::new(now);
        if !settings.is_in_cluster() {
            node.devices = Devices::standalone();
        } else if !settings.attaches_by_controller {
            node.devices = Devices::without_controller();
        }
        Agent {
            settings,
            config: PodConfig::default(),
            pods: PodManager::default(),
            records: BTreeMap::new(),
            images: Images::default(),
            statuses: StatusManager::default(),
            api_requests: ApiRequests::default(),
            node,
            outbox: Outbox::default(),
            touched: BTreeSet::new(),
            timers: Timers::default(),
            snapshot: Arc::default(),
        }
    }

    /// One turn of the loop: applies the event and returns the effects to carry out.
    pub fn handle(&mut self, now: Now, event: Event) -> Vec<Effect> {
        match event {
            Event::Config { source, pods } => self.handle_config(source, pods, Completeness::Whole, now),
            Event::PartialConfig { source, pods } => self.handle_config(source, pods, Completeness::Partial, now),
            Event::ConfigChange { source, pods, removed } => self.handle_config_change(source, pods, &removed, now),
            Event::Unreadable { pods } => self.config.unreadable = pods,
            Event::Hint { pod } => self.request_look(&pod),
            Event::LogsWritten { paths } => self.node.logs.written(&paths, now),
            Event::RuntimeEvents(stream) => self.node.event_stream = stream,
            Event::Refresh { pod } => self.handle_refresh(&pod, now),
            Event::Node(object) => self.handle_node(object),
            Event::DriverRegistered { driver } => self.handle_driver(&driver, now),
            Event::FileSystemAnswered => self.handle_file_system_answered(now),
            Event::CsiNode { is_made } => self.node.lacks_csi_node = !is_made,
            Event::MemoryShort => self.node.eviction.hasten(now),
            Event::Shutdown(signal) => self.handle_shutdown(signal, now),
            Event::Due => {}
            Event::Done { id, result } => self.handle_done(id, result, now),
        }
        self.handle_time(now);
        self.handle_pod_syncs(now);
        self.handle_api_requests(now);
        self.outbox.drain()
    }

    /// When the loop must send `Event::Due`, unless another event comes first.
    pub fn wake_at(&self, now: Now) -> Uptime {
        let parts = [
            self.timers.next_wakeup(),
            self.outbox.flights.next_wakeup(),
            self.images.next_wakeup(now),
            self.api_requests.next_wakeup(now),
            self.node.next_wakeup(&self.settings, now),
        ];
        parts.into_iter().flatten().min().expect("the check of the runtime is due some time, or under way")
    }

    /// The snapshot for readers as of the last turn.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.snapshot.clone()
    }
}

#[cfg(test)]
mod tests;
