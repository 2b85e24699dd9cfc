//! A turn's end: what time has changed, and the next step of every pod that was touched.
//!
//! Owns: turning plans into effects. Never: decides for a pod; `pod/sync_pod.rs` and `pod/termination.rs` do.
//! Upstream: HandlePodSyncs, `podWorkerLoop`.

use std::{collections::BTreeSet, sync::Arc};

use crate::{
    agent::Agent,
    api_requests::ApiRequest,
    effect::{About, EventRecord, Severity},
    explain,
    flights::{PodSubject, Subject},
    id::PodUid,
    images::ImageSteps,
    manifest,
    node::Routine,
    observation::PodFacts,
    op::{ContainerOp, NodeOp, Op, PodOp, VolumeOp},
    pod::{
        Cause, DuringLook, Lifecycle, Look, PodRecord, Preparation, Wanted,
        allocation::{is_resize_pending, update_pod_from_allocation},
        hooks::{Hook, HookRequest, PreStop},
        plan::{Plan, Planned, PodState, WaitsFor},
        restart::CrashLoop,
        status::{self, FailureReason, PodFailure, Stage, StatusInput},
        sync_pod::{self, Context},
        termination,
    },
    pod_manager::is_static_pod,
    snapshot::{PodView, Snapshot},
    status_manager,
    time::Now,
    volumes,
};

const OVER_DEADLINE: &str = "Pod was active on the node longer than the specified deadline";

impl Agent {
    pub(super) fn handle_time(&mut self, now: Now) {
        self.give_up_overdue(now);
        self.touched.extend(self.timers.due(now));
        let (touched, events) = self.images.due(now);
        self.touched.extend(touched);
        for event in events {
            self.outbox.record(event);
        }
        for routine in self.node.due(now) {
            match routine {
                Routine::CheckRuntime => {
                    self.begin_routine(routine, NodeOp::CheckRuntime, "runtime check is due", now);
                }
                Routine::Relist => self.begin_routine(routine, NodeOp::Relist, "relist is due", now),
                Routine::ListPodDirs => self.begin_routine(routine, NodeOp::ListPodDirs, "orphan scan is due", now),
                // At the end of the turn, when it is known which pods there are.
                Routine::SyncQosCgroups => {}
            }
        }
        if self.node.is_ready() && self.node.housekeeping_at <= now.uptime {
            self.handle_housekeeping(now);
        }
    }

    pub(super) fn begin_routine(&mut self, routine: Routine, op: NodeOp, reason: &str, now: Now) {
        self.node.begin(routine);
        self.outbox.send(Subject::Node(routine), op, reason.to_owned(), &self.settings, now);
    }

    /// Plans every touched pod; one pod's end may let another start, so it goes on until nobody is left.
    pub(super) fn handle_pod_syncs(&mut self, now: Now) {
        let mut seen = BTreeSet::new();
        while let Some(uid) = self.touched.pop_first() {
            self.sync_pod(&uid, now);
            self.timers.set(&uid, self.records.get(&uid).and_then(|record| record.wake_at));
            seen.insert(uid);
        }
        let steps = self.images.plan(&self.settings, now);
        self.send_image_steps(steps, now);
        self.sync_qos_cgroups(now);
        self.publish(seen, now);
    }

    fn sync_pod(&mut self, uid: &PodUid, now: Now) {
        let Some(record) = self.records.get_mut(uid) else { return };
        if record.lifecycle == Lifecycle::Waiting && !self.admit_waiting_pods(uid, now) {
            return;
        }
        self.start_look(uid, now);
        let Some(state) = self.pod_state(uid) else { return };
        let Some(facts) = state.facts.as_ref().map(|facts| state.shown(facts)) else {
            let wake_at = state.next_retry(now);
            self.records.get_mut(uid).expect("it was just found").wake_at = wake_at;
            return;
        };
        let mut is_terminal = self.update_status(uid, &facts, now);
        if !is_terminal && self.enforce_active_deadline(uid, now) {
            is_terminal = self.update_status(uid, &facts, now);
        }
        let Some(record) = self.records.get(uid) else { return };
        if is_terminal && record.lifecycle == Lifecycle::Syncing && record.fresh_facts().is_some() {
            let grace_secs = record.grace_secs();
            self.terminate(uid, Cause::Completed, grace_secs, now);
        }
        if let Some(record) = self.records.get_mut(uid) {
            record.note_all_containers_ended(self.outbox.flights.of_pod(uid));
        }
        self.probe_pod(uid, &facts, now);
        self.plan_pod(uid, now);
    }

