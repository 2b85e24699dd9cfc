//! The project's rules that no linter has, each with its reason.
//!
//! Owns: the rules and their exceptions. Sizes are a ratchet: `xtask/tidy-baseline.txt` lists what is over the limit today;
//! it may shrink, and must then be updated, but not grow.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};

use crate::check::{limits, references, samples, source::Source};

const FUNCTION_LINES: usize = 70;
const FILE_LINES: usize = 600;
const AGENT_FIELDS: usize = 12;

/// The core is pure, so it may not use anything that does I/O.
const CORE_DEPENDENCIES: &[&str] = &["rubelet-cri", "jiff", "k8s-openapi", "rpds", "serde", "serde_json", "thiserror"];

/// Words that make a run differ from its replay, with the places that may use them.
const BANNED: &[Banned] = &[
    Banned { words: &["Instant::now", "SystemTime::now", "Timestamp::now"], why: "time is a value", allowed: CLOCKS },
    Banned { words: &["HashMap", "HashSet"], why: "its order differs from run to run; use BTreeMap", allowed: &[] },
    Banned { words: &["unbounded_channel"], why: "every queue has a bound", allowed: &[] },
    Banned { words: &["fastrand", "rand"], why: "randomness comes from the shell's one generator", allowed: RANDOM },
    Banned {
        words: &["thread::sleep", "time::sleep", "sleep_until", "time::interval"],
        why: "waiting belongs to the loop and to the watchers around it",
        allowed: SLEEPERS,
    },
];

/// The simulator reads tokio's clock, which it controls; the API client measures its waits by it.
const CLOCKS: &[&str] = &[
    "crates/rubelet-sim/",
    "crates/rubelet/src/world.rs",
    "crates/rubelet-kube/src/clock.rs",
    // How long a call or a connection has lasted, in tokio's time.
    "crates/rubelet-host/src/lanes.rs",
    "crates/rubelet-host/src/names.rs",
    "crates/rubelet-host/src/stats/tree.rs",
    "crates/rubelet/src/server/unauthenticated.rs",
    "crates/rubelet-cri/examples/",
    "crates/rubelet-testbed/src/clock.rs",
];
/// Generators seeded by their caller, to spread the actions of many nodes over time.
const RANDOM: &[&str] = &[
    "crates/rubelet/src/world.rs",
    "crates/rubelet/src/node",
    "crates/rubelet/src/objects",
    "crates/rubelet/src/certs",
    "crates/rubelet-kube/src/reflector.rs",
    "crates/rubelet-sim/",
];
/// The loop sleeps until its next deadline; sources poll slowly; observation reconnects; the node's reports are periodic; a hook may be a sleep, systemd
/// is pinged, logind is reconnected and asked until it has read its configuration, and a gRPC probe redials until its deadline; the recorder, certificates and objects retry; servers delay slow or greedy readers; the first
/// CPU rate needs two readings; the API client has a rate limiter and a back-off. The simulator's time is virtual, and the testbed and its tests wait for real programs.
const SLEEPERS: &[&str] = &[
    "crates/rubelet/src/world.rs",
    "crates/rubelet/src/sync_loop.rs",
    "crates/rubelet/src/sources",
    "crates/rubelet/src/observe",
    "crates/rubelet/src/node",
    "crates/rubelet/src/objects",
    "crates/rubelet/src/certs",
    "crates/rubelet/src/effects/hook.rs",
    // udev makes links to disks without a word.
    "crates/rubelet/src/effects/volume/iscsi.rs",
    "crates/rubelet/src/notify.rs",
    "crates/rubelet/src/shutdown.rs",
    "crates/rubelet-host/src/check/grpc.rs",
    "crates/rubelet-host/src/logind",
    // The rest between two slices of a walk.
    "crates/rubelet-host/src/stats/tree.rs",
    "crates/rubelet/src/recorder/writer.rs",
    "crates/rubelet/src/server",
    "crates/rubelet/src/stats/sample.rs",
    "crates/rubelet/src/cli",
    "crates/rubelet-cri/examples/",
    "crates/rubelet-kube/src/",
    "crates/rubelet-sim/",
    "crates/rubelet-testbed/src/clock.rs",
    "crates/rubelet-e2e/",
];

/// Operators on times panic on overflow, and a panic ends the agent; clippy.toml exempts everything else from the lint.
const TIME_LINT: &str = "#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]";
/// Libraries that do not run on nodes.
const NOT_THE_AGENT: &[&str] = &[
    "crates/rubelet-sim/",
    "crates/rubelet-testbed/",
    "crates/rubelet-e2e/",
    "crates/rubelet-gen/",
    "crates/rubelet-fuzz/",
];

struct Banned {
    words: &'static [&'static str],
    why: &'static str,
    /// Path prefixes.
    allowed: &'static [&'static str],
}

