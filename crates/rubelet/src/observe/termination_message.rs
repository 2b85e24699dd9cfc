//! A container's termination message.
//!
//! Owns: the termination message file, and the last log lines if the pod's policy falls back to them.
//! Upstream: `getTerminationMessage`, `readLastStringFromContainerLogs`, `convertToKubeContainerStatus`.

use std::{io::ErrorKind, path::Path};

use rubelet_core::container::labels::Annotated;
use rubelet_cri::v1;
use rubelet_host::port::ReadError;

use crate::world::World;

/// Upstream's limit for the file and for the log.
const FILE_LIMIT_BYTES: u64 = 4096;
const LOG_LIMIT_BYTES: usize = 2048;
const LOG_LIMIT_LINES: usize = 80;
/// Holds the last 80 lines of a message with their timestamps; containerd splits lines at 16 KiB.
const LOG_TAIL_BYTES: u64 = 64 << 10;

/// The runtime's message and the container's, joined as upstream joins them.
pub async fn of(world: &World, status: &v1::ContainerStatus, annotated: &Annotated) -> String {
    let own = own_words(world, status, annotated).await;
    match (status.message.is_empty(), own.is_empty()) {
        (_, true) => status.message.clone(),
        (true, false) => own,
        (false, false) => format!("{}: {own}", status.message),
    }
}

async fn own_words(world: &World, status: &v1::ContainerStatus, annotated: &Annotated) -> String {
    // A container that was never started has no log.
    let falls_back = annotated.falls_back_to_logs && status.exit_code != 0 && status.reason != "ContainerCannotRun";
    let path = absolute(&annotated.termination_message_path);
    let mount = status.mounts.iter().find(|mount| !path.is_empty() && mount.container_path == path);
    if let Some(mount) = mount {
        match world.host.read_tail(Path::new(&mount.host_path), FILE_LIMIT_BYTES).await {
            Ok(content) if !content.is_empty() => return String::from_utf8_lossy(&content).into_owned(),
            Ok(_) => {}
            Err(ReadError::Io(error)) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return format!("Error on reading termination log {}: {error}", mount.host_path),
        }
    }
    if falls_back { log_end(world, &status.log_path).await } else { String::new() }
}

async fn log_end(world: &World, path: &str) -> String {
    match world.host.read_tail(Path::new(path), LOG_TAIL_BYTES).await {
        Ok(content) => last_words(&content),
        Err(error) => {
            format!("Error on reading termination message from logs: failed to open log file {path:?}: {error}")
        }
    }
}

/// The messages of the last lines of a CRI log, without the runtime's prefix.
pub fn last_words(log: &[u8]) -> String {
    let lines: Vec<&[u8]> = log.split_inclusive(|byte| *byte == b'\n').collect();
    let mut words = Vec::new();
    for line in &lines[lines.len().saturating_sub(LOG_LIMIT_LINES)..] {
        words.extend_from_slice(message(line).unwrap_or_default());
    }
    String::from_utf8_lossy(&words[words.len().saturating_sub(LOG_LIMIT_BYTES)..]).into_owned()
}

/// `<time> <stream> <tags> <message>`; `None` for other lines, such as one cut by the tail.
fn message(line: &[u8]) -> Option<&[u8]> {
    let mut fields = line.splitn(4, |byte| *byte == b' ');
    let (_time, stream, tags, message) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
    if !matches!(stream, b"stdout" | b"stderr") {
        return None;
    }
    // The first part of a partial line has no line break.
    let is_partial = tags.split(|byte| *byte == b':').next() == Some(b"P");
    Some(if is_partial { message.strip_suffix(b"\n").unwrap_or(message) } else { message })
}

fn absolute(path: &str) -> String {
    if path.is_empty() || path.starts_with('/') { path.to_owned() } else { format!("/{path}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_words_are_the_messages_of_the_last_lines() {
        let log = b"ed line\n2026-01-01T00:00:00Z stdout F one\n2026-01-01T00:00:00Z stderr P tw\n\
                    2026-01-01T00:00:00Z stderr F o\n2026-01-01T00:00:00Z stdout F three";
        assert_eq!(last_words(log), "one\ntwo\nthree");
        assert_eq!(last_words(b""), "");
    }

    #[test]
    fn last_words_are_80_lines_and_2048_bytes_at_most() {
        let short: String = (0..100).map(|n| format!("2026-01-01T00:00:00Z stdout F {n}\n")).collect();
        assert!(last_words(short.as_bytes()).starts_with("20\n21\n"));
        let long: String =
            (0..9).map(|n| format!("2026-01-01T00:00:00Z stdout F {}\n", n.to_string().repeat(1000))).collect();
        let words = last_words(long.as_bytes());
        assert_eq!((words.len(), &words[..2]), (2048, "66"));
    }
}
