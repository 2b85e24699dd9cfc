//! Static pods from a URL.
//!
//! Owns: polling, and the last valid response: a failing server or an invalid response removes no
//! pod. Never: shows the URL's credentials or query.
//! Upstream: `config/http.go`; there an empty response removes every pod of the source.

use std::{sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::Pod;
use rubelet_core::{
    event::{Event, Source},
    fnv::Fnv128,
    manifest::Origin,
};
use rubelet_host::port::{FetchRequest, FetchResponse};
use rubelet_kube::error_chain;
use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};

use super::{MAX_MANIFEST_BYTES, Reading, read_manifest, refuse, remark};
use crate::world::World;

/// Upstream's limit for one request.
const FETCH_TIMEOUT: Duration = Duration::from_secs(10);

/// The URL and its headers (`staticPodURLHeader`).
#[derive(Clone, Default)]
pub struct Endpoint {
    pub url: String,
    pub headers: Vec<(String, String)>,
}

/// Headers and URL may hold a token.
impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint").field("url", &without_secrets(&self.url)).finish_non_exhaustive()
    }
}

/// Sends the complete set of pods on each change, and once after the first valid response. Ends when the receiver is gone.
pub async fn run(world: World, endpoint: Endpoint, check_every: Duration, events: mpsc::Sender<Event>) {
    let shown_url = without_secrets(&endpoint.url);
    let request = FetchRequest {
        url: endpoint.url.clone(),
        headers: endpoint.headers,
        limit_bytes: MAX_MANIFEST_BYTES,
        timeout: FETCH_TIMEOUT,
    };
    let mut answers = Answers::new(endpoint.url, world.settings.node_name.clone());
    loop {
        // The host enforces the timeout too; this is a safeguard.
        let answer = match timeout(FETCH_TIMEOUT.saturating_mul(2), world.host.fetch(&request)).await {
            Ok(answer) => answer.map_err(|error| error_chain(&error).replace(user_of(&request.url), "")),
            Err(_elapsed) => Err("no answer in time".to_owned()),
        };
        let taken = answers.take(answer);
        for text in &taken.remarks {
            remark(&world, &shown_url, text);
        }
        match &taken.turn {
            Some(Turn::Failing(problem)) => refuse(&world, &shown_url, problem),
            Some(Turn::Recovered) => tracing::info!(url = shown_url, "static pod URL readable again"),
            None => {}
        }
        if let Some(pods) = taken.pods
            && events.send(Event::Config { source: Source::Http, pods }).await.is_err()
        {
            return;
        }
        sleep(check_every).await;
    }
}

/// State of the responses so far.
#[derive(Debug)]
struct Answers {
    origin: Origin,
    node_name: String,
    /// The last body, and its error.
    body: Option<(Fnv128, Option<String>)>,
    /// The pods of the last valid body.
    pods: Vec<Arc<Pod>>,
    problem: Option<String>,
    is_sent: bool,
}

/// The result of a response.
#[derive(Debug, Default)]
struct Taken {
    /// To be sent.
    pods: Option<Vec<Arc<Pod>>>,
    remarks: Vec<String>,
    turn: Option<Turn>,
}

/// Only changes are reported, not every try.
#[derive(Debug, PartialEq, Eq)]
enum Turn {
    Failing(String),
    Recovered,
}

impl Answers {
    fn new(url: String, node_name: String) -> Self {
        Answers { origin: Origin::Url(url), node_name, body: None, pods: Vec::new(), problem: None, is_sent: false }
    }

