//! CSI volumes: what a persistent volume or an inline volume asks of its driver.
//!
//! Owns: the fields of a CSI volume, the rules of its CSIDriver object, who applies the pod's fsGroup. Never: calls a driver.
//! Upstream: `pkg/volume/csi` (`csi_mounter.go`, `csi_plugin.go`).

use std::collections::BTreeMap;

use k8s_openapi::api::{
    core::v1::{CSIPersistentVolumeSource, CSIVolumeSource, Pod, SecretReference},
    storage::v1::CSIDriver,
};
use serde::{Deserialize, Serialize};

use crate::{csi_node, volumes::files::TokenKey};

/// The API's names for the lifecycles of a volume.
const PERSISTENT: &str = "Persistent";
const EPHEMERAL: &str = "Ephemeral";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CsiVolume {
    pub driver: String,
    pub handle: String,
    pub lifecycle: CsiLifecycle,
    /// Empty leaves it to the driver.
    pub fs_type: String,
    /// Its block device is used, and no file system.
    pub is_block: bool,
    pub attributes: BTreeMap<String, String>,
    pub access_mode: AccessMode,
    /// Of all its access modes.
    pub widest_access: AccessMode,
    /// One of its access modes is for one node.
    pub has_single_node_mode: bool,
    /// The SELinux label that pods want for its files.
    pub label: Option<String>,
    /// It is mounted with the label.
    pub is_labelled: bool,
    pub mount_options: Vec<String>,
    pub stage_secret: Option<SecretName>,
    pub publish_secret: Option<SecretName>,
    pub expand_secret: Option<SecretName>,
    pub rules: DriverRules,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CsiLifecycle {
    Persistent,
    /// Inline: made for its pod, and never staged.
    Ephemeral,
}

impl CsiLifecycle {
    pub fn as_str(self) -> &'static str {
        match self {
            CsiLifecycle::Persistent => PERSISTENT,
            CsiLifecycle::Ephemeral => EPHEMERAL,
        }
    }
}

/// The first access mode of a persistent volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AccessMode {
    ReadWriteOnce,
    ReadOnlyMany,
    ReadWriteMany,
    ReadWriteOncePod,
}

impl AccessMode {
    /// `None` for an unknown one.
    pub fn parse(text: &str) -> Option<AccessMode> {
        Some(match text {
            "ReadWriteOnce" => AccessMode::ReadWriteOnce,
            "ReadOnlyMany" => AccessMode::ReadOnlyMany,
            "ReadWriteMany" => AccessMode::ReadWriteMany,
            "ReadWriteOncePod" => AccessMode::ReadWriteOncePod,
            _ => return None,
        })
    }

    /// Upstream: `hasReadWriteOnce`.
    pub fn is_single_node(self) -> bool {
        matches!(self, AccessMode::ReadWriteOnce | AccessMode::ReadWriteOncePod)
    }

