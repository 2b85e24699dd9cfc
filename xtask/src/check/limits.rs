//! Checks that docs/limits.md lists every limit of the agent with its value.
//!
//! Owns: which constants are limits, and how a value is shown. A row names a file and a constant in its column
//! `constant`, or one field of it (`NAME.field`), and shows its value in its column `value`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::Context as _;

use crate::check::{
    references::{cells, unabbreviated},
    source::{Constant, Source},
};

const PAPER: &str = "docs/limits.md";
/// The agent's crates.
const CRATES: &[&str] =
    &["rubelet", "rubelet-core", "rubelet-cri", "rubelet-csi", "rubelet-host", "rubelet-kube", "rubelet-tls"];
/// A constant is a limit if one of these words is in its name, and it is of one of these types.
const WORDS: &[&str] = &["TIMEOUT", "DEADLINE", "LIMIT", "MAX", "CAPACITY", "BACKLOG"];
const TYPES: &[&str] = &["Duration", "SignedDuration", "usize", "u32", "u64"];

type Constants = BTreeMap<String, Vec<Constant>>;

/// Every wrong row, and every limit without a row.
pub fn run(root: &Path, sources: &[PathBuf]) -> anyhow::Result<Vec<String>> {
    let paper = fs::read_to_string(root.join(PAPER)).with_context(|| format!("read {PAPER}"))?;
    let mut constants = Constants::new();
    for path in sources {
        let name = path.to_str().context("a path in UTF-8")?;
        let is_agent = CRATES.iter().any(|crate_name| name.starts_with(&format!("crates/{crate_name}/src/")));
        if is_agent && !super::tidy::is_test(name) {
            let text = fs::read_to_string(root.join(path)).with_context(|| format!("read {name}"))?;
            constants.insert(name.to_owned(), Source::parse(&text).constants());
        }
    }
    Ok(breaches(&paper, &constants))
}

fn breaches(paper: &str, constants: &Constants) -> Vec<String> {
    let rows = rows(paper);
    let wrong = rows.iter().filter_map(|row| Some(format!("{PAPER}: {}", row.problem(constants)?)));
    let known: BTreeSet<_> = rows.iter().map(|row| (row.file.as_str(), row.constant_name())).collect();
    let limits = constants.iter().flat_map(|(file, all)| all.iter().map(move |each| (file.as_str(), each)));
    let missing = limits.filter(|(file, limit)| is_limit(limit) && !known.contains(&(*file, limit.name.as_str())));
    let missing = missing.map(|(file, limit)| format!("{file}: the limit `{}` is not in {PAPER}", limit.name));
    wrong.chain(missing).collect()
}

fn is_limit(constant: &Constant) -> bool {
    constant.name.split('_').any(|word| WORDS.contains(&word)) && TYPES.contains(&constant.kind.as_str())
}

struct Row {
    file: String,
    /// `NAME` or `NAME.field`.
    constant: String,
    value: String,
}

impl Row {
    fn constant_name(&self) -> &str {
        self.constant.split_once('.').map_or(&self.constant, |(name, _)| name)
    }

    fn problem(&self, constants: &Constants) -> Option<String> {
        let Row { file, constant, value } = self;
        let found = constants.get(file).into_iter().flatten().filter(|each| each.name == self.constant_name());
        let values: BTreeSet<_> = found.filter_map(|each| self.value_in(each)).map(shown).collect();
        if values.is_empty() {
            return Some(format!("`{constant}` is not in {file}"));
        }
        let values: Vec<_> = values.into_iter().collect();
        (values != [value.as_str()]).then(|| format!("`{constant}` of {file} is {}, not {value}", values.join(" or ")))
    }

    fn value_in<'a>(&self, constant: &'a Constant) -> Option<&'a str> {
        let Some((_, field)) = self.constant.split_once('.') else { return Some(&constant.value) };
        let (_, rest) = constant.value.split_once(&format!(" {field}: "))?;
        rest.split(',').next()
    }
}

