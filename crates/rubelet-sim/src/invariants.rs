//! The rules that must hold in every run.
//!
//! Owns: the history of every container in the runtime, and the rules over it. Never: inspects the agent
//! beyond the snapshot it publishes. Each rule has a name that a failure prints.

mod api;
pub(crate) mod csi;
mod eviction;
mod history;
mod patrol;
mod prune;
mod shutdown;
mod snapshot;
#[cfg(test)]
mod tests;
pub(crate) mod trouble;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    time::Duration,
};

pub(crate) use history::{ContainerHistory, PodHistory};
pub(crate) use shutdown::shutdown_groups;

use crate::{
    invariants::trouble::{Touched, Trouble},
    runtime::{
        act::{Act, KilledBy},
        store::{Container, Picture, Sandbox},
    },
    script::{ContainerScript, Hook, LABEL_POD, LABEL_VERSION, PodScript, Policy},
};

/// Upstream's crash-loop back-off.
const FIRST_BACKOFF: Duration = Duration::from_secs(10);
const MAX_BACKOFF: Duration = Duration::from_secs(300);

/// What upstream leaves between SIGTERM and SIGKILL at the least.
const MINIMUM_GRACE_SECS: i64 = 2;

/// Slack for timers and timestamps of the runtime.
const SLACK: Duration = Duration::from_millis(1_100);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Violation {
    pub rule: &'static str,
    pub at: Duration,
    pub detail: String,
}

#[derive(Debug, Default)]
pub(crate) struct Rules {
    /// Every applied script, by pod name and version.
    scripts: BTreeMap<(String, u32), PodScript>,
    /// By pod uid.
    pods: BTreeMap<String, PodHistory>,
    seen: snapshot::Seen,
    api: api::ApiSeen,
    csi: csi::CsiSeen,
    shutdown: shutdown::ShutdownSeen,
    /// When the current agent started.
    agent_began: Duration,
    /// Containers that were started after the call that is now carried out lost its client. An agent that died while it
    /// stopped a sandbox could not know of them.
    pub(crate) started_since: BTreeSet<String>,
    /// When the wall clock last jumped.
    clock_jumped: Option<Duration>,
    /// Running changing calls, by subject.
    busy: BTreeMap<String, u32>,
    known: patrol::Known,
    evictions: eviction::Evictions,
    /// Hook runs per instance since the agent started; the last probe result.
    hooks: BTreeMap<(String, Hook), u32>,
    probes: BTreeMap<String, bool>,
    pub trouble: Trouble,
    pub violations: Vec<Violation>,
}

impl Rules {
    pub(crate) fn learn(&mut self, script: &PodScript) {
        self.scripts.insert((script.name.clone(), script.version), script.clone());
        // The same pod, removed and added again, may begin a new history.
        let same = |pod: &PodHistory| pod.script == (script.name.clone(), script.version);
        for (uid, pod) in self.pods.iter_mut().filter(|(_, pod)| same(pod)) {
            pod.may_begin_anew = true;
            self.seen.forget_counts(uid);
        }
    }

    pub(crate) fn clock_jumps(&mut self, now: Duration) {
        self.clock_jumped = Some(now);
    }

    pub(crate) fn has_clock_jumped(&self) -> bool {
        self.clock_jumped.is_some()
    }

    /// A user changed the image of a container.
    pub(crate) fn image_edited(&mut self, uid: &str, container: &str, image: &str) {
        let pod = self.pods.entry(uid.to_owned()).or_default();
        pod.containers.entry(container.to_owned()).or_default().edited_image = Some(image.to_owned());
    }

    /// The current agent started the postStart hook of the instance.
    pub(crate) fn has_run_hook(&self, container: &Container) -> bool {
        let history = self.pods.get(&container.pod.uid).and_then(|pod| pod.containers.get(container.name_in_pod()));
        let is_since_agent_start = history.is_some_and(|history| history.last_start >= self.agent_began);
        is_since_agent_start && self.hooks.contains_key(&(container.id.clone(), Hook::PostStart))
    }

    pub(crate) fn history(&self, pod_name: &str) -> impl Iterator<Item = (&String, &PodHistory)> {
        self.pods.iter().filter(move |(_, pod)| pod.script.0 == pod_name)
    }

    pub(crate) fn pod(&self, uid: &str) -> Option<(&PodScript, &PodHistory)> {
        Some((self.script_of(uid)?, self.pods.get(uid)?))
    }

