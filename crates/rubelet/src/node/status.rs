//! Reports the node status: at once after a change, otherwise periodically.
//!
//! Owns: when to check, when to report, the newest Node object, the events a report causes.
//! Never: decides the contents of the status (`rubelet_core::node_status`).
//! Upstream: `syncNodeStatus`, `tryUpdateNodeStatus`, `fastNodeStatusUpdate`.

use std::{sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::Node;
use rubelet_core::{
    effect::EventRecord,
    event::Event,
    event_reasons,
    node_object::NodeObject,
    node_status::{self, ImageFacts, Report, status_event},
    snapshot::{NodeReadiness, NodeView, Snapshot},
    time::{Uptime, scaled},
};
use rubelet_cri::v1;
use rubelet_kube::{
    error_chain,
    port::{ApiError, ApiErrorKind, ApiServer},
};
use tokio::{
    sync::{mpsc, watch},
    time::{sleep, sleep_until, timeout},
};

use super::{
    NodeReporting, ResourceVersion,
    addresses::{Ask, host_ips},
    get_node,
    informer::NodeWatchState,
    registration::{self, Registered, patch_status},
};
use crate::world::World;

/// Tries of one report before the next check.
const TRIES: u32 = 5;
/// A list of images is cached this long, as upstream.
const IMAGES_LAST: Duration = Duration::from_secs(30);
const IMAGES_TIMEOUT: Duration = Duration::from_secs(10);
/// Minimum time between reports caused by another client's change: two writers that disagree must not flood the server.
const PAUSE_AFTER_DISPUTE: Duration = Duration::from_secs(1);

/// Reports until it is dropped. Publishes the node's UID once it is known.
pub async fn run(
    world: World,
    api: Arc<dyn ApiServer>,
    reporting: Arc<NodeReporting>,
    mut inputs: Inputs,
    uid: watch::Sender<Option<String>>,
) {
    // No report before the first runtime status: a restarted agent must not report NotReady.
    let is_checked =
        inputs.snapshots.wait_for(|snapshot| snapshot.node.readiness != NodeReadiness::Unchecked).await.is_ok();
    if !is_checked {
        return;
    }
    let mut reporter = Reporter::register(world, api, reporting, inputs, uid).await;
    let mut trigger = ReportTrigger::Time;
    loop {
        let outcome = reporter.check().await;
        if outcome == Outcome::Reported && trigger == ReportTrigger::Dispute {
            sleep(PAUSE_AFTER_DISPUTE).await;
        }
        trigger = reporter.wait().await;
    }
}

/// The inputs of a report.
#[derive(Debug)]
pub struct Inputs {
    pub snapshots: watch::Receiver<Arc<Snapshot>>,
    pub node_states: watch::Receiver<NodeWatchState>,
    /// Where reported Node objects are sent: the watch may show them much later.
    pub inbox: mpsc::Sender<Event>,
}

/// What triggered a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReportTrigger {
    Time,
    View,
    Dispute,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Nothing,
    Reported,
    Failed,
}

struct Reporter {
    world: World,
    api: Arc<dyn ApiServer>,
    reporting: Arc<NodeReporting>,
    inputs: Inputs,
    uid: watch::Sender<Option<String>>,
    random: fastrand::Rng,
    /// The inputs of the last report.
    view: NodeView,
    /// `None` until the first runtime status.
    images: Option<Vec<ImageFacts>>,
    images_at: Uptime,
    /// The newest known Node object.
    node: Node,
    /// When an unchanged status is reported.
    report_at: Uptime,
    is_unschedulable: bool,
}

