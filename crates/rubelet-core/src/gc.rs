//! Garbage collection of dead containers and sandboxes.
//!
//! Owns: upstream's rules for desired pods; the remains of others are removed in `pod/termination.rs`.
//! Never: removes anything itself.
//! Upstream: `kuberuntime_gc.go`, `pod_container_deletor.go`.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    flights::PodSubject,
    observation::{ContainerFacts, ContainerState, PodFacts, SandboxState},
    op::{ContainerOp, Op, PodOp},
    pod::{PodRecord, plan::Planned},
    settings::Settings,
    time::Now,
};

/// In one pod: dead instances beyond `maxPerPodContainer` of their name, and sandboxes that are neither ready, nor the newest,
/// nor in use by a container.
pub fn of_living_pod(record: &PodRecord, facts: &PodFacts, settings: &Settings, now: Now) -> Vec<Planned> {
    let Ok(keep) = usize::try_from(settings.max_dead_containers_per_container) else {
        return old_sandboxes(record, facts).collect();
    };
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    let beyond = facts.containers.iter().filter(|container| is_collectable(container, settings, now)).filter(|dead| {
        let count = seen.entry(&dead.name).or_default();
        *count += 1;
        *count > keep
    });
    let reason = "newer dead instances of it are kept";
    beyond.map(|dead| removal(record, dead, reason)).chain(old_sandboxes(record, facts)).collect()
}

/// All dead containers of a pod that has ended.
pub fn all_dead(record: &PodRecord, facts: &PodFacts) -> Vec<Planned> {
    let dead = facts.containers.iter().filter(|container| container.exit().is_some());
    dead.map(|dead| removal(record, dead, "the node lacks disk space")).collect()
}

/// On the whole node: dead containers beyond `maximum-dead-containers`, the oldest first, each container keeping its fair share
/// as long as possible.
pub fn over_node_limit<'a>(
    pods: impl Iterator<Item = (&'a PodRecord, &'a PodFacts)>,
    settings: &Settings,
    now: Now,
) -> Vec<(&'a PodRecord, Planned)> {
    let Ok(limit) = usize::try_from(settings.max_dead_containers) else { return Vec::new() };
    let mut by_name: BTreeMap<_, Vec<(&PodRecord, &ContainerFacts)>> = BTreeMap::new();
    for (record, facts) in pods {
        for dead in facts.containers.iter().filter(|container| is_collectable(container, settings, now)) {
            by_name.entry((&record.id.uid, &dead.name)).or_default().push((record, dead));
        }
    }
    let total: usize = by_name.values().map(Vec::len).sum();
    if total <= limit {
        return Vec::new();
    }
    let share = (limit / by_name.len()).max(1);
    // Newest first in each list: what is beyond the share is removed first.
    let mut candidates: Vec<_> =
        by_name.values().flat_map(|list| list.iter().enumerate().map(|(rank, dead)| (rank < share, *dead))).collect();
    candidates.sort_by_key(|(within_share, (_, dead))| (*within_share, dead.created_at));
    let excess = candidates.into_iter().take(total - limit);
    excess
        .map(|(_, (record, dead))| (record, removal(record, dead, "the node keeps too many dead containers")))
        .collect()
}

fn old_sandboxes(record: &PodRecord, facts: &PodFacts) -> impl Iterator<Item = Planned> {
    let homes: BTreeSet<_> = facts.containers.iter().map(|container| &container.sandbox).collect();
    let old = facts
        .sandboxes
        .iter()
        .skip(1)
        .filter(move |sandbox| sandbox.state == SandboxState::NotReady && !homes.contains(&sandbox.id));
    old.map(|sandbox| Planned {
        subject: PodSubject::Pod,
        op: Op::Pod(PodOp::RemoveSandbox { pod: record.id.clone(), id: sandbox.id.clone() }),
        reason: "a newer sandbox has taken its place".to_owned(),
    })
}

fn removal(record: &PodRecord, dead: &ContainerFacts, reason: &str) -> Planned {
    Planned {
        subject: PodSubject::Removal(dead.id.clone()),
        op: Op::Container(ContainerOp::Remove { pod: record.id.clone(), name: dead.name.clone(), id: dead.id.clone() }),
        reason: reason.to_owned(),
    }
}

fn is_collectable(container: &ContainerFacts, settings: &Settings, now: Now) -> bool {
    let is_dead = match container.state {
        ContainerState::Exited(_) => true,
        // A created container is a start that will resume; an unknown one is stopped first.
        ContainerState::Created | ContainerState::Running { .. } | ContainerState::Unknown => false,
    };
    is_dead && now.wall_since(container.created_at) >= settings.min_container_ttl
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{
        event::Source,
        id::PodRef,
        pod::Desired,
        test_support::{facts, mk_pod, now},
    };

    /// The containers removed when the node keeps at most `limit` dead ones, as `pod container-id`.
    fn removed(pods: &[(&str, &str)], limit: i32) -> Vec<String> {
        let settings = Settings { max_dead_containers: limit, ..Settings::for_node("node") };
        let known: Vec<_> = pods
            .iter()
            .map(|(uid, state)| {
                let mut pod = mk_pod("always | main a | main b");
                pod.metadata.uid = Some((*uid).to_owned());
                let record = PodRecord::new(PodRef::of(&pod), Arc::new(pod), Desired::By(Source::File), 1, now());
                (record, facts(state))
            })
            .collect();
        let over = over_node_limit(known.iter().map(|(record, facts)| (record, facts)), &settings, now());
        over.into_iter()
            .map(|(record, planned)| match planned.op {
                Op::Container(ContainerOp::Remove { id, .. }) => format!("{} {id}", record.id.uid),
                other => panic!("only containers are removed: {other:?}"),
            })
            .collect()
    }

    #[test]
    fn oldest_dead_containers_over_the_node_limit_are_removed() {
        let pods = [("p", "a: exit(1) x3 5s; b: running 5s"), ("q", "a: exit(1) 50s")];
        for (limit, expected) in [
            (-1, vec![]),
            (4, vec![]),
            (3, vec!["p a0"]),
            // Each container keeps one while the limit allows one each.
            (2, vec!["p a0", "p a1"]),
            (1, vec!["p a0", "p a1", "q a0"]),
            (0, vec!["p a0", "p a1", "q a0", "p a2"]),
        ] {
            assert_eq!(removed(&pods, limit), expected, "limit {limit}");
        }
    }
}
