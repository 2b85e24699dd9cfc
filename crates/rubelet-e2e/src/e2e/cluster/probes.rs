//! Probes and hooks: readiness changes, liveness restarts, postStart and preStop.

use std::{fs, path::Path};

use anyhow::{Context as _, ensure};
use rubelet_testbed::{go_tools, image::BUSYBOX};
use serde_json::{Value, json};

use crate::e2e::cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, pod, spec};

pub const CASES: &[ClusterCase] = &[
    ClusterCase {
        name: "readiness by HTTP, command, TCP and gRPC turns true and false",
        plane: Plane::Shared,
        run: readiness,
    },
    ClusterCase {
        name: "a startup probe holds back the others, and a failed liveness probe restarts",
        plane: Plane::Shared,
        run: startup_and_liveness,
    },
    ClusterCase {
        name: "postStart and preStop hooks run, sidecars' at the pod's end",
        plane: Plane::Shared,
        run: hooks,
    },
    ClusterCase {
        name: "hooks of sidecars run side by side at the end of a pod that completes",
        plane: Plane::Shared,
        run: sidecars_at_the_end,
    },
];

/// Listens as long as the file `/switch/tcp` exists.
const TCP_SERVER: &str = "while :; do if [ -e /switch/tcp ]; then [ -n \"$p\" ] || { httpd -f -p 9000 & p=$!; }; \
     else [ -z \"$p\" ] || { kill $p; wait $p; p=; }; fi; sleep 1; done";
/// Reports healthy as long as the file `/switch/grpc` exists.
const GRPC_SERVER: &str = "/tools/agnhost grpc-health-checking --port=5000 --http-port=8081 --service=all & \
     while :; do if [ -e /switch/grpc ]; then to=serving; else to=not-serving; fi; \
     wget -q -O /dev/null http://127.0.0.1:8081/make-$to; sleep 1; done";
const KINDS: [&str; 4] = ["exec", "grpc", "http", "tcp"];

fn readiness(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let tools = go_tools::ensure(&[go_tools::AGNHOST])?;
    cluster.start()?;
    let switch = cluster.node.notes("probed");
    fs::create_dir_all(&switch)?;
    cluster.apply(pod("probed", &probed(&cluster.name, &switch, &tools)))?;
    cluster.wait("all its containers run", 60, |cluster| cluster.pod("probed")?.check_running())?;
    expect_ready(cluster, &[])?;
    for kind in KINDS {
        fs::write(switch.join(kind), "on")?;
    }
    expect_ready(cluster, &KINDS)?;
    for kind in KINDS {
        fs::remove_file(switch.join(kind))?;
        let others: Vec<&str> = KINDS.into_iter().filter(|other| *other != kind).collect();
        expect_ready(cluster, &others)?;
        fs::write(switch.join(kind), "on")?;
    }
    expect_ready(cluster, &KINDS)?;
    let pod = cluster.pod("probed")?;
    for kind in KINDS {
        ensure!(pod.container(kind)["restartCount"] == 0, "{}", pod.container(kind));
    }
    let ip = pod.status()["podIP"].as_str().context("it has no address")?.to_owned();
    for words in [
        "Readiness probe failed: HTTP probe failed with statuscode: 404".to_owned(),
        format!("Readiness probe failed: dial tcp {ip}:9000: connect: connection refused"),
        "Readiness probe failed: service unhealthy (responded with \"NOT_SERVING\")".to_owned(),
        "Readiness probe failed: cat: can't open '/switch/exec'".to_owned(),
    ] {
        cluster.wait("it is told why", 20, |cluster| said(cluster, "Unhealthy", &words))?;
    }
    cluster.kubectl(&["delete", "pod", "probed"])?;
    cluster.wait_none(30)
}

