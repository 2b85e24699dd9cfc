//! What joins a pod that runs, and what of a volume a container sees: ephemeral containers and parts of volumes.

use std::fs;

use anyhow::{Context as _, ensure};
use serde_json::json;

use crate::{
    e2e::cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, pod, spec},
    image::BUSYBOX,
};

pub const CASES: &[ClusterCase] = &[
    ClusterCase {
        name: "kubectl debug sees the processes of its target and runs once",
        plane: Plane::Shared,
        run: debug,
    },
    ClusterCase {
        name: "containers see parts of volumes and nothing beyond them",
        plane: Plane::Shared,
        run: sub_paths,
    },
];

fn debug(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let mut spec = spec(&cluster.name, OBEDIENT);
    spec["terminationGracePeriodSeconds"] = json!(1);
    cluster.apply(pod("web", &spec))?;
    cluster.wait_running("web", 60)?;
    let image = format!("--image={BUSYBOX}");
    // The first process it sees is its target's, not its own.
    let look = "grep -q wait /proc/1/cmdline && exit 7";
    cluster.kubectl(&[
        "debug",
        "pod/web",
        &image,
        "--image-pull-policy=IfNotPresent",
        "--target=main",
        "--container=debugger",
        "--",
        "sh",
        "-c",
        look,
    ])?;
    let ended = cluster.wait("the debugger has looked", 30, |cluster| {
        let pod = cluster.pod("web")?;
        let status = pod.status()["ephemeralContainerStatuses"][0].clone();
        ensure!(status["state"]["terminated"].is_object(), "{status}");
        Ok(status)
    })?;
    ensure!(ended["name"] == "debugger" && ended["state"]["terminated"]["exitCode"] == 7, "{ended}");
    // One more, which also shows that the first is not started again.
    cluster.kubectl(&[
        "debug",
        "pod/web",
        &image,
        "--image-pull-policy=IfNotPresent",
        "--container=second",
        "--",
        "sh",
        "-c",
        OBEDIENT,
    ])?;
    let pod = cluster.wait("the second runs", 30, |cluster| {
        let pod = cluster.pod("web")?;
        let statuses = &pod.status()["ephemeralContainerStatuses"];
        ensure!(statuses[1]["state"]["running"].is_object(), "{statuses}");
        Ok(pod)
    })?;
    let first = &pod.status()["ephemeralContainerStatuses"][0];
    ensure!(first["containerID"] == ended["containerID"] && first["restartCount"] == 0, "{first}");
    ensure!(pod.is_ready() && pod.container("main")["restartCount"] == 0, "{}", pod.status());
    cluster.kubectl(&["delete", "pod", "web"])?;
    cluster.wait_none(30)
}

fn sub_paths(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    cluster.apply(json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "settings" }, "data": { "a": "1", "b": "2" },
    }))?;
    let notes = cluster.node.notes("parts");
    let (inside, outside) = (notes.join("volume"), notes.join("outside"));
    fs::create_dir_all(&inside)?;
    fs::create_dir_all(&outside)?;
    std::os::unix::fs::symlink(&outside, inside.join("link"))?;
    let mut spec = spec(&cluster.name, &format!("cat /one > /mine/seen; {OBEDIENT}"));
    spec["terminationGracePeriodSeconds"] = json!(1);
    let main = &mut spec["containers"][0];
    main["env"] = json!([{ "name": "POD", "valueFrom": { "fieldRef": { "fieldPath": "metadata.name" } } }]);
    main["volumeMounts"] = json!([
        { "name": "settings", "mountPath": "/one", "subPath": "a" },
        { "name": "volume", "mountPath": "/mine", "subPathExpr": "made/$(POD)" },
    ]);
    spec["volumes"] = json!([
        { "name": "settings", "configMap": { "name": "settings" } },
        { "name": "volume", "hostPath": { "path": inside } },
    ]);
    let mut hostile = spec.clone();
    hostile["containers"][0]["volumeMounts"] =
        json!([{ "name": "volume", "mountPath": "/mine", "subPath": "link/new" }]);
    cluster.apply_all(vec![pod("parts", &spec), pod("hostile", &hostile)])?;
    let uid = cluster.wait_running("parts", 60)?.uid().to_owned();
    let seen = inside.join("made/parts/seen");
    cluster.wait("the container has written what it saw", 20, |_| {
        let text = fs::read_to_string(&seen).with_context(|| seen.display().to_string())?;
        ensure!(text == "1", "{text:?}");
        Ok(())
    })?;
    cluster.wait("the hostile container waits", 30, |cluster| {
        let pod = cluster.pod("hostile")?;
        let waiting = &pod.container("main")["state"]["waiting"];
        let message = waiting["message"].as_str().unwrap_or_default();
        ensure!(waiting["reason"] == "CreateContainerConfigError" && message.contains("subPath"), "{waiting}");
        Ok(())
    })?;
    ensure!(fs::read_dir(&outside)?.next().is_none(), "something was made outside of the volume");
    cluster.kubectl(&["delete", "pod", "parts", "hostile"])?;
    cluster.wait_none(30)?;
    let left = fs::read_to_string("/proc/self/mountinfo")?;
    ensure!(!left.contains(&uid), "something of the pod is still mounted: {left}");
    ensure!(seen.is_file(), "what the container wrote went with its pod");
    Ok(())
}
