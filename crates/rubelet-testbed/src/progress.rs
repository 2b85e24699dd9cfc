//! Prints one line per step, with its duration.

use std::io::Write as _;

use crate::clock::Stopwatch;

/// Prints the step, runs it, and prints its duration.
pub fn step<T>(what: &str, work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let watch = Stopwatch::start();
    print!("{what} … ");
    // Only a display: a closed terminal is no reason to stop the work.
    let _ = std::io::stdout().flush();
    let result = work();
    match &result {
        Ok(_) => println!("{:.1} s", watch.secs()),
        Err(_) => println!("failed after {:.1} s", watch.secs()),
    }
    result
}
