//! A simulated reboot: no process, mount or network namespace of a pod is left, and the files are.

use std::collections::BTreeMap;

use anyhow::ensure;
use rubelet_testbed::image::BUSYBOX;
use serde_json::json;

use crate::e2e::cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, pod, recorder, spec};

pub const CASES: &[ClusterCase] = &[ClusterCase {
    name: "after a reboot the same pods run again, restarted once",
    plane: Plane::Shared,
    run: reboot,
}];

fn reboot(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let web = spec(&cluster.name, OBEDIENT);
    let mut staged = web.clone();
    staged["initContainers"] = json!([{ "name": "first", "image": BUSYBOX, "command": ["true"] }]);
    staged["containers"][0]["volumeMounts"] = json!([{ "name": "scratch", "mountPath": "/scratch" }]);
    staged["volumes"] = json!([{ "name": "scratch", "emptyDir": {} }]);
    let mut done = spec(&cluster.name, "exit 0");
    done["restartPolicy"] = json!("Never");
    cluster.apply_all(vec![pod("web", &web), pod("staged", &staged), pod("done", &done)])?;
    let mut before = BTreeMap::new();
    for name in ["web", "staged"] {
        before.insert(name, cluster.wait_running(name, 90)?);
    }
    cluster.wait("done is done", 60, |cluster| {
        let pod = cluster.pod("done")?;
        ensure!(pod.phase() == "Succeeded", "{}", pod.status());
        Ok(())
    })?;
    let record = cluster.record()?;

    cluster.node.agent.kill();
    cluster.node.bed.reboot()?;
    cluster.node.agent.start()?;

    for name in ["web", "staged"] {
        let before = &before[name];
        let after = cluster.wait(&format!("{name} runs again"), 120, |cluster| {
            let pod = cluster.pod(name)?;
            pod.check_running()?;
            ensure!(pod.is_ready(), "it is not ready: {}", pod.status()["conditions"]);
            let ids = [before, &pod].map(|pod| pod.container("main")["containerID"].clone());
            ensure!(ids[0] != ids[1], "it is still told as it was");
            Ok(pod)
        })?;
        ensure!(after.uid() == before.uid(), "{name} is another pod");
        ensure!(after.container("main")["restartCount"] == 1, "{name}: {}", after.container("main"));
        ensure!(
            after.status()["startTime"] == before.status()["startTime"],
            "{name} started at {}, then at {}",
            before.status()["startTime"],
            after.status()["startTime"],
        );
    }
    let done = cluster.pod("done")?;
    ensure!(done.phase() == "Succeeded", "what was done is {}", done.status());
    // The init containers run again, and meanwhile the pod is pending again, with upstream's kubelet, too.
    let mut history = record.finish()?;
    history.retain(|seen| seen.pod.name() != "staged");
    recorder::check_order(&history)
}
