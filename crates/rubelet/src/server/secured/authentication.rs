//! Authentication: client certificate, bearer token, or anonymous.
//!
//! Owns: the order of the authenticators, and what a failure of one of them means. Never: authorization.
//! Upstream: `BuildAuth` of `cmd/kubelet/app/auth.go`, `apiserver/pkg/authentication` (x509, bearertoken, union, anonymous).

use std::{collections::BTreeMap, fmt::Write as _, sync::Arc, time::Duration};

use http::{HeaderMap, header};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use rubelet_kube::{
    calls, error_chain,
    port::{Lane, ObjectPath},
};
use rustls::pki_types::{CertificateDer, UnixTime};
use sha2::{Digest as _, Sha256};

use super::{reviews::Reviews, tls::Tls};
use crate::{
    certs::leaf::Leaf,
    server::connections::Peer,
    world::{Clock, Cluster},
};

/// Upstream's timeout of one review.
pub(crate) const ASK: Duration = Duration::from_secs(10);

const AUTHENTICATED: &str = "system:authenticated";

/// A user as the API server defines it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Identity {
    pub user: String,
    pub uid: String,
    pub groups: Vec<String>,
    pub extra: BTreeMap<String, Vec<String>>,
}

impl Identity {
    fn anonymous() -> Self {
        Identity {
            user: "system:anonymous".to_owned(),
            groups: vec!["system:unauthenticated".to_owned()],
            ..Identity::default()
        }
    }

    fn authenticated(mut self) -> Self {
        if !self.groups.iter().any(|group| group == AUTHENTICATED) {
            self.groups.push(AUTHENTICATED.to_owned());
        }
        self
    }
}

#[derive(Debug)]
pub(crate) struct Authentication {
    pub tls: Arc<Tls>,
    /// TokenReview requests: `authentication.webhook`.
    pub tokens: Option<TokenReviewer>,
    /// `authentication.anonymous.enabled`.
    pub anonymous: bool,
    pub clock: Clock,
}

impl Authentication {
    /// `Ok(None)`: no credentials, and anonymous requests are disabled. An error: the credentials are invalid.
    pub(crate) async fn identify(&self, peer: &Peer, headers: &HeaderMap) -> Result<Option<Identity>, String> {
        let mut failures = Vec::new();
        match self.by_certificate(&peer.certificates).await {
            Ok(Some(identity)) => return Ok(Some(identity.authenticated())),
            Ok(None) => {}
            Err(failure) => failures.push(failure),
        }
        if let (Some(tokens), Some(token)) = (&self.tokens, bearer_token(headers)) {
            match tokens.identify(token).await {
                Ok(Some(identity)) => return Ok(Some(identity.authenticated())),
                Ok(None) => failures.push("invalid bearer token".to_owned()),
                Err(failure) => failures.push(failure),
            }
        }
        match failures.is_empty() {
            true => Ok(self.anonymous.then(Identity::anonymous)),
            false => Err(failures.join(", ")),
        }
    }

    /// The user name is the certificate's common name, the groups its organizations.
    async fn by_certificate(&self, shown: &[CertificateDer<'static>]) -> Result<Option<Identity>, String> {
        let [leaf, intermediates @ ..] = shown else { return Ok(None) };
        let verifier = self.tls.client_verifier().await.map_err(|error| error.to_string())?;
        let Some(verifier) = verifier else { return Ok(None) };
        let seconds = u64::try_from(self.clock.now().wall.as_second()).unwrap_or(0);
        let now = UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        let verified = verifier.verify_client_cert(leaf, intermediates, now);
        verified.map_err(|error| format!("the client certificate: {error}"))?;
        let read = Leaf::parse(leaf).map_err(|error| error_chain(&error))?;
        if read.common_name.is_empty() {
            return Ok(None);
        }
        let credential = ("authentication.kubernetes.io/credential-id".to_owned(), vec![fingerprint(leaf)]);
        Ok(Some(Identity {
            user: read.common_name,
            uid: String::new(),
            groups: read.organizations,
            extra: [credential].into(),
        }))
    }
}

fn fingerprint(certificate: &CertificateDer<'_>) -> String {
    let mut text = "X509SHA256=".to_owned();
    for byte in Sha256::digest(certificate.as_ref()) {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

fn bearer_token(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?.trim();
    let (scheme, token) = value.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

/// Authenticates bearer tokens with the API server.
#[derive(Debug)]
pub(crate) struct TokenReviewer {
    cluster: Cluster,
    keep: Duration,
    known: Reviews<Option<Identity>>,
}

impl TokenReviewer {
    pub(crate) fn new(cluster: Cluster, keep: Duration, clock: Clock) -> Self {
        TokenReviewer { cluster, keep, known: Reviews::new(clock) }
    }

    async fn identify(&self, token: &str) -> Result<Option<Identity>, String> {
        let ask = async {
            let review = TokenReview {
                spec: TokenReviewSpec { token: token.to_owned(), ..TokenReviewSpec::default() },
                ..TokenReview::default()
            };
            let path = ObjectPath::all("authentication.k8s.io/v1", "tokenreviews");
            let answer: TokenReview = calls::create(self.cluster.api.as_ref(), Lane::Reviews, path, &review, ASK)
                .await
                .map_err(|error| format!("cannot ask about a token: {}", error_chain(&error)))?;
            let status = answer.status.unwrap_or_default();
            if let Some(error) = status.error.filter(|error| !error.is_empty()) {
                tracing::debug!(error, "token rejected");
            }
            let user = status.user.filter(|_| status.authenticated == Some(true));
            Ok((user.map(identity_of), self.keep))
        };
        self.known.get(Sha256::digest(token).into(), ask).await
    }
}

fn identity_of(user: UserInfo) -> Identity {
    Identity {
        user: user.username.unwrap_or_default(),
        uid: user.uid.unwrap_or_default(),
        groups: user.groups.unwrap_or_default(),
        extra: user.extra.unwrap_or_default(),
    }
}
