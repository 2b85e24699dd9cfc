//! Turns of requests to the API server that callers cause.
//!
//! Owns: how many run and wait, in total and per peer address, and whose turn is next: addresses take turns, so that one with
//! many requests does not delay the others.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::oneshot, time::timeout};

use crate::server::unauthenticated::PeerAddress;

/// Limits of one kind of request.
#[derive(Clone, Copy, Debug)]
pub(super) struct TurnLimits {
    pub running: usize,
    pub running_per_address: usize,
    pub waiting: usize,
    pub waiting_per_address: usize,
    pub wait_timeout: Duration,
}

#[derive(Debug)]
pub(super) struct Turns {
    limits: TurnLimits,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    /// Without zeros.
    running: BTreeMap<PeerAddress, usize>,
    /// The address whose turn is next comes first. Without empty queues.
    waiting: VecDeque<(PeerAddress, VecDeque<oneshot::Sender<Turn>>)>,
}

/// The right to make one request.
#[derive(Debug)]
pub(super) struct Turn {
    turns: Arc<Turns>,
    address: PeerAddress,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut table = self.turns.table();
        if let Some(count) = table.running.get_mut(&self.address) {
            *count -= 1;
        }
        table.running.retain(|_, count| *count > 0);
        let mut next = Vec::new();
        while let Some(grant) = table.next(&self.turns.limits) {
            next.push(grant);
        }
        drop(table);
        for (address, waiter) in next {
            // One that no longer waits returns the turn, whose drop grants it to another.
            let _ = waiter.send(Turn { turns: self.turns.clone(), address });
        }
    }
}

impl Turns {
    pub(super) fn new(limits: TurnLimits) -> Arc<Self> {
        Arc::new(Turns { limits, table: Mutex::default() })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a turn. An error if too many wait, or for too long.
    pub(super) async fn acquire(self: &Arc<Self>, address: PeerAddress) -> Result<Turn, String> {
        let waiting = {
            let mut table = self.table();
            table.forget_gone();
            if table.may_run(&self.limits, address) && !table.waiting.iter().any(|(waiting, _)| *waiting == address) {
                *table.running.entry(address).or_default() += 1;
                return Ok(Turn { turns: self.clone(), address });
            }
            table.wait(&self.limits, address)
        };
        let too_many = || "too many reviews are waiting".to_owned();
        match timeout(self.limits.wait_timeout, waiting.ok_or_else(too_many)?).await {
            Ok(Ok(turn)) => Ok(turn),
            // Dropped for one of an address with fewer.
            Ok(Err(_)) => Err(too_many()),
            Err(_) => Err("timed out waiting for other reviews".to_owned()),
        }
    }
}

impl Table {
    fn may_run(&self, limits: &TurnLimits, address: PeerAddress) -> bool {
        let of_address = self.running.get(&address).copied().unwrap_or(0);
        self.running.values().sum::<usize>() < limits.running && of_address < limits.running_per_address
    }

    fn forget_gone(&mut self) {
        for (_, queue) in &mut self.waiting {
            queue.retain(|waiter| !waiter.is_closed());
        }
        self.waiting.retain(|(_, queue)| !queue.is_empty());
    }

    /// `None` if too many wait. In total too many: the last of the address with the most gives way to one with fewer.
    fn wait(&mut self, limits: &TurnLimits, address: PeerAddress) -> Option<oneshot::Receiver<Turn>> {
        let own = self.waiting.iter().position(|(waiting, _)| *waiting == address);
        let of_address = own.map_or(0, |own| self.waiting[own].1.len());
        if of_address >= limits.waiting_per_address {
            return None;
        }
        if self.waiting.iter().map(|(_, queue)| queue.len()).sum::<usize>() >= limits.waiting {
            let most = self.waiting.iter_mut().map(|(_, queue)| queue).max_by_key(|queue| queue.len())?;
            if most.len() <= of_address + 1 {
                return None;
            }
            most.pop_back();
        }
        let (sender, receiver) = oneshot::channel();
        match own {
            Some(own) => self.waiting[own].1.push_back(sender),
            None => self.waiting.push_back((address, [sender].into())),
        }
        Some(receiver)
    }

