//! The part of D-Bus that calls to systemd's manager need.
//!
//! Owns: encoding and decoding messages. Upstream: `github.com/godbus/dbus`.

use std::io::{self, Read, Write};

use super::{Property, Value};

const CALL: u8 = 1;
pub(super) const RETURN: u8 = 2;
pub(super) const ERROR: u8 = 3;
pub(super) const SIGNAL: u8 = 4;

/// The codes of header fields.
const PATH: u8 = 1;
const INTERFACE: u8 = 2;
pub(super) const MEMBER: u8 = 3;
pub(super) const ERROR_NAME: u8 = 4;
pub(super) const REPLY_SERIAL: u8 = 5;
pub(super) const SIGNATURE: u8 = 8;

const OWN_ORDER: u8 = if cfg!(target_endian = "little") { b'l' } else { b'B' };

/// Far larger than any message of systemd.
const LARGEST: usize = 16 << 20;

#[derive(Debug)]
pub(super) struct Connection<S> {
    stream: S,
    serial: u32,
    /// Jobs that ended before they were awaited, with their results.
    ended: Vec<(String, String)>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// With its first text, if it has one.
    Return(String),
    Error {
        name: String,
        text: String,
    },
}

impl<S: Read + Write> Connection<S> {
    /// Authenticates with our user id, which the kernel verifies.
    pub(super) fn new(mut stream: S) -> io::Result<Self> {
        let uid = rustix::process::geteuid().as_raw().to_string();
        let uid: String = uid.bytes().map(|digit| format!("{digit:02x}")).collect();
        stream.write_all(format!("\0AUTH EXTERNAL {uid}\r\n").as_bytes())?;
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n") && answer.len() < 1024 {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            answer.extend(byte);
        }
        if !answer.starts_with(b"OK ") {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it does not let us in"));
        }
        stream.write_all(b"BEGIN\r\n")?;
        Ok(Connection { stream, serial: 0, ended: Vec::new() })
    }

    /// Calls systemd's manager.
    pub(super) fn call(&mut self, method: &str, signature: &str, arguments: &Body) -> io::Result<Reply> {
        self.serial += 1;
        let fields = [
            (PATH, "o", Body::default().text("/org/freedesktop/systemd1")),
            (INTERFACE, "s", Body::default().text("org.freedesktop.systemd1.Manager")),
            (MEMBER, "s", Body::default().text(method)),
            (SIGNATURE, "g", Body::default().signature(signature)),
        ];
        self.stream.write_all(&message(CALL, self.serial, &fields, arguments))?;
        loop {
            let message = self.receive()?;
            if message.reply_serial == Some(self.serial) {
                let text =
                    if message.signature.starts_with(['s', 'o']) { Cursor::new(&message.body).text()? } else { "" };
                return Ok(match message.kind {
                    RETURN => Reply::Return(text.to_owned()),
                    ERROR => Reply::Error { name: message.error.clone(), text: text.to_owned() },
                    _ => return Err(malformed()),
                });
            }
        }
    }

    /// Waits for the end of a job.
    pub(super) fn job_result(&mut self, job: &str) -> io::Result<String> {
        loop {
            if let Some(at) = self.ended.iter().position(|(ended, _)| ended == job) {
                return Ok(self.ended.swap_remove(at).1);
            }
            self.receive()?;
        }
    }

    fn receive(&mut self) -> io::Result<Message> {
        let message = Message::read(&mut self.stream)?;
        if message.kind == SIGNAL && message.member == "JobRemoved" && message.signature == "uoss" {
            let mut body = Cursor::new(&message.body);
            body.number()?;
            let job = body.text()?.to_owned();
            body.text()?;
            self.ended.push((job, body.text()?.to_owned()));
        }
        Ok(message)
    }
}

/// The used part of a message.
#[derive(Debug, Default)]
pub(super) struct Message {
    pub kind: u8,
    pub reply_serial: Option<u32>,
    pub member: String,
    pub error: String,
    pub signature: String,
    pub body: Vec<u8>,
}

impl Message {
    pub(super) fn read(stream: &mut impl Read) -> io::Result<Self> {
        let mut head = [0; 16];
        stream.read_exact(&mut head)?;
        if head[0] != OWN_ORDER {
            return Err(malformed());
        }
        let mut sizes = Cursor { bytes: &head, at: 4 };
        let (body_length, _serial, fields_length) = (sizes.number()?, sizes.number()?, sizes.number()?);
        let (body_length, fields_length) = (body_length as usize, fields_length as usize);
        if body_length > LARGEST || fields_length > LARGEST {
            return Err(malformed());
        }
        let fields = read_bytes(stream, fields_length.next_multiple_of(8))?;
        let body = read_bytes(stream, body_length)?;
        let mut message = Message { kind: head[1], body, ..Message::default() };
        let mut fields = Cursor::new(&fields[..fields_length]);
        while !fields.is_at_end() {
            message.take_field(&mut fields)?;
        }
        Ok(message)
    }

