//! The container statuses of a pod.
//!
//! Owns: container statuses from facts, from the previous status where the runtime has lost the container, and from waiting
//! reasons. Never: the pod as a whole.
//! Upstream: `convertToAPIContainerStatuses`, `prober_manager.go` (UpdatePodStatus).

use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::{
        Container, ContainerState as ApiState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting,
        ContainerStatus, ContainerUser as ApiUser, LinuxContainerUser, PodSpec, Probe, VolumeMountStatus,
    },
    apimachinery::pkg::apis::meta::v1::Time,
};

use super::{StatusInput, resources};
use crate::{
    container::{of_ephemeral, recursive_read_only},
    observation::{ContainerFacts, ContainerState, ContainerUser},
    pod::restart_policy::{is_sidecar, restarts_after},
};

const CONTAINER_CREATING: &str = "ContainerCreating";
const POD_INITIALIZING: &str = "PodInitializing";
/// Exit code of a container whose exit was not observed.
pub(crate) const LOST_EXIT_CODE: i32 = 137;
pub(crate) const LOST_REASON: &str = "ContainerStatusUnknown";
pub(crate) const LOST_WHEN_TERMINATED: &str = "The container could not be located when the pod was terminated";
/// The two blanks are upstream's.
const LOST_WHILE_RUNNING: &str =
    "The container could not be located when the pod was deleted.  The container used to be Running";
const INIT_FORGOTTEN: &str = "Unable to get init container status from container runtime and pod has been initialized, treat it as exited normally";

pub(super) fn regular(input: &StatusInput<'_>) -> Vec<ContainerStatus> {
    let old = input.old_status().and_then(|old| old.container_statuses.as_deref());
    let specs = input.pod.spec.iter().flat_map(|spec| &spec.containers);
    specs.map(|spec| ContainerInput::new(input, spec, old, Kind::Regular).status()).collect()
}

/// In the order in which they run.
pub(super) fn init(input: &StatusInput<'_>) -> Vec<ContainerStatus> {
    let old = input.old_status().and_then(|old| old.init_container_statuses.as_deref());
    let specs = input.pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
    specs
        .map(|spec| {
            let kind = if is_sidecar(spec) { Kind::Sidecar } else { Kind::Init };
            ContainerInput::new(input, spec, old, kind).status()
        })
        .collect()
}

pub(super) fn ephemeral(input: &StatusInput<'_>) -> Vec<ContainerStatus> {
    let old = input.old_status().and_then(|old| old.ephemeral_container_statuses.as_deref());
    let wanted = input.pod.spec.iter().flat_map(|spec| spec.ephemeral_containers.iter().flatten());
    let statuses = wanted.map(|wanted| {
        let spec = of_ephemeral(wanted);
        ContainerInput::new(input, &spec, old, Kind::Ephemeral).status()
    });
    statuses.collect()
}

