//! Rules over the agent's writes to the API server.
//!
//! Owns: the last status the agent wrote of each pod, and the number of writes. Never: checks writes of others.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    time::Duration,
};

use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus};
use rubelet_core::{pod::status::is_terminal, pod_manager::is_mirror_pod};
use rubelet_kube::port::{ApiErrorKind, Verb};
use serde_json::Value;

use super::Rules;
use crate::{
    api::act::Request,
    play::predicates::NODE,
    runtime::{act::Act, store::Picture},
    simulation::SimState,
};

/// Status writes allowed beyond one per change: start and end of a pod may take two each.
const SPARE_WRITES: u32 = 3;
/// This many failed watches may cause a list.
const REFUSALS_PER_LIST: u32 = 5;

#[derive(Debug, Default)]
pub(super) struct ApiSeen {
    /// Pods that users created in the API, by uid, with their shortest grace period.
    users: BTreeMap<String, Option<i64>>,
    /// The agent's last write of a user's pod, by uid.
    written: BTreeMap<String, PodStatus>,
    /// Pods with foreign writes since, by uid.
    overwritten: BTreeSet<String>,
    /// Running status writes, by uid.
    busy: BTreeMap<String, u32>,
    /// By pod name, because a static pod and its mirror share nothing else.
    traffic: BTreeMap<String, Traffic>,
    /// The current agent has received all its pods once, from etcd and not from a stale cache.
    is_listed: bool,
    /// By watched collection.
    lists: BTreeMap<String, Lists>,
    events: EventWrites,
}

/// Lists of a collection by the current agent, and the number of reasons for them.
#[derive(Debug, Default)]
struct Lists {
    made: u32,
    reasons: u32,
    /// Failed watches, after which a watch resumes.
    refused: u32,
}

/// Events of the current agent.
#[derive(Debug, Default)]
struct EventWrites {
    recorded: u32,
    written: u32,
    /// Failed writes, each of which may be retried once.
    failed: u32,
}

/// Status writes of a pod, and the number of reasons for them.
#[derive(Debug, Default)]
struct Traffic {
    writes: u32,
    reasons: u32,
}

impl ApiSeen {
    pub(super) fn agent_begins(&mut self) {
        self.is_listed = false;
        self.busy.clear();
        self.lists.clear();
        self.events = EventWrites::default();
        for traffic in self.traffic.values_mut() {
            traffic.reasons += 1;
        }
    }

    pub(super) fn forget_all_but(&mut self, kept: &BTreeSet<String>, names: &BTreeSet<String>) {
        self.users.retain(|uid, _| kept.contains(uid));
        self.written.retain(|uid, _| kept.contains(uid));
        self.overwritten.retain(|uid| kept.contains(uid));
        self.busy.retain(|uid, _| kept.contains(uid));
        self.traffic.retain(|name, _| names.contains(name));
    }

    /// The agent reports a change of the pod.
    pub(super) fn news(&mut self, pod_name: &str) {
        self.traffic.entry(pod_name.to_owned()).or_default().reasons += 1;
    }
}

impl Rules {
    /// A user created the pod.
    pub(crate) fn pod_made(&mut self, uid: &str) {
        self.api.users.insert(uid.to_owned(), None);
    }

    /// A foreign client wrote the pod.
    pub(crate) fn pod_edited(&mut self, name: &str, uid: &str) {
        self.api.news(name);
        self.api.written.remove(uid);
        self.evictions.status_overwritten(uid);
        self.api.overwritten.insert(uid.to_owned());
    }

    pub(super) fn is_overwritten(&self, uid: &str) -> bool {
        self.api.overwritten.contains(uid)
    }

    /// Somebody else wrote the statuses of the pod's containers: an attempt that the runtime does not show is forgotten.
    pub(crate) fn restart_counts_overwritten(&mut self, uid: &str) {
        self.seen.forget_counts(uid);
    }

