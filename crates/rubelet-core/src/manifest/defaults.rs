//! The API server's defaults for pods.
//!
//! Owns: the defaults. Never: validates; an invalid value stays for `validate.rs`.
//! Upstream: `apis/core/v1/defaults.go` (SetDefaults_Pod, SetDefaults_PodSpec, …), `zz_generated.defaults.go`.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{
        Container, ContainerPort, EmptyDirVolumeSource, EnvVar, EphemeralContainer, HTTPGetAction, Lifecycle,
        ObjectFieldSelector, Pod, PodSecurityContext, Probe, ProjectedVolumeSource, ResourceRequirements, Volume,
    },
    apimachinery::pkg::api::resource::Quantity,
};

use super::pod_level::{self, Sums};
use crate::container::is_host_network;

pub(super) fn apply(pod: &mut Pod) -> Sums {
    let spec = pod.spec.get_or_insert_default();
    let on_host_network = is_host_network(spec);
    for container in spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()) {
        request_what_is_limited(container.resources.as_mut());
        if on_host_network {
            bind_host_ports(container.ports.as_deref_mut());
        }
        container_defaults(container);
    }
    for container in spec.ephemeral_containers.iter_mut().flatten() {
        ephemeral_container_defaults(container);
    }
    for volume in spec.volumes.iter_mut().flatten() {
        volume_defaults(volume);
    }
    let sums = pod_level::apply(spec);
    spec.enable_service_links.get_or_insert(true);
    text(&mut spec.dns_policy, "ClusterFirst");
    text(&mut spec.restart_policy, "Always");
    spec.security_context.get_or_insert_with(PodSecurityContext::default);
    spec.termination_grace_period_seconds.get_or_insert(30);
    text(&mut spec.scheduler_name, "default-scheduler");
    sums
}

fn container_defaults(container: &mut Container) {
    pull_policy(&mut container.image_pull_policy, container.image.as_deref());
    text(&mut container.termination_message_path, "/dev/termination-log");
    text(&mut container.termination_message_policy, "File");
    ports(container.ports.as_deref_mut());
    env(container.env.as_deref_mut());
    probes([&mut container.liveness_probe, &mut container.readiness_probe, &mut container.startup_probe]);
    lifecycle_defaults(container.lifecycle.as_mut());
}

fn ephemeral_container_defaults(container: &mut EphemeralContainer) {
    pull_policy(&mut container.image_pull_policy, container.image.as_deref());
    text(&mut container.termination_message_path, "/dev/termination-log");
    text(&mut container.termination_message_policy, "File");
    ports(container.ports.as_deref_mut());
    env(container.env.as_deref_mut());
    probes([&mut container.liveness_probe, &mut container.readiness_probe, &mut container.startup_probe]);
    lifecycle_defaults(container.lifecycle.as_mut());
}

/// Always for `latest`, which is also the meaning of no tag and no digest; otherwise a tag is taken to be fixed.
fn pull_policy(policy: &mut Option<String>, image: Option<&str>) {
    let is_latest = image.is_some_and(|image| tag(image) == "latest");
    text(policy, if is_latest { "Always" } else { "IfNotPresent" });
}

/// The tag of an image reference; empty when only a digest is given, `latest` when neither is.
fn tag(image: &str) -> &str {
    let (named, digest) = match image.split_once('@') {
        Some((named, digest)) => (named, Some(digest)),
        None => (image, None),
    };
    // A colon before the last slash is a port.
    let last = named.rsplit('/').next().unwrap_or(named);
    match (last.split_once(':'), digest) {
        (Some((_, tag)), _) => tag,
        (None, Some(_)) => "",
        (None, None) if last.is_empty() => "",
        (None, None) => "latest",
    }
}

fn ports(ports: Option<&mut [ContainerPort]>) {
    for port in ports.into_iter().flatten() {
        text(&mut port.protocol, "TCP");
    }
}

/// On the host network a container's port is a port of the host.
fn bind_host_ports(ports: Option<&mut [ContainerPort]>) {
    for port in ports.into_iter().flatten() {
        if port.host_port.unwrap_or_default() == 0 {
            port.host_port = Some(port.container_port);
        }
    }
}

fn env(env: Option<&mut [EnvVar]>) {
    for variable in env.into_iter().flatten() {
        let Some(from) = &mut variable.value_from else { continue };
        field_ref(from.field_ref.as_mut());
        if let Some(key) = &mut from.file_key_ref {
            key.optional.get_or_insert(false);
        }
    }
}

