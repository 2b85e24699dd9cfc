//! syncPod: the next steps of a pod that should run.
//!
//! Owns: the order of steps. API status and status manager come before this (`agent.rs`), then
//! network ready? → pod cgroup → data directories → volumes → sandbox → images → init containers → containers.
//! The steps "runnable?", mirror pod and pull secrets belong between them; docs/parity.md lists what is missing.
//! Never: does anything; the plan holds only steps that can be taken now, each with its reason.
//! Upstream: `Kubelet.SyncPod`, `kubeGenericRuntimeManager.SyncPod`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, PodStatus};

use crate::{
    cgroups::CgroupTree,
    config::GoDuration,
    container::{find_ephemeral, of_ephemeral, recursive_read_only},
    effect::{EventRecord, InvolvedObject, Reason, Severity},
    event_reasons,
    flights::PodSubject,
    gc,
    id::ContainerId,
    images::{ImageAvailability, ImageRequest, ImageTarget, Images},
    node_object::NodeObject,
    observation::{ContainerState, PodFacts, RuntimeStatus, SandboxFacts},
    op::{ContainerOp, Op, OpKind, PodOp, RunSandbox, StartContainer},
    pod::{
        Lifecycle, PodRecord, Preparation,
        containers::{AfterStop, ContainerAction, ContainerToKill, container_action},
        hooks::has_post_start,
        init::init_plan,
        mount_volumes::{refresh_volumes, set_up_volumes},
        plan::{Plan, PodState, WaitsFor},
        sandbox::{SandboxAction, sandbox_action},
        status::Waiting,
        termination,
    },
    settings::Settings,
    time::Now,
    volumes::devices::Devices,
};

/// What a plan reads beside the pod's record.
#[derive(Clone, Copy, Debug)]
pub struct SyncContext<'a> {
    pub images: &'a Images,
    /// Why the network is not ready; `None` if it is.
    pub network_problem: Option<&'a str>,
    /// The node's addresses, primary first.
    pub host_ips: &'a [String],
    pub runtime: &'a RuntimeStatus,
    /// `None`: pods have no cgroups of their own.
    pub cgroups: Option<CgroupTree<'a>>,
    pub settings: &'a Settings,
    pub devices: &'a Devices,
    /// The Node object; `None` before it was seen.
    pub node: Option<&'a NodeObject>,
    /// The last reported status of the pod.
    pub reported: Option<&'a PodStatus>,
}

/// Plans for a record in `Lifecycle::Syncing` whose facts are fresh.
pub fn plan(record: PodState<'_>, facts: &PodFacts, context: SyncContext<'_>, now: Now) -> Plan {
    debug_assert!(matches!(record.lifecycle, Lifecycle::Syncing));
    let mut plan = Plan::default();
    match sandbox_action(&record, facts) {
        SandboxAction::Keep(sandbox) => {
            containers_plan(record, facts, sandbox, context, &mut plan, now);
            plan.image_volumes_settled =
                !plan.images.iter().any(|request| matches!(request.target, ImageTarget::Volume(_)));
            refresh_volumes(record, context, &mut plan, now);
        }
        SandboxAction::StayDown => termination::stop_everything(record, facts, None, &mut plan, now),
        SandboxAction::Create { attempt, why } => {
            if facts.is_active() || termination::has_unstopped_sandbox(&record, facts) {
                sandbox_changed(record, facts, &mut plan);
                termination::stop_everything(record, facts, None, &mut plan, now);
            } else if is_prepared(record, context, &mut plan, now) && !record.is_busy(&PodSubject::Pod, now) {
                let order = RunSandbox {
                    uid: record.id.uid.clone(),
                    pod: record.pod.clone(),
                    attempt,
                    cgroup_parent: cgroup_parent(&record, context),
                    volume_groups: record.volume_groups(),
                };
                plan.step(PodSubject::Pod, PodOp::RunSandbox(order), why.to_string());
            }
            plan.wait_for(WaitsFor::Sandbox(why));
        }
    }
    collect_dead(record, facts, context.settings, &mut plan, now);
    plan
}