/// All violations at once.
pub fn run(root: &Path) -> anyhow::Result<()> {
    let mut breaches = Vec::new();
    let mut sizes = BTreeMap::new();
    let files = rust_files(root)?;
    for path in &files {
        let text = fs::read_to_string(root.join(path)).with_context(|| format!("read {}", path.display()))?;
        let name = path.to_str().context("a path in UTF-8")?;
        breaches.extend(breaches_of(name, &text));
        sizes.extend(oversized(name, &text));
    }
    let baseline = fs::read_to_string(root.join("xtask/tidy-baseline.txt")).unwrap_or_default();
    breaches.extend(against_baseline(&sizes, &baseline));
    let core = fs::read_to_string(root.join("crates/rubelet-core/Cargo.toml"))?;
    breaches.extend(core_dependencies(&core));
    breaches.extend(references::run(root, &files)?);
    breaches.extend(limits::run(root, &files)?);
    breaches.extend(samples::run(root)?);
    if !breaches.is_empty() {
        bail!("{} breaches of the house's rules:\n{}", breaches.len(), breaches.join("\n"));
    }
    Ok(())
}

/// All sources but the generated ones, by path from the root.
fn rust_files(root: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut open = vec![root.join("crates"), root.join("xtask"), root.join("testbed")];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(&dir).with_context(|| format!("read {}", dir.display()))? {
            let path = entry?.path();
            let is_skipped = path.ends_with("generated") || path.ends_with("target");
            if path.is_dir() && !is_skipped {
                open.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path.strip_prefix(root).expect("found below the root").to_owned());
            }
        }
    }
    found.sort();
    Ok(found)
}

/// The violations of one file, apart from its size.
fn breaches_of(path: &str, text: &str) -> Vec<String> {
    let source = Source::parse(text);
    let mut found = Vec::new();
    let mut breach = |what: &str| found.push(format!("{path}: {what}"));
    if !text.starts_with("//!") {
        breach("no module header: say in `//!` what the file owns");
    }
    if path.ends_with("/mod.rs") {
        breach("is a mod.rs: name it after its module, beside the directory");
    }
    let is_agent_root = path.ends_with("/src/lib.rs") && !NOT_THE_AGENT.iter().any(|place| path.starts_with(place));
    if is_agent_root && !text.contains(TIME_LINT) {
        breach(&format!("no `{TIME_LINT}`: overflow of a time from outside must not end the agent"));
    }
    if source.unbiased_selects() > 0 {
        breach("a `select!` without `biased;`: the order of its arms must be chosen, not drawn");
    }
    if is_test(path) {
        return found;
    }
    for banned in BANNED {
        let is_allowed = banned.allowed.iter().any(|place| path.starts_with(place));
        for word in banned.words.iter().filter(|word| !is_allowed && source.mentions(word)) {
            found.push(format!("{path}: uses `{word}`: {}", banned.why));
        }
    }
    for place in MACHINE_PLACES.iter().filter(|place| text.contains(*place)) {
        found.push(format!("{path}: names `{place}`, a place on somebody's machine"));
    }
    if path == "crates/rubelet-core/src/agent.rs"
        && let Some(count) = source.fields("Agent").filter(|count| *count > AGENT_FIELDS)
    {
        found.push(format!("{path}: `Agent` has {count} fields; it routes, others know (at most {AGENT_FIELDS})"));
    }
    found
}

/// Written in two parts, so that this file does not name them itself.
const MACHINE_PLACES: &[&str] = &[concat!("/wo", "rk/"), concat!("/root", "/go/"), concat!("/root", "/.cargo")];

pub(super) fn is_test(path: &str) -> bool {
    path.contains("/tests/") || path.ends_with("/tests.rs") || path.ends_with("_tests.rs")
}

/// What is over its limit: `kind path[::function]` and its number of lines.
fn oversized(path: &str, text: &str) -> Vec<(String, usize)> {
    if is_test(path) {
        return Vec::new();
    }
    let source = Source::parse(text);
    let functions = source.functions().into_iter().filter(|function| function.lines > FUNCTION_LINES);
    let mut found: Vec<_> =
        functions.map(|function| (format!("function {path}::{}", function.name), function.lines)).collect();
    let lines = source.lines(text);
    if lines > FILE_LINES {
        found.push((format!("file {path}"), lines));
    }
    found
}

fn against_baseline(sizes: &BTreeMap<String, usize>, baseline: &str) -> Vec<String> {
    let known: BTreeMap<&str, usize> = baseline
        .lines()
        .filter_map(|line| line.rsplit_once(' '))
        .filter_map(|(what, lines)| Some((what, lines.parse().ok()?)))
        .collect();
    let mut found = Vec::new();
    for (what, lines) in sizes {
        match known.get(what.as_str()) {
            None => {
                found.push(format!("{what} has {lines} lines (functions {FUNCTION_LINES}, files {FILE_LINES} at most)"))
            }
            Some(before) if lines > before => found.push(format!("{what} grew from {before} to {lines} lines")),
            Some(_) => {}
        }
    }
    for (what, before) in known {
        let now = sizes.get(what).copied().unwrap_or(0);
        if now < before {
            found.push(format!("{what} shrank from {before} to {now} lines: say so in xtask/tidy-baseline.txt"));
        }
    }
    found
}

