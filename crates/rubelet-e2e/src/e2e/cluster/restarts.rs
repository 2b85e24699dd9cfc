//! Starts of the agent: with an invalid kubeconfig, and again without changes to report.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use rubelet_testbed::{
    agent::{Agent, AgentOptions, Membership},
    tail,
};
use serde_json::{Value, json};

use crate::e2e::cluster::{
    ClusterCase, ClusterNode, OBEDIENT, Plane, pod, recorder, spec,
    writes::{status_writes, unexpected_writes},
};

pub const CASES: &[ClusterCase] = &[
    ClusterCase {
        name: "the agent starts again with unchanged pods: not one status is written, and the node stays ready",
        plane: Plane::Shared,
        run: quiet,
    },
    ClusterCase { name: "a wrong kubeconfig is named with what is wrong", plane: Plane::Shared, run: wrong },
];

fn quiet(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let names: Vec<String> = (0..10).map(|number| format!("web{number}")).collect();
    let mut done = spec(&cluster.name, "exit 0");
    done["restartPolicy"] = json!("Never");
    let mut pods: Vec<Value> = names.iter().map(|name| pod(name, &spec(&cluster.name, OBEDIENT))).collect();
    pods.push(pod("done", &done));
    cluster.apply_all(pods)?;
    for name in &names {
        cluster.wait_running(name, 120)?;
    }
    cluster.wait("done is done", 60, |cluster| {
        let pod = cluster.pod("done")?;
        ensure!(pod.phase() == "Succeeded", "{}", pod.status());
        Ok(())
    })?;
    // Until everything is reported.
    cluster.wait_still(Duration::from_secs(8), 60, |cluster| Ok(status_writes(cluster)?.len()))?;
    let ready_since = cluster.node_condition("Ready")?["lastTransitionTime"].clone();
    let record = cluster.record()?;
    let before = status_writes(cluster)?.len();
    for end in [Agent::stop, Agent::kill] {
        end(&mut cluster.node.agent);
        cluster.start()?;
        // Longer than one full pass of the agent.
        thread::sleep(Duration::from_secs(12));
    }
    let written = unexpected_writes(cluster, before)?;
    ensure!(written.is_empty(), "{} statuses were written:\n{}", written.len(), written.join("\n"));
    let ready = cluster.node_condition("Ready")?;
    ensure!(ready["lastTransitionTime"] == ready_since, "the node was not ready meanwhile: {ready}");
    recorder::check_order(&record.finish()?)
}

fn wrong(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let right = cluster.membership()?;
    let dir = cluster.node.bed.layout.dir.clone();
    let missing = dir.join("no-such.kubeconfig");
    let stranger = cluster.plane().node_kubeconfig("stranger")?;
    let key = edited(&right.kubeconfig, &dir.join("key.kubeconfig"), |config| {
        config["users"][0]["user"]["client-key"] = user_field(&stranger, "client-key");
    })?;
    let authority_file = dir.join("no-such-ca.crt");
    let authority = edited(&right.kubeconfig, &dir.join("ca.kubeconfig"), |config| {
        config["clusters"][0]["cluster"]["certificate-authority"] = json!(authority_file);
    })?;
    let key_file = user_field(&stranger, "client-key").as_str().unwrap_or_default().to_owned();
    // Upstream does not name the key.
    let key_words = if cluster.node.agent.is_upstream() { "private key".to_owned() } else { key_file };
    let wrongs = [
        (missing.clone(), missing.display().to_string()),
        (key, key_words),
        (authority, authority_file.display().to_string()),
    ];
    for (kubeconfig, words) in wrongs {
        let options = AgentOptions {
            cluster: Some(Membership { kubeconfig: kubeconfig.clone(), ..right.clone() }),
            ..AgentOptions::default()
        };
        cluster.node.reconfigure(&options)?;
        cluster.node.agent.spawn()?;
        cluster.wait(&format!("its log names {words}"), 30, |cluster| {
            let log = tail(&cluster.node.agent.log(), 200);
            let line = log.lines().find(|line| line.contains(&words) && is_complaint(line));
            ensure!(line.is_some(), "with {}:\n{}", kubeconfig.display(), tail(&cluster.node.agent.log(), 8));
            Ok(())
        })?;
        cluster.node.agent.stop();
        fs::remove_file(cluster.node.agent.log())?;
    }
    Ok(())
}

/// Not one that only repeats the command line.
fn is_complaint(line: &str) -> bool {
    let line = line.to_lowercase();
    ["error", "cannot", "no such file", "unable", "failed", "does not belong"].iter().any(|word| line.contains(word))
}

fn edited(from: &Path, to: &Path, edit: impl FnOnce(&mut Value)) -> anyhow::Result<PathBuf> {
    let mut config: Value = serde_json::from_str(&fs::read_to_string(from)?).context("a kubeconfig in JSON")?;
    edit(&mut config);
    fs::write(to, config.to_string())?;
    Ok(to.to_owned())
}

fn user_field(kubeconfig: &Path, field: &str) -> Value {
    let text = fs::read_to_string(kubeconfig).unwrap_or_default();
    let config: Value = serde_json::from_str(&text).unwrap_or_default();
    config["users"][0]["user"][field].clone()
}
