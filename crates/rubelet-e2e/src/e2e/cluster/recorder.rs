//! Records a watch of pods, and checks that every transition is legal.
//!
//! Owns: the watch, its history, and the rules of order. All API clients rely on these rules, so they hold over
//! restarts of the agent, too.

use std::{
    collections::BTreeMap,
    io::BufRead as _,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{bail, ensure};
use serde_json::Value;

use crate::{
    control_plane::api::Api,
    e2e::{lock, node::PodSeen},
};

/// The watch is reopened after this long without events, so that its thread can end.
const SILENCE: Duration = Duration::from_secs(2);

/// An event of the watch.
#[derive(Clone, Debug)]
pub struct Seen {
    pub kind: Kind,
    pub pod: PodSeen,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Changed,
    Deleted,
}

#[derive(Debug)]
pub struct Recorder {
    history: Arc<Mutex<Vec<Seen>>>,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<anyhow::Result<()>>>,
}

impl Recorder {
    pub fn start(api: Api, namespace: &str) -> anyhow::Result<Self> {
        let path = format!("/api/v1/namespaces/{namespace}/pods");
        let list = api.get(&path)?;
        let version = list["metadata"]["resourceVersion"].as_str().unwrap_or_default().to_owned();
        let history = Arc::new(Mutex::new(Vec::new()));
        let is_over = Arc::new(AtomicBool::new(false));
        let (events, over) = (Arc::clone(&history), Arc::clone(&is_over));
        let thread = thread::spawn(move || follow(&api, &path, version, &events, &over));
        Ok(Recorder { history, is_over, thread: Some(thread) })
    }

    /// Ends the watch once it has caught up; returns the history.
    pub fn finish(mut self) -> anyhow::Result<Vec<Seen>> {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            match thread.join() {
                Ok(result) => result?,
                Err(_) => bail!("the recorder panicked"),
            }
        }
        Ok(std::mem::take(&mut *lock(&self.history)))
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // The test has failed already, for a more specific reason.
            let _ = thread.join();
        }
    }
}

/// Resumes from the last version, so that nothing is missed between two watches.
fn follow(
    api: &Api,
    path: &str,
    mut version: String,
    events: &Mutex<Vec<Seen>>,
    over: &AtomicBool,
) -> anyhow::Result<()> {
    loop {
        let is_last = over.load(Ordering::Relaxed);
        let query = format!("{path}?watch=1&allowWatchBookmarks=true&timeoutSeconds=600&resourceVersion={version}");
        let Ok(lines) = api.watch(&query, SILENCE) else {
            // The API server may be down as part of the test.
            if is_last {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(200));
            continue;
        };
        for line in lines.lines() {
            let Ok(line) = line else { break };
            let Ok(mut event) = serde_json::from_str::<Value>(&line) else { break };
            let object = event["object"].take();
            let kind = match event["type"].as_str() {
                Some("ADDED" | "MODIFIED") => Some(Kind::Changed),
                Some("DELETED") => Some(Kind::Deleted),
                Some("BOOKMARK") => None,
                // A restarted server has lost its history; the current state is listed instead.
                Some("ERROR") if object["code"] == 410 => {
                    version = catch_up(api, path, events)?;
                    break;
                }
                other => bail!("the watch says {other:?}: {object}"),
            };
            version = object["metadata"]["resourceVersion"].as_str().unwrap_or(&version).to_owned();
            if let Some(kind) = kind {
                lock(events).push(Seen { kind, pod: PodSeen(object) });
            }
        }
        if is_last {
            return Ok(());
        }
    }
}

/// Records all pods; returns the version to resume from.
fn catch_up(api: &Api, path: &str, events: &Mutex<Vec<Seen>>) -> anyhow::Result<String> {
    let mut list = api.get(path)?;
    let items = list["items"].take();
    let pods = items.as_array().into_iter().flatten().cloned();
    lock(events).extend(pods.map(|pod| Seen { kind: Kind::Changed, pod: PodSeen(pod) }));
    Ok(list["metadata"]["resourceVersion"].as_str().unwrap_or_default().to_owned())
}

