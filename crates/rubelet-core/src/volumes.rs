//! The volumes a pod's containers mount.
//!
//! Owns: which volumes a pod uses, what each is, where each lies. Never: touches the disk.
//! Upstream: `volumemanager`'s populator, `emptydir`, `hostpath`, `nested_volumes.go`.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use k8s_openapi::api::core::v1::{Container, EmptyDirVolumeSource, HostPathVolumeSource, Pod, PodSpec, Volume};
use serde::{Deserialize, Serialize};

use crate::{
    pod_resources,
    quantity::{self, Quantity},
    volumes::{
        claims::ClaimRef,
        files::{FilePlugin, FileVolume},
    },
};

pub mod affinity;
pub mod claims;
pub mod csi;
pub mod devices;
pub mod expansion;
pub mod fc;
pub mod files;
pub mod flex;
pub mod in_tree;
pub mod iscsi;
pub mod local;
pub mod migration;
pub mod mounting;
pub mod nfs;
pub mod pod_certificates;
pub mod selinux;
pub mod teardown;
pub mod topology;
pub mod trust_bundles;

/// The directory name of the emptyDir plugin, as upstream escapes `kubernetes.io/empty-dir`.
pub const EMPTY_DIR_PLUGIN: &str = "kubernetes.io~empty-dir";

/// Media of an emptyDir, and the resources they need.
const HUGE_PAGES: &str = "HugePages";
const HUGE_PAGES_OF: &str = "HugePages-";
const HUGE_PAGES_RESOURCE: &str = "hugepages-";

/// One volume that some container of the pod mounts.
#[derive(Clone, Debug, PartialEq)]
pub struct VolumeToMount {
    pub name: String,
    pub source: VolumeSource,
}

#[derive(Clone, Debug, PartialEq)]
pub enum VolumeSource {
    EmptyDir {
        medium: Medium,
        /// The pod's fsGroup.
        group: Option<u32>,
    },
    HostPath {
        path: PathBuf,
        must_be: HostPathType,
    },
    Files(FileVolume),
    /// A persistent volume, once the claim is resolved.
    Claim(ClaimRef),
    /// A CSI ephemeral volume, or a disk of a cloud that has a driver now.
    Csi {
        driver: String,
    },
    /// It cannot be set up as it is in the manifest; the text says why.
    Invalid(String),
    /// A kind that the node mounts itself, once it is resolved.
    InTree,
    /// Disabled in Kubernetes: it ran commands as root.
    GitRepo,
    /// An unsupported kind of volume; the text is the field's name in the manifest.
    Unsupported(String),
}

impl VolumeSource {
    /// The name of its plugin in metrics; `None` for unsupported volumes, and for claims, whose persistent volume has one.
    pub fn plugin(&self) -> Option<&'static str> {
        match self {
            VolumeSource::EmptyDir { .. } => Some("kubernetes.io/empty-dir"),
            VolumeSource::HostPath { .. } => Some("kubernetes.io/host-path"),
            VolumeSource::Files(FileVolume { plugin, .. }) => Some(match plugin {
                FilePlugin::ConfigMap => "kubernetes.io/configmap",
                FilePlugin::Secret => "kubernetes.io/secret",
                FilePlugin::DownwardApi => "kubernetes.io/downward-api",
                FilePlugin::Projected => "kubernetes.io/projected",
            }),
            VolumeSource::Claim(_)
            | VolumeSource::Csi { .. }
            | VolumeSource::InTree
            | VolumeSource::GitRepo
            | VolumeSource::Invalid(_)
            | VolumeSource::Unsupported(_) => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    Disk,
    /// `None`: the size of the node's memory.
    Memory {
        size_bytes: Option<u64>,
    },
    HugePages {
        page_bytes: u64,
    },
}

/// The check of a hostPath, and what is created when it is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostPathType {
    Unchecked,
    DirectoryOrCreate,
    Directory,
    FileOrCreate,
    File,
    Socket,
    CharDevice,
    BlockDevice,
}

/// The volumes that some container mounts, in the order of the manifest. Others are not set up, as upstream.
pub fn volumes_to_mount(pod: &Pod) -> Vec<VolumeToMount> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    mounted(spec).map(|volume| VolumeToMount { name: volume.name.clone(), source: source(pod, spec, volume) }).collect()
}

/// The volumes that some container mounts, as the spec has them. Image volumes are mounted by the runtime alone.
pub fn mounted(spec: &PodSpec) -> impl Iterator<Item = &Volume> {
    let mounted = mounted_names(spec);
    spec.volumes.iter().flatten().filter(move |volume| volume.image.is_none() && mounted.contains(volume.name.as_str()))
}