fn core_dependencies(manifest: &str) -> Vec<String> {
    let section = manifest.split("\n[").find_map(|section| section.strip_prefix("dependencies]"));
    let names = section.unwrap_or_default().lines().filter_map(|line| line.split(['.', '=', ' ']).next());
    let strangers =
        names.filter(|name| !name.is_empty() && !name.starts_with('#') && !CORE_DEPENDENCIES.contains(name));
    strangers.map(|name| format!("crates/rubelet-core/Cargo.toml: depends on `{name}`; the core is pure")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caught(path: &str, text: &str) -> String {
        breaches_of(path, text).join("\n")
    }

    #[test]
    fn each_breach_in_a_file_is_caught() {
        let header = "//! Owns nothing.\n";
        let cases = [
            ("crates/rubelet/src/a.rs", "fn a() {}", "no module header"),
            ("crates/rubelet/src/a/mod.rs", "", "is a mod.rs"),
            ("crates/rubelet/src/a.rs", "fn a() { select! { x = y => {} } }", "without `biased;`"),
            ("crates/rubelet/src/a.rs", "fn a() { let t = Instant::now(); }", "uses `Instant::now`"),
            ("crates/rubelet-core/src/a.rs", "fn a() { jiff::Timestamp::now(); }", "uses `Timestamp::now`"),
            ("crates/rubelet-core/src/a.rs", "use std::collections::HashMap;", "uses `HashMap`"),
            ("crates/rubelet-core/src/a.rs", "fn a() { fastrand::u8(..); }", "uses `fastrand`"),
            ("crates/rubelet/src/a.rs", "async fn a() { tokio::time::sleep(x).await }", "uses `time::sleep`"),
            ("crates/rubelet/src/a.rs", "fn a() { mpsc::unbounded_channel(); }", "uses `unbounded_channel`"),
            ("crates/rubelet-new/src/lib.rs", "fn a() {}", "overflow of a time"),
            ("xtask/src/a.rs", concat!("const A: &str = \"/wo", "rk/x\";"), "somebody's machine"),
        ];
        for (path, text, expected) in cases {
            let header = if expected.contains("header") { "" } else { header };
            let found = caught(path, &format!("{header}{text}\n"));
            assert!(found.contains(expected), "{path} `{text}`: {found}");
        }
    }

    #[test]
    fn allowed_words_are_no_violation() {
        let cases = [
            ("crates/rubelet/src/world.rs", "fn a() { Instant::now(); }"),
            ("crates/rubelet/src/sources/file.rs", "async fn a() { tokio::time::sleep(x).await }"),
            ("crates/rubelet/src/a.rs", "fn a() { select! { biased; x = y => {} } }"),
            ("crates/rubelet/src/a.rs", "#[cfg(test)]\nmod tests {\n use std::collections::HashMap;\n}"),
        ];
        for (path, text) in cases {
            assert_eq!(caught(path, &format!("//! Owns nothing.\n{text}\n")), "");
        }
    }

    #[test]
    fn the_agent_may_not_grow_beyond_twelve_fields() {
        let agent = |count: usize| {
            let fields: String = (0..count).map(|number| format!("f{number}: u8,\n")).collect();
            caught("crates/rubelet-core/src/agent.rs", &format!("//! Routes.\nstruct Agent {{\n{fields}}}\n"))
        };
        assert_eq!(agent(12), "");
        assert!(agent(13).contains("has 13 fields"));
    }

    #[test]
    fn a_long_function_and_a_long_file_are_caught() {
        let long = format!("//! x\nfn a() {{\n{}}}\n", "  b();\n".repeat(70));
        assert_eq!(oversized("a.rs", &long), [("function a.rs::a".to_owned(), 72)]);
        let file = format!("//! x\n{}", "const A: u8 = 1;\n".repeat(600));
        assert_eq!(oversized("a.rs", &file), [("file a.rs".to_owned(), 601)]);
    }

    #[test]
    fn the_ratchet_only_tightens() {
        let sizes = |lines| BTreeMap::from([("function a.rs::a".to_owned(), lines)]);
        let verdict = |lines, baseline| against_baseline(&sizes(lines), baseline).join("\n");
        assert!(verdict(80, "").contains("has 80 lines"));
        assert_eq!(verdict(80, "function a.rs::a 80\n"), "");
        assert!(verdict(81, "function a.rs::a 80\n").contains("grew from 80 to 81"));
        assert!(verdict(79, "function a.rs::a 80\n").contains("shrank from 80 to 79"));
        assert!(against_baseline(&BTreeMap::new(), "file a.rs 700\n").join("").contains("shrank from 700 to 0"));
    }

    #[test]
    fn forbidden_core_dependency_is_reported() {
        let manifest = |name: &str| {
            format!(
                "[package]\nname = \"x\"\n\n[dependencies]\nserde.workspace = true\n{name}.workspace = true\n\n[dev-dependencies]\ninsta.workspace = true\n"
            )
        };
        assert_eq!(core_dependencies(&manifest("jiff")), Vec::<String>::new());
        assert!(core_dependencies(&manifest("tokio")).join("").contains("`tokio`"));
    }
}
