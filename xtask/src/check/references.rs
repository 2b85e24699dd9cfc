//! Checks that the tests, files, functions, cases and rules that the papers name exist.
//!
//! Owns: what counts as a reference in Markdown, and how each kind is looked up. Never: checks whether a test proves its row.
//! Names in columns of upstream's names (`upstream`, `kubelet`, `path`) are not references. In a column `here`, a name after a
//! file must occur in that file.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs,
    path::{Path, PathBuf},
};

use anyhow::Context as _;

const PAPERS: &[&str] = &[
    "docs/parity.md",
    "docs/limits.md",
    "docs/security.md",
    "docs/from-kubelet.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "STYLE.md",
];
const FOREIGN_COLUMNS: &[&str] = &["upstream", "kubelet", "path"];
const PLACES_COLUMN: &str = "here";
/// The short names of source directories in papers.
const ALIASES: &[(&str, &str)] = &[
    ("core/", "crates/rubelet-core/src/"),
    ("shell/", "crates/rubelet/src/"),
    ("cri/", "crates/rubelet-cri/src/"),
    ("csi/", "crates/rubelet-csi/src/"),
    ("host/", "crates/rubelet-host/src/"),
    ("kube/", "crates/rubelet-kube/src/"),
    ("sim/", "crates/rubelet-sim/src/"),
    ("tls/", "crates/rubelet-tls/src/"),
];
const EXTENSIONS: &[&str] = &[".rs", ".md", ".jsonl", ".txt", ".toml", ".proto"];
/// Directories of built or fetched files.
const SKIPPED_DIRS: &[&str] = &["target", ".git", ".rubelet"];
/// A name of this many parts is a test or a literal; a shorter one may be anything in the sources.
const TEST_NAME_PARTS: usize = 4;
/// A text of this many words is the name of an end-to-end case, unless it is a command.
const CASE_NAME_WORDS: usize = 4;
const COMMANDS: &[&str] = &["cargo ", "rubelet "];

/// Every dangling reference.
pub fn run(root: &Path, sources: &[PathBuf]) -> anyhow::Result<Vec<String>> {
    let tree = Tree::read(root, sources)?;
    let mut found = Vec::new();
    for paper in PAPERS {
        let text = fs::read_to_string(root.join(paper)).with_context(|| format!("read {paper}"))?;
        let broken = references(&text).into_iter().filter(|reference| !tree.has(reference));
        found.extend(broken.map(|reference| format!("{paper}: names {reference}, which does not exist")));
    }
    Ok(found)
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Reference {
    File(String),
    /// A test, another function, or a literal.
    Function(String),
    /// A function of the simulator.
    Scenario(String),
    /// Any word in the sources.
    Name(String),
    /// Of an end-to-end test; `…` stands for anything.
    Case(String),
    /// A rule of the simulator.
    Rule(String),
    /// Anything, in one of these files.
    Place(Vec<String>, String),
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reference::File(name) => write!(f, "the file `{name}`"),
            Reference::Function(name) => write!(f, "the test or function `{name}`"),
            Reference::Scenario(name) => write!(f, "the scenario `{name}`"),
            Reference::Name(name) => write!(f, "`{name}`"),
            Reference::Case(name) => write!(f, "the end-to-end case `{name}`"),
            Reference::Rule(name) => write!(f, "the rule \"{name}\""),
            Reference::Place(files, name) => write!(f, "`{name}` in `{}`", files.join("`, `")),
        }
    }
}

/// The possible targets.
#[derive(Debug, Default)]
struct Tree {
    /// Files and directories, from the root.
    paths: BTreeSet<String>,
    functions: BTreeSet<String>,
    scenarios: BTreeSet<String>,
    /// By the path of their file.
    words: BTreeMap<String, BTreeSet<String>>,
    /// Texts of one line in quotes.
    literals: BTreeSet<String>,
    case_names: BTreeSet<String>,
    rules: BTreeSet<String>,
}

impl Tree {
    fn read(root: &Path, sources: &[PathBuf]) -> anyhow::Result<Tree> {
        let mut tree = Tree { paths: paths(root)?, ..Tree::default() };
        for path in sources {
            let text = fs::read_to_string(root.join(path)).with_context(|| format!("read {}", path.display()))?;
            tree.add(path.to_str().context("a path in UTF-8")?, &text);
        }
        Ok(tree)
    }

