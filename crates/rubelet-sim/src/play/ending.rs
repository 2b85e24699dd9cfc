//! The end of a play: faults stop, and within some minutes every pod is as its script says, and nothing else is left.
//!
//! Owns: the expected final state of a script, and its checks.

use std::{path::Path, sync::Arc, time::Duration};

use rubelet_core::{event::Source, id::PodUid, pod::status::is_terminal, snapshot::PodView};
use serde_json::Value;

use crate::{
    invariants::ContainerHistory,
    play::{
        Failure, Play, agreement, memory,
        predicates::{self, Predicate},
        storage,
    },
    runtime::store::{Container, Pull, State},
    script::{Command, ContainerScript, PodScript, Policy, Program},
    simulation::SimState,
};

/// Once settled, the state must hold for this long: longer than any resync.
const STAYS_WELL: Duration = Duration::from_secs(150);
/// Longer than any period of the agent.
const RESTART: Duration = Duration::from_secs(90);
/// How often the state is checked.
const GLANCE: Duration = Duration::from_secs(1);

/// The final state of an undisturbed container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    Runs,
    Ends,
    /// Restarts without end; or never starts at all.
    Tries,
}

impl Play {
    /// Faults stop, everything is repaired, and within `limit` the final state must be reached.
    #[track_caller]
    pub(crate) fn settle(&mut self, limit: Duration) -> &mut Self {
        match self.try_settle(limit) {
            Ok(()) => self,
            Err(failure) => panic!("{failure}"),
        }
    }

    pub(crate) fn try_settle(&mut self, limit: Duration) -> Result<(), Box<Failure>> {
        self.calm().change(|sim| {
            sim.log("play", "calm");
            sim.disk.full = false;
            sim.memory.hogs.clear();
            sim.runtime.image_fs_others = 0;
            sim.bring_devices_back();
            if sim.runtime.down {
                sim.bring_runtime_up();
            }
            sim.runtime.ailments.clear();
            sim.runtime.bad_pods.clear();
            sim.free_stuck();
            sim.heal_api();
            sim.start_all_drivers();
        });
        if self.agent.is_none() {
            self.start_agent();
        }
        let mut left = limit;
        while !left.is_zero() && self.complaint().is_some() {
            self.run_for(GLANCE)?;
            left = left.saturating_sub(GLANCE);
        }
        self.complain("everything converges when faults cease")?;
        self.run_for(STAYS_WELL)?;
        self.complain("what has converged stays so")
    }

    /// A restarted agent must not write statuses of settled pods.
    pub(crate) fn try_restart_in_peace(&mut self) -> Result<(), Box<Failure>> {
        let before = self.quiet_versions();
        self.crash_agent().start_agent().run_for(RESTART)?;
        let after = self.quiet_versions();
        match before.iter().find(|version| !after.contains(version)) {
            None => Ok(()),
            Some((name, _)) => Err(Box::new(self.failure("a restart writes nothing", name))),
        }
    }

    /// Name and version in the API of every settled pod.
    fn quiet_versions(&self) -> Vec<(String, String)> {
        self.look(|sim| {
            let is_quiet = |script: &&PodScript| uid_of(sim, script).is_some_and(|uid| is_at_rest(sim, script, &uid));
            let stored =
                self.wanted.values().filter(is_quiet).filter_map(|script| predicates::stored(sim, &script.name));
            let text = |pod: &Value, field: &str| pod["metadata"][field].as_str().unwrap_or_default().to_owned();
            // A pod edited after its termination gets a new status from a restarted agent, as from upstream's.
            let is_observed = |pod: &&Arc<Value>| {
                let observed = &pod["status"]["observedGeneration"];
                observed.is_null() || *observed == pod["metadata"]["generation"]
            };
            stored.filter(is_observed).map(|pod| (text(pod, "name"), text(pod, "resourceVersion"))).collect()
        })
    }

    fn complain(&self, rule: &str) -> Result<(), Box<Failure>> {
        match self.complaint() {
            None => Ok(()),
            Some(complaint) => Err(Box::new(self.failure(rule, &complaint))),
        }
    }

    fn complaint(&self) -> Option<String> {
        let scripts: Vec<PodScript> = self.wanted.values().cloned().collect();
        self.look(|sim| complaint(sim, &scripts))
    }

