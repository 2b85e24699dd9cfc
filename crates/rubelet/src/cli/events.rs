//! `rubelet events`: recent events.
//!
//! Owns: the table layout and the event filter. Upstream: `kubectl events`.

use std::{io::Write, process::ExitCode};

use clap::{Arg, ArgAction, ArgMatches, Command};
use jiff::Timestamp;
use rubelet_core::{
    effect::{InvolvedObject, Severity},
    id::PodRef,
    snapshot::NodeView,
};

use super::{
    client::{self, CliError, Client},
    print::{Columns, age, printable},
};
use crate::{event_log::LoggedEvent, world::Clock};

pub fn run(args: Vec<String>) -> ExitCode {
    client::run(async {
        let matches = command().try_get_matches_from(args)?;
        let client = Client::new(&matches);
        let node: NodeView = client.json("/node").await?;
        let wanted = EventFilter::new(&matches, &node);
        let follows = matches.get_flag("follow");
        let mut events = client.stream(if follows { "/events?follow=1" } else { "/events" }).await?;
        let mut printer = Printer { as_json: matches.contains_id("output"), ..Printer::default() };
        let mut out = std::io::stdout();
        let clock = Clock::system();
        // Without `--watch`, all events are known before the first is printed, so that columns fit.
        let mut known = Vec::new();
        while let Some(event) = events.next_line::<LoggedEvent>().await? {
            if !wanted.means(&event.record.about) {
                continue;
            }
            if follows {
                out.write_all(printer.lines(std::slice::from_ref(&event), clock.now().wall).as_bytes())?;
                out.flush()?;
            } else {
                known.push(event);
            }
        }
        if follows {
            return Err(CliError::Refused("rubelet has stopped".to_owned()));
        }
        if known.is_empty() {
            eprintln!("No events found.");
        }
        Ok(out.write_all(printer.lines(&known, clock.now().wall).as_bytes())?)
    })
}

/// Every event in the agent's log, oldest first.
pub(super) async fn all(client: &Client) -> Result<Vec<LoggedEvent>, CliError> {
    let mut lines = client.stream("/events").await?;
    let mut events = Vec::new();
    while let Some(event) = lines.next_line().await? {
        events.push(event);
    }
    Ok(events)
}

/// A complete table.
pub(super) fn render(events: &[LoggedEvent], now: Timestamp) -> String {
    Printer::default().lines(events, now)
}

fn command() -> Command {
    client::with_socket_args(Command::new("rubelet events").about("Show recent events of this node"))
        .arg(Arg::new("follow").short('f').long("follow").action(ArgAction::SetTrue).help("Watch for new events"))
        .arg(
            Arg::new("pod")
                .long("pod")
                .value_name("POD")
                .help("Only events of this pod: name, with or without the node name suffix, or UID"),
        )
        .arg(client::namespace_arg().help("Only events of pods in this namespace"))
        .arg(client::output_arg().help("json: one object per line"))
        .after_help(
            "Examples:\n  rubelet events                  the last thousand, oldest first\n  \
             rubelet events -f               and those to come\n  \
             rubelet events --pod web        what happened to web-<node>\n\n\
             A manifest that could not be used is here too, with the field that is wrong.",
        )
}

/// Selects events.
#[derive(Clone, Debug, Default)]
struct EventFilter {
    pod: Option<String>,
    static_name: String,
    namespace: Option<String>,
}

impl EventFilter {
    fn new(matches: &ArgMatches, node: &NodeView) -> EventFilter {
        let pod = matches.get_one::<String>("pod").cloned();
        let static_name = format!("{}-{}", pod.as_deref().unwrap_or_default(), node.name);
        EventFilter { pod, static_name, namespace: matches.get_one::<String>("namespace").cloned() }
    }

    fn means(&self, about: &InvolvedObject) -> bool {
        match about {
            InvolvedObject::Pod(pod) | InvolvedObject::Container { pod, .. } => self.means_pod(pod),
            InvolvedObject::Claim { namespace, .. } => {
                self.pod.is_none() && self.namespace.as_ref().is_none_or(|wanted| wanted == namespace)
            }
            InvolvedObject::Node => self.pod.is_none() && self.namespace.is_none(),
            // The pod a broken manifest would have made has no name yet; its file's name is the best guess.
            InvolvedObject::Manifest(path) => {
                let file = path.rsplit('/').next().unwrap_or_default();
                self.namespace.is_none() && self.pod.as_ref().is_none_or(|pod| file.contains(pod.as_str()))
            }
        }
    }