    fn take_field(&mut self, fields: &mut Cursor<'_>) -> io::Result<()> {
        fields.align(8);
        let code = fields.byte()?;
        match fields.signature()? {
            "s" | "o" => {
                let text = fields.text()?;
                match code {
                    MEMBER => text.clone_into(&mut self.member),
                    ERROR_NAME => text.clone_into(&mut self.error),
                    _ => {}
                }
            }
            "g" => fields.signature()?.clone_into(&mut self.signature),
            "u" => {
                let number = fields.number()?;
                if code == REPLY_SERIAL {
                    self.reply_serial = Some(number);
                }
            }
            _ => return Err(malformed()),
        }
        Ok(())
    }
}

/// Memory is used for what arrives, not for what a head announces.
fn read_bytes(stream: &mut impl Read, count: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    stream.by_ref().take(count as u64).read_to_end(&mut bytes)?;
    if bytes.len() == count { Ok(bytes) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// A field of the header is a code, the type of its value (a letter), and the value.
pub(super) fn message(kind: u8, serial: u32, fields: &[(u8, &str, Body)], body: &Body) -> Vec<u8> {
    let mut head = Body(vec![OWN_ORDER, kind, 0, 1]).number(length(&body.0)).number(serial);
    let start = head.0.len();
    head = head.number(0);
    for (code, letter, value) in fields {
        head.align(8);
        head.0.push(*code);
        head = head.signature(letter);
        // Four bytes past a multiple of eight, where numbers and strings may begin.
        head.0.extend(&value.0);
    }
    let fields = length(&head.0[start + 4..]);
    head.0[start..start + 4].copy_from_slice(&fields.to_ne_bytes());
    head.align(8);
    head.0.extend(&body.0);
    head.0
}

/// Values in sequence, each at its alignment.
#[derive(Debug, Default)]
pub(super) struct Body(Vec<u8>);

impl Body {
    pub(super) fn number(mut self, number: u32) -> Self {
        self.align(4);
        self.0.extend(number.to_ne_bytes());
        self
    }

    pub(super) fn text(self, text: &str) -> Self {
        let mut body = self.number(length(text.as_bytes()));
        body.0.extend(text.as_bytes());
        body.0.push(0);
        body
    }

    pub(super) fn flag(self, flag: bool) -> Self {
        self.number(flag.into())
    }

    /// `a(sv)`.
    pub(super) fn properties(mut self, properties: &[Property<'_>]) -> Self {
        self = self.number(0);
        let length_at = self.0.len() - 4;
        self.align(8);
        let start = self.0.len();
        for (name, value) in properties {
            self.align(8);
            self = self.text(name);
            self = match value {
                Value::Flag(flag) => self.signature("b").flag(*flag),
                Value::Text(text) => self.signature("s").text(text),
                Value::Name(name) => {
                    // The length of the list: that of its one entry, with the length before and the NUL after it.
                    self.signature("as").number(length(name.as_bytes()) + 5).text(name)
                }
                Value::Number(number) => {
                    self = self.signature("t");
                    self.align(8);
                    self.0.extend(number.to_ne_bytes());
                    self
                }
            };
        }
        let bytes = length(&self.0[start..]);
        self.0[length_at..length_at + 4].copy_from_slice(&bytes.to_ne_bytes());
        self
    }

    /// An empty list of structures.
    pub(super) fn empty_structs(self) -> Self {
        let mut body = self.number(0);
        body.align(8);
        body
    }

    pub(super) fn signature(mut self, signature: &str) -> Self {
        self.0.push(u8::try_from(signature.len()).expect("signatures are short"));
        self.0.extend(signature.as_bytes());
        self.0.push(0);
        self
    }

    fn align(&mut self, to: usize) {
        self.0.resize(self.0.len().next_multiple_of(to), 0);
    }
}

/// Decodes what [`Body`] encodes.
#[derive(Debug)]
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        Cursor { bytes, at: 0 }
    }

    fn is_at_end(&self) -> bool {
        self.at >= self.bytes.len()
    }

    fn align(&mut self, to: usize) {
        self.at = self.at.next_multiple_of(to);
    }

    fn take(&mut self, count: usize) -> io::Result<&'a [u8]> {
        let taken = self.bytes.get(self.at..).and_then(|rest| rest.get(..count)).ok_or_else(malformed)?;
        self.at += count;
        Ok(taken)
    }

    fn byte(&mut self) -> io::Result<u8> {
        Ok(self.take(1)?[0])
    }

    fn number(&mut self) -> io::Result<u32> {
        self.align(4);
        let bytes = self.take(4)?.try_into().expect("four were taken");
        Ok(u32::from_ne_bytes(bytes))
    }

    fn text(&mut self) -> io::Result<&'a str> {
        let length = self.number()? as usize;
        self.characters(length)
    }

    fn signature(&mut self) -> io::Result<&'a str> {
        let length = usize::from(self.byte()?);
        self.characters(length)
    }

    /// A NUL follows them.
    fn characters(&mut self, count: usize) -> io::Result<&'a str> {
        let text = std::str::from_utf8(self.take(count)?).map_err(|_| malformed())?;
        self.byte()?;
        Ok(text)
    }
}

fn length(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).expect("we write no long messages")
}

fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "systemd sent something that is no message")
}
