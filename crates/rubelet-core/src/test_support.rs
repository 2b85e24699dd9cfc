//! Pods, facts and statuses in one line, for tests only.
//!
//! Owns: the notation of test cases. Never: decides anything a test checks.
//!
//! - [`mk_pod`]: `"never | static | init a | sidecar s | main b"`: first the restart policy, then traits and containers.
//! - [`facts`]: `"a: exit(0) 50s ago; b: exit(1) x2, running 30s"`: per container its attempts, oldest first, and when the
//!   newest of them started (running) or ended (exit). A ready sandbox of 60 s age comes by itself; `sandbox gone`,
//!   `sandbox notready` and `sandbox ready 90s, ready 10s` say otherwise.
//! - [`show`]: a status as a few lines, times relative to [`now`].

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::{
        Container, ContainerState as ApiState, ContainerStatus, EphemeralContainer, Pod, PodSpec, PodStatus,
    },
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
};

use crate::{
    effect::ImageFacts,
    id::{ContainerId, PodUid, SandboxId},
    manifest::{HASH_ANNOTATION, SOURCE_ANNOTATION},
    objects::{ConfigMap, Data, Object, ObjectKind, Secret},
    observation::{ContainerFacts, ContainerResources, ContainerState, Exit, PodFacts, SandboxFacts, SandboxState},
    op::StartContainer,
    time::{Now, Uptime},
};

/// An hour after the agent's start, on an arbitrary day.
pub fn now() -> Now {
    Now { uptime: Uptime::from_secs(3600), wall: "2026-06-01T12:00:00Z".parse().expect("a literal") }
}

pub fn ago(secs: i64) -> Timestamp {
    now().wall - jiff::SignedDuration::from_secs(secs)
}

/// The sandbox of this attempt, as it is just after its start.
pub fn ready_sandbox(attempt: u32) -> SandboxFacts {
    SandboxFacts {
        id: SandboxId::new(format!("sb{attempt}")),
        attempt,
        state: SandboxState::Ready,
        created_at: Some(ago(0)),
        runtime_handler: String::new(),
        host_network: false,
        ips: vec!["10.1.0.7".to_owned()],
    }
}

pub fn later(secs: u64) -> Now {
    let by = Duration::from_secs(secs);
    Now { uptime: now().uptime + by, wall: now().wall + by }
}

/// Traits: `static`, `host` (network), `deleted`. Containers: `init NAME`, `sidecar NAME`, `main NAME`, `ephemeral NAME`.
pub fn mk_pod(text: &str) -> Pod {
    let mut spec = PodSpec::default();
    let mut metadata = ObjectMeta {
        name: Some("web".to_owned()),
        namespace: Some("default".to_owned()),
        uid: Some("u1".to_owned()),
        ..ObjectMeta::default()
    };
    for part in text.split('|').map(str::trim) {
        match part.split_once(' ').unwrap_or((part, "")) {
            ("always", "") => spec.restart_policy = Some("Always".to_owned()),
            ("onfailure", "") => spec.restart_policy = Some("OnFailure".to_owned()),
            ("never", "") => spec.restart_policy = Some("Never".to_owned()),
            ("host", "") => spec.host_network = Some(true),
            ("deleted", "") => metadata.deletion_timestamp = Some(Time(ago(5))),
            ("static", "") => {
                let annotations = metadata.annotations.get_or_insert_default();
                annotations.insert(SOURCE_ANNOTATION.to_owned(), "file".to_owned());
                annotations.insert(HASH_ANNOTATION.to_owned(), "u1".to_owned());
            }
            ("main", name) => spec.containers.push(container(name)),
            ("init", name) => spec.init_containers.get_or_insert_default().push(container(name)),
            ("sidecar", name) => spec
                .init_containers
                .get_or_insert_default()
                .push(Container { restart_policy: Some("Always".to_owned()), ..container(name) }),
            ("ephemeral", name) => spec.ephemeral_containers.get_or_insert_default().push(EphemeralContainer {
                name: name.to_owned(),
                image: Some(format!("{name}:1")),
                ..EphemeralContainer::default()
            }),
            other => panic!("no such part of a pod: {other:?}"),
        }
    }
    Pod { metadata, spec: Some(spec), status: None }
}