    fn means_pod(&self, pod: &PodRef) -> bool {
        let named =
            |wanted: &String| *wanted == *pod.name || self.static_name == *pod.name || *wanted == pod.uid.as_str();
        let placed = |wanted: &String| *wanted == *pod.namespace;
        self.pod.as_ref().is_none_or(named) && self.namespace.as_ref().is_none_or(placed)
    }
}

#[derive(Debug, Default)]
struct Printer {
    columns: Columns,
    has_header: bool,
    as_json: bool,
}

impl Printer {
    fn lines(&mut self, events: &[LoggedEvent], now: Timestamp) -> String {
        if self.as_json {
            let line = |event| serde_json::to_string(event).expect("our views have string keys only") + "\n";
            return events.iter().map(line).collect();
        }
        let mut rows: Vec<Vec<String>> = events.iter().map(|event| cells(event, now)).collect();
        if !events.is_empty() && !std::mem::replace(&mut self.has_header, true) {
            rows.insert(0, ["LAST SEEN", "TYPE", "REASON", "OBJECT", "MESSAGE"].map(str::to_owned).to_vec());
        }
        self.columns.fit(&rows);
        rows.iter().map(|row| self.columns.line(row)).collect()
    }
}

fn cells(event: &LoggedEvent, now: Timestamp) -> Vec<String> {
    let seen = match event.count {
        1 => age(event.last_at, now),
        count => format!("{} (x{count} over {})", age(event.last_at, now), age(event.first_at, now)),
    };
    let severity = match event.record.severity {
        Severity::Normal => "Normal",
        Severity::Warning => "Warning",
    };
    vec![
        seen,
        severity.to_owned(),
        printable(&event.record.reason),
        printable(&event.record.about.to_string()),
        printable(&event.record.message),
    ]
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;
    use rubelet_core::{
        effect::{EventRecord, InvolvedObject, Severity},
        id::{PodRef, PodUid},
    };

    use super::{EventFilter, render};
    use crate::{event_log::EventLog, server::views::tests::at};

    fn pod() -> PodRef {
        PodRef { uid: PodUid::new("u1"), namespace: "default".into(), name: "web-n1".into() }
    }

    #[test]
    fn event_table_counts_repeats_and_escapes_control_characters() {
        let log = EventLog::default();
        let record = |about, severity, reason: &str, message: &str| {
            EventRecord::new(about, severity, reason, message.to_owned())
        };
        let pulled = record(InvolvedObject::Pod(pod()), Severity::Normal, "Pulled", "Image present");
        let about = InvolvedObject::Container { pod: pod(), container: "a".to_owned() };
        let crashed = record(about, Severity::Warning, "BackOff", "Back-off\n\u{1b}[31mred");
        let refused =
            record(InvolvedObject::Manifest("/m/bad.yaml".to_owned()), Severity::Warning, "Refused", "spec: missing");
        log.record(crashed.clone(), at("2026-11-15T18:50:00Z"));
        log.record(pulled, at("2026-11-15T18:55:00Z"));
        log.record(refused, at("2026-11-15T18:56:00Z"));
        log.record(crashed, at("2026-11-15T18:59:48Z"));
        assert_snapshot!(render(&log.since(0), at("2026-11-15T19:00:00Z")), @r#"
        LAST SEEN           TYPE      REASON    OBJECT                  MESSAGE
        5m                  Normal    Pulled    pod/default/web-n1      Image present
        4m                  Warning   Refused   /m/bad.yaml             spec: missing
        12s (x2 over 10m)   Warning   BackOff   pod/default/web-n1{a}   Back-off\n\u{1b}[31mred
        "#);
    }

    #[test]
    fn a_pods_events_are_found_by_any_of_its_names() {
        let wanted = |pod: &str, namespace: Option<&str>| EventFilter {
            pod: Some(pod.to_owned()),
            static_name: format!("{pod}-n1"),
            namespace: namespace.map(str::to_owned),
        };
        let (web, file) = (InvolvedObject::Pod(pod()), InvolvedObject::Manifest("/m/web.yaml".to_owned()));
        let cases = [
            (wanted("web", None), &web, true),
            (wanted("web-n1", None), &web, true),
            (wanted("u1", None), &web, true),
            (wanted("we", None), &web, false),
            (wanted("web", Some("kube-system")), &web, false),
            (wanted("web", None), &file, true),
            (wanted("db", None), &file, false),
            (wanted("web", None), &InvolvedObject::Node, false),
            (EventFilter::default(), &InvolvedObject::Node, true),
        ];
        for (wanted, about, expected) in cases {
            assert_eq!(wanted.means(about), expected, "{wanted:?} {about:?}");
        }
    }
}
