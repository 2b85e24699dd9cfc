//! Reading configuration files: the one of `--config`, and the drop-ins of `--config-dir`.
//!
//! Owns: files and their order. Never: what they mean; that is `rubelet_core::config`.
//! Upstream: `kubeletconfig/configfiles`, `mergeKubeletConfigurations`.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Read as _,
    path::{Path, PathBuf},
};

use rubelet_core::config::{ConfigProblem, Draft};
use serde_json::Value;

use crate::yaml::{self, DuplicateKeys, YamlError};

/// Larger than any configuration; a device or a wrong path must not fill the memory.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// The files that make up a configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sources {
    pub file: Option<PathBuf>,
    pub drop_in_dir: Option<PathBuf>,
    /// Without an API server.
    pub is_standalone: bool,
}

impl Sources {
    /// The configuration without any file.
    pub fn without_file(&self) -> Draft {
        if self.is_standalone { Draft::standalone() } else { Draft::without_file() }
    }

    /// File and drop-ins merged, before flags. Returns all problems at once.
    pub fn load(&self, flag_gates: &BTreeMap<String, bool>) -> Result<Draft, Vec<String>> {
        let mut draft = match &self.file {
            None => self.without_file(),
            Some(file) => load_file(file, flag_gates)?,
        };
        let Some(dir) = &self.drop_in_dir else { return Ok(draft) };
        let mut files = Vec::new();
        walk(dir, &mut files, &mut draft.warnings)
            .map_err(|error| vec![format!("failed to walk through kubelet dropin directory {dir:?}: {error}")])?;
        let mut documents = Vec::new();
        let mut problems = Vec::new();
        for file in files {
            match read(&file).and_then(|text| parse(&text, DuplicateKeys::Refuse)) {
                Ok(document) => documents.push((file, document)),
                Err(error) => problems.push(format!("{}: {error}", file.display())),
            }
        }
        match draft.drop_ins(&documents, flag_gates) {
            Ok(draft) if problems.is_empty() => Ok(draft),
            Ok(_) => Err(problems),
            Err(more) => Err(problems.into_iter().chain(lines(&more)).collect()),
        }
    }
}

pub(super) fn lines(problems: &[ConfigProblem]) -> Vec<String> {
    problems.iter().map(ConfigProblem::to_string).collect()
}

fn load_file(file: &Path, flag_gates: &BTreeMap<String, bool>) -> Result<Draft, Vec<String>> {
    let refuse = |error: String| vec![format!("{}: {error}", file.display())];
    let file = std::path::absolute(file).map_err(|error| refuse(error.to_string()))?;
    let text = read(&file).map_err(refuse)?;
    let mut warnings = Vec::new();
    let document = match parse(&text, DuplicateKeys::Refuse) {
        Ok(document) => document,
        // The main file of v1beta1 is decoded leniently if strict decoding fails.
        Err(strict) => {
            let document = parse(&text, DuplicateKeys::LastWins).map_err(|_| refuse(strict.clone()))?;
            warnings.push(format!("{}: Using lenient decoding as strict decoding failed: {strict}", file.display()));
            document
        }
    };
    let mut draft = Draft::from_file(&file, &document, flag_gates).map_err(|problems| lines(&problems))?;
    warnings.append(&mut draft.warnings);
    draft.warnings = warnings;
    Ok(draft)
}

/// `.conf` files sorted by name; a directory's files come at the position of its name.
fn walk(dir: &Path, files: &mut Vec<PathBuf>, warnings: &mut Vec<String>) -> Result<(), String> {
    let at = |error: std::io::Error| format!("{}: {error}", dir.display());
    let mut entries = fs::read_dir(dir).and_then(Iterator::collect::<Result<Vec<_>, _>>).map_err(at)?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let path = entry.path();
        if entry.file_type().map_err(at)?.is_dir() {
            walk(&path, files, warnings)?;
        } else if entry.file_name().to_string_lossy().ends_with(".conf") {
            files.push(path);
        } else {
            warnings
                .push(format!("Skipped file in drop-in directory (does not have .conf extension): {}", path.display()));
        }
    }
    Ok(())
}

fn read(path: &Path) -> Result<String, String> {
    let mut text = String::new();
    let file = File::open(path).map_err(|error| error.to_string())?;
    file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text).map_err(|error| error.to_string())?;
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(format!("is larger than {MAX_FILE_BYTES} bytes"));
    }
    if text.is_empty() { Err("kubelet config file was empty".to_owned()) } else { Ok(text) }
}

fn parse(text: &str, duplicate_keys: DuplicateKeys) -> Result<Value, String> {
    match yaml::parse(text.as_bytes(), duplicate_keys) {
        Ok(document) => Ok(document.value),
        Err(YamlError::Empty) => Err("kubelet config file was empty".to_owned()),
        Err(error @ YamlError::Malformed(_)) => Err(error.to_string()),
    }
}
