//! `rubelet pods`: the pods of this node as a table.
//!
//! Owns: the table layout, once or watched. Upstream: what `kubectl get pods -A` prints.

use std::{
    collections::BTreeMap,
    io::{IsTerminal, Write},
    process::ExitCode,
    time::Duration,
};

use clap::{Arg, ArgAction, ArgMatches, Command};
use jiff::Timestamp;
use rubelet_core::snapshot::NodeView;
use tokio::time::sleep;

use super::{
    client::{self, CliError, Client},
    print::{Columns, age, printable, table},
};
use crate::{
    server::views::{PodRow, PodTable},
    world::Clock,
};

pub fn run(args: Vec<String>) -> ExitCode {
    client::run(async {
        let matches = command().try_get_matches_from(args)?;
        let client = Client::new(&matches);
        if matches.get_one::<String>("output").is_some_and(|format| format == "json") {
            let list: serde_json::Value = client.json("/podlist").await?;
            return Ok(writeln!(std::io::stdout(), "{list:#}")?);
        }
        let view = View::new(&matches);
        if matches.get_flag("watch") {
            watch(&client, &view).await
        } else {
            let table: PodTable = client.json("/pods").await?;
            print_once(&view, &table, Clock::system().now().wall)
        }
    })
}

fn command() -> Command {
    client::with_socket_args(Command::new("rubelet pods").about("Show the pods of this node"))
        .arg(
            Arg::new("namespace")
                .short('n')
                .long("namespace")
                .value_name("NAMESPACE")
                .help("Namespace; default is all namespaces"),
        )
        .arg(
            Arg::new("all-namespaces")
                .short('A')
                .long("all-namespaces")
                .action(ArgAction::SetTrue)
                .conflicts_with("namespace")
                .help("All namespaces (the default)"),
        )
        .arg(
            Arg::new("output")
                .short('o')
                .long("output")
                .value_name("FORMAT")
                .value_parser(["wide", "json"])
                .help("wide: adds address and node. json: a complete v1 PodList"),
        )
        .arg(Arg::new("watch").short('w').long("watch").action(ArgAction::SetTrue).help("Watch for changes"))
        .after_help(
            "Examples:\n  rubelet pods                    every pod, with why it is not running if it is not\n  \
             rubelet pods -o wide            also its address\n  \
             rubelet pods --watch            a live table\n  \
             rubelet pods -o json            for programs\n\n\
             For the story of one pod: rubelet explain POD",
        )
}

/// The options of the table.
#[derive(Clone, Debug, Default)]
struct View {
    wide: bool,
    namespace: Option<String>,
}

impl View {
    fn new(matches: &ArgMatches) -> View {
        View {
            wide: matches.get_one::<String>("output").is_some_and(|format| format == "wide"),
            namespace: matches.get_one::<String>("namespace").cloned(),
        }
    }

    fn shows(&self, row: &PodRow) -> bool {
        self.namespace.as_ref().is_none_or(|wanted| *wanted == row.namespace)
    }

    fn header(&self) -> Vec<String> {
        let mut header = vec!["NAMESPACE", "NAME", "READY", "STATUS", "RESTARTS", "AGE"];
        if self.wide {
            header.extend(["IP", "NODE"]);
        }
        header.into_iter().map(str::to_owned).collect()
    }

    fn cells(&self, row: &PodRow, node: &str, now: Timestamp) -> Vec<String> {
        let restarts = match row.last_restart {
            Some(at) if row.restarts > 0 => format!("{} ({} ago)", row.restarts, age(at, now)),
            _ => row.restarts.to_string(),
        };
        let mut cells = vec![
            printable(&row.namespace),
            printable(&row.name),
            row.ready.clone(),
            printable(&row.status),
            restarts,
            age(row.created, now),
        ];
        if self.wide {
            cells.extend([row.ip.clone().unwrap_or_else(|| "<none>".to_owned()), node.to_owned()]);
        }
        cells
    }
}

fn print_once(view: &View, pods: &PodTable, now: Timestamp) -> Result<(), CliError> {
    // On standard error: a program that reads the table is not disturbed.
    for notice in notices(&pods.node, now) {
        eprintln!("{notice}");
    }
    if pods.rows.iter().any(|row| view.shows(row)) {
        std::io::stdout().write_all(render(view, pods, now).as_bytes())?;
    } else {
        eprintln!("No pods found.");
    }
    Ok(())
}

