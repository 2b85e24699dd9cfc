//! With a scripted API server, in paused time.

use std::io::Write as _;

use bytes::Bytes;
use rubelet_core::id::PodUid;
use rubelet_kube::port::{Verb, WatchEvent};
use serde_json::{Value, json};

use super::*;
use crate::{
    event_log::EventLog,
    fake_api::FakeApi,
    objects::{ObjectCache, Strategy, tests::next_snapshot},
    world::Clock,
};
use rubelet_core::{needs::Needs, snapshot::Snapshot};

const START: &str = "2026-11-19T00:00:00Z";

fn key(key_type: &str) -> CertificateKey {
    CertificateKey {
        namespace: "prod".to_owned(),
        pod_name: "web".to_owned(),
        pod_uid: PodUid::new("u1"),
        service_account: "robot".to_owned(),
        volume: "identity".to_owned(),
        source_index: 0,
        signer: "example.com/signer".to_owned(),
        key_type: key_type.to_owned(),
        max_expiration_secs: Some(86_400),
        annotations: None,
    }
}

fn request(name: &str, status: &Value) -> Value {
    let spec = json!({
        "nodeName": "n1", "nodeUID": "", "podName": "web", "podUID": "u1", "serviceAccountName": "robot",
        "serviceAccountUID": "", "signerName": "example.com/signer", "stubPKCS10Request": "",
    });
    json!({"metadata": {"name": name, "resourceVersion": "2"}, "spec": spec, "status": status})
}

fn decided(name: &str, kind: &str, chain: &str, times: [&str; 2]) -> WatchEvent {
    let condition = json!({"type": kind, "status": "True", "reason": "R", "message": "m", "lastTransitionTime": START});
    let chain = format!("-----BEGIN CERTIFICATE-----\n{chain}\n-----END CERTIFICATE-----\n");
    let status = match kind {
        "Issued" => json!({
            "conditions": [condition], "certificateChain": chain, "beginRefreshAt": times[0], "notAfter": times[1],
        }),
        _ => json!({"conditions": [condition]}),
    };
    WatchEvent::Modified(Bytes::from(request(name, &status).to_string()))
}

/// What the server answers to one attempt: the account, the node, the request as made, and the list before the watch.
fn answers(name: &str) -> [Result<String, rubelet_kube::port::ApiErrorKind>; 4] {
    let object = |uid: &str| json!({"metadata": {"uid": uid}}).to_string();
    let made = request(name, &json!({}));
    let list = json!({"metadata": {"resourceVersion": "1"}, "items": [made]}).to_string();
    [Ok(object("account-1")), Ok(object("node-1")), Ok(made.to_string()), Ok(list)]
}

struct Fixture {
    objects: ObjectCache,
    api: Arc<FakeApi>,
    events: EventLog,
    metrics: Arc<Metrics>,
    hints: mpsc::Receiver<Event>,
    snapshot: Snapshot,
}

impl Fixture {
    fn new(api: Arc<FakeApi>, key: &CertificateKey) -> Self {
        let clock = Clock::simulated(START.parse().unwrap(), Arc::default());
        let objects = ObjectCache::new(api.clone(), Strategy::Get, "n1", clock);
        let (events, (inbox, hints)) = (EventLog::default(), mpsc::channel(8));
        let metrics = Arc::<Metrics>::default();
        objects.enable_pod_certificates(events.clone(), metrics.clone());
        // Without the watch of services, which would take scripted answers.
        objects.shared.inbox.set(inbox).unwrap();
        let needs = Needs { certificates: BTreeSet::from([key.clone()]), ..Needs::default() };
        let snapshot = next_snapshot(&Snapshot::default(), &key.pod_uid, Some(needs));
        objects.update_needs(&Snapshot::default(), &snapshot);
        Fixture { objects, api, events, metrics, hints, snapshot }
    }

    async fn bundle(&self, key: &CertificateKey) -> Result<CredentialBundle, String> {
        self.objects.shared.certificates.bundle(key).await
    }

    /// The state of the only certificate.
    fn counted(&self) -> String {
        let page = self.metrics.page(&Snapshot::default(), self.objects.shared.clock.now().wall);
        let lines = page.lines().filter_map(|line| line.strip_prefix("kubelet_podcertificate_states"));
        lines.collect::<Vec<_>>().join(";")
    }

    fn events(&self) -> Vec<String> {
        let events = self.events.since(0).into_iter();
        events.map(|event| format!("{} {}", event.record.reason, event.record.message)).collect()
    }
}

