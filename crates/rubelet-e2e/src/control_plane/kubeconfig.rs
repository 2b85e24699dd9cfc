//! Kubeconfigs for a control plane.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use crate::control_plane::certificates::Identity;

/// The user.
#[derive(Clone, Debug)]
pub enum Credential<'a> {
    Certificate(&'a Identity),
    Token(&'a str),
    /// From an exec plugin.
    Program(&'a Path),
}

/// A kubeconfig is JSON here, which is YAML.
pub fn write(path: &Path, server: &str, authority: &Path, credential: &Credential<'_>) -> anyhow::Result<PathBuf> {
    let user = match credential {
        Credential::Certificate(identity) => {
            json!({ "client-certificate": identity.certificate, "client-key": identity.key })
        }
        Credential::Token(token) => json!({ "token": token }),
        Credential::Program(command) => json!({ "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": command,
            "interactiveMode": "Never",
        } }),
    };
    let config: Value = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "testbed", "cluster": { "server": server, "certificate-authority": authority } }],
        "users": [{ "name": "testbed", "user": user }],
        "contexts": [{ "name": "testbed", "context": { "cluster": "testbed", "user": "testbed" } }],
        "current-context": "testbed",
    });
    fs::write(path, serde_json::to_string_pretty(&config)?)?;
    Ok(path.to_owned())
}