    #[track_caller]
    pub(crate) fn expect(&mut self, predicate: &Predicate) -> &mut Self {
        let holds = self.look(|sim| predicate.holds(sim));
        assert!(holds, "{}", self.failure("expect", &predicate.name));
        self
    }

    #[track_caller]
    pub(crate) fn expect_not(&mut self, predicate: &Predicate) -> &mut Self {
        let holds = self.look(|sim| predicate.holds(sim));
        assert!(!holds, "{}", self.failure("expect not", &predicate.name));
        self
    }

    #[track_caller]
    pub(crate) fn expect_running(&mut self, pod: &str) -> &mut Self {
        self.expect(&predicates::running(pod)).expect(&predicates::phase(pod, "Running"))
    }

    #[track_caller]
    pub(crate) fn expect_gone(&mut self, pod: &str) -> &mut Self {
        self.expect(&predicates::gone(pod))
    }

    /// Containers of the pod were started exactly this often, over all its versions.
    #[track_caller]
    pub(crate) fn expect_starts(&mut self, pod: &str, times: u32) -> &mut Self {
        let starts = self.look(|sim| predicates::starts(sim, pod));
        assert!(starts == times, "{}", self.failure("expect", &format!("{pod}: {starts} starts, not {times}")));
        self
    }

    /// The highest reported restart count of the pod's containers.
    #[track_caller]
    pub(crate) fn expect_restart_count(&mut self, pod: &str, count: i32) -> &mut Self {
        let told = self.look(|sim| {
            let views = predicates::views(sim, pod);
            views.iter().flat_map(|view| predicates::statuses(view).map(|status| status.restart_count)).max()
        });
        assert!(told == Some(count), "{}", self.failure("expect", &format!("{pod}: {told:?} restarts, not {count}")));
        self
    }
}

/// The first deviation.
fn complaint(sim: &SimState, wanted: &[PodScript]) -> Option<String> {
    if let Some(script) = wanted.iter().find(|script| uid_of(sim, script).is_none()) {
        return Some(format!("nobody tells of {} v{}", script.name, script.version));
    }
    let uids: Vec<String> = wanted.iter().filter_map(|script| uid_of(sim, script)).collect();
    leftover(sim, &uids).or_else(|| storage::leftover(sim, &uids)).or_else(|| {
        let mut pods = wanted.iter().zip(&uids);
        pods.find_map(|(script, uid)| pod_complaint(sim, script, uid))
            .or_else(|| agreement::complaint(sim, &uids))
            .or_else(|| memory::complaint(sim))
    })
}

fn uid_of(sim: &SimState, script: &PodScript) -> Option<String> {
    use crate::script::{LABEL_POD, LABEL_VERSION};
    let snapshot = &sim.snapshot;
    let version = script.version.to_string();
    let found = snapshot.pods.iter().find(|(_, view)| {
        let labels = view.pod.metadata.labels.as_ref();
        let label = |key: &str| labels.and_then(|labels| labels.get(key)).map_or("", String::as_str);
        view.source.is_some() && label(LABEL_POD) == script.name && label(LABEL_VERSION) == version
    });
    found.map(|(uid, _)| uid.as_str().to_owned())
}

/// Leftovers of an undesired pod.
fn leftover(sim: &SimState, wanted: &[String]) -> Option<String> {
    let is_wanted = |uid: &str| wanted.iter().any(|known| known == uid);
    let picture = &sim.runtime.picture;
    if let Some(sandbox) = picture.sandboxes.values().find(|sandbox| !is_wanted(&sandbox.identity().uid)) {
        return Some(format!("sandbox {} of {} is left", sandbox.id, sandbox.identity().name));
    }
    if let Some(container) = picture.containers.values().find(|container| !is_wanted(&container.pod.uid)) {
        return Some(format!("container {container} is left"));
    }
    let told = &sim.snapshot;
    if let Some((uid, view)) = told.pods.iter().find(|(uid, _)| !is_wanted(uid.as_str())) {
        return Some(format!("the agent still tells of pod {uid}, {}", view.lifecycle));
    }
    let unwanted_cgroup = sim.cgroups.iter().find(|cgroup| {
        let uid = cgroup.file_name().and_then(|name| name.to_str()?.strip_prefix("pod"));
        uid.is_some_and(|uid| !is_wanted(uid))
    });
    if let Some(cgroup) = unwanted_cgroup {
        return Some(format!("cgroup {} is left", cgroup.display()));
    }
    let dirs = ["/var/lib/kubelet/pods", "/var/log/pods", "/var/log/containers"];
    let left = dirs.iter().flat_map(|dir| sim.disk.leftovers(Path::new(dir)));
    let mut unwanted = left.filter(|path| {
        // A link is named after a container, its target after the pod.
        let target = sim.disk.read_link(path).ok().flatten();
        let text = target.as_ref().unwrap_or(path).to_string_lossy();
        !wanted.iter().any(|uid| text.contains(uid.as_str()))
    });
    unwanted.next().map(|path| format!("{} is left on disk", path.display()))
}

