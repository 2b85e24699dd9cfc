//! Volumes that are images.

use anyhow::ensure;
use rubelet_testbed::{
    Runtime,
    agent::AgentOptions,
    image::{self, BUSYBOX, Image, Layer, LayerBuilder, Start},
};
use serde_json::{Map, Value, json};

use super::registry::Registry;
use crate::e2e::{
    manifest::{OBEDIENT, Pod},
    node::Node,
};

const DATA: &str = "example.com/data:1";

/// A pod whose container mounts these volumes, and runs this script before it waits for its end.
fn pod(node: &Node, name: &str, script: &str, volumes: &Value, mounts: &[Value]) -> Value {
    let mut pod = Pod::new(name, &format!("{script}; {OBEDIENT}")).notes(&node.notes(name)).manifest();
    let spec = &mut pod["spec"];
    spec["volumes"]
        .as_array_mut()
        .into_iter()
        .for_each(|all| all.extend(volumes.as_array().into_iter().flatten().cloned()));
    spec["containers"][0]["volumeMounts"].as_array_mut().into_iter().for_each(|all| all.extend(mounts.iter().cloned()));
    pod
}

fn start(node: &Node, pod: &Value) -> anyhow::Result<()> {
    let name = pod["metadata"]["name"].as_str().unwrap_or_default();
    node.drop_file(&format!("{name}.json"), pod.to_string().as_bytes())
}

fn volume(name: &str, image: &str, policy: &str) -> Value {
    json!({ "name": name, "image": { "reference": image, "pullPolicy": policy } })
}

fn mount(name: &str, path: &str) -> Value {
    json!({ "name": name, "mountPath": path })
}

fn data() -> anyhow::Result<Layer> {
    let layer = LayerBuilder::default().file("data.json", b"{}", 0o644)?.dir("etc", 0o755)?;
    layer.file("etc/os-release", b"ID=data", 0o644)?.finish()
}

fn import(node: &Node) -> anyhow::Result<()> {
    let archive = node.bed.layout.dir.join("data.tar");
    let layer = data()?;
    image::write(&archive, &[Image { names: &[DATA], start: Start::default(), layers: &[&layer] }])?;
    node.bed.import(&archive)
}

/// Runtimes before containerd 2.1 do not know image volumes, and see a mount of nothing.
fn is_refused_by_runtime(node: &Node) -> anyhow::Result<bool> {
    if node.bed.runtime() != Runtime::Debian16 {
        return Ok(false);
    }
    import(node)?;
    start(node, &pod(node, "old", "true", &json!([volume("data", DATA, "Never")]), &[mount("data", "/data")]))?;
    node.wait("the runtime refuses the mount", 60, |node| {
        let seen = node.pod("old")?;
        ensure!(seen.waiting_reason("main") == Some("CreateContainerError"), "{}", seen.container("main"));
        Ok(())
    })?;
    Ok(true)
}

pub fn mounted(node: &mut Node) -> anyhow::Result<()> {
    node.agent.start()?;
    if is_refused_by_runtime(node)? {
        return Ok(());
    }
    import(node)?;
    let volumes = json!([volume("one", DATA, "IfNotPresent"), volume("two", DATA, "Never")]);
    let part = json!({ "name": "two", "mountPath": "/part", "subPath": "etc" });
    let script =
        "{ cat /one/data.json /two/etc/os-release /part/os-release; touch /one/x && echo writable; } >> /notes/main";
    for name in ["web", "other"] {
        start(node, &pod(node, name, script, &volumes, &[mount("one", "/one"), mount("two", "/two"), part.clone()]))?;
    }
    for name in ["web", "other"] {
        node.wait_running(name, 60)?;
        node.wait("the files of the image are there", 10, |node| {
            ensure!(node.noted(name) == ["{}ID=dataID=datastart"], "{:?}", node.noted(name));
            Ok(())
        })?;
    }
    let missing = json!({ "name": "two", "mountPath": "/part", "subPath": "not/there" });
    start(node, &pod(node, "astray", "true", &volumes, &[missing]))?;
    node.wait("the runtime refuses the path", 60, |node| {
        let seen = node.pod("astray")?;
        ensure!(seen.waiting_reason("main") == Some("CreateContainerError"), "{}", seen.container("main"));
        Ok(())
    })?;
    if !node.agent.is_upstream() {
        let page = node.agent.read_only("/metrics")?;
        let value = |name: &str| {
            let mut lines =
                page.lines().filter_map(|line| line.strip_prefix(&format!("kubelet_image_volume_{name}_total ")));
            lines.next().and_then(|value| value.parse::<f64>().ok()).unwrap_or_default()
        };
        // The third pod was tried once or more.
        ensure!(value("requested") >= 5.0 && value("mounted_succeed") >= 6.0, "{page}");
    }
    for name in ["web", "other", "astray"] {
        node.remove(name)?;
        node.wait_gone(name, 30)?;
    }
    Ok(())
}