    /// A pod that has been here for longer than it may has failed; says whether that was found out now.
    fn enforce_active_deadline(&mut self, uid: &PodUid, now: Now) -> bool {
        let start_time = self.statuses.pod_status(uid, &self.pods).and_then(|status| status.start_time.clone());
        let Some((record, start)) = self.records.get_mut(uid).zip(start_time) else { return false };
        let is_over = record.active_deadline(start.0, now).is_some_and(|moment| moment <= now.uptime);
        if !is_over {
            return false;
        }
        let failure = PodFailure { reason: FailureReason::DeadlineExceeded, message: OVER_DEADLINE.to_owned() };
        let (reason, message) = (failure.reason.to_string(), failure.message.clone());
        record.failure = Some(failure);
        let about = About::Pod(record.id.clone());
        self.outbox.record(EventRecord { about, severity: Severity::Normal, reason, message });
        true
    }

    /// A static pod may start when its name is free. A pod of the API waits for no other: whoever deletes a pod by force must get
    /// its successor, even if something of the old one cannot be stopped.
    pub(super) fn has_free_name(&mut self, uid: &PodUid, now: Now) -> bool {
        let is_static = is_static_pod(&self.records[uid].pod);
        if is_static {
            self.adopt_namesakes(uid, now);
        }
        let holder = if is_static { self.name_holder(&self.records[uid]) } else { None };
        let waits_for = holder.map(|holder| WaitsFor::Namesake(holder.id.clone()));
        let is_free = waits_for.is_none();
        self.records.get_mut(uid).expect("the caller found it").waits_for = waits_for;
        is_free
    }

    /// A pod of this name that only the runtime has is an older version of it, whatever other sources may still say.
    fn adopt_namesakes(&mut self, uid: &PodUid, now: Now) {
        let Some(listing) = &self.node.listing else { return };
        let id = &self.records[uid].id;
        let namesakes = listing.pods.values().map(|listed| &listed.pod).filter(|other| {
            other.name == id.name
                && other.namespace == id.namespace
                && !self.records.contains_key(&other.uid)
                && !self.node.was_gone_after(&other.uid, listing.looked_at)
        });
        for other in namesakes.cloned().collect::<Vec<_>>() {
            self.adopt_orphan(other, now);
        }
    }

    /// Another static pod that has this one's name, or a pod of which only the runtime knows: one that is not over yet, or
    /// came first.
    pub(super) fn name_holder(&self, record: &PodRecord) -> Option<&PodRecord> {
        self.records.values().find(|other| {
            let same_name = other.id.name == record.id.name && other.id.namespace == record.id.namespace;
            let is_of_the_api = other.pod.spec.is_some() && !is_static_pod(&other.pod);
            same_name
                && !is_of_the_api
                && other.id.uid != record.id.uid
                && match other.lifecycle {
                    Lifecycle::Waiting => other.arrival < record.arrival,
                    Lifecycle::Syncing | Lifecycle::Terminating { .. } => true,
                    Lifecycle::Terminated { .. } => other.prepared != Preparation::Nothing,
                    Lifecycle::Finished { .. } => false,
                }
        })
    }

    pub(super) fn warn_of_unsupported(&mut self, uid: &PodUid) {
        let record = &self.records[uid];
        let mut fields = manifest::unsupported(&record.pod);
        // Only an API server knows what a class means.
        let has_class = record.pod.spec.as_ref().is_some_and(|spec| spec.runtime_class_name.is_some());
        if has_class && !self.settings.is_in_cluster() {
            fields.push("spec.runtimeClassName".to_owned());
        }
        if !fields.is_empty() {
            self.outbox.record(EventRecord {
                about: About::Pod(record.id.clone()),
                severity: Severity::Warning,
                reason: "UnsupportedFields".to_owned(),
                message: format!("unsupported fields ignored: {}", fields.join(", ")),
            });
        }
    }

