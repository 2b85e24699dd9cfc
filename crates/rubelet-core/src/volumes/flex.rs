//! Volumes of FlexVolume drivers, which are programs on the node.
//!
//! Owns: the fields of a volume, where its driver and its directories lie, what a call is given and what its answer means.
//! Never: runs a driver.
//! Upstream: `pkg/volume/flexvolume`.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use k8s_openapi::api::core::v1::{FlexPersistentVolumeSource, FlexVolumeSource, Pod};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{csi::SecretName, fs_group};
use crate::id::{PodUid, namespace_of};

const FS_TYPE: &str = "kubernetes.io/fsType";
const READ_WRITE: &str = "kubernetes.io/readwrite";
const NAME: &str = "kubernetes.io/pvOrVolumeName";
const POD_NAME: &str = "kubernetes.io/pod.name";
const POD_NAMESPACE: &str = "kubernetes.io/pod.namespace";
const POD_UID: &str = "kubernetes.io/pod.uid";
const SERVICE_ACCOUNT: &str = "kubernetes.io/serviceAccount.name";
const GROUP: &str = "kubernetes.io/mounterArgs.FsGroup";
const SECRET: &str = "kubernetes.io/secret/";

const SUCCESS: &str = "Success";
const NOT_SUPPORTED: &str = "Not supported";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlexVolume {
    /// `vendor/driver`, or a name alone.
    pub driver: String,
    /// Empty leaves it to the driver.
    pub fs_type: String,
    /// They override the agent's own.
    pub options: BTreeMap<String, String>,
    pub secret: Option<SecretName>,
    /// What the driver says of itself; the defaults until it is asked.
    pub capabilities: Capabilities,
    /// The node waits for the attach/detach controller, if the driver attaches.
    pub has_controller: bool,
}

/// What a driver can do. Without an answer every capability but supportsMetrics counts as present, as upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// Volumes are attached by the controller, and mounted once for all pods.
    pub attach: bool,
    pub selinux_relabel: bool,
    pub supports_metrics: bool,
    /// Volumes are given to the pod's `fsGroup`.
    pub fs_group: bool,
    pub requires_fs_resize: bool,
}

impl Default for Capabilities {
    fn default() -> Self {
        Capabilities {
            attach: true,
            selinux_relabel: true,
            supports_metrics: false,
            fs_group: true,
            requires_fs_resize: true,
        }
    }
}

impl FlexVolume {
    /// `namespace` is that of the claim.
    pub fn persistent(source: &FlexPersistentVolumeSource, namespace: &str) -> Result<Self, String> {
        let secret = source.secret_ref.as_ref().map(|secret| SecretName {
            namespace: secret.namespace.clone().filter(|it| !it.is_empty()).unwrap_or_else(|| namespace.to_owned()),
            name: secret.name.clone().unwrap_or_default(),
        });
        Self::new(&source.driver, source.fs_type.as_deref(), source.options.as_ref(), secret)
    }

    pub fn inline(source: &FlexVolumeSource, namespace: &str) -> Result<Self, String> {
        let secret = source.secret_ref.as_ref();
        let secret = secret.map(|secret| SecretName { namespace: namespace.to_owned(), name: secret.name.clone() });
        Self::new(&source.driver, source.fs_type.as_deref(), source.options.as_ref(), secret)
    }

    fn new(
        driver: &str,
        fs_type: Option<&str>,
        options: Option<&BTreeMap<String, String>>,
        secret: Option<SecretName>,
    ) -> Result<Self, String> {
        if !is_driver_name(driver) {
            return Err(format!("invalid name of a FlexVolume driver {driver:?}"));
        }
        Ok(FlexVolume {
            driver: driver.to_owned(),
            fs_type: fs_type.unwrap_or_default().to_owned(),
            options: options.cloned().unwrap_or_default(),
            secret: secret.filter(|secret| !secret.name.is_empty()),
            capabilities: Capabilities::default(),
            has_controller: true,
        })
    }

    /// What every call about the volume is given. `name` is that of the persistent volume, or of the volume in its pod.
    pub fn options(&self, name: &str, read_only: bool) -> BTreeMap<String, String> {
        self.with_own([
            (FS_TYPE, self.fs_type.clone()),
            (READ_WRITE, if read_only { "ro" } else { "rw" }.to_owned()),
            (NAME, name.to_owned()),
        ])
    }

