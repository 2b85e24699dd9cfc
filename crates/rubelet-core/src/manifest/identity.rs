//! The identity of a static pod: UID, name, and source annotations.
//!
//! Owns: what makes two manifests the same pod. Never: the time (`pod_config.rs` writes `config.seen`).
//! Upstream: `applyDefaults`, `generatePodName` in `config/common.go`.

use std::fmt::Write;

use k8s_openapi::api::core::v1::{Pod, PodStatus, Toleration};

use super::{Origin, go_dump, internal, pod_level::Sums};
use crate::{event::Source, fnv::Fnv128};

/// The source of the pod: `file`, `http` or `api`.
pub const SOURCE_ANNOTATION: &str = "kubernetes.io/config.source";
/// The static pod's UID; it changes with the manifest.
pub const HASH_ANNOTATION: &str = "kubernetes.io/config.hash";

/// The manifest's own UID, or upstream's hash of the defaulted pod, the node and the origin.
pub(super) fn uid(pod: &Pod, sums: &Sums, origin: &Origin, node_name: &str) -> String {
    if let Some(uid) = pod.metadata.uid.as_ref().filter(|uid| !uid.is_empty()) {
        return uid.clone();
    }
    let mut hash = Fnv128::default();
    go_dump::pod(&internal::encoded(pod, sums), &mut hash)
        .and_then(|()| match origin {
            Origin::File(path) => write!(hash, "host:{node_name}file:{path}"),
            Origin::Url(url) => write!(hash, "url:{url}"),
        })
        .expect("hashing does not fail");
    hash.hex()
}

/// Names the pod for this node and annotates it as static.
pub(super) fn apply(pod: &mut Pod, uid: String, origin: &Origin, node_name: &str) {
    let metadata = &mut pod.metadata;
    let name = metadata.name.take().unwrap_or_default();
    metadata.name = Some(format!("{name}-{}", node_name.to_lowercase()));
    if metadata.namespace.as_deref().unwrap_or_default().is_empty() {
        metadata.namespace = Some("default".to_owned());
    }
    let source = match origin {
        Origin::File(_) => Source::File,
        Origin::Url(_) => Source::Http,
    };
    let annotations = metadata.annotations.get_or_insert_default();
    annotations.insert(HASH_ANNOTATION.to_owned(), uid.clone());
    annotations.insert(SOURCE_ANNOTATION.to_owned(), source.as_str().to_owned());
    metadata.uid = Some(uid);

    let spec = pod.spec.get_or_insert_default();
    spec.node_name = Some(node_name.to_owned());
    if source == Source::File {
        tolerate_every_eviction(spec.tolerations.get_or_insert_default());
    }
    // A status in a manifest does not describe a pod that has not run.
    pod.status = Some(PodStatus { phase: Some("Pending".to_owned()), ..PodStatus::default() });
}