fn field_ref(field_ref: Option<&mut ObjectFieldSelector>) {
    if let Some(field_ref) = field_ref {
        text(&mut field_ref.api_version, "v1");
    }
}

fn probes(probes: [&mut Option<Probe>; 3]) {
    for probe in probes.into_iter().flatten() {
        number(&mut probe.timeout_seconds, 1);
        number(&mut probe.period_seconds, 10);
        number(&mut probe.success_threshold, 1);
        number(&mut probe.failure_threshold, 3);
        http_get(probe.http_get.as_mut());
        if let Some(grpc) = &mut probe.grpc {
            grpc.service.get_or_insert_default();
        }
    }
}

fn lifecycle_defaults(lifecycle: Option<&mut Lifecycle>) {
    let Some(lifecycle) = lifecycle else { return };
    for handler in [&mut lifecycle.post_start, &mut lifecycle.pre_stop].into_iter().flatten() {
        http_get(handler.http_get.as_mut());
    }
}

fn http_get(action: Option<&mut HTTPGetAction>) {
    let Some(action) = action else { return };
    text(&mut action.path, "/");
    text(&mut action.scheme, "HTTP");
}

fn request_what_is_limited(resources: Option<&mut ResourceRequirements>) {
    let Some(resources) = resources else { return };
    let Some(limits) = &resources.limits else { return };
    let requests: &mut BTreeMap<String, Quantity> = resources.requests.get_or_insert_default();
    for (name, limit) in limits {
        requests.entry(name.clone()).or_insert_with(|| limit.clone());
    }
}

fn volume_defaults(volume: &mut Volume) {
    const FILE_MODE: i32 = 0o644;
    if *volume == (Volume { name: volume.name.clone(), ..Volume::default() }) {
        volume.empty_dir = Some(EmptyDirVolumeSource::default());
    }
    if let Some(host_path) = &mut volume.host_path {
        host_path.type_.get_or_insert_default();
    }
    if let Some(image) = &mut volume.image {
        pull_policy(&mut image.pull_policy, image.reference.as_deref());
    }
    if let Some(secret) = &mut volume.secret {
        secret.default_mode.get_or_insert(FILE_MODE);
    }
    if let Some(config_map) = &mut volume.config_map {
        config_map.default_mode.get_or_insert(FILE_MODE);
    }
    if let Some(downward_api) = &mut volume.downward_api {
        downward_api.default_mode.get_or_insert(FILE_MODE);
        for item in downward_api.items.iter_mut().flatten() {
            field_ref(item.field_ref.as_mut());
        }
    }
    if let Some(projected) = &mut volume.projected {
        projected.default_mode.get_or_insert(FILE_MODE);
        projected_defaults(projected);
    }
    storage_defaults(volume);
}

/// Defaults of unsupported volumes, which are part of a pod's UID all the same.
fn storage_defaults(volume: &mut Volume) {
    if let Some(iscsi) = &mut volume.iscsi {
        text(&mut iscsi.iscsi_interface, "default");
    }
    if let Some(rbd) = &mut volume.rbd {
        text(&mut rbd.pool, "rbd");
        text(&mut rbd.user, "admin");
        text(&mut rbd.keyring, "/etc/ceph/keyring");
    }
    if let Some(azure) = &mut volume.azure_disk {
        azure.caching_mode.get_or_insert_with(|| "ReadWrite".to_owned());
        azure.fs_type.get_or_insert_with(|| "ext4".to_owned());
        azure.read_only.get_or_insert(false);
        azure.kind.get_or_insert_with(|| "Shared".to_owned());
    }
    if let Some(scale_io) = &mut volume.scale_io {
        text(&mut scale_io.storage_mode, "ThinProvisioned");
        text(&mut scale_io.fs_type, "xfs");
    }
    if let Some(template) = volume.ephemeral.as_mut().and_then(|volume| volume.volume_claim_template.as_mut()) {
        template.spec.volume_mode.get_or_insert_with(|| "Filesystem".to_owned());
    }
}

fn projected_defaults(projected: &mut ProjectedVolumeSource) {
    for source in projected.sources.iter_mut().flatten() {
        for item in source.downward_api.iter_mut().flat_map(|source| source.items.iter_mut().flatten()) {
            field_ref(item.field_ref.as_mut());
        }
        if let Some(token) = &mut source.service_account_token {
            token.expiration_seconds.get_or_insert(3600);
        }
    }
}