fn pod_complaint(sim: &SimState, script: &PodScript, uid: &str) -> Option<String> {
    if predicates::is_evicted(sim, uid) {
        // It was ended by the node, or rejected, and never runs again.
        return sim.runtime.running().find(|found| found.pod.uid == uid).map(|found| format!("{found} runs evicted"));
    }
    if storage::waits_for_volume(sim, script, uid) {
        return None;
    }
    if script.deadline_secs.is_some() {
        return deadline_complaint(sim, script, uid);
    }
    if is_disrupted(sim, script) {
        return disrupted_complaint(sim, script, uid);
    }
    let expected: Vec<Expected> = script.containers.iter().map(|spec| expectation(sim, script, spec, uid)).collect();
    let init_fails = script.init.iter().any(|spec| expectation(sim, script, spec, uid) == Expected::Tries);
    let init_failed = script.policy == Policy::Never
        && script.init.iter().any(|spec| !spec.is_sidecar() && failed_for_good(sim, spec, uid));
    if init_fails || init_failed || stays_down(sim, script, uid) || ended_before_a_loss(sim, script, uid) {
        return None;
    }
    for (spec, expected) in script.containers.iter().zip(&expected) {
        if is_told_done(sim, script, spec, uid) && *expected == Expected::Ends {
            continue;
        }
        let runs = sim.runtime.running().find(|found| found.pod.uid == uid && found.name_in_pod() == spec.name);
        match (expected, runs) {
            (Expected::Runs, None) => return Some(format!("{}/{} does not run", script.name, spec.name)),
            (Expected::Ends, Some(found)) => return Some(format!("{found} runs after its end")),
            (Expected::Runs, Some(found)) if has_yet_to_fail(sim, spec, found) => {
                return Some(format!("{found} has yet to fail"));
            }
            (Expected::Runs, Some(found)) if found.image != spec.image => {
                return Some(format!("{found} runs {}, not {}", found.image, spec.image));
            }
            (Expected::Runs, Some(found)) => {
                let told = told_restarts(sim, script, &spec.name);
                // A runtime that lost its state may count from zero again; reported counts stay.
                let may_tell_more = sim.rules.pod(uid).is_some_and(|(_, history)| history.was_forgotten);
                let attempt = i64::from(found.attempt());
                if told.is_some_and(|told| told < attempt || told > attempt && !may_tell_more) {
                    return Some(format!("{found}: the agent tells restartCount {told:?}"));
                }
                if let Some(complaint) = truth_complaint(sim, script, spec, found) {
                    return Some(complaint);
                }
            }
            // Its image or its start is pending.
            (Expected::Ends, None)
                if container_history(sim, spec, uid).is_none_or(|history| history.last_exit.is_none()) =>
            {
                return Some(format!("{}/{} has yet to run", script.name, spec.name));
            }
            (Expected::Ends, None) | (Expected::Tries, _) => {}
        }
    }
    phase_complaint(sim, script, &expected)
        .or_else(|| hoard(sim, script, uid))
        .or_else(|| storage::size_complaint(sim, script, uid))
}

/// Its node ends it: the rules hold that there is a reason.
fn is_disrupted(sim: &SimState, script: &PodScript) -> bool {
    predicates::views(sim, &script.name).iter().any(|view| predicates::is_disrupted(&view.status))
}

fn disrupted_complaint(sim: &SimState, script: &PodScript, uid: &str) -> Option<String> {
    let runs = sim.runtime.running().any(|found| found.pod.uid == uid);
    let has_ended = predicates::disrupted(&script.name).holds(sim);
    (runs || !has_ended).then(|| format!("{} is ended by its node and goes on", script.name))
}

