//! Our CRI configurations compared with upstream's.
//!
//! `testdata/cri/upstream.json` holds what upstream v1.36.3's own `generatePodSandboxConfig` and `generateContainerConfig`
//! made of the pods in `pods.json`, as protobuf in hex. Only what their test set-up leaves out is not compared: mounts,
//! environment, DNS and hostname.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::api::core::v1::Pod;
use rubelet_core::{
    container::{Identity, container_config, environment::Sources, sandbox_config},
    effect::{ImageFacts, ImageUser},
    op::StartContainer,
    settings::Settings,
};
use rubelet_cri::v1;

#[derive(serde::Deserialize)]
struct Upstream {
    /// By the name of the pod.
    sandboxes: BTreeMap<String, String>,
    containers: Vec<Container>,
}

#[derive(serde::Deserialize)]
struct Container {
    pod: String,
    container: String,
    #[serde(default)]
    config: String,
    #[serde(default)]
    error: String,
}

fn pods() -> BTreeMap<String, Arc<Pod>> {
    let pods: Vec<Pod> = serde_json::from_str(include_str!("../testdata/cri/pods.json")).unwrap();
    pods.into_iter().map(|pod| (pod.metadata.name.clone().unwrap(), Arc::new(pod))).collect()
}

fn upstream() -> Upstream {
    serde_json::from_str(include_str!("../testdata/cri/upstream.json")).unwrap()
}

fn decode<M: prost::Message + Default>(hex: &str) -> M {
    let bytes: Vec<u8> =
        (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect();
    M::decode(bytes.as_slice()).unwrap()
}

fn settings() -> Settings {
    let mut settings = Settings::for_node("node");
    settings.node.memory_capacity_bytes = 8 << 30;
    settings
}

#[test]
fn sandboxes_are_as_upstream_makes_them() {
    let pods = pods();
    for (name, hex) in upstream().sandboxes {
        let mut theirs: v1::PodSandboxConfig = decode(&hex);
        let pod = &pods[&name];
        let uid = pod.metadata.uid.as_deref().unwrap().into();
        let identity = Identity { uid: &uid, attempt: 3, cgroup_parent: "", volume_groups: &[] };
        let mut ours = sandbox_config(pod, identity, &settings(), "").unwrap();
        for config in [&mut theirs, &mut ours] {
            config.dns_config = None;
            config.hostname = String::new();
        }
        assert_eq!(ours, theirs, "{name}");
    }
}

#[test]
fn containers_are_as_upstream_makes_them() {
    let pods = pods();
    for Container { pod, container, config, error } in upstream().containers {
        let theirs: v1::ContainerConfig = decode(&config);
        let pod_object = &pods[&pod];
        let order = StartContainer {
            uid: pod_object.metadata.uid.as_deref().unwrap().into(),
            pod: pod_object.clone(),
            container: container.clone(),
            attempt: 2,
            sandbox: "sandbox".into(),
            sandbox_attempt: 3,
            cgroup_parent: String::new(),
            pod_ips: vec!["10.0.0.5".to_owned()],
            host_ips: Vec::new(),
            target: None,
            recursive_read_only_mounts: false,
            claimed: BTreeMap::new(),
            image_volumes: BTreeMap::new(),
            image: ImageFacts { id: "sha256:abc".to_owned(), size_bytes: 1, user: ImageUser::Unset },
        };
        match container_config(&order, &Sources::default(), &like_their_node(&theirs)) {
            Ok(mut ours) => {
                ours.mounts.clear();
                assert_eq!(ours, theirs, "{pod}/{container}");
            }
            Err(refused) => assert_eq!(refused.0, error, "{pod}/{container}"),
        }
    }
}

/// The facts of the machine they were made on, which the pod does not determine.
fn like_their_node(theirs: &v1::ContainerConfig) -> Settings {
    let mut settings = settings();
    let linux = theirs.linux.clone().unwrap_or_default();
    let huge_pages = linux.resources.unwrap_or_default().hugepage_limits;
    settings.node.huge_page_sizes = huge_pages.into_iter().map(|limit| limit.page_size).collect();
    let masked = linux.security_context.unwrap_or_default().masked_paths;
    settings.node.thermal_throttle_paths =
        masked.into_iter().filter(|path| path.ends_with("/thermal_throttle")).collect();
    settings
}
