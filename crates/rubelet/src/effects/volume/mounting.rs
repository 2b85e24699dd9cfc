//! Mounting by the node's programs.
//!
//! Owns: the calls of mount, and what is undone after one that failed. Never: decides options.
//! Upstream: `mount-utils`.

use std::{
    fmt, io,
    path::{Path, PathBuf},
    time::Duration,
};

use rubelet_core::{
    effect::EffectError,
    volumes::mounting::{self, DEFAULT_FS_TYPE, DiskFormat, Preparation},
};
use rubelet_host::port::{Ended, FileKind, MountPoint, Program, ProgramOutput, WhenLate};

use super::{DIR_MODE, make_dir, remove_dir};
use crate::{
    effects::{directories::component, failure},
    world::World,
};

const PLUGINS_DIR: &str = "/plugins/kubernetes.io/";
/// mount.nfs tries for two minutes to reach its server.
const MOUNT_TIMEOUT: Duration = Duration::from_secs(180);

const BLKID_TIMEOUT: Duration = Duration::from_secs(60);
/// A large disk is formatted, or checked, in minutes.
const FORMAT_TIMEOUT: Duration = Duration::from_secs(3600);

/// A mount to make.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mount<'a> {
    pub source: &'a str,
    pub target: &'a Path,
    pub fs_type: &'a str,
    pub options: &'a [String],
}

/// Where systemd runs, daemons that a mount leaves behind outlive the agent's service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    Own,
    Agent,
}

/// Runs mount. What it mounted in spite of an error is unmounted again, and the empty directory removed.
pub(super) async fn mount(world: &World, mount: Mount<'_>, scope: Scope) -> Result<(), EffectError> {
    let Mount { source, target, fs_type, options } = mount;
    check_source(source)?;
    let arguments = mounting::mount_arguments(source, target, fs_type, options);
    let shown = arguments.join(" ");
    let scope = (scope == Scope::Own).then(|| target.display().to_string());
    let program = Program { timeout: MOUNT_TIMEOUT, scope, ..Program::new("mount", arguments, target) };
    let failed = |what: String, output: &str| {
        let message =
            format!("mount failed: {what}\nMounting command: mount\nMounting arguments: {shown}\nOutput: {output}");
        failure::retryable(message)
    };
    let error = match world.host.run_program(&program).await {
        Ok(output) if output.is_success() => return Ok(()),
        Ok(output) => failed(output.status.to_string(), &combined_output(&output)),
        Err(error) => failed(error.to_string(), ""),
    };
    // The next attempt begins anew; what cannot be undone now is undone with the pod's volumes.
    if is_mounted(world, target).await.is_ok_and(|is_mounted| is_mounted) {
        let _ = world.host.unmount(target).await;
    }
    let _ = remove_dir(world, target, &[]).await;
    Err(error)
}

/// Mounts a block device with this file system. An empty device is formatted first, another one checked.
pub(super) async fn format_and_mount(world: &World, order: Mount<'_>) -> Result<(), EffectError> {
    let fs_type = if order.fs_type.is_empty() { DEFAULT_FS_TYPE } else { order.fs_type };
    let order = Mount { fs_type, ..order };
    let prepared = prepare(world, order).await;
    if prepared.is_err() {
        let _ = remove_dir(world, order.target, &[]).await;
    }
    prepared?;
    let mut options = order.options.to_vec();
    options.push("defaults".to_owned());
    mount(world, Mount { options: &options, ..order }, Scope::Own).await
}

