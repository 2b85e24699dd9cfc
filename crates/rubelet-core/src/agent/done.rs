//! The result of an effect, applied to the pod, the image or the node.
//!
//! Owns: the transitions that results cause, and the events about them. Never: plans the next step.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use self::events::{failed_volume, leftover_task, stuck};
use crate::{
    agent::{Agent, devices},
    effect::{EffectError, EffectId, ErrorKind, EventRecord, Facts, InvolvedObject, Reason, Severity},
    event::Source,
    event_reasons,
    flights::{Flight, PodSubject, Subject},
    id::{ContainerId, PodUid},
    images::ImageTarget,
    node::Routine,
    observation::{ContainerFacts, ContainerState, Exit, Listing, PodFacts},
    op::{ContainerOp, Dirties, Op, OpKind, PodOp, VolumeOp},
    pod::{
        Cure, DuringLook, Failure, Lifecycle, Look, PodRecord, Preparation,
        hooks::{Hook, HookRequest, POST_START_LIMIT},
        plan::Planned,
        sandbox::{SandboxAction, sandbox_action},
        status::Waiting,
        sync_pod::event,
    },
    time::{Now, Uptime},
};

mod events;
mod volumes;

impl Agent {
    pub(super) fn handle_done(&mut self, id: EffectId, result: Result<Facts, EffectError>, now: Now) {
        // Otherwise the effect was cancelled, timed out, or its result came twice.
        let Some((subject, flight)) = self.outbox.flights.end(id) else { return };
        match subject {
            Subject::Api(request) => self.api_request_done(request, &flight.op, result, now),
            Subject::Node(routine) => {
                self.suspect_runtime_after(&result, now);
                self.routine_done(routine, &flight.op, result, now);
            }
            Subject::Pod(uid, subject) => {
                self.suspect_runtime_after(&result, now);
                self.pod_done(&uid, subject, &flight, result, now);
            }
            Subject::Device(name) => self.device_done(&name, &flight.op, result, now),
            Subject::Log(_, task) => self.log_done(task, &flight.op, &result, now),
        }
    }

    fn suspect_runtime_after(&mut self, result: &Result<Facts, EffectError>, now: Now) {
        if let Err(error) = result
            && matches!(error.kind, ErrorKind::Unavailable | ErrorKind::TimedOut)
        {
            self.node.suspect_runtime(now);
        }
    }

    /// An effect without a result by its deadline has failed.
    pub(super) fn give_up_overdue(&mut self, now: Now) {
        for id in self.outbox.flights.overdue(now) {
            self.outbox.stop(id);
            let lost = EffectError { kind: ErrorKind::TimedOut, message: "no answer in time".to_owned() };
            self.handle_done(id, Err(lost), now);
        }
    }

    fn routine_done(&mut self, routine: Routine, op: &Op, result: Result<Facts, EffectError>, now: Now) {
        match routine {
            Routine::CheckRuntime => self.runtime_checked(result, now),
            Routine::Relist => {
                self.node.relisted(now);
                if let Ok(Facts::Listing(listing)) = result {
                    self.handle_listing(listing, now);
                }
            }
            Routine::SyncQosCgroups => self.qos_cgroups_synced(result, now),
            Routine::ListPodDirs => {
                self.node.dirs_listed(now);
                if let Ok(Facts::PodDirs { uids, log_dirs }) = result {
                    self.adopt_directories(uids, &log_dirs, now);
                }
            }
            Routine::ListDevices => self.devices_listed(result, now),
            Routine::MeasureLogs => self.logs_measured(op, result, now),
            Routine::ListImages => self.images_listed(result, now),
            Routine::DeleteImage => self.image_deleted(op, result),
            Routine::MeasureNode => self.node_measured(result, now),
            Routine::FindImageFs => self.image_fs_found(result, now),
            Routine::RankPods => self.pods_ranked(result, now),
            Routine::CheckLocalStorage => self.local_storage_checked(op, result, now),
        }
    }

    fn runtime_checked(&mut self, result: Result<Facts, EffectError>, now: Now) {
        let was_ready = self.node.is_ready();
        let status = result.and_then(|facts| match facts {
            Facts::Runtime(status) => Ok(status),
            other => Err(EffectError { kind: ErrorKind::Retry, message: format!("unexpected answer {other:?}") }),
        });
        let has_become_ready = self.node.checked(&status, now);
        if has_become_ready {
            let uids: Vec<_> = self.records.keys().cloned().collect();
            for uid in uids {
                self.request_look(&uid);
            }
        }
        if was_ready != self.node.is_ready() {
            self.record_runtime_change();
            self.touched.extend(self.records.keys().cloned());
        }
    }

