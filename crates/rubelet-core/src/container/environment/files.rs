//! Environment variables from files (`fileKeyRef`).
//!
//! Owns: the format of files that `fileKeyRef` names, and which of them a container needs. Never: reads one.
//! Upstream: `pkg/kubelet/util/env`; `testdata/env_files.jsonl` has its results.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Container, FileKeySelector};

/// A longer file is not read; upstream reads one of any length up to the key.
pub const MAX_FILE_BYTES: u64 = 1 << 20;
/// The buffer of upstream's scanner: a line must end before it is full.
const MAX_LINE_BYTES: usize = 65_535;

/// A key of a file of a volume.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileKey {
    pub volume: String,
    pub path: String,
    pub key: String,
}

impl From<&FileKeySelector> for FileKey {
    fn from(selector: &FileKeySelector) -> Self {
        let FileKeySelector { volume_name, path, key, optional: _ } = selector;
        FileKey { volume: volume_name.clone(), path: path.clone(), key: key.clone() }
    }
}

/// The values of the keys a container needs, empty if the key is missing, or why the file cannot be read. Users do not see the
/// reason: it might reveal what else is on the node.
pub type FileValues = BTreeMap<FileKey, Result<Vec<u8>, EnvFileError>>;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct EnvFileError(pub String);

/// The keys without which the container's environment cannot be made, grouped by file.
pub fn needs(container: &Container) -> BTreeSet<FileKey> {
    let sources = container.env.iter().flatten().filter_map(|variable| variable.value_from.as_ref());
    sources.filter_map(|source| source.file_key_ref.as_ref()).map(FileKey::from).collect()
}

/// The values of the keys in one file, read once for all of them. As upstream searches each by itself, an error in the file
/// affects only the keys after it.
pub fn values<'a>(file: &[u8], keys: &BTreeSet<&'a str>) -> BTreeMap<&'a str, Result<Vec<u8>, EnvFileError>> {
    let mut found: BTreeMap<&str, Vec<u8>> = BTreeMap::new();
    let mut lines = Lines { rest: file, number: 0 };
    let end = loop {
        match next_variable(&mut lines) {
            Ok(None) => break Ok(Vec::new()),
            Ok(Some((name, value))) => {
                let key = std::str::from_utf8(name).ok().and_then(|name| keys.get(name));
                if let Some(key) = key {
                    found.entry(key).or_insert(value);
                }
            }
            Err(mistake) => break Err(mistake),
        }
    };
    keys.iter().map(|key| (*key, found.remove(key).map_or_else(|| end.clone(), Ok))).collect()
}

type Variable<'a> = (&'a [u8], Vec<u8>);

/// `None` at the end of the file.
fn next_variable<'a>(lines: &mut Lines<'a>) -> Result<Option<Variable<'a>>, EnvFileError> {
    let line = loop {
        let Some(line) = lines.next()? else { return Ok(None) };
        let line = without_indent(line);
        if !line.is_empty() && !line.starts_with(b"#") {
            break line;
        }
    };
    let number = lines.number;
    let invalid = |why: &str| EnvFileError(format!("invalid environment variable format at line {number}: {why}"));
    let equals = line.iter().position(|byte| *byte == b'=').ok_or_else(|| invalid("missing '='"))?;
    let (name, value) = (&line[..equals], &line[equals + 1..]);
    if name.is_empty() {
        return Err(invalid("empty variable name"));
    }
    if name.last().copied().is_some_and(is_blank) {
        return Err(invalid("whitespace before '=' is not allowed"));
    }
    match value.first().copied() {
        // As in a shell, `KEY= 'value'` sets nothing.
        Some(first) if is_blank(first) => Ok(Some((name, Vec::new()))),
        Some(b'\'') => Ok(Some((name, quoted(&value[1..], lines)?))),
        Some(_) | None => Err(invalid("value must be enclosed in single quotes")),
    }
}

