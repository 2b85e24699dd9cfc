//! Translates exec over WebSockets for runtimes that support only SPDY.
//!
//! Owns: the mapping of WebSocket channels to SPDY streams, the end of a command and its status. Bytes are copied as they
//! arrive: a slow reader delays only its own direction.
//! Upstream: `StreamTranslatorHandler`, `wsstream`, `remotecommand`'s `streamProtocolV4`.

use std::{io, time::Duration};

use bytes::{BufMut as _, Bytes, BytesMut};
use futures_util::StreamExt as _;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncWriteExt as _, ReadHalf, WriteHalf, split},
    sync::{Notify, mpsc},
    time::timeout,
};
use tokio_util::codec::FramedRead;

use super::{
    Streams,
    proxy::{BUFFER_BYTES, Stream, part},
    spdy::{self, Frame},
    tunnel::write,
    websocket::{self, Piece},
};

/// The only WebSocket protocol in which a client can close its input.
pub(super) const V5: &str = "v5.channel.k8s.io";
/// The newest protocol of runtimes over SPDY; it reports the exit status.
pub(super) const V4: &str = "v4.channel.k8s.io";

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
/// In place of a channel number: the channel that follows has ended.
const CLOSE: u8 = 255;

/// A runtime's status is a few hundred bytes.
const STATUS_MAX_BYTES: usize = 64 << 10;
/// Idle timeout of a caller. Upstream's number, whatever `streamingConnectionIdleTimeout` says.
const IDLE: Duration = Duration::from_secs(4 * 3600);
/// Queue of control frames: pings beyond it before the first pong are dropped.
const ASIDES: usize = 4;

type FromCaller = FramedRead<ReadHalf<Stream>, websocket::Decoder>;
type FromRuntime = FramedRead<ReadHalf<Stream>, spdy::Decoder>;

pub(super) async fn translate(caller: Stream, runtime: Stream, streams: Streams) -> io::Result<()> {
    let channels = Channels::of(streams);
    let (from_caller, mut to_caller) = split(caller);
    let (from_runtime, mut to_runtime) = split(runtime);
    let mut from_caller = FramedRead::with_capacity(from_caller, websocket::Decoder::default(), BUFFER_BYTES);
    let from_runtime = FramedRead::with_capacity(from_runtime, spdy::Decoder::default(), BUFFER_BYTES);
    write(&mut to_runtime, channels.opening(), Bytes::new()).await?;
    // Upstream's first message on the connection.
    show(&mut to_caller, channels.first_output(), BytesMut::new()).await?;
    let (pongs, pongs_asked) = mpsc::channel(ASIDES);
    let (pings, pings_asked) = mpsc::channel(ASIDES);
    let moved = Notify::new();
    let carried = async {
        let (input, output) = (Input::new(&channels, &moved), Output::new(&channels, &moved));
        let mut output = std::pin::pin!(carry_output(output, from_runtime, &mut to_caller, pings, pongs_asked));
        let input = carry_input(input, &mut from_caller, &mut to_runtime, pongs, pings_asked);
        // Not cancel safe, which is fine: what is dropped has ended.
        tokio::select! {
            biased;
            end = output.as_mut() => end,
            left = input => match left {
                Ok(Left::Caller) => Ok(None),
                // The command may have ended without reading all of its input; its output is still to come.
                Ok(Left::Runtime) => output.await,
                Err(error) => Err(error),
            },
        }
    };
    // Not cancel safe, which is fine: what is dropped has ended.
    let end = tokio::select! {
        biased;
        end = carried => end,
        () = idle(&moved) => Err(io::ErrorKind::TimedOut.into()),
    };
    let last_words = async {
        if let Ok(Some(status)) = &end {
            show(&mut to_caller, ERROR, status.to_string().as_bytes().into()).await?;
        }
        let is_broken = end.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::InvalidData);
        write(&mut to_caller, websocket::close(if is_broken { 1002 } else { 1000 }), Bytes::new()).await?;
        to_caller.shutdown().await?;
        to_runtime.shutdown().await
    };
    part(last_words, from_caller.into_inner()).await;
    end.map(drop)
}

/// Completes after the idle timeout.
async fn idle(moved: &Notify) {
    while timeout(IDLE, moved.notified()).await.is_ok() {}
}

