//! What systemd is told: the agent is ready, alive, stopping.
//!
//! Owns: the datagrams to `NOTIFY_SOCKET` and the watchdog's interval. Never: waits for systemd; decides whether the loop turns.
//! Upstream: `daemon.SdNotify` and `pkg/kubelet/watchdog`. The protocol is sd_notify(3).

use std::{
    env,
    ffi::OsStr,
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            ffi::OsStrExt as _,
            net::{SocketAddr, UnixDatagram},
        },
    },
    sync::Arc,
    time::Duration,
};

use tokio::time::{MissedTickBehavior, interval};

use crate::{server::health::LoopHealth, world::Clock};

/// The connection to systemd, if it started the agent as `Type=notify` or with a watchdog.
#[derive(Debug)]
pub(crate) struct Notifier {
    socket: UnixDatagram,
    address: SocketAddr,
    /// Half of what systemd waits for.
    ping_every: Option<Duration>,
}

impl Notifier {
    pub(crate) fn from_environment() -> Option<Notifier> {
        let socket = env::var_os("NOTIFY_SOCKET")?;
        let ping_every = ping_every(
            env::var("WATCHDOG_USEC").ok().as_deref(),
            env::var("WATCHDOG_PID").ok().as_deref(),
            std::process::id(),
        );
        Notifier::new(&socket, ping_every).inspect_err(|error| tracing::warn!(%error, "cannot notify systemd")).ok()
    }

    fn new(socket: &OsStr, ping_every: Option<Duration>) -> std::io::Result<Notifier> {
        let address = match socket.as_bytes().strip_prefix(b"@") {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None => SocketAddr::from_pathname(socket)?,
        };
        let socket = UnixDatagram::unbound()?;
        // A full queue of systemd must not hold up the loop.
        socket.set_nonblocking(true)?;
        Ok(Notifier { socket, address, ping_every })
    }

    pub(crate) fn ready(&self) {
        self.send("READY=1");
    }

    pub(crate) fn stopping(&self) {
        self.send("STOPPING=1");
    }

    /// Pings while the sync loop turns, by the judgement of `/healthz`; without a watchdog it waits for ever. A loop that is stuck in a turn
    /// stops this task, too: they share a thread.
    pub(crate) async fn watch(&self, health: Arc<LoopHealth>, clock: Clock) {
        let Some(every) = self.ping_every else { return std::future::pending().await };
        let mut ticks = interval(every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            match health.check(clock.now().uptime) {
                Ok(()) => self.send("WATCHDOG=1"),
                Err(reason) => tracing::error!(reason, "no ping for the watchdog of systemd"),
            }
        }
    }

    fn send(&self, state: &str) {
        if let Err(error) = self.socket.send_to_addr(state.as_bytes(), &self.address) {
            tracing::warn!(state, %error, "cannot notify systemd");
        }
    }
}

fn ping_every(usec: Option<&str>, pid: Option<&str>, own_pid: u32) -> Option<Duration> {
    let is_meant = pid.is_none_or(|pid| pid.parse() == Ok(own_pid));
    let usec: u64 = usec?.parse().ok()?;
    (is_meant && usec > 1).then(|| Duration::from_micros(usec / 2))
}

#[cfg(test)]
mod tests {
    use rubelet_core::time::Uptime;

    use super::*;

    fn received(socket: &UnixDatagram) -> Vec<String> {
        let mut states = Vec::new();
        let mut bytes = [0; 64];
        while let Ok(length) = socket.recv(&mut bytes) {
            states.push(String::from_utf8(bytes[..length].to_vec()).unwrap());
        }
        states
    }

    #[tokio::test(start_paused = true)]
    async fn watchdog_is_pinged_only_while_the_loop_turns() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let systemd = UnixDatagram::bind(&path).unwrap();
        systemd.set_nonblocking(true).unwrap();
        let notifier = Notifier::new(path.as_os_str(), Some(Duration::from_secs(10))).unwrap();
        notifier.ready();
        let clock = Clock::simulated("2026-11-15T19:00:00Z".parse().unwrap(), Arc::default());
        let health = Arc::new(LoopHealth::new(Duration::from_secs(60)));
        health.turned(Uptime::from_secs(0));
        let watch = notifier.watch(health, clock);
        let _ = tokio::time::timeout(Duration::from_secs(25), watch).await;
        assert_eq!(received(&systemd), ["READY=1", "WATCHDOG=1", "WATCHDOG=1", "WATCHDOG=1"]);

        let clock = Clock::simulated("2026-11-15T19:00:00Z".parse().unwrap(), Arc::default());
        let stuck = Arc::new(LoopHealth::new(Duration::from_secs(60)));
        stuck.turned(Uptime::from_secs(0));
        tokio::time::advance(Duration::from_secs(400)).await;
        let _ = tokio::time::timeout(Duration::from_secs(25), notifier.watch(stuck, clock)).await;
        notifier.stopping();
        assert_eq!(received(&systemd), ["STOPPING=1"]);
        drop(systemd);
        notifier.stopping();
    }

    #[test]
    fn watchdog_of_another_process_is_not_ours() {
        let half = Some(Duration::from_secs(15));
        assert_eq!(ping_every(Some("30000000"), None, 7), half);
        assert_eq!(ping_every(Some("30000000"), Some("7"), 7), half);
        assert_eq!(ping_every(Some("30000000"), Some("8"), 7), None);
        assert_eq!(ping_every(Some("0"), Some("7"), 7), None);
        assert_eq!(ping_every(Some("soon"), None, 7), None);
        assert_eq!(ping_every(None, None, 7), None);
    }
}
