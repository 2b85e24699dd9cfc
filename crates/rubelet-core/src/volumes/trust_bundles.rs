//! Projected trust anchors of ClusterTrustBundles.
//!
//! Owns: which bundles a source selects, and the file of their certificates: each once, without anything but certificates.
//! Upstream: `pkg/kubelet/clustertrustbundle`.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::{
    ByteString, api::core::v1::ClusterTrustBundleProjection, apimachinery::pkg::apis::meta::v1::LabelSelector,
};
use serde_json::Value;

use crate::{
    container::ConfigError,
    fnv::fnv32a,
    id::PodUid,
    objects::{Object, ObjectError, ObjectErrorKind, ObjectKey, ObjectKind, Objects, Presence, TrustBundle},
};

const BEGIN: &str = "-----BEGIN ";
const END: &str = "-----END ";
const DASHES: &str = "-----";
/// As Go writes them.
const LINE_CHARS: usize = 64;

#[derive(Clone, Debug, PartialEq)]
pub struct TrustBundleSource {
    /// `None`: the source names neither a bundle nor a signer.
    pub key: Option<ObjectKey>,
    /// Among a signer's bundles. `None` matches none, as upstream.
    selector: Option<LabelSelector>,
    presence: Presence,
    pub path: String,
}

impl TrustBundleSource {
    pub fn of(source: &ClusterTrustBundleProjection) -> Self {
        let named = source.name.as_deref().map(ObjectKey::cluster_trust_bundle);
        TrustBundleSource {
            key: named.or_else(|| source.signer_name.as_deref().map(ObjectKey::trust_bundles_of_signer)),
            selector: source.label_selector.clone(),
            presence: source.optional.into(),
            path: source.path.clone(),
        }
    }

    /// The content of the file, or upstream's error.
    pub fn content(&self, objects: &Objects, uid: &PodUid) -> Result<Vec<u8>, ConfigError> {
        let Some(key) = &self.key else {
            let why = "ClusterTrustBundle projection requires either name or signerName to be set";
            return Err(ConfigError(why.to_owned()));
        };
        let found = objects.find(key, self.presence).map_err(|error| ConfigError(in_words(error)))?;
        let Some(Object::TrustBundles(bundles)) = found else { return Ok(Vec::new()) };
        let is_named = key.kind == ObjectKind::ClusterTrustBundle;
        let selected: Vec<_> = bundles.values().filter(|bundle| is_named || self.selects(bundle)).collect();
        if selected.is_empty() && self.presence == Presence::Required {
            let why = "combination of signerName and labelSelector matched zero ClusterTrustBundles";
            return Err(ConfigError(why.to_owned()));
        }
        Ok(normalized(selected.into_iter().map(|bundle| bundle.pem.as_str()), uid).into_bytes())
    }

    fn selects(&self, bundle: &TrustBundle) -> bool {
        let Some(selector) = &self.selector else { return false };
        let value = |key: &str| bundle.labels.get(key);
        let wanted = selector.match_labels.iter().flatten();
        let requirements = selector.match_expressions.iter().flatten();
        wanted.into_iter().all(|(key, wanted)| value(key) == Some(wanted))
            && requirements.into_iter().all(|requirement| {
                let (found, values) = (value(&requirement.key), requirement.values.as_deref().unwrap_or_default());
                match requirement.operator.as_str() {
                    "In" => found.is_some_and(|found| values.contains(found)),
                    "NotIn" => found.is_none_or(|found| !values.contains(found)),
                    "Exists" => found.is_some(),
                    "DoesNotExist" => found.is_none(),
                    // The API has no other.
                    _ => false,
                }
            })
    }
}

fn in_words(error: ObjectError) -> String {
    match error.kind {
        ObjectErrorKind::NotFound => format!("while getting ClusterTrustBundle: {}", error.message),
        ObjectErrorKind::Unreadable => error.message,
    }
}

/// Each certificate once. The order means nothing, so each pod has another one, which stays: upstream's is another one after
/// every restart of the agent.
fn normalized<'a>(bundles: impl Iterator<Item = &'a str>, uid: &PodUid) -> String {
    let certificates: BTreeSet<String> = bundles.flat_map(blocks).collect();
    let mut ordered: Vec<_> = certificates.into_iter().collect();
    ordered.sort_by_key(|certificate| fnv32a(format!("{uid}/{certificate}").as_bytes()));
    written(ordered)
}

/// The certificates of a chain in their order, without what is between them.
pub(super) fn certificates(chain: &str) -> String {
    written(blocks(chain))
}

/// As Go writes PEM.
fn written(certificates: Vec<String>) -> String {
    let mut text = String::new();
    for certificate in certificates {
        text += "-----BEGIN CERTIFICATE-----\n";
        for line in certificate.as_bytes().chunks(LINE_CHARS) {
            text.push_str(&String::from_utf8_lossy(line));
            text.push('\n');
        }
        text += "-----END CERTIFICATE-----\n";
    }
    text
}

/// The content of each PEM block, in base64 without line ends.
fn blocks(bundle: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut open: Option<String> = None;
    for line in bundle.lines().map(str::trim_end) {
        if line.starts_with(BEGIN) && line.ends_with(DASHES) {
            open = Some(String::new());
        } else if line.starts_with(END) {
            found.extend(open.take().and_then(|content| canonical(&content)));
        } else if let Some(content) = &mut open
            // A header; the API server accepts none.
            && !line.contains(':')
        {
            content.extend(line.split_whitespace());
        }
    }
    found
}

