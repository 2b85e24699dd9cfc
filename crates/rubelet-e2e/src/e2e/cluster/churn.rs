//! A hundred pods are created and deleted at random while the agent is killed; a watch must never see a pod go back.

use std::collections::BTreeMap;

use anyhow::{Context as _, bail, ensure};
use rubelet_testbed::image::BUSYBOX;
use serde_json::{Value, json};

use crate::{
    dice::Dice,
    e2e::cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, pod, recorder},
};

pub const CASES: &[ClusterCase] = &[ClusterCase {
    name: "a hundred pods come and go while the agent is killed: no client sees a pod go back",
    plane: Plane::Shared,
    run: churn,
}];

const SEED: u64 = 4711;
const ROUNDS: usize = 10;
const PER_ROUND: usize = 10;
const KILLED_IN: [usize; 3] = [2, 5, 8];

/// The end of a pod that is not deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Runs,
    Succeeds,
    Fails,
    CrashLoops,
}

fn churn(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let record = cluster.record()?;
    let mut dice = Dice::seeded(SEED);
    let mut alive: BTreeMap<String, Fate> = BTreeMap::new();
    for round in 0..ROUNDS {
        let fates = [Fate::Runs, Fate::Runs, Fate::Runs, Fate::Succeeds, Fate::Fails, Fate::CrashLoops];
        let new: BTreeMap<String, Fate> =
            (0..PER_ROUND).map(|number| (format!("p{round}-{number}"), fates[dice.below(fates.len())])).collect();
        cluster.apply_all(new.iter().map(|(name, fate)| manifest(&cluster.name, name, *fate)).collect())?;
        alive.extend(new);
        let names: Vec<String> = alive.keys().cloned().collect();
        let unlucky: Vec<&str> = names.iter().filter(|_| dice.below(3) == 0).map(String::as_str).collect();
        if !unlucky.is_empty() {
            cluster.kubectl(&[&["delete", "--wait=false", "pod"], unlucky.as_slice()].concat())?;
        }
        alive.retain(|name, _| !unlucky.contains(&name.as_str()));
        if KILLED_IN.contains(&round) {
            cluster.node.agent.kill();
            cluster.node.agent.spawn()?;
        }
    }
    cluster.wait("each pod has met its fate", 240, |cluster| {
        let pods = cluster.pods()?;
        ensure!(pods.len() == alive.len(), "{} pods instead of {}", pods.len(), alive.len());
        for pod in &pods {
            let fate = alive.get(pod.name()).with_context(|| format!("{} is not gone", pod.name()))?;
            let restarts = pod.container("main")["restartCount"].as_i64().unwrap_or_default();
            let is_met = match fate {
                Fate::Runs => pod.is_ready() && restarts == 0,
                Fate::Succeeds => pod.phase() == "Succeeded",
                Fate::Fails => pod.phase() == "Failed",
                Fate::CrashLoops => pod.phase() == "Running" && restarts > 0,
            };
            if !is_met {
                bail!("{} should meet {fate:?}: {}", pod.name(), pod.status());
            }
        }
        Ok(())
    })?;
    cluster.kubectl(&["delete", "--wait=false", "pod", "--all"])?;
    cluster.wait_none(240)?;
    let history = record.finish()?;
    ensure!(history.len() > ROUNDS * PER_ROUND * 3, "only {} events were seen", history.len());
    recorder::check_order(&history)
}

fn manifest(node: &str, name: &str, fate: Fate) -> Value {
    let (script, policy) = match fate {
        Fate::Runs => (OBEDIENT, "Always"),
        Fate::Succeeds => ("exit 0", "Never"),
        Fate::Fails => ("exit 4", "Never"),
        Fate::CrashLoops => ("exit 5", "Always"),
    };
    let mut spec = json!({
        "nodeName": node,
        "terminationGracePeriodSeconds": 2,
        "restartPolicy": policy,
        "containers": [{ "name": "main", "image": BUSYBOX, "command": ["sh", "-c", script] }],
    });
    if fate == Fate::Runs {
        spec["initContainers"] = json!([{ "name": "first", "image": BUSYBOX, "command": ["true"] }]);
    }
    pod(name, &spec)
}
