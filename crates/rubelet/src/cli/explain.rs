//! `rubelet explain POD`: the state of a pod, what it waits for, and since when.
//!
//! Owns: the text. The steps come from the agent, which gives its reasons with every plan.

use std::{io::Write, process::ExitCode};

use clap::{Arg, Command};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ContainerStatus;
use rubelet_core::{
    effect::InvolvedObject,
    event::Source,
    eviction::EvictedPod,
    id::{name_of, namespace_of},
    snapshot::{PodView, Step, StepState},
};

use super::{
    client::{self, CliError, Client, path},
    events,
    node::used,
    pods::notices,
    print::{age, printable, table, until},
};
use crate::{
    event_log::LoggedEvent,
    server::{
        admin::Explanation,
        views::{find::NotFound, status_column},
    },
    world::Clock,
};

/// The number of the pod's last events shown at the end.
const EVENTS_SHOWN: usize = 5;

pub fn run(args: Vec<String>) -> ExitCode {
    client::run(async {
        let matches = command().try_get_matches_from(args)?;
        let client = Client::new(&matches);
        let pod = matches.get_one::<String>("pod").expect("clap requires it");
        let namespace = matches.get_one::<String>("namespace").map(String::as_str);
        let explanation = match ask(&client, pod, namespace).await {
            Err(CliError::NotFound(error)) => {
                return Err(or_refused_manifest(error, pod, &events::all(&client).await?));
            }
            other => other?,
        };
        if matches.contains_id("output") {
            return client::print_json(&explanation);
        }
        let events = events::all(&client).await?;
        let story =
            Story { explanation: &explanation, events: &events, marks: marks(), now: Clock::system().now().wall };
        Ok(std::io::stdout().write_all(story.tell().as_bytes())?)
    })
}

/// The pod that the argument names.
pub(super) async fn ask(client: &Client, pod: &str, namespace: Option<&str>) -> Result<Explanation, CliError> {
    let query: Vec<_> = namespace.map(|namespace| ("namespace", namespace)).into_iter().collect();
    client.json(&path(&["explain", pod], &query)).await
}

/// A pod that does not exist because its manifest is invalid: shows the manifest's error.
fn or_refused_manifest(error: NotFound, typed: &str, events: &[LoggedEvent]) -> CliError {
    let refused = events.iter().rev().find_map(|event| match &event.record.about {
        InvolvedObject::Manifest(path) => {
            path.rsplit('/').next().is_some_and(|file| file.contains(typed)).then_some((path, event))
        }
        InvolvedObject::Node
        | InvolvedObject::Pod(_)
        | InvolvedObject::Container { .. }
        | InvolvedObject::Claim { .. } => None,
    });
    match refused {
        None => error.into(),
        Some((path, event)) => {
            let (path, message) = (printable(path), printable(&event.record.message));
            CliError::Refused(format!("{error}\nA manifest with a similar name was rejected: {path}: {message}"))
        }
    }
}

fn command() -> Command {
    client::with_socket_args(Command::new("rubelet explain").about("Explain a pod's current state"))
        .arg(
            Arg::new("pod")
                .value_name("POD")
                .required(true)
                .help("Pod name, with or without the node name suffix, or pod UID"),
        )
        .arg(client::namespace_arg().help("Namespace; default is all namespaces"))
        .arg(client::output_arg().help("json: all details"))
        .after_help(
            "Examples:\n  rubelet explain web             the story of web-<node>, step by step\n  \
             rubelet explain web -o json     the same for programs, with spec and status\n\n\
             A step is done, being worked on, waiting (for what, since when, until when), failed, or not reached yet.",
        )
}

struct Story<'a> {
    explanation: &'a Explanation,
    events: &'a [LoggedEvent],
    marks: fn(StepState) -> &'static str,
    now: Timestamp,
}

