//! iSCSI volumes.
//!
//! Owns: the fields of a volume, the names of its device and directory, the arguments of iscsiadm and what its answers mean.
//! Never: runs it.
//! Upstream: `pkg/volume/iscsi`.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use k8s_openapi::api::core::v1::{ISCSIPersistentVolumeSource, ISCSIVolumeSource};
use serde::{Deserialize, Serialize};

use super::{claims::VOLUME_DEVICES, csi::SecretName};

pub const ISCSI_PLUGIN: &str = "kubernetes.io~iscsi";
const DEFAULT_PORT: &str = ":3260";
const DEFAULT_IFACE: &str = "default";

/// Keys of the secret, which are settings of iscsiadm.
pub const DISCOVERY_KEYS: [&str; 4] = [
    "discovery.sendtargets.auth.username",
    "discovery.sendtargets.auth.password",
    "discovery.sendtargets.auth.username_in",
    "discovery.sendtargets.auth.password_in",
];
pub const SESSION_KEYS: [&str; 4] = [
    "node.session.auth.username",
    "node.session.auth.password",
    "node.session.auth.username_in",
    "node.session.auth.password_in",
];

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IscsiVolume {
    /// As the spec names it; the volume's name on the Node object has it.
    pub target_portal: String,
    /// With ports; the target portal first.
    pub portals: Vec<String>,
    pub iqn: String,
    pub lun: i32,
    /// Configured on the node.
    pub base_iface: String,
    /// With one, the interface is a copy of the configured one for this volume alone.
    pub initiator_name: Option<String>,
    pub fs_type: String,
    pub mount_options: Vec<String>,
    pub discovery_chap: bool,
    pub session_chap: bool,
    pub secret: Option<SecretName>,
    /// The node waits for the attach/detach controller, which only notes where it is in use.
    pub attach: bool,
    /// Containers get the block device, and no file system.
    pub is_block: bool,
}

impl IscsiVolume {
    /// `namespace` is that of the claim, or of nothing: its secret must name one then.
    pub fn persistent(source: &ISCSIPersistentVolumeSource, namespace: &str, mount_options: &[String]) -> Self {
        let secret = source.secret_ref.as_ref().map(|secret| SecretName {
            namespace: secret.namespace.clone().filter(|it| !it.is_empty()).unwrap_or_else(|| namespace.to_owned()),
            name: secret.name.clone().unwrap_or_default(),
        });
        IscsiVolume {
            target_portal: source.target_portal.clone(),
            portals: portals(&source.target_portal, source.portals.as_deref()),
            iqn: source.iqn.clone(),
            lun: source.lun,
            base_iface: source.iscsi_interface.clone().unwrap_or_else(|| DEFAULT_IFACE.to_owned()),
            initiator_name: source.initiator_name.clone().filter(|name| !name.is_empty()),
            fs_type: source.fs_type.clone().unwrap_or_default(),
            mount_options: mount_options.to_vec(),
            discovery_chap: source.chap_auth_discovery.unwrap_or(false),
            session_chap: source.chap_auth_session.unwrap_or(false),
            secret,
            attach: true,
            is_block: false,
        }
    }

    pub fn inline(source: &ISCSIVolumeSource, namespace: &str) -> Self {
        let name = source.secret_ref.as_ref().map(|secret| secret.name.clone());
        IscsiVolume {
            target_portal: source.target_portal.clone(),
            portals: portals(&source.target_portal, source.portals.as_deref()),
            iqn: source.iqn.clone(),
            lun: source.lun,
            base_iface: source.iscsi_interface.clone().unwrap_or_else(|| DEFAULT_IFACE.to_owned()),
            initiator_name: source.initiator_name.clone().filter(|name| !name.is_empty()),
            fs_type: source.fs_type.clone().unwrap_or_default(),
            mount_options: Vec::new(),
            discovery_chap: source.chap_auth_discovery.unwrap_or(false),
            session_chap: source.chap_auth_session.unwrap_or(false),
            secret: name.map(|name| SecretName { namespace: namespace.to_owned(), name }),
            attach: true,
            is_block: false,
        }
    }

