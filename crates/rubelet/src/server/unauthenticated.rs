//! The connections whose caller is not authenticated yet.
//!
//! Owns: how many there may be, in total and per peer address, how much they may have sent, how long they may last, and which
//! one is closed for another. Never: decides who is authenticated (`secured/authentication.rs`).
//! Upstream: none; Go's server accepts every connection.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    io,
    net::{IpAddr, Ipv6Addr},
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::{OnceCell, OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;

/// Limits of the connections of a port until their caller is authenticated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UnauthenticatedLimits {
    pub connections: usize,
    pub per_address: usize,
    /// No connection is closed for one of another address before this time: a flood of connections waits in the
    /// kernel's backlog instead of ending every handshake.
    pub min_age: Duration,
    /// Maximum size of a request's head over HTTP/1. Hyper reads up to twice as much before it refuses it.
    pub head_bytes: usize,
    /// Concurrent streams over HTTP/2.
    pub http2_streams: u32,
    /// Bytes received on one connection since no request was running on it, and the heads decoded from them.
    pub received_bytes: usize,
    /// The same of all connections.
    pub total_bytes: usize,
    /// The first head must be complete this long after the handshake, the next one this long after the response.
    pub head_timeout: Duration,
    /// From the accept.
    pub lifetime: Duration,
    /// Responses 401 in a row before a connection is closed, authenticated or not.
    pub refusals: u32,
}

/// A client certificate authenticates at the handshake, so these connections are those of bearer tokens for the moment of
/// a review, of anonymous callers, and of strangers. A node has a few dozen of the first, and they use short heads: a
/// request line is at most 64 KiB. Lifetime and size for anonymous callers are those of the ports without
/// authentication. A client whose token expired needs one response 401 to notice, two if requests overlap.
pub(crate) const UNAUTHENTICATED: UnauthenticatedLimits = UnauthenticatedLimits {
    connections: 256,
    per_address: 32,
    min_age: Duration::from_millis(100),
    head_bytes: 64 << 10,
    http2_streams: 16,
    received_bytes: 256 << 10,
    total_bytes: 8 << 20,
    head_timeout: Duration::from_secs(10),
    lifetime: Duration::from_secs(300),
    refusals: 3,
};

/// The callers that count as one: an IPv4 address, or an IPv6 network of 64 bits, which a single host may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PeerAddress(IpAddr);

impl PeerAddress {
    /// Of a peer whose address is unknown.
    pub(crate) const UNKNOWN: PeerAddress = PeerAddress(IpAddr::V6(Ipv6Addr::UNSPECIFIED));
}

impl From<IpAddr> for PeerAddress {
    fn from(ip: IpAddr) -> Self {
        PeerAddress(match ip.to_canonical() {
            IpAddr::V4(ip) => ip.into(),
            IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() & (u128::MAX << 64)).into(),
        })
    }
}

/// All of them at one port.
#[derive(Debug)]
pub(crate) struct Unauthenticated {
    limits: UnauthenticatedLimits,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    next_id: u64,
    /// By age, the oldest first.
    entries: BTreeMap<u64, Entry>,
    bytes: usize,
}

#[derive(Debug)]
struct Entry {
    address: PeerAddress,
    since: Instant,
    bytes: usize,
    closed: CancellationToken,
}

impl Unauthenticated {
    pub(crate) fn new(limits: UnauthenticatedLimits) -> Arc<Self> {
        Arc::new(Unauthenticated { limits, table: Mutex::default() })
    }

    /// Waits until another connection may be admitted.
    pub(crate) async fn room(&self) {
        let free_in = {
            let table = self.table();
            let is_full = table.entries.len() >= self.limits.connections;
            table
                .entries
                .values()
                .next()
                .filter(|_| is_full)
                .map(|oldest| self.limits.min_age.saturating_sub(oldest.since.elapsed()))
        };
        if let Some(free_in) = free_in {
            sleep(free_in).await;
        }
    }

