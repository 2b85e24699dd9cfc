//! Authentication: client certificate, bearer token, or anonymous.
//!
//! Owns: the order of the authenticators, and what a failure of one of them means. Never: authorization.
//! Upstream: `BuildAuth` of `cmd/kubelet/app/auth.go`, `apiserver/pkg/authentication` (x509, bearertoken, union, anonymous).

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use http::{HeaderMap, header, request::Parts};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use rubelet_kube::{
    calls, error_chain,
    port::{Lane, ObjectPath},
};
use sha2::{Digest as _, Sha256};

use super::{
    certificates::{CertificateAuthenticator, ClientCertificates},
    reviews::Reviews,
};
use crate::{
    server::unauthenticated::PeerAddress,
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

    pub(super) fn is_anonymous(&self) -> bool {
        *self == Identity::anonymous()
    }

    pub(super) fn authenticated(mut self) -> Self {
        if !self.groups.iter().any(|group| group == AUTHENTICATED) {
            self.groups.push(AUTHENTICATED.to_owned());
        }
        self
    }
}

#[derive(Debug)]
pub(crate) struct Authentication {
    pub certificates: Arc<CertificateAuthenticator>,
    /// TokenReview requests: `authentication.webhook`.
    pub tokens: Option<TokenReviewer>,
    /// `authentication.anonymous.enabled`.
    pub anonymous: bool,
}

impl Authentication {
    /// `Ok(None)`: no credentials, and anonymous requests are disabled. An error: the credentials are invalid.
    pub(crate) async fn identify(&self, head: &Parts, peer: PeerAddress) -> Result<Option<Identity>, String> {
        let mut failures = Vec::new();
        if let Some(shown) = head.extensions.get::<ClientCertificates>() {
            match self.certificates.identify(shown).await {
                Ok(Some(identity)) => return Ok(Some(identity)),
                Ok(None) => {}
                Err(failure) => failures.push(failure),
            }
        }
        if let (Some(tokens), Some(token)) = (&self.tokens, bearer_token(&head.headers)) {
            match tokens.identify(token, peer).await {
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
        TokenReviewer { cluster, keep, known: Reviews::new(clock, Option::is_some) }
    }

    async fn identify(&self, token: &str, peer: PeerAddress) -> Result<Option<Identity>, String> {
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
        self.known.get(Sha256::digest(token).into(), peer, ask).await
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
