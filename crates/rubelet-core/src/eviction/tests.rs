//! Rounds of eviction, look by look.

use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use super::{
    threshold::ThresholdValue,
    usage::{DiskUsage, PodUsage},
    *,
};
use crate::test_support::later;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn threshold(signal: Signal, mib: u64) -> Threshold {
    let value = ThresholdValue::Quantity(mib * MIB, format!("{mib}Mi"));
    Threshold { signal, value, min_reclaim: None, grace: Duration::ZERO }
}

struct Fixture {
    eviction: Eviction,
    settings: EvictionSettings,
}

impl Fixture {
    fn with(thresholds: Vec<Threshold>) -> Self {
        let settings = EvictionSettings { thresholds, ..EvictionSettings::default() };
        let mut eviction = Eviction::default();
        eviction.places_found(None, later(0));
        Fixture { eviction, settings }
    }

    /// A look at this second finds so many mebibytes available.
    fn sees(&mut self, secs: u64, signals: &[(Signal, u64)]) -> NextStep {
        let observation = |mib: u64| Observation { available: mib * MIB, capacity: 100 * GIB };
        let signals = signals.iter().map(|(signal, mib)| (*signal, observation(*mib))).collect();
        self.eviction.is_looking = true;
        let usage = NodeUsage { signals, layout: None };
        self.eviction.node_measured(usage, &self.settings, later(secs))
    }

    fn pressures(&self) -> Vec<Pressure> {
        self.eviction.pressures().iter().copied().collect()
    }

    fn looks_in(&self, secs: u64) -> Duration {
        self.eviction.look_at.since(later(secs).uptime)
    }

    /// Ranks pods of these names and memory usages; those that begin with `critical` are critical.
    fn ranked(&mut self, secs: u64, pods: &[(&str, u64)]) -> Option<PodToEvict> {
        let pods: Vec<(Pod, PodUsage)> = pods
            .iter()
            .map(|(name, mib)| {
                let pod = json!({
                    "metadata": { "name": name, "namespace": "default", "uid": name },
                    "spec": { "containers": [], "terminationGracePeriodSeconds": 7 },
                });
                let usage = PodUsage { memory_bytes: mib * MIB, ..PodUsage::default() };
                (serde_json::from_value(pod).expect("a pod"), usage)
            })
            .collect();
        let candidates = pods.iter().map(|(pod, usage)| Candidate { pod, spec: pod.spec_of(), usage: Some(usage) });
        let candidates = candidates.collect();
        let is_critical = |it: &Candidate<'_>| it.pod.metadata.name.as_deref().unwrap().starts_with("critical");
        self.eviction.rank(candidates, is_critical, &self.settings, later(secs))
    }

    fn advance(&mut self, secs: u64, is_reclaiming: bool, released: &[&str]) {
        let has_released = |uid: &PodUid| released.contains(&uid.as_str());
        self.eviction.advance(|| is_reclaiming, has_released, later(secs));
    }
}

trait SpecOf {
    fn spec_of(&self) -> &k8s_openapi::api::core::v1::PodSpec;
}

impl SpecOf for Pod {
    fn spec_of(&self) -> &k8s_openapi::api::core::v1::PodSpec {
        self.spec.as_ref().expect("a spec")
    }
}

const MEMORY: Signal = Signal::MemoryAvailable;
const DISK: Signal = Signal::NodeFsAvailable;

#[test]
fn node_is_looked_at_before_a_threshold_can_be_crossed() {
    let mut test = Fixture::with(vec![threshold(MEMORY, 100), threshold(DISK, 1024)]);
    // Far apart, so that what changes between them is slow.
    for (at, (memory, disk, millis)) in
        [(50_000, 50_000, 10_000), (3_172, 50_000, 3_000), (50_000, 2_048, 2_000), (101, 50_000, 500)]
            .into_iter()
            .enumerate()
    {
        let at = u64::try_from(at).expect("few") * 1000;
        assert_eq!(test.sees(at, &[(MEMORY, memory), (DISK, disk)]), NextStep::Nothing);
        assert_eq!(test.looks_in(at), Duration::from_millis(millis), "{memory} {disk}");
    }
    // 5 GiB a second, seen between two looks, is more than is assumed of a quiet node.
    test.sees(9000, &[(MEMORY, 50_000), (DISK, 50_000)]);
    test.sees(9001, &[(MEMORY, 44_880), (DISK, 50_000)]);
    assert!(test.looks_in(9001) < Duration::from_millis(4_500), "{:?}", test.looks_in(9001));
}