impl Story<'_> {
    fn tell(&self) -> String {
        let mut told: String =
            notices(&self.explanation.node, self.now).iter().map(|notice| format!("{notice}\n")).collect();
        told.push_str(&self.head());
        told.push('\n');
        let width = self.view().steps.iter().map(|step| step.name.chars().count()).max().unwrap_or(0);
        for step in &self.view().steps {
            told.push_str(&self.step(step, width));
        }
        told.push_str(&format!("\n{}\n", self.conclusion()));
        told.push_str(&self.failure());
        told.push_str(&self.containers());
        told.push_str(&self.last_events());
        told
    }

    fn view(&self) -> &PodView {
        &self.explanation.view
    }

    fn head(&self) -> String {
        let view = self.view();
        let column = status_column::of(view);
        let asked = match view.source {
            Some(Source::File) => "from a manifest file",
            Some(Source::Http) => "from the manifest URL",
            Some(Source::Api) => "from the API server",
            None => "known to the runtime only: in no source",
        };
        let restarts = match column.restarts {
            0 => String::new(),
            1 => ", 1 restart".to_owned(),
            several => format!(", {several} restarts"),
        };
        let ip = view.status.pod_ip.as_deref().map_or(String::new(), |ip| format!(", address {ip}"));
        format!(
            "Pod {}/{} (UID {}), {asked}\n{}: {}/{} ready{restarts}{ip}; {} for {}\n",
            printable(namespace_of(&view.pod)),
            printable(name_of(&view.pod)),
            self.explanation.uid,
            self.summary(&column.status),
            column.ready,
            column.total,
            view.lifecycle,
            age(view.lifecycle_since, self.now),
        )
    }

    /// The column STATUS, which shows how containers ended rather than why the pod did, as kubectl's.
    fn summary(&self, column: &str) -> String {
        match self.view().status.reason.as_deref() {
            Some(reason) if reason != column => format!("{} ({})", printable(column), printable(reason)),
            Some(_) | None => printable(column),
        }
    }

    fn step(&self, step: &Step, width: usize) -> String {
        let mut times = Vec::new();
        if let Some(since) = step.since {
            times.push(match step.state {
                StepState::Done => format!("{} ago", age(since, self.now)),
                StepState::Working | StepState::Waiting | StepState::Failed | StepState::Pending => {
                    format!("since {}", age(since, self.now))
                }
            });
        }
        if let Some(retry) = step.next_retry {
            times.push(format!("next try {}", until(retry, self.now)));
        }
        let times = if times.is_empty() { String::new() } else { format!(" ({})", times.join(", ")) };
        let mark = (self.marks)(step.state);
        let mut told = format!("  {mark} {:width$}  {}{times}\n", step.name, printable(&step.detail));
        if let Some(error) = &step.last_error {
            told.push_str(&format!("    {:width$}  last error: {}\n", "", printable(error)));
        }
        told
    }

    fn conclusion(&self) -> String {
        let open = self.view().steps.iter().find(|step| step.state != StepState::Done);
        match open {
            None => "Nothing is left to do.".to_owned(),
            Some(step) => {
                let verb = match step.state {
                    StepState::Failed => "Failed at",
                    StepState::Waiting => "Waiting at",
                    StepState::Working => "Working on",
                    StepState::Done | StepState::Pending => "Next comes",
                };
                format!("{verb} {}: {}", step.name, printable(&step.detail))
            }
        }
    }

    /// Why the pod failed, as its status says, and what this process knows of its eviction.
    fn failure(&self) -> String {
        let (status, evicted) = (&self.view().status, self.explanation.evicted.as_ref());
        // The step `admitted` says why a pod was rejected.
        let is_told = self.view().counts.rejected.is_some();
        let Some(reason) = status.reason.as_deref().or(evicted.map(|_| "Evicted")).filter(|_| !is_told) else {
            return String::new();
        };
        let message = status.message.as_deref().or(evicted.map(|evicted| evicted.message.as_str()));
        let mut told = match message.map(printable).filter(|message| !message.is_empty()) {
            Some(message) => format!("\n{}: {message}\n", printable(reason)),
            None => format!("\n{}\n", printable(reason)),
        };
        if let Some(evicted) = evicted {
            let EvictedPod { at, signal, passed_over, ranked, .. } = evicted;
            told.push_str(&format!("  signal {signal}, used {}, evicted {} ago\n", used(evicted), age(*at, self.now)));
            if *ranked > 0 {
                let after = if passed_over.is_empty() {
                    String::new()
                } else {
                    format!(" that may be evicted, after the critical {}", super::node::names(passed_over))
                };
                told.push_str(&format!("  {ranked} pods were ranked; it is the first{after}\n"));
            }
        }
        told
    }

    fn containers(&self) -> String {
        let status = &self.view().status;
        let of = |kind: &str, all: &Option<Vec<ContainerStatus>>| -> Vec<Vec<String>> {
            all.iter().flatten().map(|container| container_row(container, kind)).collect()
        };
        let mut rows = of(" (init)", &status.init_container_statuses);
        rows.extend(of("", &status.container_statuses));
        rows.extend(of(" (ephem)", &status.ephemeral_container_statuses));
        if rows.is_empty() {
            return String::new();
        }
        let header = ["CONTAINER", "READY", "RESTARTS", "STATE"].map(str::to_owned).to_vec();
        rows.insert(0, header);
        format!("\n{}", table(&rows))
    }

    fn last_events(&self) -> String {
        let about_it = |event: &&LoggedEvent| match &event.record.about {
            InvolvedObject::Pod(pod) | InvolvedObject::Container { pod, .. } => pod.uid == self.explanation.uid,
            InvolvedObject::Node | InvolvedObject::Claim { .. } | InvolvedObject::Manifest(_) => false,
        };
        let of_pod: Vec<_> = self.events.iter().filter(about_it).cloned().collect();
        let last = &of_pod[of_pod.len().saturating_sub(EVENTS_SHOWN)..];
        if last.is_empty() { String::new() } else { format!("\n{}", events::render(last, self.now)) }
    }
}

