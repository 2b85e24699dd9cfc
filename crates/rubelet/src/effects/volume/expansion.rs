//! Expansion of a volume in use: its driver, or a program of the node, makes the file system as large as the volume.
//!
//! Owns: the call, and the writes of the claim's status around it. Never: decides whether a claim wants it
//! (`rubelet_core::volumes::expansion`).
//! Upstream: `csi/expander.go`, `flexvolume/expander.go`, `local.go`, `operationexecutor/node_expander.go`.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use rubelet_core::{
    effect::{EffectError, Facts},
    id::PodUid,
    quantity::Quantity,
    volumes::{
        claims::{PersistentKind, PersistentSource},
        csi::CsiVolume,
        devices::CsiDevice,
        expansion::{self, ClaimedSize, Expanded, Next},
    },
};
use rubelet_csi::{Code, CsiError, ExpandVolume};
use rubelet_kube::{
    calls, error_chain,
    port::{Lane, ObjectPath, PatchKind},
};
use serde_json::Value;

use super::{block, csi, flex, local};
use crate::{
    effects::{failure, status},
    world::World,
};

pub(super) async fn expand(world: &World, uid: &PodUid, source: &PersistentSource) -> Result<Facts, EffectError> {
    let Some(size) = source.size.as_ref().filter(|_| source.is_expandable()) else {
        return Ok(Facts::Expanded(Expanded::NotNeeded));
    };
    if source.read_only {
        return Ok(Facts::Expanded(Expanded::ReadOnly));
    }
    let claim = claim(world, size).await?;
    let (wanted, is_shown, is_tracked) = match expansion::next(&claim, size) {
        Next::Expand { size, is_shown, is_tracked } => (size, is_shown, is_tracked),
        Next::Wait => return Ok(Facts::Expanded(Expanded::NotYet)),
        Next::Nothing => return Ok(Facts::Expanded(Expanded::NotNeeded)),
    };
    let is_given_up = expansion::is_given_up(&claim, &wanted);
    let claim = match expansion::in_progress_patch(&claim).filter(|_| is_tracked && !is_shown) {
        Some(patch) => write(world, size, &patch).await?,
        None => claim,
    };
    let called = match &source.kind {
        PersistentKind::Csi(volume) => call(world, uid, (source, volume), &wanted).await?,
        PersistentKind::Flex(volume) if flex::expand(world, uid, (source, volume), (&wanted, size)).await? => {
            Called::Done
        }
        PersistentKind::Local(volume) => {
            local::grow(world, source, volume).await?;
            Called::Done
        }
        _ => {
            Called::Unsupported { error: format!("expandfs is not supported by the driver of volume {}", source.name) }
        }
    };
    match called {
        Called::Done if is_shown => Ok(Facts::Expanded(Expanded::Done)),
        Called::Done => {
            write(world, size, &expansion::finished_patch(&claim, &wanted)).await?;
            Ok(Facts::Expanded(Expanded::Done))
        }
        // Upstream fails where the controller waits for this node.
        Called::Unsupported { error } if is_tracked && !is_shown => Err(failure::refused(error)),
        Called::Unsupported { .. } => Ok(Facts::Expanded(Expanded::NotNeeded)),
        Called::Failed(error) => failed(world, size, &error, is_tracked, is_given_up).await,
    }
}

enum Called {
    Done,
    /// The driver leaves it to its controller.
    Unsupported {
        error: String,
    },
    Failed(CsiError),
}

async fn call(
    world: &World,
    uid: &PodUid,
    (source, volume): (&PersistentSource, &CsiVolume),
    wanted: &str,
) -> Result<Called, EffectError> {
    let client = csi::client(world, &volume.driver)?;
    let capabilities = csi::capabilities(&client).await?;
    if !capabilities.expand {
        let error = format!("NodeExpand is not supported by the CSI driver {}", volume.driver);
        return Ok(Called::Unsupported { error });
    }
    let device = CsiDevice::of(source).ok_or_else(|| failure::refused("the volume has no device".to_owned()))?;
    // For a block volume upstream gives the path that it was published to.
    let volume_path = match volume.is_block {
        true => block::publish_path(world, &source.name, uid)?,
        false => source.path(&world.paths.pod_dir(uid)),
    };
    let request = ExpandVolume {
        handle: volume.handle.clone(),
        volume_path,
        staging_path: Some(csi::device_place(world, &device)?.staging),
        required_bytes: Quantity::parse(wanted).map_or(0, Quantity::value),
        access: csi::access(volume, &capabilities, None),
        secrets: csi::secrets(world, volume.expand_secret.as_ref()).await?,
    };
    Ok(match client.expand(request).await {
        Ok(_) => Called::Done,
        Err(error) => Called::Failed(error),
    })
}

async fn failed(
    world: &World,
    size: &ClaimedSize,
    error: &CsiError,
    is_tracked: bool,
    is_given_up: bool,
) -> Result<Facts, EffectError> {
    let prefix = "Expander.NodeExpand failed to expand the volume";
    let message = format!("{prefix} : {error}");
    if !error.is_uncertain() && is_tracked {
        let is_infeasible =
            is_given_up || matches!(error.code, Some(Code::InvalidArgument | Code::OutOfRange | Code::NotFound));
        let now = world.clock.now().wall.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        write(world, size, &expansion::failed_patch(&message, is_infeasible, &now)).await?;
    }
    if error.code == Some(Code::FailedPrecondition) {
        return Ok(Facts::Expanded(Expanded::InUse { error: message }));
    }
    Err(failure::retryable(message))
}

async fn claim(world: &World, size: &ClaimedSize) -> Result<PersistentVolumeClaim, EffectError> {
    let failed = |error: &dyn std::fmt::Display| {
        failure::retryable(format!("mountVolume.NodeExpandVolume get PVC failed : {error}"))
    };
    status::get_object(world, path(size)).await.map_err(|error| failed(&error))
}

async fn write(world: &World, size: &ClaimedSize, patch: &Value) -> Result<PersistentVolumeClaim, EffectError> {
    let failed = |why: &dyn std::fmt::Display| {
        failure::retryable(format!("patchPVCStatus failed to patch PVC {:?}: {why}", size.claim))
    };
    let cluster = world.cluster.as_ref().ok_or_else(|| failed(&"there is no API server"))?;
    let (path, lane) = (path(size).sub("status"), Lane::Ordinary);
    let written = calls::patch(&*cluster.api, lane, PatchKind::StrategicMerge, path, patch, status::TIMEOUT).await;
    written.map_err(|error| failed(&error_chain(&error)))
}

fn path(size: &ClaimedSize) -> ObjectPath {
    ObjectPath::all("v1", "persistentvolumeclaims").within(&*size.namespace).named(&*size.claim)
}
