//! Serves files and directories of one directory over HTTP.
//!
//! Owns: listings, redirects, and that nothing outside the directory is read: links are followed only inside it, while
//! upstream follows them anywhere. Never: sniffs types beyond text or bytes, since containers write these files.
//! Upstream: `http.FileServer` over `/var/log`.

use std::{fs::File, io, path::PathBuf};

use axum::{
    body::Body,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use jiff::Timestamp;
use rubelet_host::{
    fs::{list_open_dir, open_inside},
    port::{DirEntry, FileKind, ReadError},
    threads::for_caller,
};

use super::{
    chunks::chunks,
    condition::{Precondition, check_preconditions, http_date, is_unchanged},
};
use crate::server::health::text;

/// The bytes Go sniffs to tell text from binary.
const SNIFFED_BYTES: usize = 512;

/// The target of a path.
#[derive(Debug)]
enum Found {
    Directory { modified: Timestamp, entries: Vec<DirEntry> },
    File { file: File, modified: Timestamp, length: u64, start: Vec<u8> },
}

/// The other parameters of a request.
#[derive(Debug)]
pub(super) struct Asked {
    pub headers: HeaderMap,
    pub query: Option<String>,
}

/// Responds for `path` in `dir`.
pub(super) async fn serve(dir: &std::path::Path, path: &str, asked: &Asked) -> Response {
    let inside = inside(path);
    let found = match open(dir.to_owned(), inside.clone()).await {
        Ok(found) => found,
        Err(error) => return failed(&error),
    };
    let ends_as_directory = path.is_empty() || path.ends_with('/');
    let name = inside.file_name().map(|name| encoded(&name.to_string_lossy())).unwrap_or_default();
    match found {
        Found::Directory { .. } if !ends_as_directory => redirect(&format!("{name}/"), asked.query.as_deref()),
        Found::File { .. } if ends_as_directory => redirect(&format!("../{name}"), asked.query.as_deref()),
        Found::Directory { modified, entries } => directory(modified, &entries, &asked.headers),
        Found::File { file, modified, length, start } => {
            let shape = Shape { modified, length, media_type: media_type(&start) };
            content(file, &shape, &asked.headers)
        }
    }
}

/// Why a file cannot be opened, in the texts of Go's `os.Root`; `None` if it can.
pub(super) async fn problem(dir: &std::path::Path, path: &str) -> Option<String> {
    let escapes = path.starts_with('/') || depth(path).is_none();
    let why = match open(dir.to_owned(), PathBuf::from(path)).await {
        _ if escapes => "path escapes from parent",
        Ok(_) => return None,
        Err(ReadError::Io(error)) if error.kind() == io::ErrorKind::NotFound => "no such file or directory",
        Err(ReadError::Io(error)) if error.kind() == io::ErrorKind::NotADirectory => "not a directory",
        Err(_) => "path escapes from parent",
    };
    Some(format!("statat {path}: {why}"))
}

/// The depth of a path; `None` if it leaves its start.
fn depth(path: &str) -> Option<usize> {
    path.split('/').try_fold(0_usize, |depth, part| match part {
        "" | "." => Some(depth),
        ".." => depth.checked_sub(1),
        _ => Some(depth + 1),
    })
}

/// The path without `.`, `..` and doubled slashes; `..` at the top stays at the top.
fn inside(path: &str) -> PathBuf {
    let mut parts = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.iter().collect()
}

async fn open(dir: PathBuf, relative: PathBuf) -> Result<Found, ReadError> {
    for_caller(move || {
        let (file, kind) = open_inside(&dir, &relative)?;
        let metadata = file.metadata()?;
        let modified = Timestamp::try_from(metadata.modified()?).unwrap_or_default();
        if kind == FileKind::Directory {
            return Ok(Found::Directory { modified, entries: list_open_dir(&file)? });
        }
        let mut start = vec![0; SNIFFED_BYTES];
        let count = std::os::unix::fs::FileExt::read_at(&file, &mut start, 0)?;
        start.truncate(count);
        Ok(Found::File { file, modified, length: metadata.len(), start })
    })
    .await
}

fn failed(error: &ReadError) -> Response {
    let (status, body) = match error {
        ReadError::Io(error) => match error.kind() {
            io::ErrorKind::PermissionDenied => (StatusCode::FORBIDDEN, "403 Forbidden\n"),
            // An invalid path counts as missing too.
            io::ErrorKind::NotFound
            | io::ErrorKind::NotADirectory
            | io::ErrorKind::InvalidInput
            | io::ErrorKind::InvalidFilename => (StatusCode::NOT_FOUND, "404 page not found\n"),
            _ => (StatusCode::INTERNAL_SERVER_ERROR, "500 Internal Server Error\n"),
        },
        ReadError::NotRegular(_) | ReadError::TooLarge { .. } => (StatusCode::FORBIDDEN, "403 Forbidden\n"),
    };
    text(status, body.to_owned())
}

fn redirect(to: &str, query: Option<&str>) -> Response {
    let query = query.map(|query| format!("?{query}")).unwrap_or_default();
    (StatusCode::MOVED_PERMANENTLY, [(header::LOCATION, format!("{to}{query}"))]).into_response()
}

fn directory(modified: Timestamp, entries: &[DirEntry], headers: &HeaderMap) -> Response {
    if is_unchanged(headers, modified.as_second()) {
        return StatusCode::NOT_MODIFIED.into_response();
    }
    let mut page = "<!doctype html>\n<meta name=\"viewport\" content=\"width=device-width\">\n<pre>\n".to_owned();
    for entry in entries {
        let slash = if entry.kind == FileKind::Directory { "/" } else { "" };
        let (href, name) = (encoded(&entry.name), escaped(&entry.name));
        page.push_str(&format!("<a href=\"{href}{slash}\">{name}{slash}</a>\n"));
    }
    page.push_str("</pre>\n");
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8".to_owned()),
        (header::LAST_MODIFIED, http_date(modified)),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
    ];
    (headers, page).into_response()
}

