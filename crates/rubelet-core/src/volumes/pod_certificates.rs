//! Certificates of pods in projected volumes: what is requested for a source, and what became of it.
//!
//! Owns: the request, its outcome, the files. Never: makes a key, asks the API server.
//! Upstream: `pkg/kubelet/podcertificate`, `pkg/volume/projected`.

use std::{collections::BTreeMap, fmt};

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::{
    ByteString,
    api::{
        certificates::v1beta1::PodCertificateRequest,
        core::v1::{Pod, PodCertificateProjection},
    },
};
use serde_json::{Value, json};

use super::trust_bundles;
use crate::{
    fnv::fnv32a,
    id::{PodUid, name_of, namespace_of},
};

const DENIED: &str = "Denied";
const FAILED: &str = "Failed";
const ISSUED: &str = "Issued";
/// Renewals are spread over this long, so that those of pods that started together are not one crowd.
const JITTER_SECS: u32 = 300;
/// A certificate that is not renewed that long after it should be is reported.
const OVERDUE_AFTER: SignedDuration = SignedDuration::from_mins(10);

/// One source of one volume of a pod, with all that is requested for it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CertificateKey {
    pub namespace: String,
    pub pod_name: String,
    pub pod_uid: PodUid,
    pub service_account: String,
    pub volume: String,
    pub source_index: usize,
    pub signer: String,
    pub key_type: String,
    pub max_expiration_secs: Option<i32>,
    pub annotations: Option<BTreeMap<String, String>>,
}

/// A source, and where its files go.
#[derive(Clone, Debug, PartialEq)]
pub struct CertificateSource {
    pub key: CertificateKey,
    bundle_path: Option<String>,
    key_path: Option<String>,
    chain_path: Option<String>,
}

impl CertificateSource {
    pub fn of(pod: &Pod, volume: &str, source_index: usize, source: &PodCertificateProjection) -> Self {
        let spec = pod.spec.as_ref();
        let key = CertificateKey {
            namespace: namespace_of(pod).to_owned(),
            pod_name: name_of(pod).to_owned(),
            pod_uid: PodUid::of(pod),
            service_account: spec.and_then(|spec| spec.service_account_name.clone()).unwrap_or_default(),
            volume: volume.to_owned(),
            source_index,
            signer: source.signer_name.clone(),
            key_type: source.key_type.clone(),
            max_expiration_secs: source.max_expiration_seconds,
            annotations: source.user_annotations.clone(),
        };
        let path = |path: &Option<String>| path.clone().filter(|path| !path.is_empty());
        CertificateSource {
            key,
            bundle_path: path(&source.credential_bundle_path),
            key_path: path(&source.key_path),
            chain_path: path(&source.certificate_chain_path),
        }
    }

    /// The files of a bundle by their paths.
    pub fn files(&self, bundle: &CredentialBundle) -> Vec<(&str, Vec<u8>)> {
        let CredentialBundle { key, chain } = bundle;
        let both = [key.as_bytes(), chain.as_bytes()].concat();
        let files = [
            (&self.bundle_path, both),
            (&self.key_path, key.as_bytes().to_vec()),
            (&self.chain_path, chain.as_bytes().to_vec()),
        ];
        files.into_iter().filter_map(|(path, content)| Some((path.as_deref()?, content))).collect()
    }
}

/// In PEM.
#[derive(Clone, PartialEq, Eq)]
pub struct CredentialBundle {
    pub key: String,
    /// The pod's own certificate first.
    pub chain: String,
}

/// The key is secret: never in a log.
impl fmt::Debug for CredentialBundle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CredentialBundle")
    }
}

