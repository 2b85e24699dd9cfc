//! A pod's directories: its own under the root directory, and its logs.
//!
//! Owns: creating, listing and removing them. Never: removes what is mounted, or anything outside them.
//! Upstream: `makePodDataDirs`, `cleanupOrphanedPodDirs`, `kuberuntime_gc.evictPodLogsDirectories`.

use std::{
    io,
    path::{Path, PathBuf},
};

use rubelet_core::{
    effect::{EffectError, ErrorKind, Facts},
    id::{PodRef, PodUid},
};
use rubelet_host::port::{DirEntry, FileKind};

use super::failure;
use crate::world::World;

pub async fn make_pod_dirs(world: &World, pod: &PodRef) -> Result<Facts, EffectError> {
    component(pod.uid.as_str())?;
    let pod_dir = world.paths.pod_dir(&pod.uid);
    for dir in [&pod_dir, &pod_dir.join("volumes"), &pod_dir.join("plugins")] {
        let made = world.host.make_dir_beneath(&world.paths.pods_dir(), dir, 0o750).await;
        made.map_err(|error| failure::io("make directory", dir, &error))?;
    }
    Ok(Facts::Nothing)
}

/// Pods whose directory or logs are on the disk, desired or not.
pub async fn list_pod_dirs(world: &World) -> Result<Facts, EffectError> {
    let uids = directories_in(world, &world.paths.pods_dir()).await?.into_iter().map(PodUid::new).collect();
    let log_dirs = directories_in(world, &world.paths.pod_logs_dir).await?;
    Ok(Facts::PodDirs { uids, log_dirs })
}

pub async fn remove_pod_dir(world: &World, uid: &PodUid) -> Result<(), EffectError> {
    component(uid.as_str())?;
    let dir = world.paths.pod_dir(uid);
    let mounts =
        world.host.mounts_below(&dir).await.map_err(|error| failure::io("look for mounts below", &dir, &error))?;
    if !mounts.is_empty() {
        let points: Vec<_> = mounts.iter().map(|point| point.display().to_string()).collect();
        let message = format!("pod directory {} stays: still mounted: {}", dir.display(), points.join(", "));
        return Err(EffectError { kind: ErrorKind::Retry, message });
    }
    world.host.remove_tree(&dir).await.map_err(|error| failure::io("remove pod directory", &dir, &error))
}

/// With the links to its files.
pub async fn remove_log_dir(world: &World, dir_name: &str) -> Result<(), EffectError> {
    let dir = world.paths.pod_logs_dir.join(component(dir_name)?);
    for link in links_into(world, dir_name).await? {
        world.host.remove_file(&link).await.map_err(|error| failure::io("remove link", &link, &error))?;
    }
    world.host.remove_tree(&dir).await.map_err(|error| failure::io("remove log directory", &dir, &error))
}

/// Whether the log directory of this name exists, or a link into it.
pub(super) async fn has_logs(world: &World, dir_name: &str) -> Result<bool, EffectError> {
    let dir = world.paths.pod_logs_dir.join(component(dir_name)?);
    let kind = world.host.file_kind(&dir).await.map_err(|error| failure::io("look for", &dir, &error))?;
    Ok(kind.is_some() || !links_into(world, dir_name).await?.is_empty())
}

/// Links are named `<pod>_<namespace>_<container>-<id>.log`, log directories `<namespace>_<pod>_<uid>`.
fn may_belong_to(link_name: &str, dir_name: &str) -> bool {
    let mut parts = dir_name.splitn(3, '_');
    match (parts.next(), parts.next(), parts.next()) {
        (Some(namespace), Some(pod), Some(_)) => link_name.starts_with(&format!("{pod}_{namespace}_")),
        _ => true,
    }
}

async fn links_into(world: &World, dir_name: &str) -> Result<Vec<PathBuf>, EffectError> {
    let mut links = Vec::new();
    for entry in entries_of(world, &world.paths.container_links_dir).await? {
        if entry.kind != FileKind::Symlink || !may_belong_to(&entry.name, dir_name) {
            continue;
        }
        let link = world.paths.container_links_dir.join(&entry.name);
        let target = world.host.read_link(&link).await.map_err(|error| failure::io("read link", &link, &error))?;
        if target.is_some_and(|target| target.components().any(|part| part.as_os_str() == dir_name)) {
            links.push(link);
        }
    }
    Ok(links)
}

async fn directories_in(world: &World, dir: &Path) -> Result<Vec<String>, EffectError> {
    let entries = entries_of(world, dir).await?;
    Ok(entries.into_iter().filter(|entry| entry.kind == FileKind::Directory).map(|entry| entry.name).collect())
}

/// A missing directory is empty.
async fn entries_of(world: &World, dir: &Path) -> Result<Vec<DirEntry>, EffectError> {
    match world.host.list_dir(dir).await {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        listed => listed.map_err(|error| failure::io("list directory", dir, &error)),
    }
}

