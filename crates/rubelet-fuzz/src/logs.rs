//! Logs of containers, also rotated and compressed ones.
//!
//! Owns: that no line is lost, against a reader that has everything in memory.

use std::{cell::OnceCell, fs, io::Read as _};

use flate2::read::MultiGzDecoder;
use rubelet::{fuzzing, observe::termination_message::last_words};
use tokio::runtime::Runtime;

use crate::{choice, node_files::scratch_dir};

/// Upstream's limit of a termination message from a log; a character that is not UTF-8 is replaced by one of three bytes.
const LAST_WORDS_BYTES: usize = 2048 * 3;
const LIVE: &[u8] = b"2026-11-15T10:00:00Z stdout F live\n2026-11-15T10:00:01Z stderr P half\n";
const TAILS: [u64; 4] = [0, 1, 3, 9];

pub(crate) fn log_lines(data: &[u8]) -> Option<()> {
    let (part, log) = choice(data);
    for has_times in [false, true] {
        let expected = shown(&[log], has_times);
        assert_eq!(fuzzing::log_lines([log], has_times), expected);
        assert_eq!(fuzzing::log_lines(log.chunks(usize::from(part).max(1)), has_times), expected);
    }
    assert!(last_words(log).len() <= LAST_WORDS_BYTES);
    Some(())
}

/// The lines of several files, each with an end even if its last line has none.
fn shown(files: &[&[u8]], has_times: bool) -> Vec<u8> {
    let mut shown = Vec::new();
    let mut is_inside = false;
    for line in files.iter().flat_map(|file| lines_of(file)) {
        let words: Vec<&[u8]> = line.splitn(4, |byte| *byte == b' ').collect();
        let (time, is_partial, text) = match words[..] {
            [time, b"stdout" | b"stderr", tags, text] if is_time(time) => {
                (time, tags == b"P" || tags.starts_with(b"P:"), text)
            }
            _ => (&b""[..], false, line),
        };
        if has_times && !is_inside && !time.is_empty() {
            shown.extend([time, b" "].concat());
        }
        shown.extend_from_slice(text);
        if !is_partial {
            shown.push(b'\n');
        }
        is_inside = is_partial;
    }
    shown
}

fn lines_of(file: &[u8]) -> Vec<&[u8]> {
    let mut lines: Vec<&[u8]> = file.split(|byte| *byte == b'\n').collect();
    // After the last line break there is no line, unless it is incomplete.
    lines.pop_if(|last| last.is_empty());
    lines
}

fn is_time(word: &[u8]) -> bool {
    word.first().is_some_and(u8::is_ascii_digit) && word.contains(&b'T')
}

/// A compressed log, before a live one.
pub(crate) fn rotated_logs(data: &[u8]) -> Option<()> {
    thread_local! {
        static RUNTIME: OnceCell<Runtime> = const { OnceCell::new() };
    }
    let (choice, packed) = choice(data);
    let logs_dir = scratch_dir("logs");
    let dir = logs_dir.join("ns_pod_uid/app");
    fs::create_dir_all(&dir).expect("a directory of our own");
    fs::write(dir.join("0.log.20261115-100000.gz"), packed).expect("a file of our own");
    fs::write(dir.join("0.log"), LIVE).expect("a file of our own");
    let mut rotated = Vec::new();
    // As far as it is readable.
    let _ = MultiGzDecoder::new(packed).read_to_end(&mut rotated);
    let tail = TAILS.get(usize::from(choice)).copied();
    let found = RUNTIME.with(|runtime| {
        let runtime = runtime
            .get_or_init(|| tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime"));
        runtime.block_on(fuzzing::log_files(&logs_dir, tail)).expect("the files are readable")
    });
    let kept = tail.map_or(&rotated[..], |lines| end_of(&rotated, lines));
    let live = tail.map_or(LIVE, |lines| last_lines(LIVE, lines));
    assert_eq!(found, shown(&[kept, live], false));
    (!kept.is_empty()).then_some(())
}

/// What is left of the rotated log if the live one has two lines.
fn end_of(rotated: &[u8], lines: u64) -> &[u8] {
    match lines.checked_sub(2) {
        None | Some(0) => b"",
        Some(missing) => last_lines(rotated, missing),
    }
}

/// From the start of so many last complete lines.
fn last_lines(text: &[u8], lines: u64) -> &[u8] {
    let ends: Vec<usize> = text.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at).collect();
    let skipped = ends.len().saturating_sub(usize::try_from(lines).expect("a small number"));
    &text[skipped.checked_sub(1).map_or(0, |last| ends[last] + 1)..]
}