fn containers_plan(
    record: PodState<'_>,
    facts: &PodFacts,
    sandbox: &SandboxFacts,
    context: SyncContext<'_>,
    plan: &mut Plan,
    now: Now,
) {
    let init = init_plan(record, facts, sandbox);
    if init.failed {
        termination::stop_everything(record, facts, None, plan, now);
        return;
    }
    let regular = if init.initialized { record.containers() } else { &[] };
    let actions: Vec<_> =
        regular.iter().map(|each| (each, container_action(&record, each, facts, context.reported))).collect();
    if init.initialized && !actions.iter().any(|(_, container_action)| container_action.keeps_pod()) {
        // Sidecars must not keep a finished pod alive, nor be restarted in it.
        plan.is_over = true;
        return;
    }
    for stop in &init.stop {
        stop_one(record, stop, plan, now);
    }
    let start = Start { record, facts, sandbox, context, now };
    for container in &init.start {
        start.plan(container, plan);
    }
    if !init.initialized {
        start.plan_ephemeral(plan);
        plan.wait_for(WaitsFor::InitContainers);
        return;
    }
    start.plan_ephemeral(plan);
    for (container, container_action) in actions {
        match container_action {
            ContainerAction::Keep | ContainerAction::Done => {}
            ContainerAction::Start => start.plan(container, plan),
            ContainerAction::Stop(stop) => stop_one(record, &stop, plan, now),
        }
        if start.holds_back_others(container, plan) {
            return plan.wait_for(WaitsFor::PostStartHook(container.name.clone()));
        }
    }
}

/// Stops an instance, with an event when the stop begins.
fn stop_one(record: PodState<'_>, stop: &ContainerToKill<'_>, plan: &mut Plan, now: Now) {
    let name = &stop.running.name;
    let subject = PodSubject::Container(name.clone());
    if record.is_busy(&subject, now) {
        return;
    }
    if !record.failures.contains_key(&subject) && record.pre_stop_secs(stop.running).is_none() {
        plan.events.push(event(&record, name, Severity::Normal, event_reasons::KILLING_CONTAINER, stop.why.clone()));
    }
    if stop.then == AfterStop::Restart {
        plan.restarting.insert(stop.running.id.clone());
    }
    termination::stop_container(record, stop.running, stop.grace_secs, stop.why.clone(), plan);
}

/// The inputs for starting one container.
struct Start<'a> {
    record: PodState<'a>,
    facts: &'a PodFacts,
    sandbox: &'a SandboxFacts,
    context: SyncContext<'a>,
    now: Now,
}

