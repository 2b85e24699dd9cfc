//! The termination of a pod.
//!
//! Owns: the order of stopping (containers together, sidecars after them in reverse, sandboxes last) and of cleanup (volumes,
//! the cgroup, containers, sandboxes, directories). Never: shortens a grace period by itself.
//! Upstream: `SyncTerminatingPod`, `SyncTerminatedPod`, `killPodWithSyncResult`.

use std::{collections::BTreeMap, time::Duration};

use crate::{
    cgroups::CgroupTree,
    effect::Severity,
    event_reasons,
    flights::PodSubject,
    observation::{ContainerFacts, PodFacts, Remains, SandboxState, SharedFacts},
    op::{ContainerOp, Op, OpKind, PodOp, PodPlace, VolumeOp},
    pod::{
        Grace, Lifecycle, PodRecord, TerminationCause,
        hooks::{Hook, HookRequest},
        plan::{Plan, PodState, WaitsFor},
        restart_policy::is_sidecar,
        sync_pod::event,
    },
    pod_manager::is_static_pod,
    status_manager::RunningContainers,
    time::Now,
};

/// How long dead containers and logs of a static pod outlive its manifest, so that a pod whose manifest comes back continues
/// its restart counts. Upstream collects the containers of removed pods once a minute.
const STATIC_POD_RETENTION: Duration = Duration::from_mins(1);

impl PodState<'_> {
    /// For a terminating pod: a fresh look shows nothing that runs, and nothing is being started.
    pub fn running_containers(&self) -> RunningContainers {
        let all_ended = |facts: &SharedFacts| !facts.containers.iter().any(ContainerFacts::may_run);
        if !self.is_starting() && self.fresh_facts().is_some_and(all_ended) {
            RunningContainers::None
        } else {
            RunningContainers::Possible
        }
    }

    /// Something may run that no look has shown.
    fn is_starting(&self) -> bool {
        self.flights.changes().any(|(_, flight)| flight.op.kind() == OpKind::Start)
    }
}

/// Plans for a record in `Terminating`: everything is stopped.
pub fn terminating(record: PodState<'_>, facts: &PodFacts, grace: Grace, cause: TerminationCause, now: Now) -> Plan {
    let mut plan = Plan::default();
    if !facts.is_active() && !has_unstopped_sandbox(&record, facts) {
        if !record.flights.has_changes() {
            plan.next = Some(Lifecycle::Terminated { cause });
        } else {
            plan.wait_for(WaitsFor::StepUnderWay);
        }
        return plan;
    }
    stop_everything(record, facts, Some(grace), &mut plan, now);
    plan
}

