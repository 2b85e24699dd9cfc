//! The state of the node as a whole: the runtime, the network and periodic routines.
//!
//! Owns: the conditions of runtime and network, the last relist, the timers of routines that concern no single pod.
//! Upstream: `runtimeState`, `updateRuntimeUp`, the PLEG's relist timer.

use std::{collections::BTreeMap, time::Duration};

use crate::{
    cgroups::{Cgroup, CgroupTree},
    effect::{EffectError, ErrorKind},
    event::EventStream,
    eviction::Eviction,
    id::PodUid,
    image_gc::ImageGc,
    log_rotation::LogRotation,
    node_object::NodeObject,
    observation::{Listing, RuntimeStatus},
    op::NodeOp,
    settings::Settings,
    shutdown::Shutdown,
    snapshot::{NodeProblem, NodeReadiness},
    time::{Now, Uptime},
    volumes::devices::Devices,
};

/// Interval of checks while the runtime is ready (upstream: 5 s).
const CHECK_READY: Duration = Duration::from_secs(10);
/// Interval of checks while it is not, so that its return is found soon.
const CHECK_NOT_READY: Duration = Duration::from_secs(1);
/// Interval of relists where the runtime has no events, as upstream.
const RELIST: Duration = Duration::from_secs(1);
/// Interval of the audit, a slow relist behind the runtime's events.
const AUDIT: Duration = Duration::from_secs(30);
/// Interval of scans for orphaned directories.
const LIST_DIRS: Duration = Duration::from_secs(300);

/// A runtime without a response for this long is down; upstream's tolerance, so that its restart is not reported.
const DOWN_AFTER: Duration = Duration::from_secs(30);
/// Without a relist for this long the state of the pods is not known.
const RELIST_THRESHOLD: Duration = Duration::from_secs(180);
/// Interval of checks of the QoS cgroups, as upstream.
const SYNC_QOS: Duration = Duration::from_secs(60);

/// A periodic operation on the node, one at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Routine {
    CheckRuntime,
    Relist,
    ListPodDirs,
    ListDevices,
    SyncQosCgroups,
    MeasureLogs,
    ListImages,
    DeleteImage,
    MeasureNode,
    /// Where the runtime keeps images and containers.
    FindImageFs,
    /// A look at what pods use, to find the one to evict.
    RankPods,
    /// A look at what pods with limits on local storage use.
    CheckLocalStorage,
}

#[derive(Clone, Debug)]
pub struct Node {
    /// When each routine is due; without those in flight and those that wait for the sources.
    due_at: BTreeMap<Routine, Uptime>,
    are_sources_ready: bool,
    pub qos: QosCgroups,
    pub logs: LogRotation,
    pub image_gc: ImageGc,
    pub eviction: Eviction,
    pub devices: Devices,
    /// When all pods are next synced and dead containers collected.
    pub housekeeping_at: Uptime,
    pub status: RuntimeStatus,
    /// While the runtime streams container events, a slow audit is enough.
    pub event_stream: EventStream,
    /// `None` is ready. Starts with a problem: nothing is known before the first response.
    pub runtime_problem: Option<NodeProblem>,
    pub network_problem: Option<NodeProblem>,
    /// The runtime's last response that reported it ready.
    answered_at: Option<Uptime>,
    /// The first check has finished, successful or not.
    is_checked: bool,
    /// As last seen in the API server; `None` before that.
    pub object: Option<NodeObject>,
    /// Its CSINode object could not be made.
    pub lacks_csi_node: bool,
    /// When it was last requested for a waiting pod.
    pub object_asked_at: Option<Uptime>,
    /// The last relist; `None` before the first.
    pub listing: Option<Listing>,
    pub shutdown: Shutdown,
    /// When the last remains of a pod were removed: an older listing may still show it.
    pub gone: BTreeMap<PodUid, Uptime>,
}

