//! The CSINode object, and what CSI drivers say of this node in the Node object.
//!
//! Owns: reading both objects and writing them, one write at a time, and a few tries of each. Never: decides their content
//! (`rubelet_core::csi_node`), or when a driver is gone.
//! Upstream: `nodeinfomanager.InstallCSIDriver`, `UninstallCSIDriver`, `InitializeCSINodeWithAnnotation`.

use std::{sync::Arc, time::Duration};

use k8s_openapi::api::{core::v1::Node, storage::v1::CSINode};
use rubelet_core::csi_node::{self, DriverOnNode};
use rubelet_kube::{
    calls, error_chain,
    port::{ApiError, ApiErrorKind, ApiServer, Lane, ObjectPath, PatchKind},
};
use serde_json::{Value, json};
use tokio::{sync::Mutex, time::sleep};

/// Of one request.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Tries of one change, as upstream; another client may change the object meanwhile.
const TRIES: u32 = 4;
const BETWEEN_TRIES: Duration = Duration::from_millis(10);
const BETWEEN_TRIES_FACTOR: u32 = 5;

/// Clones share one turn: drivers that register at the same time do not overwrite each other.
#[derive(Clone)]
pub struct CsiNodeWriter {
    api: Arc<dyn ApiServer>,
    node_name: String,
    turn: Arc<Mutex<()>>,
}

/// Why a driver is not in the API.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WriteError {
    /// What the driver says contradicts the Node object, or the API server does not take it.
    #[error("{0}")]
    Refused(String),
    /// It may work later.
    #[error("{0}")]
    Api(String),
}

impl From<ApiError> for WriteError {
    fn from(error: ApiError) -> Self {
        let why = error_chain(&error);
        if error.kind == ApiErrorKind::Invalid { WriteError::Refused(why) } else { WriteError::Api(why) }
    }
}

impl std::fmt::Debug for CsiNodeWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CsiNodeWriter").field("node_name", &self.node_name).finish_non_exhaustive()
    }
}

impl CsiNodeWriter {
    pub fn new(api: Arc<dyn ApiServer>, node_name: String) -> Self {
        CsiNodeWriter { api, node_name, turn: Arc::default() }
    }

    /// Creates the CSINode object, or completes one that exists.
    pub async fn initialize(&self) -> Result<(), WriteError> {
        self.change(|node, object| async move {
            let _ = node;
            Ok(csi_node::annotated(&object))
        })
        .await
    }

    /// Adds a driver to both objects.
    pub async fn add(&self, driver: &DriverOnNode) -> Result<(), WriteError> {
        self.change(|node, object| async move {
            let patch = csi_node::node_patch_with(&node, driver).map_err(WriteError::Refused)?;
            self.patch_node(patch).await?;
            Ok(csi_node::with_driver(&object, driver))
        })
        .await
    }

    /// Writes what a registered driver says of this node now into the CSINode object. The Node object keeps what it has, as
    /// upstream's does.
    pub async fn update(&self, driver: &DriverOnNode) -> Result<(), WriteError> {
        self.change(|_, object| async move { Ok(csi_node::with_driver(&object, driver)) }).await
    }

    pub(crate) fn api(&self) -> &dyn ApiServer {
        &*self.api
    }

    /// Removes a driver from both objects, unless it is back: what another socket of it added stays.
    pub async fn remove(&self, driver: &str, is_back: impl Fn() -> bool) -> Result<(), WriteError> {
        let is_back = &is_back;
        self.change(|node, object| async move {
            if is_back() {
                return Ok(None);
            }
            let patch = csi_node::node_patch_without(&node, driver).map_err(WriteError::Refused)?;
            self.patch_node(patch).await?;
            Ok(csi_node::without_driver(&object, driver))
        })
        .await
    }

    /// Tries a change a few times, each time with what the API server has now.
    async fn change<Next>(&self, next: impl Fn(Node, CSINode) -> Next) -> Result<(), WriteError>
    where
        Next: Future<Output = Result<Option<CSINode>, WriteError>>,
    {
        let mut wait = BETWEEN_TRIES;
        for attempt in 1.. {
            let tried = {
                let _turn = self.turn.lock().await;
                self.try_change(&next).await
            };
            match tried {
                Err(WriteError::Api(_)) if attempt < TRIES => {}
                done => return done,
            }
            sleep(wait).await;
            wait = wait.saturating_mul(BETWEEN_TRIES_FACTOR);
        }
        Ok(())
    }

