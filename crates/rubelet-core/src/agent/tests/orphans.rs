//! Pods in the runtime or on disk that are not desired.

use super::*;
use crate::observation::ListedState;

fn dirs(uids: &[&str], log_dirs: &[&str]) -> Result<Facts, EffectError> {
    let uids = uids.iter().map(|uid| PodUid::new(*uid)).collect();
    Ok(Facts::PodDirs { uids, log_dirs: log_dirs.iter().map(|dir| (*dir).to_owned()).collect() })
}

#[test]
fn orphaned_directories_take_pod_names_from_logs() {
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.config(&[web("u1")]);
    test.runtime_is_up(&[]);
    let log_dirs = ["default_web_u1", "ns_logged_u2", "ns_both_u3", "not-ours", "too_many_parts_u5", "no_uid_"];
    test.answer("ListPodDirs", dirs(&["u1", "u3", "u4"], &log_dirs));
    let names = test.agent.records.values().map(|record| (record.id.to_string(), record.lifecycle.name()));
    let expected =
        [("default/web", "Syncing"), ("ns/logged", "Terminating"), ("ns/both", "Terminating"), ("/u4", "Terminating")];
    assert_eq!(names.collect::<Vec<_>>(), expected.map(|(name, lifecycle)| (name.to_owned(), lifecycle)));
}

#[test]
fn orphan_found_by_directory_holds_its_name_in_the_runtime() {
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.config(&[]);
    test.runtime_is_up(&[]);
    test.answer("ListPodDirs", dirs(&["old"], &[]));
    test.inspected("a: running");
    assert_eq!(test.agent.records[&PodUid::new("old")].id.to_string(), "/old");
    test.at_secs += 30;
    test.handle(Event::Due);
    test.relisted(&[listed("old", "web")]);
    test.config(&[web("new")]);
    assert_eq!((test.lifecycle("old"), test.lifecycle("new")), ("Terminating".to_owned(), "Waiting".to_owned()));
}

#[test]
fn nothing_is_an_orphan_before_sources_are_complete() {
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.handle(Event::PartialConfig { source: Source::File, pods: vec![Arc::new(web("u1"))] });
    test.runtime_is_up(&[listed("u2", "other")]);
    assert_eq!((test.lifecycle("u1"), test.lifecycle("u2")), ("Syncing".to_owned(), "unknown".to_owned()));
    test.config(&[web("u1")]);
    test.relisted(&[listed("u2", "other")]);
    assert_eq!(test.lifecycle("u2"), "Terminating");
}

#[test]
fn listing_older_than_a_removed_pod_does_not_restore_it() {
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.config(&[]);
    test.runtime_is_up(&[listed("stranger", "stranger")]);
    test.at_secs += 30;
    test.handle(Event::Due);
    let asked_at = test.now().uptime;
    test.at_secs += 1;
    test.inspected("sandbox gone");
    test.carried_out(&["TearDownVolumes", "RemovePodCgroup", "RemovePodDir", "RemoveLogDir"], "sandbox gone");
    assert_eq!(test.lifecycle("stranger"), "unknown");
    let pods = || [(PodUid::new("stranger"), listed("stranger", "stranger"))].into();
    test.answer("Relist", Ok(Facts::Listing(Listing { looked_at: asked_at, pods: pods() })));
    assert_eq!(test.lifecycle("stranger"), "unknown", "the listing is older than its end");
    test.at_secs += 30;
    test.handle(Event::Due);
    test.relisted(&[listed("stranger", "stranger")]);
    assert_eq!(test.lifecycle("stranger"), "Terminating", "it has come back");
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
        let mut test = TestAgent::new(Settings::for_node("node"));
        test.config(&[web("u1")]);
        test.runtime_is_up(&[]);
        test.inspected(seen);
        test.at_secs += 30;
        test.handle(Event::Due);
        let listing: Vec<_> = listing.into_iter().collect();
        test.relisted(&listing);
        assert_eq!(test.pending().contains(&"InspectPod"), is_looked_at, "{seen} {listing:?}");
    }
}

#[test]
fn failed_look_is_retried_with_growing_back_off() {
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.config(&[web("u1")]);
    test.runtime_is_up(&[]);
    let failed = || Err(EffectError { kind: ErrorKind::Retry, message: "no".to_owned() });
    let mut waits = Vec::new();
    for _ in 0..4 {
        test.answer("InspectPod", failed());
        let before = test.at_secs;
        while !test.pending().contains(&"InspectPod") {
            test.at_secs += 1;
            test.handle(Event::Due);
        }
        waits.push(test.at_secs - before);
        if waits.len() == 3 {
            test.inspected("a: running");
            test.handle(Event::Hint { pod: PodUid::new("u1") });
        }
    }
    assert_eq!(waits, [1, 2, 4, 1]);
}

#[test]
fn first_of_two_static_pods_with_one_name_runs() {
    let mut test = TestAgent::new(Settings::for_node("node"));
    // In the order of their UIDs the second would come first.
    test.config(&[web("b-first")]);
    test.handle(Event::Config { source: Source::Http, pods: vec![Arc::new(web("a-second"))] });
    test.runtime_is_up(&[]);
    assert_eq!((test.lifecycle("b-first"), test.lifecycle("a-second")), ("Syncing".to_owned(), "Waiting".to_owned()));
    test.inspected("sandbox gone");
    test.config(&[]);
    test.carried_out(&["TearDownVolumes"], "sandbox gone");
    assert_eq!(test.lifecycle("a-second"), "Waiting", "the first holds something of the node");
    test.answer("RemovePodCgroup", Ok(Facts::Nothing));
    assert_eq!(test.lifecycle("a-second"), "Syncing");
}

#[test]
fn runtime_state_change_is_recorded() {
    let mut test = TestAgent::new(Settings::for_node("node"));
    test.config(&[]);
    test.runtime_is_up(&[]);
    assert_eq!(test.events, ["NodeReady"]);
    for (answer, told) in [(unavailable(), 2), (unavailable(), 2)] {
        test.at_secs += 10;
        test.handle(Event::Due);
        test.answer("CheckRuntime", answer);
        assert_eq!(test.events.len(), told, "{:?}", test.events);
    }
    assert_eq!(test.events[1], "NodeNotReady");
}