    /// `volume` is the name of the persistent volume, or of the volume in its pod.
    pub fn device(&self, volume: &str) -> IscsiDevice {
        let portal = self.portals.first().cloned().unwrap_or_default();
        IscsiDevice { iface: self.iface(volume), portal, iqn: self.iqn.clone(), lun: self.lun }
    }

    fn iface(&self, volume: &str) -> String {
        match (&self.initiator_name, self.portals.first()) {
            (Some(_), Some(portal)) => format!("{portal}:{volume}"),
            (Some(_), None) | (None, _) => self.base_iface.clone(),
        }
    }

    /// As the Node object has it.
    pub fn volume_name(&self) -> String {
        format!("kubernetes.io/iscsi/{}:{}:{}", self.target_portal, self.iqn, self.lun)
    }

    /// Why it cannot be used: names become parts of paths and arguments.
    pub fn problem(&self) -> Option<String> {
        let names = self.portals.iter().chain([&self.iqn, &self.base_iface]).chain(&self.initiator_name);
        let bad = names.into_iter().find(|name| name.is_empty() || name.starts_with('-') || name.contains('/'));
        bad.map(|name| format!("invalid iSCSI portal, name or interface {name:?}"))
    }
}

fn portals(target: &str, more: Option<&[String]>) -> Vec<String> {
    let more = more.unwrap_or_default().iter().map(String::as_str);
    let with_port = |portal: &str| match portal.contains(':') {
        true => portal.to_owned(),
        false => format!("{portal}{DEFAULT_PORT}"),
    };
    let mut portals = Vec::new();
    for portal in [target].into_iter().chain(more).map(with_port) {
        if !portals.contains(&portal) {
            portals.push(portal);
        }
    }
    portals
}

/// A disk behind a target, as its directory names it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct IscsiDevice {
    pub iface: String,
    /// With its port.
    pub portal: String,
    pub iqn: String,
    pub lun: i32,
}

impl IscsiDevice {
    /// Unique on the node, whether or not the spec has the default port.
    pub fn name(&self) -> String {
        let portal = self.portal.strip_suffix(DEFAULT_PORT).unwrap_or(&self.portal);
        format!("kubernetes.io/iscsi/{portal}:{}:{}", self.iqn, self.lun)
    }

    /// What the Node object may call it.
    pub fn volume_names(&self) -> Vec<String> {
        let IscsiDevice { portal, iqn, lun, .. } = self;
        let named = |portal: &str| format!("kubernetes.io/iscsi/{portal}:{iqn}:{lun}");
        [Some(portal.as_str()), portal.strip_suffix(DEFAULT_PORT)].into_iter().flatten().map(named).collect()
    }

    /// The directory where it is mounted for all pods.
    pub fn dir(&self, root_dir: &Path) -> PathBuf {
        self.below(&devices_dir(root_dir))
    }

    /// The directory where its block device is bound for each pod.
    pub fn block_dir(&self, root_dir: &Path) -> PathBuf {
        self.below(&block_dir(root_dir))
    }

    fn below(&self, dir: &Path) -> PathBuf {
        let IscsiDevice { iface, portal, iqn, lun } = self;
        dir.join(format!("iface-{iface}")).join(format!("{portal}-{iqn}-lun-{lun}"))
    }

    /// From the last two parts of such a directory; `None` if they are others.
    pub fn parse(iface_dir: &str, dir: &str) -> Option<IscsiDevice> {
        let iface = iface_dir.strip_prefix("iface-")?;
        let (target, lun) = dir.rsplit_once("-lun-")?;
        let at = ["-iqn.", "-eui.", "-naa."].iter().find_map(|kind| target.find(kind))?;
        let (portal, iqn) = target.split_at(at);
        let (iface, portal, iqn) = (iface.to_owned(), portal.to_owned(), iqn.trim_start_matches('-').to_owned());
        Some(IscsiDevice { iface, portal, iqn, lun: lun.parse().ok()? })
    }
}

