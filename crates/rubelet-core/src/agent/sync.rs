//! The end of a turn: due timers, and the next step of every touched pod.
//!
//! Owns: turning plans into effects. Never: decides for a pod; `pod/sync_pod.rs` and `pod/termination.rs` do.
//! Upstream: HandlePodSyncs, `podWorkerLoop`.

use std::{collections::BTreeSet, sync::Arc};

use crate::{
    agent::Agent,
    api_requests::ApiRequest,
    effect::{EventRecord, InvolvedObject, Severity},
    event_reasons, explain,
    flights::{PodSubject, Subject},
    id::PodUid,
    images::ImageSteps,
    manifest, needs,
    observation::PodFacts,
    op::{ContainerOp, Op, PodOp, VolumeOp},
    pod::{
        Desired, DuringLook, Lifecycle, Look, PodRecord, TerminationCause,
        allocation::update_pod_from_allocation,
        hooks::{Hook, HookRequest, PreStop},
        plan::{Plan, Planned, PodState, WaitsFor},
        restart::CrashLoop,
    },
    pod_manager::is_static_pod,
    snapshot::{PodView, Snapshot},
    status_manager::StatusContext,
    time::Now,
};

impl Agent {
    pub(super) fn handle_time(&mut self, now: Now) {
        self.give_up_overdue(now);
        self.touched.extend(self.timers.due(now));
        let (touched, events) = self.images.due(now);
        self.touched.extend(touched);
        for event in events {
            self.outbox.record(event);
        }
        self.send_routines(now);
        if self.node.is_ready() && self.node.housekeeping_at <= now.uptime {
            self.handle_housekeeping(now);
        }
    }

    pub(super) fn send_routines(&mut self, now: Now) {
        for (routine, op, reason) in self.node.plan(&self.settings, now) {
            self.outbox.send(Subject::Node(routine), op, reason.to_owned(), &self.settings, now);
        }
    }

    /// Plans every touched pod, including those that a plan touches: the end of one pod may let another start.
    pub(super) fn handle_pod_syncs(&mut self, now: Now) {
        let mut seen = BTreeSet::new();
        while let Some(uid) = self.next_to_plan(now) {
            self.sync_pod(&uid, now);
            self.timers.set(&uid, self.records.get(&uid).and_then(|record| record.wake_at));
            seen.insert(uid);
        }
        self.outbox.flights.exec_slots.end_turn();
        let steps = self.images.plan(&self.settings, now);
        self.send_image_steps(steps, now);
        self.sync_qos_cgroups(now);
        self.rotate_logs(now);
        self.delete_images(now);
        self.sync_devices(now);
        self.evict_pods(now);
        self.publish(seen, now);
    }

    /// After the touched pods come those for whose exec probes a slot has become free, and those that a shutdown ends now.
    fn next_to_plan(&mut self, now: Now) -> Option<PodUid> {
        if self.touched.is_empty() {
            self.touched.extend(self.outbox.flights.exec_slots.invite());
        }
        if self.touched.is_empty() {
            self.advance_shutdown(now);
        }
        self.touched.pop_first()
    }

    fn sync_pod(&mut self, uid: &PodUid, now: Now) {
        let Some(record) = self.records.get_mut(uid) else { return };
        if record.lifecycle == Lifecycle::Waiting && !self.admit_waiting_pods(uid, now) {
            return;
        }
        self.start_look(uid, now);
        let Some(state) = self.pod_state(uid) else { return };
        match state.facts.as_ref().map(|facts| state.facts_for_status(facts)) {
            Some(shown) => {
                let plan = self.plan_pod(state, &shown, now);
                self.carry_out(uid, plan, &shown, now);
            }
            None => {
                let wake_at = state.next_retry(now);
                self.records.get_mut(uid).expect("it was just found").wake_at = wake_at;
            }
        }
    }

    /// A static pod may start when its name is free. An API pod never waits: after a forced deletion its successor must start,
    /// even if something of the old pod cannot be stopped.
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