async fn prepare(world: &World, order: Mount<'_>) -> Result<(), EffectError> {
    let Mount { source: device, target, fs_type, options } = order;
    check_source(device)?;
    let format = format_of(world, device).await?;
    match mounting::preparation(device, &format, options).map_err(failure::retryable)? {
        Preparation::Nothing => Ok(()),
        Preparation::Format => {
            // mkfs writes a file system into any file, also a user's. Upstream runs it on whatever a driver names.
            let kind = world.host.file_kind(Path::new(device)).await;
            if kind.map_err(|error| failure::io("stat", Path::new(device), &error))? != Some(FileKind::BlockDevice) {
                return Err(failure::retryable(format!("cannot format {device}: {device} is no block device")));
            }
            let name = format!("mkfs.{}", component(fs_type)?);
            let mkfs = on_device(&name, mounting::mkfs_arguments(fs_type, device), device, FORMAT_TIMEOUT);
            let failed = |error: &str, output: &str| {
                failure::retryable(mounting::format_failure(device, fs_type, target, options, error, output))
            };
            let made = world.host.run_program(&mkfs).await.map_err(|error| failed(&error.to_string(), ""))?;
            if made.is_success() { Ok(()) } else { Err(failed(&made.status.to_string(), &combined_output(&made))) }
        }
        Preparation::Check => {
            let fsck = on_device("fsck", vec!["-a".to_owned(), device.to_owned()], device, FORMAT_TIMEOUT);
            let checked = match world.host.run_program(&fsck).await {
                Ok(checked) => checked,
                // As upstream, a node without fsck mounts all the same.
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                Err(error) => return Err(failure::retryable(error.to_string())),
            };
            let Ended::Exit(exit) = checked.status else { return Ok(()) };
            mounting::check_failure(device, exit, &combined_output(&checked))
                .map_or(Ok(()), |why| Err(failure::retryable(why)))
        }
    }
}

/// The programs would take it for an option.
fn check_source(source: &str) -> Result<(), EffectError> {
    if source.starts_with('-') {
        return Err(failure::refused(format!("{source:?} cannot be mounted: it reads like an option")));
    }
    Ok(())
}

async fn format_of(world: &World, device: &str) -> Result<DiskFormat, EffectError> {
    let unknown =
        |why: &dyn fmt::Display| failure::retryable(format!("failed to get disk format of disk {device}: {why}"));
    let probe = on_device("blkid", mounting::blkid_arguments(device), device, BLKID_TIMEOUT);
    let probed = world.host.run_program(&Program { when_late: WhenLate::Kill, ..probe }).await;
    let probed = probed.map_err(|error| unknown(&error))?;
    let Ended::Exit(exit) = probed.status else { return Err(unknown(&probed.status)) };
    mounting::disk_format(exit, &probed.stdout).map_err(|why| unknown(&why))
}

/// Makes the file system on a mounted device as large as the device.
pub(super) async fn grow(world: &World, device: &str, mounted: &Path) -> Result<(), EffectError> {
    let format = format_of(world, device).await?;
    let Some((name, args)) = mounting::growth(device, &format, mounted).map_err(failure::retryable)? else {
        return Ok(());
    };
    let failed = |error: &str, output: &str| {
        failure::retryable(format!("resize of device {device} failed: {error}. {name} output: {output}"))
    };
    let grown = world.host.run_program(&on_device(name, args, device, FORMAT_TIMEOUT)).await;
    let grown = grown.map_err(|error| failed(&error.to_string(), ""))?;
    if grown.is_success() { Ok(()) } else { Err(failed(&grown.status.to_string(), &combined_output(&grown))) }
}

/// A program that changes a device goes on to its end, whoever waits for it.
fn on_device(name: &str, args: Vec<String>, device: &str, timeout: Duration) -> Program {
    Program { timeout, when_late: WhenLate::LeaveRunning, ..Program::new(name, args, Path::new(device)) }
}

