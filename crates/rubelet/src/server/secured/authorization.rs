//! Authorization: a verb on a subresource of this node.
//!
//! Owns: the mapping from method and path to attributes, and their authorization.
//! Upstream: `pkg/kubelet/server/auth.go`, `apiserver/plugin/pkg/authorizer/webhook`.

use std::time::Duration;

use http::Method;
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec, SubjectAccessReviewStatus,
};
use rubelet_kube::{
    calls, error_chain,
    port::{Lane, ObjectPath},
};
use sha2::{Digest as _, Sha256};

use super::{
    authentication::{ASK, Identity},
    reviews::Reviews,
};
use crate::{
    server::unauthenticated::PeerAddress,
    world::{Clock, Cluster},
};

/// `authorization.mode`.
#[derive(Debug)]
pub(crate) enum Authorization {
    AlwaysAllow,
    Webhook(WebhookAuthorizer),
    /// Mode Webhook on a node without an API server.
    NoApiServer,
}

/// The verb that a request to run something in a pod needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExecVerb {
    /// As upstream: a WebSocket is a GET, so `get` on `nodes/proxy` is enough to run commands.
    OfMethod,
    /// `--rubelet-exec-needs-create`.
    Create,
}

/// The API verb of a method; other methods have none, which only the RBAC rule `*` allows.
pub(crate) fn verb_of(method: &Method, path: &str, exec_verb: ExecVerb) -> &'static str {
    let is_exec = ["/exec", "/attach", "/portForward", "/run"].iter().any(|root| is_below(path, root));
    match *method {
        _ if is_exec && exec_verb == ExecVerb::Create => "create",
        Method::POST => "create",
        Method::GET => "get",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ => "",
    }
}

