//! Random pods.

use fastrand::Rng;
use serde_json::{Value, json};

use super::IMAGES;
use crate::{
    devices::DEVICES,
    script::{EmptyDir, PodScript, Policy},
};

/// The condition that pods with a readiness gate wait for.
pub(super) const GATE: &str = "sim/gate";
const SIZE_LIMIT: &str = "64Ki";

pub(crate) fn script(rng: &mut Rng, name: &str, version: u32) -> PodScript {
    let policy = [Policy::Always, Policy::Always, Policy::OnFailure, Policy::Never][rng.usize(..4)];
    let mut script = PodScript::pod(name).version(version).policy(policy).grace_secs([1, 3, 10, 30][rng.usize(..4)]);
    for number in 0..[0, 0, 1, 2][rng.usize(..4)] {
        let program = ["exit 0 after 0s", "exit 0 after 3s", "flaky 1", "exit 1 after 1s"][rng.usize(..4)];
        // A flaky init container would never end, so it becomes one that fails.
        let program = if program == "flaky 1" { "exit 0 after 1s" } else { program };
        script = script.init(&format!("init{number}"), program);
    }
    if rng.u32(0..6) == 0 {
        let program = ["run", "run", "slow 8s", "stubborn"][rng.usize(..4)];
        script = checked(rng, script.sidecar("side", program));
    }
    for number in 0..[1, 1, 2, 3][rng.usize(..4)] {
        let program = program(rng);
        script = script.container(&format!("app{number}"), &program);
        if rng.u32(0..4) == 0 {
            script = script.image(IMAGES[rng.usize(..IMAGES.len())]);
        }
        script = checked(rng, script);
        script = hooked(rng, script);
        if rng.u32(0..4) == 0 {
            script = script.field("resources", json!({ "limits": { "cpu": "100m", "memory": "64Mi" } }));
        }
    }
    if rng.u32(0..8) == 0 {
        script = script.host_network();
    }
    if rng.u32(0..8) == 0 {
        script = script.gate(GATE);
    }
    if rng.u32(0..6) == 0 {
        script = script.priority([-10, 100, 2_000_000_000][rng.usize(..3)]);
    }
    let script = match rng.u32(0..4) {
        0 if rng.bool() => script.empty_dir(EmptyDir::Disk).size_limit(SIZE_LIMIT),
        0 => script.empty_dir(EmptyDir::Disk),
        1 => script.empty_dir(EmptyDir::Memory),
        _ => script,
    };
    let host_path = format!("{}/data", DEVICES[rng.usize(..DEVICES.len())]);
    match rng.u32(0..6) {
        0 => script.host_path(&host_path),
        1 => script.host_path(&host_path).sub_path("part"),
        _ => script,
    }
}

fn program(rng: &mut Rng) -> String {
    match rng.u32(0..12) {
        0..5 => "run".to_owned(),
        5 => format!("exit 0 after {}s", rng.u32(0..40)),
        6 => format!("exit 1 after {}s", rng.u32(0..40)),
        7 => format!("flaky {}", rng.u32(1..4)),
        8 => format!("slow {}s", rng.u32(1..40)),
        9 => "stubborn".to_owned(),
        10 => format!("oom after {}s", rng.u32(1..60)),
        _ => "missing".to_owned(),
    }
}

/// Probes of the container added last.
fn checked(rng: &mut Rng, script: PodScript) -> PodScript {
    match rng.u32(0..12) {
        0 => script.field("livenessProbe", probe(rng, &["ok", "ok", "fail first", "fail", "/ok", "/stall", "/half"])),
        1..3 => script.field(
            "readinessProbe",
            probe(rng, &["ok", "fail", "sleep 2s", "fail first", "/ok", "/fail", "/reset", "/half"]),
        ),
        3 => script.field("startupProbe", probe(rng, &["ok", "sleep 2s", "fail first"])),
        _ => script,
    }
}

/// Hooks of the container added last.
fn hooked(rng: &mut Rng, script: PodScript) -> PodScript {
    let hook = |rng: &mut Rng, name: &str, commands: &[&str]| {
        let command = format!("{name} {}", commands[rng.usize(..commands.len())]);
        json!({ "exec": { "command": command.split(' ').collect::<Vec<_>>() } })
    };
    match rng.u32(0..10) {
        0 => script.field(
            "lifecycle",
            json!({ "postStart": hook(rng, "post-start", &["ok", "sleep 4s", "fail first", "fail"]) }),
        ),
        1 => script
            .field("lifecycle", json!({ "preStop": hook(rng, "pre-stop", &["ok", "sleep 2s", "sleep 60s", "fail"]) })),
        _ => script,
    }
}

/// Each check is a command, or the path of a probed server.
fn probe(rng: &mut Rng, checks: &[&str]) -> Value {
    let check = checks[rng.usize(..checks.len())];
    let mut probe = json!({
        "periodSeconds": rng.u32(2..20),
        "timeoutSeconds": rng.u32(3..6),
        "failureThreshold": rng.u32(1..4),
    });
    if check.starts_with('/') {
        probe["httpGet"] = json!({ "path": check, "port": 80 });
    } else {
        probe["exec"] = json!({ "command": check.split(' ').collect::<Vec<_>>() });
    }
    probe
}
