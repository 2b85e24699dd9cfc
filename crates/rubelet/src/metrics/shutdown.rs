//! The times of the last graceful shutdown.
//!
//! Owns: the two gauges. They are there only if shutdowns by priority are, as upstream's.

use std::sync::{Mutex, PoisonError};

use super::text::Text;
use crate::shutdown::ShutdownTimes;

#[derive(Debug, Default)]
pub struct ShutdownMetrics(Mutex<ShutdownTimes>);

impl ShutdownMetrics {
    pub(crate) fn set(&self, times: ShutdownTimes) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = times;
    }

    pub(super) fn write(&self, text: &mut Text) {
        let [start, end] = self.0.lock().unwrap_or_else(PoisonError::into_inner).as_seconds();
        let help = "[ALPHA] Last graceful shutdown start time since unix epoch in seconds";
        text.single("kubelet_graceful_shutdown_start_time_seconds", "gauge", help, start);
        let help = "[ALPHA] Last graceful shutdown end time since unix epoch in seconds";
        text.single("kubelet_graceful_shutdown_end_time_seconds", "gauge", help, end);
    }
}
