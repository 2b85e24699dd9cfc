//! READY, STATUS and RESTARTS as kubectl prints them.
//!
//! Owns: the status word of a pod. Upstream: `printPod`. A static pod has no deletion timestamp, so its
//! lifecycle state is used instead.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, ContainerStateTerminated, ContainerStatus, PodStatus};
use rubelet_core::{pod::restart_policy::is_sidecar, snapshot::PodView};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Column {
    pub ready: usize,
    pub total: usize,
    pub status: String,
    pub restarts: i32,
    pub last_restart: Option<Timestamp>,
}

pub(crate) fn of(view: &PodView) -> Column {
    let status = &*view.status;
    let spec = view.pod.spec.as_ref();
    let init: BTreeMap<&str, &Container> = spec
        .and_then(|spec| spec.init_containers.as_deref())
        .unwrap_or_default()
        .iter()
        .map(|container| (container.name.as_str(), container))
        .collect();
    let sidecars = init.values().filter(|container| is_sidecar(container)).count();

    let mut column = Column {
        total: spec.map_or(view.running.len(), |spec| spec.containers.len()) + sidecars,
        status: starting_word(view),
        ..Column::default()
    };
    let waits_in_init = init_part(status, &init, &mut column);
    if let Some(word) = &waits_in_init {
        column.status.clone_from(word);
    }
    if waits_in_init.is_none() || condition(status, "Initialized") {
        main_part(status, &init, &mut column);
    }
    let over = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
    if is_being_deleted(view) && !over {
        column.status = "Terminating".to_owned();
    }
    column
}

/// The pod's reason, else its phase, else, before it has a status, its lifecycle state.
fn starting_word(view: &PodView) -> String {
    let own = view.status.reason.as_deref().filter(|reason| !reason.is_empty());
    let phase = view.status.phase.as_deref().filter(|phase| !phase.is_empty());
    match (own.or(phase), view.source) {
        (Some(word), _) => word.to_owned(),
        (None, Some(_)) => "Pending".to_owned(),
        (None, None) => "Unknown".to_owned(),
    }
}

fn is_being_deleted(view: &PodView) -> bool {
    view.pod.metadata.deletion_timestamp.is_some() || view.lifecycle == "Terminating"
}

/// Counts restarts up to the first unfinished init container, and returns what that one waits for.
fn init_part(status: &PodStatus, init: &BTreeMap<&str, &Container>, column: &mut Column) -> Option<String> {
    for (position, container) in status.init_container_statuses.iter().flatten().enumerate() {
        count_restarts(container, column);
        let terminated = container.state.as_ref().and_then(|state| state.terminated.as_ref());
        let waiting = waiting_reason(container).filter(|reason| *reason != "PodInitializing");
        if terminated.is_some_and(|end| end.exit_code == 0) {
            continue;
        }
        if init.get(container.name.as_str()).is_some_and(|spec| is_sidecar(spec)) && container.started == Some(true) {
            column.ready += usize::from(container.ready);
            continue;
        }
        return Some(match (terminated, waiting) {
            (Some(end), _) => format!("Init:{}", end_word(end)),
            (None, Some(reason)) => format!("Init:{reason}"),
            (None, None) => format!("Init:{position}/{}", init.len()),
        });
    }
    None
}

fn main_part(status: &PodStatus, init: &BTreeMap<&str, &Container>, column: &mut Column) {
    // Restarts of ordinary init containers are ignored after initialization.
    (column.restarts, column.last_restart) = (0, None);
    for container in status.init_container_statuses.iter().flatten() {
        if init.get(container.name.as_str()).is_some_and(|spec| is_sidecar(spec)) {
            count_restarts(container, column);
        }
    }

    let mut has_running = false;
    let mut failure = None;
    // From the last to the first, so that the first container's reason wins.
    for container in status.container_statuses.iter().flatten().rev() {
        count_restarts(container, column);
        let state = container.state.as_ref();
        let terminated = state.and_then(|state| state.terminated.as_ref());
        if let Some(reason) = waiting_reason(container) {
            column.status = reason.to_owned();
        } else if let Some(end) = terminated {
            column.status = end_word(end);
            if end.exit_code != 0 {
                failure = Some(column.status.clone());
            }
        } else if container.ready && state.is_some_and(|state| state.running.is_some()) {
            has_running = true;
            column.ready += 1;
        }
    }
    if column.status != "Completed" {
        return;
    }
    if has_running && condition(status, "Ready") {
        column.status = "Running".to_owned();
    } else if let Some(failure) = failure {
        column.status = failure;
    } else if has_running {
        column.status = "NotReady".to_owned();
    }
}

