//! The end of a pod's volumes.
//!
//! Owns: which volumes are in the pod's directory, and the end of each: parts of it that containers had, then the volume, by its
//! driver if it has one. What is there counts, whoever made it. Never: ends a volume that may keep others waiting in one
//! operation with them.
//! Upstream: `UnmountVolume`, `UnmapVolume`, `CleanSubPaths`, `cleanupOrphanedPodDirs`.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use rubelet_core::{
    effect::{EffectError, Facts},
    id::PodUid,
    observation::Remains,
    op::PodPlace,
    volumes::{
        EMPTY_DIR_PLUGIN,
        claims::{CSI_PLUGIN, VOLUME_DEVICES},
        flex,
        teardown::PodVolume,
    },
};
use rubelet_host::port::FileKind;

use super::{Step, block, component, csi, device_map, entries, flex as drivers, measured, mounting, remove_dir};
use crate::{
    effects::{failure, remains},
    world::World,
};

const VOLUMES: &str = "volumes";
const SUB_PATHS: &str = "volume-subpaths";

pub(super) async fn tear_down(world: &World, place: &PodPlace) -> Result<Facts, EffectError> {
    let uid = &place.pod.uid;
    let pod_dir = pod_dir(world, uid)?;
    // The ready marks first: a partly removed volume must not look ready.
    let marks = pod_dir.join("plugins").join(EMPTY_DIR_PLUGIN);
    world.host.remove_tree(&marks).await.map_err(|error| failure::io("remove", &marks, &error))?;
    let mounted = mounted(world, &pod_dir).await?;
    if !mounted.iter().all(PodVolume::is_local) {
        return Ok(Facts::MountedVolumes(mounted));
    }
    let removal = async {
        unmount_below(world, &pod_dir.join(SUB_PATHS)).await?;
        for volume in &mounted {
            end_measured(world, uid, volume).await?;
        }
        for dir in [VOLUME_DEVICES, VOLUMES] {
            unmount_below(world, &pod_dir.join(dir)).await?;
        }
        Ok(())
    };
    remains::after(world, place, Remains::Volumes, removal).await
}

pub(super) async fn unmount(world: &World, uid: &PodUid, volume: &PodVolume) -> Result<Facts, EffectError> {
    unmount_below(world, &pod_dir(world, uid)?.join(SUB_PATHS).join(component(&volume.name)?)).await?;
    end_measured(world, uid, volume).await?;
    Ok(Facts::Nothing)
}

/// Ends a volume, with its metric and upstream's beginning of its error.
async fn end_measured(world: &World, uid: &PodUid, volume: &PodVolume) -> Result<(), EffectError> {
    let step = if volume.is_block { Step::UNMAP } else { Step::UNMOUNT };
    let plugin = plugin(world, uid, volume).await?;
    measured(world, (step, &volume.name), Some(&plugin), end(world, uid, volume)).await
}

async fn end(world: &World, uid: &PodUid, volume: &PodVolume) -> Result<(), EffectError> {
    if volume.is_block {
        let pod_dir = pod_dir(world, uid)?;
        return match &*volume.plugin_dir {
            CSI_PLUGIN => block::unpublish(world, &pod_dir, uid, &volume.name).await,
            plugin => device_map::unmap(world, &pod_dir, plugin, uid).await,
        };
    }
    let dir = volume_dir(world, uid, volume)?;
    match flex::driver_of_dir(&volume.plugin_dir) {
        Some(driver) => drivers::tear_down(world, &driver, &dir).await,
        None if volume.plugin_dir == CSI_PLUGIN => csi::unpublish(world, &dir).await,
        None if volume.is_local() => unmount_below(world, &dir).await,
        // What is in the directory now was written while nothing was mounted there: it is a user's.
        None => {
            mounting::unmount_all_below(world, &dir).await?;
            remove_dir(world, &dir, &[]).await
        }
    }
}

/// The name of its plugin in metrics.
async fn plugin(world: &World, uid: &PodUid, volume: &PodVolume) -> Result<String, EffectError> {
    if volume.plugin_dir != CSI_PLUGIN {
        return Ok(volume.plugin());
    }
    let dir = if volume.is_block { block::data_dir(world, &volume.name)? } else { volume_dir(world, uid, volume)? };
    let data = csi::read_data(world, &dir).await?;
    Ok(data.map_or_else(|| volume.plugin(), |data| format!("{}:{}", volume.plugin(), data.driver_name)))
}

/// The volumes in the pod's directory.
async fn mounted(world: &World, pod_dir: &Path) -> Result<BTreeSet<PodVolume>, EffectError> {
    let mut found = BTreeSet::new();
    for plugin_dir in entries(world, &pod_dir.join(VOLUMES), Some(FileKind::Directory)).await? {
        let dir = pod_dir.join(VOLUMES).join(&plugin_dir);
        for name in entries(world, &dir, Some(FileKind::Directory)).await? {
            found.insert(PodVolume { plugin_dir: plugin_dir.clone(), name, is_block: false });
        }
    }
    let devices = pod_dir.join(VOLUME_DEVICES);
    for plugin_dir in entries(world, &devices, Some(FileKind::Directory)).await? {
        // Links, one per device.
        let mut links = entries(world, &devices.join(&plugin_dir), None).await?;
        if plugin_dir != CSI_PLUGIN {
            // Where they are bound does not say which is which: one of them ends all.
            links.sort();
            links.truncate(1);
        }
        found.extend(links.into_iter().map(|name| PodVolume { plugin_dir: plugin_dir.clone(), name, is_block: true }));
    }
    Ok(found)
}