/// Which side ended the input.
enum Left {
    Caller,
    Runtime,
}

async fn carry_input(
    mut input: Input<'_>,
    from_caller: &mut FromCaller,
    to_runtime: &mut WriteHalf<Stream>,
    pongs: mpsc::Sender<Bytes>,
    mut pings: mpsc::Receiver<u32>,
) -> io::Result<Left> {
    loop {
        // Cancel safe: neither consumes data before it completes.
        let piece = tokio::select! {
            biased;
            Some(id) = pings.recv() => {
                if write(to_runtime, spdy::ping(id), Bytes::new()).await.is_err() {
                    return Ok(Left::Runtime);
                }
                continue;
            }
            piece = from_caller.next() => piece,
        };
        let step = match piece {
            Some(Ok(Piece::Data { bytes, begins })) => input.take(bytes, begins)?,
            Some(Ok(Piece::Ping(bytes))) => {
                let _ = pongs.try_send(websocket::pong(&bytes));
                continue;
            }
            Some(Err(error)) if error.kind() == io::ErrorKind::InvalidData => return Err(error),
            Some(Ok(Piece::Close) | Err(_)) | None => return Ok(Left::Caller),
        };
        let written = match step {
            Step::Nothing => Ok(()),
            Step::Data { stream, bytes } => write(to_runtime, spdy::data_head(stream, bytes.len()), bytes).await,
            Step::End { stream } => write(to_runtime, spdy::end(stream), Bytes::new()).await,
        };
        if written.is_err() {
            return Ok(Left::Runtime);
        }
    }
}

/// Runs until the command has ended; returns its status.
async fn carry_output(
    mut output: Output<'_>,
    mut from_runtime: FromRuntime,
    to_caller: &mut WriteHalf<Stream>,
    pings: mpsc::Sender<u32>,
    mut pongs: mpsc::Receiver<Bytes>,
) -> io::Result<Option<Value>> {
    while !output.is_over() {
        // Cancel safe: neither consumes data before it completes.
        let frame = tokio::select! {
            biased;
            Some(pong) = pongs.recv() => {
                write(to_caller, pong, Bytes::new()).await?;
                continue;
            }
            frame = from_runtime.next() => frame,
        };
        match frame {
            Some(Ok(Frame::Data { stream, bytes })) => {
                if let Some((channel, bytes)) = output.take(stream, bytes) {
                    show(to_caller, channel, bytes).await?;
                }
            }
            Some(Ok(Frame::End { stream })) => output.ended(stream),
            Some(Ok(Frame::Ping(id))) => drop(pings.try_send(id)),
            Some(Err(error)) => return Ok(Some(internal_error(&error.to_string()))),
            None => break,
        }
    }
    Ok(Some(output.status()))
}

async fn show(to_caller: &mut WriteHalf<Stream>, channel: u8, bytes: BytesMut) -> io::Result<()> {
    let mut head = websocket::message_head(bytes.len() + 1);
    head.put_u8(channel);
    write(to_caller, head, bytes).await
}

/// The channels of one command, in the order in which their streams are opened.
#[derive(Debug)]
struct Channels(Vec<u8>);

impl Channels {
    fn of(streams: Streams) -> Self {
        let Streams { stdin, stdout, stderr, tty } = streams;
        let wanted = [(ERROR, true), (STDIN, stdin), (STDOUT, stdout), (STDERR, stderr), (RESIZE, tty)];
        Channels(wanted.into_iter().filter(|(_, is_wanted)| *is_wanted).map(|(channel, _)| channel).collect())
    }

    fn opening(&self) -> Bytes {
        let kind = |channel: &u8| match *channel {
            STDIN => "stdin",
            STDOUT => "stdout",
            STDERR => "stderr",
            RESIZE => "resize",
            _ => "error",
        };
        spdy::open(&self.0.iter().map(|channel| ("streamType", kind(channel))).collect::<Vec<_>>())
    }

    fn first_output(&self) -> u8 {
        [STDOUT, STDERR].into_iter().find(|channel| self.0.contains(channel)).unwrap_or(ERROR)
    }

    fn stream(&self, channel: u8) -> Option<u32> {
        self.0.iter().position(|known| *known == channel).map(spdy::stream_id)
    }

