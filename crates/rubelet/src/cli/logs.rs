//! `rubelet logs POD`: a container's log.
//!
//! Owns: the default container. Upstream: `kubectl logs`.

use std::{io::Write, process::ExitCode};

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use k8s_openapi::api::core::v1::Pod;
use rubelet_core::{config::GoDuration, id::name_of};

use super::{
    client::{self, CliError, Client, path},
    explain,
};

/// The annotation that names the default container.
const DEFAULT_CONTAINER: &str = "kubectl.kubernetes.io/default-container";

pub fn run(args: Vec<String>) -> ExitCode {
    client::run(async {
        let matches = command().try_get_matches_from(args)?;
        let client = Client::new(&matches);
        let text = |name: &str| matches.get_one::<String>(name).map(String::as_str);
        let pod = text("pod").expect("clap requires it");
        let explanation = explain::ask(&client, pod, text("namespace")).await?;
        let chosen = choose(&explanation.view.pod, text("container").or(text("container-name")))?;
        if let Some(notice) = &chosen.notice {
            eprintln!("{notice}");
        }
        // By UID: the pod that was found, even if another takes its name meanwhile.
        let segments = ["logs", explanation.uid.as_str(), &chosen.container];
        let query = query(&matches);
        let query: Vec<_> = query.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let mut log = client.stream(&path(&segments, &query)).await?;
        let mut out = std::io::stdout();
        while let Some(bytes) = log.next_bytes().await? {
            out.write_all(&bytes)?;
            out.flush()?;
        }
        Ok(())
    })
}

fn command() -> Command {
    let switch = |name: &'static str| Arg::new(name).long(name).action(ArgAction::SetTrue);
    client::with_socket_args(Command::new("rubelet logs").about("Print the log of a container"))
        .arg(
            Arg::new("pod")
                .value_name("POD")
                .required(true)
                .help("Pod name, with or without the node name suffix, or pod UID"),
        )
        .arg(Arg::new("container-name").value_name("CONTAINER").conflicts_with("container").help("As -c"))
        .arg(
            Arg::new("container")
                .short('c')
                .long("container")
                .value_name("NAME")
                .help("Container name; default is the annotated or the first one"),
        )
        .arg(
            Arg::new("namespace")
                .short('n')
                .long("namespace")
                .value_name("NAMESPACE")
                .help("Namespace; default is all namespaces"),
        )
        .arg(switch("follow").short('f').help("Follow the log until the container stops"))
        .arg(switch("previous").short('p').help("Log of the previous run of the container"))
        .arg(switch("timestamps").help("Prefix each line with its time"))
        .arg(
            Arg::new("tail")
                .long("tail")
                .value_name("LINES")
                .allow_hyphen_values(true)
                .value_parser(value_parser!(i64).range(-1..))
                .help("Number of last lines to show; -1 for all"),
        )
        .arg(
            Arg::new("since")
                .long("since")
                .value_name("DURATION")
                .value_parser(secs_since)
                .help("Only lines newer than a duration such as 30s, 5m, 2h"),
        )
        .after_help(
            "Examples:\n  rubelet logs web                what the first container of web-<node> wrote\n  \
             rubelet logs web -c proxy -f    follow another one\n  \
             rubelet logs web --previous     why it crashed\n  \
             rubelet logs web --tail 20      the end only",
        )
}

fn secs_since(text: &str) -> Result<i64, String> {
    let duration: GoDuration = text.parse().map_err(|_| "expected a duration such as 30s, 5m, 2h".to_owned())?;
    i64::try_from(duration.as_std().as_secs()).map_err(|error| error.to_string())
}

fn query(matches: &ArgMatches) -> Vec<(&'static str, String)> {
    let mut query = Vec::new();
    for name in ["follow", "previous", "timestamps"] {
        if matches.get_flag(name) {
            query.push((name, "1".to_owned()));
        }
    }
    match matches.get_one::<i64>("tail") {
        None | Some(-1) => {}
        Some(lines) => query.push(("tail", lines.to_string())),
    }
    if let Some(secs) = matches.get_one::<i64>("since") {
        query.push(("since_secs", secs.to_string()));
    }
    query
}

#[derive(Debug, PartialEq, Eq)]
struct Chosen {
    container: String,
    /// Printed if another container could have been meant.
    notice: Option<String>,
}

