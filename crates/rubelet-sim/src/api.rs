//! The ApiServer port over the simulated state: requests take time and can fail in every way, watches fall behind, are cut and expire.
//!
//! Owns: the course of a request and of a watch. Never: what a request does (`act.rs`), what is stored (`store.rs`).

pub(crate) mod act;
pub(crate) mod merge;
pub(crate) mod store;
#[cfg(test)]
mod tests;
mod watch;

use std::{future::pending, sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use rubelet_kube::port::{ApiError, ApiErrorKind, ApiServer, Call, Verb, Watch, WatchStream};
use serde_json::Value;
use tokio::time::{sleep, timeout};

use crate::{
    api::{act::Request, store::Reach},
    faults::{ApiCallOutcome, ApiCourse},
    invariants::trouble::Touched,
    simulation::{Incarnation, ScheduledEvent, SimState, Simulation},
};

/// The API server as one process of the agent reaches it.
#[derive(Debug)]
pub(crate) struct FakeApi {
    simulation: Arc<Simulation>,
    incarnation: Incarnation,
}

impl FakeApi {
    pub(crate) fn new(simulation: Arc<Simulation>, incarnation: Incarnation) -> Self {
        FakeApi { simulation, incarnation }
    }

    async fn carry_out(&self, request: Request) -> Result<Bytes, ApiError> {
        let mut flight = self.begin(request)?;
        let ApiCourse { outcome, before, after, .. } = flight.course;
        self.pass(&flight, before).await?;
        match outcome {
            ApiCallOutcome::ErrorBefore(kind) => return Err(flight.request.error(kind, "injected")),
            ApiCallOutcome::HangBefore => return pending().await,
            ApiCallOutcome::HangAfter | ApiCallOutcome::DoneButError(_) | ApiCallOutcome::Answered => {}
        }
        let answer = flight.perform();
        if outcome == ApiCallOutcome::HangAfter {
            return pending().await;
        }
        self.pass(&flight, after).await?;
        if let ApiCallOutcome::DoneButError(kind) = outcome {
            return Err(flight.request.error(kind, "injected, though it was done"));
        }
        let answer = answer?;
        self.simulation.with(|sim| sim.rules.api_answered(sim.now, &flight.request));
        Ok(Bytes::from(answer.to_string()))
    }

    fn note_failure<T>(&self, request: &Request, answer: &Result<T, ApiError>) {
        if let Err(error) = answer {
            self.simulation.with(|sim| sim.rules.read_failed(request, request.is_list(), error.kind));
        }
    }

    fn begin(&self, request: Request) -> Result<Flight, ApiError> {
        self.simulation.with(|sim| {
            match sim.api.reach {
                Reach::Refused => return Err(request.error(ApiErrorKind::Unreachable, "connection refused")),
                Reach::Unauthorized => return Err(request.error(ApiErrorKind::Unauthorized, "credentials expired")),
                Reach::Open | Reach::Silent => {}
            }
            let course = sim.faults.api_course(&mut sim.rng, request.is_change());
            if sim.is_alive(self.incarnation) {
                sim.rules.api_called(sim.now, &request);
            }
            if course.is_faulty() {
                sim.rules.trouble.enter(Touched::Api);
            }
            let epoch = sim.api.epoch;
            Ok(Flight { simulation: self.simulation.clone(), request, course, epoch, is_performed: false })
        })
    }

    /// Waits; then the request fails if its connection was cut, and is lost if packets are dropped or the caller is dead.
    async fn pass(&self, flight: &Flight, wait: Duration) -> Result<(), ApiError> {
        self.simulation.with(|sim| sim.may_kill_agent(self.incarnation));
        sleep(wait).await;
        let (is_alive, reach, epoch) =
            self.simulation.look(|sim| (sim.is_alive(self.incarnation), sim.api.reach, sim.api.epoch));
        if !is_alive || reach == Reach::Silent {
            return pending().await;
        }
        if epoch != flight.epoch {
            return Err(flight.request.error(ApiErrorKind::Unreachable, "connection reset"));
        }
        Ok(())
    }
}

#[async_trait]
impl ApiServer for FakeApi {
    async fn call(&self, call: Call) -> Result<Bytes, ApiError> {
        let body = call.body.as_deref().map(|body| serde_json::from_slice(body).expect("bodies are JSON"));
        let Call { verb, path, query, timeout: limit, .. } = call;
        let request = Request { verb, path, query, body: body.unwrap_or(Value::Null) };
        let late = request.error(ApiErrorKind::Unreachable, "no answer in time");
        let answer = timeout(limit, self.carry_out(request.clone())).await.unwrap_or(Err(late));
        self.note_failure(&request, &answer);
        answer
    }

    async fn watch(&self, watch: Watch) -> Result<WatchStream, ApiError> {
        let Watch { collection, query } = watch;
        let request = Request { verb: Verb::Get, path: collection, query, body: Value::Null };
        let opened = self.open_watch(request.clone()).await;
        self.note_failure(&request, &opened);
        opened
    }
}

/// A running request. When its client disconnects, the server never receives it, or executes it alone.
struct Flight {
    simulation: Arc<Simulation>,
    request: Request,
    course: ApiCourse,
    epoch: u32,
    is_performed: bool,
}

impl Flight {
    fn perform(&mut self) -> Result<Arc<Value>, ApiError> {
        self.is_performed = true;
        self.simulation.with(|sim| sim.serve_agent(&self.request))
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.simulation.with(|sim| {
            sim.rules.api_returned(&self.request);
            if self.course.is_faulty() {
                sim.rules.trouble.leave(Touched::Api, sim.now);
            }
            let goes_on = self.course.goes_on_without_client && self.course.outcome == ApiCallOutcome::Answered;
            if goes_on && !self.is_performed && self.request.is_change() && sim.api.epoch == self.epoch {
                let wait = Duration::from_millis(sim.rng.u64(1..3_000));
                let late = LateRequest { request: self.request.clone(), epoch: self.epoch };
                sim.schedule_in(wait, ScheduledEvent::Request(Box::new(late)));
            }
        });
    }
}

/// A request the server executes after its client disconnected.
#[derive(Clone, Debug)]
pub(crate) struct LateRequest {
    request: Request,
    epoch: u32,
}

impl LateRequest {
    pub(crate) fn finish(&self, sim: &mut SimState) {
        // Cut off with its connection.
        if self.epoch == sim.api.epoch {
            sim.log("api", format!("without a client goes on: {}", self.request));
            // From an agent that may be dead by now: a foreign write for the current one.
            if let Ok(object) = sim.serve(&self.request)
                && let (Some(name), Some(uid)) =
                    (object["metadata"]["name"].as_str(), object["metadata"]["uid"].as_str())
            {
                sim.rules.pod_edited(name, uid);
            }
        }
    }
}

impl SimState {
    /// A request of the agent: passed to the rules and the trace.
    pub(crate) fn serve_agent(&mut self, request: &Request) -> Result<Arc<Value>, ApiError> {
        let key = request.key();
        let before = self.api.object(&key).cloned();
        let answer = self.serve(request);
        if request.is_change() {
            if let Ok(after) = &answer {
                self.check_write(request, before.as_deref(), after);
            }
            let outcome = match &answer {
                Ok(object) => format!("v{}", object["metadata"]["resourceVersion"].as_str().unwrap_or("?")),
                Err(error) => format!("{:?}", error.kind),
            };
            // Heartbeats and events would be most of the trace.
            if request.is_of("pods") || request.is_of("nodes") {
                let what =
                    if request.path.subresource == Some("status") { &request.body["status"] } else { &Value::Null };
                self.log("api", format!("{request} {} {what} -> {outcome}", key.name));
            }
        }
        answer
    }

    /// The server stops and closes all connections.
    pub(crate) fn take_api_down(&mut self) {
        self.log("world", "the API server is away");
        self.api.set_reach(Reach::Refused);
        self.api.cut_connections();
    }

    /// The agent's credentials expire.
    pub(crate) fn expire_credentials(&mut self) {
        self.log("world", "the agent's credentials expire");
        self.api.set_reach(Reach::Unauthorized);
    }

    /// Packets to it are dropped.
    pub(crate) fn silence_api(&mut self) {
        self.log("world", "the API server is silent");
        self.api.set_reach(Reach::Silent);
    }

    pub(crate) fn heal_api(&mut self) {
        if self.api.reach != Reach::Open {
            self.log("world", "the API server is back");
            self.api.set_reach(Reach::Open);
        }
    }

    pub(crate) fn catch_up(&mut self) {
        self.log("world", "the second API server has caught up");
        self.api.catch_up();
    }

    /// Objects survive; connections and the watch history do not.
    pub(crate) fn restart_api(&mut self) {
        self.log("world", "the API server restarts");
        self.api.cut_connections();
        self.api.forget_history();
    }
}
