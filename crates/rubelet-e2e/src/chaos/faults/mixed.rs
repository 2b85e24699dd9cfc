//! Several faults at once.

use std::time::Duration;

use super::{Injected, KillAgent, RuntimeKilled, network, storage};
use crate::chaos::exam::Exam;

#[derive(Debug)]
struct Mixed(Vec<Box<dyn Injected>>);

/// What does not exclude each other: a hanging mount, a dead resolver, cut connections, and kills of both programs.
pub fn begin(exam: &mut Exam) -> anyhow::Result<Box<dyn Injected>> {
    Ok(Box::new(Mixed(vec![
        storage::hung_mount(exam)?,
        network::dead_resolver(exam)?,
        network::api_resets(exam)?,
        Box::new(RuntimeKilled::default()),
        Box::new(KillAgent::default()),
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