    /// A user wants the pod to end, within this time.
    pub(crate) fn end_asked(&mut self, uid: &str, grace_secs: i64) {
        if let Some(known) = self.api.users.get_mut(uid) {
            *known = Some(known.map_or(grace_secs, |known| known.min(grace_secs)));
        }
    }

    /// The shortest requested grace period.
    pub(super) fn granted(&self, uid: &str) -> Option<i64> {
        self.api.users.get(uid).copied().flatten()
    }

    pub(crate) fn api_called(&mut self, now: Duration, request: &Request) {
        self.check_lists(now, request);
        self.check_events(now, request);
        if !request.is_of("pods") {
            return;
        }
        let name = request.key().name;
        match request.verb {
            Verb::Patch(_) => {
                let Some(uid) = request.body["metadata"]["uid"].as_str() else {
                    return self.broken("status writes carry the UID", now, request.to_string());
                };
                let count = self.api.busy.entry(uid.to_owned()).or_default();
                *count += 1;
                if *count > 1 {
                    self.broken("one status write per pod at a time", now, format!("{name} {uid}"));
                }
            }
            Verb::Delete => {
                if request.body["preconditions"]["uid"].as_str().is_none() {
                    self.broken("deletions carry the UID", now, request.to_string());
                }
                if request.body["gracePeriodSeconds"] != 0 {
                    self.broken("the agent deletes without grace", now, request.to_string());
                }
            }
            Verb::Get | Verb::Create | Verb::Update => {}
        }
    }

    /// The client has its response, or disconnected.
    pub(crate) fn api_returned(&mut self, request: &Request) {
        if let (true, Verb::Patch(_)) = (request.is_of("pods"), request.verb)
            && let Some(count) = request.body["metadata"]["uid"].as_str().and_then(|uid| self.api.busy.get_mut(uid))
        {
            *count = count.saturating_sub(1);
        }
    }

    /// The client has a successful response.
    pub(crate) fn api_answered(&mut self, now: Duration, request: &Request) {
        match request.verb {
            Verb::Create | Verb::Update if request.is_of("leases") => self.known.renewed = Some(now),
            _ if !request.is_of("pods") => {}
            // With a version, the response may come from a stale cache.
            Verb::Get if request.is_list() => self.api.is_listed |= request.version().is_none(),
            Verb::Patch(_) => {
                let name = request.key().name;
                let traffic = self.api.traffic.entry(name.clone()).or_default();
                traffic.writes += 1;
                if traffic.writes > traffic.reasons + SPARE_WRITES {
                    let detail = format!("{name}: {} writes for {} reasons", traffic.writes, traffic.reasons);
                    self.broken("statuses are written for a reason", now, detail);
                }
            }
            Verb::Get | Verb::Create | Verb::Update | Verb::Delete => {}
        }
    }

    /// Users' pods are terminated only after the agent saw their deletion.
    pub(super) fn check_listed(&mut self, now: Duration, act: &Act, picture: &Picture) {
        let uid = match act {
            Act::Term(id) | Act::Kill(id) | Act::RemoveContainer(id) | Act::DeleteTask(id) => {
                picture.containers.get(id).map(|container| container.pod.uid.clone())
            }
            Act::StopSandbox(id) | Act::RemoveSandbox(id) => {
                picture.sandboxes.get(id).map(|sandbox| sandbox.identity().uid)
            }
            Act::RunSandbox(_)
            | Act::LeaveSandbox(_)
            | Act::Create { .. }
            | Act::Start(_)
            | Act::ReopenLog(_)
            | Act::Pull(_)
            | Act::RemoveImage(_) => None,
        };
        let is_users = uid.is_some_and(|uid| self.api.users.contains_key(&uid));
        if is_users && !self.api.is_listed {
            let detail = format!("{} of a pod of the API", act.method());
            self.broken("nothing ends before a consistent list", now, detail);
        }
    }

    /// The agent recorded an event.
    pub(crate) fn event_recorded(&mut self) {
        self.api.events.recorded += 1;
    }

