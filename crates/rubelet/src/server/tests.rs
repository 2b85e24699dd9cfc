//! Tests of the servers over real sockets.

use std::{net::SocketAddr, path::Path, sync::Arc, time::Duration};

use insta::assert_snapshot;
use rubelet_core::{settings::Settings, snapshot::Snapshot, time::Uptime};
use rubelet_cri::client::CriClient;
use rubelet_host::{
    lanes::Lanes,
    watch::{Interest, Watches},
};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use super::{
    Addresses, Server, ServerContext, admin,
    connections::{self, Limits},
    health::LoopHealth,
    read_only, views,
};
use crate::{
    event_log::EventLog,
    stats::{
        disk::{DiskCounter, DiskSources},
        persistent_meter::PersistentMeter,
        sample::{Sources, Stats},
        sandbox_images::SandboxImages,
        volume_meter::VolumeMeter,
    },
    world::{Clock, Paths},
};

pub(crate) mod alone;

pub(crate) fn context(snapshot: Snapshot, root: &Path) -> (watch::Sender<Arc<Snapshot>>, ServerContext) {
    let (sender, snapshots) = watch::channel(Arc::new(snapshot));
    let clock = Clock::simulated(views::tests::at("2026-11-15T19:00:00Z"), Arc::default());
    let paths = Paths {
        root_dir: root.to_owned(),
        pod_logs_dir: root.join("logs"),
        volume_plugin_dir: root.join("volume-plugins"),
        container_links_dir: root.join("links"),
    };
    let runtime =
        Arc::new(CriClient::new("unix:///nowhere.sock", "unix:///nowhere.sock", Duration::from_secs(1)).unwrap());
    let lanes = Lanes::own_files();
    let host = Arc::new(rubelet_host::linux::LinuxHost::default());
    let sources = Sources {
        snapshots: snapshots.clone(),
        settings: Arc::new(Settings::for_node("n1")),
        clock: clock.clone(),
        named_cgroups: Arc::default(),
        identity: Arc::default(),
        disk: Arc::new(DiskCounter::new(DiskSources {
            runtime: runtime.clone(),
            host: host.clone(),
            volumes: VolumeMeter::new(host, clock.clone()),
            persistent: PersistentMeter::default(),
            paths: paths.clone(),
            clock: clock.clone(),
            volumes_count_for: None,
        })),
        sandbox_images: Arc::new(SandboxImages::new(runtime)),
        root_dir: root.to_owned(),
    };
    let context = ServerContext {
        snapshots,
        events: EventLog::default(),
        metrics: Arc::default(),
        paths,
        clock,
        health: Arc::new(LoopHealth::new(Duration::from_secs(60))),
        stats: Stats::new(sources),
        log_watches: Watches::new(Interest::Writes, lanes),
    };
    (sender, context)
}

/// A server on a free port, stopped on drop.
struct ServerFixture {
    address: SocketAddr,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl ServerFixture {
    async fn read_only(context: ServerContext, limits: Limits) -> ServerFixture {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, stop) = (listener.local_addr().unwrap(), CancellationToken::new());
        let stopped = stop.clone();
        let task = tokio::spawn(async move {
            connections::serve(&listener, read_only::router(context), limits, &stopped).await;
        });
        ServerFixture { address, stop, task }
    }

    /// Sends a raw head and returns all bytes until the server closes.
    async fn raw(&self, head: &str) -> String {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(head.as_bytes()).await.unwrap();
        until_closed(&mut stream).await
    }

    async fn end(self) {
        self.stop.cancel();
        timeout(Duration::from_secs(5), self.task).await.expect("the server ends at stop").unwrap();
    }
}

async fn until_closed(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    // A reset after a response is an end too.
    let _ = timeout(Duration::from_secs(10), stream.read_to_end(&mut answer)).await.expect("the server closes");
    String::from_utf8(answer).unwrap()
}

fn one_pod() -> Snapshot {
    let mut web = views::tests::view("default", "web-n1", &["a"], &[], json!({ "phase": "Running" }));
    web.running = [("a".to_owned(), "c1".to_owned())].into();
    views::tests::snapshot("n1", [("u1", web)])
}