/// The pod has volumes that may change while it runs.
pub fn change_with_time(pod: &Pod) -> bool {
    let changes = |source: &VolumeSource| {
        matches!(source, VolumeSource::Files(_) | VolumeSource::Claim(_) | VolumeSource::Csi { .. })
    };
    volumes_to_mount(pod).iter().any(|volume| changes(&volume.source))
}

/// The names of the pod's volumes of files with content of the API.
pub fn file_volumes(pod: &Pod) -> Vec<String> {
    let files = volumes_to_mount(pod).into_iter().filter(|volume| matches!(volume.source, VolumeSource::Files(_)));
    files.map(|volume| volume.name).collect()
}

/// Directories a volume must have because containers mount other volumes inside it: a read-only volume cannot get them later.
/// Below the volume's own directory; the outermost only.
pub fn nested_mount_points(spec: &PodSpec, volume: &str) -> Vec<PathBuf> {
    let mut nested = Vec::new();
    for container in spec.containers.iter().chain(spec.init_containers.iter().flatten()) {
        let mounts = || container.volume_mounts.iter().flatten();
        let mut points: Vec<PathBuf> = mounts().map(|mount| plain(&mount.mount_path)).collect();
        points.sort();
        for mount in mounts().filter(|mount| mount.name == volume) {
            let own = plain(&mount.mount_path);
            // In sorted order the paths inside a directory follow it directly: those inside this volume are adjacent, and each
            // outermost one is followed by those inside it.
            let inside = points.partition_point(|point| *point <= own);
            let mut outermost: Option<&PathBuf> = None;
            for point in points[inside..].iter().take_while(|point| point.starts_with(&own)) {
                if !outermost.is_some_and(|outer| point.starts_with(outer)) {
                    outermost = Some(point);
                    nested.extend(point.strip_prefix(&own).map(Path::to_path_buf));
                }
            }
        }
    }
    nested
}

/// The directory of the volume's files.
pub fn files_path(pod_dir: &Path, plugin: FilePlugin, volume: &str) -> PathBuf {
    pod_dir.join("volumes").join(plugin.dir_name()).join(volume)
}

/// The directory of an emptyDir's content.
pub fn empty_dir_path(pod_dir: &Path, volume: &str) -> PathBuf {
    pod_dir.join("volumes").join(EMPTY_DIR_PLUGIN).join(volume)
}

/// The directory of a mounted emptyDir's content. `None` for any other volume, and for none.
pub fn mounted_empty_dir(pod: &Pod, pod_dir: &Path, volume: &str) -> Option<PathBuf> {
    let spec = pod.spec.as_ref().filter(|spec| mounted_names(spec).contains(volume))?;
    let is_it = |known: &&Volume| known.name == volume && known.empty_dir.is_some();
    spec.volumes.iter().flatten().find(is_it).map(|known| empty_dir_path(pod_dir, &known.name))
}

/// The directory whose file `ready` marks an emptyDir as set up: from then on its content belongs to the containers.
pub fn empty_dir_marker(pod_dir: &Path, volume: &str) -> PathBuf {
    pod_dir.join("plugins").join(EMPTY_DIR_PLUGIN).join(volume)
}

fn mounted_names(spec: &PodSpec) -> BTreeSet<&str> {
    mount_names(spec).chain(device_names(spec)).collect()
}

/// The volumes that containers mount.
fn mount_names(spec: &PodSpec) -> impl Iterator<Item = &str> {
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let mounts = containers.flat_map(|container| container.volume_mounts.iter().flatten());
    let ephemeral = spec.ephemeral_containers.iter().flatten();
    let ephemeral_mounts = ephemeral.flat_map(|container| container.volume_mounts.iter().flatten());
    mounts.chain(ephemeral_mounts).map(|mount| mount.name.as_str())
}

/// The volumes that containers use as devices.
fn device_names(spec: &PodSpec) -> impl Iterator<Item = &str> {
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    containers.flat_map(|container| container.volume_devices.iter().flatten()).map(|device| device.name.as_str())
}

/// Without a leading slash, `.` and `..`.
fn plain(path: &str) -> PathBuf {
    let mut names: Vec<&str> = Vec::new();
    for name in path.split('/') {
        match name {
            "" | "." => {}
            ".." => drop(names.pop()),
            name => names.push(name),
        }
    }
    names.into_iter().collect()
}