/// Up to the closing quote, which may be in a later line.
fn quoted(first: &[u8], lines: &mut Lines<'_>) -> Result<Vec<u8>, EnvFileError> {
    let start = lines.number;
    let mut value = Vec::new();
    let mut line = first;
    loop {
        if let Some(end) = line.iter().position(|byte| *byte == b'\'') {
            value.extend_from_slice(&line[..end]);
            let after = without_indent(&line[end + 1..]);
            if after.is_empty() || after.starts_with(b"#") {
                return Ok(value);
            }
            let number = lines.number;
            return Err(EnvFileError(format!(
                "invalid environment variable format at line {number}: unexpected content after closing quote"
            )));
        }
        value.extend_from_slice(line);
        value.push(b'\n');
        let unclosed = || {
            let why = "unclosed single quote";
            EnvFileError(format!("invalid environment variable format starting at line {start}: {why}"))
        };
        line = lines.next().ok().flatten().ok_or_else(unclosed)?;
    }
}

struct Lines<'a> {
    rest: &'a [u8],
    number: usize,
}

impl<'a> Lines<'a> {
    /// Without its line ending. `None` after the last.
    fn next(&mut self) -> Result<Option<&'a [u8]>, EnvFileError> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        let end = self.rest.iter().position(|byte| *byte == b'\n');
        let line = &self.rest[..end.unwrap_or(self.rest.len())];
        if line.len() > MAX_LINE_BYTES {
            return Err(EnvFileError(format!("line {} is longer than {MAX_LINE_BYTES} bytes", self.number + 1)));
        }
        self.rest = end.map_or(&[], |end| &self.rest[end + 1..]);
        self.number += 1;
        Ok(Some(line.strip_suffix(b"\r").unwrap_or(line)))
    }
}

fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t')
}

fn without_indent(line: &[u8]) -> &[u8] {
    let indent = line.iter().take_while(|byte| is_blank(**byte)).count();
    &line[indent..]
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    const UPSTREAM: &str = include_str!("../../../testdata/env_files.jsonl");

    #[derive(Deserialize)]
    struct Answer {
        file: String,
        key: String,
        value: String,
        #[serde(default)]
        error: String,
    }

    fn value_of(file: &str, key: &str) -> Result<Vec<u8>, EnvFileError> {
        values(file.as_bytes(), &BTreeSet::from([key])).remove(key).unwrap()
    }

    #[test]
    fn env_files_are_read_as_upstream_reads_them() {
        for line in UPSTREAM.lines() {
            let Answer { file, key, value, error } = serde_json::from_str(line).unwrap();
            match value_of(&file, &key) {
                Ok(ours) => assert_eq!((String::from_utf8(ours).unwrap(), String::new()), (value, error), "{file:?}"),
                Err(ours) => assert_eq!(ours.0, error, "{file:?}"),
            }
        }
    }

    #[test]
    fn mistake_counts_only_for_keys_that_come_after_it() {
        let found = values(b"A='1'\nB='2'\nA='3'\nwrong\nC='4'", &BTreeSet::from(["A", "C", "D"]));
        let mistake = EnvFileError("invalid environment variable format at line 4: missing '='".to_owned());
        assert_eq!(found, BTreeMap::from([("A", Ok(b"1".to_vec())), ("C", Err(mistake.clone())), ("D", Err(mistake))]));
    }

    #[test]
    fn lines_are_as_long_as_upstreams_scanner_takes_them() {
        let file = |length: usize, end: &str| format!("A='{}'{end}", "x".repeat(length));
        let is_read = |file: String| value_of(&file, "A").is_ok();
        assert!(is_read(file(65_531, "")) && is_read(file(65_531, "\n")) && is_read(file(65_530, "\r\n")));
        assert!(!is_read(file(65_532, "")) && !is_read(file(65_532, "\n")) && !is_read(file(65_531, "\r\n")));
        let lines = |length: usize| format!("A='\n{}\n{}'", "x".repeat(length), "x".repeat(length - 1));
        assert!(is_read(lines(65_535)) && !is_read(lines(65_536)));
    }
}
