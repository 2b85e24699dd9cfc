//! Log rotation: its looks and operations, and their results.
//!
//! Owns: the routing. The decisions are in `log_rotation.rs`.
//! Upstream: `container_log_manager.go`.

use std::collections::BTreeMap;

use crate::{
    agent::Agent,
    effect::{EffectError, Facts},
    flights::Subject,
    log_rotation::LogTask,
    op::{NodeOp, Op},
    time::Now,
};

impl Agent {
    /// Logs that were not measured are looked at again in time.
    pub(super) fn logs_measured(&mut self, op: &Op, result: Result<Facts, EffectError>, now: Now) {
        let Op::Node(NodeOp::MeasureLogs { logs }) = op else { return };
        let sizes = match result {
            Ok(Facts::LogSizes(sizes)) => sizes,
            Ok(_) | Err(_) => BTreeMap::new(),
        };
        self.node.logs.measured(logs, &sizes, &self.settings.logs, now);
    }

    pub(super) fn log_done(&mut self, task: LogTask, op: &Op, result: &Result<Facts, EffectError>, now: Now) {
        let Op::Log(op) = op else { return };
        self.node.logs.done(task, op.log(), result.is_ok(), &self.settings.logs, now);
    }

    /// Sends the rotations and compressions that may begin now.
    pub(super) fn rotate_logs(&mut self, now: Now) {
        if !self.node.is_ready() {
            return;
        }
        for (task, id, op) in self.node.logs.plan(&self.settings.logs) {
            let reason = match task {
                LogTask::Rotate => "the log is full",
                LogTask::Compress => "the log was rotated",
            };
            self.outbox.send(Subject::Log(id, task), op, reason.to_owned(), &self.settings, now);
        }
    }
}
