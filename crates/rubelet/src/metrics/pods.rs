//! Numbers of pods, containers and volumes in the current snapshot.
//!
//! Owns: counting a snapshot. Never: stores a number between scrapes.
//! Upstream: `updateRunningPodAndContainerMetrics` of `pleg/generic.go`, the counts at the end of `HandlePodCleanups`.

use std::{collections::BTreeMap, sync::Arc};

use rubelet_core::{
    observation::ListedState,
    pod::status::is_terminal,
    pod_manager::is_static_pod,
    snapshot::{LifecycleStage, PodView, ProtectedMemory, Snapshot},
    volumes,
};

use super::{
    storage::plugin_of,
    text::{Labels, Text},
};

const HELP_MIN: &str = "[ALPHA] Total cgroup v2 memory.min in bytes for Guaranteed pods. This memory is hard-reserved and never \
                        reclaimed by the kernel.";
const HELP_LOW: &str = "[ALPHA] Total cgroup v2 memory.low in bytes for Burstable pods. This memory is soft-reserved and may be \
                        reclaimed under extreme pressure.";

pub(crate) fn write(snapshot: &Snapshot, text: &mut Text) {
    const NODE_NAME: &str = "kubelet_node_name";
    text.head(NODE_NAME, "gauge", "[ALPHA] The node's name. The count is always 1.");
    text.sample((NODE_NAME, ""), Labels::of(&[("node", &snapshot.node.name)]), 1.0);
    write_protected_memory(snapshot, text);
    write_runtime(snapshot, text);
    write_config(snapshot, text);
    write_working(snapshot, text);
    write_evictions(snapshot, text);
    write_volumes(snapshot, text);
    write_orphans(snapshot, text);
}

/// A family without samples is not written, as upstream's.
fn write_evictions(snapshot: &Snapshot, text: &mut Text) {
    const EVICTIONS: &str = "kubelet_evictions";
    let counts = &snapshot.eviction.record.counts;
    if !counts.is_empty() {
        text.head(EVICTIONS, "counter", "[ALPHA] Cumulative number of pod evictions by eviction signal");
    }
    for (signal, count) in counts {
        let count = u32::try_from(*count).unwrap_or(u32::MAX);
        text.sample((EVICTIONS, ""), Labels::of(&[("eviction_signal", signal)]), f64::from(count));
    }
}

/// Volumes that containers mount: of pods that are not over, and those of them that are set up.
fn write_volumes(snapshot: &Snapshot, text: &mut Text) {
    const VOLUMES: &str = "volume_manager_total_volumes";
    let mut counts: BTreeMap<(String, &str), usize> = BTreeMap::new();
    for view in snapshot.pods.values().filter(|view| view.counts.rejected.is_none()) {
        let is_desired = matches!(view.counts.stage, LifecycleStage::Syncing | LifecycleStage::Terminating);
        for volume in volumes::volumes_to_mount(&view.pod) {
            let plugin = plugin_of(view, &volume);
            if view.volumes.get(&volume.name).is_some_and(|known| known.is_set_up) {
                *counts.entry((plugin.clone(), "actual_state_of_world")).or_default() += 1;
            }
            if is_desired {
                *counts.entry((plugin, "desired_state_of_world")).or_default() += 1;
            }
        }
    }
    if !counts.is_empty() {
        text.head(VOLUMES, "gauge", "[ALPHA] Number of volumes in Volume Manager");
    }
    for ((plugin, state), count) in counts {
        text.sample((VOLUMES, ""), Labels::of(&[("plugin_name", &plugin), ("state", state)]), float(count));
    }
}

/// Pods of no source and without a spec: they are known by their directories, or by the runtime, and are being cleaned up.
fn write_orphans(snapshot: &Snapshot, text: &mut Text) {
    let is_orphan = |view: &&Arc<PodView>| view.source.is_none() && view.pod.spec.is_none();
    let (mut cleaned, mut failed) = (0, 0);
    for view in snapshot.pods.values().filter(is_orphan) {
        if view.counts.stage == LifecycleStage::Terminated {
            cleaned += 1;
            failed += usize::from(view.steps.iter().any(|step| step.last_error.is_some()));
        }
    }
    for (name, help, count) in [
        (
            "kubelet_orphan_pod_cleaned_volumes",
            "[ALPHA] The total number of orphaned Pods whose volumes were cleaned in the last periodic sweep.",
            cleaned,
        ),
        (
            "kubelet_orphan_pod_cleaned_volumes_errors",
            "[ALPHA] The number of orphaned Pods whose volumes failed to be cleaned in the last periodic sweep.",
            failed,
        ),
    ] {
        text.single(name, "gauge", help, float(count));
    }
}

/// Upstream has these metrics only with the gate MemoryQoS.
fn write_protected_memory(snapshot: &Snapshot, text: &mut Text) {
    let Some(ProtectedMemory { min_bytes, low_bytes }) = snapshot.node.protected_memory else { return };
    #[expect(clippy::cast_precision_loss, reason = "a metric is a float")]
    for (name, help, bytes) in [
        ("kubelet_memory_qos_node_memory_min_bytes", HELP_MIN, min_bytes as f64),
        ("kubelet_memory_qos_node_memory_low_bytes", HELP_LOW, low_bytes as f64),
    ] {
        text.single(name, "gauge", help, bytes);
    }
}

