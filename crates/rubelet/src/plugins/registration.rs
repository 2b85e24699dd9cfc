//! One socket of the registry: its plugin is registered as long as the socket is there.
//!
//! Owns: the order of the calls, the tries and their back-off, and which socket has which driver's name. Never: decides which
//! plugin is accepted (`rubelet_core::csi_node`).
//! Upstream: `pluginmanager/operationexecutor`, `csi.RegistrationHandler`. There a driver is unusable while the API server is
//! away; here it is usable once NodeGetInfo succeeded.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rubelet_core::{
    csi_node::{self, AcceptedPlugin, DriverVersion, PluginInfo},
    event::Event,
};
use rubelet_csi::DriverAddress;
use rubelet_host::port::FileIdentity;
use tokio::{
    sync::{mpsc, watch},
    time::{sleep, timeout},
};

use super::{driver_on_node, limits};
use crate::{
    node::csi_node::{CsiNodeWriter, WriteError},
    world::World,
};

/// Wait after a failed try, doubled up to the maximum, as upstream.
const RETRY_FIRST: Duration = Duration::from_millis(500);
const RETRY_MAX: Duration = Duration::from_secs(122);
/// A socket that was there, or gone, for this long begins without a wait the next time.
const SETTLED_AFTER: Duration = Duration::from_secs(10);
/// Of what a plugin is told and the log shows: its own words may be part of it.
const MAX_MESSAGE_CHARS: usize = 1024;

/// Clones share the names.
#[derive(Clone)]
pub(super) struct Registrar {
    world: World,
    csi_node: CsiNodeWriter,
    inbox: mpsc::Sender<Event>,
    /// By the drivers' names.
    owners: Arc<Mutex<BTreeMap<String, Owner>>>,
}

/// The plugin that has a driver's name.
#[derive(Debug)]
struct Owner {
    /// In the registry.
    socket: PathBuf,
    version: DriverVersion,
}

/// How long to wait before the next try.
#[derive(Debug, Default)]
struct Pace {
    wait: Duration,
}

impl Pace {
    fn slow_down(&mut self) {
        self.wait = self.wait.saturating_mul(2).clamp(RETRY_FIRST, RETRY_MAX);
    }
}

impl Registrar {
    pub(super) fn new(world: World, csi_node: CsiNodeWriter, inbox: mpsc::Sender<Event>) -> Self {
        Registrar { world, csi_node, inbox, owners: Arc::default() }
    }

    /// Ends when the socket is gone and its plugin is unregistered.
    pub(super) async fn serve(self, socket: PathBuf, mut found: watch::Receiver<Option<FileIdentity>>) {
        let mut pace = Pace::default();
        loop {
            let began = self.world.clock.now().uptime;
            found.mark_unchanged();
            tokio::select! {
                biased;
                // Cancel-safe: a change that was not seen is seen the next time.
                changed = found.changed() => if changed.is_err() { return },
                // It ends only by the change, at any step: the name that it has by then is released below.
                () = self.keep_registered(&socket, &mut pace) => {}
            }
            if self.world.clock.now().uptime.since(began) >= SETTLED_AFTER {
                pace = Pace::default();
            } else {
                pace.slow_down();
            }
            if let Some(name) = self.release(&socket) {
                tracing::info!(driver = name, socket = %socket.display(), "CSI driver unregistered");
                tokio::select! {
                    biased;
                    // Cancel-safe: a driver that is back is added again, whatever was removed.
                    back = found.wait_for(Option::is_some) => if back.is_err() { return },
                    () = self.withdraw(&name) => {}
                }
            }
            // A socket that comes and goes all the time keeps its back-off, however short that is yet.
            let gone_for_good = async { while found.borrow_and_update().is_none() && found.changed().await.is_ok() {} };
            if timeout(pace.wait.max(SETTLED_AFTER), gone_for_good).await.is_err() {
                return;
            }
        }
    }

    /// Registers, and stays. Cancelled when the socket changes.
    async fn keep_registered(&self, socket: &Path, pace: &mut Pace) {
        let mut problem = None;
        loop {
            sleep(pace.wait).await;
            match self.register(socket).await {
                Ok(name) => {
                    tracing::info!(driver = name, socket = %socket.display(), "CSI driver registered");
                    return limits::keep_updated(&self.world, &self.csi_node, &name).await;
                }
                Err(error) => {
                    if problem.as_ref() != Some(&error) {
                        tracing::warn!(socket = %socket.display(), "{error}");
                        problem = Some(error);
                    }
                    pace.slow_down();
                }
            }
        }
    }

