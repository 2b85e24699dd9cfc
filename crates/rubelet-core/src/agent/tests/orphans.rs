//! Pods in the runtime or on disk that are not desired.

use super::*;
use crate::observation::ListedState;

fn dirs(uids: &[&str], log_dirs: &[&str]) -> Result<Facts, EffectError> {
    let uids = uids.iter().map(|uid| PodUid::new(*uid)).collect();
    Ok(Facts::PodDirs { uids, log_dirs: log_dirs.iter().map(|dir| (*dir).to_owned()).collect() })
}

#[test]
fn orphaned_directories_take_pod_names_from_logs() {
    let mut turns = Turns::new(Settings::for_node("node"));
    turns.config(&[web("u1")]);
    turns.runtime_is_up(&[]);
    let log_dirs = ["default_web_u1", "ns_logged_u2", "ns_both_u3", "not-ours", "too_many_parts_u5", "no_uid_"];
    turns.answer("ListPodDirs", dirs(&["u1", "u3", "u4"], &log_dirs));
    let names = turns.agent.records.values().map(|record| (record.id.to_string(), record.lifecycle.name()));
    let expected =
        [("default/web", "Syncing"), ("ns/logged", "Terminating"), ("ns/both", "Terminating"), ("/u4", "Terminating")];
    assert_eq!(names.collect::<Vec<_>>(), expected.map(|(name, lifecycle)| (name.to_owned(), lifecycle)));
}

#[test]
fn orphan_found_by_directory_holds_its_name_in_the_runtime() {
    let mut turns = Turns::new(Settings::for_node("node"));
    turns.config(&[]);
    turns.runtime_is_up(&[]);
    turns.answer("ListPodDirs", dirs(&["old"], &[]));
    turns.inspected("a: running");
    assert_eq!(turns.agent.records[&PodUid::new("old")].id.to_string(), "/old");
    turns.at_secs += 30;
    turns.happens(Event::Due);
    turns.relisted(&[listed("old", "web")]);
    turns.config(&[web("new")]);
    assert_eq!((turns.lifecycle("old"), turns.lifecycle("new")), ("Terminating".to_owned(), "Waiting".to_owned()));
}

#[test]
fn nothing_is_an_orphan_before_sources_are_complete() {
    let mut turns = Turns::new(Settings::for_node("node"));
    turns.happens(Event::PartialConfig { source: Source::File, pods: vec![Arc::new(web("u1"))] });
    turns.runtime_is_up(&[listed("u2", "other")]);
    assert_eq!((turns.lifecycle("u1"), turns.lifecycle("u2")), ("Syncing".to_owned(), "unknown".to_owned()));
    turns.config(&[web("u1")]);
    turns.relisted(&[listed("u2", "other")]);
    assert_eq!(turns.lifecycle("u2"), "Terminating");
}

#[test]
fn listing_older_than_a_removed_pod_does_not_restore_it() {
    let mut turns = Turns::new(Settings::for_node("node"));
    turns.config(&[]);
    turns.runtime_is_up(&[listed("stranger", "stranger")]);
    turns.at_secs += 30;
    turns.happens(Event::Due);
    let asked_at = turns.now().uptime;
    turns.at_secs += 1;
    turns.inspected("sandbox gone");
    turns.carried_out(&["TearDownVolumes", "RemovePodCgroup", "RemovePodDir", "RemoveLogDir"], "sandbox gone");
    assert_eq!(turns.lifecycle("stranger"), "unknown");
    let pods = || [(PodUid::new("stranger"), listed("stranger", "stranger"))].into();
    turns.answer("Relist", Ok(Facts::Listing(Listing { looked_at: asked_at, pods: pods() })));
    assert_eq!(turns.lifecycle("stranger"), "unknown", "the listing is older than its end");
    turns.at_secs += 30;
    turns.happens(Event::Due);
    turns.relisted(&[listed("stranger", "stranger")]);
    assert_eq!(turns.lifecycle("stranger"), "Terminating", "it has come back");
}