    async fn try_change<Next>(&self, next: impl Fn(Node, CSINode) -> Next) -> Result<(), WriteError>
    where
        Next: Future<Output = Result<Option<CSINode>, WriteError>>,
    {
        let node: Node = self.get(self.node_path()).await?;
        let uid = node.metadata.uid.clone().unwrap_or_default();
        let object = match self.get::<CSINode>(self.path()).await {
            Ok(object) if csi_node::is_of_node(&object, &self.node_name, &uid) => object,
            Ok(_) => {
                // It belongs to an earlier node of this name, and goes with it; this one needs its own.
                calls::delete(&*self.api, Lane::Ordinary, self.path(), &json!({}), CALL_TIMEOUT).await?;
                self.create(&uid).await?
            }
            Err(error) if error.kind == ApiErrorKind::NotFound => self.create(&uid).await?,
            Err(error) => return Err(error.into()),
        };
        if let Some(object) = next(node, object).await? {
            let _: CSINode = calls::update(&*self.api, Lane::Ordinary, self.path(), &object, CALL_TIMEOUT).await?;
        }
        Ok(())
    }

    async fn create(&self, node_uid: &str) -> Result<CSINode, ApiError> {
        let object = csi_node::initial(&self.node_name, node_uid);
        calls::create(&*self.api, Lane::Ordinary, collection(), &object, CALL_TIMEOUT).await
    }

    /// Annotations and labels are written through the status, which a node may write. Not as a strategic merge: a key from a
    /// driver could be an instruction there (`$patch`).
    async fn patch_node(&self, patch: Option<Value>) -> Result<(), WriteError> {
        let Some(patch) = patch else { return Ok(()) };
        let path = self.node_path().sub("status");
        let patched: Result<Node, _> =
            calls::patch(&*self.api, Lane::Ordinary, PatchKind::Merge, path, &patch, CALL_TIMEOUT).await;
        match patched {
            Ok(_) => Ok(()),
            // The node may write its status, so what is forbidden is one of the driver's labels.
            Err(error) if error.kind == ApiErrorKind::Forbidden => Err(WriteError::Refused(error_chain(&error))),
            Err(error) => Err(error.into()),
        }
    }

    async fn get<T: serde::de::DeserializeOwned>(&self, path: ObjectPath) -> Result<T, ApiError> {
        calls::get(&*self.api, Lane::Ordinary, path, CALL_TIMEOUT).await
    }

    fn path(&self) -> ObjectPath {
        collection().named(self.node_name.clone())
    }

    fn node_path(&self) -> ObjectPath {
        ObjectPath::all("v1", "nodes").named(self.node_name.clone())
    }
}

