//! Pods at the limits of the API.

use anyhow::{Context as _, ensure};
use rubelet_testbed::image::BUSYBOX;
use serde_json::{Value, json};

use crate::e2e::cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, pod, spec};

pub const CASES: &[ClusterCase] = &[ClusterCase {
    name: "pods at the limits of the API run or are refused with their reason, and the pod beside them runs",
    plane: Plane::Shared,
    run: at_the_limits,
}];

/// The API's limit of a name, and of a container's name.
const NAME: usize = 253;
const LABEL: usize = 63;
/// A file's, which a pod's log directory must keep to: `<namespace>_<name>_<uid>`.
const FILE_NAME: usize = 255;
const UID: usize = 36;

fn at_the_limits(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let node = cluster.name.clone();
    let before = cluster.node.agent.pid().context("the agent runs")?;
    let longest_that_runs = FILE_NAME - UID - 2 - node.len();
    let (long, longest) = ("n".repeat(longest_that_runs), "m".repeat(NAME));
    let mut noted = pod("noted", &spec(&node, OBEDIENT));
    noted["metadata"]["annotations"] = json!({ "example.com/notes": "x".repeat(250 << 10) });
    let mut named = spec(&node, OBEDIENT);
    named["containers"][0]["name"] = json!("c".repeat(LABEL));
    let mut patient = spec(&node, OBEDIENT);
    patient["terminationGracePeriodSeconds"] = json!(i64::MAX);
    let runs = [long.as_str(), "noted", "told", "patient", "crowd", "beside"];
    let pods = [
        pod(&longest, &named),
        pod("thousand", &thousand(&node)),
        pod(&long, &named),
        noted,
        pod("told", &told(&node)),
        pod("patient", &patient),
        pod("crowd", &crowd(&node)),
        pod("beside", &spec(&node, OBEDIENT)),
    ];
    for pod in pods {
        cluster.create(pod)?;
    }
    for name in runs.into_iter().rev() {
        cluster.wait_running(name, 300)?;
    }
    let refused = cluster.wait("a thousand containers are refused", 60, |cluster| {
        let seen = cluster.pod("thousand")?;
        ensure!(seen.phase() == "Failed", "it is {}", seen.phase());
        Ok(seen.status().clone())
    })?;
    ensure!(refused["reason"] == "OutOfcpu", "refused for {} ({})", refused["reason"], refused["message"]);
    cluster.wait("an event says why the longest name does not start", 60, |cluster| {
        let events = cluster.plane().api().list(&format!("/api/v1/namespaces/{}/events", cluster.name))?;
        let of_it = events.iter().filter(|event| event["involvedObject"]["name"] == longest.as_str());
        let told: Vec<String> = of_it.map(|event| event["message"].to_string().to_lowercase()).collect();
        ensure!(told.iter().any(|words| words.contains("file name too long")), "told is {told:?}");
        Ok(())
    })?;
    cluster.kubectl(&["delete", "pods", "--all", "--wait=false"])?;
    cluster.wait_none(300)?;
    cluster.wait("the agent shows none of them", 60, |cluster| {
        let left = cluster.node.pods()?;
        ensure!(left.is_empty(), "it still has {}", left.len());
        Ok(())
    })?;
    let after = cluster.node.agent.pid();
    ensure!(after == Some(before), "the agent ended meanwhile: {after:?} instead of {before}");
    Ok(())
}

/// More than the node has; bound to it without the scheduler.
fn thousand(node: &str) -> Value {
    let container = |number: usize| {
        let resources = json!({ "requests": { "cpu": "1" } });
        json!({ "name": format!("c{number}"), "image": BUSYBOX, "command": ["true"], "resources": resources })
    };
    json!({ "nodeName": node, "containers": (0..1000).map(container).collect::<Vec<_>>() })
}

/// As many as a shim of the runtime stops without trouble on a small machine.
fn crowd(node: &str) -> Value {
    let mut spec = spec(node, OBEDIENT);
    let main = spec["containers"][0].clone();
    let container = |number: usize| {
        let mut container = main.clone();
        container["name"] = json!(format!("c{number}"));
        container
    };
    spec["containers"] = (0..30).map(container).collect();
    spec
}

/// A megabyte of environment, which the container counts before it goes on.
fn told(node: &str) -> Value {
    let mut spec = spec(node, &format!("[ ${{#BIG9}} = 100000 ] || exit 1; {OBEDIENT}"));
    let big = |number: usize| json!({ "name": format!("BIG{number}"), "value": "e".repeat(100_000) });
    spec["containers"][0]["env"] = (0..10).map(big).collect();
    spec
}
