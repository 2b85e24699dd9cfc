//! The last events, for `rubelet events`.
//!
//! Owns: a bounded ring of what was recorded, and the log line of each; the same event again raises its count instead of taking a place.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

use jiff::Timestamp;
use rubelet_core::effect::{EventRecord, Severity};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

/// A few screens of history; at about 300 bytes each this is 300 KB at most.
const CAPACITY: usize = 1000;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoggedEvent {
    /// Grows with every record, so that a reader can request newer ones.
    pub sequence: u64,
    #[serde(flatten)]
    pub record: EventRecord,
    pub count: u32,
    pub first_at: Timestamp,
    pub last_at: Timestamp,
}

#[derive(Clone, Debug)]
pub struct EventLog {
    ring: Arc<Mutex<VecDeque<LoggedEvent>>>,
    newest: watch::Sender<u64>,
}

impl Default for EventLog {
    fn default() -> Self {
        EventLog { ring: Arc::default(), newest: watch::Sender::new(0) }
    }
}

impl EventLog {
    pub fn record(&self, record: EventRecord, at: Timestamp) {
        match record.severity {
            Severity::Normal => tracing::info!(about = %record.about, reason = record.reason, "{}", record.message),
            Severity::Warning => tracing::warn!(about = %record.about, reason = record.reason, "{}", record.message),
        }
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let sequence = *self.newest.borrow() + 1;
        let (count, first_at) = match ring.iter().rposition(|known| known.record == record) {
            Some(position) => {
                let known = ring.remove(position).expect("the position was just found");
                (known.count + 1, known.first_at)
            }
            None => (1, at),
        };
        if ring.len() == CAPACITY {
            ring.pop_front();
        }
        ring.push_back(LoggedEvent { sequence, record, count, first_at, last_at: at });
        drop(ring);
        self.newest.send_replace(sequence);
    }

    /// Events recorded after `sequence`, oldest first.
    pub fn since(&self, sequence: u64) -> Vec<LoggedEvent> {
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        ring.iter().filter(|event| event.sequence > sequence).cloned().collect()
    }

    /// The newest sequence number, for waiting on the next event.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.newest.subscribe()
    }
}
