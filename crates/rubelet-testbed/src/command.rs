//! Runs other programs, always with a timeout.
//!
//! Owns: output capture, deadlines, error texts that name the command. Never: a shell string.

use std::{
    ffi::OsStr,
    io::Read,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context as _, bail};

use crate::clock;

/// Long enough for any small tool, short enough that a hang is noticed.
pub const SHORT: Duration = Duration::from_secs(60);

pub fn command<I, S>(program: impl AsRef<OsStr>, args: I) -> Command
where
    I: IntoIterator<Item = S>,
    S: AsRef<OsStr>,
{
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null());
    command
}

#[derive(Debug)]
pub struct Output {
    pub stdout: String,
    pub stderr: String,
    pub success: bool,
    /// `None` when a signal ended it.
    pub code: Option<i32>,
}

/// Runs to the end and captures both streams. An error only if it cannot be run or times out.
pub fn capture(command: &mut Command, limit: Duration) -> anyhow::Result<Output> {
    let name = describe(command);
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run `{name}`"))?;
    let stdout = read_aside(child.stdout.take().expect("stdout was asked for"));
    let stderr = read_aside(child.stderr.take().expect("stderr was asked for"));
    let status = wait(&mut child, limit).with_context(|| format!("`{name}`"))?;
    let text =
        |reader: thread::JoinHandle<Vec<u8>>| String::from_utf8_lossy(&reader.join().unwrap_or_default()).into_owned();
    Ok(Output { stdout: text(stdout), stderr: text(stderr), success: status.success(), code: status.code() })
}

/// Runs to the end; a failure is an error with the program's output. Returns its standard output.
pub fn output(command: &mut Command, limit: Duration) -> anyhow::Result<String> {
    let out = capture(command, limit)?;
    if !out.success {
        bail!("`{}` failed:\n{}{}", describe(command), out.stdout, out.stderr);
    }
    Ok(out.stdout)
}

/// Runs with our own terminal; a failure is an error.
pub fn show(command: &mut Command, limit: Duration) -> anyhow::Result<()> {
    let name = describe(command);
    let mut child = command.spawn().with_context(|| format!("cannot run `{name}`"))?;
    if !wait(&mut child, limit).with_context(|| format!("`{name}`"))?.success() {
        bail!("`{name}` failed");
    }
    Ok(())
}

pub fn describe(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

pub fn wait(child: &mut Child, limit: Duration) -> anyhow::Result<ExitStatus> {
    let mut failure = None;
    let ended = clock::poll(limit, Duration::from_millis(10), || match child.try_wait() {
        Ok(status) => status,
        Err(err) => {
            failure = Some(err);
            None
        }
    });
    match ended {
        Some(status) => Ok(status),
        None => {
            // Our child still runs: kill and reap it, so that nothing is left.
            let _ = child.kill();
            let _ = child.wait();
            match failure {
                Some(err) => Err(err).context("cannot wait for it"),
                None => bail!("did not end within {} s", limit.as_secs()),
            }
        }
    }
}

fn read_aside(mut stream: impl Read + Send + 'static) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // The output before a read error is kept.
        let _ = stream.read_to_end(&mut bytes);
        bytes
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_failure_names_command_and_output() {
        let err = output(&mut command("ls", ["/no/such/place"]), SHORT).unwrap_err().to_string();
        assert!(err.contains("`ls /no/such/place` failed") && err.contains("No such file"), "{err}");
    }

    #[test]
    fn a_program_that_hangs_is_ended_at_its_limit() {
        let err = capture(&mut command("sleep", ["60"]), Duration::from_millis(50)).unwrap_err();
        assert!(format!("{err:#}").contains("did not end"), "{err:#}");
    }
}
