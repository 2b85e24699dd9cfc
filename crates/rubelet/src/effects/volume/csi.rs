//! CSI volumes: the calls to their drivers, and the files that say what was asked of them.
//!
//! Owns: stage and publish with what each needs (attachment, secrets, the pod's names), unpublish and unstage from
//! `vol_data.json`, which is written before the first call, so that what a driver did is undone whoever asks. A driver's error
//! after which nothing can be mounted removes the file again. Never: unmounts anything itself.
//! Upstream: `pkg/volume/csi` (`csi_attacher.go`, `csi_mounter.go`, `csi_block.go`).

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use k8s_openapi::api::core::v1::Pod;
use rubelet_core::{
    effect::{EffectError, ErrorKind, Facts},
    id::{PodUid, namespace_of},
    needs::Needs,
    volumes::{
        self,
        claims::{CSI_PLUGIN, PersistentSource},
        csi::{AccessMode, CsiLifecycle, CsiVolume, SecretName},
        devices::{CsiDevice, DeviceOptions},
        files::Token,
    },
};
use rubelet_csi::{
    AccessMode as CsiAccessMode, AccessType, Client, CsiError, NodeCapabilities, PublishVolume, Secrets, StageVolume,
    VolumeAccess,
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest, Sha256};

use super::{DIR_MODE, VolumePod, attachment, block, data_file, make_dir, mounting, persistent};
use crate::{
    effects::{failure, status},
    world::World,
};

/// `vol_data.json` beside the mount, with upstream's fields.
const DATA_FILE: &str = "vol_data.json";
const STAGING: &str = "globalmount";
const MOUNT: &str = "mount";
const TOKENS_KEY: &str = "csi.storage.k8s.io/serviceAccount.tokens";

/// What `vol_data.json` says. Upstream reads and writes the same fields.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct VolumeData {
    pub driver_name: String,
    pub volume_handle: String,
    #[serde(rename = "specVolID", skip_serializing_if = "Option::is_none")]
    spec_vol_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_name: Option<String>,
    #[serde(rename = "attachmentID", skip_serializing_if = "Option::is_none")]
    attachment_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    volume_lifecycle_mode: Option<String>,
    /// The SELinux label that it is mounted with.
    #[serde(rename = "seLinuxMountContext", skip_serializing_if = "Option::is_none")]
    pub selinux_mount_context: Option<String>,
}

/// The handle of an inline volume.
pub(super) fn inline_handle(pod: &PodUid, volume: &str) -> String {
    format!("csi-{}", sha256_hex(&[pod.as_str(), volume]))
}