/// A config map or secret with these values.
pub fn object_of(kind: ObjectKind, data: &[(&str, impl AsRef<[u8]>)]) -> Object {
    let data = Data(data.iter().map(|(key, value)| ((*key).to_owned(), value.as_ref().to_vec())).collect());
    match kind {
        ObjectKind::ConfigMap => Object::ConfigMap(ConfigMap { data, ..ConfigMap::default() }),
        ObjectKind::Secret => Object::Secret(Secret { data, ..Secret::default() }),
        ObjectKind::RuntimeClass
        | ObjectKind::CsiDriver
        | ObjectKind::ClusterTrustBundle
        | ObjectKind::TrustBundlesOfSigner => panic!("{kind:?} has no data"),
    }
}

/// The first start of the container `a`.
pub fn start_order(pod: &Arc<Pod>) -> StartContainer {
    StartContainer {
        uid: PodUid::of(pod),
        pod: pod.clone(),
        container: "a".to_owned(),
        attempt: 0,
        sandbox: SandboxId::new("sb0"),
        sandbox_attempt: 0,
        cgroup_parent: String::new(),
        pod_ips: Vec::new(),
        host_ips: Vec::new(),
        target: None,
        recursive_read_only_mounts: false,
        claimed: BTreeMap::new(),
        image_volumes: BTreeMap::new(),
        image: ImageFacts::default(),
    }
}

fn container(name: &str) -> Container {
    Container { name: name.to_owned(), image: Some(format!("{name}:1")), ..Container::default() }
}

pub fn facts(text: &str) -> PodFacts {
    let mut facts = PodFacts { looked_at: now().uptime, ..PodFacts::default() };
    let parts: Vec<_> = text.split(';').map(str::trim).filter(|part| !part.is_empty()).collect();
    let sandboxes = parts.iter().find_map(|part| part.strip_prefix("sandbox ")).unwrap_or("ready 60s");
    for (attempt, text) in sandboxes.split(',').map(str::trim).filter(|text| *text != "gone").enumerate() {
        let (state, age) = text.split_once(' ').unwrap_or((text, "60s"));
        let ready = state == "ready";
        facts.sandboxes.insert(
            0,
            SandboxFacts {
                state: if ready { SandboxState::Ready } else { SandboxState::NotReady },
                created_at: Some(ago(secs(age))),
                ips: if ready { vec!["10.1.0.7".to_owned()] } else { Vec::new() },
                ..ready_sandbox(u32::try_from(attempt).expect("few sandboxes"))
            },
        );
    }
    for (name, attempts) in parts.iter().filter_map(|part| part.split_once(':')) {
        facts.containers.extend(mk_attempts(name.trim(), attempts, &facts.sandboxes));
    }
    facts.containers.sort_by_key(|container| std::cmp::Reverse(container.created_at));
    facts
}

/// Every attempt is 100 s older than the next.
fn mk_attempts(name: &str, text: &str, sandboxes: &[SandboxFacts]) -> Vec<ContainerFacts> {
    let mut states = Vec::new();
    for attempt in text.split(',').map(str::trim) {
        let words: Vec<_> = attempt.split_whitespace().collect();
        let times = words.iter().find_map(|word| word.strip_prefix('x')?.parse().ok()).unwrap_or(1);
        let age = words.iter().find_map(|word| word.strip_suffix('s')?.parse().ok()).unwrap_or(30);
        states.extend(std::iter::repeat_n((words[0], age), times));
    }
    let count = states.len();
    let attempts = states.into_iter().enumerate().map(|(attempt, (state, age))| {
        let ended = age + 100 * i64::try_from(count - 1 - attempt).expect("few attempts");
        let state = mk_state(state, ended);
        let started = if matches!(state, ContainerState::Exited(_)) { ended + 10 } else { ended };
        ContainerFacts {
            id: ContainerId::new(format!("{name}{attempt}")),
            sandbox: sandboxes.first().map_or_else(|| SandboxId::new("sb-gone"), |sandbox| sandbox.id.clone()),
            name: name.to_owned(),
            attempt: u32::try_from(attempt).expect("few attempts"),
            hash: None,
            image: format!("docker.io/library/{name}:1"),
            image_ref: format!("sha256:{name}"),
            created_at: ago(started),
            state,
            log_path: String::new(),
            image_volumes: Vec::new(),
            user: None,
            resources: ContainerResources::default(),
        }
    });
    attempts.collect()
}

