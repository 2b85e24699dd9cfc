//! Setup and teardown of a pod's volumes.
//!
//! Owns: emptyDir on disk and in memory, the checks of hostPath, files from objects (`volume/files.rs`). Never: removes the
//! target of a hostPath, unmounts anything outside the pod's directory.
//! Upstream: `pkg/volume/emptydir`, `pkg/volume/hostpath`.

use std::{io, path::Path};

use k8s_openapi::api::core::v1::Pod;
use rubelet_core::{
    effect::{EffectError, ErrorKind, Facts},
    id::PodUid,
    op::VolumeOp,
    volumes::{
        self, HostPathType, Medium, VolumeSource, VolumeToMount,
        claims::{PersistentKind, PersistentSource},
        devices::{Device, DeviceOptions},
    },
};
use rubelet_host::port::FileKind;

use super::{directories::component, failure};
use crate::{metrics::storage::StorageOperation, world::World};

pub use self::devices::list_devices;
#[cfg(test)]
pub use self::teardown::tear_down_volumes;

mod attachment;
mod block;
mod claim;
mod csi;
mod data_file;
mod device_map;
mod devices;
mod expansion;
mod fc;
mod files;
mod flex;
mod iscsi;
mod local;
mod mounting;
mod nfs;
mod ownership;
mod persistent;
mod scsi;
mod teardown;
#[cfg(test)]
mod testing;

/// Upstream's words. Its gate cannot be turned on any more.
const GIT_REPO_DISABLED: &str = "git-repo volume plugin has been disabled; if necessary, it may be re-enabled by enabling the feature-gate `GitRepoVolumeDriver`";

/// Of a directory that only the agent and drivers enter.
const DIR_MODE: u32 = 0o750;
/// A tmpfs as upstream mounts it: world-writable with the sticky bit.
const TMPFS_MODE: u32 = 0o1777;

/// The pod that a volume is for.
struct VolumePod<'a> {
    pod: &'a Pod,
    uid: &'a PodUid,
    dir: &'a Path,
}

pub(super) async fn perform(world: &World, op: &VolumeOp) -> Result<Facts, EffectError> {
    match op {
        VolumeOp::Resolve { pod, volume, node_labels } => {
            claim::resolve(world, pod, volume, node_labels.as_deref()).await
        }
        VolumeOp::CheckAttachLimit { source, .. } => attachment::check_limit(world, source).await,
        VolumeOp::Stage { source, options } => stage(world, source, options).await,
        VolumeOp::Unstage { device } => match device {
            Device::Csi(device) => csi::unstage(world, device).await,
            Device::Local { name } => local::unstage(world, name).await,
            Device::Iscsi(device) => iscsi::unstage(world, device).await,
            Device::Fc { dir } => fc::unstage(world, dir).await,
            Device::Flex { driver, name } => flex::unstage(world, driver, name).await,
        },
        VolumeOp::SetUp { pod, uid, volume, claimed } => {
            set_up_volume(world, pod, uid, volume, claimed.as_deref()).await
        }
        VolumeOp::Expand { uid, source, .. } => expansion::expand(world, uid, source).await,
        VolumeOp::Refresh { pod, uid } => refresh_volumes(world, pod, uid).await,
        VolumeOp::Unmount { pod, volume } => teardown::unmount(world, &pod.uid, volume).await,
        VolumeOp::TearDown(place) => teardown::tear_down(world, place).await,
    }
}

/// Errors begin with upstream's word for the step.
async fn stage(world: &World, source: &PersistentSource, options: &DeviceOptions) -> Result<Facts, EffectError> {
    let (wait, step) = match source.is_block() {
        true => ("MapVolume.WaitForAttach", "MapVolume.SetUpDevice"),
        false => ("MountVolume.WaitForAttach", "MountVolume.MountDevice"),
    };
    let failed = |step: &str, error: EffectError| {
        let message = format!("{step} failed for volume {:?} : {error}", source.name);
        EffectError { message, ..error }
    };
    let staged = match &source.kind {
        PersistentKind::Csi(volume) => {
            let attached = attachment::verified(world, source, volume).await;
            let publish_context = attached.map_err(|error| failed(wait, error))?;
            csi::stage(world, source, volume, options, publish_context).await
        }
        PersistentKind::Local(volume) => local::stage(world, source, volume).await,
        PersistentKind::Iscsi(volume) => iscsi::stage(world, source, volume).await,
        PersistentKind::Fc(volume) => fc::stage(world, source, volume).await,
        PersistentKind::Flex(volume) => flex::stage(world, source, volume).await,
        PersistentKind::HostPath { .. } | PersistentKind::Nfs(_) => Ok(Facts::Nothing),
    };
    staged.map_err(|error| failed(step, error))
}

