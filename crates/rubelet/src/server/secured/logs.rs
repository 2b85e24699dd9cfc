//! `/containerLogs`: container logs for `kubectl logs`.
//!
//! Owns: `PodLogOptions` as a query, and its validation. The rest is `container_logs.rs`.
//! Upstream: `getContainerLogs`, `ValidatePodLogOptions`.

use std::borrow::Cow;

use axum::{
    extract::{Path, RawQuery, State},
    http::StatusCode,
    response::Response,
};
use jiff::Timestamp;
use rubelet_core::time::Now;

use super::{
    Secured,
    target::{has_container, pod_named},
};
use crate::server::{
    container_logs::{self, LogOptions, earlier},
    health::text,
    log_file::{LogRun, Streams, Timestamps},
};

pub(super) async fn logs(
    State(secured): State<Secured>,
    Path((namespace, pod, container)): Path<(String, String, String)>,
    RawQuery(query): RawQuery,
) -> Response {
    let options = match options(query.as_deref().unwrap_or_default(), secured.context.clock.now()) {
        Ok(options) => options,
        Err(Wrong::Query) => {
            return text(StatusCode::BAD_REQUEST, r#"{"message": "Unable to decode query."}"#.to_owned());
        }
        Err(Wrong::Options) => {
            return text(StatusCode::UNPROCESSABLE_ENTITY, r#"{"message": "Invalid request."}"#.to_owned());
        }
    };
    let snapshot = secured.context.snapshot();
    let Some((uid, view)) = pod_named(&snapshot, &namespace, &pod) else {
        return text(StatusCode::NOT_FOUND, format!("pod {pod:?} does not exist"));
    };
    if !has_container(view, &container) {
        return text(StatusCode::NOT_FOUND, format!("container {container:?} not found in pod {pod:?}"));
    }
    container_logs::answer(&secured.context, uid, view, container, options).await
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wrong {
    /// A value cannot be parsed.
    Query,
    /// A value is out of bounds, or two exclude each other.
    Options,
}

pub(crate) fn options(query: &str, now: Now) -> Result<LogOptions, Wrong> {
    let pairs: Vec<(Cow<'_, str>, Cow<'_, str>)> = form_urlencoded::parse(query.as_bytes()).collect();
    let value = |name: &str| pairs.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_ref());
    let number = |name: &str| value(name).map(|text| text.parse::<i64>().map_err(|_| Wrong::Query)).transpose();
    // As Go's API machinery parses a boolean: anything but these two is true.
    let flag = |name: &str| value(name).is_some_and(|text| !text.eq_ignore_ascii_case("false") && text != "0");
    // The older name of `tailLines`.
    let tail = match value("tail") {
        None | Some("") => number("tailLines")?,
        Some("all") => None,
        Some(_) => number("tail")?,
    };
    let (limit_bytes, since_secs) = (number("limitBytes")?, number("sinceSeconds")?);
    let since_time: Option<Timestamp> = match value("sinceTime") {
        None | Some("") => None,
        Some(text) => Some(text.parse().map_err(|_| Wrong::Query)?),
    };
    let streams = match value("stream") {
        None | Some("" | "All") => Streams::All,
        Some("Stdout") => Streams::Stdout,
        Some("Stderr") => Streams::Stderr,
        Some(_) => return Err(Wrong::Options),
    };
    let is_out_of_bounds = tail.is_some_and(|lines| lines < 0)
        || limit_bytes.is_some_and(|bytes| bytes < 1)
        || since_secs.is_some_and(|secs| secs < 1)
        || (since_secs.is_some() && since_time.is_some())
        || (tail.is_some() && streams != Streams::All);
    if is_out_of_bounds {
        return Err(Wrong::Options);
    }
    Ok(LogOptions {
        run: if flag("previous") { LogRun::Previous } else { LogRun::Current },
        follow: flag("follow"),
        timestamps: if flag("timestamps") { Timestamps::Shown } else { Timestamps::Hidden },
        tail: tail.and_then(|lines| u64::try_from(lines).ok()),
        since: since_time.or_else(|| since_secs.map(|secs| earlier(now.wall, secs))),
        limit_bytes: limit_bytes.and_then(|bytes| u64::try_from(bytes).ok()),
        streams,
    })
}

#[cfg(test)]
mod tests {
    use rubelet_core::time::Uptime;

    use super::*;

    fn read(query: &str) -> Result<LogOptions, Wrong> {
        let wall = "2026-11-15T10:00:00Z".parse().unwrap();
        options(query, Now { uptime: Uptime::new(std::time::Duration::ZERO), wall })
    }

    #[test]
    fn options_are_read_as_upstream_reads_them() {
        let all = read("follow=true&previous=1&timestamps=x&tailLines=5&limitBytes=9&sinceSeconds=60").unwrap();
        insta::assert_debug_snapshot!(all, @r"
        LogOptions {
            run: Previous,
            follow: true,
            timestamps: Shown,
            tail: Some(
                5,
            ),
            since: Some(
                2026-11-15T09:59:00Z,
            ),
            limit_bytes: Some(
                9,
            ),
            streams: All,
        }
        ");
        let none = read("follow=false&previous=0&tail=all&sinceTime=2026-11-15T09%3A00%3A00Z&stream=Stderr").unwrap();
        assert!(!none.follow && none.run == LogRun::Current && none.tail.is_none());
        assert_eq!(none.since, Some("2026-11-15T09:00:00Z".parse().unwrap()));
        assert_eq!(none.streams, Streams::Stderr);
    }

    #[test]
    fn unparsable_log_options_differ_from_invalid_ones() {
        for query in ["tailLines=x", "limitBytes=", "sinceTime=yesterday", "tail=few"] {
            assert_eq!(read(query).unwrap_err(), Wrong::Query, "{query}");
        }
        for query in [
            "tailLines=-1",
            "limitBytes=0",
            "sinceSeconds=0",
            "sinceSeconds=1&sinceTime=2026-11-15T09:00:00Z",
            "stream=Both",
            "stream=Stdout&tailLines=1",
        ] {
            assert_eq!(read(query).unwrap_err(), Wrong::Options, "{query}");
        }
    }
}