impl Start<'_> {
    fn plan(&self, container: &Container, plan: &mut Plan) {
        let record = self.record;
        let subject = PodSubject::Container(container.name.clone());
        if record.flights.contains(&subject) {
            return;
        }
        if let Some(id) = &record.container(&container.name).interrupted_start {
            let removal = PodSubject::Removal(id.clone());
            if !record.is_busy(&removal, self.now) {
                let (pod, name) = (record.id.clone(), container.name.clone());
                plan.step(removal, ContainerOp::Remove { pod, name, id: id.clone() }, "its start was cut off");
            }
            return plan.wait_for(WaitsFor::InterruptedStart(container.name.clone()));
        }
        let newest = self.facts.newest_container(&container.name);
        if let Some(created) = newest.filter(|known| known.sandbox == self.sandbox.id)
            && created.state == ContainerState::Created
            && !record.is_busy(&subject, self.now)
        {
            let op = ContainerOp::Resume { pod: record.id.clone(), name: created.name.clone(), id: created.id.clone() };
            plan.step(subject, op, "the container was created and not started");
            return;
        }
        if self.is_backing_off(container, plan) {
            return;
        }
        if let Some(failure) = record.failures.get(&subject)
            && failure.retry_at > self.now.uptime
        {
            let (container, message) = (container.name.clone(), failure.message.clone());
            return plan.wait_for(WaitsFor::Retry { container, message });
        }
        if !is_prepared(record, self.context, plan, self.now) {
            return;
        }
        let Some(image_volumes) = self.image_volumes(container, plan) else { return };
        let request = ImageRequest::of(record.spec(), container);
        match self.context.images.readiness(&record.id.uid, &request) {
            ImageAvailability::Ready(image) => {
                let order = StartContainer {
                    uid: record.id.uid.clone(),
                    pod: record.pod.clone(),
                    container: container.name.clone(),
                    attempt: self.next_attempt(&container.name),
                    sandbox: self.sandbox.id.clone(),
                    sandbox_attempt: self.sandbox.attempt,
                    cgroup_parent: cgroup_parent(&record, self.context),
                    pod_ips: self.sandbox.ips.clone(),
                    host_ips: self.context.host_ips.to_vec(),
                    target: self.target_of(&container.name),
                    recursive_read_only_mounts: recursive_read_only::is_supported(
                        record.spec(),
                        Some(self.sandbox),
                        self.context.runtime,
                    ),
                    claimed: record.claimed_volumes(),
                    image: image.clone(),
                    image_volumes,
                };
                let reason = if newest.is_some() { "the container ended" } else { "the container never ran" };
                plan.step(subject, ContainerOp::Start(order), reason);
            }
            ImageAvailability::NotReady => {
                plan.wait_for(WaitsFor::Image(request.target.clone()));
                plan.images.push(request);
            }
        }
    }

    /// The images of the volumes that the container mounts; `None` until all are ready. The images of its pod's other volumes
    /// are requested as well, as upstream does, but not waited for.
    fn image_volumes(&self, container: &Container, plan: &mut Plan) -> Option<BTreeMap<String, String>> {
        let (uid, images) = (&self.record.id.uid, self.context.images);
        let mut found = BTreeMap::new();
        let mut is_ready = true;
        for request in ImageRequest::of_volumes(self.record.spec()) {
            if request.is_mounted_by(container) {
                match images.readiness(uid, &request) {
                    ImageAvailability::Ready(image) => {
                        drop(found.insert(request.target.name().to_owned(), image.id.clone()))
                    }
                    ImageAvailability::NotReady => {
                        is_ready = false;
                        plan.wait_for(WaitsFor::Image(request.target.clone()));
                    }
                }
            }
            if !plan.images.contains(&request) {
                plan.images.push(request);
            }
        }
        let mut mounts = container.volume_mounts.iter().flatten().rev();
        let failure = mounts.find_map(|mount| images.waiting(uid, &ImageTarget::Volume(mount.name.clone())));
        if let Some(failure) = failure {
            let known = self.record.container(&container.name).waiting.as_ref();
            if known.is_none_or(|known| known.reason != failure.reason) {
                let message = format!("Error: {}", failure.reason.as_str());
                let reason = event_reasons::FAILED_TO_CREATE_CONTAINER;
                plan.events.push(event(&self.record, &container.name, Severity::Warning, reason, message));
            }
            plan.waiting.insert(container.name.clone(), failure.clone());
        }
        is_ready.then_some(found)
    }

    /// An ephemeral container is started once, and never again.
    fn plan_ephemeral(&self, plan: &mut Plan) {
        for ephemeral in self.record.ephemeral_containers() {
            let newest = self.facts.newest_container(&ephemeral.name);
            if newest.is_none_or(|known| known.state == ContainerState::Created) {
                self.plan(&of_ephemeral(ephemeral), plan);
            }
        }
    }

    fn target_of(&self, name: &str) -> Option<ContainerId> {
        let target = find_ephemeral(self.record.spec(), name)?.target_container_name.as_ref()?;
        self.facts.newest_container(target).map(|found| found.id.clone())
    }

    /// A postStart hook blocks the start of the containers after it.
    fn holds_back_others(&self, container: &Container, plan: &Plan) -> bool {
        let subject = PodSubject::Container(container.name.clone());
        let starts = plan.steps.iter().any(|step| step.subject == subject && step.op.kind() == OpKind::Start);
        let (uid, images) = (&self.record.id.uid, self.context.images);
        let own = ImageTarget::Container(container.name.clone());
        let is_pulling = plan.images.iter().any(|request| {
            (request.target == own || request.is_mounted_by(container))
                && images.readiness(uid, request) == ImageAvailability::NotReady
                && images.waiting(uid, &request.target).is_none()
        });
        self.record.is_post_starting(container) || (has_post_start(container) && (starts || is_pulling))
    }

    /// The restart count of the next instance.
    fn next_attempt(&self, name: &str) -> u32 {
        match self.facts.newest_container(name) {
            Some(newest) => newest.attempt + 1,
            None => self.facts.logged_attempts.get(name).map_or(0, |logged| logged + 1),
        }
    }

    fn is_backing_off(&self, container: &Container, plan: &mut Plan) -> bool {
        let image = container.image.as_deref().unwrap_or_default();
        let known = self.record.container(&container.name);
        let Some(crash_loop) = &known.crash_loop else { return false };
        let Some(ended) = self
            .facts
            .newest_container(&container.name)
            .filter(|newest| newest.exit().is_some())
            .and_then(|newest| self.record.instance(&newest.id).finished_at)
        else {
            return false;
        };
        let not_before = crash_loop.not_before(image, ended);
        if not_before <= self.now.uptime {
            return false;
        }
        let pod = formatted(&self.record);
        let delay = GoDuration::from(crash_loop.delay);
        let message = format!("back-off {delay} restarting failed container={} pod={pod}", container.name);
        if known.waiting.as_ref().is_none_or(|waiting| waiting.reason != Reason::CrashLoopBackOff) {
            let message = format!("Back-off restarting failed container {} in pod {pod}", container.name);
            plan.events.push(event(
                &self.record,
                &container.name,
                Severity::Warning,
                event_reasons::BACK_OFF_START_CONTAINER,
                message,
            ));
        }
        plan.waiting.insert(container.name.clone(), Waiting { reason: Reason::CrashLoopBackOff, message });
        plan.wake_by(not_before);
        plan.wait_for(WaitsFor::CrashLoopBackOff(container.name.clone()));
        true
    }
}

