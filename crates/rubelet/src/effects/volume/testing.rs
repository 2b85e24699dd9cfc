//! A CSI driver that keeps what it was asked for, and a node on which it is registered.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::Path,
    sync::{Arc, Mutex},
};

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Pod;
use rubelet_core::{
    effect::{EffectError, Facts},
    id::PodUid,
    op::VolumeOp,
    volumes::{
        claims::{PersistentKind, PersistentSource},
        csi::{AccessMode, CsiVolume, DriverRules},
        devices::DeviceOptions,
    },
};
use rubelet_csi::{
    AccessType, CsiError, CsiPlugins, CsiResult, DriverAddress, Drivers, ExpandVolume, NodeCapabilities, NodeInfo,
    PublishVolume, StageVolume, VolumeAccess, VolumeStats, pluginregistration::PluginInfo,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{perform, set_up_volume};
use crate::{
    effects::directories::{make_pod_dirs, tests::pod_ref},
    world::{World, testing::world_in},
};

pub(super) const UID: &str = "0001";

/// Publishes directories, or files in place of devices.
#[derive(Debug, Default)]
pub(super) struct FakeDriver {
    capabilities: NodeCapabilities,
    /// It mounts where the node does not see it, and leaves directories alone.
    is_elsewhere: bool,
    pub stage_error: Mutex<Option<CsiError>>,
    /// Before it has made anything.
    pub publish_error: Mutex<Option<CsiError>>,
    calls: Mutex<Vec<String>>,
}

impl FakeDriver {
    pub(super) fn able_to(capabilities: NodeCapabilities) -> Self {
        FakeDriver { capabilities, ..FakeDriver::default() }
    }

    pub(super) fn elsewhere() -> Self {
        FakeDriver { is_elsewhere: true, ..FakeDriver::default() }
    }

    fn called(&self, method: &str, handle: &str, access: Option<&VolumeAccess>) {
        let detail = match access.map(|access| &access.access_type) {
            None => String::new(),
            Some(AccessType::Block) => " as device".to_owned(),
            Some(AccessType::Mount { mount_flags, volume_mount_group, .. }) => {
                let group = volume_mount_group.map_or_else(|| "-".to_owned(), |group| group.to_string());
                format!(" group {group} flags [{}]", mount_flags.join(","))
            }
        };
        self.calls.lock().unwrap().push(format!("{method} {handle}{detail}"));
    }
}

#[async_trait]
impl CsiPlugins for FakeDriver {
    async fn plugin_info(&self, _: &Path) -> CsiResult<PluginInfo> {
        panic!("it is registered already")
    }

    async fn notify_registration(&self, _: &Path, _: Result<(), String>) -> CsiResult<()> {
        panic!("it is registered already")
    }

    async fn node_info(&self, _: &DriverAddress) -> CsiResult<NodeInfo> {
        panic!("it is registered already")
    }

    async fn capabilities(&self, _: &DriverAddress) -> CsiResult<NodeCapabilities> {
        Ok(self.capabilities)
    }

    async fn stage(&self, _: &DriverAddress, volume: StageVolume) -> CsiResult<()> {
        self.called("stage", &volume.handle, Some(&volume.access));
        self.stage_error.lock().unwrap().clone().map_or(Ok(()), Err)
    }

    async fn unstage(&self, _: &DriverAddress, handle: &str, _: &Path) -> CsiResult<()> {
        self.called("unstage", handle, None);
        Ok(())
    }

    async fn publish(&self, _: &DriverAddress, volume: PublishVolume) -> CsiResult<()> {
        self.called("publish", &volume.handle, Some(&volume.access));
        if let Some(error) = self.publish_error.lock().unwrap().clone() {
            return Err(error);
        }
        match volume.access.access_type {
            AccessType::Block => fs::write(&volume.target_path, "").unwrap(),
            AccessType::Mount { .. } => fs::create_dir_all(&volume.target_path).unwrap(),
        }
        Ok(())
    }

    async fn unpublish(&self, _: &DriverAddress, handle: &str, target: &Path) -> CsiResult<()> {
        self.called("unpublish", handle, None);
        if !self.is_elsewhere {
            let _ = fs::remove_dir_all(target).or_else(|_| fs::remove_file(target));
        }
        Ok(())
    }

    async fn stats(&self, _: &DriverAddress, _: &str, _: &Path, _: Option<&Path>) -> CsiResult<VolumeStats> {
        panic!("nothing here measures")
    }

    async fn expand(&self, _: &DriverAddress, _: ExpandVolume) -> CsiResult<Option<i64>> {
        panic!("nothing here grows")
    }
}

/// A node with the driver `d`.
pub(super) struct Fixture {
    dir: TempDir,
    pub world: World,
    pub driver: Arc<FakeDriver>,
}

impl Fixture {
    pub(super) async fn with(driver: FakeDriver) -> Self {
        let (dir, driver) = (TempDir::new().unwrap(), Arc::new(driver));
        let csi = Drivers::over(driver.clone());
        csi.register("d", "/d.sock".into());
        let world = World { csi, ..world_in(dir.path()) };
        make_pod_dirs(&world, &pod_ref(UID)).await.unwrap();
        Fixture { dir, world, driver }
    }

    pub(super) async fn stage(&self, source: &PersistentSource, options: DeviceOptions) -> Result<Facts, EffectError> {
        perform(&self.world, &VolumeOp::Stage { source: Arc::new(source.clone()), options }).await
    }

    pub(super) async fn set_up(&self, pod: &Pod, source: &PersistentSource) -> Result<Facts, EffectError> {
        set_up_volume(&self.world, pod, &PodUid::new(UID), "v", Some(source)).await
    }

    pub(super) fn calls(&self) -> Vec<String> {
        self.driver.calls.lock().unwrap().clone()
    }

    /// Of what the pod sees.
    pub(super) fn group_of(&self, source: &PersistentSource) -> Option<u32> {
        assert!(self.dir.path().exists());
        let place = source.path(&self.world.paths.pod_dir(&PodUid::new(UID)));
        fs::metadata(place).ok().map(|found| found.gid())
    }
}

/// The persistent volume `pv` with handle `h`, which is not attached.
pub(super) fn csi_source(more: &Value, is_block: bool) -> PersistentSource {
    let mut source = json!({"driver": "d", "volumeHandle": "h"});
    source.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let rules = DriverRules { attach: false, ..DriverRules::of(None) };
    let volume = CsiVolume::persistent(&serde_json::from_value(source).unwrap(), AccessMode::ReadWriteOnce, rules);
    let kind = PersistentKind::Csi(CsiVolume { is_block, ..volume });
    PersistentSource { name: "pv".to_owned(), read_only: false, is_exclusive: false, kind, size: None, group: None }
}

/// A pod with the volume `v`.
pub(super) fn pod_on(spec: &Value) -> Pod {
    let container = json!({"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/v"}]});
    let volume = json!({"name": "v", "persistentVolumeClaim": {"claimName": "c"}});
    let mut own = json!({"containers": [container], "volumes": [volume]});
    own.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    serde_json::from_value(json!({"metadata": {"name": "web", "namespace": "prod", "uid": UID}, "spec": own})).unwrap()
}
