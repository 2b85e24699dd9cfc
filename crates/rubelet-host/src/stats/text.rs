//! Small text files of the kernel.
//!
//! Owns: reading a whole file through a reused buffer, and the two formats: one number, or names with numbers.

use std::os::fd::{AsFd, OwnedFd};

use rustix::{
    fs::{CWD, Mode, OFlags},
    io::Errno,
};

/// Far more than any of these files has: /proc/meminfo and memory.stat have a few KiB, a list of a thousand processes has ten.
const LIMIT_BYTES: usize = 1 << 20;
const START_BYTES: usize = 8 << 10;

/// One buffer for thousands of files.
#[derive(Debug)]
pub struct Reader {
    buffer: Vec<u8>,
}

impl Default for Reader {
    fn default() -> Self {
        Reader { buffer: vec![0; START_BYTES] }
    }
}

impl Reader {
    /// The content of the file; `None` if it is unreadable or not text.
    pub fn text(&mut self, dir: impl AsFd, name: &str) -> Option<&str> {
        let file = open(dir, name)?;
        let mut filled = 0;
        loop {
            if filled == self.buffer.len() {
                if filled >= LIMIT_BYTES {
                    return None;
                }
                self.buffer.resize(filled * 2, 0);
            }
            match rustix::io::read(&file, &mut self.buffer[filled..]) {
                Ok(0) => return std::str::from_utf8(&self.buffer[..filled]).ok(),
                Ok(count) => filled += count,
                Err(Errno::INTR) => {}
                // The kernel returns ENODEV for a cgroup that is being removed, and EOPNOTSUPP for pressure that is not measured.
                Err(_) => return None,
            }
        }
    }

    /// The same by full path.
    pub fn text_at(&mut self, path: &str) -> Option<&str> {
        self.text(CWD, path)
    }

    /// The number in a file; `max`, and its equivalent in v1, is not a number.
    pub fn number(&mut self, dir: impl AsFd, name: &str) -> Option<u64> {
        let file = open(dir, name)?;
        // The kernel returns the whole line at once: no second read is needed.
        let count = rustix::io::retry_on_intr(|| rustix::io::read(&file, &mut *self.buffer)).ok()?;
        number(std::str::from_utf8(&self.buffer[..count]).ok()?)
    }
}

fn open(dir: impl AsFd, name: &str) -> Option<OwnedFd> {
    rustix::fs::openat(dir, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()
}

pub(super) fn number(text: &str) -> Option<u64> {
    text.trim_ascii().parse().ok()
}

/// Lines of a name, white space and a number: `anon 4096`, `MemTotal:  16 kB`.
pub(super) fn named_numbers(text: &str) -> impl Iterator<Item = (&str, u64)> {
    text.lines().filter_map(|line| {
        let (name, rest) = line.split_once(|c: char| c.is_ascii_whitespace())?;
        let value = rest.trim_ascii_start().split(|c: char| c.is_ascii_whitespace()).next()?;
        Some((name, value.parse().ok()?))
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_file_longer_than_the_buffer_is_read_whole() {
        let dir = tempfile::tempdir().unwrap();
        let long = "0123456789\n".repeat(5000);
        fs::write(dir.path().join("long"), &long).unwrap();
        fs::write(dir.path().join("too-long"), vec![b'x'; LIMIT_BYTES + 1]).unwrap();
        fs::write(dir.path().join("one"), " 42\n").unwrap();
        let open = fs::File::open(dir.path()).unwrap();
        let mut reader = Reader::default();
        assert_eq!(reader.text(&open, "long"), Some(long.as_str()));
        assert_eq!(reader.text(&open, "too-long"), None);
        assert_eq!(reader.number(&open, "one"), Some(42));
        assert_eq!(reader.number(&open, "none"), None);
    }

    #[test]
    fn names_come_with_their_numbers_and_other_lines_not_at_all() {
        let text = "anon 4096\nMemTotal:       16 kB\n\nempty\nmax max\ntrailing 7 8\n";
        let found: Vec<_> = named_numbers(text).collect();
        assert_eq!(found, [("anon", 4096), ("MemTotal:", 16), ("trailing", 7)]);
    }
}
