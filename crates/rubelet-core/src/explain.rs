//! Explains the current state of a pod, for `rubelet explain`.
//!
//! Owns: the steps of a pod as texts, from its record. Never: decides; the texts follow the plans.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::api::core::v1::{ContainerStatus, PodStatus};

use crate::{
    cgroups::Cgroup,
    flights::PodSubject,
    images::Images,
    node::Node,
    node_status,
    observation::Remains,
    pod::{Desired, Failure, Lifecycle, Look, PodRecord, Preparation, plan::PodState, status::FailureReason},
    pod_config::PodConfig,
    settings::Settings,
    snapshot::{LifecycleStage, NodeView, PodCounts, PodView, ProtectedMemory, Step, StepState},
    time::{Now, Uptime},
};

pub fn node_view(settings: &Settings, node: &Node, config: &PodConfig, now: Now) -> NodeView {
    NodeView {
        name: settings.node_name.clone(),
        runtime: format!("{} {}", node.status.name, node.status.version).trim().to_owned(),
        runtime_problem: node.runtime_problem.clone(),
        network_problem: node.network_problem.clone(),
        readiness: node.readiness(now),
        pressures: node.eviction.known_pressures(&settings.eviction).cloned(),
        runtime_version: node_status::runtime_version(&node.status),
        runtime_handlers: node.status.handlers.clone(),
        supplemental_groups_policy: node.status.supplemental_groups_policy,
        cgroup_driver: node.status.cgroup_driver,
        protected_memory: settings.node.memory_qos.map(|_| protected_memory(&node.qos.cgroups)),
        sources_not_ready: config.sources_not_ready(&settings.sources),
        volumes_in_use: node.devices.in_use(node.object.as_ref()),
        shutdown: node.shutdown.view(),
    }
}

/// The cgroup above all pods protects the memory of guaranteed and burstable pods.
fn protected_memory(qos_cgroups: &[Cgroup]) -> ProtectedMemory {
    let of_all = qos_cgroups.first().and_then(|kubepods| kubepods.limits.memory_min_bytes).unwrap_or(0);
    let low_bytes = qos_cgroups.get(1).and_then(|burstable| burstable.limits.memory_low_bytes).unwrap_or(0);
    ProtectedMemory { min_bytes: of_all.saturating_sub(low_bytes), low_bytes }
}

pub fn pod_view(record: PodState<'_>, status: Arc<PodStatus>, images: &Images, now: Now) -> PodView {
    let running = record.facts.iter().flat_map(|facts| facts.running());
    PodView {
        source: match record.desired {
            Desired::By(source) => Some(source),
            Desired::No => None,
        },
        mirror_uid: None,
        pod: record.pod.clone(),
        lifecycle: record.lifecycle.name().to_owned(),
        lifecycle_since: record.since.wall,
        running: running.map(|container| (container.name.clone(), container.id.to_string())).collect(),
        counts: counts(record, images),
        facts: record.facts.clone(),
        needs: Arc::default(),
        volumes: if record.remains > Some(Remains::Volumes) { BTreeMap::new() } else { record.volumes.clone() },
        steps: vec![
            desired(&record),
            admitted(&record),
            volumes(&record, now),
            sandbox(&record, now),
            image_step(&record, images, now),
            containers(record, &status, now),
            status_step(&record, &status),
        ],
        status,
    }
}

fn counts(record: PodState<'_>, images: &Images) -> PodCounts {
    let mut counts = PodCounts {
        stage: match record.lifecycle {
            Lifecycle::Waiting => LifecycleStage::Waiting,
            Lifecycle::Syncing => LifecycleStage::Syncing,
            Lifecycle::Terminating { .. } => LifecycleStage::Terminating,
            Lifecycle::Terminated { .. } | Lifecycle::Finished { .. } => LifecycleStage::Terminated,
        },
        rejected: record.rejected.as_ref().map(|failure| failure.reason.to_string()),
        preempted_for: match record.failure.as_ref().map(|failure| &failure.reason) {
            Some(FailureReason::Preempting(resource)) => Some(resource.clone()),
            Some(_) | None => None,
        },
        is_working: record.flights.has_changes() || record.look != Look::Idle || images.is_working_for(&record.id.uid),
        ..PodCounts::default()
    };
    if let Some(facts) = &record.facts {
        counts.has_ready_sandbox = facts.ready_sandbox().is_some();
        for container in &facts.containers {
            *counts.containers.entry(container.listed_state()).or_default() += 1;
        }
    }
    counts
}

fn desired(record: &PodRecord) -> Step {
    let detail = match record.desired {
        Desired::By(source) => format!("desired by source \"{}\"", source.as_str()),
        Desired::No => "removed from its source".to_owned(),
    };
    step("desired", StepState::Done, detail)
}