/// In the API an empty string is an unset field.
fn text(field: &mut Option<String>, default: &str) {
    if field.as_deref().unwrap_or_default().is_empty() {
        *field = Some(default.to_owned());
    }
}

/// In the API zero is an unset field.
fn number(field: &mut Option<i32>, default: i32) {
    if field.unwrap_or_default() == 0 {
        *field = Some(default);
    }
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;
    use serde_json::json;

    use super::*;

    fn defaulted(spec: &serde_json::Value) -> serde_json::Value {
        let mut pod: Pod = serde_json::from_value(json!({ "metadata": {}, "spec": spec.clone() })).unwrap();
        apply(&mut pod);
        serde_json::to_value(pod.spec.unwrap()).unwrap()
    }

    #[test]
    fn the_smallest_pod_gets_the_api_servers_defaults() {
        let spec = defaulted(&json!({ "containers": [{ "name": "a", "image": "nginx" }] }));
        assert_snapshot!(serde_json::to_string_pretty(&spec).unwrap(), @r#"
        {
          "containers": [
            {
              "image": "nginx",
              "imagePullPolicy": "Always",
              "name": "a",
              "terminationMessagePath": "/dev/termination-log",
              "terminationMessagePolicy": "File"
            }
          ],
          "dnsPolicy": "ClusterFirst",
          "enableServiceLinks": true,
          "restartPolicy": "Always",
          "schedulerName": "default-scheduler",
          "securityContext": {},
          "terminationGracePeriodSeconds": 30
        }
        "#);
    }

    #[test]
    fn the_pull_policy_follows_the_tag() {
        for (image, policy) in [
            ("nginx", "Always"),
            ("nginx:latest", "Always"),
            ("nginx:1.25", "IfNotPresent"),
            ("registry:5000/nginx", "Always"),
            ("registry:5000/nginx:1.25", "IfNotPresent"),
            ("nginx@sha256:0123", "IfNotPresent"),
            ("nginx:latest@sha256:0123", "Always"),
            ("", "IfNotPresent"),
        ] {
            let spec = defaulted(&json!({ "containers": [{ "name": "a", "image": image }] }));
            assert_eq!(spec["containers"][0]["imagePullPolicy"], policy, "{image}");
        }
        let spec = defaulted(&json!({ "containers": [{ "name": "a", "image": "a", "imagePullPolicy": "Never" }] }));
        assert_eq!(spec["containers"][0]["imagePullPolicy"], "Never");
    }

    #[test]
    fn limits_become_requests_where_none_are_given() {
        let spec = defaulted(&json!({ "containers": [{
            "name": "a",
            "resources": { "limits": { "cpu": "1", "memory": "1Gi" }, "requests": { "cpu": "100m" } },
        }] }));
        assert_eq!(spec["containers"][0]["resources"]["requests"], json!({ "cpu": "100m", "memory": "1Gi" }));
    }

    #[test]
    fn host_network_pods_bind_their_ports_on_the_host() {
        let ports = json!([{ "containerPort": 80 }, { "containerPort": 81, "hostPort": 8081, "protocol": "UDP" }]);
        let spec = defaulted(&json!({ "hostNetwork": true, "containers": [{ "name": "a", "ports": ports }] }));
        assert_eq!(
            spec["containers"][0]["ports"],
            json!([
                { "containerPort": 80, "hostPort": 80, "protocol": "TCP" },
                { "containerPort": 81, "hostPort": 8081, "protocol": "UDP" },
            ])
        );
    }

    #[test]
    fn probes_volumes_and_field_references_get_their_defaults() {
        let spec = defaulted(&json!({
            "containers": [{
                "name": "a",
                "readinessProbe": { "httpGet": { "port": 80 }, "periodSeconds": 0, "failureThreshold": 7 },
                "env": [{ "name": "IP", "valueFrom": { "fieldRef": { "fieldPath": "status.podIP" } } }],
            }],
            "volumes": [{ "name": "a" }, { "name": "b", "hostPath": { "path": "/b" } }],
        }));
        assert_eq!(
            spec["containers"][0]["readinessProbe"],
            json!({
                "httpGet": { "path": "/", "port": 80, "scheme": "HTTP" },
                "timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 7,
            })
        );
        assert_eq!(spec["containers"][0]["env"][0]["valueFrom"]["fieldRef"]["apiVersion"], "v1");
        assert_eq!(
            spec["volumes"],
            json!([{ "name": "a", "emptyDir": {} }, { "name": "b", "hostPath": { "path": "/b", "type": "" } }])
        );
    }
}
