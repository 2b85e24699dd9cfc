//! Numbers of passed and failed tests.
//!
//! Owns: the line with the sum, and its parser.

use std::{fmt, process::ExitCode, str::FromStr};

use anyhow::Context as _;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub passed: usize,
    pub failed: usize,
}

impl Tally {
    pub const PASSED: Tally = Tally { passed: 1, failed: 0 };

    /// Prints the sum on the last line.
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

impl FromStr for Tally {
    type Err = anyhow::Error;

    fn from_str(line: &str) -> anyhow::Result<Self> {
        let parts = line.strip_suffix(" failed").and_then(|line| line.split_once(" passed, "));
        let (passed, failed) = parts.with_context(|| format!("`{line}` does not say how many tests passed"))?;
        Ok(Tally { passed: passed.parse()?, failed: failed.parse()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_read_as_it_was_written() {
        let tally = Tally { passed: 130, failed: 2 };
        assert_eq!(tally.to_string().parse::<Tally>().unwrap(), tally);
        for other in [
            "",
            "all passed",
            "ok      2.4     a pod starts (1.0 s)",
            "x passed, 0 failed",
            "1 passed, 0 failed in 2 s",
        ] {
            assert!(other.parse::<Tally>().is_err(), "{other}");
        }
    }
}
