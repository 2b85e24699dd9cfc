//! The node's lease, its heartbeat.
//!
//! Owns: its content. Never: sends it.
//! Upstream: `newLease` of the lease controller, `SetNodeOwnerFunc`.

use jiff::Timestamp;
use k8s_openapi::{
    api::coordination::v1::Lease,
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference},
};

pub const NAMESPACE: &str = "kube-node-lease";

/// The renewed lease: a new one, or the known one with our fields updated. The Node object owns it, so that both are deleted
/// together.
pub fn renewed(known: Option<&Lease>, node: &str, node_uid: Option<&str>, duration_secs: i32, at: Timestamp) -> Lease {
    let mut lease = known.cloned().unwrap_or_else(|| Lease {
        metadata: ObjectMeta {
            name: Some(node.to_owned()),
            namespace: Some(NAMESPACE.to_owned()),
            ..ObjectMeta::default()
        },
        ..Lease::default()
    });
    let spec = lease.spec.get_or_insert_default();
    spec.holder_identity = Some(node.to_owned());
    spec.lease_duration_seconds = Some(duration_secs);
    spec.renew_time = Some(MicroTime(at));
    let owners = lease.metadata.owner_references.get_or_insert_default();
    if let Some(uid) = node_uid.filter(|_| owners.is_empty()) {
        owners.push(OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Node".to_owned(),
            name: node.to_owned(),
            uid: uid.to_owned(),
            ..OwnerReference::default()
        });
    }
    lease
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at() -> Timestamp {
        "2026-06-01T12:00:00.5Z".parse().unwrap()
    }

    #[test]
    fn a_new_lease_belongs_to_the_node() {
        let lease = renewed(None, "n", Some("uid-1"), 40, at());
        insta::assert_snapshot!(serde_json::to_string(&lease).unwrap(), @r#"{"apiVersion":"coordination.k8s.io/v1","kind":"Lease","metadata":{"name":"n","namespace":"kube-node-lease","ownerReferences":[{"apiVersion":"v1","kind":"Node","name":"n","uid":"uid-1"}]},"spec":{"holderIdentity":"n","leaseDurationSeconds":40,"renewTime":"2026-06-01T12:00:00.500000Z"}}"#);
    }

    #[test]
    fn renewed_lease_keeps_owner_and_version() {
        let mut known = renewed(None, "n", Some("uid-1"), 20, at());
        known.metadata.resource_version = Some("7".to_owned());
        known.spec.get_or_insert_default().holder_identity = Some("somebody".to_owned());
        let lease = renewed(Some(&known), "n", Some("uid-2"), 40, at());
        let spec = lease.spec.unwrap();
        assert_eq!(lease.metadata, known.metadata);
        assert_eq!((spec.holder_identity.as_deref(), spec.lease_duration_seconds), (Some("n"), Some(40)));
    }
}
