//! Name look-ups for probes and hooks.
//!
//! Owns: the threads of the system's resolver, which blocks for as long as a name server does not answer. A pod has one
//! look-up at a time, so a pod with many names, or with a dead name server, delays only itself. While one hangs, another
//! begins now and then: the resolver may wait for half a minute before it asks again a server that has come back.
//! Never: caches, or looks up names for the agent itself.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rubelet_core::id::PodUid;
use tokio::{
    sync::Notify,
    time::{Instant, timeout_at},
};

use crate::threads::Threads;

/// Beside a look-up that has no answer after this time, another begins.
const ANOTHER_AFTER: Duration = Duration::from_secs(7);
/// Look-ups of one pod that may hang at once. A name server that returns is noticed by the first of them that asks it again.
const MAX_PER_POD: usize = 4;

#[derive(Clone, Debug)]
pub(crate) struct Names(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    threads: Threads,
    /// Pods that look up a name, or wait for their turn.
    pods: Mutex<BTreeMap<PodUid, Queue>>,
}

#[derive(Debug, Default)]
struct Queue {
    running: usize,
    /// When the last of them began.
    begun: Option<Instant>,
    ended: Arc<Notify>,
    visits: usize,
}

/// When a look-up may begin.
enum Turn {
    Now,
    At(Instant),
    WhenOneEnds,
}

impl Default for Names {
    fn default() -> Self {
        Names(Arc::new(Shared { threads: Threads::new("pod-names"), pods: Mutex::default() }))
    }
}

impl Names {
    /// An address is its own answer. The caller has a deadline.
    pub(crate) async fn look_up(&self, pod: &PodUid, host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        if let Ok(ip) = host.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(ip, port)]);
        }
        let host = host.to_owned();
        self.run(pod, move || (host, port).to_socket_addrs().map(Iterator::collect)).await
    }

    async fn run<T: Send + 'static>(
        &self,
        pod: &PodUid,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let running = Visit::new(self, pod).turn().await;
        let answer = self.0.threads.spawn(move || {
            let _held_to_the_end = running;
            work()
        });
        answer.await.unwrap_or_else(|_| Err(io::Error::other("the look-up panicked, or the agent is shutting down")))
    }

    fn pods(&self) -> MutexGuard<'_, BTreeMap<PodUid, Queue>> {
        // Each change is complete before anything can panic.
        self.0.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A look-up under way, or waiting for its turn.
struct Visit {
    names: Names,
    pod: PodUid,
    ended: Arc<Notify>,
}

/// A look-up under way.
struct Running(Visit);

impl Visit {
    fn new(names: &Names, pod: &PodUid) -> Self {
        let mut pods = names.pods();
        let queue = pods.entry(pod.clone()).or_default();
        queue.visits += 1;
        Visit { names: names.clone(), pod: pod.clone(), ended: queue.ended.clone() }
    }

    async fn turn(self) -> Running {
        let ended = Arc::clone(&self.ended);
        loop {
            let mut next_end = std::pin::pin!(ended.notified());
            // Before the look at the queue, so that no end is missed.
            next_end.as_mut().enable();
            match self.next_turn() {
                Turn::Now => return Running(self),
                // Whether it ended or the time is over, the queue is looked at again.
                Turn::At(moment) => drop(timeout_at(moment, next_end).await),
                Turn::WhenOneEnds => next_end.await,
            }
        }
    }

    /// `Now` counts the look-up as running.
    fn next_turn(&self) -> Turn {
        let now = Instant::now();
        let mut pods = self.names.pods();
        let queue = pods.entry(self.pod.clone()).or_default();
        let last = queue.begun.filter(|_| queue.running > 0);
        let another_at = last.and_then(|begun| begun.checked_add(ANOTHER_AFTER)).unwrap_or(now);
        if queue.running >= MAX_PER_POD {
            return Turn::WhenOneEnds;
        }
        if now < another_at {
            return Turn::At(another_at);
        }
        queue.running += 1;
        queue.begun = Some(now);
        Turn::Now
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let mut pods = self.names.pods();
        if let Some(queue) = pods.get_mut(&self.pod) {
            queue.visits -= 1;
            if queue.visits == 0 {
                pods.remove(&self.pod);
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(queue) = self.0.names.pods().get_mut(&self.0.pod) {
            queue.running -= 1;
        }
        self.0.ended.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc::channel, time::Duration};

    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn dead_name_server_delays_only_the_pod_that_asks_it() {
        let (names, a, b) = (Names::default(), PodUid::from("a"), PodUid::from("b"));
        let (release, released) = channel::<()>();
        let hung = names.run(&a, move || Ok(released.recv().is_err()));
        timeout(Duration::from_millis(50), hung).await.unwrap_err();
        let again = names.run(&a, || Ok(()));
        timeout(Duration::from_millis(50), again).await.unwrap_err();
        names.run(&b, || Ok(())).await.unwrap();
        drop(release);
        names.run(&a, || Ok(())).await.unwrap();
        while !names.pods().is_empty() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn hung_look_ups_leave_room_for_another_now_and_then() {
        let (names, pod) = (Names::default(), PodUid::from("a"));
        let (begun, begins) = std::sync::mpsc::channel();
        let mut held = Vec::new();
        // A probe a second that gives up after a second, for forty seconds.
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(40) {
            let (begun, (release, released)) = (begun.clone(), channel::<()>());
            let look_up = names.run(&pod, move || {
                begun.send(()).unwrap();
                Ok(released.recv().is_err())
            });
            timeout(Duration::from_secs(1), look_up).await.unwrap_err();
            held.push(release);
        }
        for _ in 0..MAX_PER_POD {
            begins.recv_timeout(Duration::from_secs(10)).expect("a look-up begins");
        }
        assert!(begins.try_recv().is_err(), "at most {MAX_PER_POD} hang at once");
        // The server is back: whichever of them ends makes room.
        let mut first = held.into_iter();
        drop(first.next());
        names.run(&pod, || Ok(())).await.unwrap();
        drop(first);
    }

    #[tokio::test]
    async fn addresses_are_not_looked_up() {
        let (names, a, b) = (Names::default(), PodUid::from("a"), PodUid::from("b"));
        let (_release, released) = channel::<()>();
        let hung = names.run(&a, move || Ok(released.recv().is_err()));
        timeout(Duration::from_millis(50), hung).await.unwrap_err();
        for host in ["127.0.0.1", "::1"] {
            let found = names.look_up(&a, host, 80).await.unwrap();
            assert_eq!(found, [SocketAddr::new(host.parse().unwrap(), 80)]);
        }
        assert!(!names.look_up(&b, "localhost", 80).await.unwrap().is_empty());
    }
}
