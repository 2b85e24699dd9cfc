//! SELinux labels of volumes that are mounted with one, instead of having their files relabelled for each pod.
//!
//! Owns: the label that containers of a pod want for a volume, whether it is mounted with it, and upstream's words when that
//! cannot be. Never: reads the node's policy, relabels a file.
//! A level that no container names is made up by upstream, differently each time; here such files are relabelled.
//! Upstream: `pkg/volume/util/selinux.go`, `DesiredStateOfWorld.AddPodToVolume`, `go-selinux`'s `InitLabels`.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Container, PodSpec, SELinuxOptions};
use serde::{Deserialize, Serialize};

use crate::{
    settings::NodeProfile,
    volumes::claims::{PersistentKind, PersistentSource},
};

const RECURSIVE: &str = "Recursive";
const POLICY_KEY: &str = "SELINUXTYPE";

/// The labels that the node's policy has for containers and their files; empty where it has none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerLabels {
    pub process: String,
    pub file: String,
}

/// What became of the label that a pod wants for a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LabelFinding {
    /// It wants none, or one that the volume has for another pod already.
    #[default]
    Nothing,
    /// The pod is the first on the node for which the volume has it.
    Admitted,
    /// Containers of the pod want several. It waits if the volume had to be mounted with one.
    PodMismatch { is_error: bool },
    /// Another pod has the volume with another one. It waits if the volume is mounted with that.
    VolumeMismatch { is_error: bool },
}

/// A finding, and what metrics call the volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelReport {
    pub finding: LabelFinding,
    pub plugin: String,
    pub access_mode: &'static str,
}

impl LabelReport {
    pub fn of(finding: LabelFinding, source: &PersistentSource) -> Self {
        let Some(access_mode) = access_mode(source).filter(|_| finding != LabelFinding::Nothing) else {
            return LabelReport::default();
        };
        LabelReport { finding, plugin: plugin(source), access_mode }
    }
}

/// The name of the node's policy, from its configuration.
pub fn policy(config: &str) -> Option<&str> {
    let mut lines = config.lines().map(str::trim).filter(|line| !line.starts_with([';', '#']));
    lines.find_map(|line| line.strip_prefix(POLICY_KEY)?.strip_prefix('=')).map(|value| value.trim_matches('"'))
}

impl ContainerLabels {
    /// Of a policy's `lxc_contexts`.
    pub fn parse(contexts: &str) -> Self {
        let mut labels = ContainerLabels::default();
        let lines = contexts.lines().map(str::trim).filter(|line| !line.starts_with([';', '#']));
        for (key, value) in lines.filter_map(|line| line.split_once('=')) {
            let value = value.trim().trim_matches('"').to_owned();
            match key.trim() {
                "process" => labels.process = value,
                "file" => labels.file = value,
                _ => {}
            }
        }
        labels
    }

    /// The label of files that processes with these options may use; empty if that is not known.
    fn of_files(&self, options: &SELinuxOptions) -> String {
        let given = |option: &Option<String>| option.clone().filter(|text| !text.is_empty());
        let SELinuxOptions { level, role, type_, user } = options;
        if [level, role, type_, user].into_iter().all(|option| given(option).is_none()) {
            return String::new();
        }
        if self.process.is_empty() || self.file.is_empty() {
            return self.file.clone();
        }
        let mut parts = self.file.splitn(4, ':').map(str::to_owned);
        let mut next = || parts.next().unwrap_or_default();
        let (file_user, file_role, file_type, file_level) = (next(), next(), next(), next());
        let has_levels = self.process.splitn(4, ':').count() > 3;
        let level = match given(level) {
            Some(level) => level,
            None if has_levels => return String::new(),
            None => file_level,
        };
        let label = format!("{}:{file_role}:{file_type}", given(user).unwrap_or(file_user));
        if level.is_empty() { label } else { format!("{label}:{level}") }
    }
}

