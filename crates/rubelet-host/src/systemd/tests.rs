//! Tests with a peer that replies like systemd, in any order systemd may.

use std::{io::BufRead as _, io::BufReader, thread};

use super::{
    wire::{ERROR, ERROR_NAME, MEMBER, Message, REPLY_SERIAL, RETURN, SIGNAL, SIGNATURE, message},
    *,
};

const JOB: &str = "/org/freedesktop/systemd1/job/7";

/// A call as the peer sees it: its number on the connection, and its content.
struct Call {
    serial: u32,
    message: Message,
}

fn text(text: &str) -> Body {
    Body::default().text(text)
}

fn signature(signature: &str) -> (u8, &'static str, Body) {
    (SIGNATURE, "g", Body::default().signature(signature))
}

fn to(call: &Call) -> (u8, &'static str, Body) {
    (REPLY_SERIAL, "u", Body::default().number(call.serial))
}

fn job_answer(call: &Call) -> Vec<u8> {
    message(RETURN, 1, &[to(call), signature("o")], &text(JOB))
}

fn job_end(job: &str, result: &str) -> Vec<u8> {
    let fields = [(MEMBER, "s", text("JobRemoved")), signature("uoss")];
    message(SIGNAL, 2, &fields, &Body::default().number(7).text(job).text("a.slice").text(result))
}

fn refusal(call: &Call, error: &str) -> Vec<u8> {
    message(ERROR, 3, &[to(call), (ERROR_NAME, "s", text(error)), signature("s")], &text("so it is"))
}

/// Runs `ask` against a peer whose replies `answer` makes; returns the calls.
fn with_peer<T>(
    answer: impl Fn(&Call) -> Vec<Vec<u8>> + Send + 'static,
    ask: impl FnOnce(&mut Systemd<UnixStream>) -> T,
) -> (T, Vec<Message>) {
    let (own, peer) = UnixStream::pair().unwrap();
    let peer = thread::spawn(move || {
        let mut writer = peer.try_clone().unwrap();
        let mut reader = BufReader::new(peer);
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        assert!(line.starts_with("\0AUTH EXTERNAL 3"), "{line:?}");
        writer.write_all(b"OK 1234\r\n").unwrap();
        line.clear();
        reader.read_line(&mut line).unwrap();
        assert_eq!(line, "BEGIN\r\n");
        let mut calls = Vec::new();
        while let Ok(message) = Message::read(&mut reader) {
            let call = Call { serial: u32::try_from(calls.len()).unwrap() + 1, message };
            for message in answer(&call) {
                writer.write_all(&message).unwrap();
            }
            calls.push(call.message);
        }
        calls
    });
    let mut systemd = Systemd(Connection::new(own).unwrap());
    let result = ask(&mut systemd);
    drop(systemd);
    (result, peer.join().unwrap())
}

#[test]
fn slice_exists_even_if_its_job_ends_before_the_reply() {
    let both = |call: &Call| vec![job_end("/other", "failed"), job_end(JOB, "done"), job_answer(call)];
    let (result, calls) =
        with_peer(both, |systemd| systemd.start_slice("a-b.slice", &[("TasksMax", Value::Number(9))]));
    result.unwrap();
    assert_eq!((calls[0].member.as_str(), calls[0].signature.as_str()), ("StartTransientUnit", "ssa(sv)a(sa(sv))"));
    let late = |call: &Call| vec![job_answer(call), job_end(JOB, "timeout")];
    let (result, _) = with_peer(late, |systemd| systemd.stop("a.slice"));
    assert_eq!(result.unwrap_err().to_string(), "systemd does not stop a.slice: timeout");
}

#[test]
fn existing_slice_gets_limits_and_missing_slice_needs_no_stop() {
    let there = |call: &Call| match call.message.member.as_str() {
        "StartTransientUnit" => vec![refusal(call, "org.freedesktop.systemd1.UnitExists")],
        "StopUnit" => vec![refusal(call, "org.freedesktop.systemd1.NoSuchUnit")],
        _ => vec![message(RETURN, 1, &[to(call)], &Body::default())],
    };
    let (results, calls) = with_peer(there, |systemd| [systemd.start_slice("a.slice", &[]), systemd.stop("a.slice")]);
    assert!(results.iter().all(Result::is_ok), "{results:?}");
    let called: Vec<_> = calls.iter().map(|call| (call.member.as_str(), call.signature.as_str())).collect();
    let expected = [("StartTransientUnit", "ssa(sv)a(sa(sv))"), ("SetUnitProperties", "sba(sv)"), ("StopUnit", "ss")];
    assert_eq!(called, expected);
    let refused = |call: &Call| vec![refusal(call, "org.freedesktop.DBus.Error.AccessDenied")];
    let (result, _) = with_peer(refused, |systemd| systemd.start_slice("a.slice", &[]));
    assert_eq!(result.unwrap_err().to_string(), "systemd does not start a.slice: so it is");
}

/// Byte for byte as in the D-Bus specification.
#[test]
#[cfg(target_endian = "little")]
fn properties_have_dbus_wire_format() {
    let body =
        Body::default().properties(&[("A", Value::Flag(true)), ("Bc", Value::Number(5)), ("D", Value::Name("e"))]);
    let fields = [(MEMBER, "s", text("M"))];
    let bytes = message(SIGNAL, 1, &fields, &body);
    let expected = [
        &b"l\x04\0\x01\x46\0\0\0\x01\0\0\0\x0a\0\0\0"[..],
        b"\x03\x01s\0\x01\0\0\0M\0\0\0\0\0\0\0",
        b"\x3e\0\0\0\0\0\0\0",
        b"\x01\0\0\0A\0\x01b\0\0\0\0\x01\0\0\0",
        b"\x02\0\0\0Bc\0\x01t\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0",
        b"\x01\0\0\0D\0\x02as\0\0\0\x06\0\0\0\x01\0\0\0e\0",
    ];
    assert_eq!(bytes, expected.concat());
}

#[test]
fn the_parent_of_a_slice_is_in_its_name() {
    assert_eq!(["a.slice", "a-b.slice", "a-b-pod1_2.slice"].map(parent), ["-.slice", "a.slice", "a-b.slice"]);
}

#[test]
fn announced_length_allocates_nothing_before_the_bytes_arrive() {
    /// The largest buffer it was given to fill.
    struct Largest<'a>(&'a [u8], usize);

    impl Read for Largest<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.1 = self.1.max(buffer.len());
            self.0.read(buffer)
        }
    }

    let mut bytes = message(RETURN, 1, &[signature("s")], &text("all there is"));
    bytes[4..8].copy_from_slice(&(16_u32 << 20).to_ne_bytes());
    let mut stream = Largest(&bytes, 0);
    assert_eq!(Message::read(&mut stream).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    assert!(stream.1 < 64 << 10, "{}", stream.1);
}
