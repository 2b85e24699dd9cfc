//! The PodSandboxConfig for the runtime.
//!
//! Owns: `PodSandboxConfig`. Never: names the pod's cgroup (`cgroups.rs`).
//! Upstream: `generatePodSandboxConfig`.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Container, ContainerPort, Pod, PodSpec};
use rubelet_cri::v1::{LinuxPodSandboxConfig, PodSandboxConfig, PodSandboxMetadata, PortMapping, Protocol};

use super::{ConfigError, dns, hosts, is_host_network, labels, logs, resources, security, spec};
use crate::{
    id::{PodRef, PodUid, name_of, namespace_of},
    settings::Settings,
};

/// The attempt of the sandbox, and its cgroup.
#[derive(Clone, Copy, Debug)]
pub struct Identity<'a> {
    pub uid: &'a PodUid,
    pub attempt: u32,
    /// The pod's cgroup; empty leaves it to the runtime.
    pub cgroup_parent: &'a str,
    /// Supplemental groups because of the pod's volumes.
    pub volume_groups: &'a [i64],
}

/// `resolv_conf` is the text of the file that `settings.node.resolv_conf` names.
pub fn sandbox_config(
    pod: &Pod,
    identity: Identity<'_>,
    settings: &Settings,
    resolv_conf: &str,
) -> Result<PodSandboxConfig, ConfigError> {
    let Identity { uid, attempt, cgroup_parent, volume_groups } = identity;
    let spec = spec(pod)?;
    let hostname =
        if is_host_network(spec) { String::new() } else { hosts::kernel_hostname(pod, &settings.node.cluster_domain)? };
    let log_directory = logs::pod_dir(&settings.pod_logs_dir, namespace_of(pod), name_of(pod), uid);
    Ok(PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: name_of(pod).to_owned(),
            uid: uid.as_str().to_owned(),
            namespace: namespace_of(pod).to_owned(),
            attempt,
        }),
        hostname,
        log_directory: log_directory.display().to_string(),
        dns_config: Some(dns::config(pod, spec, &settings.node, resolv_conf)),
        port_mappings: spec.containers.iter().flat_map(port_mappings).collect(),
        labels: labels::of_sandbox(pod, uid),
        annotations: pod.metadata.annotations.clone().unwrap_or_default(),
        linux: Some(linux(spec, (cgroup_parent, volume_groups), settings)?),
    })
}

/// The part of a sandbox configuration that an image pull needs.
pub fn for_pull(pod: &PodRef) -> PodSandboxConfig {
    PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: pod.name.as_ref().to_owned(),
            uid: pod.uid.as_str().to_owned(),
            namespace: pod.namespace.as_ref().to_owned(),
            attempt: 0,
        }),
        labels: labels::of_pod(&pod.name, &pod.namespace, &pod.uid),
        ..PodSandboxConfig::default()
    }
}

fn linux(
    spec: &PodSpec,
    (cgroup_parent, volume_groups): (&str, &[i64]),
    settings: &Settings,
) -> Result<LinuxPodSandboxConfig, ConfigError> {
    let mut security_context = security::of_sandbox(spec)?;
    security_context.supplemental_groups.extend(volume_groups);
    let sysctls = spec.security_context.iter().flat_map(|context| context.sysctls.iter().flatten());
    Ok(LinuxPodSandboxConfig {
        cgroup_parent: cgroup_parent.to_owned(),
        security_context: Some(security_context),
        sysctls: sysctls.map(|sysctl| (sysctl.name.clone(), sysctl.value.clone())).collect(),
        overhead: Some(resources::of_overhead(spec, &settings.node)),
        resources: Some(resources::of_sandbox(spec, &settings.node)),
    })
}

/// A port named twice in one container is mapped once.
fn port_mappings(container: &Container) -> Vec<PortMapping> {
    let mut seen = BTreeSet::new();
    container.ports.iter().flatten().filter(|port| seen.insert(port_name(port))).map(port_mapping).collect()
}

fn port_name(port: &ContainerPort) -> String {
    if let Some(name) = port.name.as_ref().filter(|name| !name.is_empty()) {
        return name.clone();
    }
    let host_ip = port.host_ip.as_deref().unwrap_or_default();
    let protocol = port.protocol.as_deref().unwrap_or_default();
    format!("{protocol}-{host_ip}:{}:{}", port.container_port, port.host_port.unwrap_or(0))
}

