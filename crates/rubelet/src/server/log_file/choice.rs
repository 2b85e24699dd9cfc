//! Chooses the run of a container whose log is requested.
//!
//! Owns: upstream's rules and texts. Never: reads files.
//! Upstream: `validateContainerLogStatus`.

use k8s_openapi::api::core::v1::{ContainerStateTerminated, ContainerStatus, PodStatus};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogRun {
    /// The current run; otherwise the last terminated one.
    Current,
    /// The run before the current one.
    Previous,
}

/// The attempt whose log is requested, or why there is none.
pub(crate) fn choose_attempt(status: &PodStatus, pod: &str, container: &str, run: LogRun) -> Result<u32, String> {
    let statuses = [&status.container_statuses, &status.init_container_statuses, &status.ephemeral_container_statuses];
    let Some(found) = statuses.into_iter().flatten().flatten().find(|status| status.name == container) else {
        return Err(format!("container {container:?} in pod {pod:?} is not available"));
    };
    let newest = u32::try_from(found.restart_count).unwrap_or_default();
    // Before the next run starts, the last terminated run is also the newest.
    let last_ended = if has_run(found) { newest.checked_sub(1) } else { Some(newest) };
    let last_state = found.last_state.as_ref().and_then(|state| state.terminated.as_ref());
    let last_ended = last_state.filter(|ended| has_container(ended)).and(last_ended);
    match run {
        LogRun::Previous => {
            last_ended.ok_or_else(|| format!("previous terminated container {container:?} in pod {pod:?} not found"))
        }
        LogRun::Current if has_run(found) => Ok(newest),
        LogRun::Current => {
            last_ended.ok_or_else(|| format!("container {container:?} in pod {pod:?} is {}", plight(found)))
        }
    }
}

/// The container ID of the current state exists, running or terminated.
fn has_run(status: &ContainerStatus) -> bool {
    status
        .state
        .as_ref()
        .is_some_and(|state| state.running.is_some() || state.terminated.as_ref().is_some_and(has_container))
}

fn has_container(ended: &ContainerStateTerminated) -> bool {
    ended.container_id.as_deref().is_some_and(|id| !id.is_empty())
}

fn plight(status: &ContainerStatus) -> String {
    let state = status.state.clone().unwrap_or_default();
    let was_terminated = status.last_state.as_ref().is_some_and(|state| state.terminated.is_some());
    match state.waiting.and_then(|waiting| waiting.reason) {
        _ if state.terminated.is_some() || was_terminated => "terminated".to_owned(),
        None => "waiting to start - no logs yet".to_owned(),
        Some(reason) => match reason.as_str() {
            "ErrImagePull" => "waiting to start: image can't be pulled".to_owned(),
            "ImagePullBackOff" => "waiting to start: trying and failing to pull image".to_owned(),
            other => format!("waiting to start: {other}"),
        },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn each_state_leads_to_the_run_upstream_would_show() {
        let running = json!({"running": {"startedAt": "2026-11-15T10:00:00Z"}});
        let ended = json!({"terminated": {"exitCode": 1, "containerID": "containerd://x"}});
        let lost = json!({"terminated": {"exitCode": 137}});
        let waiting = |reason: &str| json!({"waiting": {"reason": reason}});
        let none = json!({});
        let cases = [
            ("running, first", &running, &none, 0),
            ("running, third", &running, &ended, 2),
            ("completed", &ended, &none, 0),
            ("completed again", &ended, &ended, 1),
            ("crash loop", &waiting("CrashLoopBackOff"), &ended, 4),
            ("never started", &waiting("ContainerCreating"), &none, 0),
            ("cannot pull", &waiting("ErrImagePull"), &none, 0),
            ("still cannot pull", &waiting("ImagePullBackOff"), &none, 0),
            ("lost", &lost, &none, 0),
            ("lost after a run", &lost, &ended, 3),
            ("waiting after a loss", &waiting("CrashLoopBackOff"), &lost, 1),
            ("nothing known", &none, &none, 0),
        ];
        let mut table = String::new();
        for (name, state, last, restarts) in cases {
            let [current, previous] = [LogRun::Current, LogRun::Previous].map(|run| shown(state, last, restarts, run));
            table += &format!("{name}: {current} | {previous}\n");
        }
        insta::assert_snapshot!(table, @r#"
        running, first: 0 | previous terminated container "c" in pod "p" not found
        running, third: 2 | 1
        completed: 0 | previous terminated container "c" in pod "p" not found
        completed again: 1 | 0
        crash loop: 4 | 4
        never started: container "c" in pod "p" is waiting to start: ContainerCreating | previous terminated container "c" in pod "p" not found
        cannot pull: container "c" in pod "p" is waiting to start: image can't be pulled | previous terminated container "c" in pod "p" not found
        still cannot pull: container "c" in pod "p" is waiting to start: trying and failing to pull image | previous terminated container "c" in pod "p" not found
        lost: container "c" in pod "p" is terminated | previous terminated container "c" in pod "p" not found
        lost after a run: 3 | 3
        waiting after a loss: container "c" in pod "p" is terminated | previous terminated container "c" in pod "p" not found
        nothing known: container "c" in pod "p" is waiting to start - no logs yet | previous terminated container "c" in pod "p" not found
        "#);
    }

    fn shown(state: &Value, last: &Value, restarts: i32, run: LogRun) -> String {
        let container = json!({"name": "c", "image": "i", "imageID": "", "ready": true, "restartCount": restarts,
            "state": state, "lastState": last});
        let status: PodStatus = serde_json::from_value(json!({"initContainerStatuses": [container]})).unwrap();
        match choose_attempt(&status, "p", "c", run) {
            Ok(attempt) => attempt.to_string(),
            Err(why) => why,
        }
    }

    #[test]
    fn an_unknown_container_is_named() {
        let error = choose_attempt(&PodStatus::default(), "p", "c", LogRun::Current).unwrap_err();
        assert_eq!(error, r#"container "c" in pod "p" is not available"#);
    }
}
