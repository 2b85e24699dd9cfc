//! A logind for tests, on a bus of its own: a `dbus-daemon` in a temporary directory.
//!
//! Owns: the bus, the names of logind and systemd on it, the inhibitors handed out. Never: used by the agent.

use std::{
    fs, io,
    io::Read as _,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use futures_util::StreamExt as _;
use tokio::{task::JoinHandle, time::sleep};
use zbus::{Connection, Message, MessageStream, OwnedVariant, Variant, message::Type};

use super::{CONF_FILE, LOGIND, SYSTEMD};

/// Stopped and removed when it is dropped.
#[derive(Debug)]
pub struct FakeLogind {
    dir: PathBuf,
    conf_dir: PathBuf,
    bus: Mutex<Child>,
    connection: Connection,
    state: Arc<Mutex<State>>,
    service: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct State {
    delay: Duration,
    is_preparing: bool,
    reloads: u32,
    /// Of whom and for what, and the reading end of its pipe, which ends when the holder closes the other.
    inhibitors: Vec<(String, io::PipeReader)>,
    conf_file: PathBuf,
}

impl FakeLogind {
    /// With this longest delay. Must be called inside of a tokio runtime. `None`, said on standard error: there is no
    /// `dbus-daemon`, and the test is left out; `cargo xtask test` installs it.
    pub async fn start(delay: Duration) -> Option<Self> {
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("fake-logind-{}-{number}", std::process::id()));
        let conf_dir = dir.join("conf");
        fs::create_dir_all(&dir).expect("a directory for the bus");
        let Some(bus) = start_bus(&dir) else {
            eprintln!("LEFT OUT: this test needs dbus-daemon, of the Debian package dbus");
            let _ = fs::remove_dir_all(&dir);
            return None;
        };
        let bus = Mutex::new(bus);
        let state = State { delay, conf_file: conf_dir.join(CONF_FILE), ..State::default() };
        let state = Arc::new(Mutex::new(state));
        let (connection, service) = on_bus(&dir, &state).await;
        Some(FakeLogind { dir, conf_dir, bus, connection, state, service })
    }

    pub fn address(&self) -> String {
        address(&self.dir)
    }

    pub fn conf_dir(&self) -> &Path {
        &self.conf_dir
    }

    /// The drop-in of the agent.
    pub fn override_text(&self) -> Option<String> {
        fs::read_to_string(&self.state().conf_file).ok()
    }

    /// How often logind was told to read its configuration.
    pub fn reloads(&self) -> u32 {
        self.state().reloads
    }

    /// Those still held: what, who, how and why.
    pub fn inhibitors(&self) -> Vec<String> {
        let mut state = self.state();
        state.inhibitors.retain_mut(|(_, pipe)| is_open(pipe));
        state.inhibitors.iter().map(|(text, _)| text.clone()).collect()
    }

    /// As `shutdown` or `reboot` do.
    pub async fn begin_shutdown(&self) {
        self.state().is_preparing = true;
        emit(&self.connection, true).await;
    }

    pub async fn cancel_shutdown(&self) {
        self.state().is_preparing = false;
        emit(&self.connection, false).await;
    }

    /// As upstream's end-to-end tests do.
    pub async fn emit_as_a_stranger(&self, begins: bool) {
        emit(&connect(&self.dir).await, begins).await;
    }

    /// Every connection is lost, and no new one is possible.
    pub fn stop_bus(&self) {
        let mut bus = self.bus.lock().expect("no test panics with it");
        let _ = bus.kill();
        let _ = bus.wait();
        let _ = fs::remove_file(self.dir.join("bus"));
    }

    /// Every connection is lost; the new bus has a logind that prepares for a shutdown, or not.
    pub async fn restart_bus(&mut self, is_preparing: bool) {
        self.service.abort();
        self.stop_bus();
        *self.bus.lock().expect("no test panics with it") = start_bus(&self.dir).expect("it started before");
        self.state().is_preparing = is_preparing;
        (self.connection, self.service) = on_bus(&self.dir, &self.state).await;
    }

    /// Waits for what other tasks cause, ten seconds at most.
    pub async fn until(&self, holds: impl Fn(&Self) -> bool) {
        for _ in 0..1000 {
            if holds(self) {
                return;
            }
            sleep(Duration::from_millis(10)).await;
        }
        panic!("it did not happen within ten seconds: {self:?}");
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no test panics with it")
    }
}

impl Drop for FakeLogind {
    fn drop(&mut self) {
        self.service.abort();
        self.stop_bus();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Serves under the names of logind and systemd.
async fn on_bus(dir: &Path, state: &Arc<Mutex<State>>) -> (Connection, JoinHandle<()>) {
    let connection = connect(dir).await;
    let service = tokio::spawn(serve(connection.clone(), state.clone()));
    for name in [LOGIND.name, SYSTEMD.name] {
        connection.request_name(name).await.expect("the name is free");
    }
    (connection, service)
}

fn address(dir: &Path) -> String {
    format!("unix:path={}", dir.join("bus").display())
}

async fn connect(dir: &Path) -> Connection {
    let builder = zbus::connection::Builder::address(address(dir).as_str());
    builder.build().await.expect("the bus accepts connections")
}

/// Whoever connects may own every name and send everything. `None`: there is no `dbus-daemon`.
fn start_bus(dir: &Path) -> Option<Child> {
    let config = format!(
        "<busconfig><type>custom</type><listen>{}</listen><auth>EXTERNAL</auth><policy context=\"default\">\
         <allow send_destination=\"*\" eavesdrop=\"true\"/><allow eavesdrop=\"true\"/><allow own=\"*\"/>\
         </policy></busconfig>",
        address(dir)
    );
    fs::write(dir.join("bus.conf"), config).expect("its configuration");
    let started = Command::new("dbus-daemon")
        .arg(format!("--config-file={}", dir.join("bus.conf").display()))
        .args(["--nofork", "--print-address"])
        .stdout(Stdio::piped())
        .spawn();
    let mut bus = match started {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        started => started.expect("dbus-daemon starts"),
    };
    // It prints its address when it accepts connections.
    let mut first = [0];
    bus.stdout.as_mut().expect("it is piped").read_exact(&mut first).expect("its address");
    Some(bus)
}

async fn emit(connection: &Connection, begins: bool) {
    let destination = None::<&str>;
    let sent = connection.emit_signal(destination, LOGIND.path, LOGIND.interface, "PrepareForShutdown", &begins);
    sent.await.expect("the bus takes it");
}

/// Whether the other end is held by somebody.
fn is_open(pipe: &mut io::PipeReader) -> bool {
    let mut byte = [0];
    rustix::io::read(&*pipe, &mut byte) == Err(rustix::io::Errno::AGAIN)
}

async fn serve(connection: Connection, state: Arc<Mutex<State>>) {
    let mut messages = MessageStream::from(&connection);
    while let Some(Ok(message)) = messages.next().await {
        if message.message_type() == Type::MethodCall {
            let reply = reply(&message, &mut state.lock().expect("no test panics with it"));
            if connection.send(&reply).await.is_err() {
                return;
            }
        }
    }
}

fn reply(call: &Message, state: &mut State) -> Message {
    let header = call.header();
    let answer = Message::method_return(&header);
    let body = call.body();
    let built = match header.member().map(|member| member.as_str()) {
        Some("Get") => {
            let (_, name): (&str, &str) = body.deserialize().expect("an interface and a name");
            let value = match name {
                "InhibitDelayMaxUSec" => Variant::from(u64::try_from(state.delay.as_micros()).unwrap_or(u64::MAX)),
                "PreparingForShutdown" => Variant::from(state.is_preparing),
                other => panic!("the agent reads {other}"),
            };
            answer.build(&OwnedVariant::try_from(value).expect("it holds no descriptor"))
        }
        Some("Inhibit") => {
            let (what, who, why, mode): (&str, &str, &str, &str) = body.deserialize().expect("four texts");
            let (reader, writer) = io::pipe().expect("a pipe");
            rustix::io::ioctl_fionbio(&reader, true).expect("a pipe can be non-blocking");
            state.inhibitors.push((format!("{what} {who} {mode}: {why}"), reader));
            answer.build(&zbus::OwnedFd::from(OwnedFd::from(writer)))
        }
        Some("KillUnit") => {
            let arguments: (&str, &str, i32) = body.deserialize().expect("a unit and a signal");
            assert_eq!(arguments, ("systemd-logind.service", "all", 1));
            state.reloads = state.reloads.saturating_add(1);
            let text = fs::read_to_string(&state.conf_file).unwrap_or_default();
            let secs = text.lines().find_map(|line| line.strip_prefix("InhibitDelayMaxSec=")?.parse().ok());
            state.delay = secs.map_or(state.delay, Duration::from_secs);
            answer.build(&())
        }
        other => Message::error(&header, "org.freedesktop.DBus.Error.UnknownMethod").build(&format!("{other:?}")),
    };
    built.expect("a reply")
}
