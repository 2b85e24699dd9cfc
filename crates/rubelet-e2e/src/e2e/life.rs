//! A pod's lifecycle without crashes: start, failure, replacement, termination.

use std::{collections::BTreeMap, fs, path::Path, thread, time::Duration};

use anyhow::{Context as _, bail, ensure};
use rubelet_testbed::{
    clock::Stopwatch,
    image::{self, BUSYBOX},
};
use serde_json::json;

use crate::e2e::{
    Case,
    manifest::{OBEDIENT, Pod, SLOW_TO_STOP, STUBBORN},
    node::{Node, full_name},
};

pub const CASES: &[Case] = &[
    Case {
        name: "a crashing container shows CrashLoopBackOff with growing waits and the right restart count",
        run: crash_loop,
    },
    Case { name: "an image that cannot be pulled is waited for, and runs at the next try once it is there", run: pull },
    Case { name: "init containers run in order before the others, and logs are where upstream puts them", run: init },
    Case {
        name: "variables come from a file that an init container wrote, and from no place its links name",
        run: env_files,
    },
    Case { name: "editing the manifest replaces the pod, the old one gone before the new one starts", run: edit },
    Case { name: "deleting the manifest stops the pod within its grace period", run: delete },
    Case { name: "a container that ignores SIGTERM dies at the end of its grace period", run: ignore_term },
    Case { name: "a plugin's directory is there, and what its pod mounts in it is seen on the node", run: plugin_dir },
    Case { name: "a manifest written again unchanged counts its pod on", run: written_again },
];

fn init(node: &mut Node) -> anyhow::Result<()> {
    node.agent.start()?;
    let mounts = json!([{ "name": "shared", "mountPath": "/shared" }]);
    let container = |name: &str, script: &str| json!({ "name": name, "image": BUSYBOX, "command": ["sh", "-c", script], "volumeMounts": mounts });
    let manifest = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": "two" },
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "initContainers": [
                container("first", "sleep 1; echo first >> /shared/order"),
                container("second", "echo second >> /shared/order"),
            ],
            "containers": [
                container("left", "echo left >> /shared/order; cat /shared/order; sleep 3600"),
                container("right", "echo hello from right; echo and from its stderr >&2; sleep 3600"),
            ],
            "volumes": [{ "name": "shared", "emptyDir": {} }],
        },
    });
    node.drop_file("two.json", serde_json::to_string(&manifest)?.as_bytes())?;
    let pod = node.wait_running("two", 60)?;
    for name in ["first", "second"] {
        let ended = &pod.container(name)["state"]["terminated"];
        ensure!(ended["exitCode"] == 0 && ended["reason"] == "Completed", "init container {name}: {ended}");
    }
    ensure!(pod.status()["podIP"].as_str().is_some_and(|ip| ip.starts_with("10.213.")), "podIP: {}", pod.status());
    let dir = node.agent.pod_logs_dir().join(format!("default_{}_{}", full_name("two"), pod.uid()));
    let left = wait_log(node, &dir.join("left/0.log"), 3)?;
    ensure!(left == ["first", "second", "left"], "the order was {left:?}");
    let right = wait_log(node, &dir.join("right/0.log"), 2)?;
    ensure!(right.iter().any(|line| line == "hello from right"), "right said {right:?}");
    let id = pod.container("left")["containerID"].as_str().context("no containerID")?.replace("containerd://", "");
    let link = format!("/var/log/containers/{}_default_left-{id}.log", full_name("two"));
    let target = fs::canonicalize(&link).with_context(|| format!("link {link}"))?;
    ensure!(target == dir.join("left/0.log"), "{link} leads to {}", target.display());
    if node.agent.is_upstream() {
        return Ok(());
    }
    let said = node.agent.ask(&["logs", "two", "-c", "right"])?;
    ensure!(said.contains("hello from right") && said.contains("and from its stderr"), "rubelet logs: {said}");
    Ok(())
}

