//! A scripted API server, for tests only.

use std::{collections::VecDeque, sync::Mutex, time::Duration};

use async_trait::async_trait;
use rubelet_core::{
    node_status::{Machine, NodeSetup, Report},
    snapshot::{NodeReadiness, NodeView},
};
use rubelet_kube::port::{Watch, WatchStream};
use serde_json::{Value, json};

use super::*;

pub(super) const NOT_FOUND: Answer = Err(ApiErrorKind::NotFound);
pub(super) const CONFLICT: Answer = Err(ApiErrorKind::Conflict);
pub(super) const UNREACHABLE: Answer = Err(ApiErrorKind::Unreachable);

pub(super) type Answer = Result<Value, ApiErrorKind>;

/// Responses in order; calls beyond the last never return.
pub(super) struct Scripted {
    answers: Mutex<VecDeque<Answer>>,
    heard: Mutex<Vec<(String, Value)>>,
}

impl Scripted {
    pub(super) fn new(answers: impl IntoIterator<Item = Answer>) -> Arc<Self> {
        Arc::new(Scripted { answers: Mutex::new(answers.into_iter().collect()), heard: Mutex::default() })
    }

    /// `Get nodes/n1?resourceVersion=0`, one per call.
    pub(super) fn heard(&self) -> Vec<String> {
        self.heard.lock().unwrap().iter().map(|(line, _)| line.clone()).collect()
    }

    pub(super) fn bodies(&self) -> Vec<Value> {
        self.heard.lock().unwrap().iter().map(|(_, body)| body.clone()).collect()
    }
}

#[async_trait]
impl ApiServer for Scripted {
    async fn call(&self, call: Call) -> Result<bytes::Bytes, ApiError> {
        if call.lane == Lane::Ordinary {
            // The watch's first list.
            return std::future::pending().await;
        }
        assert!(matches!(call.lane, Lane::Lease | Lane::Heartbeat), "no limit of pods delays it");
        let object = [Some(call.path.resource), call.path.name.as_deref(), call.path.subresource];
        let object = object.into_iter().flatten().collect::<Vec<_>>().join("/");
        let query: String = call.query.iter().map(|(name, value)| format!("?{name}={value}")).collect();
        let body = call.body.map_or(Value::Null, |body| serde_json::from_slice(&body).unwrap());
        self.heard.lock().unwrap().push((format!("{:?} {object}{query}", call.verb), body));
        let answer = self.answers.lock().unwrap().pop_front();
        match answer {
            Some(Ok(body)) => Ok(bytes::Bytes::from(body.to_string())),
            Some(Err(kind)) => Err(ApiError::new(kind, format!("{kind:?}"))),
            None => std::future::pending().await,
        }
    }

    async fn watch(&self, _watch: Watch) -> Result<WatchStream, ApiError> {
        std::future::pending().await
    }
}

pub(super) fn reporting() -> NodeReporting {
    NodeReporting {
        setup: NodeSetup {
            name: "n1".to_owned(),
            internal_ips: vec!["10.0.0.7".to_owned()],
            architecture: "amd64".to_owned(),
            ..NodeSetup::default()
        },
        machine: Machine { cpus: 2, ..Machine::default() },
        node_ip: "10.0.0.7".to_owned(),
        registers: true,
        check_every: Duration::from_secs(10),
        report_every: Duration::from_secs(300),
        lease_secs: 40,
    }
}

pub(super) fn view() -> NodeView {
    NodeView { readiness: NodeReadiness::Ready, ..NodeView::default() }
}

pub(super) fn report<'a>(reporting: &'a NodeReporting, view: &'a NodeView) -> Report<'a> {
    let at = "2026-06-01T12:00:00Z".parse().unwrap();
    Report { setup: &reporting.setup, machine: &reporting.machine, view, images: None, at }
}

/// A node with the agent's labels, and a `role` label of another client.
pub(super) fn node() -> Value {
    json!({
        "metadata": {"name": "n1", "uid": "u1", "resourceVersion": "5", "labels": {
            "kubernetes.io/hostname": "n1", "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64",
            "beta.kubernetes.io/os": "linux", "beta.kubernetes.io/arch": "amd64", "role": "db",
        }},
        "status": {"capacity": {"cpu": "2"}},
    })
}
