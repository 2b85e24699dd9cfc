//! The API server at the address of its service, for programs in pods: nothing routes addresses of services here.
//!
//! Owns: the connections. The address belongs to the bridge of the testbed, and goes with it.

use std::net::Ipv4Addr;

use anyhow::Context as _;
use rubelet_testbed::Testbed;
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
};

use crate::{background::BackgroundServer, control_plane::ControlPlane};

/// The first of `--service-cluster-ip-range`.
pub const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);
const PORT: u16 = 443;

/// Served until it is dropped.
#[derive(Debug)]
pub struct ServiceAddress {
    _server: BackgroundServer,
}

impl ServiceAddress {
    pub fn serve(plane: &ControlPlane, testbed: &Testbed) -> anyhow::Result<Self> {
        testbed.add_address(SERVICE.into())?;
        let listener =
            std::net::TcpListener::bind((SERVICE, PORT)).with_context(|| format!("bind {SERVICE}:{PORT}"))?;
        listener.set_nonblocking(true)?;
        let server = plane.server_address();
        let connect = move |mut client| async move {
            let Ok(mut server) = TcpStream::connect(server).await else { return };
            // Both ends see it when the other goes away.
            let _ = copy_bidirectional(&mut client, &mut server).await;
        };
        let server = BackgroundServer::start(|| TcpListener::from_std(listener), connect)?;
        Ok(ServiceAddress { _server: server })
    }
}
