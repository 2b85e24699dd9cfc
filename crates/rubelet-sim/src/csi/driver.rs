//! The simulated drivers: what each can do, whether it runs, and its sockets on the node's disk.
//!
//! Owns: their starts and ends. A driver keeps what it did in the node's mount table, as real ones do; a forgetful one also
//! wants to have staged a volume itself since it was started. Never: serves a call (`act.rs`).

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    time::Duration,
};

use rubelet_csi::{NodeCapabilities, pluginregistration::PluginInfo};
use sha2::{Digest, Sha256};

use crate::{
    invariants::{
        csi::{KUBELET, STAGED},
        trouble::Touched,
    },
    simulation::{ScheduledEvent, SimState},
};

/// What volumes hold, by driver and handle.
const VOLUMES: &str = "/sim/volumes";
pub(super) const VOLUME_BYTES: i64 = 1 << 30;

/// A volume of a driver, which is attached and staged once for all its pods.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Device {
    pub driver: String,
    pub handle: String,
}

impl Device {
    pub(crate) fn new(driver: &str, handle: &str) -> Self {
        Device { driver: driver.to_owned(), handle: handle.to_owned() }
    }

    /// As `volumesInUse` and `volumesAttached` name it.
    pub(crate) fn unique_name(&self) -> String {
        format!("kubernetes.io/csi/{}^{}", self.driver, self.handle)
    }

    /// Where the agent stages it.
    pub(crate) fn staging_dir(&self) -> PathBuf {
        Path::new(STAGED).join(&self.driver).join(sha256_hex(&[&self.handle]))
    }

    /// What a mount of the volume shows.
    pub(crate) fn content(&self) -> PathBuf {
        Path::new(VOLUMES).join(&self.driver).join(&self.handle)
    }
}

pub(super) fn sha256_hex(parts: &[&str]) -> String {
    let mut digest = Sha256::new();
    parts.iter().for_each(|part| digest.update(part.as_bytes()));
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}^{}", self.driver, self.handle)
    }
}

/// A driver as a play installs it.
#[derive(Clone, Debug)]
pub(crate) struct DriverScript {
    pub name: String,
    pub capabilities: NodeCapabilities,
    /// Its volumes must be attached to a node.
    pub attaches: bool,
    /// Without a CSIDriver object its volumes must be attached, and inline volumes are refused.
    pub has_object: bool,
    /// After a restart it publishes no volume that it has not staged since.
    pub is_forgetful: bool,
    /// It mounts volumes with the SELinux label it is told.
    pub takes_label: bool,
    /// How many volumes it can have on the node; the node asks for it from time to time.
    pub limit: Option<usize>,
}

impl From<&str> for DriverScript {
    /// One that is attached and staged.
    fn from(name: &str) -> Self {
        DriverScript {
            name: name.to_owned(),
            capabilities: NodeCapabilities { stage_unstage: true, ..NodeCapabilities::default() },
            attaches: true,
            has_object: true,
            is_forgetful: false,
            takes_label: false,
            limit: None,
        }
    }
}

impl DriverScript {
    /// Its volumes are only published.
    pub(crate) fn without_stage(mut self) -> Self {
        self.capabilities.stage_unstage = false;
        self
    }

    pub(crate) fn without_attach(mut self) -> Self {
        self.attaches = false;
        self
    }

    pub(crate) fn without_object(mut self) -> Self {
        self.has_object = false;
        self
    }

    pub(crate) fn labelled(mut self) -> Self {
        self.takes_label = true;
        self
    }

    /// It makes file systems larger on the node.
    pub(crate) fn expanding(mut self) -> Self {
        self.capabilities.expand = true;
        self
    }

    pub(crate) fn limited_to(mut self, volumes: usize) -> Self {
        self.limit = Some(volumes);
        self
    }

    pub(crate) fn forgetful(mut self) -> Self {
        self.is_forgetful = true;
        self
    }
}

#[derive(Debug)]
pub(crate) struct Driver {
    pub script: DriverScript,
    pub is_up: bool,
    /// Its registrar is another process.
    pub has_registrar: bool,
    /// Grows with each end: calls of an earlier process of the driver are lost.
    pub epoch: u32,
    /// By handle.
    pub volumes: BTreeMap<String, VolumeSize>,
    /// Volumes with a call under way, by handle: every other one is answered with Aborted, as CSI asks for.
    pub pending: BTreeMap<String, u64>,
    /// Handles that this process of the driver has staged.
    pub staged: BTreeSet<String>,
}

/// In bytes. A file system grows after its volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VolumeSize {
    pub volume: i64,
    pub file_system: i64,
}