/// Containers and sandboxes in the runtime at the last look.
fn write_runtime(snapshot: &Snapshot, text: &mut Text) {
    const CONTAINERS: &str = "kubelet_running_containers";
    let running = snapshot.pods.values().filter(|view| view.counts.has_ready_sandbox).count();
    text.single(
        "kubelet_running_pods",
        "gauge",
        "[ALPHA] Number of pods that have a running pod sandbox",
        float(running),
    );
    let states = [
        (ListedState::Created, "created"),
        (ListedState::Exited, "exited"),
        (ListedState::Running, "running"),
        (ListedState::Unknown, "unknown"),
    ];
    text.head(CONTAINERS, "gauge", "[ALPHA] Number of containers currently running");
    for (state, name) in states {
        let counts = snapshot.pods.values().filter_map(|view| view.counts.containers.get(&state));
        let count: u32 = counts.sum();
        text.sample((CONTAINERS, ""), Labels::of(&[("container_state", name)]), f64::from(count));
    }
}

/// Whether a pod is one of those a family counts.
type Counts = fn(&PodView) -> bool;

/// Desired pods.
fn write_config(snapshot: &Snapshot, text: &mut Text) {
    let desired = || snapshot.pods.values().filter(|view| view.source.is_some());
    let families: [(&str, &str, Counts); 2] = [
        (
            "kubelet_desired_pods",
            "[ALPHA] The number of pods the kubelet is being instructed to run. static is true if the pod is not from the \
             apiserver.",
            |_| true,
        ),
        (
            "kubelet_active_pods",
            "[ALPHA] The number of pods the kubelet considers active and which are being considered when admitting new pods. \
             static is true if the pod is not from the apiserver.",
            is_active,
        ),
    ];
    for (name, help, counts) in families {
        text.head(name, "gauge", help);
        for (label, is_static) in [("", false), ("true", true)] {
            let count = desired().filter(|view| counts(view) && is_static_pod(&view.pod) == is_static).count();
            text.sample((name, ""), Labels::of(&[("static", label)]), float(count));
        }
    }
    let mirrors = snapshot.pods.values().filter(|view| view.mirror_uid.is_some()).count();
    text.single(
        "kubelet_mirror_pods",
        "gauge",
        "[ALPHA] The number of mirror pods the kubelet will try to create (one per admitted static pod)",
        float(mirrors),
    );
    let specs = snapshot.pods.values().filter_map(|view| view.pod.spec.as_ref());
    let ephemeral = specs.map(|spec| spec.ephemeral_containers.as_ref().map_or(0, Vec::len)).sum();
    text.single(
        "kubelet_managed_ephemeral_containers",
        "gauge",
        "[ALPHA] Current number of ephemeral containers in pods managed by this kubelet.",
        float(ephemeral),
    );
}

fn is_active(view: &PodView) -> bool {
    let is_over = view.status.phase.as_deref().is_some_and(is_terminal);
    view.counts.stage != LifecycleStage::Terminated && view.counts.rejected.is_none() && !is_over
}

/// Pods with a worker. A rejected pod has none.
fn write_working(snapshot: &Snapshot, text: &mut Text) {
    const WORKING: &str = "kubelet_working_pods";
    let mut counts: BTreeMap<[&str; 3], usize> = BTreeMap::new();
    for lifecycle in ["sync", "terminated", "terminating"] {
        for (config, is_static) in
            [("desired", ""), ("desired", "true"), ("orphan", ""), ("orphan", "true"), ("runtime_only", "unknown")]
        {
            counts.insert([lifecycle, config, is_static], 0);
        }
    }
    for view in snapshot.pods.values().filter(|view| view.counts.rejected.is_none()) {
        let lifecycle = match view.counts.stage {
            LifecycleStage::Waiting => continue,
            LifecycleStage::Syncing => "sync",
            LifecycleStage::Terminating => "terminating",
            LifecycleStage::Terminated => "terminated",
        };
        let is_static = if is_static_pod(&view.pod) { "true" } else { "" };
        let (config, is_static) = match (view.source, &view.pod.spec) {
            (Some(_), _) => ("desired", is_static),
            (None, Some(_)) => ("orphan", is_static),
            (None, None) => ("runtime_only", "unknown"),
        };
        *counts.entry([lifecycle, config, is_static]).or_default() += 1;
    }
    text.head(
        WORKING,
        "gauge",
        "[ALPHA] Number of pods the kubelet is actually running, broken down by lifecycle phase, whether the pod is desired, \
         orphaned, or runtime only (also orphaned), and whether the pod is static. An orphaned pod has been removed from local \
         configuration or force deleted in the API and consumes resources that are not otherwise visible.",
    );
    for ([lifecycle, config, is_static], count) in counts {
        let labels = [("lifecycle", lifecycle), ("config", config), ("static", is_static)];
        text.sample((WORKING, ""), Labels::of(&labels), float(count));
    }
}

#[expect(clippy::cast_precision_loss, reason = "no node has as many pods as a float can count")]
fn float(count: usize) -> f64 {
    count as f64
}
