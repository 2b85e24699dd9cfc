//! Maps error responses and network failures to errors.
//!
//! Owns: the kind of an error and its text. Never: shows a header or a token.
//! Upstream: `apimachinery/pkg/api/errors`.

use std::{error::Error, time::Duration};

use http::{HeaderMap, StatusCode, header};
use serde::Deserialize;

use crate::port::{ApiError, ApiErrorKind};

/// Of a response that is not the API's own: a proxy's page, a plain text. Enough to recognise it.
const SHOWN_TEXT_CHARS: usize = 200;

/// How long a server may ask a client to wait. API servers ask for up to 32 s (priority and fairness) or 5 s (shutdown); client-go has no
/// limit of its own. One request a minute is no load for a server that asks for more, and a mistaken header must not keep a node
/// away from its pods.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

/// The `metav1.Status` of an error response.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Status {
    message: Option<String>,
    reason: Option<String>,
    code: Option<u16>,
    details: Option<Details>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Details {
    retry_after_seconds: Option<u64>,
    causes: Vec<Cause>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Cause {
    reason: String,
}

/// `operation` is the verb and the path.
pub(crate) fn refused(operation: &str, code: StatusCode, headers: &HeaderMap, body: &[u8]) -> ApiError {
    let status: Status = serde_json::from_slice(body).unwrap_or_default();
    let header = headers.get(header::RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse().ok());
    let retry_after = header.map(capped).or(status.retry_after());
    let text = match &status.message {
        Some(message) => message.clone(),
        None => String::from_utf8_lossy(body).trim().chars().take(SHOWN_TEXT_CHARS).collect(),
    };
    let kind = status.kind(code.as_u16(), retry_after);
    ApiError::new(kind, sentence(operation, code, &text))
}

/// An `ERROR` frame of a watch.
pub(super) fn watch_failed(operation: &str, status: &Status) -> ApiError {
    let code =
        status.code.and_then(|code| StatusCode::from_u16(code).ok()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let kind = status.kind(code.as_u16(), status.retry_after());
    ApiError::new(kind, sentence(operation, code, status.message.as_deref().unwrap_or_default()))
}

pub(super) fn unreachable(operation: &str, cause: impl Error + Send + Sync + 'static) -> ApiError {
    ApiError::new(ApiErrorKind::Unreachable, operation).caused_by(cause)
}

/// An error with all its causes: the outer ones alone say little.
pub fn error_chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let inner = error.to_string();
        if !text.ends_with(&inner) {
            text = format!("{text}: {inner}");
        }
        cause = error.source();
    }
    text
}

impl Status {
    fn retry_after(&self) -> Option<Duration> {
        self.details.as_ref()?.retry_after_seconds.filter(|secs| *secs > 0).map(capped)
    }

    fn has_cause(&self, reason: &str) -> bool {
        self.details.as_ref().is_some_and(|details| details.causes.iter().any(|cause| cause.reason == reason))
    }

    fn kind(&self, code: u16, retry_after: Option<Duration>) -> ApiErrorKind {
        match (code, self.reason.as_deref()) {
            (410, _) | (_, Some("Expired" | "Gone")) => ApiErrorKind::Expired,
            // 504 of a server whose cache is older than the requested version.
            _ if self.has_cause("ResourceVersionTooLarge") => ApiErrorKind::Expired,
            (409, Some("AlreadyExists")) => ApiErrorKind::AlreadyExists,
            (409, _) => ApiErrorKind::Conflict,
            (401, _) => ApiErrorKind::Unauthorized,
            (403, _) => ApiErrorKind::Forbidden,
            (404, _) => ApiErrorKind::NotFound,
            (429, _) => ApiErrorKind::TooManyRequests { retry_after },
            (503, _) if retry_after.is_some() => ApiErrorKind::TooManyRequests { retry_after },
            (400..=499, _) => ApiErrorKind::Invalid,
            _ => ApiErrorKind::Server,
        }
    }
}

fn capped(secs: u64) -> Duration {
    Duration::from_secs(secs).min(RETRY_AFTER_MAX)
}

fn sentence(operation: &str, code: StatusCode, text: &str) -> String {
    let reason = code.canonical_reason().map_or(String::new(), |reason| format!(" {reason}"));
    let text = if text.is_empty() { String::new() } else { format!(": {text}") };
    format!("{operation}: {}{reason}{text}", code.as_u16())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(code: u16, retry_after: Option<&'static str>, body: &str) -> (ApiErrorKind, String) {
        let mut headers = HeaderMap::new();
        if let Some(seconds) = retry_after {
            headers.insert(header::RETRY_AFTER, http::HeaderValue::from_static(seconds));
        }
        let code = StatusCode::from_u16(code).unwrap();
        let error = refused("patch /api/v1/namespaces/x/pods/y/status", code, &headers, body.as_bytes());
        (error.kind, error.to_string())
    }

    #[test]
    fn api_error_names_request_status_code_and_server_message() {
        let body = r#"{"kind":"Status","reason":"Forbidden","message":"pods \"y\" is forbidden: no","code":403}"#;
        let (kind, message) = answer(403, None, body);
        assert_eq!(kind, ApiErrorKind::Forbidden);
        insta::assert_snapshot!(message, @r#"patch /api/v1/namespaces/x/pods/y/status: 403 Forbidden: pods "y" is forbidden: no"#);
        let (kind, message) = answer(502, None, "<html>bad gateway</html>\n");
        assert_eq!(kind, ApiErrorKind::Server);
        insta::assert_snapshot!(message, @"patch /api/v1/namespaces/x/pods/y/status: 502 Bad Gateway: <html>bad gateway</html>");
    }

    #[test]
    fn the_kind_follows_code_and_reason() {
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        for (code, retry_after, body, expected) in [
            (404, None, "", ApiErrorKind::NotFound),
            (409, None, r#"{"reason":"AlreadyExists"}"#, ApiErrorKind::AlreadyExists),
            (409, None, r#"{"reason":"Conflict"}"#, ApiErrorKind::Conflict),
            (410, None, "", ApiErrorKind::Expired),
            (400, None, r#"{"reason":"Expired"}"#, ApiErrorKind::Expired),
            (504, Some("1"), r#"{"details":{"causes":[{"reason":"ResourceVersionTooLarge"}]}}"#, ApiErrorKind::Expired),
            (504, Some("1"), "", ApiErrorKind::Server),
            (401, None, "", ApiErrorKind::Unauthorized),
            (400, None, "", ApiErrorKind::Invalid),
            (422, None, r#"{"reason":"Invalid"}"#, ApiErrorKind::Invalid),
            (429, None, "", ApiErrorKind::TooManyRequests { retry_after: None }),
            (429, Some("3"), "", ApiErrorKind::TooManyRequests { retry_after: seconds(3) }),
            (
                429,
                None,
                r#"{"details":{"retryAfterSeconds":7}}"#,
                ApiErrorKind::TooManyRequests { retry_after: seconds(7) },
            ),
            (503, Some("1"), "", ApiErrorKind::TooManyRequests { retry_after: seconds(1) }),
            (503, None, "", ApiErrorKind::Server),
            (500, None, "not JSON", ApiErrorKind::Server),
        ] {
            assert_eq!(answer(code, retry_after, body).0, expected, "{code} {body}");
        }
    }
}