    pub(super) fn want_look(&mut self, uid: &PodUid) {
        if let Some(record) = self.records.get_mut(uid) {
            record.want_look(DuringLook::Hint);
            self.touched.insert(uid.clone());
        }
    }

    fn start_look(&mut self, uid: &PodUid, now: Now) {
        let Some(record) = self.records.get_mut(uid) else { return };
        if !self.node.is_ready() || !record.may_look(now) {
            return;
        }
        let op = PodOp::Inspect { pod: record.id.clone() };
        record.look = Look::UnderWay { meanwhile: DuringLook::Nothing };
        let subject = Subject::Pod(uid.clone(), PodSubject::Look);
        self.outbox.send(subject, op, "something may have changed".to_owned(), &self.settings, now);
    }

    pub(super) fn pod_state<'a>(&'a self, uid: &'a PodUid) -> Option<PodState<'a>> {
        let record = self.records.get(uid)?;
        Some(PodState { record, flights: self.outbox.pod_flights(uid) })
    }

    /// Computes the pod's status and hands it to the status manager; says whether the pod has come to its end.
    fn update_status(&mut self, uid: &PodUid, facts: &PodFacts, now: Now) -> bool {
        let record = &self.records[uid];
        if record.pod.spec.is_none() {
            return false;
        }
        let context = status_manager::Context { pods: &self.pods, now };
        if let Some(failure) = &record.rejected {
            self.statuses.set_pod_status(&record.pod, status::rejected(&record.pod, failure), context);
            return true;
        }
        let mut waiting = record.waiting();
        let names = record.init_containers().iter().chain(record.containers()).map(|container| &container.name);
        for name in names.chain(record.ephemeral_containers().iter().map(|container| &container.name)) {
            if let Some(for_image) = self.images.waiting(uid, name) {
                waiting.insert(name.clone(), for_image.clone());
            }
        }
        let previous = self.statuses.pod_status(uid, &self.pods).map(Arc::as_ref);
        let status = status::pod_status(&StatusInput {
            pod: &record.pod,
            facts,
            previous,
            stored: self.pods.api_pod(uid).and_then(|stored| stored.status.as_ref()),
            waiting: &waiting,
            restarting: &record.restarting(),
            is_resize_pending: self.pods.pod_by_uid(uid).is_some_and(|desired| is_resize_pending(desired, &record.pod)),
            stage: stage(&record.lifecycle),
            host_ips: self.node.host_ips(&self.settings),
            runtime: &self.node.status,
            failed: record.failure.as_ref(),
            now,
        });
        let is_terminal = status.phase.as_deref().is_some_and(status::is_terminal);
        self.statuses.set_pod_status(&record.pod, status, context);
        is_terminal
    }

    fn plan_pod(&mut self, uid: &PodUid, now: Now) {
        let record = &self.records[uid];
        let Some(problem) = &self.node.runtime_problem else {
            let state = PodState { record, flights: self.outbox.pod_flights(uid) };
            let plan = record.fresh_facts().map(|facts| self.plan_of(state, facts, now));
            return match plan {
                Some(plan) => self.carry_out(uid, plan, now),
                None => self.rest(uid, None, now),
            };
        };
        let waits_for = WaitsFor::Runtime(problem.message.clone());
        self.rest(uid, Some(waits_for), now);
    }

    fn plan_of(&self, record: PodState<'_>, facts: &PodFacts, now: Now) -> Plan {
        match record.lifecycle {
            Lifecycle::Waiting => Plan::default(),
            Lifecycle::Syncing => {
                let network_problem = self.node.network_problem.as_ref().map(|problem| problem.message.as_str());
                let settings = &self.settings;
                let (images, host_ips) = (&self.images, self.node.host_ips(settings));
                let (runtime, cgroups) = (&self.node.status, self.cgroups());
                let told = self.statuses.pod_status(&record.id.uid, &self.pods).map(Arc::as_ref);
                let context = Context { images, network_problem, host_ips, runtime, cgroups, settings, told };
                sync_pod::plan(record, facts, context, now)
            }
            Lifecycle::Terminating { grace, cause } => termination::terminating(record, facts, grace, cause, now),
            Lifecycle::Terminated { cause } | Lifecycle::Finished { cause } => {
                termination::ended(record, facts, cause, self.cgroups(), now)
            }
        }
    }