fn port_mapping(port: &ContainerPort) -> PortMapping {
    let protocol = match port.protocol.as_deref() {
        Some("UDP") => Protocol::Udp,
        Some("SCTP") => Protocol::Sctp,
        _ => Protocol::Tcp,
    };
    PortMapping {
        protocol: protocol.into(),
        container_port: port.container_port,
        host_port: port.host_port.unwrap_or(0),
        host_ip: port.host_ip.clone().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sandbox_of_a_pod_with_ports_and_sysctls() {
        let pod: Pod = serde_json::from_str(
            r#"{"metadata":{"name":"web-node","namespace":"prod","labels":{"app":"web"},"annotations":{"a":"b"}},
                "spec":{"dnsPolicy":"Default","securityContext":{"runAsUser":5,"sysctls":[{"name":"net.ipv4.ip_unprivileged_port_start","value":"0"}]},
                "containers":[
                    {"name":"a","ports":[{"containerPort":80,"hostPort":8080,"protocol":"TCP"},{"containerPort":80,"hostPort":8080,"protocol":"TCP"}]},
                    {"name":"b","ports":[{"name":"dns","containerPort":53,"protocol":"UDP"}],"securityContext":{"privileged":true}}]}}"#,
        )
        .unwrap();
        let (uid, cgroup_parent) = (&"u-1".into(), "/kubepods/besteffort/podu-1");
        let identity = Identity { uid, attempt: 3, cgroup_parent, volume_groups: &[] };
        let config = sandbox_config(&pod, identity, &Settings::for_node("node"), "nameserver 9.9.9.9\n").unwrap();
        insta::assert_debug_snapshot!(config, @r#"
        PodSandboxConfig {
            metadata: Some(
                PodSandboxMetadata {
                    name: "web-node",
                    uid: "u-1",
                    namespace: "prod",
                    attempt: 3,
                },
            ),
            hostname: "web-node",
            log_directory: "/var/log/pods/prod_web-node_u-1",
            dns_config: Some(
                DnsConfig {
                    servers: [
                        "9.9.9.9",
                    ],
                    searches: [],
                    options: [],
                },
            ),
            port_mappings: [
                PortMapping {
                    protocol: Tcp,
                    container_port: 80,
                    host_port: 8080,
                    host_ip: "",
                },
                PortMapping {
                    protocol: Udp,
                    container_port: 53,
                    host_port: 0,
                    host_ip: "",
                },
            ],
            labels: {
                "app": "web",
                "io.kubernetes.pod.name": "web-node",
                "io.kubernetes.pod.namespace": "prod",
                "io.kubernetes.pod.uid": "u-1",
            },
            annotations: {
                "a": "b",
            },
            linux: Some(
                LinuxPodSandboxConfig {
                    cgroup_parent: "/kubepods/besteffort/podu-1",
                    security_context: Some(
                        LinuxSandboxSecurityContext {
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
                                    value: 5,
                                },
                            ),
                            run_as_group: None,
                            readonly_rootfs: false,
                            supplemental_groups: [],
                            supplemental_groups_policy: Merge,
                            privileged: true,
                            seccomp: Some(
                                SecurityProfile {
                                    profile_type: RuntimeDefault,
                                    localhost_ref: "",
                                },
                            ),
                            apparmor: None,
                            seccomp_profile_path: "",
                        },
                    ),
                    sysctls: {
                        "net.ipv4.ip_unprivileged_port_start": "0",
                    },
                    overhead: Some(
                        LinuxContainerResources {
                            cpu_period: 0,
                            cpu_quota: 0,
                            cpu_shares: 0,
                            memory_limit_in_bytes: 0,
                            oom_score_adj: 0,
                            cpuset_cpus: "",
                            cpuset_mems: "",
                            hugepage_limits: [],
                            unified: {},
                            memory_swap_limit_in_bytes: 0,
                        },
                    ),
                    resources: Some(
                        LinuxContainerResources {
                            cpu_period: 100000,
                            cpu_quota: 0,
                            cpu_shares: 2,
                            memory_limit_in_bytes: 0,
                            oom_score_adj: 0,
                            cpuset_cpus: "",
                            cpuset_mems: "",
                            hugepage_limits: [],
                            unified: {},
                            memory_swap_limit_in_bytes: 0,
                        },
                    ),
                },
            ),
        }
        "#);
    }
}