/// As drivers mount it: type Directory requires it to exist.
fn plugin_dir(node: &mut Node) -> anyhow::Result<()> {
    node.agent.start()?;
    let registry = node.agent.root_dir().join("plugins_registry");
    let script =
        "mkdir -p /registry/seen; mount -t tmpfs tmpfs /registry/seen && touch /registry/seen/mark; sleep 3600";
    let mut manifest = Pod::new("driver", script).grace_secs(1).manifest();
    let container = &mut manifest["spec"]["containers"][0];
    container["securityContext"] = json!({ "privileged": true });
    container["volumeMounts"] =
        json!([{ "name": "registry", "mountPath": "/registry", "mountPropagation": "Bidirectional" }]);
    manifest["spec"]["volumes"] =
        json!([{ "name": "registry", "hostPath": { "path": registry, "type": "Directory" } }]);
    node.drop_file("driver.json", manifest.to_string().as_bytes())?;
    node.wait_running("driver", 60)?;
    let mark = registry.join("seen/mark");
    node.wait("the mount of the pod on the node", 20, |_| {
        ensure!(mark.exists(), "{} is not there", mark.display());
        Ok(())
    })
}

fn written_again(node: &mut Node) -> anyhow::Result<()> {
    node.agent.start()?;
    let pod = Pod::new("again", "trap 'exit 0' TERM; echo hello; sleep 3600 & wait").grace_secs(5);
    node.apply(&pod)?;
    let before = node.wait_running("again", 60)?;
    node.remove("again")?;
    node.wait("it is stopped", 20, |node| node.check_stopped("again"))?;
    node.apply(&pod)?;
    let after = node.wait_running("again", 60)?;
    ensure!(after.uid() == before.uid(), "another UID: {} and {}", before.uid(), after.uid());
    let counts = [&before, &after].map(|pod| pod.container("main")["restartCount"].clone());
    ensure!(counts == [json!(0), json!(1)], "restarts: {counts:?}");
    let dir = node.agent.pod_logs_dir().join(format!("default_{}_{}", full_name("again"), after.uid()));
    wait_log(node, &dir.join("main/1.log"), 1).map(drop)
}

fn env_files(node: &mut Node) -> anyhow::Result<()> {
    node.agent.start()?;
    let file = |key: &str, optional: bool| json!({ "fileKeyRef": { "volumeName": "config", "path": "dir/env", "key": key, "optional": optional } });
    let pod = |name: &str, write: &str| {
        let container =
            |name: &str, script: &str| json!({ "name": name, "image": BUSYBOX, "command": ["sh", "-c", script] });
        let mut init = container("write", &format!("mkdir /config/dir; {write}"));
        init["volumeMounts"] = json!([{ "name": "config", "mountPath": "/config" }]);
        let mut main = container("main", "echo A=$A; echo B=$B; echo has C: ${C+yes}; sleep 3600");
        main["env"] = json!([
            { "name": "A", "valueFrom": file("A", false) },
            { "name": "B", "value": "seen $(A)" },
            { "name": "C", "valueFrom": file("C", true) },
        ]);
        json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name },
            "spec": {
                "terminationGracePeriodSeconds": 1, "initContainers": [init], "containers": [main],
                "volumes": [{ "name": "config", "emptyDir": {} }],
            },
        })
    };
    let refused = [
        ("link", "echo \"A='no'\" > /config/real; ln -s /etc/passwd /config/dir/env", "couldn't parse env file"),
        ("wrong", "echo A=no > /config/dir/env", "couldn't parse env file"),
        ("other", "echo \"B='no'\" > /config/dir/env", "environment variable key \"A\" not found in file \""),
    ];
    node.drop_file("good.json", pod("good", "echo \"A='\\$(one) # 1' # c\" > /config/dir/env").to_string().as_bytes())?;
    for (name, write, _) in refused {
        node.drop_file(&format!("{name}.json"), pod(name, write).to_string().as_bytes())?;
    }
    let good = node.wait_running("good", 60)?;
    let dir = node.agent.pod_logs_dir().join(format!("default_{}_{}", full_name("good"), good.uid()));
    let said = wait_log(node, &dir.join("main/0.log"), 3)?;
    ensure!(said == ["A=$(one) # 1", "B=seen $(one) # 1", "has C:"], "it saw {said:?}");
    for (name, _, message) in refused {
        node.wait(&format!("{name} is refused"), 60, |node| {
            let waiting = node.pod(name)?.container("main")["state"]["waiting"].clone();
            ensure!(waiting["reason"] == "CreateContainerConfigError", "{waiting}");
            ensure!(waiting["message"].as_str().is_some_and(|text| text.starts_with(message)), "{waiting}");
            Ok(())
        })?;
    }
    Ok(())
}