    /// Takes a waiter whose turn it is.
    fn next(&mut self, limits: &TurnLimits) -> Option<(PeerAddress, oneshot::Sender<Turn>)> {
        let position = self.waiting.iter().position(|(address, _)| self.may_run(limits, *address))?;
        let (address, mut queue) = self.waiting.remove(position)?;
        let waiter = queue.pop_front()?;
        if !queue.is_empty() {
            self.waiting.push_back((address, queue));
        }
        *self.running.entry(address).or_default() += 1;
        Some((address, waiter))
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    const LIMITS: TurnLimits = TurnLimits {
        running: 2,
        running_per_address: 1,
        waiting: 5,
        waiting_per_address: 4,
        wait_timeout: Duration::from_secs(10),
    };

    fn address(last: u8) -> PeerAddress {
        IpAddr::from([10, 0, 0, last]).into()
    }

    struct Fixture {
        turns: Arc<Turns>,
        log: Arc<Mutex<Vec<String>>>,
    }

    impl Fixture {
        fn new() -> Self {
            Fixture { turns: Turns::new(LIMITS), log: Arc::default() }
        }

        /// A request of this name that takes a second, and its log entry.
        async fn request(&self, name: &'static str, last: u8) -> tokio::task::JoinHandle<()> {
            let (turns, log) = (self.turns.clone(), self.log.clone());
            let task = tokio::spawn(async move {
                let turn = turns.acquire(address(last)).await;
                let entry = turn.as_ref().map_or_else(|error| format!("{name}: {error}"), |_| name.to_owned());
                log.lock().unwrap().push(entry);
                if turn.is_ok() {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            });
            tokio::task::yield_now().await;
            task
        }

        fn taken(&self) -> String {
            std::mem::take(&mut *self.log.lock().unwrap()).join(", ")
        }
    }

    #[tokio::test(start_paused = true)]
    async fn requests_are_served_round_robin_by_address() {
        let fixture = Fixture::new();
        for (name, last) in [("a1", 1), ("a2", 1), ("a3", 1), ("a4", 1), ("b1", 2), ("c1", 3), ("b2", 2)] {
            fixture.request(name, last).await;
        }
        assert_eq!(fixture.taken(), "a1, b1");
        for expected in ["a2, c1", "b2, a3", "a4"] {
            tokio::time::sleep(Duration::from_millis(1001)).await;
            assert_eq!(fixture.taken(), expected);
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(fixture.turns.table().running.is_empty() && fixture.turns.table().waiting.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_requests_are_bounded_and_the_largest_queue_gives_way() {
        let fixture = Fixture::new();
        for name in ["a1", "a2", "a3", "a4", "a5", "a6"] {
            fixture.request(name, 1).await;
        }
        assert_eq!(fixture.taken(), "a1, a6: too many reviews are waiting");
        for (name, last) in [("b1", 2), ("b2", 2), ("c1", 3)] {
            fixture.request(name, last).await;
        }
        assert_eq!(fixture.taken(), "b1, a5: too many reviews are waiting");
        // Those that left do not count.
        let turns = fixture.turns.clone();
        assert!(timeout(Duration::ZERO, turns.acquire(address(4))).await.is_err());
        tokio::task::yield_now().await;
        assert_eq!(fixture.taken(), "a4: too many reviews are waiting");
        fixture.request("d1", 5).await;
        assert_eq!(fixture.taken(), "");
    }

    #[tokio::test(start_paused = true)]
    async fn wait_for_a_turn_has_an_end_and_loses_no_turn() {
        let fixture = Fixture::new();
        let held = fixture.turns.acquire(address(1)).await.unwrap();
        fixture.request("late", 1).await;
        let gone = fixture.request("gone", 1).await;
        gone.abort();
        tokio::time::sleep(Duration::from_secs(11)).await;
        assert_eq!(fixture.taken(), "late: timed out waiting for other reviews");
        drop(held);
        fixture.request("next", 1).await;
        assert_eq!(fixture.taken(), "next");
    }
}
