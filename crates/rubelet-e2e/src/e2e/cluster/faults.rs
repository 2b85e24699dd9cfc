//! Many requests of the agent fail, and the cluster still converges.

use anyhow::ensure;
use rubelet_testbed::agent::{AgentOptions, Membership};
use serde_json::{Value, json};

use crate::e2e::cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, pod, recorder, spec};

pub const CASES: &[ClusterCase] = &[ClusterCase {
    name: "requests are refused, answers lost and watches cut: the cluster gets where it should",
    plane: Plane::Shared,
    run: faults,
}];

const SEED: u64 = 815;
const RUNNING: usize = 15;
const ENDING: usize = 5;
/// Each pod takes some requests, and almost every third fails.
const FAULTS_AT_LEAST: usize = 50;

fn faults(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let proxy = cluster.plane().fault_proxy(&cluster.name, SEED)?;
    let options = AgentOptions {
        cluster: Some(Membership {
            kubeconfig: cluster.plane().node_kubeconfig_by_way_of(&cluster.name, &proxy.url())?,
            ..cluster.membership()?
        }),
        ..AgentOptions::default()
    };
    cluster.node.reconfigure(&options)?;
    cluster.node.agent.start()?;
    cluster.wait_ready(120)?;
    let record = cluster.record()?;
    let mut done = spec(&cluster.name, "exit 0");
    done["restartPolicy"] = json!("Never");
    let mut mounted = spec(&cluster.name, OBEDIENT);
    mounted["containers"][0]["volumeMounts"] = json!([{ "name": "settings", "mountPath": "/settings" }]);
    mounted["volumes"] = json!([{ "name": "settings", "configMap": { "name": "settings" } }]);
    let running = (0..RUNNING).map(|number| pod(&format!("web{number}"), &mounted));
    let ending = (0..ENDING).map(|number| pod(&format!("done{number}"), &done));
    let settings =
        json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "settings" }, "data": { "a": "1" } });
    let all: Vec<Value> = std::iter::once(settings).chain(running).chain(ending).collect();
    cluster.apply_all(all)?;
    cluster.wait("all pods are where they should be", 240, |cluster| {
        for pod in cluster.pods()? {
            let is_right = if pod.name().starts_with("web") { pod.is_ready() } else { pod.phase() == "Succeeded" };
            ensure!(is_right, "{}: {}", pod.name(), pod.status());
            ensure!(pod.container("main")["restartCount"] == 0, "{}: {}", pod.name(), pod.container("main"));
        }
        Ok(())
    })?;
    cluster.kubectl(&["delete", "--wait=false", "pod", "--all"])?;
    cluster.wait_none(180)?;
    cluster.wait_ready(60)?;
    ensure!(proxy.faults() > FAULTS_AT_LEAST, "only {} requests were spoilt", proxy.faults());
    recorder::check_order(&record.finish()?)
}