/// The messages in a log in CRI's format: `time stream F message`.
fn wait_log(node: &Node, path: &Path, lines: usize) -> anyhow::Result<Vec<String>> {
    node.wait(&format!("{lines} lines in {}", path.display()), 10, |_| {
        let text = fs::read_to_string(path)?;
        let messages: Vec<String> =
            text.lines().filter_map(|line| line.splitn(4, ' ').nth(3)).map(str::to_owned).collect();
        ensure!(messages.len() >= lines, "{text}");
        Ok(messages)
    })
}

fn crash_loop(node: &mut Node) -> anyhow::Result<()> {
    node.agent.start()?;
    node.apply(&Pod::new("crash", "echo start; exit 3"))?;
    let mut starts: BTreeMap<u32, f64> = BTreeMap::new();
    let mut was_in_backoff = false;
    let pod = node.wait("the fourth start", 120, |node| {
        let pod = node.pod("crash")?;
        was_in_backoff |= pod.waiting_reason("main") == Some("CrashLoopBackOff");
        let dir = node.agent.pod_logs_dir().join(format!("default_{}_{}/main", full_name("crash"), pod.uid()));
        for attempt in 0..4 {
            if let Some(second) = first_timestamp(&dir.join(format!("{attempt}.log"))) {
                starts.entry(attempt).or_insert(second);
            }
        }
        ensure!(starts.contains_key(&3), "starts so far: {starts:?}, the agent shows {}", pod.container("main"));
        ensure!(pod.container("main")["restartCount"] == 3, "the agent shows {}", pod.container("main"));
        Ok(pod)
    })?;
    ensure!(was_in_backoff, "CrashLoopBackOff was never shown");
    ensure!(pod.phase() == "Running", "phase {}", pod.phase());
    let gap = |attempt: u32| starts[&attempt] - starts[&(attempt - 1)];
    // The first restart is immediate; then 10 s, then 20 s, counted from the container's end. None may be early; how late
    // one is depends on the load of the machine.
    for (attempt, least, most) in [(1, 0.0, 15.0), (2, 9.5, 30.0), (3, 19.5, 50.0)] {
        let waited = gap(attempt);
        ensure!((least..most).contains(&waited), "restart {attempt} came after {waited:.1} s");
    }
    let pod = node.wait("it waits again", 15, |node| {
        let pod = node.pod("crash")?;
        ensure!(pod.waiting_reason("main") == Some("CrashLoopBackOff"), "{}", pod.container("main"));
        Ok(pod)
    })?;
    let last = &pod.container("main")["lastState"]["terminated"];
    ensure!(last["exitCode"] == 3 && last["reason"] == "Error", "lastState {last}");
    Ok(())
}

/// When the runtime received the container's first line, in seconds.
fn first_timestamp(log: &Path) -> Option<f64> {
    let text = fs::read_to_string(log).ok()?;
    let time: jiff::Timestamp = text.split(' ').next()?.parse().ok()?;
    Some(time.as_duration().as_secs_f64())
}

fn pull(node: &mut Node) -> anyhow::Result<()> {
    // Connections there are refused, so the pull fails at once.
    let image = "127.0.0.1:1/late/busybox:1";
    node.agent.start()?;
    node.apply(&Pod::new("late", "sleep 3600").image(image).grace_secs(1))?;
    let mut reasons = Vec::new();
    node.wait("ImagePullBackOff", 30, |node| {
        let pod = node.pod("late")?;
        let reason = pod.waiting_reason("main").unwrap_or_default().to_owned();
        if reasons.last() != Some(&reason) {
            reasons.push(reason.clone());
        }
        ensure!(reason == "ImagePullBackOff", "{}", pod.container("main"));
        Ok(())
    })?;
    let events = node.agent.ask(&["events"])?;
    for reason in ["ErrImagePull", "ImagePullBackOff"] {
        ensure!(events.contains(reason), "`{reason}` is not in the events; reasons shown {reasons:?}:\n{events}");
    }
    let pod = node.pod("late")?;
    ensure!(pod.phase() == "Pending" && pod.container("main")["restartCount"] == 0, "{}", pod.status());
    let archive = node.bed.layout.dir.join("late.tar");
    image::busybox_named(image, &archive)?;
    node.bed.import(&archive)?;
    // The first waits are 10 s and 20 s.
    let pod = node.wait_running("late", 25)?;
    ensure!(pod.container("main")["restartCount"] == 0, "a failed pull is no restart: {}", pod.container("main"));
    Ok(())
}

