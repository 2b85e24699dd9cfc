//! Which form of a document a caller wants.
//!
//! Owns: the `Accept` header as upstream reads it, and JSON and YAML as it writes them.
//! Upstream: `goautoneg`, `apiserver/pkg/endpoints/handlers/negotiation`, `FlagzEndpointRestrictions`.

use axum::http::{HeaderMap, header};
use serde::Serialize;
use serde_json::Value;

/// Deprecated first.
const VERSIONS: [&str; 2] = ["v1alpha1", "v1beta1"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Text,
    Document { encoding: Encoding, version: &'static str },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    Json { pretty: bool },
    Yaml,
}

/// Nothing that is asked for is to be had. With what the caller would understand all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub encoding: Option<Encoding>,
}

/// What a caller says about the form.
#[derive(Clone, Debug)]
pub struct Wish {
    accept: String,
    /// The caller is a person: `?pretty=1`, or a browser or curl.
    pretty: bool,
}

impl Wish {
    pub fn of(headers: &HeaderMap, query: Option<&str>) -> Self {
        let said = |name| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let asked = form_urlencoded::parse(query.unwrap_or_default().as_bytes())
            .find(|(name, value)| name == "pretty" && !value.is_empty())
            .map(|(_, value)| matches!(value.as_ref(), "1" | "t" | "T" | "true" | "TRUE" | "True"));
        let agent = said(header::USER_AGENT);
        let is_person = || ["curl", "Wget", "Mozilla/5.0"].iter().any(|program| agent.starts_with(program));
        Wish { accept: said(header::ACCEPT).to_owned(), pretty: asked.unwrap_or_else(is_person) }
    }

    pub fn form(&self, group: &str, kind: &str) -> Result<Form, Refusal> {
        if self.accept.trim().is_empty() {
            return Ok(Form::Text);
        }
        let clauses = clauses(&self.accept);
        let document = |clause: &Clause<'_>| clause.version(group, kind).filter(|_| clause.is_plain());
        for clause in &clauses {
            for encoding in self.encodings(clause).filter(|encoding| clause.covers(encoding.media_type())) {
                if let Some(version) = document(clause) {
                    return Ok(Form::Document { encoding, version });
                }
            }
            if clause.covers("text/plain") && clause.is_plain() && !clause.converts() {
                return Ok(Form::Text);
            }
        }
        let understood = clauses.iter().find_map(|clause| {
            let mut known = self.encodings(clause).filter(|encoding| clause.covers(encoding.media_type()));
            known.next().filter(|_| !clause.converts() && clause.param("sv").is_none())
        });
        Err(Refusal { encoding: understood })
    }

    fn encodings(&self, clause: &Clause<'_>) -> impl Iterator<Item = Encoding> + use<> {
        let pretty = self.pretty || clause.param("pretty") == Some("1");
        [Encoding::Json { pretty }, Encoding::Yaml].into_iter()
    }
}

impl Encoding {
    pub fn media_type(self) -> &'static str {
        match self {
            Encoding::Json { .. } => "application/json",
            Encoding::Yaml => "application/yaml",
        }
    }

    pub fn encode(self, document: &impl Serialize) -> String {
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

/// One alternative of an `Accept` header.
#[derive(Debug)]
struct Clause<'a> {
    main: &'a str,
    sub: &'a str,
    params: Vec<(&'a str, &'a str)>,
    quality: f32,
}

fn clauses(accept: &str) -> Vec<Clause<'_>> {
    let mut clauses: Vec<Clause<'_>> = accept.split(',').filter_map(Clause::parse).collect();
    let order = |clause: &Clause<'_>| (clause.main == "*", clause.sub == "*");
    clauses.sort_by(|a, b| b.quality.total_cmp(&a.quality).then(order(a).cmp(&order(b))));
    clauses
}

impl<'a> Clause<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let mut parts = text.split(';');
        let media_type = parts.next()?.trim();
        let (main, sub) = if media_type == "*" { ("*", "*") } else { media_type.split_once('/')? };
        if sub.is_empty() || sub.contains('/') {
            return None;
        }
        let mut params: Vec<(&str, &str)> =
            parts.filter_map(|part| part.split_once('=')).map(|(name, value)| (name.trim(), value.trim())).collect();
        let quality = params.iter().find(|(name, _)| *name == "q").map(|(_, value)| value.parse().unwrap_or(0.0));
        params.retain(|(name, value)| *name != "q" && !value.is_empty());
        Some(Clause { main: main.trim(), sub: sub.trim(), params, quality: quality.unwrap_or(1.0) })
    }

    fn param(&self, name: &str) -> Option<&'a str> {
        self.params.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
    }

    fn covers(&self, media_type: &str) -> bool {
        let (main, sub) = media_type.split_once('/').expect("a media type of ours");
        (self.main == main && (self.sub == sub || self.sub == "*")) || (self.main == "*" && self.sub == "*")
    }

    /// Neither a watch nor a version of the server's own is to be had here.
    fn is_plain(&self) -> bool {
        self.param("stream").is_none() && self.param("sv").is_none()
    }

    fn converts(&self) -> bool {
        ["as", "g", "v"].iter().any(|name| self.param(name).is_some())
    }

    fn version(&self, group: &str, kind: &str) -> Option<&'static str> {
        let wanted = self.param("v").filter(|_| self.param("g") == Some(group) && self.param("as") == Some(kind))?;
        VERSIONS.into_iter().find(|version| *version == wanted)
    }
}

/// Keys in order, as Kubernetes writes YAML. Every text is quoted, which spares all questions of what it could be taken for.
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
