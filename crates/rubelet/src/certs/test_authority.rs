//! A signer for tests, with new keys each time.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};

use async_trait::async_trait;
use bytes::Bytes;
use jiff::Timestamp;
use k8s_openapi::{
    ByteString,
    api::certificates::v1::{
        CertificateSigningRequest, CertificateSigningRequestCondition, CertificateSigningRequestStatus,
    },
};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, IsCa, KeyPair, PublicKeyData,
    SanType,
};
use rubelet_kube::port::{ApiError, ApiErrorKind, ApiServer, Call, Verb, Watch, WatchStream};
use rustls::pki_types::{CertificateSigningRequestDer, pem::PemObject as _};
use x509_cert::{der::Decode as _, request::CertReq};

use super::CertificateTemplate;
use crate::world::Clock;

pub(super) struct Authority(CertifiedIssuer<'static, KeyPair>);

#[derive(Clone, Copy, Debug)]
pub(super) struct Validity {
    pub not_before: Timestamp,
    pub not_after: Timestamp,
}

/// The wall-clock time of the tests.
pub(super) fn start() -> Timestamp {
    "2026-11-16T00:00:00Z".parse().unwrap()
}

impl Validity {
    /// Relative to the start of the tests.
    pub(super) fn hours(hours: i64) -> Self {
        Self::secs_from(start(), hours * 3600)
    }

    pub(super) fn secs_from(not_before: Timestamp, secs: i64) -> Self {
        Validity { not_before, not_after: not_before + jiff::SignedDuration::from_secs(secs) }
    }
}

pub(super) fn authority() -> Authority {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.not_before = system_time(start()).into();
    params.not_after = (system_time(start()) + Duration::from_secs(10 * 365 * 86_400)).into();
    Authority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
}

impl Authority {
    pub(super) fn certificate(
        &self,
        template: &CertificateTemplate,
        key: &impl PublicKeyData,
        validity: Validity,
    ) -> String {
        let mut params = CertificateParams::new(template.dns_names.clone()).unwrap();
        params.subject_alt_names.extend(template.ips.iter().map(|ip| SanType::IpAddress(*ip)));
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, "system:nodes");
        params.distinguished_name.push(DnType::CommonName, format!("system:node:{}", template.node_name));
        params.not_before = system_time(validity.not_before).into();
        params.not_after = system_time(validity.not_after).into();
        params.signed_by(key, &self.0).unwrap().pem()
    }

    pub(super) fn pair(&self, template: &CertificateTemplate, key: &KeyPair, validity: Validity) -> String {
        format!("{}{}", self.certificate(template, key, validity), key.serialize_pem())
    }
}

fn system_time(at: Timestamp) -> SystemTime {
    at.into()
}

/// An API server that signs every request at once.
pub(super) struct Signer {
    authority: Authority,
    clock: Clock,
    template: CertificateTemplate,
    life_secs: i64,
    /// How many of the next requests are rejected.
    pub refusals: Mutex<u32>,
    pub asked_at: Mutex<Vec<Timestamp>>,
    issued: Mutex<String>,
}

impl Signer {
    pub(super) fn new(clock: Clock, template: CertificateTemplate, life_secs: i64) -> Arc<Self> {
        let authority = authority();
        let (refusals, asked_at, issued) = (Mutex::default(), Mutex::default(), Mutex::default());
        Arc::new(Signer { authority, clock, template, life_secs, refusals, asked_at, issued })
    }

    fn sign(&self, request: &CertificateSigningRequest) -> String {
        let request = CertificateSigningRequestDer::from_pem_slice(&request.spec.request.0).unwrap();
        let request = CertReq::from_der(&request).unwrap();
        let key = PublicKey(request.info.public_key.subject_public_key.raw_bytes().to_vec());
        self.authority.certificate(&self.template, &key, Validity::secs_from(self.clock.now().wall, self.life_secs))
    }
}

struct PublicKey(Vec<u8>);

impl PublicKeyData for PublicKey {
    fn der_bytes(&self) -> &[u8] {
        &self.0
    }

    fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
        &rcgen::PKCS_ECDSA_P256_SHA256
    }
}

#[async_trait]
impl ApiServer for Signer {
    async fn call(&self, call: Call) -> Result<Bytes, ApiError> {
        if call.verb == Verb::Create {
            self.asked_at.lock().unwrap().push(self.clock.now().wall);
            let mut refusals = self.refusals.lock().unwrap();
            if *refusals > 0 {
                *refusals -= 1;
                return Err(ApiError::new(ApiErrorKind::Forbidden, "not you"));
            }
            let mut csr: CertificateSigningRequest = serde_json::from_slice(&call.body.unwrap()).unwrap();
            let certificate = Some(ByteString(self.sign(&csr).into_bytes()));
            let approved = CertificateSigningRequestCondition { type_: "Approved".to_owned(), ..Default::default() };
            csr.status = Some(CertificateSigningRequestStatus { certificate, conditions: Some(vec![approved]) });
            csr.metadata.name.get_or_insert_with(|| "csr-1".to_owned());
            *self.issued.lock().unwrap() = serde_json::to_string(&csr).unwrap();
        }
        Ok(self.issued.lock().unwrap().clone().into())
    }

    async fn watch(&self, _watch: Watch) -> Result<WatchStream, ApiError> {
        Ok(Box::pin(futures_util::stream::pending()))
    }
}
