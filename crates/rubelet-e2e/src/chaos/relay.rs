//! A TCP relay between the agent and the API server: it can be slow, reset connections, or lead elsewhere.
//!
//! Owns: the connections and their threads. TLS passes through it untouched.

use std::{
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::Context as _;
use rubelet_testbed::clock::Stopwatch;

use crate::{dice::Dice, e2e::lock};

/// What happens to connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    Direct,
    /// Each piece of data waits this long, in both directions.
    Slow(Duration),
    /// Each connection is reset after a random time up to this one.
    Resets(Duration),
    /// To another server of this machine.
    To(u16),
}

/// How often a connection that is silent checks whether it should end.
const CHECK_EVERY: Duration = Duration::from_millis(100);

#[derive(Debug)]
struct State {
    path: Path,
    /// Changes with the path: connections of an older one are cut.
    generation: u64,
    dice: Dice,
    is_over: bool,
}

#[derive(Debug)]
pub struct Relay {
    port: u16,
    state: Arc<Mutex<State>>,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Relay {
    /// `server` is a URL with a port of this machine.
    pub fn start(server: &str, seed: u64) -> anyhow::Result<Self> {
        let server = port_of(server)?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        let state = State { path: Path::Direct, generation: 0, dice: Dice::seeded(seed), is_over: false };
        let state = Arc::new(Mutex::new(state));
        let is_over = Arc::new(AtomicBool::new(false));
        let (shared, over) = (Arc::clone(&state), Arc::clone(&is_over));
        let thread = thread::spawn(move || {
            for client in listener.incoming() {
                if over.load(Ordering::Relaxed) {
                    return;
                }
                let shared = Arc::clone(&shared);
                if let Ok(client) = client {
                    // An error ends the connection, which its client notices.
                    thread::spawn(move || connect(client, server, &shared));
                }
            }
        });
        Ok(Relay { port, state, is_over, thread: Some(thread) })
    }

    pub fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// Cuts all connections.
    pub fn lead(&self, path: Path) {
        let mut state = lock(&self.state);
        state.path = path;
        state.generation += 1;
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        lock(&self.state).is_over = true;
        // Wakes the listener.
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

pub fn port_of(url: &str) -> anyhow::Result<u16> {
    let port = url.trim_end_matches('/').rsplit(':').next().and_then(|port| port.parse().ok());
    port.with_context(|| format!("{url} has no port"))
}

/// One connection, as long as it may live.
#[derive(Clone, Debug)]
struct Passage {
    state: Arc<Mutex<State>>,
    generation: u64,
    path: Path,
    since: Stopwatch,
    life: Option<Duration>,
}

impl Passage {
    fn is_cut(&self) -> bool {
        let state = lock(&self.state);
        let is_old = state.generation != self.generation || state.is_over;
        is_old || self.life.is_some_and(|life| self.since.elapsed() >= life)
    }
}

fn connect(client: TcpStream, server: u16, state: &Arc<Mutex<State>>) -> io::Result<()> {
    let passage = {
        let mut state_now = lock(state);
        let path = state_now.path;
        let life = match path {
            Path::Resets(most) => Some(most * u32::try_from(state_now.dice.below(1000)).unwrap_or_default() / 1000),
            Path::Direct | Path::Slow(_) | Path::To(_) => None,
        };
        Passage { state: Arc::clone(state), generation: state_now.generation, path, since: Stopwatch::start(), life }
    };
    let port = if let Path::To(port) = passage.path { port } else { server };
    let server = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    for side in [&client, &server] {
        side.set_nodelay(true)?;
        side.set_read_timeout(Some(CHECK_EVERY))?;
    }
    let (up, down) = (passage.clone(), passage);
    let (client_too, server_too) = (client.try_clone()?, server.try_clone()?);
    let back = thread::spawn(move || copy(server_too, client_too, &down));
    copy(client, server, &up);
    // Both directions end together.
    let _ = back.join();
    Ok(())
}

/// Until one side ends or the connection is cut.
fn copy(mut from: TcpStream, mut to: TcpStream, passage: &Passage) {
    let mut piece = vec![0; 1 << 16];
    loop {
        if passage.is_cut() {
            reset(&from);
            reset(&to);
            return;
        }
        match from.read(&mut piece) {
            Ok(0) => break,
            Ok(length) => {
                if let Path::Slow(delay) = passage.path {
                    thread::sleep(delay);
                }
                if to.write_all(&piece[..length]).is_err() {
                    break;
                }
            }
            Err(err) if matches!(err.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
            Err(_) => break,
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Both);
    let _ = from.shutdown(std::net::Shutdown::Both);
}

/// Closing then sends a reset, not an orderly end.
fn reset(side: &TcpStream) {
    let _ = rustix::net::sockopt::set_socket_linger(side, Some(Duration::ZERO));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn echo() -> u16 {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            let mut byte = [0; 1];
            while socket.read(&mut byte).is_ok_and(|length| length == 1) {
                socket.write_all(&byte).unwrap();
            }
        });
        port
    }

    fn ask(socket: &mut TcpStream) -> io::Result<[u8; 1]> {
        let mut byte = [0; 1];
        socket.write_all(b"a")?;
        socket.read_exact(&mut byte)?;
        Ok(byte)
    }

    #[test]
    fn connection_passes_until_the_path_changes() {
        let relay = Relay::start(&format!("https://127.0.0.1:{}", echo()), 1).unwrap();
        let mut socket = TcpStream::connect((Ipv4Addr::LOCALHOST, relay.port)).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        assert_eq!(ask(&mut socket).unwrap(), *b"a");
        relay.lead(Path::Resets(Duration::ZERO));
        let mut byte = [0; 1];
        let kind = socket.read(&mut byte).unwrap_err().kind();
        assert_eq!(kind, io::ErrorKind::ConnectionReset);
    }
}
