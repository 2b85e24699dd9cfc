//! Debug output of what holds secrets.
//!
//! Owns: what of a request may be shown. Never: shows a secret, a volume's context (it may hold tokens of a service account)
//! or a publish context (what an attachment returned; some drivers put credentials there).

use std::{collections::BTreeMap, fmt};

use crate::v1;

/// The data of a driver's Secret. Debug shows how many there are.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secrets(BTreeMap<String, String>);

impl Secrets {
    pub fn new(data: BTreeMap<String, String>) -> Self {
        Secrets(data)
    }

    /// For the request's message alone.
    pub fn reveal(&self) -> &BTreeMap<String, String> {
        &self.0
    }

    pub fn insert(&mut self, key: String, value: String) {
        self.0.insert(key, value);
    }
}

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secrets({})", self.0.len())
    }
}

impl fmt::Debug for v1::NodeStageVolumeRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeStageVolumeRequest")
            .field("volume_id", &self.volume_id)
            .field("staging_target_path", &self.staging_target_path)
            .field("volume_capability", &self.volume_capability)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for v1::NodePublishVolumeRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodePublishVolumeRequest")
            .field("volume_id", &self.volume_id)
            .field("target_path", &self.target_path)
            .field("volume_capability", &self.volume_capability)
            .field("readonly", &self.readonly)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for v1::NodeExpandVolumeRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeExpandVolumeRequest")
            .field("volume_id", &self.volume_id)
            .field("volume_path", &self.volume_path)
            .field("capacity_range", &self.capacity_range)
            .finish_non_exhaustive()
    }
}