    /// In a cluster the node's Ready condition reports it, with upstream's grace for a runtime that restarts.
    fn record_runtime_change(&mut self) {
        if self.settings.sources.contains(&Source::Api) {
            return;
        }
        let (severity, reason, message) = match &self.node.runtime_problem {
            Some(problem) => (
                Severity::Warning,
                event_reasons::NODE_NOT_READY,
                format!("container runtime is down: {}", problem.message),
            ),
            None => {
                let name = format!("{} {}", self.node.status.name, self.node.status.version);
                (Severity::Normal, event_reasons::NODE_READY, format!("container runtime is up: {name}"))
            }
        };
        self.outbox.record(EventRecord::new(InvolvedObject::Node, severity, reason, message));
    }

    fn handle_listing(&mut self, listing: Listing, now: Now) {
        let differs: Vec<PodUid> = self
            .records
            .values()
            .filter(|record| match (&record.facts, listing.pods.get(&record.id.uid)) {
                (Some(facts), Some(listed)) => !listed.agrees_with(facts),
                (Some(facts), None) => !facts.sandboxes.is_empty() || !facts.containers.is_empty(),
                (None, _) => false,
            })
            .map(|record| record.id.uid.clone())
            .collect();
        for uid in differs {
            self.request_look(&uid);
        }
        self.name_orphans(&listing);
        let is_first = self.node.listing.is_none();
        self.node.take_listing(listing);
        if is_first {
            self.touched.extend(self.records.keys().cloned());
        }
        self.handle_pod_cleanups(now);
    }

    fn pod_done(
        &mut self,
        uid: &PodUid,
        subject: PodSubject,
        flight: &Flight,
        result: Result<Facts, EffectError>,
        now: Now,
    ) {
        self.touched.insert(uid.clone());
        match subject {
            PodSubject::Look => self.look_done(uid, result, now),
            PodSubject::Probe(id, kind) => self.probe_done(uid, &id, kind, result, now),
            PodSubject::Image(target) => {
                let result = result.map(|facts| match facts {
                    Facts::Image(image) => image,
                    _ => None,
                });
                let steps = self.images.done(uid, &target, &result, now);
                self.send_image_steps(steps, now);
            }
            PodSubject::Pod
            | PodSubject::Volume(_)
            | PodSubject::Unmount(_)
            | PodSubject::Volumes
            | PodSubject::Container(_)
            | PodSubject::Removal(_) => {
                self.step_done(uid, subject, flight, result, now);
            }
        }
    }

    fn look_done(&mut self, uid: &PodUid, result: Result<Facts, EffectError>, now: Now) {
        let Some(record) = self.records.get_mut(uid) else { return };
        let Look::UnderWay { meanwhile } = record.look else { return };
        record.look = if meanwhile == DuringLook::Nothing { Look::Idle } else { Look::Requested };
        match result {
            Ok(Facts::Pod(facts)) => {
                apply_look(record, facts, meanwhile, now);
                self.end_hooks_of_the_dead(uid, now);
            }
            // The look failed: the next one is delayed.
            Ok(_) | Err(_) => record.look_failed(now),
        }
    }

    fn step_done(
        &mut self,
        uid: &PodUid,
        subject: PodSubject,
        flight: &Flight,
        result: Result<Facts, EffectError>,
        now: Now,
    ) {
        let Some(record) = self.records.get_mut(uid) else { return };
        let was_released = record.is_released();
        let started = started(&flight.op, &result);
        let exceeds_limit = result == Ok(Facts::AttachLimit { is_exceeded: true });
        let result = devices::labelled(record, &flight.op, result, &self.node.devices, &self.settings.node);
        devices::note_step(&mut self.node.devices, uid, &flight.op, &result);
        for event in apply_result(record, &subject, flight, result, now) {
            self.outbox.record(event);
        }
        if let Op::Container(ContainerOp::Start(order)) = &flight.op {
            self.images.forget(uid, &ImageTarget::Container(order.container.clone()));
        }
        if flight.op.dirties() == Dirties::Runtime {
            // Any result, also a failure, may have changed the runtime.
            record.is_fresh = false;
            record.request_look(DuringLook::Change);
        }
        if exceeds_limit {
            devices::reject_for_attach_limit(record, &self.node, &mut self.outbox, now);
        }
        let becomes_released = !was_released && record.is_released();
        let post_start = started
            .filter(|_| record.lifecycle == Lifecycle::Syncing)
            .and_then(|(name, id)| HookRequest::of(record, &name, &id, Hook::PostStart, POST_START_LIMIT));
        if let Some(order) = post_start {
            let reason = "the container has started".to_owned();
            self.send_planned(uid, Planned { subject, op: Op::Container(ContainerOp::RunHook(order)), reason }, now);
        }
        if becomes_released {
            // Its name is free, even while its remains stay.
            self.touch_waiting_pods();
        }
    }