/// A pod past its deadline has failed. The clock at its start may lag behind the one that jumped.
fn deadline_complaint(sim: &SimState, script: &PodScript, uid: &str) -> Option<String> {
    let views = predicates::views(sim, &script.name);
    let has_ended = views.iter().any(|view| view.status.phase.as_deref().is_some_and(is_terminal));
    let runs = sim.runtime.running().find(|found| found.pod.uid == uid);
    if sim.rules.has_clock_jumped() || has_ended && runs.is_none() {
        return None;
    }
    Some(format!("{} is past its deadline of {:?} s", script.name, script.deadline_secs))
}

/// The status matches the probes and the runtime's resources.
fn truth_complaint(sim: &SimState, script: &PodScript, spec: &ContainerScript, found: &Container) -> Option<String> {
    let views = predicates::views(sim, &script.name);
    let told = views.iter().flat_map(|view| predicates::statuses(view)).find(|status| status.name == spec.name)?;
    let probe = spec.probe("readinessProbe");
    let is_well = probe.is_none_or(|probe| !probe.fails(found.attempt()) && probe != Command::NoVerdict);
    if told.ready != is_well {
        return Some(format!("{found}: the agent tells ready {}", told.ready));
    }
    let told_limit = told.resources.as_ref().and_then(|resources| resources.limits.as_ref()?.get("memory"));
    let told_bytes = told_limit.and_then(|limit| bytes(&limit.0)).unwrap_or(0);
    let given = found.config.linux.as_ref().and_then(|linux| linux.resources.as_ref());
    let given_bytes = given.map_or(0, |given| given.memory_limit_in_bytes);
    (told_bytes != given_bytes)
        .then(|| format!("{found}: the agent tells {told_bytes} bytes of memory, {given_bytes} were given"))
}

/// In the only unit that scripts use.
pub(crate) fn bytes(quantity: &str) -> Option<i64> {
    quantity.strip_suffix("Mi")?.parse::<i64>().ok().map(|mib| mib << 20)
}

/// Whether it has not settled yet.
fn has_yet_to_fail(sim: &SimState, spec: &ContainerScript, found: &Container) -> bool {
    let attempt = found.attempt();
    // It runs for a second only.
    let is_flaky = matches!(spec.program, Program::Flaky { times } if attempt < times);
    is_flaky || is_ended_by_checks(sim, spec, Some(found))
}

/// A probe or a hook ends this instance, or the first one.
fn is_ended_by_checks(sim: &SimState, spec: &ContainerScript, found: Option<&Container>) -> bool {
    let attempt = found.map_or(0, |found| found.attempt());
    // As upstream, a hook is not run if the response to the start was lost, and its result is unknown if an
    // earlier agent started it.
    let is_hook_lost = found.is_some_and(|found| !sim.rules.has_run_hook(found));
    spec.is_ended_by_probes(attempt) || spec.is_ended_by_hook(attempt) && !is_hook_lost
}

/// None of its containers will start or end again by itself. A static pod is reconstructed from the runtime, as
/// upstream's: its dates follow the clock at its start, and state before its last restart may be lost.
fn is_at_rest(sim: &SimState, script: &PodScript, uid: &str) -> bool {
    let is_static = sim.snapshot.pods.get(&PodUid::new(uid)).is_some_and(|view| view.source != Some(Source::Api));
    let has_restarted = || {
        let (_, history) = sim.rules.pod(uid).unzip();
        history.is_some_and(|history| {
            history.was_forgotten || history.containers.values().any(|container| container.starts > 1)
        })
    };
    // Earlier probe results are known only of pods of the API.
    let probes = ["readinessProbe", "startupProbe"];
    let is_probed = || {
        script.init.iter().chain(&script.containers).any(|spec| probes.iter().any(|probe| spec.field(probe).is_some()))
    };
    // A termination message that could not be read is read again, and a new process has no back-off.
    let view = sim.snapshot.pods.get(&PodUid::new(uid));
    let has_deadline = |view: &Arc<PodView>| {
        let spec = view.pod.spec.as_ref();
        view.lifecycle == "Syncing" && spec.is_some_and(|spec| spec.active_deadline_seconds.is_some())
    };
    if view.is_some_and(has_deadline) {
        // It may pass at any time.
        return false;
    }
    let told = view.map(|view| serde_json::to_string(&*view.status).expect("a status is JSON"));
    if told.is_some_and(|told| ["Error on reading termination", "CrashLoopBackOff"].iter().any(|it| told.contains(it)))
    {
        return false;
    }
    let has_lost_dates = is_static && (sim.rules.has_clock_jumped() || has_restarted() || is_probed());
    // A foreign condition is stored behind the agent's; the agent's next write puts it before them, as upstream's.
    if !script.gates.is_empty() || has_lost_dates {
        return false;
    }
    let mut specs = script.init.iter().chain(&script.containers);
    specs.all(|spec| expectation(sim, script, spec, uid) != Expected::Tries)
}

