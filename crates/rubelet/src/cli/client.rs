//! The client of the agent's socket.
//!
//! Owns: connecting, requests, and plain errors when there is no response. Every wait has a deadline except that for the
//! next line of a followed stream.

use std::{
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use axum::body::Body;
use clap::{Arg, ArgMatches, Command, error::Error as UsageError};
use http_body_util::BodyExt;
use hyper::{Request, Response, StatusCode, body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use rubelet_kube::error_chain;
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use crate::server::{
    admin::{socket, socket_path},
    views::find::NotFound,
};

const DEFAULT_ROOT_DIR: &str = "/var/lib/kubelet";

/// The agent answers from memory; this allows for a machine under heavy load.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

/// Our views are a few kilobytes per pod; a longer response is not from our agent.
const LINE_LIMIT_BYTES: usize = 64 << 20;

#[derive(Debug, thiserror::Error)]
pub(super) enum CliError {
    #[error("connection refused: {0:?}; check that rubelet runs and pass its --root-dir")]
    NotRunning(PathBuf),
    #[error("permission denied: {0:?}; run as root")]
    Denied(PathBuf),
    #[error("no response on {0:?}: rubelet is stopped or serves too many commands")]
    NoAnswer(PathBuf),
    #[error(transparent)]
    NotFound(#[from] NotFound),
    /// The agent returned an error with this message.
    #[error("{0}")]
    Refused(String),
    #[error("failed to read from rubelet's socket")]
    Connection(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("failed to write the output")]
    Output(#[from] io::Error),
    #[error(transparent)]
    Usage(#[from] UsageError),
}

/// Runs a command to its exit code: 0 success, 1 failure, 2 usage error.
pub(super) fn run(command: impl Future<Output = Result<(), CliError>>) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let result = runtime.map_err(CliError::Output).and_then(|runtime| runtime.block_on(command));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // A closed output pipe is no failure: `rubelet pods | head`.
        Err(CliError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(CliError::Usage(usage)) => {
            let _ = usage.print();
            ExitCode::from(u8::try_from(usage.exit_code()).unwrap_or(2))
        }
        Err(error) => {
            eprintln!("error: {}", error_chain(&error));
            ExitCode::FAILURE
        }
    }
}

/// The two options that choose the agent, for every command that connects to one.
pub(super) fn with_socket_args(command: Command) -> Command {
    command
        .no_binary_name(true)
        .arg(
            Arg::new("root-dir")
                .long("root-dir")
                .value_name("DIR")
                .default_value(DEFAULT_ROOT_DIR)
                .help("The agent's --root-dir, which holds its socket"),
        )
        .arg(
            Arg::new("socket")
                .long("socket")
                .value_name("PATH")
                .conflicts_with("root-dir")
                .help("Path of the agent's socket"),
        )
}

pub(super) fn namespace_arg() -> Arg {
    Arg::new("namespace").short('n').long("namespace").value_name("NAMESPACE")
}

pub(super) fn output_arg() -> Arg {
    Arg::new("output").short('o').long("output").value_name("FORMAT").value_parser(["json"])
}

/// The whole view, for programs.
pub(super) fn print_json(view: &impl serde::Serialize) -> Result<(), CliError> {
    let json = serde_json::to_string_pretty(view).expect("our views have string keys only");
    Ok(writeln!(std::io::stdout(), "{json}")?)
}

#[derive(Clone, Debug)]
pub(super) struct Client {
    socket: PathBuf,
}

impl Client {
    pub(super) fn new(matches: &ArgMatches) -> Client {
        let text = |name| matches.get_one::<String>(name).map(String::as_str);
        let in_root_dir = || socket_path(Path::new(text("root-dir").unwrap_or(DEFAULT_ROOT_DIR)));
        Client { socket: text("socket").map_or_else(in_root_dir, PathBuf::from) }
    }

    /// One JSON response.
    pub(super) async fn json<T: DeserializeOwned>(&self, path: &str) -> Result<T, CliError> {
        let mut lines = self.stream(path).await?;
        let body = timeout(ANSWER_TIMEOUT, lines.rest()).await.map_err(|_| self.no_answer())??;
        parse(&body)
    }

    /// A streamed response.
    pub(super) async fn stream(&self, path: &str) -> Result<Stream, CliError> {
        let response = timeout(ANSWER_TIMEOUT, self.ask(path)).await.map_err(|_| self.no_answer())??;
        let status = response.status();
        let mut stream = Stream { body: response.into_body(), read: Vec::new() };
        if status.is_success() {
            return Ok(stream);
        }
        let body = timeout(ANSWER_TIMEOUT, stream.rest()).await.map_err(|_| self.no_answer())??;
        if matches!(status, StatusCode::NOT_FOUND | StatusCode::CONFLICT)
            && let Ok(not_found) = serde_json::from_slice::<NotFound>(&body)
        {
            return Err(not_found.into());
        }
        Err(CliError::Refused(String::from_utf8_lossy(&body).trim().to_owned()))
    }

    async fn ask(&self, path: &str) -> Result<Response<Incoming>, CliError> {
        let stream = socket::connect(&self.socket).await.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => CliError::NotRunning(self.socket.clone()),
            io::ErrorKind::PermissionDenied => CliError::Denied(self.socket.clone()),
            _ => connection(error),
        })?;
        let (mut sender, connected) = http1::handshake(TokioIo::new(stream)).await.map_err(connection)?;
        // Ends with the process, which runs this one command; its errors surface where the response is read.
        drop(tokio::spawn(connected));
        let request = Request::get(path).header("host", "rubelet").body(Body::empty()).map_err(connection)?;
        sender.send_request(request).await.map_err(connection)
    }

    fn no_answer(&self) -> CliError {
        CliError::NoAnswer(self.socket.clone())
    }
}

/// A response being read.
#[derive(Debug)]
pub(super) struct Stream {
    body: Incoming,
    read: Vec<u8>,
}

impl Stream {
    /// The next line as JSON; `None` at the end.
    pub(super) async fn next_line<T: DeserializeOwned>(&mut self) -> Result<Option<T>, CliError> {
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.read.drain(..=end).collect();
                return parse(&line).map(Some);
            }
            match self.next_bytes().await? {
                Some(bytes) => self.read.extend_from_slice(&bytes),
                None => return Ok(None),
            }
            if self.read.len() > LINE_LIMIT_BYTES {
                return Err(connection("the response is too long"));
            }
        }
    }

    /// The next chunk; `None` at the end.
    pub(super) async fn next_bytes(&mut self) -> Result<Option<axum::body::Bytes>, CliError> {
        while let Some(frame) = self.body.frame().await {
            if let Ok(data) = frame.map_err(connection)?.into_data() {
                return Ok(Some(data));
            }
        }
        Ok(None)
    }

    async fn rest(&mut self) -> Result<Vec<u8>, CliError> {
        let mut all = std::mem::take(&mut self.read);
        while let Some(bytes) = self.next_bytes().await? {
            all.extend_from_slice(&bytes);
            if all.len() > LINE_LIMIT_BYTES {
                return Err(connection("the response is too long"));
            }
        }
        Ok(all)
    }
}

