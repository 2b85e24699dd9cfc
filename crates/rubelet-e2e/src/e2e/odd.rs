//! Invalid files in the manifest directory.

use std::{fs, process::Command, time::Duration};

use anyhow::ensure;
use rubelet_testbed::command::{SHORT, command, output};
use serde_json::json;

use crate::e2e::{
    Case,
    manifest::{OBEDIENT, Pod},
    node::Node,
};

pub const CASES: &[Case] = &[
    Case { name: "odd things among the manifests: each a clear error, and no effect on the others", run: odd_files },
    Case { name: "an environment bomb is refused by name, and another pod starts", run: environment_bomb },
    Case { name: "a kill for want of memory on the node is told in an event", run: out_of_memory },
];

/// The kernel's part is written by the test: every record that root writes there is read as the kernel's.
fn out_of_memory(node: &mut Node) -> anyhow::Result<()> {
    node.agent.start()?;
    if node.agent.is_upstream() {
        // Without a cluster it keeps no events.
        return Ok(());
    }
    let victim = format!("victim-{}", std::process::id());
    node.wait("the event", 20, |node| {
        for record in [
            format!("{victim} invoked oom-killer: written by a test of rubelet"),
            format!("Out of memory: Killed process 4711 ({victim}) written by a test of rubelet"),
        ] {
            fs::write("/dev/kmsg", record)?;
        }
        let events = node.agent.ask(&["events"])?;
        let message = format!("System OOM encountered, victim process: {victim}, pid: 4711");
        ensure!(events.contains("SystemOOM") && events.contains(&message), "{events}");
        Ok(())
    })
}

fn odd_files(node: &mut Node) -> anyhow::Result<()> {
    node.agent.start()?;
    node.apply(&Pod::new("good", OBEDIENT).notes(&node.notes("good")))?;
    let before = node.wait_running("good", 60)?.identity("main")?;

    let manifests = node.agent.manifests();
    let mut mkfifo: Command = command("mkfifo", [manifests.join("a-fifo.yaml")]);
    output(&mut mkfifo, SHORT)?;
    fs::create_dir(manifests.join("a-directory.yaml"))?;
    let huge = format!("# {}\n{}", "x".repeat(20 << 20), Pod::new("huge", OBEDIENT).manifest());
    node.drop_file("too-large.yaml", huge.as_bytes())?;
    node.drop_file("broken.yaml", b"apiVersion: v1\nkind: Pod\nmetadata: {name: broken\n  spec: [\n")?;
    let twin = Pod::new("twin", "sleep 3600").grace_secs(1).manifest();
    node.drop_file("twin-one.json", twin.to_string().as_bytes())?;
    node.drop_file("twin-two.json", twin.to_string().as_bytes())?;
    let mut unknown = Pod::new("unknown", "sleep 3600").grace_secs(1).manifest();
    unknown["spec"]["containers"][0]["imagePullPolicie"] = json!("Never");
    node.drop_file("unknown-field.json", unknown.to_string().as_bytes())?;
    // The last one must not be affected by those before it.
    node.apply(&Pod::new("late", OBEDIENT).notes(&node.notes("late")))?;
    node.wait_running("late", 60)?;

    let traces = ["a-fifo.yaml", "a-directory.yaml", "too-large.yaml", "broken.yaml", "imagePullPolicie", "twin-"];
    for trace in traces {
        node.wait(&format!("`{trace}` in `rubelet events` and in the log"), 30, |node| {
            let events = node.agent.ask(&["events"])?;
            ensure!(events.contains(trace), "the events are\n{events}");
            let log = fs::read_to_string(node.agent.log())?;
            ensure!(log.contains(trace), "it is in the events but not in the log");
            Ok(())
        })?;
    }
    std::thread::sleep(Duration::from_secs(2));
    let after = node.wait_running("good", 10)?.identity("main")?;
    ensure!(after == before, "before {before:?}, after {after:?}");
    let pods = node.pods()?;
    let of = |name: &str| pods.iter().filter(|pod| pod.name().starts_with(name)).count();
    ensure!(of("twin") == 1, "there are {} pods named twin", of("twin"));
    ensure!(of("huge") == 0 && of("broken") == 0, "a refused manifest became a pod");
    ensure!(node.noted("good") == ["start"] && node.noted("late") == ["start"], "a good pod was touched");
    // A corrected file is accepted.
    node.drop_file("broken.yaml", Pod::new("broken", "sleep 3600").grace_secs(1).manifest().to_string().as_bytes())?;
    node.wait_running("broken", 60).map(drop)
}

fn environment_bomb(node: &mut Node) -> anyhow::Result<()> {
    if node.agent.is_upstream() {
        // It expands them all, and uses up the memory of the machine.
        return Ok(());
    }
    node.agent.start()?;
    let mut bomb = Pod::new("bomb", "sleep 3600").grace_secs(1).manifest();
    let times = |text: &str| text.repeat(1000);
    bomb["spec"]["containers"][0]["env"] = json!([
        { "name": "A", "value": times("x") },
        { "name": "B", "value": times("$(A)") },
        { "name": "C", "value": times("$(B)") },
        { "name": "D", "value": times("$(C)") },
    ]);
    node.drop_file("bomb.json", bomb.to_string().as_bytes())?;
    node.wait("the bomb is refused", 60, |node| {
        let pod = node.pod("bomb")?;
        let waiting = &pod.container("main")["state"]["waiting"];
        ensure!(waiting["reason"] == "CreateContainerConfigError", "{waiting}");
        let message = waiting["message"].as_str().unwrap_or_default();
        ensure!(message.starts_with("environment variable \"B\" is too long"), "{message}");
        Ok(())
    })?;
    node.apply(&Pod::new("good", OBEDIENT).notes(&node.notes("good")))?;
    node.wait_running("good", 60).map(drop)
}
