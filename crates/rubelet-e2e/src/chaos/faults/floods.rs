//! Faults of pods that produce more than they should: a log, and the output of a probe.

use serde_json::json;

use super::Injected;
use crate::{
    chaos::{exam::Exam, verify::Expected},
    e2e::cluster::{OBEDIENT, spec},
};

/// All that a flooding container may print: the disk survives it even if nothing rotates its log.
const LOG_BYTES: u64 = 2 << 30;
const PROBE_BYTES: u64 = 16 << 20;
const PROBED: usize = 3;

#[derive(Debug)]
struct Flood {
    pods: Vec<(String, serde_json::Value)>,
}

/// A container that prints as fast as it can.
pub fn log_flood(exam: &mut Exam) -> anyhow::Result<Box<dyn Injected>> {
    let line =
        "a line of a log as programs write it, with a time, a level, a place and a few words about what happened";
    let script = format!("yes '{line}' | head -c {LOG_BYTES}; {OBEDIENT}");
    Ok(Box::new(Flood { pods: vec![("flood-log".to_owned(), spec(&exam.cluster.name, &script))] }))
}

/// Exec probes that print 16 MiB every second.
pub fn exec_flood(exam: &mut Exam) -> anyhow::Result<Box<dyn Injected>> {
    let mut flooding = spec(&exam.cluster.name, OBEDIENT);
    let script = format!("head -c {PROBE_BYTES} /dev/zero | tr '\\0' x");
    flooding["containers"][0]["readinessProbe"] =
        json!({ "exec": { "command": ["sh", "-c", script] }, "periodSeconds": 1, "timeoutSeconds": 10 });
    let pods = (0..PROBED).map(|number| (format!("flood-probe-{number}"), flooding.clone()));
    Ok(Box::new(Flood { pods: pods.collect() }))
}

impl Injected for Flood {
    fn strike(&mut self, exam: &mut Exam) -> anyhow::Result<()> {
        for (name, spec) in &self.pods {
            exam.create(name, spec, Expected::Ready)?;
        }
        Ok(())
    }

    fn end(&mut self, exam: &mut Exam) -> anyhow::Result<()> {
        for (name, _) in &self.pods {
            exam.delete(name)?;
        }
        Ok(())
    }

    fn clean_up(&mut self, exam: &mut Exam) -> anyhow::Result<()> {
        exam.remove(&self.pods.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>())
    }
}
