//! A strict parser of the exposition format.
//!
//! Owns: the grammar of a page and the rules of its families.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, bail, ensure};

/// A page, by family.
#[derive(Debug, Default)]
pub struct Page(pub BTreeMap<String, Family>);

#[derive(Debug, Default)]
pub struct Family {
    pub kind: String,
    pub series: Vec<Series>,
}

#[derive(Debug)]
pub struct Series {
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub value: f64,
}

impl Page {
    pub fn parse(text: &str) -> anyhow::Result<Page> {
        ensure!(text.ends_with('\n'), "the last line is cut off");
        let mut page = Page::default();
        let (mut announced, mut open) = (String::new(), String::new());
        for line in text.lines() {
            let fault = || format!("line {line:?}");
            if let Some(help) = line.strip_prefix("# HELP ") {
                let (name, help) = help.split_once(' ').with_context(fault)?;
                ensure!(is_name(name) && !help.is_empty(), "{}", fault());
                name.clone_into(&mut announced);
            } else if let Some(kind) = line.strip_prefix("# TYPE ") {
                let (name, kind) = kind.split_once(' ').with_context(fault)?;
                ensure!(name == announced, "{}: HELP was of {announced}", fault());
                ensure!(["counter", "gauge", "histogram", "summary"].contains(&kind), "{}", fault());
                let family = Family { kind: kind.to_owned(), series: Vec::new() };
                ensure!(page.0.insert(name.to_owned(), family).is_none(), "{name} is there twice");
                name.clone_into(&mut open);
            } else {
                let series = parse_series(line).with_context(fault)?;
                let family = page.0.get_mut(&open).with_context(|| format!("{}: no TYPE before it", fault()))?;
                ensure!(belongs(&series.name, &open, &family.kind), "{}: it is not of {open}", fault());
                family.series.push(series);
            }
        }
        for (name, family) in &page.0 {
            family.check().with_context(|| name.clone())?;
        }
        Ok(page)
    }

    /// The one series with these labels, whatever others it has; the sum if there are several.
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> anyhow::Result<f64> {
        let all = self.0.values().flat_map(|family| &family.series).filter(|series| series.name == name);
        let has = |series: &&Series| {
            labels.iter().all(|(key, value)| series.labels.get(*key).is_some_and(|given| given == value))
        };
        let values: Vec<f64> = all.filter(has).map(|series| series.value).collect();
        ensure!(!values.is_empty(), "there is no {name} with {labels:?}");
        Ok(values.iter().sum())
    }
}

impl Family {
    /// The names of the labels of all series but for a bucket's bound.
    pub fn labels(&self) -> BTreeSet<&str> {
        self.series
            .iter()
            .flat_map(|series| series.labels.keys())
            .map(String::as_str)
            .filter(|name| *name != "le")
            .collect()
    }

    fn check(&self) -> anyhow::Result<()> {
        ensure!(!self.series.is_empty(), "it has no series");
        let mut seen = BTreeSet::new();
        let mut buckets: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
        let mut counts: BTreeMap<String, f64> = BTreeMap::new();
        for Series { name, labels, value } in &self.series {
            ensure!(seen.insert((name, labels)), "{name} {labels:?} is there twice");
            ensure!(self.kind == "gauge" || *value >= 0.0 || name.ends_with("_sum"), "{name} {labels:?} is {value}");
            let mut others = labels.clone();
            let bound = others.remove("le");
            if name.ends_with("_bucket") && self.kind == "histogram" {
                let bound = number(&bound.context("a bucket without a bound")?)?;
                buckets.entry(format!("{others:?}")).or_default().push((bound, *value));
            } else if name.ends_with("_count") && self.kind == "histogram" {
                counts.insert(format!("{others:?}"), *value);
            }
        }
        for (labels, buckets) in &buckets {
            let rises = buckets.is_sorted_by(|(bound, count), (next, more)| bound < next && count <= more);
            ensure!(rises, "the buckets of {labels} do not rise: {buckets:?}");
            let (bound, all) = buckets.last().expect("it has one");
            ensure!(bound.is_infinite(), "{labels} has no last bucket");
            ensure!(counts.get(labels) == Some(all), "{labels}: {all} in buckets, {:?} in all", counts.get(labels));
        }
        ensure!(self.kind != "histogram" || buckets.len() == counts.len(), "buckets and counts differ");
        Ok(())
    }
}