    async fn register(&self, socket: &Path) -> Result<String, String> {
        let plugins = self.world.csi.plugins();
        let info = plugins.plugin_info(socket).await.map_err(|error| {
            let socket = socket.display();
            truncated(format!(
                "RegisterPlugin error -- failed to get plugin info using RPC GetInfo at socket {socket}, err: {error}"
            ))
        })?;
        let info = PluginInfo {
            kind: info.r#type,
            name: info.name,
            endpoint: info.endpoint,
            versions: info.supported_versions,
        };
        let outcome = match self.claim(&info, socket) {
            Ok(plugin) => {
                let installed = self.install(&plugin).await;
                installed.map_err(|why| format!("RegisterPlugin error -- plugin registration failed with err: {why}"))
            }
            Err(why) => Err(why),
        };
        let outcome = outcome.map_err(truncated);
        let told = plugins.notify_registration(socket, outcome.clone()).await.map_err(|error| {
            let socket = socket.display();
            truncated(format!(
                "RegisterPlugin error -- failed to send registration status at socket {socket}, err: {error}"
            ))
        });
        if let Err(why) = outcome.and(told) {
            self.release(socket);
            return Err(why);
        }
        Ok(info.name)
    }

    /// The plugin has the name from here on.
    fn claim(&self, info: &PluginInfo, socket: &Path) -> Result<AcceptedPlugin, String> {
        let mut owners = self.owners();
        let other = |name: &str| owners.get(name).filter(|owner| owner.socket != socket);
        let plugin = csi_node::accept(info, socket, |name| other(name).map(|owner| owner.version.clone()))?;
        let owner = Owner { socket: socket.to_owned(), version: plugin.version.clone() };
        owners.insert(plugin.name.clone(), owner);
        Ok(plugin)
    }

    /// Makes the driver usable, then known in the API. While the API server is away it is usable all the same.
    async fn install(&self, plugin: &AcceptedPlugin) -> Result<(), String> {
        let AcceptedPlugin { name, endpoint, .. } = plugin;
        let address = DriverAddress { name: name.clone(), socket: endpoint.clone() };
        let info = self.world.csi.plugins().node_info(&address).await.map_err(|error| error.to_string())?;
        let on_node = driver_on_node(name, info);
        self.world.csi.register(name, endpoint.clone());
        // A closed inbox is the end of the agent.
        let _ = self.inbox.send(Event::DriverRegistered { driver: name.clone() }).await;
        let mut pace = Pace::default();
        loop {
            match self.csi_node.add(&on_node).await {
                Ok(()) => return Ok(()),
                Err(WriteError::Refused(why)) => return Err(why),
                Err(WriteError::Api(why)) => {
                    pace.slow_down();
                    tracing::warn!(driver = name, "failed to update CSINode, will retry in {:?}: {why}", pace.wait);
                }
            }
            sleep(pace.wait).await;
        }
    }

    /// Removes the driver from the API, unless another socket has its name meanwhile.
    async fn withdraw(&self, name: &str) {
        let mut pace = Pace::default();
        let is_back = || self.owners().contains_key(name);
        while let Err(error) = self.csi_node.remove(name, is_back).await {
            pace.slow_down();
            tracing::warn!(driver = name, "failed to remove the driver from CSINode, will retry: {error}");
            sleep(pace.wait).await;
        }
    }

    /// The socket has no driver's name any more; returns the one it had. Another plugin may have it from here on.
    fn release(&self, socket: &Path) -> Option<String> {
        let mut owners = self.owners();
        let name = owners.iter().find(|(_, owner)| owner.socket == socket).map(|(name, _)| name.clone())?;
        owners.remove(&name);
        self.world.csi.unregister(&name);
        Some(name)
    }

    fn owners(&self) -> MutexGuard<'_, BTreeMap<String, Owner>> {
        // A panic while the lock was held leaves only names.
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn truncated(text: String) -> String {
    match text.char_indices().nth(MAX_MESSAGE_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
