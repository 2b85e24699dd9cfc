//! The private key of a pending bootstrap, kept until the certificate is signed: a restarted agent reuses it.
//!
//! Owns: `kubelet-client.key.tmp`. Reads what upstream writes (SEC 1) and what we write (PKCS#8).

use std::{
    io,
    path::{Path, PathBuf},
};

use rcgen::KeyPair;
use rubelet_host::port::{Host, ReadError};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer, pem::PemObject as _};

use super::store::make_missing_dir;

const FILE: &str = "kubelet-client.key.tmp";
const MAX_BYTES: u64 = 1 << 16;

/// PKCS#8 around a P-256 key of SEC 1's form: version 0, `ecPublicKey` with `prime256v1`, and room for the key.
const PKCS8_ALGORITHM: [u8; 24] = [
    0x02, 0x01, 0x00, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a, 0x86, 0x48,
    0xce, 0x3d, 0x03, 0x01, 0x07,
];

pub(super) fn path(dir: &Path) -> PathBuf {
    dir.join(FILE)
}

/// The stored pending key, or a new one, which is stored.
pub(super) async fn load_or_make(host: &dyn Host, dir: &Path) -> io::Result<KeyPair> {
    let path = path(dir);
    match host.read_file(&path, MAX_BYTES).await {
        Ok(pem) => {
            if let Some(key) = parse(&pem) {
                return Ok(key);
            }
            tracing::warn!(path = %path.display(), "unsupported key type, creating a new key");
        }
        Err(ReadError::Io(error)) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => tracing::warn!(path = %path.display(), %error, "failed to read key, creating a new one"),
    }
    let key = KeyPair::generate().map_err(io::Error::other)?;
    make_missing_dir(host, dir).await?;
    host.write_durably(&path, key.serialize_pem().as_bytes(), 0o600).await?;
    Ok(key)
}

pub(super) async fn forget(host: &dyn Host, dir: &Path) -> io::Result<()> {
    host.remove_file(&path(dir)).await
}

fn parse(pem: &[u8]) -> Option<KeyPair> {
    match PrivateKeyDer::from_pem_slice(pem).ok()? {
        PrivateKeyDer::Pkcs8(der) => KeyPair::try_from(&der).ok(),
        PrivateKeyDer::Sec1(der) => {
            let key = tagged(0x04, der.secret_sec1_der())?;
            let der = tagged(0x30, &[&PKCS8_ALGORITHM, &*key].concat())?;
            KeyPair::try_from(&PrivatePkcs8KeyDer::from(der)).ok()
        }
        _ => None,
    }
}

/// A DER element; one byte of length is two in the long form, which is enough for a P-256 key.
fn tagged(tag: u8, content: &[u8]) -> Option<Vec<u8>> {
    let length = u8::try_from(content.len()).ok()?;
    let head: &[u8] = if length < 0x80 { &[tag, length] } else { &[tag, 0x81, length] };
    Some([head, content].concat())
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::MetadataExt as _};

    use rubelet_host::linux::LinuxHost;

    use super::*;

    #[tokio::test]
    async fn a_key_is_made_once_and_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let pki = dir.path().join("pki");
        let host = LinuxHost::default();
        let first = load_or_make(&host, &pki).await.unwrap();
        let again = load_or_make(&host, &pki).await.unwrap();
        assert_eq!(first.serialize_pem(), again.serialize_pem());
        assert_eq!(fs::metadata(path(&pki)).unwrap().mode() & 0o777, 0o600);
        forget(&host, &pki).await.unwrap();
        assert_ne!(load_or_make(&host, &pki).await.unwrap().serialize_pem(), first.serialize_pem());
    }

    #[test]
    fn a_key_that_upstream_left_is_the_same_key_to_us() {
        let [ours, upstreams] = [include_str!("testdata/key.pem"), include_str!("testdata/key-sec1.pem")];
        let public = |pem: &str| parse(pem.as_bytes()).unwrap().public_key_raw().to_vec();
        assert_eq!(public(ours), public(upstreams));
    }

    #[tokio::test]
    async fn invalid_pending_key_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(path(dir.path()), "cut off").unwrap();
        load_or_make(&LinuxHost::default(), dir.path()).await.unwrap();
        assert!(fs::read_to_string(path(dir.path())).unwrap().contains("PRIVATE KEY"));
    }
}
