//! Content negotiation of metrics pages.
//!
//! Owns: content type and compression, as the client accepts them. Only text is available: upstream also has protobuf, and no
//! OpenMetrics either. Never: the contents of a page.
//! Upstream: `promhttp.HandlerFor`, `expfmt.Negotiate`, `httputil.NegotiateContentEncoding`.

use std::io::{self, Write as _};

use axum::{
    body::{Body, to_bytes},
    extract::Request,
    http::{HeaderMap, HeaderName, HeaderValue, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};
use hyper::StatusCode;
use rubelet_host::threads::for_caller;

use super::{accept::clauses, health::text};
use crate::metrics::{process, text::CONTENT_TYPE};

const STARTED: HeaderName = HeaderName::from_static("process-start-time-unix");
/// The name escaping for older readers. No name needs it, so it only appears in the content type.
const ESCAPINGS: [&str; 4] = ["allow-utf-8", "underscores", "dots", "values"];
const DEFAULT_ESCAPING: &str = "underscores";

/// The layer around the routes of metrics.
pub(super) async fn send(request: Request, next: Next) -> Response {
    let (content_type, takes_gzip) = (content_type(request.headers()), takes_gzip(request.headers()));
    let (mut head, mut body) = next.run(request).await.into_parts();
    // Otherwise it is an error, or the response to a reset.
    if head.headers.get(header::CONTENT_TYPE).is_none_or(|found| found != CONTENT_TYPE) {
        return (head, body).into_response();
    }
    head.headers.insert(header::CONTENT_TYPE, content_type);
    head.headers.extend(process::start_time_secs().map(|secs| (STARTED, HeaderValue::from(secs as u64))));
    if takes_gzip {
        head.headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        body = match compressed(body).await {
            Ok(page) => page.into(),
            Err(error) => return text(StatusCode::INTERNAL_SERVER_ERROR, format!("compress the page: {error}\n")),
        };
    }
    (head, body).into_response()
}

/// On another thread: a page of many pods takes tens of milliseconds.
async fn compressed(body: Body) -> io::Result<Vec<u8>> {
    // The body is in memory already, in one piece.
    let page: Bytes = to_bytes(body, usize::MAX).await.map_err(io::Error::other)?;
    for_caller(move || {
        // The lines are similar, so the fastest level compresses well.
        let mut packed = GzEncoder::new(Vec::with_capacity(page.len() / 8), Compression::fast());
        packed.write_all(&page)?;
        packed.finish()
    })
    .await
}

fn content_type(headers: &HeaderMap) -> HeaderValue {
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    let mut escaping = DEFAULT_ESCAPING;
    for clause in clauses(accept) {
        // Upstream's quirk: escaping in an unsupported alternative counts as well.
        let told = clause.param("escaping").filter(|told| ESCAPINGS.contains(told));
        escaping = told.unwrap_or(escaping);
        if clause.names("text/plain") && matches!(clause.param("version"), None | Some("0.0.4")) {
            break;
        }
    }
    HeaderValue::from_str(&format!("{CONTENT_TYPE}; escaping={escaping}")).expect("words of ours")
}

/// Upstream's order: identity unless gzip has a higher quality.
fn takes_gzip(headers: &HeaderMap) -> bool {
    let lines = headers.get_all(header::ACCEPT_ENCODING).iter().filter_map(|line| line.to_str().ok());
    // After a syntax error the rest of the line is ignored.
    let told: Vec<(&str, f32)> = lines.flat_map(|line| line.split(',').map_while(coding)).collect();
    let liking = |coding: &str| {
        let likings = told.iter().filter(|(named, _)| *named == coding || *named == "*").map(|(_, quality)| *quality);
        likings.fold(0.0, f32::max)
    };
    liking("gzip") > liking("identity")
}

/// `gzip;q=0.5`, with its quality.
fn coding(text: &str) -> Option<(&str, f32)> {
    let (name, quality) = match text.split_once(';') {
        None => (text, Some(1.0)),
        Some((name, param)) => (name, param.trim().strip_prefix("q=").and_then(|quality| quality.parse().ok())),
    };
    let name = name.trim();
    quality.filter(|_| !name.is_empty()).map(|quality| (name, quality))
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use axum::http::Method;
    use flate2::read::GzDecoder;
    use tower::ServiceExt as _;

    use super::*;
    use crate::server::{read_only, tests::context, views::tests::snapshot};

    #[test]
    fn page_is_compressed_if_gzip_is_preferred() {
        let told: [&[&'static str]; 14] = [
            &[],
            &["gzip"],
            &["deflate, gzip"],
            &["deflate", "gzip"],
            &["gzip;q=0"],
            &["gzip; q=0.5, identity;q=0.4"],
            &["gzip, identity"],
            &["*"],
            &["*;q=0.5, gzip"],
            &["gzip, *;q=0"],
            &["identity;q=0, gzip;q=0.1"],
            &["zstd"],
            &["deflate;level=9, gzip"],
            &["gzip;q=yes"],
        ];
        let shown = told.map(|lines| {
            let headers = lines.iter().map(|line| (header::ACCEPT_ENCODING, HeaderValue::from_static(line))).collect();
            format!("{lines:?} {}", takes_gzip(&headers))
        });
        insta::assert_snapshot!(shown.join("\n"), @r#"
        [] false
        ["gzip"] true
        ["deflate, gzip"] true
        ["deflate", "gzip"] true
        ["gzip;q=0"] false
        ["gzip; q=0.5, identity;q=0.4"] true
        ["gzip, identity"] false
        ["*"] false
        ["*;q=0.5, gzip"] true
        ["gzip, *;q=0"] true
        ["identity;q=0, gzip;q=0.1"] true
        ["zstd"] false
        ["deflate;level=9, gzip"] false
        ["gzip;q=yes"] false
        "#);
    }

    #[test]
    fn the_content_type_is_the_one_upstream_answers() {
        let prometheus_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
                            application/openmetrics-text;version=0.0.1;q=0.5,\
                            text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        for (accept, escaping) in [
            ("", "underscores"),
            ("*/*", "underscores"),
            ("application/openmetrics-text;version=1.0.0", "underscores"),
            (prometheus_3, "allow-utf-8"),
            ("text/plain, application/json;escaping=dots;q=0.5", "underscores"),
            ("text/plain;version=0.0.4;escaping=values", "values"),
            ("text/plain;escaping=none", "underscores"),
        ] {
            let headers = HeaderMap::from_iter([(header::ACCEPT, HeaderValue::from_static(accept))]);
            assert_eq!(
                content_type(&headers),
                format!("text/plain; version=0.0.4; charset=utf-8; escaping={escaping}"),
                "{accept}"
            );
        }
    }

    #[tokio::test]
    async fn pages_of_metrics_are_compressed_and_no_others() {
        let (_sender, context) = context(snapshot("n1", []), std::path::Path::new("/nonexistent"));
        let ask = async |method: Method, path: &str| {
            let request = Request::builder().method(method).uri(path).header(header::ACCEPT_ENCODING, "gzip");
            let answer =
                read_only::router(context.clone()).oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
            let encoding = answer.headers().get(header::CONTENT_ENCODING).cloned();
            let has_start = answer.headers().contains_key(STARTED);
            (encoding, has_start, to_bytes(answer.into_body(), usize::MAX).await.unwrap())
        };
        for path in ["/metrics", "/metrics/cadvisor", "/metrics/resource", "/metrics/probes", "/metrics/slis"] {
            let (encoding, has_start, body) = ask(Method::GET, path).await;
            assert_eq!((encoding.unwrap(), has_start), (HeaderValue::from_static("gzip"), true), "{path}");
            let mut page = String::new();
            GzDecoder::new(&*body).read_to_string(&mut page).unwrap();
            assert!(page.starts_with("# HELP ") && page.ends_with('\n'), "{path}: {page}");
        }
        for (method, path) in [(Method::DELETE, "/metrics/slis"), (Method::GET, "/pods"), (Method::GET, "/healthz")] {
            let (encoding, has_start, body) = ask(method, path).await;
            assert_eq!((encoding, has_start), (None, false), "{path}");
            assert!(str::from_utf8(&body).is_ok(), "{path}");
        }
    }
}
