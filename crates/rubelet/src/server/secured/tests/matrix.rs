//! Every route × every port × every kind of caller. A route without a row here fails a test.

use std::{collections::BTreeSet, path::PathBuf};

use super::*;
use crate::server::{Addresses, Server, admin};

/// A route as in the source code, and a request that matches it.
const ROWS: &[(&str, &str)] = &[
    ("/healthz", "GET /healthz"),
    ("/healthz", "POST /healthz"),
    ("/healthz/{check}", "GET /healthz/syncloop"),
    ("/healthz/{check}", "DELETE /healthz/log"),
    ("/healthz/ping", "GET /healthz/ping"),
    ("/pods", "GET /pods"),
    ("/pods", "POST /pods"),
    ("/pods", "HEAD /pods"),
    ("/pods/", "GET /pods/"),
    ("/pods/", "HEAD /pods/"),
    ("/metrics", "GET /metrics"),
    ("/metrics", "POST /metrics"),
    ("/metrics/probes", "GET /metrics/probes"),
    ("/metrics/slis", "DELETE /metrics/slis"),
    ("/metrics/resource", "GET /metrics/resource"),
    ("/metrics/resource", "POST /metrics/resource"),
    ("/metrics/cadvisor", "GET /metrics/cadvisor"),
    ("/metrics/cadvisor", "HEAD /metrics/cadvisor"),
    ("/stats/summary", "GET /stats/summary"),
    ("/stats/summary", "POST /stats/summary"),
    ("/stats/summary", "HEAD /stats/summary"),
    ("/runningpods/", "GET /runningpods/"),
    ("/runningpods/", "HEAD /runningpods/"),
    ("/configz", "GET /configz"),
    ("/configz", "PUT /configz"),
    ("/flagz", "GET /flagz"),
    ("/statusz", "GET /statusz"),
    ("/explain/{namespace}/{pod}", "GET /explain/default/web-n1"),
    ("/containerLogs/{namespace}/{pod}/{container}", "GET /containerLogs/default/web-n1/a"),
    ("/containerLogs/{namespace}/{pod}/{container}", "GET /containerLogs/default/other/a"),
    ("/containerLogs/{namespace}/{pod}/{container}", "HEAD /containerLogs/default/web-n1/a"),
    ("/exec/{namespace}/{pod}/{container}", "POST /exec/default/web-n1/a?output=1&command=ls"),
    ("/exec/{namespace}/{pod}/{container}/{last}", "GET /exec/default/web-n1/u1/a?output=1&command=ls"),
    ("/exec/{namespace}/{pod}/{container}", "HEAD /exec/default/web-n1/a?output=1&command=ls"),
    ("/attach/{namespace}/{pod}/{container}", "GET /attach/default/web-n1/a?output=1"),
    ("/attach/{namespace}/{pod}/{container}/{last}", "POST /attach/default/web-n1/u1/a?output=1"),
    ("/run/{namespace}/{pod}/{container}", "POST /run/default/web-n1/a?cmd=ls"),
    ("/run/{namespace}/{pod}/{container}", "GET /run/default/web-n1/a?cmd=ls"),
    ("/run/{namespace}/{pod}/{container}/{last}", "POST /run/default/web-n1/u1/a?cmd=ls"),
    ("/portForward/{namespace}/{pod}", "GET /portForward/default/web-n1"),
    ("/portForward/{namespace}/{pod}/{uid}", "POST /portForward/default/web-n1/u1"),
    ("/debug/pprof/", "GET /debug/pprof/"),
    ("/debug/pprof/{*profile}", "GET /debug/pprof/heap"),
    ("/debug/flags/v", "PUT /debug/flags/v"),
    ("/debug/flags/v", "GET /debug/flags/v"),
    ("/checkpoint/{namespace}/{pod}/{container}", "POST /checkpoint/default/web-n1/a"),
    ("/checkpoint/{namespace}/{pod}/{container}", "POST /checkpoint/default/web-n1/other"),
    ("/checkpoint/{namespace}/{pod}/{container}", "POST /checkpoint/default/other/a"),
    ("/checkpoint/{namespace}/{pod}/{container}", "GET /checkpoint/default/web-n1/a"),
    ("/logs/", "GET /logs/"),
    ("/logs/", "HEAD /logs/"),
    ("/logs/", "POST /logs/"),
    ("/logs/{*path}", "GET /logs/nothing"),
    ("/logs/{*path}", "GET /logs/../pods"),
    ("(none)", "GET /logs"),
    ("(none)", "GET /nothing"),
    ("(none)", "GET /"),
];

