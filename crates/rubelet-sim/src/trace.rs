//! The trace of a run, line by line, identical for the same seed.

use std::{fmt, time::Duration};

#[derive(Clone, Debug, Default)]
pub(crate) struct Trace {
    lines: Vec<String>,
    /// The oldest lines beyond this number are dropped, some time.
    kept: Option<usize>,
}

impl Trace {
    /// `actor` is the origin (`cri`, `disk`, `world`, `play`, `agent`).
    pub(crate) fn push(&mut self, at: Duration, actor: &str, what: impl fmt::Display) {
        if self.kept.is_some_and(|kept| self.lines.len() > 2 * kept) {
            self.lines.drain(..self.lines.len() / 2);
        }
        self.lines.push(format!("{:>9}.{:03} {actor:<5} {what}", at.as_secs(), at.subsec_millis()));
    }

    pub(crate) fn keep(&mut self, lines: usize) {
        self.kept = Some(lines);
    }

    pub(crate) fn lines(&self) -> &[String] {
        &self.lines
    }
}