fn pod_dir(world: &World, uid: &PodUid) -> Result<PathBuf, EffectError> {
    component(uid.as_str())?;
    Ok(world.paths.pod_dir(uid))
}

fn volume_dir(world: &World, uid: &PodUid, volume: &PodVolume) -> Result<PathBuf, EffectError> {
    let volumes = pod_dir(world, uid)?.join(VOLUMES);
    Ok(volumes.join(component(&volume.plugin_dir)?).join(component(&volume.name)?))
}

/// Unmounts all that is below a directory of ours, and removes it.
async fn unmount_below(world: &World, dir: &Path) -> Result<(), EffectError> {
    mounting::unmount_all_below(world, dir).await?;
    world.host.remove_tree(dir).await.map_err(|error| failure::io("remove volumes", dir, &error))
}

/// All of it, as the core has it done step by step.
#[cfg(test)]
pub async fn tear_down_volumes(world: &World, pod: &rubelet_core::id::PodRef) -> Result<(), EffectError> {
    let place = PodPlace { pod: pod.clone(), cgroup_paths: Vec::new() };
    while let Facts::MountedVolumes(mounted) = tear_down(world, &place).await? {
        for volume in &mounted {
            // A program that another test just starts holds open files until it runs.
            for _ in 0..100 {
                let done = unmount(world, &pod.uid, volume).await;
                if !done.as_ref().is_err_and(|error| error.message.contains("resource busy")) {
                    done?;
                    break;
                }
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rubelet_core::{snapshot::Snapshot, volumes::devices::DeviceOptions};
    use rubelet_csi::NodeCapabilities;
    use serde_json::json;

    use super::*;
    use crate::effects::{
        directories::tests::pod_ref,
        volume::testing::{FakeDriver, Fixture, UID, csi_source, pod_on},
    };

    fn place() -> PodPlace {
        PodPlace { pod: pod_ref(UID), cgroup_paths: Vec::new() }
    }

    #[tokio::test]
    async fn volumes_of_drivers_are_named_before_anything_is_unmounted() {
        let fixture = Fixture::with(FakeDriver::able_to(NodeCapabilities::default())).await;
        let world = &fixture.world;
        fixture.set_up(&pod_on(&json!({})), &csi_source(&json!({}), false)).await.unwrap();
        let own = world.paths.pod_dir(&PodUid::new(UID)).join("volumes/kubernetes.io~empty-dir/tmp");
        fs::create_dir_all(&own).unwrap();
        let Facts::MountedVolumes(mounted) = tear_down(world, &place()).await.unwrap() else { panic!("not named") };
        assert!(own.exists());
        assert_eq!(mounted.iter().map(ToString::to_string).collect::<Vec<_>>(), ["pv", "tmp"]);
        for volume in &mounted {
            unmount(world, &PodUid::new(UID), volume).await.unwrap();
        }
        assert!(!own.exists());
        assert_eq!(fixture.calls().last().unwrap(), "unpublish h");
        assert_eq!(tear_down(world, &place()).await, Ok(Facts::Remains(Remains::PodDir)));
    }

    #[tokio::test]
    async fn each_end_is_timed_by_plugin() {
        let fixture = Fixture::with(FakeDriver::able_to(NodeCapabilities::default())).await;
        let (world, uid) = (&fixture.world, PodUid::new(UID));
        for is_block in [false, true] {
            let source = csi_source(&json!({}), is_block);
            fixture.stage(&source, DeviceOptions::default()).await.unwrap();
            fixture.set_up(&pod_on(&json!({})), &source).await.unwrap();
        }
        fs::create_dir_all(world.paths.pod_dir(&uid).join("volumes/kubernetes.io~projected/token")).unwrap();
        tear_down_volumes(world, &pod_ref(UID)).await.unwrap();
        let page = world.metrics.page(&Snapshot::default(), jiff::Timestamp::UNIX_EPOCH);
        let is_count = |line: &&str| line.starts_with("storage_operation_duration_seconds_count");
        let counts: Vec<_> = page.lines().filter(is_count).collect();
        insta::assert_snapshot!(counts.join("\n"), @r#"
        storage_operation_duration_seconds_count{volume_plugin="kubernetes.io/csi:d",operation_name="map_volume",status="success",migrated="false"} 1
        storage_operation_duration_seconds_count{volume_plugin="kubernetes.io/csi:d",operation_name="unmap_volume",status="success",migrated="false"} 1
        storage_operation_duration_seconds_count{volume_plugin="kubernetes.io/csi:d",operation_name="volume_mount",status="success",migrated="false"} 1
        storage_operation_duration_seconds_count{volume_plugin="kubernetes.io/csi:d",operation_name="volume_unmount",status="success",migrated="false"} 1
        storage_operation_duration_seconds_count{volume_plugin="kubernetes.io/projected",operation_name="volume_unmount",status="success",migrated="false"} 1
        "#);
    }
}
