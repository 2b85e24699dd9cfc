//! FNV-1a of 32 and 128 bits: a short name for content, the same on every run and machine.
//!
//! Owns: the sums. Never: resists deliberate collisions; no secret depends on it.

use std::fmt;

const OFFSET_BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;

pub fn fnv32a(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fnv128(u128);

impl Fnv128 {
    pub fn of(bytes: &[u8]) -> Self {
        let mut hash = Fnv128::default();
        hash.update(bytes);
        hash
    }

    pub fn update(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u128::from(*byte)).wrapping_mul(PRIME);
        }
    }

    /// 32 hexadecimal digits.
    pub fn hex(self) -> String {
        format!("{:032x}", self.0)
    }
}

impl Default for Fnv128 {
    fn default() -> Self {
        Fnv128(OFFSET_BASIS)
    }
}

impl fmt::Write for Fnv128 {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.update(text.as_bytes());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sums_are_those_of_the_reference() {
        // The reference vectors of draft-eastlake-fnv.
        assert_eq!(Fnv128::of(b"").hex(), "6c62272e07bb014262b821756295c58d");
        assert_eq!(Fnv128::of(b"a").hex(), "d228cb696f1a8caf78912b704e4a8964");
        assert_eq!(Fnv128::of(b"foobar").hex(), "343e1662793c64bf6f0d3597ba446f18");
        assert_eq!(fnv32a(b"foobar"), 0xbf9c_f968);
    }
}
