//! postStart and preStop hooks.
//!
//! Owns: a container's hooks and their requests, and what a status omits while a container starts.
//! Never: runs a hook (`rubelet/src/effects/hook.rs`).
//! Upstream: `lifecycle/handlers.go`, `executePreStopHook`, the end of `startContainer`.

use std::{sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::{Container, LifecycleHandler};
use serde::{Deserialize, Serialize};

use crate::{
    effect::{EffectError, EventRecord, Facts, InvolvedObject, Reason, Severity},
    event_reasons,
    flights::{Flight, PodSubject},
    id::{ContainerId, PodRef},
    observation::{ContainerFacts, ContainerState, SharedFacts},
    op::{ContainerOp, Op, OpKind},
    pod::{
        Lifecycle, PodRecord,
        plan::PodState,
        status::{Waiting, is_terminal},
        sync_pod::event,
    },
    probes::HttpGet,
    time::{Now, Uptime},
};

/// Bounds a hung hook; upstream has no limit.
pub const POST_START_LIMIT: Duration = Duration::from_secs(2 * 3600);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HookRequest {
    pub pod: PodRef,
    pub container: String,
    pub id: ContainerId,
    pub hook: Hook,
    pub action: HookAction,
    /// The hook is aborted after this time.
    pub limit: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Hook {
    PostStart,
    PreStop,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HookAction {
    Exec {
        command: Vec<String>,
    },
    Http(HttpGet),
    Sleep {
        secs: u64,
    },
    /// The hook's definition is invalid, so it has failed.
    Invalid(String),
}

/// How far an instance's preStop hook is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PreStop {
    Began(Uptime),
    /// It has finished, after this much of the grace period.
    Took(Duration),
}

impl HookRequest {
    /// `None`: the container has no such hook.
    pub fn of(record: &PodRecord, name: &str, id: &ContainerId, hook: Hook, limit: Duration) -> Option<Self> {
        let mut all = record.init_containers().iter().chain(record.containers());
        let container = all.find(|container| container.name == name)?;
        let action = action(record, container, handler(container, hook)?);
        Some(HookRequest { pod: record.id.clone(), container: name.to_owned(), id: id.clone(), hook, action, limit })
    }

    /// The event for an HTTPS hook whose server has no TLS.
    pub fn fell_back(&self, facts: &Facts) -> Option<EventRecord> {
        let Facts::HookFellBack { address } = facts else { return None };
        let message = format!("request to HTTPS lifecycle hook {address} got HTTP response, retry with HTTP succeeded");
        let (about, reason) =
            (InvolvedObject::Pod(self.pod.clone()), event_reasons::LIFECYCLE_HTTP_FALLBACK.to_owned());
        Some(EventRecord::new(about, Severity::Warning, reason, message))
    }
}

impl Flight {
    /// The hook of this kind in flight.
    pub fn hook(&self, hook: Hook) -> Option<&HookRequest> {
        match &self.op {
            Op::Container(ContainerOp::RunHook(request)) if request.hook == hook => Some(request),
            _ => None,
        }
    }
}

impl PodRecord {
    /// How much of the grace period the instance's preStop hook took; `None` when none has finished.
    pub fn pre_stop_secs(&self, container: &ContainerFacts) -> Option<i64> {
        match self.instance(&container.id).pre_stop {
            Some(PreStop::Took(time)) => Some(i64::try_from(time.as_secs()).unwrap_or(i64::MAX)),
            Some(PreStop::Began(_)) | None => None,
        }
    }

    /// A new grace period has begun: hooks have used none of it. A running hook is not started again (upstream cancels and
    /// restarts it).
    pub fn restart_pre_stop_clocks(&mut self, now: Now) {
        for hook in self.instances.values_mut().filter_map(|instance| instance.pre_stop.as_mut()) {
            *hook = match hook {
                PreStop::Began(_) => PreStop::Began(now.uptime),
                PreStop::Took(_) => PreStop::Took(Duration::ZERO),
            };
        }
    }
}

impl PodState<'_> {
    /// The container's start finishes only with its postStart hook.
    pub fn is_post_starting(&self, container: &Container) -> bool {
        let flight = self.flights.get(&PodSubject::Container(container.name.clone()));
        has_post_start(container)
            && flight.is_some_and(|flight| flight.hook(Hook::PostStart).is_some() || flight.op.kind() == OpKind::Start)
    }

    /// The facts as a status shows them: a container does not run before its postStart hook has succeeded, and the short time
    /// between its creation and its start is not shown.
    pub fn facts_for_status(&self, facts: &SharedFacts) -> SharedFacts {
        let specs = || self.init_containers().iter().chain(self.containers());
        let is_hidden = |found: &ContainerFacts| {
            let newest = facts.newest_container(&found.name).is_some_and(|newest| newest.id == found.id);
            let is_post_starting = || specs().any(|spec| spec.name == found.name && self.is_post_starting(spec));
            let is_early = || self.instance(&found.id).has_post_start_failed || is_post_starting();
            found.exit().is_none() && newest && (self.is_merely_created(found) || is_early())
        };
        if !facts.containers.iter().any(is_hidden) {
            return facts.clone();
        }
        let mut shown = facts.as_ref().clone();
        shown.containers.retain(|found| !is_hidden(found));
        Arc::new(shown)
    }
}

impl PodRecord {
    /// Created, and either its start by this process has not failed (it runs in a moment, or does already), or its pod has ended
    /// and it never starts.
    fn is_merely_created(&self, found: &ContainerFacts) -> bool {
        let phase = self.pod.status.as_ref().and_then(|status| status.phase.as_deref());
        let has_ended = phase.is_some_and(is_terminal)
            || matches!(self.lifecycle, Lifecycle::Terminated { .. } | Lifecycle::Finished { .. });
        let is_starting = self.container(&found.name).last_attempt == Some(found.attempt)
            && !self.failures.contains_key(&PodSubject::Container(found.name.clone()));
        found.state == ContainerState::Created && (has_ended || is_starting)
    }

    /// Applies a hook's result; returns the event. The hook's output stays out of events: it may hold secrets.
    pub fn hook_ended(&mut self, order: &HookRequest, error: Option<EffectError>, now: Now) -> Option<EventRecord> {
        let warning = |reason: &str, message: &str| event(self, &order.container, Severity::Warning, reason, message);
        match order.hook {
            Hook::PreStop => {
                let event = error.map(|_| warning(event_reasons::FAILED_PRE_STOP_HOOK, "PreStopHook failed"));
                if let Some(PreStop::Began(began)) = self.instance(&order.id).pre_stop {
                    self.instance_mut(&order.id).pre_stop = Some(PreStop::Took(now.uptime.since(began)));
                }
                event
            }
            Hook::PostStart => {
                let error = error?;
                let event = warning(event_reasons::FAILED_POST_START_HOOK, "PostStartHook failed");
                self.instance_mut(&order.id).has_post_start_failed = true;
                let waiting = Waiting { reason: Reason::PostStartHookError, message: error.message };
                self.container_mut(&order.container).waiting = Some(waiting);
                Some(event)
            }
        }
    }
}

pub fn has_post_start(container: &Container) -> bool {
    handler(container, Hook::PostStart).is_some()
}

fn handler(container: &Container, hook: Hook) -> Option<&LifecycleHandler> {
    let lifecycle = container.lifecycle.as_ref()?;
    match hook {
        Hook::PostStart => lifecycle.post_start.as_ref(),
        Hook::PreStop => lifecycle.pre_stop.as_ref(),
    }
}

fn action(record: &PodRecord, container: &Container, handler: &LifecycleHandler) -> HookAction {
    if let Some(exec) = &handler.exec {
        return HookAction::Exec { command: exec.command.clone().unwrap_or_default() };
    }
    if let Some(get) = &handler.http_get {
        let sandbox = record.facts.as_ref().and_then(|facts| facts.newest_sandbox());
        let known = sandbox.and_then(|sandbox| sandbox.ips.first()).map(String::as_str);
        let pod_ip = known.or(record.uses_host_network().then_some("127.0.0.1"));
        let names_host = get.host.as_ref().is_some_and(|host| !host.is_empty());
        if pod_ip.is_none() && !names_host {
            return HookAction::Invalid("failed to find networking container".to_owned());
        }
        let resolved = HttpGet::of(get, container, pod_ip.unwrap_or_default(), "lifecycle");
        return resolved.map_or_else(|error| HookAction::Invalid(error.to_string()), HookAction::Http);
    }
    match &handler.sleep {
        Some(sleep) => HookAction::Sleep { secs: u64::try_from(sleep.seconds).unwrap_or(0) },
        None => HookAction::Invalid("invalid handler".to_owned()),
    }
}
