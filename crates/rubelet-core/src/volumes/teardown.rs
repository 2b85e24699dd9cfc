//! Volumes in the directory of a pod that has ended.
//!
//! Owns: the names by which they are found there, and which of them may keep others waiting. Never: touches the disk.
//! Upstream: `getMountedVolumePathListFromDisk`, `UnmountVolume` of the operation executor.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::volumes::{EMPTY_DIR_PLUGIN, files::FilePlugin};

/// A volume as its directory is called.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PodVolume {
    /// The name of its plugin's directory, as upstream escapes it.
    pub plugin_dir: String,
    /// Of the persistent volume, if it is one; else the volume's in the pod.
    pub name: String,
    /// Containers had it as a device.
    pub is_block: bool,
}

impl PodVolume {
    /// No driver, server or disk other than the node's own is needed to unmount it.
    pub fn is_local(&self) -> bool {
        let files = [FilePlugin::ConfigMap, FilePlugin::Secret, FilePlugin::DownwardApi, FilePlugin::Projected];
        let is_file = || files.iter().any(|plugin| plugin.dir_name() == self.plugin_dir);
        !self.is_block && (self.plugin_dir == EMPTY_DIR_PLUGIN || is_file())
    }

    /// The name of its plugin in metrics; that of a CSI driver is not part of it.
    pub fn plugin(&self) -> String {
        self.plugin_dir.replace('~', "/")
    }
}

impl fmt::Display for PodVolume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}
