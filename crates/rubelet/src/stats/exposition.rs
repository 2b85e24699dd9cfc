//! Metrics pages, family by family.
//!
//! Owns: labels shared by many samples, encoded once. A family without samples is omitted, as Go's client does.
//! The syntax is `metrics/text.rs`'.

use std::fmt::Display;

use axum::{
    http::header,
    response::{IntoResponse, Response},
};
use jiff::Timestamp;

use crate::metrics::text::{CONTENT_TYPE, Text, write_label};

#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Counter,
    Gauge,
}

#[derive(Debug, Default)]
pub(crate) struct Exposition {
    text: Text,
}

/// All samples of one name.
#[derive(Debug)]
pub(crate) struct Family<'a> {
    text: &'a mut Text,
    name: &'static str,
    help: &'static str,
    kind: Kind,
    has_samples: bool,
}

/// Encoded names and values of labels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Labels(String);

impl Exposition {
    pub(crate) fn family(&mut self, name: &'static str, kind: Kind, help: &'static str) -> Family<'_> {
        Family { text: &mut self.text, name, help, kind, has_samples: false }
    }

    pub(crate) fn gauge(&mut self, name: &'static str, help: &'static str) -> Family<'_> {
        self.family(name, Kind::Gauge, help)
    }

    pub(crate) fn counter(&mut self, name: &'static str, help: &'static str) -> Family<'_> {
        self.family(name, Kind::Counter, help)
    }

    pub(crate) fn into_text(self) -> String {
        self.text.into_string()
    }
}

impl IntoResponse for Exposition {
    fn into_response(self) -> Response {
        ([(header::CONTENT_TYPE, CONTENT_TYPE)], self.into_text()).into_response()
    }
}

impl Family<'_> {
    /// `at` is the measurement time; without it the time of the scrape applies.
    pub(crate) fn add(&mut self, labels: &Labels, value: impl Display, at: Option<Timestamp>) {
        if !self.has_samples {
            let kind = match self.kind {
                Kind::Counter => "counter",
                Kind::Gauge => "gauge",
            };
            self.text.head(self.name, kind, self.help);
            self.has_samples = true;
        }
        self.text.prepared(self.name, &labels.0, value, at);
    }
}

impl Labels {
    pub(crate) fn new<'a>(labels: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        Labels::default().and(labels)
    }

    /// These labels and more.
    pub(crate) fn and<'a>(&self, labels: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let mut text = self.0.clone();
        for (name, value) in labels {
            if !text.is_empty() {
                text.push(',');
            }
            write_label(&mut text, name, value);
        }
        Labels(text)
    }
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
