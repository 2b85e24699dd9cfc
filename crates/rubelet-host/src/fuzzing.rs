//! Entry points of the fuzz targets (`rubelet-fuzz`) to parsers that are private.
//!
//! Owns: nothing else. Never: used by the agent.

use std::io::{self, Read, Write};

use crate::{
    mount::{self, Mount},
    systemd::{Systemd, Value},
};

/// The text of `/proc/self/mountinfo`.
pub fn mount_table(text: &[u8]) -> Vec<Mount> {
    mount::parse(text)
}

/// Creates and stops a slice at a systemd that sends these bytes whatever it is asked.
pub fn systemd_replies(bytes: &[u8]) -> io::Result<()> {
    let mut systemd = Systemd::over(Replies(bytes))?;
    systemd.start_slice("kubepods.slice", &[("MemoryMax", Value::Number(1 << 30))])?;
    systemd.stop("kubepods.slice")
}

struct Replies<'a>(&'a [u8]);

impl Read for Replies<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for Replies<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
