//! The API server at the address of its service, for programs in pods: nothing routes addresses of services here.
//!
//! Owns: the connections. The address belongs to the bridge of the testbed, and goes with it.

use std::{
    net::{Ipv4Addr, SocketAddr},
    thread::{self, JoinHandle},
};

use anyhow::Context as _;
use rubelet_testbed::Testbed;
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::oneshot,
    task::JoinSet,
};

use crate::control_plane::ControlPlane;

/// The first of `--service-cluster-ip-range`.
pub const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);
const PORT: u16 = 443;

/// Served until it is dropped.
#[derive(Debug)]
pub struct ServiceAddress {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl ServiceAddress {
    pub fn serve(plane: &ControlPlane, testbed: &Testbed) -> anyhow::Result<Self> {
        testbed.add_address(SERVICE.into())?;
        let listener =
            std::net::TcpListener::bind((SERVICE, PORT)).with_context(|| format!("bind {SERVICE}:{PORT}"))?;
        listener.set_nonblocking(true)?;
        let server = plane.server_address();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
        let (stop, stopped) = oneshot::channel();
        let thread = thread::spawn(move || runtime.block_on(serve(listener, server, stopped)));
        Ok(ServiceAddress { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for ServiceAddress {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // If it panicked, pods did not reach the API server, and the run has said so.
            let _ = thread.join();
        }
    }
}

async fn serve(listener: std::net::TcpListener, server: SocketAddr, mut stopped: oneshot::Receiver<()>) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    // Connections end with the set.
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            // A dropped sender is the signal; it is not polled again, because the loop ends.
            _ = &mut stopped => return,
            accepted = listener.accept() => {
                let Ok((mut client, _)) = accepted else { continue };
                connections.spawn(async move {
                    let Ok(mut server) = TcpStream::connect(server).await else { return };
                    // Both ends see it when the other goes away.
                    let _ = copy_bidirectional(&mut client, &mut server).await;
                });
            }
            Some(_) = connections.join_next() => {}
        }
    }
}
