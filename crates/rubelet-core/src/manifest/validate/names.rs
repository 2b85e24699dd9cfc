//! Name formats, with the API server's messages.
//!
//! Upstream: `apimachinery/pkg/util/validation`, `apimachinery/pkg/api/validate/content`.

const LABEL: &str = "[a-z0-9]([-a-z0-9]*[a-z0-9])?";
const SUBDOMAIN: &str = "[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*";
const KEY: &str = "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]";
const KEY_RULE: &str =
    "must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character";
pub(super) const SYSCTL: &str = "^([a-z0-9]([-_a-z0-9]*[a-z0-9])?[\\./])*[a-z0-9]([-_a-z0-9]*[a-z0-9])?$";
pub(super) const MAX_SYSCTL_BYTES: usize = 253;

/// A container, a volume, a host.
pub(super) fn dns_label(value: &str) -> Vec<String> {
    let mut messages = too_long(value, 63);
    if !is_label(value) {
        messages.push(if value.contains('.') {
            "must not contain dots".to_owned()
        } else {
            format!(
                "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start \
                 and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is \
                 '{LABEL}')"
            )
        });
    }
    messages
}

/// A pod.
pub(super) fn dns_subdomain(value: &str) -> Vec<String> {
    let mut messages = too_long(value, 253);
    if !value.split('.').all(is_label) {
        messages.push(format!(
            "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must \
             start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is \
             '{SUBDOMAIN}')"
        ));
    }
    messages
}

/// A label's key: `example.com/my.name`, or without the part before the slash.
pub(super) fn qualified(value: &str) -> Vec<String> {
    let rule =
        format!("{KEY_RULE} (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '{KEY}')");
    let mut messages = Vec::new();
    let name = match value.split_once('/') {
        None => value,
        Some((_, name)) if name.contains('/') => {
            return vec![format!(
                "a valid label key {rule} with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')"
            )];
        }
        Some(("", name)) => {
            messages.push("prefix part must be non-empty".to_owned());
            name
        }
        Some((prefix, name)) => {
            messages.extend(dns_subdomain(prefix).iter().map(|message| format!("prefix part {message}")));
            name
        }
    };
    if name.is_empty() {
        messages.push("name part must be non-empty".to_owned());
    }
    messages.extend(too_long(name, 63).iter().map(|message| format!("name part {message}")));
    if !is_key(name) {
        messages.push(format!("name part {rule}"));
    }
    messages
}

pub(super) fn label_value(value: &str) -> Vec<String> {
    let mut messages = too_long(value, 63);
    if !value.is_empty() && !is_key(value) {
        messages.push(format!(
            "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must \
             start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for \
             validation is '({KEY})?')"
        ));
    }
    messages
}

/// A port name.
pub(super) fn port(value: &str) -> Vec<String> {
    let mut messages = too_long(value, 15);
    let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if value.is_empty() || !value.bytes().all(is_allowed) {
        messages.push("must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)".to_owned());
    }
    if !value.bytes().any(|byte| byte.is_ascii_lowercase()) {
        messages.push("must contain at least one letter (a-z)".to_owned());
    }
    if value.contains("--") {
        messages.push("must not contain consecutive hyphens".to_owned());
    }
    if value.starts_with('-') || value.ends_with('-') {
        messages.push("must not begin or end with a hyphen".to_owned());
    }
    messages
}

pub(super) fn port_number(value: i32) -> Vec<String> {
    if (1..=65535).contains(&value) { Vec::new() } else { vec!["must be between 1 and 65535, inclusive".to_owned()] }
}

pub(super) fn env(value: &str) -> Vec<String> {
    if value.bytes().all(|byte| (byte.is_ascii_graphic() || byte == b' ') && byte != b'=') {
        return Vec::new();
    }
    vec!["a valid environment variable name must consist only of printable ASCII characters other than '='".to_owned()]
}

pub(super) fn uid(value: &str) -> Vec<String> {
    if value.len() <= 63 && is_key(value) && !value.contains("..") {
        return Vec::new();
    }
    vec![format!("must be no more than 63 bytes and {KEY_RULE}")]
}

pub(super) fn is_sysctl(value: &str) -> bool {
    let is_part = |part: &str| is_made_of(part, |byte| byte.is_ascii_lowercase() || byte.is_ascii_digit(), b"-_");
    value.len() <= MAX_SYSCTL_BYTES && value.split(['.', '/']).all(is_part)
}

fn is_label(value: &str) -> bool {
    is_made_of(value, |byte| byte.is_ascii_lowercase() || byte.is_ascii_digit(), b"-")
}

fn is_key(value: &str) -> bool {
    is_made_of(value, |byte| byte.is_ascii_alphanumeric(), b"-_.")
}

/// Not empty, with `is_end` at both ends and those or `inner` between.
fn is_made_of(value: &str, is_end: impl Fn(u8) -> bool, inner: &[u8]) -> bool {
    let bytes = value.as_bytes();
    let (Some(first), Some(last)) = (bytes.first(), bytes.last()) else { return false };
    is_end(*first) && is_end(*last) && bytes.iter().all(|byte| is_end(*byte) || inner.contains(byte))
}

fn too_long(value: &str, limit_bytes: usize) -> Vec<String> {
    if value.len() > limit_bytes { vec![format!("must be no more than {limit_bytes} bytes")] } else { Vec::new() }
}
