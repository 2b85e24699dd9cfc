//! Port forwarding with SPDY inside WebSocket messages.
//!
//! Owns: packing and unpacking. Never: decodes the SPDY; the runtime does.
//! Upstream: `NewTunnelingHandler`, `portforward.NewTunnelingConnection`.

use std::io;

use bytes::{Buf, Bytes, BytesMut};
use futures_util::StreamExt as _;
use tokio::{
    io::{AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadHalf, WriteHalf, split},
    sync::mpsc,
};
use tokio_util::codec::FramedRead;

use super::{
    proxy::{BUFFER_BYTES, Stream, part},
    websocket::{self, Decoder, Piece},
};

const PREFIX: &str = "SPDY/3.1+";
/// Queue of control frames: pings beyond it before the first pong are dropped.
const ASIDES: usize = 4;

/// The inner protocol, if the WebSocket protocol is a tunnel.
pub(super) fn inner(protocol: &str) -> Option<&str> {
    protocol.strip_prefix(PREFIX).filter(|inner| inner.ends_with(".k8s.io"))
}

pub(super) fn outer(inner: &str) -> String {
    format!("{PREFIX}{inner}")
}

pub(super) async fn unwrap(caller: Stream, runtime: Stream) -> io::Result<()> {
    let (from_caller, mut to_caller) = split(caller);
    let (from_runtime, mut to_runtime) = split(runtime);
    let mut from_caller = FramedRead::with_capacity(from_caller, Decoder::default(), BUFFER_BYTES);
    let (pongs, asked) = mpsc::channel(ASIDES);
    // Not cancel safe, which is fine: the tunnel ends with the first of them.
    let ended = tokio::select! {
        biased;
        ended = wrap_all(from_runtime, &mut to_caller, asked) => ended,
        ended = unwrap_all(&mut from_caller, &mut to_runtime, pongs) => ended,
    };
    let close = websocket::close(if ended.is_ok() { 1000 } else { 1002 });
    let last_words = async {
        write(&mut to_caller, close, Bytes::new()).await?;
        to_caller.shutdown().await?;
        to_runtime.shutdown().await
    };
    part(last_words, from_caller.into_inner()).await;
    ended
}

async fn unwrap_all(
    from_caller: &mut FramedRead<ReadHalf<Stream>, Decoder>,
    to_runtime: &mut WriteHalf<Stream>,
    pongs: mpsc::Sender<Bytes>,
) -> io::Result<()> {
    while let Some(piece) = from_caller.next().await {
        match piece? {
            Piece::Data { bytes, .. } => to_runtime.write_all(&bytes).await?,
            Piece::Ping(bytes) => drop(pongs.try_send(websocket::pong(&bytes))),
            Piece::Close => break,
        }
    }
    Ok(())
}

async fn wrap_all(
    mut from_runtime: ReadHalf<Stream>,
    to_caller: &mut WriteHalf<Stream>,
    mut pongs: mpsc::Receiver<Bytes>,
) -> io::Result<()> {
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(BUFFER_BYTES);
        // Cancel safe: neither consumes data before it completes.
        let read = tokio::select! {
            biased;
            Some(pong) = pongs.recv() => {
                write(to_caller, pong, Bytes::new()).await?;
                continue;
            }
            read = from_runtime.read_buf(&mut buffer) => read?,
        };
        if read == 0 {
            return Ok(());
        }
        write(to_caller, websocket::message_head(read), buffer.split()).await?;
    }
}

/// Writes a complete frame and flushes.
pub(super) async fn write(to: &mut (impl AsyncWrite + Unpin), head: impl Buf, bytes: impl Buf) -> io::Result<()> {
    to.write_all_buf(&mut head.chain(bytes)).await?;
    to.flush().await
}