#[test]
fn relist_difference_causes_a_look() {
    let with = |sandbox: SandboxState, container: Option<ListedState>| ListedPod {
        sandboxes: BTreeMap::from([("sb0".into(), sandbox)]),
        containers: container.into_iter().map(|state| ("a0".into(), state)).collect(),
        ..listed("u1", "web")
    };
    let running = || with(SandboxState::Ready, Some(ListedState::Running));
    for (seen, listing, is_looked_at) in [
        ("a: running", Some(running()), false),
        ("a: running", Some(with(SandboxState::Ready, Some(ListedState::Exited))), true),
        ("a: running", Some(with(SandboxState::Ready, None)), true),
        ("a: running", None, true),
        ("sandbox notready", None, true),
        ("sandbox gone; a: exit(0)", None, true),
        ("sandbox gone", None, false),
        ("sandbox gone", Some(running()), true),
    ] {
        let mut turns = Turns::new(Settings::for_node("node"));
        turns.config(&[web("u1")]);
        turns.runtime_is_up(&[]);
        turns.inspected(seen);
        turns.at_secs += 30;
        turns.happens(Event::Due);
        let listing: Vec<_> = listing.into_iter().collect();
        turns.relisted(&listing);
        assert_eq!(turns.pending().contains(&"InspectPod"), is_looked_at, "{seen} {listing:?}");
    }
}

#[test]
fn failed_look_is_retried_with_growing_back_off() {
    let mut turns = Turns::new(Settings::for_node("node"));
    turns.config(&[web("u1")]);
    turns.runtime_is_up(&[]);
    let failed = || Err(EffectError { kind: ErrorKind::Retry, message: "no".to_owned() });
    let mut waits = Vec::new();
    for _ in 0..4 {
        turns.answer("InspectPod", failed());
        let before = turns.at_secs;
        while !turns.pending().contains(&"InspectPod") {
            turns.at_secs += 1;
            turns.happens(Event::Due);
        }
        waits.push(turns.at_secs - before);
        if waits.len() == 3 {
            turns.inspected("a: running");
            turns.happens(Event::Hint { pod: PodUid::new("u1") });
        }
    }
    assert_eq!(waits, [1, 2, 4, 1]);
}

#[test]
fn of_two_static_pods_with_one_name_the_first_runs() {
    let mut turns = Turns::new(Settings::for_node("node"));
    // In the order of their UIDs the second would come first.
    turns.config(&[web("b-first")]);
    turns.happens(Event::Config { source: Source::Http, pods: vec![Arc::new(web("a-second"))] });
    turns.runtime_is_up(&[]);
    assert_eq!((turns.lifecycle("b-first"), turns.lifecycle("a-second")), ("Syncing".to_owned(), "Waiting".to_owned()));
    turns.inspected("sandbox gone");
    turns.config(&[]);
    turns.carried_out(&["TearDownVolumes"], "sandbox gone");
    assert_eq!(turns.lifecycle("a-second"), "Waiting", "the first holds something of the node");
    turns.answer("RemovePodCgroup", Ok(Facts::Nothing));
    assert_eq!(turns.lifecycle("a-second"), "Syncing");
}

#[test]
fn runtime_state_change_is_recorded() {
    let mut turns = Turns::new(Settings::for_node("node"));
    turns.config(&[]);
    turns.runtime_is_up(&[]);
    assert_eq!(turns.told, ["NodeReady"]);
    for (answer, told) in [(unavailable(), 2), (unavailable(), 2)] {
        turns.at_secs += 10;
        turns.happens(Event::Due);
        turns.answer("CheckRuntime", answer);
        assert_eq!(turns.told.len(), told, "{:?}", turns.told);
    }
    assert_eq!(turns.told[1], "NodeNotReady");
}