    /// A read failed; or a watch or its initial list did.
    pub(crate) fn read_failed(&mut self, request: &Request, is_list: bool, kind: ApiErrorKind) {
        if is_event_of_a_pod(request) {
            self.api.events.failed += 1;
        }
        if !is_followed(request) {
            return;
        }
        let lists = self.api.lists.entry(followed(request)).or_default();
        match kind {
            _ if is_list => lists.reasons += 1,
            ApiErrorKind::Expired | ApiErrorKind::Invalid | ApiErrorKind::NotFound | ApiErrorKind::Unreadable => {
                lists.reasons += 1;
            }
            ApiErrorKind::Unreachable | ApiErrorKind::TooManyRequests { .. } => {}
            _ => lists.refused += 1,
        }
    }

    /// A watch resumes from its version; only an unusable version justifies a list.
    fn check_lists(&mut self, now: Duration, request: &Request) {
        if !is_followed(request) || !request.is_list() {
            return;
        }
        let key = followed(request);
        let lists = self.api.lists.entry(key.clone()).or_default();
        lists.made += 1;
        if lists.made > 1 + lists.reasons + lists.refused / REFUSALS_PER_LIST {
            let detail = format!("{key}: {lists:?}");
            self.broken("a list has a reason", now, detail);
        }
    }

    fn check_events(&mut self, now: Duration, request: &Request) {
        if !is_event_of_a_pod(request) {
            return;
        }
        self.api.events.written += 1;
        if self.api.events.written > self.api.events.recorded + self.api.events.failed {
            let detail = format!("{request}: {:?}", self.api.events);
            self.broken("an event is written once", now, detail);
        }
    }

    fn status_written(&mut self, now: Duration, pod: &Pod, picture: &Picture) {
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        let status = pod.status.clone().unwrap_or_default();
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        let readiness = false_readiness(&status);
        // A patch keeps foreign changes that the watch has not shown yet.
        if readiness.is_none() {
            self.api.overwritten.remove(&uid);
        }
        if let Some(detail) = readiness.filter(|_| !self.api.overwritten.contains(&uid)) {
            self.broken("only what runs is ready", now, format!("{name}: {detail}"));
        }
        // A static pod may restart under its mirror pod.
        if is_mirror_pod(pod) {
            return;
        }
        if status.phase.as_deref().is_some_and(is_terminal)
            && let Some(running) = picture.containers.values().find(|it| it.is_running() && it.pod.uid == uid)
        {
            self.broken("an ended pod runs nothing", now, format!("{name} is {:?}, {running} runs", status.phase));
        }
        self.evictions.status_written(&uid, &status);
        let was_forgotten = self.pods.get(&uid).is_some_and(|pod| pod.was_forgotten);
        if let Some(before) = self.api.written.insert(uid, status.clone())
            && !was_forgotten
            && let Some(detail) = step_back(&before, &status)
        {
            self.broken("a status never goes back", now, format!("{name}: {detail}"));
        }
    }
}

impl SimState {
    /// A write of the agent succeeded.
    pub(crate) fn check_write(&mut self, request: &Request, before: Option<&Value>, after: &Value) {
        if !request.is_of("pods") {
            return;
        }
        let now = self.now;
        match request.verb {
            Verb::Create if after["metadata"]["annotations"]["kubernetes.io/config.mirror"].is_null() => {
                self.rules.broken("the agent makes no pods but mirrors", now, request.to_string());
            }
            Verb::Patch(_) => {
                let pod: Pod = serde_json::from_value(after.clone()).expect("what the agent writes is a pod");
                self.rules.status_written(now, &pod, &self.runtime.picture);
            }
            Verb::Delete => {
                let pod = before.and_then(|pod| serde_json::from_value::<Pod>(pod.clone()).ok());
                if let Some(complaint) = pod.and_then(|pod| self.held_by(&pod)) {
                    self.rules.broken("a pod is deleted when it holds nothing", now, complaint);
                }
            }
            Verb::Create | Verb::Get | Verb::Update => {}
        }
    }

