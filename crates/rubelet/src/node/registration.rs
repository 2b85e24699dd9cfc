//! Registers the node with its cluster.
//!
//! Owns: reading the Node object, creating it, reconciling what an earlier process left on it, and retrying.
//! Upstream: `registerWithAPIServer`, `tryRegisterWithAPIServer`.

use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use rubelet_core::node_status::{self, Report};
use rubelet_kube::{
    calls, error_chain,
    port::{ApiError, ApiErrorKind, ApiServer, Lane, ObjectPath, PatchKind},
};
use tokio::time::sleep;

use super::{NodeReporting, ResourceVersion, get_node, without_managed_fields};

const BACK_OFF_FIRST: Duration = Duration::from_millis(100);
const BACK_OFF_MAX: Duration = Duration::from_secs(7);

#[derive(Debug, PartialEq)]
pub enum Registered {
    Created(Node),
    Existing(Node),
}

/// Retries until the node is registered. Each try has a new report.
pub async fn register<'a>(
    api: &dyn ApiServer,
    reporting: &NodeReporting,
    report: impl Fn() -> Report<'a>,
) -> Registered {
    let mut wait = BACK_OFF_FIRST;
    loop {
        match try_register(api, reporting, report()).await {
            Ok(registered) => return registered,
            Err(error) => {
                let node = &reporting.setup.name;
                tracing::warn!(node, "failed to register node, will retry in {wait:?}: {}", error_chain(&error));
            }
        }
        sleep(wait).await;
        wait = wait.saturating_mul(2).min(BACK_OFF_MAX);
    }
}

pub(super) async fn try_register(
    api: &dyn ApiServer,
    reporting: &NodeReporting,
    report: Report<'_>,
) -> Result<Registered, ApiError> {
    // Upstream creates first; a restarted node exists, and a read costs the server less than a rejected write.
    let error = match get_node(api, reporting, ResourceVersion::Cached).await {
        Ok(known) => return reconcile(api, reporting, known, report).await,
        Err(error) => error,
    };
    if error.kind != ApiErrorKind::NotFound || !reporting.registers {
        return Err(error);
    }
    let node = node_status::initial(report);
    let nodes = ObjectPath::all("v1", "nodes");
    let created: Result<Node, _> = calls::create(api, Lane::Heartbeat, nodes, &node, reporting.timeout()).await;
    let error = match created {
        Ok(node) => return Ok(Registered::Created(without_managed_fields(node))),
        Err(error) => error,
    };
    match error.kind {
        // Without permission to create a node, an existing one can still be used.
        ApiErrorKind::AlreadyExists | ApiErrorKind::Forbidden => {
            match get_node(api, reporting, ResourceVersion::Newest).await {
                Ok(known) => reconcile(api, reporting, known, report).await,
                Err(_) => Err(error),
            }
        }
        _ => Err(error),
    }
}

async fn reconcile(
    api: &dyn ApiServer,
    reporting: &NodeReporting,
    known: Node,
    report: Report<'_>,
) -> Result<Registered, ApiError> {
    if !reporting.registers {
        return Ok(Registered::Existing(known));
    }
    let node = match node_status::patch(&known, &node_status::reconciled(&known, report)) {
        None => known,
        Some(patch) => patch_status(api, reporting, &patch).await?,
    };
    Ok(Registered::Existing(node))
}

/// Returns the node after the patch.
pub(super) async fn patch_status(
    api: &dyn ApiServer,
    reporting: &NodeReporting,
    patch: &serde_json::Value,
) -> Result<Node, ApiError> {
    let path = reporting.path().sub("status");
    calls::patch(api, Lane::Heartbeat, PatchKind::StrategicMerge, path, patch, reporting.timeout())
        .await
        .map(without_managed_fields)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokio::time::Instant;

    use super::*;
    use crate::node::testing::{NOT_FOUND, Scripted, UNREACHABLE, node, report, reporting, view};

    /// Registers with a scripted server; returns the requests and the result.
    async fn registered(
        reporting: &NodeReporting,
        answers: impl IntoIterator<Item = Result<serde_json::Value, ApiErrorKind>>,
    ) -> (Vec<String>, Registered) {
        let (api, view) = (Scripted::new(answers), view());
        let registered = register(&*api, reporting, || report(reporting, &view)).await;
        (api.heard(), registered)
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_is_known_and_right_is_not_written() {
        let (heard, registered) = registered(&reporting(), [Ok(node())]).await;
        assert_eq!(heard, ["Get nodes/n1?resourceVersion=0"]);
        assert!(matches!(registered, Registered::Existing(_)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_is_not_known_is_created() {
        let (heard, registered) = registered(&reporting(), [NOT_FOUND, Ok(node())]).await;
        assert_eq!(heard, ["Get nodes/n1?resourceVersion=0", "Create nodes"]);
        assert!(matches!(registered, Registered::Created(_)));
    }

    #[tokio::test(start_paused = true)]
    async fn node_created_concurrently_is_reconciled() {
        let mut other = node();
        other["metadata"]["labels"]["kubernetes.io/hostname"] = json!("elsewhere");
        let answers = [NOT_FOUND, Err(ApiErrorKind::AlreadyExists), Ok(other), Ok(node())];
        let (heard, registered) = registered(&reporting(), answers).await;
        assert_eq!(
            heard,
            ["Get nodes/n1?resourceVersion=0", "Create nodes", "Get nodes/n1", "Patch(StrategicMerge) nodes/n1/status"]
        );
        assert!(matches!(registered, Registered::Existing(_)));
    }

    #[tokio::test(start_paused = true)]
    async fn forbidden_node_creation_is_retried() {
        let forbidden = || Err(ApiErrorKind::Forbidden);
        let answers = [NOT_FOUND, forbidden(), NOT_FOUND, UNREACHABLE, NOT_FOUND, Ok(node())];
        let started = Instant::now();
        let (heard, _) = registered(&reporting(), answers).await;
        assert_eq!(heard.last().unwrap(), "Create nodes");
        assert_eq!(started.elapsed(), Duration::from_millis(100 + 200));
    }

    #[tokio::test(start_paused = true)]
    async fn without_register_node_agent_waits_for_existing_node() {
        let mut known = node();
        known["metadata"]["labels"] = json!({});
        let reporting = NodeReporting { registers: false, ..reporting() };
        let (heard, registered) = registered(&reporting, [NOT_FOUND, NOT_FOUND, Ok(known)]).await;
        assert_eq!(heard, ["Get nodes/n1?resourceVersion=0"; 3]);
        assert!(matches!(registered, Registered::Existing(_)));
    }
}