#[test]
fn hard_threshold_evicts_one_pod_and_waits_until_it_has_released_its_memory() {
    let mut test = Fixture::with(vec![threshold(MEMORY, 100)]);
    let rank = NextStep::RankPods(MEMORY);
    assert_eq!(test.sees(0, &[(MEMORY, 99)]), rank);
    assert_eq!(test.pressures(), [Pressure::Memory]);
    let evicted = test.ranked(0, &[("small", 10), ("critical", 500), ("big", 300)]).expect("a pod");
    assert_eq!((evicted.uid.as_str(), evicted.grace_secs, evicted.is_disruption), ("big", 1, true));
    let noted = &test.eviction.record().recent[0];
    assert_eq!((noted.used.as_str(), noted.ranked, noted.passed_over[0].name.as_ref()), ("300Mi", 3, "critical"));
    assert_eq!(test.eviction.record().counts, BTreeMap::from([("memory.available".to_owned(), 1)]));

    test.advance(1, false, &[]);
    assert_eq!(test.eviction.due(&test.settings, later(20)), None);
    test.advance(2, false, &["big"]);
    assert!(test.eviction.due(&test.settings, later(2)).is_some());
    // One that does not end is waited for no longer than this.
    assert_eq!(test.sees(3, &[(MEMORY, 99)]), rank);
    test.ranked(3, &[("small", 10)]);
    test.advance(32, false, &[]);
    assert_eq!(test.eviction.due(&test.settings, later(32)), None);
    test.advance(33, false, &[]);
    assert!(test.eviction.due(&test.settings, later(33)).is_some());
}

#[test]
fn with_only_critical_pods_nothing_is_evicted_for_a_while() {
    let mut test = Fixture::with(vec![threshold(MEMORY, 100)]);
    test.sees(0, &[(MEMORY, 99)]);
    assert_eq!(test.ranked(0, &[("critical", 500)]), None);
    assert_eq!(test.looks_in(0), Duration::from_secs(10));
    assert!(test.eviction.record().recent.is_empty() && test.eviction.record().counts.is_empty());
}

#[test]
fn soft_threshold_waits_for_its_grace_period_but_the_condition_does_not() {
    let soft = Threshold { grace: Duration::from_secs(5), ..threshold(MEMORY, 1000) };
    let mut test = Fixture::with(vec![soft]);
    assert_eq!(test.sees(0, &[(MEMORY, 900)]), NextStep::Nothing);
    assert_eq!((test.pressures(), test.looks_in(0)), (vec![Pressure::Memory], Duration::from_secs(5)));
    // A gap starts the period over.
    assert_eq!(test.sees(3, &[(MEMORY, 1001)]), NextStep::Nothing);
    assert_eq!(test.sees(4, &[(MEMORY, 900)]), NextStep::Nothing);
    assert_eq!(test.sees(6, &[(MEMORY, 900)]), NextStep::Nothing);
    assert_eq!(test.sees(9, &[(MEMORY, 900)]), NextStep::RankPods(MEMORY));
    test.settings.max_pod_grace_secs = 30;
    assert_eq!(test.ranked(9, &[("pod", 1)]).map(|pod| pod.grace_secs), Some(7));
}