/// A volume that the pod does not have, or no container mounts, needs nothing.
pub async fn set_up_volume(
    world: &World,
    pod: &Pod,
    uid: &PodUid,
    volume: &str,
    claimed: Option<&PersistentSource>,
) -> Result<Facts, EffectError> {
    let pod_dir = world.paths.pods_dir().join(component(uid.as_str())?);
    let owner = VolumePod { pod, uid, dir: &pod_dir };
    if let Some(source) = claimed {
        let setup = persistent::set_up(world, &owner, source);
        let step = if source.is_block() { Step::MAP } else { Step::MOUNT };
        measured(world, (step, &source.name), Some(&source.plugin()), setup).await?;
        return Ok(source.block_places(&world.paths.root_dir, owner.dir).map_or(Facts::Nothing, Facts::Mapped));
    }
    let mut volumes = volumes::volumes_to_mount(pod);
    volumes.retain(|known| known.name == volume);
    set_up_each(world, &owner, volumes).await
}

/// Every volume whose content can change, also after a failure.
pub async fn refresh_volumes(world: &World, pod: &Pod, uid: &PodUid) -> Result<Facts, EffectError> {
    let pod_dir = world.paths.pods_dir().join(component(uid.as_str())?);
    let owner = VolumePod { pod, uid, dir: &pod_dir };
    let mut volumes = volumes::volumes_to_mount(pod);
    volumes.retain(|volume| matches!(volume.source, VolumeSource::Files(_)));
    set_up_each(world, &owner, volumes).await
}

async fn set_up_each(world: &World, owner: &VolumePod<'_>, volumes: Vec<VolumeToMount>) -> Result<Facts, EffectError> {
    let mut failures = Vec::new();
    for volume in volumes {
        let setup = set_up(world, owner, &volume);
        failures.extend(measured(world, (Step::MOUNT, &volume.name), volume.source.plugin(), setup).await.err());
    }
    let Some(first) = failures.first() else { return Ok(Facts::Nothing) };
    let is_one_kind = failures.iter().all(|failure| failure.kind == first.kind);
    let kind = if is_one_kind { first.kind.clone() } else { ErrorKind::Retry };
    let messages: Vec<_> = failures.into_iter().map(|failure| failure.message).collect();
    Err(EffectError { kind, message: messages.join("; ") })
}

/// Upstream's words for a volume's setup or end.
#[derive(Clone, Copy)]
struct Step {
    operation: StorageOperation,
    name: &'static str,
}

impl Step {
    const MOUNT: Step = Step { operation: StorageOperation::Mount, name: "MountVolume.SetUp" };
    const UNMOUNT: Step = Step { operation: StorageOperation::Unmount, name: "UnmountVolume.TearDown" };
    const MAP: Step = Step { operation: StorageOperation::Map, name: "MapVolume.MapPodDevice" };
    const UNMAP: Step = Step { operation: StorageOperation::Unmap, name: "UnmapVolume.UnmapPodDevice" };
}

/// Runs the setup or the end of a volume, with its metric and upstream's beginning of its error.
async fn measured(
    world: &World,
    (step, name): (Step, &str),
    plugin: Option<&str>,
    work: impl Future<Output = Result<(), EffectError>>,
) -> Result<(), EffectError> {
    let began = world.clock.now().uptime;
    let done = work.await;
    if let Some(plugin) = plugin {
        let took = world.clock.now().uptime.since(began);
        world.metrics.storage.ended(plugin, step.operation, done.is_ok(), took);
    }
    done.map_err(|error| {
        let message = format!("{} failed for volume {name:?} : {error}", step.name);
        EffectError { message, ..error }
    })
}

