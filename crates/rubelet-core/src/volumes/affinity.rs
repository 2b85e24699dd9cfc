//! Whether a persistent volume's node affinity matches this node.
//!
//! Owns: the match of its node affinity with the node's labels, and upstream's words.
//! Upstream: `checkNodeAffinity` of the operation executor.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::PersistentVolume;

use crate::admission::affinity::any_term_holds;

/// `labels` are the node's, `None` before its object is known. A field of the node matches nothing, as upstream.
pub fn check(volume: &PersistentVolume, labels: Option<&BTreeMap<String, String>>) -> Result<(), String> {
    let affinity = volume.spec.as_ref().and_then(|spec| spec.node_affinity.as_ref());
    let Some(required) = affinity.and_then(|affinity| affinity.required.as_ref()) else { return Ok(()) };
    let why = match labels {
        Some(labels) if any_term_holds(&required.node_selector_terms, labels, "") => return Ok(()),
        Some(_) => "no matching NodeSelectorTerms",
        None => "the labels of the node are not known yet",
    };
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    Err(format!("MountVolume.NodeAffinity check failed for volume {name:?} : {why}"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn volume_of_another_node_is_refused() {
        let refused = |why: &str| Err(format!("MountVolume.NodeAffinity check failed for volume \"pv\" : {why}"));
        let labels = BTreeMap::from([("host".to_owned(), "a".to_owned())]);
        let at = |host: &str| json!([{"matchExpressions": [{"key": "host", "operator": "In", "values": [host]}]}]);
        let either = json!([at("b")[0], at("a")[0]]);
        let field = json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node"]}]}]);
        let check = |terms: Value, labels: Option<&BTreeMap<String, String>>| {
            let spec = json!({"nodeAffinity": {"required": {"nodeSelectorTerms": terms}}});
            let volume = json!({"metadata": {"name": "pv"}, "spec": spec});
            check(&serde_json::from_value(volume).unwrap(), labels)
        };
        for (terms, expected) in [
            (at("a"), Ok(())),
            (either, Ok(())),
            (at("b"), refused("no matching NodeSelectorTerms")),
            (json!([]), refused("no matching NodeSelectorTerms")),
            (field, refused("no matching NodeSelectorTerms")),
        ] {
            assert_eq!(check(terms.clone(), Some(&labels)), expected, "{terms}");
        }
        assert_eq!(check(at("a"), None), refused("the labels of the node are not known yet"));
        assert_eq!(super::check(&PersistentVolume::default(), None), Ok(()));
    }
}
