//! The API server port: calls and watches.
//!
//! Owns: the port, which the client and the simulator implement, and the types of requests and errors.
//! Never: interprets an object; bodies are JSON as sent.

use std::{error::Error, fmt, pin::Pin, sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::Stream;

#[async_trait]
pub trait ApiServer: Send + Sync + 'static {
    /// One request and the body of its response. An unsuccessful response is an error.
    async fn call(&self, call: Call) -> Result<Bytes, ApiError>;

    /// Opens a watch; the stream ends when the server or the network ends it, and the caller reopens it.
    async fn watch(&self, watch: Watch) -> Result<WatchStream, ApiError>;
}

#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    pub lane: Lane,
    pub verb: Verb,
    pub path: ObjectPath,
    pub query: Vec<(&'static str, String)>,
    pub body: Option<Bytes>,
    /// From the call on, including the rate limiter's wait.
    pub timeout: Duration,
}

/// Traffic of one lane cannot delay another's: each has its own connections. Watches have theirs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// The lease alone, so that its connections belong to its thread. Not rate limited.
    Lease,
    /// The node's status: not rate limited, independent of pods.
    Heartbeat,
    /// Everything else, within `kubeAPIQPS` and `kubeAPIBurst`.
    Ordinary,
    /// Within `eventRecordQPS` and `eventBurst`.
    Events,
    /// TokenReviews and SubjectAccessReviews. Not rate limited, as upstream: clients of the agent's port cause them,
    /// and they must not use up the limit of pods.
    Reviews,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// One object, or a collection when the path names none.
    Get,
    Create,
    Update,
    Patch(PatchKind),
    Delete,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PatchKind {
    Merge,
    /// Lists are merged by their patch merge keys.
    StrategicMerge,
}

/// The path of an object or a collection: `/api/v1/namespaces/default/pods/web/status`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectPath {
    /// `v1`, or group and version: `coordination.k8s.io/v1`.
    pub group_version: &'static str,
    /// In the plural: `pods`.
    pub resource: &'static str,
    pub namespace: Option<String>,
    pub name: Option<String>,
    pub subresource: Option<&'static str>,
}

impl ObjectPath {
    /// A cluster-scoped collection, or one across all namespaces.
    pub fn all(group_version: &'static str, resource: &'static str) -> Self {
        ObjectPath { group_version, resource, namespace: None, name: None, subresource: None }
    }

    #[must_use]
    pub fn within(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = Some(namespace.into());
        self
    }

    #[must_use]
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    #[must_use]
    #[expect(clippy::should_implement_trait, reason = "it adds a subresource, and subtracts nothing")]
    pub fn sub(mut self, subresource: &'static str) -> Self {
        self.subresource = Some(subresource);
        self
    }
}

/// The path of the URL. Valid API names need no escaping.
impl fmt::Display for ObjectPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let root = if self.group_version.contains('/') { "apis" } else { "api" };
        write!(f, "/{root}/{}", self.group_version)?;
        if let Some(namespace) = &self.namespace {
            write!(f, "/namespaces/{namespace}")?;
        }
        write!(f, "/{}", self.resource)?;
        if let Some(name) = &self.name {
            write!(f, "/{name}")?;
        }
        if let Some(subresource) = self.subresource {
            write!(f, "/{subresource}")?;
        }
        Ok(())
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Watch {
    pub collection: ObjectPath,
    /// Selectors and, to resume, the resource version.
    pub query: Vec<(&'static str, String)>,
}

pub type WatchStream = Pin<Box<dyn Stream<Item = Result<WatchEvent, ApiError>> + Send>>;

/// Each carries the object as JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatchEvent {
    Added(Bytes),
    Modified(Bytes),
    Deleted(Bytes),
    /// No changes up to this object's resource version.
    Bookmark(Bytes),
}

/// Kind for decisions; `error_chain` has the whole text for users.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    pub kind: ApiErrorKind,
    /// Names the request and, if the server sent one, its error.
    message: String,
    source: Option<Arc<dyn Error + Send + Sync>>,
}

impl ApiError {
    pub fn new(kind: ApiErrorKind, message: impl Into<String>) -> Self {
        ApiError { kind, message: message.into(), source: None }
    }

    #[must_use]
    pub fn caused_by(self, source: impl Error + Send + Sync + 'static) -> Self {
        ApiError { source: Some(Arc::new(source)), ..self }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApiErrorKind {
    /// 404.
    NotFound,
    /// 409 because of a name that is taken.
    AlreadyExists,
    /// 409 because of a precondition or a newer version.
    Conflict,
    /// 410, or a resource version the server no longer has or does not have yet: list again.
    Expired,
    /// 401.
    Unauthorized,
    /// 403.
    Forbidden,
    /// 400 and 422: sending it again will not help.
    Invalid,
    /// 429, or 503 with `Retry-After`.
    TooManyRequests { retry_after: Option<Duration> },
    /// The server failed: 5xx.
    Server,
    /// The response has an unexpected format, or is not JSON.
    Unreadable,
    /// No response: refused, cut off, timed out. Whether the request was executed is unknown.
    Unreachable,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_those_of_the_api() {
        let paths = [
            ObjectPath::all("v1", "nodes").named("n").sub("status"),
            ObjectPath::all("v1", "pods").within("default").named("web"),
            ObjectPath::all("coordination.k8s.io/v1", "leases").within("kube-node-lease").named("n"),
            ObjectPath::all("v1", "services"),
        ];
        let shown: Vec<_> = paths.iter().map(ToString::to_string).collect();
        assert_eq!(
            shown,
            [
                "/api/v1/nodes/n/status",
                "/api/v1/namespaces/default/pods/web",
                "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n",
                "/api/v1/services",
            ]
        );
    }
}
