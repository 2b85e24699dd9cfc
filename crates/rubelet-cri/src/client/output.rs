//! Cuts the output of a command while it is received.
//!
//! Owns: the body of an `ExecSync` response, read piece by piece, so that of each stream no more than a limit is held.
//! gRPC's own decoder holds a whole message first, and a runtime sends up to 16 MiB of output in one.

use http_body_util::BodyExt as _;
use prost::Message as _;
use tonic::{
    body::Body,
    codegen::{BoxFuture, Bytes, Context, Poll, Service, http},
    transport::{Channel, Error},
};

use crate::v1::ExecSyncResponse;

/// A channel whose every response is an `ExecSyncResponse`.
#[derive(Clone, Debug)]
pub(super) struct CutOutput {
    pub channel: Channel,
    /// Of each stream.
    pub limit_bytes: usize,
}

impl Service<http::Request<Body>> for CutOutput {
    type Response = http::Response<Body>;
    type Error = Error;
    type Future = BoxFuture<Self::Response, Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.channel.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let answer = self.channel.call(request);
        let mut cutter = Cutter::new(self.limit_bytes);
        Box::pin(async move {
            let cut =
                move |body: Body| Body::new(body.map_frame(move |frame| frame.map_data(|data| cutter.pass(&data))));
            Ok(answer.await?.map(cut))
        })
    }
}

const HEAD_BYTES: usize = 5;
const STDOUT: u64 = 1;
const STDERR: u64 = 2;
const EXIT_CODE: u64 = 3;
/// A message that no decoder accepts, for a malformed one.
const MALFORMED: [u8; 6] = [0, 0, 0, 0, 1, 0xff];

/// Reads gRPC messages and their fields as they come; writes each again, cut, when it is complete.
#[derive(Debug)]
struct Cutter {
    limit_bytes: usize,
    place: Place,
    /// Of the message.
    left_bytes: u64,
    number: Number,
    message: ExecSyncResponse,
}

#[derive(Clone, Copy, Debug)]
enum Place {
    Head {
        bytes: [u8; HEAD_BYTES],
        filled: usize,
    },
    Key,
    Length {
        field: u64,
    },
    Content {
        field: u64,
        left_bytes: u64,
    },
    Value {
        field: u64,
    },
    /// A compressed message, which was not asked for, or a wire type that does not exist: the decoder is to report it.
    Opaque,
}

const START: Place = Place::Head { bytes: [0; HEAD_BYTES], filled: 0 };

impl Cutter {
    fn new(limit_bytes: usize) -> Self {
        Cutter {
            limit_bytes,
            place: START,
            left_bytes: 0,
            number: Number::default(),
            message: ExecSyncResponse::default(),
        }
    }

    fn pass(&mut self, data: &[u8]) -> Bytes {
        let (mut data, mut written) = (data, Vec::new());
        while let Some((first, rest)) = data.split_first() {
            match self.place {
                Place::Opaque => {
                    written.extend_from_slice(data);
                    break;
                }
                Place::Head { bytes, filled } => {
                    data = rest;
                    self.read_head(bytes, filled, *first, &mut written);
                }
                Place::Content { field, left_bytes } => {
                    let most = usize::try_from(left_bytes.min(self.left_bytes)).unwrap_or(usize::MAX);
                    let (content, after) = data.split_at(most.min(data.len()));
                    data = after;
                    self.keep(field, content);
                    self.left_bytes = self.left_bytes.saturating_sub(content.len() as u64);
                    let left_bytes = left_bytes.saturating_sub(content.len() as u64);
                    self.place = if left_bytes == 0 { Place::Key } else { Place::Content { field, left_bytes } };
                    self.end_if_complete(&mut written);
                }
                Place::Key | Place::Length { .. } | Place::Value { .. } => {
                    data = rest;
                    self.left_bytes = self.left_bytes.saturating_sub(1);
                    if let Some(number) = self.number.take(*first) {
                        self.read_number(number);
                    }
                    self.end_if_complete(&mut written);
                }
            }
        }
        written.into()
    }

    fn read_head(&mut self, mut bytes: [u8; HEAD_BYTES], filled: usize, byte: u8, written: &mut Vec<u8>) {
        bytes[filled] = byte;
        self.place = Place::Head { bytes, filled: filled + 1 };
        if filled + 1 < HEAD_BYTES {
            return;
        }
        let [compression, length @ ..] = bytes;
        if compression != 0 {
            written.extend(bytes);
            self.place = Place::Opaque;
            return;
        }
        self.left_bytes = u32::from_be_bytes(length).into();
        self.place = Place::Key;
        self.end_if_complete(written);
    }