    fn carry_out(&mut self, uid: &PodUid, plan: Plan, now: Now) {
        for event in plan.events {
            self.outbox.record(event);
        }
        for planned in plan.steps {
            self.send_planned(uid, planned, now);
        }
        let record = self.records.get_mut(uid).expect("a plan is for a known pod");
        for id in &plan.restarting {
            record.instance_mut(id).is_restarting = true;
        }
        let id = record.id.clone();
        let mut has_news = false;
        for (name, waiting) in plan.waiting {
            let known = &mut record.container_mut(&name).waiting;
            has_news |= known.as_ref() != Some(&waiting);
            *known = Some(waiting);
        }
        record.wake_at = plan.wake_at;
        let has_moved = plan.next.as_ref().is_some_and(|next| *next != record.lifecycle);
        if let Some(next) = plan.next {
            record.enter(next, now);
        }
        self.rest(uid, plan.waits_for, now);
        for want in plan.images {
            if self.images.supersede(uid, &want) {
                self.outbox.cancel(&Subject::Pod(uid.clone(), PodSubject::Image(want.container.clone())));
            }
            if let Some(op) = self.images.want(&id, &want, now) {
                let steps = ImageSteps { ops: vec![(uid.clone(), want.container, op)], events: Vec::new() };
                self.send_image_steps(steps, now);
            }
        }
        if plan.is_over {
            let grace_secs = self.records[uid].grace_secs();
            self.terminate(uid, Cause::Completed, grace_secs, now);
        }
        if plan.is_gone {
            self.let_go(uid, now);
        } else if has_moved || has_news {
            if has_moved {
                self.lifecycle_moved(uid, now);
            }
            self.touched.insert(uid.clone());
        }
    }

    /// Nothing to do for this pod until something happens or its time comes.
    fn rest(&mut self, uid: &PodUid, waits_for: Option<WaitsFor>, now: Now) {
        let retry = self.pod_state(uid).and_then(|state| state.next_retry(now));
        let record = self.records.get_mut(uid).expect("the caller found it");
        let planned = record.wake_at.filter(|moment| *moment > now.uptime);
        let start_time = self.statuses.pod_status(uid, &self.pods).and_then(|status| status.start_time.as_ref());
        let deadline = start_time.and_then(|start| record.active_deadline(start.0, now));
        let others = [retry, record.probes.next_wakeup(now), deadline];
        let others = others.into_iter().flatten().filter(|moment| *moment > now.uptime);
        record.wake_at = planned.into_iter().chain(others).min();
        record.waits_for = waits_for;
    }

    fn lifecycle_moved(&mut self, uid: &PodUid, now: Now) {
        self.node.qos.pods_changed = true;
        let record = &self.records[uid];
        self.api_requests.mirrors.insert(record.id.full_name());
        if matches!(record.lifecycle, Lifecycle::Finished { .. }) && record.pod.spec.is_some() {
            let context = status_manager::Context { pods: &self.pods, now };
            self.statuses.terminate_pod(&record.pod, context);
        }
        self.touch_waiting_pods();
    }

    /// A pod of the same name may have waited for this.
    pub(super) fn touch_waiting_pods(&mut self) {
        let waiting = self.records.values().filter(|other| other.lifecycle == Lifecycle::Waiting);
        self.touched.extend(waiting.map(|other| other.id.uid.clone()));
    }

    /// The last trace is gone. A pod that is wanted again starts over.
    fn let_go(&mut self, uid: &PodUid, now: Now) {
        let record = self.records.remove(uid).expect("the caller found it");
        self.api_requests.mirrors.insert(record.id.full_name());
        self.api_requests.forget(&ApiRequest::Status(uid.clone()));
        self.images.forget_pod(uid);
        self.outbox.cancel_of_pod(uid, |_, _| true);
        self.node.gone.insert(uid.clone(), now.uptime);
        self.statuses.remove_orphaned_statuses(&self.records.keys().cloned().collect());
        if let Wanted::By(source) = record.wanted
            && let Some(pod) = self.pods.pod_by_uid(uid).cloned()
        {
            let arrival = self.outbox.next_arrival();
            let pod = update_pod_from_allocation(pod, None);
            let mut again = PodRecord::new(record.id, pod, Wanted::By(source), arrival, now);
            again.look = Look::Wanted;
            self.records.insert(uid.clone(), again);
            // It may have been deleted while it ended for another reason.
            self.pod_changed(uid, now);
        }
        self.touch_waiting_pods();
    }