pub(super) fn sha256_hex(parts: &[&str]) -> String {
    let mut digest = Sha256::new();
    parts.iter().for_each(|part| digest.update(part.as_bytes()));
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Where a device lies on disk.
#[derive(Debug)]
pub(super) struct DevicePlace {
    pub staging: PathBuf,
    /// The directory of its `vol_data.json`.
    data: PathBuf,
    /// The directory of its name, if it is a block device: it holds nothing but ours.
    block: Option<PathBuf>,
}

impl DevicePlace {
    /// Removes what is left of it. The data file goes last, until then the driver is asked again.
    async fn remove(&self, world: &World) -> Result<(), EffectError> {
        match &self.block {
            Some(own) => {
                let publish = block::devices_dir(world).join("publish").join(own.file_name().unwrap_or_default());
                remove_trees(world, &[self.staging.clone(), publish, own.clone()]).await
            }
            None => remove(world, &self.staging, &self.data).await,
        }
    }
}

pub(super) fn device_place(world: &World, device: &CsiDevice) -> Result<DevicePlace, EffectError> {
    if let Some(name) = &device.block {
        let (devices, name) = (block::devices_dir(world), super::component(name)?);
        let (own, staging) = (devices.join(name), devices.join("staging").join(name));
        return Ok(DevicePlace { staging, data: own.join("data"), block: Some(own) });
    }
    let driver = super::component(&device.driver)?;
    let data = devices_dir(world).join(driver).join(sha256_hex(&[&device.handle]));
    Ok(DevicePlace { staging: data.join(STAGING), data, block: None })
}

pub(super) fn devices_dir(world: &World) -> PathBuf {
    world.paths.root_dir.join("plugins/kubernetes.io/csi")
}

pub(super) async fn stage(
    world: &World,
    source: &PersistentSource,
    volume: &CsiVolume,
    options: &DeviceOptions,
    publish_context: BTreeMap<String, String>,
) -> Result<Facts, EffectError> {
    let device = CsiDevice::of(source).ok_or_else(|| failure::refused("the volume has no device".to_owned()))?;
    let place = device_place(world, &device)?;
    let (staging_path, data_dir) = (place.staging.clone(), place.data.clone());
    let client = client(world, &volume.driver)?;
    let capabilities = capabilities(&client).await?;
    let stage_secret = volume.stage_secret.as_ref().filter(|_| capabilities.stage_unstage);
    let secrets = secrets(world, stage_secret).await?;
    // The file goes first: what has none was never staged.
    let data = device_data(world, source, volume);
    make_dir(world, &world.paths.root_dir, &data_dir, DIR_MODE).await?;
    let was_staged = read_data(world, &data_dir).await?.is_some();
    data_file::write(world, &data_dir, DATA_FILE, &data).await?;
    make_dir(world, &world.paths.root_dir, &staging_path, DIR_MODE).await?;
    if !capabilities.stage_unstage {
        return Ok(Facts::Nothing);
    }
    let access = access(volume, &capabilities, options.group);
    let (handle, volume_context) = (volume.handle.clone(), volume.attributes.clone());
    let request =
        StageVolume { handle, staging_path: staging_path.clone(), access, publish_context, volume_context, secrets };
    match client.stage(request).await {
        Ok(()) => Ok(Facts::Nothing),
        Err(error) => {
            // What was staged before stays: pods may be using it. The driver's error counts more than one here.
            if !error.is_uncertain() && !was_staged {
                logged(&staging_path, place.remove(world).await);
            }
            Err(answered(&error))
        }
    }
}

/// What a look finds a device by. Upstream reads the other fields of a block volume here too: it finds the volume's directories by
/// `specVolID`.
fn device_data(world: &World, source: &PersistentSource, volume: &CsiVolume) -> VolumeData {
    let node = &world.settings.node_name;
    let block = volume.is_block.then(|| attachment::name(&volume.handle, &volume.driver, node));
    VolumeData {
        driver_name: volume.driver.clone(),
        volume_handle: volume.handle.clone(),
        spec_vol_id: block.as_ref().map(|_| source.name.clone()),
        node_name: block.as_ref().map(|_| node.clone()),
        attachment_id: block,
        volume_lifecycle_mode: None,
        selinux_mount_context: volume.mount_context().map(str::to_owned),
    }
}

pub(super) async fn unstage(world: &World, device: &CsiDevice) -> Result<Facts, EffectError> {
    let place = device_place(world, device)?;
    let client = client(world, &device.driver)?;
    mounting::check_references(world, &place.staging).await?;
    if capabilities(&client).await?.stage_unstage {
        let done = client.unstage(&device.handle, &place.staging).await;
        done.map_err(|error| called("attacher.UnmountDevice failed", &error))?;
    }
    place.remove(world).await?;
    Ok(Facts::Nothing)
}

pub(super) async fn publish(
    world: &World,
    owner: &VolumePod<'_>,
    source: &PersistentSource,
    volume: &CsiVolume,
) -> Result<(), EffectError> {
    let dir = owner.dir.join("volumes").join(CSI_PLUGIN).join(super::component(&source.name)?);
    let target_path = dir.join(MOUNT);
    let client = client(world, &volume.driver)?;
    let capabilities = capabilities(&client).await?;
    let request = publish_request(world, owner, source, (volume, &capabilities), &target_path).await?;
    let was_published = has_mounts(world, &target_path).await?;
    make_dir(world, &world.paths.pods_dir(), &dir, DIR_MODE).await?;
    let node = &world.settings.node_name;
    let data = VolumeData {
        driver_name: volume.driver.clone(),
        volume_handle: volume.handle.clone(),
        spec_vol_id: Some(source.name.clone()),
        node_name: Some(node.clone()),
        attachment_id: Some(attachment::name(&volume.handle, &volume.driver, node)),
        volume_lifecycle_mode: Some(volume.lifecycle.as_str().to_owned()),
        selinux_mount_context: volume.mount_context().map(str::to_owned),
    };
    data_file::write(world, &dir, DATA_FILE, &data).await?;
    if let Err(error) = client.publish(request).await {
        // What containers may be using stays.
        if !error.is_uncertain() && !was_published {
            logged(&dir, remove(world, &target_path, &dir).await);
        }
        return Err(answered(&error));
    }
    if volume.is_given_to_group(capabilities.volume_mount_group) && !source.read_only {
        persistent::share(world, owner.pod, source, &target_path).await?;
    }
    Ok(())
}

/// All that the driver is told of a volume and of its pod.
pub(super) async fn publish_request(
    world: &World,
    owner: &VolumePod<'_>,
    source: &PersistentSource,
    (volume, capabilities): (&CsiVolume, &NodeCapabilities),
    target_path: &Path,
) -> Result<PublishVolume, EffectError> {
    let publish_context = attachment::publish_context(world, source, volume).await?;
    let mut secrets = secrets(world, volume.publish_secret.as_ref()).await?;
    let mut volume_context = volume_context(owner, volume);
    if let Some(tokens) = tokens(world, owner, volume).await? {
        let name = TOKENS_KEY.to_owned();
        if volume.rules.tokens_are_secret {
            secrets.insert(name, tokens);
        } else {
            volume_context.insert(name, tokens);
        }
    }
    let staging_path = match CsiDevice::of(source).filter(|_| capabilities.stage_unstage) {
        Some(device) => Some(device_place(world, &device)?.staging),
        None => None,
    };
    let group = owner.pod.spec.as_ref().and_then(volumes::fs_group);
    Ok(PublishVolume {
        handle: volume.handle.clone(),
        staging_path,
        target_path: target_path.to_owned(),
        access: access(volume, capabilities, group),
        read_only: source.read_only,
        publish_context,
        volume_context,
        secrets,
    })
}

/// Undoes what was published into the volume's directory, by the driver that did it. A mount that stays is an error.
pub(super) async fn unpublish(world: &World, dir: &Path) -> Result<(), EffectError> {
    let target = dir.join(MOUNT);
    let Some(data) = read_data(world, dir).await? else {
        // Its call was never made: the file is written first, and removed last.
        let removed = remove(world, &target, dir).await;
        world.metrics.storage.force_cleaned(removed.is_ok());
        return removed;
    };
    let client = client(world, &data.driver_name)?;
    let done = client.unpublish(&data.volume_handle, &target).await;
    done.map_err(|error| called("Unmounter.TearDownAt failed", &error))?;
    remove(world, &target, dir).await
}

/// Removes the place of a mount, then the directory with the data file. Files that the mount did not show, because a driver
/// mounted nothing or elsewhere, are a user's: they stay, and are an error.
async fn remove(world: &World, target: &Path, dir: &Path) -> Result<(), EffectError> {
    check_unmounted(world, dir).await?;
    super::remove_dir(world, target, &[]).await?;
    super::remove_dir(world, dir, &[DATA_FILE]).await
}

/// Removes directories that no call was made for. One that a call is just being prepared for stays once it has its file; before,
/// the file cannot be written, and the call is prepared again.
pub(super) async fn remove_unused(world: &World, dir: &Path) {
    if logged(dir, check_unmounted(world, dir).await) {
        for dir in [&dir.join(STAGING), &dir.join("data"), dir] {
            // What is not empty is no concern here: the next look sees what became of it.
            let _ = super::remove_dir(world, dir, &[]).await;
        }
    }
}

fn logged(place: &Path, done: Result<(), EffectError>) -> bool {
    done.inspect_err(
        |error| tracing::warn!(place = %place.display(), error = %error, "failed to remove a volume's directory"),
    )
    .is_ok()
}

/// Removes trees in this order, once nothing is mounted in any of them.
async fn remove_trees(world: &World, trees: &[PathBuf]) -> Result<(), EffectError> {
    for tree in trees {
        check_unmounted(world, tree).await?;
    }
    for tree in trees {
        world.host.remove_tree(tree).await.map_err(|error| failure::io("remove", tree, &error))?;
    }
    Ok(())
}

async fn check_unmounted(world: &World, tree: &Path) -> Result<(), EffectError> {
    if has_mounts(world, tree).await? {
        let message = format!("kubernetes.io/csi: {} is still mounted", tree.display());
        return Err(failure::retryable(message));
    }
    Ok(())
}

/// At the path or below it.
pub(super) async fn has_mounts(world: &World, path: &Path) -> Result<bool, EffectError> {
    let mounts = world.host.mounts_below(path).await;
    mounts.map(|mounts| !mounts.is_empty()).map_err(|error| failure::io("look for mounts below", path, &error))
}

/// Tokens of the pod's service account by audience, as JSON; `None` if the driver wants none.
async fn tokens(world: &World, owner: &VolumePod<'_>, volume: &CsiVolume) -> Result<Option<String>, EffectError> {
    let wanted = volume.tokens(owner.pod);
    if wanted.is_empty() {
        return Ok(None);
    }
    let failed = |why: String| {
        failure::retryable(format!(
            "kubernetes.io/csi: mounter.SetUpAt failed to get service accoount token attributes: {why}"
        ))
    };
    let cluster = world.cluster.as_ref().ok_or_else(|| failed("there is no API server".to_owned()))?;
    let needs = Needs { tokens: wanted.iter().map(|(_, key)| key.clone()).collect(), ..Needs::default() };
    let mut gathered = cluster.objects.gather_for_volume(owner.uid, needs).await;
    let mut by_audience = BTreeMap::new();
    for (audience, key) in wanted {
        let token = gathered.tokens.remove(&key).unwrap_or_else(|| Err("the token was not gathered".to_owned()));
        let Token { token, expires_at } = token.map_err(failed)?;
        by_audience.insert(audience, json!({"token": token, "expirationTimestamp": expires_at}));
    }
    Ok(Some(json!(by_audience).to_string()))
}

pub(super) fn client(world: &World, driver: &str) -> Result<Client, EffectError> {
    world.csi.client(driver).map_err(|error| EffectError {
        kind: ErrorKind::MissingObject,
        message: format!("kubernetes.io/csi: failed to get CSI client: {error}"),
    })
}

pub(super) async fn capabilities(client: &Client) -> Result<NodeCapabilities, EffectError> {
    client.capabilities().await.map_err(|error| called("failed to get the driver's capabilities", &error))
}

/// A driver's answer to a call that makes something, alone as upstream shows it.
pub(super) fn answered(error: &CsiError) -> EffectError {
    let kind = match error.code {
        Some(_) if error.is_uncertain() => ErrorKind::Uncertain,
        Some(_) => ErrorKind::FailedByDriver,
        None => ErrorKind::Retry,
    };
    EffectError { kind, message: error.to_string() }
}

pub(super) fn called(what: &str, error: &CsiError) -> EffectError {
    let error = answered(error);
    EffectError { message: format!("kubernetes.io/csi: {what}: {error}"), ..error }
}

/// `group`: the pod's fsGroup, which the driver is told if it applies it itself.
pub(super) fn access(volume: &CsiVolume, capabilities: &NodeCapabilities, group: Option<u32>) -> VolumeAccess {
    let single = capabilities.single_node_multi_writer;
    let mode = match volume.access_mode {
        AccessMode::ReadWriteOnce if single => CsiAccessMode::SingleNodeMultiWriter,
        AccessMode::ReadWriteOncePod if single => CsiAccessMode::SingleNodeSingleWriter,
        AccessMode::ReadWriteOnce | AccessMode::ReadWriteOncePod => CsiAccessMode::SingleNodeWriter,
        AccessMode::ReadOnlyMany => CsiAccessMode::MultiNodeReaderOnly,
        AccessMode::ReadWriteMany => CsiAccessMode::MultiNodeMultiWriter,
    };
    if volume.is_block {
        return VolumeAccess { mode, access_type: AccessType::Block };
    }
    let (fs_type, mut mount_flags) = (volume.fs_type.clone(), volume.mount_options.clone());
    // Quoted, as it may have commas.
    mount_flags.extend(volume.mount_context().map(|context| format!("context={context:?}")));
    let volume_mount_group = group.filter(|_| capabilities.volume_mount_group).map(i64::from);
    VolumeAccess { mode, access_type: AccessType::Mount { fs_type, mount_flags, volume_mount_group } }
}

/// The volume's attributes, and the pod where the driver wants to know it.
fn volume_context(owner: &VolumePod<'_>, volume: &CsiVolume) -> BTreeMap<String, String> {
    let mut context = volume.attributes.clone();
    if volume.rules.pod_info {
        let Pod { metadata, spec, .. } = owner.pod;
        let account = spec.as_ref().and_then(|spec| spec.service_account_name.clone()).unwrap_or_default();
        let is_ephemeral = volume.lifecycle == CsiLifecycle::Ephemeral;
        for (key, value) in [
            ("pod.name", metadata.name.clone().unwrap_or_default()),
            ("pod.namespace", namespace_of(owner.pod).to_owned()),
            ("pod.uid", owner.uid.to_string()),
            ("serviceAccount.name", account),
            ("ephemeral", is_ephemeral.to_string()),
        ] {
            context.insert(format!("csi.storage.k8s.io/{key}"), value);
        }
    }
    context
}

pub(super) async fn secrets(world: &World, name: Option<&SecretName>) -> Result<Secrets, EffectError> {
    secret_texts(world, name).await.map(Secrets::new)
}

/// The values of a secret by their keys; nothing without a secret.
pub(super) async fn secret_texts(
    world: &World,
    name: Option<&SecretName>,
) -> Result<BTreeMap<String, String>, EffectError> {
    let Some(secret @ SecretName { namespace, name }) = name else { return Ok(BTreeMap::new()) };
    let failed = |error: &dyn std::fmt::Display| {
        failure::retryable(format!("fetching secret {namespace}/{name} failed: {error}"))
    };
    let secret = status::get_secret(world, secret).await.map_err(|error| failed(&error))?;
    let data = secret.data.unwrap_or_default().into_iter();
    let data = data.map(|(key, value)| match String::from_utf8(value.0) {
        Ok(text) => Ok((key, text)),
        Err(_) => Err(failed(&format_args!("the value of {key:?} is no text"))),
    });
    data.collect()
}

/// `None` if there is none, or one that was lost in a power cut: then nothing is mounted any more either, and a driver that
/// staged something has lost it.
pub(super) async fn read_data(world: &World, dir: &Path) -> Result<Option<VolumeData>, EffectError> {
    data_file::read(world, dir, DATA_FILE).await
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt, symlink},
    };

    use rubelet_csi::Code;

    use super::*;
    use crate::effects::{
        directories::tests::pod_ref,
        volume::{
            list_devices, tear_down_volumes,
            testing::{FakeDriver, Fixture, UID, csi_source, pod_on},
        },
    };

    fn stages() -> NodeCapabilities {
        NodeCapabilities { stage_unstage: true, ..NodeCapabilities::default() }
    }

    #[tokio::test]
    async fn driver_that_applies_the_group_is_told_it_at_staging_too() {
        let applies = NodeCapabilities { stage_unstage: true, volume_mount_group: true, ..Default::default() };
        let leaves_it = NodeCapabilities { volume_mount_group: false, ..applies };
        for (capabilities, group) in [(applies, "4321"), (leaves_it, "-")] {
            let fixture = Fixture::with(FakeDriver::able_to(capabilities)).await;
            let source = csi_source(&json!({"fsType": "ext4"}), false);
            let pod = pod_on(&json!({"securityContext": {"fsGroup": 4321}}));
            fixture.stage(&source, DeviceOptions { group: Some(4321) }).await.unwrap();
            fixture.set_up(&pod, &source).await.unwrap();
            let calls = [format!("stage h group {group} flags []"), format!("publish h group {group} flags []")];
            assert_eq!(fixture.calls(), calls);
            let owner = fixture.group_of(&source);
            assert_eq!(owner == Some(4321), group == "-", "either the driver or the agent applies it: {owner:?}");
        }
    }

    #[tokio::test]
    async fn driver_is_told_the_label_and_a_look_finds_it_again() {
        let fixture = Fixture::with(FakeDriver::able_to(stages())).await;
        let label = Some("u:object_r:container_file_t:s0:c1,c2".to_owned());
        let source = csi_source(&json!({}), false).with_label(label.clone(), true);
        fixture.stage(&source, DeviceOptions::default()).await.unwrap();
        fixture.set_up(&pod_on(&json!({})), &source).await.unwrap();
        let flags = r#"flags [context="u:object_r:container_file_t:s0:c1,c2"]"#;
        let calls = [format!("stage h group - {flags}"), format!("publish h group - {flags}")];
        assert_eq!(fixture.calls(), calls);
        let Facts::Devices(found) = list_devices(&fixture.world).await.unwrap() else { panic!("no devices") };
        assert_eq!(found.iter().map(|device| device.context.clone()).collect::<Vec<_>>(), [label]);
    }

    #[tokio::test]
    async fn data_file_of_a_device_is_what_upstream_reads() {
        for (is_block, fields) in [
            (false, vec!["driverName", "volumeHandle"]),
            (true, vec!["attachmentID", "driverName", "nodeName", "specVolID", "volumeHandle"]),
        ] {
            let fixture = Fixture::with(FakeDriver::able_to(stages())).await;
            let source = csi_source(&json!({}), is_block);
            fixture.stage(&source, DeviceOptions::default()).await.unwrap();
            let place = device_place(&fixture.world, &CsiDevice::of(&source).unwrap()).unwrap();
            let data: serde_json::Value =
                serde_json::from_slice(&fs::read(place.data.join(DATA_FILE)).unwrap()).unwrap();
            assert_eq!(data.as_object().unwrap().keys().collect::<Vec<_>>(), fields);
            // Without the name upstream's agent takes the directories of all block volumes for this one's.
            assert!(!is_block || data["specVolID"] == "pv", "{data}");
        }
    }

    async fn devices_in(fixture: &Fixture) -> usize {
        let Facts::Devices(found) = list_devices(&fixture.world).await.unwrap() else { panic!("no devices") };
        found.len()
    }

    #[tokio::test]
    async fn device_that_pods_may_be_using_survives_a_failed_call() {
        let fixture = Fixture::with(FakeDriver::able_to(stages())).await;
        let source = csi_source(&json!({}), false);
        let refuse = |code| {
            let refusal = CsiError { code: Some(code), message: "no backend".to_owned() };
            *fixture.driver.stage_error.lock().unwrap() = Some(refusal);
        };
        refuse(Code::Internal);
        let error = fixture.stage(&source, DeviceOptions::default()).await.unwrap_err();
        let words = "MountVolume.MountDevice failed for volume \"pv\" : rpc error: code = Internal";
        assert!(error.message.starts_with(words), "{error}");
        assert_eq!(devices_in(&fixture).await, 0, "the first call left nothing");
        *fixture.driver.stage_error.lock().unwrap() = None;
        fixture.stage(&source, DeviceOptions::default()).await.unwrap();
        let place = device_place(&fixture.world, &CsiDevice::of(&source).unwrap()).unwrap();
        fs::write(place.staging.join("of-the-driver"), "kept").unwrap();
        refuse(Code::Internal);
        fixture.stage(&source, DeviceOptions::default()).await.unwrap_err();
        assert!(place.staging.join("of-the-driver").exists());
        assert_eq!(devices_in(&fixture).await, 1);
    }

    /// A first call that fails with this code: the error, and which directories are left of the device and of the volume.
    async fn left_after(code: Code, is_block: bool) -> [(EffectError, bool); 2] {
        let fixture = Fixture::with(FakeDriver::able_to(stages())).await;
        let world = &fixture.world;
        let (source, pod) = (csi_source(&json!({}), is_block), pod_on(&json!({})));
        let device = device_place(world, &CsiDevice::of(&source).unwrap()).unwrap();
        let refuse = || Some(CsiError::new(code, "no backend"));
        *fixture.driver.stage_error.lock().unwrap() = refuse();
        let stage_error = fixture.stage(&source, DeviceOptions::default()).await.unwrap_err();
        let is_device_left = device.staging.exists();
        assert_eq!(device.data.join(DATA_FILE).exists(), is_device_left, "{code:?}");
        *fixture.driver.stage_error.lock().unwrap() = None;
        fixture.stage(&source, DeviceOptions::default()).await.unwrap();
        *fixture.driver.publish_error.lock().unwrap() = refuse();
        let publish_error = fixture.set_up(&pod, &source).await.unwrap_err();
        let left = match is_block {
            // The link, by which the end of the pod finds it.
            true => fs::symlink_metadata(source.path(&world.paths.pod_dir(&PodUid::new(UID)))).is_ok(),
            false => source.path(&world.paths.pod_dir(&PodUid::new(UID))).with_file_name(DATA_FILE).exists(),
        };
        assert_eq!(devices_in(&fixture).await, 1, "what was staged stays");
        // What stays is undone by the driver.
        tear_down_volumes(world, &pod_ref(UID)).await.unwrap();
        let is_undone = fixture.calls().last().unwrap() == "unpublish h";
        assert_eq!(is_undone, left, "{code:?}");
        [(stage_error, is_device_left), (publish_error, left)]
    }

    #[tokio::test]
    async fn directories_stay_after_a_call_whose_outcome_is_open_and_go_after_a_refusal() {
        let open = [Code::Canceled, Code::DeadlineExceeded, Code::Unavailable, Code::ResourceExhausted, Code::Aborted];
        let refused = [Code::Unknown, Code::InvalidArgument, Code::NotFound, Code::FailedPrecondition, Code::Internal];
        for (codes, kind, is_left) in [(open, ErrorKind::Uncertain, true), (refused, ErrorKind::FailedByDriver, false)]
        {
            for code in codes {
                for (error, left) in left_after(code, false).await {
                    assert_eq!((error.kind, left), (kind.clone(), is_left), "{code:?}");
                }
                // Of a device the link stays until the end of the pod.
                let [(_, left), (error, link_left)] = left_after(code, true).await;
                assert_eq!((error.kind, left, link_left), (kind.clone(), is_left, true), "{code:?} of a device");
            }
        }
    }

    #[tokio::test]
    async fn link_in_place_of_the_data_file_or_the_mount_leads_nowhere() {
        let fixture = Fixture::with(FakeDriver::elsewhere()).await;
        let world = &fixture.world;
        let outside = world.paths.root_dir.join("../outside");
        fs::create_dir(&outside).unwrap();
        let victim = json!({"driverName": "d", "volumeHandle": "victim"}).to_string();
        fs::write(outside.join(DATA_FILE), &victim).unwrap();
        let (source, pod) =
            (csi_source(&json!({"fsType": "ext4"}), false), pod_on(&json!({"securityContext": {"fsGroup": 4321}})));
        let target = source.path(&world.paths.pod_dir(&PodUid::new(UID)));
        fixture.set_up(&pod, &source).await.unwrap();
        let file = target.with_file_name(DATA_FILE);
        let device = devices_dir(world).join("d/link");
        fs::create_dir_all(&device).unwrap();
        let links = [file.clone(), device.join(DATA_FILE)];
        for link in &links {
            let _ = fs::remove_file(link);
            symlink(outside.join(DATA_FILE), link).unwrap();
        }
        for link in &links {
            let error = read_data(world, link.parent().unwrap()).await.unwrap_err();
            assert!(error.message.contains("vol_data.json: Too many levels of symbolic links"), "{error}");
        }
        let error = list_devices(world).await.unwrap_err();
        assert!(error.message.contains("d/link/vol_data.json: Too many levels"), "{error}");
        let error = tear_down_volumes(world, &pod_ref(UID)).await.unwrap_err();
        assert!(error.message.contains("vol_data.json: Too many levels"), "{error}");
        // The next setup replaces the link.
        fixture.set_up(&pod, &source).await.unwrap();
        assert!(fs::symlink_metadata(&file).unwrap().is_file());
        fs::remove_dir(&target).unwrap();
        symlink(&outside, &target).unwrap();
        let error = fixture.set_up(&pod, &source).await.unwrap_err();
        assert!(error.message.contains("give to the pod's group"), "{error}");
        let error = tear_down_volumes(world, &pod_ref(UID)).await.unwrap_err();
        assert!(error.message.contains("/mount: Not a directory"), "{error}");
        assert_eq!(fixture.calls().iter().filter(|call| call.contains("victim")).count(), 0);
        assert_eq!(fs::read_to_string(outside.join(DATA_FILE)).unwrap(), victim);
        assert_eq!((fs::metadata(&outside).unwrap().gid(), fs::read_dir(&outside).unwrap().count()), (0, 1));
        fs::remove_file(&target).unwrap();
        tear_down_volumes(world, &pod_ref(UID)).await.unwrap();
        assert_eq!(fixture.calls().last().unwrap(), "unpublish h");
    }

    #[tokio::test]
    async fn file_written_while_nothing_was_mounted_is_kept() {
        let driver = FakeDriver::elsewhere();
        let fixture = Fixture::with(driver).await;
        let source = csi_source(&json!({}), false);
        fixture.set_up(&pod_on(&json!({})), &source).await.unwrap();
        let file = source.path(&fixture.world.paths.pod_dir(&PodUid::new(UID))).join("file");
        fs::write(&file, "of a user").unwrap();
        for _ in 0..2 {
            let error = tear_down_volumes(&fixture.world, &pod_ref(UID)).await.unwrap_err();
            assert!(error.message.contains("/mount: directory not empty; its files were written while"), "{error}");
        }
        assert_eq!(fixture.calls()[1..], ["unpublish h", "unpublish h"]);
        fs::remove_file(&file).unwrap();
        tear_down_volumes(&fixture.world, &pod_ref(UID)).await.unwrap();
        assert!(!file.parent().unwrap().exists());
    }

    #[tokio::test]
    async fn damaged_file_concerns_its_own_volume_alone() {
        let fixture = Fixture::with(FakeDriver::able_to(stages())).await;
        let source = csi_source(&json!({}), false);
        fixture.stage(&source, DeviceOptions::default()).await.unwrap();
        fixture.set_up(&pod_on(&json!({})), &source).await.unwrap();
        let other = devices_dir(&fixture.world).join("d/other");
        fs::create_dir_all(&other).unwrap();
        fs::write(other.join(DATA_FILE), "").unwrap();
        assert_eq!(devices_in(&fixture).await, 1);
        // A power cut unmounts all.
        let target = source.path(&fixture.world.paths.pod_dir(&PodUid::new(UID)));
        fs::write(target.with_file_name(DATA_FILE), "{\"driverName\":").unwrap();
        assert_eq!(devices_in(&fixture).await, 1);
        tear_down_volumes(&fixture.world, &pod_ref(UID)).await.unwrap();
        assert!(!target.exists());
    }
}
