//! NFS volumes.
//!
//! Owns: what is mounted from where, and with which options. Never: mounts it.
//! Upstream: `pkg/volume/nfs`.

use std::net::Ipv6Addr;

use k8s_openapi::api::core::v1::NFSVolumeSource;
use serde::{Deserialize, Serialize};

use super::mounting;

pub const NFS_PLUGIN: &str = "kubernetes.io~nfs";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NfsVolume {
    pub server: String,
    /// On the server.
    pub path: String,
    /// Of the persistent volume.
    pub mount_options: Vec<String>,
}

impl NfsVolume {
    pub fn new(source: &NFSVolumeSource, mount_options: &[String]) -> Self {
        let NFSVolumeSource { server, path, .. } = source;
        NfsVolume { server: server.clone(), path: path.clone(), mount_options: mount_options.to_vec() }
    }

    /// What is mounted.
    pub fn device(&self) -> String {
        let NfsVolume { server, path, .. } = self;
        match server.parse::<Ipv6Addr>() {
            Ok(_) => format!("[{server}]:{path}"),
            Err(_) => format!("{server}:{path}"),
        }
    }

    pub fn options(&self, read_only: bool) -> Vec<String> {
        mounting::join_options(&self.mount_options, read_only.then_some("ro"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_and_options_become_arguments_of_mount() {
        let volume = |server: &str, options: &[&str]| {
            let source = NFSVolumeSource { server: server.to_owned(), path: "/exports".to_owned(), read_only: None };
            NfsVolume::new(&source, &options.iter().map(|option| (*option).to_owned()).collect::<Vec<_>>())
        };
        for (server, device) in [
            ("nfs.example", "nfs.example:/exports"),
            ("192.0.2.1", "192.0.2.1:/exports"),
            ("fd00::1", "[fd00::1]:/exports"),
        ] {
            assert_eq!(volume(server, &[]).device(), device);
        }
        assert_eq!(volume("s", &[]).options(false), Vec::<String>::new());
        assert_eq!(volume("s", &["nfsvers=4.1", "hard", "hard"]).options(true), ["hard", "nfsvers=4.1", "ro"]);
    }
}
