//! FlexVolume drivers: programs in `volumePluginDir` that mount volumes.
//!
//! Owns: the calls, each with a deadline and alone on its directory, and what is done where a driver leaves it to the agent. A
//! driver is looked for when it is needed, so that one that appears later is found. Never: attaches a volume, which is the
//! controller's; shows the arguments of a call, which may be secret.
//! Upstream: `pkg/volume/flexvolume`.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use k8s_openapi::api::core::v1::Node;
use rubelet_core::{
    effect::{EffectError, ErrorKind, Facts},
    id::PodUid,
    quantity::Quantity,
    volumes::{
        claims::{PersistentKind, PersistentSource},
        csi::SecretName,
        expansion::ClaimedSize,
        flex::{self, Answer, CallFailure, FlexVolume},
    },
};
use rubelet_host::port::{FileKind, Program, WhenLate};
use rubelet_kube::port::ObjectPath;

use super::{
    DIR_MODE, VolumePod, make_dir,
    mounting::{self, Mount},
    persistent, remove_dir,
};
use crate::{
    effects::{directories::component, failure, status},
    world::World,
};

/// For what a driver says of itself.
const QUERY_TIMEOUT: Duration = Duration::from_secs(10);
/// As for a call to a CSI driver.
const CALL_TIMEOUT: Duration = Duration::from_secs(120);
/// A disk may take long to appear.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(600);

/// Asks the driver of a volume what it can do. Other kinds stay as they are.
pub(super) async fn with_capabilities(
    world: &World,
    mut source: PersistentSource,
) -> Result<PersistentSource, EffectError> {
    let PersistentSource { name, read_only, kind, .. } = &mut source;
    let PersistentKind::Flex(volume) = kind else { return Ok(source) };
    if program(world, &volume.driver).await?.is_none() {
        let message = format!("failed to get Plugin from volumeSpec for volume {name:?} err=no volume plugin matched");
        return Err(failure::retryable(message));
    }
    let place = flex::device_dir(&world.paths.root_dir, &volume.driver, component(name)?);
    let answer = query(world, volume, Call::new("init", Vec::new(), &place.join("init"))).await?;
    volume.capabilities = answer.unwrap_or_default().capabilities;
    if volume.capabilities.attach {
        // As upstream, its answer is not used, but its refusal is.
        let args = vec![json(&volume.options(name, *read_only))];
        query(world, volume, Call::new("getvolumename", args, &place.join("name"))).await?;
    }
    Ok(source)
}

/// `None`: the driver does not know this call.
async fn query(world: &World, volume: &FlexVolume, query: Call<'_>) -> Result<Option<Answer>, EffectError> {
    call(world, &volume.driver, &Call { timeout: QUERY_TIMEOUT, when_late: WhenLate::Kill, ..query }).await
}

/// Mounts a volume that was attached once for all pods.
pub(super) async fn stage(world: &World, source: &PersistentSource, volume: &FlexVolume) -> Result<Facts, EffectError> {
    let FlexVolume { driver, fs_type, .. } = volume;
    let target = device_dir(world, driver, &source.name)?;
    if mounting::is_mounted(world, &target).await? {
        return Ok(Facts::Nothing);
    }
    let options = json(&volume.options(&source.name, source.read_only));
    let attached = attached_device(world, source).await?;
    let wait = Call::new("waitforattach", vec![attached.clone(), options.clone()], &target);
    let wait = Call { timeout: ATTACH_TIMEOUT, when_late: WhenLate::Kill, ..wait };
    let device = call(world, driver, &wait).await?.map_or(attached, |answer| answer.device);
    make_dir(world, &world.paths.root_dir, &target, DIR_MODE).await?;
    let args = vec![target.display().to_string(), device.clone(), options];
    if call(world, driver, &Call::new("mountdevice", args, &target)).await?.is_some() || device.is_empty() {
        return Ok(Facts::Nothing);
    }
    let options = [if source.read_only { "ro" } else { "rw" }.to_owned()];
    let order = Mount { source: &device, target: &target, fs_type, options: &options };
    mounting::format_and_mount(world, order).await.map(|()| Facts::Nothing)
}

