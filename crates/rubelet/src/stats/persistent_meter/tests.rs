//! Tests of the measurement of persistent volumes, with drivers that answer, hang or do not know.

use std::path::Path;

use async_trait::async_trait;
use rubelet_core::{
    pod::VolumeRecord,
    volumes::csi::{AccessMode, DriverRules},
};
use rubelet_csi::{
    Code, CsiError, CsiPlugins, DriverAddress, Drivers, ExpandVolume, NodeCapabilities, NodeInfo, PublishVolume,
    StageVolume, VolumeCondition, VolumeStats, pluginregistration::PluginInfo,
};
use serde_json::json;

use super::*;
use crate::{
    server::views::tests::{at, snapshot, view},
    world::{Clock, testing::world_in},
};

/// Its volumes are called after what it does when asked for their figures.
pub(crate) struct FakeDriver;

#[async_trait]
impl CsiPlugins for FakeDriver {
    async fn plugin_info(&self, _: &Path) -> CsiResult<PluginInfo> {
        panic!("not asked by the meter")
    }

    async fn notify_registration(&self, _: &Path, _: Result<(), String>) -> CsiResult<()> {
        panic!("not asked by the meter")
    }

    async fn node_info(&self, _: &DriverAddress) -> CsiResult<NodeInfo> {
        panic!("not asked by the meter")
    }

    async fn capabilities(&self, driver: &DriverAddress) -> CsiResult<NodeCapabilities> {
        let has_stats = driver.name != "simple";
        Ok(NodeCapabilities { volume_stats: has_stats, volume_condition: has_stats, ..NodeCapabilities::default() })
    }

    async fn stage(&self, _: &DriverAddress, _: StageVolume) -> CsiResult<()> {
        panic!("not asked by the meter")
    }

    async fn unstage(&self, _: &DriverAddress, _: &str, _: &Path) -> CsiResult<()> {
        panic!("not asked by the meter")
    }

    async fn publish(&self, _: &DriverAddress, _: PublishVolume) -> CsiResult<()> {
        panic!("not asked by the meter")
    }

    async fn unpublish(&self, _: &DriverAddress, _: &str, _: &Path) -> CsiResult<()> {
        panic!("not asked by the meter")
    }

    async fn stats(&self, _: &DriverAddress, handle: &str, path: &Path, _: Option<&Path>) -> CsiResult<VolumeStats> {
        let place = match handle {
            "raw" => "plugins/kubernetes.io/csi/volumeDevices/pv-raw/dev/u1".to_owned(),
            _ => format!("volumes/kubernetes.io~csi/pv-{handle}/mount"),
        };
        assert!(path.ends_with(place), "{}", path.display());
        let bytes = Some(VolumeUsage { total: 1000, available: 300, used: 700 });
        let inodes = Some(VolumeUsage { total: 50, available: 20, used: 30 });
        let condition = |is_abnormal, text: &str| Some(VolumeCondition { is_abnormal, message: text.to_owned() });
        match handle {
            "hang" => std::future::pending().await,
            "fail" => Err(CsiError::new(Code::Internal, "no")),
            "sick" => Ok(VolumeStats { bytes, inodes, condition: condition(true, "disk is on fire") }),
            "bytes" | "raw" => Ok(VolumeStats { bytes, inodes: None, condition: None }),
            _ => Ok(VolumeStats { bytes, inodes, condition: condition(false, "") }),
        }
    }

    async fn expand(&self, _: &DriverAddress, _: ExpandVolume) -> CsiResult<Option<i64>> {
        panic!("not asked by the meter")
    }
}

fn world(dir: &Path) -> World {
    let csi = Drivers::over(Arc::new(FakeDriver));
    for name in ["good", "simple"] {
        csi.register(name, format!("/{name}.sock").into());
    }
    let clock = Clock::simulated(at("2026-11-15T19:00:00Z"), Arc::default());
    World { csi, clock, ..world_in(dir) }
}

fn csi_volume(driver: &str, handle: &str) -> PersistentKind {
    let source = json!({"driver": driver, "volumeHandle": handle});
    let source = serde_json::from_value(source).unwrap();
    PersistentKind::Csi(CsiVolume::persistent(&source, AccessMode::ReadWriteOnce, DriverRules::of(None)))
}