pub fn missing(node: &mut Node) -> anyhow::Result<()> {
    node.agent.start()?;
    if is_refused_by_runtime(node)? {
        return Ok(());
    }
    let refused = |node: &Node, name: &str, volume: Value, reason: &str| {
        let volumes = json!([volume]);
        start(node, &pod(node, name, "true", &volumes, &[mount("v", "/v")]))?;
        node.wait(reason, 60, |node| {
            let seen = node.pod(name)?;
            ensure!(seen.waiting_reason("main") == Some(reason), "{}", seen.container("main"));
            Ok(seen.container("main")["state"]["waiting"]["message"].as_str().unwrap_or_default().to_owned())
        })
    };
    let message = refused(node, "never", volume("v", DATA, "Never"), "ErrImageNeverPull")?;
    ensure!(message == format!("Container image {DATA:?} is not present with pull policy of Never"), "{message}");
    let message = refused(node, "nowhere", volume("v", "127.0.0.1:9/none:1", "IfNotPresent"), "ImagePullBackOff")?;
    let expected = "Back-off pulling image \"127.0.0.1:9/none:1\": ErrImagePull: ";
    ensure!(message.starts_with(expected), "{message}");
    refused(node, "wrong", volume("v", "No Name", "Never"), "InvalidImageName")?;
    // Nobody mounts it.
    start(node, &pod(node, "free", "true", &json!([volume("v", "127.0.0.1:9/none:1", "Always")]), &[]))?;
    node.wait_running("free", 60)?;
    // It starts when its image comes.
    import(node)?;
    node.wait_running("never", 60).map(drop)
}

pub fn pulled(node: &mut Node) -> anyhow::Result<()> {
    node.agent.start()?;
    if is_refused_by_runtime(node)? {
        return Ok(());
    }
    let registry = Registry::serve("data", &data()?)?;
    let script = "{ cat /v/data.json; echo; } >> /notes/main";
    let mut pulls = 0;
    for (name, policy, is_pulled) in [("a", "Always", true), ("b", "IfNotPresent", false), ("c", "Always", true)] {
        start(node, &pod(node, name, script, &json!([volume("v", &registry.image, policy)]), &[mount("v", "/v")]))?;
        node.wait_running(name, 60)?;
        node.wait("the file of the image is there", 10, |node| {
            ensure!(node.noted(name) == ["{}", "start"], "{:?}", node.noted(name));
            Ok(())
        })?;
        let now = registry.pulls();
        ensure!((now > pulls) == is_pulled, "{policy}: {pulls} pulls became {now}");
        pulls = now;
    }
    Ok(())
}

pub fn in_use(node: &mut Node) -> anyhow::Result<()> {
    let mut config = Map::new();
    config.insert("imageGCHighThresholdPercent".to_owned(), json!(1));
    config.insert("imageGCLowThresholdPercent".to_owned(), json!(0));
    config.insert("imageMinimumGCAge".to_owned(), json!("1s"));
    node.reconfigure(&AgentOptions { config, ..AgentOptions::default() })?;
    node.agent.start()?;
    if is_refused_by_runtime(node)? {
        return Ok(());
    }
    import(node)?;
    start(node, &pod(node, "web", "true", &json!([volume("data", DATA, "Never")]), &[mount("data", "/data")]))?;
    node.wait_running("web", 60)?;
    super::import_unused(node)?;
    let limit_secs = if node.agent.is_upstream() { 700 } else { 400 };
    node.wait("the unused images are gone", limit_secs, |node| {
        let left = super::images(node)?.into_iter().filter(|name| name.starts_with("example.com/unused")).count();
        ensure!(left == 0, "{left} are left");
        Ok(())
    })?;
    let left = super::images(node)?;
    ensure!(left.contains(DATA) && left.contains(BUSYBOX), "an image in use is gone: {left:?}");
    node.remove("web")?;
    node.wait_gone("web", 30)
}