fn container_row(container: &ContainerStatus, kind: &str) -> Vec<String> {
    let state = container.state.clone().unwrap_or_default();
    let with = |word: &str, message: Option<String>| match message.as_deref().map(printable) {
        Some(message) if !message.is_empty() => format!("{}: {message}", printable(word)),
        _ => printable(word),
    };
    let said = if let Some(waiting) = state.waiting {
        with(waiting.reason.as_deref().unwrap_or("Waiting"), waiting.message)
    } else if let Some(end) = state.terminated {
        with(
            &format!("{} (exit {})", end.reason.unwrap_or_else(|| "Terminated".to_owned()), end.exit_code),
            end.message,
        )
    } else if state.running.is_some() {
        "Running".to_owned()
    } else {
        "Unknown".to_owned()
    };
    vec![
        format!("{}{kind}", container.name),
        if container.ready { "yes" } else { "no" }.to_owned(),
        container.restart_count.to_string(),
        said,
    ]
}

/// Symbols that a terminal can show: ASCII if the locale is not UTF-8.
fn marks() -> fn(StepState) -> &'static str {
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"]
        .into_iter()
        .find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
        .unwrap_or_default()
        .to_ascii_lowercase();
    if locale.contains("utf-8") || locale.contains("utf8") { symbols } else { letters }
}

fn symbols(state: StepState) -> &'static str {
    match state {
        StepState::Done => "✓",
        StepState::Working => "▸",
        StepState::Waiting => "…",
        StepState::Failed => "✗",
        StepState::Pending => "·",
    }
}

