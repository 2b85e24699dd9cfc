//! The actions of the simulated drivers, with CSI's semantics.
//!
//! Owns: every change of a volume on the node; each happens completely or not at all, and is safe to repeat. A driver makes and
//! removes the target of a publication, and finds the staging directory made. Never: time, faults.

use std::path::{Path, PathBuf};

use rubelet_csi::{AccessMode, Code, CsiError, CsiResult};

use crate::{csi::driver::Device, simulation::SimState};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CsiAct {
    /// With mount options.
    Stage {
        handle: String,
        staging: PathBuf,
        options: String,
    },
    Unstage {
        handle: String,
        staging: PathBuf,
    },
    Publish {
        handle: String,
        staging: Option<PathBuf>,
        target: PathBuf,
        mode: AccessMode,
    },
    Unpublish {
        handle: String,
        target: PathBuf,
    },
    Expand {
        handle: String,
        path: PathBuf,
        bytes: i64,
    },
}

impl CsiAct {
    pub(crate) fn method(&self) -> &'static str {
        match self {
            CsiAct::Stage { .. } => "NodeStageVolume",
            CsiAct::Unstage { .. } => "NodeUnstageVolume",
            CsiAct::Publish { .. } => "NodePublishVolume",
            CsiAct::Unpublish { .. } => "NodeUnpublishVolume",
            CsiAct::Expand { .. } => "NodeExpandVolume",
        }
    }

    pub(crate) fn handle(&self) -> &str {
        match self {
            CsiAct::Stage { handle, .. }
            | CsiAct::Unstage { handle, .. }
            | CsiAct::Publish { handle, .. }
            | CsiAct::Unpublish { handle, .. }
            | CsiAct::Expand { handle, .. } => handle,
        }
    }

    /// The directory that it is about.
    pub(crate) fn path(&self) -> &Path {
        match self {
            CsiAct::Stage { staging, .. } | CsiAct::Unstage { staging, .. } => staging,
            CsiAct::Publish { target, .. } | CsiAct::Unpublish { target, .. } => target,
            CsiAct::Expand { path, .. } => path,
        }
    }
}

impl std::fmt::Display for CsiAct {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} at {}", self.method(), self.handle(), self.path().display())
    }
}

/// The handles of inline volumes are the agent's own.
pub(crate) fn is_inline(handle: &str) -> bool {
    handle.starts_with("csi-")
}

impl SimState {
    pub(crate) fn perform_csi(&mut self, driver: &str, act: &CsiAct) -> CsiResult<()> {
        let device = Device::new(driver, act.handle());
        let done = match act {
            CsiAct::Stage { staging, options, .. } => self.stage_volume(&device, staging, options),
            CsiAct::Unstage { staging, .. } => self.unstage_volume(&device, staging),
            CsiAct::Publish { staging, target, .. } => self.publish_volume(&device, staging.as_deref(), target),
            CsiAct::Unpublish { target, .. } => self.unpublish_volume(&device, target),
            CsiAct::Expand { path, bytes, .. } => self.expand_volume(&device, path, *bytes),
        };
        match &done {
            Ok(()) => self.log("csi", format!("{act} -> ok")),
            Err(error) => self.log("csi", format!("{act} -> {error}")),
        }
        self.check_mounts_of(&device);
        done
    }

    fn stage_volume(&mut self, device: &Device, staging: &Path, options: &str) -> CsiResult<()> {
        if !self.driver(&device.driver).script.capabilities.stage_unstage {
            return Err(CsiError::new(Code::Unimplemented, "NodeStageVolume is not implemented"));
        }
        self.must_exist(device)?;
        if self.must_be_attached(device) && !self.is_attached(device) {
            return Err(CsiError::new(Code::Internal, "the device is not there"));
        }
        let known = self.csi.options.get(device).filter(|_| self.shows(staging, device));
        if known.is_some_and(|known| known != options) {
            return Err(CsiError::new(Code::Internal, "it is mounted with other options"));
        }
        self.mount_volume(device, staging)?;
        self.csi.options.insert(device.clone(), options.to_owned());
        self.driver(&device.driver).staged.insert(device.handle.clone());
        Ok(())
    }

