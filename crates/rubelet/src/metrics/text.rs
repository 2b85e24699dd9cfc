//! The Prometheus text exposition format.
//!
//! Owns: the lines of a page, their escaping, and numbers as Go prints them: a bucket's bound is a label, and must be the
//! same text on every node of a cluster. Never: knows which metrics there are.
//! Upstream: `prometheus/common/expfmt`.

use std::fmt::{Display, Write as _};

use jiff::Timestamp;

/// The content type of a page, without what `server/metrics_encoding.rs` adds.
pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A page being written.
#[derive(Debug, Default)]
pub struct Text(String);

impl Text {
    /// The HELP and TYPE lines of a family. `kind` is `counter`, `gauge` or `histogram`.
    pub fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = write!(self.0, "# HELP {name} ");
        escape(&mut self.0, help, Quotes::Plain);
        let _ = writeln!(self.0, "\n# TYPE {name} {kind}");
    }

    /// One series; `suffix` distinguishes the parts of a histogram.
    pub fn sample(&mut self, (name, suffix): (&str, &str), labels: Labels<'_>, value: f64) {
        let Labels { pairs, bound } = labels;
        self.0.push_str(name);
        self.0.push_str(suffix);
        let mut open = '{';
        for (label, value) in pairs {
            self.label(open, label, value);
            open = ',';
        }
        if let Some(bound) = bound {
            self.label(open, "le", &number(bound));
            open = ',';
        }
        if open == ',' {
            self.0.push('}');
        }
        let _ = writeln!(self.0, " {}", number(value));
    }

    /// A family of one series without labels.
    pub fn single(&mut self, name: &str, kind: &str, help: &str, value: f64) {
        self.head(name, kind, help);
        self.sample((name, ""), Labels::default(), value);
    }

    /// One series with encoded labels; `at` is its measurement time, otherwise the time of the scrape applies.
    pub fn prepared(&mut self, name: &str, labels: &str, value: impl Display, at: Option<Timestamp>) {
        self.0.push_str(name);
        if !labels.is_empty() {
            let _ = write!(self.0, "{{{labels}}}");
        }
        let _ = match at {
            Some(at) => writeln!(self.0, " {value} {}", at.as_millisecond()),
            None => writeln!(self.0, " {value}"),
        };
    }

    pub fn into_string(self) -> String {
        self.0
    }

    fn label(&mut self, open: char, name: &str, value: &str) {
        self.0.push(open);
        write_label(&mut self.0, name, value);
    }
}

/// One label, encoded.
pub(crate) fn write_label(out: &mut String, name: &str, value: &str) {
    out.push_str(name);
    out.push_str("=\"");
    escape(out, value, Quotes::Escaped);
    out.push('"');
}

/// The labels of one series.
#[derive(Clone, Copy, Debug, Default)]
pub struct Labels<'a> {
    /// Names and values.
    pub pairs: &'a [(&'a str, &'a str)],
    /// The bound of a histogram bucket.
    pub bound: Option<f64>,
}

impl<'a> Labels<'a> {
    pub fn of(pairs: &'a [(&'a str, &'a str)]) -> Self {
        Labels { pairs, bound: None }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Quotes {
    Plain,
    Escaped,
}

fn escape(out: &mut String, text: &str, quotes: Quotes) {
    for character in text.chars() {
        match character {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '"' if quotes == Quotes::Escaped => out.push_str("\\\""),
            other => out.push(other),
        }
    }
}

/// As `strconv.FormatFloat(value, 'g', -1, 64)`: with an exponent from `1e+06` on.
fn number(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "+Inf" } else { "-Inf" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').expect("`{:e}` writes an exponent");
    let exponent: i32 = exponent.parse().expect("`{:e}` writes a number as exponent");
    if (-4..6).contains(&exponent) {
        return format!("{value}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_printed_as_go_prints_them() {
        let values =
            [0.0, 1.0, 0.005, 0.0001, 0.00001, 298.0232238769531, 999_999.0, 1e6, 1_048_576.0, 1_763_276_400.25];
        let shown = values.map(number).join(" ");
        assert_eq!(shown, "0 1 0.005 0.0001 1e-05 298.0232238769531 999999 1e+06 1.048576e+06 1.76327640025e+09");
        assert_eq!([f64::INFINITY, f64::NEG_INFINITY, f64::NAN].map(number).join(" "), "+Inf -Inf NaN");
    }

    #[test]
    fn labels_and_help_are_escaped() {
        let mut text = Text::default();
        text.head("a", "gauge", "one \"line\"\nand \\ another");
        text.sample(("a", ""), Labels::of(&[("l", "x\"y\\z\n")]), 2.0);
        assert_eq!(
            text.into_string(),
            "# HELP a one \"line\"\\nand \\\\ another\n# TYPE a gauge\na{l=\"x\\\"y\\\\z\\n\"} 2\n"
        );
    }
}