/// The QoS cgroups.
#[derive(Clone, Debug)]
pub struct QosCgroups {
    /// As they were last set.
    pub cgroups: Vec<Cgroup>,
    /// Result of the last sync; `None` before the first.
    pub outcome: Option<Result<(), String>>,
    /// Pods were added or removed since they were set.
    pub pods_changed: bool,
}

impl Node {
    pub fn new(now: Now) -> Self {
        Node {
            due_at: BTreeMap::from([(Routine::CheckRuntime, Uptime::ZERO), (Routine::Relist, Uptime::ZERO)]),
            are_sources_ready: false,
            qos: QosCgroups { cgroups: Vec::new(), outcome: None, pods_changed: false },
            logs: LogRotation::default(),
            image_gc: ImageGc::default(),
            eviction: Eviction::default(),
            devices: Devices::default(),
            housekeeping_at: Uptime::ZERO,
            status: RuntimeStatus::default(),
            event_stream: EventStream::Down,
            runtime_problem: Some(NodeProblem {
                message: "the runtime has not answered yet".to_owned(),
                since: now.wall,
            }),
            network_problem: None,
            answered_at: None,
            is_checked: false,
            object: None,
            lacks_csi_node: false,
            object_asked_at: None,
            listing: None,
            shutdown: Shutdown::None,
            gone: BTreeMap::new(),
        }
    }

    pub fn is_ready(&self) -> bool {
        self.runtime_problem.is_none()
    }

    /// The operations to send now, each with its reason. They count as in flight.
    pub fn plan(&mut self, settings: &Settings, now: Now) -> Vec<(Routine, NodeOp, &'static str)> {
        let due = self.due(now).into_iter().filter_map(|routine| match routine {
            Routine::CheckRuntime => Some((routine, NodeOp::CheckRuntime, "runtime check is due")),
            Routine::Relist => Some((routine, NodeOp::Relist, "relist is due")),
            Routine::ListPodDirs => Some((routine, NodeOp::ListPodDirs, "orphan scan is due")),
            // Sent at the end of the turn, when the set of pods is known.
            Routine::SyncQosCgroups
            | Routine::DeleteImage
            | Routine::RankPods
            | Routine::CheckLocalStorage
            | Routine::ListDevices => None,
            // They have times of their own.
            Routine::MeasureLogs | Routine::ListImages | Routine::MeasureNode | Routine::FindImageFs => None,
        });
        let mut due: Vec<_> = due.collect();
        for (routine, ..) in &due {
            self.begin(*routine);
        }
        if self.is_ready() {
            let logs = self.logs.due(now);
            if !logs.is_empty() {
                due.push((Routine::MeasureLogs, NodeOp::MeasureLogs { logs }, "log sizes are due"));
            }
            if let Some(look) = self.image_gc.due(&settings.image_gc, now) {
                due.push((Routine::ListImages, NodeOp::ListImages(look), "look at images is due"));
            }
            if self.eviction.places_due(&settings.eviction, now) {
                due.push((Routine::FindImageFs, NodeOp::FindImageFs, "places of the runtime are due"));
            }
            if let Some(places) = self.eviction.due(&settings.eviction, now) {
                let tree = CgroupTree::new(settings, self.status.cgroup_driver);
                let kubepods = tree.map(CgroupTree::kubepods_path);
                due.push((Routine::MeasureNode, NodeOp::MeasureNode { kubepods, places }, "look at the node is due"));
            }
        }
        due
    }

    /// The routines to begin now. While the runtime is down only its check is due.
    pub fn due(&self, now: Now) -> Vec<Routine> {
        let due = self.possible_routines().filter(|(_, moment)| *moment <= now.uptime);
        due.map(|(routine, _)| routine).collect()
    }

    fn possible_routines(&self) -> impl Iterator<Item = (Routine, Uptime)> {
        let is_possible = |routine: &Routine| self.is_ready() || *routine == Routine::CheckRuntime;
        self.due_at.iter().filter(move |(routine, _)| is_possible(routine)).map(|(routine, moment)| (*routine, *moment))
    }

