//! Field paths and field errors, with the API server's texts.
//!
//! Owns: the texts users know from `kubectl apply`. Upstream: `apimachinery/pkg/util/validation/field`.

use std::{borrow::Borrow, fmt};

/// `spec.containers[0].image`.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Path(String);

impl Path {
    pub fn root() -> Self {
        Path::default()
    }

    pub fn child(&self, name: &str) -> Self {
        if self.0.is_empty() { Path(name.to_owned()) } else { Path(format!("{}.{name}", self.0)) }
    }

    pub fn index(&self, index: usize) -> Self {
        Path(format!("{}[{index}]", self.0))
    }

    /// An entry of a map whose keys are the user's: `metadata.labels[app]`.
    pub fn key(&self, key: &str) -> Self {
        Path(format!("{}[{key}]", self.0))
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One error of one field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    pub field: Path,
    /// `Required value`, `Invalid value: "x": must be …`.
    pub detail: String,
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.field.0.is_empty() {
            return f.write_str(&self.detail);
        }
        write!(f, "{}: {}", self.field, self.detail)
    }
}

impl FieldError {
    pub fn required(field: &Path, why: &str) -> Self {
        FieldError::new(field, with_reason("Required value".to_owned(), why))
    }

    /// `value` as shown in the error: strings through [`quoted`].
    pub fn invalid(field: &Path, value: impl fmt::Display, why: &str) -> Self {
        FieldError::new(field, with_reason(format!("Invalid value: {value}"), why))
    }

    pub fn duplicate(field: &Path, value: impl fmt::Display) -> Self {
        FieldError::new(field, format!("Duplicate value: {value}"))
    }

    pub fn not_found(field: &Path, value: &str) -> Self {
        FieldError::new(field, format!("Not found: {}", quoted(value)))
    }

    pub fn forbidden(field: &Path, why: &str) -> Self {
        FieldError::new(field, with_reason("Forbidden".to_owned(), why))
    }

    /// `supported` is sorted by the caller, as upstream's sets are.
    pub fn unsupported<S: Borrow<str>>(field: &Path, value: &str, supported: &[S]) -> Self {
        let supported: Vec<String> = supported.iter().map(|value| quoted(value.borrow())).collect();
        let listed = format!("supported values: {}", supported.join(", "));
        FieldError::new(field, with_reason(format!("Unsupported value: {}", quoted(value)), &listed))
    }

    pub fn too_long(field: &Path, limit_bytes: usize) -> Self {
        FieldError::new(field, format!("Too long: may not be more than {limit_bytes} bytes"))
    }

    pub fn new(field: &Path, detail: String) -> Self {
        FieldError { field: field.clone(), detail }
    }
}

/// A string value as a message shows it. Long ones are cut: an event is one line.
pub fn quoted(value: &str) -> String {
    const SHOWN_CHARS: usize = 120;
    match value.char_indices().nth(SHOWN_CHARS) {
        Some((cut, _)) => format!("{:?}...", &value[..cut]),
        None => format!("{value:?}"),
    }
}

fn with_reason(text: String, why: &str) -> String {
    if why.is_empty() { text } else { format!("{text}: {why}") }
}
