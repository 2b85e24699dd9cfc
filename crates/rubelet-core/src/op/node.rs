//! Operations on the node as a whole.

use serde::{Deserialize, Serialize};

use super::{Deadline, LogPlace, ONE_CALL, Properties};
use crate::{
    cgroups::Cgroup,
    eviction::usage::{PodFigures, PodToMeasure, RuntimePlaces},
    image_gc::LookAtImages,
};

/// The node as a whole.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum NodeOp {
    CheckRuntime,
    Relist,
    /// Lists the pods with a directory under the root directory, or a log directory.
    ListPodDirs,
    /// Lists the devices that are staged on the node, with the pods whose directories refer to them.
    ListDevices,
    /// Sets the QoS cgroups, and lists the cgroups below them.
    SyncQosCgroups {
        cgroups: Vec<Cgroup>,
    },
    /// Looks at the images, their use, and the space on their file system.
    ListImages(LookAtImages),
    /// Looks at the sizes of these logs.
    MeasureLogs {
        logs: Vec<LogPlace>,
    },
    /// Looks at the memory, file systems and processes of the node.
    MeasureNode {
        /// The cgroup of all pods; `None`: pods have no cgroups of their own.
        kubepods: Option<String>,
        /// `None`: the runtime has not said where they are.
        places: Option<RuntimePlaces>,
    },
    /// Asks the runtime where it keeps images and containers.
    FindImageFs,
    /// Looks at what these pods use.
    MeasurePods {
        pods: Vec<PodToMeasure>,
        figures: PodFigures,
    },
}

impl NodeOp {
    pub(super) fn properties(&self) -> Properties {
        match self {
            NodeOp::CheckRuntime => Properties::look("CheckRuntime").lasting(ONE_CALL),
            NodeOp::Relist => Properties::look("Relist"),
            NodeOp::ListPodDirs => Properties::look("ListPodDirs").lasting(Deadline::Disk),
            NodeOp::ListDevices => Properties::look("ListDevices").lasting(Deadline::Disk),
            NodeOp::SyncQosCgroups { .. } => Properties::disk("SyncQosCgroups"),
            NodeOp::ListImages(_) => Properties::look("ListImages"),
            NodeOp::MeasureLogs { .. } => Properties::look("MeasureLogs"),
            NodeOp::MeasureNode { .. } => Properties::look("MeasureNode"),
            NodeOp::FindImageFs => Properties::look("FindImageFs").lasting(ONE_CALL),
            NodeOp::MeasurePods { .. } => Properties::look("MeasurePods"),
        }
    }
}
