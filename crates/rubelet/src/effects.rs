//! Effects: the only I/O on behalf of pods.
//!
//! Owns: running each effect in its own task, its deadline, its cancellation, its result, and its log lines.
//! Never: decides; an effect gathers, builds, calls and reports.

use std::collections::BTreeMap;

use rubelet_core::{
    effect::{Effect, EffectError, EffectId, ErrorKind, Facts},
    event::Event,
    observation::Remains,
    op::{ApiOp, ContainerOp, ImageOp, LogOp, NodeOp, Op, OpKind, PodOp},
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
mod image_gc;
mod log;
mod probe;
mod remains;
pub mod sandbox;
pub mod status;
mod usage;
pub mod volume;

/// The running effects. Dropping it aborts them all.
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

/// Recalls an effect: it begins no further step. Effects that start something check this before each call.
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
                    // The loop has ended; the result has no receiver.
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
            Effect::Record(record) => self.world.events.record(record, self.world.clock.now().wall),
        }
    }

    /// The result has arrived: the task has ended.
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
        Op::Node(op) => match op {
            NodeOp::CheckRuntime => observe::check_runtime(world).await,
            NodeOp::Relist => observe::relist::relist(world).await,
            NodeOp::ListPodDirs => directories::list_pod_dirs(world).await,
            NodeOp::ListDevices => volume::list_devices(world).await,
            NodeOp::SyncQosCgroups { cgroups } => cgroup::sync_qos_cgroups(world, cgroups).await,
            NodeOp::ListImages(look) => image_gc::list_images(world, look).await,
            NodeOp::MeasureLogs { logs } => log::measure_logs(world, logs).await,
            NodeOp::MeasureNode { kubepods, places } => {
                usage::measure_node(world, kubepods.as_deref(), places.as_ref()).await
            }
            NodeOp::FindImageFs => usage::find_image_fs(world).await,
            NodeOp::MeasurePods { pods, figures } => usage::measure_pods(world, pods, *figures).await,
        },
        Op::Pod(op) => match op {
            PodOp::Inspect { pod } => observe::inspect::inspect(world, pod).await,
            PodOp::SetUpCgroup { cgroup, .. } => cgroup::set_up_pod_cgroup(world, cgroup).await,
            PodOp::RemoveCgroup(place) => {
                let removal = cgroup::remove_pod_cgroup(world, &place.cgroup_paths);
                remains::after(world, place, Remains::Cgroup, removal).await
            }
            PodOp::MakeDirs { pod } => directories::make_pod_dirs(world, pod).await,
            PodOp::RemoveDir(place) => {
                let removal = directories::remove_pod_dir(world, &place.pod.uid);
                remains::after(world, place, Remains::PodDir, removal).await
            }
            PodOp::RemoveLogDir(place) => {
                let dir_name = place.log_dir_name();
                remains::after(world, place, Remains::Logs, directories::remove_log_dir(world, &dir_name)).await
            }
            PodOp::RunSandbox(order) => sandbox::run_sandbox(world, order, recalled).await,
            PodOp::StopSandbox { id, .. } => sandbox::stop_sandbox(world, id).await,
            PodOp::RemoveSandbox { id, .. } => sandbox::remove_sandbox(world, id).await,
        },
        Op::Container(op) => match op {
            ContainerOp::Start(order) => container::start_container(world, order, recalled).await,
            ContainerOp::Resume { id, .. } => container::resume_container(world, id, recalled).await,
            ContainerOp::Stop { id, grace_secs, .. } => container::stop_container(world, id, *grace_secs).await,
            ContainerOp::Remove { id, .. } => container::remove_container(world, id).await,
            ContainerOp::Probe(order) => probe::probe(world, order).await,
            ContainerOp::RunHook(order) => hook::run_hook(world, order).await,
        },
        Op::Volume(op) => volume::perform(world, op).await,
        Op::Image(op) => match op {
            ImageOp::Inspect { image, .. } => image::inspect_image(world, image).await,
            ImageOp::Pull { pod, image, secrets } => image::pull_image(world, pod, image, secrets).await,
            ImageOp::Delete { id, .. } => image_gc::delete_image(world, id).await,
        },
        Op::Log(op) => match op {
            LogOp::Rotate { log, max_files } => log::rotate_log(world, log, *max_files).await,
            LogOp::Compress { log } => log::compress_logs(world, log).await,
        },
        Op::Api(op) => match op {
            ApiOp::GetNode => status::get_node(world).await,
            ApiOp::PatchStatus { pod, patch, .. } => status::patch_status(world, pod, patch).await,
            ApiOp::DeletePod { pod } | ApiOp::DeleteMirrorPod { pod } => status::delete_pod(world, pod).await,
            ApiOp::CreateMirrorPod { pod } => status::create_mirror_pod(world, pod).await,
        },
    }
}

/// One line per decision that changes something. Looks are logged at a high verbosity only: with the runtime down they would
/// fill the log, and a node event reports that once.
fn log_start(op: &Op, reason: &str) {
    let name = op.name();
    match op.kind() {
        OpKind::Look => tracing::trace!(op = name, about = op.about(), reason, "look started"),
        OpKind::Upkeep => tracing::debug!(op = name, about = op.about(), reason, "effect started"),
        OpKind::Start | OpKind::End | OpKind::Change => {
            tracing::info!(op = name, about = op.about(), reason, "effect started");
        }
    }
}

fn log_end(op: &Op, result: &Result<Facts, EffectError>) {
    let (name, is_look) = (op.name(), op.kind() == OpKind::Look);
    match result {
        Ok(_) if is_look => tracing::trace!(op = name, about = op.about(), "look finished"),
        Ok(_) => tracing::debug!(op = name, about = op.about(), "effect finished"),
        Err(error) if is_look => {
            tracing::debug!(op = name, about = op.about(), kind = ?error.kind, "failed: {error}");
        }
        Err(error) => tracing::warn!(op = name, about = op.about(), kind = ?error.kind, "failed: {error}"),
    }
}