    /// A new process of the agent has no back-off, and snapshots of the old one do not count.
    pub(crate) fn agent_begins(&mut self, now: Duration) {
        self.agent_began = now;
        self.trouble.strike(Touched::Node, now);
        self.known.agent_begins();
        self.evictions.agent_begins();
        // The result of a hook that a dead agent started is unknown.
        self.hooks.retain(|(_, hook), _| *hook == Hook::PostStart);
        self.seen.agent_begins();
        self.api.agent_begins();
        for history in self.pods.values_mut().flat_map(|pod| pod.containers.values_mut()) {
            history.restarts_since_agent_start = 0;
        }
    }

    /// A changing call begins; the result is for `returned`.
    pub(crate) fn called(&mut self, now: Duration, act: &Act, picture: &Picture) -> Option<String> {
        self.check_listed(now, act, picture);
        let busy = subject(act, picture);
        if let Some(key) = &busy {
            let count = self.busy.entry(key.clone()).or_default();
            *count += 1;
            if *count > 1 {
                self.broken("one changing call per subject", now, format!("{} on {key}", act.method()));
            }
        }
        busy
    }

    /// All containers were listed, and the response arrived.
    pub(crate) fn listed(&mut self, now: Duration) {
        self.known.listed = Some(now);
    }

    /// The runtime has lost these: their pods begin anew.
    pub(crate) fn runtime_forgot(&mut self, now: Duration, lost: &Picture) {
        self.trouble.strike(Touched::Node, now);
        for container in lost.containers.values().filter(|container| container.is_running()) {
            self.exited(now, container, 137);
        }
        for pod in self.pods.values_mut() {
            pod.begin_anew();
            pod.was_forgotten = true;
        }
    }

    /// The agent decided to start something for this pod.
    pub(crate) fn ordered(&mut self, now: Duration, uid: &str, what: &str) {
        if self.seen.is_ending(uid) {
            let detail = format!("{what} for pod {uid}, which is {}", self.seen.lifecycle(uid));
            self.broken("nothing is started for a pod that ends", now, detail);
        }
        self.check_start_after_eviction(now, uid, what);
        self.check_start_in_shutdown(now, uid, what);
    }

    pub(crate) fn returned(&mut self, busy: Option<&str>) {
        if let Some(count) = busy.and_then(|key| self.busy.get_mut(key)) {
            *count = count.saturating_sub(1);
        }
    }

    pub(crate) fn sandbox_made(&mut self, now: Duration, sandbox: &Sandbox) {
        let label = |key: &str| sandbox.config.labels.get(key).cloned().unwrap_or_default();
        let script = (label(LABEL_POD), label(LABEL_VERSION).parse().unwrap_or(0));
        let pod = self.pods.entry(sandbox.identity().uid).or_default();
        pod.script = script;
        // A first sandbox after others is that of a pod which starts over.
        let starts_over = sandbox.attempt() == 0 && !pod.sandboxes.is_empty();
        if starts_over && pod.may_begin_anew {
            pod.begin_anew();
        }
        let is_second = starts_over && !pod.sandboxes.is_empty();
        pod.sandboxes.push(sandbox.id.clone());
        if is_second {
            self.broken("a pod starts over only when asked for again", now, sandbox.name.clone());
        }
    }

    pub(crate) fn started(&mut self, now: Duration, container: &Container, picture: &Picture) {
        self.check_company(now, container, picture);
        self.check_order(now, container);
        let history = self.pods.get(&container.pod.uid).and_then(|pod| pod.containers.get(container.name_in_pod()));
        let is_made_again = history.is_some_and(|history| history.is_made_again(container));
        if !is_made_again {
            self.check_policy(now, container);
            self.check_backoff(now, container);
        }
        let pod = self.pods.entry(container.pod.uid.clone()).or_default();
        let history = pod.containers.entry(container.name_in_pod().to_owned()).or_default();
        let earlier = history.highest_attempt.filter(|highest| !is_made_again && container.attempt() <= *highest);
        history.start(now, container);
        if let Some(highest) = earlier {
            self.broken("attempts only grow", now, format!("{container} after attempt {highest}"));
        }
    }

    pub(crate) fn exited(&mut self, now: Duration, container: &Container, code: i32) {
        let pod = self.pods.entry(container.pod.uid.clone()).or_default();
        pod.containers.entry(container.name_in_pod().to_owned()).or_default().exit(now, container, code);
    }