fn edit(node: &mut Node) -> anyhow::Result<()> {
    node.agent.start()?;
    let notes = node.notes("web");
    let old = Pod::new("web", SLOW_TO_STOP).notes(&notes);
    node.apply(&old)?;
    let before = node.wait_running("web", 60)?;
    node.wait("the old one runs", 10, |node| {
        ensure!(node.noted("web") == ["start"]);
        Ok(())
    })?;
    let new_script = "echo new >> /notes/main; sleep 3600";
    node.apply(&Pod::new("web", new_script).notes(&notes).grace_secs(1))?;
    let after = node.wait("the new one runs", 60, |node| {
        let pod = node.pod("web")?;
        ensure!(pod.uid() != before.uid(), "still the old one");
        pod.check_running()?;
        ensure!(node.noted("web").last().is_some_and(|note| note == "new"), "{:?}", node.noted("web"));
        Ok(pod)
    })?;
    ensure!(node.noted("web") == ["start", "term", "stop", "new"], "it went {:?}", node.noted("web"));
    ensure!(after.container("main")["restartCount"] == 0, "a new pod: {}", after.container("main"));
    node.wait("the old pod's directory is gone", 90, |node| {
        ensure!(!node.agent.root_dir().join("pods").join(before.uid()).exists(), "pods/{}", before.uid());
        Ok(())
    })
}

fn delete(node: &mut Node) -> anyhow::Result<()> {
    node.agent.start()?;
    node.apply(&Pod::new("web", OBEDIENT).notes(&node.notes("web")).grace_secs(20))?;
    node.wait_running("web", 60)?;
    node.wait("it runs", 10, |node| {
        ensure!(node.noted("web") == ["start"]);
        Ok(())
    })?;
    node.remove("web")?;
    // It exits on SIGTERM, long before the grace period is over.
    node.wait("it is stopped", 10, |node| node.check_stopped("web"))?;
    ensure!(node.noted("web") == ["start", "stop"], "it went {:?}", node.noted("web"));
    node.wait_gone("web", 90)
}

fn ignore_term(node: &mut Node) -> anyhow::Result<()> {
    const GRACE_SECS: u64 = 5;
    node.agent.start()?;
    node.apply(&Pod::new("web", STUBBORN).notes(&node.notes("web")).grace_secs(GRACE_SECS))?;
    node.wait_running("web", 60)?;
    node.wait("it runs", 10, |node| {
        ensure!(node.noted("web") == ["start"]);
        Ok(())
    })?;
    let container = node.containers()?.into_iter().find(|container| container.kind == "container");
    let container = container.context("the runtime has no container")?;
    node.remove("web")?;
    let watch = Stopwatch::start();
    loop {
        let tasks = node.bed.ctr(["tasks", "list"])?;
        let runs = tasks.lines().any(|line| line.starts_with(&container.id) && line.contains("RUNNING"));
        if !runs {
            break;
        }
        if watch.elapsed() > Duration::from_secs(GRACE_SECS + 10) {
            bail!("it still runs {:.1} s after its manifest was removed", watch.secs());
        }
        thread::sleep(Duration::from_millis(50));
    }
    let lived = watch.secs();
    ensure!(lived > GRACE_SECS as f64 - 0.5, "it was killed after {lived:.1} s of {GRACE_SECS}");
    ensure!(lived < GRACE_SECS as f64 + 4.0, "it lived {lived:.1} s with a grace period of {GRACE_SECS} s");
    ensure!(node.noted("web") == ["start", "term"], "it went {:?}", node.noted("web"));
    node.wait_gone("web", 90)
}
