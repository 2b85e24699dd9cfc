//! Typed requests: the port's calls with JSON encoding and decoding.
//!
//! Owns: encoding and decoding of bodies, and the errors of both. Never: connects, retries, knows a particular kind.

use std::time::Duration;

use bytes::Bytes;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

use crate::port::{ApiError, ApiErrorKind, ApiServer, Call, Lane, ObjectPath, PatchKind, Verb};

/// One object, or a list when the path names none.
pub async fn get<R: DeserializeOwned>(
    api: &dyn ApiServer,
    lane: Lane,
    path: ObjectPath,
    timeout: Duration,
) -> Result<R, ApiError> {
    typed(api, Call { lane, verb: Verb::Get, path, query: Vec::new(), body: None, timeout }).await
}

/// Into a collection, or into a subresource such as `binding`; returns the object as stored.
pub async fn create<T: Serialize + Sync, R: DeserializeOwned>(
    api: &dyn ApiServer,
    lane: Lane,
    collection: ObjectPath,
    object: &T,
    timeout: Duration,
) -> Result<R, ApiError> {
    let body = Some(body_of(&collection, object)?);
    typed(api, Call { lane, verb: Verb::Create, path: collection, query: Vec::new(), body, timeout }).await
}

/// Replaces the object, which carries the resource version it was read at.
pub async fn update<T: Serialize + Sync, R: DeserializeOwned>(
    api: &dyn ApiServer,
    lane: Lane,
    path: ObjectPath,
    object: &T,
    timeout: Duration,
) -> Result<R, ApiError> {
    let body = Some(body_of(&path, object)?);
    typed(api, Call { lane, verb: Verb::Update, path, query: Vec::new(), body, timeout }).await
}

/// Returns the object after the patch.
pub async fn patch<R: DeserializeOwned>(
    api: &dyn ApiServer,
    lane: Lane,
    kind: PatchKind,
    path: ObjectPath,
    patch: &Value,
    timeout: Duration,
) -> Result<R, ApiError> {
    let body = Some(body_of(&path, patch)?);
    typed(api, Call { lane, verb: Verb::Patch(kind), path, query: Vec::new(), body, timeout }).await
}

/// `options` are `DeleteOptions`: grace period, preconditions. The response body is ignored.
pub async fn delete(
    api: &dyn ApiServer,
    lane: Lane,
    path: ObjectPath,
    options: &Value,
    timeout: Duration,
) -> Result<(), ApiError> {
    let body = Some(body_of(&path, options)?);
    api.call(Call { lane, verb: Verb::Delete, path, query: Vec::new(), body, timeout }).await.map(|_answer| ())
}

async fn typed<R: DeserializeOwned>(api: &dyn ApiServer, call: Call) -> Result<R, ApiError> {
    let path = call.path.clone();
    let answer = api.call(call).await?;
    serde_json::from_slice(&answer).map_err(|error| {
        ApiError::new(ApiErrorKind::Unreadable, format!("{path}: the answer cannot be read")).caused_by(error)
    })
}

fn body_of<T: Serialize>(path: &ObjectPath, value: &T) -> Result<Bytes, ApiError> {
    serde_json::to_vec(value).map(Bytes::from).map_err(|error| {
        ApiError::new(ApiErrorKind::Invalid, format!("{path}: the object cannot be written as JSON")).caused_by(error)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use async_trait::async_trait;
    use serde_json::json;

    use super::*;
    use crate::port::{Watch, WatchStream};

    /// Gives every call the same response, and records the call.
    struct Answering {
        body: &'static str,
        heard: Mutex<Vec<Call>>,
    }

    #[async_trait]
    impl ApiServer for Answering {
        async fn call(&self, call: Call) -> Result<Bytes, ApiError> {
            self.heard.lock().unwrap().push(call);
            Ok(Bytes::from_static(self.body.as_bytes()))
        }

        async fn watch(&self, _watch: Watch) -> Result<WatchStream, ApiError> {
            unreachable!("nothing here watches")
        }
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test]
    async fn a_patch_sends_its_document_and_reads_the_object_after_it() {
        let api = Answering { body: r#"{"status":{"phase":"Running"}}"#, heard: Mutex::default() };
        let path = ObjectPath::all("v1", "pods").within("default").named("web").sub("status");
        let document = json!({"status": {"phase": "Running"}});
        let after: Value =
            patch(&api, Lane::Ordinary, PatchKind::StrategicMerge, path.clone(), &document, SECOND).await.unwrap();
        assert_eq!(after, document);
        let heard = api.heard.into_inner().unwrap();
        let expected = Call {
            lane: Lane::Ordinary,
            verb: Verb::Patch(PatchKind::StrategicMerge),
            path,
            query: Vec::new(),
            body: Some(Bytes::from(document.to_string())),
            timeout: SECOND,
        };
        assert_eq!(heard, [expected]);
    }

    #[tokio::test]
    async fn an_answer_of_another_shape_names_the_path() {
        let api = Answering { body: "[]", heard: Mutex::default() };
        let path = ObjectPath::all("v1", "nodes").named("n");
        let error = get::<serde_json::Map<String, Value>>(&api, Lane::Heartbeat, path, SECOND).await.unwrap_err();
        assert_eq!(error.kind, ApiErrorKind::Unreadable);
        assert!(error.to_string().starts_with("/api/v1/nodes/n: the answer cannot be read"), "{error}");
    }

    #[tokio::test]
    async fn the_answer_to_a_deletion_may_be_anything() {
        let api = Answering { body: "gone", heard: Mutex::default() };
        let path = ObjectPath::all("v1", "pods").within("default").named("web");
        delete(&api, Lane::Ordinary, path, &json!({"gracePeriodSeconds": 0}), SECOND).await.unwrap();
    }
}
