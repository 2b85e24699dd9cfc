//! Claims: the persistent volume that a volume of a pod stands for.
//!
//! Owns: which claim a volume names, when a claim and its persistent volume may be used, and what they resolve to. Never:
//! fetches them.
//! Upstream: `getPVCExtractPV`, `getPVSpec` of the desired state's populator, `component-helpers/storage/ephemeral`.

use std::path::{Path, PathBuf};

use k8s_openapi::api::{
    core::v1::{PersistentVolume, PersistentVolumeClaim, PersistentVolumeSpec, Pod, Volume},
    storage::v1::CSIDriver,
};
use serde::{Deserialize, Serialize};

use crate::{
    id::{PodUid, namespace_of},
    volumes::{
        self, HostPathType,
        csi::{self, AccessMode, CsiLifecycle, CsiVolume, DriverRules},
        devices::{Device, DeviceName},
        expansion::ClaimedSize,
        fc::{self, FC_PLUGIN, FcVolume},
        flex::{self, FlexVolume},
        in_tree,
        iscsi::{ISCSI_PLUGIN, IscsiVolume},
        local::{self, LOCAL_PLUGIN, LocalVolume},
        migration::{self, InlineVolume},
        nfs::{NFS_PLUGIN, NfsVolume},
    },
};

/// The directory name of the CSI plugin.
pub const CSI_PLUGIN: &str = "kubernetes.io~csi";
/// The directories of block devices have this name.
pub const VOLUME_DEVICES: &str = "volumeDevices";
const GROUP_ANNOTATION: &str = "pv.beta.kubernetes.io/gid";
/// Overrides `spec.mountOptions`, but for CSI volumes.
const MOUNT_OPTIONS_ANNOTATION: &str = "volume.beta.kubernetes.io/mount-options";
const PROTECTION_FINALIZER: &str = "kubernetes.io/pvc-protection";

/// The claim that a volume names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimRef {
    pub namespace: String,
    pub name: String,
    /// Made for this pod from the template in its spec.
    pub is_ephemeral: bool,
    pub read_only: bool,
    pub usage: VolumeUsage,
}

/// How the containers of a pod use a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VolumeUsage {
    /// Its name in the pod.
    pub volume: String,
    pub is_mounted: bool,
    pub is_device: bool,
}

impl VolumeUsage {
    fn of(pod: &Pod, volume: &Volume) -> Self {
        let Some(spec) = &pod.spec else { return VolumeUsage::default() };
        let is_device = volumes::device_names(spec).any(|name| name == volume.name);
        let is_mounted = volumes::mount_names(spec).any(|name| name == volume.name);
        VolumeUsage { volume: volume.name.clone(), is_mounted, is_device }
    }

    /// Why a volume of this mode cannot be used so.
    fn mismatch(&self, is_block: bool) -> Option<String> {
        let (mode, place) = match (is_block, self.is_mounted, self.is_device) {
            (true, true, _) => ("Block", "volumeMounts"),
            (false, _, true) => ("Filesystem", "volumeDevices"),
            (true, false, _) | (false, _, false) => return None,
        };
        Some(format!("volume {} has volumeMode {mode}, but is specified in {place}", self.volume))
    }
}

impl ClaimRef {
    /// `None` for a volume of another kind.
    pub fn of(pod: &Pod, volume: &Volume) -> Option<ClaimRef> {
        let namespace = namespace_of(pod).to_owned();
        let usage = VolumeUsage::of(pod, volume);
        if let Some(source) = &volume.persistent_volume_claim {
            let read_only = source.read_only.unwrap_or(false);
            let name = source.claim_name.clone();
            return Some(ClaimRef { namespace, name, is_ephemeral: false, read_only, usage });
        }
        volume.ephemeral.as_ref()?;
        let name = format!("{}-{}", pod.metadata.name.as_deref().unwrap_or_default(), volume.name);
        Some(ClaimRef { namespace, name, is_ephemeral: true, read_only: false, usage })
    }

