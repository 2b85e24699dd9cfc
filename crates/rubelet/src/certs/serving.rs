//! The serving certificate of the node's own port.
//!
//! Owns: which of its three origins is used, and the self-signed pair.
//! Upstream: `InitializeTLS`, `NewKubeletServerCertificateManager`, `GenerateSelfSignedCertKey`.

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use anyhow::Context as _;
use jiff::Timestamp;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose, SanType,
};
use rubelet_host::port::Host;
use rubelet_tls::MAX_PEM_BYTES;

use super::{leaf::Leaf, store::make_missing_dir};

const VALID_FOR: Duration = Duration::from_secs(365 * 86_400);
/// Tolerates clients whose clocks are behind ours.
const VALID_SINCE: Duration = Duration::from_secs(3600);

/// Two files, configured or generated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Files {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

impl Files {
    pub(crate) fn of_our_own(cert_dir: &Path) -> Self {
        Files { certificate: cert_dir.join("kubelet.crt"), key: cert_dir.join("kubelet.key") }
    }

    /// Returns what is wrong with them, if anything.
    pub(crate) async fn check(&self, host: &dyn Host) -> anyhow::Result<Leaf> {
        let mut pair = Vec::new();
        for path in [&self.certificate, &self.key] {
            let read = host.read_file(path, MAX_PEM_BYTES).await;
            pair.extend(read.with_context(|| path.display().to_string())?);
            pair.push(b'\n');
        }
        Leaf::of_pair(&pair).with_context(|| format!("{} and {}", self.certificate.display(), self.key.display()))
    }

    /// Whether an agent generated the certificate, this one or upstream's: both sign it with a one-off CA of the same name.
    async fn is_self_signed(&self, host: &dyn Host) -> bool {
        let Ok(pem) = host.read_file(&self.certificate, MAX_PEM_BYTES).await else { return false };
        let names = rubelet_tls::certificates(&pem).ok().and_then(|chain| {
            let [leaf, authority] = &chain[..] else { return None };
            Some((Leaf::parse(leaf).ok()?.common_name, Leaf::parse(authority).ok()?.common_name))
        });
        names.is_some_and(|(leaf, authority)| {
            leaf.split_once('@').is_some_and(|(node, _)| authority.starts_with(&format!("{node}-ca@")))
        })
    }
}

/// Ensures that the directory holds a pair: the existing one, or a new self-signed one.
pub(crate) async fn self_signed(
    host: &dyn Host,
    cert_dir: &Path,
    node_name: &str,
    ips: &[IpAddr],
    now: Timestamp,
) -> anyhow::Result<()> {
    let files = Files::of_our_own(cert_dir);
    let mut is_there = [false, false];
    for (path, is_there) in [&files.certificate, &files.key].into_iter().zip(&mut is_there) {
        *is_there = host.file_kind(path).await.with_context(|| path.display().to_string())?.is_some();
    }
    match is_there {
        [true, true] => match files.check(host).await {
            Ok(_) => return Ok(()),
            // A start that was killed between the two files of a pair.
            Err(error) if files.is_self_signed(host).await => {
                tracing::warn!("replacing a self-signed serving certificate: {error:#}");
            }
            Err(error) => return Err(error),
        },
        [true, false] if files.is_self_signed(host).await => {}
        [false, false] => {}
        _ => anyhow::bail!("{} has a certificate without its key or a key without its certificate", cert_dir.display()),
    }
    let (chain, key) = make_pair(node_name, ips, now).context("create a serving certificate")?;
    make_missing_dir(host, cert_dir).await.with_context(|| cert_dir.display().to_string())?;
    // The certificate first: unlike a key, it shows the next start that it was generated, so that both may be replaced.
    for (path, pem, mode) in [(&files.certificate, chain, 0o644), (&files.key, key, 0o600)] {
        host.write_durably(path, pem.as_bytes(), mode).await.with_context(|| path.display().to_string())?;
    }
    tracing::info!(certificate = %files.certificate.display(), "created a self-signed serving certificate");
    Ok(())
}

/// The chain of a certificate and its one-off CA, and the certificate's key.
fn make_pair(node_name: &str, ips: &[IpAddr], now: Timestamp) -> Result<(String, String), rcgen::Error> {
    let stamp = now.as_second();
    let mut authority = params(format!("{node_name}-ca@{stamp}"), now);
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.key_usages =
        vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment, KeyUsagePurpose::KeyCertSign];
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;
    let mut params = params(format!("{node_name}@{stamp}"), now);
    params.subject_alt_names = match node_name.parse() {
        Ok(ip) => vec![SanType::IpAddress(ip)],
        Err(_) => vec![SanType::DnsName(node_name.try_into()?)],
    };
    params.subject_alt_names.extend(ips.iter().map(|ip| SanType::IpAddress(*ip)));
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let key = KeyPair::generate()?;
    let certificate = params.signed_by(&key, &authority)?;
    Ok((format!("{}{}", certificate.pem(), authority.pem()), key.serialize_pem()))
}

fn params(common_name: String, now: Timestamp) -> CertificateParams {
    let now = SystemTime::from(now);
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    params.not_before = now.checked_sub(VALID_SINCE).unwrap_or(now).into();
    params.not_after = now.checked_add(VALID_FOR).unwrap_or(now).into();
    params
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::MetadataExt as _};

    use rubelet_host::linux::LinuxHost;

    use super::*;
    use crate::certs::test_authority::start;

    #[tokio::test]
    async fn a_pair_of_our_own_is_made_once_with_the_names_of_the_node() {
        let dir = tempfile::tempdir().unwrap();
        let (host, pki) = (LinuxHost::default(), dir.path().join("pki"));
        let ips = ["10.0.0.7".parse().unwrap()];
        self_signed(&host, &pki, "n1", &ips, start()).await.unwrap();
        let files = Files::of_our_own(&pki);
        let leaf = files.check(&host).await.unwrap();
        assert_eq!(leaf.common_name, "n1@1794787200");
        assert_eq!((&*leaf.dns_names, &*leaf.ips), (&["n1".to_owned()][..], &ips[..]));
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!([mode(&pki), mode(&files.certificate), mode(&files.key)], [0o755, 0o644, 0o600]);
        self_signed(&host, &pki, "n1", &ips, start() + Duration::from_secs(9)).await.unwrap();
        assert_eq!(files.check(&host).await.unwrap(), leaf);
    }

    #[tokio::test]
    async fn half_a_pair_is_no_pair() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("kubelet.key"), "").unwrap();
        let error = self_signed(&LinuxHost::default(), dir.path(), "n1", &[], start()).await.unwrap_err();
        assert!(error.to_string().contains("without its key"), "{error}");
    }

    #[tokio::test]
    async fn mismatched_certificate_and_key_are_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let host = LinuxHost::default();
        for name in ["a", "b"] {
            self_signed(&host, &dir.path().join(name), name, &[], start()).await.unwrap();
        }
        let mixed = Files { certificate: dir.path().join("a/kubelet.crt"), key: dir.path().join("b/kubelet.key") };
        let error = format!("{:#}", mixed.check(&host).await.unwrap_err());
        assert!(error.ends_with("its private key is not that of its first certificate"), "{error}");
    }
}
