//! From a manifest to a static pod: decoding, defaults, identity, validation.
//!
//! Owns: valid manifests, and the pods made from them. Never: reads files, parses YAML, keeps state.
//! Upstream: `config/common.go`, and of the API server `apis/core/v1/defaults.go`, `apis/core/validation`.

mod decode;
mod defaults;
pub mod field;
mod go_dump;
mod go_quantity;
mod identity;
mod internal;
mod pattern;
mod pod_level;
mod references;
mod unsupported;
mod validate;

use std::{fmt, sync::Arc};

use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;

use field::{FieldError, Path};
pub use identity::{HASH_ANNOTATION, SOURCE_ANNOTATION};
pub use unsupported::unsupported;

/// Where a manifest was read. It is part of the pod's identity: the same text in another file is another pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    File(String),
    Url(String),
}

/// The pods of one manifest, ready to run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Manifest {
    pub pods: Vec<Arc<Pod>>,
    pub warnings: Vec<Warning>,
}

/// Something in a manifest that is ignored; the pod runs all the same.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Warning {
    /// `spec.containers[0].comand`.
    pub field: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unknown field \"{}\"", self.field)
    }
}

/// Why a manifest is invalid: all errors, not only the first.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid pod: [{}]", problems.iter().map(FieldError::to_string).collect::<Vec<_>>().join(", "))]
pub struct ManifestError {
    pub problems: Vec<FieldError>,
}

/// Applies the API server's defaults.
pub fn set_defaults(pod: &mut Pod) {
    defaults::apply(pod);
}

/// Decodes a v1 Pod, or from a URL a v1 PodList, and makes its pods ready to run on this node.
///
/// One invalid pod rejects the whole list, as upstream: half a list would look like a removal of the rest.
pub fn decode(value: Value, origin: &Origin, node_name: &str) -> Result<Manifest, ManifestError> {
    let mut manifest = Manifest::default();
    let mut problems = Vec::new();
    for (path, value) in decode::split(value, origin).map_err(|problem| ManifestError { problems: vec![problem] })? {
        match static_pod(value, &path, origin, node_name) {
            Ok((pod, warnings)) => {
                manifest.pods.push(Arc::new(pod));
                manifest.warnings.extend(warnings);
            }
            Err(found) => problems.extend(found),
        }
    }
    if problems.is_empty() { Ok(manifest) } else { Err(ManifestError { problems }) }
}

fn static_pod(
    value: Value,
    path: &Path,
    origin: &Origin,
    node_name: &str,
) -> Result<(Pod, Vec<Warning>), Vec<FieldError>> {
    let (mut pod, warnings) = decode::pod(value, path)?;
    if pod.metadata.name.as_deref().unwrap_or_default().is_empty() {
        let name = path.child("metadata").child("name");
        return Err(vec![FieldError::required(&name, "name is needed for the pod")]);
    }
    let sums = defaults::apply(&mut pod);
    internal::convert(&mut pod);
    let uid = identity::uid(&pod, &sums, origin, node_name);
    identity::apply(&mut pod, uid, origin, node_name);
    let mut problems = validate::pod(&pod, path);
    problems.extend(references::problems(&decode::encoded(&pod), path));
    if problems.is_empty() { Ok((pod, warnings)) } else { Err(problems) }
}
