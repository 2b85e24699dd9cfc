//! Inspection of the runtime: relist, look at one pod, container events.
//!
//! Owns: parsing CRI responses into facts. Never: changes anything, stores anything.
//! Upstream: PLEG, `GetPodStatus`, `updateRuntimeUp`.

pub mod events;
pub mod inspect;
pub mod late_file_systems;
pub mod log_writes;
pub mod memory;
pub mod node;
pub mod oom;
pub mod relist;
pub mod termination_message;

pub use self::{inspect::inspect, relist::relist};

use rubelet_core::{
    cgroups::CgroupDriver,
    effect::{EffectError, ErrorKind, Facts},
    observation::{RuntimeHandler, RuntimeStatus},
};
use rubelet_cri::{
    port::{RpcError, RpcErrorKind, RpcResult},
    v1,
};
use rubelet_kube::error_chain;

use crate::world::World;

/// The runtime's status as it reports it.
pub async fn check_runtime(world: &World) -> Result<Facts, EffectError> {
    let (status, version, cgroup_driver) =
        tokio::try_join!(world.runtime.status(), world.runtime.version(), cgroup_driver(world))
            .map_err(|error| failed(&error))?;
    let conditions = status.status.unwrap_or_default().conditions;
    let mut handlers: Vec<_> = status.runtime_handlers.into_iter().map(handler).collect();
    handlers.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(Facts::Runtime(RuntimeStatus {
        name: version.runtime_name,
        version: version.runtime_version,
        runtime_problem: problem(&conditions, "RuntimeReady", "container runtime not ready"),
        network_problem: problem(&conditions, "NetworkReady", "container runtime network not ready"),
        cgroup_driver,
        handlers,
        supplemental_groups_policy: status.features.map(|features| features.supplemental_groups_policy),
    }))
}

fn handler(handler: v1::RuntimeHandler) -> RuntimeHandler {
    let features = handler.features.unwrap_or_default();
    RuntimeHandler {
        name: handler.name,
        recursive_read_only_mounts: features.recursive_read_only_mounts,
        user_namespaces: features.user_namespaces,
    }
}

/// The cgroup driver the runtime uses; `None` if it is too old to report it.
async fn cgroup_driver(world: &World) -> RpcResult<Option<CgroupDriver>> {
    match world.runtime.runtime_config().await {
        Ok(config) => Ok(config.linux.map(|linux| match linux.cgroup_driver() {
            v1::CgroupDriver::Systemd => CgroupDriver::Systemd,
            v1::CgroupDriver::Cgroupfs => CgroupDriver::Cgroupfs,
        })),
        Err(error) if error.kind == RpcErrorKind::Unimplemented => Ok(None),
        Err(error) => Err(error),
    }
}

/// A runtime that cannot be listed is down, whatever its status says, unless it is merely slow.
fn failed(error: &RpcError) -> EffectError {
    let is_late = error.kind == RpcErrorKind::DeadlineExceeded;
    let kind = if is_late { ErrorKind::TimedOut } else { ErrorKind::Unavailable };
    EffectError { kind, message: error_chain(error) }
}

/// A condition that is not reported is false.
fn problem(conditions: &[v1::RuntimeCondition], name: &str, what: &str) -> Option<String> {
    match conditions.iter().find(|condition| condition.r#type == name) {
        Some(condition) if condition.status => None,
        Some(condition) => {
            Some(format!("{what}: {name}=false reason:{} message:{}", condition.reason, condition.message))
        }
        None => Some(format!("{what}: the runtime does not report {name}")),
    }
}
