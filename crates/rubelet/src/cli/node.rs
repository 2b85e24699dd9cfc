//! `rubelet node`: the readiness of this node, its eviction thresholds, and what was deleted and evicted.
//!
//! Owns: the text. The data is the agent's; how close to a threshold counts as close is decided in `core/eviction/view.rs`.
//! Upstream: parts of what `kubectl describe node` prints.

use std::{io::Write, process::ExitCode};

use clap::Command;
use jiff::Timestamp;
use rubelet_core::{
    eviction::{
        EvictedPod, EvictionRecord, ThresholdState, ThresholdView,
        threshold::{Resource, Signal},
    },
    id::PodRef,
    image_gc::ImageCollection,
    quantity::Quantity,
    snapshot::{NodeReadiness, NodeView},
};

use super::{
    client::{self, Client},
    pods::notices,
    print::{age, bytes, printable, short, table},
};
use crate::{server::views::NodeReport, world::Clock};

/// Rows of each of the tables of what happened.
const ROWS_SHOWN: usize = 10;

pub fn run(args: Vec<String>) -> ExitCode {
    client::run(async {
        let matches = command().try_get_matches_from(args)?;
        let report: NodeReport = Client::new(&matches).json("/node").await?;
        if matches.contains_id("output") {
            return client::print_json(&report);
        }
        Ok(std::io::stdout().write_all(render(&report, Clock::system().now().wall).as_bytes())?)
    })
}

fn command() -> Command {
    client::with_socket_args(Command::new("rubelet node").about("Show readiness, thresholds and evictions of this node"))
        .arg(client::output_arg().help("json: all details"))
        .after_help(
            "Examples:\n  rubelet node                    is the node ready, and how close is it to evicting pods?\n  \
             rubelet node -o json            the same for programs, with all evictions that are remembered\n\n\
             STATE of a threshold: ok, close (less than a tenth of the capacity above it), or MET. A threshold with a grace period\n\
             (evictionSoft) must be met for so long before pods are evicted. What was deleted and evicted is remembered until the\n\
             agent restarts. For the eviction of one pod: rubelet explain POD",
        )
}

fn render(report: &NodeReport, now: Timestamp) -> String {
    let (node, eviction) = (&report.node, &report.eviction);
    let mut text: String = notices(node, now).iter().map(|notice| format!("{notice}\n")).collect();
    text.push_str(&head(node));
    text.push_str(&thresholds(&eviction.thresholds, now));
    text.push_str(&collections(eviction.images.iter(), now));
    text.push_str(&evictions(&eviction.record, now));
    text
}

fn head(node: &NodeView) -> String {
    let readiness = match &node.readiness {
        NodeReadiness::Unchecked => "Unknown: the first check has not finished".to_owned(),
        NodeReadiness::Unknown => "Unknown: no response of the runtime yet".to_owned(),
        NodeReadiness::Ready => "Ready".to_owned(),
        NodeReadiness::NotReady(reasons) => format!("NotReady: {}", printable(&reasons.join("; "))),
    };
    let pressures: Vec<_> = node.pressures.iter().flatten().map(|pressure| pressure.condition()).collect();
    let or_none = |text: String| if text.is_empty() { "<none>".to_owned() } else { text };
    format!(
        "Node {}: {readiness}\nPressure: {}\nRuntime: {}\n",
        printable(&node.name),
        or_none(pressures.join(", ")),
        or_none(printable(&node.runtime)),
    )
}