    /// The name of the persistent volume it is bound to, or why it cannot be used.
    pub fn bound_to(&self, pod: &Pod, claim: &PersistentVolumeClaim) -> Result<String, String> {
        if self.is_ephemeral && !is_made_for(pod, claim) {
            let ClaimRef { namespace, name, .. } = self;
            let pod = pod.metadata.name.as_deref().unwrap_or_default();
            return Err(format!("PVC {namespace}/{name} was not created for pod {namespace}/{pod} (pod is not owner)"));
        }
        let finalizers = claim.metadata.finalizers.iter().flatten();
        let is_protected = finalizers.into_iter().any(|finalizer| finalizer == PROTECTION_FINALIZER);
        if claim.metadata.deletion_timestamp.is_some() && !is_protected {
            return Err("PVC is being deleted".to_owned());
        }
        if claim.status.as_ref().and_then(|status| status.phase.as_deref()) != Some("Bound") {
            return Err("PVC is not bound".to_owned());
        }
        let name = claim.spec.as_ref().and_then(|spec| spec.volume_name.clone()).unwrap_or_default();
        if name.is_empty() { Err("PVC has empty pvc.Spec.VolumeName".to_owned()) } else { Ok(name) }
    }
}

fn is_made_for(pod: &Pod, claim: &PersistentVolumeClaim) -> bool {
    let owners = claim.metadata.owner_references.iter().flatten();
    let mut owners = owners.filter(|owner| owner.controller == Some(true));
    owners.any(|owner| Some(&owner.uid) == pod.metadata.uid.as_ref())
}

/// A persistent volume, or an inline volume of a CSI driver, as a pod uses it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PersistentSource {
    /// The name of the PersistentVolume; of an inline volume, its name in the pod.
    pub name: String,
    /// The pod's volume says so; the containers' mounts are read-only then. As upstream, `readOnly` of a PersistentVolume's CSI
    /// source is for the controller alone.
    pub read_only: bool,
    /// One pod at a time may use it: `ReadWriteOncePod` is its only access mode.
    pub is_exclusive: bool,
    pub kind: PersistentKind,
    /// Its size and its claim's. `None` for volumes without a claim.
    pub size: Option<ClaimedSize>,
    /// A group of which the pod's processes are members, from an annotation of the persistent volume.
    pub group: Option<i64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PersistentKind {
    HostPath { path: PathBuf, must_be: HostPathType },
    Local(LocalVolume),
    Nfs(NfsVolume),
    Iscsi(IscsiVolume),
    Fc(FcVolume),
    Flex(FlexVolume),
    Csi(CsiVolume),
}

impl PersistentSource {
    /// What a bound claim stands for, or why its volume cannot be used. `driver` is the object of its CSI driver, if it has one.
    pub fn of(
        claim_ref: &ClaimRef,
        claim: &PersistentVolumeClaim,
        volume: &PersistentVolume,
        driver: Option<&CSIDriver>,
    ) -> Result<Self, String> {
        let name = volume.metadata.name.clone().unwrap_or_default();
        let Some(spec) = &volume.spec else { return Err(format!("PV {name} has no spec")) };
        let Some(bound) = &spec.claim_ref else {
            return Err(format!(
                "found PV object {name} but it has a nil pv.Spec.ClaimRef indicating it is not yet bound to the claim"
            ));
        };
        let (bound_uid, uid) =
            (bound.uid.as_deref().unwrap_or_default(), claim.metadata.uid.as_deref().unwrap_or_default());
        if bound_uid != uid {
            return Err(format!(
                "found PV object {name} but its pv.Spec.ClaimRef.UID {bound_uid} does not point to claim.UID {uid}"
            ));
        }
        let is_block = spec.volume_mode.as_deref() == Some("Block");
        if let Some(why) = claim_ref.usage.mismatch(is_block) {
            return Err(why);
        }
        let mount_options = mount_options(volume, spec);
        if !in_tree::takes_mount_options(spec) && !mount_options.is_empty() {
            return Err("mount options are not supported for this volume type".to_owned());
        }
        let modes = spec.access_modes.as_deref().unwrap_or_default();
        let is_exclusive = matches!(modes, [only] if AccessMode::parse(only) == Some(AccessMode::ReadWriteOncePod));
        let kind = if let Some(source) = &spec.csi {
            if let Some(why) = csi::unsupported_lifecycle(&source.driver, driver, CsiLifecycle::Persistent) {
                return Err(why);
            }
            let mode = modes.first().and_then(|mode| AccessMode::parse(mode)).unwrap_or(AccessMode::ReadWriteOnce);
            let modes = || modes.iter().filter_map(|mode| AccessMode::parse(mode));
            let widest_access = AccessMode::widest(modes()).unwrap_or(mode);
            let has_single_node_mode = modes().any(AccessMode::is_single_node);
            let volume = CsiVolume::persistent(source, mode, DriverRules::of(driver));
            // Upstream does not give drivers the options of the annotation.
            let mount_options = spec.mount_options.clone().unwrap_or_default();
            PersistentKind::Csi(CsiVolume { mount_options, is_block, widest_access, has_single_node_mode, ..volume })
        } else {
            let kind = in_tree::kind(&name, spec, &claim_ref.namespace, &mount_options)?;
            if is_block { in_tree::as_block(&name, kind)? } else { kind }
        };
        let capacity = spec.capacity.as_ref().and_then(|capacity| capacity.get("storage"));
        let size = capacity.and_then(|capacity| ClaimedSize::of(claim, &capacity.0));
        let annotations = volume.metadata.annotations.as_ref();
        let group = annotations.and_then(|annotations| annotations.get(GROUP_ANNOTATION)?.parse().ok());
        Ok(PersistentSource { name, read_only: claim_ref.read_only, is_exclusive, kind, size, group })
    }