fn parse<T: DeserializeOwned>(json: &[u8]) -> Result<T, CliError> {
    serde_json::from_slice(json).map_err(connection)
}

fn connection(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> CliError {
    CliError::Connection(error.into())
}

/// A path of the agent's socket with user input escaped.
pub(super) fn path(segments: &[&str], query: &[(&str, &str)]) -> String {
    let mut path = String::new();
    for segment in segments {
        path.push('/');
        path.push_str(&encoded(segment));
    }
    for (position, (name, value)) in query.iter().enumerate() {
        path.push(if position == 0 { '?' } else { '&' });
        path.push_str(&format!("{name}={}", encoded(value)));
    }
    path
}

fn encoded(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'~' => char::from(byte).to_string(),
            b'.' if text.len() > 2 => ".".to_owned(),
            other => format!("%{other:02X}"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::{path::Path, sync::Arc, time::Duration};

    use rubelet_core::{
        effect::{EventRecord, InvolvedObject, Severity},
        snapshot::Snapshot,
    };
    use serde_json::{Value, json};
    use tokio::{sync::watch, task::JoinHandle, time::timeout};
    use tokio_util::sync::CancellationToken;

    use super::{CliError, Client, path};
    use crate::{
        cli::explain,
        event_log::{EventLog, LoggedEvent},
        server::{
            Addresses, Server,
            admin::socket_path,
            tests::context,
            views::{
                NodeReport, PodTable,
                tests::{at, snapshot, view},
            },
        },
    };

    struct Agent {
        client: Client,
        snapshots: watch::Sender<Arc<Snapshot>>,
        events: EventLog,
        stop: CancellationToken,
        task: JoinHandle<()>,
    }

    impl Agent {
        async fn start(root: &Path) -> Agent {
            let addresses = Addresses { socket: socket_path(root), health: None, read_only: None };
            let (snapshots, context) = context(picture("Pending"), root);
            let (events, stop) = (context.events.clone(), CancellationToken::new());
            let task = tokio::spawn(Server::bind(&addresses).await.unwrap().serve(context, stop.clone()));
            Agent { client: Client { socket: addresses.socket }, snapshots, events, stop, task }
        }

        async fn end(self) {
            self.stop.cancel();
            timeout(Duration::from_secs(5), self.task).await.expect("the server ends at stop").unwrap();
        }
    }

    fn picture(phase: &str) -> Snapshot {
        snapshot("n1", [("u1", view("default", "web-n1", &["a"], &[], json!({ "phase": phase })))])
    }

    #[tokio::test]
    async fn commands_get_their_answers_over_the_socket() {
        let root = tempfile::tempdir().unwrap();
        let agent = Agent::start(root.path()).await;
        let table: PodTable = agent.client.json("/pods").await.unwrap();
        assert_eq!((table.rows[0].name.as_str(), table.rows[0].status.as_str()), ("web-n1", "Pending"));
        let list: Value = agent.client.json("/podlist").await.unwrap();
        assert_eq!(list["kind"], "PodList");
        let report: NodeReport = agent.client.json("/node").await.unwrap();
        assert_eq!(report.node.name, "n1");
        assert_eq!(explain::ask(&agent.client, "web", Some("default")).await.unwrap().uid.as_str(), "u1");
        let error = explain::ask(&agent.client, "wbe/../x", None).await.unwrap_err();
        assert!(matches!(error, CliError::NotFound(_)), "{error:?}");
        let error = explain::ask(&agent.client, "wbe", None).await.unwrap_err();
        assert_eq!(error.to_string(), r#"pods "wbe" not found; did you mean default/web-n1?"#);
        agent.end().await;
    }

    #[tokio::test]
    async fn watchers_see_changes_and_only_changes() {
        let root = tempfile::tempdir().unwrap();
        let agent = Agent::start(root.path()).await;
        let mut tables = agent.client.stream("/pods?watch=1").await.unwrap();
        let mut status =
            async || tables.next_line::<PodTable>().await.unwrap().map(|table| table.rows[0].status.clone());
        assert_eq!(status().await.as_deref(), Some("Pending"));
        agent.snapshots.send_replace(Arc::new(picture("Pending")));
        tokio::time::sleep(Duration::from_millis(150)).await;
        agent.snapshots.send_replace(Arc::new(picture("Running")));
        assert_eq!(status().await.as_deref(), Some("Running"));
        agent.end().await;
    }

    #[tokio::test]
    async fn followers_of_events_get_the_old_ones_and_the_new() {
        let root = tempfile::tempdir().unwrap();
        let agent = Agent::start(root.path()).await;
        let record = |reason: &str| EventRecord::new(InvolvedObject::Node, Severity::Normal, reason, String::new());
        agent.events.record(record("Old"), at("2026-11-15T18:00:00Z"));
        let mut lines = agent.client.stream("/events?follow=1").await.unwrap();
        let mut reason = async || lines.next_line::<LoggedEvent>().await.unwrap().unwrap().record.reason;
        assert_eq!(reason().await, "Old");
        agent.events.record(record("New"), at("2026-11-15T18:00:01Z"));
        assert_eq!(reason().await, "New");
        let mut known = agent.client.stream("/events?since=1").await.unwrap();
        assert_eq!(known.next_line::<LoggedEvent>().await.unwrap().unwrap().record.reason, "New");
        assert!(known.next_line::<LoggedEvent>().await.unwrap().is_none());
        agent.end().await;
    }

    #[tokio::test]
    async fn a_log_is_followed_until_its_container_stops() {
        let root = tempfile::tempdir().unwrap();
        let agent = Agent::start(root.path()).await;
        let state = |state: Value| {
            let status = json!({ "phase": "Running", "containerStatuses": [
                { "name": "a", "image": "i", "imageID": "", "ready": true, "restartCount": 0, "state": state }] });
            Arc::new(snapshot("n1", [("u1", view("default", "web-n1", &["a"], &[], status))]))
        };
        let error = agent.client.stream("/logs/web/a").await.unwrap_err();
        assert_eq!(error.to_string(), r#"container "a" in pod "web-n1" is not available"#);

        agent.snapshots.send_replace(state(json!({ "running": {} })));
        let dir = root.path().join("logs/default_web-n1_u1/a");
        std::fs::create_dir_all(&dir).unwrap();
        let line = |text: &str| format!("2026-11-15T18:00:00.000000000Z stdout F {text}\n");
        let file = dir.join("0.log");
        std::fs::write(&file, line("one") + &line("two")).unwrap();
        let mut log = agent.client.stream("/logs/web/a?tail=1").await.unwrap();
        assert_eq!(log.rest().await.unwrap(), b"two\n");

        let mut log = agent.client.stream("/logs/u1/a?follow=1&tail=1").await.unwrap();
        assert_eq!(log.next_bytes().await.unwrap().as_deref(), Some(&b"two\n"[..]));
        let mut written = std::fs::OpenOptions::new().append(true).open(&file).unwrap();
        std::io::Write::write_all(&mut written, line("three").as_bytes()).unwrap();
        assert_eq!(log.next_bytes().await.unwrap().as_deref(), Some(&b"three\n"[..]));
        agent.snapshots.send_replace(state(json!({ "terminated": { "exitCode": 0 } })));
        assert!(timeout(Duration::from_secs(5), log.rest()).await.expect("following ends").unwrap().is_empty());

        let error = agent.client.stream("/logs/web/a?previous=1").await.unwrap_err();
        assert_eq!(error.to_string(), r#"previous terminated container "a" in pod "web-n1" not found"#);
        agent.end().await;
    }

    #[tokio::test]
    async fn an_agent_that_is_not_there_is_named() {
        let root = tempfile::tempdir().unwrap();
        for socket in [socket_path(root.path()), socket_path(&root.path().join("gone"))] {
            let error = Client { socket }.json::<Value>("/pods").await.unwrap_err();
            assert!(error.to_string().contains("check that rubelet runs"), "{error}");
        }
        let socket = socket_path(root.path());
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        let error = Client { socket }.json::<Value>("/pods").await.unwrap_err();
        assert!(matches!(error, CliError::NotRunning(_)), "{error:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_that_hangs_is_not_waited_for_for_ever() {
        let root = tempfile::tempdir().unwrap();
        let socket = socket_path(root.path());
        let _silent = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let error = Client { socket }.json::<Value>("/pods").await.unwrap_err();
        assert!(matches!(error, CliError::NoAnswer(_)), "{error:?}");
    }

    #[test]
    fn typed_names_are_escaped_in_the_path() {
        assert_eq!(
            path(&["explain", "a/../b?c"], &[("namespace", "x&y=1")]),
            "/explain/a%2F..%2Fb%3Fc?namespace=x%26y%3D1"
        );
        assert_eq!(path(&["explain", ".."], &[]), "/explain/%2E%2E");
    }
}