#[tokio::test]
async fn the_read_only_port_reads_and_nothing_else() {
    let (_sender, context) = context(one_pod(), Path::new("/nowhere"));
    let server = ServerFixture::read_only(context, Limits::OPEN_PORT).await;
    let mut matrix = String::new();
    for path in [
        "/healthz",
        "/healthz?verbose",
        "/healthz/syncloop",
        "/healthz/none",
        "/pods",
        "/pods/",
        "/runningpods",
        "/runningpods/",
        "/run/default/web/a",
        "/exec/default/web/a",
        "/logs/",
        "/containerLogs/default/web/a",
        "/debug/pprof/heap",
        "/configz",
        "/",
    ] {
        for method in ["GET", "HEAD", "POST", "DELETE"] {
            let answer = server.raw(&format!("{method} {path} HTTP/1.1\r\nHost: n\r\nConnection: close\r\n\r\n")).await;
            let status = answer.split(' ').nth(1).unwrap_or("none").to_owned();
            let body = answer.split("\r\n\r\n").nth(1).unwrap_or_default();
            let body: String = body.replace('\n', "|").chars().take(60).collect();
            matrix.push_str(format!("{method:6} {path:30} {status} {body}").trim_end());
            matrix.push('\n');
        }
    }
    server.end().await;
    assert_snapshot!(matrix, @r#"
    GET    /healthz                       200 ok
    HEAD   /healthz                       200
    POST   /healthz                       200 ok
    DELETE /healthz                       200 ok
    GET    /healthz?verbose               200 [+]ping ok|[+]log ok|[+]syncloop ok|healthz check passed|
    HEAD   /healthz?verbose               200
    POST   /healthz?verbose               200 [+]ping ok|[+]log ok|[+]syncloop ok|healthz check passed|
    DELETE /healthz?verbose               200 [+]ping ok|[+]log ok|[+]syncloop ok|healthz check passed|
    GET    /healthz/syncloop              200 ok
    HEAD   /healthz/syncloop              200
    POST   /healthz/syncloop              200 ok
    DELETE /healthz/syncloop              200 ok
    GET    /healthz/none                  404 404 page not found|
    HEAD   /healthz/none                  404
    POST   /healthz/none                  404 404 page not found|
    DELETE /healthz/none                  404 404 page not found|
    GET    /pods                          200 {"apiVersion":"v1","items":[{"metadata":{"name":"web-n1","na
    HEAD   /pods                          405
    POST   /pods                          405 405: Method Not Allowed
    DELETE /pods                          405 405: Method Not Allowed
    GET    /pods/                         200 {"apiVersion":"v1","items":[{"metadata":{"name":"web-n1","na
    HEAD   /pods/                         405
    POST   /pods/                         405 405: Method Not Allowed
    DELETE /pods/                         405 405: Method Not Allowed
    GET    /runningpods                   404 404 page not found|
    HEAD   /runningpods                   404
    POST   /runningpods                   404 404 page not found|
    DELETE /runningpods                   404 404 page not found|
    GET    /runningpods/                  405 Debug endpoints are disabled.|
    HEAD   /runningpods/                  405
    POST   /runningpods/                  405 Debug endpoints are disabled.|
    DELETE /runningpods/                  405 Debug endpoints are disabled.|
    GET    /run/default/web/a             405 Debug endpoints are disabled.|
    HEAD   /run/default/web/a             405
    POST   /run/default/web/a             405 Debug endpoints are disabled.|
    DELETE /run/default/web/a             405 Debug endpoints are disabled.|
    GET    /exec/default/web/a            405 Debug endpoints are disabled.|
    HEAD   /exec/default/web/a            405
    POST   /exec/default/web/a            405 Debug endpoints are disabled.|
    DELETE /exec/default/web/a            405 Debug endpoints are disabled.|
    GET    /logs/                         405 Debug endpoints are disabled.|
    HEAD   /logs/                         405
    POST   /logs/                         405 Debug endpoints are disabled.|
    DELETE /logs/                         405 Debug endpoints are disabled.|
    GET    /containerLogs/default/web/a   405 Debug endpoints are disabled.|
    HEAD   /containerLogs/default/web/a   405
    POST   /containerLogs/default/web/a   405 Debug endpoints are disabled.|
    DELETE /containerLogs/default/web/a   405 Debug endpoints are disabled.|
    GET    /debug/pprof/heap              405 Debug endpoints are disabled.|
    HEAD   /debug/pprof/heap              405
    POST   /debug/pprof/heap              405 Debug endpoints are disabled.|
    DELETE /debug/pprof/heap              405 Debug endpoints are disabled.|
    GET    /configz                       404 404 page not found|
    HEAD   /configz                       404
    POST   /configz                       404 404 page not found|
    DELETE /configz                       404 404 page not found|
    GET    /                              404 404 page not found|
    HEAD   /                              404
    POST   /                              404 404 page not found|
    DELETE /                              404 404 page not found|
    "#);
}

#[tokio::test]
async fn wrong_method_gets_405_with_allowed_methods() {
    let (_sender, context) = context(one_pod(), Path::new("/nowhere"));
    let server = ServerFixture::read_only(context, Limits::OPEN_PORT).await;
    for (request, allowed) in [("HEAD /pods", "GET"), ("DELETE /stats/summary", "GET, POST")] {
        let answer = server.raw(&format!("{request} HTTP/1.1\r\nHost: n\r\nConnection: close\r\n\r\n")).await;
        assert!(answer.contains(&format!("allow: {allowed}\r\n")), "{request}: {answer}");
    }
    server.end().await;
}

#[tokio::test]
async fn a_stale_loop_fails_the_syncloop_check_and_only_that() {
    let (_sender, context) = context(one_pod(), Path::new("/nowhere"));
    let health = LoopHealth::new(Duration::from_secs(200));
    assert_eq!(health.check(Uptime::from_secs(9_999)), Ok(()), "a loop that never turned is starting");
    health.turned(Uptime::from_secs(1000));
    assert_eq!(health.check(Uptime::from_secs(1400)), Ok(()));
    assert_eq!(health.check(Uptime::from_secs(1401)), Err("sync Loop took longer than expected"));

    tokio::time::pause();
    context.health.turned(Uptime::ZERO);
    tokio::time::advance(Duration::from_secs(301)).await;
    tokio::time::resume();
    let server = ServerFixture::read_only(context, Limits::OPEN_PORT).await;
    let answer = server.raw("GET /healthz HTTP/1.1\r\nHost: n\r\nConnection: close\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 500 "), "{answer}");
    assert!(
        answer.ends_with("[+]ping ok\n[+]log ok\n[-]syncloop failed: reason withheld\nhealthz check failed\n"),
        "{answer}"
    );
    server.end().await;
}

#[tokio::test]
async fn slow_peers_lose_their_place() {
    let (_sender, context) = context(one_pod(), Path::new("/nowhere"));
    let limits = Limits { connections: 2, head_timeout: Duration::from_millis(300), ..Limits::OPEN_PORT };
    let server = ServerFixture::read_only(context, limits).await;
    let mut silent = TcpStream::connect(server.address).await.unwrap();
    let mut dripping = TcpStream::connect(server.address).await.unwrap();
    dripping.write_all(b"GET /pods HTTP/1.1\r\nHost: n\r\nX-A: ").await.unwrap();
    // Both slots are taken; this one waits in the backlog and is served when they are closed.
    let answer = server.raw("GET /healthz HTTP/1.1\r\nHost: n\r\nConnection: close\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    for slow in [&mut silent, &mut dripping] {
        let said = until_closed(slow).await;
        assert!(said.is_empty() || said.starts_with("HTTP/1.1 408 "), "{said}");
    }
    server.end().await;
}

#[tokio::test]
async fn a_connection_does_not_outlive_its_lifetime() {
    let (_sender, context) = context(one_pod(), Path::new("/nowhere"));
    let limits = Limits { lifetime: Some(Duration::from_millis(200)), ..Limits::OPEN_PORT };
    let server = ServerFixture::read_only(context, limits).await;
    let answer = server.raw("GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    server.end().await;
}

#[tokio::test]
async fn an_oversized_head_is_refused() {
    let (_sender, context) = context(one_pod(), Path::new("/nowhere"));
    let server = ServerFixture::read_only(context, Limits { head_bytes: 8192, ..Limits::OPEN_PORT }).await;
    let head = format!("GET /pods HTTP/1.1\r\nHost: n\r\nX-Long: {}", "x".repeat(9000));
    let answer = server.raw(&head).await;
    assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
    let many: String = (0..200).map(|n| format!("X-{n}: 1\r\n")).collect();
    let answer = server.raw(&format!("GET /pods HTTP/1.1\r\nHost: n\r\n{many}\r\n")).await;
    assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
    server.end().await;
}

#[tokio::test]
async fn health_port_answers_ping_and_binds_when_port_is_free() {
    let root = tempfile::tempdir().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = taken.local_addr().unwrap();
    let addresses = Addresses { socket: admin::socket_path(root.path()), health: Some(address), read_only: None };
    let server = Server::bind(&addresses).await.unwrap();
    let (_sender, context) = context(one_pod(), root.path());
    let stop = CancellationToken::new();
    let task = tokio::spawn(server.serve(context, stop.clone()));
    tokio::task::yield_now().await;
    drop(taken);
    tokio::time::pause();
    tokio::time::sleep(Duration::from_secs(6)).await;
    tokio::time::resume();
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: n\r\nConnection: close\r\n\r\n").await.unwrap();
    let answer = until_closed(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("\r\n\r\nok"), "{answer}");
    stop.cancel();
    timeout(Duration::from_secs(5), task).await.expect("the server ends at stop").unwrap();
    assert!(!addresses.socket.exists());
}
