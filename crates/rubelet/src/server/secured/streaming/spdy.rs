//! SPDY/3.1, the client side for a runtime's streaming server.
//!
//! Owns: frames in and out. Never: reads or writes a socket, interprets stream data.
//!
//! The servers of all runtimes use one library, `moby/spdystream`, with two consequences. It has no flow control: it
//! neither sends nor honours window updates, so waiting for one would never end. Backpressure is that of
//! the connection: a slow reader stops reading it. And headers need no compression: a header block is compressed by
//! zlib, and zlib can store bytes uncompressed. Headers of a server are not needed here, so they are skipped.
//! Upstream: `httpstream/spdy` over `moby/spdystream`.

use std::io;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use tokio_util::codec;

const VERSION: u16 = 3;
const FIN: u8 = 1;
const SYN_STREAM: u16 = 1;
const SYN_REPLY: u16 = 2;
const RST_STREAM: u16 = 3;
const PING: u16 = 6;
const HEADERS: u16 = 8;
/// A length is 24 bits.
const MAX_LENGTH: usize = (1 << 24) - 1;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    /// Never empty.
    Data { stream: u32, bytes: BytesMut },
    /// The server has ended this stream.
    End { stream: u32 },
    /// To be sent back.
    Ping(u32),
}

/// Decodes a server's bytes to frames.
#[derive(Debug, Default)]
pub(crate) struct Decoder(Part);

#[derive(Clone, Copy, Debug, Default)]
enum Part {
    #[default]
    Head,
    Data {
        stream: u32,
        left: usize,
        is_last: bool,
    },
    /// The rest of a skipped frame.
    Skip(usize),
}

impl codec::Decoder for Decoder {
    type Item = Frame;
    type Error = io::Error;

    fn decode(&mut self, buffer: &mut BytesMut) -> io::Result<Option<Frame>> {
        loop {
            match self.0 {
                Part::Data { stream, left: 0, is_last } => {
                    self.0 = Part::Head;
                    if is_last {
                        return Ok(Some(Frame::End { stream }));
                    }
                }
                Part::Skip(0) => self.0 = Part::Head,
                Part::Data { .. } | Part::Skip(_) if buffer.is_empty() => return Ok(None),
                Part::Data { stream, left, is_last } => {
                    let bytes = buffer.split_to(left.min(buffer.len()));
                    self.0 = Part::Data { stream, left: left - bytes.len(), is_last };
                    return Ok(Some(Frame::Data { stream, bytes }));
                }
                Part::Skip(left) => {
                    let here = left.min(buffer.len());
                    buffer.advance(here);
                    self.0 = Part::Skip(left - here);
                }
                Part::Head => match self.head(buffer)? {
                    Reached::Nowhere => return Ok(None),
                    Reached::Part => {}
                    Reached::Frame(frame) => return Ok(Some(frame)),
                },
            }
        }
    }
}

enum Reached {
    /// The frame is incomplete.
    Nowhere,
    Part,
    Frame(Frame),
}

impl Decoder {
    fn head(&mut self, buffer: &mut BytesMut) -> io::Result<Reached> {
        let mut rest = &buffer[..];
        if rest.len() < 8 {
            return Ok(Reached::Nowhere);
        }
        let (first, second) = (rest.get_u32(), rest.get_u32());
        let (flags, length) = ((second >> 24) as u8, (second & 0x00ff_ffff) as usize);
        let is_last = flags & FIN != 0;
        if first >> 31 == 0 {
            buffer.advance(8);
            self.0 = Part::Data { stream: first, left: length, is_last };
            return Ok(Reached::Part);
        }
        let (version, kind) = ((first >> 16) as u16 & 0x7fff, first as u16);
        if version != VERSION {
            return Err(wrong(&format!("version {version}")));
        }
        if !matches!(kind, SYN_REPLY | RST_STREAM | PING | HEADERS) {
            buffer.advance(8);
            self.0 = Part::Skip(length);
            return Ok(Reached::Part);
        }
        if length < 4 {
            return Err(wrong("a frame that is too short"));
        }
        if rest.len() < 4 {
            return Ok(Reached::Nowhere);
        }
        let about = rest.get_u32();
        buffer.advance(12);
        self.0 = Part::Skip(length - 4);
        Ok(match kind {
            PING => Reached::Frame(Frame::Ping(about)),
            RST_STREAM => Reached::Frame(Frame::End { stream: about }),
            _ if is_last => Reached::Frame(Frame::End { stream: about }),
            _ => Reached::Part,
        })
    }
}

fn wrong(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the runtime's streaming server sent {what}"))
}

/// The id of a client's n-th stream.
pub(super) fn stream_id(number: usize) -> u32 {
    u32::try_from(number * 2 + 1).expect("a handful of streams")
}

/// Opens one stream per header, in this order and before anything else is sent.
pub(super) fn open(headers: &[(&str, &str)]) -> Bytes {
    let mut frames = BytesMut::new();
    for (number, (name, value)) in headers.iter().enumerate() {
        let mut block = BytesMut::new();
        block.put_u32(1);
        for text in [name.to_ascii_lowercase().as_str(), value] {
            block.put_u32(u32::try_from(text.len()).expect("a header is short"));
            block.put_slice(text.as_bytes());
        }
        let mut body = BytesMut::new();
        body.put_u32(stream_id(number));
        body.put_u32(0); // belongs to no other stream
        body.put_u16(0); // priority and slot
        if number == 0 {
            body.put_u16(0x7801); // one zlib stream goes through all header blocks
        }
        put_stored(&mut body, &block);
        // The reader flushes at an empty block.
        put_stored(&mut body, &[]);
        put_control(&mut frames, SYN_STREAM, &body);
    }
    frames.freeze()
}

