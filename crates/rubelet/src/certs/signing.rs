//! Creates a CertificateSigningRequest and waits for the certificate.
//!
//! Owns: the object, what its conditions mean, and waiting through broken watches and an unreachable server.
//! Never: decides whether and when to request again. Upstream: `client-go/util/certificate/csr`.

use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::{
    ByteString,
    api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestSpec},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use rcgen::KeyPair;
use rubelet_kube::{
    calls, error_chain,
    port::{ApiError, ApiErrorKind, ApiServer, Lane, ObjectPath, Watch, WatchEvent},
};
use tokio::time::{sleep, timeout};

use super::CertificateTemplate;

const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// A watch is reopened after this long, after a fresh read: a lost event costs no more.
const WATCH_SECS: u64 = 300;
/// The server ends the watch; this bounds a watch on a dead connection.
const WATCH_OVERDUE: Duration = Duration::from_secs(WATCH_SECS + 30);
const BETWEEN_LOOKS: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
pub(super) enum SigningError {
    #[error("failed to create the request")]
    Request(#[from] rcgen::Error),
    #[error(transparent)]
    Api(#[from] ApiError),
    /// Denied by an approver.
    #[error("certificate signing request {name:?} {message}")]
    Refused { name: String, message: String },
    #[error("certificate signing request {name:?} was not decided within {} minutes", patience.as_secs() / 60)]
    NotAnswered { name: String, patience: Duration },
}

impl SigningError {
    /// The server may be unreachable or busy.
    pub(super) fn is_passing(&self) -> bool {
        matches!(self, SigningError::Api(error) if is_passing(error))
    }
}

/// How a request is named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Name {
    /// A new one each time.
    Generated,
    /// From key and template: finds the request of an earlier run.
    Digested,
}

/// Returns the chain in PEM. Waits at most `patience` once the request exists.
pub(super) async fn request_certificate(
    api: &dyn ApiServer,
    template: &CertificateTemplate,
    key: &KeyPair,
    name: Name,
    patience: Duration,
) -> Result<String, SigningError> {
    let made = create(api, template, key, name).await?;
    let name = made.metadata.name.clone().unwrap_or_default();
    tracing::info!(
        csr = name,
        signer = template.purpose.signer(),
        "CSR pending; unless it is approved automatically, approve with: kubectl certificate approve {name}"
    );
    match timeout(patience, issued(api, &made, &name)).await {
        Ok(answer) => answer,
        Err(_) => Err(SigningError::NotAnswered { name, patience }),
    }
}

async fn create(
    api: &dyn ApiServer,
    template: &CertificateTemplate,
    key: &KeyPair,
    name: Name,
) -> Result<CertificateSigningRequest, SigningError> {
    let name = (name == Name::Digested).then(|| template.digested_name(key));
    let generate_name = name.is_none().then(|| "csr-".to_owned());
    let request = CertificateSigningRequest {
        metadata: ObjectMeta { name: name.clone(), generate_name, ..ObjectMeta::default() },
        spec: CertificateSigningRequestSpec {
            request: ByteString(template.request(key)?.into_bytes()),
            signer_name: template.purpose.signer().to_owned(),
            usages: Some(template.purpose.usages().map(str::to_owned).to_vec()),
            ..CertificateSigningRequestSpec::default()
        },
        status: None,
    };
    match (calls::create(api, Lane::Ordinary, collection(), &request, CALL_TIMEOUT).await, name) {
        (Err(error), Some(name)) if error.kind == ApiErrorKind::AlreadyExists => {
            tracing::info!(csr = name, "CSR exists already, waiting for it");
            Ok(look(api, &name).await?)
        }
        (answer, _) => Ok(answer?),
    }
}

/// Reads and watches in turn until the request is decided.
async fn issued(api: &dyn ApiServer, made: &CertificateSigningRequest, name: &str) -> Result<String, SigningError> {
    let mut is_approved = false;
    loop {
        match look_and_watch(api, made, name, &mut is_approved).await {
            Ok(Some(chain)) => return Ok(chain),
            Ok(None) => {}
            Err(SigningError::Api(error)) if is_passing(&error) => {
                tracing::warn!(csr = name, error = error_chain(&error), "failed to watch CSR, will retry");
            }
            Err(error) => return Err(error),
        }
        sleep(BETWEEN_LOOKS).await;
    }
}

/// `None`: the watch ended before a decision.
async fn look_and_watch(
    api: &dyn ApiServer,
    made: &CertificateSigningRequest,
    name: &str,
    is_approved: &mut bool,
) -> Result<Option<String>, SigningError> {
    let refused = |message: String| SigningError::Refused { name: name.to_owned(), message };
    let mut judge = |csr: &CertificateSigningRequest| match state_of(csr, made) {
        CsrState::Issued(chain) => Ok(Some(chain)),
        CsrState::Refused(message) => Err(refused(message)),
        CsrState::Approved if !std::mem::replace(is_approved, true) => {
            tracing::info!(csr = name, "CSR approved, waiting for the certificate");
            Ok(None)
        }
        CsrState::Approved | CsrState::Undecided => Ok(None),
    };
    let found = match look(api, name).await {
        Err(error) if error.kind == ApiErrorKind::NotFound => return Err(refused("was deleted".to_owned())),
        found => found?,
    };
    if let Some(chain) = judge(&found)? {
        return Ok(Some(chain));
    }
    let query = vec![
        ("watch", "true".to_owned()),
        ("fieldSelector", format!("metadata.name={name}")),
        ("resourceVersion", found.metadata.resource_version.unwrap_or_default()),
        ("timeoutSeconds", WATCH_SECS.to_string()),
    ];
    let mut changes = api.watch(Watch { collection: collection(), query }).await?;
    while let Ok(Some(change)) = timeout(WATCH_OVERDUE, changes.next()).await {
        match change? {
            WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                // An undecodable object is read again, and that reports the reason.
                let Ok(csr) = serde_json::from_slice(&object) else { return Ok(None) };
                if let Some(chain) = judge(&csr)? {
                    return Ok(Some(chain));
                }
            }
            WatchEvent::Deleted(_) => return Err(refused("was deleted".to_owned())),
            WatchEvent::Bookmark(_) => {}
        }
    }
    Ok(None)
}

