//! Container checkpoints.

use std::{collections::BTreeSet, fs, os::unix::fs::PermissionsExt as _, path::Path};

use anyhow::{Context as _, ensure};
use rubelet_testbed::{
    Runtime,
    agent::AgentOptions,
    command::{SHORT, capture, command},
    packages::Tool,
};
use serde_json::{Value, json};

use crate::e2e::{Case, manifest::Pod, node::Node, secured_port};

/// On machines where CRIU works.
pub const WITH_CRIU: &[Case] = &[Case {
    name: "a checkpoint of a running container is an archive of its processes, files and log, where the runtime makes one",
    run: checkpoint,
}];

/// It must match the kernel.
pub fn has_criu() -> bool {
    Tool::Program("criu").is_there() && capture(&mut command("criu", ["check"]), SHORT).is_ok_and(|check| check.success)
}

fn checkpoint(node: &mut Node) -> anyhow::Result<()> {
    let config = json!({
        "authentication": { "anonymous": { "enabled": true }, "webhook": { "enabled": false } },
        "authorization": { "mode": "AlwaysAllow" },
    });
    let config = config.as_object().cloned().unwrap_or_default();
    node.reconfigure(&AgentOptions { config, ..AgentOptions::default() })?;
    node.agent.start()?;
    node.apply(&Pod::new("web", "echo hello; echo mine > /file; while :; do sleep 1; done"))?;
    let before = node.wait_running("web", 60)?.identity("main")?;
    let (status, body) = secured_port::post(&node.agent, "/checkpoint/default/web-node/main")?;
    if node.bed.runtime() == Runtime::Debian16 {
        let refusal = "checkpointing of default/web-node/main failed (rpc error: code = Unimplemented";
        ensure!(status == 500 && body.starts_with(refusal), "{status} {body}");
        return Ok(());
    }
    ensure!(status == 200, "{status} {body}");
    let answer: Value = serde_json::from_str(&body)?;
    let path = answer["items"][0].as_str().with_context(|| format!("no path in {answer}"))?;
    ensure!(answer == json!({ "items": [path] }), "{answer}");
    check_archive(node, Path::new(path))?;
    ensure!(node.wait_running("web", 1)?.identity("main")? == before, "the container did not just go on");
    Ok(())
}

/// Upstream's path and name, readable by root only, with everything needed for a restore.
fn check_archive(node: &Node, path: &Path) -> anyhow::Result<()> {
    let dir = node.agent.root_dir().join("checkpoints");
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let time = name.strip_prefix("checkpoint-web-node_default-main-").and_then(|rest| rest.strip_suffix(".tar"));
    let time = time.and_then(|time| time.parse::<jiff::Timestamp>().ok());
    ensure!(path.parent() == Some(&dir) && time.is_some(), "it is at {}", path.display());
    for (path, mode) in [(dir.as_path(), 0o700), (path, 0o600)] {
        let found = path.metadata()?.permissions().mode() & 0o777;
        ensure!(found == mode, "{} has mode {found:o}", path.display());
    }
    let mut archive = tar::Archive::new(fs::File::open(path)?);
    let entries = archive.entries()?.map(|entry| Ok(entry?.path()?.display().to_string()));
    let names = entries.collect::<anyhow::Result<BTreeSet<_>>>()?;
    for part in [
        "checkpoint/inventory.img",
        "checkpoint/pages-1.img",
        "config.dump",
        "container.log",
        "dump.log",
        "rootfs-diff.tar",
        "spec.dump",
        "stats-dump",
        "status.dump",
    ] {
        ensure!(names.contains(part), "{part} is not among {names:?}");
    }
    Ok(())
}