/// In a pod that keeps running, a container in unknown state is restarted. Its status must not be terminated: the API server
/// rejects a restart of a terminated container in a pod with restartPolicy Never.
pub(super) fn await_unknown(input: &StatusInput<'_>, statuses: Option<&mut Vec<ContainerStatus>>) {
    let is_unknown =
        |name: &str| input.facts.newest_container(name).is_some_and(|newest| newest.state == ContainerState::Unknown);
    let statuses = statuses.into_iter().flatten().filter(|status| is_unknown(&status.name));
    for status in statuses.filter(|_| input.may_start_containers()) {
        if terminated(status.state.as_ref()).is_some() {
            status.last_state = status.state.replace(waiting_for("", ""));
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Init,
    Sidecar,
    Regular,
    Ephemeral,
}

/// One container of the spec, and all that is known about it.
struct ContainerInput<'a> {
    input: &'a StatusInput<'a>,
    spec: &'a Container,
    kind: Kind,
    old: Option<&'a ContainerStatus>,
    newest: Option<&'a ContainerFacts>,
    /// The attempt before the newest.
    before: Option<&'a ContainerFacts>,
}

impl<'a> ContainerInput<'a> {
    fn new(input: &'a StatusInput<'a>, spec: &'a Container, old: Option<&'a [ContainerStatus]>, kind: Kind) -> Self {
        let mut found = input.facts.containers.iter().filter(|container| container.name == spec.name);
        ContainerInput {
            input,
            spec,
            kind,
            old: old.into_iter().flatten().find(|status| status.name == spec.name),
            newest: found.next(),
            before: found.next(),
        }
    }

    fn status(&self) -> ContainerStatus {
        let mut status = match self.newest {
            Some(facts) => self.found(facts),
            None => self.not_found(),
        };
        if !self.is_settled() {
            self.apply_waiting(&mut status);
        }
        self.set_started_and_ready(&mut status);
        status
    }

    /// The container is in the runtime.
    fn found(&self, facts: &ContainerFacts) -> ContainerStatus {
        let attempt = i32::try_from(facts.attempt).unwrap_or(i32::MAX);
        let id = self.id_of(facts);
        let mut status = ContainerStatus {
            name: self.spec.name.clone(),
            image: facts.image.clone(),
            image_id: facts.image_ref.clone(),
            restart_count: attempt.max(self.old.map_or(0, |old| old.restart_count)),
            last_state: self.last_state_from_old(&id),
            state: Some(self.state_of(facts)),
            resources: Some(resources::of_container(self.spec, facts, self.reported_running(&id))),
            allocated_resources: self.spec.resources.as_ref().and_then(|resources| resources.requests.clone()),
            volume_mounts: self.volume_mounts_of(&id),
            container_id: Some(id),
            user: facts.user.as_ref().map(shown_user),
            ..ContainerStatus::default()
        };
        if let Some(before) = self.before {
            status.last_state = Some(self.state_of(before));
        }
        // A runtime that lost its state counts from zero; the pod's count continues.
        if let Some(old) = self.old
            && facts.is_running()
            && terminated(old.state.as_ref()).is_some()
            && old.container_id != status.container_id
            && old.restart_count >= attempt
            && self.before.is_none()
        {
            status.restart_count = old.restart_count.saturating_add(1);
        }
        status
    }

    /// The last reported status of this container ID, if it was running.
    fn reported_running(&self, id: &str) -> Option<&'a ContainerStatus> {
        let ran = |old: &&ContainerStatus| old.state.as_ref().is_some_and(|state| state.running.is_some());
        self.old.filter(ran).filter(|old| old.container_id.as_deref() == Some(id))
    }

    /// The exit of the previous instance, where the runtime has lost it.
    fn last_state_from_old(&self, id: &str) -> Option<ApiState> {
        let old = self.old?;
        let ended = terminated(old.state.as_ref()).filter(|_| old.container_id.as_deref() != Some(id));
        let last = ended.or_else(|| terminated(old.last_state.as_ref()))?;
        Some(ApiState { terminated: Some(last.clone()), ..ApiState::default() })
    }

    fn state_of(&self, facts: &ContainerFacts) -> ApiState {
        match &facts.state {
            ContainerState::Running { started_at } => {
                let running = ContainerStateRunning { started_at: Some(Time(*started_at)) };
                ApiState { running: Some(running), ..ApiState::default() }
            }
            ContainerState::Exited(exit) => ApiState {
                terminated: Some(ContainerStateTerminated {
                    exit_code: exit.code,
                    reason: text(&exit.reason),
                    message: text(&exit.message),
                    // A container that never started shows the Unix epoch, as upstream.
                    started_at: Some(Time(exit.started_at.unwrap_or(Timestamp::UNIX_EPOCH))),
                    finished_at: Some(Time(exit.finished_at)),
                    container_id: Some(self.id_of(facts)),
                    ..ContainerStateTerminated::default()
                }),
                ..ApiState::default()
            },
            ContainerState::Created => waiting_for("", ""),
            ContainerState::Unknown => self.state_of_unknown(facts),
        }
    }

    /// It ran and its state is unknown: "never ran" would let a run-once pod run twice, so it counts as failed, and stays so.
    fn state_of_unknown(&self, facts: &ContainerFacts) -> ApiState {
        let old = self.old.and_then(|old| old.state.as_ref());
        let same = self.old.is_some_and(|old| old.container_id.as_deref() == Some(&self.id_of(facts)));
        match old {
            Some(ApiState { running: Some(_), .. }) => lost(LOST_WHEN_TERMINATED),
            Some(state @ ApiState { terminated: Some(_), .. }) if same => state.clone(),
            Some(_) | None => waiting_for("", ""),
        }
    }

    /// The container is not in the runtime: not any more, or not yet.
    fn not_found(&self) -> ContainerStatus {
        if let Some(old) = self.old.filter(|old| terminated(old.state.as_ref()).is_some()) {
            return old.clone();
        }
        let logged = self.input.facts.logged_attempts.get(&self.spec.name).copied().unwrap_or(0);
        let mut status = ContainerStatus {
            name: self.spec.name.clone(),
            image: self.spec.image.clone().unwrap_or_default(),
            state: Some(waiting_for(self.first_wait(), "")),
            restart_count: i32::try_from(logged).unwrap_or(i32::MAX),
            volume_mounts: self.volume_mounts(),
            ..ContainerStatus::default()
        };
        let Some(old) = self.old else {
            return status;
        };
        status.restart_count = old.restart_count.max(status.restart_count);
        status.last_state.clone_from(&old.last_state);
        let ran = old.state.as_ref().is_some_and(|state| state.running.is_some());
        if ran && terminated(old.last_state.as_ref()).is_none() {
            // The last state shows that the pod has run.
            status.last_state = Some(lost(LOST_WHILE_RUNNING));
            if self.input.pod.metadata.deletion_timestamp.is_none() {
                status.restart_count = old.restart_count.saturating_add(1).max(status.restart_count);
            }
        }
        status
    }

    fn first_wait(&self) -> &'static str {
        let has_init =
            self.input.pod.spec.as_ref().is_some_and(|spec| spec.init_containers.iter().flatten().count() > 0);
        if has_init { POD_INITIALIZING } else { CONTAINER_CREATING }
    }

    /// An init container that completed is not started again, whatever its last start attempt returned.
    fn is_settled(&self) -> bool {
        let completed = self.newest.and_then(ContainerFacts::exit).is_some_and(|exit| exit.code == 0);
        matches!(self.kind, Kind::Init | Kind::Sidecar) && completed
    }

    fn apply_waiting(&self, status: &mut ContainerStatus) {
        let is_waiting = status.state.as_ref().is_some_and(|state| state.waiting.is_some());
        if self.kind == Kind::Init && self.newest.is_none() && is_waiting && self.any_regular_container_created() {
            let completed = ContainerStateTerminated {
                reason: text("Completed"),
                message: text(INIT_FORGOTTEN),
                ..ContainerStateTerminated::default()
            };
            status.state = Some(ApiState { terminated: Some(completed), ..ApiState::default() });
            return;
        }
        let is_restarting = self.newest.is_some_and(|newest| self.input.restarting.contains(&newest.id));
        let told = self.input.waiting.get(&self.spec.name).filter(|_| self.will_start());
        let (reason, message) = match told {
            Some(waiting) => (waiting.reason.as_str(), waiting.message.as_str()),
            // We stopped it: its next start is decided, whatever its restart policy.
            None if is_restarting && self.will_start() => ("", ""),
            None => return,
        };
        if terminated(status.state.as_ref()).is_some() {
            status.last_state = status.state.take();
        }
        status.state = Some(waiting_for(reason, message));
    }

    fn will_start(&self) -> bool {
        let Some(spec) = self.input.pod.spec.as_ref().filter(|_| self.input.may_start_containers()) else {
            return false;
        };
        let Some(newest) = self.newest else { return !self.is_reported_done(spec) };
        match &newest.state {
            ContainerState::Created | ContainerState::Unknown => true,
            ContainerState::Running { .. } => false,
            ContainerState::Exited(_) if self.kind == Kind::Ephemeral => false,
            ContainerState::Exited(exit) => {
                self.input.restarting.contains(&newest.id) || restarts_after(self.spec, spec, exit.code)
            }
        }
    }

    /// The runtime has lost a container whose final state was reported (see `pod/containers.rs`).
    fn is_reported_done(&self, spec: &PodSpec) -> bool {
        self.kind == Kind::Regular && self.old.is_some_and(|old| has_ended_for_good(old, self.spec, spec))
    }

    fn any_regular_container_created(&self) -> bool {
        let regular = self.input.pod.spec.iter().flat_map(|spec| &spec.containers);
        regular.filter_map(|spec| self.input.facts.newest_container(&spec.name)).any(|facts| match facts.state {
            ContainerState::Created | ContainerState::Running { .. } | ContainerState::Exited(_) => true,
            ContainerState::Unknown => false,
        })
    }

    /// The previous status keeps a probe's result, set by `SetContainerReadiness` and `SetContainerStartup`, for as long as the
    /// same container runs.
    fn set_started_and_ready(&self, status: &mut ContainerStatus) {
        let running = status.state.as_ref().is_some_and(|state| state.running.is_some());
        let judged = status.container_id.as_deref().and_then(|id| self.reported_running(id));
        let verdict = |probe: &Option<Probe>, of: fn(&ContainerStatus) -> bool| match (probe, judged) {
            (Some(_), Some(old)) => of(old),
            (Some(_), None) => false,
            (None, _) => true,
        };
        let started = running && verdict(&self.spec.startup_probe, |old| old.started == Some(true));
        match self.kind {
            Kind::Regular | Kind::Sidecar => {
                status.started = Some(started);
                status.ready = started && verdict(&self.spec.readiness_probe, |old| old.ready);
            }
            Kind::Init => {
                status.started = Some(started);
                status.ready = terminated(status.state.as_ref()).is_some_and(|end| end.exit_code == 0);
            }
            Kind::Ephemeral => {}
        }
    }

    /// They do not change while a container exists, even if the runtime's features do.
    fn volume_mounts_of(&self, id: &str) -> Option<Vec<VolumeMountStatus>> {
        let reported = self.old.filter(|old| old.container_id.as_deref() == Some(id));
        reported.and_then(|old| old.volume_mounts.clone()).or_else(|| self.volume_mounts())
    }

    fn volume_mounts(&self) -> Option<Vec<VolumeMountStatus>> {
        let mounts = self.spec.volume_mounts.as_ref().filter(|mounts| !mounts.is_empty())?;
        let pod = self.input.pod.spec.as_ref()?;
        let is_supported =
            recursive_read_only::is_supported(pod, self.input.facts.newest_sandbox(), self.input.runtime);
        let status = mounts.iter().map(|mount| {
            let read_only = mount.read_only.filter(|read_only| *read_only);
            // A container with a rejected mount is not created.
            let is_recursive = recursive_read_only::resolve(mount, is_supported).unwrap_or(false);
            let mode = if is_recursive { "Enabled" } else { "Disabled" };
            VolumeMountStatus {
                name: mount.name.clone(),
                mount_path: mount.mount_path.clone(),
                read_only,
                recursive_read_only: read_only.map(|_| mode.to_owned()),
                ..VolumeMountStatus::default()
            }
        });
        Some(status.collect())
    }

    fn id_of(&self, facts: &ContainerFacts) -> String {
        format!("{}://{}", self.input.runtime.name, facts.id)
    }
}