    fn add(&mut self, path: &str, text: &str) {
        let functions = text.split("fn ").skip(1).map(|rest| rest.split(|c: char| !is_word(c)).next().unwrap_or(rest));
        let literals = text.lines().flat_map(|line| line.split('"').skip(1).step_by(2)).map(str::to_owned);
        let literals: BTreeSet<String> = literals.collect();
        if path.starts_with("crates/rubelet-sim/") {
            self.scenarios.extend(functions.clone().map(str::to_owned));
            self.rules.extend(literals.iter().cloned());
        }
        if path.starts_with("crates/rubelet-e2e/src/e2e") {
            self.case_names.extend(literals.iter().cloned());
        }
        self.functions.extend(functions.map(str::to_owned));
        self.literals.extend(literals);
        self.words.insert(path.to_owned(), text.split(|c: char| !is_word(c)).map(str::to_owned).collect());
    }

    fn has(&self, reference: &Reference) -> bool {
        match reference {
            Reference::File(path) => self.has_path(path),
            Reference::Function(name) => self.functions.contains(name) || self.literals.contains(name),
            Reference::Scenario(name) => self.scenarios.contains(name),
            Reference::Name(name) => name.split("::").all(|part| self.words.values().any(|words| words.contains(part))),
            Reference::Case(name) => self.case_names.iter().any(|known| matches(known, name)),
            Reference::Rule(name) => self.rules.contains(name),
            Reference::Place(files, name) => self.is_in_one_of(files, name),
        }
    }

    /// By its path from the root, or by a suffix of it.
    fn has_path(&self, path: &str) -> bool {
        let (path, is_whole) = unabbreviated(path);
        let below = format!("/{path}");
        self.paths.contains(&path) || !is_whole && self.paths.iter().any(|known| known.ends_with(&below))
    }

    /// A directory stands for all files below it.
    fn is_in_one_of(&self, files: &[String], name: &str) -> bool {
        let is_one_of = |known: &str| {
            files.iter().map(|file| unabbreviated(file)).any(|(path, is_whole)| {
                let is_below = known.strip_prefix(&path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
                is_below || !is_whole && known.ends_with(&format!("/{path}"))
            })
        };
        let mut files = self.words.iter().filter(|(path, _)| is_one_of(path));
        files.any(|(_, words)| name.split("::").all(|part| words.contains(part)))
    }
}

/// The path with its short name replaced, and whether it had one: then it is from the root.
pub(super) fn unabbreviated(path: &str) -> (String, bool) {
    let long = ALIASES.iter().find_map(|(short, long)| path.strip_prefix(short).map(|rest| format!("{long}{rest}")));
    let is_whole = long.is_some();
    (long.as_deref().unwrap_or(path).trim_end_matches('/').to_owned(), is_whole)
}

/// Whether the parts of `pattern` between `…` occur in `text` in order; without `…` at an end, it must match the end of the text.
fn matches(text: &str, pattern: &str) -> bool {
    let parts: Vec<&str> = pattern.split('…').collect();
    let (Some(first), Some(last)) = (parts.first(), parts.last()) else { return false };
    if !text.starts_with(first) || !text.ends_with(last) || parts.len() == 1 && text != pattern {
        return false;
    }
    let mut rest = text;
    parts.iter().all(|part| match rest.find(part) {
        Some(place) => {
            rest = &rest[place + part.len()..];
            true
        }
        None => false,
    })
}

fn paths(root: &Path) -> anyhow::Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    let mut open = vec![root.to_owned()];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(&dir).with_context(|| format!("read {}", dir.display()))? {
            let path = entry?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if SKIPPED_DIRS.contains(&name) {
                continue;
            }
            found.extend(path.strip_prefix(root).ok().and_then(Path::to_str).map(str::to_owned));
            if path.is_dir() && !path.is_symlink() {
                open.push(path);
            }
        }
    }
    Ok(found)
}

/// All references of a paper, in order.
fn references(text: &str) -> Vec<Reference> {
    let mut found = Vec::new();
    let mut quotes = Quotes::OfRules;
    let mut columns: Vec<String> = Vec::new();
    for block in blocks(text) {
        if let Some(heading) = block.strip_prefix("## ") {
            quotes = if heading.trim() == "Invariants" { Quotes::All } else { Quotes::OfRules };
        }
        if !block.starts_with('|') {
            found.extend(in_text(&block, quotes));
            columns.clear();
            continue;
        }
        let cells = cells(&block);
        if columns.is_empty() {
            columns = cells.iter().map(|cell| cell.trim().to_owned()).collect();
            continue;
        }
        for (cell, column) in cells.iter().zip(&columns).filter(|(_, name)| !FOREIGN_COLUMNS.contains(&name.as_str())) {
            found.extend(in_text(cell, quotes));
            if column == PLACES_COLUMN {
                found.extend(places(cell));
            }
        }
    }
    found
}