/// Every step between two states of a pod must be legal.
pub fn check_order(history: &[Seen]) -> anyhow::Result<()> {
    let mut last: BTreeMap<&str, &Seen> = BTreeMap::new();
    for seen in history {
        let uid = seen.pod.uid();
        check_alone(&seen.pod).map_err(|err| explain(&err, None, seen))?;
        if let Some(before) = last.get(uid) {
            check_step(before, seen).map_err(|err| explain(&err, Some(before), seen))?;
        }
        last.insert(uid, seen);
    }
    Ok(())
}

fn explain(err: &anyhow::Error, before: Option<&Seen>, after: &Seen) -> anyhow::Error {
    let status = |seen: &Seen| seen.pod.status().to_string();
    let name = after.pod.name();
    anyhow::anyhow!(
        "pod {name}: {err:#}\nbefore: {}\nafter:  {}",
        before.map(status).unwrap_or_default(),
        status(after)
    )
}

fn check_alone(pod: &PodSeen) -> anyhow::Result<()> {
    if pod.is_ready() {
        ensure!(pod.phase() == "Running", "it is ready in phase {}", pod.phase());
        ensure!(pod.status()["podIP"].is_string(), "it is ready without an address");
    }
    Ok(())
}

fn check_step(before: &Seen, after: &Seen) -> anyhow::Result<()> {
    ensure!(before.kind != Kind::Deleted, "it came back after its deletion");
    let (old, new) = (&before.pod, &after.pod);
    let is_terminal = |phase: &str| matches!(phase, "Succeeded" | "Failed");
    if is_terminal(old.phase()) {
        ensure!(old.phase() == new.phase(), "phase {} became {}", old.phase(), new.phase());
    }
    ensure!(!(old.phase() == "Running" && new.phase() == "Pending"), "a running pod became pending");
    if old.is_being_deleted() {
        ensure!(new.is_being_deleted(), "its deletion was taken back");
    }
    for status in old.all_container_statuses() {
        let name = status["name"].as_str().unwrap_or_default();
        let now = new.container(name);
        ensure!(!now.is_null(), "the status of container {name} is gone");
        let restarts = |status: &Value| status["restartCount"].as_i64().unwrap_or_default();
        let (was, is) = (restarts(status), restarts(now));
        ensure!(was <= is, "container {name}: restartCount fell from {was} to {is}");
        let same_id = status["containerID"] == now["containerID"];
        let was_over = status["state"]["terminated"].is_object();
        let is_running = now["state"]["running"].is_object();
        ensure!(!(same_id && was_over && is_running), "container {name} ended and runs again under the same id");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn seen(phase: &str, container: &Value) -> Seen {
        let pod = json!({
            "metadata": { "name": "web", "uid": "1" },
            "status": { "phase": phase, "containerStatuses": [container] },
        });
        Seen { kind: Kind::Changed, pod: PodSeen(pod) }
    }

    fn verdict(history: &[Seen]) -> String {
        check_order(history).err().map_or("legal".to_owned(), |err| err.to_string().lines().next().unwrap().to_owned())
    }

    #[test]
    fn a_pod_that_goes_back_is_noticed() {
        let running = json!({ "name": "main", "containerID": "a", "restartCount": 1, "state": { "running": {} } });
        let ended = json!({ "name": "main", "containerID": "a", "restartCount": 1, "state": { "terminated": {} } });
        let forgotten = json!({ "name": "main", "containerID": "b", "restartCount": 0, "state": { "running": {} } });
        assert_eq!(verdict(&[seen("Running", &running), seen("Failed", &ended)]), "legal");
        assert_eq!(
            verdict(&[seen("Failed", &ended), seen("Running", &running)]),
            "pod web: phase Failed became Running"
        );
        assert_eq!(
            verdict(&[seen("Running", &ended), seen("Running", &running)]),
            "pod web: container main ended and runs again under the same id"
        );
        assert_eq!(
            verdict(&[seen("Running", &running), seen("Running", &forgotten)]),
            "pod web: container main: restartCount fell from 1 to 0"
        );
        let mut gone = seen("Running", &running);
        gone.kind = Kind::Deleted;
        assert_eq!(verdict(&[gone, seen("Running", &running)]), "pod web: it came back after its deletion");
    }
}