fn letters(state: StepState) -> &'static str {
    match state {
        StepState::Done => "+",
        StepState::Working => ">",
        StepState::Waiting => "~",
        StepState::Failed => "x",
        StepState::Pending => ".",
    }
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;
    use rubelet_core::{
        effect::{EventRecord, InvolvedObject, Severity},
        eviction::{EvictedPod, EvictionRecord},
        id::{PodRef, PodUid},
        snapshot::{EvictionView, Step, StepState},
    };
    use serde_json::json;

    use super::{Story, letters, or_refused_manifest, symbols};
    use crate::{
        event_log::{EventLog, LoggedEvent},
        server::{
            admin::Explanation,
            views::{
                find::NotFound,
                tests::{at, snapshot, view},
            },
        },
    };

    fn step(name: &str, state: StepState, detail: &str) -> Step {
        let (name, detail) = (name.to_owned(), detail.to_owned());
        Step { name, state, detail, since: None, next_retry: None, last_error: None }
    }

    fn explanation() -> Explanation {
        let mut web = view(
            "default",
            "web-n1",
            &["a"],
            &["i"],
            json!({
                "phase": "Running",
                "podIP": "10.0.0.7",
                "initContainerStatuses": [{"name": "i", "image": "i", "imageID": "", "ready": true, "restartCount": 0,
                    "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}],
                "containerStatuses": [{"name": "a", "image": "i", "imageID": "", "ready": false, "restartCount": 1,
                    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container\u{1b}[2J"}}}],
            }),
        );
        let since = Some(at("2026-11-15T18:59:50Z"));
        web.steps = vec![
            Step { since: Some(at("2026-11-15T18:50:00Z")), ..step("desired", StepState::Done, "from a file") },
            step("sandbox", StepState::Done, "ready, attempt 0"),
            Step {
                since,
                next_retry: Some(at("2026-11-15T19:00:04Z")),
                last_error: Some("exit code 1".to_owned()),
                ..step("containers", StepState::Waiting, "a starts again after its back-off")
            },
            step("status", StepState::Pending, "not reached"),
        ];
        let snapshot = snapshot("n1", [("u1", web)]);
        let (uid, view) = snapshot.pods.first().unwrap();
        Explanation::new(&snapshot, uid, view)
    }

    fn evicted() -> Explanation {
        let message = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 90Mi. Container a was using \
            300Mi, request is 0, has larger consumption of memory. ";
        let status = json!({ "phase": "Failed", "reason": "Evicted", "message": message });
        let mut hog = view("default", "hog", &["a"], &[], status);
        hog.lifecycle = "Finished".to_owned();
        hog.steps = vec![step("status", StepState::Done, "Failed (Evicted)")];
        let mut snapshot = snapshot("n1", [("u1", hog)]);
        let pod = |uid: &str, name: &str| PodRef {
            uid: PodUid::new(uid),
            namespace: "kube-system".into(),
            name: name.into(),
        };
        let noted = |uid: &str, signal: &str| EvictedPod {
            pod: pod(uid, "hog"),
            at: at("2026-11-15T18:58:00Z"),
            signal: signal.to_owned(),
            used: "300Mi".to_owned(),
            message: message.to_owned(),
            passed_over: vec![pod("c1", "dns"), pod("c2", "proxy")],
            ranked: 7,
        };
        let record = EvictionRecord {
            recent: [noted("u1", "memory.available"), noted("u2", "another pod's")].into(),
            ..EvictionRecord::default()
        };
        snapshot.eviction = EvictionView { record, ..EvictionView::default() }.into();
        let (uid, view) = snapshot.pods.first().unwrap();
        Explanation::new(&snapshot, uid, view)
    }

    #[test]
    fn explain_of_an_evicted_pod_shows_signal_usage_and_critical_pods() {
        let now = at("2026-11-15T19:00:00Z");
        let tell = |explanation: &Explanation| Story { explanation, events: &[], marks: letters, now }.tell();
        let mut explanation = evicted();
        assert_snapshot!(tell(&explanation), @"
        Pod default/hog (UID u1), from a manifest file
        Evicted: 0/1 ready; Finished for 60m

          + status  Failed (Evicted)

        Nothing is left to do.

        Evicted: The node was low on resource: memory. Threshold quantity: 100Mi, available: 90Mi. Container a was using 300Mi, request is 0, has larger consumption of memory.
          signal memory.available, used 300.0Mi, evicted 2m ago
          7 pods were ranked; it is the first that may be evicted, after the critical kube-system/dns, kube-system/proxy
        ");
        // A pod over a limit: no pods were ranked.
        let eviction = explanation.evicted.as_mut().unwrap();
        (eviction.signal, eviction.ranked) = ("emptydirfs.limit".to_owned(), 0);
        assert!(tell(&explanation).ends_with("  signal emptydirfs.limit, used 300.0Mi, evicted 2m ago\n"));
        // Its container ended in an error, which is all that the column says.
        let mut killed = (*explanation.view).clone();
        let terminated = json!({ "name": "a", "image": "i", "imageID": "", "ready": false, "restartCount": 0,
            "state": { "terminated": { "exitCode": 137, "reason": "Error" } } });
        let mut status = (*killed.status).clone();
        status.container_statuses = Some(vec![serde_json::from_value(terminated).unwrap()]);
        killed.status = status.into();
        let mut ended = evicted();
        ended.view = killed.into();
        assert!(tell(&ended).contains("\nError (Evicted): 0/1 ready"), "{}", tell(&ended));
        // After a restart of the agent only the status is left.
        explanation.evicted = None;
        assert!(tell(&explanation).contains("\nEvicted: The node was low on resource: memory. "));
        assert!(!tell(&explanation).contains("signal"));
    }

    fn events() -> Vec<LoggedEvent> {
        let log = EventLog::default();
        let pod = |uid: &str| PodRef { uid: PodUid::new(uid), namespace: "default".into(), name: "web-n1".into() };
        let record = |about, reason: &str| {
            EventRecord::new(about, Severity::Warning, reason, "Back-off restarting failed container")
        };
        for second in [10, 20] {
            let about = InvolvedObject::Container { pod: pod("u1"), container: "a".to_owned() };
            log.record(record(about, "BackOff"), at(&format!("2026-11-15T18:59:{second}Z")));
        }
        log.record(record(InvolvedObject::Pod(pod("another")), "NotMine"), at("2026-11-15T18:59:30Z"));
        log.since(0)
    }

    #[test]
    fn explain_shows_what_a_pod_waits_for_and_since_when() {
        let now = at("2026-11-15T19:00:00Z");
        let story = Story { explanation: &explanation(), events: &events(), marks: symbols, now };
        assert_snapshot!(story.tell(), @r#"
        Pod default/web-n1 (UID u1), from a manifest file
        CrashLoopBackOff: 0/1 ready, 1 restart, address 10.0.0.7; Syncing for 60m

          ✓ desired     from a file (10m ago)
          ✓ sandbox     ready, attempt 0
          … containers  a starts again after its back-off (since 10s, next try in 4s)
                        last error: exit code 1
          · status      not reached

        Waiting at containers: a starts again after its back-off

        CONTAINER   READY   RESTARTS   STATE
        i (init)    yes     0          Completed (exit 0)
        a           no      1          CrashLoopBackOff: back-off 10s restarting failed container\u{1b}[2J

        LAST SEEN           TYPE      REASON    OBJECT                  MESSAGE
        40s (x2 over 50s)   Warning   BackOff   pod/default/web-n1{a}   Back-off restarting failed container
        "#);
    }

    #[test]
    fn a_pod_whose_manifest_was_refused_is_not_just_unknown() {
        let log = EventLog::default();
        let message = "spec.containers: Required value".to_owned();
        let about = InvolvedObject::Manifest("/manifests/web.yaml".to_owned());
        let record = EventRecord::new(about, Severity::Warning, "Refused", message);
        log.record(record, at("2026-11-15T18:59:00Z"));
        let unknown = |name: &str| NotFound::Unknown { wanted: name.to_owned(), similar: Vec::new() };
        assert_snapshot!(or_refused_manifest(unknown("web"), "web", &log.since(0)), @r#"
        pods "web" not found
        A manifest with a similar name was rejected: /manifests/web.yaml: spec.containers: Required value
        "#);
        assert_eq!(or_refused_manifest(unknown("db"), "db", &log.since(0)).to_string(), r#"pods "db" not found"#);
    }

    #[test]
    fn explain_of_settled_pod_shows_nothing_left() {
        let mut explanation = explanation();
        let mut view = (*explanation.view).clone();
        view.steps.truncate(2);
        view.source = None;
        view.status = std::sync::Arc::default();
        explanation.view = view.into();
        let now = at("2026-11-15T19:00:00Z");
        assert_snapshot!(Story { explanation: &explanation, events: &[], marks: letters, now }.tell(), @"
        Pod default/web-n1 (UID u1), known to the runtime only: in no source
        Unknown: 0/1 ready; Syncing for 60m

          + desired  from a file (10m ago)
          + sandbox  ready, attempt 0

        Nothing is left to do.
        ");
    }
}