    /// `None` for a volume that is only mounted into pods.
    pub fn device_name(&self) -> Option<DeviceName> {
        Device::of(self).map(|device| DeviceName::of(&device))
    }

    /// An inline volume of a CSI driver.
    pub fn inline(name: &str, read_only: bool, volume: CsiVolume) -> Self {
        PersistentSource {
            name: name.to_owned(),
            read_only,
            is_exclusive: false,
            kind: PersistentKind::Csi(volume),
            size: None,
            group: None,
        }
    }

    /// Containers get its block device.
    pub fn is_block(&self) -> bool {
        match &self.kind {
            PersistentKind::Csi(volume) => volume.is_block,
            PersistentKind::Local(volume) => volume.is_block,
            PersistentKind::Iscsi(volume) => volume.is_block,
            PersistentKind::Fc(volume) => volume.is_block,
            PersistentKind::HostPath { .. } | PersistentKind::Nfs(_) | PersistentKind::Flex(_) => false,
        }
    }

    /// A CSI ephemeral volume.
    pub fn is_inline(&self) -> bool {
        matches!(&self.kind, PersistentKind::Csi(volume) if volume.lifecycle == CsiLifecycle::Ephemeral)
    }

    /// Its driver supports the mount option `context=`.
    pub fn takes_label(&self) -> bool {
        matches!(&self.kind, PersistentKind::Csi(volume) if volume.rules.takes_label)
    }

    /// For pods that want this SELinux label. `is_labelled`: it is mounted with it.
    pub fn with_label(mut self, label: Option<String>, is_labelled: bool) -> Self {
        if let PersistentKind::Csi(volume) = &mut self.kind {
            (volume.label, volume.is_labelled) = (label, is_labelled);
        }
        self
    }

    /// The SELinux label that pods want for it.
    pub fn label(&self) -> Option<&str> {
        let PersistentKind::Csi(volume) = &self.kind else { return None };
        volume.label.as_deref()
    }

    /// The SELinux label that it is mounted with.
    pub fn mount_context(&self) -> Option<&str> {
        let PersistentKind::Csi(volume) = &self.kind else { return None };
        volume.mount_context()
    }

    /// It is published again from time to time.
    pub fn is_republished(&self) -> bool {
        matches!(&self.kind, PersistentKind::Csi(volume) if volume.rules.republish)
    }

    /// The node may have to make its file system larger.
    pub fn is_expandable(&self) -> bool {
        match &self.kind {
            PersistentKind::Csi(volume) => volume.lifecycle == CsiLifecycle::Persistent,
            PersistentKind::Flex(volume) => volume.capabilities.requires_fs_resize,
            PersistentKind::Local(_) => true,
            PersistentKind::HostPath { .. }
            | PersistentKind::Nfs(_)
            | PersistentKind::Iscsi(_)
            | PersistentKind::Fc(_) => false,
        }
    }

