//! A node's certificates: bootstrap, rotation within minutes, serving, and from an exec plugin.

use std::{collections::BTreeSet, fs};

use anyhow::{Context as _, ensure};
use rubelet_testbed::agent::{AgentOptions, Membership};
use serde_json::json;

use crate::{
    control_plane::ControlPlaneOptions,
    e2e::{
        cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, pod, spec},
        manifest::Pod,
    },
};

pub const CASES: &[ClusterCase] = &[
    ClusterCase {
        name: "a node runs static pods before it can join, joins with a token, and renews its certificate again and again",
        plane: Plane::Own(|| ControlPlaneOptions { signing_duration: Some("2m"), ..ControlPlaneOptions::default() }),
        run: rotation,
    },
    ClusterCase {
        name: "a serving certificate is asked for, and kept where upstream keeps it once it is approved",
        plane: Plane::Shared,
        run: serving,
    },
    ClusterCase {
        name: "a node whose kubeconfig names a program comes with the certificate it prints",
        plane: Plane::Shared,
        run: by_program,
    },
];

const ROTATIONS: usize = 3;

fn rotation(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let membership = cluster.membership_by_token()?;
    let kubeconfig = membership.kubeconfig.clone();
    cluster.node.reconfigure(&AgentOptions { cluster: Some(membership), ..AgentOptions::default() })?;
    let first = run_before_joining(cluster)?;
    cluster.own_plane()?.start_apiserver()?;
    cluster.wait_ready(60)?;
    ensure!(kubeconfig.exists(), "the agent wrote no kubeconfig");
    cluster.wait("the static pod has a mirror", 60, |cluster| {
        let mirror = cluster.plane().api().get(&format!("/api/v1/namespaces/default/pods/first-{}", cluster.name))?;
        let id = &mirror["status"]["containerStatuses"][0]["containerID"];
        ensure!(*id == first, "its container is {id}, and was {first}");
        Ok(())
    })?;
    let link = cluster.node.agent.pki_dir().join("kubelet-client-current.pem");
    let mut seen = BTreeSet::new();
    // Two minutes each, renewed after at most 90 % of what is left of them.
    cluster.wait("the certificate is renewed several times", 480, |cluster| {
        let target = fs::read_link(&link).with_context(|| format!("read {}", link.display()))?;
        seen.insert(target);
        let ready = cluster.node_condition("Ready")?;
        // Not `ensure`: a node that is not ready now is a failure, not a reason to poll again.
        assert_eq!(ready["status"], "True", "after {} certificates: {ready}", seen.len());
        ensure!(seen.len() > ROTATIONS, "{} certificates so far", seen.len());
        Ok(())
    })?;
    // The first ones have expired by now or soon will; the API server must know the node by the last.
    cluster.apply(pod("web", &spec(&cluster.name, OBEDIENT)))?;
    cluster.wait_running("web", 60).map(drop)
}

/// The API server is down, so nothing can be signed. Returns the id of a static pod's container.
fn run_before_joining(cluster: &mut ClusterNode) -> anyhow::Result<String> {
    cluster.own_plane()?.kill_apiserver();
    cluster.node.apply(&Pod::new("first", OBEDIENT))?;
    cluster.node.agent.start()?;
    cluster.wait("a static pod runs", 60, |cluster| {
        let pods = cluster.node.pods()?;
        let pod = pods.first().context("the agent shows no pod")?;
        pod.check_running()?;
        Ok(pod.identity("main")?.id)
    })
}

fn serving(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let config = json!({ "serverTLSBootstrap": true });
    let options = AgentOptions {
        cluster: Some(cluster.membership()?),
        config: config.as_object().cloned().unwrap_or_default(),
        ..AgentOptions::default()
    };
    cluster.node.reconfigure(&options)?;
    cluster.start()?;
    let request = cluster.wait("the node asks for a serving certificate", 30, |cluster| {
        let requests = cluster.plane().api().list("/apis/certificates.k8s.io/v1/certificatesigningrequests")?;
        let user = format!("system:node:{}", cluster.name);
        let ours = requests.into_iter().find(|request| request["spec"]["username"] == *user);
        ours.context("no request of the node's")
    })?;
    let spec = &request["spec"];
    ensure!(spec["signerName"] == "kubernetes.io/kubelet-serving", "{spec}");
    ensure!(spec["usages"].as_array().is_some_and(|usages| usages.contains(&json!("server auth"))), "{spec}");
    let link = cluster.node.agent.pki_dir().join("kubelet-server-current.pem");
    ensure!(!link.exists(), "there is a certificate that nobody approved");
    let name = request["metadata"]["name"].as_str().context("the request has no name")?;
    cluster.plane().kubectl(&["certificate", "approve", name])?;
    cluster.wait("the certificate is there", 30, |_| {
        let target = fs::read_link(&link).with_context(|| format!("read {}", link.display()))?;
        let file = target.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        ensure!(file.starts_with("kubelet-server-20"), "the link leads to {file}");
        let pem = fs::read_to_string(&link)?;
        ensure!(pem.contains("BEGIN CERTIFICATE") && pem.contains("PRIVATE KEY"), "half a pair in {file}");
        Ok(())
    })
}

fn by_program(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let (kubeconfig, note) = cluster.plane().node_kubeconfig_by_program(&cluster.name)?;
    let options =
        AgentOptions { cluster: Some(Membership { kubeconfig, ..cluster.membership()? }), ..AgentOptions::default() };
    cluster.node.reconfigure(&options)?;
    cluster.start()?;
    cluster.apply(pod("web", &spec(&cluster.name, OBEDIENT)))?;
    cluster.wait_running("web", 60)?;
    let asked = fs::read_to_string(&note).context("the program was never asked")?.lines().count();
    ensure!(asked == 1, "the program was asked {asked} times for a certificate that does not expire");
    cluster.kubectl(&["delete", "pod", "web"])?;
    cluster.wait_none(20)
}
