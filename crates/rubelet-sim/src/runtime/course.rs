//! Outcomes of runtime calls: random faults, conditions of the runtime, and pods whose calls always fail.

use std::time::Duration;

use super::{act::Act, store::Ailment};
use crate::{
    faults::{CallOutcome, Course},
    invariants::trouble::Touched,
    simulation::SimState,
};

const LOOK: Duration = Duration::from_millis(4);

impl SimState {
    pub(super) fn look_course(&mut self, method: &str, touched: &Touched) -> Course {
        let mut course = self.faults.course(&mut self.rng, LOOK);
        if course.outcome == CallOutcome::HalfDone {
            course.outcome = CallOutcome::Answered;
        }
        let ails = |ailment: Ailment| self.runtime.ailments.contains(&ailment);
        let is_list = method.starts_with("List") && *touched == Touched::Node;
        if is_list && ails(Ailment::ListsFail) {
            course.outcome = CallOutcome::ErrorBefore;
        }
        if method == "Status" && ails(Ailment::StatusLate) {
            course.after += Duration::from_secs(self.rng.u64(8..60));
        }
        course
    }

    /// What the call comes to, how, and which pod it is for.
    pub(super) fn change_course(&mut self, act: Act, usual: Duration) -> (Act, Course, Touched) {
        let mut course = self.faults.course(&mut self.rng, usual);
        let pod = act.pod(&self.runtime.picture);
        if let Some(outcome) = pod.as_ref().and_then(|pod| self.runtime.bad_pods.get(&pod.name)) {
            course.outcome = *outcome;
        }
        let act = match (act, course.outcome) {
            (Act::RunSandbox(config), CallOutcome::HalfDone) => Act::LeaveSandbox(config),
            (act, CallOutcome::HalfDone) => {
                course.outcome = CallOutcome::Answered;
                act
            }
            (act, _) => act,
        };
        (act, course, Touched::pod(pod.map(|pod| pod.uid)))
    }
}