fn admitted(record: &PodRecord) -> Step {
    if let Some(failure) = &record.rejected {
        let detail = format!("rejected ({}): {}", failure.reason, failure.message);
        return Step { since: Some(record.since.wall), ..step("admitted", StepState::Failed, detail) };
    }
    match &record.lifecycle {
        Lifecycle::Waiting => {
            let waits_for = record.waits_for.as_ref().map_or("admission".to_owned(), ToString::to_string);
            Step {
                since: Some(record.since.wall),
                ..step("admitted", StepState::Waiting, format!("waits for {waits_for}"))
            }
        }
        Lifecycle::Syncing => step("admitted", StepState::Done, "admitted".to_owned()),
        Lifecycle::Terminating { grace, cause, .. } => Step {
            since: Some(record.since.wall),
            ..step("admitted", StepState::Done, format!("terminating ({cause:?}), grace period {} s", grace.secs))
        },
        Lifecycle::Terminated { cause } | Lifecycle::Finished { cause } => Step {
            since: Some(record.since.wall),
            ..step("admitted", StepState::Done, format!("terminated ({cause:?})"))
        },
    }
}

fn volumes(record: &PodRecord, now: Now) -> Step {
    let uses_volumes = record.facts.as_ref().is_some_and(|facts| facts.running().next().is_some());
    let missing = record.missing_volumes();
    let (state, detail) = match (record.prepared, record.remains) {
        (_, Some(Remains::Volumes)) => (StepState::Working, "volumes are being torn down"),
        (_, Some(Remains::Cgroup)) => (StepState::Working, "volumes are torn down, the cgroup is being removed"),
        (_, Some(Remains::PodDir | Remains::Logs | Remains::Nothing)) => (StepState::Done, "volumes are torn down"),
        (_, None) if has_ended(record) => (StepState::Working, "volumes are being torn down"),
        (Preparation::Directories, None) if missing.is_empty() => {
            return step("volumes", StepState::Done, "directories and volumes are set up".to_owned());
        }
        (Preparation::Directories, None) => {
            let names: Vec<_> = missing.iter().map(|volume| volume.name.as_str()).collect();
            let detail = match &record.waits_for {
                Some(waits_for) if waits_for.volume().is_some() => format!("waits for {waits_for}"),
                _ => format!("being set up: {}", names.join(", ")),
            };
            return failing_volume(record, &names, step("volumes", StepState::Working, detail), now);
        }
        (Preparation::Cgroup, None) => (StepState::Working, "the cgroup is created, directories are being created"),
        (Preparation::Nothing, None) if record.lifecycle != Lifecycle::Syncing => {
            (StepState::Pending, "nothing is set up")
        }
        (Preparation::Nothing, None) if uses_volumes => (StepState::Done, "in use since before the agent started"),
        (Preparation::Nothing, None) => (StepState::Pending, "nothing is set up yet"),
    };
    let step = failing(record, &PodSubject::Pod, step("volumes", state, detail.to_owned()), now);
    failing_unmount(record, step, now)
}

fn sandbox(record: &PodRecord, now: Now) -> Step {
    let ready = record.facts.as_ref().and_then(|facts| facts.ready_sandbox());
    if let Some(sandbox) = ready {
        let address = sandbox.ips.first().map_or("the node's network".to_owned(), |ip| format!("IP {ip}"));
        let detail = format!("{} (attempt {}) is ready, {address}", short(sandbox.id.as_str()), sandbox.attempt);
        return Step { since: sandbox.created_at, ..step("sandbox", StepState::Done, detail) };
    }
    let state = match record.lifecycle {
        Lifecycle::Syncing if record.prepared == Preparation::Directories && record.missing_volumes().is_empty() => {
            StepState::Working
        }
        Lifecycle::Syncing | Lifecycle::Waiting => StepState::Pending,
        Lifecycle::Terminating { .. } | Lifecycle::Terminated { .. } | Lifecycle::Finished { .. } => StepState::Done,
    };
    let none = step("sandbox", state, "no ready sandbox".to_owned());
    if state == StepState::Working { failing(record, &PodSubject::Pod, none, now) } else { none }
}

fn image_step(record: &PodRecord, images: &Images, now: Now) -> Step {
    let images_of_pod = images.progress(&record.id.uid);
    let Some(image) = images_of_pod.iter().find(|image| !image.is_ready).or(images_of_pod.first()) else {
        let has_run = record.facts.as_ref().is_some_and(|facts| !facts.containers.is_empty());
        let (state, detail) = if has_run || has_ended(record) {
            (StepState::Done, "no container waits for an image")
        } else {
            (StepState::Pending, "not reached")
        };
        return step("images", state, detail.to_owned());
    };
    let state = match (image.is_ready, image.error) {
        (true, _) => StepState::Done,
        (false, Some(_)) => StepState::Failed,
        (false, None) => StepState::Working,
    };
    Step {
        name: "images".to_owned(),
        state,
        detail: image.text.clone(),
        since: image.since.map(|moment| PodRecord::wall(moment, now)),
        next_retry: image.next_retry.map(|moment| PodRecord::wall(moment, now)),
        last_error: image.error.map(str::to_owned),
    }
}