/// One path component. UIDs and names come from manifests and from the runtime's labels and must not leave the directory.
pub(super) fn component(name: &str) -> Result<&str, EffectError> {
    if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0']) {
        return Err(failure::refused(format!("{name:?} cannot be the name of a directory")));
    }
    Ok(name)
}

#[cfg(test)]
pub(super) mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt, PermissionsExt as _, symlink},
    };

    use super::*;
    use crate::world::testing::world_in;

    pub(crate) fn pod_ref(uid: &str) -> PodRef {
        PodRef { uid: PodUid::new(uid), namespace: "default".into(), name: "web".into() }
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o7777
    }

    #[tokio::test]
    async fn pod_directories_are_made_listed_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let world = world_in(dir.path());
        let nothing = Facts::PodDirs { uids: vec![], log_dirs: vec![] };
        assert_eq!(list_pod_dirs(&world).await.unwrap(), nothing);
        for _ in 0..2 {
            make_pod_dirs(&world, &pod_ref("uid-1")).await.unwrap();
        }
        let pod_dir = world.paths.pod_dir(&PodUid::new("uid-1"));
        assert_eq!([&pod_dir, &pod_dir.join("volumes"), &pod_dir.join("plugins")].map(|dir| mode(dir)), [0o750; 3]);
        fs::create_dir_all(world.paths.pod_logs_dir.join("default_web_uid-2")).unwrap();
        fs::write(world.paths.pods_dir().join("stray-file"), "").unwrap();
        let listed = Facts::PodDirs { uids: vec![PodUid::new("uid-1")], log_dirs: vec!["default_web_uid-2".into()] };
        assert_eq!(list_pod_dirs(&world).await.unwrap(), listed);
        for _ in 0..2 {
            remove_pod_dir(&world, &PodUid::new("uid-1")).await.unwrap();
        }
        assert!(!pod_dir.exists());
    }

    #[tokio::test]
    async fn pod_directories_are_not_made_through_links() {
        let dir = tempfile::tempdir().unwrap();
        let world = world_in(dir.path());
        let outside = dir.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::set_permissions(&outside, fs::Permissions::from_mode(0o700)).unwrap();
        fs::create_dir_all(world.paths.pod_dir(&PodUid::new("middle"))).unwrap();
        symlink(&outside, world.paths.pod_dir(&PodUid::new("last"))).unwrap();
        symlink(&outside, world.paths.pod_dir(&PodUid::new("middle")).join("volumes")).unwrap();
        for uid in ["last", "middle"] {
            make_pod_dirs(&world, &pod_ref(uid)).await.unwrap_err();
        }
        assert_eq!((mode(&outside), fs::read_dir(&outside).unwrap().count()), (0o700, 0));
    }

    #[tokio::test]
    async fn only_dead_links_of_the_removed_pod_go_with_its_logs() {
        let dir = tempfile::tempdir().unwrap();
        let world = world_in(dir.path());
        let logs = &world.paths.pod_logs_dir;
        let links = &world.paths.container_links_dir;
        fs::create_dir_all(links).unwrap();
        let log = |pod: &str, container: &str| -> PathBuf {
            let dir = logs.join(pod).join(container);
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("0.log"), "").unwrap();
            dir.join("0.log")
        };
        let link = |name: &str, target: &Path| std::os::unix::fs::symlink(target, links.join(name)).unwrap();
        link("web_default_app-aaa.log", &log("default_web_uid-1", "app"));
        link("web_default_app-bbb.log", &log("default_web_uid-2", "app"));
        link("web_default_old-ccc.log", &logs.join("default_web_uid-3/old/0.log"));
        link("other_default_app-ddd.log", &log("default_other_uid-4", "app"));
        fs::write(links.join("web_default_notes.log"), "").unwrap();
        for _ in 0..2 {
            remove_log_dir(&world, "default_web_uid-1").await.unwrap();
        }
        let left: Vec<_> = world.host.list_dir(links).await.unwrap().into_iter().map(|entry| entry.name).collect();
        let expected = [
            "other_default_app-ddd.log",
            "web_default_app-bbb.log",
            "web_default_notes.log",
            "web_default_old-ccc.log",
        ];
        assert_eq!(left, expected);
        assert!(!logs.join("default_web_uid-1").exists());
        assert!(logs.join("default_web_uid-2/app/0.log").exists());
    }

    #[tokio::test]
    async fn uid_that_is_no_plain_name_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let world = world_in(dir.path());
        fs::create_dir_all(world.paths.pods_dir()).unwrap();
        fs::write(dir.path().join("precious"), "").unwrap();
        for hostile in ["", ".", "..", "../..", "/", "a/../..", "a\0b"] {
            make_pod_dirs(&world, &pod_ref(hostile)).await.unwrap_err();
            remove_pod_dir(&world, &PodUid::new(hostile)).await.unwrap_err();
            remove_log_dir(&world, hostile).await.unwrap_err();
        }
        assert!(dir.path().join("precious").exists() && world.paths.pods_dir().exists());
    }
}
