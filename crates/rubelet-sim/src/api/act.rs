//! The actions of the fake API server, with the real one's semantics.
//!
//! Owns: creation, updates, patches, graceful deletion of pods, preconditions. Each happens completely or not at all.
//! Upstream: `registry/core/pod/strategy.go` (CheckGracefulDelete), `registry/rest/delete.go` (BeforeDelete).

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use rubelet_kube::port::{ApiError, ApiErrorKind, ObjectPath, PatchKind, Verb};
use serde_json::{Value, json};

use crate::{
    api::{
        merge,
        store::{Key, Selection},
    },
    simulation::SimState,
};

/// The metadata that no writer may change.
const FIXED: [&str; 8] = [
    "name",
    "namespace",
    "uid",
    "creationTimestamp",
    "resourceVersion",
    "generation",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
];

#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub verb: Verb,
    pub path: ObjectPath,
    pub query: Vec<(&'static str, String)>,
    pub body: Value,
}

impl Request {
    pub(crate) fn error(&self, kind: ApiErrorKind, what: &str) -> ApiError {
        ApiError::new(kind, format!("{self}: {what}"))
    }

    pub(crate) fn is_change(&self) -> bool {
        self.verb != Verb::Get
    }

    /// The object of the request; a collection has no name.
    pub(crate) fn key(&self) -> Key {
        let name = self.path.name.as_deref().or_else(|| self.body.pointer("/metadata/name").and_then(Value::as_str));
        Key::of(&self.path, name.unwrap_or_default())
    }

    pub(crate) fn is_of(&self, resource: &str) -> bool {
        self.path.resource == resource
    }

    pub(crate) fn option(&self, name: &str) -> Option<&str> {
        self.query.iter().find(|(known, _)| *known == name).map(|(_, value)| value.as_str())
    }

    /// A watch with `sendInitialEvents`.
    pub(crate) fn is_streamed_list(&self) -> bool {
        self.option("sendInitialEvents") == Some("true")
    }

    /// It requests the current objects only, without a watch.
    pub(crate) fn is_list(&self) -> bool {
        self.verb == Verb::Get
            && self.path.name.is_none()
            && (self.option("watch").is_none() || self.is_streamed_list())
    }

    /// The requested version.
    pub(crate) fn version(&self) -> Option<u64> {
        self.option("resourceVersion").and_then(|text| text.parse().ok())
    }
}

impl std::fmt::Display for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let verb = match self.verb {
            Verb::Get => "GET",
            Verb::Create => "CREATE",
            Verb::Update => "UPDATE",
            Verb::Patch(_) => "PATCH",
            Verb::Delete => "DELETE",
        };
        let name = self.path.name.as_deref().unwrap_or_default();
        write!(f, "{verb} {}/{name}", self.path.resource)?;
        self.path.subresource.map_or(Ok(()), |subresource| write!(f, "/{subresource}"))
    }
}

impl SimState {
    pub(crate) fn serve(&mut self, request: &Request) -> Result<Arc<Value>, ApiError> {
        let name = request.key().name;
        let is_failing = |(resource, prefix): &(&str, String)| request.is_of(resource) && name.starts_with(prefix);
        if request.is_change() && self.api.failing.iter().any(is_failing) {
            return Err(request.error(ApiErrorKind::Server, "the server fails on this object"));
        }
        match request.verb {
            Verb::Get if request.path.name.is_none() => self.list_objects(request).map(Arc::new),
            Verb::Get => self.stored(request),
            Verb::Create => self.create_object(request),
            Verb::Update => self.update_object(request),
            Verb::Patch(kind) => self.patch_object(request, kind),
            Verb::Delete => self.delete_object(request),
        }
    }

    /// Without a version from etcd; with one, from the cache, if it is as new.
    pub(crate) fn list_objects(&self, request: &Request) -> Result<Value, ApiError> {
        let selection = Selection::new(&request.path, &request.query);
        match request.version() {
            None => Ok(self.api.list(&selection)),
            Some(version) if version <= self.api.cached_version() => Ok(self.api.cached_list(&selection)),
            Some(_) => Err(request.error(ApiErrorKind::Expired, "too large resource version")),
        }
    }

    fn stored(&self, request: &Request) -> Result<Arc<Value>, ApiError> {
        let found = self.api.object(&request.key()).cloned();
        found.ok_or_else(|| request.error(ApiErrorKind::NotFound, "not found"))
    }

    fn create_object(&mut self, request: &Request) -> Result<Arc<Value>, ApiError> {
        let key = request.key();
        if self.api.object(&key).is_some() {
            return Err(request.error(ApiErrorKind::AlreadyExists, "already exists"));
        }
        if self.api.ending_namespaces.contains(&key.namespace) {
            return Err(request.error(ApiErrorKind::Forbidden, "the namespace is being terminated"));
        }
        let mut object = request.body.clone();
        let metadata = &mut object["metadata"];
        metadata["uid"] = self.api.new_uid().into();
        metadata["creationTimestamp"] = rfc3339(self.wall).into();
        metadata["generation"] = 1.into();
        if request.is_of("pods") {
            object["status"] = json!({ "phase": "Pending" });
        }
        Ok(self.api.put(key, object))
    }

    /// A version in the body is a precondition.
    fn update_object(&mut self, request: &Request) -> Result<Arc<Value>, ApiError> {
        let stored = self.stored(request)?;
        let version = &request.body["metadata"]["resourceVersion"];
        if !version.is_null() && *version != stored["metadata"]["resourceVersion"] {
            return Err(request.error(ApiErrorKind::Conflict, "the object has been modified"));
        }
        Ok(self.replace(request, &stored, request.body.clone()))
    }