fn containers(record: PodState<'_>, status: &PodStatus, now: Now) -> Step {
    let total = record.containers().len();
    let running = status.container_statuses.iter().flatten().filter(|each| each.ready).count();
    let all = status.init_container_statuses.iter().flatten().chain(status.container_statuses.iter().flatten());
    let waiting = all.filter_map(|each| Some((each, each.state.as_ref()?.waiting.as_ref()?))).find(|(_, waiting)| {
        !matches!(waiting.reason.as_deref(), None | Some("ContainerCreating" | "PodInitializing"))
    });
    let mut result = match (waiting, &record.waits_for) {
        (Some((container, waiting)), _) => {
            let reason = waiting.reason.as_deref().unwrap_or_default();
            let mut failed =
                step("containers", StepState::Failed, format!("{}: {reason}{}", container.name, last_run(container)));
            failed.last_error = waiting.message.clone();
            failed
        }
        (None, Some(waits_for)) if record.lifecycle != Lifecycle::Waiting => {
            step("containers", StepState::Waiting, format!("{running} of {total} ready; waits for {waits_for}"))
        }
        (None, _) if has_ended(&record) || (total > 0 && running == total) => {
            step("containers", StepState::Done, format!("{running} of {total} ready"))
        }
        (None, _) => step("containers", StepState::Pending, format!("{running} of {total} ready")),
    };
    if let Some(removal) = failed_removal(&record) {
        result.last_error.get_or_insert_with(|| removal.message.clone());
    }
    if result.state != StepState::Done {
        result.next_retry = retry_of_containers(record, now).map(|moment| PodRecord::wall(moment, now));
    }
    result
}

/// No container of it runs or will.
fn has_ended(record: &PodRecord) -> bool {
    match record.lifecycle {
        Lifecycle::Terminated { .. } | Lifecycle::Finished { .. } => true,
        Lifecycle::Waiting | Lifecycle::Syncing | Lifecycle::Terminating { .. } => false,
    }
}

/// The exit of the container's last run, which a crash loop repeats.
fn last_run(container: &ContainerStatus) -> String {
    let ended = container.last_state.as_ref().and_then(|last| last.terminated.as_ref());
    ended.map_or(String::new(), |ended| {
        let reason = ended.reason.as_deref().unwrap_or("Error");
        format!(", last run ended with exit code {} ({reason})", ended.exit_code)
    })
}

/// The removal of a dead container that the runtime has refused most often.
fn failed_removal(record: &PodRecord) -> Option<&Failure> {
    let removals = record.failures.iter().filter(|(subject, _)| matches!(subject, PodSubject::Removal(_)));
    removals.map(|(_, failure)| failure).max_by_key(|failure| failure.count)
}

/// When the next container start is retried.
fn retry_of_containers(record: PodState<'_>, now: Now) -> Option<Uptime> {
    record.wake_at.filter(|moment| *moment > now.uptime && !record.flights.has_changes())
}

fn status_step(record: &PodRecord, status: &PodStatus) -> Step {
    let phase = status.phase.as_deref().unwrap_or("Unknown");
    let state = if record.facts.is_some() { StepState::Done } else { StepState::Pending };
    let detail = match (&status.reason, record.facts.is_some()) {
        (Some(reason), _) => format!("{phase} ({reason})"),
        (None, true) => phase.to_owned(),
        (None, false) => "not known before the first look at the runtime".to_owned(),
    };
    step("status", state, detail)
}

/// With the error of the first volume that cannot be unmounted.
fn failing_unmount(record: &PodRecord, step: Step, now: Now) -> Step {
    let mut subjects = record.mounted.iter().map(|volume| PodSubject::Unmount(volume.clone()));
    match subjects.find(|subject| record.failures.contains_key(subject)) {
        Some(subject) => failing(record, &subject, step, now),
        None => step,
    }
}

/// With the error of the first volume that failed.
fn failing_volume(record: &PodRecord, missing: &[&str], step: Step, now: Now) -> Step {
    let mut subjects = missing.iter().map(|name| PodSubject::Volume((*name).to_owned()));
    match subjects.find(|subject| record.failures.contains_key(subject)) {
        Some(subject) => failing(record, &subject, step, now),
        None => step,
    }
}

/// The step with the last failure of its subject, if there is one.
fn failing(record: &PodRecord, subject: &PodSubject, step: Step, now: Now) -> Step {
    match record.failures.get(subject) {
        Some(failure) => Step {
            state: StepState::Failed,
            next_retry: Some(PodRecord::wall(failure.retry_at, now)),
            last_error: Some(failure.message.clone()),
            ..step
        },
        None => step,
    }
}

fn step(name: &str, state: StepState, detail: String) -> Step {
    Step { name: name.to_owned(), state, detail, since: None, next_retry: None, last_error: None }
}

fn short(id: &str) -> &str {
    id.get(..13).unwrap_or(id)
}