    fn take(&mut self, answer: Result<FetchResponse, String>) -> Taken {
        let mut taken = Taken::default();
        let problem = match answer {
            Err(problem) => Some(problem),
            Ok(FetchResponse { status: 200, body }) if body.is_empty() => {
                // A server without pods is a ready source; one that had pods and now returns an empty body is broken.
                if !self.is_sent {
                    taken.pods = Some(Vec::new());
                }
                Some("zero-length data received".to_owned())
            }
            Ok(FetchResponse { status: 200, body }) => self.take_body(&body, &mut taken),
            Ok(FetchResponse { status, .. }) => {
                let status = http::StatusCode::from_u16(status).map_or(status.to_string(), |status| status.to_string());
                Some(format!("the server answers {status}"))
            }
        };
        self.is_sent |= taken.pods.is_some();
        taken.turn = match (&self.problem, &problem) {
            (Some(before), Some(now)) if before == now => None,
            (_, Some(now)) => {
                let kept = if self.pods.is_empty() { "" } else { "; the pods of the last good answer stay" };
                Some(Turn::Failing(format!("{now}{kept}")))
            }
            (Some(_), None) => Some(Turn::Recovered),
            (None, None) => None,
        };
        self.problem = problem;
        taken
    }

    fn take_body(&mut self, body: &[u8], taken: &mut Taken) -> Option<String> {
        let seen = Fnv128::of(body);
        if let Some((known, problem)) = &self.body
            && *known == seen
        {
            return problem.clone();
        }
        let Reading { pods, remarks } = read_manifest(body, &self.origin, &self.node_name);
        taken.remarks = remarks;
        let problem = match pods {
            Ok(pods) => {
                if !self.is_sent || pods != self.pods {
                    taken.pods = Some(pods.clone());
                }
                self.pods = pods;
                None
            }
            Err(problem) => Some(problem),
        };
        self.body = Some((seen, problem.clone()));
        problem
    }
}

/// The URL without user, password and query.
fn without_secrets(url: &str) -> String {
    let shown = url.split(['?', '#']).next().unwrap_or_default();
    match user_of(url) {
        "" => shown.to_owned(),
        user => shown.replacen(user, "", 1),
    }
}

