//! Log lines on their way to standard error.
//!
//! Owns: a bounded queue and the thread that writes it, so that a slow or stopped reader of standard error holds up no turn; the count of
//! lines that found no room. Never: formats lines but the one that tells that count.

use std::{
    collections::VecDeque,
    io::Write,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

/// About ten thousand lines: what a busy node writes in a minute.
const QUEUE_MAX_BYTES: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    lines: VecDeque<String>,
    bytes: usize,
    /// Since the last line that tells it.
    dropped: u64,
    is_writing: bool,
}

impl Queue {
    /// `None` if the thread cannot be started: then lines are to be written at once. `tell` makes the line for a number of dropped ones.
    pub(super) fn start(
        mut out: impl Write + Send + 'static,
        tell: impl Fn(u64) -> String + Send + 'static,
    ) -> Option<Arc<Queue>> {
        let queue = Arc::new(Queue { state: Mutex::default(), changed: Condvar::new() });
        let own = queue.clone();
        let write = move || {
            loop {
                let text = own.next(&tell);
                // A closed standard error must not end the process.
                let _ = out.write_all(text.as_bytes());
                own.written();
            }
        };
        // It ends with the process: what is still to be written is waited for by `flush`.
        thread::Builder::new().name("log".to_owned()).spawn(write).ok().map(|_| queue)
    }

    /// Never waits for the writer.
    pub(super) fn push(&self, line: String) {
        let mut state = self.locked();
        if state.bytes.saturating_add(line.len()) > QUEUE_MAX_BYTES {
            state.dropped += 1;
            return;
        }
        state.bytes += line.len();
        state.lines.push_back(line);
        self.changed.notify_all();
    }

    /// Waits until everything is written, at most this long.
    pub(super) fn flush(&self, at_most: Duration) {
        let is_pending = |state: &mut State| state.is_writing || !state.lines.is_empty() || state.dropped > 0;
        let waited = self.changed.wait_timeout_while(self.locked(), at_most, is_pending);
        drop(waited);
    }

    /// The next line. When lines were dropped the queue was full, so those in it come first.
    fn next(&self, tell: &impl Fn(u64) -> String) -> String {
        let mut state = self.locked();
        loop {
            if let Some(line) = state.lines.pop_front() {
                state.bytes -= line.len();
                state.is_writing = true;
                return line;
            }
            if state.dropped > 0 {
                state.is_writing = true;
                return tell(std::mem::take(&mut state.dropped));
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn written(&self) {
        self.locked().is_writing = false;
        self.changed.notify_all();
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::mpsc::{Receiver, Sender, channel},
    };

    use super::*;

    /// Each write waits for a permit, and is shown.
    struct Slow {
        permits: Receiver<()>,
        shown: Sender<String>,
    }

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let _ = self.permits.recv();
            let _ = self.shown.send(String::from_utf8_lossy(bytes).into_owned());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn slow() -> (Arc<Queue>, Sender<()>, Receiver<String>) {
        let (permit, permits) = channel();
        let (shown, seen) = channel();
        let queue = Queue::start(Slow { permits, shown }, |count| format!("{count} dropped\n")).unwrap();
        (queue, permit, seen)
    }

    #[test]
    fn stopped_log_reader_delays_nobody_and_sees_the_lost_count() {
        let (queue, permit, seen) = slow();
        let line = "x".repeat(1023) + "\n";
        // One may be in the writer's hand.
        for _ in 0..1030 {
            queue.push(line.clone());
        }
        queue.flush(Duration::from_millis(10));
        let dropped = queue.locked().dropped;
        assert!((5..=6).contains(&dropped), "{dropped}");
        drop(permit);
        queue.flush(Duration::from_secs(60));
        let seen: Vec<String> = seen.try_iter().collect();
        assert_eq!(seen.len() as u64, 1030 - dropped + 1);
        assert_eq!(seen.last().map(String::as_str), Some(format!("{dropped} dropped\n").as_str()));
        // There is room again.
        queue.push("after\n".to_owned());
        assert_eq!(queue.locked().dropped, 0);
    }

    #[test]
    fn lines_are_written_in_order_before_flush_returns() {
        let (queue, permit, seen) = slow();
        drop(permit);
        for number in 0..100 {
            queue.push(format!("{number}\n"));
        }
        queue.flush(Duration::from_secs(60));
        assert_eq!(
            seen.try_iter().collect::<String>(),
            (0..100).map(|number| format!("{number}\n")).collect::<String>()
        );
    }
}
