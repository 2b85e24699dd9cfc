//! Requests to the agent's own port, over TLS.

use std::{fs, net::TcpStream, sync::Arc};

use anyhow::Context as _;
use rubelet_testbed::agent::{Agent, ask};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    crypto::ring,
    pki_types::{CertificateDer, pem::PemObject as _},
};

/// The status and the body of the response.
pub fn get(agent: &Agent, path: &str, token: Option<&str>) -> anyhow::Result<(u16, String)> {
    let token = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
    ask(connect(agent)?, "GET", path, &token)
}

/// The same for any method and user.
pub fn post(agent: &Agent, path: &str) -> anyhow::Result<(u16, String)> {
    ask(connect(agent)?, "POST", path, "Content-Length: 0\r\n")
}

/// Its certificate is trusted because it is the one on disk.
pub fn connect(agent: &Agent) -> anyhow::Result<StreamOwned<ClientConnection, TcpStream>> {
    let chain = fs::read(agent.pki_dir().join("kubelet.crt")).context("the agent's serving certificate")?;
    let mut roots = RootCertStore::empty();
    let certificates = CertificateDer::pem_slice_iter(&chain).collect::<Result<Vec<_>, _>>()?;
    roots.add_parsable_certificates(certificates);
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let connection = ClientConnection::new(Arc::new(config), agent.node().to_owned().try_into()?)?;
    Ok(StreamOwned::new(connection, agent.connect_secured()?))
}