    fn channel(&self, stream: u32) -> Option<u8> {
        self.0.iter().copied().find(|channel| self.stream(*channel) == Some(stream))
    }
}

/// Decodes the caller's messages.
#[derive(Debug)]
struct Input<'a> {
    channels: &'a Channels,
    moved: &'a Notify,
    message: Message,
    has_ended: bool,
}

/// The position in a message.
#[derive(Clone, Copy, Debug)]
enum Message {
    Of(u8),
    /// The next byte is the channel to close.
    Close,
    Closed,
}

#[derive(Debug, PartialEq, Eq)]
enum Step {
    Nothing,
    Data { stream: u32, bytes: BytesMut },
    End { stream: u32 },
}

impl<'a> Input<'a> {
    fn new(channels: &'a Channels, moved: &'a Notify) -> Self {
        Input { channels, moved, message: Message::Closed, has_ended: false }
    }

    fn take(&mut self, mut bytes: BytesMut, begins: bool) -> io::Result<Step> {
        self.moved.notify_one();
        if begins {
            self.message = match bytes.split_to(1)[0] {
                CLOSE => Message::Close,
                channel => Message::Of(channel),
            };
        }
        match (self.message, &bytes[..]) {
            (_, []) => Ok(Step::Nothing),
            (Message::Of(channel), _) => Ok(match self.stream(channel) {
                Some(stream) => Step::Data { stream, bytes },
                None => Step::Nothing,
            }),
            (Message::Close, [channel]) => {
                self.message = Message::Closed;
                let stream = self.stream(*channel).filter(|_| *channel == STDIN);
                self.has_ended |= stream.is_some();
                Ok(stream.map_or(Step::Nothing, |stream| Step::End { stream }))
            }
            (Message::Close | Message::Closed, _) => {
                let text = "the caller's WebSocket says more than which channel has ended";
                Err(io::Error::new(io::ErrorKind::InvalidData, text))
            }
        }
    }

    /// The destination of the caller's data.
    fn stream(&self, channel: u8) -> Option<u32> {
        let is_heard = channel == RESIZE || (channel == STDIN && !self.has_ended);
        self.channels.stream(channel).filter(|_| is_heard)
    }
}

/// The command's output and its end.
#[derive(Debug)]
struct Output<'a> {
    channels: &'a Channels,
    moved: &'a Notify,
    open: Vec<u8>,
    status: Vec<u8>,
}

impl<'a> Output<'a> {
    fn new(channels: &'a Channels, moved: &'a Notify) -> Self {
        let open = channels.0.iter().copied().filter(|channel| [STDOUT, STDERR, ERROR].contains(channel)).collect();
        Output { channels, moved, open, status: Vec::new() }
    }

    /// Output, and its channel.
    fn take(&mut self, stream: u32, bytes: BytesMut) -> Option<(u8, BytesMut)> {
        self.moved.notify_one();
        match self.channels.channel(stream)? {
            ERROR => {
                let room = STATUS_MAX_BYTES - self.status.len();
                self.status.extend_from_slice(&bytes[..bytes.len().min(room)]);
                None
            }
            channel => self.open.contains(&channel).then_some((channel, bytes)),
        }
    }

    fn ended(&mut self, stream: u32) {
        let channel = self.channels.channel(stream);
        self.open.retain(|open| Some(*open) != channel);
    }

    fn is_over(&self) -> bool {
        self.open.is_empty()
    }

    /// The runtime's status. A connection that ended without one is an error.
    fn status(&self) -> Value {
        if self.status.is_empty() && self.is_over() {
            return json!({ "metadata": {}, "status": "Success" });
        }
        if self.status.is_empty() {
            return internal_error("the runtime ended the connection before it said how the command ended");
        }
        let said = serde_json::from_slice(&self.status).ok().filter(Value::is_object);
        said.unwrap_or_else(|| internal_error(&String::from_utf8_lossy(&self.status)))
    }
}

fn internal_error(message: &str) -> Value {
    json!({
        "metadata": {}, "status": "Failure", "reason": "InternalError", "code": 500,
        "message": format!("Internal error occurred: {message}"), "details": { "causes": [{ "message": message }] },
    })
}