fn source(pod: &Pod, spec: &PodSpec, volume: &Volume) -> VolumeSource {
    if let Some(files) = FileVolume::of(pod, spec, volume) {
        VolumeSource::Files(files)
    } else if let Some(source) = &volume.empty_dir {
        empty_dir(spec, source)
    } else if let Some(source) = &volume.host_path {
        match host_path_type(source) {
            Some(must_be) => VolumeSource::HostPath { path: PathBuf::from(&source.path), must_be },
            None => VolumeSource::Unsupported(format!("hostPath.type {}", source.type_.as_deref().unwrap_or_default())),
        }
    } else if let Some(claim) = ClaimRef::of(pod, volume) {
        VolumeSource::Claim(claim)
    } else if let Some(source) = &volume.csi {
        VolumeSource::Csi { driver: source.driver.clone() }
    } else if let Some(driver) = migration::inline_driver(volume) {
        VolumeSource::Csi { driver: driver.to_owned() }
    } else if in_tree::is_inline(volume) {
        VolumeSource::InTree
    } else if volume.git_repo.is_some() {
        VolumeSource::GitRepo
    } else {
        match field_name(volume) {
            Some(field) => VolumeSource::Unsupported(field),
            // A volume without a source is an emptyDir, as the API server defaults it.
            None => empty_dir(spec, &EmptyDirVolumeSource::default()),
        }
    }
}

fn empty_dir(spec: &PodSpec, source: &EmptyDirVolumeSource) -> VolumeSource {
    let medium = match source.medium.as_deref().unwrap_or_default() {
        "" => Medium::Disk,
        "Memory" => Medium::Memory { size_bytes: memory_size(spec, source) },
        medium if medium == HUGE_PAGES || medium.starts_with(HUGE_PAGES_OF) => match page_bytes(spec, medium) {
            Ok(page_bytes) => Medium::HugePages { page_bytes },
            Err(problem) => return VolumeSource::Invalid(problem),
        },
        other => return VolumeSource::Invalid(format!("unknown storage medium {other:?}")),
    };
    VolumeSource::EmptyDir { medium, group: fs_group(spec) }
}

/// The page size of a medium of huge pages, which the pod must request; without one in its name, the only one it requests.
/// Upstream: `getPageSizeMountOption`.
fn page_bytes(spec: &PodSpec, medium: &str) -> Result<u64, String> {
    let size = |text: &str| Quantity::parse(text).map_err(|error| error.to_string());
    let asked = medium.strip_prefix(HUGE_PAGES_OF).map(size).transpose()?;
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let requirements = spec.resources.iter().chain(containers.filter_map(|container| container.resources.as_ref()));
    let names = requirements.flat_map(|resources| resources.requests.iter().flatten()).map(|(name, _)| name);
    let mut found = None;
    for text in names.filter_map(|name| name.strip_prefix(HUGE_PAGES_RESOURCE)) {
        let requested = size(text)?;
        if asked.is_some_and(|asked| asked != requested) {
            continue;
        }
        if found.is_some_and(|found| found != requested) {
            return Err(format!("medium: {medium} can't be used if container requests multiple huge page sizes"));
        }
        found = Some(requested);
    }
    let found = found.and_then(|size| u64::try_from(size.value()).ok());
    found.ok_or_else(|| {
        format!("medium {medium}: hugePages storage requested, but there is no resource request for huge pages")
    })
}

pub fn fs_group(spec: &PodSpec) -> Option<u32> {
    let group = spec.security_context.as_ref().and_then(|context| context.fs_group)?;
    u32::try_from(group).ok()
}

/// `None` for an unknown type.
fn host_path_type(source: &HostPathVolumeSource) -> Option<HostPathType> {
    Some(match source.type_.as_deref().unwrap_or_default() {
        "" => HostPathType::Unchecked,
        "DirectoryOrCreate" => HostPathType::DirectoryOrCreate,
        "Directory" => HostPathType::Directory,
        "FileOrCreate" => HostPathType::FileOrCreate,
        "File" => HostPathType::File,
        "Socket" => HostPathType::Socket,
        "CharDevice" => HostPathType::CharDevice,
        "BlockDevice" => HostPathType::BlockDevice,
        _ => return None,
    })
}

/// The volume's only field beside its name.
fn field_name(volume: &Volume) -> Option<String> {
    let fields = serde_json::to_value(volume).ok()?;
    fields.as_object()?.keys().find(|field| *field != "name").cloned()
}

