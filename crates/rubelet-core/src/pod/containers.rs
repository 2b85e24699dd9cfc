//! Which regular containers are to start, to stop, or to stay as they are?
//!
//! Owns: the verdict per regular container once the pod is initialized.
//! Upstream: the second half of `computePodActions`, `ShouldContainerBeRestarted`.

use k8s_openapi::api::core::v1::Container;

use crate::{
    observation::{ContainerFacts, ContainerState, PodFacts},
    pod::{PodRecord, restart_policy::restarts_after},
};

#[derive(Clone, Debug, PartialEq)]
pub enum Verdict<'a> {
    Keep,
    Start,
    /// Stop this instance; it is started again when it is gone.
    Replace {
        running: &'a ContainerFacts,
        why: String,
    },
    /// It ended, and its restart policy says that this was it.
    Done,
}

pub fn verdict<'a>(record: &PodRecord, container: &Container, facts: &'a PodFacts) -> Verdict<'a> {
    let Some(known) = facts.newest_container(&container.name) else { return Verdict::Start };
    match &known.state {
        ContainerState::Running { .. } => {
            let changed = known.hash.is_some_and(|hash| hash != crate::container::hash(container));
            if !changed {
                return Verdict::Keep;
            }
            let why = format!("Container {} definition changed, will be restarted", container.name);
            Verdict::Replace { running: known, why }
        }
        ContainerState::Unknown => Verdict::Replace {
            running: known,
            why: "Container is in \"unknown\" state, try killing it before restart".to_owned(),
        },
        ContainerState::Created => Verdict::Start,
        ContainerState::Exited(exit) if restarts_after(container, record.spec(), exit.code) => Verdict::Start,
        ContainerState::Exited(_) => Verdict::Done,
    }
}
