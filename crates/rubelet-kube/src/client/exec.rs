//! Credentials from an exec plugin.
//!
//! Owns: running the plugin and decoding its output. Never: stores the output, or shows it.
//! Upstream: `client-go/plugin/pkg/client/auth/exec`.

use std::{process::Stdio, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::Deserialize;
use serde_json::json;
use tokio::{io::AsyncReadExt as _, process::Command};

use crate::kubeconfig::{ClientCertificate, Cluster, ExecPlugin, Source, Verification};

/// Plugins call a service in the network; a slower one hangs.
const DEADLINE: Duration = Duration::from_secs(60);
/// A token or a certificate with its key are a few KiB.
const MAX_ANSWER_BYTES: u64 = 1 << 20;

#[derive(Debug)]
pub(super) struct Issued {
    pub(super) token: Option<String>,
    pub(super) certificate: Option<ClientCertificate>,
    /// `None`: no expiry, valid until the server rejects it.
    pub(super) expires: Option<jiff::Timestamp>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ExecCredential {
    api_version: String,
    status: Option<ExecCredentialStatus>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ExecCredentialStatus {
    token: String,
    client_certificate_data: String,
    client_key_data: String,
    expiration_timestamp: Option<jiff::Timestamp>,
}

/// Runs the plugin without a terminal; its stderr is that of the agent.
pub(super) async fn run(plugin: &ExecPlugin, cluster: &Cluster) -> Result<Issued, String> {
    let name = plugin.command.display();
    match tokio::time::timeout(DEADLINE, output(plugin, cluster)).await {
        Ok(answer) => {
            answer.and_then(|answer| issued(plugin, &answer)).map_err(|error| format!("exec {name}: {error}"))
        }
        Err(_elapsed) => Err(format!("exec {name}: no answer within {DEADLINE:?}")),
    }
}

async fn output(plugin: &ExecPlugin, cluster: &Cluster) -> Result<Vec<u8>, String> {
    let mut child = Command::new(&plugin.command)
        .args(&plugin.args)
        .envs(plugin.env.iter().map(|(name, value)| (name, value)))
        .env("KUBERNETES_EXEC_INFO", exec_info(plugin, cluster)?)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| match plugin.install_hint.trim() {
            "" => error.to_string(),
            hint => format!("{error}\n{hint}"),
        })?;
    let mut answer = Vec::new();
    let stdout = child.stdout.take().expect("it is piped");
    stdout.take(MAX_ANSWER_BYTES).read_to_end(&mut answer).await.map_err(|error| error.to_string())?;
    let status = child.wait().await.map_err(|error| error.to_string())?;
    if status.success() { Ok(answer) } else { Err(format!("failed: {status}")) }
}

/// The plugin's input: the API version and, if requested, the cluster.
fn exec_info(plugin: &ExecPlugin, cluster: &Cluster) -> Result<String, String> {
    let mut spec = json!({"interactive": false});
    if plugin.is_told_the_cluster {
        let mut about = json!({"server": cluster.server.to_string().trim_end_matches('/')});
        if let Some(name) = &cluster.tls_server_name {
            about["tls-server-name"] = json!(name);
        }
        if cluster.verification == Verification::Skipped {
            about["insecure-skip-tls-verify"] = json!(true);
        }
        let authority = match &cluster.certificate_authority {
            Some(Source::Data(bytes)) => Some(bytes.clone()),
            Some(Source::File(path)) => Some(
                std::fs::read(path).map_err(|error| format!("certificate-authority {}: {error}", path.display()))?,
            ),
            None => None,
        };
        if let Some(authority) = authority {
            about["certificate-authority-data"] = json!(STANDARD.encode(authority));
        }
        spec["cluster"] = about;
    }
    Ok(json!({"kind": "ExecCredential", "apiVersion": plugin.api_version, "spec": spec}).to_string())
}

fn issued(plugin: &ExecPlugin, answer: &[u8]) -> Result<Issued, String> {
    // The library's message may quote the output, which is secret.
    let credential: ExecCredential =
        serde_json::from_slice(answer).map_err(|_| "its answer is not an ExecCredential in JSON".to_owned())?;
    if credential.api_version != plugin.api_version {
        let (asked, got) = (&plugin.api_version, &credential.api_version);
        return Err(format!("it was asked for {asked} and answered with {got}: set the user's `apiVersion`"));
    }
    let Some(status) = credential.status else {
        return Err("its answer has no status".to_owned());
    };
    let pem = |text: String| Source::Data(text.into_bytes());
    let certificate = match (status.client_certificate_data.is_empty(), status.client_key_data.is_empty()) {
        (true, true) => None,
        (false, false) => Some(ClientCertificate {
            certificate: pem(status.client_certificate_data),
            key: pem(status.client_key_data),
        }),
        _ => return Err("its answer has a certificate or a key, not both".to_owned()),
    };
    let token = Some(status.token).filter(|token| !token.is_empty());
    if token.is_none() && certificate.is_none() {
        return Err("its answer has neither a token nor a certificate".to_owned());
    }
    Ok(Issued { token, certificate, expires: status.expiration_timestamp })
}