    pub(crate) fn killed(&mut self, now: Duration, container: &Container, by: KilledBy) {
        if self.started_since.contains(&container.id) {
            return;
        }
        let Some(script) = self.script_of(&container.pod.uid) else { return };
        let secs = self.granted(&container.pod.uid).map_or(script.grace_secs, |granted| granted.min(script.grace_secs));
        let secs = self.left_by_shutdown(script).map_or(secs, |left| left.min(secs));
        // A sidecar's order and a hook use up the grace period; upstream's two seconds remain in any case.
        let has_less =
            script.find_container(container.name_in_pod()).is_some_and(|spec| spec.is_sidecar() || spec.has_pre_stop());
        // The same holds for a pod that only the runtime knows.
        let has_less = has_less || self.seen.was_orphan(&container.pod.uid);
        let secs = if has_less { secs.min(MINIMUM_GRACE_SECS) } else { secs };
        let grace = Duration::from_secs(u64::try_from(secs).unwrap_or(0));
        let had = container.pre_stop_at.or(container.term_at).map_or(Duration::ZERO, |since| now.saturating_sub(since));
        if had + SLACK < grace {
            let detail = format!("{container} killed by {by:?} after {had:?} of {grace:?}");
            self.broken("SIGKILL waits for the grace period", now, detail);
        }
    }

    pub(crate) fn hook_runs(&mut self, now: Duration, container: &Container, hook: Hook) {
        let runs = self.hooks.entry((container.id.clone(), hook)).or_default();
        *runs += 1;
        if *runs > 1 {
            self.broken("a hook runs once per instance", now, format!("{hook:?} of {container}"));
        }
    }

    /// A probe of the container returned.
    pub(crate) fn probed(&mut self, container: &str, is_well: bool) {
        self.probes.insert(container.to_owned(), is_well);
    }

    pub(crate) fn image_removed(&mut self, now: Duration, image: &str, picture: &Picture) {
        if let Some(container) = picture.containers.values().find(|container| container.image == image) {
            self.broken("no image in use is deleted", now, format!("{image} is deleted, and {container} has it"));
        }
    }

    /// The file that a container's output goes to was removed.
    pub(crate) fn line_lost(&mut self, now: Duration, container: &str, file: &Path) {
        let detail = format!("{} is gone while {container} writes to it", file.display());
        self.broken("no line of a log is lost or doubled", now, detail);
    }

    pub(crate) fn log_broken(&mut self, now: Duration, container: &str, files: &str) {
        let detail = format!("the lines of {container} are not in order in {files}");
        self.broken("no line of a log is lost or doubled", now, detail);
    }

    /// Removing a cgroup kills its processes.
    pub(crate) fn cgroup_removed(&mut self, now: Duration, path: &Path, picture: &Picture) {
        let is_inside = |sandbox: &Sandbox| {
            let linux = sandbox.config.linux.as_ref();
            linux.is_some_and(|linux| Path::new(&linux.cgroup_parent).starts_with(path))
        };
        for sandbox in picture.sandboxes.values().filter(|sandbox| sandbox.ready && is_inside(sandbox)) {
            let detail = format!("{} is removed under sandbox {}", path.display(), sandbox.name);
            self.broken("no cgroup is removed under what runs", now, detail);
        }
    }

    pub(crate) fn broken(&mut self, rule: &'static str, at: Duration, detail: String) {
        self.violations.push(Violation { rule, at, detail });
    }

    pub(crate) fn script_of(&self, uid: &str) -> Option<&PodScript> {
        self.scripts.get(&self.pods.get(uid)?.script)
    }

    /// The other running instances when this one starts.
    fn check_company(&mut self, now: Duration, container: &Container, picture: &Picture) {
        let others: Vec<_> = picture
            .containers
            .values()
            .filter(|other| other.is_running() && other.id != container.id)
            .cloned()
            .collect();
        // A pod of the API does not wait for others: force deletion must free the name even if something cannot be stopped.
        let is_static = |it: &Container| !picture.sandboxes.get(&it.sandbox).is_some_and(|home| home.is_of_the_api());
        for other in others {
            let same_pod = other.pod.uid == container.pod.uid;
            let same_name = (&other.pod.namespace, &other.pod.name) == (&container.pod.namespace, &container.pod.name);
            let rule = if same_pod && other.name_in_pod() == container.name_in_pod() {
                "a container runs once"
            } else if same_pod && other.sandbox != container.sandbox {
                "a pod runs in one sandbox"
            } else if !same_pod && same_name && is_static(container) && is_static(&other) {
                "a replaced static pod is gone before the next starts"
            } else {
                continue;
            };
            self.broken(rule, now, format!("{container} starts while {other} runs"));
        }
    }

    /// Init containers in order, then the rest. Ephemeral containers, which are in no script, wait for none.
    fn check_order(&mut self, now: Duration, container: &Container) {
        let script = self
            .script_of(&container.pod.uid)
            .filter(|script| script.find_container(container.name_in_pod()).is_some());
        let Some(script) = script.cloned() else { return };
        let before = script.init.iter().take_while(|spec| spec.name != container.name_in_pod());
        for spec in before {
            let pod = &self.pods[&container.pod.uid];
            let is_done = |history: &ContainerHistory| {
                if spec.is_sidecar() {
                    history.last_sandbox == container.sandbox
                } else {
                    history.succeeded_in(&container.sandbox)
                }
            };
            if !pod.containers.get(&spec.name).is_some_and(is_done) {
                let detail = format!("{container} starts before init container {} is done", spec.name);
                self.broken("init containers come first, in order", now, detail);
            }
        }
    }

