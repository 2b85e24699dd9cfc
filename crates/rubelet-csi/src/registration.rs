//! The client of plugin registration.
//!
//! Owns: the deadlines of its two calls. Never: decides whether a plugin is accepted.
//! Upstream: `pluginmanager/operationexecutor`.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use tonic::transport::Channel;

use crate::{
    CsiResult,
    pluginregistration::{InfoRequest, PluginInfo, RegistrationStatus, registration_client},
    socket::{MAX_MESSAGE_BYTES, call},
};

/// Upstream's.
const INFO_TIMEOUT: Duration = Duration::from_secs(1);
/// Upstream's.
const NOTIFY_TIMEOUT: Duration = Duration::from_secs(5);

/// A plugin's socket in the registry.
#[derive(Clone, Debug)]
pub struct RegistrationClient {
    socket: PathBuf,
}

impl RegistrationClient {
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        RegistrationClient { socket: socket.into() }
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    pub async fn info(&self) -> CsiResult<PluginInfo> {
        call(&self.socket, INFO_TIMEOUT, InfoRequest {}, |channel, request| async move {
            service(channel).get_info(request).await
        })
        .await
    }

    /// The error is shown to the plugin's owner: registrars log it and exit.
    pub async fn notify(&self, outcome: Result<(), String>) -> CsiResult<()> {
        let status =
            RegistrationStatus { plugin_registered: outcome.is_ok(), error: outcome.err().unwrap_or_default() };
        call(&self.socket, NOTIFY_TIMEOUT, status, |channel, request| async move {
            service(channel).notify_registration_status(request).await
        })
        .await?;
        Ok(())
    }
}

fn service(channel: Channel) -> registration_client::RegistrationClient<Channel> {
    registration_client::RegistrationClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES)
}
