//! WebSocket, the server side.
//!
//! Owns: the handshake, and frames in and out. Message data is passed on as it arrives, so the largest message costs one
//! read buffer. Never: reads or writes a socket, interprets a message.
//! Upstream: `wsstream` over `golang.org/x/net/websocket`, gorilla's `websocket`; RFC 6455.

use std::io;

use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header, response::Builder};
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use tokio_util::codec;

use super::super::HttpError;

/// The GUID that a server appends to the client's key.
const GUID: &str = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
const CONTROL_MAX_BYTES: usize = 125;

pub(super) fn is_websocket(headers: &HeaderMap) -> bool {
    headers.get(header::UPGRADE).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"websocket"))
}

/// The client's subprotocols, in order of preference.
pub(super) fn protocols(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let values = headers.get_all(header::SEC_WEBSOCKET_PROTOCOL).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim)
}

/// A valid upgrade request of a client.
#[derive(Debug)]
pub(super) struct Handshake {
    accept: String,
}

impl Handshake {
    pub(super) fn of(method: &Method, headers: &HeaderMap) -> Result<Self, HttpError> {
        if method != Method::GET {
            return Err(HttpError(StatusCode::METHOD_NOT_ALLOWED, "a WebSocket begins with GET".to_owned()));
        }
        if headers.get(header::SEC_WEBSOCKET_VERSION).is_none_or(|version| version != "13") {
            return Err(HttpError(StatusCode::BAD_REQUEST, "the version of WebSockets here is 13".to_owned()));
        }
        let key =
            headers.get(header::SEC_WEBSOCKET_KEY).and_then(|key| key.to_str().ok()).filter(|key| !key.is_empty());
        let Some(key) = key else {
            return Err(HttpError(
                StatusCode::BAD_REQUEST,
                "a WebSocket needs the header Sec-WebSocket-Key".to_owned(),
            ));
        };
        let hash = digest(&SHA1_FOR_LEGACY_USE_ONLY, format!("{key}{GUID}").as_bytes());
        Ok(Handshake { accept: BASE64.encode(hash) })
    }