fn shown_user(user: &ContainerUser) -> ApiUser {
    let groups = Some(&user.supplemental_groups).filter(|groups| !groups.is_empty());
    let linux = LinuxContainerUser { uid: user.uid, gid: user.gid, supplemental_groups: groups.cloned() };
    ApiUser { linux: Some(linux) }
}

/// A container that existed and cannot be found.
pub(crate) fn lost(message: &str) -> ApiState {
    ApiState {
        terminated: Some(ContainerStateTerminated {
            exit_code: LOST_EXIT_CODE,
            reason: text(LOST_REASON),
            message: text(message),
            ..ContainerStateTerminated::default()
        }),
        ..ApiState::default()
    }
}

/// A terminated container that its restart policy does not restart.
pub(crate) fn has_ended_for_good(status: &ContainerStatus, container: &Container, spec: &PodSpec) -> bool {
    terminated(status.state.as_ref()).is_some_and(|end| !restarts_after(container, spec, end.exit_code))
}

pub(crate) fn terminated(state: Option<&ApiState>) -> Option<&ContainerStateTerminated> {
    state?.terminated.as_ref()
}

fn waiting_for(reason: &str, message: &str) -> ApiState {
    let waiting = ContainerStateWaiting { reason: text(reason), message: text(message) };
    ApiState { waiting: Some(waiting), ..ApiState::default() }
}

fn text(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}
