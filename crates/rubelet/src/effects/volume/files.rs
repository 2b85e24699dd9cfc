//! Volumes with content from the API and the pod: written and updated.
//!
//! Owns: the order of gathering, building and writing. If gathering fails, the existing content stays.
//! Upstream: SetUpAt of `pkg/volume/{configmap,secret,downwardapi,projected}`.

use std::{collections::BTreeMap, path::PathBuf};

use jiff::tz::TimeZone;
use rubelet_core::{
    effect::{EffectError, ErrorKind},
    id::PodUid,
    objects::{ObjectKey, Objects},
    volumes::{
        self,
        files::{FileVolume, Files, Gathered, VolumeFile},
    },
};
use rubelet_host::port::{ProjectedFile, Projection};

use super::{TMPFS_MODE, VolumePod, make_dir};
use crate::{
    effects::{directories::component, failure},
    world::World,
};

/// World-writable like an emptyDir: the files have their own modes.
const FILES_DIR_MODE: u32 = 0o777;
const NESTED_MODE: u32 = 0o755;

/// Unchanged content is left alone, so this also updates a volume.
pub(super) async fn set_up(
    world: &World,
    owner: &VolumePod<'_>,
    name: &str,
    volume: &FileVolume,
) -> Result<(), EffectError> {
    let gathered = gather(world, owner.uid, volume).await;
    let files = volume
        .files(owner.pod, owner.uid, &gathered, world.settings.node.allocatable)
        .map_err(|error| EffectError { kind: ErrorKind::MissingObject, message: error.0 })?;
    let dir = volumes::files_path(owner.dir, volume.plugin, component(name)?);
    let host = &world.host;
    let pods_dir = world.paths.pods_dir();
    make_dir(world, &pods_dir, &dir, FILES_DIR_MODE).await?;
    if volume.plugin.is_in_memory() {
        // Without a size limit: only the agent writes there, and the content came from API objects.
        host.mount_tmpfs(&dir, None, TMPFS_MODE).await.map_err(|error| failure::io("mount tmpfs at", &dir, &error))?;
    }
    if let Some(group) = volume.group {
        host.share_dir(&dir, group).await.map_err(|error| failure::io("give to the pod's group", &dir, &error))?;
    }
    let nested = owner.pod.spec.as_ref().map(|spec| volumes::nested_mount_points(spec, name));
    for point in nested.into_iter().flatten().map(|point| dir.join(point)) {
        make_dir(world, &pods_dir, &point, NESTED_MODE).await?;
    }
    let projection = Projection { files: projected(files), group: volume.group, stamp: stamp(world) };
    host.project(&dir, projection).await.map_err(|error| failure::io("write files to", &dir, &error))?;
    Ok(())
}

async fn gather(world: &World, uid: &PodUid, volume: &FileVolume) -> Gathered {
    let mut needs = volume.needs();
    if let Some(cluster) = &world.cluster {
        let is_refused = |key: &ObjectKey| key.is_trust_bundle() && !world.settings.node.trust_bundles_enabled;
        let refused = needs.objects.iter().filter(|key| is_refused(key)).cloned().collect::<Vec<_>>();
        needs.objects.retain(|key| !is_refused(key));
        let mut gathered = cluster.objects.gather_for_volume(uid, needs).await;
        gathered.objects.0.extend(Objects::standalone(refused).0);
        return gathered;
    }
    let no_token = || Err("cannot use TokenManager when kubelet is in standalone mode".to_owned());
    Gathered {
        objects: Objects::standalone(needs.objects),
        tokens: needs.tokens.into_iter().map(|key| (key, no_token())).collect(),
        certificates: needs.certificates.into_iter().map(|key| (key, Err("unimplemented".to_owned()))).collect(),
    }
}

fn projected(files: Files) -> BTreeMap<PathBuf, ProjectedFile> {
    let file = |VolumeFile { content, mode, owner }| ProjectedFile { content, mode, owner };
    files.into_iter().map(|(path, made)| (path, file(made))).collect()
}

