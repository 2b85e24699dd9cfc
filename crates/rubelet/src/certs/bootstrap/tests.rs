//! Tests of a node's first certificate, and when none is needed.

use std::{fs, os::unix::fs::MetadataExt as _, sync::atomic::AtomicI64};

use rubelet_host::linux::LinuxHost;
use rubelet_kube::port::ApiErrorKind;
use serde_json::json;

use super::*;
use crate::{
    certs::test_authority::{Signer, Validity, authority, start},
    fake_api::FakeApi,
};

#[tokio::test(start_paused = true)]
async fn signed_certificate_is_stored_and_pending_key_removed() {
    let dir = tempfile::tempdir().unwrap();
    let bootstrap = bootstrap(dir.path());
    let signer = Signer::new(bootstrap.clock.clone(), CertificateTemplate::client("n1"), 3600);
    fs::write(&bootstrap.bootstrap_kubeconfig, kubeconfig(&json!({ "token": "t" }))).unwrap();
    bootstrap.join(signer.as_ref(), &Kubeconfig::read(&bootstrap.bootstrap_kubeconfig).unwrap()).await.unwrap();
    assert_eq!(bootstrap.is_done().await, Ok(()));
    assert!(!pending_key::path(&bootstrap.cert_dir).exists());
}

#[tokio::test(start_paused = true)]
async fn restarted_bootstrap_reuses_key_and_csr_name() {
    let dir = tempfile::tempdir().unwrap();
    let bootstrap = bootstrap(dir.path());
    let mut names = Vec::new();
    for _ in 0..2 {
        let api = FakeApi::answering([Err(ApiErrorKind::Forbidden)]);
        bootstrap.get_certificate(api.as_ref()).await.unwrap_err();
        let body: serde_json::Value = serde_json::from_slice(api.calls()[0].body.as_deref().unwrap()).unwrap();
        names.push(body["metadata"]["name"].clone());
    }
    assert!(names[0].as_str().unwrap().starts_with("node-csr-"));
    assert_eq!(names[0], names[1]);
}

#[tokio::test(start_paused = true)]
async fn expired_certificate_of_earlier_csr_is_not_used() {
    let dir = tempfile::tempdir().unwrap();
    let bootstrap = bootstrap(dir.path());
    let earlier = Signer::new(bootstrap.clock.clone(), CertificateTemplate::client("n1"), -60);
    let key = pending_key::load_or_make(bootstrap.host.as_ref(), &bootstrap.cert_dir).await.unwrap();
    tokio::time::timeout(Duration::from_secs(600), bootstrap.get_certificate(earlier.as_ref())).await.unwrap_err();
    assert!(earlier.asked_at.lock().unwrap().len() > 1);
    let next = pending_key::load_or_make(bootstrap.host.as_ref(), &bootstrap.cert_dir).await.unwrap();
    assert_ne!(key.serialize_pem(), next.serialize_pem());
    assert!(!bootstrap.cert_dir.join("kubelet-client-current.pem").exists());
}

#[tokio::test(start_paused = true)]
async fn bootstrap_retries_unreachable_server_and_fails_on_refusal() {
    let dir = tempfile::tempdir().unwrap();
    let bootstrap = bootstrap(dir.path());
    let away = || Err(ApiErrorKind::Unreachable);
    let api = FakeApi::answering([away(), away(), away(), Err(ApiErrorKind::Unauthorized)]);
    let error = bootstrap.get_certificate(api.as_ref()).await.unwrap_err();
    assert_eq!(api.calls().len(), 4);
    assert!(format!("{error:#}").starts_with("request a client certificate with"), "{error:#}");
}

#[tokio::test(start_paused = true)]
async fn a_server_that_never_comes_ends_the_wait_after_an_hour() {
    let dir = tempfile::tempdir().unwrap();
    let bootstrap = bootstrap(dir.path());
    let api = FakeApi::answering((0..200).map(|_| Err(ApiErrorKind::Unreachable)));
    let error = bootstrap.get_certificate(api.as_ref()).await.unwrap_err();
    assert_eq!(error.to_string(), "no certificate within 60 minutes");
}

#[tokio::test(start_paused = true)]
async fn bootstrap_is_needed_until_kubeconfig_certificate_is_valid() {
    let dir = tempfile::tempdir().unwrap();
    let bootstrap = bootstrap(dir.path());
    assert_eq!(bootstrap.is_done().await.unwrap_err(), "is not there yet");
    fs::write(&bootstrap.kubeconfig, kubeconfig(&json!({ "token": "t" }))).unwrap();
    assert_eq!(bootstrap.is_done().await.unwrap_err(), "names no client certificate");
    let pem = dir.path().join("pair.pem");
    fs::write(&bootstrap.kubeconfig, kubeconfig(&json!({ "client-certificate": pem, "client-key": pem }))).unwrap();
    let reason = bootstrap.is_done().await.unwrap_err();
    assert!(reason.contains("pair.pem"), "{reason}");
    for (validity, expected) in [
        (Validity::secs_from(start(), 60), Ok(())),
        (
            Validity::secs_from(start() - Duration::from_secs(60), 59),
            Err("its certificate ended at 2026-11-15T23:59:59Z"),
        ),
    ] {
        let pair = authority().pair(&CertificateTemplate::client("n1"), &KeyPair::generate().unwrap(), validity);
        fs::write(&pem, pair).unwrap();
        assert_eq!(bootstrap.is_done().await, expected.map_err(str::to_owned));
    }
}

#[tokio::test]
async fn the_kubeconfig_is_for_its_owner_only() {
    let dir = tempfile::tempdir().unwrap();
    let bootstrap = Bootstrap { kubeconfig: dir.path().join("etc/kubelet.conf"), ..bootstrap(dir.path()) };
    bootstrap.write_kubeconfig("kind: Config\n").await.unwrap();
    assert_eq!(fs::metadata(&bootstrap.kubeconfig).unwrap().mode() & 0o777, 0o600);
}

pub(in crate::certs) fn bootstrap(dir: &Path) -> Bootstrap {
    Bootstrap {
        host: Arc::new(LinuxHost::default()),
        clock: Clock::simulated(start(), Arc::new(AtomicI64::new(0))),
        node_name: "n1".to_owned(),
        kubeconfig: dir.join("kubelet.conf"),
        bootstrap_kubeconfig: dir.join("bootstrap.conf"),
        cert_dir: dir.join("pki"),
    }
}

pub(in crate::certs) fn kubeconfig(user: &serde_json::Value) -> String {
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{ "name": "c", "context": { "cluster": "k", "user": "u" } }],
        "clusters": [{ "name": "k", "cluster": { "server": "https://127.0.0.1:6443" } }],
        "users": [{ "name": "u", "user": user }],
    })
    .to_string()
}
