//! Logind on the system bus: delays a shutdown, and reports that one begins.
//!
//! Owns: the inhibitor, the signal, logind's longest delay. Never: decides what happens in a shutdown.
//! Upstream: `pkg/kubelet/nodeshutdown/systemd/inhibit_linux.go`.

use std::{fs, io, os::fd::OwnedFd, path::Path, time::Duration};

use futures_util::StreamExt as _;
use tokio::time::{sleep, timeout};
use zbus::{Connection, DynamicType, MatchRule, Message, MessageStream, OwnedVariant};

#[cfg(any(test, feature = "testing"))]
pub mod fake;

/// Where systemd reads drop-ins of logind's configuration.
pub const CONF_DIR: &str = "/etc/systemd/logind.conf.d";
const CONF_FILE: &str = "99-kubelet.conf";

/// Where the system bus is, unless the environment says otherwise.
const SYSTEM_BUS: &str = "unix:path=/run/dbus/system_bus_socket";

/// The deadline of each call.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Logind reads its configuration some time after it was told to: how often it is asked for the new delay.
const RELOAD_CHECKS: u32 = 5;
/// The wait before the second of these checks; it doubles.
const RELOAD_WAIT: Duration = Duration::from_millis(100);

const LOGIND: Peer = Peer {
    name: "org.freedesktop.login1",
    path: "/org/freedesktop/login1",
    interface: "org.freedesktop.login1.Manager",
};
const SYSTEMD: Peer = Peer {
    name: "org.freedesktop.systemd1",
    path: "/org/freedesktop/systemd1",
    interface: "org.freedesktop.systemd1.Manager",
};

struct Peer {
    name: &'static str,
    path: &'static str,
    interface: &'static str,
}

/// The address of the system bus.
pub fn system_bus() -> String {
    std::env::var("DBUS_SYSTEM_BUS_ADDRESS").unwrap_or_else(|_| SYSTEM_BUS.to_owned())
}

/// While it is held, logind delays a shutdown.
#[derive(Debug)]
pub struct Inhibitor {
    _fd: OwnedFd,
}

/// A connection to logind that sees every signal since it was made.
#[derive(Debug)]
pub struct Logind {
    connection: Connection,
    signals: MessageStream,
}

impl Logind {
    pub async fn connect(bus: &str) -> io::Result<Self> {
        let connect = async {
            let connection = zbus::connection::Builder::address(bus).build().await?;
            // Of any sender: upstream's end-to-end tests send the signal themselves.
            let rule = MatchRule::builder()
                .msg_type(zbus::message::Type::Signal)
                .path(LOGIND.path)
                .interface(LOGIND.interface)
                .member("PrepareForShutdown")
                .build()?;
            let signals = MessageStream::for_match_rule(rule, &connection, None).await?;
            Ok(Logind { connection, signals })
        };
        within_deadline(connect).await.map_err(|error| named("connect to the system bus", &error))
    }

    /// The longest time for which logind delays a shutdown.
    pub async fn inhibit_delay(&self) -> io::Result<Duration> {
        let micros: u64 = self.property("InhibitDelayMaxUSec").await?;
        Ok(Duration::from_micros(micros))
    }

    /// A shutdown has begun and was not cancelled.
    pub async fn is_preparing_for_shutdown(&self) -> io::Result<bool> {
        self.property("PreparingForShutdown").await
    }

    pub async fn inhibit(&self) -> io::Result<Inhibitor> {
        let arguments = ("shutdown", "kubelet", "Kubelet needs time to handle node shutdown", "delay");
        let reply = self.call(&LOGIND, LOGIND.interface, "Inhibit", &arguments).await?;
        let fd: zbus::OwnedFd = reply.body().deserialize().map_err(|error| named("Inhibit", &error))?;
        Ok(Inhibitor { _fd: fd.into() })
    }

    /// Makes logind wait for the inhibitor at least this long; its own configuration stays if that is enough.
    pub async fn ensure_delay(&self, wanted: Duration, conf_dir: &Path) -> io::Result<()> {
        if self.inhibit_delay().await? >= wanted {
            return Ok(());
        }
        write_override(wanted, conf_dir)?;
        const SIGHUP: i32 = 1;
        self.call(&SYSTEMD, SYSTEMD.interface, "KillUnit", &("systemd-logind.service", "all", SIGHUP)).await?;
        let mut wait = RELOAD_WAIT;
        for check in 1..=RELOAD_CHECKS {
            let delay = self.inhibit_delay().await?;
            if delay >= wanted {
                return Ok(());
            }
            if check < RELOAD_CHECKS {
                sleep(wait).await;
                wait = wait.saturating_mul(2);
            }
        }
        let message = format!("logind did not take over InhibitDelayMaxSec={} of {CONF_FILE}", wanted.as_secs());
        Err(io::Error::new(io::ErrorKind::TimedOut, message))
    }

