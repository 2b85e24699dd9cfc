//! Prometheus' text format.
//!
//! Owns: its syntax. A family that has no sample is not named at all, as Go's client does it.

use std::fmt::{Display, Write as _};

use axum::{
    http::header,
    response::{IntoResponse, Response},
};
use jiff::Timestamp;

#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Counter,
    Gauge,
}

#[derive(Debug, Default)]
pub struct Exposition {
    text: String,
}

/// All samples of one name.
#[derive(Debug)]
pub struct Family<'a> {
    text: &'a mut String,
    name: &'static str,
    help: &'static str,
    kind: Kind,
    has_samples: bool,
}

/// Names and values of labels, as they stand between the braces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labels(String);

impl Exposition {
    pub fn family(&mut self, name: &'static str, kind: Kind, help: &'static str) -> Family<'_> {
        Family { text: &mut self.text, name, help, kind, has_samples: false }
    }

    pub fn gauge(&mut self, name: &'static str, help: &'static str) -> Family<'_> {
        self.family(name, Kind::Gauge, help)
    }

    pub fn counter(&mut self, name: &'static str, help: &'static str) -> Family<'_> {
        self.family(name, Kind::Counter, help)
    }

    pub fn into_text(self) -> String {
        self.text
    }
}

impl IntoResponse for Exposition {
    fn into_response(self) -> Response {
        ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], self.text).into_response()
    }
}

impl Family<'_> {
    /// `at` is when it was measured; without, it counts for the moment of the scrape.
    pub fn add(&mut self, labels: &Labels, value: impl Display, at: Option<Timestamp>) {
        if !self.has_samples {
            let kind = match self.kind {
                Kind::Counter => "counter",
                Kind::Gauge => "gauge",
            };
            let (name, help) = (self.name, self.help);
            write(self.text, format_args!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
            self.has_samples = true;
        }
        self.text.push_str(self.name);
        if !labels.0.is_empty() {
            write(self.text, format_args!("{{{}}}", labels.0));
        }
        match at {
            Some(at) => write(self.text, format_args!(" {value} {}\n", at.as_millisecond())),
            None => write(self.text, format_args!(" {value}\n")),
        }
    }
}

impl Labels {
    pub fn new<'a>(labels: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        Labels::default().and(labels)
    }

    /// These and more.
    pub fn and<'a>(&self, labels: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let mut text = self.0.clone();
        for (name, value) in labels {
            let comma = if text.is_empty() { "" } else { "," };
            write(&mut text, format_args!("{comma}{name}=\""));
            for character in value.chars() {
                match character {
                    '\\' => text.push_str(r"\\"),
                    '"' => text.push_str(r#"\""#),
                    '\n' => text.push_str(r"\n"),
                    other => text.push(other),
                }
            }
            text.push('"');
        }
        Labels(text)
    }
}

fn write(text: &mut String, arguments: std::fmt::Arguments<'_>) {
    text.write_fmt(arguments).expect("a string takes everything");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_stand_below_their_name_with_labels_escaped() {
        let mut exposition = Exposition::default();
        let base = Labels::new([("pod", "a\"b\\c\nd")]);
        let mut family = exposition.counter("used_total", "All that was used.");
        family.add(&base, 0.5, Timestamp::from_millisecond(1234).ok());
        family.add(&base.and([("cpu", "total")]), 7, None);
        exposition.gauge("unused", "Nobody has it.");
        exposition.gauge("error", "1 if so.").add(&Labels::default(), 0, None);
        insta::assert_snapshot!(exposition.into_text(), @r#"
        # HELP used_total All that was used.
        # TYPE used_total counter
        used_total{pod="a\"b\\c\nd"} 0.5 1234
        used_total{pod="a\"b\\c\nd",cpu="total"} 7
        # HELP error 1 if so.
        # TYPE error gauge
        error 0
        "#);
    }
}