fn rows(paper: &str) -> Vec<Row> {
    let mut found = Vec::new();
    let mut columns: Vec<String> = Vec::new();
    for line in paper.lines() {
        if !line.starts_with('|') {
            columns.clear();
            continue;
        }
        let cells: Vec<_> = cells(line).iter().map(|cell| cell.trim().to_owned()).collect();
        let cell = |name: &str| columns.iter().position(|column| column == name).and_then(|place| cells.get(place));
        if let (Some(place), Some(value)) = (cell("constant"), cell("value")) {
            let mut spans = place.split('`').skip(1).step_by(2);
            if let (Some(file), Some(constant)) = (spans.next(), spans.next()) {
                found.push(Row { file: unabbreviated(file).0, constant: constant.to_owned(), value: value.clone() });
            }
        }
        if columns.is_empty() {
            columns = cells;
        }
    }
    found
}

/// A value with its unit: `Duration::from_secs(30)` is 30 s, `64 << 10` is 64 KiB.
fn shown(value: &str) -> String {
    const UNITS: &[(&str, &str, &str)] = &[
        ("from_millis(", ")", "ms"),
        ("from_secs(", ")", "s"),
        ("from_mins(", ")", "min"),
        ("from_hours(", ")", "h"),
        ("", " << 10", "KiB"),
        ("", " << 20", "MiB"),
    ];
    let value = value.trim_start_matches("Signed").trim_start_matches("Duration::");
    let unit = UNITS.iter().find_map(|(head, tail, unit)| Some((value.strip_prefix(head)?.strip_suffix(tail)?, unit)));
    let (number, unit) = unit.map_or((value, None), |(number, unit)| (number, Some(unit)));
    let number = number.replace('_', "").replace(" * ", " × ");
    unit.map_or(number.clone(), |unit| format!("{number} {unit}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE: &str = "const READ_TIMEOUT: Duration = Duration::from_secs(30);\nconst OPEN: Limits = Limits { bytes: 64 << 10, connections: 8, };\n\
                        const MAX_NAME: &str = \"\";\n#[cfg(test)]\nmod tests {\n  const TEST_TIMEOUT: Duration = Duration::ZERO;\n}\n";

    fn found(rows: &str) -> String {
        let paper = format!("| what | value | constant |\n|---|---|---|\n{rows}");
        let constants = Constants::from([("crates/rubelet-core/src/a.rs".to_owned(), Source::parse(CODE).constants())]);
        breaches(&paper, &constants).join("\n")
    }

    #[test]
    fn rows_must_show_what_the_code_says() {
        let row = "| reading | 30 s | `core/a.rs` `READ_TIMEOUT` |\n";
        assert_eq!(found(row), "");
        let cases = [
            ("| x | 64 KiB | `core/a.rs` `OPEN.bytes` |", ""),
            (
                "| x | 9 | `core/a.rs` `OPEN.connections` |",
                "`OPEN.connections` of crates/rubelet-core/src/a.rs is 8, not 9",
            ),
            ("| x | 9 | `core/a.rs` `OPEN.streams` |", "`OPEN.streams` is not in crates/rubelet-core/src/a.rs"),
            ("| x | 9 | `core/b.rs` `OPEN` |", "`OPEN` is not in crates/rubelet-core/src/b.rs"),
        ];
        for (second, expected) in cases {
            assert_eq!(found(&format!("{row}{second}")).trim_start_matches("docs/limits.md: "), expected, "{second}");
        }
        assert!(found(&row.replace("30 s", "3 s")).ends_with("a.rs is 30 s, not 3 s"));
    }

    #[test]
    fn limits_must_have_a_row() {
        assert_eq!(found(""), "crates/rubelet-core/src/a.rs: the limit `READ_TIMEOUT` is not in docs/limits.md");
    }

    #[test]
    fn values_are_shown_with_units() {
        let cases = [
            ("Duration::from_secs(2 * 3600)", "2 × 3600 s"),
            ("SignedDuration::from_hours(24)", "24 h"),
            ("10 << 20", "10 MiB"),
            ("65_535", "65535"),
        ];
        for (value, expected) in cases {
            assert_eq!(shown(value), expected);
        }
    }
}