pub(super) async fn unstage(world: &World, driver: &str, name: &str) -> Result<Facts, EffectError> {
    let target = device_dir(world, driver, name)?;
    mounting::check_references(world, &target).await?;
    if mounting::is_mounted(world, &target).await? {
        let args = vec![target.display().to_string()];
        call(world, driver, &Call::new("unmountdevice", args, &target)).await?;
    }
    mounting::unmount_and_remove(world, &target).await.map(|()| Facts::Nothing)
}

pub(super) async fn set_up(
    world: &World,
    owner: &VolumePod<'_>,
    source: &PersistentSource,
    volume: &FlexVolume,
) -> Result<(), EffectError> {
    component(&source.name)?;
    let target = source.path(owner.dir);
    if mounting::is_mounted(world, &target).await? {
        return Ok(());
    }
    let secrets = secrets(world, &volume.driver, volume.secret.as_ref()).await?;
    make_dir(world, &world.paths.pods_dir(), &target, DIR_MODE).await?;
    let options = volume.mount_options((&source.name, source.read_only), (owner.pod, owner.uid), secrets);
    let args = vec![target.display().to_string(), json(&options)];
    let mounted = match call(world, &volume.driver, &Call::new("mount", args, &target)).await {
        Ok(Some(_)) => Ok(()),
        Ok(None) => mounting::bind(world, &device_dir(world, &volume.driver, &source.name)?, &target, &[]).await,
        Err(error) => Err(error),
    };
    if let Err(error) = mounted {
        // A driver that is only late goes on, and needs its directory.
        if error.kind != ErrorKind::Uncertain && !mounting::is_mounted(world, &target).await? {
            // The driver's error counts more than one here.
            let _ = remove_dir(world, &target, &[]).await;
        }
        return Err(error);
    }
    if volume.capabilities.fs_group && !source.read_only {
        // As upstream, a volume that cannot be given to the group is used all the same.
        let _ = persistent::share(world, owner.pod, source, &target).await;
    }
    Ok(())
}

/// Has the driver unmount what it mounted for a pod.
pub(super) async fn tear_down(world: &World, driver: &str, target: &Path) -> Result<(), EffectError> {
    let args = vec![target.display().to_string()];
    let is_known = call(world, driver, &Call::new("unmount", args, target)).await?.is_some();
    if mounting::is_mounted(world, target).await? {
        if is_known {
            let message = format!("{} is still mounted after the driver's unmount", target.display());
            return Err(failure::retryable(message));
        }
        world.host.unmount(target).await.map_err(|error| failure::io("unmount", target, &error))?;
    }
    remove_dir(world, target, &[]).await
}

/// Has the driver make the file system as large as the volume. `false`: the driver does not know how.
pub(super) async fn expand(
    world: &World,
    uid: &PodUid,
    (source, volume): (&PersistentSource, &FlexVolume),
    (wanted, size): (&str, &ClaimedSize),
) -> Result<bool, EffectError> {
    let device = attached_device(world, source).await?;
    let mounted = match volume.capabilities.attach {
        true => device_dir(world, &volume.driver, &source.name)?,
        false => source.path(&world.paths.pod_dir(uid)),
    };
    let bytes = Quantity::parse(wanted).map_or(0, Quantity::value);
    let args = vec![
        json(&volume.options(&source.name, source.read_only)),
        device,
        mounted.display().to_string(),
        bytes.to_string(),
        size.claim_bytes.to_string(),
    ];
    Ok(call(world, &volume.driver, &Call::new("expandfs", args, &mounted)).await?.is_some())
}

fn device_dir(world: &World, driver: &str, name: &str) -> Result<PathBuf, EffectError> {
    Ok(flex::device_dir(&world.paths.root_dir, driver, component(name)?))
}