    /// A new connection. Beyond a limit the oldest of its address, or of the address that has the most, is closed for it:
    /// a caller that holds connections cannot lock another one out.
    pub(crate) fn admit(self: &Arc<Self>, address: PeerAddress, places: &Arc<Semaphore>) -> Connection {
        let closed = CancellationToken::new();
        let mut table = self.table();
        table.next_id += 1;
        let id = table.next_id;
        table.entries.insert(id, Entry { address, since: Instant::now(), bytes: 0, closed: closed.clone() });
        if table.of(address).count() > self.limits.per_address {
            table.close_oldest(address);
        } else if table.entries.len() > self.limits.connections {
            let busiest = table.busiest();
            table.close_oldest(busiest);
        }
        drop(table);
        Connection(Arc::new(Shared {
            address,
            entry: Some((self.clone(), id)),
            places: places.clone(),
            place: OnceCell::new(),
            authenticated: CancellationToken::new(),
            refusals: AtomicU32::new(0),
            refused: CancellationToken::new(),
            closed,
        }))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Beyond a limit the connection that sent the most is closed.
    fn add_bytes(&self, id: u64, count: usize) {
        let mut table = self.table();
        let Some(entry) = table.entries.get_mut(&id) else { return };
        entry.bytes += count;
        let is_too_large = entry.bytes > self.limits.received_bytes;
        table.bytes += count;
        if is_too_large {
            table.close(id);
        }
        while table.bytes > self.limits.total_bytes {
            let largest = table.entries.iter().max_by_key(|(id, entry)| (entry.bytes, Reverse(**id)));
            let largest = *largest.expect("bytes belong to entries").0;
            table.close(largest);
        }
    }
}

impl Table {
    fn of(&self, address: PeerAddress) -> impl Iterator<Item = u64> {
        self.entries.iter().filter(move |(_, entry)| entry.address == address).map(|(id, _)| *id)
    }

    /// The address with the most connections; of several, the one with the oldest.
    fn busiest(&self) -> PeerAddress {
        let mut counts: BTreeMap<PeerAddress, (usize, Reverse<u64>)> = BTreeMap::new();
        for (id, entry) in &self.entries {
            counts.entry(entry.address).or_insert((0, Reverse(*id))).0 += 1;
        }
        counts.into_iter().max_by_key(|(_, rank)| *rank).map_or(PeerAddress::UNKNOWN, |(address, _)| address)
    }

    fn close_oldest(&mut self, address: PeerAddress) {
        let oldest = self.of(address).next();
        if let Some(oldest) = oldest {
            self.close(oldest);
        }
    }

    fn close(&mut self, id: u64) {
        if let Some(entry) = self.remove(id) {
            entry.closed.cancel();
        }
    }

    fn remove(&mut self, id: u64) -> Option<Entry> {
        let entry = self.entries.remove(&id)?;
        self.bytes -= entry.bytes;
        Some(entry)
    }
}

/// One connection. In every request's extensions.
#[derive(Clone, Debug)]
pub(crate) struct Connection(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    address: PeerAddress,
    /// `None` at a port without authentication.
    entry: Option<(Arc<Unauthenticated>, u64)>,
    /// Of the authenticated connections.
    places: Arc<Semaphore>,
    place: OnceCell<OwnedSemaphorePermit>,
    authenticated: CancellationToken,
    /// Responses 401 in a row.
    refusals: AtomicU32,
    refused: CancellationToken,
    closed: CancellationToken,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.remove();
    }
}

impl Shared {
    fn remove(&self) {
        if let Some((all, id)) = &self.entry {
            all.table().remove(*id);
        }
    }
}

