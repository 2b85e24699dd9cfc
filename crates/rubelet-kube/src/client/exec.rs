//! Credentials from an exec plugin.
//!
//! Owns: running the plugin and decoding its output. Never: stores the output, or shows it.
//! Upstream: `client-go/plugin/pkg/client/auth/exec`.

use std::{
    io,
    path::PathBuf,
    process::{ExitStatus, Stdio},
    time::Duration,
};

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

#[derive(Debug, thiserror::Error)]
#[error("exec {}", command.display())]
pub(crate) struct ExecError {
    command: PathBuf,
    source: ExecFailure,
}

#[derive(Debug, thiserror::Error)]
enum ExecFailure {
    #[error("no answer within {DEADLINE:?}")]
    Late,
    // The hint comes last, so the cause is in the text and not in the chain.
    #[error("{error}\n{hint}")]
    NotStarted { error: io::Error, hint: String },
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("failed: {0}")]
    Exit(ExitStatus),
    #[error("certificate-authority {}", path.display())]
    Authority { path: PathBuf, source: io::Error },
    // Without its cause, which may quote the output: that is secret.
    #[error("its answer is not an ExecCredential in JSON")]
    NotJson,
    #[error("it was asked for {asked} and answered with {got}: set the user's `apiVersion`")]
    Version { asked: String, got: String },
    #[error("its answer has no status")]
    NoStatus,
    #[error("its answer has a certificate or a key, not both")]
    HalfAPair,
    #[error("its answer has neither a token nor a certificate")]
    NoCredential,
}

/// Runs the plugin without a terminal; its stderr is that of the agent.
pub(super) async fn run(plugin: &ExecPlugin, cluster: &Cluster) -> Result<Issued, ExecError> {
    let answered = match tokio::time::timeout(DEADLINE, output(plugin, cluster)).await {
        Ok(answer) => answer.and_then(|answer| issued(plugin, &answer)),
        Err(_elapsed) => Err(ExecFailure::Late),
    };
    answered.map_err(|source| ExecError { command: plugin.command.clone(), source })
}

async fn output(plugin: &ExecPlugin, cluster: &Cluster) -> Result<Vec<u8>, ExecFailure> {
    let mut child = Command::new(&plugin.command)
        .args(&plugin.args)
        .envs(plugin.env.iter().map(|(name, value)| (name, value)))
        .env("KUBERNETES_EXEC_INFO", exec_info(plugin, cluster)?)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| match plugin.install_hint.trim() {
            "" => ExecFailure::Io(error),
            hint => ExecFailure::NotStarted { error, hint: hint.to_owned() },
        })?;
    let mut answer = Vec::new();
    let stdout = child.stdout.take().expect("it is piped");
    stdout.take(MAX_ANSWER_BYTES).read_to_end(&mut answer).await?;
    let status = child.wait().await?;
    if status.success() { Ok(answer) } else { Err(ExecFailure::Exit(status)) }
}

/// The plugin's input: the API version and, if requested, the cluster.
fn exec_info(plugin: &ExecPlugin, cluster: &Cluster) -> Result<String, ExecFailure> {
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
            Some(Source::File(path)) => {
                Some(std::fs::read(path).map_err(|source| ExecFailure::Authority { path: path.clone(), source })?)
            }
            None => None,
        };
        if let Some(authority) = authority {
            about["certificate-authority-data"] = json!(STANDARD.encode(authority));
        }
        spec["cluster"] = about;
    }
    Ok(json!({"kind": "ExecCredential", "apiVersion": plugin.api_version, "spec": spec}).to_string())
}

fn issued(plugin: &ExecPlugin, answer: &[u8]) -> Result<Issued, ExecFailure> {
    let credential: ExecCredential = serde_json::from_slice(answer).map_err(|_| ExecFailure::NotJson)?;
    if credential.api_version != plugin.api_version {
        let asked = plugin.api_version.clone();
        return Err(ExecFailure::Version { asked, got: credential.api_version });
    }
    let status = credential.status.ok_or(ExecFailure::NoStatus)?;
    let pem = |text: String| Source::Data(text.into_bytes());
    let certificate = match (status.client_certificate_data.is_empty(), status.client_key_data.is_empty()) {
        (true, true) => None,
        (false, false) => Some(ClientCertificate {
            certificate: pem(status.client_certificate_data),
            key: pem(status.client_key_data),
        }),
        _ => return Err(ExecFailure::HalfAPair),
    };
    let token = Some(status.token).filter(|token| !token.is_empty());
    if token.is_none() && certificate.is_none() {
        return Err(ExecFailure::NoCredential);
    }
    Ok(Issued { token, certificate, expires: status.expiration_timestamp })
}