async fn set_up(world: &World, owner: &VolumePod<'_>, volume: &VolumeToMount) -> Result<(), EffectError> {
    match &volume.source {
        VolumeSource::EmptyDir { medium, group } => {
            let name = component(&volume.name)?;
            set_up_empty_dir(world, owner.dir, name, EmptyDir { medium: *medium, group: *group }).await
        }
        VolumeSource::HostPath { path, must_be } => set_up_host_path(world, path, *must_be).await,
        VolumeSource::Files(content) => files::set_up(world, owner, &volume.name, content).await,
        VolumeSource::Claim(_) | VolumeSource::Csi { .. } | VolumeSource::InTree => {
            Err(failure::refused("the volume is not resolved yet".to_owned()))
        }
        VolumeSource::Invalid(problem) => Err(failure::refused(problem.clone())),
        VolumeSource::GitRepo => Err(failure::refused(GIT_REPO_DISABLED.to_owned())),
        VolumeSource::Unsupported(what) => Err(failure::refused(format!("{what} is not supported yet"))),
    }
}

#[derive(Clone, Copy)]
struct EmptyDir {
    medium: Medium,
    group: Option<u32>,
}

async fn set_up_empty_dir(world: &World, pod_dir: &Path, name: &str, volume: EmptyDir) -> Result<(), EffectError> {
    let host = &world.host;
    let dir = volumes::empty_dir_path(pod_dir, name);
    let marker = volumes::empty_dir_marker(pod_dir, name);
    let ready = marker.join("ready");
    let at_dir = |what: &'static str| {
        let dir = &dir;
        move |error: io::Error| failure::io(what, dir, &error)
    };
    // A ready volume belongs to the containers: they may have changed its mode, and a restarted agent keeps that.
    if host.file_kind(&ready).await.map_err(|error| failure::io("stat", &ready, &error))? == Some(FileKind::File) {
        let is_there = match volume.medium {
            Medium::Disk => host.file_kind(&dir).await.map_err(at_dir("stat"))? == Some(FileKind::Directory),
            // Memory is lost when the node restarts.
            Medium::Memory { .. } | Medium::HugePages { .. } => {
                !host.mounts_below(&dir).await.map_err(at_dir("look for mounts below"))?.is_empty()
            }
        };
        if is_there {
            return Ok(());
        }
    }
    let pods_dir = world.paths.pods_dir();
    make_dir(world, &pods_dir, &dir, 0o777).await?;
    match volume.medium {
        Medium::Disk => {}
        Medium::Memory { size_bytes } => {
            host.mount_tmpfs(&dir, size_bytes, TMPFS_MODE).await.map_err(at_dir("mount tmpfs at"))?;
        }
        Medium::HugePages { page_bytes } => {
            host.mount_huge_pages(&dir, page_bytes).await.map_err(at_dir("mount huge pages at"))?;
        }
    }
    if let Some(group) = volume.group {
        host.share_dir(&dir, group).await.map_err(at_dir("give to the pod's group"))?;
    }
    make_dir(world, &pods_dir, &marker, DIR_MODE).await?;
    host.make_file_beneath(&pods_dir, &ready, 0o644).await.map_err(|error| failure::io("create", &ready, &error))?;
    Ok(())
}

async fn set_up_host_path(world: &World, path: &Path, must_be: HostPathType) -> Result<(), EffectError> {
    if path.components().any(|part| part == std::path::Component::ParentDir) {
        let message = format!("invalid HostPath `{}`: must not contain '..'", path.display());
        return Err(failure::refused(message));
    }
    let host = &world.host;
    let (expected, called) = match must_be {
        HostPathType::Unchecked => return Ok(()),
        HostPathType::DirectoryOrCreate | HostPathType::Directory => (FileKind::Directory, "directory"),
        HostPathType::FileOrCreate | HostPathType::File => (FileKind::File, "file"),
        HostPathType::Socket => (FileKind::Socket, "socket file"),
        HostPathType::CharDevice => (FileKind::CharDevice, "character device"),
        HostPathType::BlockDevice => (FileKind::BlockDevice, "block device"),
    };
    match (host.file_kind(path).await.map_err(|error| failure::io("stat", path, &error))?, must_be) {
        (None, HostPathType::DirectoryOrCreate) => {
            host.make_dir(path, 0o755).await.map_err(|error| failure::io("make directory", path, &error))
        }
        (None, HostPathType::FileOrCreate) => {
            host.make_file(path, 0o644).await.map_err(|error| failure::io("create", path, &error))
        }
        (Some(found), _) if found == expected => Ok(()),
        (None | Some(_), _) => {
            let message = format!("hostPath type check failed: {} is not a {called}", path.display());
            Err(failure::retryable(message))
        }
    }
}

