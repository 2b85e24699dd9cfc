//! Temporary certificates for a control plane: a CA, the server's certificate, and clients'.
//!
//! Owns: the files in the `pki` directory. A user's name and groups are the subject of his certificate.

use std::{
    fs,
    io::Write as _,
    net::IpAddr,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    SanType,
};

/// A CA and its directory.
#[derive(Debug)]
pub struct Authority {
    dir: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate and its key.
#[derive(Clone, Debug)]
pub struct Identity {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

impl Authority {
    /// The CA in `dir`; a new one if there is none.
    pub fn open(dir: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(dir)?;
        let key_file = dir.join("ca.key");
        let key = match fs::read_to_string(&key_file) {
            Ok(pem) => KeyPair::from_pem(&pem).context("ca.key")?,
            Err(_) => {
                let key = KeyPair::generate()?;
                fs::write(dir.join("ca.crt"), params_of_authority()?.self_signed(&key)?.pem())?;
                write_secret(&key_file, &key.serialize_pem())?;
                key
            }
        };
        Ok(Authority { dir: dir.to_owned(), issuer: Issuer::new(params_of_authority()?, key) })
    }

    /// The CA bundle of clients.
    pub fn certificate(&self) -> PathBuf {
        self.dir.join("ca.crt")
    }

    pub fn key(&self) -> PathBuf {
        self.dir.join("ca.key")
    }

    /// A certificate for a server of this machine.
    pub fn server(&self, name: &str, addresses: &[IpAddr], names: &[&str]) -> anyhow::Result<Identity> {
        let mut params = params(name);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.subject_alt_names = addresses.iter().copied().map(SanType::IpAddress).collect();
        for name in names {
            params.subject_alt_names.push(SanType::DnsName((*name).try_into()?));
        }
        self.issue(name, &params)
    }

    /// A client certificate. `file` names the files.
    pub fn client(&self, file: &str, user: &str, group: Option<&str>) -> anyhow::Result<Identity> {
        let mut params = params(user);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        if let Some(group) = group {
            params.distinguished_name.push(DnType::OrganizationName, group);
        }
        self.issue(file, &params)
    }

    fn issue(&self, file: &str, params: &CertificateParams) -> anyhow::Result<Identity> {
        let identity =
            Identity { certificate: self.dir.join(format!("{file}.crt")), key: self.dir.join(format!("{file}.key")) };
        if identity.certificate.exists() {
            return Ok(identity);
        }
        let key = KeyPair::generate()?;
        write_secret(&identity.key, &key.serialize_pem())?;
        fs::write(&identity.certificate, params.signed_by(&key, &self.issuer)?.pem())?;
        Ok(identity)
    }
}

/// The key pair of service account tokens.
#[derive(Clone, Debug)]
pub struct SigningKey {
    pub private: PathBuf,
    pub public: PathBuf,
}

impl SigningKey {
    pub fn open(dir: &Path) -> anyhow::Result<Self> {
        let files = SigningKey { private: dir.join("service-accounts.key"), public: dir.join("service-accounts.pub") };
        if !files.public.exists() {
            let key = KeyPair::generate()?;
            write_secret(&files.private, &key.serialize_pem())?;
            fs::write(&files.public, key.public_key_pem())?;
        }
        Ok(files)
    }
}

fn params_of_authority() -> anyhow::Result<CertificateParams> {
    let mut params = params("rubelet-testbed-ca");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Ok(params)
}

fn params(common_name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.use_authority_key_identifier_extension = true;
    params
}

fn write_secret(path: &Path, text: &str) -> anyhow::Result<()> {
    let mut file = fs::OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes()).with_context(|| format!("write {}", path.display()))
}