#[tokio::test(start_paused = true)]
async fn certificate_is_requested_watched_for_and_renewed_with_another_key() {
    let [begin, end] = ["2026-11-19T08:00:00Z", "2026-11-19T12:00:00Z"];
    let later = ["2026-11-20T08:00:00Z", "2026-11-20T12:00:00Z"];
    let api = FakeApi::answering(answers("req-1").into_iter().chain(answers("req-2")))
        .watched([decided("req-1", "Issued", "AAEC", [begin, end])])
        .watched([decided("req-2", "Issued", "AwQF", later)]);
    let key = key("ECDSAP256");
    let mut test = Fixture::new(api, &key);
    let hint = test.hints.recv().await.unwrap();
    assert!(matches!(hint, Event::Refresh { pod } if pod == key.pod_uid));
    assert_eq!(test.counted(), "{signer_name=\"example.com/signer\",state=\"fresh\"} 1");
    let first = test.bundle(&key).await.unwrap();
    assert!(first.key.starts_with("-----BEGIN PRIVATE KEY-----\n") && first.chain.contains("\nAAEC\n"));
    let calls = test.api.calls();
    let create = calls.iter().find(|call| call.verb == Verb::Create).unwrap();
    let body: Value = serde_json::from_slice(create.body.as_ref().unwrap()).unwrap();
    assert_eq!(body["spec"]["serviceAccountUID"], "account-1");
    assert_eq!(body["spec"]["nodeUID"], "node-1");
    let list = calls.last().unwrap();
    let selector = ("fieldSelector", "spec.nodeName=n1,metadata.name=req-1".to_owned());
    assert!(list.query.contains(&selector), "{list:?}");
    test.hints.recv().await.unwrap();
    let now = test.objects.shared.clock.now().wall;
    assert!(now >= begin.parse::<Timestamp>().unwrap(), "renewed at {now}");
    let second = test.bundle(&key).await.unwrap();
    assert!(second.chain.contains("\nAwQF\n"));
    assert_ne!(first.key, second.key);
    // The pod ends, and with it its key.
    let ended = next_snapshot(&test.snapshot, &key.pod_uid, None);
    test.objects.update_needs(&test.snapshot, &ended);
    assert_eq!(test.bundle(&key).await, Err("unimplemented".to_owned()));
    assert_eq!(test.counted(), "");
}

#[tokio::test(start_paused = true)]
async fn refused_certificate_is_an_error_of_its_volume_and_an_event() {
    let api = FakeApi::answering(answers("req-1")).watched([decided("req-1", "Denied", "", [START; 2])]);
    let key = key("ED25519");
    let mut test = Fixture::new(api, &key);
    test.hints.recv().await.unwrap();
    let error = "PodCertificateRequest was permanently denied: reason=\"R\" message=\"m\"";
    assert_eq!(test.bundle(&key).await, Err(error.to_owned()));
    let event = "Denied PodCertificateRequest prod/req-1 was denied, reason=\"R\", message=\"m\"";
    assert_eq!(test.events(), [event]);
    assert!(test.counted().contains("state=\"denied\""));
}

#[tokio::test(start_paused = true)]
async fn late_renewal_is_reported_and_the_certificate_stays_in_use() {
    let api = FakeApi::answering(answers("req-1").into_iter().chain(answers("req-2"))).watched([decided(
        "req-1",
        "Issued",
        "AAEC",
        ["2026-11-19T08:00:00Z", "2026-11-19T12:00:00Z"],
    )]);
    let key = key("ECDSAP384");
    let mut test = Fixture::new(api, &key);
    test.hints.recv().await.unwrap();
    sleep(Duration::from_secs(13 * 3600)).await;
    let expected =
        ["CertificateOverdueForRefresh PodCertificate refresh overdue", "CertificateExpired PodCertificate expired"];
    assert_eq!(test.events(), expected);
    assert!(test.counted().contains("state=\"expired\""));
    assert!(test.bundle(&key).await.unwrap().chain.contains("\nAAEC\n"));
}

#[tokio::test(start_paused = true)]
async fn key_that_cannot_be_made_is_refused_by_name() {
    let key = key("DSA");
    let mut test = Fixture::new(FakeApi::answering([]), &key);
    test.hints.recv().await.unwrap();
    let error = test.bundle(&key).await.unwrap_err();
    assert_eq!(error, "while generating keypair: unknown key type \"DSA\"");
    assert!(test.api.calls().is_empty());
}

/// By a program that did not make them.
#[test]
fn keys_and_requests_are_read_by_openssl() {
    let dir = tempfile::tempdir().unwrap();
    for key_type in ["ECDSAP256", "ECDSAP384", "ECDSAP521", "ED25519", "RSA3072", "RSA4096"] {
        let own = own_key(key_type).unwrap();
        let file = |name: &str, content: &[u8]| {
            let path = dir.path().join(name);
            std::fs::File::create(&path).unwrap().write_all(content).unwrap();
            path
        };
        let (key, request) = (file("key.pem", own.key.as_bytes()), file("req.der", &own.stub));
        let run = |args: &[&str], path: &std::path::Path| {
            let ran = std::process::Command::new("openssl").args(args).arg("-in").arg(path).output();
            match ran {
                Ok(ran) => assert!(ran.status.success(), "{key_type}: {}", String::from_utf8_lossy(&ran.stderr)),
                Err(_) => println!("skipped: there is no openssl"),
            }
        };
        run(&["pkey", "-noout"], &key);
        run(&["req", "-inform", "DER", "-verify", "-noout"], &request);
    }
}
