//! SIGINT and SIGTERM: the exam ends at the next wait, and everything it made is removed on the way out.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::bail;
use rubelet_testbed::clock::Stopwatch;
use tokio::signal::unix::{SignalKind, signal};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// From now on, signals end nothing by themselves.
pub fn watch() -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (mut interrupt, mut terminate) = {
        let _context = runtime.enter();
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?)
    };
    thread::spawn(move || {
        runtime.block_on(async {
            tokio::select! {
                biased;
                // Both are cancel safe: a lost signal is only another request to end.
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        });
        eprintln!("interrupted: removing everything");
        INTERRUPTED.store(true, Ordering::Relaxed);
    });
    Ok(())
}

pub fn check() -> anyhow::Result<()> {
    if INTERRUPTED.load(Ordering::Relaxed) {
        bail!("interrupted");
    }
    Ok(())
}

/// An error as soon as a signal arrives.
pub fn sleep(time: Duration) -> anyhow::Result<()> {
    let watch = Stopwatch::start();
    while watch.elapsed() < time {
        check()?;
        thread::sleep(Duration::from_millis(50).min(time.saturating_sub(watch.elapsed())));
    }
    check()
}

/// Polls until there is no error, until the limit, or until a signal.
pub fn wait<T>(what: &str, limit: Duration, mut ask: impl FnMut() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let watch = Stopwatch::start();
    loop {
        check()?;
        match ask() {
            Ok(answer) => return Ok(answer),
            Err(err) if watch.elapsed() >= limit => {
                return Err(err.context(format!("waited {:.0} s for: {what}", watch.secs())));
            }
            Err(_) => sleep(Duration::from_millis(200))?,
        }
    }
}
