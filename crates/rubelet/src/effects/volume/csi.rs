//! CSI volumes, which always fail: no driver can register with this agent yet.
//!
//! Owns: that error, with the information of the CSIDriver object. The object is watched while the pod waits.
//! Upstream: `csiMountMgr.SetUpAt`, `supportsVolumeLifecycleMode` of `pkg/volume/csi`.

use std::collections::BTreeSet;

use rubelet_core::{
    effect::EffectError,
    id::PodUid,
    objects::{CsiDriver, Object, ObjectKey, Objects, Presence},
};

use crate::{effects::failure, world::World};

/// The API's name for the lifecycle of an inline volume.
const EPHEMERAL: &str = "Ephemeral";

/// Upstream's text, with both of its reasons.
pub(super) async fn why_not(world: &World, pod: &PodUid, driver: &str) -> EffectError {
    let key = ObjectKey::csi_driver(driver);
    let wanted = BTreeSet::from([key.clone()]);
    let objects = match &world.cluster {
        Some(cluster) => cluster.objects.gather(pod, wanted).await,
        None => Objects::standalone(wanted),
    };
    let unfit = match objects.find(&key, Presence::Optional) {
        Ok(object) => unfit(driver, object),
        Err(error) => Some(error.message),
    };
    let unregistered = format!(
        "kubernetes.io/csi: mounter.SetUpAt failed to get CSI client: driver name {driver} not found in the list of registered CSI drivers"
    );
    failure::refused(match unfit {
        Some(unfit) => format!("{unregistered}; failed to check volume lifecycle mode: {unfit}"),
        None => unregistered,
    })
}

/// Why the driver would reject such a volume.
fn unfit(driver: &str, object: Option<&Object>) -> Option<String> {
    let refusal = format!("volume mode {EPHEMERAL:?} not supported by driver {driver}");
    let Some(Object::CsiDriver(CsiDriver { volume_lifecycle_modes: modes })) = object else {
        return Some(format!("{refusal} (no CSIDriver object)"));
    };
    if modes.iter().any(|mode| mode == EPHEMERAL) {
        return None;
    }
    let quoted: Vec<_> = modes.iter().map(|mode| format!("{mode:?}")).collect();
    Some(format!("{refusal} (only supports [{}])", quoted.join(" ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn csi_driver_must_support_ephemeral_volumes() {
        let of = |modes: &[&str]| {
            let volume_lifecycle_modes = modes.iter().map(|mode| (*mode).to_owned()).collect();
            unfit("d", Some(&Object::CsiDriver(CsiDriver { volume_lifecycle_modes })))
        };
        assert_eq!(of(&["Persistent", "Ephemeral"]), None);
        let refusal = r#"volume mode "Ephemeral" not supported by driver d"#;
        assert_eq!(of(&["Persistent"]), Some(format!(r#"{refusal} (only supports ["Persistent"])"#)));
        assert_eq!(unfit("d", None), Some(format!("{refusal} (no CSIDriver object)")));
    }
}
