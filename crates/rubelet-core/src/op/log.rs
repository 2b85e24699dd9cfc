//! Operations on container logs.

use serde::{Deserialize, Serialize};

use super::{Deadline, OpKind, Properties};
use crate::id::{ContainerId, PodRef};

/// The log of a running container.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum LogOp {
    /// Renames it, has the runtime open a new one, and removes the oldest of its rotated files. A missing log is only opened.
    Rotate {
        log: LogPlace,
        /// Kept, with the live one.
        max_files: u32,
    },
    /// Compresses its rotated files but the newest, which the runtime or a reader may still use.
    Compress { log: LogPlace },
}

/// Whose log it is, and where.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogPlace {
    pub pod: PodRef,
    pub container: String,
    pub id: ContainerId,
    /// Of the live file, as the runtime reports it.
    pub path: String,
}

impl LogOp {
    pub(super) fn properties(&self) -> Properties {
        match self {
            LogOp::Rotate { .. } => Properties::disk("RotateLog").upkeep(),
            LogOp::Compress { .. } => Properties::new("CompressLogs", OpKind::Upkeep, Deadline::Compression),
        }
    }

    pub fn log(&self) -> &LogPlace {
        match self {
            LogOp::Rotate { log, .. } | LogOp::Compress { log } => log,
        }
    }

    pub(super) fn about(&self) -> String {
        let log = self.log();
        format!("{}/{}", log.pod, log.container)
    }
}
