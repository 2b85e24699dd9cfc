//! Expansion of a volume on the node, after the controller has made it larger.
//!
//! Owns: whether the claim lets this node expand its volume, and the claim's status afterwards. Never: calls a driver or the API.
//! Upstream: `operationexecutor/node_expander.go`, `pkg/volume/util/resize_util.go`.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, PersistentVolumeClaimCondition};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::quantity::{Quantity, amount};

/// The resource of claims and volumes.
const STORAGE: &str = "storage";
/// For volumes of several nodes whose controller has done all.
const NOT_REQUIRED_ANNOTATION: &str = "volume.kubernetes.io/node-expansion-not-required";
const RESIZE_PENDING: &str = "NodeResizePending";
const RESIZE_IN_PROGRESS: &str = "NodeResizeInProgress";
const RESIZE_INFEASIBLE: &str = "NodeResizeInfeasible";
/// The claim's conditions about its expansion.
const RESIZE_CONDITIONS: [&str; 4] =
    ["FileSystemResizePending", "Resizing", "ControllerResizeError", "NodeResizeError"];
const NODE_RESIZE_ERROR: &str = "NodeResizeError";

/// The claim of a volume, and the sizes of both when they were read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClaimedSize {
    pub namespace: String,
    pub claim: String,
    pub claim_uid: String,
    pub volume_bytes: i64,
    /// Zero before the claim's status has it.
    pub claim_bytes: i64,
    /// The persistent volume's, as it writes it.
    pub volume_size: String,
}

impl ClaimedSize {
    pub fn of(claim: &PersistentVolumeClaim, volume_size: &str) -> Option<Self> {
        let status = claim.status.as_ref();
        Some(ClaimedSize {
            namespace: claim.metadata.namespace.clone()?,
            claim: claim.metadata.name.clone()?,
            claim_uid: claim.metadata.uid.clone().unwrap_or_default(),
            volume_bytes: Quantity::parse(volume_size).ok()?.value(),
            claim_bytes: amount(status.and_then(|status| status.capacity.as_ref()), STORAGE).value(),
            volume_size: volume_size.to_owned(),
        })
    }
}

/// What became of an expansion. But for one, none of these is tried again until the volume grows once more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Expanded {
    Done,
    /// The claim's status needs no node expansion, or another node did it.
    NotNeeded,
    /// The controller is at work, or has to undo it: it is asked for again when the claim has been read again.
    NotYet,
    /// The volume is mounted to be read only.
    ReadOnly,
    /// The driver does not expand volumes in use.
    InUse {
        error: String,
    },
}

/// What to do for a claim as it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    Nothing,
    /// The claim may want it later.
    Wait,
    /// Call the driver for this size.
    Expand {
        size: String,
        /// The claim shows the size already: another node expanded the volume.
        is_shown: bool,
        /// The controller keeps track in the claim's status.
        is_tracked: bool,
    },
}

/// A size that cannot be read is not asked for.
pub fn next(claim: &PersistentVolumeClaim, size: &ClaimedSize) -> Next {
    let status = claim.status.clone().unwrap_or_default();
    let state = resize_state(claim);
    let allocated = status.allocated_resources.as_ref().and_then(|resources| resources.get(STORAGE));
    let is_tracked = state.is_some() || status.allocated_resources.is_some();
    let wanted = allocated.map_or_else(|| size.volume_size.clone(), |size| size.0.clone());
    let Ok(wanted_size) = Quantity::parse(&wanted) else { return Next::Nothing };
    let shown = amount(status.capacity.as_ref(), STORAGE);
    let is_shown = shown >= wanted_size && state.is_none();
    let modes = claim.spec.as_ref().and_then(|spec| spec.access_modes.as_ref());
    let is_shared = modes.is_some_and(|modes| modes.iter().any(|mode| mode == "ReadWriteMany"));
    let annotations = claim.metadata.annotations.as_ref();
    let is_excused = annotations.is_some_and(|annotations| annotations.contains_key(NOT_REQUIRED_ANNOTATION));
    let may = match state {
        _ if is_shown => is_shared && !is_excused,
        Some(RESIZE_PENDING | RESIZE_IN_PROGRESS) => true,
        Some(_) => false,
        None => !is_tracked,
    };
    match may {
        true => Next::Expand { size: wanted, is_shown, is_tracked },
        false if is_shown => Next::Nothing,
        false => Next::Wait,
    }
}

