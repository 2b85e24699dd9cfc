//! The fields of a certificate that the node uses.
//!
//! Owns: reading PEM and X.509, and the check that key and certificate belong together.

use std::net::IpAddr;

use jiff::Timestamp;
use rubelet_tls::PemError;
use rustls::{crypto::ring::sign::any_supported_type, pki_types::CertificateDer, sign::CertifiedKey};
use x509_cert::{
    Certificate,
    der::{self, Decode as _, asn1::ObjectIdentifier, oid::db::rfc4519},
    ext::pkix::{SubjectAltName, name::GeneralName},
    name::Name,
};

/// The first certificate of a chain: the node's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Leaf {
    pub common_name: String,
    pub organizations: Vec<String>,
    pub dns_names: Vec<String>,
    pub ips: Vec<IpAddr>,
    pub not_before: Timestamp,
    pub not_after: Timestamp,
}

/// To be said of a file or a text.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LeafError {
    #[error(transparent)]
    Pem(#[from] PemError),
    #[error("its certificate cannot be read")]
    Certificate(#[source] der::Error),
    #[error("its private key cannot be used")]
    Key(#[source] rustls::Error),
    #[error("its private key is not that of its first certificate")]
    Mismatch,
}

impl Leaf {
    /// Parses a text that holds a chain and the key of its first certificate.
    pub(crate) fn of_pair(pem: &[u8]) -> Result<Self, LeafError> {
        let chain = rubelet_tls::certificates(pem)?;
        let leaf = Self::parse(&chain[0])?;
        let key = rubelet_tls::private_key(pem)?;
        let key = any_supported_type(&key).map_err(LeafError::Key)?;
        match CertifiedKey::new(chain, key).keys_match() {
            Ok(()) => Ok(leaf),
            Err(_) => Err(LeafError::Mismatch),
        }
    }

    pub(crate) fn parse(certificate: &CertificateDer<'_>) -> Result<Self, LeafError> {
        let certificate = Certificate::from_der(certificate).map_err(LeafError::Certificate)?;
        let certificate = certificate.tbs_certificate();
        let subject = certificate.subject();
        let alternatives = certificate.get_extension::<SubjectAltName>().map_err(LeafError::Certificate)?;
        let names = alternatives.map(|(_, names)| names.0).unwrap_or_default();
        let validity = certificate.validity();
        Ok(Leaf {
            common_name: values(subject, rfc4519::CN).into_iter().next().unwrap_or_default(),
            organizations: values(subject, rfc4519::O),
            dns_names: names.iter().filter_map(dns_name).collect(),
            ips: names.iter().filter_map(ip).collect(),
            not_before: timestamp(validity.not_before),
            not_after: timestamp(validity.not_after),
        })
    }
}

/// The earliest expiry of all certificates in the text.
pub(crate) fn first_end(pem: &[u8]) -> Result<Timestamp, LeafError> {
    let mut ends = Vec::new();
    for certificate in rubelet_tls::certificates(pem)? {
        ends.push(Leaf::parse(&certificate)?.not_after);
    }
    Ok(ends.into_iter().min().expect("a chain is not empty"))
}

/// For any string type: all but very old certificates use UTF-8.
fn values(subject: &Name, attribute: ObjectIdentifier) -> Vec<String> {
    let found = subject.iter().filter(|pair| pair.oid == attribute);
    found.map(|pair| String::from_utf8_lossy(pair.value.value()).into_owned()).collect()
}

fn dns_name(name: &GeneralName) -> Option<String> {
    match name {
        GeneralName::DnsName(name) => Some(name.to_string()),
        _ => None,
    }
}

fn ip(name: &GeneralName) -> Option<IpAddr> {
    let GeneralName::IpAddress(bytes) = name else { return None };
    let four = <[u8; 4]>::try_from(bytes.as_bytes()).map(IpAddr::from);
    four.or_else(|_| <[u8; 16]>::try_from(bytes.as_bytes()).map(IpAddr::from)).ok()
}

/// X.509 has no fractions of a second and ends in the year 9999.
fn timestamp(time: x509_cert::time::Time) -> Timestamp {
    let seconds = i64::try_from(time.to_unix_duration().as_secs()).unwrap_or(i64::MAX);
    Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX)
}