    /// The routine is in flight, or has nothing to do.
    pub fn begin(&mut self, routine: Routine) {
        self.due_at.remove(&routine);
    }

    fn schedule(&mut self, routine: Routine, after: Duration, now: Now) {
        self.due_at.insert(routine, now.uptime + after);
    }

    fn hasten(&mut self, routine: Routine, now: Now) {
        if let Some(moment) = self.due_at.get_mut(&routine) {
            *moment = (*moment).min(now.uptime);
        }
    }

    /// A call got no response: a check finds out whether the runtime is down.
    pub fn suspect_runtime(&mut self, now: Now) {
        self.hasten(Routine::CheckRuntime, now);
    }

    /// The sync of the QoS cgroups is due, or their content may have changed.
    pub fn may_sync_qos_cgroups(&self, now: Now) -> bool {
        let due_at = self.due_at.get(&Routine::SyncQosCgroups).filter(|_| self.is_ready());
        due_at.is_some_and(|moment| *moment <= now.uptime || self.qos.pods_changed)
    }

    /// Applies the result of a sync of the QoS cgroups; returns whether it differs from the last one.
    pub fn qos_cgroups_synced(&mut self, outcome: Result<(), String>, now: Now) -> bool {
        self.schedule(Routine::SyncQosCgroups, SYNC_QOS, now);
        let is_news = self.qos.outcome.as_ref() != Some(&outcome);
        self.qos.outcome = Some(outcome);
        is_news
    }

    /// Applies the result of a check; returns whether the runtime has just become usable. A runtime that is slow to report its
    /// status may still serve pods, so only a runtime that is down stops work.
    pub fn checked(&mut self, result: &Result<RuntimeStatus, EffectError>, now: Now) -> bool {
        let was_ready = self.is_ready();
        self.is_checked = true;
        let runtime = match result {
            Ok(status) => status.runtime_problem.clone(),
            Err(error) if was_ready && error.kind == ErrorKind::TimedOut => None,
            Err(error) => Some(error.message.clone()),
        };
        self.runtime_problem = lasting(self.runtime_problem.take(), runtime, now);
        if let Ok(status) = result {
            // Without a response the network's state is not known either.
            self.network_problem = lasting(self.network_problem.take(), status.network_problem.clone(), now);
            self.status = status.clone();
            if status.runtime_problem.is_none() {
                self.answered_at = Some(now.uptime);
            }
        }
        let next = if self.is_ready() && result.is_ok() { CHECK_READY } else { CHECK_NOT_READY };
        self.schedule(Routine::CheckRuntime, next, now);
        let has_become_ready = !was_ready && self.is_ready();
        if has_become_ready {
            self.hasten(Routine::Relist, now);
        }
        has_become_ready
    }

    /// All sources are ready: from now on pods that are not desired may be cleaned up.
    pub fn sources_ready(&mut self, now: Now) {
        if !std::mem::replace(&mut self.are_sources_ready, true) {
            self.schedule(Routine::ListPodDirs, Duration::ZERO, now);
            self.schedule(Routine::SyncQosCgroups, Duration::ZERO, now);
            self.hasten(Routine::Relist, now);
        }
    }

    /// A relist has finished, successful or not.
    pub fn relisted(&mut self, now: Now) {
        let next = match self.event_stream {
            EventStream::Up => AUDIT,
            EventStream::Down => RELIST,
        };
        self.schedule(Routine::Relist, next, now);
    }

    pub fn take_listing(&mut self, listing: Listing) {
        self.gone.retain(|_, gone_at| *gone_at > listing.looked_at);
        self.listing = Some(listing);
    }

    /// The pod's last remains were removed after this look began.
    pub fn was_gone_after(&self, uid: &PodUid, looked_at: Uptime) -> bool {
        self.gone.get(uid).is_some_and(|gone_at| *gone_at >= looked_at)
    }