/// Plans for a record in `Terminated` or `Finished`: resources are reclaimed. A pod that completed keeps its dead containers,
/// for their logs and exit codes, until it is no longer desired.
pub fn ended(
    record: PodState<'_>,
    facts: &PodFacts,
    cause: TerminationCause,
    cgroups: Option<CgroupTree<'_>>,
    now: Now,
) -> Plan {
    let mut plan = Plan::default();
    let cgroup_paths = cgroups.map_or_else(Vec::new, |tree| tree.pod_paths(&record.id.uid));
    let place = PodPlace { pod: record.id.clone(), cgroup_paths };
    if facts.is_active() {
        // A container was started from outside. The resources it uses stay until it is gone.
        stop_everything(record, facts, None, &mut plan, now);
    } else if !record.is_released() && record.flights.has_volumes() {
        plan.wait_for(WaitsFor::StepUnderWay);
    } else if !record.is_released() && !record.mounted.is_empty() {
        unmount_volumes(record, &mut plan, now);
    } else if !record.is_released() {
        let (op, waits_for) = next_release(record.remains, place);
        pod_step(record, op, waits_for, &mut plan, now);
    } else {
        match cause {
            TerminationCause::Completed => plan.next = Some(Lifecycle::Finished { cause }),
            // Its logs are read after the boot.
            TerminationCause::Failed if record.has_ended_with_node() => plan.next = Some(Lifecycle::Finished { cause }),
            // Without its dead containers the next process would run it again.
            TerminationCause::Failed
                if record.is_desired() && !is_static_pod(&record.pod) && !record.has_ended_in_api() =>
            {
                plan.wait_for(WaitsFor::EndInApi);
            }
            // They hold what the node may lack; upstream removes them at once, too.
            TerminationCause::Failed => {
                if remove_dead(record, facts, &mut plan, now) && !record.flights.has_changes() {
                    plan.next = Some(Lifecycle::Finished { cause });
                }
            }
            // The API server has the pod until its resources are reclaimed; until then its logs stay readable.
            TerminationCause::Removed if record.is_desired() && record.pod.metadata.deletion_timestamp.is_some() => {
                plan.next = Some(Lifecycle::Finished { cause });
            }
            // Desired again: it starts over, and its attempts continue from the earlier ones.
            TerminationCause::Removed | TerminationCause::Orphaned if record.is_desired() => {
                drop_record(record, cause, &mut plan);
            }
            TerminationCause::Removed
                if is_static_pod(&record.pod) && now.uptime < record.since.uptime + STATIC_POD_RETENTION =>
            {
                plan.wake_at = Some(record.since.uptime + STATIC_POD_RETENTION);
                plan.wait_for(WaitsFor::ManifestToReturn);
            }
            TerminationCause::Removed | TerminationCause::Orphaned => {
                if remove_dead(record, facts, &mut plan, now) {
                    match next_removal(record.remains, place) {
                        Some((op, waits_for)) => pod_step(record, op, waits_for, &mut plan, now),
                        None => drop_record(record, cause, &mut plan),
                    }
                }
            }
        }
    }
    plan
}

/// Side by side: one that hangs or fails delays no other.
fn unmount_volumes(record: PodState<'_>, plan: &mut Plan, now: Now) {
    for volume in &record.mounted {
        let subject = PodSubject::Unmount(volume.clone());
        if !record.is_busy(&subject, now) {
            let op = VolumeOp::Unmount { pod: record.id.clone(), volume: volume.clone() };
            plan.step(subject, op, "the pod has ended");
        }
    }
    plan.wait_for(WaitsFor::VolumesToTearDown);
}

/// What the pod still holds on the node. While unknown, volumes are torn down first: that is safe to repeat.
fn next_release(remains: Option<Remains>, place: PodPlace) -> (Op, WaitsFor) {
    match remains {
        Some(Remains::Cgroup) => (Op::Pod(PodOp::RemoveCgroup(place)), WaitsFor::CgroupToRemove),
        None | Some(Remains::Volumes | Remains::PodDir | Remains::Logs | Remains::Nothing) => {
            (Op::Volume(VolumeOp::TearDown(place)), WaitsFor::VolumesToTearDown)
        }
    }
}

/// What is left on disk of a pod whose resources are reclaimed; `None` when nothing is.
fn next_removal(remains: Option<Remains>, place: PodPlace) -> Option<(Op, WaitsFor)> {
    match remains {
        Some(Remains::Nothing) => None,
        Some(Remains::Logs) => Some((Op::Pod(PodOp::RemoveLogDir(place)), WaitsFor::LogsToRemove)),
        None | Some(Remains::Volumes | Remains::Cgroup | Remains::PodDir) => {
            Some((Op::Pod(PodOp::RemoveDir(place)), WaitsFor::PodDirToRemove))
        }
    }
}