/// Names after a file, except tests, which may be in another file.
fn places(cell: &str) -> Vec<Reference> {
    let mut files = Vec::new();
    let mut found = Vec::new();
    for span in cell.split('`').skip(1).step_by(2) {
        match as_path(span) {
            Some(path) => files = expanded(path),
            None if files.is_empty() || span.is_empty() || !span.chars().all(|c| is_word(c) || c == ':') => {}
            None if span.split('_').count() >= TEST_NAME_PARTS => {}
            None => found.push(Reference::Place(files.clone(), span.to_owned())),
        }
    }
    found
}

/// Which quoted texts are names of rules.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Quotes {
    /// Below the heading `## Invariants`.
    All,
    /// Those after the word "rule", and those that follow such a one.
    OfRules,
}

/// Paragraphs, headings and rows of tables, each on one line, and an empty one for every gap; examples in fences are left out.
fn blocks(text: &str) -> Vec<String> {
    let mut blocks: Vec<String> = Vec::new();
    let mut in_fence = false;
    for line in text.lines().map(str::trim) {
        let is_fence = line.starts_with("```");
        in_fence ^= is_fence;
        if in_fence || is_fence {
            continue;
        }
        let is_paragraph = |line: &str| !line.is_empty() && !line.starts_with(['|', '#']);
        match blocks.last_mut().filter(|last| is_paragraph(last) && is_paragraph(line)) {
            Some(last) => *last = format!("{last} {line}"),
            None => blocks.push(line.to_owned()),
        }
    }
    blocks
}

pub(super) fn cells(row: &str) -> Vec<String> {
    let row = row.trim().trim_start_matches('|').trim_end_matches('|');
    row.replace("\\|", "\u{1}").split('|').map(|cell| cell.replace('\u{1}', "|")).collect()
}

fn in_text(text: &str, quotes: Quotes) -> Vec<Reference> {
    let mut found = Vec::new();
    let mut rest = text;
    let mut last_was_rule = false;
    while let Some(start) = rest.find(['`', '"']) {
        let (before, opened) = rest.split_at(start);
        let mark = &opened[..1];
        let Some((span, after)) = opened[1..].split_once(mark) else { break };
        rest = after;
        if mark == "\"" {
            let follows = last_was_rule && [", ", " and "].contains(&before);
            last_was_rule = quotes == Quotes::All || follows || before.ends_with("rule ") || before.ends_with("rules ");
            found.extend(last_was_rule.then(|| Reference::Rule(span.to_owned())));
        } else {
            last_was_rule = false;
            found.extend(in_code(before, span));
        }
    }
    found
}

/// The target of a text in backticks, often none.
fn in_code(before: &str, span: &str) -> Vec<Reference> {
    let is_sentence = span.split(' ').count() >= CASE_NAME_WORDS
        && span.starts_with(|c: char| c.is_lowercase() || c == '…')
        && !COMMANDS.iter().any(|command| span.starts_with(command));
    if before.ends_with("e2e ") || is_sentence {
        return alternatives(span).into_iter().map(Reference::Case).collect();
    }
    if let Some(path) = as_path(span) {
        return expanded(path).into_iter().map(Reference::File).collect();
    }
    if !span.chars().all(|c| is_word(c) || c == ':') {
        return Vec::new();
    }
    let is_snake_case =
        span.contains('_') && span.starts_with(char::is_lowercase) && !span.contains(char::is_uppercase);
    let name = span.to_owned();
    if is_snake_case && before.ends_with("sim ") {
        return vec![Reference::Scenario(name)];
    }
    if is_snake_case && !span.contains(':') && span.split('_').count() >= TEST_NAME_PARTS {
        return vec![Reference::Function(name)];
    }
    let is_name = is_snake_case || span.contains("::");
    if is_name { vec![Reference::Name(name)] } else { Vec::new() }
}

fn as_path(span: &str) -> Option<&str> {
    let is_path = span.chars().all(|c| is_word(c) || "./{},-".contains(c)) && !span.starts_with(['/', '.', '-']);
    let has_end = span.ends_with('/') || EXTENSIONS.iter().any(|extension| span.ends_with(extension));
    Some(span).filter(|_| is_path && has_end)
}