/// The routes in the source code of the ports.
fn routes() -> BTreeSet<String> {
    fn visit(dir: PathBuf, routes: &mut BTreeSet<String>) {
        for entry in fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
            let name = entry.file_name().unwrap().to_str().unwrap();
            // The root-only socket is not a port.
            if name.starts_with("tests") || name.starts_with("admin") {
                continue;
            }
            if entry.is_dir() {
                visit(entry, routes);
                continue;
            }
            let source = fs::read_to_string(&entry).unwrap();
            let served = source.split("#[cfg(test)]").next().unwrap();
            for route in served.split(".route(").skip(1) {
                match route.trim_start().strip_prefix('"') {
                    Some(route) => routes.extend(route.split('"').next().map(str::to_owned)),
                    None => assert!(route.starts_with("&format!") && name == "read_only.rs", "{entry:?}: {route:.60}"),
                }
            }
        }
    }
    let mut routes = BTreeSet::new();
    visit(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/server"), &mut routes);
    routes
}

#[test]
fn every_route_has_a_row() {
    let rows: BTreeSet<String> = ROWS.iter().map(|(route, _)| (*route).to_owned()).collect();
    let missing: Vec<String> = routes().difference(&rows).cloned().collect();
    assert!(missing.is_empty(), "no row says who may take {missing:?}");
}

/// The two ports without authentication.
struct OpenPorts {
    read_only: SocketAddr,
    health: SocketAddr,
    stop: CancellationToken,
    task: JoinHandle<()>,
    _sender: tokio::sync::watch::Sender<Arc<rubelet_core::snapshot::Snapshot>>,
    _dir: tempfile::TempDir,
}

impl OpenPorts {
    async fn open() -> Self {
        let free = || std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let [read_only, health] = [free(), free()].map(|listener| listener.local_addr().unwrap());
        let dir = tempfile::tempdir().unwrap();
        let addresses =
            Addresses { socket: admin::socket_path(dir.path()), health: Some(health), read_only: Some(read_only) };
        let web = views::tests::view("default", "web-n1", &["a"], &[], json!({ "phase": "Running" }));
        let (sender, context) = context(views::tests::snapshot("n1", [("u1", web)]), dir.path());
        let (server, stop) = (Server::bind(&addresses).await.unwrap(), CancellationToken::new());
        let task = tokio::spawn(server.serve(context, stop.clone()));
        while TcpStream::connect(health).await.is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        OpenPorts { read_only, health, stop, task, _sender: sender, _dir: dir }
    }

    async fn status(&self, address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(head_of(request, "").as_bytes()).await.unwrap();
        let answer = read_answer(&mut stream).await;
        answer.split(' ').next().unwrap().to_owned()
    }
}

