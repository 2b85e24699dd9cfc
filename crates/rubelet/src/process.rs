//! The agent's own process: open files, the kernel's choice when memory runs out, core dumps.
//!
//! Owns: what is set at start. Never: fails; a limit that may not be set is warned of, as upstream does.
//! Upstream: `run` and `RunKubelet` of `cmd/kubelet/app/server.go`.

use std::{fs, io, path::Path};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const OOM_SCORE_ADJ: &str = "/proc/self/oom_score_adj";

/// `maxOpenFiles` and `oomScoreAdj`, and no core dumps.
pub(crate) fn apply_limits(max_open_files: i64, oom_score_adj: i32) {
    if let Err(error) = set_open_files(max_open_files) {
        tracing::warn!(max_open_files, %error, "Failed to set rlimit on max file handles");
    }
    if let Err(error) = set_oom_score_adj(Path::new(OOM_SCORE_ADJ), oom_score_adj) {
        tracing::warn!(oom_score_adj, %error, "Failed to ApplyOOMScoreAdj");
    }
    if let Err(error) = forbid_core_dumps() {
        tracing::warn!(%error, "failed to disable core dumps");
    }
}

/// Soft and hard limit. If the hard limit may not be raised, as much as it allows.
fn set_open_files(count: i64) -> io::Result<()> {
    let count = Some(u64::try_from(count).map_err(io::Error::other)?);
    setrlimit(Resource::Nofile, Rlimit { current: count, maximum: count }).map_err(|error| {
        let hard = getrlimit(Resource::Nofile).maximum;
        // Lowering or raising the soft limit within the hard one is always permitted.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: hard, maximum: hard });
        error.into()
    })
}

fn set_oom_score_adj(file: &Path, value: i32) -> io::Result<()> {
    fs::write(file, value.to_string())
}

/// The process holds tokens, keys and secrets of pods. A soft limit of one byte, and not zero: the kernel ignores the limit for a
/// `core_pattern` that is a pipe (systemd-coredump, apport) unless it is exactly one; for a file, anything below a page means no
/// dump. PR_SET_DUMPABLE would also hide `/proc/PID` from root without CAP_SYS_PTRACE, which monitoring and debuggers read.
/// The hard limit stays, so that `prlimit --core` can allow a dump when one is needed.
fn forbid_core_dumps() -> io::Result<()> {
    let maximum = getrlimit(Resource::Core).maximum.map(|hard| hard.max(1));
    Ok(setrlimit(Resource::Core, Rlimit { current: Some(1), maximum })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_files_beyond_the_kernels_limit_leave_what_is_permitted() {
        let before = getrlimit(Resource::Nofile);
        assert!(set_open_files(i64::MAX).is_err());
        let after = getrlimit(Resource::Nofile);
        assert_eq!((after.current, after.maximum), (before.maximum, before.maximum));
        assert!(set_open_files(-1).is_err());
        let hard = before.maximum.and_then(|hard| i64::try_from(hard).ok());
        if let Some(hard) = hard {
            set_open_files(hard).unwrap();
        }
        setrlimit(Resource::Nofile, before).unwrap();
    }

    #[test]
    fn oom_score_is_written_in_the_kernels_form() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("oom_score_adj");
        set_oom_score_adj(&file, -999).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "-999");
        assert!(set_oom_score_adj(&dir.path().join("missing/file"), 0).is_err());
    }

    #[test]
    fn core_dumps_are_forbidden_for_files_and_pipes() {
        let before = getrlimit(Resource::Core);
        if before.maximum == Some(0) {
            return;
        }
        forbid_core_dumps().unwrap();
        let after = getrlimit(Resource::Core);
        assert_eq!((after.current, after.maximum), (Some(1), before.maximum));
        setrlimit(Resource::Core, before).unwrap();
    }
}
