//! Tests that the rules of a shutdown can be broken.

use k8s_openapi::api::core::v1::{Pod, PodSpec};

use super::*;

/// A view of a pod with this priority and reason; it runs a container or none.
fn view(priority: i32, reason: &str, running: &[&str]) -> Arc<PodView> {
    let mut view = PodView::clone(&told("Syncing", "Running", 0).pods[&PodUid::new("u1")]);
    let spec = PodSpec { priority: Some(priority), ..PodSpec::default() };
    view.pod = Arc::new(Pod { spec: Some(spec), ..Pod::default() });
    view.source = Some(Source::File);
    view.status = Arc::new(PodStatus { reason: Some(reason.to_owned()), ..PodStatus::default() });
    view.running = running.iter().map(|name| ((*name).to_owned(), "id".to_owned())).collect();
    Arc::new(view)
}

/// The rules broken by these two pods so many seconds after a shutdown began.
fn broken_after(secs: u64, low: &Arc<PodView>, high: &Arc<PodView>) -> Vec<&'static str> {
    let mut snapshot = Snapshot::default();
    snapshot.pods.insert_mut(PodUid::new("low"), low.clone());
    snapshot.pods.insert_mut(PodUid::new("high"), high.clone());
    broken_by(&PodScript::pod("web"), |sim| {
        pass(sim, 100);
        sim.rules.shutdown_begins(sim.now, &snapshot, &sim.runtime.picture);
        pass(sim, secs);
        sim.rules.told(sim.now, sim.wall, &snapshot);
    })
}

#[test]
fn higher_group_ended_before_the_lower_breaks_a_rule() {
    let (runs, ended) = (view(0, "", &["app"]), view(0, "Terminated", &[]));
    let high = view(1000, "Terminated", &["app"]);
    assert_eq!(broken_after(19, &runs, &high), ["a shutdown ends groups in order"]);
    assert_eq!(broken_after(20, &runs, &high), Vec::<&str>::new());
    assert_eq!(broken_after(1, &ended, &high), Vec::<&str>::new());
    assert_eq!(broken_after(1, &runs, &view(1000, "", &["app"])), Vec::<&str>::new());
}

#[test]
fn start_of_a_new_pod_in_a_shutdown_breaks_a_rule() {
    let mut snapshot = Snapshot::default();
    snapshot.pods.insert_mut(PodUid::new("old"), view(0, "", &[]));
    let broken = broken_by(&PodScript::pod("web"), |sim| {
        sim.rules.shutdown_begins(sim.now, &snapshot, &sim.runtime.picture);
        sim.rules.ordered(sim.now, "old", "StartContainer");
        sim.rules.ordered(sim.now, "new", "RunSandbox");
        sim.rules.shutdown_ends();
        sim.rules.ordered(sim.now, "new", "RunSandbox");
    });
    assert_eq!(broken, ["no new pod starts in a shutdown"]);
}
