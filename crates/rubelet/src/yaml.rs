//! Parses the text of a manifest or a configuration file into plain data.
//!
//! Owns: the YAML dialect: YAML 1.1 as Kubernetes writes it (`0644` is octal, `yes` is true), JSON included.
//! Never: knows what a pod or a configuration is.

use serde_json::Value;
use serde_saphyr::DuplicateKeyPolicy;

/// serde's advice to programmers, removed from messages to users.
const LIBRARY_HINT: &str = ", set DuplicateKeyPolicy in Options if acceptable";

/// How a duplicate key in one mapping is handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DuplicateKeys {
    /// One of the two values would be ignored silently.
    Refuse,
    /// As upstream's lenient decoder.
    LastWins,
}

#[derive(Debug)]
pub(crate) struct Document {
    pub value: Value,
    /// Documents after the first.
    pub ignored_documents: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum YamlError {
    #[error("it is empty")]
    Empty,
    #[error("not YAML: {0}")]
    Malformed(String),
}

pub(crate) fn parse(text: &[u8], duplicate_keys: DuplicateKeys) -> Result<Document, YamlError> {
    let first = text.iter().find(|byte| !byte.is_ascii_whitespace());
    if first == Some(&b'{') {
        // JSON that YAML refuses, such as tabs before a key, is still JSON.
        if let Ok(value) = serde_json::from_slice(text) {
            return Ok(Document { value, ignored_documents: 0 });
        }
    }
    let options = serde_saphyr::options! {
        legacy_octal_numbers: true,
        with_snippet: false,
        duplicate_keys: match duplicate_keys {
            DuplicateKeys::Refuse => DuplicateKeyPolicy::Error,
            DuplicateKeys::LastWins => DuplicateKeyPolicy::LastWins,
        },
        // Limits aliases: a few lines of them can expand to gigabytes.
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: 10_000 },
    };
    let mut reader = text;
    let mut documents = serde_saphyr::read_with_options::<_, Value>(&mut reader, options);
    let value = match documents.next() {
        Some(Ok(value)) => value,
        Some(Err(error)) => return Err(YamlError::Malformed(error.to_string().replace(LIBRARY_HINT, ""))),
        None => return Err(YamlError::Empty),
    };
    Ok(Document { value, ignored_documents: documents.count() })
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;

    fn parsed(text: &str) -> String {
        match parse(text.as_bytes(), DuplicateKeys::Refuse) {
            Ok(document) if document.ignored_documents == 0 => document.value.to_string(),
            Ok(document) => format!("{} and {} more", document.value, document.ignored_documents),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn yaml_is_read_as_kubernetes_writes_it() {
        for (text, expected) in [
            ("mode: 0644", r#"{"mode":420}"#),
            ("on: yes", r#"{"on":true}"#),
            ("a: 'yes'", r#"{"a":"yes"}"#),
            ("a: 1.10", r#"{"a":1.1}"#),
            ("a: ~\nb:", r#"{"a":null,"b":null}"#),
            ("{\"a\": [1, true, null]}", r#"{"a":[1,true,null]}"#),
            ("\t{\n\t\"a\": 1\n\t}", r#"{"a":1}"#),
            ("a: &x {b: 1}\nc: *x", r#"{"a":{"b":1},"c":{"b":1}}"#),
            ("a: &x {b: 1}\nc: {<<: *x, d: 2}", r#"{"a":{"b":1},"c":{"b":1,"d":2}}"#),
            ("# comment\n---\na: 1\n", r#"{"a":1}"#),
            ("---\na: 1\n---\nb: 2\n", r#"{"a":1} and 1 more"#),
            ("a: 1\n---\n# nothing\n", r#"{"a":1}"#),
            ("image: nginx:1.25", r#"{"image":"nginx:1.25"}"#),
            ("a: |\n  x\n  y\n", r#"{"a":"x\ny\n"}"#),
        ] {
            assert_eq!(parsed(text), expected, "{text}");
        }
    }

    #[test]
    fn invalid_yaml_error_has_line_and_column() {
        let found = ["", "# only a comment\n", "a: 1\na: 2\n", "a: [1, 2", "a: b: c", "\u{1}\u{2}", "a:\n\t- b"]
            .map(parsed)
            .join("\n");
        assert_snapshot!(found, @r"
        it is empty
        it is empty
        not YAML: duplicate mapping key: a at line 2, column 1
        not YAML: unclosed bracket '[' at line 1, column 4
        not YAML: mapping values are not allowed in this context at line 1, column 5
        not YAML: unexpected character: `\u{1}' at line 1, column 1
        not YAML: tabs disallowed within this context (block indentation) at line 2, column 2
        ");
    }

    #[test]
    fn an_alias_bomb_is_refused() {
        let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
        for level in 1..10 {
            let below = level - 1;
            let aliases = vec![format!("*a{below}"); 10].join(", ");
            text.push_str(&format!("a{level}: &a{level} [{aliases}]\n"));
        }
        assert!(parse(text.as_bytes(), DuplicateKeys::Refuse).is_err());
    }

    #[test]
    fn the_last_of_two_values_wins_where_it_may() {
        let document = parse(b"a: 1\nb: 2\na: 3\n", DuplicateKeys::LastWins).unwrap();
        assert_eq!(document.value.to_string(), r#"{"a":3,"b":2}"#);
    }
}