    /// Whether a shutdown begins or is cancelled; `None` when the connection has ended. Cancel-safe.
    pub async fn next_signal(&mut self) -> Option<bool> {
        loop {
            let message = self.signals.next().await?.ok()?;
            if let Ok(begins) = message.body().deserialize::<bool>() {
                return Some(begins);
            }
        }
    }

    async fn property<T>(&self, name: &str) -> io::Result<T>
    where
        T: TryFrom<OwnedVariant>,
        T::Error: std::fmt::Display,
    {
        let reply = self.call(&LOGIND, "org.freedesktop.DBus.Properties", "Get", &(LOGIND.interface, name)).await?;
        let value: OwnedVariant = reply.body().deserialize().map_err(|error| named(name, &error))?;
        T::try_from(value).map_err(|error| named(name, &error))
    }

    async fn call(
        &self,
        peer: &Peer,
        interface: &str,
        method: &str,
        arguments: &(impl serde::Serialize + DynamicType),
    ) -> io::Result<Message> {
        let call = self.connection.call_method(Some(peer.name), peer.path, Some(interface), method, arguments);
        within_deadline(call).await.map_err(|error| named(&format!("{} of {}", method, peer.name), &error))
    }
}

async fn within_deadline<T>(call: impl Future<Output = zbus::Result<T>>) -> io::Result<T> {
    timeout(CALL_TIMEOUT, call).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?.map_err(io::Error::other)
}

/// Upstream's file, so that either agent replaces the other's.
fn write_override(delay: Duration, conf_dir: &Path) -> io::Result<()> {
    let path = conf_dir.join(CONF_FILE);
    let secs = delay.as_secs();
    let text = format!("# Kubelet logind override\n[Login]\nInhibitDelayMaxSec={secs}\n");
    let write = || {
        fs::create_dir_all(conf_dir)?;
        fs::write(&path, text)
    };
    write().map_err(|error| named(&format!("write {}", path.display()), &error))
}

fn named(what: &str, error: &impl std::fmt::Display) -> io::Error {
    io::Error::other(format!("{what}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::{fake::FakeLogind, *};

    async fn connected(fake: &FakeLogind) -> Logind {
        Logind::connect(&fake.address()).await.unwrap()
    }

    async fn next(logind: &mut Logind) -> Option<bool> {
        timeout(Duration::from_secs(10), logind.next_signal()).await.expect("a signal")
    }

    #[tokio::test]
    async fn inhibitor_is_held_until_it_is_dropped() {
        let Some(fake) = FakeLogind::start(Duration::from_secs(5)).await else { return };
        let logind = connected(&fake).await;
        let inhibitor = logind.inhibit().await.unwrap();
        assert_eq!(fake.inhibitors(), ["shutdown kubelet delay: Kubelet needs time to handle node shutdown"]);
        drop(inhibitor);
        fake.until(|fake| fake.inhibitors().is_empty()).await;
    }

    #[tokio::test]
    async fn signals_of_any_sender_count() {
        let Some(fake) = FakeLogind::start(Duration::from_secs(5)).await else { return };
        let mut logind = connected(&fake).await;
        assert!(!logind.is_preparing_for_shutdown().await.unwrap());
        fake.begin_shutdown().await;
        assert_eq!(next(&mut logind).await, Some(true));
        assert!(logind.is_preparing_for_shutdown().await.unwrap());
        fake.emit_as_a_stranger(false).await;
        assert_eq!(next(&mut logind).await, Some(false));
    }

    #[tokio::test]
    async fn a_delay_that_is_too_short_is_overridden_once() {
        let Some(fake) = FakeLogind::start(Duration::from_secs(5)).await else { return };
        let logind = connected(&fake).await;
        logind.ensure_delay(Duration::from_secs(5), fake.conf_dir()).await.unwrap();
        assert_eq!((fake.override_text(), fake.reloads()), (None, 0));
        logind.ensure_delay(Duration::from_secs(30), fake.conf_dir()).await.unwrap();
        let text = "# Kubelet logind override\n[Login]\nInhibitDelayMaxSec=30\n";
        assert_eq!((fake.override_text().as_deref(), fake.reloads()), (Some(text), 1));
        assert_eq!(logind.inhibit_delay().await.unwrap(), Duration::from_secs(30));
        logind.ensure_delay(Duration::from_secs(20), fake.conf_dir()).await.unwrap();
        assert_eq!(fake.reloads(), 1);
    }

    #[tokio::test]
    async fn lost_connection_ends_the_signals_and_refuses_calls() {
        let Some(fake) = FakeLogind::start(Duration::from_secs(5)).await else { return };
        let mut logind = connected(&fake).await;
        fake.stop_bus();
        assert_eq!(next(&mut logind).await, None);
        assert!(logind.inhibit().await.is_err());
        assert!(Logind::connect(&fake.address()).await.is_err());
    }
}