/// Binds a directory into the pod's, once. With options it gets its own instead of those of what it shows.
pub(super) async fn bind(world: &World, from: &Path, to: &Path, options: &[String]) -> Result<(), EffectError> {
    if is_mounted(world, to).await? {
        return Ok(());
    }
    if let Some(parent) = to.parent() {
        make_dir(world, &world.paths.pods_dir(), parent, DIR_MODE).await?;
    }
    let bound = world.host.bind_sub_path(from, Path::new(""), to).await;
    bound.map_err(|error| failure::io("mount at", to, &error))?;
    if options.is_empty() {
        return Ok(());
    }
    let table = world.host.mount_points().await;
    let table = table.map_err(|error| failure::io("look for the mount at", to, &error))?;
    let own = mount_at(world, to).await?;
    let current = table.iter().rfind(|mount| Some(&mount.path) == own.as_ref());
    let options = mounting::remount_options(options, current.map_or("", |mount| mount.options.as_str()));
    let from = from.display().to_string();
    mount(world, Mount { source: &from, target: to, fs_type: "", options: &options }, Scope::Agent).await
}

/// An error if what is staged there is mounted elsewhere, too: somebody's bind mount would lose its device. Other directories of
/// the agent's plugins do not count, for each has its own end.
/// Upstream: `GetDeviceMountRefs`, `HasMountRefs`.
pub(super) async fn check_references(world: &World, staged: &Path) -> Result<(), EffectError> {
    let table = world.host.mount_points().await;
    let table = table.map_err(|error| failure::io("look for mounts of", staged, &error))?;
    let path = mount_at(world, staged).await?;
    let Some(own) = table.iter().rfind(|mount| Some(&mount.path) == path.as_ref()) else { return Ok(()) };
    let is_of_plugin = |path: &Path| path.to_string_lossy().contains(PLUGINS_DIR);
    let is_other = |mount: &&MountPoint| {
        (mount.device, &mount.root) == (own.device, &own.root) && mount.path != own.path && !is_of_plugin(&mount.path)
    };
    let others: Vec<_> = table.iter().filter(is_other).map(|mount| mount.path.display().to_string()).collect();
    if others.is_empty() {
        return Ok(());
    }
    let message = format!(
        "GetDeviceMountRefs check failed : the device mount path {:?} is still mounted by other references [{}]",
        staged.display().to_string(),
        others.join(" ")
    );
    Err(failure::retryable(message))
}

/// Unmounts all that is mounted at a path or below it, deepest first.
pub(super) async fn unmount_all_below(world: &World, dir: &Path) -> Result<(), EffectError> {
    let mounts = world.host.mounts_below(dir).await;
    for point in mounts.map_err(|error| failure::io("look for mounts below", dir, &error))? {
        world.host.unmount(&point).await.map_err(|error| failure::io("unmount", &point, &error))?;
    }
    Ok(())
}

/// Unmounts what all pods shared, and removes its directory.
pub(super) async fn unmount_and_remove(world: &World, point: &Path) -> Result<(), EffectError> {
    if is_mounted(world, point).await? {
        world.host.unmount(point).await.map_err(|error| failure::io("unmount", point, &error))?;
    }
    remove_dir(world, point, &[]).await
}

/// Both outputs of a program.
pub(super) fn combined_output(output: &ProgramOutput) -> String {
    format!("{}{}", output.stdout, output.stderr)
}

/// Whether something is mounted right there.
pub(super) async fn is_mounted(world: &World, point: &Path) -> Result<bool, EffectError> {
    mount_at(world, point).await.map(|mount| mount.is_some())
}

/// The mount point as the kernel names it, if something is mounted right there. Looks at the directory above only: what is mounted
/// may not answer.
async fn mount_at(world: &World, point: &Path) -> Result<Option<PathBuf>, EffectError> {
    let (Some(parent), Some(name)) = (point.parent(), point.file_name()) else { return Ok(None) };
    let mounts = world.host.mounts_below(parent).await;
    let mounts = mounts.map_err(|error| failure::io("look for mounts below", parent, &error))?;
    let Some(dir) = parent.file_name() else { return Ok(None) };
    let own = Path::new(dir).join(name);
    Ok(mounts.into_iter().find(|mount| mount.ends_with(&own)))
}
