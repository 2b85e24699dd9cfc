//! Faults of calls to CSI plugins, and of the attach/detach controller.

use std::time::Duration;

use fastrand::Rng;
use rubelet_csi::Code;

use super::{Faults, LATE, roll};

/// Probabilities per call to a plugin, and per attachment.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CsiFaultRates {
    /// The call fails and had no effect; every code, also those that leave the outcome open.
    pub error_before: f64,
    /// It had its effect, and returns an error of any code.
    pub done_but_error: f64,
    /// No response before the client's deadline; half the time it had its effect.
    pub hang: f64,
    pub late_answer: f64,
    /// The driver does it again after it did it, as if the transport had made the call twice.
    pub doubled: f64,
    /// An attachment or its end takes minutes instead of seconds.
    pub attach_late: f64,
    /// An attachment fails, and is tried again.
    pub attach_error: f64,
}

/// The outcome of a call, and the duration of its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CsiCourse {
    pub outcome: CsiOutcome,
    pub before: Duration,
    pub after: Duration,
    pub goes_on_without_client: bool,
    /// How long after the first time it is done again.
    pub again_after: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CsiOutcome {
    Answered,
    ErrorBefore(Code),
    HangBefore,
    HangAfter,
    DoneButError(Code),
}

impl CsiCourse {
    /// It fails, hangs or is late.
    pub(crate) fn is_faulty(&self) -> bool {
        self.outcome != CsiOutcome::Answered || self.after >= LATE || self.again_after.is_some()
    }
}

/// After these the client cannot know what was done.
const UNCERTAIN: [Code; 5] =
    [Code::Canceled, Code::DeadlineExceeded, Code::Unavailable, Code::ResourceExhausted, Code::Aborted];
const FINAL: [Code; 6] = [
    Code::Internal,
    Code::InvalidArgument,
    Code::NotFound,
    Code::FailedPrecondition,
    Code::PermissionDenied,
    Code::Unknown,
];

impl Faults {
    /// `usual` is the duration of such a call on an idle node.
    pub(crate) fn csi_course(&self, rng: &mut Rng, usual: Duration) -> CsiCourse {
        let micros = u64::try_from(usual.as_micros()).unwrap_or(u64::MAX);
        let before = Duration::from_micros(rng.u64(micros / 10..=micros));
        let mut after = Duration::from_micros(rng.u64(0..=micros));
        let Some(storm) = &self.storm else {
            let goes_on_without_client = rng.bool();
            return CsiCourse {
                outcome: CsiOutcome::Answered,
                before,
                after,
                goes_on_without_client,
                again_after: None,
            };
        };
        let rates = &storm.csi;
        if roll(rng, rates.late_answer) {
            after += Duration::from_millis(rng.u64(500..60_000));
        }
        let outcome = if roll(rng, rates.error_before) {
            CsiOutcome::ErrorBefore(some_code(rng))
        } else if roll(rng, rates.done_but_error) {
            CsiOutcome::DoneButError(some_code(rng))
        } else if roll(rng, rates.hang) {
            if rng.bool() { CsiOutcome::HangBefore } else { CsiOutcome::HangAfter }
        } else {
            CsiOutcome::Answered
        };
        let goes_on_without_client = roll(rng, storm.goes_on_without_client);
        let again_after = roll(rng, rates.doubled).then(|| {
            // Some come when the client has given up.
            let most_secs = if rng.u32(0..4) == 0 { 200 } else { 5 };
            Duration::from_millis(rng.u64(1..most_secs * 1_000))
        });
        CsiCourse { outcome, before, after, goes_on_without_client, again_after }
    }

    /// How long an attachment, or its end, takes.
    pub(crate) fn attach_takes(&self, rng: &mut Rng) -> Duration {
        let usual = Duration::from_millis(rng.u64(50..4_000));
        match &self.storm {
            Some(storm) if roll(rng, storm.csi.attach_late) => usual + Duration::from_secs(rng.u64(10..180)),
            Some(_) | None => usual,
        }
    }

    pub(crate) fn attach_fails(&self, rng: &mut Rng) -> bool {
        self.storm.as_ref().is_some_and(|storm| roll(rng, storm.csi.attach_error))
    }
}

fn some_code(rng: &mut Rng) -> Code {
    if rng.bool() { UNCERTAIN[rng.usize(..UNCERTAIN.len())] } else { FINAL[rng.usize(..FINAL.len())] }
}
