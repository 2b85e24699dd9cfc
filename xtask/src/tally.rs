//! How many tests passed, and how many failed.
//!
//! Owns: the line that says so.

use std::{fmt, process::ExitCode};

#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub passed: usize,
    pub failed: usize,
}

impl Tally {
    pub const PASSED: Tally = Tally { passed: 1, failed: 0 };

    /// Prints the sum on a line of its own, as the last thing.
    pub fn conclude(self) -> ExitCode {
        println!("{self}");
        if self.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)
    }
}
