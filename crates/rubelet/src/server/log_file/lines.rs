//! Lines in the format of CRI: `<time> <stdout|stderr> <P|F>[:tag…] <text>`.
//!
//! Owns: which part of a line is shown. A partial line (`P`) is joined with the next; a line in another format is shown as is.
//! Never: keeps more than one line, nor a line longer than any runtime writes.

use jiff::Timestamp;

/// Runtimes split at 16 KiB. Longer lines are not CRI log lines; they are shown in pieces.
const MAX_LINE_BYTES: usize = 1024 * 1024;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Timestamps {
    #[default]
    Hidden,
    Shown,
}

/// Selects stdout, stderr or both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Streams {
    #[default]
    All,
    Stdout,
    Stderr,
}

impl Streams {
    fn contain(self, stream: &[u8]) -> bool {
        match self {
            Streams::All => true,
            Streams::Stdout => stream == b"stdout",
            Streams::Stderr => stream == b"stderr",
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Filter {
    pub since: Option<Timestamp>,
    pub timestamps: Timestamps,
    pub streams: Streams,
}

/// Decodes blocks of a file to the text to show.
pub(crate) struct Lines {
    filter: Filter,
    /// The start of an incomplete line.
    begun: Vec<u8>,
    /// The last shown line was partial, so the next continues it.
    inside_line: bool,
}

struct Line<'a> {
    time: &'a [u8],
    /// Empty if the line is not in CRI format.
    stream: &'a [u8],
    is_partial: bool,
    text: &'a [u8],
}

impl Lines {
    pub(crate) fn new(filter: Filter) -> Self {
        Lines { filter, begun: Vec::new(), inside_line: false }
    }

    pub(crate) fn take(&mut self, block: &[u8]) -> Vec<u8> {
        let mut shown = Vec::with_capacity(block.len());
        let mut rest = block;
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let (line, after) = rest.split_at(end);
            if self.begun.is_empty() {
                self.show(line, &mut shown);
            } else {
                self.begun.extend_from_slice(line);
                self.show_begun(&mut shown);
            }
            rest = &after[1..];
        }
        self.begun.extend_from_slice(rest);
        if self.begun.len() > MAX_LINE_BYTES {
            self.show_begun(&mut shown);
        }
        shown
    }

    /// An incomplete last line.
    pub(crate) fn take_rest(&mut self) -> Vec<u8> {
        let mut shown = Vec::new();
        if !self.begun.is_empty() {
            self.show_begun(&mut shown);
        }
        shown
    }

    fn show_begun(&mut self, shown: &mut Vec<u8>) {
        let line = std::mem::take(&mut self.begun);
        self.show(&line, shown);
    }

    fn show(&mut self, line: &[u8], shown: &mut Vec<u8>) {
        let line = parse(line).unwrap_or(Line { time: b"", stream: b"", is_partial: false, text: line });
        if self.filter.since.is_some_and(|since| time_of(&line).is_some_and(|time| time < since)) {
            return;
        }
        if !self.filter.streams.contain(line.stream) {
            return;
        }
        if self.filter.timestamps == Timestamps::Shown && !self.inside_line && !line.time.is_empty() {
            shown.extend_from_slice(line.time);
            shown.push(b' ');
        }
        shown.extend_from_slice(line.text);
        if !line.is_partial {
            shown.push(b'\n');
        }
        self.inside_line = line.is_partial;
    }
}

fn parse(line: &[u8]) -> Option<Line<'_>> {
    let mut parts = line.splitn(4, |byte| *byte == b' ');
    let (time, stream, tags, text) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let is_time = time.first().is_some_and(u8::is_ascii_digit) && time.contains(&b'T');
    if !is_time || !matches!(stream, b"stdout" | b"stderr") {
        return None;
    }
    let is_partial = tags.split(|byte| *byte == b':').next() == Some(b"P");
    Some(Line { time, stream, is_partial, text })
}

fn time_of(line: &Line<'_>) -> Option<Timestamp> {
    std::str::from_utf8(line.time).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LOG: &[u8] = b"2026-11-15T10:00:00.000000001Z stdout F one\n\
        2026-11-15T10:00:01.000000001Z stderr P two,\n\
        2026-11-15T10:00:01.000000002Z stderr P  still two,\n\
        2026-11-15T10:00:02.000000001+00:00 stderr F:tag  end of two\n\
        not a line of CRI\n\
        2026-11-15T10:00:03.000000001Z stdout F \n\
        2026-11-15T10:00:04.000000001Z stdout F three";

    fn shown(filter: Filter) -> String {
        let mut lines = Lines::new(filter);
        let mut text = lines.take(LOG);
        text.extend(lines.take_rest());
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn partial_lines_are_joined_and_strange_ones_shown() {
        insta::assert_snapshot!(shown(Filter::default()), @"
        one
        two, still two, end of two
        not a line of CRI

        three
        ");
    }

    #[test]
    fn a_time_stands_once_before_each_whole_line() {
        let filter = Filter { timestamps: Timestamps::Shown, ..Filter::default() };
        insta::assert_snapshot!(shown(filter), @"
        2026-11-15T10:00:00.000000001Z one
        2026-11-15T10:00:01.000000001Z two, still two, end of two
        not a line of CRI
        2026-11-15T10:00:03.000000001Z 
        2026-11-15T10:00:04.000000001Z three
        ");
    }

    #[test]
    fn older_lines_are_left_out_to_the_nanosecond() {
        let since = Some("2026-11-15T10:00:03.000000001Z".parse().unwrap());
        insta::assert_snapshot!(shown(Filter { since, ..Filter::default() }), @"
        not a line of CRI

        three
        ");
    }

    #[test]
    fn single_stream_can_be_shown() {
        let only = |streams| shown(Filter { streams, ..Filter::default() });
        insta::assert_snapshot!(only(Streams::Stdout), @"
        one

        three
        ");
        insta::assert_snapshot!(only(Streams::Stderr), @"two, still two, end of two");
    }

    #[test]
    fn a_line_without_end_does_not_fill_the_memory() {
        let mut lines = Lines::new(Filter::default());
        let mut total = 0;
        for _ in 0..100 {
            total += lines.take(&[b'x'; 64 * 1024]).len();
            assert!(lines.begun.len() <= MAX_LINE_BYTES + 64 * 1024);
        }
        assert!(total > 0);
    }

    proptest! {
        #[test]
        fn it_does_not_matter_where_the_blocks_are_cut(cuts in proptest::collection::vec(0..LOG.len(), 0..8)) {
            let mut cuts = cuts;
            cuts.sort_unstable();
            let mut lines = Lines::new(Filter::default());
            let (mut text, mut from) = (Vec::new(), 0);
            for cut in cuts {
                text.extend(lines.take(&LOG[from..cut]));
                from = cut;
            }
            text.extend(lines.take(&LOG[from..]));
            text.extend(lines.take_rest());
            prop_assert_eq!(String::from_utf8(text).unwrap(), shown(Filter::default()));
        }

        #[test]
        fn arbitrary_bytes_do_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let mut lines = Lines::new(Filter { since: Some(Timestamp::UNIX_EPOCH), timestamps: Timestamps::Shown, streams: Streams::Stderr });
            lines.take(&bytes);
            lines.take_rest();
        }
    }
}