#[test]
fn rankings_say_how_old_the_figures_were() {
    let mut test = Fixture::with(vec![threshold(MEMORY, 100), threshold(DISK, 1024)]);
    let mut ages = Vec::new();
    for (seen, ranked) in [(10, 12), (50, 50)] {
        test.sees(seen, &[(MEMORY, 99), (DISK, 50_000)]);
        test.ranked(ranked, &[("critical", 500)]);
        let Ranking { number, stats_age } = test.eviction.record().last_ranking.clone().expect("a ranking");
        ages.push(format!("{number} {stats_age:?}"));
    }
    assert_eq!(ages, [r#"0 {"memory.available": 2s}"#, r#"1 {"memory.available": 0ns}"#]);
}

#[test]
fn readers_see_since_when_a_threshold_is_met() {
    let mut test = Fixture::with(vec![threshold(MEMORY, 100), threshold(DISK, 1024)]);
    test.sees(10, &[(MEMORY, 99)]);
    test.sees(13, &[(MEMORY, 98)]);
    let views = test.eviction.view(&test.settings, later(14));
    let met: Vec<_> = views.iter().map(|view| (view.signal, view.met_since)).collect();
    assert_eq!(met, [(MEMORY, Some(later(10).wall)), (DISK, None)]);
    assert_eq!(views[1].state(), ThresholdState::NotMeasured);
}

#[test]
fn condition_lasts_for_the_transition_period() {
    let mut test = Fixture::with(vec![threshold(MEMORY, 100), threshold(Signal::PidAvailable, 1)]);
    test.sees(0, &[(MEMORY, 99), (Signal::PidAvailable, 0)]);
    test.eviction.stage = Stage::Watching;
    assert_eq!(test.pressures(), [Pressure::Memory, Pressure::Pid]);
    test.sees(299, &[(MEMORY, 5000), (Signal::PidAvailable, 0)]);
    assert_eq!(test.pressures(), [Pressure::Memory, Pressure::Pid]);
    test.sees(300, &[(MEMORY, 5000), (Signal::PidAvailable, 7)]);
    assert_eq!(test.pressures(), [Pressure::Pid]);
}

#[test]
fn threshold_drives_eviction_until_the_minimum_is_reclaimed() {
    let min_reclaim = Some(ThresholdValue::Quantity(50 * MIB, "50Mi".to_owned()));
    let mut test = Fixture::with(vec![Threshold { min_reclaim, ..threshold(MEMORY, 100) }]);
    let rank = NextStep::RankPods(MEMORY);
    assert_eq!(test.sees(0, &[(MEMORY, 120)]), NextStep::Nothing);
    assert_eq!(test.sees(1, &[(MEMORY, 99)]), rank);
    test.eviction.stage = Stage::Watching;
    assert_eq!(test.sees(2, &[(MEMORY, 149)]), rank);
    test.eviction.stage = Stage::Watching;
    assert_eq!(test.sees(3, &[(MEMORY, 150)]), NextStep::Nothing);
    assert_eq!(test.sees(4, &[(MEMORY, 120)]), NextStep::Nothing);
}

#[test]
fn disk_is_reclaimed_before_pods_are_evicted() {
    let mut test = Fixture::with(vec![threshold(DISK, 100)]);
    let reclaim = NextStep::Reclaim { signal: DISK, what: Reclaimable::ContainersAndImages };
    assert_eq!(test.sees(0, &[(DISK, 99)]), reclaim);
    // It takes time; looks go on, and end it as soon as enough is free.
    test.advance(1, true, &[]);
    assert_eq!(test.sees(1, &[(DISK, 99)]), NextStep::Nothing);
    assert_eq!(test.sees(2, &[(DISK, 200)]), NextStep::StopReclaiming);
    assert_eq!(test.sees(3, &[(DISK, 99)]), reclaim);
    test.advance(4, false, &[]);
    assert!(test.eviction.due(&test.settings, later(4)).is_some());
    let rank = NextStep::RankPods(DISK);
    assert_eq!(test.sees(4, &[(DISK, 99)]), rank);
    // Or it takes too long.
    test.eviction.stage = Stage::Watching;
    assert_eq!(test.sees(10, &[(DISK, 99)]), reclaim);
    test.advance(69, true, &[]);
    assert_eq!(test.sees(69, &[(DISK, 99)]), NextStep::Nothing);
    test.advance(70, true, &[]);
    assert_eq!(test.sees(70, &[(DISK, 99)]), rank);
}

#[test]
fn memory_comes_before_disk() {
    let mut test = Fixture::with(vec![threshold(DISK, 100), threshold(MEMORY, 100)]);
    let rank = NextStep::RankPods(MEMORY);
    assert_eq!(test.sees(0, &[(DISK, 99), (MEMORY, 99)]), rank);
}

#[test]
fn memory_does_not_wait_until_disk_is_reclaimed() {
    let mut test = Fixture::with(vec![threshold(DISK, 100), threshold(MEMORY, 100)]);
    let reclaim = NextStep::Reclaim { signal: DISK, what: Reclaimable::ContainersAndImages };
    assert_eq!(test.sees(0, &[(DISK, 99), (MEMORY, 5000)]), reclaim);
    test.advance(1, true, &[]);
    let rank = NextStep::RankPods(MEMORY);
    assert_eq!(test.sees(1, &[(DISK, 99), (MEMORY, 99)]), rank);
}

#[test]
fn pod_is_evicted_for_the_threshold_that_is_still_met() {
    let pids = Signal::PidAvailable;
    let mut test = Fixture::with(vec![threshold(DISK, 100), threshold(pids, 1)]);
    let reclaim = NextStep::Reclaim { signal: DISK, what: Reclaimable::ContainersAndImages };
    assert_eq!(test.sees(0, &[(DISK, 99), (pids, 7)]), reclaim);
    test.advance(1, false, &[]);
    let rank = NextStep::RankPods(pids);
    assert_eq!(test.sees(1, &[(DISK, 200), (pids, 0)]), rank);
}

#[test]
fn signal_that_is_not_measured_is_not_met() {
    let mut test = Fixture::with(vec![threshold(DISK, 100)]);
    assert_eq!(test.sees(0, &[(MEMORY, 0)]), NextStep::Nothing);
    assert!(test.pressures().is_empty());
}

#[test]
fn what_is_reclaimed_depends_on_where_images_are() {
    use DiskLayout::{DedicatedImages, Shared, Split};
    let found = [Shared, DedicatedImages, Split].map(|layout| {
        [DISK, Signal::ImageFsInodesFree, MEMORY].map(|signal| match reclaimable(signal, layout) {
            None => "nothing",
            Some(Reclaimable::Containers) => "containers",
            Some(Reclaimable::Images) => "images",
            Some(Reclaimable::ContainersAndImages) => "both",
        })
    });
    assert_eq!(
        found,
        [["both", "both", "nothing"], ["nothing", "both", "nothing"], ["containers", "images", "nothing"]]
    );
}

#[test]
fn pods_over_their_limits_are_all_evicted_at_once() {
    let mut test = Fixture::with(Vec::new());
    assert!(!test.eviction.limits_check_due(|| false, &test.settings, later(0)));
    assert!(!test.eviction.limits_check_due(|| true, &test.settings, later(9)));
    assert!(test.eviction.limits_check_due(|| true, &test.settings, later(10)));
    let pod = |name: &str| -> Pod {
        serde_json::from_value(json!({
            "metadata": { "name": name, "namespace": "default", "uid": name },
            "spec": { "containers": [], "volumes": [{ "name": "v", "emptyDir": { "sizeLimit": "1Ki" } }] },
        }))
        .expect("a pod")
    };
    let usage = |bytes| PodUsage {
        volumes: BTreeMap::from([("v".to_owned(), DiskUsage { bytes, inodes: 1 })]),
        ..PodUsage::default()
    };
    let pods = [(pod("a"), usage(2048)), (pod("b"), usage(10)), (pod("c"), usage(4096))];
    let candidates = pods.iter().map(|(pod, usage)| Candidate { pod, spec: pod.spec_of(), usage: Some(usage) });
    let evicted = test.eviction.over_limits(&candidates.collect::<Vec<_>>(), later(11));
    let shown: Vec<_> = evicted.iter().map(|pod| (pod.uid.as_str(), pod.grace_secs, pod.is_disruption)).collect();
    assert_eq!(shown, [("a", 1, false), ("c", 1, false)]);
    assert_eq!(test.eviction.record().counts, BTreeMap::from([("emptydirfs.limit".to_owned(), 2)]));
    let used: Vec<_> = test.eviction.record().recent.iter().map(|noted| noted.used.as_str()).collect();
    assert_eq!(used, ["2Ki", "4Ki"]);
}