/// It had terminated when the runtime lost its state: the API keeps its status.
fn ended_before_a_loss(sim: &SimState, script: &PodScript, uid: &str) -> bool {
    let was_forgotten = sim.rules.pod(uid).is_some_and(|(_, history)| history.was_forgotten);
    let views = predicates::views(sim, &script.name);
    was_forgotten && views.iter().any(|view| view.status.phase.as_deref().is_some_and(is_terminal))
}

/// The container had terminated when the runtime lost its state: its status stays.
fn is_told_done(sim: &SimState, script: &PodScript, spec: &ContainerScript, uid: &str) -> bool {
    let was_forgotten = sim.rules.pod(uid).is_some_and(|(_, history)| history.was_forgotten);
    let runs = sim.runtime.running().any(|found| found.pod.uid == uid && found.name_in_pod() == spec.name);
    let views = predicates::views(sim, &script.name);
    let mut told = views.iter().flat_map(|view| view.status.container_statuses.iter().flatten());
    let told = told.find(|status| status.name == spec.name);
    let end = told.and_then(|told| told.state.as_ref()?.terminated.as_ref());
    let is_done = |code: i32| match script.policy {
        Policy::Always => false,
        Policy::OnFailure => code == 0,
        Policy::Never => true,
    };
    was_forgotten && !runs && end.is_some_and(|end| is_done(end.exit_code))
}

/// As upstream: a pod with restart policy Never whose sandbox is lost after a main container ran gets no other.
pub(crate) fn stays_down(sim: &SimState, script: &PodScript, uid: &str) -> bool {
    let picture = &sim.runtime.picture;
    let has_home = picture.sandboxes.values().any(|sandbox| sandbox.ready && sandbox.identity().uid == uid);
    let ran = script
        .containers
        .iter()
        .any(|spec| container_history(sim, spec, uid).is_some_and(|history| history.starts > 0));
    script.policy == Policy::Never && ran && !has_home
}

fn phase_complaint(sim: &SimState, script: &PodScript, expected: &[Expected]) -> Option<String> {
    let all = |wanted: Expected| expected.iter().all(|expected| *expected == wanted);
    let phases: &[&str] = if all(Expected::Runs) {
        &["Running"]
    } else if all(Expected::Ends) {
        &["Succeeded", "Failed"]
    } else {
        return None;
    };
    let told = predicates::views(sim, &script.name);
    let told = told.iter().filter_map(|view| view.status.phase.clone()).next_back().unwrap_or_default();
    (!phases.contains(&told.as_str())).then(|| format!("{} is {told}, not {phases:?}", script.name))
}

/// More dead containers than upstream keeps: the newest of each name, and one more while it is being replaced.
fn hoard(sim: &SimState, script: &PodScript, uid: &str) -> Option<String> {
    let specs = script.init.iter().chain(&script.containers);
    specs.map(|spec| spec.name.as_str()).find_map(|name| {
        let dead = sim.runtime.picture.containers.values().filter(|container| {
            container.pod.uid == uid
                && container.name_in_pod() == name
                && matches!(container.state, State::Exited { .. })
        });
        let count = dead.count();
        (count > 2).then(|| format!("{count} dead containers of {}/{name} are kept", script.name))
    })
}

fn told_restarts(sim: &SimState, script: &PodScript, name: &str) -> Option<i64> {
    let views = predicates::views(sim, &script.name);
    let statuses = views.iter().flat_map(|view| predicates::statuses(view).cloned().collect::<Vec<_>>());
    statuses.filter(|status| status.name == name).map(|status| i64::from(status.restart_count)).max()
}

