//! `/flagz` and `/statusz`: flags, start time and version of the agent.
//!
//! Owns: both pages as text and as documents of `config.k8s.io`. Never: which values are secret (`cli/flagz.rs`).
//! Upstream: `apiserver/pkg/server/flagz`, `apiserver/pkg/server/statusz`. The text's delimiter is random, so that programs do not parse it.

use axum::{
    extract::{RawQuery, State},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use jiff::{SignedDuration, Timestamp};
use rubelet_core::time::{Now, moved};
use serde::Serialize;
use serde_json::json;

mod negotiation;

use negotiation::{Encoding, Form, NotAcceptable, Wish};

use super::Secured;
use crate::cli::KUBERNETES_VERSION;

const COMPONENT: &str = "kubelet";
const GROUP: &str = "config.k8s.io";
const WARNING: &str = "Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility guarantees and \
                       is for debugging purposes only.";
const DELIMITERS: [&str; 4] = [":", ": ", "=", " "];
const UNACCEPTABLE: &str =
    "only the following media types are accepted: application/json, application/yaml, text/plain";

pub(super) async fn flagz(State(secured): State<Secured>, headers: HeaderMap, RawQuery(query): RawQuery) -> Response {
    let flags = secured.pages.flags.iter().flatten();
    let text = |now: Now| {
        // Constant for the life of the process.
        let delimiter = delimiter(started(now).as_second());
        let lines = flags.clone().map(|(name, value)| format!("{name}{delimiter}{value}\n"));
        format!("\n{COMPONENT} flagz\n{WARNING}\n{}", lines.collect::<String>())
    };
    let document = json!({ "flags": flags.clone().collect::<std::collections::BTreeMap<_, _>>() });
    let page = Page { kind: "Flagz", endpoint: "flagz", document };
    page.answer(&Wish::of(&headers, query.as_deref()), || text(secured.context.clock.now()))
}

pub(super) async fn statusz(State(secured): State<Secured>, headers: HeaderMap, RawQuery(query): RawQuery) -> Response {
    let now = secured.context.clock.now();
    let status = Status::new(now, secured.pages.listed());
    let page = Page { kind: "Statusz", endpoint: "statusz", document: &status };
    page.answer(&Wish::of(&headers, query.as_deref()), || status.text(delimiter(now.wall.as_millisecond())))
}

fn delimiter(number: i64) -> &'static str {
    DELIMITERS[usize::try_from(number.rem_euclid(4)).expect("below four")]
}

/// To the second, as upstream.
fn started(now: Now) -> Timestamp {
    let uptime = SignedDuration::try_from(now.uptime.as_duration()).unwrap_or_default();
    let exact = moved(now.wall, SignedDuration::ZERO.saturating_sub(uptime));
    Timestamp::from_second(exact.as_second()).unwrap_or(exact)
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    start_time: String,
    uptime_seconds: u64,
    go_version: &'static str,
    binary_version: &'static str,
    emulation_version: &'static str,
    paths: Vec<&'static str>,
    #[serde(skip)]
    started: Timestamp,
}

impl Status {
    fn new(now: Now, paths: Vec<&'static str>) -> Self {
        let started = started(now);
        Status {
            start_time: started.to_string(),
            uptime_seconds: now.uptime.as_duration().as_secs(),
            // Upstream's field; there is no Go version.
            go_version: "rustc",
            binary_version: KUBERNETES_VERSION.trim_start_matches('v'),
            emulation_version: "1.36",
            paths,
            started,
        }
    }

    fn text(&self, delimiter: &str) -> String {
        let (up, started) = (self.uptime_seconds, self.started.strftime("%a %b %e %H:%M:%S UTC %Y"));
        let up = format!("{} hr {:02} min {:02} sec", up / 3600, up / 60 % 60, up % 60);
        let Status { go_version, binary_version, emulation_version, .. } = self;
        format!(
            "\n{COMPONENT} statusz\n{WARNING}\n\nStarted{delimiter} {started}\nUp{delimiter} {up}\n\
             Go version{delimiter} {go_version}\nBinary version{delimiter} {binary_version}\n\
             Emulation version{delimiter} {emulation_version}\nPaths{delimiter} {}\n",
            self.paths.join(" ")
        )
    }
}

/// One page: the common part of both.
struct Page<D> {
    kind: &'static str,
    endpoint: &'static str,
    document: D,
}

/// In the order Go writes it.
#[derive(Serialize)]
struct Document<'a, D> {
    kind: &'a str,
    #[serde(rename = "apiVersion")]
    api_version: String,
    metadata: Metadata,
    #[serde(flatten)]
    body: &'a D,
}

#[derive(Serialize)]
struct Metadata {
    name: &'static str,
}

impl<D: Serialize> Page<D> {
    fn answer(&self, wish: &Wish, text: impl FnOnce() -> String) -> Response {
        match wish.form(GROUP, self.kind) {
            Ok(Form::Text) => ([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], text()).into_response(),
            Ok(Form::Document { encoding, version }) => {
                let document = Document {
                    kind: self.kind,
                    api_version: format!("{GROUP}/{version}"),
                    metadata: Metadata { name: COMPONENT },
                    body: &self.document,
                };
                let media_type = format!("{};g={GROUP};v={version};as={}", encoding.media_type(), self.kind);
                let mut answer = ([(header::CONTENT_TYPE, media_type)], encoding.encode(&document)).into_response();
                if version == "v1alpha1" {
                    let warning = format!(
                        "299 - \"This version of the {} endpoint is deprecated. Please use a newer version.\"",
                        self.endpoint
                    );
                    answer.headers_mut().insert(header::WARNING, warning.parse().expect("it is plain ASCII"));
                }
                answer
            }
            Err(refusal) => refused(&refusal),
        }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Failure {
    kind: &'static str,
    api_version: &'static str,
    metadata: serde_json::Map<String, serde_json::Value>,
    status: &'static str,
    message: &'static str,
    reason: &'static str,
    code: u16,
}

fn refused(refusal: &NotAcceptable) -> Response {
    let failure = Failure {
        kind: "Status",
        api_version: "v1",
        metadata: serde_json::Map::new(),
        status: "Failure",
        message: UNACCEPTABLE,
        reason: "NotAcceptable",
        code: 406,
    };
    // A client that accepts none of our encodings gets the error all the same.
    let encoding = refusal.encoding.unwrap_or(Encoding::Json { pretty: true });
    let headers = [(header::CONTENT_TYPE, encoding.media_type())];
    (StatusCode::NOT_ACCEPTABLE, headers, encoding.encode(&failure)).into_response()
}

#[cfg(test)]
mod tests;