fn probed(node: &str, switch: &Path, tools: &Path) -> Value {
    let mut spec = spec(node, "");
    let container = |name: &str, script: &str, action: Value| {
        let mut probe = json!({ "periodSeconds": 1, "failureThreshold": 1, "timeoutSeconds": 2 });
        probe[if name == "http" {
            "httpGet"
        } else if name == "tcp" {
            "tcpSocket"
        } else {
            name
        }] = action;
        json!({
            "name": name,
            "image": BUSYBOX,
            "command": ["sh", "-c", format!("trap 'exit 0' TERM; {script}")],
            "readinessProbe": probe,
            "volumeMounts": [{ "name": "switch", "mountPath": "/switch" }, { "name": "tools", "mountPath": "/tools" }],
        })
    };
    spec["containers"] = json!([
        container("http", "httpd -f -p 8080 -h /switch", json!({ "port": 8080, "path": "/http" })),
        container("exec", OBEDIENT, json!({ "command": ["cat", "/switch/exec"] })),
        container("tcp", TCP_SERVER, json!({ "port": 9000 })),
        container("grpc", GRPC_SERVER, json!({ "port": 5000, "service": "all" })),
    ]);
    spec["terminationGracePeriodSeconds"] = json!(1);
    spec["volumes"] = json!([
        { "name": "switch", "hostPath": { "path": switch } },
        { "name": "tools", "hostPath": { "path": tools } },
    ]);
    spec
}

/// Exactly these containers are ready, and the pod if all are.
fn expect_ready(cluster: &ClusterNode, expected: &[&str]) -> anyhow::Result<()> {
    cluster.wait(&format!("{expected:?} are ready, and no others"), 20, |cluster| {
        let pod = cluster.pod("probed")?;
        let ready: Vec<&str> = KINDS.into_iter().filter(|kind| pod.container(kind)["ready"] == true).collect();
        ensure!(ready == expected, "{ready:?} are");
        ensure!(pod.is_ready() == (expected.len() == KINDS.len()), "{}", pod.status()["conditions"]);
        Ok(())
    })
}

fn startup_and_liveness(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let switch = cluster.node.notes("slow");
    fs::create_dir_all(&switch)?;
    let mut spec = spec(&cluster.name, &format!("rm -f /switch/sick; {OBEDIENT}"));
    let main = &mut spec["containers"][0];
    let probe = |test: &str, threshold: u32| {
        let command = json!({ "command": ["sh", "-c", test] });
        json!({ "exec": command, "periodSeconds": 1, "failureThreshold": threshold })
    };
    main["startupProbe"] = probe("[ -e /switch/started ]", 600);
    main["livenessProbe"] = probe("[ ! -e /switch/sick ]", 1);
    main["volumeMounts"] = json!([{ "name": "switch", "mountPath": "/switch" }]);
    spec["volumes"] = json!([{ "name": "switch", "hostPath": { "path": switch } }]);
    cluster.apply(pod("slow", &spec))?;
    cluster.wait("the startup probe has failed", 30, |cluster| said(cluster, "Unhealthy", "Startup probe failed: "))?;
    // The liveness probe would fail if it ran.
    fs::write(switch.join("sick"), "yes")?;
    let beginning = cluster.wait("a second of startup", 10, |cluster| cluster.pod("slow"))?;
    let main = beginning.container("main");
    ensure!(main["started"] == false && main["ready"] == false && main["restartCount"] == 0, "{main}");
    fs::remove_file(switch.join("sick"))?;
    fs::write(switch.join("started"), "yes")?;
    let started = cluster.wait_running("slow", 20)?;
    ensure!(started.container("main")["restartCount"] == 0, "{}", started.container("main"));
    fs::write(switch.join("sick"), "yes")?;
    cluster.wait("it has been restarted and is ready again", 40, |cluster| {
        let pod = cluster.pod("slow")?;
        ensure!(pod.container("main")["restartCount"] == 1 && pod.is_ready(), "{}", pod.container("main"));
        Ok(())
    })?;
    for (reason, words) in [
        ("Unhealthy", "Liveness probe failed: "),
        ("Killing", "Container main failed liveness probe, will be restarted"),
    ] {
        cluster.wait("it is told why", 20, |cluster| said(cluster, reason, words))?;
    }
    cluster.kubectl(&["delete", "pod", "slow"])?;
    cluster.wait_none(30)
}

