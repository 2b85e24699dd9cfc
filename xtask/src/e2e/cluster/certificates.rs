//! A node that joins with a token and lives on certificates that expire within minutes.

use std::{collections::BTreeSet, fs};

use anyhow::{Context as _, ensure};

use crate::{
    e2e::cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, pod, spec},
    testbed::{
        agent::{AgentOptions, Membership},
        cluster::ControlPlaneOptions,
    },
};

pub const CASES: &[ClusterCase] = &[ClusterCase {
    name: "a node joins with a token and renews its certificate in time, again and again",
    plane: Plane::Own(|| ControlPlaneOptions { signing_duration: Some("2m"), ..ControlPlaneOptions::default() }),
    run: rotation,
}];

const ROTATIONS: usize = 3;

fn rotation(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let kubeconfig = cluster.node.bed.layout.dir.join("kubelet.kubeconfig");
    let options = AgentOptions {
        cluster: Some(Membership {
            kubeconfig: kubeconfig.clone(),
            bootstrap_kubeconfig: Some(cluster.plane().bootstrap_kubeconfig()),
            ..cluster.membership()?
        }),
        ..AgentOptions::default()
    };
    cluster.node.reconfigure(&options)?;
    cluster.start()?;
    ensure!(kubeconfig.exists(), "the agent wrote no kubeconfig");
    let link = cluster.node.agent.pki_dir().join("kubelet-client-current.pem");
    let mut seen = BTreeSet::new();
    // Two minutes each, renewed after at most 90 % of what is left of them.
    cluster.wait("the certificate is renewed several times", 480, |cluster| {
        let target = fs::read_link(&link).with_context(|| format!("read {}", link.display()))?;
        seen.insert(target);
        let ready = cluster.node_condition("Ready")?;
        // Not `ensure`: a node that is not ready now is no reason to look again.
        assert_eq!(ready["status"], "True", "after {} certificates: {ready}", seen.len());
        ensure!(seen.len() > ROTATIONS, "{} certificates so far", seen.len());
        Ok(())
    })?;
    // The first ones have expired by now or soon will; the API server must know the node by the last.
    cluster.apply(pod("web", &spec(&cluster.name, OBEDIENT)))?;
    cluster.wait_running("web", 60).map(drop)
}