fn count_restarts(container: &ContainerStatus, column: &mut Column) {
    column.restarts += container.restart_count;
    let ended = container.last_state.as_ref().and_then(|state| state.terminated.as_ref());
    let at = ended.and_then(|end| end.finished_at.as_ref()).map(|time| time.0);
    column.last_restart = column.last_restart.max(at);
}

fn waiting_reason(container: &ContainerStatus) -> Option<&str> {
    let waiting = container.state.as_ref()?.waiting.as_ref()?;
    waiting.reason.as_deref().filter(|reason| !reason.is_empty())
}

fn end_word(end: &ContainerStateTerminated) -> String {
    match (end.reason.as_deref().unwrap_or_default(), end.signal.unwrap_or(0)) {
        ("", 0) => format!("ExitCode:{}", end.exit_code),
        ("", signal) => format!("Signal:{signal}"),
        (reason, _) => reason.to_owned(),
    }
}

fn condition(status: &PodStatus, name: &str) -> bool {
    status.conditions.iter().flatten().any(|condition| condition.type_ == name && condition.status == "True")
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;
    use serde_json::json;

    use super::super::tests::view;
    use super::of;

    #[test]
    fn status_column_equals_kubectls() {
        let running = |name: &str, ready: bool| json!({"name": name, "image": "i", "imageID": "", "ready": ready, "restartCount": 0, "state": {"running": {}}});
        let waiting = |name: &str, reason: &str| json!({"name": name, "image": "i", "imageID": "", "ready": false, "restartCount": 3, "state": {"waiting": {"reason": reason}}, "lastState": {"terminated": {"exitCode": 1, "finishedAt": "2026-11-15T18:00:00Z"}}});
        let ended = |name: &str, code: i32, reason: &str| json!({"name": name, "image": "i", "imageID": "", "ready": false, "restartCount": 0, "state": {"terminated": {"exitCode": code, "reason": reason}}});
        let killed = json!({"name": "a", "image": "i", "imageID": "", "ready": false, "restartCount": 0, "state": {"terminated": {"exitCode": 137, "signal": 9}}});
        let ready = json!([{"type": "Ready", "status": "True"}, {"type": "Initialized", "status": "True"}]);
        let phase = |phase: &str, main: serde_json::Value| json!({"phase": phase, "containerStatuses": main});
        let init = |first: serde_json::Value, second: serde_json::Value| {
            json!({"phase": "Pending", "initContainerStatuses": [first, second],
                   "containerStatuses": [{"name": "a", "image": "i", "imageID": "", "ready": false, "restartCount": 0, "state": {"waiting": {"reason": "PodInitializing"}}}]})
        };
        let cases = [
            ("no status yet", json!({})),
            ("running", phase("Running", json!([running("a", true), running("b", true)]))),
            ("one not ready", phase("Running", json!([running("a", true), running("b", false)]))),
            ("creating", phase("Pending", json!([waiting("a", "ContainerCreating")]))),
            (
                "crash loop beside a running one",
                phase("Running", json!([waiting("a", "CrashLoopBackOff"), running("b", true)])),
            ),
            (
                "first container's word wins",
                phase("Pending", json!([waiting("a", "ErrImagePull"), waiting("b", "ImagePullBackOff")])),
            ),
            ("completed", phase("Succeeded", json!([ended("a", 0, "Completed")]))),
            ("failed", phase("Failed", json!([ended("a", 1, "Error")]))),
            ("killed by a signal, no reason", phase("Failed", json!([killed]))),
            ("one done, one failed", phase("Failed", json!([ended("a", 0, "Completed"), ended("b", 2, "Error")]))),
            ("one done, one running", phase("Running", json!([ended("a", 0, "Completed"), running("b", true)]))),
            (
                "one done, one running, pod ready",
                json!({"phase": "Running", "conditions": ready, "containerStatuses": [ended("a", 0, "Completed"), running("b", true)]}),
            ),
            ("evicted", json!({"phase": "Failed", "reason": "Evicted"})),
            ("first init runs", init(running("i", false), waiting("j", "PodInitializing"))),
            ("second init runs", init(ended("i", 0, "Completed"), running("j", false))),
            ("init failed", init(ended("i", 1, "Error"), waiting("j", "PodInitializing"))),
            ("init crash loop", init(waiting("i", "CrashLoopBackOff"), waiting("j", "PodInitializing"))),
            ("init done, mains wait", init(ended("i", 0, "Completed"), ended("j", 0, "Completed"))),
        ];
        let table: Vec<String> = cases
            .into_iter()
            .map(|(case, status)| {
                let column = of(&view("default", "web", &["a", "b"], &["i", "j"], status));
                let ago = column.last_restart.map_or(String::new(), |at| format!(" last {at}"));
                format!("{case:32} {}/{} {} {}{ago}", column.ready, column.total, column.status, column.restarts)
            })
            .collect();
        assert_snapshot!(table.join("\n"), @"
        no status yet                    0/2 Pending 0
        running                          2/2 Running 0
        one not ready                    1/2 Running 0
        creating                         0/2 ContainerCreating 3 last 2026-11-15T18:00:00Z
        crash loop beside a running one  1/2 CrashLoopBackOff 3 last 2026-11-15T18:00:00Z
        first container's word wins      0/2 ErrImagePull 6 last 2026-11-15T18:00:00Z
        completed                        0/2 Completed 0
        failed                           0/2 Error 0
        killed by a signal, no reason    0/2 Signal:9 0
        one done, one failed             0/2 Error 0
        one done, one running            1/2 NotReady 0
        one done, one running, pod ready 1/2 Running 0
        evicted                          0/2 Evicted 0
        first init runs                  0/2 Init:0/2 0
        second init runs                 0/2 Init:1/2 0
        init failed                      0/2 Init:Error 0
        init crash loop                  0/2 Init:CrashLoopBackOff 3 last 2026-11-15T18:00:00Z
        init done, mains wait            0/2 PodInitializing 0
        ");
    }

    #[test]
    fn a_pod_being_stopped_is_terminating_unless_it_is_over() {
        let status = |phase: &str| json!({"phase": phase, "containerStatuses": [{"name": "a", "image": "i", "imageID": "", "ready": true, "restartCount": 0, "state": {"running": {}}}]});
        for (phase, expected) in [("Running", "Terminating"), ("Pending", "Terminating"), ("Succeeded", "Succeeded")] {
            let mut view = view("default", "web", &["a"], &[], status(phase));
            view.lifecycle = "Terminating".to_owned();
            assert_eq!(of(&view).status, expected, "{phase}");
        }
    }

    #[test]
    fn a_started_sidecar_counts_among_the_containers() {
        let mut sidecar = view(
            "default",
            "web",
            &["a"],
            &["s"],
            json!({
                "phase": "Running",
                "initContainerStatuses": [{"name": "s", "image": "i", "imageID": "", "ready": true, "started": true, "restartCount": 2, "state": {"running": {}}}],
                "containerStatuses": [{"name": "a", "image": "i", "imageID": "", "ready": true, "restartCount": 1, "state": {"running": {}}}],
            }),
        );
        let mut pod = (*sidecar.pod).clone();
        let init = pod.spec.as_mut().and_then(|spec| spec.init_containers.as_mut()).unwrap();
        init[0].restart_policy = Some("Always".to_owned());
        sidecar.pod = pod.into();
        let column = of(&sidecar);
        assert_eq!((column.ready, column.total, column.restarts, column.status.as_str()), (2, 2, 3, "Running"));
    }
}
