//! The driver, its pod or the agent is killed in the middle of each call of the Node service.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use rubelet_testbed::{agent::AgentOptions, clock};
use serde_json::json;

use crate::e2e::cluster::{
    ClusterCase, ClusterNode, OBEDIENT, Plane,
    csi::{claim, claimed, driver::Driver, exec, gate::Gate, spec_with, wait_bound, wait_only_driver},
    pod,
};

pub const CASES: &[ClusterCase] = &[ClusterCase {
    name: "the CSI driver, the agent or the driver's pod is killed in the middle of each node call, and the call is repeated",
    plane: Plane::Shared,
    run: killed_in_calls,
}];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Victim {
    Driver,
    Agent,
    DriverPod,
}

const INFO: &str = "NodeGetInfo";
const STAGE: &str = "NodeStageVolume";
const PUBLISH: &str = "NodePublishVolume";
const STATS: &str = "NodeGetVolumeStats";
const EXPAND: &str = "NodeExpandVolume";
const UNPUBLISH: &str = "NodeUnpublishVolume";
const UNSTAGE: &str = "NodeUnstageVolume";

/// Who dies in which calls, in the order in which they come. A driver's pod has a successor after some seconds only.
const ROUNDS: [(Victim, &[&str]); 3] = [
    (Victim::Driver, &[INFO, STAGE, PUBLISH, STATS, EXPAND, UNPUBLISH, UNSTAGE]),
    (Victim::Agent, &[INFO, STAGE, PUBLISH, STATS, EXPAND, UNPUBLISH, UNSTAGE]),
    (Victim::DriverPod, &[INFO, PUBLISH, UNPUBLISH]),
];

const CALL_LIMIT: Duration = Duration::from_secs(60);

fn killed_in_calls(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    // So that the driver is often asked for figures, and a volume's new size is soon seen.
    let periods = [("volumeStatsAggPeriod", "1s"), ("syncFrequency", "2s")];
    let config = periods.map(|(name, period)| (name.to_owned(), json!(period))).into_iter().collect();
    let options = AgentOptions { config, cluster: Some(cluster.membership()?), ..AgentOptions::default() };
    cluster.node.reconfigure(&options)?;
    cluster.start()?;
    let (driver, gate) = Driver::deploy_behind_gate(cluster)?;
    cluster.apply(claim(&driver, "data", "ReadWriteOnce"))?;
    wait_bound(cluster, "data")?;
    let mut kills = Vec::new();
    for (index, (victim, calls)) in ROUNDS.into_iter().enumerate() {
        let mut round = Round { cluster, driver: &driver, gate: &gate, victim, calls, kills: &mut kills };
        round.play(index + 1).with_context(|| format!("while {victim:?} is killed"))?;
    }
    let planned: Vec<_> = ROUNDS.iter().flat_map(|(victim, calls)| calls.iter().map(|call| (*victim, *call))).collect();
    ensure!(kills == planned, "killed in {kills:?}");
    driver.wait_registered(cluster)?;
    cluster.kubectl(&["delete", "pvc", "data"])?;
    driver.wait_nothing_left(cluster, 90)?;
    driver.remove(cluster)
}

/// A pod comes, its volume grows, it goes.
struct Round<'a> {
    cluster: &'a mut ClusterNode,
    driver: &'a Driver,
    gate: &'a Gate,
    victim: Victim,
    /// Those in which it dies.
    calls: &'static [&'static str],
    kills: &'a mut Vec<(Victim, &'static str)>,
}