    /// The head of the upgrade response.
    pub(super) fn agreed(&self, protocol: &str) -> http::Result<Builder> {
        let answer = http::Response::builder()
            .status(StatusCode::SWITCHING_PROTOCOLS)
            .header(header::CONNECTION, "Upgrade")
            .header(header::UPGRADE, "websocket")
            .header(header::SEC_WEBSOCKET_ACCEPT, &self.accept);
        Ok(answer.header(header::SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_str(protocol)?))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Opcode {
    Continuation = 0,
    Text = 1,
    Binary = 2,
    Close = 8,
    Ping = 9,
    Pong = 10,
}

impl Opcode {
    fn of(first: u8) -> io::Result<Self> {
        use Opcode::{Binary, Close, Continuation, Ping, Pong, Text};
        let known = [Continuation, Text, Binary, Close, Ping, Pong];
        known.into_iter().find(|code| *code as u8 == first & 0x0f).ok_or_else(|| wrong("a frame of an unknown kind"))
    }

    fn is_control(self) -> bool {
        self as u8 >= 8
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    /// Never empty. A message is a piece with `begins`, and those up to the next such piece.
    Data {
        bytes: BytesMut,
        begins: bool,
    },
    /// The server sends it back as a pong.
    Ping(BytesMut),
    Close,
}

/// Decodes a client's bytes to pieces.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    /// Of the current frame: the remaining length, and the mask, rotated to the next byte.
    frame: Option<(u64, [u8; 4])>,
    /// A message is incomplete: the next data frame must continue it.
    is_open: bool,
    /// The next data begins a message.
    begins: bool,
}

impl codec::Decoder for Decoder {
    type Item = Piece;
    type Error = io::Error;

    fn decode(&mut self, buffer: &mut BytesMut) -> io::Result<Option<Piece>> {
        loop {
            if let Some((left, mask)) = &mut self.frame {
                if *left == 0 {
                    self.frame = None;
                    continue;
                }
                let here = usize::try_from(*left).unwrap_or(usize::MAX).min(buffer.len());
                if here == 0 {
                    return Ok(None);
                }
                let mut bytes = buffer.split_to(here);
                unmask(&mut bytes, mask);
                *left -= here as u64;
                return Ok(Some(Piece::Data { bytes, begins: std::mem::take(&mut self.begins) }));
            }
            let Some(head) = Head::read(buffer)? else { return Ok(None) };
            if head.opcode.is_control() {
                match head.control(buffer)? {
                    Control::Awaited => return Ok(None),
                    Control::Nothing => continue,
                    Control::Piece(piece) => return Ok(Some(piece)),
                }
            }
            if self.is_open != (head.opcode == Opcode::Continuation) {
                return Err(wrong("a message that begins inside another, or goes on without a beginning"));
            }
            buffer.advance(head.bytes);
            self.begins |= !self.is_open;
            self.is_open = !head.is_last;
            self.frame = Some((head.length, head.mask));
        }
    }
}

struct Head {
    opcode: Opcode,
    is_last: bool,
    length: u64,
    mask: [u8; 4],
    /// Of the head itself.
    bytes: usize,
}

enum Control {
    /// Incomplete.
    Awaited,
    Nothing,
    Piece(Piece),
}

impl Head {
    /// `None` while it is incomplete.
    fn read(buffer: &[u8]) -> io::Result<Option<Head>> {
        let mut rest = buffer;
        if rest.len() < 2 {
            return Ok(None);
        }
        let (first, second) = (rest.get_u8(), rest.get_u8());
        let (opcode, is_last) = (Opcode::of(first)?, first & 0x80 != 0);
        if first & 0x70 != 0 || second & 0x80 == 0 {
            return Err(wrong("a frame with an extension nobody agreed to, or without a mask"));
        }
        let length = match second & 0x7f {
            126 if rest.len() >= 2 => u64::from(rest.get_u16()),
            127 if rest.len() >= 8 => rest.get_u64(),
            126 | 127 => return Ok(None),
            length => u64::from(length),
        };
        if length >> 63 != 0 || (opcode.is_control() && (!is_last || length > CONTROL_MAX_BYTES as u64)) {
            return Err(wrong("a frame that is too long"));
        }
        if rest.len() < 4 {
            return Ok(None);
        }
        let mask = rest.get_u32().to_be_bytes();
        Ok(Some(Head { opcode, is_last, length, mask, bytes: buffer.len() - rest.len() }))
    }

    fn control(mut self, buffer: &mut BytesMut) -> io::Result<Control> {
        let length = usize::try_from(self.length).map_err(io::Error::other)?;
        if buffer.len() < self.bytes + length {
            return Ok(Control::Awaited);
        }
        buffer.advance(self.bytes);
        let mut bytes = buffer.split_to(length);
        unmask(&mut bytes, &mut self.mask);
        Ok(match self.opcode {
            Opcode::Close => Control::Piece(Piece::Close),
            Opcode::Ping => Control::Piece(Piece::Ping(bytes)),
            Opcode::Continuation | Opcode::Text | Opcode::Binary | Opcode::Pong => Control::Nothing,
        })
    }
}

/// The mask, rotated by the bytes used.
fn unmask(bytes: &mut [u8], mask: &mut [u8; 4]) {
    let wide = u128::from_ne_bytes(std::array::from_fn(|index| mask[index % 4]));
    let (blocks, rest) = bytes.as_chunks_mut();
    for block in blocks {
        *block = (u128::from_ne_bytes(*block) ^ wide).to_ne_bytes();
    }
    for (byte, key) in rest.iter_mut().zip(mask.iter().cycle()) {
        *byte ^= key;
    }
    mask.rotate_left(bytes.len() % 4);
}

fn wrong(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the caller's WebSocket sent {what}"))
}

/// The header of a message of `length` bytes.
pub(super) fn message_head(length: usize) -> BytesMut {
    head(Opcode::Binary, length)
}

pub(super) fn pong(bytes: &[u8]) -> Bytes {
    control(Opcode::Pong, bytes)
}

/// The status code: 1000 normal, 1002 protocol error.
pub(super) fn close(status: u16) -> Bytes {
    control(Opcode::Close, &status.to_be_bytes())
}

fn control(opcode: Opcode, bytes: &[u8]) -> Bytes {
    let mut frame = head(opcode, bytes.len());
    frame.put_slice(bytes);
    frame.freeze()
}

fn head(opcode: Opcode, length: usize) -> BytesMut {
    let mut head = BytesMut::with_capacity(16);
    head.put_u8(0x80 | opcode as u8);
    match (u8::try_from(length), u16::try_from(length)) {
        (Ok(length @ ..=125), _) => head.put_u8(length),
        (_, Ok(length)) => {
            head.put_u8(126);
            head.put_u16(length);
        }
        _ => {
            head.put_u8(127);
            head.put_u64(length as u64);
        }
    }
    head
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::{collection::vec, prelude::*};
    use tokio_util::codec::Decoder as _;

    use super::*;

    /// As a client sends it.
    pub(crate) fn masked(first: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = head(Opcode::Binary, payload.len()).to_vec();
        (frame[0], frame[1]) = (first, frame[1] | 0x80);
        let mut mask = [1, 2, 3, 4];
        frame.extend(mask);
        let mut payload = payload.to_vec();
        unmask(&mut payload, &mut mask);
        frame.extend(payload);
        frame
    }

    /// The pieces of bytes that arrive in parts of this size.
    fn read(bytes: &[u8], part: usize) -> io::Result<Vec<Piece>> {
        let (mut decoder, mut buffer, mut pieces) = (Decoder::default(), BytesMut::new(), Vec::new());
        for part in bytes.chunks(part) {
            buffer.extend_from_slice(part);
            while let Some(piece) = decoder.decode(&mut buffer)? {
                pieces.push(piece);
            }
        }
        Ok(pieces)
    }

    fn messages(pieces: &[Piece]) -> Vec<Vec<u8>> {
        let mut messages: Vec<Vec<u8>> = Vec::new();
        for piece in pieces {
            if let Piece::Data { bytes, begins } = piece {
                if *begins {
                    messages.push(Vec::new());
                }
                messages.last_mut().unwrap().extend_from_slice(bytes);
            }
        }
        messages
    }

    #[test]
    fn accept_key_follows_rfc_6455() {
        let mut headers = HeaderMap::new();
        assert!(Handshake::of(&Method::GET, &headers).is_err());
        headers.insert(header::SEC_WEBSOCKET_VERSION, "13".parse().unwrap());
        headers.insert(header::SEC_WEBSOCKET_KEY, "dGhlIHNhbXBsZSBub25jZQ==".parse().unwrap());
        let handshake = Handshake::of(&Method::GET, &headers).unwrap();
        assert_eq!(handshake.accept, "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
        assert!(Handshake::of(&Method::POST, &headers).is_err());
    }

    #[test]
    fn control_frames_between_message_fragments_are_separated() {
        let sent =
            [masked(0x02, b"one "), masked(0x89, b"ping"), masked(0x00, b""), masked(0x80, b"two"), masked(0x82, b"x")];
        for part in [1, 3, 1000] {
            let pieces = read(&sent.concat(), part).unwrap();
            assert_eq!(messages(&pieces), [b"one two".to_vec(), b"x".to_vec()]);
            assert!(pieces.contains(&Piece::Ping(BytesMut::from(&b"ping"[..]))));
        }
    }

    #[test]
    fn protocol_violations_are_rejected() {
        let unmasked = control(Opcode::Binary, b"x").to_vec();
        let no_end = [[0x82, 0xff].as_slice(), &[0xff; 12]].concat();
        for sent in [
            unmasked,
            no_end,
            masked(0xc2, b"an extension"),
            masked(0x83, b"an unknown kind"),
            masked(0x09, b"a ping in parts"),
            masked(0x89, &[0; 126]),
            masked(0x80, b"goes on without a beginning"),
            [masked(0x02, b"a"), masked(0x82, b"begins inside another")].concat(),
        ] {
            assert_eq!(read(&sent, 1000).unwrap_err().kind(), io::ErrorKind::InvalidData, "{sent:?}");
        }
    }

    #[test]
    fn frame_length_uses_shortest_encoding() {
        let lengths = [0, 125, 126, 65_535, 65_536];
        let heads = lengths.map(|length| message_head(length).to_vec());
        assert_eq!(heads[..3], [vec![0x82, 0], vec![0x82, 125], vec![0x82, 126, 0, 126]]);
        assert_eq!(heads[3..], [vec![0x82, 126, 255, 255], vec![0x82, 127, 0, 0, 0, 0, 0, 1, 0, 0]]);
    }

    proptest! {
        #[test]
        fn messages_arrive_whole_in_whatever_parts_they_come(
            sent in vec(vec(any::<u8>(), 1..300), 1..5), cut in 1_usize..40, part in 1_usize..70,
        ) {
            let mut bytes = Vec::new();
            for message in &sent {
                let frames: Vec<&[u8]> = message.chunks(cut).collect();
                for (number, frame) in frames.iter().enumerate() {
                    let last = if number + 1 == frames.len() { 0x80 } else { 0 };
                    bytes.extend(masked(last | if number == 0 { 2 } else { 0 }, frame));
                }
            }
            prop_assert_eq!(messages(&read(&bytes, part).unwrap()), sent);
        }

        #[test]
        fn random_bytes_cause_no_panic_and_bounded_buffering(
            bytes in vec(any::<u8>(), 0..400), part in 1_usize..70,
        ) {
            let (mut decoder, mut buffer) = (Decoder::default(), BytesMut::new());
            for part in bytes.chunks(part) {
                buffer.extend_from_slice(part);
                loop {
                    match decoder.decode(&mut buffer) {
                        Ok(Some(_)) => {}
                        Ok(None) => break,
                        Err(_) => return Ok(()),
                    }
                }
                prop_assert!(buffer.len() < 14 + CONTROL_MAX_BYTES);
            }
        }
    }
}