fn expectation(sim: &SimState, script: &PodScript, spec: &ContainerScript, uid: &str) -> Expected {
    let has_image = sim.runtime.images.contains(&spec.image)
        || matches!(sim.runtime.registry.get(&spec.image), Some(Pull::After(_)));
    if !has_image {
        return Expected::Tries;
    }
    if has_ended_for_good(sim, script, spec, uid) || is_told_done(sim, script, spec, uid) {
        return Expected::Ends;
    }
    let running = sim.runtime.running().find(|found| found.pod.uid == uid && found.name_in_pod() == spec.name);
    // Attempts continue after the runtime lost its state.
    let attempt = running.map_or(0, |running| running.attempt());
    let (ends, code) = match spec.program {
        Program::Run | Program::Slow { .. } | Program::Stubborn => (false, 0),
        Program::Flaky { times } => (times > attempt && script.policy == Policy::Never, 1),
        Program::Exit { code, .. } => (true, code),
        Program::Oom { .. } => (true, 137),
        Program::Missing => (true, 128),
    };
    // A probe or a hook ends it, repeatedly or once; its exit code does not matter then.
    match script.policy_of(spec) {
        Policy::Never if is_ended_by_checks(sim, spec, running.map(|found| &**found)) => return Expected::Ends,
        Policy::Always | Policy::OnFailure if spec.is_ended_by_checks(1) => return Expected::Tries,
        Policy::Never | Policy::Always | Policy::OnFailure => {}
    }
    let is_init = script.is_init(&spec.name);
    let again = match script.policy_of(spec) {
        Policy::Always => !is_init || spec.is_sidecar() || code != 0,
        Policy::OnFailure => code != 0,
        Policy::Never => false,
    };
    match (ends, again) {
        (false, _) => Expected::Runs,
        (true, true) => Expected::Tries,
        (true, false) => Expected::Ends,
    }
}

/// It ended, and its policy does not restart it.
fn has_ended_for_good(sim: &SimState, script: &PodScript, spec: &ContainerScript, uid: &str) -> bool {
    let Some(history) = container_history(sim, spec, uid) else { return false };
    let runs = sim.runtime.running().any(|found| found.pod.uid == uid && found.name_in_pod() == spec.name);
    let Some(exit) = history.last_exit.as_ref().filter(|_| !runs) else { return false };
    match script.policy_of(spec) {
        Policy::Always => false,
        // A container stopped for a failed check restarts, however it ends.
        Policy::OnFailure => exit.code == 0 && !spec.is_ended_by_checks(1),
        Policy::Never => true,
    }
}

fn failed_for_good(sim: &SimState, spec: &ContainerScript, uid: &str) -> bool {
    container_history(sim, spec, uid).and_then(|history| history.last_exit.as_ref()).is_some_and(|exit| exit.code != 0)
}

fn container_history<'a>(sim: &'a SimState, spec: &ContainerScript, uid: &str) -> Option<&'a ContainerHistory> {
    let (_, history) = sim.rules.pod(uid)?;
    history.containers.get(&spec.name)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use k8s_openapi::api::core::v1::ContainerStatus;
    use serde_json::json;

    use crate::{
        play::{Play, minutes},
        script::PodScript,
    };

    /// The complaint about this reported status of the only container of a ready pod with limits.
    fn complaint_about(lie: impl FnOnce(&mut ContainerStatus)) -> Option<String> {
        let mut play = Play::seeded(1);
        let limits = json!({ "limits": { "cpu": "100m", "memory": "64Mi" } });
        play.apply(PodScript::from("web").field("resources", limits)).settle(minutes(1));
        play.change(|sim| {
            let pods = &mut Arc::make_mut(&mut sim.snapshot).pods;
            let uid = pods.keys().next().expect("one pod").clone();
            let view = pods.get_mut(&uid).expect("it is there");
            let status = Arc::make_mut(&mut Arc::make_mut(view).status);
            lie(&mut status.container_statuses.as_mut().expect("told")[0]);
        });
        play.complaint()
    }

    #[test]
    fn wrong_status_is_a_complaint() {
        assert_eq!(complaint_about(|_| ()), None);
        let unready = complaint_about(|status| status.ready = false).expect("it is ready");
        assert!(unready.ends_with("the agent tells ready false"), "{unready}");
        let unlimited = complaint_about(|status| status.resources = None).expect("it has a limit");
        assert!(unlimited.ends_with("the agent tells 0 bytes of memory, 67108864 were given"), "{unlimited}");
        let restarted = complaint_about(|status| status.restart_count = 4).expect("it was not restarted");
        assert!(restarted.ends_with("the agent tells restartCount Some(4)"), "{restarted}");
    }
}
