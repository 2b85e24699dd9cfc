//! The ContainerConfig for the runtime.
//!
//! Owns: `ContainerConfig`, put together from its parts, and the devices of block volumes. Never: devices of plugins, which are
//! not supported yet.
//! Upstream: `generateContainerConfig`.

use k8s_openapi::api::core::v1::{Container, PodSpec, VolumeDevice};
use rubelet_cri::v1::{
    ContainerConfig, ContainerMetadata, Device, ImageSpec, KeyValue, LinuxContainerConfig, NamespaceMode,
};

use super::{
    ConfigError,
    environment::{Environment, Sources, environment},
    find, find_ephemeral, labels, logs,
    mounts::{self, SubPath},
    resources, security, spec,
};
use crate::{id::ContainerId, op::StartContainer, settings::Settings};

pub fn container_config(
    order: &StartContainer,
    sources: &Sources,
    settings: &Settings,
) -> Result<ContainerConfig, ConfigError> {
    let spec = spec(&order.pod)?;
    let container = &*find(&order.pod, &order.container)?;
    let mut environment = environment(order, container, sources, settings)?;
    let command = expanded(container.command.as_deref(), "command", &mut environment)?;
    let args = expanded(container.args.as_deref(), "args", &mut environment)?;
    let mounts = mounts::mounts(order, spec, container, &environment, settings)?;
    security::verify_run_as_non_root(&order.pod, &order.uid, container, &order.image.user)?;
    Ok(ContainerConfig {
        metadata: Some(ContainerMetadata { name: container.name.clone(), attempt: order.attempt }),
        image: Some(ImageSpec {
            image: order.image.id.clone(),
            user_specified_image: container.image.clone().unwrap_or_default(),
            ..ImageSpec::default()
        }),
        command,
        args,
        working_dir: container.working_dir.clone().unwrap_or_default(),
        envs: environment.variables.into_iter().map(|(key, value)| KeyValue { key, value }).collect(),
        mounts,
        labels: labels::of_container(container, &order.pod, &order.uid),
        annotations: labels::annotations(container, &order.pod, order.attempt),
        log_path: logs::container_log(&container.name, order.attempt),
        stdin: container.stdin.unwrap_or(false),
        stdin_once: container.stdin_once.unwrap_or(false),
        tty: container.tty.unwrap_or(false),
        devices: devices(order, container, settings)?,
        linux: Some(linux(order, spec, container, settings)?),
        ..ContainerConfig::default()
    })
}

/// The block volumes that the container uses as devices.
fn devices(order: &StartContainer, container: &Container, settings: &Settings) -> Result<Vec<Device>, ConfigError> {
    let pod_dir = mounts::pod_dir(&settings.root_dir, &order.uid);
    let device = |used: &VolumeDevice| {
        let source = order.claimed.get(&used.name).filter(|source| source.is_block()).ok_or_else(|| {
            ConfigError(format!("cannot find volume {:?} to pass into container {:?}", used.name, container.name))
        })?;
        Ok(Device {
            container_path: used.device_path.clone(),
            host_path: source.path(&pod_dir).display().to_string(),
            permissions: if source.read_only { "r" } else { "mrw" }.to_owned(),
        })
    };
    container.volume_devices.iter().flatten().map(device).collect()
}

/// The subPaths that must be mounted before the container is created.
pub fn sub_paths(order: &StartContainer, sources: &Sources, settings: &Settings) -> Result<Vec<SubPath>, ConfigError> {
    let container = &*find(&order.pod, &order.container)?;
    if !container.volume_mounts.iter().flatten().any(mounts::has_sub_path) {
        return Ok(Vec::new());
    }
    let environment = environment(order, container, sources, settings)?;
    mounts::sub_paths(order, spec(&order.pod)?, container, &environment, settings)
}

fn linux(
    order: &StartContainer,
    spec: &PodSpec,
    container: &Container,
    settings: &Settings,
) -> Result<LinuxContainerConfig, ConfigError> {
    let mut security_context = security::of_container(&order.pod, spec, container, &order.image.user, settings)?;
    security_context.supplemental_groups.extend(order.volume_groups());
    if let Some(target) = target(order, spec)?
        && let Some(namespaces) = &mut security_context.namespace_options
        && namespaces.pid() == NamespaceMode::Container
    {
        namespaces.set_pid(NamespaceMode::Target);
        namespaces.target_id = target.to_string();
    }
    Ok(LinuxContainerConfig {
        resources: Some(resources::of_container(&order.pod, spec, container, &settings.node)),
        security_context: Some(security_context),
    })
}

