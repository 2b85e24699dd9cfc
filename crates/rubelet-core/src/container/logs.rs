//! The paths of container logs.
//!
//! Owns: upstream's names under the pod log directory and in `/var/log/containers`. Never: touches a file.
//! Upstream: `BuildPodLogsDirectory`, `logSymlink`, `calcRestartCountByLogDir`.

use std::path::{Path, PathBuf};

use crate::id::PodUid;

/// The maximum length of a file name in ext4.
const MAX_NAME_BYTES: usize = 255;
const SUFFIX: &str = ".log";

/// `<namespace>_<name>_<uid>`
pub fn pod_dir_name(namespace: &str, name: &str, uid: &PodUid) -> String {
    format!("{namespace}_{name}_{uid}")
}

pub fn pod_dir(pod_logs_dir: &Path, namespace: &str, name: &str, uid: &PodUid) -> PathBuf {
    pod_logs_dir.join(pod_dir_name(namespace, name, uid))
}

/// Relative to the pod's log directory.
pub fn container_log(container: &str, attempt: u32) -> String {
    format!("{container}/{attempt}.log")
}

/// The file name of the link in `/var/log/containers` that log shippers follow.
pub fn link_name(pod: &str, namespace: &str, container: &str, id: &str) -> String {
    let mut name = format!("{pod}_{namespace}_{container}-{id}");
    // All of its parts are ASCII.
    name.truncate(MAX_NAME_BYTES - SUFFIX.len());
    name + SUFFIX
}

/// The attempt a log file belongs to: `3.log`, or `3.log.20260102-150405` once rotated.
pub fn attempt_of(file_name: &str) -> Option<u32> {
    let (attempt, rest) = file_name.split_once(SUFFIX)?;
    let is_number = !attempt.is_empty() && attempt.bytes().all(|byte| byte.is_ascii_digit());
    let is_whole = rest.is_empty() || rest.starts_with('.');
    if is_number && is_whole { attempt.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_names_end_in_log_even_when_cut() {
        assert_eq!(link_name("web", "default", "c", "0123"), "web_default_c-0123.log");
        let long = link_name(&"p".repeat(253), "default", "c", "0123");
        assert_eq!((long.len(), long.ends_with("pp_.log")), (255, false), "{long}");
        assert!(long.ends_with(".log"));
    }

    #[test]
    fn attempts_are_read_from_log_names() {
        for (name, attempt) in [
            ("0.log", Some(0)),
            ("12.log", Some(12)),
            ("7.log.20260102-150405", Some(7)),
            ("7.log.20260102-150405.gz", Some(7)),
            ("x.log", None),
            (".log", None),
            ("3.txt", None),
            ("3.logs", None),
            ("99999999999.log", None),
        ] {
            assert_eq!(attempt_of(name), attempt, "{name}");
        }
    }
}
