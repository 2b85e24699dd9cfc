//! The trace of a run, line by line, identical for the same seed.

use std::{fmt, time::Duration};

#[derive(Clone, Debug, Default)]
pub(crate) struct Trace {
    lines: Vec<String>,
}

impl Trace {
    /// `actor` is the origin (`cri`, `disk`, `world`, `play`, `agent`).
    pub(crate) fn push(&mut self, at: Duration, actor: &str, what: impl fmt::Display) {
        self.lines.push(format!("{:>9}.{:03} {actor:<5} {what}", at.as_secs(), at.subsec_millis()));
    }

    pub(crate) fn lines(&self) -> &[String] {
        &self.lines
    }
}
