//! Several faults at once.

use std::time::Duration;

use super::{Injected, RuntimeKilled, callers, network, storage};
use crate::chaos::exam::Exam;

#[derive(Debug)]
struct Mixed(Vec<Box<dyn Injected>>);

/// A hanging mount, a dead resolver, cut connections, kills of the runtime, and callers. The agent is not killed: a new process
/// has none of the blocked threads of the old one, so kills would hide what the others do.
pub fn begin(exam: &mut Exam) -> anyhow::Result<Box<dyn Injected>> {
    Ok(Box::new(Mixed(vec![
        storage::hung_mount(exam)?,
        network::dead_resolver(exam)?,
        network::api_resets(exam)?,
        callers::begin(exam)?,
        Box::new(RuntimeKilled::default()),
    ])))
}

impl Injected for Mixed {
    fn strike(&mut self, exam: &mut Exam) -> anyhow::Result<()> {
        self.0.iter_mut().try_for_each(|each| each.strike(exam))
    }

    fn tick(&mut self, exam: &mut Exam, since: Duration, hold: Duration) -> anyhow::Result<()> {
        self.0.iter_mut().try_for_each(|each| each.tick(exam, since, hold))
    }

    /// All of them, even if one fails.
    fn end(&mut self, exam: &mut Exam) -> anyhow::Result<()> {
        self.0.iter_mut().map(|each| each.end(exam)).fold(Ok(()), anyhow::Result::and)
    }

    fn clean_up(&mut self, exam: &mut Exam) -> anyhow::Result<()> {
        self.0.iter_mut().map(|each| each.clean_up(exam)).fold(Ok(()), anyhow::Result::and)
    }

    fn note(&self) -> String {
        self.0.iter().map(|each| each.note()).filter(|note| !note.is_empty()).collect::<Vec<_>>().join("; ")
    }
}