fn belongs(name: &str, family: &str, kind: &str) -> bool {
    let Some(suffix) = name.strip_prefix(family) else { return false };
    match kind {
        "histogram" => ["_bucket", "_sum", "_count"].contains(&suffix),
        "summary" => ["", "_sum", "_count"].contains(&suffix),
        _ => suffix.is_empty(),
    }
}

fn parse_series(line: &str) -> anyhow::Result<Series> {
    let end = line.find(['{', ' ']).context("a name without a value")?;
    let (name, mut rest) = line.split_at(end);
    ensure!(is_name(name), "{name:?} is no name");
    let mut labels = BTreeMap::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        while !rest.starts_with('}') {
            let (label, quoted) = rest.split_once("=\"").context("a label without a value")?;
            ensure!(is_name(label) && !label.contains(':'), "{label:?} is no label");
            let (value, after) = unquoted(quoted)?;
            ensure!(labels.insert(label.to_owned(), value).is_none(), "{label} is there twice");
            rest = after.strip_prefix(',').unwrap_or(after);
        }
        rest = &rest[1..];
    }
    let value = number(rest.strip_prefix(' ').context("no value")?)?;
    Ok(Series { name: name.to_owned(), labels, value })
}

/// Up to the closing quote, and what comes after it.
fn unquoted(text: &str) -> anyhow::Result<(String, &str)> {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Ok((value, &text[at + 1..])),
            '\\' => match characters.next() {
                Some((_, 'n')) => value.push('\n'),
                Some((_, escaped @ ('\\' | '"'))) => value.push(escaped),
                other => bail!("{other:?} is escaped"),
            },
            other => value.push(other),
        }
    }
    bail!("an open quote")
}

fn number(text: &str) -> anyhow::Result<f64> {
    match text {
        "+Inf" => Ok(f64::INFINITY),
        "-Inf" => Ok(f64::NEG_INFINITY),
        "NaN" => Ok(f64::NAN),
        text => text.parse().with_context(|| format!("{text:?} is no number")),
    }
}

fn is_name(text: &str) -> bool {
    let may_begin = |character: char| character.is_ascii_alphabetic() || character == '_' || character == ':';
    text.starts_with(may_begin) && text.chars().all(|character| may_begin(character) || character.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "# HELP a A.\n# TYPE a counter\na{x=\"1\\n\\\"\",y=\"\"} 2\n# HELP h H.\n# TYPE h histogram\n\
                        h_bucket{le=\"1\"} 1\nh_bucket{le=\"+Inf\"} 3\nh_sum 1e+06\nh_count 3\n";

    #[test]
    fn a_good_page_is_read() {
        let page = Page::parse(GOOD).unwrap();
        assert_eq!(page.value("a", &[("x", "1\n\"")]).unwrap(), 2.0);
        assert_eq!(page.0["a"].labels(), BTreeSet::from(["x", "y"]));
        assert_eq!(page.value("h_sum", &[]).unwrap(), 1e6);
    }

    #[test]
    fn invalid_format_is_refused() {
        for (from, to) in [
            ("# HELP a A.\n", ""),
            ("# TYPE a counter\n", ""),
            ("counter", "number"),
            ("h_sum", "g_sum"),
            ("le=\"1\"} 1", "le=\"1\"} 4"),
            ("le=\"+Inf\"} 3", "le=\"+Inf\"} 2"),
            ("h_bucket{le=\"+Inf\"} 3\n", ""),
            ("} 2", "} -2"),
            ("} 2", "} two"),
            ("} 2", "}2"),
            ("y=\"\"", "x=\"\""),
            ("y=\"\"", "y=\""),
            ("y=\"\"", "1y=\"\""),
            ("h_count 3\n", "h_count 3"),
            ("h_count 3\n", "h_count 3\nh_count 3\n"),
            (
                "# HELP h H.\n# TYPE h histogram\n",
                "# HELP a A.\n# TYPE a counter\na 1\n# HELP h H.\n# TYPE h histogram\n",
            ),
        ] {
            let broken = GOOD.replacen(from, to, 1);
            assert!(Page::parse(&broken).is_err(), "{from:?} became {to:?}");
        }
    }
}