    fn patch_object(&mut self, request: &Request, kind: PatchKind) -> Result<Arc<Value>, ApiError> {
        let stored = self.stored(request)?;
        for precondition in ["uid", "resourceVersion"] {
            let asked = &request.body["metadata"][precondition];
            if !asked.is_null() && *asked != stored["metadata"][precondition] {
                return Err(
                    request.error(ApiErrorKind::Conflict, &format!("{precondition} {asked} is not the stored one"))
                );
            }
        }
        let mut object = Value::clone(&stored);
        match kind {
            PatchKind::StrategicMerge => merge::strategic(&mut object, &request.body),
            PatchKind::Merge => merge::merge(&mut object, &request.body),
        }
        Ok(self.replace(request, &stored, object))
    }

    /// Replaces the stored object, except for what this request may not write.
    fn replace(&mut self, request: &Request, stored: &Arc<Value>, mut object: Value) -> Arc<Value> {
        for field in FIXED {
            set(&mut object["metadata"], field, &stored["metadata"][field]);
        }
        let is_status = request.path.subresource == Some("status");
        let has_status = request.is_of("pods") || request.is_of("nodes");
        if is_status {
            set(&mut object, "spec", &stored["spec"]);
        } else if has_status {
            set(&mut object, "status", &stored["status"]);
        }
        if object["spec"] != stored["spec"] {
            let generation = stored["metadata"]["generation"].as_i64().unwrap_or(1);
            object["metadata"]["generation"] = (generation + 1).into();
        }
        // The last finalizer was removed.
        if metadata_ends_now(&object["metadata"]) && !has_finalizers(&object) {
            self.api.remove(&request.key());
            return stored.clone();
        }
        // A write without a change gets no new version.
        if object == **stored { stored.clone() } else { self.api.put(request.key(), object) }
    }

    fn delete_object(&mut self, request: &Request) -> Result<Arc<Value>, ApiError> {
        let stored = self.stored(request)?;
        let uid = &request.body["preconditions"]["uid"];
        if !uid.is_null() && *uid != stored["metadata"]["uid"] {
            return Err(request.error(ApiErrorKind::Conflict, &format!("uid {uid} is not the stored one")));
        }
        let asked = request.body["gracePeriodSeconds"].as_i64().map(|secs| if secs < 0 { 1 } else { secs });
        let end = if request.is_of("pods") { end_of_pod(&stored, asked, self.wall) } else { End::Now };
        match end {
            End::Now if has_finalizers(&stored) => {
                let mut object = Value::clone(&stored);
                let at = object["metadata"]["deletionTimestamp"].as_str().map_or(rfc3339(self.wall), str::to_owned);
                object["metadata"]["deletionTimestamp"] = at.into();
                object["metadata"]["deletionGracePeriodSeconds"] = 0.into();
                if object == *stored { Ok(stored) } else { Ok(self.api.put(request.key(), object)) }
            }
            End::Now => {
                self.api.remove(&request.key());
                Ok(stored)
            }
            End::Pending => Ok(stored),
            End::Graceful { at, grace_secs, generation } => {
                let mut object = Value::clone(&stored);
                object["metadata"]["deletionTimestamp"] = rfc3339(at).into();
                object["metadata"]["deletionGracePeriodSeconds"] = grace_secs.into();
                object["metadata"]["generation"] = generation.into();
                Ok(self.api.put(request.key(), object))
            }
        }
    }
}

fn has_finalizers(object: &Value) -> bool {
    object["metadata"]["finalizers"].as_array().is_some_and(|finalizers| !finalizers.is_empty())
}

fn metadata_ends_now(metadata: &Value) -> bool {
    !metadata["deletionTimestamp"].is_null() && metadata["deletionGracePeriodSeconds"] == 0
}

/// The effect of a deletion on a pod.
enum End {
    Now,
    Graceful {
        at: Timestamp,
        grace_secs: i64,
        generation: i64,
    },
    /// It terminates already, and no later than this.
    Pending,
}

/// A terminated pod, or one without a node, is deleted at once. A grace period only shrinks.
fn end_of_pod(pod: &Value, asked: Option<i64>, now: Timestamp) -> End {
    let metadata = &pod["metadata"];
    let generation = metadata["generation"].as_i64().unwrap_or(1);
    let ends_at: Option<Timestamp> = metadata["deletionTimestamp"].as_str().and_then(|text| text.parse().ok());
    if let (Some(ends_at), Some(known)) = (ends_at, metadata["deletionGracePeriodSeconds"].as_i64()) {
        return match asked {
            Some(0) => End::Now,
            Some(asked) if asked < known => {
                let at = ends_at + SignedDuration::from_secs(asked - known);
                if at < now {
                    return End::Graceful { at: now, grace_secs: 1, generation };
                }
                End::Graceful { at, grace_secs: asked, generation }
            }
            Some(_) | None => End::Pending,
        };
    }
    let needs_none =
        pod["spec"]["nodeName"].is_null() || matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
    let own = pod["spec"]["terminationGracePeriodSeconds"].as_i64().unwrap_or(0);
    let grace_secs = if needs_none { 0 } else { asked.unwrap_or(own) };
    if grace_secs == 0 {
        return End::Now;
    }
    End::Graceful { at: now + SignedDuration::from_secs(grace_secs), grace_secs, generation: generation + 1 }
}

fn set(object: &mut Value, field: &str, value: &Value) {
    let Value::Object(fields) = object else { return };
    if value.is_null() {
        fields.remove(field);
    } else {
        fields.insert(field.to_owned(), value.clone());
    }
}

/// Dates of the API have whole seconds.
pub(crate) fn rfc3339(at: Timestamp) -> String {
    Timestamp::from_second(at.as_second()).expect("a second of a moment that is").to_string()
}
