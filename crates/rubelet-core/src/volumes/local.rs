//! Local persistent volumes: a directory of the node, or a file system on one of its block devices.
//!
//! Owns: their options, and where a block device is mounted for all pods. Never: mounts it.
//! Upstream: `pkg/volume/local`.

use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::LocalVolumeSource;
use serde::{Deserialize, Serialize};

use super::{
    claims::VOLUME_DEVICES,
    mounting::{self, DEFAULT_FS_TYPE},
};

pub const LOCAL_PLUGIN: &str = "kubernetes.io~local-volume";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalVolume {
    /// A directory or a block device.
    pub path: PathBuf,
    /// Of a block device.
    pub fs_type: String,
    pub mount_options: Vec<String>,
    /// Containers get the block device, and no file system.
    pub is_block: bool,
}

impl LocalVolume {
    pub fn new(source: &LocalVolumeSource, mount_options: &[String]) -> Self {
        let fs_type = source.fs_type.clone().unwrap_or_else(|| DEFAULT_FS_TYPE.to_owned());
        let (path, mount_options) = (PathBuf::from(&source.path), mount_options.to_vec());
        LocalVolume { path, fs_type, mount_options, is_block: false }
    }

    /// Of the mount of a block device.
    pub fn device_options(&self, read_only: bool) -> Vec<String> {
        mounting::join_options(&self.mount_options, read_only.then_some("ro"))
    }

    /// Why it cannot be used.
    pub fn problem(&self) -> Option<String> {
        let path = self.path.display();
        if self.path.as_os_str().is_empty() {
            return Some("local volume source is nil or local path is not set".to_owned());
        }
        let goes_back = self.path.components().any(|part| part == std::path::Component::ParentDir);
        goes_back.then(|| format!("invalid path: {path} must not contain '..'"))
    }
}

/// Where block devices are mounted, by the names of their volumes.
pub fn devices_dir(root_dir: &Path) -> PathBuf {
    root_dir.join("plugins/kubernetes.io/local-volume/mounts")
}

/// Where block devices are bound for pods, by the names of their volumes. Upstream escapes the plugin's name here.
pub fn block_dir(root_dir: &Path) -> PathBuf {
    root_dir.join("plugins").join(LOCAL_PLUGIN).join(VOLUME_DEVICES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_volume_has_a_default_file_system_and_a_plain_path() {
        let volume = |path: &str, fs_type: Option<&str>| {
            let source = LocalVolumeSource { path: path.to_owned(), fs_type: fs_type.map(str::to_owned) };
            LocalVolume::new(&source, &["noatime".to_owned()])
        };
        assert_eq!(volume("/dev/b", None).fs_type, "ext4");
        assert_eq!(volume("/dev/b", Some("xfs")).fs_type, "xfs");
        assert_eq!(volume("/dev/b", None).device_options(true), ["noatime", "ro"]);
        assert_eq!(volume("/dev/b", None).problem(), None);
        assert_eq!(volume("/a/../b", None).problem().as_deref(), Some("invalid path: /a/../b must not contain '..'"));
    }
}
