//! The Node object: its creation, its addresses, and its deletion.

use std::{thread, time::Duration};

use anyhow::{Context as _, ensure};
use rubelet_testbed::agent::AgentOptions;
use serde_json::{Value, json};

use crate::e2e::cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, pod, spec};

pub const CASES: &[ClusterCase] = &[
    ClusterCase {
        name: "with registerNode off, no Node is made, and the agent works once somebody else made it",
        plane: Plane::Shared,
        run: not_registering,
    },
    ClusterCase {
        name: "a Node deleted under the agent is made anew by its next start, and its pods go on",
        plane: Plane::Shared,
        run: deleted,
    },
    ClusterCase {
        name: "two addresses of --node-ip are told in their order, of the node and of its pods",
        plane: Plane::Shared,
        run: two_addresses,
    },
];

/// Long enough for an agent to create its Node.
const WHILE: Duration = Duration::from_secs(3);

fn not_registering(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let config = json!({ "registerNode": false });
    let options = AgentOptions {
        cluster: Some(cluster.membership()?),
        config: config.as_object().cloned().unwrap_or_default(),
        ..AgentOptions::default()
    };
    cluster.node.reconfigure(&options)?;
    cluster.node.agent.start()?;
    check_stays_away(cluster)?;
    let labels = json!({ "kubernetes.io/hostname": cluster.name, "made-by": "somebody" });
    cluster.plane().apply(&json!({
        "apiVersion": "v1", "kind": "Node", "metadata": { "name": cluster.name, "labels": labels },
    }))?;
    cluster.wait_ready(30)?;
    ensure!(node(cluster)?["metadata"]["labels"]["made-by"] == "somebody", "it is another Node");
    cluster.apply(pod("web", &spec(&cluster.name, OBEDIENT)))?;
    cluster.wait_running("web", 30)?;
    cluster.kubectl(&["delete", "pod", "web"])?;
    cluster.wait_none(20)
}

fn deleted(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    cluster.apply(pod("web", &spec(&cluster.name, OBEDIENT)))?;
    let before = cluster.wait_running("web", 60)?.identity("main")?;
    cluster.plane().kubectl(&["delete", "node", &cluster.name])?;
    check_stays_away(cluster)?;
    cluster.node.agent.stop();
    cluster.start()?;
    let after = cluster.wait_running("web", 30)?.identity("main")?;
    ensure!(before == after, "before {before:?}, after {after:?}");
    let lease = format!("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{}", cluster.name);
    cluster.wait("the lease is the new Node's", 30, |cluster| {
        let lease = cluster.plane().api().get(&lease)?;
        let (owner, uid) = (&lease["metadata"]["ownerReferences"][0]["uid"], &node(cluster)?["metadata"]["uid"]);
        ensure!(owner == uid, "the lease is {owner}'s, the Node is {uid}");
        Ok(())
    })?;
    cluster.kubectl(&["delete", "pod", "web"])?;
    cluster.wait_none(20)
}

fn two_addresses(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let own = cluster.node.bed.address()?.to_string();
    let ips = ["fd00:213::7", &own];
    // Upstream accepts only addresses of the machine.
    cluster.node.bed.add_address(ips[0].parse()?)?;
    let options =
        AgentOptions { cluster: Some(cluster.membership()?), node_ip: Some(ips.join(",")), ..AgentOptions::default() };
    cluster.node.reconfigure(&options)?;
    cluster.start()?;
    let told = node(cluster)?["status"]["addresses"].take();
    let addresses: Vec<_> = told.as_array().into_iter().flatten().map(|each| &each["address"]).collect();
    ensure!(addresses == [ips[0], ips[1], &cluster.name], "the node's addresses are {told}");
    let mut on_the_host = spec(&cluster.name, OBEDIENT);
    on_the_host["hostNetwork"] = json!(true);
    cluster.apply(pod("web", &on_the_host))?;
    let pod = cluster.wait_running("web", 60)?;
    for field in ["hostIPs", "podIPs"] {
        let expected = json!([{ "ip": ips[0] }, { "ip": ips[1] }]);
        ensure!(pod.status()[field] == expected, "{field} are {}", pod.status()[field]);
    }
    cluster.kubectl(&["delete", "pod", "web"])?;
    cluster.wait_none(20)
}

fn node(cluster: &ClusterNode) -> anyhow::Result<Value> {
    cluster.plane().api().get(&format!("/api/v1/nodes/{}", cluster.name)).context("the Node object")
}

fn check_stays_away(cluster: &ClusterNode) -> anyhow::Result<()> {
    thread::sleep(WHILE);
    ensure!(node(cluster).is_err(), "the agent made a Node");
    Ok(())
}
