//! Name look-ups for probes and hooks.
//!
//! Owns: the threads of the system's resolver, which blocks for as long as a name server does not answer. A pod has one
//! look-up at a time, so a pod with many names, or with a dead name server, delays only itself.
//! Never: caches, or looks up names for the agent itself.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rubelet_core::id::PodUid;
use tokio::sync::Semaphore;

use crate::threads::Threads;

#[derive(Clone, Debug)]
pub(crate) struct Names(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    threads: Threads,
    /// Pods that look up a name, or wait for their turn.
    pods: Mutex<BTreeMap<PodUid, Queue>>,
}

#[derive(Debug)]
struct Queue {
    /// One.
    turns: Arc<Semaphore>,
    visits: usize,
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
        let visit = Visit::new(self, pod);
        let turn = visit.turns.clone().acquire_owned().await;
        let answer = self.0.threads.spawn(move || {
            let _held_to_the_end = (turn, visit);
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
    turns: Arc<Semaphore>,
}

impl Visit {
    fn new(names: &Names, pod: &PodUid) -> Self {
        let mut pods = names.pods();
        let queue = pods.entry(pod.clone()).or_insert_with(|| Queue { turns: Arc::new(Semaphore::new(1)), visits: 0 });
        queue.visits += 1;
        Visit { names: names.clone(), pod: pod.clone(), turns: queue.turns.clone() }
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