/// A running pod with a claim per volume, of the same name.
fn pod_with(volumes: &[(&str, PersistentKind)]) -> PodView {
    let mut pod = view("prod", "web", &["a"], &[], json!({}));
    let claims = volumes.iter().map(|(name, _)| json!({"name": name, "persistentVolumeClaim": {"claimName": name}}));
    let spec = Arc::make_mut(&mut pod.pod).spec.as_mut().unwrap();
    spec.volumes = Some(claims.map(|claim| serde_json::from_value(claim).unwrap()).collect());
    pod.counts.has_ready_sandbox = true;
    for (name, kind) in volumes {
        let source = PersistentSource {
            name: format!("pv-{name}"),
            read_only: false,
            is_exclusive: false,
            size: None,
            group: None,
            kind: kind.clone(),
        };
        let record = VolumeRecord { claimed: Some(Arc::new(source)), is_set_up: true, ..VolumeRecord::default() };
        pod.volumes.insert((*name).to_owned(), record);
    }
    pod
}

fn shown(world: &World) -> String {
    let kept = world.persistent.lock().clone();
    let line = |((pod, _), stats): (&Key, &PersistentStats)| {
        let PersistentStats { volume, claim, figures, is_abnormal, .. } = stats;
        let claim = claim.as_ref().map_or_else(String::new, |claim| format!("{}/{}", claim.namespace, claim.name));
        let PersistentFigures { capacity_bytes, available_bytes, used_bytes, inodes, inodes_free, inodes_used } =
            figures;
        format!(
            "{pod} {volume} {claim}: {capacity_bytes} {available_bytes} {used_bytes} {inodes} {inodes_free} {inodes_used} {is_abnormal:?}"
        )
    };
    kept.iter().map(line).collect::<Vec<_>>().join("\n")
}

const MINUTE: Duration = Duration::from_secs(60);

/// The meter over snapshots, for this long.
async fn run_for(world: &World, receiver: &watch::Receiver<Arc<Snapshot>>, time: Duration, with_health: bool) {
    let _ = timeout(time, run(world.clone(), receiver.clone(), Schedule { period: MINUTE, with_health })).await;
}