/// The volume with the label that the pod wants for it, and with what it is mounted with. `others`: the label for which other
/// pods have it. An error says why the pod has to wait.
pub fn labelled(
    spec: &PodSpec,
    volume: &str,
    source: PersistentSource,
    others: Option<Option<&str>>,
    node: &NodeProfile,
) -> (LabelFinding, Result<PersistentSource, String>) {
    let Some(labels) = &node.selinux_labels else { return (LabelFinding::Nothing, Ok(source)) };
    let wanted = wanted_labels(spec, volume, labels);
    let is_error = is_mounted_with_label(&source, node);
    if wanted.len() > 1 {
        let finding = LabelFinding::PodMismatch { is_error };
        let message = || format!("multiple SELinux labels found: {}", Vec::from_iter(wanted).join(","));
        return (finding, if is_error { Err(message()) } else { Ok(source) });
    }
    let policy = spec.security_context.as_ref().and_then(|context| context.se_linux_change_policy.as_deref());
    let is_supported = source.takes_label();
    let is_wanted = |label: &String| is_supported && policy != Some(RECURSIVE) && !label.is_empty();
    let label = wanted.into_iter().next().filter(is_wanted);
    if let Some(others) = others.filter(|others| is_supported && *others != label.as_deref()) {
        let (name, theirs, own) = (&source.name, others.unwrap_or_default(), label.as_deref().unwrap_or_default());
        let message = format!("conflicting SELinux labels of volume {name}: {theirs:?} and {own:?}");
        let finding = LabelFinding::VolumeMismatch { is_error };
        return (finding, if is_error { Err(message) } else { Ok(source.with_label(label, false)) });
    }
    let is_first = label.is_some() && others.is_none();
    let finding = if is_first { LabelFinding::Admitted } else { LabelFinding::Nothing };
    (finding, Ok(source.with_label(label, is_error)))
}

/// Of the containers that mount the volume and name a label.
fn wanted_labels(spec: &PodSpec, volume: &str, labels: &ContainerLabels) -> BTreeSet<String> {
    let of_pod = spec.security_context.as_ref().and_then(|context| context.se_linux_options.as_ref());
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let mounts_it = |container: &&Container| {
        let mut mounts = container.volume_mounts.iter().flatten();
        mounts.any(|mount| mount.name == volume)
    };
    let options = containers.filter(mounts_it).filter_map(|container| {
        let own = container.security_context.as_ref().and_then(|context| context.se_linux_options.as_ref());
        own.or(of_pod)
    });
    options.map(|options| labels.of_files(options)).collect()
}

/// Volumes of one pod at a time; others with the gate SELinuxMount.
fn is_mounted_with_label(source: &PersistentSource, node: &NodeProfile) -> bool {
    !source.is_inline() && (node.selinux_mount_enabled || source.is_exclusive)
}

/// These metrics have a driver's name after a slash.
fn plugin(source: &PersistentSource) -> String {
    match &source.kind {
        PersistentKind::Csi(volume) => format!("kubernetes.io/csi/{}", volume.driver),
        PersistentKind::HostPath { .. }
        | PersistentKind::Local(_)
        | PersistentKind::Nfs(_)
        | PersistentKind::Iscsi(_)
        | PersistentKind::Fc(_)
        | PersistentKind::Flex(_) => source.plugin(),
    }
}