fn collection() -> ObjectPath {
    ObjectPath::all("storage.k8s.io/v1", "csinodes")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_api::FakeApi;

    const NODE: &str = r#"{"metadata": {"name": "n1", "uid": "u1"}}"#;

    fn driver() -> DriverOnNode {
        DriverOnNode { name: "d".to_owned(), node_id: "n1-id".to_owned(), ..DriverOnNode::default() }
    }

    fn object_of(uid: &str) -> Result<String, ApiErrorKind> {
        Ok(serde_json::to_string(&csi_node::initial("n1", uid)).unwrap())
    }

    async fn written<T>(
        answers: impl IntoIterator<Item = Result<String, ApiErrorKind>>,
        write: impl AsyncFn(CsiNodeWriter) -> T,
    ) -> (Vec<String>, T) {
        let api = FakeApi::answering(answers);
        let done = write(CsiNodeWriter::new(api.clone(), "n1".to_owned())).await;
        let calls = api.calls();
        (calls.iter().map(|call| format!("{:?} {}", call.verb, call.path)).collect(), done)
    }

    #[tokio::test(start_paused = true)]
    async fn csi_node_is_made_for_this_node_and_only_then() {
        let node = || Ok(NODE.to_owned());
        let initialize = async |writer: CsiNodeWriter| writer.initialize().await;
        let made = written([node(), Err(ApiErrorKind::NotFound), object_of("u1")], initialize).await;
        insta::assert_debug_snapshot!(made, @r#"
        (
            [
                "Get /api/v1/nodes/n1",
                "Get /apis/storage.k8s.io/v1/csinodes/n1",
                "Create /apis/storage.k8s.io/v1/csinodes",
            ],
            Ok(
                (),
            ),
        )
        "#);
        let known = written([node(), object_of("u1")], initialize).await;
        insta::assert_debug_snapshot!(known, @r#"
        (
            [
                "Get /api/v1/nodes/n1",
                "Get /apis/storage.k8s.io/v1/csinodes/n1",
            ],
            Ok(
                (),
            ),
        )
        "#);
        let other = written([node(), object_of("old"), Ok("{}".to_owned()), object_of("u1")], initialize).await;
        insta::assert_debug_snapshot!(other, @r#"
        (
            [
                "Get /api/v1/nodes/n1",
                "Get /apis/storage.k8s.io/v1/csinodes/n1",
                "Delete /apis/storage.k8s.io/v1/csinodes/n1",
                "Create /apis/storage.k8s.io/v1/csinodes",
            ],
            Ok(
                (),
            ),
        )
        "#);
    }

    #[tokio::test(start_paused = true)]
    async fn driver_is_added_to_node_and_csi_node_after_a_conflict_too() {
        let node = || Ok(NODE.to_owned());
        let add = async |writer: CsiNodeWriter| writer.add(&driver()).await;
        let conflict = Err(ApiErrorKind::Conflict);
        let answers = [node(), object_of("u1"), node(), conflict, node(), object_of("u1"), node(), object_of("u1")];
        insta::assert_debug_snapshot!(written(answers, add).await, @r#"
        (
            [
                "Get /api/v1/nodes/n1",
                "Get /apis/storage.k8s.io/v1/csinodes/n1",
                "Patch(Merge) /api/v1/nodes/n1/status",
                "Update /apis/storage.k8s.io/v1/csinodes/n1",
                "Get /api/v1/nodes/n1",
                "Get /apis/storage.k8s.io/v1/csinodes/n1",
                "Patch(Merge) /api/v1/nodes/n1/status",
                "Update /apis/storage.k8s.io/v1/csinodes/n1",
            ],
            Ok(
                (),
            ),
        )
        "#);
        let unreachable = std::iter::repeat_n(Err(ApiErrorKind::Unreachable), 4);
        let (calls, failed) = written(unreachable, add).await;
        assert_eq!(calls.len(), 4, "a few tries, then the caller decides");
        assert!(matches!(failed, Err(WriteError::Api(_))), "{failed:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn driver_that_is_back_is_not_removed() {
        let metadata =
            json!({"name": "n1", "uid": "u1", "annotations": {"csi.volume.kubernetes.io/nodeid": r#"{"d":"n1-id"}"#}});
        let node = || Ok(json!({"metadata": metadata}).to_string());
        let object = csi_node::with_driver(&csi_node::initial("n1", "u1"), &driver()).unwrap();
        let object = || Ok(serde_json::to_string(&object).unwrap());
        for (is_back, requests) in [(true, 2), (false, 4)] {
            let answers = [node(), object(), node(), object()];
            let remove = async |writer: CsiNodeWriter| writer.remove("d", || is_back).await;
            let (calls, removed) = written(answers, remove).await;
            assert_eq!((calls.len(), removed), (requests, Ok(())), "{calls:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn label_of_another_value_refuses_the_driver_at_once() {
        let node = r#"{"metadata": {"name": "n1", "uid": "u1", "labels": {"zone": "b"}}}"#;
        let topology = [("zone".to_owned(), "a".to_owned())].into();
        let driver = DriverOnNode { topology, ..driver() };
        let (calls, refused) =
            written([Ok(node.to_owned()), object_of("u1")], async |writer: CsiNodeWriter| writer.add(&driver).await)
                .await;
        assert_eq!(calls.len(), 2);
        assert!(matches!(refused, Err(WriteError::Refused(why)) if why.contains("topology value collision")));
    }
}
