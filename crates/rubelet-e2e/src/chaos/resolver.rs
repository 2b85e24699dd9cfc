//! A resolver of names on loopback that can stop answering, and an HTTP server behind the names it gives.
//!
//! Owns: the socket and the file that leads there. Every name has the node's address.

use std::{
    io::{Read as _, Write as _},
    net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::Context as _;

/// The resolver's header, and the offsets of what we read.
const HEADER: usize = 12;
const TYPE_A: [u8; 2] = [0, 1];

#[derive(Debug)]
pub struct Resolver {
    address: Ipv4Addr,
    web: (Ipv4Addr, u16),
    is_silent: Arc<AtomicBool>,
    is_over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Resolver {
    pub fn start(node: Ipv4Addr) -> anyhow::Result<Self> {
        // As many as there are testbeds: each has a loopback address of its own.
        let address = Ipv4Addr::new(127, 53, node.octets()[2], 53);
        let socket = UdpSocket::bind((address, 53)).with_context(|| format!("listen on {address}:53"))?;
        socket.set_read_timeout(Some(Duration::from_millis(200)))?;
        // The node's address is gone before this server is.
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        let web = (Ipv4Addr::LOCALHOST, listener.local_addr()?.port());
        let is_silent = Arc::new(AtomicBool::new(false));
        let is_over = Arc::new(AtomicBool::new(false));
        let (silent, over) = (Arc::clone(&is_silent), Arc::clone(&is_over));
        let names = thread::spawn(move || {
            let mut query = [0; 512];
            while !over.load(Ordering::Relaxed) {
                let Ok((length, from)) = socket.recv_from(&mut query) else { continue };
                if !silent.load(Ordering::Relaxed)
                    && let Some(response) = response(&query[..length], node)
                {
                    // One that does not arrive is asked for again.
                    let _ = socket.send_to(&response, from);
                }
            }
        });
        let over = Arc::clone(&is_over);
        let pages = thread::spawn(move || serve(&listener, &over));
        Ok(Resolver { address, web, is_silent, is_over, threads: vec![names, pages] })
    }

    /// The longest waits that a resolver's file can ask for.
    pub fn resolv_conf(&self) -> String {
        format!("nameserver {}\noptions timeout:30 attempts:5\n", self.address)
    }

    /// The port behind every name.
    pub fn web_port(&self) -> u16 {
        self.web.1
    }

    pub fn silence(&self, is_silent: bool) {
        self.is_silent.store(is_silent, Ordering::Relaxed);
    }
}

impl Drop for Resolver {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        // Wakes the web server.
        let _ = TcpStream::connect(self.web);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// The node's address for a question of type A; no address for any other type.
fn response(query: &[u8], node: Ipv4Addr) -> Option<Vec<u8>> {
    let mut end = HEADER;
    // The name: parts with their lengths, until an empty one.
    while *query.get(end)? != 0 {
        end += 1 + usize::from(*query.get(end)?);
    }
    let question = query.get(HEADER..end + 5)?;
    let has_address = question.get(question.len() - 4..question.len() - 2)? == TYPE_A;
    let mut response = query.get(..2)?.to_vec();
    response.extend([0x81, 0x80, 0, 1, 0, u8::from(has_address), 0, 0, 0, 0]);
    response.extend(question);
    if has_address {
        // A pointer to the name, type A, class IN, no time to live, four bytes.
        response.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4]);
        response.extend(node.octets());
    }
    Some(response)
}

fn serve(listener: &TcpListener, over: &AtomicBool) {
    for socket in listener.incoming() {
        if over.load(Ordering::Relaxed) {
            return;
        }
        let Ok(mut socket) = socket else { continue };
        let _ = socket.set_read_timeout(Some(Duration::from_millis(500)));
        // A probe that breaks off is the agent's concern.
        let _ = socket.read(&mut [0; 2048]);
        let _ = socket.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn question_gets_an_address_only_for_type_a() {
        let question = |kind: u8| {
            [b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x03web\x04test\x00\x00".as_slice(), &[kind, 0, 1]]
                .concat()
        };
        let a = response(&question(1), Ipv4Addr::new(10, 213, 0, 1)).unwrap();
        assert!(a.starts_with(b"\x12\x34\x81\x80\x00\x01\x00\x01"), "{a:?}");
        assert!(a.ends_with(&[0, 4, 10, 213, 0, 1]), "{a:?}");
        let aaaa = response(&question(28), Ipv4Addr::new(10, 213, 0, 1)).unwrap();
        assert!(aaaa.starts_with(b"\x12\x34\x81\x80\x00\x01\x00\x00"), "{aaaa:?}");
        assert_eq!(response(b"short", Ipv4Addr::LOCALHOST), None);
    }
}