    fn check_policy(&mut self, now: Duration, container: &Container) {
        let Some(script) = self.script_of(&container.pod.uid) else { return };
        let Some(history) = self.pods[&container.pod.uid].containers.get(container.name_in_pod()) else { return };
        let main_ran = || {
            let containers = &self.pods[&container.pod.uid].containers;
            script.containers.iter().any(|main| containers.get(&main.name).is_some_and(|history| history.has_run))
        };
        let is_sidecar = script.find_container(container.name_in_pod()).is_some_and(ContainerScript::is_sidecar);
        let forbidden = match script.policy {
            // An ephemeral container is in no script.
            _ if script.find_container(container.name_in_pod()).is_none() => history.starts > 0,
            Policy::Always => false,
            Policy::OnFailure | Policy::Never if history.is_for_new_image(container) => false,
            Policy::OnFailure | Policy::Never if history.last_exit.as_ref().is_some_and(|exit| exit.is_unknown) => {
                false
            }
            Policy::OnFailure | Policy::Never if is_sidecar => false,
            // A sandbox lost before any main container ran may be replaced, and runs its init containers anew.
            Policy::Never if script.is_init(container.name_in_pod()) => {
                history.starts > 0 && (main_ran() || history.last_sandbox == container.sandbox)
            }
            Policy::Never => history.starts > 0,
            // A new sandbox runs its init containers anew.
            Policy::OnFailure if script.is_init(container.name_in_pod()) => history.succeeded_in(&container.sandbox),
            // A container stopped for a failed probe restarts, however it ends.
            Policy::OnFailure
                if script.find_container(container.name_in_pod()).is_some_and(ContainerScript::may_be_unhealthy) =>
            {
                false
            }
            Policy::OnFailure => history.last_exit.as_ref().is_some_and(|exit| exit.code == 0),
        };
        if forbidden {
            let detail = format!("{container} with restartPolicy {:?} starts again", script.policy);
            self.broken("restartPolicy is kept", now, detail);
        }
    }

    fn check_backoff(&mut self, now: Duration, container: &Container) {
        let Some(history) =
            self.pods.get(&container.pod.uid).and_then(|pod| pod.containers.get(container.name_in_pod()))
        else {
            return;
        };
        let Some(exit) = &history.last_exit else { return };
        // An exit that was not seen before the clock jumped has no valid time; scenarios check what was seen.
        if self.clock_jumped.is_some_and(|jumped| jumped >= exit.at) {
            return;
        }
        let forgiven = exit.at.saturating_sub(history.last_start) > 2 * MAX_BACKOFF;
        if forgiven || history.restarts_since_agent_start == 0 || history.is_for_new_image(container) {
            return;
        }
        let doublings = history.restarts_since_agent_start.saturating_sub(1).min(10);
        let wait = (FIRST_BACKOFF * (1 << doublings)).min(MAX_BACKOFF);
        let waited = now.saturating_sub(exit.at);
        if waited + SLACK < wait {
            let detail = format!("{container} starts {waited:?} after its last exit, {wait:?} were due");
            self.broken("a crash loop waits longer each time", now, detail);
        }
    }
}

/// The subject of a changing call; two at once on one subject break a rule.
fn subject(act: &Act, picture: &Picture) -> Option<String> {
    match act {
        Act::RunSandbox(config) | Act::LeaveSandbox(config) => {
            let metadata = config.metadata.clone().unwrap_or_default();
            Some(format!("sandbox of {}", metadata.uid))
        }
        Act::Create { sandbox, config } => {
            let sandbox = picture.sandboxes.get(sandbox)?;
            Some(format!("{} {}", sandbox.identity().uid, config.metadata.clone().unwrap_or_default().name))
        }
        Act::Start(id) | Act::RemoveContainer(id) | Act::DeleteTask(id) => Some(id.clone()),
        Act::ReopenLog(id) => Some(format!("log of {id}")),
        Act::RemoveImage(_) => Some("images".to_owned()),
        Act::StopSandbox(id) | Act::RemoveSandbox(id) => Some(id.clone()),
        // A shorter stop may overtake a longer one; pulls are not shared.
        Act::Term(_) | Act::Kill(_) | Act::Pull(_) => None,
    }
}
