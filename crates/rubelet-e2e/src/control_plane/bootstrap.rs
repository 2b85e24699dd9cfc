//! The setup for nodes that join with a token: the token, and kubeadm's three bindings.

use serde_json::{Value, json};

/// `id.secret`. Valid for this control plane only, which listens on the loopback interface and is temporary.
pub const TOKEN: &str = "abcdef.0123456789abcdef";

const GROUP: &str = "system:bootstrappers:kubeadm:default-node-token";
/// Cluster roles whose signing requests are approved automatically.
const APPROVE_FIRST: &str = "system:certificates.k8s.io:certificatesigningrequests:nodeclient";
const APPROVE_RENEWAL: &str = "system:certificates.k8s.io:certificatesigningrequests:selfnodeclient";

pub fn objects() -> Value {
    let (id, secret) = TOKEN.split_once('.').expect("a token has two parts");
    json!({
        "apiVersion": "v1",
        "kind": "List",
        "items": [
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "type": "bootstrap.kubernetes.io/token",
                "metadata": { "name": format!("bootstrap-token-{id}"), "namespace": "kube-system" },
                "stringData": {
                    "token-id": id,
                    "token-secret": secret,
                    "usage-bootstrap-authentication": "true",
                    "usage-bootstrap-signing": "true",
                    "auth-extra-groups": GROUP,
                },
            },
            binding("kubeadm:kubelet-bootstrap", "system:node-bootstrapper", GROUP),
            binding("kubeadm:node-autoapprove-bootstrap", APPROVE_FIRST, GROUP),
            binding("kubeadm:node-autoapprove-certificate-rotation", APPROVE_RENEWAL, "system:nodes"),
        ],
    })
}

/// Gives a cluster role to a group.
pub fn binding(name: &str, role: &str, group: &str) -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": { "name": name },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role },
        "subjects": [{ "apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": group }],
    })
}
