//! Service account tokens for pods: requested once, and again before they expire.
//!
//! Owns: the request, the cache, and when a token is renewed. Never: logs a token.
//! Upstream: `pkg/kubelet/token/token_manager.go`.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Mutex,
};

use jiff::{SignedDuration, Timestamp};
use rubelet_core::{
    fnv::fnv32a,
    volumes::files::{Token, TokenKey},
};
use rubelet_kube::{
    calls, error_chain,
    port::{ApiError, ApiServer, Lane, ObjectPath},
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{CALL_TIMEOUT, locked};
use crate::world::Clock;

/// Maximum age of a token, whatever its validity.
const MAX_AGE: SignedDuration = SignedDuration::from_hours(24);
/// Renewals of pods that started together are spread over this long.
const JITTER_SECS: u32 = 10;

/// The tokens that pods need; `None` until they are requested.
#[derive(Default)]
pub(super) struct TokenCache(Mutex<BTreeMap<TokenKey, Option<CachedToken>>>);

#[derive(Clone)]
struct CachedToken {
    token: Token,
    lifetime: SignedDuration,
}

impl TokenCache {
    /// From the cache while it is fresh; a stale one is used if no newer one can be requested.
    pub(super) async fn token(&self, api: &dyn ApiServer, key: &TokenKey, clock: &Clock) -> Result<Token, String> {
        let Some(known) = locked(&self.0).get(key).cloned() else {
            let TokenKey { namespace, service_account, pod_name, .. } = key;
            return Err(format!("token of {namespace}/{service_account} for pod {pod_name} not registered"));
        };
        if let Some(token) = known.as_ref().filter(|token| !token.is_old(jitter(key), clock.now().wall)) {
            return Ok(token.token.clone());
        }
        match (request(api, key).await, known) {
            (Ok(fresh), _) => {
                let token = fresh.token.clone();
                // The pod may have been removed meanwhile.
                if let Some(known) = locked(&self.0).get_mut(key) {
                    *known = Some(fresh);
                }
                Ok(token)
            }
            (Err(error), Some(known)) if known.token.expires_at > clock.now().wall => {
                let pod = format!("{}/{}", key.namespace, key.pod_name);
                tracing::warn!(
                    pod,
                    "failed to renew service account token, using the cached one: {}",
                    error_chain(&error)
                );
                Ok(known.token)
            }
            (Err(error), Some(_)) => Err(format!("token expired and refresh failed: {}", error_chain(&error))),
            (Err(error), None) => Err(format!("failed to fetch token: {}", error_chain(&error))),
        }
    }

    /// Updates the tokens of one pod; tokens are not shared.
    pub(super) fn update_needs(&self, before: &BTreeSet<TokenKey>, now: &BTreeSet<TokenKey>) {
        let mut tokens = locked(&self.0);
        tokens.extend(now.difference(before).map(|key| (key.clone(), None)));
        for key in before.difference(now) {
            tokens.remove(key);
        }
    }
}

impl CachedToken {
    /// In the last fifth of its validity, or a day old.
    fn is_old(&self, jitter: SignedDuration, now: Timestamp) -> bool {
        let left = self.token.expires_at.duration_since(now);
        let age = self.lifetime.saturating_sub(left);
        age > MAX_AGE.saturating_sub(jitter)
            || left < self.lifetime.checked_div(5).unwrap_or_default().saturating_add(jitter)
    }
}

/// Constant for one token, different between tokens.
fn jitter(key: &TokenKey) -> SignedDuration {
    SignedDuration::from_secs(i64::from(fnv32a(key.pod_uid.as_str().as_bytes()) % JITTER_SECS))
}

#[derive(Deserialize)]
struct TokenResponse {
    spec: TokenResponseSpec,
    status: TokenResponseStatus,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct TokenResponseSpec {
    expiration_seconds: Option<i64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct TokenResponseStatus {
    token: String,
    expiration_timestamp: Timestamp,
}

async fn request(api: &dyn ApiServer, key: &TokenKey) -> Result<CachedToken, ApiError> {
    let path = ObjectPath::all("v1", "serviceaccounts").within(&key.namespace).named(&key.service_account).sub("token");
    let response: TokenResponse = calls::create(api, Lane::Ordinary, path, &body(key), CALL_TIMEOUT).await?;
    // The server may grant another lifetime than requested.
    let lifetime = SignedDuration::from_secs(response.spec.expiration_seconds.unwrap_or(key.expiration_secs));
    let token = Token { token: response.status.token, expires_at: response.status.expiration_timestamp };
    Ok(CachedToken { token, lifetime })
}

fn body(key: &TokenKey) -> Value {
    let audiences: Vec<_> = key.audience.iter().collect();
    json!({
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {
            "audiences": audiences,
            "expirationSeconds": key.expiration_secs,
            "boundObjectRef": { "apiVersion": "v1", "kind": "Pod", "name": key.pod_name, "uid": key.pod_uid.as_str() },
        },
    })
}

#[cfg(test)]
mod tests {
    use rubelet_core::id::PodUid;

    use super::*;
    use crate::fake_api::FakeApi;

    #[tokio::test]
    async fn token_response_with_extreme_times_is_used_and_renewed() {
        let lifetimes = [i64::MAX, i64::MIN, 0, -1, 1 << 53];
        let ends = ["9999-12-30T22:00:00Z", "-009999-01-02T01:59:59Z", "0001-01-01T00:00:00Z"];
        let clock = Clock::system();
        for (lifetime, end) in lifetimes.iter().flat_map(|lifetime| ends.map(|end| (lifetime, end))) {
            let response = format!(
                r#"{{"spec":{{"expirationSeconds":{lifetime}}},"status":{{"token":"t","expirationTimestamp":"{end}"}}}}"#
            );
            let api = FakeApi::answering([Ok(response.clone()), Ok(response)]);
            let key = TokenKey {
                namespace: "shop".to_owned(),
                service_account: "default".to_owned(),
                pod_name: "web".to_owned(),
                pod_uid: PodUid::new("u1"),
                audience: None,
                expiration_secs: 3600,
            };
            let tokens = TokenCache::default();
            tokens.update_needs(&BTreeSet::new(), &BTreeSet::from([key.clone()]));
            for _ in 0..2 {
                let token = tokens.token(&*api, &key, &clock).await.map(|token| token.token);
                assert_eq!(token.as_deref(), Ok("t"), "{lifetime} {end}");
            }
        }
    }

    #[test]
    fn token_is_renewed_after_80_percent_or_a_day() {
        let issued_at: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let old_after = |lifetime_secs: i64, jitter_secs: i64| {
            let lifetime = SignedDuration::from_secs(lifetime_secs);
            let token = Token { token: String::new(), expires_at: issued_at + lifetime };
            let token = CachedToken { token, lifetime };
            let is_old = |secs: &i64| {
                token.is_old(SignedDuration::from_secs(jitter_secs), issued_at + SignedDuration::from_secs(*secs))
            };
            (0..200_000).find(is_old).unwrap()
        };
        assert_eq!(old_after(600, 0), 481);
        assert_eq!(old_after(600, 9), 472);
        assert_eq!(old_after(3600, 0), 2881);
        assert_eq!(old_after(7 * 86_400, 0), 86_401);
        assert_eq!(old_after(7 * 86_400, 5), 86_396);
    }
}