async fn look(api: &dyn ApiServer, name: &str) -> Result<CertificateSigningRequest, ApiError> {
    calls::get(api, Lane::Ordinary, collection().named(name), CALL_TIMEOUT).await
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum CsrState {
    Undecided,
    Approved,
    Issued(String),
    Refused(String),
}

fn state_of(csr: &CertificateSigningRequest, made: &CertificateSigningRequest) -> CsrState {
    if csr.metadata.uid != made.metadata.uid {
        return CsrState::Refused("was replaced by another of the same name".to_owned());
    }
    let Some(status) = &csr.status else { return CsrState::Undecided };
    let conditions = status.conditions.iter().flatten();
    let mut is_approved = false;
    for condition in conditions {
        let why = [condition.reason.as_deref(), condition.message.as_deref()];
        let why = why.into_iter().flatten().collect::<Vec<_>>().join(": ");
        match condition.type_.as_str() {
            "Denied" => return CsrState::Refused(format!("was denied ({why})")),
            "Failed" => return CsrState::Refused(format!("failed ({why})")),
            "Approved" => is_approved = true,
            _ => {}
        }
    }
    match &status.certificate {
        Some(ByteString(chain)) if is_approved && !chain.is_empty() => {
            CsrState::Issued(String::from_utf8_lossy(chain).into_owned())
        }
        _ if is_approved => CsrState::Approved,
        _ => CsrState::Undecided,
    }
}

fn is_passing(error: &ApiError) -> bool {
    match error.kind {
        ApiErrorKind::Unreachable
        | ApiErrorKind::Server
        | ApiErrorKind::Unreadable
        | ApiErrorKind::TooManyRequests { .. }
        | ApiErrorKind::Expired
        | ApiErrorKind::Conflict => true,
        ApiErrorKind::NotFound
        | ApiErrorKind::AlreadyExists
        | ApiErrorKind::Unauthorized
        | ApiErrorKind::Forbidden
        | ApiErrorKind::Invalid => false,
    }
}

fn collection() -> ObjectPath {
    ObjectPath::all("certificates.k8s.io/v1", "certificatesigningrequests")
}

#[cfg(test)]
mod tests;
