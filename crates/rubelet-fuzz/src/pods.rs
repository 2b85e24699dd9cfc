//! Manifests, pods of the API, and the runtime's replies.
//!
//! Owns: that a pod which is accepted can be translated for the runtime, in bounded memory, and means the same when it is stored.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use prost::Message;
use rubelet::{
    fuzzing,
    observe::inspect::{facts_of_container, facts_of_sandbox},
};
use rubelet_core::{
    agent::Agent,
    api_pod as core_api_pod,
    container::{
        Identity, container_config, environment::Sources, expansion::MAX_EXEC_BYTES, labels::Annotated, sandbox_config,
        sub_paths,
    },
    effect::{Effect, Facts, ImageFacts, ImageUser},
    event::{Event, Source},
    id::PodUid,
    manifest::{Origin, set_defaults},
    observation::{Listing, PodFacts, RuntimeStatus},
    op::{NodeOp, Op, PodOp, StartContainer},
    pod_config::mark,
    settings::Settings,
    time::{Now, Uptime},
};
use rubelet_cri::v1;

use crate::choice;

/// Effects of one pod that are answered. Some are repeated for ever.
const EFFECTS: usize = 100;

pub(crate) fn manifest(data: &[u8]) -> Option<()> {
    let is_list = data.windows(7).any(|window| window == b"PodList");
    let origin =
        if is_list { Origin::Url("http://m/".to_owned()) } else { Origin::File("/etc/manifests/web.yaml".to_owned()) };
    let pods = fuzzing::manifest(data, &origin, "node").ok()?;
    for pod in pods {
        let mut again = Pod::clone(&pod);
        set_defaults(&mut again);
        assert_eq!(again, *pod, "defaults were not complete");
        assert_eq!(stored(&pod), *pod);
        translate(&pod);
    }
    Some(())
}

pub(crate) fn api_pod(data: &[u8]) -> Option<()> {
    let pod = core_api_pod::decode(data).ok()?;
    assert_eq!(stored(&pod), pod);
    translate(&Arc::new(pod.clone()));
    run(pod);
    Some(())
}

fn stored(pod: &Pod) -> Pod {
    core_api_pod::decode(&serde_json::to_vec(pod).expect("a pod is JSON")).expect("it was written as JSON")
}

/// All that is sent to the runtime.
fn translate(pod: &Arc<Pod>) {
    let mut settings = Settings::for_node("node");
    settings.node.env_files_enabled = true;
    let uid = PodUid::of(pod);
    let identity = Identity { uid: &uid, attempt: 1, cgroup_parent: "/kubepods", volume_groups: &[] };
    if let Ok(config) = sandbox_config(pod, identity, &settings, "nameserver 10.0.0.1\n") {
        assert_eq!(v1::PodSandboxConfig::decode(config.encode_to_vec().as_slice()), Ok(config));
    }
    let spec = pod.spec.clone().unwrap_or_default();
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten()).map(|it| &it.name);
    for name in containers.chain(spec.ephemeral_containers.iter().flatten().map(|it| &it.name)) {
        let order = StartContainer {
            uid: uid.clone(),
            pod: pod.clone(),
            container: name.clone(),
            attempt: 1,
            sandbox: "sandbox".into(),
            sandbox_attempt: 1,
            cgroup_parent: "/kubepods".to_owned(),
            pod_ips: vec!["10.0.0.5".to_owned()],
            host_ips: vec!["10.0.0.1".to_owned()],
            target: None,
            recursive_read_only_mounts: true,
            image: ImageFacts { id: "sha256:abc".to_owned(), size_bytes: 1, user: ImageUser::Uid(1) },
            claimed: BTreeMap::new(),
            image_volumes: BTreeMap::new(),
        };
        // Either may fail without the other.
        let _ = sub_paths(&order, &Sources::default(), &settings);
        let Ok(config) = container_config(&order, &Sources::default(), &settings) else { continue };
        let words = config.command.iter().chain(&config.args).map(String::len);
        let variables = config.envs.iter().map(|variable| variable.key.len() + variable.value.len());
        assert!(words.chain(variables).sum::<usize>() <= MAX_EXEC_BYTES);
        assert_eq!(v1::ContainerConfig::decode(config.encode_to_vec().as_slice()), Ok(config));
    }
}

/// The agent gets the pod, starts what it can, and loses the pod again.
fn run(mut pod: Pod) {
    if PodUid::of(&pod).as_str().is_empty() {
        return;
    }
    mark(&mut pod, Source::Api, "2026-06-01T12:00:00Z");
    let settings = Settings { sources: vec![Source::Api], ..Settings::for_node("node") };
    let mut agent = Agent::new(settings, now());
    let mut pending = Vec::new();
    for pods in [vec![Arc::new(pod)], Vec::new()] {
        pending.extend(agent.handle(now(), Event::Config { source: Source::Api, pods }));
        for _ in 0..EFFECTS {
            let Some(effect) = pending.pop() else { break };
            if let Effect::Do { id, op, .. } = effect {
                pending.extend(agent.handle(now(), Event::Done { id, result: Ok(answer(&op)) }));
            }
        }
    }
    drop(agent.snapshot());
}

fn answer(op: &Op) -> Facts {
    match op {
        Op::Node(NodeOp::CheckRuntime) => Facts::Runtime(RuntimeStatus::default()),
        Op::Node(NodeOp::Relist) => Facts::Listing(Listing { looked_at: now().uptime, ..Listing::default() }),
        Op::Pod(PodOp::Inspect { .. }) => Facts::Pod(PodFacts {
            looked_at: now().uptime,
            sandboxes: Vec::new(),
            containers: Vec::new(),
            logged_attempts: BTreeMap::new(),
        }),
        _ => Facts::Nothing,
    }
}

fn now() -> Now {
    Now { uptime: Uptime::from_secs(3600), wall: Timestamp::UNIX_EPOCH + Duration::from_secs(1 << 30) }
}

/// A message of the runtime, and what the agent reads in it.
pub(crate) fn cri_facts(data: &[u8]) -> Option<()> {
    let (kind, bytes) = choice(data);
    match kind % 3 {
        0 => {
            let status: v1::ContainerStatus = decoded(bytes)?;
            let annotated = Annotated::read(&status.annotations);
            let container = v1::Container { id: status.id.clone(), ..v1::Container::default() };
            let facts = facts_of_container(&container, status.clone(), &annotated, String::new());
            assert_eq!(facts.id.as_str(), status.id);
            assert!(facts.resources.memory_limit_bytes.is_none_or(|bytes| bytes > 0));
            assert!(facts.resources.cpu_request_millis.is_none_or(|millis| millis > 0));
            assert!(facts.resources.cpu_limit_millis.is_none_or(|millis| millis > 0));
        }
        1 => {
            let status: v1::PodSandboxStatus = decoded(bytes)?;
            let sandbox = v1::PodSandbox { id: status.id.clone(), ..v1::PodSandbox::default() };
            let facts = facts_of_sandbox(sandbox, Some(status));
            assert!(facts.ips.iter().all(|ip| ip.parse::<std::net::IpAddr>().is_ok()));
        }
        _ => {
            let sandbox: v1::PodSandbox = decoded(bytes)?;
            assert_eq!(facts_of_sandbox(sandbox, None).ips.len(), 0);
        }
    }
    Some(())
}

fn decoded<M: Message + Default + PartialEq + std::fmt::Debug>(bytes: &[u8]) -> Option<M> {
    let message = M::decode(bytes).ok()?;
    assert_eq!(M::decode(message.encode_to_vec().as_slice()).as_ref(), Ok(&message));
    Some(message)
}
