//! Events as `kubectl get events` shows them: source, text and count.

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use crate::e2e::cluster::{ClusterCase, ClusterNode, Plane, pod, spec};

pub const CASES: &[ClusterCase] = &[
    ClusterCase {
        name: "what happens again is counted in one event, which names the agent and its node",
        plane: Plane::Shared,
        run: counted,
    },
    ClusterCase {
        name: "many events that differ in their words alone are combined into one that is counted",
        plane: Plane::Shared,
        run: combined,
    },
];

fn counted(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    cluster.apply(pod("crash", &spec(&cluster.name, "exit 1")))?;
    let path = format!("/api/v1/namespaces/{}/events", cluster.name);
    let events = cluster.wait("the second start is counted, and a back-off follows", 60, |cluster| {
        let events = cluster.plane().api().list(&path)?;
        ensure!(one(&events, "Started")?["count"].as_i64() >= Some(2), "{}", one(&events, "Started")?);
        one(&events, "BackOff")?;
        Ok(events)
    })?;
    for (reason, kind) in [("Pulled", "Normal"), ("Created", "Normal"), ("Started", "Normal"), ("BackOff", "Warning")] {
        let event = one(&events, reason)?;
        let is_ours = event["source"]["component"] == "kubelet" && event["source"]["host"] == *cluster.name;
        ensure!(is_ours && event["type"] == kind, "{event}");
        ensure!(event["involvedObject"]["fieldPath"] == "spec.containers{main}", "{event}");
        let time =
            |field: &str| event[field].as_str().map(str::to_owned).with_context(|| format!("no {field}: {event}"));
        ensure!(time("firstTimestamp")? <= time("lastTimestamp")?, "{event}");
    }
    let shown = cluster.kubectl(&["get", "events", "--field-selector=involvedObject.name=crash"])?;
    let line = shown.lines().find(|line| line.contains("BackOff")).context("kubectl shows no BackOff")?;
    ensure!(line.contains("Warning") && line.contains("pod/crash"), "{line}");
    ensure!(line.contains("Back-off restarting failed container main in pod crash_"), "{line}");

    let of_node = cluster.plane().api().list("/api/v1/namespaces/default/events")?;
    let of_node: Vec<_> =
        of_node.into_iter().filter(|event| event["involvedObject"]["name"] == *cluster.name).collect();
    for reason in ["Starting", "NodeReady"] {
        ensure!(one(&of_node, reason)?["involvedObject"]["kind"] == "Node", "{of_node:?}");
    }
    cluster.kubectl(&["delete", "pod", "crash"])?;
    cluster.wait_none(20)
}

fn combined(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let mut crowd = spec(&cluster.name, "exit 0");
    // Two events each: more containers would exceed the event burst of one pod.
    let containers = (0..11).map(|number| {
        json!({ "name": format!("c{number}"), "image": format!("e2e.invalid/none:{number}"), "imagePullPolicy": "Never" })
    });
    crowd["containers"] = containers.collect();
    cluster.apply(pod("crowd", &crowd))?;
    let path = format!("/api/v1/namespaces/{}/events", cluster.name);
    let prefix = "(combined from similar events): Container image \"e2e.invalid/none:";
    cluster.wait("the tenth and the eleventh are combined", 60, |cluster| {
        let events = cluster.plane().api().list(&path)?;
        let of_images = events.iter().filter(|event| event["reason"] == "ErrImageNeverPull");
        let is_combined = |event: &&Value| event["message"].as_str().is_some_and(|text| text.starts_with(prefix));
        let (joint, single): (Vec<_>, Vec<_>) = of_images.partition(is_combined);
        ensure!(single.len() == 9 && joint.len() == 1, "{} alone, {} combined", single.len(), joint.len());
        ensure!(joint[0]["count"].as_i64() >= Some(2), "{}", joint[0]);
        ensure!(joint[0]["type"] == "Warning" && joint[0]["involvedObject"]["name"] == "crowd", "{}", joint[0]);
        Ok(())
    })?;
    cluster.kubectl(&["delete", "pod", "crowd"])?;
    cluster.wait_none(20)
}

/// The only one with this reason.
fn one<'a>(events: &'a [Value], reason: &str) -> anyhow::Result<&'a Value> {
    let found: Vec<_> = events.iter().filter(|event| event["reason"] == reason).collect();
    ensure!(found.len() <= 1, "{} events {reason}: {found:?}", found.len());
    found.first().copied().with_context(|| format!("no event {reason}"))
}