    pub(super) fn send_planned(&mut self, uid: &PodUid, planned: Planned, now: Now) {
        let Planned { subject, op, reason } = planned;
        let subject = Subject::Pod(uid.clone(), subject);
        if self.outbox.flights.contains(&subject) {
            return;
        }
        let record = self.records.get_mut(uid).expect("a plan is for a known pod");
        match &op {
            Op::Container(ContainerOp::Start(order)) => {
                record.container_mut(&order.container).last_attempt = Some(order.attempt);
                note_restart(record, &order.container, &self.settings, now);
            }
            Op::Container(ContainerOp::Resume { name, .. }) => note_restart(record, name, &self.settings, now),
            Op::Container(ContainerOp::RunHook(HookRequest { hook: Hook::PreStop, id, .. })) => {
                record.instance_mut(id).pre_stop = Some(PreStop::Began(now.uptime));
            }
            Op::Volume(VolumeOp::SetUp { pod, .. } | VolumeOp::Refresh { pod, .. }) => {
                let next = now.uptime + self.settings.sync_frequency;
                record.refresh_at = volumes::change_with_time(pod).then_some(next);
            }
            Op::Container(_) | Op::Volume(_) | Op::Node(_) | Op::Pod(_) | Op::Image(_) | Op::Api(_) => {}
        }
        self.outbox.send(subject, op, reason, &self.settings, now);
    }

    pub(super) fn send_image_steps(&mut self, steps: ImageSteps, now: Now) {
        for event in steps.events {
            self.outbox.record(event);
        }
        for (uid, container, op) in steps.ops {
            let reason = format!("container {container} needs it");
            self.outbox.send(Subject::Pod(uid, PodSubject::Image(container)), op, reason, &self.settings, now);
        }
    }

    /// Readers get a new picture of the pods that were touched.
    fn publish(&mut self, seen: BTreeSet<PodUid>, now: Now) {
        let node = explain::node_view(&self.settings, &self.node, &self.config, now);
        if seen.is_empty() && node == self.snapshot.node {
            return;
        }
        let mut pods = self.snapshot.pods.clone();
        for uid in &seen {
            match self.pod_state(uid) {
                Some(state) => {
                    let record = state.record;
                    let status = self.statuses.pod_status(uid, &self.pods).cloned().unwrap_or_default();
                    let mirror = self.pods.mirror_pod_by_full_name(&record.id.full_name());
                    let mirror_uid = mirror.filter(|_| is_static_pod(&record.pod)).map(|mirror| PodUid::of(mirror));
                    let view = PodView { mirror_uid, ..explain::pod_view(state, status, &self.images, now) };
                    pods.insert_mut(uid.clone(), Arc::new(view));
                }
                None => {
                    pods.remove_mut(uid);
                }
            }
        }
        self.snapshot = Arc::new(Snapshot { node, pods, changed: seen });
    }
}

/// A container that ran is started again: its next crash waits longer.
fn note_restart(record: &mut PodRecord, name: &str, settings: &crate::settings::Settings, now: Now) {
    let Some(facts) = &record.facts else { return };
    let mut dead = facts.containers.iter().filter(|container| container.name == name && container.exit().is_some());
    let Some(ended) = dead.next().and_then(|newest| record.instance(&newest.id).finished_at) else { return };
    let all = record.init_containers().iter().chain(record.containers());
    let image = all.into_iter().find(|each| each.name == name).and_then(|each| each.image.as_deref());
    let crash_loop = CrashLoop::after_restart(
        record.container(name).crash_loop.as_ref(),
        image.unwrap_or_default(),
        ended,
        settings.max_container_restart_period,
        now.uptime,
    );
    record.container_mut(name).crash_loop = Some(crash_loop);
}

fn stage(lifecycle: &Lifecycle) -> Stage {
    match lifecycle {
        Lifecycle::Waiting | Lifecycle::Syncing => Stage::Syncing,
        Lifecycle::Terminating { .. } => Stage::Terminating,
        Lifecycle::Terminated { .. } | Lifecycle::Finished { .. } => Stage::Terminated,
    }
}