/// The device that the controller's attach has led to; empty if nothing was attached.
async fn attached_device(world: &World, source: &PersistentSource) -> Result<String, EffectError> {
    let Some(name) = source.attached_name() else { return Ok(String::new()) };
    let path = ObjectPath::all("v1", "nodes").named(&*world.settings.node_name);
    let node: Node = status::get_object(world, path).await?;
    let mut attached = node.status.and_then(|status| status.volumes_attached).into_iter().flatten();
    let missing = || {
        let message = format!("volume {} is not yet in node's status", source.name);
        failure::retryable(message)
    };
    attached.find(|volume| volume.name == name).map(|volume| volume.device_path).ok_or_else(missing)
}

/// The values of a secret, which must be of the driver's own type, in base64.
async fn secrets(
    world: &World,
    driver: &str,
    name: Option<&SecretName>,
) -> Result<BTreeMap<String, String>, EffectError> {
    let Some(secret @ SecretName { namespace, name }) = name else { return Ok(BTreeMap::new()) };
    let failed =
        |why: &dyn std::fmt::Display| failure::retryable(format!("couldn't get secret {namespace}/{name} err: {why}"));
    let secret = status::get_secret(world, secret).await.map_err(|error| failed(&error))?;
    if secret.type_.as_deref() != Some(driver) {
        return Err(failed(&format_args!("cannot get secret of type {driver}")));
    }
    let data = secret.data.unwrap_or_default().into_iter();
    Ok(data.map(|(key, value)| (key, BASE64_STANDARD.encode(value.0))).collect())
}

fn json(options: &BTreeMap<String, String>) -> String {
    serde_json::to_string(options).expect("texts become JSON")
}

struct Call<'a> {
    command: &'static str,
    args: Vec<String>,
    on: &'a Path,
    timeout: Duration,
    when_late: WhenLate,
}

impl<'a> Call<'a> {
    /// One that changes something: it goes on to its end, whoever waits for it.
    fn new(command: &'static str, args: Vec<String>, on: &'a Path) -> Self {
        Call { command, args, on, timeout: CALL_TIMEOUT, when_late: WhenLate::LeaveRunning }
    }
}

/// `None`: the driver does not know this call.
async fn call(world: &World, driver: &str, call: &Call<'_>) -> Result<Option<Answer>, EffectError> {
    let Call { command, args, on, timeout, when_late } = call;
    let Some(program) = program(world, driver).await? else {
        return Err(failure::retryable(format!("no volume plugin matched name: {driver}")));
    };
    let args = [*command].into_iter().map(str::to_owned).chain(args.iter().cloned()).collect();
    let program =
        Program { timeout: *timeout, when_late: *when_late, ..Program::new(&program.display().to_string(), args, on) };
    let output = world.host.run_program(&program).await.map_err(|error| {
        let is_late = error.kind() == std::io::ErrorKind::TimedOut && *when_late == WhenLate::LeaveRunning;
        let kind = if is_late { ErrorKind::Uncertain } else { ErrorKind::Retry };
        EffectError { kind, message: format!("{command} command failed: {error}") }
    })?;
    // Upstream reads both outputs as one.
    let said = if output.stdout.trim().is_empty() { &output.stderr } else { &output.stdout };
    match Answer::parse(command, said) {
        Ok(answer) if output.is_success() => Ok(Some(answer)),
        Ok(_) => Err(failure::retryable(output.status.to_string())),
        Err(CallFailure::NotSupported) => Ok(None),
        Err(CallFailure::Failed(why)) => Err(failure::retryable(why)),
    }
}

async fn program(world: &World, driver: &str) -> Result<Option<PathBuf>, EffectError> {
    let program = flex::executable(&world.paths.volume_plugin_dir, driver);
    let kind = world.host.file_kind(&program).await.map_err(|error| failure::io("stat", &program, &error))?;
    Ok(Some(program).filter(|_| kind == Some(FileKind::File)))
}

#[cfg(test)]
mod tests;