impl Connection {
    /// At a port without authentication.
    pub(crate) fn open(places: &Arc<Semaphore>, place: OwnedSemaphorePermit) -> Self {
        let authenticated = CancellationToken::new();
        authenticated.cancel();
        Connection(Arc::new(Shared {
            address: PeerAddress::UNKNOWN,
            entry: None,
            places: places.clone(),
            place: OnceCell::new_with(Some(place)),
            authenticated,
            refusals: AtomicU32::new(0),
            refused: CancellationToken::new(),
            closed: CancellationToken::new(),
        }))
    }

    pub(crate) fn address(&self) -> PeerAddress {
        self.0.address
    }

    pub(crate) fn is_authenticated(&self) -> bool {
        self.0.authenticated.is_cancelled()
    }

    /// A request was authenticated: the connection no longer counts as unauthenticated. Waits for a place among the others.
    pub(crate) async fn authenticate(&self) {
        self.0.refusals.store(0, Ordering::Relaxed);
        if self.is_authenticated() {
            return;
        }
        let place = || async { self.0.places.clone().acquire_owned().await.expect("the semaphore is never closed") };
        self.0.place.get_or_init(place).await;
        self.0.authenticated.cancel();
        self.0.remove();
    }

    /// A request gets a response 401. Returns whether the connection has to end with it.
    pub(crate) fn refuse(&self) -> bool {
        let Some((all, _)) = &self.0.entry else { return false };
        let count = self.0.refusals.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        if count >= all.limits.refusals {
            self.0.refused.cancel();
        }
        count >= all.limits.refusals
    }

    /// Bytes that are in memory for this caller.
    pub(crate) fn add_bytes(&self, count: usize) {
        if let Some((all, id)) = &self.0.entry
            && !self.is_authenticated()
        {
            all.add_bytes(*id, count);
        }
    }

    /// No request is running any more.
    pub(crate) fn release_bytes(&self) {
        if let Some((all, id)) = &self.0.entry
            && !self.is_authenticated()
        {
            let mut table = all.table();
            let held = table.entries.get_mut(id).map(|entry| std::mem::take(&mut entry.bytes));
            table.bytes -= held.unwrap_or(0);
        }
    }

    /// Completes when the connection is closed for another one, or because it sent too much.
    pub(crate) async fn closed(&self) {
        self.0.closed.cancelled().await;
    }

    /// Completes when too many requests in a row were refused.
    pub(crate) async fn refused(&self) {
        self.0.refused.cancelled().await;
    }

    /// Completes when a request was authenticated.
    pub(crate) async fn authenticated(&self) {
        self.0.authenticated.cancelled().await;
    }
}

/// Counts what is received until the caller is authenticated.
#[derive(Debug)]
pub(crate) struct Counted<S> {
    pub stream: S,
    pub connection: Connection,
}