    /// A pod of this name that is only in the runtime is an older version of it, whatever other sources report.
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

    /// Another static pod of this name, or one that is only in the runtime: one that has not terminated, or came first.
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
                    Lifecycle::Terminated { .. } => !other.is_released(),
                    Lifecycle::Finished { .. } => false,
                }
        })
    }

    pub(super) fn warn_of_unsupported(&mut self, uid: &PodUid) {
        let record = &self.records[uid];
        let mut fields = manifest::unsupported(&record.pod);
        // RuntimeClass objects exist only in an API server.
        let has_class = record.pod.spec.as_ref().is_some_and(|spec| spec.runtime_class_name.is_some());
        if has_class && !self.settings.is_in_cluster() {
            fields.push("spec.runtimeClassName".to_owned());
        }
        if !fields.is_empty() {
            self.outbox.record(EventRecord::new(
                InvolvedObject::Pod(record.id.clone()),
                Severity::Warning,
                event_reasons::UNSUPPORTED_FIELDS,
                format!("unsupported fields ignored: {}", fields.join(", ")),
            ));
        }
    }

    pub(super) fn request_look(&mut self, uid: &PodUid) {
        if let Some(record) = self.records.get_mut(uid) {
            record.request_look(DuringLook::Hint);
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
        self.outbox.send(subject, op, "look is due".to_owned(), &self.settings, now);
    }

    pub(super) fn pod_state<'a>(&'a self, uid: &'a PodUid) -> Option<PodState<'a>> {
        let record = self.records.get(uid)?;
        Some(PodState { record, flights: self.outbox.pod_flights(uid) })
    }

    fn carry_out(&mut self, uid: &PodUid, plan: Plan, shown: &PodFacts, now: Now) {
        let record = self.records.get_mut(uid).expect("a plan is for a known pod");
        let (id, pod) = (record.id.clone(), record.pod.clone());
        let has_moved = plan.next.as_ref().is_some_and(|next| next.name() != record.lifecycle.name());
        record.failure = record.failure.take().or(plan.failure);
        for (name, waiting) in plan.waiting {
            record.container_mut(&name).waiting = Some(waiting);
        }
        for id in &plan.restarting {
            record.instance_mut(id).is_restarting = true;
        }
        if let Some(status) = plan.status {
            self.statuses.set_pod_status(&pod, status, StatusContext { pods: &self.pods, now });
        }
        self.probe_pod(uid, shown, now);
        self.node.logs.track(&id, shown, &self.settings.logs, now);
        for event in plan.events {
            self.outbox.record(event);
        }
        for planned in plan.steps {
            self.send_planned(uid, planned, now);
        }
        let record = self.records.get_mut(uid).expect("a plan is for a known pod");
        if let Some(next) = plan.next {
            record.enter(next, now);
        }
        record.waits_for = plan.waits_for;
        let mut volume_waits = plan.volume_waits;
        for (name, volume) in &mut record.volumes {
            volume.waits_for = volume_waits.remove(name);
        }
        record.wake_at = [plan.wake_at, record.probes.next_wakeup(now)].into_iter().flatten().min();
        if plan.image_volumes_settled {
            self.images.forget_volumes(uid);
        }
        for request in plan.images {
            if self.images.supersede(uid, &request) {
                self.outbox.cancel(&Subject::Pod(uid.clone(), PodSubject::Image(request.target.clone())));
            }
            if let Some(op) = self.images.ensure_image(&id, &request, now) {
                let steps = ImageSteps { ops: vec![(uid.clone(), request.target, op)], events: Vec::new() };
                self.send_image_steps(steps, now);
            }
        }
        for (source, options) in plan.devices {
            self.stage_device(source, options, now);
        }
        if plan.is_over {
            let grace_secs = self.records[uid].grace_secs();
            self.terminate(uid, TerminationCause::Completed, grace_secs, now);
        }
        if plan.is_gone {
            self.drop_record(uid, now);
        } else if has_moved {
            self.lifecycle_moved(uid, now);
            self.touched.insert(uid.clone());
        }
    }

    fn lifecycle_moved(&mut self, uid: &PodUid, now: Now) {
        self.node.qos.pods_changed = true;
        let record = &self.records[uid];
        self.api_requests.mirrors.insert(record.id.full_name());
        match record.lifecycle {
            // It waits for the API server to have its end, which was held back while something might run.
            Lifecycle::Terminated { cause: TerminationCause::Failed } => self.statuses.send_again(uid, &self.pods),
            Lifecycle::Finished { .. } if record.pod.spec.is_some() => {
                self.statuses.terminate_pod(&record.pod, StatusContext { pods: &self.pods, now });
            }
            _ => {}
        }
        self.touch_waiting_pods();
    }

    /// A pod of the same name may have waited for this.
    pub(super) fn touch_waiting_pods(&mut self) {
        let waiting = self.records.values().filter(|other| other.lifecycle == Lifecycle::Waiting);
        self.touched.extend(waiting.map(|other| other.id.uid.clone()));
    }

    /// The pod's remains are gone. A pod that is desired again starts over.
    fn drop_record(&mut self, uid: &PodUid, now: Now) {
        let record = self.records.remove(uid).expect("the caller found it");
        self.api_requests.mirrors.insert(record.id.full_name());
        self.api_requests.forget(&ApiRequest::Status(uid.clone()));
        self.images.forget_pod(uid);
        self.node.logs.forget_pod(uid);
        self.outbox.cancel_of_pod(uid, |_, _| true);
        self.node.gone.insert(uid.clone(), now.uptime);
        self.statuses.remove_orphaned_statuses(&self.records.keys().cloned().collect());
        if let Desired::By(source) = record.desired
            && let Some(pod) = self.pods.pod_by_uid(uid).cloned()
        {
            let arrival = self.outbox.next_arrival();
            let pod = update_pod_from_allocation(pod, None);
            let mut again = PodRecord::new(record.id.clone(), pod, Desired::By(source), arrival, now);
            again.look = Look::Requested;
            again.keep_back_offs(&record);
            self.records.insert(uid.clone(), again);
            // It may have been deleted while it terminated for another reason.
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
            Op::Volume(VolumeOp::SetUp { volume, .. } | VolumeOp::Resolve { volume, .. }) => {
                record.put_off_refresh(Some(volume), now.uptime + self.settings.sync_frequency);
            }
            Op::Volume(VolumeOp::Refresh { .. }) => {
                record.put_off_refresh(None, now.uptime + self.settings.sync_frequency);
            }
            Op::Container(_) | Op::Volume(_) | Op::Node(_) | Op::Pod(_) | Op::Image(_) | Op::Log(_) | Op::Api(_) => {}
        }
        self.outbox.send(subject, op, reason, &self.settings, now);
    }

    pub(super) fn send_image_steps(&mut self, steps: ImageSteps, now: Now) {
        for event in steps.events {
            self.outbox.record(event);
        }
        for (uid, target, op) in steps.ops {
            let reason = format!("{target} needs it");
            self.outbox.send(Subject::Pod(uid, PodSubject::Image(target)), op, reason, &self.settings, now);
        }
    }

    /// Publishes new views of the touched pods.
    fn publish(&mut self, seen: BTreeSet<PodUid>, now: Now) {
        let node = explain::node_view(&self.settings, &self.node, &self.config, now);
        let eviction = self.eviction_view(now);
        if seen.is_empty() && node == self.snapshot.node && Arc::ptr_eq(&eviction, &self.snapshot.eviction) {
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
                    let needs = needs::published(record, pods.get(uid).map(AsRef::as_ref));
                    let view = PodView { mirror_uid, needs, ..explain::pod_view(state, status, &self.images, now) };
                    pods.insert_mut(uid.clone(), Arc::new(view));
                }
                None => {
                    pods.remove_mut(uid);
                }
            }
        }
        self.snapshot = Arc::new(Snapshot { node, eviction, pods, changed: seen });
    }
}

/// A container is restarted: its next crash waits longer.
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
