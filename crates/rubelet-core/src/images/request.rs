//! The images that a pod needs, and what each is for.
//!
//! Owns: requests of containers and of image volumes, pull policies, pull secrets. Never: decides when an image is pulled.
//! Upstream: the arguments of `EnsureImageExists`, `getImageVolumes`.

use std::fmt;

use k8s_openapi::api::core::v1::{Container, ImageVolumeSource, PodSpec, Volume};

use crate::{effect::InvolvedObject, id::PodRef};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PullPolicy {
    Always,
    IfNotPresent,
    Never,
}

impl PullPolicy {
    fn parse(policy: Option<&str>) -> Self {
        match policy {
            Some("Always") => PullPolicy::Always,
            Some("Never") => PullPolicy::Never,
            // Manifests and API pods are defaulted; for any other value upstream's fallback.
            _ => PullPolicy::IfNotPresent,
        }
    }
}

/// What a pod needs an image for, by name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ImageTarget {
    Container(String),
    /// A volume whose content is the image.
    Volume(String),
}

impl ImageTarget {
    /// Before every other target.
    pub const FIRST: ImageTarget = ImageTarget::Container(String::new());

    pub fn name(&self) -> &str {
        match self {
            ImageTarget::Container(name) | ImageTarget::Volume(name) => name,
        }
    }

    /// Events about the image of a volume are the pod's, as upstream.
    pub fn involved_object(&self, pod: &PodRef) -> InvolvedObject {
        match self {
            ImageTarget::Container(container) => {
                InvolvedObject::Container { pod: pod.clone(), container: container.clone() }
            }
            ImageTarget::Volume(_) => InvolvedObject::Pod(pod.clone()),
        }
    }
}

impl fmt::Display for ImageTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ImageTarget::Container(name) => write!(f, "container {name}"),
            ImageTarget::Volume(name) => write!(f, "volume {name}"),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageRequest {
    pub target: ImageTarget,
    pub image: String,
    pub policy: PullPolicy,
    /// Names of secrets in the pod's namespace.
    pub pull_secrets: Vec<String>,
}

impl ImageRequest {
    pub fn of(spec: &PodSpec, container: &Container) -> Self {
        ImageRequest {
            target: ImageTarget::Container(container.name.clone()),
            image: container.image.clone().unwrap_or_default(),
            policy: PullPolicy::parse(container.image_pull_policy.as_deref()),
            pull_secrets: pull_secrets(spec),
        }
    }

    /// Of every image volume, mounted or not, as upstream.
    pub fn of_volumes(spec: &PodSpec) -> impl Iterator<Item = Self> {
        let images = spec.volumes.iter().flatten().filter_map(|volume| Some((volume, volume.image.as_ref()?)));
        images.map(|(volume, image)| Self::of_volume(spec, volume, image))
    }

    fn of_volume(spec: &PodSpec, volume: &Volume, image: &ImageVolumeSource) -> Self {
        ImageRequest {
            target: ImageTarget::Volume(volume.name.clone()),
            image: image.reference.clone().unwrap_or_default(),
            policy: PullPolicy::parse(image.pull_policy.as_deref()),
            pull_secrets: pull_secrets(spec),
        }
    }

    /// The container mounts the volume whose image is requested.
    pub fn is_mounted_by(&self, container: &Container) -> bool {
        match &self.target {
            ImageTarget::Container(_) => false,
            ImageTarget::Volume(name) => container.volume_mounts.iter().flatten().any(|mount| mount.name == *name),
        }
    }
}

fn pull_secrets(spec: &PodSpec) -> Vec<String> {
    spec.image_pull_secrets.iter().flatten().map(|secret| secret.name.clone()).collect()
}
