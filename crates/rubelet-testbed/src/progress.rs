//! One line per step, with seconds, so that somebody who waits knows for what.

use std::io::Write as _;

use crate::clock::Stopwatch;

/// Says what begins, does it, and says how long it took.
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
