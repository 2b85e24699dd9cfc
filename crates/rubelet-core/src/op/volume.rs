//! Operations on volumes and devices.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use super::{Deadline, PodPlace, Properties};
use crate::{
    id::{PodRef, PodUid},
    volumes::{
        claims::{PersistentKind, PersistentSource},
        devices::{Device, DeviceName, DeviceOptions},
        teardown::PodVolume,
    },
};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum VolumeOp {
    /// Finds the persistent volume that a volume of the pod claims.
    Resolve { pod: Arc<Pod>, volume: String, node_labels: Option<Arc<BTreeMap<String, String>>> },
    /// Stages the device of a volume, for all pods that use it.
    Stage { source: Arc<PersistentSource>, options: DeviceOptions },
    /// Undoes that after the last of them.
    Unstage { device: Device },
    /// Finds out whether a volume is not attached because the node has as many as its driver can have here. If so, the driver is
    /// asked for its limit anew.
    CheckAttachLimit { pod: PodRef, volume: String, source: Arc<PersistentSource> },
    /// Makes one volume of the pod ready for its containers.
    SetUp {
        pod: Arc<Pod>,
        uid: PodUid,
        volume: String,
        /// What its claim stands for, if it has one.
        claimed: Option<Arc<PersistentSource>>,
    },
    /// Has the driver make the volume's file system as large as the volume.
    Expand { pod: Arc<Pod>, uid: PodUid, volume: String, source: Arc<PersistentSource> },
    /// Refreshes the volumes with API content; leaves the others alone.
    Refresh { pod: Arc<Pod>, uid: PodUid },
    /// Unmounts and removes one volume of a pod that has ended.
    Unmount { pod: PodRef, volume: PodVolume },
    /// Unmounts and removes the pod's volumes and what belongs to none of them. If one of them may keep the others waiting, it
    /// only finds out which there are (`Facts::MountedVolumes`).
    TearDown(PodPlace),
}

impl VolumeOp {
    pub(super) fn properties(&self) -> Properties {
        match self {
            VolumeOp::Resolve { .. } => Properties::look("ResolveClaim").lasting(Deadline::Api).aborted(),
            VolumeOp::Stage { source, .. } => Properties::disk("StageDevice").lasting(match source.kind {
                PersistentKind::Csi(_) => Deadline::Driver,
                // A large disk may have to be formatted or checked.
                PersistentKind::HostPath { .. }
                | PersistentKind::Local(_)
                | PersistentKind::Nfs(_)
                | PersistentKind::Iscsi(_)
                | PersistentKind::Flex(_)
                | PersistentKind::Fc(_) => Deadline::Ownership,
            }),
            VolumeOp::CheckAttachLimit { .. } => {
                Properties::disk("CheckAttachLimit").lasting(Deadline::Driver).aborted().upkeep()
            }
            VolumeOp::Unstage { .. } => Properties::disk("UnstageDevice").lasting(Deadline::Driver),
            // A server may never answer, and the program that waits for it is killed.
            VolumeOp::SetUp { claimed: Some(source), .. } if matches!(source.kind, PersistentKind::Nfs(_)) => {
                Properties::disk("SetUpVolume").lasting(Deadline::Driver).aborted()
            }
            // A driver finishes a call whose caller gave up, so the call is not aborted; the end of the pod's volumes waits for it.
            VolumeOp::SetUp { claimed: Some(_), .. } => Properties::disk("SetUpVolume").lasting(Deadline::Ownership),
            VolumeOp::SetUp { claimed: None, .. } => Properties::disk("SetUpVolume").aborted(),
            VolumeOp::Expand { .. } => Properties::disk("ExpandVolume").lasting(Deadline::Driver),
            VolumeOp::Refresh { .. } => Properties::disk("RefreshVolumes").aborted().upkeep(),
            VolumeOp::Unmount { .. } => Properties::disk("UnmountVolume").lasting(Deadline::Driver),
            VolumeOp::TearDown(_) => Properties::disk("TearDownVolumes").lasting(Deadline::Driver),
        }
    }

    pub(super) fn about(&self) -> String {
        match self {
            VolumeOp::Resolve { pod, volume, .. }
            | VolumeOp::SetUp { pod, volume, .. }
            | VolumeOp::Expand { pod, volume, .. } => {
                format!("{}/{volume}", PodRef::of(pod))
            }
            VolumeOp::CheckAttachLimit { pod, volume, .. } => format!("{pod}/{volume}"),
            VolumeOp::Stage { source, .. } => source.name.clone(),
            VolumeOp::Unstage { device } => DeviceName::of(device).to_string(),
            VolumeOp::Refresh { pod, .. } => PodRef::of(pod).to_string(),
            VolumeOp::Unmount { pod, volume } => format!("{pod}/{volume}"),
            VolumeOp::TearDown(place) => place.pod.to_string(),
        }
    }
}
