//! The client against a test server on real sockets: TLS, HTTP/2 and server faults.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/test_server.rs"]
mod test_server;

use std::{error::Error as _, io, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::StreamExt as _;
use http::{Method, StatusCode};
use rubelet_kube::{
    client::{Client, Observer, Occurrence, RateLimit, RateLimits},
    error_chain,
    kubeconfig::Kubeconfig,
    port::{ApiErrorKind, ApiServer as _, Call, Lane, ObjectPath, PatchKind, Verb, Watch, WatchEvent},
};

use crate::test_server::{Answer, Authority, Certificates, Protocol, TestServer};

const NO_LIMITS: RateLimits = RateLimits { ordinary: RateLimit::NONE, events: RateLimit::NONE };
const SOON: Duration = Duration::from_secs(20);

fn client(kubeconfig: &std::path::Path) -> Client {
    Client::new(&Kubeconfig::read(kubeconfig).unwrap(), NO_LIMITS).unwrap()
}

fn pods() -> ObjectPath {
    ObjectPath::all("v1", "pods")
}

fn get(lane: Lane, path: ObjectPath, timeout: Duration) -> Call {
    Call { lane, verb: Verb::Get, path, query: Vec::new(), body: None, timeout }
}

fn watch(path: ObjectPath) -> Watch {
    Watch { collection: path, query: vec![("watch", "true".to_owned())] }
}

#[tokio::test]
async fn request_has_user_agent_and_credentials() {
    for protocol in [Protocol::Http2, Protocol::Http1] {
        let certificates = Certificates::new();
        let server = TestServer::start(&certificates, protocol, |request| {
            let seen = format!(
                "{} {} as {}\n{:?}\n{:?}\n{}",
                request.method,
                request.target,
                request.peer,
                request.header("content-type"),
                request.header("user-agent"),
                request.body
            );
            Answer::ok(seen)
        })
        .await;
        let client = client(&certificates.kubeconfig(&server, "node-one"));
        let call = Call {
            lane: Lane::Ordinary,
            verb: Verb::Patch(PatchKind::StrategicMerge),
            path: pods().within("default").named("web").sub("status"),
            query: vec![("fieldManager", "a=b,c d".to_owned())],
            body: Some(Bytes::from_static(b"{}")),
            timeout: SOON,
        };
        let seen = String::from_utf8(client.call(call).await.unwrap().to_vec()).unwrap();
        insta::allow_duplicates! {
            insta::assert_snapshot!(seen, @r#"
            PATCH /api/v1/namespaces/default/pods/web/status?fieldManager=a%3Db%2Cc%20d as node-one
            Some("application/strategic-merge-patch+json")
            Some("rubelet/0.1.0 (linux/amd64) kubernetes/v1.36")
            {}
            "#);
        }
        assert_eq!(server.connections(), 1, "{protocol:?}");
    }
}

#[tokio::test]
async fn observer_sees_every_try_and_call() {
    let certificates = Certificates::new();
    let server = TestServer::start(&certificates, Protocol::Http2, |request| {
        if request.target.contains("missing") { Answer::status(StatusCode::NOT_FOUND) } else { Answer::ok("12345") }
    })
    .await;
    let kubeconfig = Kubeconfig::read(&certificates.kubeconfig(&server, "node-one")).unwrap();
    let told = Arc::new(std::sync::Mutex::new(Vec::new()));
    let heard = told.clone();
    let observer = Observer::new(move |observed| {
        let what = match observed.what {
            Occurrence::Waited(_) => "waited".to_owned(),
            Occurrence::Tried(code) => format!("tried {code:?}"),
            Occurrence::Called { sent_bytes, received_bytes, .. } => format!("{sent_bytes} for {received_bytes:?}"),
        };
        assert!(observed.host.contains(':'), "{}", observed.host);
        heard.lock().unwrap().push(format!("{} {what}", observed.method));
    });
    let limits = RateLimits { ordinary: RateLimit { qps: 50, burst: 100 }, events: RateLimit::NONE };
    let client = Client::observed(&kubeconfig, limits, Some(observer)).unwrap();
    client.call(get(Lane::Ordinary, pods(), SOON)).await.unwrap();
    client.call(get(Lane::Heartbeat, pods().named("missing"), SOON)).await.unwrap_err();
    insta::assert_snapshot!(told.lock().unwrap().join("\n"), @"
    GET waited
    GET tried Some(200)
    GET 0 for Some(5)
    GET tried Some(404)
    GET 0 for None
    ");
}

#[tokio::test]
async fn a_server_of_another_authority_is_not_spoken_to() {
    let certificates = Certificates::new();
    let server = TestServer::start(&certificates, Protocol::Http2, |_| Answer::ok("")).await;
    let kubeconfig = certificates.kubeconfig(&server, "node-one");
    std::fs::write(certificates.path("ca.crt"), Authority::new().certificate_pem()).unwrap();
    let error = client(&kubeconfig).call(get(Lane::Ordinary, pods(), SOON)).await.unwrap_err();
    assert_eq!(error.kind, ApiErrorKind::Unreachable);
    assert!(error_chain(&error).contains("invalid peer certificate"), "{error}");
}

#[tokio::test]
async fn events_of_a_watch_come_as_they_happen() {
    let certificates = Certificates::new();
    let server = TestServer::start(&certificates, Protocol::Http2, |_| Answer::Stream).await;
    let client = client(&certificates.kubeconfig(&server, "node-one"));
    let mut events = client.watch(watch(pods())).await.unwrap();
    let stream = server.next_stream().await;
    for object in ["{\"a\":1}", "{\"b\":2}"] {
        stream.send(format!("{{\"type\":\"MODIFIED\",\"object\":{object}}}\n"));
        assert_eq!(events.next().await.unwrap().unwrap(), WatchEvent::Modified(Bytes::from(object)));
    }
    stream.send(
        "{\"type\":\"ERROR\",\"object\":{\"code\":410,\"reason\":\"Expired\",\"message\":\"too old\"}}\n".to_owned(),
    );
    assert_eq!(events.next().await.unwrap().unwrap_err().kind, ApiErrorKind::Expired);
    assert!(events.next().await.is_none());
}

#[tokio::test]
async fn a_watch_that_the_server_ends_is_over() {
    let certificates = Certificates::new();
    let server = TestServer::start(&certificates, Protocol::Http2, |_| Answer::Stream).await;
    let client = client(&certificates.kubeconfig(&server, "node-one"));
    let mut events = client.watch(watch(pods())).await.unwrap();
    drop(server.next_stream().await);
    assert!(events.next().await.is_none());
}

#[tokio::test]
async fn hundreds_of_watches_leave_heartbeats_and_calls_alone() {
    let certificates = Certificates::new();
    let server =
        TestServer::start(&certificates, Protocol::Http2, |request| match request.target.contains("watch=true") {
            true => Answer::Stream,
            false => Answer::ok("pong"),
        })
        .await;
    let client = Arc::new(client(&certificates.kubeconfig(&server, "node-one")));
    let mut opening = tokio::task::JoinSet::new();
    for number in 0..250 {
        let client = Arc::clone(&client);
        opening.spawn(async move { client.watch(watch(pods().within(format!("n{number}")))).await.unwrap() });
    }
    let watches = opening.join_all().await;
    assert_eq!(watches.len(), 250);
    assert_eq!(server.connections(), 4, "80 watches share one connection");
    for lane in [Lane::Lease, Lane::Heartbeat, Lane::Ordinary, Lane::Events, Lane::Reviews] {
        assert_eq!(client.call(get(lane, pods(), SOON)).await.unwrap(), "pong");
    }
    assert_eq!(server.connections(), 9);
}

#[tokio::test]
async fn retry_after_is_honoured() {
    let certificates = Certificates::new();
    let server = TestServer::start(&certificates, Protocol::Http2, |request| match request.number {
        0 => Answer::status(StatusCode::TOO_MANY_REQUESTS).with("retry-after", "1"),
        1 => Answer::status(StatusCode::SERVICE_UNAVAILABLE).with("retry-after", "1"),
        _ => Answer::ok(request.body.clone()),
    })
    .await;
    let client = client(&certificates.kubeconfig(&server, "node-one"));
    let body = Some(Bytes::from_static(b"{\"again\":true}"));
    let create = Call { verb: Verb::Create, body, ..get(Lane::Ordinary, pods(), SOON) };
    assert_eq!(client.call(create).await.unwrap(), "{\"again\":true}");
    assert_eq!(server.requests(), 3);
}

#[tokio::test]
async fn patience_ends_with_the_calls_time() {
    let certificates = Certificates::new();
    let server = TestServer::start(&certificates, Protocol::Http2, |_| {
        Answer::status(StatusCode::TOO_MANY_REQUESTS).with("retry-after", "3600")
    })
    .await;
    let client = client(&certificates.kubeconfig(&server, "node-one"));
    let error = client.call(get(Lane::Ordinary, pods(), SOON)).await.unwrap_err();
    assert_eq!(error.kind, ApiErrorKind::TooManyRequests { retry_after: Some(Duration::from_secs(60)) });
    assert_eq!(server.requests(), 1);
}

#[tokio::test]
async fn retry_after_beyond_any_clock_is_an_error_of_the_call() {
    let certificates = Certificates::new();
    let server = TestServer::start(&certificates, Protocol::Http2, |request| match request.number % 3 {
        0 => Answer::status(StatusCode::TOO_MANY_REQUESTS).with("retry-after", "18446744073709551615"),
        1 => Answer::status(StatusCode::SERVICE_UNAVAILABLE).with("retry-after", "9223372036854775807"),
        _ => Answer::Whole {
            status: StatusCode::TOO_MANY_REQUESTS,
            headers: http::HeaderMap::new(),
            body: r#"{"kind":"Status","details":{"retryAfterSeconds":18446744073709551615}}"#.to_owned(),
        },
    })
    .await;
    let client = client(&certificates.kubeconfig(&server, "node-one"));
    let longest = ApiErrorKind::TooManyRequests { retry_after: Some(Duration::from_secs(60)) };
    for _ in 0..3 {
        let error = client.call(get(Lane::Ordinary, pods(), SOON)).await.unwrap_err();
        assert_eq!(error.kind, longest);
    }
    // A call without an end of its own waits for nothing longer either.
    let patient = Duration::from_secs(30);
    assert_eq!(client.call(get(Lane::Ordinary, pods(), patient)).await.unwrap_err().kind, longest);
}

#[tokio::test]
async fn hung_server_times_out_and_next_call_reconnects() {
    let certificates = Certificates::new();
    let server = TestServer::start(&certificates, Protocol::Http2, |request| match request.number {
        0 => Answer::Never,
        _ => Answer::ok("here"),
    })
    .await;
    let client = client(&certificates.kubeconfig(&server, "node-one"));
    let error = client.call(get(Lane::Heartbeat, pods(), Duration::from_millis(300))).await.unwrap_err();
    assert_eq!(
        (error.kind, error.to_string().as_str()),
        (ApiErrorKind::Unreachable, "get /api/v1/pods: no answer within 300ms")
    );
    assert_eq!(client.call(get(Lane::Heartbeat, pods(), SOON)).await.unwrap(), "here");
    assert_eq!(server.connections(), 2);
}

#[tokio::test]
async fn silent_server_times_out() {
    let certificates = Certificates::new();
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = silent.local_addr().unwrap();
    let client = client(&certificates.kubeconfig_for(&format!("https://{address}"), "node-one"));
    let error = client.call(get(Lane::Ordinary, pods(), Duration::from_millis(200))).await.unwrap_err();
    assert_eq!(error.kind, ApiErrorKind::Unreachable);
    drop(silent);
    let error = client.call(get(Lane::Ordinary, pods(), SOON)).await.unwrap_err();
    assert!(error_chain(&error).contains("Connection refused"), "{error}");
    let mut causes = std::iter::successors(error.source(), |&cause| cause.source());
    let cause = causes.find_map(|cause| cause.downcast_ref::<io::Error>()).unwrap();
    assert_eq!(cause.kind(), io::ErrorKind::ConnectionRefused);
}

#[tokio::test]
async fn a_connection_that_broke_is_replaced() {
    let certificates = Certificates::new();
    let server = TestServer::start(&certificates, Protocol::Http2, |_| Answer::ok("here")).await;
    let client = client(&certificates.kubeconfig(&server, "node-one"));
    for expected in 1..=3 {
        assert_eq!(client.call(get(Lane::Ordinary, pods(), SOON)).await.unwrap(), "here");
        assert_eq!(server.connections(), expected);
        server.cut_connections().await;
    }
}

#[tokio::test]
async fn a_change_that_was_cut_off_is_not_made_again() {
    let certificates = Certificates::new();
    let server = TestServer::start(&certificates, Protocol::Http2, |_| Answer::Cut).await;
    let client = client(&certificates.kubeconfig(&server, "node-one"));
    let create =
        Call { verb: Verb::Create, body: Some(Bytes::from_static(b"{}")), ..get(Lane::Ordinary, pods(), SOON) };
    assert_eq!(client.call(create).await.unwrap_err().kind, ApiErrorKind::Unreachable);
    assert_eq!(server.requests(), 1);
    assert_eq!(client.call(get(Lane::Ordinary, pods(), SOON)).await.unwrap_err().kind, ApiErrorKind::Unreachable);
    assert_eq!(server.requests(), 3, "a question is asked twice");
}

#[tokio::test]
async fn a_new_client_certificate_is_used_without_losing_a_request() {
    let certificates = Certificates::new();
    let server = TestServer::start(&certificates, Protocol::Http2, |request| {
        match (request.target.contains("watch=true"), request.target.contains("slow")) {
            (true, _) | (_, true) => Answer::Stream,
            _ => Answer::ok(request.peer.clone()),
        }
    })
    .await;
    let client = Arc::new(client(&certificates.kubeconfig(&server, "node-old")));
    let ask = || client.call(get(Lane::Ordinary, pods(), SOON));
    assert_eq!(ask().await.unwrap(), "node-old");
    let mut events = client.watch(watch(pods())).await.unwrap();
    let _watch_stream = server.next_stream().await;
    let slow = tokio::spawn({
        let client = Arc::clone(&client);
        async move { client.call(get(Lane::Ordinary, pods().within("slow"), SOON)).await }
    });
    let slow_stream = server.next_stream().await;

    certificates.write_client("node-new");
    client.credentials_changed().await;
    assert_eq!(ask().await.unwrap(), "node-new");
    slow_stream.send("done".to_owned());
    drop(slow_stream);
    assert_eq!(slow.await.unwrap().unwrap(), "done", "what was under way is finished");
    assert!(events.next().await.is_none(), "a watch of the old certificate ends in peace");
}

#[tokio::test]
async fn a_certificate_that_changed_on_disk_is_noticed() {
    let certificates = Certificates::new();
    let server = TestServer::start(&certificates, Protocol::Http2, |request| Answer::ok(request.peer.clone())).await;
    let client = client(&certificates.kubeconfig(&server, "node-old"));
    let ask = || client.call(get(Lane::Ordinary, pods(), SOON));
    assert_eq!(ask().await.unwrap(), "node-old");
    certificates.write_client("node-new");
    server.cut_connections().await;
    assert_eq!(ask().await.unwrap(), "node-new");

    // A half-finished rotation is invalid: the last valid certificate stays.
    std::fs::write(certificates.path("client.pem"), "half").unwrap();
    server.cut_connections().await;
    assert_eq!(ask().await.unwrap(), "node-new");
}

#[tokio::test]
async fn plain_http_and_a_token_file_are_enough() {
    let certificates = Certificates::new();
    let server =
        TestServer::start(&certificates, Protocol::Plain, |request| match request.header("authorization").as_deref() {
            Some("Bearer second") => Answer::ok(format!("{} {}", request.method, Method::GET)),
            _ => Answer::status(StatusCode::UNAUTHORIZED),
        })
        .await;
    let kubeconfig = certificates.token_kubeconfig(&server, "token");
    std::fs::write(certificates.path("token"), "first\n").unwrap();
    let client = client(&kubeconfig);
    let error = client.call(get(Lane::Ordinary, pods(), SOON)).await.unwrap_err();
    assert_eq!(error.kind, ApiErrorKind::Unauthorized);
    assert_eq!(server.requests(), 2, "the token is read again, once");
    std::fs::write(certificates.path("token"), "second\n").unwrap();
    assert_eq!(client.call(get(Lane::Ordinary, pods(), SOON)).await.unwrap(), "GET GET");
}

/// A plugin that counts its runs and returns `token-<run>`.
fn counting_plugin(certificates: &Certificates, rest_of_status: &str) -> String {
    let script = format!(
        "cd \"$(dirname \"$0\")\"; echo \"$KUBERNETES_EXEC_INFO\" > asked; echo run >> runs\n\
         echo '{{\"kind\":\"ExecCredential\",\"apiVersion\":\"client.authentication.k8s.io/v1\",\
         \"status\":{{\"token\":\"token-'$(wc -l < runs)'\"{rest_of_status}}}}}'\n"
    );
    std::fs::write(certificates.path("plugin.sh"), script).unwrap();
    let arguments = certificates.path("plugin.sh");
    format!(
        "{{exec: {{command: sh, args: ['{}'], apiVersion: client.authentication.k8s.io/v1, \
         interactiveMode: Never, provideClusterInfo: true}}}}",
        arguments.display()
    )
}

#[tokio::test]
async fn exec_plugin_runs_once_and_again_after_unauthorized() {
    let certificates = Certificates::new();
    let server = TestServer::start(&certificates, Protocol::Plain, |request| match request.header("authorization") {
        Some(token) if request.number < 2 || token != "Bearer token-1" => Answer::ok(token),
        _ => Answer::status(StatusCode::UNAUTHORIZED),
    })
    .await;
    let user = counting_plugin(&certificates, "");
    let client = client(&certificates.write_kubeconfig(&format!("{{server: '{}'}}", server.url), &user));
    let ask = || client.call(get(Lane::Ordinary, pods(), SOON));
    assert_eq!(ask().await.unwrap(), "Bearer token-1");
    assert_eq!(ask().await.unwrap(), "Bearer token-1");
    let asked: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(certificates.path("asked")).unwrap()).unwrap();
    assert_eq!(asked["spec"]["cluster"]["server"], server.url);

    // Requested a moment ago and rejected: not requested again at once.
    assert_eq!(ask().await.unwrap_err().kind, ApiErrorKind::Unauthorized);
    assert_eq!(server.requests(), 4);
}

#[tokio::test]
async fn a_token_that_is_over_is_not_used() {
    let certificates = Certificates::new();
    let server = TestServer::start(&certificates, Protocol::Plain, |request| {
        Answer::ok(request.header("authorization").unwrap_or_default())
    })
    .await;
    let user = counting_plugin(&certificates, ",\"expirationTimestamp\":\"2020-01-01T00:00:00Z\"");
    let client = client(&certificates.write_kubeconfig(&format!("{{server: '{}'}}", server.url), &user));
    let ask = || client.call(get(Lane::Ordinary, pods(), SOON));
    assert_eq!(ask().await.unwrap(), "Bearer token-1");
    assert_eq!(ask().await.unwrap(), "Bearer token-2");
}

#[test]
fn invalid_kubeconfig_files_are_named() {
    let certificates = Certificates::new();
    let kubeconfig = certificates.kubeconfig_for("https://127.0.0.1:1", "node-one");
    let failure = || {
        let failed = Client::new(&Kubeconfig::read(&kubeconfig).unwrap(), NO_LIMITS).unwrap_err();
        let failed = error_chain(&failed);
        failed.replace(certificates.path("").to_str().unwrap(), "")
    };
    let other_key = Authority::new().sign("node-one").1;
    let (certificate, _) = Authority::new().sign("node-one");
    let write = |name: &str, text: &str| std::fs::write(certificates.path(name), text).unwrap();
    let mut told = Vec::new();
    write("client.pem", &format!("{certificate}{other_key}"));
    told.push(failure());
    write("client.pem", &certificate);
    told.push(failure());
    write("client.pem", "nothing\n");
    told.push(failure());
    write("ca.crt", "-----BEGIN CERTIFICATE-----\n*\n-----END CERTIFICATE-----\n");
    told.push(failure());
    std::fs::remove_file(certificates.path("ca.crt")).unwrap();
    told.push(failure());
    insta::assert_snapshot!(told.join("\n"), @"
    kubeconfig kubeconfig: client-key client.pem does not belong to client-certificate client.pem
    kubeconfig kubeconfig: client-key client.pem holds no private key in PEM
    kubeconfig kubeconfig: client-certificate client.pem holds no certificate in PEM
    kubeconfig kubeconfig: certificate-authority ca.crt is not PEM: base64 decode error: InvalidCharacter(42)
    kubeconfig kubeconfig: certificate-authority ca.crt: No such file or directory (os error 2)
    ");
}