fn is_below(path: &str, root: &str) -> bool {
    path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Any one of them is sufficient; the most specific comes first.
pub(crate) fn subresources_of(path: &str) -> Vec<&'static str> {
    let fine = [
        ("/pods", "pods"),
        ("/healthz", "healthz"),
        ("/configz", "configz"),
        ("/runningpods", "pods"),
        // Our own route: it shows of one pod what `/pods` shows of all.
        ("/explain", "pods"),
    ];
    let own = [
        ("/stats", "stats"),
        ("/metrics", "metrics"),
        ("/logs", "log"),
        ("/checkpoint", "checkpoint"),
        ("/statusz", "statusz"),
        ("/flagz", "configz"),
    ];
    let found =
        |table: &[(&str, &'static str)]| table.iter().find(|(root, _)| is_below(path, root)).map(|(_, name)| *name);
    let mut subresources = Vec::from_iter(found(&fine));
    subresources.push(found(&own).unwrap_or("proxy"));
    subresources
}

/// Authorizes with SubjectAccessReviews.
#[derive(Debug)]
pub(crate) struct WebhookAuthorizer {
    cluster: Cluster,
    node_name: String,
    keep_allowed: Duration,
    keep_denied: Duration,
    known: Reviews<bool>,
}

impl WebhookAuthorizer {
    pub(crate) fn new(
        cluster: Cluster,
        node_name: &str,
        keep_allowed: Duration,
        keep_denied: Duration,
        clock: Clock,
    ) -> Self {
        WebhookAuthorizer {
            cluster,
            node_name: node_name.to_owned(),
            keep_allowed,
            keep_denied,
            known: Reviews::new(clock, |is_allowed| *is_allowed),
        }
    }

    pub(crate) async fn allow(
        &self,
        (who, peer): (&Identity, PeerAddress),
        verb: &str,
        subresource: &str,
    ) -> Result<bool, String> {
        let review = self.question(who, verb, subresource);
        let key = serde_json::to_vec(&review.spec).map_err(|error| error.to_string())?;
        let ask = async {
            let path = ObjectPath::all("authorization.k8s.io/v1", "subjectaccessreviews");
            let answer: SubjectAccessReview =
                calls::create(self.cluster.api.as_ref(), Lane::Reviews, path, &review, ASK)
                    .await
                    .map_err(|error| format!("cannot ask for a right: {}", error_chain(&error)))?;
            let SubjectAccessReviewStatus { allowed, evaluation_error, .. } = answer.status.unwrap_or_default();
            if let Some(error) = evaluation_error.filter(|error| !error.is_empty()) {
                tracing::debug!(error, "SubjectAccessReview evaluation error");
            }
            Ok((allowed, if allowed { self.keep_allowed } else { self.keep_denied }))
        };
        self.known.get(Sha256::digest(key).into(), peer, ask).await
    }

    fn question(&self, who: &Identity, verb: &str, subresource: &str) -> SubjectAccessReview {
        let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        let attributes = ResourceAttributes {
            verb: some(verb),
            version: some("v1"),
            resource: some("nodes"),
            subresource: some(subresource),
            name: some(&self.node_name),
            ..ResourceAttributes::default()
        };
        let spec = SubjectAccessReviewSpec {
            resource_attributes: Some(attributes),
            user: some(&who.user),
            uid: some(&who.uid),
            groups: Some(who.groups.clone()),
            extra: (!who.extra.is_empty()).then(|| who.extra.clone()),
            ..SubjectAccessReviewSpec::default()
        };
        SubjectAccessReview { spec, ..SubjectAccessReview::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_map_to_upstreams_attributes() {
        let cases = [
            ("/pods", "pods,proxy"),
            ("/pods/", "pods,proxy"),
            ("/podsx", "proxy"),
            ("/runningpods/", "pods,proxy"),
            ("/healthz/syncloop", "healthz,proxy"),
            ("/configz", "configz,proxy"),
            ("/stats/summary", "stats"),
            ("/metrics/cadvisor", "metrics"),
            ("/metricsx", "proxy"),
            ("/logs/syslog", "log"),
            ("/checkpoint/a/b/c", "checkpoint"),
            ("/statusz", "statusz"),
            ("/flagz", "configz"),
            ("/explain/default/web", "pods,proxy"),
            ("/exec/default/web/c", "proxy"),
            ("/containerLogs/default/web/c", "proxy"),
            ("/", "proxy"),
            ("", "proxy"),
        ];
        for (path, expected) in cases {
            assert_eq!(subresources_of(path).join(","), expected, "{path}");
        }
    }

    #[test]
    fn verbs_follow_the_method_unless_exec_needs_create() {
        let methods = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE"];
        let verbs = |path: &str, exec_verb| {
            methods.map(|method| verb_of(&Method::from_bytes(method.as_bytes()).unwrap(), path, exec_verb)).join(",")
        };
        const OF_METHOD: &str = "get,create,update,patch,delete,,,";
        const CREATE: &str = "create,create,create,create,create,create,create,create";
        let table = [
            ("/exec/default/web/a", CREATE),
            ("/exec/default/web/u1/a", CREATE),
            ("/attach/default/web/a", CREATE),
            ("/attach/default/web/u1/a", CREATE),
            ("/portForward/default/web", CREATE),
            ("/portForward/default/web/u1", CREATE),
            ("/run/default/web/a", CREATE),
            ("/run/default/web/u1/a", CREATE),
            ("/run", CREATE),
            ("/runningpods/", OF_METHOD),
            ("/execx", OF_METHOD),
            ("/containerLogs/default/web/a", OF_METHOD),
            ("/checkpoint/default/web/a", OF_METHOD),
            ("/logs/", OF_METHOD),
            ("/pods", OF_METHOD),
            ("/metrics", OF_METHOD),
            ("/", OF_METHOD),
        ];
        for (path, strict) in table {
            assert_eq!(verbs(path, ExecVerb::OfMethod), OF_METHOD, "{path}");
            assert_eq!(verbs(path, ExecVerb::Create), strict, "{path}");
        }
    }
}