impl CertificateKey {
    /// The object to create. `request` is the stub in PKCS#10, signed with the key that the certificate is for.
    pub fn request(&self, service_account_uid: &str, (node, node_uid): (&str, &str), request: Vec<u8>) -> Value {
        let mut spec = json!({
            "signerName": self.signer,
            "podName": self.pod_name,
            "podUID": self.pod_uid.as_str(),
            "serviceAccountName": self.service_account,
            "serviceAccountUID": service_account_uid,
            "nodeName": node,
            "nodeUID": node_uid,
            "stubPKCS10Request": ByteString(request),
        });
        if let Some(secs) = self.max_expiration_secs {
            spec["maxExpirationSeconds"] = json!(secs);
        }
        if let Some(annotations) = &self.annotations {
            spec["unverifiedUserAnnotations"] = json!(annotations);
        }
        let owner = json!({"apiVersion": "v1", "kind": "Pod", "name": self.pod_name, "uid": self.pod_uid.as_str()});
        json!({
            "apiVersion": "certificates.k8s.io/v1beta1",
            "kind": "PodCertificateRequest",
            "metadata": {"namespace": self.namespace, "generateName": "req-", "ownerReferences": [owner]},
            "spec": spec,
        })
    }

    fn jitter(&self, request: &str) -> SignedDuration {
        let seed = format!("{}/{}/{request}", self.pod_uid, self.volume);
        SignedDuration::from_secs(i64::from(fnv32a(seed.as_bytes()) % JITTER_SECS))
    }
}

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Pending,
    /// For good.
    Refused(Refusal),
    Issued {
        chain: String,
        times: CertificateTimes,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// `Denied` or `Failed`: the type of the condition, and the reason of the event.
    pub kind: &'static str,
    /// For events.
    pub event: String,
    /// For the pod's volume.
    pub error: String,
}

impl Refusal {
    /// Without asking a signer.
    pub fn failed(error: &str) -> Self {
        Refusal { kind: FAILED, event: error.to_owned(), error: error.to_owned() }
    }

    pub fn is_denial(&self) -> bool {
        self.kind == DENIED
    }
}

/// When a certificate is renewed, and what is reported if it is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CertificateTimes {
    pub renew_at: Timestamp,
    pub overdue_at: Timestamp,
    pub not_after: Timestamp,
}