    /// Called by watch and GetNode; older is ignored.
    pub fn take_object(&mut self, object: NodeObject) {
        if self.object.as_ref().is_none_or(|known| known.version <= object.version) {
            self.object = Some(object);
        }
    }

    /// From the Node object, if it has any; else those found at start.
    pub fn host_ips<'a>(&'a self, settings: &'a Settings) -> &'a [String] {
        let shown = self.object.as_ref().map(|object| object.host_ips.as_slice()).filter(|ips| !ips.is_empty());
        shown.unwrap_or(&settings.host_ips)
    }

    pub fn dirs_listed(&mut self, now: Now) {
        self.schedule(Routine::ListPodDirs, LIST_DIRS, now);
    }

    /// Whether the node is ready, with upstream's reasons if it is not.
    pub fn readiness(&self, now: Now) -> NodeReadiness {
        if !self.is_checked {
            return NodeReadiness::Unchecked;
        }
        let mut problems = Vec::new();
        match self.answered_at {
            None if now.uptime < Uptime::ZERO + DOWN_AFTER && self.status.runtime_problem.is_none() => {
                return NodeReadiness::Unknown;
            }
            None => problems.push("container runtime status check may not have completed yet".to_owned()),
            Some(answered_at) if now.uptime.since(answered_at) >= DOWN_AFTER => {
                problems.push("container runtime is down".to_owned());
            }
            Some(_) => {}
        }
        match &self.listing {
            // The first relist follows the first check; until it may have failed, the earlier condition counts.
            None if now.uptime < Uptime::ZERO + DOWN_AFTER && self.status.runtime_problem.is_none() => {
                return NodeReadiness::Unknown;
            }
            None => problems.push("PLEG is not healthy: pleg has yet to be successful".to_owned()),
            Some(listing) => problems.extend(stale_relist(listing, now)),
        }
        problems.extend(self.status.runtime_problem.clone());
        problems.extend(self.status.network_problem.clone());
        if self.lacks_csi_node {
            problems.push("CSINode is not yet initialized".to_owned());
        }
        if self.shutdown.is_under_way() {
            problems.push("node is shutting down".to_owned());
        }
        if problems.is_empty() { NodeReadiness::Ready } else { NodeReadiness::NotReady(problems) }
    }

    /// When the next routine is due, or the tolerance for the runtime ends. While the runtime is down only its check counts.
    pub fn next_wakeup(&self, settings: &Settings, now: Now) -> Option<Uptime> {
        let patience = [Some(Uptime::ZERO), self.answered_at].into_iter().flatten().map(|since| since + DOWN_AFTER);
        let patience = patience.filter(|moment| *moment > now.uptime).chain(self.shutdown.next_wakeup());
        let routines = self.possible_routines().map(|(_, moment)| moment);
        let images_at = self.image_gc.next_wakeup(&settings.image_gc);
        let eviction_at = self.eviction.next_wakeup(&settings.eviction);
        let others = [Some(self.housekeeping_at), self.logs.next_wakeup(), images_at, eviction_at];
        let others = others.into_iter().flatten();
        let devices_at = self.devices.next_wakeup(now);
        patience.chain(routines).chain(devices_at).chain(others.filter(|_| self.is_ready())).min()
    }
}

/// The last relist was too long ago, in whole minutes: each change of the text is a report.
fn stale_relist(listing: &Listing, now: Now) -> Option<String> {
    let minutes = now.uptime.since(listing.looked_at).as_secs() / 60;
    (minutes * 60 >= RELIST_THRESHOLD.as_secs())
        .then(|| format!("PLEG is not healthy: pleg was last seen active {minutes}m0s ago; threshold is 3m0s"))
}

