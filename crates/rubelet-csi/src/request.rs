//! What a driver is asked for.
//!
//! Owns: requests in our words, and the messages made of them. Never: chooses an access mode or a path.
//! Upstream: `csi.csiDriverClient`'s arguments, `asCSIAccessModeV1`.

use std::{collections::BTreeMap, fmt, path::Path, path::PathBuf};

use crate::{Secrets, v1};

/// NodeStageVolume: makes a volume usable on this node, once for all its pods.
#[derive(Clone)]
pub struct StageVolume {
    pub handle: String,
    pub staging_path: PathBuf,
    pub access: VolumeAccess,
    pub publish_context: BTreeMap<String, String>,
    pub volume_context: BTreeMap<String, String>,
    pub secrets: Secrets,
}

/// NodePublishVolume: makes a volume usable for one pod.
#[derive(Clone)]
pub struct PublishVolume {
    pub handle: String,
    /// `None`: the driver does not stage.
    pub staging_path: Option<PathBuf>,
    pub target_path: PathBuf,
    pub access: VolumeAccess,
    pub read_only: bool,
    pub publish_context: BTreeMap<String, String>,
    pub volume_context: BTreeMap<String, String>,
    pub secrets: Secrets,
}

/// NodeExpandVolume: after the controller has made a volume larger.
#[derive(Clone, Debug)]
pub struct ExpandVolume {
    pub handle: String,
    pub volume_path: PathBuf,
    pub staging_path: Option<PathBuf>,
    pub required_bytes: i64,
    pub access: VolumeAccess,
    pub secrets: Secrets,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeAccess {
    pub mode: AccessMode,
    pub access_type: AccessType,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AccessType {
    Block,
    Mount {
        /// Empty: the driver chooses.
        fs_type: String,
        mount_flags: Vec<String>,
        /// The pod's fsGroup, if the driver applies it (`NodeCapabilities::volume_mount_group`).
        volume_mount_group: Option<i64>,
    },
}

/// CSI's access modes that upstream uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessMode {
    SingleNodeWriter,
    MultiNodeReaderOnly,
    MultiNodeMultiWriter,
    SingleNodeSingleWriter,
    SingleNodeMultiWriter,
}

impl StageVolume {
    pub(crate) fn into_message(self) -> v1::NodeStageVolumeRequest {
        v1::NodeStageVolumeRequest {
            volume_id: self.handle,
            publish_context: self.publish_context,
            staging_target_path: text(&self.staging_path),
            volume_capability: Some(self.access.into_message()),
            secrets: self.secrets.reveal().clone(),
            volume_context: self.volume_context,
        }
    }
}

impl PublishVolume {
    pub(crate) fn into_message(self) -> v1::NodePublishVolumeRequest {
        v1::NodePublishVolumeRequest {
            volume_id: self.handle,
            publish_context: self.publish_context,
            staging_target_path: optional(self.staging_path.as_deref()),
            target_path: text(&self.target_path),
            volume_capability: Some(self.access.into_message()),
            readonly: self.read_only,
            secrets: self.secrets.reveal().clone(),
            volume_context: self.volume_context,
        }
    }
}

impl ExpandVolume {
    pub(crate) fn into_message(self) -> v1::NodeExpandVolumeRequest {
        v1::NodeExpandVolumeRequest {
            volume_id: self.handle,
            volume_path: text(&self.volume_path),
            capacity_range: Some(v1::CapacityRange { required_bytes: self.required_bytes, limit_bytes: 0 }),
            staging_target_path: optional(self.staging_path.as_deref()),
            volume_capability: Some(self.access.into_message()),
            secrets: self.secrets.reveal().clone(),
        }
    }
}

impl VolumeAccess {
    fn into_message(self) -> v1::VolumeCapability {
        use v1::volume_capability::{self as capability, access_mode::Mode};
        let access_type = match self.access_type {
            AccessType::Block => capability::AccessType::Block(capability::BlockVolume {}),
            AccessType::Mount { fs_type, mount_flags, volume_mount_group } => {
                let volume_mount_group = volume_mount_group.map(|group| group.to_string()).unwrap_or_default();
                capability::AccessType::Mount(capability::MountVolume { fs_type, mount_flags, volume_mount_group })
            }
        };
        let mode = match self.mode {
            AccessMode::SingleNodeWriter => Mode::SingleNodeWriter,
            AccessMode::MultiNodeReaderOnly => Mode::MultiNodeReaderOnly,
            AccessMode::MultiNodeMultiWriter => Mode::MultiNodeMultiWriter,
            AccessMode::SingleNodeSingleWriter => Mode::SingleNodeSingleWriter,
            AccessMode::SingleNodeMultiWriter => Mode::SingleNodeMultiWriter,
        };
        v1::VolumeCapability {
            access_mode: Some(capability::AccessMode { mode: mode.into() }),
            access_type: Some(access_type),
        }
    }
}

pub(crate) fn optional(path: Option<&Path>) -> String {
    path.map(text).unwrap_or_default()
}

/// Our paths are made of the root directory, names of the API and hashes; protobuf's strings are UTF-8.
pub(crate) fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

impl fmt::Debug for StageVolume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StageVolume")
            .field("handle", &self.handle)
            .field("staging_path", &self.staging_path)
            .field("access", &self.access)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for PublishVolume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PublishVolume")
            .field("handle", &self.handle)
            .field("target_path", &self.target_path)
            .field("access", &self.access)
            .field("read_only", &self.read_only)
            .finish_non_exhaustive()
    }
}