    /// A volume of a pod whose kind moved into a CSI driver, or why it cannot be used.
    pub fn migrated(volume: &InlineVolume, driver: Option<&CSIDriver>) -> Result<Self, String> {
        let InlineVolume { name, source, access_mode } = volume;
        if let Some(why) = csi::unsupported_lifecycle(&source.driver, driver, CsiLifecycle::Persistent) {
            return Err(why);
        }
        let kind = PersistentKind::Csi(CsiVolume::persistent(source, *access_mode, DriverRules::of(driver)));
        // As upstream, for the name of a directory.
        let name = name.replace('/', "~");
        Ok(PersistentSource { name, read_only: false, is_exclusive: false, kind, size: None, group: None })
    }

    /// The node must wait until the attach/detach controller has attached it.
    pub fn is_attached_by_controller(&self) -> bool {
        match &self.kind {
            PersistentKind::Csi(volume) => volume.rules.attach,
            PersistentKind::Iscsi(volume) => volume.attach,
            PersistentKind::Fc(volume) => volume.attach,
            PersistentKind::Flex(volume) => volume.capabilities.attach && volume.has_controller,
            PersistentKind::HostPath { .. } | PersistentKind::Local(_) | PersistentKind::Nfs(_) => false,
        }
    }

    /// A node that cannot attach it may have more volumes of its driver than the scheduler knew.
    pub fn has_changing_limit(&self) -> bool {
        let PersistentKind::Csi(volume) = &self.kind else { return false };
        volume.rules.attach && volume.rules.has_changing_limit && volume.lifecycle == CsiLifecycle::Persistent
    }

    /// On a standalone node there is no controller, and the node's own part is all that these kinds need.
    pub fn without_controller(mut self) -> Self {
        match &mut self.kind {
            PersistentKind::Iscsi(volume) => volume.attach = false,
            PersistentKind::Fc(volume) => volume.attach = false,
            PersistentKind::Flex(volume) => volume.has_controller = false,
            PersistentKind::Csi(_)
            | PersistentKind::HostPath { .. }
            | PersistentKind::Local(_)
            | PersistentKind::Nfs(_) => {}
        }
        self
    }

    /// The volume's name on the Node object, if the attach/detach controller attaches it.
    pub fn attached_name(&self) -> Option<String> {
        if !self.is_attached_by_controller() {
            return None;
        }
        match &self.kind {
            PersistentKind::Iscsi(volume) => Some(volume.volume_name()),
            PersistentKind::Fc(volume) => Some(volume.volume_name.clone()),
            PersistentKind::Csi(_)
            | PersistentKind::HostPath { .. }
            | PersistentKind::Local(_)
            | PersistentKind::Flex(_)
            | PersistentKind::Nfs(_) => self.device_name().map(|name| name.to_string()),
        }
    }

    /// It lies at the same place, on the same device. What its driver asks for may have changed.
    pub fn is_same_volume(&self, other: &Self) -> bool {
        let pod_dir = Path::new("");
        self.name == other.name && self.path(pod_dir) == other.path(pod_dir) && Device::of(self) == Device::of(other)
    }

    /// Where containers mount it from.
    pub fn path(&self, pod_dir: &Path) -> PathBuf {
        if let Some(places) = self.block_places(Path::new(""), pod_dir) {
            return places.link_dir.join(&self.name);
        }
        match &self.kind {
            PersistentKind::HostPath { path, .. } => path.clone(),
            PersistentKind::Local(_) => pod_dir.join("volumes").join(LOCAL_PLUGIN).join(&self.name),
            PersistentKind::Nfs(_) => pod_dir.join("volumes").join(NFS_PLUGIN).join(&self.name),
            PersistentKind::Iscsi(_) => pod_dir.join("volumes").join(ISCSI_PLUGIN).join(&self.name),
            PersistentKind::Fc(_) => pod_dir.join("volumes").join(FC_PLUGIN).join(&self.name),
            PersistentKind::Flex(volume) => {
                pod_dir.join("volumes").join(flex::dir_name(&volume.driver)).join(&self.name)
            }
            PersistentKind::Csi(_) => pod_dir.join("volumes").join(CSI_PLUGIN).join(&self.name).join("mount"),
        }
    }

