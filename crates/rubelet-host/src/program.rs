//! Programs of the node: mount, mkfs, iscsiadm.
//!
//! Owns: their start without a shell, their deadline, their output up to a bound, and what has not ended yet: a program that a
//! dead server or a broken disk holds up stays the only one on its mount point or device. Never: decides which to run.
//! Upstream: `k8s.io/utils/exec`, `mount-utils` (`detectSystemd`, `AddSystemdScope`).

use std::{
    collections::BTreeSet,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    process::{Child, Command},
    sync::{OnceCell, oneshot},
    time::timeout,
};

use crate::{
    port::{Ended, Program, ProgramOutput, WhenLate},
    threads::Threads,
};

/// Of each of its two outputs; the rest is read and dropped.
const MAX_OUTPUT_BYTES: usize = 64 * 1024;
/// A daemon that the program left behind may hold its outputs open.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(200);
const SYSTEMD_TEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Clones share what they know of programs that run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Programs {
    running: Running,
    /// `systemd-run --scope` works here.
    has_systemd: Arc<OnceCell<bool>>,
}

/// What programs, and other changes of mounts, work on now.
#[derive(Clone, Debug, Default)]
struct Running(Arc<Mutex<BTreeSet<PathBuf>>>);

/// The path is free again when this is dropped.
#[derive(Debug)]
struct Place {
    running: Running,
    path: PathBuf,
}

impl Running {
    fn enter(&self, path: &Path) -> Option<Place> {
        let is_free = self.paths().insert(path.to_owned());
        is_free.then(|| Place { running: self.clone(), path: path.to_owned() })
    }

    fn paths(&self) -> MutexGuard<'_, BTreeSet<PathBuf>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.running.paths().remove(&self.path);
    }
}

impl Programs {
    /// Its exit and output. `Err` if it cannot be started, is late, or an earlier one on the same path has not ended.
    pub(crate) async fn run(&self, program: &Program) -> io::Result<ProgramOutput> {
        let Some(place) = self.running.enter(&program.on) else { return Err(busy(&program.on)) };
        let (name, args) = self.command_line(program).await;
        let mut command = Command::new(&name);
        // A group of its own, so that its helpers end with it.
        command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let started = command.spawn();
        let child = started.map_err(|error| io::Error::new(error.kind(), format!("cannot start {name}: {error}")))?;
        let (abandon, abandoned) = oneshot::channel::<()>();
        let (answer, mut answered) = oneshot::channel();
        let when_late = program.when_late;
        // It waits for the program, whoever else does, so that the place is free when it has ended.
        tokio::spawn(async move {
            let output = watch(child, abandoned, when_late).await;
            drop(place);
            // Its caller may have left.
            let _ = answer.send(output);
        });
        let in_time = timeout(program.timeout, &mut answered).await;
        drop(abandon);
        match in_time {
            Ok(Ok(output)) => output,
            Ok(Err(_)) => Err(io::Error::new(io::ErrorKind::Interrupted, "the agent is shutting down")),
            Err(_) => Err(late(&program.name, &program.on, program.timeout)),
        }
    }

    /// On a thread of its own, not in a lane: a scan of a bus that takes long must not delay other reads of sysfs.
    pub(crate) async fn write_control(&self, path: &Path, content: &[u8], patience: Duration) -> io::Result<()> {
        static THREADS: LazyLock<Threads> = LazyLock::new(|| Threads::new("control-files"));
        let Some(place) = self.running.enter(path) else { return Err(busy(path)) };
        let (file, content) = (path.to_owned(), content.to_owned());
        let written = THREADS.spawn(move || {
            let _place = place;
            std::fs::OpenOptions::new().write(true).open(file)?.write_all(&content)
        });
        match timeout(patience, written).await {
            Ok(Ok(written)) => written,
            Ok(Err(_)) => Err(io::Error::new(io::ErrorKind::Interrupted, "the agent is shutting down")),
            Err(_) => Err(late("the kernel's work", path, patience)),
        }
    }

    /// In a scope of its own where systemd runs: a daemon that mount starts outlives the agent's service.
    async fn command_line(&self, program: &Program) -> (String, Vec<String>) {
        let Program { name, args, .. } = program;
        let Some(what) = program.scope.as_ref().filter(|_| self.has_systemd.initialized() || may_have_systemd()) else {
            return (name.clone(), args.clone());
        };
        if !*self.has_systemd.get_or_init(test_systemd).await {
            return (name.clone(), args.clone());
        }
        let scope = [format!("--description=Kubernetes transient mount for {what}"), "--scope".to_owned()];
        let command = ["--".to_owned(), name.clone()];
        ("systemd-run".to_owned(), scope.into_iter().chain(command).chain(args.iter().cloned()).collect())
    }
}

fn busy(on: &Path) -> io::Error {
    let message = format!("an earlier program on {} has not ended yet", on.display());
    io::Error::new(io::ErrorKind::ResourceBusy, message)
}

fn late(what: &str, on: &Path, patience: Duration) -> io::Error {
    let (on, secs) = (on.display(), patience.as_secs());
    io::Error::new(io::ErrorKind::TimedOut, format!("{what} on {on} has not ended within {secs} s"))
}