/// The attributes of a file for headers.
#[derive(Debug)]
struct Shape {
    modified: Timestamp,
    length: u64,
    media_type: &'static str,
}

fn content(file: File, shape: &Shape, headers: &HeaderMap) -> Response {
    let Shape { modified, length, media_type } = shape;
    let dated = [(header::LAST_MODIFIED, http_date(*modified))];
    let part = match check_preconditions(headers, *length, *modified) {
        Precondition::NotModified => return (StatusCode::NOT_MODIFIED, dated).into_response(),
        Precondition::Failed => return (StatusCode::PRECONDITION_FAILED, dated).into_response(),
        Precondition::BadRange(why) => {
            let answer = text(StatusCode::RANGE_NOT_SATISFIABLE, format!("{why}\n"));
            return ([(header::CONTENT_RANGE, format!("bytes */{length}"))], answer).into_response();
        }
        Precondition::Whole => None,
        Precondition::Part(part) => Some(part),
    };
    let sent = part.clone().unwrap_or(0..*length);
    let headers = [
        (header::CONTENT_TYPE, (*media_type).to_owned()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
        (header::ACCEPT_RANGES, "bytes".to_owned()),
        (header::CONTENT_LENGTH, (sent.end - sent.start).to_string()),
    ];
    let body = Body::from_stream(chunks(file, sent.start, sent.end));
    let whole = (dated, headers, body).into_response();
    match part {
        None => whole,
        Some(part) => {
            let range = format!("bytes {}-{}/{length}", part.start, part.end - 1);
            (StatusCode::PARTIAL_CONTENT, [(header::CONTENT_RANGE, range)], whole).into_response()
        }
    }
}

fn media_type(start: &[u8]) -> &'static str {
    let is_binary = |byte: &u8| matches!(byte, 0..=8 | 0x0b | 0x0e..=0x1a | 0x1c..=0x1f);
    match start {
        [0x1f, 0x8b, 0x08, ..] => "application/x-gzip",
        start if start.iter().any(is_binary) => "application/octet-stream",
        _ => "text/plain; charset=utf-8",
    }
}

/// As a relative link. A colon in its first segment would be parsed as a scheme.
fn encoded(name: &str) -> String {
    let mut link = if name.contains(':') { "./".to_owned() } else { String::new() };
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => link.push(char::from(byte)),
            b'-' | b'_' | b'.' | b'~' | b'$' | b'&' | b'+' | b',' | b'/' | b':' | b';' | b'=' | b'@' => {
                link.push(char::from(byte));
            }
            other => link.push_str(&format!("%{other:02X}")),
        }
    }
    link.replace('&', "&amp;")
}

fn escaped(name: &str) -> String {
    name.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&#34;").replace('\'', "&#39;")
}
