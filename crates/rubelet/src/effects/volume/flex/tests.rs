//! With real programs as drivers: small shell scripts that mount memory.

use std::{fs, os::unix::fs::PermissionsExt};

use rubelet_core::volumes::devices::Device;
use serde_json::{Value, json};

use super::*;
use crate::{
    effects::{
        directories::{make_pod_dirs, remove_pod_dir, tests::pod_ref},
        volume::{devices, set_up_volume, tear_down_volumes},
    },
    world::testing::world_in,
};

const UID: &str = "0001";

/// Writes down each call, and mounts memory. Its capabilities are in the file `capabilities` beside it. With a file `device` it
/// answers with that one, and leaves its mount to the agent.
const DRIVER: &str = r#"#!/bin/sh
dir=$(dirname "$0")
echo "$*" >> "$dir/calls"
ok() { echo '{"status": "Success"}'; exit 0; }
case "$1" in
init) echo "{\"status\": \"Success\", \"capabilities\": $(cat "$dir/capabilities")}" ;;
mountdevice)
  [ -e "$dir/device" ] && { echo '{"status": "Not supported"}'; exit 1; }
  mount -t tmpfs -o size=64k flex "$2" && ok ;;
mount)
  [ -e "$dir/broken" ] && { echo '{"status": "Failure", "message": "no such share"}'; exit 1; }
  [ -e "$dir/device-only" ] && { echo '{"status": "Not supported"}'; exit 1; }
  mount -t tmpfs -o size=64k flex "$2" && ok ;;
unmount|unmountdevice) umount "$2" && ok ;;
waitforattach) echo "{\"status\": \"Success\", \"device\": \"$(cat "$dir/device" 2>/dev/null || echo /dev/flex)\"}" ;;
slow) sleep 60 ;;
*) echo '{"status": "Not supported"}'; exit 1 ;;
esac
"#;

