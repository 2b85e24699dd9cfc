//! The agent's own log: one line per event, on standard error.
//!
//! Owns: the two formats, what `-v` lets through, and the last lines of a process that ends. Upstream: klog (`text`) and `component-base/logs/json` (`json`).
//!
//! | `-v` | our crates | libraries |
//! |---|---|---|
//! | 0 to 3 | info: every decision that changes something | info |
//! | 4, 5 | debug: also why nothing was done, every call | info |
//! | 6 to 9 | trace: also what went over the wire | debug |
//! | 10 and more | trace | trace |
//!
//! Text and string values are quoted and escaped, so text of a container or a manifest cannot forge a line.
//! Times are UTC.

mod queue;

use std::{
    fmt,
    io::Write,
    sync::{Arc, OnceLock},
    time::Duration,
};

use rubelet_kube::error_chain;
use serde_json::Value;
use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    level_filters::LevelFilter,
    span::{Attributes, Id, Record},
};
use tracing_subscriber::{
    Layer, Registry,
    filter::Targets,
    layer::{Context, SubscriberExt},
    registry::LookupSpan,
    reload,
};

use queue::Queue;

use crate::world::Clock;

/// How long an end waits for a reader of standard error that is slow or gone.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    #[default]
    Text,
    Json,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Logging {
    pub format: Format,
    /// `-v`
    pub verbosity: u32,
}

impl Logging {
    /// From the validated configuration: any value but `json` means `text`.
    pub fn of(config: &rubelet_core::config::Logging) -> Self {
        let format = if config.format == "json" { Format::Json } else { Format::Text };
        Logging { format, verbosity: config.verbosity }
    }
}

/// Sends all log lines from here on to standard error. Called once, by main.
pub fn start(logging: Logging, clock: Clock) {
    let (format, wall) = (logging.format, clock.clone());
    let queue = Queue::start(std::io::stderr(), move |count| dropped_line(format, count, wall.now().wall));
    let _ = QUEUE.set(queue);
    write_panics_to_the_queue();
    let lines = Lines { format: logging.format, clock, out: write };
    let (filter, handle) = reload::Layer::new(filter(logging.verbosity));
    let subscriber = tracing_subscriber::registry().with(lines.with_filter(filter));
    tracing::subscriber::set_global_default(subscriber).expect("logging is started once");
    let _ = FILTER.set(handle);
}

/// Once logging is started; `None` inside: its thread could not be.
static QUEUE: OnceLock<Option<Arc<Queue>>> = OnceLock::new();

/// One write per line: lines of two threads never mix.
fn write(line: String) {
    match QUEUE.get() {
        Some(Some(queue)) => queue.push(line),
        // A closed standard error must not end the process.
        Some(None) | None => drop(std::io::stderr().write_all(line.as_bytes())),
    }
}

/// Writes the reason of the end after all lines, and waits for them no longer than `FLUSH_TIMEOUT`.
pub fn finish(reason: Option<String>) {
    if let Some(reason) = reason {
        write(reason);
    }
    if let Some(Some(queue)) = QUEUE.get() {
        queue.flush(FLUSH_TIMEOUT);
    }
}

/// The default hook would wait for the reader of standard error, and the process would not end.
fn write_panics_to_the_queue() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        finish(Some(format!("thread '{}' panicked: {panic}\n", thread.name().unwrap_or("unnamed"))));
    }));
}

/// As global as the subscriber it belongs to.
static FILTER: OnceLock<reload::Handle<Targets, Registry>> = OnceLock::new();

/// Sets the verbosity that `-v` sets at start.
pub fn set_verbosity(verbosity: u32) {
    if let Some(handle) = FILTER.get() {
        // It fails only when the subscriber is gone.
        let _ = handle.reload(filter(verbosity));
    }
}

fn filter(verbosity: u32) -> Targets {
    let (ours, theirs) = match verbosity {
        0..=3 => (LevelFilter::INFO, LevelFilter::INFO),
        4 | 5 => (LevelFilter::DEBUG, LevelFilter::INFO),
        6..=9 => (LevelFilter::TRACE, LevelFilter::DEBUG),
        10.. => (LevelFilter::TRACE, LevelFilter::TRACE),
    };
    Targets::new().with_default(theirs).with_target("rubelet", ours)
}

struct Lines<W> {
    format: Format,
    clock: Clock,
    out: W,
}

