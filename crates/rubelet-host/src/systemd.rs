//! Systemd slices: with the systemd driver, systemd creates and stops them.
//!
//! Owns: the calls to systemd, and waiting for their jobs. Never: writes a cgroup's files, decides a limit.
//! Upstream: `systemd` of `github.com/opencontainers/cgroups`, over `go-systemd`.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    time::Duration,
};

use self::wire::{Body, Connection, Reply};

mod wire;

/// Systemd's private socket, for root alone: it needs no bus, and reports every finished job without a subscription.
const SOCKET: &str = "/run/systemd/private";
/// Upstream's timeout of a job.
const ANSWER: Duration = Duration::from_secs(30);

/// A property of a unit, by systemd's name.
pub(crate) type Property<'a> = (&'static str, Value<'a>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Value<'a> {
    Flag(bool),
    Number(u64),
    Text(&'a str),
    /// A list with one entry.
    Name(&'a str),
}

#[derive(Debug)]
pub(crate) struct Systemd<S>(Connection<S>);

impl Systemd<UnixStream> {
    pub(crate) fn connect() -> io::Result<Self> {
        let connect = || {
            let stream = UnixStream::connect(SOCKET)?;
            stream.set_read_timeout(Some(ANSWER))?;
            stream.set_write_timeout(Some(ANSWER))?;
            Systemd::over(stream)
        };
        connect().map_err(|error| io::Error::new(error.kind(), format!("systemd at {SOCKET}: {error}")))
    }
}

impl<S: Read + Write> Systemd<S> {
    /// Authenticates on a connected stream.
    pub(crate) fn over(stream: S) -> io::Result<Self> {
        Connection::new(stream).map(Systemd)
    }

    /// Creates the slice with these limits, or sets them on an existing one.
    pub(crate) fn start_slice(&mut self, name: &str, limits: &[Property<'_>]) -> io::Result<()> {
        let parent = parent(name);
        let mut properties = vec![("Description", Value::Text(name)), ("Wants", Value::Name(&parent))];
        let accounting = ["MemoryAccounting", "CPUAccounting", "IOAccounting", "TasksAccounting"];
        properties.extend(accounting.map(|controller| (controller, Value::Flag(true))));
        properties.push(("DefaultDependencies", Value::Flag(false)));
        properties.extend(limits);
        let arguments = Body::default().text(name).text("replace").properties(&properties).empty_structs();
        match self.0.call("StartTransientUnit", "ssa(sv)a(sa(sv))", &arguments)? {
            Reply::Error { name: error, .. } if error == "org.freedesktop.systemd1.UnitExists" => {
                self.set(name, limits)
            }
            reply => self.finish("start", name, reply),
        }
    }

    /// A missing slice is no error.
    pub(crate) fn stop(&mut self, name: &str) -> io::Result<()> {
        match self.0.call("StopUnit", "ss", &Body::default().text(name).text("replace"))? {
            Reply::Error { name: error, .. } if error == "org.freedesktop.systemd1.NoSuchUnit" => Ok(()),
            reply => self.finish("stop", name, reply),
        }
    }

    fn set(&mut self, name: &str, properties: &[Property<'_>]) -> io::Result<()> {
        // Until the next boot.
        let arguments = Body::default().text(name).flag(true).properties(properties);
        match self.0.call("SetUnitProperties", "sba(sv)", &arguments)? {
            Reply::Return(_) => Ok(()),
            Reply::Error { text, .. } => Err(failed("change", name, &text)),
        }
    }

    /// The reply names a job; the unit has the requested state when the job ends.
    fn finish(&mut self, what: &str, name: &str, reply: Reply) -> io::Result<()> {
        let job = match reply {
            Reply::Return(job) => job,
            Reply::Error { text, .. } => return Err(failed(what, name, &text)),
        };
        match self.0.job_result(&job)?.as_str() {
            "done" => Ok(()),
            result => Err(failed(what, name, result)),
        }
    }
}

/// `a-b.slice` is in `a.slice`, and that in the root slice.
fn parent(slice: &str) -> String {
    match slice.rsplit_once('-') {
        Some((parent, _)) => format!("{parent}.slice"),
        None => "-.slice".to_owned(),
    }
}

fn failed(what: &str, name: &str, why: &str) -> io::Error {
    io::Error::other(format!("systemd does not {what} {name}: {why}"))
}

#[cfg(test)]
mod tests;