/// By the first condition that says so.
pub fn outcome(key: &CertificateKey, request: &PodCertificateRequest) -> Outcome {
    let name = request.metadata.name.as_deref().unwrap_or_default();
    let Some(status) = &request.status else { return Outcome::Pending };
    for condition in status.conditions.iter().flatten() {
        let (reason, message) = (&condition.reason, &condition.message);
        let refused = |kind, verb: &str, participle: &str| {
            let event = format!(
                "PodCertificateRequest {}/{name} {verb}, reason={reason:?}, message={message:?}",
                key.namespace
            );
            let error =
                format!("PodCertificateRequest was permanently {participle}: reason={reason:?} message={message:?}");
            Outcome::Refused(Refusal { kind, event, error })
        };
        match condition.type_.as_str() {
            DENIED => return refused(DENIED, "was denied", "denied"),
            FAILED => return refused(FAILED, "failed", "failed"),
            ISSUED => {
                let (Some(chain), Some(begin), Some(end)) =
                    (&status.certificate_chain, &status.begin_refresh_at, &status.not_after)
                else {
                    return Outcome::Pending;
                };
                let renew_at = begin.0.saturating_add(key.jitter(name)).unwrap_or(begin.0);
                let overdue_at = renew_at.saturating_add(OVERDUE_AFTER).unwrap_or(renew_at);
                let times = CertificateTimes { renew_at, overdue_at, not_after: end.0 };
                return Outcome::Issued { chain: trust_bundles::certificates(chain), times };
            }
            _ => {}
        }
    }
    Outcome::Pending
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> CertificateKey {
        let source = json!({
            "signerName": "example.com/signer", "keyType": "ECDSAP256", "credentialBundlePath": "both.pem",
            "keyPath": "key.pem", "certificateChainPath": "chain.pem", "maxExpirationSeconds": 3600,
        });
        let pod = json!({
            "metadata": {"name": "web", "namespace": "prod", "uid": "0001"},
            "spec": {"containers": [], "serviceAccountName": "robot"},
        });
        let (pod, source) = (serde_json::from_value(pod).unwrap(), serde_json::from_value(source).unwrap());
        let source = CertificateSource::of(&pod, "identity", 2, &source);
        let bundle = CredentialBundle { key: "k".to_owned(), chain: "c".to_owned() };
        let files = source.files(&bundle);
        assert_eq!(files, [("both.pem", b"kc".to_vec()), ("key.pem", b"k".to_vec()), ("chain.pem", b"c".to_vec())]);
        source.key
    }

    #[test]
    fn request_names_pod_account_and_node() {
        let request = key().request("sa-1", ("n1", "node-1"), b"csr".to_vec());
        insta::assert_snapshot!(request, @r#"{"apiVersion":"certificates.k8s.io/v1beta1","kind":"PodCertificateRequest","metadata":{"generateName":"req-","namespace":"prod","ownerReferences":[{"apiVersion":"v1","kind":"Pod","name":"web","uid":"0001"}]},"spec":{"maxExpirationSeconds":3600,"nodeName":"n1","nodeUID":"node-1","podName":"web","podUID":"0001","serviceAccountName":"robot","serviceAccountUID":"sa-1","signerName":"example.com/signer","stubPKCS10Request":"Y3Ny"}}"#);
    }

    #[test]
    fn first_final_condition_decides() {
        let request = |status: Value| {
            let object = json!({"metadata": {"name": "req-1"}, "spec": {
                "nodeName": "", "nodeUID": "", "podName": "", "podUID": "", "serviceAccountName": "",
                "serviceAccountUID": "", "signerName": "", "stubPKCS10Request": "",
            }, "status": status});
            outcome(&key(), &serde_json::from_value(object).unwrap())
        };
        let condition = |kind: &str| {
            let time = "2026-11-19T00:00:00Z";
            json!({"type": kind, "status": "True", "reason": "Why", "message": "so", "lastTransitionTime": time})
        };
        assert_eq!(request(json!({})), Outcome::Pending);
        assert_eq!(request(json!({"conditions": [condition("Odd")]})), Outcome::Pending);
        let Outcome::Refused(denied) = request(json!({"conditions": [condition("Denied")]})) else { panic!() };
        assert_eq!(denied.kind, "Denied");
        assert_eq!(denied.event, "PodCertificateRequest prod/req-1 was denied, reason=\"Why\", message=\"so\"");
        assert_eq!(denied.error, "PodCertificateRequest was permanently denied: reason=\"Why\" message=\"so\"");
        let Outcome::Refused(failed) = request(json!({"conditions": [condition("Failed")]})) else { panic!() };
        assert_eq!(failed.event, "PodCertificateRequest prod/req-1 failed, reason=\"Why\", message=\"so\"");
        let chain = "noise\n-----BEGIN CERTIFICATE-----\nAAEC\n-----END CERTIFICATE-----\nmore\n\
                     -----BEGIN CERTIFICATE-----\nAwQF\n-----END CERTIFICATE-----";
        let begin = "2026-11-19T08:00:00Z";
        let issued = request(json!({
            "conditions": [condition("Issued")], "certificateChain": chain, "beginRefreshAt": begin,
            "notAfter": "2026-11-19T12:00:00Z",
        }));
        let Outcome::Issued { chain, times } = issued else { panic!() };
        insta::assert_snapshot!(chain, @"
        -----BEGIN CERTIFICATE-----
        AAEC
        -----END CERTIFICATE-----
        -----BEGIN CERTIFICATE-----
        AwQF
        -----END CERTIFICATE-----
        ");
        let begin: Timestamp = begin.parse().unwrap();
        assert!((0..300).contains(&times.renew_at.duration_since(begin).as_secs()), "{times:?}");
        assert_eq!(times.overdue_at.duration_since(times.renew_at), OVERDUE_AFTER);
    }
}