    /// As metrics have it.
    pub fn short_name(self) -> &'static str {
        match self {
            AccessMode::ReadWriteOnce => "RWO",
            AccessMode::ReadOnlyMany => "ROX",
            AccessMode::ReadWriteMany => "RWX",
            AccessMode::ReadWriteOncePod => "RWOP",
        }
    }

    /// The mode of several that lets most pods use a volume.
    pub fn widest(modes: impl IntoIterator<Item = AccessMode>) -> Option<AccessMode> {
        modes.into_iter().max_by_key(|mode| match mode {
            AccessMode::ReadWriteOncePod => 0,
            AccessMode::ReadWriteOnce => 1,
            AccessMode::ReadOnlyMany => 2,
            AccessMode::ReadWriteMany => 3,
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretName {
    pub namespace: String,
    pub name: String,
}

impl SecretName {
    fn of(reference: Option<&SecretReference>) -> Option<SecretName> {
        let SecretReference { namespace, name } = reference?;
        Some(SecretName { namespace: namespace.clone().unwrap_or_default(), name: name.clone().unwrap_or_default() })
    }
}

/// What the driver's CSIDriver object says, or upstream assumes without one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverRules {
    /// The attach/detach controller attaches its volumes before they are used.
    pub attach: bool,
    /// It is told of the pod a volume is published for.
    pub pod_info: bool,
    pub fs_group: FsGroupPolicy,
    /// Its volumes are published again periodically.
    pub republish: bool,
    /// Tokens of the pod's service account that it is given.
    pub tokens: Vec<TokenRequest>,
    /// They are given as a secret.
    pub tokens_are_secret: bool,
    /// It mounts a volume with the SELinux label it is told.
    pub takes_label: bool,
    /// How many volumes it can have on a node changes with time, so that a pod may have come to a node that has too many.
    pub has_changing_limit: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenRequest {
    /// Empty: the API server itself.
    pub audience: String,
    pub expiration_secs: Option<i64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FsGroupPolicy {
    ReadWriteOnceWithFsType,
    File,
    None,
}

impl DriverRules {
    /// Without an object a driver's volumes have to be attached.
    pub fn of(object: Option<&CSIDriver>) -> DriverRules {
        let Some(object @ CSIDriver { spec, .. }) = object else {
            return DriverRules {
                attach: true,
                pod_info: false,
                fs_group: FsGroupPolicy::ReadWriteOnceWithFsType,
                republish: false,
                tokens: Vec::new(),
                tokens_are_secret: false,
                takes_label: false,
                has_changing_limit: false,
            };
        };
        let requests = spec.token_requests.iter().flatten();
        let tokens = requests.map(|request| TokenRequest {
            audience: request.audience.clone(),
            expiration_secs: request.expiration_seconds,
        });
        DriverRules {
            attach: spec.attach_required.unwrap_or(true),
            pod_info: spec.pod_info_on_mount.unwrap_or(false),
            fs_group: match spec.fs_group_policy.as_deref() {
                Some("File") => FsGroupPolicy::File,
                Some("None") => FsGroupPolicy::None,
                Some(_) | None => FsGroupPolicy::ReadWriteOnceWithFsType,
            },
            republish: spec.requires_republish.unwrap_or(false),
            tokens: tokens.collect(),
            tokens_are_secret: spec.service_account_token_in_secrets.unwrap_or(false),
            takes_label: spec.se_linux_mount.unwrap_or(false),
            has_changing_limit: csi_node::update_period(object).is_some(),
        }
    }
}

/// Why the driver cannot serve a volume of this lifecycle.
pub fn unsupported_lifecycle(driver: &str, object: Option<&CSIDriver>, lifecycle: CsiLifecycle) -> Option<String> {
    let refusal = format!("volume mode {:?} not supported by driver {driver}", lifecycle.as_str());
    let modes = match object.map(|object| object.spec.volume_lifecycle_modes.as_deref().unwrap_or_default()) {
        // Drivers existed before their objects, for persistent volumes.
        None if lifecycle == CsiLifecycle::Persistent => return None,
        None => return Some(format!("{refusal} (no CSIDriver object)")),
        Some([]) => &[PERSISTENT.to_owned()],
        Some(modes) => modes,
    };
    if modes.iter().any(|mode| mode == lifecycle.as_str()) {
        return None;
    }
    let quoted: Vec<_> = modes.iter().map(|mode| format!("{mode:?}")).collect();
    Some(format!("{refusal} (only supports [{}])", quoted.join(" ")))
}

impl CsiVolume {
    pub fn persistent(source: &CSIPersistentVolumeSource, access_mode: AccessMode, rules: DriverRules) -> Self {
        CsiVolume {
            driver: source.driver.clone(),
            handle: source.volume_handle.clone(),
            lifecycle: CsiLifecycle::Persistent,
            fs_type: source.fs_type.clone().unwrap_or_default(),
            is_block: false,
            attributes: source.volume_attributes.clone().unwrap_or_default(),
            access_mode,
            widest_access: access_mode,
            has_single_node_mode: access_mode.is_single_node(),
            label: None,
            is_labelled: false,
            mount_options: Vec::new(),
            stage_secret: SecretName::of(source.node_stage_secret_ref.as_ref()),
            publish_secret: SecretName::of(source.node_publish_secret_ref.as_ref()),
            expand_secret: SecretName::of(source.node_expand_secret_ref.as_ref()),
            rules,
        }
    }

    pub fn inline(source: &CSIVolumeSource, handle: String, namespace: &str, rules: DriverRules) -> Self {
        let secret = source.node_publish_secret_ref.as_ref();
        CsiVolume {
            driver: source.driver.clone(),
            handle,
            lifecycle: CsiLifecycle::Ephemeral,
            fs_type: source.fs_type.clone().unwrap_or_default(),
            is_block: false,
            attributes: source.volume_attributes.clone().unwrap_or_default(),
            access_mode: AccessMode::ReadWriteOnce,
            widest_access: AccessMode::ReadWriteOnce,
            has_single_node_mode: true,
            label: None,
            is_labelled: false,
            mount_options: Vec::new(),
            stage_secret: None,
            publish_secret: secret
                .map(|secret| SecretName { namespace: namespace.to_owned(), name: secret.name.clone() }),
            expand_secret: None,
            // Inline volumes are never attached.
            rules: DriverRules { attach: false, ..rules },
        }
    }

    /// The SELinux label that it is mounted with.
    pub fn mount_context(&self) -> Option<&str> {
        self.label.as_deref().filter(|_| self.is_labelled)
    }

    /// The tokens that the driver is given for a pod, each with its audience as the driver knows it.
    pub fn tokens(&self, pod: &Pod) -> Vec<(&str, TokenKey)> {
        let requests = self.rules.tokens.iter();
        let key = |request: &TokenRequest| TokenKey::of(pod, Some(&request.audience), request.expiration_secs);
        requests.map(|request| (request.audience.as_str(), key(request))).collect()
    }

    /// The pod's fsGroup is applied by changing the owner of files. `delegated`: the driver mounts it with the group itself.
    pub fn is_given_to_group(&self, delegated: bool) -> bool {
        if delegated {
            return false;
        }
        match self.rules.fs_group {
            FsGroupPolicy::None => false,
            FsGroupPolicy::File => true,
            FsGroupPolicy::ReadWriteOnceWithFsType => self.has_single_node_mode && !self.fs_type.is_empty(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn driver(spec: &serde_json::Value) -> CSIDriver {
        serde_json::from_value(json!({"metadata": {"name": "d"}, "spec": spec})).unwrap()
    }

    #[test]
    fn driver_must_support_the_lifecycle_of_a_volume() {
        let of = |modes: &[&str], lifecycle| {
            unsupported_lifecycle("d", Some(&driver(&json!({"volumeLifecycleModes": modes}))), lifecycle)
        };
        assert_eq!(of(&["Persistent", "Ephemeral"], CsiLifecycle::Ephemeral), None);
        assert_eq!(of(&[], CsiLifecycle::Persistent), None);
        let refusal = r#"volume mode "Ephemeral" not supported by driver d"#;
        let only = Some(format!(r#"{refusal} (only supports ["Persistent"])"#));
        assert_eq!(of(&["Persistent"], CsiLifecycle::Ephemeral), only);
        assert_eq!(of(&[], CsiLifecycle::Ephemeral), only);
        let missing = |lifecycle| unsupported_lifecycle("d", None, lifecycle);
        assert_eq!(missing(CsiLifecycle::Ephemeral), Some(format!("{refusal} (no CSIDriver object)")));
        assert_eq!(missing(CsiLifecycle::Persistent), None);
    }

    #[test]
    fn drivers_object_decides_on_attachment_and_group() {
        let volume = |spec: &serde_json::Value, fs_type: &str, mode| {
            let source = json!({"driver": "d", "volumeHandle": "h", "fsType": fs_type});
            let rules = DriverRules::of(Some(&driver(spec)));
            CsiVolume::persistent(&serde_json::from_value(source).unwrap(), mode, rules)
        };
        let by_default = volume(&json!({}), "ext4", AccessMode::ReadWriteOnce);
        assert!(by_default.rules.attach && by_default.is_given_to_group(false));
        assert!(!by_default.is_given_to_group(true), "the driver does it");
        assert!(!volume(&json!({}), "", AccessMode::ReadWriteOnce).is_given_to_group(false));
        assert!(!volume(&json!({}), "ext4", AccessMode::ReadWriteMany).is_given_to_group(false));
        assert!(volume(&json!({"fsGroupPolicy": "File"}), "", AccessMode::ReadWriteMany).is_given_to_group(false));
        assert!(!volume(&json!({"fsGroupPolicy": "None"}), "ext4", AccessMode::ReadWriteOnce).is_given_to_group(false));
        assert!(!volume(&json!({"attachRequired": false}), "", AccessMode::ReadWriteOnce).rules.attach);
        assert!(DriverRules::of(None).attach, "a driver without an object");
    }
}
