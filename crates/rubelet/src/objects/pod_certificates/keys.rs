//! Keys of pods' certificates.
//!
//! Owns: making a key of each type, and the request that is signed with it. Never: keeps or sends a key.
//! Upstream: `generateKeyAndProof` of `pkg/kubelet/podcertificate`.

use std::fmt;

use anyhow::{Context as _, anyhow};
use p521::{
    SecretKey,
    ecdsa::{Signature, SigningKey, signature::Signer as _},
    pkcs8::{EncodePrivateKey as _, LineEnding},
};
use rcgen::{CertificateParams, DistinguishedName, KeyPair};
use ring::rand::{SecureRandom as _, SystemRandom};
use rsa::{RsaPrivateKey, pkcs8::EncodePrivateKey as _, rand_core::OsRng};
use rustls::pki_types::PrivatePkcs8KeyDer;
use x509_cert::{
    attr::Attributes,
    der::{Encode as _, asn1::BitString, oid::ObjectIdentifier},
    name::Name,
    request::{CertReq, CertReqInfo, Version},
    spki::{AlgorithmIdentifier, SubjectPublicKeyInfoOwned},
};

/// Of the first version of the PKCS#8 of an Ed25519 key, which all programs read: the 32 bytes of the key follow.
const ED25519_PREFIX: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];
const ED25519_KEY_BYTES: usize = 32;
const ECDSA_WITH_SHA512: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.10045.4.3.4");
/// Of a number of 521 bits.
const P521_KEY_BYTES: usize = 66;
const P521_FIRST_BYTE_MASK: u8 = 0b1;

/// A new key, and the proof that we have it.
pub(super) struct OwnKey {
    /// In PEM.
    pub key: String,
    /// A request in PKCS#10 that says nothing but whose key it is.
    pub stub: Vec<u8>,
}

/// The key is secret: never in a log.
impl fmt::Debug for OwnKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OwnKey")
    }
}

/// Takes seconds for a long RSA key.
pub(super) fn own_key(key_type: &str) -> anyhow::Result<OwnKey> {
    match key_type {
        "ECDSAP256" => of_pair(&KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256)?),
        "ECDSAP384" => of_pair(&KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384)?),
        "ECDSAP521" => p521_key(),
        "ED25519" => {
            let key = KeyPair::generate_for(&rcgen::PKCS_ED25519)?.serialize_der();
            let end = ED25519_PREFIX.len().saturating_add(ED25519_KEY_BYTES);
            let own = key.get(ED25519_PREFIX.len()..end).context("the key is too short")?;
            of_pair(&KeyPair::try_from([&ED25519_PREFIX[..], own].concat())?)
        }
        "RSA3072" => rsa_key(3072),
        "RSA4096" => rsa_key(4096),
        other => anyhow::bail!("unknown key type {other:?}"),
    }
}

fn of_pair(pair: &KeyPair) -> anyhow::Result<OwnKey> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    Ok(OwnKey { key: pair.serialize_pem(), stub: params.serialize_request(pair)?.der().to_vec() })
}

/// `ring`, which signs with RSA keys, makes none.
fn rsa_key(bits: usize) -> anyhow::Result<OwnKey> {
    let key = RsaPrivateKey::new(&mut OsRng, bits)?.to_pkcs8_der()?;
    let key = PrivatePkcs8KeyDer::from(key.as_bytes());
    of_pair(&KeyPair::from_pkcs8_der_and_sign_algo(&key, &rcgen::PKCS_RSA_SHA256)?)
}

/// `ring` knows no P-521.
fn p521_key() -> anyhow::Result<OwnKey> {
    let key = random_p521()?;
    let public = SubjectPublicKeyInfoOwned::from_key(&key.public_key())?;
    let info = CertReqInfo {
        version: Version::V1,
        subject: Name::default(),
        public_key: public,
        attributes: Attributes::new(),
    };
    let signature: Signature = SigningKey::from(&key).try_sign(&info.to_der()?)?;
    let request = CertReq {
        info,
        algorithm: AlgorithmIdentifier { oid: ECDSA_WITH_SHA512, parameters: None },
        signature: BitString::from_bytes(signature.to_der().as_bytes())?,
    };
    Ok(OwnKey { key: key.to_pkcs8_pem(LineEnding::LF)?.to_string(), stub: request.to_der()? })
}

/// Numbers are drawn until one is a key, which nearly all of them are.
fn random_p521() -> anyhow::Result<SecretKey> {
    loop {
        let mut number = [0; P521_KEY_BYTES];
        SystemRandom::new().fill(&mut number).map_err(|_unspecified| anyhow!("there are no random numbers"))?;
        number[0] &= P521_FIRST_BYTE_MASK;
        if let Ok(key) = SecretKey::from_slice(&number) {
            return Ok(key);
        }
    }
}
