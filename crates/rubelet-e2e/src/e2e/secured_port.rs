//! Requests to the agent's own port, over TLS.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, TcpStream},
    sync::Arc,
};

use anyhow::Context as _;
use rubelet_testbed::agent::{self, Agent, ask};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    crypto::ring,
    pki_types::{CertificateDer, ServerName, pem::PemObject as _},
};

/// The status and the body of the response.
pub fn get(agent: &Agent, path: &str, token: Option<&str>) -> anyhow::Result<(u16, String)> {
    Caller::of(agent)?.get(path, token)
}

/// The same for any method and user.
pub fn post(agent: &Agent, path: &str) -> anyhow::Result<(u16, String)> {
    ask(connect(agent)?, "POST", path, "Content-Length: 0\r\n")
}

pub fn connect(agent: &Agent) -> anyhow::Result<StreamOwned<ClientConnection, TcpStream>> {
    Caller::of(agent)?.connect()
}

/// A client of one agent's port, which a thread may own.
#[derive(Debug)]
pub struct Caller {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
    address: SocketAddr,
    /// Its own address, if it matters.
    source: Option<Ipv4Addr>,
}

impl Caller {
    /// The agent's certificate is trusted because it is the one on disk.
    pub fn of(agent: &Agent) -> anyhow::Result<Self> {
        let config = Arc::new(trusting(agent)?);
        let name = agent.node().to_owned().try_into()?;
        Ok(Caller { config, name, address: agent.secured_address(), source: None })
    }

    /// From this address of the machine.
    pub fn calling_from(self, source: Ipv4Addr) -> Self {
        Caller { source: Some(source), ..self }
    }

    pub fn get(&self, path: &str, token: Option<&str>) -> anyhow::Result<(u16, String)> {
        let token = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
        ask(self.connect()?, "GET", path, &token)
    }

    fn connect(&self) -> anyhow::Result<StreamOwned<ClientConnection, TcpStream>> {
        let connection = ClientConnection::new(Arc::clone(&self.config), self.name.clone())?;
        Ok(StreamOwned::new(connection, agent::connect(self.address, self.source)?))
    }
}

fn trusting(agent: &Agent) -> anyhow::Result<ClientConfig> {
    let chain = fs::read(agent.pki_dir().join("kubelet.crt")).context("the agent's serving certificate")?;
    let mut roots = RootCertStore::empty();
    let certificates = CertificateDer::pem_slice_iter(&chain).collect::<Result<Vec<_>, _>>()?;
    roots.add_parsable_certificates(certificates);
    Ok(ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth())
}