/// The container whose processes an ephemeral container sees.
fn target<'order>(order: &'order StartContainer, spec: &PodSpec) -> Result<Option<&'order ContainerId>, ConfigError> {
    let ephemeral = find_ephemeral(spec, &order.container);
    let name = ephemeral.and_then(|ephemeral| ephemeral.target_container_name.as_ref());
    match (name.filter(|name| !name.is_empty()), &order.target) {
        (None, _) => Ok(None),
        (Some(_), Some(target)) => Ok(Some(target)),
        (Some(name), None) => Err(ConfigError(format!("unable to find target container {name}"))),
    }
}

fn expanded(words: Option<&[String]>, field: &str, environment: &mut Environment) -> Result<Vec<String>, ConfigError> {
    let Environment { variables, space } = environment;
    space.words(words.unwrap_or_default(), field, |name| variables.get(name).map(Vec::as_slice))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use std::collections::BTreeMap;

    use super::*;
    use crate::effect::{ImageFacts, ImageUser};

    fn order(spec: &str) -> StartContainer {
        let pod = format!(r#"{{"metadata":{{"name":"web-node","namespace":"prod"}},"spec":{spec}}}"#);
        StartContainer {
            uid: "u-1".into(),
            pod: Arc::new(serde_json::from_str(&pod).unwrap()),
            container: "web".to_owned(),
            attempt: 2,
            sandbox: "sandbox-1".into(),
            sandbox_attempt: 1,
            cgroup_parent: String::new(),
            pod_ips: vec!["10.0.0.5".to_owned()],
            host_ips: Vec::new(),
            target: None,
            recursive_read_only_mounts: false,
            claimed: BTreeMap::new(),
            image_volumes: BTreeMap::new(),
            image: ImageFacts { id: "sha256:abc".to_owned(), size_bytes: 1, user: ImageUser::Uid(101) },
        }
    }

    #[test]
    fn container_with_volumes_environment_and_limits() {
        let order = order(
            r#"{"terminationGracePeriodSeconds":30,
                "volumes":[{"name":"tmp","emptyDir":{}},{"name":"logs","hostPath":{"path":"/var/log"}}],
                "containers":[{"name":"web","image":"nginx:1.27","command":["/bin/$(WHO)"],"args":["$(NOBODY)","$$x"],
                    "workingDir":"/srv","tty":true,"stdin":true,
                    "terminationMessagePath":"/dev/termination-log","terminationMessagePolicy":"File",
                    "env":[{"name":"WHO","value":"me"}],
                    "resources":{"requests":{"cpu":"100m"},"limits":{"memory":"64Mi"}},
                    "volumeMounts":[{"name":"tmp","mountPath":"/tmp"},{"name":"logs","mountPath":"logs","readOnly":true,"mountPropagation":"HostToContainer"}]}]}"#,
        );
        insta::assert_debug_snapshot!(container_config(&order, &Sources::default(), &Settings::for_node("node")).unwrap(), @r#"
        ContainerConfig {
            metadata: Some(
                ContainerMetadata {
                    name: "web",
                    attempt: 2,
                },
            ),
            image: Some(
                ImageSpec {
                    image: "sha256:abc",
                    annotations: {},
                    user_specified_image: "nginx:1.27",
                    runtime_handler: "",
                    image_ref: "",
                },
            ),
            command: [
                "/bin/me",
            ],
            args: [
                "$(NOBODY)",
                "$x",
            ],
            working_dir: "/srv",
            envs: [
                KeyValue {
                    key: "WHO",
                    value: [
                        109,
                        101,
                    ],
                },
            ],
            mounts: [
                Mount {
                    container_path: "/tmp",
                    host_path: "/var/lib/kubelet/pods/u-1/volumes/kubernetes.io~empty-dir/tmp",
                    readonly: false,
                    selinux_relabel: false,
                    propagation: PropagationPrivate,
                    uid_mappings: [],
                    gid_mappings: [],
                    recursive_read_only: false,
                    image: None,
                    image_sub_path: "",
                },
                Mount {
                    container_path: "/logs",
                    host_path: "/var/log",
                    readonly: true,
                    selinux_relabel: false,
                    propagation: PropagationHostToContainer,
                    uid_mappings: [],
                    gid_mappings: [],
                    recursive_read_only: false,
                    image: None,
                    image_sub_path: "",
                },
                Mount {
                    container_path: "/etc/hosts",
                    host_path: "/var/lib/kubelet/pods/u-1/etc-hosts",
                    readonly: false,
                    selinux_relabel: false,
                    propagation: PropagationPrivate,
                    uid_mappings: [],
                    gid_mappings: [],
                    recursive_read_only: false,
                    image: None,
                    image_sub_path: "",
                },
                Mount {
                    container_path: "/dev/termination-log",
                    host_path: "/var/lib/kubelet/pods/u-1/containers/web/a2514a33",
                    readonly: false,
                    selinux_relabel: false,
                    propagation: PropagationPrivate,
                    uid_mappings: [],
                    gid_mappings: [],
                    recursive_read_only: false,
                    image: None,
                    image_sub_path: "",
                },
            ],
            devices: [],
            labels: {
                "io.kubernetes.container.name": "web",
                "io.kubernetes.pod.name": "web-node",
                "io.kubernetes.pod.namespace": "prod",
                "io.kubernetes.pod.uid": "u-1",
            },
            annotations: {
                "io.kubernetes.container.hash": "e220f96",
                "io.kubernetes.container.restartCount": "2",
                "io.kubernetes.container.terminationMessagePath": "/dev/termination-log",
                "io.kubernetes.container.terminationMessagePolicy": "File",
                "io.kubernetes.pod.terminationGracePeriod": "30",
            },
            log_path: "web/2.log",
            stdin: true,
            stdin_once: false,
            tty: true,
            linux: Some(
                LinuxContainerConfig {
                    resources: Some(
                        LinuxContainerResources {
                            cpu_period: 100000,
                            cpu_quota: 0,
                            cpu_shares: 102,
                            memory_limit_in_bytes: 67108864,
                            oom_score_adj: 999,
                            cpuset_cpus: "",
                            cpuset_mems: "",
                            hugepage_limits: [],
                            unified: {},
                            memory_swap_limit_in_bytes: 0,
                        },
                    ),
                    security_context: Some(
                        LinuxContainerSecurityContext {
                            capabilities: None,
                            privileged: false,
                            namespace_options: Some(
                                NamespaceOption {
                                    network: Pod,
                                    pid: Container,
                                    ipc: Pod,
                                    target_id: "",
                                    userns_options: None,
                                },
                            ),
                            selinux_options: None,
                            run_as_user: Some(
                                Int64Value {
                                    value: 101,
                                },
                            ),
                            run_as_group: None,
                            run_as_username: "",
                            readonly_rootfs: false,
                            supplemental_groups: [],
                            supplemental_groups_policy: Merge,
                            no_new_privs: false,
                            masked_paths: [
                                "/proc/asound",
                                "/proc/acpi",
                                "/proc/interrupts",
                                "/proc/kcore",
                                "/proc/keys",
                                "/proc/latency_stats",
                                "/proc/timer_list",
                                "/proc/timer_stats",
                                "/proc/sched_debug",
                                "/proc/scsi",
                                "/sys/firmware",
                                "/sys/devices/virtual/powercap",
                            ],
                            readonly_paths: [
                                "/proc/bus",
                                "/proc/fs",
                                "/proc/irq",
                                "/proc/sys",
                                "/proc/sysrq-trigger",
                            ],
                            seccomp: Some(
                                SecurityProfile {
                                    profile_type: Unconfined,
                                    localhost_ref: "",
                                },
                            ),
                            apparmor: None,
                            apparmor_profile: "",
                            seccomp_profile_path: "",
                        },
                    ),
                },
            ),
            cdi_devices: [],
            stop_signal: RuntimeDefault,
        }
        "#);
    }

    #[test]
    fn image_volume_is_mounted_by_the_runtime() {
        let mut order = order(
            r#"{"volumes":[{"name":"data","image":{"reference":"quay.io/data:1","pullPolicy":"Never"}}],
                "containers":[{"name":"web","env":[{"name":"PART","value":"etc"}],"volumeMounts":[
                    {"name":"data","mountPath":"/all"},{"name":"data","mountPath":"/part","subPathExpr":"$(PART)"}]}]}"#,
        );
        order.image_volumes = BTreeMap::from([("data".to_owned(), "sha256:d".to_owned())]);
        Arc::make_mut(&mut order.pod).metadata.annotations = Some(BTreeMap::from([("a".to_owned(), "b".to_owned())]));
        let settings = Settings::for_node("node");
        assert_eq!(sub_paths(&order, &Sources::default(), &settings).unwrap(), [], "the agent mounts nothing");
        let config = container_config(&order, &Sources::default(), &settings).unwrap();
        let image = ImageSpec {
            image: "sha256:d".to_owned(),
            user_specified_image: "quay.io/data:1".to_owned(),
            annotations: BTreeMap::from([("a".to_owned(), "b".to_owned())]).into_iter().collect(),
            ..ImageSpec::default()
        };
        for (mount, (path, sub_path)) in config.mounts.iter().zip([("/all", ""), ("/part", "etc")]) {
            assert_eq!((mount.container_path.as_str(), mount.host_path.as_str()), (path, ""));
            assert_eq!((mount.image_sub_path.as_str(), mount.readonly, mount.selinux_relabel), (sub_path, true, false));
            assert_eq!(mount.image.as_ref(), Some(&image));
        }
    }

    #[test]
    fn invalid_containers_give_upstreams_errors() {
        for (container, message) in [
            (
                r#"{"name":"web","volumeMounts":[{"name":"nope","mountPath":"/x"}]}"#,
                r#"cannot find volume "nope" to mount into container "web""#,
            ),
            (
                r#"{"name":"web","securityContext":{"runAsNonRoot":true,"runAsUser":0}}"#,
                r#"container's runAsUser breaks non-root policy (pod: "web-node_prod(u-1)", container: web)"#,
            ),
            (r#"{"name":"other"}"#, r#"container "web" is not in the pod's spec"#),
        ] {
            let order =
                order(&format!(r#"{{"volumes":[{{"name":"tmp","emptyDir":{{}}}}],"containers":[{container}]}}"#));
            let error = container_config(&order, &Sources::default(), &Settings::for_node("node")).unwrap_err();
            assert_eq!(error.0, message, "{container}");
        }
    }

    #[test]
    fn hosts_file_is_left_to_a_container_that_brings_its_own() {
        let paths = |spec: &str, pod_ips: &[&str]| {
            let mut order = order(spec);
            order.pod_ips = pod_ips.iter().map(|&ip| ip.to_owned()).collect();
            let config = container_config(&order, &Sources::default(), &Settings::for_node("node")).unwrap();
            config.mounts.into_iter().map(|mount| mount.container_path).collect::<Vec<_>>().join(" ")
        };
        let bare = r#"{"containers":[{"name":"web"}]}"#;
        assert_eq!(paths(bare, &["10.0.0.5"]), "/etc/hosts");
        assert_eq!(paths(bare, &[]), "");
        assert_eq!(paths(r#"{"hostNetwork":true,"containers":[{"name":"web"}]}"#, &[]), "/etc/hosts");
        let own = r#"{"volumes":[{"name":"h","hostPath":{"path":"/h"}}],"containers":[{"name":"web","volumeMounts":[{"name":"h","mountPath":"/etc/hosts"}]}]}"#;
        assert_eq!(paths(own, &["10.0.0.5"]), "/etc/hosts");
    }

    #[test]
    fn an_ephemeral_container_joins_the_processes_of_its_target() {
        let spec = r#"{"containers":[{"name":"app"}],
            "ephemeralContainers":[{"name":"web","image":"busybox","stdin":true,"targetContainerName":"app"}]}"#;
        let mut order = order(spec);
        let made = |order: &StartContainer| container_config(order, &Sources::default(), &Settings::for_node("node"));
        assert_eq!(made(&order).unwrap_err().to_string(), "unable to find target container app");
        order.target = Some("c-1".into());
        let config = made(&order).unwrap();
        let namespaces = config.linux.unwrap().security_context.unwrap().namespace_options.unwrap();
        assert_eq!((namespaces.pid(), namespaces.target_id.as_str()), (NamespaceMode::Target, "c-1"));
        assert!(config.stdin);
    }

    fn config_of(container: &Value) -> Result<ContainerConfig, ConfigError> {
        let order = order(&json!({ "containers": [container] }).to_string());
        container_config(&order, &Sources::default(), &Settings::for_node("node"))
    }

    #[test]
    fn environment_bomb_is_refused_by_the_variables_name() {
        let times = |text: &str| text.repeat(1000);
        let mut bomb = json!({"name": "web", "env": [
            {"name": "A", "value": times("x")}, {"name": "B", "value": times("$(A)")},
            {"name": "C", "value": times("$(B)")}, {"name": "D", "value": times("$(C)")},
        ]});
        let limits = "is too long: the kernel takes 131071 bytes in one string, and 6291456 bytes of command and \
                      environment together";
        assert_eq!(config_of(&bomb).unwrap_err().0, format!("environment variable \"B\" {limits}"));
        bomb["env"].as_array_mut().unwrap().truncate(1);
        bomb["command"] = json!(["sh", times("$(A)")]);
        assert_eq!(config_of(&bomb).unwrap_err().0, format!("command[1] {limits}"));
        bomb["command"] = json!(["sh"]);
        // Each fits, all together do not.
        bomb["args"] = json!(vec!["$(A)".repeat(100); 100]);
        assert_eq!(config_of(&bomb).unwrap_err().0, format!("args[62] {limits}"));
        bomb["args"].as_array_mut().unwrap().truncate(62);
        let config = config_of(&bomb).unwrap();
        assert_eq!((config.args.len(), config.args[61].len()), (62, 100_000));
    }

    #[test]
    fn variables_that_fit_the_kernels_limits_are_given_as_they_are() {
        let with = |value: String| config_of(&json!({"name": "web", "env": [{"name": "A", "value": value}]}));
        assert_eq!(with("x".repeat(131_069)).unwrap().envs[0].value.len(), 131_069);
        let refused = with("x".repeat(131_070)).unwrap_err();
        assert!(refused.0.starts_with("environment variable \"A\" is too long"), "{refused}");
        let many: Vec<_> = (0..63).map(|n| json!({"name": format!("V{n}"), "value": "x".repeat(100_000)})).collect();
        let refused = config_of(&json!({"name": "web", "env": many})).unwrap_err();
        assert!(refused.0.starts_with("environment variable \"V62\" is too long"), "{refused}");
        // Only the last of a name counts.
        let same: Vec<_> = (0..63).map(|_| json!({"name": "V", "value": "x".repeat(100_000)})).collect();
        assert_eq!(config_of(&json!({"name": "web", "env": same})).unwrap().envs.len(), 1);
    }

    #[test]
    fn parts_of_volumes_are_mounted_from_a_place_of_their_own() {
        let mounts = r#"{"name":"tmp","mountPath":"/w"},{"name":"tmp","mountPath":"/x","subPath":"a/b"},
            {"name":"tmp","mountPath":"/y","subPathExpr":"$(WHO)/$$x"}"#;
        let order = |mounts: &str| {
            order(&format!(
                r#"{{"volumes":[{{"name":"tmp","emptyDir":{{}}}}],"containers":[{{"name":"web",
                    "env":[{{"name":"WHO","value":"me"}},{{"name":"NIL"}}],"volumeMounts":[{mounts}]}}]}}"#
            ))
        };
        let settings = Settings::for_node("node");
        let parts = |mounts: &str| sub_paths(&order(mounts), &Sources::default(), &settings);
        let volume = "/var/lib/kubelet/pods/u-1/volumes/kubernetes.io~empty-dir/tmp";
        let place = |index: u32| format!("/var/lib/kubelet/pods/u-1/volume-subpaths/tmp/web/{index}");
        let part = |path: &str, index: u32| SubPath {
            name: "tmp".to_owned(),
            volume: volume.into(),
            path: path.into(),
            place: place(index).into(),
        };
        assert_eq!(parts(mounts).unwrap(), [part("a/b", 1), part("me/$x", 2)]);
        let config = container_config(&order(mounts), &Sources::default(), &settings).unwrap();
        let from: Vec<_> = config.mounts.iter().take(3).map(|mount| mount.host_path.clone()).collect();
        assert_eq!(from, [volume.to_owned(), place(1), place(2)]);
        for (expression, message) in [
            ("$(NIL)/$(NOBODY)/$(NIL)", "missing value for NIL, NOBODY"),
            ("/$(WHO)", "error SubPath `/me` must not be an absolute path"),
            ("$(WHO)/..", "unable to provision SubPath `me/..`: must not contain '..'"),
        ] {
            let mount = format!(r#"{{"name":"tmp","mountPath":"/x","subPathExpr":"{expression}"}}"#);
            assert_eq!(parts(&mount).unwrap_err().0, message);
        }
        let long = format!(r#"{{"name":"tmp","mountPath":"/x","subPathExpr":"{}"}}"#, "$(WHO)/".repeat(1366));
        let message = "failed to create subPath directory for volumeMount \"tmp\" of container \"web\"";
        assert_eq!(parts(&long).unwrap_err().0, message);
    }
}