    /// A postStart hook ends with its container: a command that hangs in a dead container must not block the pod.
    fn end_hooks_of_the_dead(&mut self, uid: &PodUid, now: Now) {
        let Some(record) = self.records.get(uid) else { return };
        let Some(facts) = &record.facts else { return };
        let has_ended = |id: &ContainerId| facts.containers.iter().any(|it| it.id == *id && it.exit().is_some());
        let is_over = |flight: &Flight| flight.hook(Hook::PostStart).is_some_and(|request| has_ended(&request.id));
        let flights = self.outbox.pod_flights(uid).changes().filter(|(_, flight)| is_over(flight));
        for id in flights.map(|(_, flight)| flight.id).collect::<Vec<_>>() {
            self.outbox.stop(id);
            let ended = EffectError { kind: ErrorKind::Gone, message: "the container has ended".to_owned() };
            self.handle_done(id, Err(ended), now);
        }
    }
}

/// A new look at the pod.
fn apply_look(record: &mut PodRecord, mut facts: PodFacts, meanwhile: DuringLook, now: Now) {
    record.failures.remove(&PodSubject::Look);
    set_apart_interrupted_starts(record, &mut facts);
    if meanwhile != DuringLook::Change {
        forget_what_is_gone(record, &facts);
    }
    // A container that exited since the last look exited after it, whatever the wall clock did.
    let last_look = record.facts.as_ref().map_or(Uptime::ZERO, |facts| facts.looked_at);
    for container in &facts.containers {
        match &container.state {
            ContainerState::Exited(exit) => {
                let ended = now.uptime.saturating_sub(now.wall_since(exit.finished_at)).max(last_look);
                record.instance_mut(&container.id).finished_at.get_or_insert(ended);
            }
            ContainerState::Running { .. } if record.instance(&container.id).has_post_start_failed => {}
            ContainerState::Running { .. } => {
                if let Some(known) = record.container_records.get_mut(&container.name) {
                    known.waiting = None;
                }
            }
            ContainerState::Created | ContainerState::Unknown => {}
        }
    }
    if meanwhile != DuringLook::Change {
        for container in record.container_records.values_mut() {
            if std::mem::take(&mut container.has_unseen_start) {
                container.waiting = None;
            }
        }
    }
    if let Some(earlier) = &record.facts
        && !facts.sandboxes.is_empty()
    {
        // The runtime has not restarted since: containers missing from the list are late, or were removed to be recreated.
        facts.logged_attempts.clone_from(&earlier.logged_attempts);
    }
    record.facts = Some(Arc::new(facts));
    record.is_fresh = meanwhile != DuringLook::Change;
}

/// Only called for fresh looks: others do not show what was started since.
fn forget_what_is_gone(record: &mut PodRecord, facts: &PodFacts) {
    let is_known = |id: &ContainerId| facts.containers.iter().any(|container| container.id == *id);
    record.instances.retain(|id, _| is_known(id));
    let set_apart: BTreeSet<_> = record.interrupted_starts().map(|(_, id)| id.clone()).collect();
    record.failures.retain(|subject, _| match subject {
        PodSubject::Removal(id) => is_known(id) || set_apart.contains(id),
        _ => true,
    });
    if sandbox_action(record, facts) == SandboxAction::StayDown {
        // Without a sandbox no container restarts: it keeps its last exit. Why a start failed is dropped, because nothing
        // repeats it: after a restart the agent would not know the reason, and would write another status.
        record.instances.values_mut().for_each(|instance| instance.is_restarting = false);
        record.container_records.values_mut().for_each(|container| container.waiting = None);
    }
    record.stopped_sandboxes.retain(|id| facts.sandboxes.iter().any(|sandbox| sandbox.id == *id));
}