#[tokio::test]
async fn no_route_of_any_port_answers_anyone_it_should_not() {
    let port = Port::open(false).await;
    let quiet = Port::open_as(Opening { debugging: false, ..Opening::default() }).await;
    let open = OpenPorts::open().await;
    let (root, stranger) = (port.authority.client("root"), Authority::new().client("root"));
    let quiet_root = quiet.authority.client("root");
    let mut matrix = format!(
        "{:53} {}\n",
        "", "nobody, bad token, stranger; no right, all others; just it | quiet, 10255, 10248 | root"
    );
    for (_, request) in ROWS {
        let path = request.split([' ', '?']).nth(1).unwrap();
        let rights = subresources_of(path);
        let (less, none) = (format!("token-of-all-but-{}", rights.join("+")), "token-of-nothing".to_owned());
        let mut columns = Vec::new();
        for caller in [Caller::Nobody, Caller::Token("guessed"), Caller::Certificate(&stranger)] {
            columns.push(port.status(&caller, request).await);
        }
        for token in [none, less].into_iter().chain(rights.iter().map(|right| format!("token-of-{right}"))) {
            columns.push(port.status(&Caller::Token(&token), request).await);
        }
        columns.push("|".to_owned());
        columns.push(quiet.status(&Caller::Certificate(&quiet_root), request).await);
        columns.push(open.status(open.read_only, request).await);
        columns.push(open.status(open.health, request).await);
        let answer = port.ask(&Caller::Certificate(&root), request).await;
        // Numbers differ between runs.
        let shown = if ["/metrics", "/stats"].iter().any(|figures| path.starts_with(figures)) { 3 } else { 64 };
        let answer: String = answer.chars().take(shown).collect();
        matrix.push_str(format!("{request:53} {} | {answer}", columns.join(" ")).trim_end());
        matrix.push('\n');
    }
    open.stop.cancel();
    open.task.await.unwrap();
    quiet.end().await;
    port.end().await;
    insta::assert_snapshot!(matrix, @r#"
                                                          nobody, bad token, stranger; no right, all others; just it | quiet, 10255, 10248 | root
    GET /healthz                                          401 401 401 403 403 200 200 | 200 200 200 | 200 ok
    POST /healthz                                         401 401 401 403 403 200 200 | 200 200 200 | 200 ok
    GET /healthz/syncloop                                 401 401 401 403 403 200 200 | 200 200 404 | 200 ok
    DELETE /healthz/log                                   401 401 401 403 403 200 200 | 200 200 404 | 200 ok
    GET /healthz/ping                                     401 401 401 403 403 200 200 | 200 200 200 | 200 ok
    GET /pods                                             401 401 401 403 403 200 200 | 200 200 404 | 200 {"apiVersion":"v1","items":[{"metadata":{"name":"web-n1","na
    POST /pods                                            401 401 401 403 403 405 405 | 405 405 404 | 405 405: Method Not Allowed
    HEAD /pods                                            401 401 401 403 403 405 405 | 405 405 404 | 405
    GET /pods/                                            401 401 401 403 403 200 200 | 200 200 404 | 200 {"apiVersion":"v1","items":[{"metadata":{"name":"web-n1","na
    HEAD /pods/                                           401 401 401 403 403 405 405 | 405 405 404 | 405
    GET /metrics                                          401 401 401 403 403 200 | 200 200 404 | 200
    POST /metrics                                         401 401 401 403 403 200 | 200 200 404 | 200
    GET /metrics/probes                                   401 401 401 403 403 200 | 200 200 404 | 200
    DELETE /metrics/slis                                  401 401 401 403 403 200 | 200 200 404 | 200
    GET /metrics/resource                                 401 401 401 403 403 200 | 200 200 404 | 200
    POST /metrics/resource                                401 401 401 403 403 200 | 200 200 404 | 200
    GET /metrics/cadvisor                                 401 401 401 403 403 200 | 200 200 404 | 200
    HEAD /metrics/cadvisor                                401 401 401 403 403 200 | 200 200 404 | 200
    GET /stats/summary                                    401 401 401 403 403 200 | 200 200 404 | 200
    POST /stats/summary                                   401 401 401 403 403 200 | 200 200 404 | 200
    HEAD /stats/summary                                   401 401 401 403 403 405 | 405 405 404 | 405
    GET /runningpods/                                     401 401 401 403 403 200 200 | 405 405 404 | 200 {"apiVersion":"v1","items":[],"kind":"PodList","metadata":{}
    HEAD /runningpods/                                    401 401 401 403 403 405 405 | 405 405 404 | 405
    GET /configz                                          401 401 401 403 403 200 200 | 404 404 404 | 200 {"kubeletconfig":{"kind":"KubeletConfiguration"}}
    PUT /configz                                          401 401 401 403 403 200 200 | 404 404 404 | 200 {"kubeletconfig":{"kind":"KubeletConfiguration"}}
    GET /flagz                                            401 401 401 403 403 200 | 404 404 404 | 200 |kubelet flagz|Warning: This endpoint is not meant to be mac
    GET /statusz                                          401 401 401 403 403 200 | 404 404 404 | 200 |kubelet statusz|Warning: This endpoint is not meant to be m
    GET /explain/default/web-n1                           401 401 401 403 403 200 200 | 404 404 404 | 200 {"node":{"name":"n1","runtime":"containerd 2.4.2","runtime_p
    GET /containerLogs/default/web-n1/a                   401 401 401 403 403 400 | 405 405 404 | 400 container "a" in pod "web-n1" is not available
    GET /containerLogs/default/other/a                    401 401 401 403 403 404 | 405 405 404 | 404 pod "other" does not exist
    HEAD /containerLogs/default/web-n1/a                  401 401 401 403 403 405 | 405 405 404 | 405
    POST /exec/default/web-n1/a?output=1&command=ls       401 401 401 403 403 500 | 405 405 404 | 500 container not found ("a")
    GET /exec/default/web-n1/u1/a?output=1&command=ls     401 401 401 403 403 500 | 405 405 404 | 500 container not found ("a")
    HEAD /exec/default/web-n1/a?output=1&command=ls       401 401 401 403 403 405 | 405 405 404 | 405
    GET /attach/default/web-n1/a?output=1                 401 401 401 403 403 500 | 405 405 404 | 500 container not found ("a")
    POST /attach/default/web-n1/u1/a?output=1             401 401 401 403 403 500 | 405 405 404 | 500 container not found ("a")
    POST /run/default/web-n1/a?cmd=ls                     401 401 401 403 403 500 | 405 405 404 | 500 container not found ("a")
    GET /run/default/web-n1/a?cmd=ls                      401 401 401 403 403 405 | 405 405 404 | 405 405: Method Not Allowed
    POST /run/default/web-n1/u1/a?cmd=ls                  401 401 401 403 403 500 | 405 405 404 | 500 container not found ("a")
    GET /portForward/default/web-n1                       401 401 401 403 403 500 | 405 405 404 | 500 rpc error: code = Unavailable desc = No such file or directo
    POST /portForward/default/web-n1/u1                   401 401 401 403 403 500 | 405 405 404 | 500 rpc error: code = Unavailable desc = No such file or directo
    GET /debug/pprof/                                     401 401 401 403 403 405 | 405 405 404 | 405 profiling endpoint is disabled.|
    GET /debug/pprof/heap                                 401 401 401 403 403 405 | 405 405 404 | 405 profiling endpoint is disabled.|
    PUT /debug/flags/v                                    401 401 401 403 403 400 | 404 404 404 | 400 strconv.ParseUint: parsing "": invalid syntax|
    GET /debug/flags/v                                    401 401 401 403 403 406 | 404 404 404 | 406 unsupported http method|
    POST /checkpoint/default/web-n1/a                     401 401 401 403 403 500 | 404 404 404 | 500 checkpointing of default/web-n1/a failed (container a not fo
    POST /checkpoint/default/web-n1/other                 401 401 401 403 403 404 | 404 404 404 | 404 container other does not exist
    POST /checkpoint/default/other/a                      401 401 401 403 403 404 | 404 404 404 | 404 pod does not exist
    GET /checkpoint/default/web-n1/a                      401 401 401 403 403 405 | 404 404 404 | 405 405: Method Not Allowed
    GET /logs/                                            401 401 401 403 403 200 | 405 405 404 | 200 <!doctype html>|<meta name="viewport" content="width=device-
    HEAD /logs/                                           401 401 401 403 403 405 | 405 405 404 | 405
    POST /logs/                                           401 401 401 403 403 405 | 405 405 404 | 405 405: Method Not Allowed
    GET /logs/nothing                                     401 401 401 403 403 404 | 405 405 404 | 404 404 page not found|
    GET /logs/../pods                                     401 401 401 403 403 404 | 405 405 404 | 404 404 page not found|
    GET /logs                                             401 401 401 403 403 404 | 404 404 404 | 404 404 page not found|
    GET /nothing                                          401 401 401 403 403 404 | 404 404 404 | 404 404 page not found|
    GET /                                                 401 401 401 403 403 404 | 404 404 404 | 404 404 page not found|
    "#);
}

#[tokio::test]
async fn forbidden_response_names_missing_permission() {
    let port = Port::open(false).await;
    let refused = async |request: &str| port.ask(&Caller::Token("token-of-nothing"), request).await;
    insta::assert_snapshot!(refused("GET /pods").await, @"403 Forbidden (user=nothing, verb=get, resource=nodes, subresource(s)=[pods proxy])|");
    insta::assert_snapshot!(refused("POST /logs/").await, @"403 Forbidden (user=nothing, verb=create, resource=nodes, subresource(s)=[log])|");
    insta::assert_snapshot!(refused("GET /flagz").await, @"403 Forbidden (user=nothing, verb=get, resource=nodes, subresource(s)=[configz])|");
    insta::assert_snapshot!(refused("PUT /debug/flags/v").await, @"403 Forbidden (user=nothing, verb=update, resource=nodes, subresource(s)=[proxy])|");
    port.end().await;
}