/// How a driver ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DriverEnd {
    /// It removes its sockets.
    Stops,
    /// Its sockets stay, and nobody listens on them.
    Dies,
    /// So it does, but its registrar goes on: the driver does not register again when it is back.
    DiesAlone,
}

impl Driver {
    fn registrar_socket(&self) -> PathBuf {
        Path::new(KUBELET).join("plugins_registry").join(format!("{}-reg.sock", self.script.name))
    }

    fn socket(&self) -> PathBuf {
        Path::new(KUBELET).join("plugins").join(&self.script.name).join("csi.sock")
    }

    pub(super) fn has_socket(&self, socket: &Path) -> bool {
        socket == self.socket() || socket == self.registrar_socket()
    }

    pub(super) fn info(&self) -> PluginInfo {
        PluginInfo {
            r#type: "CSIPlugin".to_owned(),
            name: self.script.name.clone(),
            endpoint: self.socket().to_string_lossy().into_owned(),
            supported_versions: vec!["1.0.0".to_owned()],
        }
    }
}

impl SimState {
    /// Drivers are never uninstalled.
    pub(crate) fn driver(&mut self, name: &str) -> &mut Driver {
        self.csi.drivers.get_mut(name).expect("calls are those of installed drivers")
    }

    /// The driver does not run yet.
    pub(crate) fn install_driver(&mut self, script: DriverScript) {
        let driver = Driver {
            script: script.clone(),
            is_up: false,
            has_registrar: false,
            epoch: 0,
            volumes: BTreeMap::new(),
            pending: BTreeMap::new(),
            staged: BTreeSet::new(),
        };
        self.csi.drivers.insert(script.name, driver);
    }

    pub(crate) fn add_volume(&mut self, device: &Device) {
        let size = VolumeSize { volume: VOLUME_BYTES, file_system: VOLUME_BYTES };
        self.driver(&device.driver).volumes.insert(device.handle.clone(), size);
        self.disk.make_dir(&device.content(), 0o755).expect("an empty disk takes directories");
    }

    pub(crate) fn start_driver(&mut self, name: &str) {
        let driver = self.driver(name);
        if driver.is_up {
            return;
        }
        driver.is_up = true;
        let registrar = (!driver.has_registrar).then(|| driver.registrar_socket());
        driver.has_registrar = true;
        let sockets = [Some(driver.socket()), registrar];
        self.log("csi", format!("{name} starts"));
        sockets.into_iter().flatten().for_each(|socket| self.listen_on(&socket));
    }

    /// Its own directories are not those of pods, so that it has room for them.
    fn listen_on(&mut self, socket: &Path) {
        let full = std::mem::take(&mut self.disk.full);
        let dir = socket.parent().unwrap_or(Path::new("/"));
        if self.disk.list_dir(dir).is_err() {
            self.disk.make_dir(dir, 0o755).expect("there is room");
        }
        self.disk.make_socket(socket).expect("its directory is there");
        self.disk.full = full;
    }

    pub(crate) fn end_driver(&mut self, name: &str, how: DriverEnd) {
        let driver = self.driver(name);
        if !driver.is_up {
            return;
        }
        driver.is_up = false;
        driver.has_registrar = how == DriverEnd::DiesAlone;
        driver.epoch += 1;
        driver.pending.clear();
        driver.staged.clear();
        let sockets = [driver.registrar_socket(), driver.socket()];
        self.log("csi", format!("{name} {how:?}"));
        if how == DriverEnd::Stops {
            for socket in sockets {
                self.disk.remove_file(&socket).expect("a socket is a file");
            }
        }
    }

    pub(crate) fn start_all_drivers(&mut self) {
        for name in self.csi.drivers.keys().cloned().collect::<Vec<_>>() {
            self.start_driver(&name);
        }
    }

    /// Only its socket in the registry goes; it is back some seconds later.
    pub(super) fn restart_registrar(&mut self, name: &str) {
        let socket = self.driver(name).registrar_socket();
        self.disk.remove_file(&socket).expect("a socket is a file");
        let wait = Duration::from_millis(self.rng.u64(500..10_000));
        self.schedule_in(wait, ScheduledEvent::RegistrarReturns(name.to_owned()));
    }

    pub(crate) fn bring_registrar_back(&mut self, name: &str) {
        let driver = self.driver(name);
        let (has_registrar, socket) = (driver.has_registrar, driver.registrar_socket());
        if has_registrar {
            self.listen_on(&socket);
        }
    }

    /// A fault of the driver is one of all pods that use its volumes.
    pub(super) fn strike_users_of(&mut self, driver: &str) {
        for (uid, device) in self.users_of_devices() {
            if device.driver == driver {
                self.rules.trouble.strike(Touched::Pod(uid), self.now);
            }
        }
    }
}