fn mk_state(text: &str, age: i64) -> ContainerState {
    let exit = |code, reason: &str| {
        ContainerState::Exited(Exit {
            code,
            started_at: Some(ago(age + 10)),
            finished_at: ago(age),
            reason: reason.to_owned(),
            message: String::new(),
        })
    };
    match text {
        "created" => ContainerState::Created,
        "running" => ContainerState::Running { started_at: ago(age) },
        "unknown" => ContainerState::Unknown,
        "oom" => exit(137, "OOMKilled"),
        "exit(0)" => exit(0, "Completed"),
        other => {
            let code = other.strip_prefix("exit(").and_then(|rest| rest.strip_suffix(')'));
            exit(code.and_then(|code| code.parse().ok()).expect("a state"), "Error")
        }
    }
}

fn secs(text: &str) -> i64 {
    text.trim_end_matches(" ago").strip_suffix('s').and_then(|secs| secs.parse().ok()).expect("seconds, like 60s")
}

/// The status as text: phase and addresses, a line per container, a line per condition.
pub fn show(status: &PodStatus) -> String {
    let mut lines = vec![format!(
        "{}{}{} ip={} host={} qos={} start={}",
        status.phase.as_deref().unwrap_or("-"),
        parenthesis(status.reason.as_deref()),
        status.message.as_ref().map(|message| format!(" {message:?}")).unwrap_or_default(),
        status.pod_ips.iter().flatten().map(|ip| ip.ip.as_str()).collect::<Vec<_>>().join(","),
        status.host_ips.iter().flatten().map(|ip| ip.ip.as_str()).collect::<Vec<_>>().join(","),
        status.qos_class.as_deref().unwrap_or("-"),
        since(status.start_time.as_ref()),
    )];
    let groups = [
        ("init", &status.init_container_statuses),
        ("main", &status.container_statuses),
        ("ephemeral", &status.ephemeral_container_statuses),
    ];
    for (group, statuses) in groups {
        lines.extend(statuses.iter().flatten().map(|status| format!("{group} {}", show_container(status))));
    }
    lines.extend(status.conditions.iter().flatten().map(|condition| {
        format!(
            "{}={}{}{} {}",
            condition.type_,
            condition.status,
            parenthesis(condition.reason.as_deref()),
            condition.message.as_ref().map(|message| format!(" {message:?}")).unwrap_or_default(),
            since(condition.last_transition_time.as_ref()),
        )
    }));
    lines.join("\n")
}

pub fn show_container(status: &ContainerStatus) -> String {
    let mut line = format!("{}: {}", status.name, show_state(status.state.as_ref()));
    if let Some(last) = &status.last_state {
        line += &format!(", last {}", show_state(Some(last)));
    }
    line += &format!(", restarts={}", status.restart_count);
    if status.started == Some(true) {
        line += " started";
    }
    if status.ready {
        line += " ready";
    }
    line
}

fn show_state(state: Option<&ApiState>) -> String {
    match state {
        Some(ApiState { running: Some(running), .. }) => format!("running {}", since(running.started_at.as_ref())),
        Some(ApiState { terminated: Some(end), .. }) => {
            let message = end.message.as_ref().map(|message| format!(" {message:?}")).unwrap_or_default();
            let reason = parenthesis(end.reason.as_deref());
            format!("exit {}{reason}{message} {}", end.exit_code, since(end.finished_at.as_ref()))
        }
        Some(ApiState { waiting: Some(waiting), .. }) => {
            let message = waiting.message.as_ref().map(|message| format!(" {message:?}")).unwrap_or_default();
            format!("waiting{}{message}", parenthesis(waiting.reason.as_deref()))
        }
        Some(_) | None => "-".to_owned(),
    }
}

fn parenthesis(text: Option<&str>) -> String {
    text.map(|text| format!("({text})")).unwrap_or_default()
}

/// `-60s`: a minute before [`now`].
fn since(time: Option<&Time>) -> String {
    time.map_or_else(|| "@never".to_owned(), |time| format!("{:+}s", time.0.as_second() - now().wall.as_second()))
}
