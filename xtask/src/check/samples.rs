//! Checks that the code samples in papers are excerpts of the code.
//!
//! Owns: how a sample is compared with its file, which is the last one named above it. A line `…` stands for any lines;
//! indentation and empty lines are ignored.

use std::{fs, path::Path};

use anyhow::Context as _;

use crate::check::references::unabbreviated;

const PAPERS: &[&str] = &["STYLE.md", "CONTRIBUTING.md"];
const LEFT_OUT: &str = "…";

/// Every sample that is not in its file.
pub fn run(root: &Path) -> anyhow::Result<Vec<String>> {
    let mut found = Vec::new();
    for paper in PAPERS {
        let text = fs::read_to_string(root.join(paper)).with_context(|| format!("read {paper}"))?;
        for sample in samples(&text) {
            let file = fs::read_to_string(root.join(unabbreviated(sample.file).0)).unwrap_or_default();
            found.extend(sample.missing(&file).map(|line| format!("{paper}: `{line}` is not in `{}`", sample.file)));
        }
    }
    Ok(found)
}

struct Sample<'a> {
    file: &'a str,
    lines: Vec<&'a str>,
}

impl Sample<'_> {
    /// The first line that does not follow the one before it; after `…` it may come later.
    fn missing(&self, text: &str) -> Option<&str> {
        let lines: Vec<_> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        let first = self.lines.first()?;
        let starts = lines.iter().enumerate().filter(|(_, line)| *line == first).map(|(place, _)| place);
        let ends = starts.map(|start| self.missing_after(&lines[start..]));
        ends.max_by_key(|missing| missing.map_or(usize::MAX, |place| place))
            .unwrap_or(Some(0))
            .map(|place| self.lines[place])
    }

    fn missing_after(&self, lines: &[&str]) -> Option<usize> {
        let mut rest = lines.iter();
        let mut may_skip = false;
        for (place, line) in self.lines.iter().enumerate() {
            if *line == LEFT_OUT {
                may_skip = true;
                continue;
            }
            let is_there = if may_skip { rest.any(|known| known == line) } else { rest.next() == Some(line) };
            if !is_there {
                return Some(place);
            }
            may_skip = false;
        }
        None
    }
}

fn samples(paper: &str) -> Vec<Sample<'_>> {
    let mut found = Vec::new();
    let mut file = "no file";
    let mut lines = paper.lines().map(str::trim);
    while let Some(line) = lines.next() {
        if line == "```rust" {
            let sample = lines.by_ref().take_while(|line| *line != "```").filter(|line| !line.is_empty());
            found.push(Sample { file, lines: sample.collect() });
        } else {
            file = line.split('`').skip(1).step_by(2).filter(|span| span.ends_with(".rs")).last().unwrap_or(file);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_must_be_in_their_file_in_order() {
        let file = "fn x() {\n}\n\nfn a() {\n    b();\n\n    c();\n    d();\n}\n";
        for (code, expected) in [
            ("fn a() {\n  b();\n  c();", None),
            ("fn a() {\n…\nd();\n}", None),
            ("fn a() {\nc();", Some("c();")),
            ("fn a() {\n…\nd();\n…\nc();", Some("c();")),
            ("fn e() {", Some("fn e() {")),
        ] {
            let paper = format!("A rule. (`core/a.rs`)\n```rust\n{code}\n```\n");
            let samples = samples(&paper);
            assert_eq!((samples[0].file, samples[0].missing(file)), ("core/a.rs", expected), "{code}");
        }
    }
}
