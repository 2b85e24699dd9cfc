//! Effects: the only I/O on behalf of pods.
//!
//! Owns: running each effect in a task of its own, its deadline, its cancellation, its answer, and the log lines about it.
//! Never: decides; an effect gathers, builds, calls and reports.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use rubelet_core::{
    effect::{Effect, EffectError, EffectId, ErrorKind, Facts, Op, Severity},
    event::Event,
    id::PodRef,
};
use tokio::{
    sync::mpsc,
    task::{AbortHandle, JoinSet},
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use crate::{observe, world::World};

mod cgroup;
pub mod container;
pub mod directories;
mod failure;
mod hook;
pub mod image;
mod probe;
pub mod sandbox;
pub mod status;
pub mod volume;

/// The effects under way. Dropping it aborts them all.
#[derive(Debug)]
pub struct Effects {
    world: World,
    inbox: mpsc::Sender<Event>,
    tasks: JoinSet<()>,
    under_way: BTreeMap<EffectId, UnderWay>,
}

#[derive(Debug)]
struct UnderWay {
    task: AbortHandle,
    recalled: Recalled,
}

/// Tells an effect to begin no further step. Effects that start something look at it before each call.
pub type Recalled = CancellationToken;

impl Effects {
    pub fn new(world: World, inbox: mpsc::Sender<Event>) -> Self {
        Effects { world, inbox, tasks: JoinSet::new(), under_way: BTreeMap::new() }
    }

    pub fn start(&mut self, effect: Effect) {
        match effect {
            Effect::Do { id, op, deadline, reason } => {
                log_start(&op, &reason);
                let (world, inbox, recalled) = (self.world.clone(), self.inbox.clone(), Recalled::new());
                let recall = recalled.clone();
                let task = self.tasks.spawn(async move {
                    let began = world.clock.now().uptime;
                    let result = timeout(deadline, perform(&world, &op, &recall)).await.unwrap_or_else(|_| {
                        let message = format!("no answer within {} s", deadline.as_secs());
                        Err(EffectError { kind: ErrorKind::TimedOut, message })
                    });
                    log_end(&op, &result);
                    world.metrics.effect_ended(&op, &result, began, world.clock.now());
                    // The loop has gone: nobody is left to tell.
                    let _ = inbox.send(Event::Done { id, result }).await;
                });
                self.under_way.insert(id, UnderWay { task, recalled });
            }
            Effect::Cancel(id) => {
                if let Some(effect) = self.under_way.remove(&id) {
                    effect.task.abort();
                }
            }
            Effect::Recall(id) => {
                if let Some(effect) = self.under_way.get(&id) {
                    effect.recalled.cancel();
                }
            }
            Effect::Record(record) => {
                match record.severity {
                    Severity::Normal => {
                        tracing::info!(about = %record.about, reason = record.reason, "{}", record.message);
                    }
                    Severity::Warning => {
                        tracing::warn!(about = %record.about, reason = record.reason, "{}", record.message);
                    }
                }
                self.world.events.record(record, self.world.clock.now().wall);
            }
        }
    }

    /// The answer has arrived: the task is over.
    pub fn ended(&mut self, id: EffectId) {
        self.under_way.remove(&id);
        while let Some(joined) = self.tasks.try_join_next() {
            if let Err(error) = joined
                && error.is_panic()
            {
                std::panic::resume_unwind(error.into_panic());
            }
        }
    }
}

async fn perform(world: &World, op: &Op, recalled: &Recalled) -> Result<Facts, EffectError> {
    match op {
        Op::CheckRuntime => observe::check_runtime(world).await,
        Op::Relist => observe::relist::relist(world).await,
        Op::InspectPod { pod } => observe::inspect::inspect(world, pod).await,
        Op::InspectImage { image, .. } => image::inspect_image(world, image).await,
        Op::ListPodDirs => directories::list_pod_dirs(world).await,
        Op::SyncQosCgroups { tiers } => cgroup::sync_qos_cgroups(world, tiers).await,
        Op::SetUpPodCgroup { cgroup, .. } => cgroup::set_up_pod_cgroup(world, cgroup).await,
        Op::RemovePodCgroup { paths, .. } => cgroup::remove_pod_cgroup(world, paths).await,
        Op::LookAtNode => status::look_at_node(world).await,
        Op::Probe(order) => probe::probe(world, order).await,
        Op::RunHook(order) => hook::run_hook(world, order).await,
        Op::MakePodDirs { pod } => directories::make_pod_dirs(world, pod).await,
        Op::SetUpVolumes { pod, uid } => volume::set_up_volumes(world, pod, uid).await,
        Op::RefreshVolumes { pod, uid } => volume::refresh_volumes(world, pod, uid).await,
        Op::TearDownVolumes { pod } => volume::tear_down_volumes(world, pod).await,
        Op::RemovePodDir { uid } => directories::remove_pod_dir(world, uid).await,
        Op::RemoveLogDir { dir_name } => directories::remove_log_dir(world, dir_name).await,
        Op::PullImage { pod, image, secrets } => image::pull_image(world, pod, image, secrets).await,
        Op::RunSandbox(order) => sandbox::run_sandbox(world, order, recalled).await,
        Op::StopSandbox { id, .. } => sandbox::stop_sandbox(world, id).await,
        Op::RemoveSandbox { id, .. } => sandbox::remove_sandbox(world, id).await,
        Op::StartContainer(order) => container::start_container(world, order, recalled).await,
        Op::ResumeContainer { id, .. } => container::resume_container(world, id, recalled).await,
        Op::StopContainer { id, grace_secs, .. } => container::stop_container(world, id, *grace_secs).await,
        Op::RemoveContainer { id, .. } => container::remove_container(world, id).await,
        Op::PatchStatus { pod, patch, .. } => status::patch_status(world, pod, patch).await,
        Op::DeletePod { pod } | Op::DeleteMirrorPod { pod } => status::delete_pod(world, pod).await,
        Op::CreateMirrorPod { pod } => status::create_mirror_pod(world, pod).await,
    }
}

/// One line per decision that changes something; looks are told only at a high verbosity, for a runtime that stays away
/// would fill the log with them (the node's own event says it once).
fn log_start(op: &Op, reason: &str) {
    let Named { name, about } = Named::of(op);
    if is_look(op) {
        tracing::trace!(op = name, about, reason, "look");
    } else if is_routine(op) {
        tracing::debug!(op = name, about, reason, "do");
    } else {
        tracing::info!(op = name, about, reason, "do");
    }
}

fn log_end(op: &Op, result: &Result<Facts, EffectError>) {
    let Named { name, about } = Named::of(op);
    match result {
        Ok(_) if is_look(op) => tracing::trace!(op = name, about, "looked"),
        Ok(_) => tracing::debug!(op = name, about, "done"),
        Err(error) if is_look(op) => tracing::debug!(op = name, about, kind = ?error.kind, "failed: {error}"),
        Err(error) => tracing::warn!(op = name, about, kind = ?error.kind, "failed: {error}"),
    }
}

fn is_look(op: &Op) -> bool {
    matches!(
        op,
        Op::CheckRuntime
            | Op::Relist
            | Op::InspectPod { .. }
            | Op::InspectImage { .. }
            | Op::ListPodDirs
            | Op::LookAtNode
            | Op::Probe(_)
    )
}

/// Follows from what was decided and told elsewhere, and comes again and again.
fn is_routine(op: &Op) -> bool {
    matches!(op, Op::PatchStatus { .. } | Op::RefreshVolumes { .. })
}

/// What an operation is about, for the log: `namespace/pod`, `namespace/pod/container`.
struct Named {
    name: &'static str,
    about: String,
}

impl Named {
    fn of(op: &Op) -> Self {
        let named = |name, about: String| Named { name, about };
        let names = |pod: &Pod| PodRef::of(pod).to_string();
        match op {
            Op::CheckRuntime => named("CheckRuntime", String::new()),
            Op::Relist => named("Relist", String::new()),
            Op::ListPodDirs => named("ListPodDirs", String::new()),
            Op::LookAtNode => named("LookAtNode", String::new()),
            Op::InspectPod { pod } => named("InspectPod", pod.to_string()),
            Op::InspectImage { pod, image } => named("InspectImage", format!("{pod} {image}")),
            Op::SyncQosCgroups { .. } => named("SyncQosCgroups", String::new()),
            Op::SetUpPodCgroup { pod, .. } => named("SetUpPodCgroup", pod.to_string()),
            Op::RemovePodCgroup { pod, .. } => named("RemovePodCgroup", pod.to_string()),
            Op::RunHook(order) => named("RunHook", format!("{}/{}", order.pod, order.container)),
            Op::Probe(order) => named("Probe", format!("{}/{}", order.pod, order.container)),
            Op::MakePodDirs { pod } => named("MakePodDirs", pod.to_string()),
            Op::SetUpVolumes { pod, .. } => named("SetUpVolumes", names(pod)),
            Op::RefreshVolumes { pod, .. } => named("RefreshVolumes", names(pod)),
            Op::TearDownVolumes { pod } => named("TearDownVolumes", pod.to_string()),
            Op::RemovePodDir { uid } => named("RemovePodDir", uid.to_string()),
            Op::RemoveLogDir { dir_name } => named("RemoveLogDir", dir_name.clone()),
            Op::PullImage { pod, image, .. } => named("PullImage", format!("{pod} {image}")),
            Op::RunSandbox(order) => named("RunSandbox", names(&order.pod)),
            Op::StopSandbox { pod, .. } => named("StopSandbox", pod.to_string()),
            Op::RemoveSandbox { pod, .. } => named("RemoveSandbox", pod.to_string()),
            Op::StartContainer(order) => named("StartContainer", format!("{}/{}", names(&order.pod), order.container)),
            Op::ResumeContainer { pod, name, .. } => named("ResumeContainer", format!("{pod}/{name}")),
            Op::StopContainer { pod, name, .. } => named("StopContainer", format!("{pod}/{name}")),
            Op::RemoveContainer { pod, name, .. } => named("RemoveContainer", format!("{pod}/{name}")),
            Op::PatchStatus { pod, .. } => named("PatchStatus", pod.to_string()),
            Op::DeletePod { pod } => named("DeletePod", pod.to_string()),
            Op::CreateMirrorPod { pod } => named("CreateMirrorPod", names(pod)),
            Op::DeleteMirrorPod { pod } => named("DeleteMirrorPod", pod.to_string()),
        }
    }
}
