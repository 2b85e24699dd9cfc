//! The credentials of a pod's pull secrets for an image.
//!
//! Owns: both forms of such a secret, and the matching of registries with globs, ports and paths. Never: logs a password.
//! Upstream: `pkg/credentialprovider/{config,keyring}.go`.

use std::{collections::BTreeMap, fmt};

use k8s_openapi::ByteString;
use serde::Deserialize;

use crate::{container::image_name::repository, objects::Secret};

const CONFIG_JSON: &str = ".dockerconfigjson";
const CONFIG: &str = ".dockercfg";
const CONFIG_JSON_TYPE: &str = "kubernetes.io/dockerconfigjson";
const CONFIG_TYPE: &str = "kubernetes.io/dockercfg";
const DEFAULT_REGISTRY: &str = "index.docker.io";

#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    pub username: String,
    pub password: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:***", self.username)
    }
}

#[derive(Deserialize)]
struct ConfigFile {
    #[serde(default)]
    auths: BTreeMap<String, Entry>,
}

#[derive(Deserialize)]
struct Entry {
    #[serde(default)]
    username: String,
    #[serde(default)]
    password: String,
    /// `user:password` in base64; takes precedence over both.
    #[serde(default)]
    auth: String,
}

/// The matching credentials, most specific first. A secret of another type, or one that cannot be read, has none.
pub fn credentials<'a>(image: &str, secrets: impl IntoIterator<Item = &'a Secret>) -> Vec<Credentials> {
    let mut by_place: BTreeMap<String, Vec<Credentials>> = BTreeMap::new();
    for (place, entry) in secrets.into_iter().flat_map(entries) {
        if let Some(credentials) = entry.credentials() {
            by_place.entry(place_of(&place)).or_default().push(credentials);
        }
    }
    let target = repository(image);
    let fitting = by_place.iter().rev().filter(|(place, _)| fits(place, &target));
    let found: Vec<_> = fitting.flat_map(|(_, credentials)| credentials.clone()).collect();
    if found.is_empty() && target.starts_with("docker.io/") {
        return by_place.remove(DEFAULT_REGISTRY).unwrap_or_default();
    }
    found
}

fn entries(secret: &Secret) -> BTreeMap<String, Entry> {
    let data = &secret.data.0;
    let read = match secret.secret_type.as_str() {
        CONFIG_JSON_TYPE => data
            .get(CONFIG_JSON)
            .and_then(|config| serde_json::from_slice::<ConfigFile>(config).ok())
            .map(|file| file.auths),
        CONFIG_TYPE => data.get(CONFIG).and_then(|config| serde_json::from_slice(config).ok()),
        _ => None,
    };
    read.unwrap_or_default()
}

impl Entry {
    fn credentials(self) -> Option<Credentials> {
        if self.auth.is_empty() {
            return Some(Credentials { username: self.username, password: self.password });
        }
        let unpadded = self.auth.trim().trim_end_matches('=');
        let padded = format!("{unpadded}{}", "=".repeat((4 - unpadded.len() % 4) % 4));
        let ByteString(decoded) = serde_json::from_value(serde_json::Value::String(padded)).ok()?;
        let decoded = String::from_utf8(decoded).ok()?;
        let (username, password) = decoded.split_once(':')?;
        Some(Credentials { username: username.to_owned(), password: password.to_owned() })
    }
}

/// Host, port and path, without what old clients add.
fn place_of(place: &str) -> String {
    let place = place.strip_prefix("https://").or_else(|| place.strip_prefix("http://")).unwrap_or(place);
    let (host, path) = place.split_at(place.find('/').unwrap_or(place.len()));
    let path = if path.starts_with("/v1/") || path.starts_with("/v2/") { &path[3..] } else { path };
    if path == "/" { host.to_owned() } else { format!("{host}{path}") }
}

/// The path must be a prefix; in the host, each part between dots may be a glob.
fn fits(place: &str, target: &str) -> bool {
    let split = |text: &str| {
        let (host, path) = text.split_at(text.find('/').unwrap_or(text.len()));
        let (host, port) = host.rsplit_once(':').unwrap_or((host, ""));
        (host.to_owned(), port.to_owned(), path.to_owned())
    };
    let ((host, port, path), (target_host, target_port, target_path)) = (split(place), split(target));
    let (parts, target_parts): (Vec<_>, Vec<_>) = (host.split('.').collect(), target_host.split('.').collect());
    port == target_port
        && target_path.starts_with(&path)
        && parts.len() == target_parts.len()
        && parts.iter().zip(&target_parts).all(|(glob, part)| matches_glob(glob, part))
}