/// `user:password@`, or nothing.
fn user_of(url: &str) -> &str {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    authority.rfind('@').map_or("", |at| &authority[..=at])
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
    };

    use super::*;
    use crate::world::testing::world_in;

    fn pod(name: &str) -> String {
        format!(
            "{{\"apiVersion\": \"v1\", \"kind\": \"Pod\", \"metadata\": {{\"name\": \"{name}\"}}, \
             \"spec\": {{\"containers\": [{{\"name\": \"a\", \"image\": \"i\"}}]}}}}"
        )
    }

    fn ok(body: &str) -> Result<FetchResponse, String> {
        Ok(FetchResponse { status: 200, body: body.as_bytes().to_vec() })
    }

    /// One line per response: what is sent and what is reported.
    fn played(answers: Vec<Result<FetchResponse, String>>) -> String {
        let mut source = Answers::new("http://m/".to_owned(), "n1".to_owned());
        let mut lines = Vec::new();
        for answer in answers {
            let taken = source.take(answer);
            let sent = taken.pods.map_or("nothing".to_owned(), |pods| {
                let names = pods.iter().map(|pod| pod.metadata.name.clone().unwrap_or_default());
                format!("[{}]", names.collect::<Vec<_>>().join(" "))
            });
            let heard = match taken.turn {
                Some(Turn::Failing(problem)) => format!(", failing: {problem}"),
                Some(Turn::Recovered) => ", recovered".to_owned(),
                None => String::new(),
            };
            lines.push(format!("sent {sent}{heard}"));
        }
        lines.join("\n")
    }

    #[test]
    fn a_server_that_fails_takes_no_pod_away() {
        let found = played(vec![
            Err("connection refused".to_owned()),
            Err("connection refused".to_owned()),
            ok(&pod("a")),
            ok(&pod("a")),
            Ok(FetchResponse { status: 503, body: b"busy".to_vec() }),
            ok("<html>"),
            ok("<html>"),
            ok(""),
            ok(&pod("a")),
            ok(&pod("b")),
            ok("{\"apiVersion\": \"v1\", \"kind\": \"PodList\", \"items\": []}"),
        ]);
        assert_snapshot!(found, @"
        sent nothing, failing: connection refused
        sent nothing
        sent [a-n1], recovered
        sent nothing
        sent nothing, failing: the server answers 503 Service Unavailable; the pods of the last good answer stay
        sent nothing, failing: invalid pod: [expected a v1 Pod, found a string]; the pods of the last good answer stay
        sent nothing
        sent nothing, failing: zero-length data received; the pods of the last good answer stay
        sent nothing, recovered
        sent [b-n1]
        sent []
        ");
    }

    #[test]
    fn a_server_without_pods_has_spoken_once() {
        assert_snapshot!(played(vec![ok(""), ok(""), ok(&pod("a"))]), @"
        sent [], failing: zero-length data received
        sent nothing
        sent [a-n1], recovered
        ");
    }

    #[test]
    fn list_with_an_invalid_pod_is_refused_whole() {
        let list = |items: &[String]| {
            ok(&format!("{{\"apiVersion\": \"v1\", \"kind\": \"PodList\", \"items\": [{}]}}", items.join(", ")))
        };
        let found = played(vec![list(&[pod("a"), pod("b")]), list(&[pod("c"), pod("D")])]);
        assert_snapshot!(found, @r#"
        sent [a-n1 b-n1]
        sent nothing, failing: invalid pod: [items[1].metadata.name: Invalid value: "D-n1": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')]; the pods of the last good answer stay
        "#);
    }

    /// Gives one response per body, then closes connections; returns the requests.
    async fn serve(listener: TcpListener, bodies: Vec<String>) -> Vec<String> {
        let mut requests = Vec::new();
        for body in bodies {
            let (mut connection, _) = listener.accept().await.unwrap();
            let mut request = String::new();
            while !request.contains("\r\n\r\n") {
                let mut buffer = [0; 4096];
                let read = connection.read(&mut buffer).await.unwrap();
                request.push_str(&String::from_utf8_lossy(&buffer[..read]));
            }
            requests.push(request);
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
            connection.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
        }
        requests
    }

    #[tokio::test]
    async fn pods_come_from_a_real_server_and_stay_when_it_is_gone() {
        let dir = tempfile::TempDir::new().unwrap();
        let world = world_in(dir.path());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/pods?token=secret", listener.local_addr().unwrap());
        let server = tokio::spawn(serve(listener, vec![pod("a"), pod("a"), pod("b")]));
        let endpoint = Endpoint { url, headers: vec![("X-Manifest".to_owned(), "yes".to_owned())] };
        let (sender, mut events) = mpsc::channel(8);
        let every = Duration::from_millis(20);
        let source = tokio::spawn(run(world.clone(), endpoint, every, sender));

        for name in ["a-n1", "b-n1"] {
            match timeout(Duration::from_secs(10), events.recv()).await.unwrap() {
                Some(Event::Config { source: Source::Http, pods }) => {
                    assert_eq!(pods[0].metadata.name.as_deref(), Some(name));
                }
                other => panic!("{other:?}"),
            }
        }
        let requests = server.await.unwrap();
        assert!(requests.iter().all(|request| request.to_lowercase().contains("x-manifest: yes")), "{requests:?}");
        let mut newest = world.events.subscribe();
        timeout(Duration::from_secs(10), newest.wait_for(|sequence| *sequence > 0)).await.unwrap().unwrap();
        let record = world.events.since(0).remove(0).record;
        assert!(record.message.ends_with("; the pods of the last good answer stay"), "{record:?}");
        assert!(!format!("{record:?}").contains("secret"), "{record:?}");
        assert!(events.try_recv().is_err());
        source.abort();
        assert!(source.await.unwrap_err().is_cancelled());
    }

    #[test]
    fn people_see_no_secrets_of_a_url() {
        for (url, shown) in [
            ("http://m/pods", "http://m/pods"),
            ("https://user:secret@m:8443/pods?token=x#y", "https://m:8443/pods"),
            ("https://m?token=x@y", "https://m"),
            ("m/pods@1", "m/pods@1"),
        ] {
            assert_eq!(without_secrets(url), shown);
            let endpoint = Endpoint { url: url.to_owned(), headers: vec![("Authorization".into(), "secret".into())] };
            assert!(!format!("{endpoint:?}").contains("secret"));
        }
    }
}
