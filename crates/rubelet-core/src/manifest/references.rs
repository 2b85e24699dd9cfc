//! A static pod may not refer to API objects: it must run without an API server.
//!
//! Upstream: `HasAPIObjectReference` in `pkg/api/pod/util.go`, under gate PreventStaticPodAPIReferences.

use serde_json::Value;

use super::{
    field::{FieldError, Path},
    pattern,
};

/// Field, and the object's name in upstream's message.
const REFERENCES: &[(&str, &str)] = &[
    ("spec.serviceAccountName", "serviceaccounts"),
    ("spec.serviceAccount", "serviceaccounts"),
    ("spec.imagePullSecrets[*]", "secrets"),
    ("spec.<containers>[*].env[*].valueFrom.secretKeyRef", "secrets"),
    ("spec.<containers>[*].envFrom[*].secretRef", "secrets"),
    ("spec.<containers>[*].env[*].valueFrom.configMapKeyRef", "configmaps"),
    ("spec.<containers>[*].envFrom[*].configMapRef", "configmaps"),
    ("spec.resourceClaims[*]", "resourceclaims"),
    ("spec.volumes[*].configMap", "configmaps (via configmap volumes)"),
    ("spec.volumes[*].secret", "secrets (via secret volumes)"),
    ("spec.volumes[*].csi", "csidrivers (via CSI volumes)"),
    ("spec.volumes[*].glusterfs", "endpoints (via glusterFS volumes)"),
    ("spec.volumes[*].persistentVolumeClaim", "persistentvolumeclaims"),
    ("spec.volumes[*].ephemeral", "persistentvolumeclaims (via ephemeral volumes)"),
    ("spec.volumes[*].azureFile", "secrets (via azureFile volumes)"),
    ("spec.volumes[*].cephfs.secretRef", "secrets"),
    ("spec.volumes[*].cinder.secretRef", "secrets"),
    ("spec.volumes[*].flexVolume.secretRef", "secrets"),
    ("spec.volumes[*].iscsi.secretRef", "secrets"),
    ("spec.volumes[*].rbd.secretRef", "secrets"),
    ("spec.volumes[*].scaleIO.secretRef", "secrets"),
    ("spec.volumes[*].storageos.secretRef", "secrets"),
    ("spec.volumes[*].projected.sources[*].configMap", "configmaps (via projected volumes)"),
    ("spec.volumes[*].projected.sources[*].secret", "secrets (via projected volumes)"),
    ("spec.volumes[*].projected.sources[*].serviceAccountToken", "serviceaccounts (via projected volumes)"),
    ("spec.volumes[*].projected.sources[*].clusterTrustBundle", "clustertrustbundles"),
    ("spec.volumes[*].projected.sources[*].podCertificate", "podcertificates"),
];

/// `pod` as data, `path` in front of the fields' own.
pub(super) fn problems(pod: &Value, path: &Path) -> Vec<FieldError> {
    let mut problems = Vec::new();
    for (field, objects) in REFERENCES {
        for found in pattern::used(pod, field) {
            let why = format!("static pods may not reference {objects}");
            problems.push(FieldError::forbidden(&path.child(&found.to_string()), &why));
        }
    }
    problems
}
