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
        match read_tail(world, Path::new(&mount.host_path), FILE_LIMIT_BYTES).await {
            Ok(content) if !content.is_empty() => return String::from_utf8_lossy(&content).into_owned(),
            Ok(_) => {}
            Err(ReadError::Io(error)) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return format!("Error on reading termination log {}: {error}", mount.host_path),
        }
    }
    if falls_back { log_end(world, &status.log_path).await } else { String::new() }
}

async fn log_end(world: &World, path: &str) -> String {
    match read_tail(world, Path::new(path), LOG_TAIL_BYTES).await {
        Ok(content) => last_words(&content),
        Err(error) => {
            format!("Error on reading termination message from logs: failed to open log file {path:?}: {error}")
        }
    }
}

async fn read_tail(world: &World, path: &Path, limit_bytes: u64) -> Result<Vec<u8>, ReadError> {
    world.host.read_tail(&world.paths.root_of(path), path, limit_bytes).await
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
    use std::{fs, os::unix::fs::symlink};

    use super::*;
    use crate::world::testing::world_in;

    #[tokio::test]
    async fn a_link_in_place_of_message_log_or_directory_reveals_no_other_file() {
        let dir = tempfile::tempdir().unwrap();
        let world = world_in(dir.path());
        let secrets = dir.path().join("secrets");
        fs::create_dir(&secrets).unwrap();
        fs::write(secrets.join("file"), "2026-01-01T00:00:00Z stdout F secret\n").unwrap();
        let annotated = |termination_message_path: &str| Annotated {
            termination_message_path: termination_message_path.to_owned(),
            falls_back_to_logs: true,
            ..Annotated::default()
        };
        // The last is that of an earlier agent whose log directory was behind a link.
        fs::create_dir(dir.path().join("real")).unwrap();
        symlink(dir.path().join("real"), dir.path().join("earlier")).unwrap();
        for root in [world.paths.pods_dir(), world.paths.pod_logs_dir.clone(), dir.path().join("earlier/pods/web")] {
            let [last, middle, honest] = ["last/file", "middle/file", "honest/file"].map(|path| root.join(path));
            fs::create_dir_all(root.join("last")).unwrap();
            fs::create_dir(root.join("honest")).unwrap();
            symlink(secrets.join("file"), &last).unwrap();
            symlink(&secrets, root.join("middle")).unwrap();
            fs::copy(secrets.join("file"), &honest).unwrap();
            for (path, is_read) in [(&last, false), (&middle, false), (&honest, true)] {
                let path = path.to_string_lossy().into_owned();
                let mount = v1::Mount { container_path: "/m".into(), host_path: path.clone(), ..Default::default() };
                let status = v1::ContainerStatus { exit_code: 1, mounts: vec![mount], ..Default::default() };
                let message = of(&world, &status, &annotated("/m")).await;
                assert_eq!(message.contains("secret\n"), is_read, "{path}: {message}");
                let status = v1::ContainerStatus { exit_code: 1, log_path: path.clone(), ..Default::default() };
                let message = of(&world, &status, &annotated("")).await;
                assert_eq!(message.contains("secret\n"), is_read, "{path}: {message}");
            }
        }
    }

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