/// Upstream's name of a content version: the time of the write.
fn stamp(world: &World) -> String {
    let now = world.clock.now().wall.to_zoned(TimeZone::UTC);
    now.strftime("..%Y_%m_%d_%H_%M_%S.").to_string()
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::MetadataExt, path::Path, sync::Arc};

    use k8s_openapi::api::core::v1::Pod;
    use rubelet_core::{needs::Needs, snapshot::Snapshot};
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        effects::{
            directories::tests::pod_ref,
            volume::{refresh_volumes, set_up_volume, tear_down_volumes},
        },
        objects::{
            Strategy,
            tests::{Scripted, next_snapshot},
        },
        world::{Cluster, testing::world_in},
    };

    const UID: &str = "0001";

    /// A pod whose only container mounts the volumes.
    fn pod(volumes: &Value) -> Pod {
        let names = volumes.as_array().unwrap().iter().map(|volume| volume["name"].clone());
        let mounts: Vec<_> = names.map(|name| json!({"name": name, "mountPath": "/x"})).collect();
        let metadata = json!({"name": "web", "namespace": "prod", "uid": UID, "labels": {"app": "web"}});
        let spec = json!({
            "containers": [{"name": "c", "volumeMounts": mounts}],
            "volumes": volumes,
            "securityContext": {"fsGroup": 4321},
        });
        serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
    }

    /// A node whose cluster has this pod.
    fn in_cluster(dir: &Path, pod: &Pod) -> (World, Scripted) {
        let api = Scripted::default();
        let mut world = world_in(dir);
        let cluster = Cluster::new(Arc::new(api.clone()), Strategy::Get, "node", &world.clock);
        let before = Snapshot::default();
        let with_pod = next_snapshot(&before, &PodUid::new(UID), Some(Needs::of(pod)));
        cluster.objects.update_needs(&before, &with_pod);
        world.cluster = Some(cluster);
        (world, api)
    }

    fn volume_dir(world: &World, plugin: &str, name: &str) -> PathBuf {
        world.paths.pod_dir(&PodUid::new(UID)).join("volumes").join(plugin).join(name)
    }

    fn seen(path: &Path) -> String {
        let found = fs::metadata(path).unwrap();
        let content = fs::read_to_string(path).unwrap();
        format!("{content} {:o} {}", found.mode() & 0o7777, found.gid())
    }

    #[tokio::test]
    async fn volumes_use_upstream_paths_and_fs_group_and_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let labels = json!([{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]);
        let pod = pod(&json!([
            {"name": "a", "configMap": {"name": "m"}},
            {"name": "b", "secret": {"secretName": "s", "defaultMode": 0o400}},
            {"name": "c", "downwardAPI": {"items": labels}},
            {"name": "d", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}},
        ]));
        let (world, api) = in_cluster(dir.path(), &pod);
        api.put("/api/v1/namespaces/prod/configmaps/m", json!({"metadata": {}, "data": {"k": "map"}})).await;
        api.put("/api/v1/namespaces/prod/secrets/s", json!({"metadata": {}, "data": {"k": "c2VjcmV0"}})).await;
        let uid = PodUid::new(UID);
        for _ in 0..2 {
            for volume in ["a", "b", "c", "d"] {
                set_up_volume(&world, &pod, &uid, volume, None).await.unwrap();
            }
        }
        assert_eq!(seen(&volume_dir(&world, "kubernetes.io~configmap", "a").join("k")), "map 644 4321");
        assert_eq!(seen(&volume_dir(&world, "kubernetes.io~secret", "b").join("k")), "secret 440 4321");
        let labels = volume_dir(&world, "kubernetes.io~downward-api", "c").join("labels");
        assert_eq!(seen(&labels), "app=\"web\" 644 4321");
        let token = seen(&volume_dir(&world, "kubernetes.io~projected", "d").join("token"));
        assert!(token.starts_with("token ") && token.ends_with(" 640 4321"), "{token}");
        let mounted = world.host.mounts_below(&world.paths.pod_dir(&uid)).await.unwrap();
        let names: Vec<_> = mounted.iter().map(|point| point.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["d", "c", "b"], "all but the config map are in memory, each mounted once");
        tear_down_volumes(&world, &pod_ref(UID)).await.unwrap();
        assert_eq!(world.host.mounts_below(&world.paths.pod_dir(&uid)).await.unwrap(), Vec::<PathBuf>::new());
        assert!(!world.paths.volumes_dir(&uid).exists());
    }

    #[tokio::test]
    async fn volume_refresh_updates_files_and_failed_refresh_keeps_them() {
        let dir = tempfile::tempdir().unwrap();
        let object = |value: &str| json!({"metadata": {}, "data": {"k": value}});
        let items = json!([{"key": "k", "path": "sub/file"}]);
        let pod =
            pod(&json!([{"name": "a", "configMap": {"name": "m", "items": items}}, {"name": "e", "emptyDir": {}}]));
        let (world, api) = in_cluster(dir.path(), &pod);
        api.put("/api/v1/namespaces/prod/configmaps/m", object("1")).await;
        let uid = PodUid::new(UID);
        for volume in ["a", "e"] {
            set_up_volume(&world, &pod, &uid, volume, None).await.unwrap();
        }
        let file = volume_dir(&world, "kubernetes.io~configmap", "a").join("sub/file");
        api.put("/api/v1/namespaces/prod/configmaps/m", object("2")).await;
        fs::remove_dir(volume_dir(&world, "kubernetes.io~empty-dir", "e")).unwrap();
        refresh_volumes(&world, &pod, &uid).await.unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "2");
        assert!(!volume_dir(&world, "kubernetes.io~empty-dir", "e").exists(), "other volumes are left alone");
        api.put("/api/v1/namespaces/prod/configmaps/m", json!({"metadata": {}, "data": {}})).await;
        let error = refresh_volumes(&world, &pod, &uid).await.unwrap_err();
        assert_eq!(
            error.message,
            "MountVolume.SetUp failed for volume \"a\" : configmap references non-existent config key: k"
        );
        assert_eq!(fs::read_to_string(&file).unwrap(), "2");
    }

    #[tokio::test]
    async fn standalone_node_builds_only_volumes_without_api_objects() {
        let dir = tempfile::tempdir().unwrap();
        let world = world_in(dir.path());
        let name = json!([{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]);
        let pod =
            pod(&json!([{"name": "d", "downwardAPI": {"items": name}}, {"name": "m", "configMap": {"name": "m"}}]));
        set_up_volume(&world, &pod, &PodUid::new(UID), "d", None).await.unwrap();
        let error = set_up_volume(&world, &pod, &PodUid::new(UID), "m", None).await.unwrap_err();
        assert_eq!(
            error.message,
            "MountVolume.SetUp failed for volume \"m\" : couldn't get configMap prod/m, no kubeClient defined"
        );
        assert_eq!(seen(&volume_dir(&world, "kubernetes.io~downward-api", "d").join("name")), "web 644 4321");
        tear_down_volumes(&world, &pod_ref(UID)).await.unwrap();
    }
}
