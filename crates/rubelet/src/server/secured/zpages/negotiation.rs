//! Content negotiation of z-pages.
//!
//! Owns: what an `Accept` header means for these pages, and JSON and YAML as upstream writes them.
//! Upstream: `apiserver/pkg/endpoints/handlers/negotiation`, `FlagzEndpointRestrictions`.

use axum::http::{HeaderMap, header};
use serde::Serialize;
use serde_json::Value;

use crate::server::accept::{Clause, clauses};

/// Deprecated first.
const VERSIONS: [&str; 2] = ["v1alpha1", "v1beta1"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Text,
    Document { encoding: Encoding, version: &'static str },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    Json { pretty: bool },
    Yaml,
}

/// No accepted alternative is available. Holds an encoding for the error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NotAcceptable {
    pub encoding: Option<Encoding>,
}

/// The content negotiation headers and parameters.
#[derive(Clone, Debug)]
pub(super) struct Wish {
    accept: String,
    /// Formatted for reading: `?pretty=1`, or a browser or curl.
    pretty: bool,
}

impl Wish {
    pub(super) fn of(headers: &HeaderMap, query: Option<&str>) -> Self {
        let said = |name| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let asked = form_urlencoded::parse(query.unwrap_or_default().as_bytes())
            .find(|(name, value)| name == "pretty" && !value.is_empty())
            .map(|(_, value)| matches!(value.as_ref(), "1" | "t" | "T" | "true" | "TRUE" | "True"));
        let agent = said(header::USER_AGENT);
        let is_person = || ["curl", "Wget", "Mozilla/5.0"].iter().any(|program| agent.starts_with(program));
        Wish { accept: said(header::ACCEPT).to_owned(), pretty: asked.unwrap_or_else(is_person) }
    }

    pub(super) fn form(&self, group: &str, kind: &str) -> Result<Form, NotAcceptable> {
        if self.accept.trim().is_empty() {
            return Ok(Form::Text);
        }
        let clauses = clauses(&self.accept);
        let document = |clause: &Clause<'_>| version(clause, group, kind).filter(|_| is_plain(clause));
        for clause in &clauses {
            for encoding in self.encodings(clause).filter(|encoding| clause.covers(encoding.media_type())) {
                if let Some(version) = document(clause) {
                    return Ok(Form::Document { encoding, version });
                }
            }
            if clause.covers("text/plain") && is_plain(clause) && !converts(clause) {
                return Ok(Form::Text);
            }
        }
        let understood = clauses.iter().find_map(|clause| {
            let mut known = self.encodings(clause).filter(|encoding| clause.covers(encoding.media_type()));
            known.next().filter(|_| !converts(clause) && clause.param("sv").is_none())
        });
        Err(NotAcceptable { encoding: understood })
    }

    fn encodings(&self, clause: &Clause<'_>) -> impl Iterator<Item = Encoding> + use<> {
        let pretty = self.pretty || clause.param("pretty") == Some("1");
        [Encoding::Json { pretty }, Encoding::Yaml].into_iter()
    }
}

impl Encoding {
    pub(super) fn media_type(self) -> &'static str {
        match self {
            Encoding::Json { .. } => "application/json",
            Encoding::Yaml => "application/yaml",
        }
    }

    pub(super) fn encode(self, document: &impl Serialize) -> String {
        const WHY: &str = "a page has only string keys";
        match self {
            Encoding::Json { pretty: true } => serde_json::to_string_pretty(document).expect(WHY),
            Encoding::Json { pretty: false } => serde_json::to_string(document).expect(WHY) + "\n",
            Encoding::Yaml => {
                let mut out = String::new();
                write_yaml(&mut out, &serde_json::to_value(document).expect(WHY), 0);
                out
            }
        }
    }
}

/// Watches and other API versions are not available here.
fn is_plain(clause: &Clause<'_>) -> bool {
    clause.param("stream").is_none() && clause.param("sv").is_none()
}

fn converts(clause: &Clause<'_>) -> bool {
    ["as", "g", "v"].iter().any(|name| clause.param(name).is_some())
}

fn version(clause: &Clause<'_>, group: &str, kind: &str) -> Option<&'static str> {
    let wanted = clause.param("v").filter(|_| clause.param("g") == Some(group) && clause.param("as") == Some(kind))?;
    VERSIONS.into_iter().find(|version| *version == wanted)
}

/// Sorted keys, as Kubernetes writes YAML. Every string is quoted, so that none is parsed as another type.
fn write_yaml(out: &mut String, value: &Value, depth: usize) {
    let indent = "  ".repeat(depth);
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                out.push_str(&format!("{indent}{name}:"));
                write_member(out, member, depth);
            }
        }
        Value::Array(items) => {
            for item in items {
                out.push_str(&format!("{indent}- {item}\n"));
            }
        }
        leaf => out.push_str(&format!("{indent}{leaf}\n")),
    }
}

fn write_member(out: &mut String, member: &Value, depth: usize) {
    match member {
        Value::Object(members) if members.is_empty() => out.push_str(" {}\n"),
        Value::Array(items) if items.is_empty() => out.push_str(" []\n"),
        Value::Object(_) => {
            out.push('\n');
            write_yaml(out, member, depth + 1);
        }
        Value::Array(_) => {
            out.push('\n');
            write_yaml(out, member, depth);
        }
        leaf => out.push_str(&format!(" {leaf}\n")),
    }
}