/// A runtime aborts the start of a container when its client dies; such a container failed without having run. That is no crash
/// of the pod: the container is removed and its attempt made again. Not so for an attempt of this process, for one whose
/// predecessor did not run either or is not known (its number would be lost), for one whose end was reported to the API
/// server, and for one that the runtime does not manage to remove.
fn set_apart_interrupted_starts(record: &mut PodRecord, facts: &mut PodFacts) {
    let never_ran = |container: &ContainerFacts| container.exit().is_some_and(|exit| exit.started_at.is_none());
    let newest_by_name: BTreeMap<_, _> = facts.containers.iter().rev().map(|each| (each.name.clone(), each)).collect();
    let is_interrupted = |newest: &ContainerFacts| {
        let has_predecessor = || {
            let mut earlier =
                facts.containers.iter().filter(|other| other.name == newest.name && other.id != newest.id);
            earlier.next().is_some_and(|predecessor| !never_ran(predecessor))
        };
        newest.exit().is_some_and(Exit::was_cut_off)
            && record.container(&newest.name).last_attempt != Some(newest.attempt)
            && !record.has_reported_end_of(&newest.id)
            && (newest.attempt == 0 || has_predecessor())
            && !record.failures.get(&PodSubject::Removal(newest.id.clone())).is_some_and(Failure::is_stuck)
    };
    let interrupted: BTreeMap<_, _> = newest_by_name
        .into_iter()
        .filter(|(_, newest)| is_interrupted(newest))
        .map(|(name, newest)| (name, newest.id.clone()))
        .collect();
    facts.containers.retain(|container| !interrupted.values().any(|id| *id == container.id));
    for container in record.container_records.values_mut() {
        container.interrupted_start = None;
    }
    for (name, id) in interrupted {
        record.container_mut(&name).interrupted_start = Some(id);
    }
}

impl PodRecord {
    fn has_reported_end_of(&self, id: &ContainerId) -> bool {
        let Some(status) = &self.pod.status else { return false };
        let mut reported = status.container_statuses.iter().chain(&status.init_container_statuses).flatten();
        reported.any(|container| {
            let ended = container.state.as_ref().and_then(|state| state.terminated.as_ref());
            let told_id = ended.and_then(|ended| ended.container_id.as_deref()?.split_once("://"));
            told_id.is_some_and(|(_, told_id)| told_id == id.as_str())
        })
    }
}

impl PodRecord {
    fn look_failed(&mut self, now: Now) {
        let failure =
            Failure::after(self.failures.get(&PodSubject::Look), "the look at the runtime failed".to_owned(), now);
        self.failures.insert(PodSubject::Look, failure);
        self.look = Look::Requested;
    }

    /// A look is requested and not delayed by an earlier failure.
    pub(super) fn may_look(&self, now: Now) -> bool {
        self.look == Look::Requested && !self.is_waiting_to_retry(&PodSubject::Look, now)
    }
}