pub fn devices_dir(root_dir: &Path) -> PathBuf {
    root_dir.join("plugins/kubernetes.io/iscsi")
}

pub fn block_dir(root_dir: &Path) -> PathBuf {
    devices_dir(root_dir).join(VOLUME_DEVICES)
}

/// The link to the disk behind one portal. On other transports than TCP it begins with the PCI device, so it is found by its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskLink {
    Named(String),
    EndsWith(String),
}

pub fn disk_link(transport: &str, portal: &str, iqn: &str, lun: i32) -> DiskLink {
    let address = portal.replace(['[', ']'], "");
    let name = format!("ip-{address}-iscsi-{iqn}-lun-{lun}");
    if transport == "tcp" { DiskLink::Named(name) } else { DiskLink::EndsWith(format!("-{name}")) }
}

/// Which transport an interface uses, by what iscsiadm shows of it.
pub fn transport(shown: &str) -> Option<&str> {
    let value = shown.lines().find_map(|line| line.strip_prefix("iface.transport_name = "))?;
    Some(if value == "<empty>" { "tcp" } else { value })
}

/// The settings of an interface that a copy of it has.
pub fn iface_settings(shown: &str) -> BTreeMap<&str, &str> {
    let set = shown.lines().filter(|line| line.starts_with("iface.") && !line.contains("<empty>"));
    let settings = set.filter_map(|line| line.split_once(" = "));
    settings.filter(|(key, _)| *key != "iface.iscsi_ifacename").collect()
}

/// Command lines of iscsiadm.
pub mod iscsiadm {
    use super::IscsiDevice;

    pub fn iface(name: &str, action: &[&str]) -> Vec<String> {
        texts(&[&["-m", "iface", "-I", name], action].concat())
    }

    pub fn discovery(portal: &str, iface: &str, action: &[&str]) -> Vec<String> {
        texts(&[&["-m", "discoverydb", "-t", "sendtargets", "-p", portal, "-I", iface], action].concat())
    }

    pub fn node(portal: &str, device: &IscsiDevice, action: &[&str]) -> Vec<String> {
        texts(&[&["-m", "node", "-p", portal, "-T", &device.iqn, "-I", &device.iface], action].concat())
    }

    pub const NEW: [&str; 2] = ["-o", "new"];
    pub const DELETE: [&str; 2] = ["-o", "delete"];
    pub const SHOW: [&str; 2] = ["-o", "show"];

    pub fn update<'a>(key: &'a str, value: &'a str) -> [&'a str; 6] {
        ["-o", "update", "-n", key, "-v", value]
    }

    fn texts(arguments: &[&str]) -> Vec<String> {
        arguments.iter().map(|argument| (*argument).to_owned()).collect()
    }

    /// Exit codes of a target that is logged in already, and of one of which nothing is known.
    pub const SESSION_EXISTS: i32 = 15;
    pub const NOTHING_KNOWN: [i32; 2] = [2, 21];
}