impl<S, W> Layer<S> for Lines<W>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    W: Fn(String) + 'static,
{
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let span = context.span(id).expect("a span that was just made exists");
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        span.extensions_mut().insert(fields);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let span = context.span(id).expect("a span that is written to exists");
        if let Some(fields) = span.extensions_mut().get_mut::<Fields>() {
            values.record(fields);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        // If a span and the event both name the subject, the innermost value is used.
        for span in context.event_scope(event).into_iter().flatten() {
            let extensions = span.extensions();
            for (name, value) in extensions.get::<Fields>().into_iter().flat_map(|fields| &fields.rest) {
                if fields.rest.iter().all(|(known, _)| known != name) {
                    fields.rest.push((name, value.clone()));
                }
            }
        }
        let wall = self.clock.now().wall;
        let line = match self.format {
            Format::Text => text_line(event.metadata(), &fields, wall),
            Format::Json => json_line(event.metadata(), &fields, wall),
        };
        (self.out)(line);
    }
}

/// The fields of an event or a span, in the order written.
#[derive(Clone, Debug, Default)]
struct Fields {
    message: String,
    rest: Vec<(&'static str, Arc<Value>)>,
}

impl Fields {
    fn add(&mut self, field: &Field, value: Value) {
        match (field.name(), value) {
            ("message", Value::String(message)) => self.message = message,
            // Upstream's key.
            ("error", value) => self.rest.push(("err", value.into())),
            (name, value) => self.rest.push((name, value.into())),
        }
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, Value::String(format!("{value:?}")));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, Value::from(value));
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        self.add(field, Value::String(error_chain(value)));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, Value::from(value));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, Value::from(value));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, Value::from(value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, Value::from(value));
    }
}

fn text_line(metadata: &Metadata<'_>, fields: &Fields, wall: jiff::Timestamp) -> String {
    let severity = match *metadata.level() {
        Level::ERROR => 'E',
        Level::WARN => 'W',
        Level::INFO | Level::DEBUG | Level::TRACE => 'I',
    };
    let mut line = format!(
        "{severity}{} {:7} {}] {:?}",
        wall.strftime("%m%d %H:%M:%S.%6f"),
        std::process::id(),
        caller(metadata, 1),
        fields.message
    );
    for (name, value) in &fields.rest {
        line.push_str(&match &**value {
            Value::String(text) => format!(" {name}={text:?}"),
            other => format!(" {name}={other}"),
        });
    }
    line.push('\n');
    line
}