/// Removes dead containers, then sandboxes; true when none is left.
fn remove_dead(record: PodState<'_>, facts: &PodFacts, plan: &mut Plan, now: Now) -> bool {
    let seen = facts.containers.iter().map(|container| (&container.name, &container.id));
    let dead: BTreeMap<_, _> = seen.chain(record.interrupted_starts()).map(|(name, id)| (id, name)).collect();
    for (id, name) in &dead {
        let subject = PodSubject::Removal((*id).clone());
        if !record.is_busy(&subject, now) {
            let (pod, name, id) = (record.id.clone(), (*name).clone(), (*id).clone());
            plan.step(subject, ContainerOp::Remove { pod, name, id }, "pod is no longer desired");
        }
    }
    if !dead.is_empty() {
        plan.wait_for(WaitsFor::DeadContainersToRemove);
    } else if let Some(sandbox) = facts.sandboxes.first() {
        let op = PodOp::RemoveSandbox { pod: record.id.clone(), id: sandbox.id.clone() };
        pod_step(record, op, WaitsFor::SandboxToRemove, plan, now);
    }
    dead.is_empty() && facts.sandboxes.is_empty()
}

/// Nothing is left; the record may be dropped when no effect is in flight.
fn drop_record(record: PodState<'_>, cause: TerminationCause, plan: &mut Plan) {
    if record.flights.has_changes() {
        plan.wait_for(WaitsFor::StepUnderWay);
    } else {
        plan.next = Some(Lifecycle::Finished { cause });
        plan.is_gone = true;
    }
}

/// The next step on the pod itself, unless one is in flight.
fn pod_step(record: PodState<'_>, op: impl Into<Op>, waits_for: WaitsFor, plan: &mut Plan, now: Now) {
    if !record.is_busy(&PodSubject::Pod, now) {
        plan.step(PodSubject::Pod, op, "the pod has ended");
    }
    plan.wait_for(waits_for);
}

/// Stops what runs: first the containers, then the sandboxes. Without a running grace period the pod's own is used.
pub fn stop_everything(record: PodState<'_>, facts: &PodFacts, grace: Option<Grace>, plan: &mut Plan, now: Now) {
    let order = TerminationOrder::of(record, facts, grace, now);
    let is_free = |container: &ContainerFacts, plan: &Plan| {
        let subject = PodSubject::Container(container.name.clone());
        !record.is_busy(&subject, now) && !plan.has_step(&subject)
    };
    let grace_secs = |container: &ContainerFacts| match grace {
        None => record.grace_secs(),
        // The time its hook took is subtracted when it is stopped.
        Some(grace) if is_sidecar_of(&record, &container.name) => {
            grace.remaining_secs(now).saturating_add(record.pre_stop_secs(container).unwrap_or(0))
        }
        // However late the stop is sent, the pod's grace period lies between SIGTERM and SIGKILL.
        Some(grace) => grace.secs,
    };
    for container in &order.now {
        if is_free(container, plan) {
            record_killing(&record, container, plan);
            stop_container(record, container, grace_secs(container), "the pod is being stopped", plan);
        }
    }
    // A sidecar's preStop hook runs at once; the sidecar is stopped after the others.
    for sidecar in &order.later {
        if is_free(sidecar, plan)
            && let Some(order) = pre_stop(&record, sidecar, grace_secs(sidecar))
        {
            record_killing(&record, sidecar, plan);
            plan.step(
                PodSubject::Container(sidecar.name.clone()),
                ContainerOp::RunHook(order),
                "the pod is being stopped",
            );
        }
    }
    if let Some(grace) = grace.filter(|_| !order.later.is_empty()) {
        plan.wake_by(grace.ends_at);
    }
    if !order.now.is_empty() {
        return plan.wait_for(WaitsFor::ContainersToStop);
    }
    if record.flights.changes().any(|(subject, _)| matches!(subject, PodSubject::Container(_))) {
        // A container may be starting: it gets its grace period first, which a sandbox stop would not give.
        return plan.wait_for(WaitsFor::StepUnderWay);
    }
    let unstopped = facts.sandboxes.iter().find(|sandbox| !is_stopped(&record, sandbox));
    if let Some(sandbox) = unstopped {
        let op = PodOp::StopSandbox { pod: record.id.clone(), id: sandbox.id.clone() };
        pod_step(record, op, WaitsFor::SandboxToStop, plan, now);
    }
}