    /// Where a block volume's device is shown; `None` for a file system.
    pub fn block_places(&self, root_dir: &Path, pod_dir: &Path) -> Option<BlockPlaces> {
        let (plugin, bound_dir) = match &self.kind {
            PersistentKind::Csi(_) => (CSI_PLUGIN, bound_dir(root_dir, &self.name)),
            PersistentKind::Local(_) => (LOCAL_PLUGIN, local::block_dir(root_dir).join(&self.name)),
            PersistentKind::Iscsi(volume) => (ISCSI_PLUGIN, volume.device(&self.name).block_dir(root_dir)),
            PersistentKind::Fc(volume) => (FC_PLUGIN, fc::block_dir(root_dir).join(volume.device.dir_name())),
            PersistentKind::HostPath { .. } | PersistentKind::Nfs(_) | PersistentKind::Flex(_) => return None,
        };
        let places = BlockPlaces { bound_dir, link_dir: links_dir(pod_dir, plugin) };
        Some(places).filter(|_| self.is_block())
    }

    /// The name of its plugin in metrics.
    pub fn plugin(&self) -> String {
        match &self.kind {
            PersistentKind::HostPath { .. } => "kubernetes.io/host-path".to_owned(),
            PersistentKind::Local(_) => "kubernetes.io/local-volume".to_owned(),
            PersistentKind::Nfs(_) => "kubernetes.io/nfs".to_owned(),
            PersistentKind::Iscsi(_) => "kubernetes.io/iscsi".to_owned(),
            PersistentKind::Fc(_) => "kubernetes.io/fc".to_owned(),
            PersistentKind::Flex(volume) => volume.driver.clone(),
            PersistentKind::Csi(volume) => format!("kubernetes.io/csi:{}", volume.driver),
        }
    }
}

/// The two directories that show a block volume's device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockPlaces {
    /// It is bound there under the UID of each pod that uses it. Upstream: the global map path.
    pub bound_dir: PathBuf,
    /// Of the pod: with a link for containers, by the volume's name. Upstream: the volume map path.
    pub link_dir: PathBuf,
}

/// The directory of a pod's links to the devices of one plugin's volumes.
pub fn links_dir(pod_dir: &Path, plugin: &str) -> PathBuf {
    pod_dir.join(VOLUME_DEVICES).join(plugin)
}

/// The place where a block volume's device is bound for a pod, which drivers are asked about.
pub fn bound_device(root_dir: &Path, name: &str, pod: &PodUid) -> PathBuf {
    bound_dir(root_dir, name).join(pod.as_str())
}

fn bound_dir(root_dir: &Path, name: &str) -> PathBuf {
    root_dir.join("plugins/kubernetes.io/csi").join(VOLUME_DEVICES).join(name).join("dev")
}

/// The volume must be resolved before it can be set up: its spec does not say all.
pub fn is_resolved_first(volume: &Volume) -> bool {
    let is_of_api = volume.persistent_volume_claim.is_some() || volume.ephemeral.is_some() || volume.csi.is_some();
    is_of_api || migration::inline_driver(volume).is_some() || in_tree::is_inline(volume)
}

