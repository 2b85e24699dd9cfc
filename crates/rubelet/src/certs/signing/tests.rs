//! Tests of every outcome of a request.

use std::sync::Arc;

use serde_json::{Value, json};

use super::*;
use crate::fake_api::FakeApi;

const NAME: &str = "csr-x1";
const PATIENCE: Duration = Duration::from_secs(900);

#[tokio::test(start_paused = true)]
async fn csr_signed_during_watch_returns_certificate() {
    let api = FakeApi::answering([Ok(undecided()), Ok(undecided())])
        .watched([modified(&decided("Approved", None)), modified(&decided("Approved", Some("CHAIN")))]);
    assert_eq!(obtain_from(&api).await.unwrap(), "CHAIN");
    let created: Value = serde_json::from_slice(api.calls()[0].body.as_deref().unwrap()).unwrap();
    assert_eq!(created["metadata"]["generateName"], "csr-");
    assert_eq!(created["spec"]["signerName"], "kubernetes.io/kube-apiserver-client-kubelet");
    assert_eq!(created["spec"]["usages"], json!(["digital signature", "client auth"]));
}

#[tokio::test(start_paused = true)]
async fn denied_csr_reports_approver_and_reason() {
    let cases = [
        (decided("Denied", None), "certificate signing request \"csr-x1\" was denied (AdminSaid: no)"),
        (decided("Failed", None), "certificate signing request \"csr-x1\" failed (AdminSaid: no)"),
        (
            decided("Approved", None).replace("u1", "u2"),
            "certificate signing request \"csr-x1\" was replaced by another of the same name",
        ),
    ];
    for (answer, expected) in cases {
        let api = FakeApi::answering([Ok(undecided()), Ok(answer)]);
        let error = obtain_from(&api).await.unwrap_err();
        assert_eq!(error.to_string(), expected);
        assert!(!error.is_passing());
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_deleted_is_not_waited_for() {
    let gone = FakeApi::answering([Ok(undecided()), Err(ApiErrorKind::NotFound)]);
    let while_watching =
        FakeApi::answering([Ok(undecided()), Ok(undecided())]).watched([WatchEvent::Deleted(undecided().into())]);
    for api in [gone, while_watching] {
        let error = obtain_from(&api).await.unwrap_err().to_string();
        assert_eq!(error, "certificate signing request \"csr-x1\" was deleted");
    }
}

#[tokio::test(start_paused = true)]
async fn undecided_csr_times_out() {
    let api = FakeApi::answering((0..20).map(|_| Ok(undecided())));
    let error = obtain_from(&api).await.unwrap_err().to_string();
    assert_eq!(error, "certificate signing request \"csr-x1\" was not decided within 15 minutes");
    assert!(api.calls().len() < 6, "a quiet watch is looked after every five minutes, not more");
}

#[tokio::test(start_paused = true)]
async fn csr_wait_survives_api_outage() {
    let away = || Err(ApiErrorKind::Unreachable);
    let api = FakeApi::answering([Ok(undecided()), away(), away(), Ok(decided("Approved", Some("CHAIN")))]);
    assert_eq!(obtain_from(&api).await.unwrap(), "CHAIN");
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_ends_early_is_followed_by_another_look() {
    let api =
        FakeApi::answering([Ok(undecided()), Ok(undecided()), Ok(decided("Approved", Some("CHAIN")))]).watched([]);
    assert_eq!(obtain_from(&api).await.unwrap(), "CHAIN");
}

#[tokio::test(start_paused = true)]
async fn a_request_of_an_earlier_run_is_found_by_its_name() {
    let api = FakeApi::answering([
        Err(ApiErrorKind::AlreadyExists),
        Ok(decided("Approved", None)),
        Ok(decided("Approved", Some("CHAIN"))),
    ]);
    let (template, key) = (CertificateTemplate::client("n1"), KeyPair::generate().unwrap());
    let chain = request_certificate(api.as_ref(), &template, &key, Name::Digested, PATIENCE).await.unwrap();
    assert_eq!(chain, "CHAIN");
    assert_eq!(api.calls()[1].path.name, Some(template.digested_name(&key)));
}

#[tokio::test(start_paused = true)]
async fn csr_errors_are_retryable_or_final() {
    let cases = [
        (ApiErrorKind::Unreachable, true),
        (ApiErrorKind::Server, true),
        (ApiErrorKind::Unauthorized, false),
        (ApiErrorKind::Forbidden, false),
        (ApiErrorKind::Invalid, false),
    ];
    for (kind, expected) in cases {
        let error = obtain_from(&FakeApi::answering([Err(kind)])).await.unwrap_err();
        assert_eq!(error.is_passing(), expected, "{kind:?}");
    }
}

async fn obtain_from(api: &Arc<FakeApi>) -> Result<String, SigningError> {
    request_certificate(
        api.as_ref(),
        &CertificateTemplate::client("n1"),
        &KeyPair::generate().unwrap(),
        Name::Generated,
        PATIENCE,
    )
    .await
}

fn undecided() -> String {
    csr(&json!({}))
}

fn decided(condition: &str, chain: Option<&str>) -> String {
    let certificate = chain.map(|chain| ByteString(chain.as_bytes().to_vec()));
    let condition = json!({ "type": condition, "status": "True", "reason": "AdminSaid", "message": "no" });
    csr(&json!({ "conditions": [condition], "certificate": certificate }))
}

fn csr(status: &Value) -> String {
    json!({
        "apiVersion": "certificates.k8s.io/v1",
        "kind": "CertificateSigningRequest",
        "metadata": { "name": NAME, "uid": "u1", "resourceVersion": "7" },
        "spec": { "request": "", "signerName": "s" },
        "status": status,
    })
    .to_string()
}

fn modified(csr: &str) -> WatchEvent {
    WatchEvent::Modified(csr.to_owned().into())
}
