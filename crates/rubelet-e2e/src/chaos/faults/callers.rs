//! Callers of the agent's port: many that are silent, and some that are hostile, beside one with credentials.

use std::{
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::Context as _;
use rubelet_testbed::clock::Stopwatch;

use super::Injected;
use crate::{
    chaos::{TICK, exam::Exam},
    e2e::{cluster::account, lock, secured_port},
};

const SILENT: usize = 2_048;
const HOSTILE: usize = 200;
/// A hostile caller holds its connection for this long, then comes again.
const HELD: Duration = Duration::from_secs(2);
/// What hostile callers send: no TLS, the begin of a greeting, a greeting that announces more than follows, nothing.
const OPENINGS: [&[u8]; 4] =
    [b"GET / HTTP/1.1\r\nHost: node\r\n\r\n", &[22, 3, 1], &[22, 3, 1, 63, 255, 1, 0, 63, 251, 3, 3], b""];

/// The caller with credentials has an address of its own, as the API server has.
const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 9);

#[derive(Debug, Default)]
struct Latency {
    secs: Vec<f64>,
    failed: usize,
    /// Of the last that failed.
    error: Option<String>,
}

impl Latency {
    fn fails(&mut self, error: String) {
        self.failed += 1;
        self.error = Some(error);
    }
}

#[derive(Debug)]
struct Callers {
    port: SocketAddr,
    token: String,
    silent: Vec<TcpStream>,
    /// The hostile callers, and the one with credentials.
    threads: Vec<JoinHandle<()>>,
    is_over: Arc<AtomicBool>,
    latency: Arc<Mutex<Latency>>,
}

pub fn begin(exam: &mut Exam) -> anyhow::Result<Box<dyn Injected>> {
    let port = exam.cluster.node.agent.connect_secured()?.peer_addr()?;
    let token = account(&exam.cluster, "caller", &["healthz", "proxy"])?;
    secured_port::get(&exam.cluster.node.agent, "/healthz", Some(&token)).context("before other callers")?;
    Ok(Box::new(Callers {
        port,
        token,
        silent: Vec::new(),
        threads: Vec::new(),
        is_over: Arc::new(AtomicBool::new(false)),
        latency: Arc::default(),
    }))
}

impl Callers {
    fn stop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.silent.clear();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Injected for Callers {
    fn strike(&mut self, exam: &mut Exam) -> anyhow::Result<()> {
        let caller = secured_port::Caller::of(&exam.cluster.node.agent)?.calling_from(ELSEWHERE);
        let (token, over, latency) = (self.token.clone(), Arc::clone(&self.is_over), Arc::clone(&self.latency));
        self.threads.push(thread::spawn(move || {
            while !over.load(Ordering::Relaxed) {
                call(&caller, &token, &latency);
                thread::sleep(TICK);
            }
        }));
        for number in 0..HOSTILE {
            let (port, over) = (self.port, Arc::clone(&self.is_over));
            let opening = OPENINGS[number % OPENINGS.len()];
            self.threads.push(thread::spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    annoy(port, opening);
                }
            }));
        }
        // A full queue of the kernel refuses some; the others count.
        let connect = |_| TcpStream::connect_timeout(&self.port, Duration::from_secs(1)).ok();
        self.silent = (0..SILENT).filter_map(connect).collect();
        Ok(())
    }

    fn end(&mut self, _exam: &mut Exam) -> anyhow::Result<()> {
        self.stop();
        Ok(())
    }

    fn note(&self) -> String {
        let mut latency = lock(&self.latency);
        latency.secs.sort_by(f64::total_cmp);
        let ms = |secs: Option<&f64>| secs.map_or("none".to_owned(), |secs| format!("{:.0} ms", secs * 1000.0));
        let (median, max) = (latency.secs.get(latency.secs.len() / 2), latency.secs.last());
        let (answered, failed) = (latency.secs.len(), latency.failed);
        let error = latency.error.as_ref().map_or(String::new(), |error| format!(" ({error})"));
        format!("with credentials: {answered} answered, median {}, max {}; {failed} failed{error}", ms(median), ms(max))
    }
}

impl Drop for Callers {
    fn drop(&mut self) {
        self.stop();
    }
}

/// One request with credentials.
fn call(caller: &secured_port::Caller, token: &str, latency: &Mutex<Latency>) {
    let watch = Stopwatch::start();
    let answer = caller.get("/healthz", Some(token));
    let mut latency = lock(latency);
    match answer {
        Ok((200, _)) => latency.secs.push(watch.secs()),
        Ok((status, _)) => latency.fails(format!("status {status}")),
        Err(error) => latency.fails(format!("{error:#}")),
    }
}

/// Errors are what the agent should cause.
fn annoy(port: SocketAddr, opening: &[u8]) {
    let Ok(mut socket) = TcpStream::connect_timeout(&port, Duration::from_secs(1)) else {
        thread::sleep(Duration::from_millis(100));
        return;
    };
    let _ = socket.write_all(opening);
    let _ = socket.set_read_timeout(Some(HELD));
    let _ = socket.read(&mut [0; 64]);
    // An agent that closes at once is not called in a busy loop: that would measure this machine, not the agent.
    thread::sleep(Duration::from_millis(100));
}