    /// What its mount for a pod is given beside that. Values of the secret are in base64.
    pub fn mount_options(
        &self,
        (name, read_only): (&str, bool),
        (pod, uid): (&Pod, &PodUid),
        secrets: BTreeMap<String, String>,
    ) -> BTreeMap<String, String> {
        let spec = pod.spec.as_ref();
        let account = spec.and_then(|spec| spec.service_account_name.clone()).unwrap_or_default();
        let mut options = self.options(name, read_only);
        let pod = [
            (POD_NAME, pod.metadata.name.clone().unwrap_or_default()),
            (POD_NAMESPACE, namespace_of(pod).to_owned()),
            (POD_UID, uid.to_string()),
            (SERVICE_ACCOUNT, account),
        ];
        options.extend(pod.map(|(key, value)| (key.to_owned(), value)));
        options.extend(secrets.into_iter().map(|(key, value)| (format!("{SECRET}{key}"), value)));
        options.extend(spec.and_then(fs_group).map(|group| (GROUP.to_owned(), group.to_string())));
        options.extend(self.options.clone());
        options
    }

    fn with_own<const N: usize>(&self, own: [(&str, String); N]) -> BTreeMap<String, String> {
        let own = own.into_iter().map(|(key, value)| (key.to_owned(), value));
        own.chain(self.options.clone()).collect()
    }
}

/// One or two plain names: directories are named after them.
fn is_driver_name(driver: &str) -> bool {
    let is_plain = |name: &str| !name.is_empty() && !name.starts_with('.') && !name.contains('~');
    driver.split('/').count() <= 2 && driver.split('/').all(is_plain)
}

/// Of the directory of its program, and of its volumes in a pod's directory.
pub fn dir_name(driver: &str) -> String {
    driver.replace('/', "~")
}

/// The driver of such a directory; `None` for one of the agent's own kinds of volumes.
pub fn driver_of_dir(name: &str) -> Option<String> {
    let driver = name.replacen('~', "/", 1);
    (!name.starts_with("kubernetes.io~") && is_driver_name(&driver)).then_some(driver)
}

/// The driver's program.
pub fn executable(plugin_dir: &Path, driver: &str) -> PathBuf {
    let name = driver.rsplit('/').next().unwrap_or_default();
    plugin_dir.join(dir_name(driver)).join(name)
}

/// Where a volume is mounted for all pods.
pub fn device_dir(root_dir: &Path, driver: &str, volume: &str) -> PathBuf {
    devices_dir(root_dir).join(driver).join(MOUNTS).join(volume)
}

/// Directories of drivers, below those of their vendors.
pub fn devices_dir(root_dir: &Path) -> PathBuf {
    root_dir.join("plugins/kubernetes.io/flexvolume")
}

/// In a driver's directory there, that of its volumes.
pub const MOUNTS: &str = "mounts";

/// What a driver said of a call that worked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    pub device: String,
    pub capabilities: Capabilities,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallFailure {
    /// The agent does what it would do without a driver.
    NotSupported,
    Failed(String),
}

impl Answer {
    /// As Go reads JSON into a struct: names of fields in any case, and what is missing keeps its default.
    pub fn parse(command: &str, output: &str) -> Result<Self, CallFailure> {
        let unreadable =
            |why: &dyn std::fmt::Display| CallFailure::Failed(format!("the answer to {command} cannot be read: {why}"));
        let answer: Value = serde_json::from_str(output).map_err(|error| unreadable(&error))?;
        if !answer.is_object() {
            return Err(unreadable(&"it is no object"));
        }
        let text = |name: &str| field(&answer, name).and_then(Value::as_str).unwrap_or_default();
        match text("status") {
            SUCCESS => {}
            NOT_SUPPORTED => return Err(CallFailure::NotSupported),
            status => {
                let message = text("message");
                return Err(CallFailure::Failed(format!(
                    "{command} command failed, status: {status}, reason: {message}"
                )));
            }
        }
        let said = field(&answer, "capabilities");
        let known = |name: &str, default: bool| {
            said.and_then(|said| field(said, name)).and_then(Value::as_bool).unwrap_or(default)
        };
        let default = Capabilities::default();
        let capabilities = Capabilities {
            attach: known("attach", default.attach),
            selinux_relabel: known("selinuxRelabel", default.selinux_relabel),
            supports_metrics: known("supportsMetrics", default.supports_metrics),
            fs_group: known("fsGroup", default.fs_group),
            requires_fs_resize: known("requiresFSResize", default.requires_fs_resize),
        };
        Ok(Answer { device: text("device").to_owned(), capabilities })
    }
}

