//! Faults and their probabilities.
//!
//! Owns: the rates and the random draws. Never: acts; the fakes do.

mod csi;
mod host;

use std::time::Duration;

use fastrand::Rng;
use rubelet_kube::port::ApiErrorKind;

pub(crate) use self::{
    csi::{CsiCourse, CsiFaultRates, CsiOutcome},
    host::{HostCall, HostFaultRates},
};

/// Probabilities per call, event or hint. All zero is a world without faults.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct FaultRates {
    /// The call fails and had no effect.
    pub error_before: f64,
    /// The call never returns; half the time it had its effect.
    pub hang: f64,
    /// It had its effect, and returns an error.
    pub done_but_error: f64,
    /// The response takes seconds.
    pub late_answer: f64,
    /// A list of everything is some seconds stale.
    pub stale_list: f64,
    /// So is a list of one pod's objects, which containerd never returns.
    pub stale_look: f64,
    pub event_lost: f64,
    pub event_doubled: f64,
    pub event_late: f64,
    /// A directory change without a hint.
    pub hint_lost: f64,
    /// The agent dies at a call, before or after its effect.
    pub agent_death: f64,
    /// A server that continues a call after its client disconnected.
    pub goes_on_without_client: f64,
    /// RunPodSandbox fails and leaves its sandbox behind, not ready.
    pub sandbox_left: f64,
    pub host: HostFaultRates,
    pub api: ApiFaultRates,
    pub csi: CsiFaultRates,
}

/// Probabilities per request to the API server, and per watch event.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ApiFaultRates {
    /// No connection, and no effect.
    pub refused: f64,
    /// 409 for a write, and no effect.
    pub conflict: f64,
    /// 429 with `Retry-After`.
    pub throttled: f64,
    /// 500, and no effect.
    pub server_error: f64,
    /// 401, 403 or 422, and no effect.
    pub rejected: f64,
    /// It had its effect, and the response is lost or an error.
    pub done_but_error: f64,
    /// No response; half the time it had its effect.
    pub hang: f64,
    pub late_answer: f64,
    pub watch_cut: f64,
    /// 410: the server's history expires now.
    pub gone: f64,
    pub event_doubled: f64,
    /// The watch falls behind by some seconds.
    pub event_late: f64,
}

/// Whether faults happen at all: a run has a stormy part and then a calm one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Faults {
    pub storm: Option<FaultRates>,
}

/// The outcome of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallOutcome {
    Answered,
    ErrorBefore,
    HangBefore,
    HangAfter,
    DoneButError,
    /// It failed half way: the sandbox of RunPodSandbox exists and does not run.
    HalfDone,
}

/// The outcome of one call, and the duration of its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Course {
    pub outcome: CallOutcome,
    pub before: Duration,
    pub after: Duration,
    pub goes_on_without_client: bool,
}

impl Course {
    /// It fails, hangs or is late.
    pub(crate) fn is_faulty(&self) -> bool {
        self.outcome != CallOutcome::Answered || self.after >= LATE
    }
}

impl ApiCourse {
    /// It fails, hangs or is late.
    pub(crate) fn is_faulty(&self) -> bool {
        self.outcome != ApiCallOutcome::Answered || self.after >= LATE
    }
}

/// A response that takes this long is a fault.
const LATE: Duration = Duration::from_millis(500);

/// The outcome of a request to the API server, and the duration of its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ApiCourse {
    pub outcome: ApiCallOutcome,
    pub before: Duration,
    pub after: Duration,
    pub goes_on_without_client: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ApiCallOutcome {
    Answered,
    ErrorBefore(ApiErrorKind),
    HangBefore,
    HangAfter,
    DoneButError(ApiErrorKind),
}

/// What happens to a watch that has an event to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WatchDelivery {
    Once,
    Twice,
    Late(Duration),
    Cut,
    Gone,
}

/// The scope of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    Everything,
    OnePod,
}

impl Scope {
    pub(crate) fn of<Filter>(filter: Option<&Filter>) -> Self {
        if filter.is_some() { Scope::OnePod } else { Scope::Everything }
    }
}

/// How an event is delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventDelivery {
    Once,
    Twice,
    Lost,
    Late(Duration),
}

impl Faults {
    /// `usual` is the duration of such a call on an idle node.
    pub(crate) fn course(&self, rng: &mut Rng, usual: Duration) -> Course {
        // From a tenth to twice the usual time, so that no two calls stay in step.
        let micros = u64::try_from(usual.as_micros()).unwrap_or(u64::MAX);
        let before = Duration::from_micros(rng.u64(micros / 10..=micros));
        let mut after = Duration::from_micros(rng.u64(0..=micros));
        let Some(rates) = &self.storm else {
            return Course { outcome: CallOutcome::Answered, before, after, goes_on_without_client: rng.bool() };
        };
        if roll(rng, rates.late_answer) {
            after += Duration::from_millis(rng.u64(1_000..30_000));
        }
        let outcome = if roll(rng, rates.error_before) {
            CallOutcome::ErrorBefore
        } else if roll(rng, rates.sandbox_left) {
            CallOutcome::HalfDone
        } else if roll(rng, rates.hang) {
            if rng.bool() { CallOutcome::HangBefore } else { CallOutcome::HangAfter }
        } else if roll(rng, rates.done_but_error) {
            CallOutcome::DoneButError
        } else {
            CallOutcome::Answered
        };
        let goes_on_without_client = roll(rng, rates.goes_on_without_client);
        Course { outcome, before, after, goes_on_without_client }
    }

