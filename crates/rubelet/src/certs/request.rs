//! The contents and the name of the node's certificate requests.
//!
//! Owns: subjects, usages and signers, the request in PKCS#10, and whether a certificate matches a template.
//! Upstream: `newGetTemplateFn`, `DefaultKubelet{Client,Serving}GetUsages`, `digestedName`.

use std::net::IpAddr;

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, PublicKeyData as _, SanType};
use sha2::{Digest as _, Sha512_256};

use super::leaf::Leaf;

const ORGANIZATION: &str = "system:nodes";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Authenticates the node to the API server.
    Client,
    /// Authenticates the node to clients of its own port.
    Serving,
}

impl Purpose {
    pub(super) fn signer(self) -> &'static str {
        match self {
            Purpose::Client => "kubernetes.io/kube-apiserver-client-kubelet",
            Purpose::Serving => "kubernetes.io/kubelet-serving",
        }
    }

    /// Our keys are elliptic curve keys, which have no key encipherment.
    pub(super) fn usages(self) -> [&'static str; 2] {
        match self {
            Purpose::Client => ["digital signature", "client auth"],
            Purpose::Serving => ["digital signature", "server auth"],
        }
    }

    /// The prefix of its file names.
    pub(super) fn prefix(self) -> &'static str {
        match self {
            Purpose::Client => "kubelet-client",
            Purpose::Serving => "kubelet-server",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CertificateTemplate {
    pub purpose: Purpose,
    pub node_name: String,
    /// Names and addresses of the node; a client certificate has none.
    pub dns_names: Vec<String>,
    pub ips: Vec<IpAddr>,
}

impl CertificateTemplate {
    pub(super) fn client(node_name: &str) -> Self {
        CertificateTemplate {
            purpose: Purpose::Client,
            node_name: node_name.to_owned(),
            dns_names: Vec::new(),
            ips: Vec::new(),
        }
    }

    /// A certificate with more names than requested also matches.
    pub(super) fn is_met_by(&self, leaf: &Leaf) -> bool {
        leaf.common_name == self.common_name()
            && leaf.organizations.iter().any(|organization| organization == ORGANIZATION)
            && self.dns_names.iter().all(|name| leaf.dns_names.contains(name))
            && self.ips.iter().all(|ip| leaf.ips.contains(ip))
    }

    /// The request in PEM, signed with the key it is for.
    pub(super) fn request(&self, key: &KeyPair) -> Result<String, rcgen::Error> {
        let mut params = CertificateParams::new(self.dns_names.clone())?;
        params.subject_alt_names.extend(self.ips.iter().map(|ip| SanType::IpAddress(*ip)));
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, ORGANIZATION);
        params.distinguished_name.push(DnType::CommonName, self.common_name());
        params.serialize_request(key)?.pem()
    }

    /// The same for the same key and template, so that a restarted agent finds its first request.
    pub(super) fn digested_name(&self, key: &KeyPair) -> String {
        let mut hash = Sha512_256::new();
        let mut write = |part: &[u8]| {
            hash.update(URL_SAFE_NO_PAD.encode(part));
            // Occurs in no part: two different templates cannot have the same digest.
            hash.update(b"|");
        };
        write(&key.subject_public_key_info());
        write(self.common_name().as_bytes());
        write(ORGANIZATION.as_bytes());
        for usage in self.purpose.usages() {
            write(usage.as_bytes());
        }
        format!("node-csr-{}", URL_SAFE_NO_PAD.encode(hash.finalize()))
    }

    fn common_name(&self) -> String {
        format!("system:node:{}", self.node_name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certs::test_authority::{Validity, authority};

    #[test]
    fn a_request_names_the_node_as_upstream_does() {
        let key = KeyPair::generate().unwrap();
        let template = CertificateTemplate {
            purpose: Purpose::Serving,
            dns_names: vec!["n1".to_owned()],
            ips: vec!["10.0.0.7".parse().unwrap(), "fd00::7".parse().unwrap()],
            ..CertificateTemplate::client("n1")
        };
        let pair = authority().pair(&template, &key, Validity::hours(1));
        let leaf = Leaf::of_pair(pair.as_bytes()).unwrap();
        assert_eq!(
            (leaf.common_name.as_str(), &*leaf.organizations),
            ("system:node:n1", &["system:nodes".to_owned()][..])
        );
        assert!(template.is_met_by(&leaf));
        let missing = CertificateTemplate { ips: vec!["10.0.0.8".parse().unwrap()], ..template.clone() };
        assert!(!missing.is_met_by(&leaf));
        assert!(!CertificateTemplate { node_name: "n2".to_owned(), ..template }.is_met_by(&leaf));
        assert!(CertificateTemplate::client("n1").is_met_by(&leaf));
    }

    #[test]
    fn a_requests_name_is_upstreams_for_the_same_key_and_node() {
        let (key, expected) = (include_str!("testdata/key.pem"), include_str!("testdata/name.txt"));
        let key = KeyPair::from_pem(key).unwrap();
        assert_eq!(CertificateTemplate::client("node-1").digested_name(&key), expected.trim());
        assert_ne!(CertificateTemplate::client("node-2").digested_name(&key), expected.trim());
    }

    #[test]
    fn a_key_of_another_certificate_is_found_out() {
        let (key, other) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
        let certificate = authority().certificate(&CertificateTemplate::client("n1"), &key, Validity::hours(1));
        let mixed = format!("{certificate}{}", other.serialize_pem());
        assert_eq!(
            Leaf::of_pair(mixed.as_bytes()).unwrap_err().to_string(),
            "its private key is not that of its first certificate"
        );
    }
}