fn thresholds(views: &[ThresholdView], now: Timestamp) -> String {
    if views.is_empty() {
        return "\nNo eviction thresholds are configured.\n".to_owned();
    }
    // The soft threshold of a signal follows its hard one.
    let mut views: Vec<_> = views.iter().collect();
    views.sort_by_key(|view| (view.signal, view.grace_secs));
    let rows = views.into_iter().map(|view| {
        let available = view.observed.map_or("<unknown>".to_owned(), |observed| {
            format!("{} of {}", amount(view.signal, observed.available), amount(view.signal, observed.capacity))
        });
        let computed = view.amount.filter(|_| view.value.ends_with('%'));
        let computed = computed.map_or(String::new(), |computed| format!(" ({})", amount(view.signal, computed)));
        let grace_secs = i64::try_from(view.grace_secs).unwrap_or(i64::MAX);
        let grace = if grace_secs == 0 { "<none>".to_owned() } else { short(grace_secs) };
        vec![view.signal.to_string(), available, format!("{}{computed}", view.value), grace, state(view, now)]
    });
    section(["SIGNAL", "AVAILABLE", "THRESHOLD", "GRACE PERIOD", "STATE"], rows)
}

fn state(view: &ThresholdView, now: Timestamp) -> String {
    match view.state() {
        ThresholdState::NotMeasured => "not measured".to_owned(),
        ThresholdState::Ok => "ok".to_owned(),
        ThresholdState::Close => "close".to_owned(),
        ThresholdState::Met { since } => {
            let met_secs = now.duration_since(since).as_secs();
            let left = i64::try_from(view.grace_secs).unwrap_or(i64::MAX).saturating_sub(met_secs);
            let next = if left > 0 { format!(", evicts in {}", short(left)) } else { String::new() };
            format!("MET for {}{next}", age(since, now))
        }
    }
}

fn amount(signal: Signal, amount: u64) -> String {
    match signal.resource() {
        Resource::Memory | Resource::EphemeralStorage => bytes(amount),
        Resource::Inodes | Resource::Pids => amount.to_string(),
    }
}

fn collections<'a>(all: impl DoubleEndedIterator<Item = &'a ImageCollection>, now: Timestamp) -> String {
    let rows = newest(all).into_iter().map(|collection| {
        let failure = collection.failure.as_deref();
        let failure = failure.map_or(String::new(), |error| format!("; {}", printable(first_sentence(error))));
        let reason = format!("{}{failure}", collection.reason);
        vec![age(collection.at, now), collection.images.to_string(), bytes(collection.freed_bytes), reason]
    });
    section(["AGE", "IMAGES DELETED", "FREED", "REASON"], rows)
}

fn evictions(record: &EvictionRecord, now: Timestamp) -> String {
    let rows = newest(record.recent.iter()).into_iter().map(|evicted| {
        let EvictedPod { pod, at, signal, message, passed_over, ranked, .. } = evicted;
        let ranked = if *ranked == 0 { "<none>".to_owned() } else { ranked.to_string() };
        let passed_over = if passed_over.is_empty() { "<none>".to_owned() } else { names(passed_over) };
        vec![age(*at, now), name(pod), signal.clone(), used(evicted), ranked, passed_over, printable(message)]
    });
    let header = ["AGE", "EVICTED POD", "SIGNAL", "USED", "PODS RANKED", "PASSED OVER AS CRITICAL", "MESSAGE"];
    let mut text = section(header, rows);
    if !record.counts.is_empty() {
        let counts: Vec<_> = record.counts.iter().map(|(signal, count)| format!("{signal} {count}")).collect();
        text.push_str(&format!("\nEvictions since the agent started: {}\n", counts.join(", ")));
    }
    text
}

/// The event has the rest of it.
fn first_sentence(text: &str) -> &str {
    text.split_once(". ").map_or(text, |(first, _)| first)
}

/// What an evicted pod used, for people. The agent has it as a quantity, as in the message.
pub(super) fn used(evicted: &EvictedPod) -> String {
    let is_count = evicted.signal.ends_with("inodesFree") || evicted.signal.starts_with("pid.");
    let amount = Quantity::parse(&evicted.used).ok().and_then(|used| u64::try_from(used.value()).ok());
    amount.filter(|_| !is_count).map_or_else(|| printable(&evicted.used), bytes)
}

/// The newest are last, as in the table of events.
fn newest<T>(all: impl DoubleEndedIterator<Item = T>) -> Vec<T> {
    let mut newest: Vec<T> = all.rev().take(ROWS_SHOWN).collect();
    newest.reverse();
    newest
}