fn render(view: &View, pods: &PodTable, now: Timestamp) -> String {
    let shown = pods.rows.iter().filter(|row| view.shows(row));
    let rows: Vec<_> =
        std::iter::once(view.header()).chain(shown.map(|row| view.cells(row, &pods.node.name, now))).collect();
    table(&rows)
}

/// The lines above the table when the node has problems.
pub(super) fn notices(node: &NodeView, now: Timestamp) -> Vec<String> {
    let mut notices = Vec::new();
    for (what, problem) in [("The runtime", &node.runtime_problem), ("The pod network", &node.network_problem)] {
        if let Some(problem) = problem {
            let message = printable(&problem.message);
            notices.push(format!("! {what} has a problem since {}: {message}", age(problem.since, now)));
        }
    }
    if !node.sources_not_ready.is_empty() {
        let awaited: Vec<_> = node.sources_not_ready.iter().map(|source| source.as_str()).collect();
        notices.push(format!("! Source not ready: {}; cleanup deferred", awaited.join(", ")));
    }
    notices
}

async fn watch(client: &Client, view: &View) -> Result<(), CliError> {
    let mut tables = client.stream("/pods?watch=1").await?;
    let clock = Clock::system();
    let mut out = std::io::stdout();
    let mut screen = if out.is_terminal() { Screen::Redrawn(None) } else { Screen::Appended(Changes::default()) };
    loop {
        // Cancel safe: a partly read line stays in `tables`.
        let next = tokio::select! {
            biased;
            table = tables.next_line::<PodTable>() => Some(table?),
            // Ages advance while nothing else changes.
            () = sleep(Duration::from_secs(1)), if matches!(screen, Screen::Redrawn(Some(_))) => None,
        };
        let now = clock.now().wall;
        match (&mut screen, next) {
            (_, Some(None)) => return Err(CliError::Refused("rubelet has stopped".to_owned())),
            (Screen::Redrawn(shown), next) => {
                if let Some(table) = next.flatten() {
                    *shown = Some(table);
                }
                if let Some(pods) = shown {
                    out.write_all(picture(view, pods, now).as_bytes())?;
                }
            }
            (Screen::Appended(changes), Some(Some(pods))) => {
                out.write_all(changes.lines(view, &pods, now).as_bytes())?;
            }
            (Screen::Appended(_), None) => {}
        }
        out.flush()?;
    }
}

enum Screen {
    /// A terminal: redraws the whole table from the last update.
    Redrawn(Option<PodTable>),
    /// A file or a pipe: one line per change.
    Appended(Changes),
}

/// Moves the cursor home, clears each line to its end, then the rest of the screen: no flicker, no leftovers.
fn picture(view: &View, pods: &PodTable, now: Timestamp) -> String {
    let mut text: String = notices(&pods.node, now).iter().map(|notice| format!("{notice}\n")).collect();
    text.push_str(&render(view, pods, now));
    format!("\x1b[H{}\x1b[J", text.replace('\n', "\x1b[K\n"))
}

/// Rows that differ from those last printed.
#[derive(Debug, Default)]
struct Changes {
    columns: Columns,
    printed: BTreeMap<String, PodRow>,
    node: Option<NodeView>,
    has_header: bool,
}

impl Changes {
    fn lines(&mut self, view: &View, pods: &PodTable, now: Timestamp) -> String {
        let current: BTreeMap<String, PodRow> =
            pods.rows.iter().filter(|row| view.shows(row)).map(|row| (row.uid.to_string(), row.clone())).collect();
        let changed = current.iter().filter(|(uid, row)| self.printed.get(*uid) != Some(row));
        let mut rows: Vec<_> = changed.map(|(_, row)| view.cells(row, &pods.node.name, now)).collect();
        for row in self.printed.iter().filter(|(uid, _)| !current.contains_key(*uid)).map(|(_, row)| row) {
            let gone = PodRow { status: "Deleted".to_owned(), ..row.clone() };
            rows.push(view.cells(&gone, &pods.node.name, now));
        }
        self.printed = current;
        if !std::mem::replace(&mut self.has_header, true) {
            rows.insert(0, view.header());
        }
        self.columns.fit(&rows);

        let mut fresh = String::new();
        if self.node.as_ref() != Some(&pods.node) {
            fresh.extend(notices(&pods.node, now).iter().map(|notice| format!("{notice}\n")));
            self.node = Some(pods.node.clone());
        }
        fresh + &rows.iter().map(|row| self.columns.line(row)).collect::<String>()
    }
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;
    use rubelet_core::snapshot::NodeProblem;
    use serde_json::json;

