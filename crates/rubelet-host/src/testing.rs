//! Helpers shared by the tests of this crate.

use std::{path::PathBuf, sync::Arc};

use rustix::mount::UnmountFlags;
use rustls::{ServerConfig, pki_types::PrivateKeyDer};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpListener,
    task::JoinHandle,
};
use tokio_rustls::TlsAcceptor;

/// Fails instead of skipping: a skipped test proves nothing.
pub(crate) fn need_root() {
    assert!(rustix::process::geteuid().is_root(), "this test mounts file systems: run it as root");
}

/// Unmounts when the test ends, however it ends.
pub(crate) struct MountGuard(pub PathBuf);

impl Drop for MountGuard {
    fn drop(&mut self) {
        while rustix::mount::unmount(&self.0, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW).is_ok() {}
    }
}

/// Responds to every connection with what `answer` makes of the request's text.
pub(crate) struct WebServer {
    pub address: String,
    task: JoinHandle<()>,
}

impl WebServer {
    pub(crate) async fn new(answer: impl Fn(&str) -> String + Send + Sync + 'static) -> Self {
        WebServer::serve(None, answer).await
    }

    /// With a self-signed certificate.
    pub(crate) async fn tls(answer: impl Fn(&str) -> String + Send + Sync + 'static) -> Self {
        let own = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
        let key = PrivateKeyDer::try_from(own.signing_key.serialize_der()).unwrap();
        let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![own.cert.der().clone()], key)
            .unwrap();
        WebServer::serve(Some(Arc::new(config).into()), answer).await
    }

    async fn serve(tls: Option<TlsAcceptor>, answer: impl Fn(&str) -> String + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let task = tokio::spawn(async move {
            loop {
                let (connection, _) = listener.accept().await.unwrap();
                let Some(tls) = &tls else {
                    converse(connection, &answer).await;
                    continue;
                };
                if let Ok(connection) = tls.accept(connection).await {
                    converse(connection, &answer).await;
                }
            }
        });
        WebServer { address, task }
    }
}

impl Drop for WebServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn converse(mut connection: impl AsyncRead + AsyncWrite + Unpin, answer: impl Fn(&str) -> String) {
    let mut request = vec![0; 8192];
    let read = connection.read(&mut request).await.unwrap();
    let text = answer(&String::from_utf8_lossy(&request[..read]));
    // The reader may have closed the connection.
    let _ = connection.write_all(text.as_bytes()).await;
    let _ = connection.shutdown().await;
}
