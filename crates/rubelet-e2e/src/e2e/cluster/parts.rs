//! Ephemeral containers, subPaths, and mounts below them.
//! them.

use std::{fs, path::Path, process::Command};

use anyhow::{Context as _, ensure};
use rubelet_testbed::{
    command::{SHORT, output},
    image::BUSYBOX,
};
use serde_json::{Value, json};

use crate::e2e::cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, pod, spec};

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
    ClusterCase {
        name: "what is mounted below a recursively read-only mount cannot be written",
        plane: Plane::Shared,
        run: recursive_read_only,
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
    expect_text(cluster, &seen, "1")?;
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

fn recursive_read_only(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let node = cluster.plane().api().get(&format!("/api/v1/nodes/{}", cluster.name))?;
    let handlers = &node["status"]["runtimeHandlers"];
    let is_able = |handler: &Value| handler["features"]["recursiveReadOnlyMounts"] == true;
    ensure!(handlers.as_array().is_some_and(|handlers| handlers.iter().any(is_able)), "{handlers}");
    let notes = cluster.node.notes("nested");
    let (volume, seen) = (notes.join("volume"), notes.join("seen"));
    let nested = volume.join("nested");
    fs::create_dir_all(&nested)?;
    fs::create_dir_all(&seen)?;
    output(Command::new("mount").args(["-t", "tmpfs", "nested"]).arg(&nested), SHORT)?;

    let write = "for mount in /data/*; do touch $mount/nested/file && echo $mount written || echo $mount refused; done";
    let mut spec = spec(&cluster.name, &format!("{{ {write}; }} > /seen/$(hostname); {OBEDIENT}"));
    spec["terminationGracePeriodSeconds"] = json!(1);
    spec["volumes"] = json!([
        { "name": "data", "hostPath": { "path": volume } },
        { "name": "seen", "hostPath": { "path": seen } },
    ]);
    let with_modes = |modes: &[&str]| {
        let mount = |mode: &&str| json!({ "name": "data", "mountPath": format!("/data/{mode}"), "readOnly": true, "recursiveReadOnly": mode });
        let mut mounts: Vec<_> = modes.iter().map(mount).collect();
        mounts.push(json!({ "name": "seen", "mountPath": "/seen" }));
        let mut spec = spec.clone();
        spec["containers"][0]["volumeMounts"] = json!(mounts);
        spec
    };
    cluster.apply_all(vec![
        pod("lenient", &with_modes(&["Disabled", "IfPossible"])),
        pod("strict", &with_modes(&["Enabled"])),
    ])?;
    expect_modes(cluster, "lenient", &["Disabled", "Enabled"])?;
    expect_text(cluster, &seen.join("lenient"), "/data/Disabled written\n/data/IfPossible refused\n")?;
    expect_modes(cluster, "strict", &["Enabled"])?;
    expect_text(cluster, &seen.join("strict"), "/data/Enabled refused\n")?;
    cluster.kubectl(&["delete", "pod", "lenient", "strict"])?;
    cluster.wait_none(30)?;
    output(Command::new("umount").arg(&nested), SHORT).map(drop)
}

fn expect_modes(cluster: &ClusterNode, name: &str, expected: &[&str]) -> anyhow::Result<()> {
    let pod = cluster.wait_running(name, 60)?;
    let mounts = pod.container("main")["volumeMounts"].as_array().context("no volume mounts")?;
    let of_data = mounts.iter().filter(|mount| mount["name"] == "data");
    let modes: Vec<_> = of_data.map(|mount| mount["recursiveReadOnly"].as_str().unwrap_or("none")).collect();
    ensure!(modes == expected, "{name}: {modes:?}");
    Ok(())
}

fn expect_text(cluster: &ClusterNode, file: &Path, expected: &str) -> anyhow::Result<()> {
    cluster.wait("the container has written what it saw", 20, |_| {
        let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
        ensure!(text == expected, "{text:?}");
        Ok(())
    })
}
