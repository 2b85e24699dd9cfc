//! What a terminated pod leaves on the node.
//!
//! Owns: the check after each removal, so that the result reports the actual state. Never: removes
//! anything.

use std::path::Path;

use rubelet_core::{
    effect::{EffectError, ErrorKind, Facts},
    observation::Remains,
    op::PodPlace,
};

use super::{directories, failure};
use crate::world::World;

/// Removes something of the pod, then checks what remains of it.
pub(super) async fn after(
    world: &World,
    place: &PodPlace,
    removed: Remains,
    removal: impl Future<Output = Result<(), EffectError>>,
) -> Result<Facts, EffectError> {
    removal.await?;
    let found = find(world, place).await?;
    if found <= removed {
        let message = format!("{found:?} of pod {} found again after removal", place.pod);
        return Err(EffectError { kind: ErrorKind::Retry, message });
    }
    Ok(Facts::Remains(found))
}

async fn find(world: &World, place: &PodPlace) -> Result<Remains, EffectError> {
    let pod_dir = world.paths.pods_dir().join(directories::component(place.pod.uid.as_str())?);
    for dir in [pod_dir.join("volume-subpaths"), pod_dir.join("volumeDevices"), pod_dir.join("volumes")] {
        if exists(world, &dir).await? {
            return Ok(Remains::Volumes);
        }
    }
    for path in &place.cgroup_paths {
        let found = world.host.has_cgroup(Path::new(path)).await;
        if found.map_err(|error| failure::io("look for cgroup", Path::new(path), &error))? {
            return Ok(Remains::Cgroup);
        }
    }
    if exists(world, &pod_dir).await? {
        return Ok(Remains::PodDir);
    }
    let has_logs = directories::has_logs(world, &place.log_dir_name()).await?;
    Ok(if has_logs { Remains::Logs } else { Remains::Nothing })
}

async fn exists(world: &World, path: &Path) -> Result<bool, EffectError> {
    let kind = world.host.file_kind(path).await.map_err(|error| failure::io("look for", path, &error))?;
    Ok(kind.is_some())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{effects::directories::tests::pod_ref, world::testing::world_in};

    #[tokio::test]
    async fn first_thing_that_is_left_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let world = world_in(dir.path());
        let place = PodPlace { pod: pod_ref("0001"), cgroup_paths: Vec::new() };
        let pod_dir = world.paths.pod_dir(&place.pod.uid);
        let logs = world.paths.pod_logs_dir.join("default_web_0001");
        let link = world.paths.container_links_dir.join("web_default_main-1.log");
        for dir in [&logs, &world.paths.container_links_dir, &pod_dir.join("volumes")] {
            fs::create_dir_all(dir).unwrap();
        }
        std::os::unix::fs::symlink(logs.join("main/0.log"), &link).unwrap();
        let mut found = vec![find(&world, &place).await.unwrap()];
        fs::remove_dir(pod_dir.join("volumes")).unwrap();
        found.push(find(&world, &place).await.unwrap());
        fs::remove_dir(&pod_dir).unwrap();
        found.push(find(&world, &place).await.unwrap());
        fs::remove_dir(&logs).unwrap();
        found.push(find(&world, &place).await.unwrap());
        fs::remove_file(&link).unwrap();
        found.push(find(&world, &place).await.unwrap());
        use Remains::{Logs, Nothing, PodDir, Volumes};
        assert_eq!(found, [Volumes, PodDir, Logs, Logs, Nothing]);
    }

    #[tokio::test]
    async fn removed_but_remaining_object_is_a_failure() {
        let dir = tempfile::tempdir().unwrap();
        let world = world_in(dir.path());
        let place = PodPlace { pod: pod_ref("0001"), cgroup_paths: Vec::new() };
        fs::create_dir_all(world.paths.pod_dir(&place.pod.uid)).unwrap();
        let nothing_done = || std::future::ready(Ok(()));
        let after_volumes = after(&world, &place, Remains::Volumes, nothing_done()).await;
        assert_eq!(after_volumes, Ok(Facts::Remains(Remains::PodDir)));
        let error = after(&world, &place, Remains::PodDir, nothing_done()).await.unwrap_err();
        assert_eq!(error.message, "PodDir of pod default/web found again after removal");
    }
}