/// The problem with the time it began, which a change of its text does not move.
fn lasting(known: Option<NodeProblem>, message: Option<String>, now: Now) -> Option<NodeProblem> {
    let since = known.map_or(now.wall, |problem| problem.since);
    message.map(|message| NodeProblem { message, since })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::now as an_hour_in;

    fn at(secs: u64) -> Now {
        Now { uptime: Uptime::from_secs(secs), wall: an_hour_in().wall }
    }

    fn no_answer() -> Result<RuntimeStatus, EffectError> {
        Err(EffectError { kind: ErrorKind::Unavailable, message: "connection refused".to_owned() })
    }

    /// Its first relist came with the first second.
    fn listed() -> Node {
        let mut node = Node::new(at(0));
        node.take_listing(Listing { looked_at: at(1).uptime, ..Listing::default() });
        node
    }

    fn not_ready(problems: &[&str]) -> NodeReadiness {
        NodeReadiness::NotReady(problems.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn node_stays_ready_while_the_runtime_restarts() {
        let mut node = listed();
        assert_eq!(node.readiness(at(0)), NodeReadiness::Unchecked);
        node.checked(&Ok(RuntimeStatus::default()), at(10));
        assert_eq!(node.readiness(at(10)), NodeReadiness::Ready);
        node.checked(&no_answer(), at(39));
        assert_eq!(node.readiness(at(39)), NodeReadiness::Ready);
        assert_eq!(node.readiness(at(40)), not_ready(&["container runtime is down"]));
        node.checked(&Ok(RuntimeStatus::default()), at(41));
        assert_eq!(node.readiness(at(41)), NodeReadiness::Ready);
    }

    #[test]
    fn readiness_is_unknown_for_thirty_seconds_without_a_runtime() {
        let mut node = listed();
        node.checked(&no_answer(), at(1));
        assert_eq!(node.readiness(at(29)), NodeReadiness::Unknown);
        assert_eq!(node.readiness(at(30)), not_ready(&["container runtime status check may not have completed yet"]));
    }

    #[test]
    fn problem_reported_by_the_runtime_counts_at_once() {
        let mut node = listed();
        node.checked(&Ok(RuntimeStatus::default()), at(1));
        let status = RuntimeStatus {
            runtime_problem: Some("container runtime not ready".to_owned()),
            network_problem: Some("container runtime network not ready".to_owned()),
            ..RuntimeStatus::default()
        };
        node.checked(&Ok(status), at(2));
        let problems = ["container runtime not ready", "container runtime network not ready"];
        assert_eq!(node.readiness(at(2)), not_ready(&problems));
    }

    #[test]
    fn node_without_relist_for_three_minutes_is_not_ready() {
        let mut node = listed();
        node.checked(&Ok(RuntimeStatus::default()), at(180));
        assert_eq!(node.readiness(at(180)), NodeReadiness::Ready);
        node.checked(&Ok(RuntimeStatus::default()), at(260));
        let problem = "PLEG is not healthy: pleg was last seen active 4m0s ago; threshold is 3m0s";
        assert_eq!(node.readiness(at(260)), not_ready(&[problem]));
    }

    #[test]
    fn relists_are_slow_only_while_the_event_stream_is_up() {
        let mut node = listed();
        for (stream, next) in [(EventStream::Down, 101), (EventStream::Up, 130), (EventStream::Down, 101)] {
            node.event_stream = stream;
            node.relisted(at(100));
            assert_eq!(node.due_at[&Routine::Relist], at(next).uptime);
        }
    }

    #[test]
    fn node_is_not_ready_before_its_first_relist() {
        let mut node = Node::new(at(0));
        node.checked(&Ok(RuntimeStatus::default()), at(1));
        assert_eq!(node.readiness(at(29)), NodeReadiness::Unknown);
        node.checked(&Ok(RuntimeStatus::default()), at(30));
        assert_eq!(node.readiness(at(30)), not_ready(&["PLEG is not healthy: pleg has yet to be successful"]));
        node.take_listing(Listing { looked_at: at(31).uptime, ..Listing::default() });
        assert_eq!(node.readiness(at(31)), NodeReadiness::Ready);
    }
}