/// Applies the result of a mutating effect to the record; returns the events to record.
fn apply_result(
    record: &mut PodRecord,
    subject: &PodSubject,
    flight: &Flight,
    result: Result<Facts, EffectError>,
    now: Now,
) -> Vec<EventRecord> {
    if let Op::Container(ContainerOp::RunHook(order)) = &flight.op {
        let fell_back = result.as_ref().ok().and_then(|facts| order.fell_back(facts));
        return record.hook_ended(order, result.err(), now).into_iter().chain(fell_back).collect();
    }
    if let Op::Volume(op) = &flight.op
        && let Some(events) = volumes::renewal_ended(record, op, &result, now)
    {
        // What failed with an earlier answer keeps its back-off.
        if result.is_ok() && !matches!(op, VolumeOp::Resolve { .. }) {
            record.failures.remove(subject);
        }
        return events;
    }
    match (&flight.op, &result) {
        (_, Ok(Facts::Remains(remains))) => record.remains = Some(*remains),
        (_, Ok(Facts::MountedVolumes(mounted))) => record.mounted.clone_from(mounted),
        (Op::Volume(VolumeOp::Unmount { volume, .. }), Ok(_)) => drop(record.mounted.remove(volume)),
        (Op::Volume(VolumeOp::Resolve { volume, .. }), Ok(Facts::Volume(source))) => {
            record.volumes.entry(volume.clone()).or_default().resolved(source, now);
        }
        // What ran until now may have left new files or mounts, and so may a start that hung.
        (Op::Container(ContainerOp::Stop { .. }) | Op::Pod(PodOp::StopSandbox { .. }), _)
        | (Op::Pod(PodOp::RemoveDir(_)), Err(_)) => record.remains = None,
        _ => {}
    }
    if let (Op::Container(ContainerOp::Remove { name, id, .. }), Ok(Facts::LeftoverTask { error })) =
        (&flight.op, &result)
    {
        record.failures.remove(subject);
        return vec![leftover_task(record, name, id, error)];
    }
    let error = match result {
        Ok(_) => None,
        // What was to be stopped or removed is already gone: success.
        Err(error) if error.kind == ErrorKind::Gone && flight.op.kind() == OpKind::End => None,
        Err(error) => Some(error),
    };
    let Some(error) = error else {
        record.failures.remove(subject);
        return succeeded(record, &flight.op);
    };
    if flight.op.kind() == OpKind::Start && record.lifecycle != Lifecycle::Syncing {
        // The pod is terminating: a failed start is no failure.
        return Vec::new();
    }
    if let Op::Container(ContainerOp::Remove { .. }) | Op::Pod(PodOp::RemoveSandbox { .. }) = &flight.op
        && error.kind == ErrorKind::Retry
    {
        let failure = Failure::of_removal(record.failures.get(subject), error.message, now);
        let events = failure.has_become_stuck().then(|| stuck(record, &flight.op, &failure.message));
        record.failures.insert(subject.clone(), failure);
        return events.into_iter().collect();
    }
    let failure = Failure::of_step(&flight.op, record.failures.get(subject), error.message.clone(), now);
    record.failures.insert(subject.clone(), Failure { cure: Cure::of(&flight.op, &error), ..failure });
    failed(record, &flight.op, &error)
}

/// The container that this effect started, if any.
fn started(op: &Op, result: &Result<Facts, EffectError>) -> Option<(String, ContainerId)> {
    match (op, result) {
        (Op::Container(ContainerOp::Start(order)), Ok(Facts::Container { id })) => {
            Some((order.container.clone(), id.clone()))
        }
        (Op::Container(ContainerOp::Resume { name, id, .. }), Ok(_)) => Some((name.clone(), id.clone())),
        _ => None,
    }
}

fn succeeded(record: &mut PodRecord, op: &Op) -> Vec<EventRecord> {
    match op {
        Op::Pod(op) => pod_succeeded(record, op),
        Op::Container(op) => return container_succeeded(record, op),
        Op::Volume(VolumeOp::SetUp { volume, .. }) => {
            record.volumes.entry(volume.clone()).or_default().is_set_up = true;
        }
        Op::Volume(
            VolumeOp::Resolve { .. }
            | VolumeOp::CheckAttachLimit { .. }
            | VolumeOp::Expand { .. }
            | VolumeOp::Stage { .. }
            | VolumeOp::Unstage { .. }
            | VolumeOp::Refresh { .. }
            | VolumeOp::Unmount { .. }
            | VolumeOp::TearDown(_),
        )
        | Op::Node(_)
        | Op::Image(_)
        | Op::Log(_)
        | Op::Api(_) => {}
    }
    Vec::new()
}

fn pod_succeeded(record: &mut PodRecord, op: &PodOp) {
    match op {
        PodOp::SetUpCgroup { .. } => record.prepared = Preparation::Cgroup,
        PodOp::MakeDirs { .. } => record.prepared = Preparation::Directories,
        PodOp::StopSandbox { id, .. } => {
            record.stopped_sandboxes.insert(id.clone());
        }
        PodOp::Inspect { .. }
        | PodOp::RunSandbox(_)
        | PodOp::RemoveSandbox { .. }
        | PodOp::RemoveCgroup(_)
        | PodOp::RemoveDir(_)
        | PodOp::RemoveLogDir(_) => {}
    }
}