fn install(world: &World, capabilities: &Value) -> PathBuf {
    let dir = world.paths.volume_plugin_dir.join("vendor~mem");
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("capabilities"), capabilities.to_string()).unwrap();
    // Renamed, as drivers should be: a program that is written cannot be started.
    fs::write(dir.join(".mem"), DRIVER).unwrap();
    fs::set_permissions(dir.join(".mem"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::rename(dir.join(".mem"), dir.join("mem")).unwrap();
    dir
}

fn source() -> PersistentSource {
    let source = json!({"driver": "vendor/mem", "options": {"size": "small"}});
    let volume = FlexVolume::inline(&serde_json::from_value(source).unwrap(), "prod").unwrap();
    let kind = PersistentKind::Flex(volume);
    let source = PersistentSource {
        name: "pv".to_owned(),
        read_only: false,
        is_exclusive: false,
        kind,
        size: None,
        group: None,
    };
    source.without_controller()
}

fn volume_of(source: &PersistentSource) -> &FlexVolume {
    match &source.kind {
        PersistentKind::Flex(volume) => volume,
        other => panic!("{other:?}"),
    }
}

async fn set_up_pod(world: &World, source: &PersistentSource) -> Result<(), String> {
    make_pod_dirs(world, &pod_ref(UID)).await.unwrap();
    let pod = json!({"metadata": {"name": "web", "namespace": "prod"}, "spec": {"containers": []}});
    let pod = serde_json::from_value(pod).unwrap();
    let done = set_up_volume(world, &pod, &PodUid::new(UID), "data", Some(source)).await;
    done.map(drop).map_err(|error| error.message)
}

async fn tear_down(world: &World) {
    tear_down_volumes(world, &pod_ref(UID)).await.unwrap();
    remove_pod_dir(world, &PodUid::new(UID)).await.unwrap();
}

/// The calls since the last look, without the directory of the test.
fn calls(world: &World, dir: &Path) -> String {
    let calls = fs::read_to_string(dir.join("calls")).unwrap_or_default();
    let _ = fs::remove_file(dir.join("calls"));
    calls.trim_end().replace(world.paths.root_dir.to_str().unwrap(), "")
}

#[tokio::test]
async fn driver_that_appears_later_mounts_a_volume_and_unmounts_it() {
    let dir = tempfile::tempdir().unwrap();
    let world = world_in(&dir.path().canonicalize().unwrap());
    let missing = with_capabilities(&world, source()).await.unwrap_err().message;
    assert_eq!(missing, "failed to get Plugin from volumeSpec for volume \"pv\" err=no volume plugin matched");
    let driver = install(&world, &json!({"attach": false}));
    let source = with_capabilities(&world, source()).await.unwrap();
    assert_eq!(Device::of(&source), None, "nothing is mounted for all pods");
    fs::write(driver.join("broken"), "").unwrap();
    let place = world.paths.pod_dir(&PodUid::new(UID)).join("volumes/vendor~mem/pv");
    let why = set_up_pod(&world, &source).await.unwrap_err();
    let expected = "mount command failed, status: Failure, reason: no such share";
    assert_eq!(why, format!("MountVolume.SetUp failed for volume \"pv\" : {expected}"));
    assert!(!place.exists());
    fs::remove_file(driver.join("broken")).unwrap();
    for _ in 0..2 {
        set_up_pod(&world, &source).await.unwrap();
    }
    assert!(mounting::is_mounted(&world, &place).await.unwrap());
    // Another process finds what is to be unmounted on disk.
    tear_down(&world).await;
    insta::assert_snapshot!(calls(&world, &driver), @r#"
    init
    mount /pods/0001/volumes/vendor~mem/pv {"kubernetes.io/fsType":"","kubernetes.io/pod.name":"web","kubernetes.io/pod.namespace":"prod","kubernetes.io/pod.uid":"0001","kubernetes.io/pvOrVolumeName":"pv","kubernetes.io/readwrite":"rw","kubernetes.io/serviceAccount.name":"","size":"small"}
    mount /pods/0001/volumes/vendor~mem/pv {"kubernetes.io/fsType":"","kubernetes.io/pod.name":"web","kubernetes.io/pod.namespace":"prod","kubernetes.io/pod.uid":"0001","kubernetes.io/pvOrVolumeName":"pv","kubernetes.io/readwrite":"rw","kubernetes.io/serviceAccount.name":"","size":"small"}
    unmount /pods/0001/volumes/vendor~mem/pv
    "#);
    // Without its driver a pod waits for the end of its volume.
    set_up_pod(&world, &source).await.unwrap();
    fs::rename(driver.join("mem"), driver.join("away")).unwrap();
    let stuck = tear_down_volumes(&world, &pod_ref(UID)).await.unwrap_err().message;
    assert_eq!(stuck, "UnmountVolume.TearDown failed for volume \"pv\" : no volume plugin matched name: vendor/mem");
    fs::rename(driver.join("away"), driver.join("mem")).unwrap();
    tear_down(&world).await;
}

#[tokio::test]
async fn volume_that_is_attached_is_mounted_once_and_bound_for_its_pods() {
    let dir = tempfile::tempdir().unwrap();
    let world = world_in(&dir.path().canonicalize().unwrap());
    let driver = install(&world, &json!({}));
    fs::write(driver.join("device-only"), "").unwrap();
    let source = with_capabilities(&world, source()).await.unwrap();
    let device = Device::of(&source).unwrap();
    for _ in 0..2 {
        stage(&world, &source, volume_of(&source)).await.unwrap();
    }
    set_up_pod(&world, &source).await.unwrap();
    let global = flex::device_dir(&world.paths.root_dir, "vendor/mem", "pv");
    fs::write(global.join("file"), "seen").unwrap();
    let place = source.path(&world.paths.pod_dir(&PodUid::new(UID)));
    assert_eq!(fs::read_to_string(place.join("file")).unwrap(), "seen");
    let Facts::Devices(found) = devices::list_devices(&world).await.unwrap() else { panic!("no devices") };
    assert_eq!(found.len(), 1);
    assert_eq!((&found[0].device, found[0].pods.first()), (&device, Some(&PodUid::new(UID))));
    // The driver does not know how the pod's mount came about, and is asked all the same.
    tear_down(&world).await;
    let Facts::Devices(found) = devices::list_devices(&world).await.unwrap() else { panic!("no devices") };
    assert!(found[0].pods.is_empty());
    for _ in 0..2 {
        unstage(&world, "vendor/mem", "pv").await.unwrap();
    }
    assert!(!global.exists());
    insta::assert_snapshot!(calls(&world, &driver), @r#"
    init
    getvolumename {"kubernetes.io/fsType":"","kubernetes.io/pvOrVolumeName":"pv","kubernetes.io/readwrite":"rw","size":"small"}
    waitforattach  {"kubernetes.io/fsType":"","kubernetes.io/pvOrVolumeName":"pv","kubernetes.io/readwrite":"rw","size":"small"}
    mountdevice /plugins/kubernetes.io/flexvolume/vendor/mem/mounts/pv /dev/flex {"kubernetes.io/fsType":"","kubernetes.io/pvOrVolumeName":"pv","kubernetes.io/readwrite":"rw","size":"small"}
    mount /pods/0001/volumes/vendor~mem/pv {"kubernetes.io/fsType":"","kubernetes.io/pod.name":"web","kubernetes.io/pod.namespace":"prod","kubernetes.io/pod.uid":"0001","kubernetes.io/pvOrVolumeName":"pv","kubernetes.io/readwrite":"rw","kubernetes.io/serviceAccount.name":"","size":"small"}
    unmount /pods/0001/volumes/vendor~mem/pv
    unmountdevice /plugins/kubernetes.io/flexvolume/vendor/mem/mounts/pv
    "#);
}

#[tokio::test]
async fn device_that_is_none_is_neither_formatted_nor_mounted() {
    let dir = tempfile::tempdir().unwrap();
    let world = world_in(&dir.path().canonicalize().unwrap());
    let driver = install(&world, &json!({}));
    fs::write(driver.join("device"), "").unwrap();
    let source = with_capabilities(&world, source()).await.unwrap();
    let (users, file) = (dir.path().join("users"), dir.path().join("users/file"));
    fs::create_dir(&users).unwrap();
    let content = "of a user ".repeat(1 << 20);
    fs::write(&file, &content).unwrap();
    let global = flex::device_dir(&world.paths.root_dir, "vendor/mem", "pv");
    for (device, why) in [
        ("..", ".. is no block device"),
        ("/", "/ is no block device"),
        ("users/file", "users/file is no block device"),
        (users.to_str().unwrap(), "is no block device"),
        (file.to_str().unwrap(), "is no block device"),
        ("/dev/null", "/dev/null is no block device"),
        ("/dev/none", "/dev/none is no block device"),
        ("--version", "it reads like an option"),
    ] {
        fs::write(driver.join("device"), device).unwrap();
        let error = stage(&world, &source, volume_of(&source)).await.unwrap_err();
        assert!(error.message.contains(why), "{device}: {error}");
        assert!(!mounting::is_mounted(&world, &global).await.unwrap() && !global.exists(), "{device}");
        assert!(fs::read_to_string(&file).unwrap() == content, "{device}: a user's file was written to");
    }
}

#[tokio::test]
async fn call_that_does_not_end_has_a_deadline() {
    let dir = tempfile::tempdir().unwrap();
    let world = world_in(dir.path());
    install(&world, &json!({}));
    let slow = Call { timeout: Duration::from_millis(300), ..Call::new("slow", Vec::new(), dir.path()) };
    let slow = Call { when_late: WhenLate::Kill, ..slow };
    let error = call(&world, "vendor/mem", &slow).await.unwrap_err();
    assert!(error.message.starts_with("slow command failed: "), "{error}");
}
