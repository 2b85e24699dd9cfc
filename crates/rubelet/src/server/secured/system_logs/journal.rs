//! Logs of services: from the journal if they use it, otherwise from files with their names.
//!
//! Owns: which of the two a service uses, running and ending journalctl. Never: a shell; journalctl gets separate arguments, and
//! runs no longer than [`DEADLINE`] or until its reader is gone.
//! Upstream: `nodeLogQuery.Copy`, `checkForNativeLogger`, `heuristicsCopyFileLogs`.

use std::{
    io,
    path::{Path, PathBuf},
    pin::Pin,
    process::Stdio,
    time::Duration,
};

use axum::{
    body::Body,
    http::header,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures_util::{Stream, StreamExt as _, stream};
use rubelet_host::{
    fs::open_inside,
    port::{FileKind, ReadError},
    threads::for_caller,
};
use tokio::{
    io::AsyncReadExt as _,
    net::unix::pipe,
    process::{Child, Command},
    time::sleep,
};

use super::{chunks::chunks, query::Query};

/// Upstream's, for a complete response.
const DEADLINE: Duration = Duration::from_secs(30);
/// Size limit of the list of units, of which a node has hundreds.
const UNITS_MAX_BYTES: u64 = 4 << 20;
const CHUNK_BYTES: usize = 64 << 10;

type Parts = Pin<Box<dyn Stream<Item = io::Result<Bytes>> + Send>>;

pub(super) async fn answer(dir: &Path, query: &Query) -> Response {
    let mut late = Box::pin(sleep(DEADLINE));
    // Cancel safe: dropping the future kills journalctl.
    let units = tokio::select! {
        biased;
        units = units() => units.unwrap_or_default(),
        () = &mut late => String::new(),
    };
    let (native, in_files): (Vec<String>, Vec<String>) =
        query.services.iter().cloned().partition(|service| units.contains(&format!("{service}.service")));
    let mut parts: Vec<Parts> = Vec::new();
    if !native.is_empty() {
        parts.push(match spawn(&query.arguments(&native)) {
            Ok(running) => running.output(),
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "failed to start journalctl");
                let missing = if query.is_of_this_boot() { "\nerror: journal output not available\n" } else { "" };
                said(missing.to_owned())
            }
        });
    }
    if !in_files.is_empty() && query.has_options() {
        let names = in_files.join(" ");
        let advice = "try without specifying options";
        parts.push(said(format!("\noptions present and query resolved to log files for [{names}]\n{advice}\n")));
    } else {
        for service in &in_files {
            parts.push(file_of(dir.to_owned(), service.clone()).await);
        }
    }
    let all = stream::iter(parts).flatten();
    let in_time = stream::unfold((Box::pin(all), late), |(mut all, mut late)| async {
        // Cancel safe: a response that takes too long is truncated, as upstream's.
        let part = tokio::select! {
            biased;
            () = &mut late => None,
            part = all.next() => part,
        };
        Some((part?, (all, late)))
    });
    ([(header::CONTENT_TYPE, "text/plain;charset=UTF-8")], Body::from_stream(in_time)).into_response()
}

fn said(text: String) -> Parts {
    Box::pin(stream::once(async { Ok(text.into()) }))
}

/// The units the journal knows, one per line.
async fn units() -> io::Result<String> {
    let mut running = spawn(&["--field".to_owned(), "_SYSTEMD_UNIT".to_owned()])?;
    let mut output = Vec::new();
    (&mut running.output).take(UNITS_MAX_BYTES).read_to_end(&mut output).await?;
    Ok(String::from_utf8_lossy(&output).into_owned())
}

/// journalctl, killed on drop.
struct Running {
    /// Its standard output and standard error.
    output: pipe::Receiver,
    _child: Child,
}

fn spawn(arguments: &[String]) -> io::Result<Running> {
    let (writer, output) = pipe::pipe()?;
    let writer = writer.into_blocking_fd()?;
    let child = Command::new("journalctl")
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(writer.try_clone()?)
        .stdout(writer)
        .kill_on_drop(true)
        .spawn()?;
    Ok(Running { output, _child: child })
}

impl Running {
    fn output(self) -> Parts {
        Box::pin(stream::try_unfold(self, |mut running| async {
            let mut chunk = vec![0; CHUNK_BYTES];
            let count = running.output.read(&mut chunk).await?;
            chunk.truncate(count);
            Ok((count > 0).then(|| (chunk.into(), running)))
        }))
    }
}

/// The first existing log file of a service.
async fn file_of(dir: PathBuf, service: String) -> Parts {
    let names = [service.clone(), format!("{service}.log"), format!("{service}/{service}.log")];
    let found = for_caller(move || {
        for name in names {
            match open_inside(&dir, Path::new(&name)) {
                Ok((file, FileKind::File)) => return Ok(Some(file)),
                Ok(_) => {}
                Err(ReadError::Io(error)) if is_missing(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    });
    match found.await {
        Ok(Some(file)) => Box::pin(chunks(file, 0, u64::MAX)),
        Ok(None) => said(format!("\nlog not found for {service}\n")),
        Err(error) => said(format!("\nerror getting log for {service}: {error}\n")),
    }
}

fn is_missing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}