/// As sd_booted(3).
fn may_have_systemd() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

/// It may be installed and not run.
async fn test_systemd() -> bool {
    let mut command = Command::new("systemd-run");
    command.args(["--description=Kubernetes systemd probe", "--scope", "true"]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    let status = timeout(SYSTEMD_TEST_TIMEOUT, command.status()).await;
    status.is_ok_and(|status| status.is_ok_and(|status| status.success()))
}

/// Waits for the end of a program. Once its caller has left it is killed, if it may be.
async fn watch(mut child: Child, abandoned: oneshot::Receiver<()>, when_late: WhenLate) -> io::Result<ProgramOutput> {
    let group = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let ended = {
        let read = async { tokio::join!(read(out, &mut stdout), read(err, &mut stderr)) };
        let end = async {
            tokio::select! {
                biased;
                // Cancel-safe: the status stays with the child.
                status = child.wait() => return status,
                _ = abandoned => {}
            }
            // It has not been waited for, so its number is still its own.
            if let (WhenLate::Kill, Some(group)) = (when_late, group) {
                let _ = kill_process_group(group, Signal::KILL);
            }
            child.wait().await
        };
        tokio::pin!(read);
        tokio::pin!(end);
        tokio::select! {
            biased;
            // What was read so far is in the buffers.
            status = &mut end => {
                let _ = timeout(DRAIN_TIMEOUT, &mut read).await;
                status
            }
            _ = &mut read => end.await,
        }
    };
    Ok(ProgramOutput { status: Ended::from(ended?), stdout: text(&stdout), stderr: text(&stderr) })
}

impl From<ExitStatus> for Ended {
    fn from(status: ExitStatus) -> Self {
        match status.code() {
            Some(code) => Ended::Exit(code),
            None => Ended::Signal(std::os::unix::process::ExitStatusExt::signal(&status).unwrap_or_default()),
        }
    }
}

async fn read(pipe: Option<impl AsyncRead + Unpin>, to: &mut Vec<u8>) {
    let Some(mut pipe) = pipe else { return };
    let mut piece = vec![0; 4096];
    while let Ok(length @ 1..) = pipe.read(&mut piece).await {
        let room = MAX_OUTPUT_BYTES.saturating_sub(to.len());
        to.extend_from_slice(&piece[..length.min(room)]);
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    fn sh(script: &str, on: &str, timeout: Duration) -> Program {
        let args = vec!["-c".to_owned(), script.to_owned()];
        Program { timeout, ..Program::new("sh", args, Path::new(on)) }
    }

    const LONG: Duration = Duration::from_secs(30);

    #[tokio::test]
    async fn exit_and_output_are_returned_up_to_a_bound() {
        let programs = Programs::default();
        let output = programs.run(&sh("echo out; echo err >&2; exit 2", "/dev/a", LONG)).await.unwrap();
        let (out, err) = ("out\n".to_owned(), "err\n".to_owned());
        assert_eq!(output, ProgramOutput { status: Ended::Exit(2), stdout: out, stderr: err });
        let much = programs.run(&sh("head -c 1000000 /dev/zero", "/dev/a", LONG)).await.unwrap();
        assert_eq!((much.status, much.stdout.len()), (Ended::Exit(0), MAX_OUTPUT_BYTES));
        let killed = programs.run(&sh("kill -9 $$", "/dev/a", LONG)).await.unwrap();
        assert_eq!(killed.status, Ended::Signal(9));
        let missing = programs.run(&Program::new("no-such-program", Vec::new(), Path::new("/"))).await.unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }

    #[tokio::test]
    async fn late_program_is_killed_with_its_helpers() {
        let dir = tempfile::tempdir().unwrap();
        let (programs, mark) = (Programs::default(), dir.path().join("mark"));
        let script = format!("(sleep 1; touch {}) & sleep 60", mark.display());
        let late = programs.run(&sh(&script, "/dev/a", Duration::from_millis(100))).await.unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        tokio::time::sleep(Duration::from_millis(1500)).await;
        assert!(!mark.exists());
        programs.run(&sh("true", "/dev/a", LONG)).await.unwrap();
    }

    #[tokio::test]
    async fn path_is_busy_until_its_program_has_ended() {
        let programs = Programs::default();
        let slow = Program { when_late: WhenLate::LeaveRunning, ..sh("sleep 1", "/dev/a", Duration::from_millis(50)) };
        assert_eq!(programs.run(&slow).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        let refused = programs.run(&sh("true", "/dev/a", LONG)).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ResourceBusy);
        programs.run(&sh("true", "/dev/b", LONG)).await.unwrap();
        while programs.run(&sh("true", "/dev/a", LONG)).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    #[tokio::test]
    async fn daemon_left_behind_does_not_hold_up_the_result() {
        let (programs, began) = (Programs::default(), Instant::now());
        let output = programs.run(&sh("sleep 5 & echo done", "/dev/a", LONG)).await.unwrap();
        assert_eq!(output.stdout, "done\n");
        assert!(began.elapsed() < Duration::from_secs(4));
    }
}