/// An uncompressed zlib block.
fn put_stored(to: &mut BytesMut, bytes: &[u8]) {
    let length = u16::try_from(bytes.len()).expect("a header is short");
    to.put_u8(0);
    to.put_u16_le(length);
    to.put_u16_le(!length);
    to.put_slice(bytes);
}

fn put_control(to: &mut BytesMut, kind: u16, body: &[u8]) {
    to.put_u16(0x8000 | VERSION);
    to.put_u16(kind);
    to.put_u32(u32::try_from(body.len()).expect("our own frames are short"));
    to.put_slice(body);
}

pub(super) fn ping(id: u32) -> Bytes {
    let mut frame = BytesMut::new();
    put_control(&mut frame, PING, &id.to_be_bytes());
    frame.freeze()
}

/// The header of a data frame.
pub(super) fn data_head(stream: u32, length: usize) -> Bytes {
    assert!(length <= MAX_LENGTH, "no read is so large");
    let mut head = BytesMut::with_capacity(8);
    head.put_u32(stream);
    head.put_u32(length as u32);
    head.freeze()
}

/// Ends our side of the stream.
pub(super) fn end(stream: u32) -> Bytes {
    let mut frame = BytesMut::with_capacity(8);
    frame.put_u32(stream);
    frame.put_u32(u32::from(FIN) << 24);
    frame.freeze()
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::{collection::vec, prelude::*};
    use tokio_util::codec::Decoder as _;

    use super::*;

    /// As a server sends it.
    pub(crate) fn control(kind: u16, flags: u8, body: &[u8]) -> Vec<u8> {
        let mut frame = BytesMut::new();
        put_control(&mut frame, kind, body);
        frame[4] = flags;
        frame.to_vec()
    }

    pub(crate) fn data(stream: u32, bytes: &[u8]) -> Vec<u8> {
        [&data_head(stream, bytes.len())[..], bytes].concat()
    }

    fn read(bytes: &[u8], part: usize) -> io::Result<Vec<Frame>> {
        let (mut decoder, mut buffer, mut frames) = (Decoder::default(), BytesMut::new(), Vec::new());
        for part in bytes.chunks(part) {
            buffer.extend_from_slice(part);
            while let Some(frame) = decoder.decode(&mut buffer)? {
                frames.push(frame);
            }
        }
        Ok(frames)
    }

    #[test]
    fn stream_header_blocks_are_valid_zlib() {
        let frames = open(&[("streamType", "error"), ("streamType", "stdin")]);
        let block = |kind: &str| [&[0, 0, 0, 1, 0, 0, 0, 10][..], b"streamtype\0\0\0\x05", kind.as_bytes()].concat();
        let syn = |id: u8, zlib: &[u8], block: &[u8]| {
            let stored =
                [&[0, block.len() as u8, 0, !(block.len() as u8), 255][..], block, &[0, 0, 0, 255, 255]].concat();
            let body = [&[0, 0, 0, id, 0, 0, 0, 0, 0, 0][..], zlib, &stored].concat();
            [&[0x80, 3, 0, 1, 0, 0, 0, body.len() as u8][..], &body].concat()
        };
        let expected = [syn(1, &[0x78, 1], &block("error")), syn(3, &[], &block("stdin"))].concat();
        assert_eq!(frames, expected);
    }

    #[test]
    fn server_frames_are_decoded_and_irrelevant_ones_skipped() {
        let sent = [
            control(SYN_REPLY, 0, &[0, 0, 0, 1, 9, 9, 9]),
            control(4, 0, &[0; 12]),
            data(1, b"out"),
            control(PING, 0, &[0, 0, 0, 2]),
            end(1).to_vec(),
            control(RST_STREAM, 0, &[0, 0, 0, 3, 0, 0, 0, 5]),
            control(7, 0, &[0; 8]),
            control(SYN_REPLY, FIN, &[0, 0, 0, 5]),
        ];
        let out = Frame::Data { stream: 1, bytes: BytesMut::from(&b"out"[..]) };
        let ends = [1, 3, 5].map(|stream| Frame::End { stream });
        let expected = [&[out, Frame::Ping(2)][..], &ends].concat();
        assert_eq!(read(&sent.concat(), 1000).unwrap(), expected);
        assert_eq!(read(&sent.concat(), 1).unwrap().len(), expected.len() + 2, "data comes on as it arrives");
    }

    #[test]
    fn wrong_version_and_truncated_frames_are_rejected() {
        let mut strange = control(PING, 0, &[0; 4]);
        strange[1] = 2;
        for sent in [strange, control(PING, 0, &[0; 3])] {
            assert_eq!(read(&sent, 100).unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic_or_hold_more_than_a_head(bytes in vec(any::<u8>(), 0..400), part in 1_usize..70) {
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
                prop_assert!(buffer.len() < 12);
            }
        }
    }
}