impl<S: AsyncRead + Unpin> AsyncRead for Counted<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        self.connection.add_bytes(buf.filled().len() - before);
        let is_closed = self.connection.0.closed.is_cancelled();
        Poll::Ready(if is_closed { Err(io::ErrorKind::ConnectionAborted.into()) } else { Ok(()) })
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Counted<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: UnauthenticatedLimits = UnauthenticatedLimits {
        connections: 4,
        per_address: 3,
        received_bytes: 100,
        total_bytes: 250,
        refusals: 3,
        ..UNAUTHENTICATED
    };

    struct Fixture {
        all: Arc<Unauthenticated>,
        places: Arc<Semaphore>,
        open: Vec<(&'static str, Connection)>,
    }

    impl Fixture {
        fn new() -> Self {
            Fixture { all: Unauthenticated::new(LIMITS), places: Arc::new(Semaphore::new(1)), open: Vec::new() }
        }

        /// A connection with this name, from this address.
        fn connect(&mut self, name: &'static str, ip: &str) -> Connection {
            let connection = self.all.admit(ip.parse::<IpAddr>().unwrap().into(), &self.places);
            self.open.push((name, connection.clone()));
            connection
        }

        /// Connections and bytes.
        fn counts(&self) -> (usize, usize) {
            let table = self.all.table();
            (table.entries.len(), table.bytes)
        }

        /// The names of those that were closed.
        fn closed(&self) -> String {
            let closed = self.open.iter().filter(|(_, connection)| connection.0.closed.is_cancelled());
            closed.map(|(name, _)| *name).collect::<Vec<_>>().join(" ")
        }
    }

    #[test]
    fn beyond_its_limit_an_address_loses_its_oldest_connection() {
        let mut port = Fixture::new();
        port.connect("other", "10.0.0.2");
        for name in ["a", "b", "c"] {
            port.connect(name, "10.0.0.1");
        }
        assert_eq!(port.closed(), "");
        port.connect("d", "10.0.0.1");
        assert_eq!(port.closed(), "a");
        // An IPv4 address in IPv6 is the same one.
        port.connect("e", "::ffff:10.0.0.1");
        assert_eq!(port.closed(), "a b");
    }

    #[test]
    fn beyond_the_total_the_busiest_address_loses_its_oldest_connection() {
        let mut port = Fixture::new();
        port.connect("single", "10.0.0.1");
        port.connect("a", "2001:db8::1");
        port.connect("b", "2001:db8::2");
        port.connect("last", "10.0.0.3");
        assert_eq!(port.closed(), "");
        port.connect("new", "10.0.0.4");
        assert_eq!(port.closed(), "a");
        // Each address has one now: the oldest goes.
        port.connect("newer", "10.0.0.5");
        assert_eq!(port.closed(), "single a");
    }

    #[tokio::test(start_paused = true)]
    async fn full_table_admits_no_other_connection_before_the_oldest_had_its_time() {
        let mut port = Fixture::new();
        for (name, ip) in [("a", "10.0.0.1"), ("b", "10.0.0.2"), ("c", "10.0.0.3")] {
            port.connect(name, ip);
        }
        let start = Instant::now();
        port.all.room().await;
        assert_eq!(start.elapsed(), Duration::ZERO);
        port.connect("d", "10.0.0.4");
        port.all.room().await;
        assert_eq!(start.elapsed(), LIMITS.min_age);
    }

    #[tokio::test]
    async fn authenticated_connection_is_not_counted_and_never_closed() {
        let mut port = Fixture::new();
        let known = port.connect("known", "10.0.0.1");
        known.authenticate().await;
        for name in ["a", "b", "c", "d", "e"] {
            port.connect(name, "10.0.0.1");
        }
        assert_eq!(port.closed(), "a b");
        known.add_bytes(1_000);
        assert_eq!(port.closed(), "a b");
        assert_eq!(port.counts(), (3, 0));
        port.open.clear();
        assert_eq!((port.counts(), port.places.available_permits()), ((0, 0), 0));
        drop(known);
        assert_eq!(port.places.available_permits(), 1);
    }

    #[test]
    fn received_bytes_are_bounded_per_connection_and_in_total() {
        let mut port = Fixture::new();
        let [a, b, c] = ["a", "b", "c"].map(|name| port.connect(name, "10.0.0.1"));
        a.add_bytes(100);
        a.release_bytes();
        a.add_bytes(80);
        b.add_bytes(90);
        c.add_bytes(80);
        assert_eq!(port.closed(), "");
        // 251 in total: the largest goes.
        c.add_bytes(1);
        assert_eq!((port.closed().as_str(), port.counts()), ("b", (2, 161)));
        a.add_bytes(21);
        assert_eq!((port.closed().as_str(), port.counts()), ("a b", (1, 81)));
    }

    #[tokio::test]
    async fn refusals_in_a_row_end_a_connection() {
        let mut port = Fixture::new();
        let caller = port.connect("a", "10.0.0.1");
        assert_eq!([caller.refuse(), caller.refuse()], [false, false]);
        caller.authenticate().await;
        assert_eq!([caller.refuse(), caller.refuse(), caller.refuse()], [false, false, true]);
        assert!(caller.0.refused.is_cancelled());
    }
}