/// The smaller of the volume's size limit and the pod's memory limit.
fn memory_size(spec: &PodSpec, source: &EmptyDirVolumeSource) -> Option<u64> {
    let asked = source.size_limit.as_ref().and_then(|text| Quantity::parse(&text.0).ok());
    let limits = [asked, pod_memory_limit(spec)];
    let smallest = limits.into_iter().flatten().filter(|limit| limit.is_positive()).min()?;
    u64::try_from(smallest.value()).ok()
}

/// `None` when one container has no limit. Init containers run before the others, sidecars beside them.
fn pod_memory_limit(spec: &PodSpec) -> Option<Quantity> {
    let of_pod = spec.resources.as_ref().map(|resources| quantity::amount(resources.limits.as_ref(), "memory"));
    if let Some(limit) = of_pod.filter(|limit| limit.is_positive()) {
        return Some(limit);
    }
    let mut is_bounded = true;
    let total = pod_resources::aggregate_containers(spec, |container| {
        let limit = memory_limit(container);
        is_bounded &= limit.is_some();
        limit.unwrap_or_default()
    });
    is_bounded.then_some(total)
}

fn memory_limit(container: &Container) -> Option<Quantity> {
    let limits = container.resources.as_ref().and_then(|resources| resources.limits.as_ref());
    Some(quantity::amount(limits, "memory")).filter(|limit| limit.is_positive())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn to_mount(spec: &serde_json::Value) -> Vec<VolumeToMount> {
        volumes_to_mount(&serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).unwrap())
    }

    /// One container, without limits, that mounts each of the volumes.
    fn sources_of(volumes: &serde_json::Value, more: &serde_json::Value) -> Vec<VolumeSource> {
        let names = volumes.as_array().unwrap().iter().map(|volume| volume["name"].clone());
        let mounts: Vec<_> = names.map(|name| json!({"name": name, "mountPath": "/x"})).collect();
        let mut spec = json!({"containers": [{"name": "c", "volumeMounts": mounts}], "volumes": volumes});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        to_mount(&spec).into_iter().map(|volume| volume.source).collect()
    }

    #[test]
    fn only_volumes_that_some_container_mounts_are_needed() {
        let mount = |name: &str| json!([{"name": name, "mountPath": "/x"}]);
        let volumes = ["a", "b", "c", "d"].map(|name| json!({"name": name, "emptyDir": {}}));
        let volumes = to_mount(&json!({
            "containers": [{"name": "c", "volumeMounts": mount("b")}],
            "initContainers": [{"name": "i", "volumeMounts": mount("a")}],
            "ephemeralContainers": [{"name": "e", "volumeMounts": mount("d")}],
            "volumes": volumes,
        }));
        assert_eq!(volumes.iter().map(|volume| volume.name.as_str()).collect::<Vec<_>>(), ["a", "b", "d"]);
    }

    #[test]
    fn each_source_is_read() {
        let sources = sources_of(
            &json!([
                {"name": "none"},
                {"name": "disk", "emptyDir": {"sizeLimit": "1Gi"}},
                {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "64Ki"}},
                {"name": "all-memory", "emptyDir": {"medium": "Memory"}},
                {"name": "huge", "emptyDir": {"medium": "HugePages"}},
                {"name": "tape", "emptyDir": {"medium": "Tape"}},
                {"name": "host", "hostPath": {"path": "/data"}},
                {"name": "socket", "hostPath": {"path": "/s", "type": "Socket"}},
                {"name": "wrong", "hostPath": {"path": "/s", "type": "Sock"}},
                {"name": "mounted", "nfs": {"server": "s", "path": "/"}},
                {"name": "git", "gitRepo": {"repository": "r"}},
                {"name": "disk", "gcePersistentDisk": {"pdName": "d"}},
                {"name": "later", "flexVolume": {"driver": "d"}},
            ]),
            &json!({"securityContext": {"fsGroup": 2000}}),
        );
        let lines: Vec<_> = sources.iter().map(|source| format!("{source:?}")).collect();
        insta::assert_snapshot!(lines.join("\n"), @r#"
        EmptyDir { medium: Disk, group: Some(2000) }
        EmptyDir { medium: Disk, group: Some(2000) }
        EmptyDir { medium: Memory { size_bytes: Some(65536) }, group: Some(2000) }
        EmptyDir { medium: Memory { size_bytes: None }, group: Some(2000) }
        Invalid("medium HugePages: hugePages storage requested, but there is no resource request for huge pages")
        Invalid("unknown storage medium \"Tape\"")
        HostPath { path: "/data", must_be: Unchecked }
        HostPath { path: "/s", must_be: Socket }
        Unsupported("hostPath.type Sock")
        InTree
        GitRepo
        Csi { driver: "pd.csi.storage.gke.io" }
        InTree
        "#);
    }

    #[test]
    fn page_size_is_that_of_the_medium_or_the_only_one_requested() {
        let none = "hugePages storage requested, but there is no resource request for huge pages";
        for (medium, requests, expected) in [
            ("HugePages", &["hugepages-2Mi"][..], Ok(2 << 20)),
            ("HugePages", &["memory"], Err(format!("medium HugePages: {none}"))),
            (
                "HugePages",
                &["hugepages-2Mi", "hugepages-1Gi"],
                Err("medium: HugePages can't be used if container requests multiple huge page sizes".to_owned()),
            ),
            ("HugePages-1Gi", &["hugepages-2Mi", "hugepages-1Gi"], Ok(1 << 30)),
            ("HugePages-1024Mi", &["hugepages-1Gi"], Ok(1 << 30)),
            ("HugePages-1Gi", &["hugepages-2Mi"], Err(format!("medium HugePages-1Gi: {none}"))),
        ] {
            let requests: serde_json::Map<_, _> =
                requests.iter().map(|name| ((*name).to_owned(), json!("2Mi"))).collect();
            for spec in [
                json!({"containers": [{"name": "c", "resources": {"requests": requests}}]}),
                json!({"containers": [], "initContainers": [{"name": "c", "resources": {"requests": requests}}]}),
                json!({"containers": [], "resources": {"requests": requests}}),
            ] {
                let spec: PodSpec = serde_json::from_value(spec).unwrap();
                assert_eq!(page_bytes(&spec, medium), expected, "{medium} {spec:?}");
            }
        }
    }

    #[test]
    fn a_volume_gets_directories_for_those_mounted_inside_of_it() {
        let mounts = |points: &[(&str, &str)]| {
            let mounts: Vec<_> = points.iter().map(|(name, path)| json!({"name": name, "mountPath": path})).collect();
            json!(mounts)
        };
        let spec: PodSpec = serde_json::from_value(json!({
            "initContainers": [{"name": "i", "volumeMounts": mounts(&[("v", "/v/"), ("w", "/v/init/../w")])}],
            "containers": [{"name": "c", "volumeMounts": mounts(&[
                ("v", "/dir"), ("a", "/dir/nested/double"), ("b", "/dir/nested"), ("c", "/dir/nested-vol"), ("d", "/dirs"),
            ])}],
        }))
        .unwrap();
        let nested: Vec<_> =
            nested_mount_points(&spec, "v").into_iter().map(|path| path.display().to_string()).collect();
        assert_eq!(nested, ["nested", "nested-vol", "w"]);
        assert_eq!(nested_mount_points(&spec, "b"), [PathBuf::from("double")]);
    }

    #[test]
    fn memory_is_limited_by_the_smaller_of_volume_and_pod() {
        let limited = |memory: &str| json!({"limits": {"memory": memory}});
        let volume =
            |limit: &serde_json::Value| json!([{"name": "v", "emptyDir": {"medium": "Memory", "sizeLimit": limit}}]);
        let with = |volume: serde_json::Value, containers: serde_json::Value| {
            let mut containers = containers;
            containers["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/x"}]);
            match sources_of(&volume, &containers).as_slice() {
                [VolumeSource::EmptyDir { medium: Medium::Memory { size_bytes }, .. }] => *size_bytes,
                other => panic!("{other:?}"),
            }
        };
        let one = json!({"containers": [{"name": "c", "resources": limited("100")}]});
        let two = json!({"containers": [{"name": "c", "resources": limited("100")}, {"name": "d", "resources": limited("50")}]});
        let init = json!({
            "initContainers": [
                {"name": "s", "restartPolicy": "Always", "resources": limited("30")},
                {"name": "i", "resources": limited("200")},
            ],
            "containers": [{"name": "c", "resources": limited("100")}],
        });
        let open = json!({"containers": [{"name": "c", "resources": limited("100")}, {"name": "d"}]});
        let pod = json!({"resources": limited("70"), "containers": [{"name": "c"}]});
        let none = json!(null);
        assert_eq!(with(volume(&none), one.clone()), Some(100));
        assert_eq!(with(volume(&json!("40")), one.clone()), Some(40));
        assert_eq!(with(volume(&json!("400")), one.clone()), Some(100));
        assert_eq!(with(volume(&json!("0")), one), Some(100));
        assert_eq!(with(volume(&none), two), Some(150));
        assert_eq!(with(volume(&none), init), Some(230));
        assert_eq!(with(volume(&none), open), None);
        assert_eq!(with(volume(&none), pod), Some(70));
    }
}
