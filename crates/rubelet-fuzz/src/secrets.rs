//! Credentials: certificates, kubeconfig, pull secrets.
//!
//! Owns: that a kubeconfig is read back as it is written, and that no message shows a secret.

use std::path::Path;

use rubelet::fuzzing;
use rubelet_core::{
    images::keyring::credentials,
    objects::{Data, Secret},
};
use rubelet_kube::fuzzing::kubeconfig as parsed;

/// A chain and a key in PEM, or else one certificate in DER.
pub(crate) fn certificates(data: &[u8]) -> Option<()> {
    if !data.starts_with(b"-----BEGIN") {
        return fuzzing::certificate_end(data).ok().map(drop);
    }
    let (pair, first_end) = fuzzing::certificate_pair(data);
    let chain = rubelet_tls::certificates(data);
    assert!(pair.is_err() || (chain.is_ok() && rubelet_tls::private_key(data).is_ok()));
    if let (Ok(chain), Ok(first_end)) = (chain, first_end) {
        assert!(!chain.is_empty());
        assert!(chain.iter().all(|der| fuzzing::certificate_end(der).is_ok_and(|end| end >= first_end)));
    }
    pair.ok()
}

pub(crate) fn kubeconfig(data: &[u8]) -> Option<()> {
    let path = Path::new("/etc/kubernetes/kubelet.conf");
    let config = parsed(data, path).ok()?;
    let written = config.to_yaml();
    let again = parsed(written.as_bytes(), path).unwrap_or_else(|error| panic!("{error} in {written}"));
    assert_eq!(again.to_yaml(), written);
    assert_eq!(again.cluster.tls_server_name, config.cluster.tls_server_name);
    assert_eq!(again.cluster.certificate_authority, config.cluster.certificate_authority);
    Some(())
}

/// An image in the first line, then the content of both kinds of secrets.
pub(crate) fn keyring(data: &[u8]) -> Option<()> {
    let end = data.iter().position(|byte| *byte == b'\n').unwrap_or(data.len());
    let image = String::from_utf8_lossy(&data[..end]);
    let content = &data[(end + 1).min(data.len())..];
    let kinds = [("dockerconfigjson", ".dockerconfigjson"), ("dockercfg", ".dockercfg")];
    let mut is_valid = false;
    for (kind, key) in kinds {
        let secret = secret(&format!("kubernetes.io/{kind}"), key, content);
        let found = credentials(&image, [&secret]);
        assert!(found.len() <= content.len());
        for credentials in &found {
            assert_eq!(format!("{credentials:?}"), format!("{}:***", credentials.username));
        }
        // One secret twice has each of them twice.
        assert_eq!(credentials(&image, [&secret, &secret]).len(), found.len() * 2);
        is_valid |= !found.is_empty();
    }
    is_valid.then_some(())
}

fn secret(secret_type: &str, key: &str, content: &[u8]) -> Secret {
    let data = Data([(key.to_owned(), content.to_vec())].into());
    Secret { secret_type: secret_type.to_owned(), data, is_immutable: false }
}