/// `a while b | while c` are `a while b` and `…while c`.
fn alternatives(span: &str) -> Vec<String> {
    let mut parts = span.split(" | ");
    let first = parts.next().unwrap_or(span).to_owned();
    std::iter::once(first).chain(parts.map(|part| format!("…{part}"))).collect()
}

/// `a/{b,c}.rs` is `a/b.rs` and `a/c.rs`.
fn expanded(path: &str) -> Vec<String> {
    let braces =
        path.split_once('{').and_then(|(head, rest)| rest.split_once('}').map(|(list, tail)| (head, list, tail)));
    let Some((head, list, tail)) = braces else { return vec![path.to_owned()] };
    list.split(',').flat_map(|part| expanded(&format!("{head}{part}{tail}"))).collect()
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> Tree {
        let mut tree = Tree::default();
        let paths = ["docs", "docs/parity.md", "crates/rubelet-core/src/pod.rs", "crates/rubelet-core/src/pod/init.rs"];
        tree.paths.extend(paths.map(str::to_owned));
        tree.paths.insert("crates/rubelet-core/src/pod".to_owned());
        tree.add(
            "crates/rubelet-core/src/pod.rs",
            "fn pods_start_in_order() {}\nenum Op { Start }\nfn may_start() {}\n",
        );
        tree.add("crates/rubelet-sim/src/a.rs", "fn a_lost_pod_comes_back() {}\nlet rule = \"a pod runs once\";\n");
        tree.add("crates/rubelet-e2e/src/e2e/a.rs", "Case { name: \"a pod starts, and then it stops\", run }\n");
        tree
    }

    fn broken(text: &str) -> Vec<String> {
        let tree = tree();
        references(text).iter().filter(|found| !tree.has(found)).map(ToString::to_string).collect()
    }

    #[test]
    fn existing_remains_are_found() {
        let text = "`core/pod.rs` and `core/{pod,pod/init}.rs`, `pod/init.rs`, `docs/`; `pods_start_in_order`, `may_start`, `Op::Start`;\n\
                    sim `a_lost_pod_comes_back`; rule \"a pod runs\nonce\"; e2e `a pod starts…`, `a pod starts, and then it stops`, `… then it stops`\n\n\
                    | here |\n|---|\n| `Stop`, `core/{pod,pod/init}.rs` `Op::Start` |";
        assert_eq!(broken(text), Vec::<String>::new());
    }

    #[test]
    fn dangling_references_are_reported() {
        let cases = [
            ("`core/gone.rs`", "the file `core/gone.rs`"),
            ("`core/{pod,gone}.rs`", "the file `core/gone.rs`"),
            ("`gone/`", "the file `gone/`"),
            ("`pods_start_in_any_order`", "the test or function `pods_start_in_any_order`"),
            ("`must_start`", "`must_start`"),
            ("`Op::Stop`", "`Op::Stop`"),
            ("sim `pods_start_in_order`", "the scenario `pods_start_in_order`"),
            ("rules \"a pod runs once\", \"a pod runs twice\"", "the rule \"a pod runs twice\""),
            ("e2e `a pod stops…`", "the end-to-end case `a pod stops…`"),
            ("`a pod starts, and then it`", "the end-to-end case `a pod starts, and then it`"),
            ("## Invariants\n\n\"a pod never runs\"", "the rule \"a pod never runs\""),
            ("| here |\n|---|\n| `core/gone.rs` |", "the file `core/gone.rs`"),
            ("| here |\n|---|\n| `core/pod.rs` `Start`, `Init` |", "`Init` in `core/pod.rs`"),
            ("| here |\n|---|\n| `core/pod/` `Op` |", "`Op` in `core/pod/`"),
        ];
        for (text, expected) in cases {
            assert_eq!(broken(text), [expected], "{text}");
        }
    }

    #[test]
    fn names_of_upstream_and_examples_are_no_references() {
        let text = "| upstream | here |\n|---|---|\n| `some_metric_of_theirs_total`, `their.rs` | \"words\" for a `pod` at `/var/log/pods` |\n\n\
                    ```\n`core/gone.rs`\n```\n`cargo xtask vm --filter x`, `allocatedResources`, `--root-dir`, `pods/<uid>/x.txt`";
        assert_eq!(broken(text), Vec::<String>::new());
    }
}
