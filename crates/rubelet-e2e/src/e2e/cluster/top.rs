//! `kubectl top` with a real metrics-server.

use anyhow::{Context as _, ensure};
use serde_json::json;

use crate::{
    control_plane::ControlPlaneOptions,
    e2e::cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, pod, spec},
};

/// On its own control plane: metrics-server scrapes every node of a cluster, and those of other tests come and go.
pub const CASES: &[ClusterCase] = &[ClusterCase {
    name: "kubectl top shows node and pods through a real metrics-server",
    plane: Plane::Own(ControlPlaneOptions::default),
    run: top,
}];

/// Allocates some megabytes, then uses the CPU without pause.
const BUSY: &str = "kept=$(head -c 8000000 /dev/zero | tr '\\0' x); while :; do :; done";

fn top(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let address = cluster.node.bed.address()?;
    cluster.start()?;
    let mut busy = spec(&cluster.name, BUSY);
    busy["terminationGracePeriodSeconds"] = json!(0);
    busy["containers"][0]["resources"] = json!({ "limits": { "cpu": "300m", "memory": "64Mi" } });
    cluster.apply_all(vec![pod("busy", &busy), pod("resting", &spec(&cluster.name, OBEDIENT))])?;
    cluster.own_plane()?.start_metrics_server(address)?;
    for pod in ["busy", "resting"] {
        cluster.wait_running(pod, 60)?;
    }
    // It needs two scrapes.
    cluster.wait("metrics-server has figures of both pods and of the node", 90, |cluster| {
        for pod in ["busy", "resting"] {
            cluster.object("metrics.k8s.io/v1beta1", &format!("pods/{pod}"))?;
        }
        cluster.plane().api().get(&format!("/apis/metrics.k8s.io/v1beta1/nodes/{}", cluster.name)).map(drop)
    })?;
    // Upstream's first values may be from before the pod started its work.
    cluster.wait("kubectl shows who works", 60, |cluster| {
        let pods = cluster.kubectl(&["top", "pod", "--no-headers"])?;
        let (busy, resting) = (Usage::shown(&pods, "busy")?, Usage::shown(&pods, "resting")?);
        // A third of a CPU, of which other load on the machine may take some.
        ensure!((80..450).contains(&busy.millicores) && resting.millicores < 50, "{busy:?}, {resting:?}");
        ensure!((5..64).contains(&busy.mebibytes) && resting.mebibytes < 5, "{busy:?}, {resting:?}");
        let node = Usage::shown(&cluster.kubectl(&["top", "node", "--no-headers"])?, &cluster.name)?;
        ensure!(node.millicores > busy.millicores / 2 && node.mebibytes > busy.mebibytes, "{node:?} of {busy:?}");
        Ok(())
    })
}

/// A line of `kubectl top`.
#[derive(Debug)]
struct Usage {
    millicores: u64,
    mebibytes: u64,
}

impl Usage {
    fn shown(table: &str, name: &str) -> anyhow::Result<Usage> {
        let mut lines = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let line = lines.find(|words| words.first() == Some(&name)).with_context(|| format!("no {name} in {table}"))?;
        let figure = |unit: &str| {
            let found = line[1..].iter().find_map(|word| word.strip_suffix(unit)?.parse().ok());
            found.with_context(|| format!("nothing in {unit}: {line:?}"))
        };
        Ok(Usage { millicores: figure("m")?, mebibytes: figure("Mi")? })
    }
}
