//! Fibre Channel volumes.
//!
//! Owns: the names of a volume's device, directory and disk. Never: looks for the disk.
//! Upstream: `pkg/volume/fc`.

use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::FCVolumeSource;
use serde::{Deserialize, Serialize};

use super::claims::VOLUME_DEVICES;

pub const FC_PLUGIN: &str = "kubernetes.io~fc";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FcVolume {
    /// As the Node object has it.
    pub volume_name: String,
    pub device: FcDevice,
    pub fs_type: String,
    pub mount_options: Vec<String>,
    /// The node waits for the attach/detach controller, which only notes where it is in use.
    pub attach: bool,
    /// Containers get the block device, and no file system.
    pub is_block: bool,
}

/// A disk, by its names in the fabric.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum FcDevice {
    Targets { wwns: Vec<String>, lun: i32 },
    Ids(Vec<String>),
}

impl FcVolume {
    /// `Err` if the volume names no disk.
    pub fn new(source: &FCVolumeSource, mount_options: &[String]) -> Result<Self, String> {
        let (wwns, wwids) = (source.target_wwns.clone().unwrap_or_default(), source.wwids.clone().unwrap_or_default());
        let device = match source.lun {
            Some(lun) if !wwns.is_empty() => FcDevice::Targets { wwns, lun },
            // The name of a disk has no blanks where it is found.
            _ if !wwids.is_empty() => FcDevice::Ids(wwids.iter().map(|id| id.replace(' ', "_")).collect()),
            _ => return Err("fc: no fc disk information found. failed to make a new mounter".to_owned()),
        };
        if let Some(bad) = device.names().iter().find(|name| name.is_empty() || name.contains('/')) {
            return Err(format!("fc: invalid name of a disk {bad:?}"));
        }
        let fs_type = source.fs_type.clone().unwrap_or_default();
        let volume_name = match &device {
            FcDevice::Targets { .. } => device.volume_name(),
            FcDevice::Ids(_) => FcDevice::Ids(wwids).volume_name(),
        };
        let mount_options = mount_options.to_vec();
        Ok(FcVolume { volume_name, device, fs_type, mount_options, attach: true, is_block: false })
    }
}

impl FcDevice {
    fn names(&self) -> &[String] {
        match self {
            FcDevice::Targets { wwns, .. } => wwns,
            FcDevice::Ids(ids) => ids,
        }
    }

    /// As the Node object has it, but for blanks.
    pub fn volume_name(&self) -> String {
        let names = self.names().join(" ");
        match self {
            FcDevice::Targets { lun, .. } => format!("kubernetes.io/fc/[{names}]:{lun}"),
            FcDevice::Ids(_) => format!("kubernetes.io/fc/[{names}]"),
        }
    }

    /// The name of the directory where it is mounted for all pods.
    pub fn dir_name(&self) -> String {
        let names = self.names().join("-");
        match self {
            FcDevice::Targets { lun, .. } => format!("{names}-lun-{lun}"),
            FcDevice::Ids(_) => names,
        }
    }

    /// From the name of such a directory.
    pub fn parse(dir: &str) -> Option<FcDevice> {
        let parts = |text: &str| text.split('-').map(str::to_owned).collect::<Vec<_>>();
        match dir.rsplit_once("-lun-") {
            Some((wwns, lun)) => Some(FcDevice::Targets { wwns: parts(wwns), lun: lun.parse().ok()? }),
            None => Some(FcDevice::Ids(parts(dir))).filter(|_| !dir.is_empty()),
        }
    }

    /// Below `/dev/disk`, the directory with links to disks by this kind of name.
    pub fn links_dir(&self) -> &'static str {
        match self {
            FcDevice::Targets { .. } => "by-path",
            FcDevice::Ids(_) => "by-id",
        }
    }

    /// Whether a link there is one to this disk.
    pub fn is_link(&self, link: &str) -> bool {
        match self {
            FcDevice::Targets { wwns, lun } => wwns.iter().any(|wwn| {
                let Some(start) = link.strip_suffix(&format!("fc-0x{wwn}-lun-{lun}")) else { return false };
                start.is_empty() || (start.starts_with("pci-") && start.ends_with('-'))
            }),
            FcDevice::Ids(ids) => ids.iter().any(|id| link.strip_prefix("scsi-") == Some(id)),
        }
    }
}

pub fn devices_dir(root_dir: &Path) -> PathBuf {
    root_dir.join("plugins/kubernetes.io/fc")
}

/// Where block devices are bound for pods, by the names of the disks' directories.
pub fn block_dir(root_dir: &Path) -> PathBuf {
    devices_dir(root_dir).join(VOLUME_DEVICES)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn volume(source: Value) -> Result<FcVolume, String> {
        FcVolume::new(&serde_json::from_value(source).unwrap(), &[])
    }

    #[test]
    fn names_and_directories_are_those_of_upstream() {
        let lines = [
            json!({"targetWWNs": ["50060e801049cfd1", "50060e801049cfd2"], "lun": 2}),
            json!({"wwids": ["3600508b400105e210000900000490000"]}),
            json!({"wwids": ["VENDOR disk 1"]}),
            json!({"targetWWNs": ["50060e801049cfd1"]}),
            json!({"wwids": ["../x"]}),
        ]
        .map(|source| match volume(source) {
            Ok(FcVolume { volume_name, device, .. }) => {
                assert_eq!(FcDevice::parse(&device.dir_name()).as_ref(), Some(&device));
                format!("{volume_name} {}", device.dir_name())
            }
            Err(error) => error,
        });
        insta::assert_snapshot!(lines.join("\n"), @r#"
        kubernetes.io/fc/[50060e801049cfd1 50060e801049cfd2]:2 50060e801049cfd1-50060e801049cfd2-lun-2
        kubernetes.io/fc/[3600508b400105e210000900000490000] 3600508b400105e210000900000490000
        kubernetes.io/fc/[VENDOR disk 1] VENDOR_disk_1
        fc: no fc disk information found. failed to make a new mounter
        fc: invalid name of a disk "../x"
        "#);
    }

    #[test]
    fn disk_is_found_by_its_link() {
        let by_target = volume(json!({"targetWWNs": ["50060e801049cfd1"], "lun": 2})).unwrap().device;
        for (link, expected) in [
            ("pci-0000:41:00.0-fc-0x50060e801049cfd1-lun-2", true),
            ("fc-0x50060e801049cfd1-lun-2", true),
            ("pci-0000:41:00.0-fc-0x50060e801049cfd1-lun-2-part1", false),
            ("pci-0000:41:00.0-fc-0x50060e801049cfd1-lun-22", false),
            ("usb-fc-0x50060e801049cfd1-lun-2", false),
        ] {
            assert_eq!(by_target.is_link(link), expected, "{link}");
        }
        let by_id = volume(json!({"wwids": ["3600508b4"]})).unwrap().device;
        assert!(by_id.is_link("scsi-3600508b4"));
        assert!(!by_id.is_link("scsi-3600508b4-part1"));
    }
}