/// The pod's cgroup; empty leaves it to the runtime.
fn cgroup_parent(record: &PodRecord, context: SyncContext<'_>) -> String {
    context.cgroups.map_or_else(String::new, |tree| tree.pod_path(record.spec(), &record.id.uid))
}

/// True when network, cgroup, directories and volumes are ready; otherwise plans the next of them.
fn is_prepared(record: PodState<'_>, context: SyncContext<'_>, plan: &mut Plan, now: Now) -> bool {
    if let Some(problem) = context.network_problem
        && !record.uses_host_network()
    {
        let network = WaitsFor::Network(problem.to_owned());
        let is_known = [&record.waits_for, &plan.waits_for].iter().any(|known| known.as_ref() == Some(&network));
        if !is_known {
            plan.events.push(EventRecord::new(
                InvolvedObject::Pod(record.id.clone()),
                Severity::Warning,
                event_reasons::NETWORK_NOT_READY,
                format!("network is not ready: {problem}"),
            ));
        }
        plan.waits_for = Some(network);
        return false;
    }
    prepare(record, context, plan, now)
}

/// `None` when only volumes may be missing. Every step is safe to repeat; what a previous process prepared is not known.
fn next_preparation(record: &PodRecord, context: SyncContext<'_>) -> Option<(Op, WaitsFor)> {
    let pod = record.id.clone();
    match record.prepared {
        Preparation::Nothing => {
            let cgroup = context.cgroups.and_then(|tree| tree.pod(&record.pod, &record.id.uid));
            Some(match cgroup {
                Some(cgroup) => (Op::Pod(PodOp::SetUpCgroup { pod, cgroup }), WaitsFor::PodCgroup),
                None => (Op::Pod(PodOp::MakeDirs { pod }), WaitsFor::PodDirs),
            })
        }
        Preparation::Cgroup => Some((Op::Pod(PodOp::MakeDirs { pod }), WaitsFor::PodDirs)),
        Preparation::Directories => None,
    }
}

/// True when cgroup, directories and volumes are ready; otherwise plans what can be done for them now.
pub(super) fn prepare(record: PodState<'_>, context: SyncContext<'_>, plan: &mut Plan, now: Now) -> bool {
    if let Some((op, waits_for)) = next_preparation(&record, context) {
        if !plan.has_step(&PodSubject::Pod) && !record.is_busy(&PodSubject::Pod, now) {
            plan.step(PodSubject::Pod, op, format!("{waits_for} may be missing"));
        }
        plan.wait_for(waits_for);
        return false;
    }
    set_up_volumes(record, context, plan, now)
}

/// Records once per sandbox that it is replaced.
fn sandbox_changed(record: PodState<'_>, facts: &PodFacts, plan: &mut Plan) {
    if facts.is_active() && !record.flights.has_changes() && record.failures.is_empty() {
        plan.events.push(EventRecord::new(
            InvolvedObject::Pod(record.id.clone()),
            Severity::Normal,
            event_reasons::SANDBOX_CHANGED,
            "Pod sandbox changed, it will be killed and re-created.",
        ));
    }
}

/// Removes dead containers and sandboxes over the limits, after what the pod itself needs.
fn collect_dead(record: PodState<'_>, facts: &PodFacts, settings: &Settings, plan: &mut Plan, now: Now) {
    for planned in gc::of_living_pod(&record, facts, settings, now) {
        let owner = match &planned.op {
            Op::Container(ContainerOp::Remove { name, .. }) => PodSubject::Container(name.clone()),
            _ => planned.subject.clone(),
        };
        let is_taken = plan.has_step(&owner) || record.flights.contains(&owner);
        if !is_taken && !record.is_busy(&planned.subject, now) {
            plan.steps.push(planned);
        }
    }
}

pub fn event(
    record: &PodRecord,
    container: &str,
    severity: Severity,
    reason: &str,
    message: impl Into<String>,
) -> EventRecord {
    EventRecord::new(
        InvolvedObject::Container { pod: record.id.clone(), container: container.to_owned() },
        severity,
        reason,
        message.into(),
    )
}

/// Upstream's `format.Pod`.
fn formatted(record: &PodRecord) -> String {
    format!("{}_{}({})", record.id.name, record.id.namespace, record.id.uid)
}