fn hooks(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let notes = cluster.node.notes("polite");
    let note = |line: &str| format!("echo {line} >> /notes/main");
    let hook = |line: &str| json!({ "exec": { "command": ["sh", "-c", note(line)] } });
    let script = |name: &str, delay: &str| {
        format!("trap '{delay}{}; exit 0' TERM; while :; do sleep 1 & wait $!; done", note(name))
    };
    let mut spec = spec(&cluster.name, &script("main-ends", "sleep 2; "));
    let mounts = json!([{ "name": "notes", "mountPath": "/notes" }]);
    let main = &mut spec["containers"][0];
    main["lifecycle"] = json!({ "postStart": hook("main-starts"), "preStop": hook("main-stops") });
    main["volumeMounts"] = mounts.clone();
    spec["initContainers"] = json!([{
        "name": "sidecar",
        "image": BUSYBOX,
        "restartPolicy": "Always",
        "command": ["sh", "-c", script("sidecar-ends", "")],
        "lifecycle": { "preStop": hook("sidecar-stops") },
        "volumeMounts": mounts,
    }]);
    spec["terminationGracePeriodSeconds"] = json!(20);
    spec["volumes"] = json!([{ "name": "notes", "hostPath": { "path": notes, "type": "DirectoryOrCreate" } }]);
    cluster.apply(pod("polite", &spec))?;
    cluster.wait_running("polite", 60)?;
    let said = cluster.node.noted("polite");
    ensure!(said == ["main-starts"], "{said:?}");
    cluster.kubectl(&["delete", "pod", "polite"])?;
    cluster.wait_none(40)?;
    let mut said = cluster.node.noted("polite");
    // Both hooks run at once; the sidecar's signal comes after the other container is gone.
    ensure!(said.len() == 5 && said[3..] == ["main-ends", "sidecar-ends"], "{said:?}");
    said[1..3].sort();
    ensure!(said[1..3] == ["main-stops", "sidecar-stops"], "{said:?}");
    Ok(())
}

/// Hooks that never return: each gets the whole grace period, in any stop order.
fn sidecars_at_the_end(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let notes = cluster.node.notes("ending");
    let mounts = json!([{ "name": "notes", "mountPath": "/notes" }]);
    let sidecar = |name: &str| {
        let hook = format!("while :; do echo {name} >> /notes/main; sleep 1; done");
        json!({
            "name": name,
            "image": BUSYBOX,
            "restartPolicy": "Always",
            "command": ["sh", "-c", OBEDIENT],
            "lifecycle": { "preStop": { "exec": { "command": ["sh", "-c", hook] } } },
            "volumeMounts": mounts.clone(),
        })
    };
    let mut spec = spec(&cluster.name, "sleep 5");
    spec["restartPolicy"] = json!("Never");
    spec["initContainers"] = json!([sidecar("first"), sidecar("second")]);
    spec["terminationGracePeriodSeconds"] = json!(10);
    spec["volumes"] = json!([{ "name": "notes", "hostPath": { "path": notes, "type": "DirectoryOrCreate" } }]);
    cluster.apply(pod("ending", &spec))?;
    cluster.wait("the pod has succeeded", 60, |cluster| {
        let status = cluster.pod("ending")?.status().clone();
        ensure!(status["phase"] == "Succeeded", "{status}");
        Ok(())
    })?;
    let said = cluster.node.noted("ending");
    for name in ["first", "second"] {
        let times = said.iter().filter(|line| *line == name).count();
        ensure!((8..=13).contains(&times), "the hook of {name} ran for {times} s: {said:?}");
    }
    cluster.kubectl(&["delete", "pod", "ending"])?;
    cluster.wait_none(30)
}

fn said(cluster: &ClusterNode, reason: &str, words: &str) -> anyhow::Result<()> {
    let events = cluster.plane().api().list(&format!("/api/v1/namespaces/{}/events", cluster.name))?;
    let of_reason: Vec<&str> =
        events.iter().filter(|event| event["reason"] == reason).filter_map(|event| event["message"].as_str()).collect();
    ensure!(of_reason.iter().any(|message| message.contains(words)), "no event {words:?} among {of_reason:?}");
    Ok(())
}