fn field<'a>(object: &'a Value, name: &str) -> Option<&'a Value> {
    object.as_object()?.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn volume(source: Value) -> Result<FlexVolume, String> {
        FlexVolume::inline(&serde_json::from_value(source).unwrap(), "prod")
    }

    #[test]
    fn driver_lies_where_upstream_looks_for_it() {
        for (driver, program, name) in
            [("vendor/cifs", "/e/vendor~cifs/cifs", "vendor~cifs"), ("cifs", "/e/cifs/cifs", "cifs")]
        {
            assert_eq!(executable(Path::new("/e"), driver), Path::new(program));
            assert_eq!(driver_of_dir(name).as_deref(), Some(driver));
            let dir = device_dir(Path::new("/r"), driver, "pv");
            assert_eq!(dir, Path::new("/r/plugins/kubernetes.io/flexvolume").join(driver).join("mounts/pv"));
        }
        for bad in ["", "..", "a/b/c", "../x", "a/", "/a", "a~b"] {
            assert!(volume(json!({"driver": bad})).is_err(), "{bad}");
        }
        assert_eq!(driver_of_dir("kubernetes.io~nfs"), None);
        assert_eq!(driver_of_dir(".."), None);
    }

    #[test]
    fn mount_is_told_of_volume_pod_and_secret() {
        let source = json!({
            "driver": "vendor/cifs", "fsType": "xfs", "options": {"share": "//s/x", "kubernetes.io/readwrite": "own"},
            "secretRef": {"name": "login"},
        });
        let volume = volume(source).unwrap();
        assert_eq!(volume.secret.as_ref().map(|secret| (&*secret.namespace, &*secret.name)), Some(("prod", "login")));
        let spec = json!({"containers": [], "serviceAccountName": "robot", "securityContext": {"fsGroup": 4321}});
        let pod = json!({"metadata": {"name": "web", "namespace": "prod"}, "spec": spec});
        let pod = serde_json::from_value(pod).unwrap();
        let secrets = BTreeMap::from([("password".to_owned(), "c2VjcmV0".to_owned())]);
        let options = volume.mount_options(("data", true), (&pod, &PodUid::new("0001")), secrets);
        let lines: Vec<_> = options.iter().map(|(key, value)| format!("{key}={value}")).collect();
        insta::assert_snapshot!(lines.join("\n"), @r"
        kubernetes.io/fsType=xfs
        kubernetes.io/mounterArgs.FsGroup=4321
        kubernetes.io/pod.name=web
        kubernetes.io/pod.namespace=prod
        kubernetes.io/pod.uid=0001
        kubernetes.io/pvOrVolumeName=data
        kubernetes.io/readwrite=own
        kubernetes.io/secret/password=c2VjcmV0
        kubernetes.io/serviceAccount.name=robot
        share=//s/x
        ");
        assert_eq!(volume.options("data", false).len(), 4);
    }

    #[test]
    fn answer_is_read_as_go_reads_it() {
        let failed = |text: &str| Err(CallFailure::Failed(text.to_owned()));
        let success = |capabilities| Ok(Answer { device: String::new(), capabilities });
        let default = Capabilities::default();
        for (output, expected) in [
            (r#"{"status": "Success"}"#, success(default)),
            (
                r#"{"Status": "Success", "capabilities": {"attach": false}}"#,
                success(Capabilities { attach: false, ..default }),
            ),
            (
                r#"{"status": "Success", "Capabilities": {"FSGroup": false, "supportsMetrics": true}}"#,
                success(Capabilities { fs_group: false, supports_metrics: true, ..default }),
            ),
            (
                r#"{"status": "Success", "device": "/dev/sdb"}"#,
                Ok(Answer { device: "/dev/sdb".to_owned(), capabilities: default }),
            ),
            (r#"{"status": "Not supported"}"#, Err(CallFailure::NotSupported)),
            (
                r#"{"status": "Failure", "message": "no such share"}"#,
                failed("mount command failed, status: Failure, reason: no such share"),
            ),
            (r"{}", failed("mount command failed, status: , reason: ")),
            (r"[]", failed("the answer to mount cannot be read: it is no object")),
        ] {
            assert_eq!(Answer::parse("mount", output), expected, "{output}");
        }
        let Err(CallFailure::Failed(why)) = Answer::parse("mount", "mounted") else { panic!("it was read") };
        assert!(why.starts_with("the answer to mount cannot be read: expected value"), "{why}");
    }
}