/// Whether enough paths to the disk are there to go on, after so many rounds.
pub fn has_enough_paths(found: usize, wanted: usize, rounds: u32) -> bool {
    const ENOUGH: usize = 2;
    const ROUNDS_FOR_ENOUGH: u32 = 2;
    const MAX_ROUNDS: u32 = 5;
    found == 0 || found >= wanted || (found >= ENOUGH && rounds >= ROUNDS_FOR_ENOUGH) || rounds >= MAX_ROUNDS
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn volume(source: serde_json::Value) -> IscsiVolume {
        IscsiVolume::inline(&serde_json::from_value(source).unwrap(), "prod")
    }

    #[test]
    fn names_and_directories_are_those_of_upstream() {
        let plain = json!({"targetPortal": "10.0.0.1", "iqn": "iqn.2001-04.com.example:disk1", "lun": 3});
        let own = json!({
            "targetPortal": "10.0.0.1:3261", "portals": ["10.0.0.2", "10.0.0.1:3261"], "iqn": "eui.02004567A425678D",
            "lun": 0, "initiatorName": "iqn.1994-05.com.redhat:node", "iscsiInterface": "eth1", "secretRef": {"name": "chap"},
        });
        let (plain, own) = (volume(plain), volume(own));
        let lines = [&plain, &own].map(|volume| {
            let device = volume.device("pv");
            let dir = device.dir(Path::new("/r"));
            let names = dir.iter().rev().filter_map(|part| part.to_str()).take(2).collect::<Vec<_>>();
            assert_eq!(IscsiDevice::parse(names[1], names[0]).as_ref(), Some(&device));
            format!("{} {} {} {:?}", volume.volume_name(), device.name(), dir.display(), volume.portals)
        });
        insta::assert_snapshot!(lines.join("\n"), @r#"
        kubernetes.io/iscsi/10.0.0.1:iqn.2001-04.com.example:disk1:3 kubernetes.io/iscsi/10.0.0.1:iqn.2001-04.com.example:disk1:3 /r/plugins/kubernetes.io/iscsi/iface-default/10.0.0.1:3260-iqn.2001-04.com.example:disk1-lun-3 ["10.0.0.1:3260"]
        kubernetes.io/iscsi/10.0.0.1:3261:eui.02004567A425678D:0 kubernetes.io/iscsi/10.0.0.1:3261:eui.02004567A425678D:0 /r/plugins/kubernetes.io/iscsi/iface-10.0.0.1:3261:pv/10.0.0.1:3261-eui.02004567A425678D-lun-0 ["10.0.0.1:3261", "10.0.0.2:3260"]
        "#);
        assert_eq!(own.secret.map(|secret| secret.namespace).as_deref(), Some("prod"));
        assert_eq!(plain.problem(), None);
        let hostile = json!({"targetPortal": "10.0.0.1", "iqn": "../../x", "lun": 0});
        assert!(volume(hostile).problem().is_some());
        assert_eq!(IscsiDevice::parse("volumeDevices", "x"), None);
        for iqn in ["naa.52004567BA64678D52004567BA64678D", "eui.02004567A425678D", "iqn.2001-04.com.example:a-lun-1"] {
            let device = volume(json!({"targetPortal": "10.0.0.1", "iqn": iqn, "lun": 7})).device("pv");
            let dir = device.dir(Path::new("/r"));
            let name = dir.file_name().and_then(|name| name.to_str()).unwrap();
            assert_eq!(IscsiDevice::parse("iface-default", name), Some(device), "a device is found again on disk");
        }
    }

    #[test]
    fn answers_of_iscsiadm_are_read() {
        let shown = "# BEGIN RECORD 2.1.8\niface.iscsi_ifacename = default\niface.net_ifacename = <empty>\n\
                     iface.transport_name = tcp\niface.initiatorname = <empty>\niface.mtu = 0\n# END RECORD\n";
        assert_eq!(transport(shown), Some("tcp"));
        assert_eq!(transport("iface.transport_name = <empty>\n"), Some("tcp"));
        assert_eq!(transport(""), None);
        let settings: Vec<_> = iface_settings(shown).into_iter().collect();
        assert_eq!(settings, [("iface.mtu", "0"), ("iface.transport_name", "tcp")]);
        let link = disk_link("tcp", "[fd00::1]:3260", "iqn.x", 1);
        assert_eq!(link, DiskLink::Named("ip-fd00::1:3260-iscsi-iqn.x-lun-1".to_owned()));
        let link = disk_link("be2iscsi", "10.0.0.1:3260", "iqn.x", 1);
        assert_eq!(link, DiskLink::EndsWith("-ip-10.0.0.1:3260-iscsi-iqn.x-lun-1".to_owned()));
    }

    #[test]
    fn paths_are_waited_for_in_rounds() {
        for (found, wanted, rounds, expected) in
            [(0, 1, 1, true), (1, 1, 1, true), (1, 2, 1, false), (2, 3, 1, false), (2, 3, 2, true), (1, 2, 5, true)]
        {
            assert_eq!(has_enough_paths(found, wanted, rounds), expected, "{found} of {wanted} after {rounds}");
        }
    }
}
