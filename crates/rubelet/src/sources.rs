//! The sources of pods: a directory of manifests, a URL, the API server.
//!
//! Owns: reading, and reporting what was wrong with the input. Never: validates a pod (`rubelet_core::manifest`),
//! computes changes (`rubelet_core::pod_config`).
//! Upstream: `config/file.go`, `config/http.go`, `config/apiserver.go`.

pub mod api;
pub mod file;
pub mod http;

use rubelet_core::{
    effect::{EventRecord, InvolvedObject, Severity},
    event_reasons,
    manifest::{self, Manifest, Origin},
};

use crate::{
    world::World,
    yaml::{self, DuplicateKeys},
};

/// Upstream's size limit for a manifest file or response.
const MAX_MANIFEST_BYTES: u64 = 10 << 20;

/// The result of decoding one manifest: pods or the error, and warnings that do not stop the pods.
#[derive(Debug)]
pub(crate) struct Reading {
    pub(crate) pods: Result<Vec<std::sync::Arc<k8s_openapi::api::core::v1::Pod>>, String>,
    remarks: Vec<String>,
}

pub(crate) fn read_manifest(text: &[u8], origin: &Origin, node_name: &str) -> Reading {
    let document = match yaml::parse(text, DuplicateKeys::Refuse) {
        Ok(document) => document,
        Err(error) => return Reading { pods: Err(error.to_string()), remarks: Vec::new() },
    };
    let mut remarks = Vec::new();
    if document.ignored_documents > 0 {
        // Upstream also reads only the first document, without a warning.
        remarks.push(format!(
            "only the first document is used, {} more are ignored: one pod per manifest",
            document.ignored_documents
        ));
    }
    match manifest::decode(document.value, origin, node_name) {
        Ok(Manifest { pods, warnings }) => {
            remarks.extend(warnings.iter().map(ToString::to_string));
            Reading { pods: Ok(pods), remarks }
        }
        Err(refusal) => Reading { pods: Err(refusal.to_string()), remarks },
    }
}

/// A manifest that defines no valid pod.
fn refuse(world: &World, manifest: &str, problem: &str) {
    record(world, manifest, event_reasons::FAILED_VALIDATION, problem);
}

/// A manifest whose pods run although one of its fields is ignored.
fn remark(world: &World, manifest: &str, remark: &str) {
    record(world, manifest, event_reasons::IGNORED_FIELD, remark);
}

fn record(world: &World, manifest: &str, reason: &str, message: &str) {
    let record =
        EventRecord::new(InvolvedObject::Manifest(manifest.to_owned()), Severity::Warning, reason, message.to_owned());
    world.events.record(record, world.clock.now().wall);
}