    /// Why this pod must not be deleted from the API yet.
    fn held_by(&self, pod: &Pod) -> Option<String> {
        if is_mirror_pod(pod) {
            return None;
        }
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default();
        // A foreign client may have written another phase since.
        let is_anothers_word = self.rules.api.overwritten.contains(uid);
        if pod.metadata.deletion_timestamp.is_none() || !is_terminal(phase) && !is_anothers_word {
            return Some(format!("{name} is {phase}, to end at {:?}", pod.metadata.deletion_timestamp));
        }
        let picture = &self.runtime.picture;
        if let Some(container) = picture.containers.values().find(|it| it.is_running() && it.pod.uid == uid) {
            return Some(format!("{container} runs"));
        }
        if let Some(sandbox) = picture.sandboxes.values().find(|it| it.ready && it.identity().uid == uid) {
            return Some(format!("sandbox {} is ready", sandbox.name));
        }
        let dir = Path::new("/var/lib/kubelet/pods").join(uid);
        if let Some(mount) = self.disk.mounts_below(&dir).ok().and_then(|mounts| mounts.into_iter().next()) {
            return Some(format!("{} is mounted", mount.display()));
        }
        let cgroup = format!("pod{uid}");
        let left = self.cgroups.iter().find(|path| path.file_name().is_some_and(|name| *name == *cgroup));
        left.map(|path| format!("cgroup {} is there", path.display()))
    }
}

/// Collections watched for as long as the agent runs. Objects of pods are watched anew with each pod.
fn is_followed(request: &Request) -> bool {
    request.path.name.is_none() && ["pods", "nodes", "services"].iter().any(|resource| request.is_of(resource))
}

/// Events of the node come from its reporter, and not from the core.
fn is_event_of_a_pod(request: &Request) -> bool {
    request.is_of("events") && !request.key().name.starts_with(&format!("{NODE}."))
}

fn followed(request: &Request) -> String {
    format!("{} {}", request.path, request.option("fieldSelector").unwrap_or_default())
}

fn containers(status: &PodStatus) -> impl Iterator<Item = &ContainerStatus> {
    status.container_statuses.iter().chain(&status.init_container_statuses).flatten()
}

fn false_readiness(status: &PodStatus) -> Option<String> {
    let is_true = |wanted: &str| {
        let condition = status.conditions.iter().flatten().find(|condition| condition.type_ == wanted);
        condition.is_some_and(|condition| condition.status == "True")
    };
    let runs = |it: &&ContainerStatus| it.state.as_ref().is_some_and(|state| state.running.is_some());
    let mains = || status.container_statuses.iter().flatten();
    if let Some(idle) = mains().find(|it| it.ready && !runs(it)) {
        return Some(format!("{} is ready and does not run", idle.name));
    }
    if is_true("Ready") && !is_true("ContainersReady") {
        return Some("Ready without ContainersReady".to_owned());
    }
    let idle = mains().find(|it| !it.ready).filter(|_| is_true("Ready"));
    if let Some(idle) = idle {
        return Some(format!("Ready though {} is not", idle.name));
    }
    let phase = status.phase.as_deref().unwrap_or_default();
    (is_true("Ready") && phase != "Running").then(|| format!("Ready though {phase}"))
}

fn step_back(before: &PodStatus, after: &PodStatus) -> Option<String> {
    if before.phase != after.phase && before.phase.as_deref().is_some_and(is_terminal) {
        return Some(format!("from {:?} to {:?}", before.phase, after.phase));
    }
    containers(before).find_map(|known| {
        let now = containers(after).find(|it| it.name == known.name)?;
        let falls = now.restart_count < known.restart_count;
        falls.then(|| format!("{}: restartCount {} then {}", known.name, known.restart_count, now.restart_count))
    })
}
