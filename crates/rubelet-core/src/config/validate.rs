//! The rules a configuration must hold to.
use super::{document::Mismatch, types::KubeletConfiguration};

/// What the rules must know of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {
    CgroupV1,
    CgroupV2,
}

pub(super) fn validate(_config: &KubeletConfiguration, _host: Host) -> Vec<Mismatch> {
    Vec::new()
}