/// `*` matches any text, `?` any character. Only the last `*` is ever retried, so matching is never exponential.
fn matches_glob(glob: &str, text: &str) -> bool {
    let (glob, text): (Vec<char>, Vec<char>) = (glob.chars().collect(), text.chars().collect());
    let (mut at, mut next) = (0, 0);
    let mut last_star = None;
    while next < text.len() {
        match glob.get(at) {
            Some('*') => {
                last_star = Some((at, next));
                at += 1;
            }
            Some(expected) if *expected == '?' || *expected == text[next] => (at, next) = (at + 1, next + 1),
            Some(_) | None => {
                let Some((star, from)) = last_star else { return false };
                last_star = Some((star, from + 1));
                (at, next) = (star + 1, from + 1);
            }
        }
    }
    glob[at..].iter().all(|rest| *rest == '*')
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::objects::Data;

    fn secret(secret_type: &str, key: &str, content: &serde_json::Value) -> Secret {
        let data = Data(BTreeMap::from([(key.to_owned(), content.to_string().into_bytes())]));
        Secret { data, secret_type: secret_type.to_owned(), is_immutable: false }
    }

    /// Users whose credentials are tried, in order. Every entry's user is named like its registry.
    fn tried(image: &str, places: &[&str]) -> String {
        let auths: serde_json::Map<_, _> =
            places.iter().map(|place| ((*place).to_owned(), json!({"username": place, "password": "p"}))).collect();
        let secret = secret(CONFIG_JSON_TYPE, CONFIG_JSON, &json!({"auths": auths}));
        let users: Vec<_> = credentials(image, [&secret]).into_iter().map(|found| found.username).collect();
        users.join(" ")
    }

    #[test]
    fn the_most_specific_place_comes_first_and_others_are_not_tried() {
        assert_eq!(tried("quay.io/team/app:1", &["quay.io", "quay.io/team", "quay.io/other"]), "quay.io/team quay.io");
        assert_eq!(tried("reg.local:5000/app", &["reg.local", "reg.local:5000"]), "reg.local:5000");
        assert_eq!(tried("eu.gcr.io/app@sha256:00", &["*.gcr.io", "gcr.io"]), "*.gcr.io");
        assert_eq!(tried("a.b.gcr.io/app", &["*.gcr.io"]), "");
        assert_eq!(tried("quay.io/app", &["https://quay.io/v2/"]), "https://quay.io/v2/");
        assert_eq!(tried("nginx", &["https://index.docker.io/v1/", "quay.io"]), "https://index.docker.io/v1/");
        assert_eq!(tried("me/app", &["docker.io/me", "index.docker.io"]), "docker.io/me");
    }

    #[test]
    fn globs_match_whole_parts() {
        for (glob, text, is_match) in [
            ("*", "", true),
            ("*", "eu", true),
            ("e*", "eu", true),
            ("e*u", "eabu", true),
            ("*a*b*", "xxaxxbxx", true),
            ("*a*b", "xxaxxbxx", false),
            ("e?", "eu", true),
            ("e?", "e", false),
            ("eu", "eux", false),
        ] {
            assert_eq!(matches_glob(glob, text), is_match, "{glob} {text}");
        }
        assert!(!matches_glob(&"*a".repeat(30), &"a".repeat(29)));
    }

    #[test]
    fn both_forms_of_a_secret_are_read_and_auth_wins() {
        let entry = json!({"quay.io": {"username": "old", "password": "old", "auth": "dXNlcjpwYTpzcw"}});
        let config_json = (CONFIG_JSON_TYPE, CONFIG_JSON, json!({"auths": entry}));
        for (secret_type, key, content) in [(CONFIG_TYPE, CONFIG, entry.clone()), config_json] {
            let found = credentials("quay.io/app", [&secret(secret_type, key, &content)]);
            assert_eq!(found, [Credentials { username: "user".to_owned(), password: "pa:ss".to_owned() }]);
            assert_eq!(format!("{found:?}"), "[user:***]");
        }
        assert_eq!(credentials("quay.io/app", [&secret(CONFIG_TYPE, "other", &entry)]), []);
    }

    #[test]
    fn secret_of_another_type_has_no_credentials() {
        let entry = json!({"quay.io": {"username": "user", "password": "pass"}});
        let whole = json!({"auths": entry});
        for (secret_type, key, content) in [
            ("Opaque", CONFIG_JSON, &whole),
            ("Opaque", CONFIG, &entry),
            (CONFIG_TYPE, CONFIG_JSON, &whole),
            (CONFIG_JSON_TYPE, CONFIG, &entry),
        ] {
            assert_eq!(credentials("quay.io/app", [&secret(secret_type, key, content)]), [], "{secret_type} {key}");
        }
    }
}