impl Reporter {
    async fn register(
        world: World,
        api: Arc<dyn ApiServer>,
        reporting: Arc<NodeReporting>,
        inputs: Inputs,
        uid: watch::Sender<Option<String>>,
    ) -> Reporter {
        let images = list_images(&world).await;
        let now = world.clock.now();
        let view = inputs.snapshots.borrow().node.clone();
        let mut reporter = Reporter {
            random: fastrand::Rng::with_seed(reporting.seed()),
            view,
            images,
            images_at: now.uptime,
            node: Node::default(),
            report_at: now.uptime,
            is_unschedulable: false,
            world,
            api,
            reporting,
            inputs,
            uid,
        };
        let registered = registration::register(&*reporter.api, &reporter.reporting, || reporter.report()).await;
        let now = reporter.world.clock.now();
        match registered {
            Registered::Created(node) => {
                tracing::info!(node = reporter.reporting.setup.name, "node registered");
                reporter.record_all(node_status::status_change_events(None, &node));
                reporter.report_at = now.uptime + reporter.jitter(reporter.reporting.report_every);
                reporter.take(node);
            }
            Registered::Existing(node) => {
                tracing::info!(node = reporter.reporting.setup.name, "node was previously registered");
                // The previous process may have reported a moment ago.
                let since = node_status::last_report(&node).map(|reported| now.wall_since(reported));
                let left = since.map_or(Duration::ZERO, |since| reporter.reporting.report_every.saturating_sub(since));
                reporter.report_at = now.uptime + left;
                reporter.take(node);
            }
        }
        reporter
    }

    /// Reports if something changed or the report is due.
    async fn check(&mut self) -> Outcome {
        self.refresh_images().await;
        self.refresh_addresses().await;
        for attempt in 1..=TRIES {
            self.view = self.inputs.snapshots.borrow_and_update().node.clone();
            let updated = node_status::updated(&self.node, self.report());
            let is_changed = node_status::has_changed(&self.node, &updated);
            if !is_changed && self.world.clock.now().uptime < self.report_at {
                return Outcome::Nothing;
            }
            match self.send(&updated).await {
                Ok(node) => {
                    self.record_all(node_status::status_change_events(Some(&self.node), &node));
                    let every = self.reporting.report_every;
                    let wait = if is_changed { self.jitter(every) } else { every };
                    self.report_at = self.world.clock.now().uptime + wait;
                    // A volume that this report left out of `volumesInUse` must not be taken for one in use. A closed inbox is the
                    // end of the agent.
                    let _ = self.inputs.inbox.send(Event::Node(NodeObject::of(&node))).await;
                    self.take(node);
                    return Outcome::Reported;
                }
                Err(error) if error.kind == ApiErrorKind::NotFound => {
                    tracing::warn!("Node object deleted; restart to register again: {}", error_chain(&error));
                    return Outcome::Failed;
                }
                Err(error) => tracing::warn!(attempt, "failed to update node status: {}", error_chain(&error)),
            }
            if let Ok(node) = get_node(&*self.api, &self.reporting, ResourceVersion::Newest).await {
                self.take(node);
            }
        }
        Outcome::Failed
    }

    async fn send(&self, updated: &Node) -> Result<Node, ApiError> {
        match node_status::patch(&self.node, updated) {
            Some(patch) => patch_status(&*self.api, &self.reporting, &patch).await,
            None => Ok(updated.clone()),
        }
    }

    /// Waits for a possible change.
    async fn wait(&mut self) -> ReportTrigger {
        let next_look = self.world.clock.instant(self.world.clock.now().uptime + self.reporting.check_every);
        loop {
            let view = &self.view;
            let Inputs { snapshots, node_states, .. } = &mut self.inputs;
            tokio::select! {
                biased;
                // Cancel-safe: waiting for a value takes nothing away.
                Ok(_) = snapshots.wait_for(|snapshot| snapshot.node != *view) => return ReportTrigger::View,
                // Cancel-safe: a change that was not seen is seen the next time.
                Ok(()) = node_states.changed() => {}
                // Cancel-safe: the deadline stays the same.
                () = sleep_until(next_look) => return ReportTrigger::Time,
            }
            let state = node_states.borrow_and_update().clone();
            if self.take_state(state) {
                return ReportTrigger::Dispute;
            }
        }
    }