/// Once per instance, when its stop begins.
fn record_killing(record: &PodRecord, container: &ContainerFacts, plan: &mut Plan) {
    let subject = PodSubject::Container(container.name.clone());
    if !record.failures.contains_key(&subject) && record.pre_stop_secs(container).is_none() {
        let message = format!("Stopping container {}", container.name);
        plan.events.push(event(record, &container.name, Severity::Normal, event_reasons::KILLING_CONTAINER, message));
    }
}

/// A stop step for one container, unless one is in flight for it: first its preStop hook, which uses the same grace period.
pub fn stop_container(
    record: PodState<'_>,
    container: &ContainerFacts,
    grace_secs: i64,
    reason: impl Into<String>,
    plan: &mut Plan,
) {
    let subject = PodSubject::Container(container.name.clone());
    if record.flights.contains(&subject) {
        return;
    }
    if let Some(order) = pre_stop(&record, container, grace_secs) {
        return plan.step(subject, ContainerOp::RunHook(order), reason);
    }
    let left_secs = grace_secs.saturating_sub(record.pre_stop_secs(container).unwrap_or(0));
    let op = ContainerOp::Stop {
        pod: record.id.clone(),
        name: container.name.clone(),
        id: container.id.clone(),
        grace_secs: left_secs.max(super::MINIMUM_GRACE_SECS),
    };
    plan.step(subject, op, reason);
}

/// The preStop hook that a running instance still needs.
fn pre_stop(record: &PodRecord, container: &ContainerFacts, grace_secs: i64) -> Option<HookRequest> {
    let limit = Duration::from_secs(u64::try_from(grace_secs).unwrap_or(0));
    let may_run = record.pre_stop_secs(container).is_none() && container.is_running() && !limit.is_zero();
    may_run.then(|| HookRequest::of(record, &container.name, &container.id, Hook::PreStop, limit)).flatten()
}

/// A dead sandbox holds its network until it is stopped once.
pub fn has_unstopped_sandbox(record: &PodRecord, facts: &PodFacts) -> bool {
    facts.sandboxes.iter().any(|sandbox| !is_stopped(record, sandbox))
}

fn is_stopped(record: &PodRecord, sandbox: &crate::observation::SandboxFacts) -> bool {
    sandbox.state == SandboxState::NotReady && record.stopped_sandboxes.contains(&sandbox.id)
}

/// Sidecars are stopped last, with the rest of the pod's grace period.
fn is_sidecar_of(record: &PodRecord, name: &str) -> bool {
    record.init_containers().iter().any(|init| init.name == name && is_sidecar(init))
}

/// The running containers, in the order in which they are stopped.
struct TerminationOrder<'a> {
    /// All running containers except sidecars; when only sidecars are left and nothing is being started, the last of them;
    /// after the grace period, all.
    now: Vec<&'a ContainerFacts>,
    later: Vec<&'a ContainerFacts>,
}

impl<'a> TerminationOrder<'a> {
    fn of(record: PodState<'_>, facts: &'a PodFacts, grace: Option<Grace>, moment: Now) -> Self {
        let sidecar_rank = |container: &ContainerFacts| {
            record.init_containers().iter().position(|init| init.name == container.name && is_sidecar(init))
        };
        let (mut sidecars, mut now): (Vec<_>, Vec<_>) = facts
            .containers
            .iter()
            .filter(|container| container.may_run())
            .partition(|container| sidecar_rank(container).is_some());
        if grace.is_some_and(|grace| grace.ends_at <= moment.uptime) {
            now.append(&mut sidecars);
        } else if now.is_empty() && !record.is_starting() {
            sidecars.sort_by_key(|container| sidecar_rank(container));
            now.extend(sidecars.pop());
        }
        TerminationOrder { now, later: sidecars }
    }
}
