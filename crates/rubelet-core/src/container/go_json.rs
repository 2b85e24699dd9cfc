//! JSON as Go's `encoding/json` writes it.
//!
//! Owns: the three characters of HTML and the two line separators that Go escapes and others do not. What upstream hashes or
//! compares as text must be equal byte for byte.

use serde::Serialize;

pub fn to_string(value: &impl Serialize) -> String {
    let json = serde_json::to_string(value).expect("plain structs of strings and numbers serialise");
    let mut escaped = String::with_capacity(json.len());
    for character in json.chars() {
        match character {
            // JSON has these only inside strings, so the context does not matter.
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                escaped.push_str(&format!("\\u{:04x}", u32::from(character)));
            }
            other => escaped.push(other),
        }
    }
    escaped
}
