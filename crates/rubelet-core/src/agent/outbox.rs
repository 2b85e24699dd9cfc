//! What leaves the core this turn, and who waits for which answer.
//!
//! Owns: effect ids and deadlines. Never: decides that something be done.

use std::{collections::BTreeMap, time::Duration};

use crate::{
    effect::{Effect, EffectId, EventRecord, Op},
    id::PodUid,
    settings::Settings,
    time::{Now, Uptime},
};

/// A look that lasts longer than this is as bad as none.
const LOOK_DEADLINE: Duration = Duration::from_secs(30);
/// File operations of one pod.
const DISK_DEADLINE: Duration = Duration::from_secs(123);
/// Upstream lets a pull last for ever; this is for ever with an end.
const PULL_DEADLINE: Duration = Duration::from_secs(2 * 3600);
/// One request to the API server, waiting for the client's rate limit included.
const API_DEADLINE: Duration = Duration::from_secs(30);
/// How long after its deadline an effect that never answered is given up.
const LOST_AFTER: Duration = Duration::from_secs(10);

/// Whose effect it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    Node,
    /// A look, or an effect in the pod's `flights`.
    Pod(PodUid),
    Image,
    /// To the API server.
    Errand,
}

#[derive(Debug, Default)]
pub struct Outbox {
    effects: Vec<Effect>,
    last_id: u64,
    owners: BTreeMap<EffectId, Owner>,
    /// How many pods have arrived so far.
    pub arrivals: u64,
    /// When the next queued pull may start, if it waits for the registry's rate.
    pub pulls_at: Option<Uptime>,
}

impl Outbox {
    /// Sends an effect; returns its id and when to give up on its answer.
    pub fn send(&mut self, owner: Owner, op: Op, reason: String, settings: &Settings, now: Now) -> (EffectId, Uptime) {
        self.last_id += 1;
        let id = EffectId(self.last_id);
        let deadline = deadline(&op, settings);
        self.owners.insert(id, owner);
        self.effects.push(Effect::Do { id, op, deadline, reason });
        (id, now.uptime + deadline + LOST_AFTER)
    }

    pub fn cancel(&mut self, id: EffectId) {
        if self.owners.contains_key(&id) {
            self.abandon(id);
        }
    }

    /// Nobody waits for this any more, and whatever still does it is to stop.
    pub fn abandon(&mut self, id: EffectId) {
        self.owners.remove(&id);
        self.effects.push(Effect::Cancel(id));
    }

    pub fn recall(&mut self, id: EffectId) {
        self.effects.push(Effect::Recall(id));
    }

    pub fn record(&mut self, event: EventRecord) {
        self.effects.push(Effect::Record(event));
    }

    /// Who waits for this answer; `None` when nobody does any more.
    pub fn answered(&mut self, id: EffectId) -> Option<Owner> {
        self.owners.remove(&id)
    }

    /// The pods for which an answer is awaited.
    pub fn pods(&self) -> impl Iterator<Item = &PodUid> {
        self.owners.values().filter_map(|owner| match owner {
            Owner::Pod(uid) => Some(uid),
            Owner::Node | Owner::Image | Owner::Errand => None,
        })
    }

    pub fn next_arrival(&mut self) -> u64 {
        self.arrivals += 1;
        self.arrivals
    }

    pub fn drain(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }
}

fn deadline(op: &Op, settings: &Settings) -> Duration {
    let request = settings.runtime_request_timeout;
    match op {
        // The effect ends by the probe's own timeout; a command may have to be killed first, as slow as the runtime does it.
        Op::Probe(order) => order.timeout + request,
        Op::RunHook(order) => order.limit + request,
        Op::Relist | Op::InspectPod { .. } | Op::InspectImage { .. } => LOOK_DEADLINE,
        Op::ListPodDirs
        | Op::SyncQosCgroups { .. }
        | Op::SetUpPodCgroup { .. }
        | Op::RemovePodCgroup { .. }
        | Op::MakePodDirs { .. }
        | Op::SetUpVolumes { .. }
        | Op::RefreshVolumes { .. }
        | Op::TearDownVolumes { .. }
        | Op::RemovePodDir { .. }
        | Op::RemoveLogDir { .. } => DISK_DEADLINE,
        Op::PullImage { .. } => PULL_DEADLINE,
        // As upstream: a sandbox may need its image and a network first.
        Op::RunSandbox(_) => request * 2,
        // Two calls.
        Op::StartContainer(_) => request * 2,
        Op::CheckRuntime => request,
        Op::StopSandbox { .. } | Op::RemoveSandbox { .. } | Op::ResumeContainer { .. } | Op::RemoveContainer { .. } => {
            request
        }
        Op::LookAtNode
        | Op::PatchStatus { .. }
        | Op::DeletePod { .. }
        | Op::CreateMirrorPod { .. }
        | Op::DeleteMirrorPod { .. } => API_DEADLINE,
        Op::StopContainer { grace_secs, .. } => request + Duration::from_secs(grace_secs.unsigned_abs()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        effect::RunSandbox,
        id::PodRef,
        test_support::{mk_pod, start_order},
    };

    #[test]
    fn an_effect_has_as_long_as_its_calls_may_take() {
        let settings = Settings { runtime_request_timeout: Duration::from_secs(100), ..Settings::for_node("node") };
        let pod = std::sync::Arc::new(mk_pod("always | main a"));
        let (uid, id) = (PodUid::of(&pod), PodRef::of(&pod));
        let container = start_order(&pod);
        let sandbox = RunSandbox { uid, pod, attempt: 0, cgroup_parent: String::new() };
        let stop = Op::StopContainer { pod: id.clone(), name: "a".to_owned(), id: "a0".into(), grace_secs: 30 };
        for (op, secs) in [
            (Op::CheckRuntime, 100),
            (Op::InspectPod { pod: id.clone() }, 30),
            (Op::RunSandbox(sandbox), 200),
            (Op::StartContainer(container), 200),
            (stop, 130),
            (Op::StopSandbox { pod: id, id: "sb0".into() }, 100),
        ] {
            assert_eq!(deadline(&op, &settings), Duration::from_secs(secs), "{op:?}");
        }
    }
}
