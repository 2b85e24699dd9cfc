//! CSI volumes while the driver or the agent is killed, and while the driver is away.

use std::{thread, time::Duration};

use anyhow::ensure;

use crate::{
    dice::Dice,
    e2e::cluster::{
        ClusterCase, ClusterNode, OBEDIENT, Plane,
        csi::{claim, claimed, driver::Driver, exec, spec_with, wait_only_driver},
        pod,
    },
};

pub const CASES: &[ClusterCase] = &[
    ClusterCase {
        name: "the CSI driver and the agent are killed at any moment: volumes converge, and no data is lost",
        plane: Plane::Shared,
        run: killed,
    },
    ClusterCase {
        name: "a pod whose CSI driver is away ends when the driver is back",
        plane: Plane::Shared,
        run: away,
    },
];

const SEED: u64 = 815;
const ROUNDS: usize = 5;
const PODS: usize = 3;
/// A pod with such a volume starts, and ends, in about this time.
const MOMENTS: usize = 2000;

/// In every round all pods start and end on the same claims, and something is killed during each.
fn killed(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let driver = Driver::deploy(cluster)?;
    let names: Vec<String> = (0..PODS).map(|number| format!("web{number}")).collect();
    cluster.apply_all(names.iter().map(|name| claim(&driver, name, "ReadWriteOnce")).collect())?;
    let mut dice = Dice::seeded(SEED);
    let mut expected = String::new();
    for round in 0..ROUNDS {
        expected.push_str(&format!("round {round}\n"));
        let script = format!("echo round {round} >> /data/log; sync; {OBEDIENT}");
        let pods = names.iter().map(|name| pod(name, &spec_with(cluster, &script, &[claimed("data", name)])));
        cluster.apply_all(pods.collect())?;
        kill_one(cluster, &driver, &mut dice)?;
        for name in &names {
            cluster.wait_running(name, 150)?;
            let log = exec(cluster, name, "cat /data/log")?;
            ensure!(log == expected, "in round {round}, {name} finds {log:?}");
        }
        let words: Vec<&str> = names.iter().map(String::as_str).collect();
        cluster.kubectl(&[&["delete", "--wait=false", "pod"], words.as_slice()].concat())?;
        kill_one(cluster, &driver, &mut dice)?;
        wait_only_driver(cluster, 150)?;
    }
    cluster.kubectl(&["delete", "pvc", "--all"])?;
    driver.wait_nothing_left(cluster, 150)?;
    driver.remove(cluster)
}

fn kill_one(cluster: &mut ClusterNode, driver: &Driver, dice: &mut Dice) -> anyhow::Result<()> {
    thread::sleep(Duration::from_millis(u64::try_from(dice.below(MOMENTS))?));
    if dice.below(2) == 0 {
        return driver.kill(cluster);
    }
    cluster.node.agent.kill();
    cluster.node.agent.spawn()
}

fn away(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let driver = Driver::deploy(cluster)?;
    let spec = spec_with(cluster, &format!("echo kept > /data/a; {OBEDIENT}"), &[claimed("data", "data")]);
    cluster.apply_all(vec![claim(&driver, "data", "ReadWriteOnce"), pod("web", &spec)])?;
    cluster.wait_running("web", 120)?;
    driver.stop(cluster)?;
    cluster.kubectl(&["delete", "--wait=false", "pod", "web"])?;
    cluster.wait("its container has ended", 30, |cluster| {
        let containers = cluster.node.containers()?;
        let left: Vec<_> =
            containers.iter().filter(|container| container.pod == "web" && container.is_running).collect();
        ensure!(left.is_empty(), "{left:?}");
        Ok(())
    })?;
    // Several attempts of the agent.
    thread::sleep(Duration::from_secs(4));
    ensure!(cluster.pod("web")?.is_being_deleted(), "the pod is gone, and its volume is mounted");
    driver.start(cluster)?;
    driver.wait_registered(cluster)?;
    wait_only_driver(cluster, 60)?;
    let reader = spec_with(cluster, OBEDIENT, &[claimed("data", "data")]);
    cluster.apply(pod("reader", &reader))?;
    cluster.wait_running("reader", 60)?;
    let data = exec(cluster, "reader", "cat /data/a")?;
    ensure!(data == "kept\n", "the volume has {data:?}");
    cluster.kubectl(&["delete", "pod/reader", "pvc/data"])?;
    driver.wait_nothing_left(cluster, 90)?;
    driver.remove(cluster)
}