/// Makes a directory, and those above it up to `root`, without following a link.
async fn make_dir(world: &World, root: &Path, dir: &Path, mode: u32) -> Result<(), EffectError> {
    world.host.make_dir_beneath(root, dir, mode).await.map_err(|error| failure::io("make directory", dir, &error))
}

/// The names in a directory, of this kind; none if the directory does not exist.
async fn entries(world: &World, dir: &Path, kind: Option<FileKind>) -> Result<Vec<String>, EffectError> {
    match world.host.list_dir(dir).await {
        Ok(entries) => {
            let meant = entries.into_iter().filter(|entry| kind.is_none_or(|kind| entry.kind == kind));
            Ok(meant.map(|entry| entry.name).collect())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(failure::io("list", dir, &error)),
    }
}

/// Removes a directory where a volume was mounted, with these files of ours.
async fn remove_dir(world: &World, dir: &Path, own: &'static [&'static str]) -> Result<(), EffectError> {
    world.host.remove_dir(dir, own).await.map_err(|error| {
        let failed = failure::io("remove", dir, &error);
        if error.kind() != io::ErrorKind::DirectoryNotEmpty {
            return failed;
        }
        let message = format!("{failed}; its files were written while no volume was mounted there, move them away");
        EffectError { message, ..failed }
    })
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt, PermissionsExt, symlink},
        path::PathBuf,
    };

    use serde_json::json;

    use super::*;
    use crate::{
        effects::directories::{make_pod_dirs, remove_pod_dir, tests::pod_ref},
        world::testing::world_in,
    };

    const UID: &str = "0001";

    /// A pod whose only container mounts each of the volumes.
    fn pod(volumes: &serde_json::Value) -> Pod {
        let names = volumes.as_array().unwrap().iter().map(|volume| volume["name"].clone());
        let mounts: Vec<_> = names.map(|name| json!({"name": name, "mountPath": "/x"})).collect();
        let containers = json!([{"name": "c", "volumeMounts": mounts}]);
        serde_json::from_value(json!({"metadata": {}, "spec": {"containers": containers, "volumes": volumes}})).unwrap()
    }

    fn with_fs_group(mut pod: Pod, group: i64) -> Pod {
        pod.spec.as_mut().unwrap().security_context.get_or_insert_default().fs_group = Some(group);
        pod
    }

    async fn set_up_all(world: &World, pod: &Pod) -> String {
        make_pod_dirs(world, &pod_ref(UID)).await.unwrap();
        let mut answers = Vec::new();
        for volume in volumes::volumes_to_mount(pod) {
            match set_up_volume(world, pod, &PodUid::new(UID), &volume.name, None).await {
                Ok(Facts::Nothing) => {}
                Ok(facts) => answers.push(format!("{facts:?}")),
                Err(error) => answers.push(format!("{:?}: {error}", error.kind)),
            }
        }
        if answers.is_empty() { "Nothing".to_owned() } else { answers.join("; ") }
    }

    async fn tear_down_all(world: &World) {
        tear_down_volumes(world, &pod_ref(UID)).await.unwrap();
        remove_pod_dir(world, &PodUid::new(UID)).await.unwrap();
        assert_eq!(fs::read_dir(world.paths.pods_dir()).unwrap().count(), 0);
    }

    fn empty_dir(world: &World, name: &str) -> PathBuf {
        volumes::empty_dir_path(&world.paths.pod_dir(&PodUid::new(UID)), name)
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o7777
    }

    #[tokio::test]
    async fn empty_dir_is_world_writable_and_keeps_container_changes() {
        let dir = tempfile::tempdir().unwrap();
        let world = world_in(dir.path());
        let pod = pod(&json!([{"name": "data", "emptyDir": {}}]));
        assert_eq!(set_up_all(&world, &pod).await, "Nothing");
        let data = empty_dir(&world, "data");
        assert!(data.ends_with("pods/0001/volumes/kubernetes.io~empty-dir/data"));
        assert_eq!(mode(&data), 0o777);
        fs::write(data.join("file"), "kept").unwrap();
        fs::set_permissions(&data, fs::Permissions::from_mode(0o700)).unwrap();
        assert_eq!(set_up_all(&world, &pod).await, "Nothing");
        assert_eq!((mode(&data), fs::read_to_string(data.join("file")).unwrap().as_str()), (0o700, "kept"));
        tear_down_all(&world).await;
        tear_down_volumes(&world, &pod_ref(UID)).await.unwrap();
    }

    #[tokio::test]
    async fn an_empty_dir_belongs_to_the_pods_group() {
        let dir = tempfile::tempdir().unwrap();
        let world = world_in(dir.path());
        let pod = with_fs_group(pod(&json!([{"name": "data", "emptyDir": {}}])), 4321);
        assert_eq!(set_up_all(&world, &pod).await, "Nothing");
        let data = empty_dir(&world, "data");
        assert_eq!((mode(&data), fs::metadata(&data).unwrap().gid()), (0o2777, 4321));
        tear_down_all(&world).await;
    }

    #[tokio::test]
    async fn memory_volume_is_mounted_once_with_limit_and_unmounted() {
        let dir = tempfile::tempdir().unwrap();
        let behind = dir.path().join("link");
        fs::create_dir(dir.path().join("real")).unwrap();
        symlink(dir.path().join("real"), &behind).unwrap();
        let mut world = world_in(dir.path());
        // Also below a root directory that contains links.
        world.paths.root_dir = behind;
        let pod = pod(&json!([{"name": "mem", "emptyDir": {"medium": "Memory", "sizeLimit": "64Ki"}}]));
        for _ in 0..2 {
            assert_eq!(set_up_all(&world, &pod).await, "Nothing");
        }
        let mem = empty_dir(&world, "mem");
        assert_eq!(mode(&mem), 0o1777);
        let too_much = fs::write(mem.join("file"), vec![0; 65 * 1024]).unwrap_err();
        assert_eq!(too_much.kind(), io::ErrorKind::StorageFull);
        let pod_dir = world.paths.pod_dir(&PodUid::new(UID));
        assert_eq!(world.host.mounts_below(&pod_dir).await.unwrap().len(), 1);
        let refused = remove_pod_dir(&world, &PodUid::new(UID)).await.unwrap_err();
        assert!(refused.message.contains("still mounted: ") && refused.message.ends_with("/mem"), "{refused}");
        assert!(mem.join("file").exists());
        tear_down_all(&world).await;
    }

    #[tokio::test]
    async fn huge_pages_are_mounted_once_with_their_size_and_unmounted() {
        let dir = tempfile::tempdir().unwrap();
        let world = world_in(dir.path());
        let mut pod = pod(&json!([{"name": "huge", "emptyDir": {"medium": "HugePages"}}]));
        let refused = set_up_all(&world, &pod).await;
        assert!(refused.starts_with("Refused: MountVolume.SetUp failed for volume \"huge\" : medium HugePages: "));
        let requests = json!({"requests": {"hugepages-2Mi": "2Mi"}});
        pod.spec.as_mut().unwrap().containers[0].resources = Some(serde_json::from_value(requests).unwrap());
        for _ in 0..2 {
            assert_eq!(set_up_all(&world, &pod).await, "Nothing");
        }
        let table = fs::read_to_string("/proc/self/mounts").unwrap();
        let place = empty_dir(&world, "huge").canonicalize().unwrap();
        let here: Vec<_> = table.lines().filter(|line| line.contains(place.to_str().unwrap())).collect();
        assert!(here.len() == 1 && here[0].contains(" hugetlbfs ") && here[0].contains("pagesize=2M"), "{here:?}");
        tear_down_all(&world).await;
    }

    #[tokio::test]
    async fn tearing_down_a_hostile_empty_dir_stays_inside_it() {
        let dir = tempfile::tempdir().unwrap();
        let world = world_in(dir.path());
        let precious = dir.path().join("precious");
        fs::create_dir(&precious).unwrap();
        fs::write(precious.join("file"), "data").unwrap();
        let volumes = json!([{"name": "data", "emptyDir": {}}, {"name": "host", "hostPath": {"path": precious}}]);
        assert_eq!(set_up_all(&world, &pod(&volumes)).await, "Nothing");
        let data = empty_dir(&world, "data");
        symlink("/", data.join("root")).unwrap();
        symlink(&precious, data.join("precious")).unwrap();
        tear_down_all(&world).await;
        assert_eq!(fs::read_to_string(precious.join("file")).unwrap(), "data");
    }

    #[tokio::test]
    async fn a_host_path_is_checked_or_made() {
        let dir = tempfile::tempdir().unwrap();
        let world = world_in(dir.path());
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("dir")).unwrap();
        fs::write(at("file"), "kept").unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        symlink("dir", at("link")).unwrap();
        let cases = [
            ("nothing", ""),
            ("nothing", "Directory"),
            ("dir", "Directory"),
            ("link", "Directory"),
            ("file", "DirectoryOrCreate"),
            ("new/dir", "DirectoryOrCreate"),
            ("file", "File"),
            ("dir", "FileOrCreate"),
            ("file", "FileOrCreate"),
            ("new-file", "FileOrCreate"),
            ("no-parent/file", "FileOrCreate"),
            ("socket", "Socket"),
            ("file", "Socket"),
            ("/dev/null", "CharDevice"),
            ("/dev/null", "BlockDevice"),
            ("dir/../file", "File"),
        ];
        let mut answers = String::new();
        for (name, kind) in cases {
            let volume = json!([{"name": "v", "hostPath": {"path": at(name), "type": kind}}]);
            let answer = set_up_all(&world, &pod(&volume)).await;
            answers += &format!("{name} {kind:?}: {}\n", answer.replace(dir.path().to_str().unwrap(), ""));
        }
        insta::assert_snapshot!(answers, @r#"
        nothing "": Nothing
        nothing "Directory": Retry: MountVolume.SetUp failed for volume "v" : hostPath type check failed: /nothing is not a directory
        dir "Directory": Nothing
        link "Directory": Nothing
        file "DirectoryOrCreate": Retry: MountVolume.SetUp failed for volume "v" : hostPath type check failed: /file is not a directory
        new/dir "DirectoryOrCreate": Nothing
        file "File": Nothing
        dir "FileOrCreate": Retry: MountVolume.SetUp failed for volume "v" : hostPath type check failed: /dir is not a file
        file "FileOrCreate": Nothing
        new-file "FileOrCreate": Nothing
        no-parent/file "FileOrCreate": Retry: MountVolume.SetUp failed for volume "v" : create /no-parent/file: No such file or directory (os error 2)
        socket "Socket": Nothing
        file "Socket": Retry: MountVolume.SetUp failed for volume "v" : hostPath type check failed: /file is not a socket file
        /dev/null "CharDevice": Nothing
        /dev/null "BlockDevice": Retry: MountVolume.SetUp failed for volume "v" : hostPath type check failed: /dev/null is not a block device
        dir/../file "File": Refused: MountVolume.SetUp failed for volume "v" : invalid HostPath `/dir/../file`: must not contain '..'
        "#);
        assert_eq!((mode(&at("new/dir")), mode(&at("new-file")) & !0o022), (0o755, 0o644));
        assert_eq!(fs::read_to_string(at("file")).unwrap(), "kept");
    }

    #[tokio::test]
    async fn failed_volume_does_not_delay_other_volumes() {
        let dir = tempfile::tempdir().unwrap();
        let world = world_in(dir.path());
        let volumes = json!([{"name": "a", "gitRepo": {"repository": "r"}}, {"name": "b", "emptyDir": {}}]);
        let answer = set_up_all(&world, &pod(&volumes)).await;
        let expected = format!("Refused: MountVolume.SetUp failed for volume \"a\" : {GIT_REPO_DISABLED}");
        assert_eq!(answer, expected);
        assert!(empty_dir(&world, "b").exists());
    }
}