/// The claim wants another size since an expansion to this one failed for good: the controller may undo it after one more failure.
pub fn is_given_up(claim: &PersistentVolumeClaim, size: &str) -> bool {
    let conditions = claim.status.as_ref().and_then(|status| status.conditions.as_ref());
    let has_failed = conditions.into_iter().flatten().any(|condition| condition.type_ == NODE_RESIZE_ERROR);
    let resources = claim.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    let asked = amount(resources.and_then(|resources| resources.requests.as_ref()), STORAGE);
    has_failed && Quantity::parse(size).is_ok_and(|size| size != asked)
}

/// The claim's status while the driver works. `None`: the status is already NodeResizeInProgress.
pub fn in_progress_patch(claim: &PersistentVolumeClaim) -> Option<Value> {
    (resize_state(claim) != Some(RESIZE_IN_PROGRESS))
        .then(|| checked(claim, &json!({"allocatedResourceStatuses": {STORAGE: RESIZE_IN_PROGRESS}})))
}

/// The claim's status afterwards.
pub fn finished_patch(claim: &PersistentVolumeClaim, size: &str) -> Value {
    let dropped = RESIZE_CONDITIONS.map(|kind| json!({"type": kind, "$patch": "delete"}));
    let status = json!({
        "capacity": {STORAGE: size},
        "allocatedResourceStatuses": {STORAGE: null},
        "conditions": dropped,
    });
    checked(claim, &status)
}

/// The claim's status after an error; an infeasible expansion is not tried again, and the controller may undo it.
pub fn failed_patch(error: &str, is_infeasible: bool, now: &str) -> Value {
    let condition = PersistentVolumeClaimCondition {
        type_: NODE_RESIZE_ERROR.to_owned(),
        status: "True".to_owned(),
        message: Some(format!("failed to expand pvc with {error}")),
        ..PersistentVolumeClaimCondition::default()
    };
    let mut condition = json!(condition);
    condition["lastTransitionTime"] = json!(now);
    let mut status = json!({"conditions": [condition]});
    if is_infeasible {
        status["allocatedResourceStatuses"] = json!({STORAGE: RESIZE_INFEASIBLE});
    }
    json!({"status": status})
}

fn resize_state(claim: &PersistentVolumeClaim) -> Option<&str> {
    let statuses = claim.status.as_ref()?.allocated_resource_statuses.as_ref()?;
    statuses.get(STORAGE).map(String::as_str).filter(|state| !state.is_empty())
}