fn mount_options(volume: &PersistentVolume, spec: &PersistentVolumeSpec) -> Vec<String> {
    let annotation = volume.metadata.annotations.as_ref().and_then(|all| all.get(MOUNT_OPTIONS_ANNOTATION));
    match annotation {
        Some(text) => text.split(',').filter(|option| !option.is_empty()).map(str::to_owned).collect(),
        None => spec.mount_options.clone().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(volume: &Value) -> (Pod, Volume) {
        let metadata = json!({"name": "web", "namespace": "prod", "uid": "pod-1"});
        let volume: Volume = serde_json::from_value(volume.clone()).unwrap();
        (serde_json::from_value(json!({"metadata": metadata, "spec": {"containers": []}})).unwrap(), volume)
    }

    fn claimed(volume: &Value, claim: &Value) -> Result<String, String> {
        let (pod, volume) = pod(volume);
        let claim_ref = ClaimRef::of(&pod, &volume).expect("a claim");
        claim_ref.bound_to(&pod, &serde_json::from_value(claim.clone()).unwrap())
    }

    #[test]
    fn claim_is_named_by_the_volume_or_made_for_the_pod() {
        let of = |volume: Value| {
            let (pod, volume) = pod(&volume);
            ClaimRef::of(&pod, &volume).map(|claim| (claim.name, claim.is_ephemeral, claim.read_only))
        };
        let named = json!({"name": "v", "persistentVolumeClaim": {"claimName": "c", "readOnly": true}});
        assert_eq!(of(named), Some(("c".to_owned(), false, true)));
        let template = json!({"volumeClaimTemplate": {"spec": {}}});
        assert_eq!(of(json!({"name": "v", "ephemeral": template})), Some(("web-v".to_owned(), true, false)));
        assert_eq!(of(json!({"name": "v", "emptyDir": {}})), None);
    }

    #[test]
    fn claim_may_be_used_once_it_is_bound() {
        let named = json!({"name": "v", "persistentVolumeClaim": {"claimName": "c"}});
        let deleted = "2026-11-18T00:00:00Z";
        let claim = |metadata: Value, name: &str, phase: &str| json!({"metadata": metadata, "spec": {"volumeName": name}, "status": {"phase": phase}});
        let error = |text: &str| Err(text.to_owned());
        for (claim, expected) in [
            (claim(json!({}), "pv", "Bound"), Ok("pv".to_owned())),
            (claim(json!({}), "pv", "Pending"), error("PVC is not bound")),
            (claim(json!({}), "", "Bound"), error("PVC has empty pvc.Spec.VolumeName")),
            (claim(json!({"deletionTimestamp": deleted}), "pv", "Bound"), error("PVC is being deleted")),
            (
                claim(json!({"deletionTimestamp": deleted, "finalizers": [PROTECTION_FINALIZER]}), "pv", "Bound"),
                Ok("pv".to_owned()),
            ),
        ] {
            assert_eq!(claimed(&named, &claim), expected, "{claim}");
        }
    }

    #[test]
    fn claim_of_another_owner_is_refused() {
        let ephemeral = json!({"name": "v", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}});
        let owned_by = |uid: &str| {
            let owner = json!([{"apiVersion": "v1", "kind": "Pod", "name": "web", "uid": uid, "controller": true}]);
            json!({"metadata": {"ownerReferences": owner}, "spec": {"volumeName": "pv"}, "status": {"phase": "Bound"}})
        };
        assert_eq!(claimed(&ephemeral, &owned_by("pod-1")), Ok("pv".to_owned()));
        let refused = "PVC prod/web-v was not created for pod prod/web (pod is not owner)";
        assert_eq!(claimed(&ephemeral, &owned_by("pod-2")), Err(refused.to_owned()));
    }

    #[test]
    fn persistent_volume_must_be_bound_to_the_claim_and_of_a_kind_we_know() {
        let claim_ref = ClaimRef {
            namespace: "prod".to_owned(),
            name: "c".to_owned(),
            is_ephemeral: false,
            read_only: true,
            usage: VolumeUsage::default(),
        };
        let claim = serde_json::from_value(json!({"metadata": {"uid": "claim-1"}})).unwrap();
        let source = |spec: Value| {
            let volume = serde_json::from_value(json!({"metadata": {"name": "pv"}, "spec": spec})).unwrap();
            match PersistentSource::of(&claim_ref, &claim, &volume, None) {
                Ok(source) => {
                    let path = source.path(Path::new("/pod"));
                    format!("{} {} {}", source.plugin(), path.display(), source.read_only)
                }
                Err(error) => error,
            }
        };
        let bound = |uid: &str, field: &str, value: Value| {
            let mut spec = json!({"claimRef": {"uid": uid}});
            spec[field] = value;
            spec
        };
        let lines = [
            source(bound("claim-1", "hostPath", json!({"path": "/data"}))),
            source(bound("claim-1", "hostPath", json!({"path": "/data", "type": "Sock"}))),
            source(bound("claim-1", "local", json!({"path": "/disk"}))),
            source(bound("claim-1", "nfs", json!({"server": "s", "path": "/"}))),
            source(bound("claim-2", "local", json!({"path": "/disk"}))),
            source(json!({"local": {"path": "/disk"}})),
            source(json!({"claimRef": {"uid": "claim-1"}, "volumeMode": "Block", "nfs": {"server": "s", "path": "/"}})),
        ];
        insta::assert_snapshot!(lines.join("\n"), @r"
        kubernetes.io/host-path /data true
        hostPath.type Sock is not supported
        kubernetes.io/local-volume /pod/volumes/kubernetes.io~local-volume/pv true
        kubernetes.io/nfs /pod/volumes/kubernetes.io~nfs/pv true
        found PV object pv but its pv.Spec.ClaimRef.UID claim-2 does not point to claim.UID claim-1
        found PV object pv but it has a nil pv.Spec.ClaimRef indicating it is not yet bound to the claim
        PV pv cannot be used as a block volume: its kind has no device
        ");
    }

    #[test]
    fn group_is_applied_if_any_access_mode_is_for_one_node() {
        let (pod, volume) = pod(&json!({"name": "v", "persistentVolumeClaim": {"claimName": "c"}}));
        let claim_ref = ClaimRef::of(&pod, &volume).unwrap();
        let claim = serde_json::from_value(json!({"metadata": {"uid": "claim-1"}})).unwrap();
        let source = |modes: &[&str]| {
            let csi = json!({"driver": "d", "volumeHandle": "h", "fsType": "ext4"});
            let spec = json!({"claimRef": {"uid": "claim-1"}, "csi": csi, "accessModes": modes});
            let volume = serde_json::from_value(json!({"metadata": {"name": "pv"}, "spec": spec})).unwrap();
            let source = PersistentSource::of(&claim_ref, &claim, &volume, None).unwrap();
            let PersistentKind::Csi(volume) = source.kind else { panic!("another kind") };
            (volume.access_mode, volume.is_given_to_group(false))
        };
        for (modes, expected) in [
            (&["ReadWriteOnce"][..], (AccessMode::ReadWriteOnce, true)),
            (&["ReadWriteMany", "ReadWriteOnce"], (AccessMode::ReadWriteMany, true)),
            (&["ReadOnlyMany", "ReadWriteOncePod"], (AccessMode::ReadOnlyMany, true)),
            (&["ReadOnlyMany", "ReadWriteMany"], (AccessMode::ReadOnlyMany, false)),
        ] {
            assert_eq!(source(modes), expected, "{modes:?}");
        }
    }

    #[test]
    fn persistent_volume_of_a_driver_is_mounted_as_upstream_mounts_it() {
        let (pod, volume) = pod(&json!({"name": "v", "persistentVolumeClaim": {"claimName": "c"}}));
        let claim_ref = ClaimRef::of(&pod, &volume).unwrap();
        let claim = serde_json::from_value(json!({"metadata": {"uid": "claim-1"}})).unwrap();
        let annotations = json!({"pv.beta.kubernetes.io/gid": "4711", MOUNT_OPTIONS_ANNOTATION: "sync,ro"});
        let source = |field: &str, value: Value| {
            let mut spec = json!({"claimRef": {"uid": "claim-1"}, "mountOptions": ["noatime"]});
            spec[field] = value;
            let volume = json!({"metadata": {"name": "pv", "annotations": annotations}, "spec": spec});
            PersistentSource::of(&claim_ref, &claim, &serde_json::from_value(volume).unwrap(), None).unwrap()
        };
        let csi = source("csi", json!({"driver": "d", "volumeHandle": "h", "readOnly": true}));
        let PersistentKind::Csi(volume) = &csi.kind else { panic!("another kind") };
        assert_eq!(volume.mount_options, ["noatime"], "not those of the annotation");
        assert!(!csi.read_only, "the pod does not say so");
        assert_eq!(csi.group, Some(4711));
        let nfs = source("nfs", json!({"server": "s", "path": "/"}));
        let PersistentKind::Nfs(volume) = &nfs.kind else { panic!("another kind") };
        assert!(volume.options(false).contains(&"sync".to_owned()), "{volume:?}");
    }

    #[test]
    fn volume_is_the_same_by_name_place_and_device() {
        let source = |name: &str, kind: PersistentKind| PersistentSource {
            name: name.to_owned(),
            read_only: false,
            is_exclusive: false,
            kind,
            size: None,
            group: None,
        };
        let host_path = |path: &str| PersistentKind::HostPath { path: path.into(), must_be: HostPathType::Unchecked };
        let csi = |handle: &str, is_block, attach| {
            let volume = serde_json::from_value(json!({"driver": "d", "volumeHandle": handle})).unwrap();
            let rules = DriverRules { attach, ..DriverRules::of(None) };
            let volume = CsiVolume::persistent(&volume, AccessMode::ReadWriteOnce, rules);
            PersistentKind::Csi(CsiVolume { is_block, ..volume })
        };
        for (one, other, expected) in [
            (source("pv", csi("h", false, true)), source("pv", csi("h", false, false)), true),
            (source("pv", csi("h", false, true)), source("pv2", csi("h", false, true)), false),
            (source("pv", csi("h", false, true)), source("pv", csi("h2", false, true)), false),
            (source("pv", csi("h", false, true)), source("pv", csi("h", true, true)), false),
            (source("pv", csi("h", false, true)), source("pv", host_path("/a")), false),
            (source("pv", host_path("/a")), source("pv", host_path("/b")), false),
        ] {
            assert_eq!(one.is_same_volume(&other), expected, "{one:?} {other:?}");
        }
    }

    #[test]
    fn block_volume_is_a_device_and_no_mount() {
        let volume = |field: &str, value: Value| {
            let mut spec = json!({"volumeMode": "Block", "claimRef": {"uid": "claim-1"}});
            spec[field] = value;
            serde_json::from_value(json!({"metadata": {"name": "pv"}, "spec": spec})).unwrap()
        };
        let claim = serde_json::from_value(json!({"metadata": {"uid": "claim-1"}})).unwrap();
        let source = |container: Value, volume: &PersistentVolume| {
            let named = json!({"name": "v", "persistentVolumeClaim": {"claimName": "c"}});
            let pod = json!({"metadata": {"name": "web"}, "spec": {"containers": [container], "volumes": [named]}});
            let pod: Pod = serde_json::from_value(pod).unwrap();
            assert_eq!(volumes::volumes_to_mount(&pod).len(), 1);
            let claim_ref = ClaimRef::of(&pod, &pod.spec.as_ref().unwrap().volumes.as_ref().unwrap()[0]).unwrap();
            PersistentSource::of(&claim_ref, &claim, volume, None)
        };
        let volumes: [PersistentVolume; 4] = [
            volume("csi", json!({"driver": "d", "volumeHandle": "h"})),
            volume("local", json!({"path": "/dev/sda"})),
            volume("iscsi", json!({"targetPortal": "10.0.0.1", "iqn": "iqn.2001-04.com.example:a", "lun": 0})),
            volume("fc", json!({"targetWWNs": ["50060e801049cfd1"], "lun": 2})),
        ];
        let lines = volumes.each_ref().map(|volume| {
            let container = json!({"name": "c", "volumeDevices": [{"name": "v", "devicePath": "/dev/x"}]});
            let device = source(container, volume).unwrap();
            assert!(device.is_block());
            let places = device.block_places(Path::new("/r"), Path::new("/pod")).unwrap();
            format!("{} {}", places.bound_dir.display(), device.path(Path::new("/pod")).display())
        });
        insta::assert_snapshot!(lines.join("\n"), @r"
        /r/plugins/kubernetes.io/csi/volumeDevices/pv/dev /pod/volumeDevices/kubernetes.io~csi/pv
        /r/plugins/kubernetes.io~local-volume/volumeDevices/pv /pod/volumeDevices/kubernetes.io~local-volume/pv
        /r/plugins/kubernetes.io/iscsi/volumeDevices/iface-default/10.0.0.1:3260-iqn.2001-04.com.example:a-lun-0 /pod/volumeDevices/kubernetes.io~iscsi/pv
        /r/plugins/kubernetes.io/fc/volumeDevices/50060e801049cfd1-lun-2 /pod/volumeDevices/kubernetes.io~fc/pv
        ");
        let mounted = source(json!({"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/x"}]}), &volumes[1]);
        assert_eq!(mounted, Err("volume v has volumeMode Block, but is specified in volumeMounts".to_owned()));
    }
}