    fn unstage_volume(&mut self, device: &Device, staging: &Path) -> CsiResult<()> {
        if !self.driver(&device.driver).script.capabilities.stage_unstage {
            return Err(CsiError::new(Code::Unimplemented, "NodeUnstageVolume is not implemented"));
        }
        self.disk.unmount(staging).map_err(|error| failed("unmount", &error))?;
        self.driver(&device.driver).staged.remove(&device.handle);
        Ok(())
    }

    fn publish_volume(&mut self, device: &Device, staging: Option<&Path>, target: &Path) -> CsiResult<()> {
        if is_inline(&device.handle) {
            self.disk.make_dir(&device.content(), 0o755).map_err(|error| failed("make", &error))?;
        } else {
            self.must_exist(device)?;
            let driver = self.driver(&device.driver);
            let (stages, is_known) = (driver.script.capabilities.stage_unstage, driver.staged.contains(&device.handle));
            let must_know = driver.script.is_forgetful;
            let is_staged = staging.is_some_and(|staging| self.shows(staging, device));
            if stages && (!is_staged || must_know && !is_known) {
                return Err(CsiError::new(Code::FailedPrecondition, "the volume is not staged"));
            }
        }
        let parent = target.parent().unwrap_or(Path::new("/"));
        if self.disk.list_dir(parent).is_err() {
            return Err(CsiError::new(Code::Internal, format!("{} does not exist", parent.display())));
        }
        if self.disk.mounted_at(target).is_none() {
            self.disk.make_dir(target, 0o750).map_err(|error| failed("make", &error))?;
        }
        self.mount_volume(device, target)
    }

    fn unpublish_volume(&mut self, device: &Device, target: &Path) -> CsiResult<()> {
        self.disk.unmount(target).map_err(|error| failed("unmount", &error))?;
        self.disk.remove_tree(target).map_err(|error| failed("remove", &error))?;
        if is_inline(&device.handle) {
            self.disk.remove_tree(&device.content()).map_err(|error| failed("remove", &error))?;
        }
        Ok(())
    }

    /// The file system gets as large as the volume.
    fn expand_volume(&mut self, device: &Device, path: &Path, bytes: i64) -> CsiResult<()> {
        if !self.driver(&device.driver).script.capabilities.expand {
            return Err(CsiError::new(Code::Unimplemented, "NodeExpandVolume is not implemented"));
        }
        self.must_exist(device)?;
        if !self.shows(path, device) {
            return Err(CsiError::new(Code::NotFound, format!("{} does not show the volume", path.display())));
        }
        let size = self.driver(&device.driver).volumes.get_mut(&device.handle).expect("it exists");
        let volume = size.volume;
        if volume < bytes {
            return Err(CsiError::new(Code::OutOfRange, format!("the volume has {volume} bytes, not {bytes}")));
        }
        if size.file_system < volume {
            size.file_system = volume;
            self.log("csi", format!("{device} grows to {volume} bytes"));
        }
        Ok(())
    }

    /// At a directory that exists; a mount that is there stays.
    fn mount_volume(&mut self, device: &Device, point: &Path) -> CsiResult<()> {
        if self.shows(point, device) {
            return Ok(());
        }
        if self.disk.mounted_at(point).is_some() {
            return Err(CsiError::new(Code::AlreadyExists, format!("{} has another volume", point.display())));
        }
        self.disk.bind(&device.content(), point).map_err(|error| failed("mount", &error))
    }

    /// The volume is mounted there.
    pub(crate) fn shows(&self, point: &Path, device: &Device) -> bool {
        self.disk.mounted_at(point) == Some(&device.content())
    }

    fn must_exist(&mut self, device: &Device) -> CsiResult<()> {
        let is_there = self.driver(&device.driver).volumes.contains_key(&device.handle);
        is_there.then_some(()).ok_or_else(|| CsiError::new(Code::NotFound, format!("there is no volume {device}")))
    }
}

fn failed(what: &str, error: &std::io::Error) -> CsiError {
    CsiError::new(Code::Internal, format!("{what}: {error}"))
}