fn container_succeeded(record: &mut PodRecord, op: &ContainerOp) -> Vec<EventRecord> {
    let event = |record: &PodRecord, name: &str, reason: &str, message: &str| {
        event(record, name, Severity::Normal, reason, message)
    };
    match op {
        ContainerOp::Start(order) => {
            record.container_mut(&order.container).has_unseen_start = true;
            vec![
                event(record, &order.container, event_reasons::CREATED_CONTAINER, "Container created"),
                event(record, &order.container, event_reasons::STARTED_CONTAINER, "Container started"),
            ]
        }
        ContainerOp::Resume { name, .. } => {
            record.container_mut(name).has_unseen_start = true;
            vec![event(record, name, event_reasons::STARTED_CONTAINER, "Container started")]
        }
        ContainerOp::Stop { .. } | ContainerOp::Remove { .. } | ContainerOp::Probe(_) | ContainerOp::RunHook(_) => {
            Vec::new()
        }
    }
}

fn failed(record: &mut PodRecord, op: &Op, error: &EffectError) -> Vec<EventRecord> {
    let about_pod = |reason: &str, message: String| {
        EventRecord::new(InvolvedObject::Pod(record.id.clone()), Severity::Warning, reason, message)
    };
    match op {
        Op::Container(ContainerOp::Start(order)) => start_failed(record, &order.container, error),
        Op::Container(ContainerOp::Resume { name, .. }) => start_failed(record, name, error),
        Op::Pod(PodOp::RunSandbox(_)) => {
            vec![about_pod(
                event_reasons::FAILED_CREATE_POD_SANDBOX,
                format!("Failed to create pod sandbox: {}", error.message),
            )]
        }
        Op::Pod(PodOp::SetUpCgroup { .. }) => {
            let message = format!("unable to ensure pod container exists: {}", error.message);
            vec![about_pod(event_reasons::FAILED_TO_CREATE_POD_CONTAINER, message)]
        }
        Op::Pod(PodOp::MakeDirs { .. }) => {
            vec![about_pod(
                event_reasons::FAILED_TO_MAKE_POD_DATA_DIRECTORIES,
                format!("error making pod data directories: {}", error.message),
            )]
        }
        Op::Volume(op @ (VolumeOp::Resolve { .. } | VolumeOp::SetUp { .. } | VolumeOp::Refresh { .. })) => {
            vec![failed_volume(record, op, error)]
        }
        Op::Container(ContainerOp::Stop { .. }) | Op::Pod(PodOp::StopSandbox { .. }) => {
            vec![about_pod(event_reasons::FAILED_TO_KILL_POD, format!("error killing pod: {}", error.message))]
        }
        Op::Volume(VolumeOp::Unmount { .. } | VolumeOp::TearDown(_)) => {
            vec![about_pod(event_reasons::FAILED_UNMOUNT_VOLUME, error.message.clone())]
        }
        // Retried until it works; the log has every attempt.
        Op::Pod(
            PodOp::Inspect { .. }
            | PodOp::RemoveCgroup(_)
            | PodOp::RemoveDir(_)
            | PodOp::RemoveLogDir(_)
            | PodOp::RemoveSandbox { .. },
        )
        | Op::Container(ContainerOp::Remove { .. } | ContainerOp::Probe(_) | ContainerOp::RunHook(_))
        | Op::Volume(
            VolumeOp::CheckAttachLimit { .. }
            | VolumeOp::Expand { .. }
            | VolumeOp::Stage { .. }
            | VolumeOp::Unstage { .. },
        )
        | Op::Node(_)
        | Op::Image(_)
        | Op::Log(_)
        | Op::Api(_) => Vec::new(),
    }
}

fn start_failed(record: &mut PodRecord, name: &str, error: &EffectError) -> Vec<EventRecord> {
    let reason = match &error.kind {
        ErrorKind::Reject(reason) => *reason,
        ErrorKind::Retry
        | ErrorKind::Uncertain
        | ErrorKind::FailedByDriver
        | ErrorKind::FileSystemLate
        | ErrorKind::Unavailable
        | ErrorKind::TimedOut
        | ErrorKind::MissingObject
        | ErrorKind::Refused
        | ErrorKind::Gone => Reason::RunContainerError,
    };
    record.container_mut(name).waiting = Some(Waiting { reason, message: error.message.clone() });
    vec![event(
        record,
        name,
        Severity::Warning,
        event_reasons::FAILED_TO_START_CONTAINER,
        format!("Error: {}", error.message),
    )]
}

#[cfg(test)]
mod tests;