/// The widest access mode of a volume, as metrics have it; `None` if it is not known.
fn access_mode(source: &PersistentSource) -> Option<&'static str> {
    match &source.kind {
        PersistentKind::Csi(_) if source.is_inline() => Some("inline"),
        PersistentKind::Csi(volume) => Some(volume.widest_access.short_name()),
        PersistentKind::HostPath { .. }
        | PersistentKind::Local(_)
        | PersistentKind::Nfs(_)
        | PersistentKind::Iscsi(_)
        | PersistentKind::Fc(_)
        | PersistentKind::Flex(_) => source.is_exclusive.then_some("RWOP"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::volumes::csi::{AccessMode, CsiVolume, DriverRules};

    const CONTEXTS: &str = "# comment\nprocess = \"system_u:system_r:container_t:s0\"\n\
                            file = \"system_u:object_r:container_file_t:s0\"\nro_file=\"x\"\n";

    fn node(mounts_all: bool) -> NodeProfile {
        NodeProfile {
            selinux_labels: Some(ContainerLabels::parse(CONTEXTS)),
            selinux_mount_enabled: mounts_all,
            ..NodeProfile::default()
        }
    }

    fn volume(driver: &Value, is_exclusive: bool) -> PersistentSource {
        let object = json!({"metadata": {"name": "d"}, "spec": driver});
        let rules = DriverRules::of(Some(&serde_json::from_value(object).unwrap()));
        let source = serde_json::from_value(json!({"driver": "d", "volumeHandle": "h"})).unwrap();
        let kind = PersistentKind::Csi(CsiVolume::persistent(&source, AccessMode::ReadWriteOnce, rules));
        PersistentSource { name: "pv".to_owned(), read_only: false, is_exclusive, kind, size: None, group: None }
    }

    fn spec(pod: &Value, containers: &[&Value]) -> PodSpec {
        let mounts = json!([{"name": "v", "mountPath": "/v"}]);
        let container = |options: &Value| json!({"name": "c", "volumeMounts": mounts, "securityContext": {"seLinuxOptions": options}});
        let containers: Vec<_> = containers.iter().map(|options| container(options)).collect();
        serde_json::from_value(json!({"securityContext": pod, "containers": containers})).unwrap()
    }

    #[test]
    fn label_of_files_is_the_policys_with_the_containers_level_and_user() {
        let labels = ContainerLabels::parse(CONTEXTS);
        let of = |options: Value| labels.of_files(&serde_json::from_value(options).unwrap());
        assert_eq!(of(json!({"level": "s0:c1,c2"})), "system_u:object_r:container_file_t:s0:c1,c2");
        let all = json!({"level": "s0:c1,c2", "user": "u", "role": "r", "type": "spc_t"});
        assert_eq!(of(all), "u:object_r:container_file_t:s0:c1,c2", "role and type are the processes'");
        assert_eq!(of(json!({"type": "spc_t"})), "", "the runtime makes up the level");
        assert_eq!(of(json!({})), "");
        let none = ContainerLabels::default();
        assert_eq!(none.of_files(&SELinuxOptions { level: Some("s0".to_owned()), ..Default::default() }), "");
        assert_eq!(policy("#SELINUXTYPE=mls\nSELINUX=enforcing\nSELINUXTYPE=targeted\n"), Some("targeted"));
    }

    #[test]
    fn volume_of_one_pod_is_mounted_with_its_label() {
        let (one, two) = (json!({"level": "s0:c1,c2"}), json!({"level": "s0:c3,c4"}));
        let (takes, does_not) = (json!({"seLinuxMount": true}), json!({}));
        let recursive = json!({"seLinuxChangePolicy": "Recursive"});
        let (ours, theirs) = ("system_u:object_r:container_file_t:s0:c1,c2", "other");
        let rows = [
            ("exclusive", spec(&json!({}), &[&one]), volume(&takes, true), None, false),
            ("shared", spec(&json!({}), &[&one]), volume(&takes, false), None, false),
            ("shared, gate", spec(&json!({}), &[&one]), volume(&takes, false), None, true),
            ("same label", spec(&json!({}), &[&one]), volume(&takes, false), Some(Some(ours)), true),
            ("other label", spec(&json!({}), &[&one]), volume(&takes, false), Some(Some(theirs)), true),
            ("other label, no gate", spec(&json!({}), &[&one]), volume(&takes, false), Some(Some(theirs)), false),
            ("two labels", spec(&json!({}), &[&one, &two]), volume(&takes, true), None, false),
            ("two labels, shared", spec(&json!({}), &[&one, &two]), volume(&takes, false), None, false),
            ("recursive", spec(&recursive, &[&one]), volume(&takes, true), None, false),
            ("driver cannot", spec(&json!({}), &[&one]), volume(&does_not, true), None, false),
            ("no label", spec(&json!({}), &[]), volume(&takes, true), None, false),
        ];
        let lines = rows.map(|(name, spec, source, others, gate)| {
            let (finding, labelled) = labelled(&spec, "v", source, others, &node(gate));
            let shown = labelled.map(|source| source.mount_context().unwrap_or("-").to_owned());
            format!("{name}: {finding:?} {}", shown.unwrap_or_else(|error| error))
        });
        insta::assert_snapshot!(lines.join("\n"), @r#"
        exclusive: Admitted system_u:object_r:container_file_t:s0:c1,c2
        shared: Admitted -
        shared, gate: Admitted system_u:object_r:container_file_t:s0:c1,c2
        same label: Nothing system_u:object_r:container_file_t:s0:c1,c2
        other label: VolumeMismatch { is_error: true } conflicting SELinux labels of volume pv: "other" and "system_u:object_r:container_file_t:s0:c1,c2"
        other label, no gate: VolumeMismatch { is_error: false } -
        two labels: PodMismatch { is_error: true } multiple SELinux labels found: system_u:object_r:container_file_t:s0:c1,c2,system_u:object_r:container_file_t:s0:c3,c4
        two labels, shared: PodMismatch { is_error: false } -
        recursive: Nothing -
        driver cannot: Nothing -
        no label: Nothing -
        "#);
        let off = NodeProfile::default();
        let untouched = volume(&takes, true);
        let spec = spec(&json!({}), &[&one]);
        assert_eq!(labelled(&spec, "v", untouched.clone(), None, &off), (LabelFinding::Nothing, Ok(untouched)));
    }
}
