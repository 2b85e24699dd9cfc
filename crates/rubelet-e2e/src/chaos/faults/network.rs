//! Faults of the network: a resolver that does not answer, and an API server that is slow, cuts connections or returns errors.

use std::{fmt, time::Duration};

use anyhow::Context as _;
use serde_json::json;

use super::Injected;
use crate::{
    chaos::{
        exam::{Exam, served},
        relay::{Path, port_of},
        verify::Expected,
    },
    control_plane::FaultProxy,
};

/// Each asks for a name every second.
const ASKING: usize = 20;

#[derive(Debug)]
struct DeadResolver {
    pods: Vec<String>,
}

/// A resolver that never answers, below HTTP probes with names.
pub fn dead_resolver(exam: &mut Exam) -> anyhow::Result<Box<dyn Injected>> {
    let pods: Vec<String> = (0..ASKING).map(|number| format!("asking-{number}")).collect();
    for name in &pods {
        let mut spec = served(&exam.cluster.name, &json!({ "tcpSocket": { "port": 8080 } }));
        spec["containers"][0]["readinessProbe"] = json!({
            "httpGet": { "host": format!("{name}.chaos.test"), "port": exam.resolver.web_port() },
            "periodSeconds": 1,
            "timeoutSeconds": 1,
        });
        exam.create(name, &spec, Expected::Ready)?;
    }
    exam.settle(Duration::from_secs(120)).context("the fault's pods are ready")?;
    Ok(Box::new(DeadResolver { pods }))
}

impl Injected for DeadResolver {
    fn strike(&mut self, exam: &mut Exam) -> anyhow::Result<()> {
        exam.resolver.silence(true);
        Ok(())
    }

    fn end(&mut self, exam: &mut Exam) -> anyhow::Result<()> {
        exam.resolver.silence(false);
        Ok(())
    }

    fn clean_up(&mut self, exam: &mut Exam) -> anyhow::Result<()> {
        exam.remove(&self.pods)
    }

    fn note(&self) -> String {
        format!("{} pods ask for names", self.pods.len())
    }
}

/// Each piece of data in each direction.
const DELAY: Duration = Duration::from_secs(1);
/// The longest life of a connection.
const LIFE: Duration = Duration::from_secs(3);
const SEED: u64 = 4;

pub fn api_slow(_exam: &mut Exam) -> anyhow::Result<Box<dyn Injected>> {
    Ok(Box::new(ApiPath { path: Path::Slow(DELAY), proxy: None }))
}

pub fn api_resets(_exam: &mut Exam) -> anyhow::Result<Box<dyn Injected>> {
    Ok(Box::new(ApiPath { path: Path::Resets(LIFE), proxy: None }))
}

/// Errors 429, 500 and 409, lost answers and cut watches, for almost every third request.
pub fn api_errors(exam: &mut Exam) -> anyhow::Result<Box<dyn Injected>> {
    let proxy = exam.cluster.plane().fault_proxy(&exam.cluster.name, SEED)?;
    Ok(Box::new(ApiPath { path: Path::To(port_of(&proxy.url())?), proxy: Some(proxy) }))
}

struct ApiPath {
    path: Path,
    proxy: Option<FaultProxy>,
}

impl Injected for ApiPath {
    fn strike(&mut self, exam: &mut Exam) -> anyhow::Result<()> {
        exam.relay.lead(self.path);
        Ok(())
    }

    fn end(&mut self, exam: &mut Exam) -> anyhow::Result<()> {
        exam.relay.lead(Path::Direct);
        Ok(())
    }

    fn note(&self) -> String {
        self.proxy.as_ref().map(|proxy| format!("{} requests failed", proxy.faults())).unwrap_or_default()
    }
}

impl fmt::Debug for ApiPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiPath").field("path", &self.path).finish_non_exhaustive()
    }
}
