//! The images of the node: what they are, what uses them, and deleting one.
//!
//! Owns: matching containers to images, and the file with the images' last use. Never: chooses an image to delete.
//! Upstream: `detectImages`, `freeImage` of `images/image_gc_manager.go`.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use rubelet_core::{
    effect::{EffectError, Facts},
    image_gc::{ImageListing, ImageUse, ListedImage, LookAtImages, Space},
};
use rubelet_cri::v1;

use super::failure;
use crate::{stats::sandbox_images::image_of, world::World};

/// Thousands of images.
const LIMIT_BYTES: u64 = 4 << 20;

pub(super) async fn list_images(world: &World, look: &LookAtImages) -> Result<Facts, EffectError> {
    let remembered = match look {
        LookAtImages::First => remembered(world).await,
        LookAtImages::Later { save } => {
            self::save(world, save).await;
            BTreeMap::new()
        }
    };
    let runtime = &world.runtime;
    let (images, containers, sandboxes, fs_info) = tokio::try_join!(
        runtime.list_images(),
        runtime.list_containers(None),
        runtime.list_pod_sandbox(None),
        runtime.image_fs_info()
    )
    .map_err(|error| failure::retry(&error))?;
    // Runtimes before containerd 2 do not pin the image of their sandboxes, of which there is one.
    let sandbox_image = match sandboxes.first() {
        Some(sandbox) => runtime.pod_sandbox_info(&sandbox.id).await.map(|info| image_of(&info)).unwrap_or_default(),
        None => String::new(),
    };
    let used = names_in_use(&containers, &sandbox_image);
    let is_used = |image: &v1::Image| {
        let mut names = image.repo_tags.iter().chain(&image.repo_digests).chain([&image.id]);
        names.any(|name| used.contains(name.as_str()))
    };
    let in_use = images.iter().filter(|image| is_used(image)).map(|image| image.id.clone()).collect();
    let space = space(world, fs_info).await?;
    Ok(Facts::Images(ImageListing { images: images.into_iter().map(listed).collect(), in_use, space, remembered }))
}

pub(super) async fn delete_image(world: &World, id: &str) -> Result<Facts, EffectError> {
    let spec = v1::ImageSpec { image: id.to_owned(), ..v1::ImageSpec::default() };
    failure::gone_is_done(world.runtime.remove_image(&spec).await)?;
    // The image is gone, whether or not the space is known.
    let space = match world.runtime.image_fs_info().await {
        Ok(info) => space(world, info).await.unwrap_or_default(),
        Err(_) => None,
    };
    Ok(Facts::ImageDeleted { space })
}

/// IDs and names: what a container says of its image depends on the runtime.
fn names_in_use<'a>(containers: &'a [v1::Container], sandbox_image: &'a str) -> BTreeSet<&'a str> {
    let of_container = |container: &'a v1::Container| {
        let named = container.image.as_ref().map_or("", |image| image.image.as_str());
        [container.image_id.as_str(), container.image_ref.as_str(), named]
    };
    let names = containers.iter().flat_map(of_container).chain([sandbox_image]);
    names.filter(|name| !name.is_empty()).collect()
}

fn listed(image: v1::Image) -> ListedImage {
    let names = image.repo_tags.into_iter().chain(image.repo_digests).collect();
    ListedImage { id: image.id, names, size_bytes: image.size, is_pinned: image.pinned }
}

/// Of the first file system that the runtime names, as upstream.
async fn space(world: &World, info: v1::ImageFsInfoResponse) -> Result<Option<Space>, EffectError> {
    let first = info.image_filesystems.into_iter().next().and_then(|usage| usage.fs_id);
    let Some(mount_point) = first.map(|id| PathBuf::from(id.mountpoint)) else { return Ok(None) };
    let found = world.host.file_system(&mount_point).await;
    let found = found.map_err(|error| failure::io("look at the file system of images", &mount_point, &error))?;
    Ok(Some(Space { capacity_bytes: found.capacity_bytes, available_bytes: found.available_bytes }))
}

fn file(world: &World) -> PathBuf {
    world.paths.root_dir.join("rubelet_image_use.json")
}

/// An unreadable file is no reason to collect nothing: then every image counts as just seen.
async fn remembered(world: &World) -> BTreeMap<String, ImageUse> {
    let path = file(world);
    if let Ok(None) = world.host.file_kind(&path).await {
        return BTreeMap::new();
    }
    let read = world.host.read_file(&path, LIMIT_BYTES).await.map_err(|error| error.to_string());
    let parsed = read.and_then(|content| serde_json::from_slice(&content).map_err(|error| error.to_string()));
    parsed.unwrap_or_else(|error| {
        tracing::warn!(path = %path.display(), error, "the last use of images is not known");
        BTreeMap::new()
    })
}

async fn save(world: &World, uses: &BTreeMap<String, ImageUse>) {
    let path = file(world);
    let content = serde_json::to_vec(uses).expect("strings and times");
    if let Err(error) = world.host.write_file(Path::new(&path), &content, 0o600).await {
        tracing::warn!(path = %path.display(), %error, "the last use of images is not saved");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::testing::world_in;

    #[test]
    fn images_are_in_use_by_any_name_a_runtime_gives_them() {
        let container = |image_id: &str, image_ref: &str, named: &str| v1::Container {
            image_id: image_id.to_owned(),
            image_ref: image_ref.to_owned(),
            image: Some(v1::ImageSpec { image: named.to_owned(), ..v1::ImageSpec::default() }),
            ..v1::Container::default()
        };
        let containers = [container("sha256:1", "", ""), container("", "a@sha256:2", "a:v1"), container("", "", "")];
        let found = names_in_use(&containers, "pause:3");
        assert_eq!(found, BTreeSet::from(["sha256:1", "a@sha256:2", "a:v1", "pause:3"]));
    }

    #[tokio::test]
    async fn last_use_is_saved_and_read_and_a_broken_file_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let world = world_in(dir.path());
        std::fs::create_dir_all(&world.paths.root_dir).unwrap();
        assert!(remembered(&world).await.is_empty());
        let moment = "2026-11-17T22:00:00Z".parse().unwrap();
        let uses = BTreeMap::from([("sha256:1".to_owned(), ImageUse { first_seen: moment, last_used: Some(moment) })]);
        save(&world, &uses).await;
        assert_eq!(remembered(&world).await, uses);
        std::fs::write(file(&world), "{").unwrap();
        assert!(remembered(&world).await.is_empty());
    }
}