fn json_line(metadata: &Metadata<'_>, fields: &Fields, wall: jiff::Timestamp) -> String {
    let millis = wall.as_microsecond() as f64 / 1e3;
    let mut line = format!(
        r#"{{"ts":{millis},"caller":{},"msg":{}"#,
        Value::from(caller(metadata, 2)),
        Value::from(fields.message.as_str())
    );
    // Upstream's errors have no verbosity.
    match *metadata.level() {
        Level::ERROR => {}
        Level::WARN | Level::INFO => line.push_str(r#","v":0"#),
        Level::DEBUG => line.push_str(r#","v":4"#),
        Level::TRACE => line.push_str(r#","v":6"#),
    }
    for (name, value) in &fields.rest {
        line.push_str(&format!(",{}:{value}", Value::from(*name)));
    }
    line.push_str("}\n");
    line
}

fn dropped_line(format: Format, count: u64, wall: jiff::Timestamp) -> String {
    const MESSAGE: &str = "log lines dropped: standard error is not read fast enough";
    match format {
        Format::Text => format!(
            "W{} {:7} queue.rs] {MESSAGE:?} lines={count}\n",
            wall.strftime("%m%d %H:%M:%S.%6f"),
            std::process::id()
        ),
        Format::Json => {
            let millis = wall.as_microsecond() as f64 / 1e3;
            format!(
                "{{\"ts\":{millis},\"caller\":\"logging/queue.rs\",\"msg\":{},\"v\":0,\"lines\":{count}}}\n",
                Value::from(MESSAGE)
            )
        }
    }
}

/// `file.rs:12` with the last `parts` of the path.
fn caller(metadata: &Metadata<'_>, parts: usize) -> String {
    let path = metadata.file().unwrap_or_else(|| metadata.target());
    let start = path.rmatch_indices('/').nth(parts - 1).map_or(0, |(slash, _)| slash + 1);
    match metadata.line() {
        Some(line) => format!("{}:{line}", &path[start..]),
        None => path[start..].to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use insta::assert_snapshot;
    use tracing::{Level, debug, error, info, info_span, subscriber::with_default, trace, warn};
    use tracing_subscriber::{Layer, layer::SubscriberExt};

    use super::{Format, Lines, filter};
    use crate::world::Clock;

    fn logged(format: Format, verbosity: u32, act: impl FnOnce()) -> String {
        let written = Arc::new(Mutex::new(String::new()));
        let into = written.clone();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let _entered = runtime.enter();
        let clock = Clock::simulated("2026-11-15T19:00:00.25Z".parse().unwrap(), Arc::default());
        let lines = Lines { format, clock, out: move |line: String| into.lock().unwrap().push_str(&line) };
        with_default(tracing_subscriber::registry().with(lines.with_filter(filter(verbosity))), act);
        let written = written.lock().unwrap().clone();
        // The process id and the lines of this file change; all else is fixed.
        let written = written.replace(&format!("{:7} ", std::process::id()), "    PID ");
        let mut stable = String::new();
        let mut rest = written.as_str();
        while let Some(found) = rest.find("logging.rs:") {
            let end = found + "logging.rs:".len();
            stable.push_str(&rest[..end]);
            stable.push_str("NN");
            rest = rest[end..].trim_start_matches(|digit: char| digit.is_ascii_digit());
        }
        stable + rest
    }

    fn speak() {
        let span = info_span!("sync", pod = "default/web", uid = tracing::field::Empty);
        span.record("uid", "u1");
        let _entered = span.enter();
        info!(container = "a", attempt = 3, "Starting \"a\"");
        warn!(pod = "default/other", ready = false, "Forged\nI1115 line");
        let error = std::io::Error::other("refused");
        error!(error = &error as &dyn std::error::Error, "Pull failed");
        debug!(seconds = 1.5, "Nothing to do");
        trace!("Wire");
    }

    #[test]
    fn text_lines_are_klogs() {
        assert_snapshot!(logged(Format::Text, 6, speak), @r#"
        I1115 19:00:00.250000     PID logging.rs:NN] "Starting \"a\"" container="a" attempt=3 pod="default/web" uid="u1"
        W1115 19:00:00.250000     PID logging.rs:NN] "Forged\nI1115 line" pod="default/other" ready=false uid="u1"
        E1115 19:00:00.250000     PID logging.rs:NN] "Pull failed" err="refused" pod="default/web" uid="u1"
        I1115 19:00:00.250000     PID logging.rs:NN] "Nothing to do" seconds=1.5 pod="default/web" uid="u1"
        I1115 19:00:00.250000     PID logging.rs:NN] "Wire" pod="default/web" uid="u1"
        "#);
    }

    #[test]
    fn json_lines_have_upstreams_keys() {
        let lines = logged(Format::Json, 6, speak);
        for line in lines.lines() {
            serde_json::from_str::<serde_json::Value>(line).unwrap();
        }
        assert_snapshot!(lines, @r#"
        {"ts":1794769200250,"caller":"src/logging.rs:NN","msg":"Starting \"a\"","v":0,"container":"a","attempt":3,"pod":"default/web","uid":"u1"}
        {"ts":1794769200250,"caller":"src/logging.rs:NN","msg":"Forged\nI1115 line","v":0,"pod":"default/other","ready":false,"uid":"u1"}
        {"ts":1794769200250,"caller":"src/logging.rs:NN","msg":"Pull failed","err":"refused","pod":"default/web","uid":"u1"}
        {"ts":1794769200250,"caller":"src/logging.rs:NN","msg":"Nothing to do","v":4,"seconds":1.5,"pod":"default/web","uid":"u1"}
        {"ts":1794769200250,"caller":"src/logging.rs:NN","msg":"Wire","v":6,"pod":"default/web","uid":"u1"}
        "#);
    }

    #[test]
    fn verbosity_opens_our_debug_lines_before_those_of_libraries() {
        let cases = [
            (0, "rubelet::sync_loop", Level::INFO, true),
            (3, "rubelet::sync_loop", Level::DEBUG, false),
            (4, "rubelet_core::agent", Level::DEBUG, true),
            (4, "hyper::proto", Level::DEBUG, false),
            (6, "rubelet_cri::client", Level::TRACE, true),
            (6, "hyper::proto", Level::DEBUG, true),
            (9, "hyper::proto", Level::TRACE, false),
            (10, "hyper::proto", Level::TRACE, true),
        ];
        for (verbosity, target, level, expected) in cases {
            assert_eq!(filter(verbosity).would_enable(target, &level), expected, "-v {verbosity} {target} {level}");
        }
    }
}
