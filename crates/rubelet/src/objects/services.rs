//! The services of the cluster, for the environment variables of containers.
//!
//! Owns: one watch of all services with a cluster IP, and the fields kept of each.
//! Upstream: the service informer of `NewMainKubelet`.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use k8s_openapi::api::core::v1 as api;
use rubelet_core::{
    container::environment::{
        Services,
        services::{Links, ServiceMap, variables},
    },
    objects::Service,
};
use rubelet_kube::{
    port::ObjectPath,
    reflector::{self, Delta, Selection},
};
use tokio::{
    sync::{mpsc, watch},
    time::timeout,
};

use super::{FIRST_LIST, Shared, locked};

/// The receiver is far faster than the server.
const BACKLOG: usize = 16;

#[derive(Debug, Default)]
pub struct KnownServices {
    services: Mutex<ServiceMap>,
    is_read: watch::Sender<bool>,
}

/// Whether to wait for the first list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    Wait,
    /// A static pod starts with the services known so far.
    Now,
}

impl KnownServices {
    /// The variables for a pod of this namespace.
    pub async fn variables(&self, namespace: &str, links: Links, patience: Patience) -> Services {
        let wait = match patience {
            Patience::Wait => FIRST_LIST,
            Patience::Now => Duration::ZERO,
        };
        let mut is_read = self.is_read.subscribe();
        if timeout(wait, is_read.wait_for(|is_read| *is_read)).await.is_err() {
            return Services::Unread;
        }
        Services::Read(variables(&locked(&self.services), namespace, links))
    }

    fn take_in(&self, change: Delta) {
        let mut services = locked(&self.services);
        match change {
            Delta::Replaced(all) => *services = all.iter().filter_map(|body| kept(&read(body)?)).collect(),
            Delta::Applied(body) => {
                if let Some(service) = read(&body) {
                    match kept(&service) {
                        Some((name, kept)) => drop(services.insert(name, kept)),
                        None => drop(services.remove(&name_of(&service))),
                    }
                }
            }
            Delta::Deleted(body) => {
                if let Some(service) = read(&body) {
                    services.remove(&name_of(&service));
                }
            }
        }
        drop(services);
        self.is_read.send_if_modified(|is_read| !std::mem::replace(is_read, true));
    }
}

pub(super) async fn follow(shared: Arc<Shared>) {
    // Services without an address have no variables, so they are not requested.
    let fields = Some("spec.clusterIP!=None".to_owned());
    let selection = Selection { collection: ObjectPath::all("v1", "services"), fields };
    let (sender, mut changes) = mpsc::channel(BACKLOG);
    let taking_in = async {
        while let Some(change) = changes.recv().await {
            shared.services.take_in(change);
        }
    };
    tokio::select! {
        biased;
        // Neither is awaited again after the other has ended.
        () = taking_in => {}
        () = reflector::follow(&*shared.api, &selection, shared.seed("services"), &sender) => {}
    }
}

fn read(body: &[u8]) -> Option<api::Service> {
    serde_json::from_slice(body).inspect_err(|error| tracing::warn!("failed to decode a service: {error}")).ok()
}

fn kept(service: &api::Service) -> Option<((String, String), Service)> {
    Some((name_of(service), Service::of(service)?))
}

fn name_of(service: &api::Service) -> (String, String) {
    let metadata = &service.metadata;
    (metadata.namespace.clone().unwrap_or_default(), metadata.name.clone().unwrap_or_default())
}