    fn read_number(&mut self, number: u64) {
        self.place = match self.place {
            Place::Key => {
                let field = number >> 3;
                match number & 7 {
                    0 => Place::Value { field },
                    1 => Place::Content { field: 0, left_bytes: 8 },
                    2 => Place::Length { field },
                    5 => Place::Content { field: 0, left_bytes: 4 },
                    // Skips to the end of the message, which is then malformed.
                    _ => Place::Content { field: 0, left_bytes: u64::MAX },
                }
            }
            Place::Length { field } => {
                match field {
                    STDOUT => self.message.stdout.clear(),
                    STDERR => self.message.stderr.clear(),
                    _ => {}
                }
                if number == 0 { Place::Key } else { Place::Content { field, left_bytes: number } }
            }
            Place::Value { field } => {
                if field == EXIT_CODE {
                    // Protobuf sends an int32 sign-extended.
                    self.message.exit_code = number as i32;
                }
                Place::Key
            }
            other @ (Place::Head { .. } | Place::Content { .. } | Place::Opaque) => other,
        };
    }

    fn keep(&mut self, field: u64, content: &[u8]) {
        let stream = match field {
            STDOUT => &mut self.message.stdout,
            STDERR => &mut self.message.stderr,
            _ => return,
        };
        let room = self.limit_bytes.saturating_sub(stream.len());
        stream.extend_from_slice(&content[..room.min(content.len())]);
    }

    fn end_if_complete(&mut self, written: &mut Vec<u8>) {
        if self.left_bytes > 0 {
            return;
        }
        let message = std::mem::take(&mut self.message);
        let is_whole = matches!(self.place, Place::Key) && self.number == Number::default();
        match u32::try_from(message.encoded_len()) {
            Ok(length) if is_whole => {
                written.push(0);
                written.extend(length.to_be_bytes());
                written.extend(message.encode_to_vec());
            }
            Ok(_) | Err(_) => written.extend(MALFORMED),
        }
        (self.place, self.number) = (START, Number::default());
    }
}

/// A protobuf varint in parts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Number {
    value: u64,
    bits: u32,
}

impl Number {
    /// The number, with its last byte. Bits beyond the sixty-fourth are dropped.
    fn take(&mut self, byte: u8) -> Option<u64> {
        self.value |= u64::from(byte & 0x7f).checked_shl(self.bits).unwrap_or(0);
        self.bits = self.bits.saturating_add(7);
        if byte & 0x80 != 0 {
            return None;
        }
        Some(std::mem::take(self).value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn framed(message: &[u8]) -> Vec<u8> {
        let head = [&[0][..], &u32::try_from(message.len()).unwrap().to_be_bytes()].concat();
        [&head, message].concat()
    }

    fn cut(sent: &[u8], piece_bytes: usize) -> Vec<u8> {
        let mut cutter = Cutter::new(10);
        let mut received = Vec::new();
        for piece in sent.chunks(piece_bytes) {
            received.extend(cutter.pass(piece));
            assert!(cutter.message.stdout.len() <= 10 && cutter.message.stderr.len() <= 10);
        }
        received
    }

    #[test]
    fn output_is_cut_however_the_message_comes_in_pieces() {
        let cases = [
            (b"".to_vec(), b"".to_vec(), 0),
            (b"short".to_vec(), b"".to_vec(), -1),
            (vec![b'o'; 700], vec![b'e'; 300], 137),
            (vec![b'o'; 10], vec![b'e'; 11], i32::MIN),
        ];
        for (stdout, stderr, exit_code) in cases {
            let sent =
                framed(&ExecSyncResponse { stdout: stdout.clone(), stderr: stderr.clone(), exit_code }.encode_to_vec());
            let kept = |stream: &[u8]| stream[..stream.len().min(10)].to_vec();
            let expected = ExecSyncResponse { stdout: kept(&stdout), stderr: kept(&stderr), exit_code };
            for piece_bytes in [1, 2, 7, sent.len()] {
                assert_eq!(cut(&sent, piece_bytes), framed(&expected.encode_to_vec()), "{exit_code} {piece_bytes}");
            }
        }
    }

    #[test]
    fn unknown_fields_are_skipped() {
        let known = ExecSyncResponse { stdout: b"a".to_vec(), stderr: Vec::new(), exit_code: 3 }.encode_to_vec();
        // Field 9 as a number, eight bytes, a string and four bytes.
        let unknown = [0x48, 0x96, 0x01, 0x49, 1, 2, 3, 4, 5, 6, 7, 8, 0x4a, 2, b'x', b'y', 0x4d, 1, 2, 3, 4];
        assert_eq!(cut(&framed(&[&unknown[..], &known].concat()), 3), framed(&known));
    }

    #[test]
    fn malformed_message_is_passed_on_unchanged() {
        // A stream longer than its message, a number without an end, a wire type that does not exist.
        for message in [&[0x0a, 200, b'x'][..], &[0x18, 0x80], &[0x0f, 1]] {
            assert_eq!(cut(&framed(message), 1), MALFORMED);
        }
        let compressed = [1, 0, 0, 0, 1, 7];
        assert_eq!(cut(&compressed, 1), compressed);
    }
}