    use super::{Changes, View, notices, picture, render};
    use crate::server::views::{
        PodTable, pod_table,
        tests::{at, snapshot, view},
    };

    fn pods() -> PodTable {
        let waiting = json!({"phase": "Running", "startTime": "2026-11-15T18:50:00Z", "containerStatuses": [
            {"name": "a", "image": "i", "imageID": "", "ready": false, "restartCount": 4,
             "state": {"waiting": {"reason": "CrashLoopBackOff"}},
             "lastState": {"terminated": {"exitCode": 1, "finishedAt": "2026-11-15T18:59:30Z"}}}]});
        let running = json!({"phase": "Running", "startTime": "2026-11-15T18:58:00Z", "podIPs": [{"ip": "10.0.0.7"}],
            "containerStatuses": [{"name": "a", "image": "i", "imageID": "", "ready": true, "restartCount": 0, "state": {"running": {}}}]});
        pod_table(&snapshot(
            "n1",
            [
                ("u1", view("kube-system", "proxy-n1", &["a"], &[], running)),
                ("u2", view("default", "web-n1", &["a"], &[], waiting)),
            ],
        ))
    }

    #[test]
    fn the_table_is_kubectls() {
        let now = at("2026-11-15T19:00:00Z");
        assert_snapshot!(render(&View::default(), &pods(), now), @"
        NAMESPACE     NAME       READY   STATUS             RESTARTS      AGE
        default       web-n1     0/1     CrashLoopBackOff   4 (30s ago)   10m
        kube-system   proxy-n1   1/1     Running            0             2m
        ");
        assert_snapshot!(render(&View { wide: true, namespace: Some("kube-system".to_owned()) }, &pods(), now), @"
        NAMESPACE     NAME       READY   STATUS    RESTARTS   AGE   IP         NODE
        kube-system   proxy-n1   1/1     Running   0          2m    10.0.0.7   n1
        ");
    }

    #[test]
    fn node_problems_are_shown_above_the_table() {
        let mut node = pods().node;
        node.runtime_problem =
            Some(NodeProblem { message: "connection refused".to_owned(), since: at("2026-11-15T18:59:00Z") });
        node.network_problem =
            Some(NodeProblem { message: "cni plugin not initialized".to_owned(), since: at("2026-11-15T18:00:00Z") });
        node.sources_not_ready = vec![rubelet_core::event::Source::Http];
        assert_snapshot!(notices(&node, at("2026-11-15T19:00:00Z")).join("\n"), @"
        ! The runtime has a problem since 60s: connection refused
        ! The pod network has a problem since 60m: cni plugin not initialized
        ! Source not ready: http; cleanup deferred
        ");
    }

    #[test]
    fn a_pipe_gets_a_line_per_change() {
        let now = at("2026-11-15T19:00:00Z");
        let (view, mut changes) = (View::default(), Changes::default());
        let mut table = pods();
        let mut written = changes.lines(&view, &table, now);
        written.push_str(&changes.lines(&view, &table, now));
        table.rows[0].status = "Running".to_owned();
        table.rows.remove(1);
        written.push_str(&changes.lines(&view, &table, now));
        assert_snapshot!(written, @"
        NAMESPACE     NAME       READY   STATUS             RESTARTS      AGE
        kube-system   proxy-n1   1/1     Running            0             2m
        default       web-n1     0/1     CrashLoopBackOff   4 (30s ago)   10m
        default       web-n1     0/1     Running            4 (30s ago)   10m
        kube-system   proxy-n1   1/1     Deleted            0             2m
        ");
    }

    #[test]
    fn a_terminal_is_redrawn_without_leftovers() {
        let drawn = picture(&View::default(), &pods(), at("2026-11-15T19:00:00Z"));
        assert!(drawn.starts_with("\x1b[HNAMESPACE") && drawn.ends_with("\x1b[J"));
        assert_eq!(drawn.matches("\x1b[K\n").count(), drawn.matches('\n').count());
    }
}
