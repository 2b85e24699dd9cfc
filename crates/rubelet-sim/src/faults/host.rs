//! Faults of host calls: disks and mounts that fail, are busy, slow or hang.

use std::{io, time::Duration};

use fastrand::Rng;

use super::{Faults, roll};

const EIO: i32 = 5;
const EBUSY: i32 = 16;

/// Probabilities per call of the host.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct HostFaultRates {
    /// EIO, and no effect.
    pub io_error: f64,
    /// EBUSY for a change, and no effect.
    pub busy: f64,
    /// The call takes seconds.
    pub slow: f64,
    /// The call takes minutes, as on a hung network mount; half the time it had its effect at once.
    pub hang: f64,
}

/// The outcome of one call: it waits, happens or fails, and waits again.
#[derive(Debug)]
pub(crate) struct HostCourse {
    pub before: Duration,
    pub error: Option<io::Error>,
    pub after: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostCall {
    Look,
    Change,
}

impl HostCall {
    fn usual_micros(self) -> u64 {
        match self {
            HostCall::Look => 500,
            HostCall::Change => 2_000,
        }
    }
}

impl HostCourse {
    /// Whether it is a fault.
    pub(crate) fn is_faulty(&self) -> bool {
        self.error.is_some() || self.before + self.after > Duration::from_secs(1)
    }
}

impl Faults {
    pub(crate) fn host_course(&self, rng: &mut Rng, call: HostCall) -> HostCourse {
        let mut before = Duration::from_micros(rng.u64(0..call.usual_micros()));
        let mut after = Duration::ZERO;
        let Some(rates) = self.storm.as_ref().map(|storm| &storm.host) else {
            return HostCourse { before, error: None, after };
        };
        if roll(rng, rates.slow) {
            before += Duration::from_millis(rng.u64(1_000..20_000));
        }
        if roll(rng, rates.hang) {
            let time = Duration::from_secs(rng.u64(60..400));
            *if rng.bool() { &mut before } else { &mut after } += time;
        }
        let error = if roll(rng, rates.io_error) {
            Some(io::Error::from_raw_os_error(EIO))
        } else if call == HostCall::Change && roll(rng, rates.busy) {
            Some(io::Error::from_raw_os_error(EBUSY))
        } else {
            None
        };
        HostCourse { before, error, after }
    }
}
