//! Conditional and range requests.
//!
//! Owns: the conditional headers and `Range`, for files without an entity tag. Never: reads a file.
//! Upstream: `checkPreconditions`, `parseRange` of Go's `net/http`. Several ranges at once get the whole file, as HTTP allows.

use std::ops::Range;

use axum::http::{HeaderMap, HeaderName, header};
use jiff::{Timestamp, civil::DateTime, tz::TimeZone};

const HTTP_DATE: &str = "%a, %d %b %Y %H:%M:%S GMT";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Precondition {
    Whole,
    Part(Range<u64>),
    NotModified,
    Failed,
    /// With Go's error text; the length is included if the range is beyond it.
    BadRange(&'static str),
}

pub(super) fn http_date(time: Timestamp) -> String {
    time.strftime(HTTP_DATE).to_string()
}

/// The response for a file of this length and modification time.
pub(crate) fn check_preconditions(headers: &HeaderMap, length: u64, modified: Timestamp) -> Precondition {
    // To the second, as dates in headers are.
    let modified = modified.as_second();
    let said = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim);
    let date = |name: HeaderName| said(name).and_then(parse_date);
    match said(header::IF_MATCH) {
        Some(tags) if tags != "*" => return Precondition::Failed,
        Some(_) => {}
        None if date(header::IF_UNMODIFIED_SINCE).is_some_and(|since| modified > since) => {
            return Precondition::Failed;
        }
        None => {}
    }
    let unchanged = match said(header::IF_NONE_MATCH) {
        Some(tags) => tags == "*",
        None => is_unchanged(headers, modified),
    };
    if unchanged {
        return Precondition::NotModified;
    }
    let is_for_this_version = match said(header::IF_RANGE) {
        None => true,
        Some(_) => date(header::IF_RANGE) == Some(modified),
    };
    match said(header::RANGE) {
        Some(range) if is_for_this_version => part(range, length),
        _ => Precondition::Whole,
    }
}

/// The only precondition Go checks for a directory.
pub(super) fn is_unchanged(headers: &HeaderMap, modified_secs: i64) -> bool {
    let since = headers.get(header::IF_MODIFIED_SINCE).and_then(|value| value.to_str().ok()).and_then(parse_date);
    since.is_some_and(|since| modified_secs <= since)
}

fn parse_date(text: &str) -> Option<i64> {
    let date = DateTime::strptime(HTTP_DATE, text.trim()).ok()?;
    Some(date.to_zoned(TimeZone::UTC).ok()?.timestamp().as_second())
}

fn part(range: &str, length: u64) -> Precondition {
    const INVALID: Precondition = Precondition::BadRange("invalid range");
    let Some(ranges) = range.strip_prefix("bytes=") else { return INVALID };
    let mut ranges = ranges.split(',').map(str::trim).filter(|range| !range.is_empty());
    let (Some(range), None) = (ranges.next(), ranges.next()) else { return Precondition::Whole };
    let Some((start, end)) = range.split_once('-') else { return INVALID };
    let number = |text: &str| text.trim().bytes().all(|byte| byte.is_ascii_digit()).then(|| text.trim().parse().ok());
    let wanted = match (start.trim(), end.trim()) {
        ("", last) => number(last).flatten().map(|last: u64| length.saturating_sub(last)..length),
        (start, "") => number(start).flatten().map(|start: u64| start..length),
        (start, end) => match (number(start).flatten(), number(end).flatten()) {
            (Some(start), Some(end)) if start <= end => Some(start..length.min(u64::saturating_add(end, 1))),
            _ => None,
        },
    };
    match wanted {
        None => INVALID,
        Some(wanted) if wanted.start >= length => Precondition::BadRange("invalid range: failed to overlap"),
        Some(wanted) => Precondition::Part(wanted),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditional_headers_are_parsed_like_go() {
        let modified = "2026-11-16T06:57:11.5Z".parse().unwrap();
        let table: [(&[(&str, &str)], Precondition); 20] = [
            (&[], Precondition::Whole),
            (&[("range", "bytes=0-0")], Precondition::Part(0..1)),
            (&[("range", "bytes=1-")], Precondition::Part(1..3)),
            (&[("range", "bytes=1-99")], Precondition::Part(1..3)),
            (&[("range", "bytes=-2")], Precondition::Part(1..3)),
            (&[("range", "bytes=-9")], Precondition::Part(0..3)),
            (&[("range", "bytes=9-")], Precondition::BadRange("invalid range: failed to overlap")),
            (&[("range", "bytes=x")], Precondition::BadRange("invalid range")),
            (&[("range", "bytes=2-1")], Precondition::BadRange("invalid range")),
            (&[("range", "bytes=+1-2")], Precondition::BadRange("invalid range")),
            (&[("range", "lines=1-2")], Precondition::BadRange("invalid range")),
            (&[("range", "bytes=0-0,2-2")], Precondition::Whole),
            (&[("if-modified-since", "Mon, 16 Nov 2026 06:57:11 GMT")], Precondition::NotModified),
            (&[("if-modified-since", "Mon, 16 Nov 2026 06:57:10 GMT")], Precondition::Whole),
            (&[("if-modified-since", "yesterday")], Precondition::Whole),
            (&[("if-unmodified-since", "Mon, 16 Nov 2026 06:57:10 GMT")], Precondition::Failed),
            (&[("if-none-match", "*")], Precondition::NotModified),
            (
                &[("if-none-match", "\"x\""), ("if-modified-since", "Mon, 16 Nov 2026 06:57:11 GMT")],
                Precondition::Whole,
            ),
            (&[("if-match", "\"x\"")], Precondition::Failed),
            (&[("range", "bytes=0-0"), ("if-range", "Mon, 16 Nov 2026 06:57:10 GMT")], Precondition::Whole),
        ];
        for (headers, expected) in table {
            let map = headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect();
            assert_eq!(check_preconditions(&map, 3, modified), expected, "{headers:?}");
        }
        assert_eq!(http_date(modified), "Mon, 16 Nov 2026 06:57:11 GMT");
    }
}