#[tokio::test(start_paused = true)]
async fn hanging_driver_delays_its_own_volume_alone() {
    let dir = tempfile::tempdir().unwrap();
    let world = world(dir.path());
    let names = ["hang", "good", "bytes", "fail"];
    let mut volumes: Vec<_> = names.iter().map(|name| (*name, csi_volume("good", name))).collect();
    volumes.extend([("quiet", csi_volume("simple", "quiet")), ("lost", csi_volume("unknown", "lost"))]);
    let (_sender, receiver) = watch::channel(Arc::new(snapshot("n1", [("u1", pod_with(&volumes))])));
    run_for(&world, &receiver, Duration::from_secs(1), false).await;
    insta::assert_snapshot!(shown(&world), @r"
    u1 bytes prod/bytes: 1000 300 700 0 0 0 None
    u1 good prod/good: 1000 300 700 50 20 30 None
    ");
}

#[tokio::test(start_paused = true)]
async fn block_volume_is_measured_where_its_device_is_bound() {
    let dir = tempfile::tempdir().unwrap();
    let world = world(dir.path());
    let PersistentKind::Csi(volume) = csi_volume("good", "raw") else { panic!("it is") };
    let raw = PersistentKind::Csi(CsiVolume { is_block: true, ..volume });
    let (_sender, receiver) = watch::channel(Arc::new(snapshot("n1", [("u1", pod_with(&[("raw", raw)]))])));
    run_for(&world, &receiver, Duration::from_secs(1), false).await;
    assert_eq!(shown(&world), "u1 raw prod/raw: 1000 300 700 0 0 0 None");
}

#[tokio::test(start_paused = true)]
async fn volumes_are_measured_again_after_one_to_two_periods_until_their_pod_ends() {
    let dir = tempfile::tempdir().unwrap();
    let world = world(dir.path());
    let volumes: Vec<(String, PersistentKind)> =
        (0..20).map(|number| (format!("v{number}"), csi_volume("good", &format!("v{number}")))).collect();
    let volumes: Vec<_> = volumes.iter().map(|(name, kind)| (name.as_str(), kind.clone())).collect();
    let (sender, receiver) = watch::channel(Arc::new(snapshot("n1", [("u1", pod_with(&volumes))])));
    let watching = async {
        let mut turns = vec![];
        // A second after each tick.
        let mut wait = Duration::from_secs(1);
        for _ in 0..25 {
            let _ = timeout(wait, std::future::pending::<()>()).await;
            wait = TICK;
            let now = world.clock.now().wall;
            let fresh = world.persistent.lock().values().filter(|it| now.duration_since(it.at).as_secs() < 5).count();
            turns.push(fresh);
        }
        turns
    };
    let running = run(world.clone(), receiver.clone(), Schedule { period: MINUTE, with_health: false });
    let turns = tokio::select! {
        biased;
        turns = watching => turns,
        () = running => unreachable!("it runs for ever"),
    };
    assert_eq!(turns[0], 20, "new volumes are measured at once: {turns:?}");
    assert_eq!(turns[1..12].iter().sum::<usize>(), 0, "not within a period: {turns:?}");
    assert_eq!(turns[12..].iter().sum::<usize>(), 20, "within two: {turns:?}");
    assert!(turns[12..].iter().all(|fresh| *fresh < 10), "spread: {turns:?}");
    sender.send(Arc::new(snapshot("n1", []))).unwrap();
    run_for(&world, &receiver, TICK, false).await;
    assert_eq!(shown(&world), "");
}

#[tokio::test(start_paused = true)]
async fn abnormal_volume_is_reported_if_the_gate_is_on() {
    let dir = tempfile::tempdir().unwrap();
    let volumes = ["sick", "well"].map(|name| (name, csi_volume("good", name)));
    let (_sender, receiver) = watch::channel(Arc::new(snapshot("n1", [("u1", pod_with(&volumes))])));
    let mut seen = Vec::new();
    for with_health in [false, true] {
        let world = world(dir.path());
        run_for(&world, &receiver, Duration::from_secs(1), with_health).await;
        let events = world.events.since(0).into_iter();
        let events: Vec<_> = events.map(|event| format!("{} {}", event.record.reason, event.record.message)).collect();
        seen.push(format!("{}\n{}", shown(&world), events.join("\n")));
    }
    insta::assert_snapshot!(seen.join("\n"), @r"
    u1 sick prod/sick: 1000 300 700 50 20 30 None
    u1 well prod/well: 1000 300 700 50 20 30 None

    u1 sick prod/sick: 1000 300 700 50 20 30 Some(true)
    u1 well prod/well: 1000 300 700 50 20 30 Some(false)
    VolumeConditionAbnormal Volume sick: disk is on fire
    ");
}

#[tokio::test]
async fn local_volume_has_the_figures_of_its_file_system() {
    let dir = tempfile::tempdir().unwrap();
    let world = world(dir.path());
    let place = world.paths.pod_dir(&PodUid::new("u1")).join("volumes/kubernetes.io~local-volume/pv-disk");
    std::fs::create_dir_all(&place).unwrap();
    let host = PersistentKind::HostPath {
        path: dir.path().to_owned(),
        must_be: rubelet_core::volumes::HostPathType::Unchecked,
    };
    let volumes = [
        (
            "disk",
            PersistentKind::Local(rubelet_core::volumes::local::LocalVolume {
                path: "/disk".into(),
                fs_type: String::new(),
                mount_options: Vec::new(),
                is_block: false,
            }),
        ),
        ("host", host),
    ];
    let two = [("u1", pod_with(&volumes)), ("u2", pod_with(&volumes))];
    let (_sender, receiver) = watch::channel(Arc::new(snapshot("n1", two)));
    run_for(&world, &receiver, Duration::from_millis(500), false).await;
    let of_pod = world.persistent.of_pod(&PodUid::new("u1"));
    let [stats] = of_pod.as_slice() else { panic!("{of_pod:?}: a host path has no figures") };
    let found = world.host.file_system(&place).await.unwrap();
    assert_eq!((stats.figures.capacity_bytes, stats.figures.inodes), (found.capacity_bytes, found.inodes));
    assert_eq!(stats.figures.inodes_used, stats.figures.inodes - stats.figures.inodes_free);
    assert_eq!(world.persistent.of_pod(&PodUid::new("u2")), [], "it is not there");
    assert_eq!(world.persistent.of_claims().len(), 1);
}