/// `None` if it is no base64.
fn canonical(base64: &str) -> Option<String> {
    let bytes: ByteString = serde_json::from_value(Value::String(base64.to_owned())).ok()?;
    match serde_json::to_value(bytes).ok()? {
        Value::String(text) => Some(text),
        _ => None,
    }
}

/// From the body of a response or a watch event: the bundle and its name.
pub fn read(body: &[u8]) -> Result<(String, TrustBundle), serde_json::Error> {
    #[derive(serde::Deserialize)]
    struct Bundle {
        metadata: Metadata,
        spec: Spec,
    }
    #[derive(serde::Deserialize)]
    struct Metadata {
        name: String,
        #[serde(default)]
        labels: BTreeMap<String, String>,
    }
    #[derive(serde::Deserialize)]
    struct Spec {
        #[serde(rename = "trustBundle")]
        trust_bundle: String,
    }
    let Bundle { metadata, spec } = serde_json::from_slice(body)?;
    Ok((metadata.name, TrustBundle { labels: metadata.labels, pem: spec.trust_bundle }))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;

    fn pem(content: &str) -> String {
        format!("-----BEGIN CERTIFICATE-----\n{content}\n-----END CERTIFICATE-----\n")
    }

    fn bundle(labels: &[(&str, &str)], pem: &str) -> TrustBundle {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        TrustBundle { labels, pem: pem.to_owned() }
    }

    /// Three bundles of a signer, and one by its name.
    fn gathered() -> Objects {
        let one = bundle(&[], &format!("text\n{}{}", pem("AA=="), pem("AA==")));
        let of_signer = BTreeMap::from([
            ("s:a".to_owned(), bundle(&[("env", "prod")], &pem("AA=="))),
            ("s:b".to_owned(), bundle(&[("env", "test")], &pem("AQ==").replace("Q=", "Q\n="))),
            ("s:c".to_owned(), bundle(&[], &format!("{}{}", pem("AA=="), pem("not base64!")))),
        ]);
        let none = ObjectKey::cluster_trust_bundle("none");
        let missing = none.not_found();
        let found = |bundles| Ok(Arc::new(Object::TrustBundles(bundles)));
        Objects(BTreeMap::from([
            (ObjectKey::cluster_trust_bundle("one"), found(BTreeMap::from([("one".to_owned(), one)]))),
            (ObjectKey::trust_bundles_of_signer("s"), found(of_signer)),
            (ObjectKey::trust_bundles_of_signer("empty"), found(BTreeMap::new())),
            (none, Err(missing)),
        ]))
    }

    fn content(source: &serde_json::Value) -> String {
        let mut source = source.clone();
        source["path"] = json!("t");
        let source = TrustBundleSource::of(&serde_json::from_value(source).unwrap());
        match source.content(&gathered(), &PodUid::new("u")) {
            Ok(content) => String::from_utf8(content)
                .unwrap()
                .replace("-----BEGIN CERTIFICATE-----\n", "")
                .replace("\n-----END CERTIFICATE-----\n", " "),
            Err(error) => format!("error: {error}"),
        }
    }

    #[test]
    fn certificates_of_selected_bundles_are_written_once() {
        let signer = |selector: serde_json::Value| json!({"signerName": "s", "labelSelector": selector});
        let expression = |operator: &str, values: &[&str]| {
            signer(json!({"matchExpressions": [{"key": "env", "operator": operator, "values": values}]}))
        };
        let zero = "error: combination of signerName and labelSelector matched zero ClusterTrustBundles";
        for (source, expected) in [
            (json!({"name": "one"}), "AA== "),
            (json!({"name": "none", "optional": true}), ""),
            (
                json!({"name": "none"}),
                "error: while getting ClusterTrustBundle: clustertrustbundle.certificates.k8s.io \"none\" not found",
            ),
            (signer(json!({"matchLabels": {"env": "prod"}})), "AA== "),
            (signer(json!({"matchLabels": {"env": "none"}})), zero),
            (json!({"signerName": "s"}), zero),
            (json!({"signerName": "s", "optional": true}), ""),
            (json!({"signerName": "empty", "labelSelector": {}}), zero),
            (expression("In", &["test", "prod"]), "both"),
            (expression("NotIn", &["prod"]), "both"),
            (expression("Exists", &[]), "both"),
            (expression("DoesNotExist", &[]), "AA== "),
            (json!({}), "error: ClusterTrustBundle projection requires either name or signerName to be set"),
        ] {
            let found = content(&source);
            if expected == "both" {
                let mut certificates: Vec<_> = found.split_whitespace().collect();
                certificates.sort_unstable();
                assert_eq!(certificates, ["AA==", "AQ=="], "{source}");
            } else {
                assert_eq!(found, expected, "{source}");
            }
        }
    }

    #[test]
    fn certificates_have_lines_as_go_writes_them() {
        let long = "A".repeat(100);
        let text = normalized([pem(&long).as_str()].into_iter(), &PodUid::new("u"));
        let expected = format!("{}\n{}", "A".repeat(64), "A".repeat(36));
        assert_eq!(text, pem(&expected));
    }
}