impl Round<'_> {
    fn play(&mut self, number: usize) -> anyhow::Result<()> {
        // The agent that starts registers the driver anew.
        self.kill_in(&[INFO], |cluster| {
            cluster.node.agent.kill();
            cluster.node.agent.spawn()
        })?;
        self.kill_in(&[STAGE, PUBLISH], |cluster| {
            let script = format!("echo round {number} >> /data/log; sync; {OBEDIENT}");
            cluster.apply(pod("web", &spec_with(cluster, &script, &[claimed("data", "data")])))
        })?;
        let before = self.cluster.wait_running("web", 120)?.identity("main")?;
        let log = exec(self.cluster, "web", "cat /data/log")?;
        let expected: String = (1..=number).map(|number| format!("round {number}\n")).collect();
        ensure!(log == expected, "in round {number} the volume has {log:?}");
        self.kill_in(&[STATS], |_| Ok(()))?;
        self.grow(8 * (number + 1))?;
        let after = self.cluster.pod("web")?.identity("main")?;
        ensure!(after == before, "the container was disturbed: {before:?}, then {after:?}");
        self.kill_in(&[UNPUBLISH, UNSTAGE], |cluster| {
            cluster.kubectl(&["delete", "--wait=false", "pod", "web"]).map(drop)
        })?;
        wait_only_driver(self.cluster, 120)?;
        self.cluster.wait("the volume is neither published nor staged", 60, |cluster| {
            let volumes = self.driver.volumes(cluster)?;
            let is_used =
                |field: &str| volumes.iter().any(|volume| volume[field].as_array().is_some_and(|all| !all.is_empty()));
            ensure!(volumes.len() == 1 && !is_used("Published") && !is_used("Staged"), "{volumes:?}");
            Ok(())
        })
    }

    fn grow(&mut self, mebibytes: usize) -> anyhow::Result<()> {
        let size = format!("{mebibytes}Mi");
        self.kill_in(&[EXPAND], |cluster| {
            let patch = json!({ "spec": { "resources": { "requests": { "storage": size } } } }).to_string();
            cluster.kubectl(&["patch", "pvc", "data", "--patch", &patch]).map(drop)
        })?;
        self.cluster.wait("the claim has the new size", 60, |cluster| {
            let status = cluster.object("v1", "persistentvolumeclaims/data")?["status"].clone();
            ensure!(status["capacity"]["storage"] == size.as_str(), "{status}");
            let conditions = status["conditions"].as_array();
            ensure!(conditions.is_none_or(Vec::is_empty) && status["allocatedResourceStatuses"].is_null(), "{status}");
            Ok(())
        })
    }

    /// The victim dies in each of these calls, and the agent repeats it: there was no answer.
    fn kill_in(
        &mut self,
        calls: &[&'static str],
        trigger: impl FnOnce(&mut ClusterNode) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let calls: Vec<&str> = calls.iter().copied().filter(|call| self.calls.contains(call)).collect();
        let mut begun = Vec::new();
        self.gate.hold(calls.first().copied());
        trigger(self.cluster)?;
        for (index, call) in calls.iter().enumerate() {
            let place = self.kill(call, calls.get(index + 1).copied())?;
            self.kills.push((self.victim, call));
            begun.push((call, place));
        }
        // Upstream's kubelet finds devices again only by the pods that use them: once it was killed in this call, it does not repeat it.
        let is_forgotten = self.victim == Victim::Agent && self.cluster.node.agent.is_upstream();
        for (call, place) in begun.into_iter().filter(|(call, _)| !is_forgotten || **call != UNSTAGE) {
            self.gate.wait_again(call, place, CALL_LIMIT)?;
        }
        Ok(())
    }

    /// Returns where the driver's log goes on after the begin of the call.
    fn kill(&mut self, call: &'static str, next: Option<&'static str>) -> anyhow::Result<u64> {
        let driver = clock::poll(Duration::from_secs(10), Duration::from_millis(20), || self.driver.process());
        let driver = driver.context("the driver does not run")?;
        let place = self.gate.wait_begun(CALL_LIMIT)?;
        match self.victim {
            Victim::Driver => self.driver.crash(self.cluster, driver)?,
            Victim::Agent => self.cluster.node.agent.kill(),
            Victim::DriverPod => {
                // The driver notes its mounts at the end of a call, and nothing notes them in its place here.
                self.gate.wait_done(call, place, CALL_LIMIT)?;
                self.driver.force_delete(self.cluster)?;
            }
        }
        self.gate.hold(next);
        match self.victim {
            Victim::Driver => self.driver.revive(self.cluster)?,
            Victim::Agent => self.cluster.node.agent.spawn()?,
            Victim::DriverPod => self.driver.replace(self.cluster)?,
        }
        Ok(place)
    }
}