    /// Whether the UID differs from the known one.
    fn take_state(&mut self, state: NodeWatchState) -> bool {
        match state {
            NodeWatchState::Unseen | NodeWatchState::Absent => false,
            NodeWatchState::Gone => {
                // As upstream: a deleted node may be about to be shut down, so it is not registered again.
                tracing::warn!(node = self.reporting.setup.name, "Node object deleted; restart to register again");
                self.uid.send_replace(None);
                false
            }
            NodeWatchState::Seen(node) if !is_newer(&node, &self.node) => false,
            NodeWatchState::Seen(node) => {
                self.take(Arc::unwrap_or_clone(node));
                true
            }
        }
    }

    fn take(&mut self, node: Node) {
        let is_unschedulable = node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or(false);
        if is_unschedulable != self.is_unschedulable {
            self.is_unschedulable = is_unschedulable;
            let reason =
                if is_unschedulable { event_reasons::NODE_NOT_SCHEDULABLE } else { event_reasons::NODE_SCHEDULABLE };
            self.record_all(vec![status_event(&self.reporting.setup.name, reason)]);
        }
        self.uid.send_if_modified(|known| {
            let is_new = *known != node.metadata.uid;
            known.clone_from(&node.metadata.uid);
            is_new
        });
        self.node = node;
    }

    async fn refresh_images(&mut self) {
        let now = self.world.clock.now().uptime;
        if self.images.is_some() && now.since(self.images_at) < IMAGES_LAST {
            return;
        }
        if let Some(images) = list_images(&self.world).await {
            self.images = Some(images);
            self.images_at = now;
        }
    }

    /// Configured addresses stay. A node that loses its network for a while keeps its last addresses.
    async fn refresh_addresses(&mut self) {
        let NodeReporting { setup, node_ip, .. } = &*self.reporting;
        if setup.has_configured_ips {
            return;
        }
        match host_ips(node_ip, &setup.name, Ask::ResolverAndRoutes).await {
            Ok(found) if !found.is_empty() && found != setup.internal_ips => {
                tracing::info!(before = ?setup.internal_ips, now = ?found, "node addresses changed");
                Arc::make_mut(&mut self.reporting).setup.internal_ips = found;
            }
            Ok(_) => {}
            Err(error) => tracing::warn!("failed to find the node's addresses: {error:#}"),
        }
    }

    fn report(&self) -> Report<'_> {
        Report {
            setup: &self.reporting.setup,
            machine: &self.reporting.machine,
            view: &self.view,
            images: self.images.as_deref(),
            at: self.world.clock.now().wall,
        }
    }

    /// Jitter between 0.5 and 1.5, so that nodes that changed together do not keep reporting together.
    fn jitter(&mut self, every: Duration) -> Duration {
        scaled(every, 0.5 + self.random.f64())
    }

    fn record_all(&self, events: Vec<EventRecord>) {
        for event in events {
            self.world.events.record(event, self.world.clock.now().wall);
        }
    }
}

/// `None` if the runtime did not respond.
async fn list_images(world: &World) -> Option<Vec<ImageFacts>> {
    match timeout(IMAGES_TIMEOUT, world.runtime.list_images()).await {
        Ok(Ok(images)) => Some(images.into_iter().map(image_facts).collect()),
        Ok(Err(error)) => {
            tracing::debug!("failed to list images: {}", error_chain(&error));
            None
        }
        Err(_elapsed) => None,
    }
}

fn image_facts(image: v1::Image) -> ImageFacts {
    ImageFacts {
        id: image.id,
        names: image.repo_digests.into_iter().chain(image.repo_tags).collect(),
        size_bytes: i64::try_from(image.size).unwrap_or(i64::MAX),
    }
}

/// A watch may be older than a patch response. Resource versions of one kind are increasing integers.
fn is_newer(node: &Node, known: &Node) -> bool {
    let version =
        |node: &Node| node.metadata.resource_version.as_deref().and_then(|version| version.parse::<u128>().ok());
    match (version(node), version(known)) {
        (Some(node), Some(known)) => node > known,
        _ => node != known,
    }
}

#[cfg(test)]
mod tests;