fn choose(pod: &Pod, asked: Option<&str>) -> Result<Chosen, CliError> {
    let spec = pod.spec.clone().unwrap_or_default();
    let main: Vec<String> = spec.containers.iter().map(|container| container.name.clone()).collect();
    let init: Vec<String> = spec.init_containers.into_iter().flatten().map(|container| container.name).collect();
    let ephemeral: Vec<String> =
        spec.ephemeral_containers.into_iter().flatten().map(|ephemeral| ephemeral.name).collect();
    let is_there = |name: &str| main.iter().chain(&init).chain(&ephemeral).any(|known| known == name);
    let all = || {
        let init = init.iter().map(|name| format!("{name} (init)"));
        let ephemeral = ephemeral.iter().map(|name| format!("{name} (ephem)"));
        main.iter().cloned().chain(ephemeral).chain(init).collect::<Vec<_>>().join(", ")
    };
    let pod_name = name_of(pod);
    if let Some(asked) = asked {
        return match is_there(asked) {
            true => Ok(Chosen { container: asked.to_owned(), notice: None }),
            false => {
                Err(CliError::Refused(format!("container {asked} is not valid for pod {pod_name}; it has: {}", all())))
            }
        };
    }
    let annotated = pod.metadata.annotations.as_ref().and_then(|annotations| annotations.get(DEFAULT_CONTAINER));
    if let Some(container) = annotated.filter(|name| is_there(name)) {
        return Ok(Chosen { container: container.clone(), notice: None });
    }
    let Some(first) = main.first() else {
        let message = format!("containers of pod {pod_name} are unknown; name one with -c");
        return Err(CliError::Refused(message));
    };
    let is_only = main.len() + init.len() + ephemeral.len() == 1;
    let notice = (!is_only).then(|| format!("Defaulted container {first:?} out of: {}", all()));
    Ok(Chosen { container: first.clone(), notice })
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;
    use k8s_openapi::api::core::v1::EphemeralContainer;
    use serde_json::json;

    use super::{choose, command, query, secs_since};
    use crate::server::views::tests::view;

    #[test]
    fn the_container_is_the_one_kubectl_would_take() {
        let one = view("default", "one-n1", &["a"], &[], json!({})).pod;
        let two = view("default", "two-n1", &["a", "b"], &["i"], json!({})).pod;
        let none = view("default", "stray", &[], &[], json!({})).pod;
        let mut annotated = (*two).clone();
        annotated.metadata.annotations =
            Some([("kubectl.kubernetes.io/default-container".to_owned(), "b".to_owned())].into());
        let mut debugged = (*one).clone();
        let debugger = EphemeralContainer { name: "d".to_owned(), ..EphemeralContainer::default() };
        debugged.spec.as_mut().unwrap().ephemeral_containers = Some(vec![debugger]);
        let cases = [
            ("only one", choose(&one, None)),
            ("beside a debugger", choose(&debugged, None)),
            ("the debugger", choose(&debugged, Some("d"))),
            ("first of several", choose(&two, None)),
            ("annotated", choose(&annotated, None)),
            ("asked for", choose(&annotated, Some("i"))),
            ("mistyped", choose(&two, Some("x"))),
            ("none known", choose(&none, None)),
        ];
        let told: Vec<String> = cases
            .into_iter()
            .map(|(case, chosen)| match chosen {
                Ok(chosen) => format!("{case}: {} {:?}", chosen.container, chosen.notice),
                Err(error) => format!("{case}: error: {error}"),
            })
            .collect();
        assert_snapshot!(told.join("\n"), @r#"
        only one: a None
        beside a debugger: a Some("Defaulted container \"a\" out of: a, d (ephem)")
        the debugger: d None
        first of several: a Some("Defaulted container \"a\" out of: a, b, i (init)")
        annotated: b None
        asked for: i None
        mistyped: error: container x is not valid for pod two-n1; it has: a, b, i (init)
        none known: error: containers of pod stray are unknown; name one with -c
        "#);
    }

    #[test]
    fn flags_become_a_query() {
        let asked = |args: &[&str]| {
            let matches = command().try_get_matches_from(args).map_err(|error| error.kind())?;
            Ok::<_, clap::error::ErrorKind>(
                query(&matches).iter().map(|(name, value)| format!("{name}={value} ")).collect::<String>(),
            )
        };
        let cases = [
            asked(&["web"]),
            asked(&["web", "-f", "--tail", "20", "-p"]),
            asked(&["web", "--tail=-1", "--since", "1m30s", "--timestamps"]),
            asked(&["web", "--tail=-2"]),
            asked(&["web", "--since", "soon"]),
            asked(&["web", "a", "-c", "b"]),
            asked(&[]),
        ];
        assert_snapshot!(cases.map(|case| format!("{case:?}")).join("\n"), @r#"
        Ok("")
        Ok("follow=1 previous=1 tail=20 ")
        Ok("timestamps=1 since_secs=90 ")
        Err(ValueValidation)
        Err(ValueValidation)
        Err(ArgumentConflict)
        Err(MissingRequiredArgument)
        "#);
        assert_eq!(secs_since("2h"), Ok(7200));
    }
}