/// A pod from a file is not evicted: it cannot be moved to another node.
fn tolerate_every_eviction(tolerations: &mut Vec<Toleration>) {
    let all = Toleration {
        operator: Some("Exists".to_owned()),
        effect: Some("NoExecute".to_owned()),
        ..Toleration::default()
    };
    let is_same = |known: &&mut Toleration| {
        let unset = |text: &Option<String>| text.as_deref().unwrap_or_default().is_empty();
        unset(&known.key) && unset(&known.value) && known.operator == all.operator && known.effect == all.effect
    };
    match tolerations.iter_mut().find(is_same) {
        Some(known) => *known = all,
        None => tolerations.push(all),
    }
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;
    use serde_json::json;

    use super::{
        super::{Manifest, defaults, field::Path},
        *,
    };
    use serde_json::Value;

    fn file(path: &str) -> Origin {
        Origin::File(path.to_owned())
    }

    fn web() -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": { "name": "web", "labels": { "app": "web" } },
            "spec": { "containers": [{ "name": "nginx", "image": "nginx:1.25" }] },
        })
    }

    fn decoded(value: Value, origin: &Origin, node: &str) -> Pod {
        let Manifest { pods, .. } = super::super::decode(value, origin, node).unwrap();
        Pod::clone(&pods[0])
    }

    fn uid_of(value: Value, origin: &Origin, node: &str) -> String {
        decoded(value, origin, node).metadata.uid.unwrap()
    }

    #[test]
    fn a_static_pod_is_named_after_its_node_and_marked() {
        let pod = decoded(web(), &file("/etc/kubernetes/manifests/web.yaml"), "Node-1");
        let spec = pod.spec.unwrap();
        let found = json!({
            "metadata": pod.metadata,
            "nodeName": spec.node_name,
            "tolerations": spec.tolerations,
            "status": pod.status,
        });
        // The UID is upstream's.
        assert_snapshot!(serde_json::to_string_pretty(&found).unwrap(), @r#"
        {
          "metadata": {
            "annotations": {
              "kubernetes.io/config.hash": "7175b97b5aae028a735a0ae0f54616b4",
              "kubernetes.io/config.source": "file"
            },
            "labels": {
              "app": "web"
            },
            "name": "web-node-1",
            "namespace": "default",
            "uid": "7175b97b5aae028a735a0ae0f54616b4"
          },
          "nodeName": "Node-1",
          "status": {
            "phase": "Pending"
          },
          "tolerations": [
            {
              "effect": "NoExecute",
              "operator": "Exists"
            }
          ]
        }
        "#);
    }

    #[test]
    fn uid_depends_only_on_the_pod_definition() {
        let origin = file("/m/web.yaml");
        let uid = uid_of(web(), &origin, "n1");
        assert_eq!(uid.len(), 32);
        assert_eq!(uid, uid_of(web(), &origin, "n1"));

        let mut edited = web();
        edited["spec"]["containers"][0]["image"] = json!("nginx:1.26");
        let mut relabelled = web();
        relabelled["metadata"]["labels"]["app"] = json!("other");
        let mut with_nulls = web();
        with_nulls["status"] = json!({});
        with_nulls["metadata"]["creationTimestamp"] = json!(null);
        with_nulls["spec"]["nodeSelector"] = json!(null);
        with_nulls["spec"]["restartPolicy"] = json!("Always");

        assert_eq!(uid, uid_of(with_nulls, &origin, "n1"));
        for other in [
            uid_of(edited, &origin, "n1"),
            uid_of(relabelled, &origin, "n1"),
            uid_of(web(), &origin, "n2"),
            uid_of(web(), &file("/m/web2.yaml"), "n1"),
            uid_of(web(), &Origin::Url("http://m/web.yaml".into()), "n1"),
        ] {
            assert_ne!(uid, other);
        }
    }

    /// Manifests that together set every field of a pod, kubeadm's among them, with upstream's UIDs.
    /// `testbed/go/kubernetes/static-pods` made them.
    const ANSWERS: &str = include_str!("../../testdata/static_pods.jsonl");

    #[test]
    fn uids_are_those_of_upstream() {
        let mut different = Vec::new();
        for line in ANSWERS.lines() {
            let answer: Value = serde_json::from_str(line).unwrap();
            let origin = match answer["url"].as_str() {
                Some(url) => Origin::Url(url.to_owned()),
                None => file(answer["file"].as_str().unwrap()),
            };
            let (mut pod, _) = super::super::decode::pod(answer["manifest"].clone(), &Path::root()).unwrap();
            let sums = defaults::apply(&mut pod);
            internal::convert(&mut pod);
            if uid(&pod, &sums, &origin, answer["node"].as_str().unwrap()) != answer["uid"] {
                different.push(answer["name"].to_string());
            }
        }
        assert_eq!(different.join(" "), "");
    }

    #[test]
    fn a_manifests_own_uid_is_kept_and_becomes_the_hash() {
        let mut own = web();
        own["metadata"]["uid"] = json!("11111111-2222-3333-4444-555555555555");
        let pod = decoded(own, &file("/m/web.yaml"), "n1");
        assert_eq!(pod.metadata.uid.as_deref(), Some("11111111-2222-3333-4444-555555555555"));
        assert_eq!(pod.metadata.annotations.unwrap()[HASH_ANNOTATION], "11111111-2222-3333-4444-555555555555");
    }

    #[test]
    fn the_toleration_is_added_once_and_only_to_pods_from_files() {
        let mut tolerant = web();
        tolerant["spec"]["tolerations"] =
            json!([{ "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5 }]);
        let pod = decoded(tolerant, &file("/m/web.yaml"), "n1");
        let tolerations = pod.spec.unwrap().tolerations.unwrap();
        assert_eq!(tolerations.len(), 1);
        assert_eq!(tolerations[0].toleration_seconds, None);
        assert_eq!(decoded(web(), &Origin::Url("http://m".into()), "n1").spec.unwrap().tolerations, None);
    }
}