/// A table below an empty line; nothing without rows.
fn section<const N: usize>(header: [&str; N], rows: impl Iterator<Item = Vec<String>>) -> String {
    let all: Vec<_> = std::iter::once(header.map(str::to_owned).to_vec()).chain(rows).collect();
    if all.len() == 1 { String::new() } else { format!("\n{}", table(&all)) }
}

fn name(pod: &PodRef) -> String {
    printable(&format!("{}/{}", pod.namespace, pod.name))
}

/// `default/a, default/b`.
pub(super) fn names(pods: &[PodRef]) -> String {
    pods.iter().map(name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, sync::Arc};

    use insta::assert_snapshot;
    use rubelet_core::{
        eviction::threshold::{Observation, Pressure},
        id::PodUid,
        snapshot::{EvictionView, NodeProblem},
    };

    use super::*;
    use crate::server::views::tests::at;

    const GIB: u64 = 1 << 30;

    fn threshold(signal: Signal, value: &str, amount: u64, observed: Option<(u64, u64)>) -> ThresholdView {
        let observed = observed.map(|(available, capacity)| Observation { available, capacity });
        let amount = observed.map(|_| amount);
        ThresholdView { signal, value: value.to_owned(), amount, grace_secs: 0, observed, met_since: None }
    }

    fn pod(namespace: &str, name: &str) -> PodRef {
        PodRef { uid: PodUid::new(name), namespace: namespace.into(), name: name.into() }
    }

    fn quiet() -> NodeReport {
        let node = NodeView {
            name: "node1".to_owned(),
            runtime: "containerd 2.4.2".to_owned(),
            readiness: NodeReadiness::Ready,
            ..NodeView::default()
        };
        let thresholds = vec![
            threshold(Signal::MemoryAvailable, "100Mi", 100 << 20, Some((14 * GIB + GIB / 5, 23 * GIB + GIB / 2))),
            threshold(Signal::NodeFsAvailable, "10%", 10 * GIB, Some((19 * GIB, 100 * GIB))),
            threshold(Signal::ImageFsAvailable, "15%", 0, None),
            threshold(Signal::PidAvailable, "5%", 1600, Some((30_000, 32_000))),
        ];
        NodeReport { node, eviction: Arc::new(EvictionView { thresholds, ..EvictionView::default() }) }
    }

    #[test]
    fn quiet_node_shows_how_close_its_thresholds_are() {
        assert_snapshot!(render(&quiet(), at("2026-11-15T19:00:00Z")), @"
        Node node1: Ready
        Pressure: <none>
        Runtime: containerd 2.4.2

        SIGNAL              AVAILABLE           THRESHOLD      GRACE PERIOD   STATE
        memory.available    14.2Gi of 23.5Gi    100Mi          <none>         ok
        nodefs.available    19.0Gi of 100.0Gi   10% (10.0Gi)   <none>         close
        imagefs.available   <unknown>           15%            <none>         not measured
        pid.available       30000 of 32000      5% (1600)      <none>         ok
        ");
    }

    #[test]
    fn node_under_pressure_shows_what_was_deleted_and_evicted() {
        let NodeReport { mut node, eviction } = quiet();
        node.pressures = Some(BTreeSet::from([Pressure::Memory, Pressure::Disk]));
        let mut thresholds = eviction.thresholds.clone();
        thresholds.truncate(2);
        thresholds[0].observed = Some(Observation { available: 90 << 20, capacity: 23 * GIB + GIB / 2 });
        thresholds[0].met_since = Some(at("2026-11-15T18:59:48Z"));
        thresholds.push(ThresholdView { grace_secs: 90, ..thresholds[0].clone() });
        let images = [
            ("2026-11-15T18:00:00Z", "the file system of images was 91% full", None),
            (
                "2026-11-15T18:58:00Z",
                "an eviction threshold was met",
                Some("read-only file system\u{1b}. Investigate disk usage. ".to_owned()),
            ),
        ];
        let images = images.map(|(moment, reason, failure)| {
            let (at, reason) = (at(moment), reason.to_owned());
            ImageCollection { at, reason, images: 3, freed_bytes: 3 * GIB / 2, failure }
        });
        let evicted = |name: &str, signal: &str, message: &str, ranked: usize| EvictedPod {
            pod: pod("default", name),
            at: at("2026-11-15T18:59:00Z"),
            signal: signal.to_owned(),
            used: "300Mi".to_owned(),
            message: message.to_owned(),
            passed_over: if ranked > 0 {
                vec![pod("kube-system", "dns"), pod("kube-system", "proxy")]
            } else {
                Vec::new()
            },
            ranked,
        };
        let low = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 90Mi. ";
        let limit = "Usage of EmptyDir volume \"v\" exceeds the limit \"200Mi\". ";
        let record = EvictionRecord {
            counts: [("memory.available".to_owned(), 12), ("emptydirfs.limit".to_owned(), 1)].into(),
            recent: [evicted("hog", "memory.available", low, 9), evicted("writer", "emptydirfs.limit", limit, 0)]
                .into(),
            last_ranking: None,
        };
        let eviction = Arc::new(EvictionView { thresholds, record, images: images.into() });
        let shown = render(&NodeReport { node, eviction }, at("2026-11-15T19:00:00Z"));
        assert_snapshot!(shown, @r#"
        Node node1: Ready
        Pressure: MemoryPressure, DiskPressure
        Runtime: containerd 2.4.2

        SIGNAL             AVAILABLE           THRESHOLD      GRACE PERIOD   STATE
        memory.available   90.0Mi of 23.5Gi    100Mi          <none>         MET for 12s
        memory.available   90.0Mi of 23.5Gi    100Mi          90s            MET for 12s, evicts in 78s
        nodefs.available   19.0Gi of 100.0Gi   10% (10.0Gi)   <none>         close

        AGE   IMAGES DELETED   FREED   REASON
        60m   3                1.5Gi   the file system of images was 91% full
        2m    3                1.5Gi   an eviction threshold was met; read-only file system\u{1b}

        AGE   EVICTED POD      SIGNAL             USED      PODS RANKED   PASSED OVER AS CRITICAL              MESSAGE
        60s   default/hog      memory.available   300.0Mi   9             kube-system/dns, kube-system/proxy   The node was low on resource: memory. Threshold quantity: 100Mi, available: 90Mi.
        60s   default/writer   emptydirfs.limit   300.0Mi   <none>        <none>                               Usage of EmptyDir volume "v" exceeds the limit "200Mi".

        Evictions since the agent started: emptydirfs.limit 1, memory.available 12
        "#);
    }

    #[test]
    fn node_that_is_not_ready_says_why() {
        let NodeReport { mut node, .. } = quiet();
        node.readiness = NodeReadiness::NotReady(vec!["cni plugin not initialized".to_owned(), "b".to_owned()]);
        node.network_problem =
            Some(NodeProblem { message: "cni plugin not initialized".to_owned(), since: at("2026-11-15T18:59:00Z") });
        let report = NodeReport { node, eviction: Arc::default() };
        assert_snapshot!(render(&report, at("2026-11-15T19:00:00Z")), @"
        ! The pod network has a problem since 60s: cni plugin not initialized
        Node node1: NotReady: cni plugin not initialized; b
        Pressure: <none>
        Runtime: containerd 2.4.2

        No eviction thresholds are configured.
        ");
    }

    #[test]
    fn only_the_newest_are_listed() {
        assert_eq!(newest(0..13), (3..13).collect::<Vec<_>>());
    }

    #[test]
    fn report_survives_the_socket() {
        let report = quiet();
        let sent = serde_json::to_value(&report).unwrap();
        assert_eq!(sent["eviction"]["thresholds"][0]["signal"], "memory.available");
        assert_eq!(serde_json::from_value::<NodeView>(sent.clone()).unwrap(), report.node);
        assert_eq!(serde_json::from_value::<NodeReport>(sent).unwrap(), report);
    }
}