    /// `is_change`: only writes get a conflict.
    pub(crate) fn api_course(&self, rng: &mut Rng, is_change: bool) -> ApiCourse {
        let before = Duration::from_micros(rng.u64(300..4_000));
        let mut after = Duration::from_micros(rng.u64(100..4_000));
        let Some(rates) = &self.storm else {
            return ApiCourse { outcome: ApiCallOutcome::Answered, before, after, goes_on_without_client: rng.bool() };
        };
        let api = &rates.api;
        if roll(rng, api.late_answer) {
            after += Duration::from_millis(rng.u64(500..20_000));
        }
        let outcome = if roll(rng, api.refused) {
            ApiCallOutcome::ErrorBefore(ApiErrorKind::Unreachable)
        } else if is_change && roll(rng, api.conflict) {
            ApiCallOutcome::ErrorBefore(ApiErrorKind::Conflict)
        } else if roll(rng, api.throttled) {
            let retry_after = Some(Duration::from_secs(rng.u64(1..10)));
            ApiCallOutcome::ErrorBefore(ApiErrorKind::TooManyRequests { retry_after })
        } else if roll(rng, api.server_error) {
            ApiCallOutcome::ErrorBefore(ApiErrorKind::Server)
        } else if roll(rng, api.rejected) {
            let kinds = [ApiErrorKind::Unauthorized, ApiErrorKind::Forbidden, ApiErrorKind::Invalid];
            ApiCallOutcome::ErrorBefore(kinds[rng.usize(..kinds.len())])
        } else if roll(rng, api.done_but_error) {
            ApiCallOutcome::DoneButError(if rng.bool() { ApiErrorKind::Server } else { ApiErrorKind::Unreachable })
        } else if roll(rng, api.hang) {
            if rng.bool() { ApiCallOutcome::HangBefore } else { ApiCallOutcome::HangAfter }
        } else {
            ApiCallOutcome::Answered
        };
        let goes_on_without_client = roll(rng, rates.goes_on_without_client);
        ApiCourse { outcome, before, after, goes_on_without_client }
    }

    pub(crate) fn watch_delivery(&self, rng: &mut Rng) -> WatchDelivery {
        let Some(FaultRates { api, .. }) = &self.storm else { return WatchDelivery::Once };
        if roll(rng, api.watch_cut) {
            WatchDelivery::Cut
        } else if roll(rng, api.gone) {
            WatchDelivery::Gone
        } else if roll(rng, api.event_doubled) {
            WatchDelivery::Twice
        } else if roll(rng, api.event_late) {
            WatchDelivery::Late(Duration::from_millis(rng.u64(100..20_000)))
        } else {
            WatchDelivery::Once
        }
    }

    pub(crate) fn delivery(&self, rng: &mut Rng) -> EventDelivery {
        let Some(rates) = &self.storm else { return EventDelivery::Once };
        if roll(rng, rates.event_lost) {
            EventDelivery::Lost
        } else if roll(rng, rates.event_doubled) {
            EventDelivery::Twice
        } else if roll(rng, rates.event_late) {
            EventDelivery::Late(Duration::from_millis(rng.u64(100..20_000)))
        } else {
            EventDelivery::Once
        }
    }

    /// The age of the next list.
    pub(crate) fn list_age(&self, rng: &mut Rng, scope: Scope) -> Duration {
        let Some(rates) = &self.storm else { return Duration::ZERO };
        let chance = match scope {
            Scope::Everything => rates.stale_list,
            Scope::OnePod => rates.stale_look,
        };
        if roll(rng, chance) { Duration::from_millis(rng.u64(100..3_000)) } else { Duration::ZERO }
    }

    /// A runtime that continues a stop after its client disconnected.
    pub(crate) fn stop_goes_on(&self, rng: &mut Rng) -> bool {
        self.storm.as_ref().is_some_and(|rates| roll(rng, rates.goes_on_without_client))
    }

    pub(crate) fn loses_hint(&self, rng: &mut Rng) -> bool {
        self.storm.as_ref().is_some_and(|rates| roll(rng, rates.hint_lost))
    }

    pub(crate) fn kills_agent(&self, rng: &mut Rng) -> bool {
        self.storm.as_ref().is_some_and(|rates| roll(rng, rates.agent_death))
    }
}

/// A probability of zero draws nothing, so that an unset rate changes no other draw.
fn roll(rng: &mut Rng, chance: f64) -> bool {
    chance > 0.0 && rng.f64() < chance
}