/// It applies only to the version that was read.
fn checked(claim: &PersistentVolumeClaim, status: &Value) -> Value {
    json!({"metadata": {"resourceVersion": claim.metadata.resource_version}, "status": status})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(status: &Value, mode: &str, annotation: Option<&str>) -> PersistentVolumeClaim {
        let annotations = annotation.map(|name| json!({name: ""}));
        let metadata = json!({"name": "c", "namespace": "n", "resourceVersion": "7", "annotations": annotations});
        let claim = json!({"metadata": metadata, "spec": {"accessModes": [mode]}, "status": status});
        serde_json::from_value(claim).unwrap()
    }

    #[test]
    fn claim_says_whether_the_node_expands_its_volume() {
        let size = |claim: &PersistentVolumeClaim| ClaimedSize::of(claim, "2Gi").unwrap();
        let rows = [
            ("older controller", json!({"capacity": {"storage": "1Gi"}}), "ReadWriteOnce", None),
            (
                "pending",
                json!({"capacity": {"storage": "1Gi"}, "allocatedResources": {"storage": "3Gi"}, "allocatedResourceStatuses": {"storage": "NodeResizePending"}}),
                "ReadWriteOnce",
                None,
            ),
            (
                "infeasible",
                json!({"capacity": {"storage": "1Gi"}, "allocatedResources": {"storage": "2Gi"}, "allocatedResourceStatuses": {"storage": "NodeResizeInfeasible"}}),
                "ReadWriteOnce",
                None,
            ),
            (
                "controller at work",
                json!({"capacity": {"storage": "1Gi"}, "allocatedResources": {"storage": "2Gi"}, "allocatedResourceStatuses": {"storage": "ControllerResizeInProgress"}}),
                "ReadWriteOnce",
                None,
            ),
            ("done", json!({"capacity": {"storage": "2Gi"}}), "ReadWriteOnce", None),
            ("done on another node", json!({"capacity": {"storage": "2Gi"}}), "ReadWriteMany", None),
            (
                "done for all nodes",
                json!({"capacity": {"storage": "2Gi"}}),
                "ReadWriteMany",
                Some(NOT_REQUIRED_ANNOTATION),
            ),
        ];
        let lines = rows.iter().map(|(name, status, mode, annotation)| {
            let claim = claim(status, mode, *annotation);
            format!("{name}: {:?}", next(&claim, &size(&claim)))
        });
        insta::assert_snapshot!(lines.collect::<Vec<_>>().join("\n"), @r#"
        older controller: Expand { size: "2Gi", is_shown: false, is_tracked: false }
        pending: Expand { size: "3Gi", is_shown: false, is_tracked: true }
        infeasible: Wait
        controller at work: Wait
        done: Nothing
        done on another node: Expand { size: "2Gi", is_shown: true, is_tracked: false }
        done for all nodes: Nothing
        "#);
    }

    #[test]
    fn failed_expansion_is_given_up_once_the_claim_wants_another_size() {
        let failed = json!({"conditions": [{"type": NODE_RESIZE_ERROR, "status": "True"}]});
        for (status, asked, expected) in
            [(&failed, "5Gi", true), (&failed, "9Gi", false), (&failed, "9216Mi", false), (&json!({}), "5Gi", false)]
        {
            let mut claim = claim(status, "ReadWriteOnce", None);
            let resources = json!({"requests": {"storage": asked}});
            claim.spec.as_mut().unwrap().resources = serde_json::from_value(resources).unwrap();
            assert_eq!(is_given_up(&claim, "9Gi"), expected, "{asked} {status}");
        }
    }

    #[test]
    fn claim_shows_how_far_the_expansion_is() {
        let status = json!({"capacity": {"storage": "1Gi"}, "allocatedResourceStatuses": {"storage": RESIZE_PENDING}});
        let pending = claim(&status, "ReadWriteOnce", None);
        let begun = json!({"allocatedResourceStatuses": {"storage": RESIZE_IN_PROGRESS}});
        assert_eq!(in_progress_patch(&claim(&begun, "ReadWriteOnce", None)), None);
        let lines = [
            in_progress_patch(&pending).expect("it is pending").to_string(),
            finished_patch(&pending, "2Gi").to_string(),
            failed_patch("no", true, "2026-01-01T00:00:00Z").to_string(),
            failed_patch("no", false, "2026-01-01T00:00:00Z").to_string(),
        ];
        insta::assert_snapshot!(lines.join("\n"), @r#"
        {"metadata":{"resourceVersion":"7"},"status":{"allocatedResourceStatuses":{"storage":"NodeResizeInProgress"}}}
        {"metadata":{"resourceVersion":"7"},"status":{"allocatedResourceStatuses":{"storage":null},"capacity":{"storage":"2Gi"},"conditions":[{"$patch":"delete","type":"FileSystemResizePending"},{"$patch":"delete","type":"Resizing"},{"$patch":"delete","type":"ControllerResizeError"},{"$patch":"delete","type":"NodeResizeError"}]}}
        {"status":{"allocatedResourceStatuses":{"storage":"NodeResizeInfeasible"},"conditions":[{"lastTransitionTime":"2026-01-01T00:00:00Z","message":"failed to expand pvc with no","status":"True","type":"NodeResizeError"}]}}
        {"status":{"conditions":[{"lastTransitionTime":"2026-01-01T00:00:00Z","message":"failed to expand pvc with no","status":"True","type":"NodeResizeError"}]}}
        "#);
    }
}
