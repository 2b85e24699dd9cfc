//! Whether the pod has a usable sandbox.
//!
//! Owns: when a sandbox is kept, replaced, or not created at all. Never: decides about single containers.
//! Upstream: `PodSandboxChanged` and the first half of `computePodActions`.

use std::fmt;

use k8s_openapi::api::core::v1::{Container, PodSpec};

use crate::{
    container::is_host_network,
    observation::{ContainerState, PodFacts, SandboxFacts, SandboxState},
    pod::{PodRecord, restart_policy::restarts_after},
};

#[derive(Clone, Debug, PartialEq)]
pub enum SandboxAction<'a> {
    Keep(&'a SandboxFacts),
    /// Everything of the pod that runs is stopped first.
    Create {
        attempt: u32,
        why: SandboxNeed,
    },
    /// The pod ran and will not run again; the rest of it is stopped.
    StayDown,
}

/// Why a new sandbox is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SandboxNeed {
    Missing,
    SeveralReady,
    NotReady,
    OtherNetwork,
    NoAddress,
}

impl fmt::Display for SandboxNeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SandboxNeed::Missing => "the pod has no sandbox",
            SandboxNeed::SeveralReady => "the pod has more than one ready sandbox",
            SandboxNeed::NotReady => "the pod's sandbox is not ready",
            SandboxNeed::OtherNetwork => "the sandbox has another network namespace than the pod asks for",
            SandboxNeed::NoAddress => "the sandbox has no IP address",
        })
    }
}

pub fn sandbox_action<'a>(record: &PodRecord, facts: &'a PodFacts) -> SandboxAction<'a> {
    let (attempt, why) = match usable_sandbox(record.spec(), facts) {
        Ok(sandbox) => return SandboxAction::Keep(sandbox),
        Err(need) => need,
    };
    let never_restarts = record.restart_policy() == "Never" && record.containers().iter().all(has_no_own_policy);
    // Upstream counts init containers, too, and leaves such a pod Pending for ever.
    let ran = record.containers().iter().any(|container| {
        let newest = facts.newest_container(&container.name);
        newest.is_some_and(|newest| newest.state != ContainerState::Created)
    });
    if never_restarts && ran {
        return SandboxAction::StayDown;
    }
    let anything_to_start = record.containers().iter().any(|container| {
        let last_exit = facts.newest_container(&container.name).and_then(|last| last.exit());
        last_exit.is_none_or(|exit| exit.code != 0 || restarts_after(container, record.spec(), 0))
    });
    if ran && !anything_to_start {
        return SandboxAction::StayDown;
    }
    SandboxAction::Create { attempt, why }
}

/// The sandbox to keep, or the attempt number of the next one and why it is needed.
pub fn usable_sandbox<'a>(spec: &PodSpec, facts: &'a PodFacts) -> Result<&'a SandboxFacts, (u32, SandboxNeed)> {
    let Some(newest) = facts.newest_sandbox() else {
        return Err((0, SandboxNeed::Missing));
    };
    let next = facts.sandboxes.iter().map(|sandbox| sandbox.attempt).max().unwrap_or(0) + 1;
    let ready = facts.sandboxes.iter().filter(|sandbox| sandbox.state == SandboxState::Ready).count();
    if ready > 1 {
        return Err((next, SandboxNeed::SeveralReady));
    }
    if newest.state != SandboxState::Ready {
        return Err((next, SandboxNeed::NotReady));
    }
    if newest.host_network != is_host_network(spec) {
        return Err((next, SandboxNeed::OtherNetwork));
    }
    if !newest.host_network && newest.ips.is_empty() {
        return Err((next, SandboxNeed::NoAddress));
    }
    Ok(newest)
}

fn has_no_own_policy(container: &Container) -> bool {
    container.restart_policy.is_none()
}
