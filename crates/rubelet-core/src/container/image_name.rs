//! Image references.
//!
//! Owns: the grammar of image references, the default tag. Never: adds a registry; the runtime resolves short names.
//! Upstream: `applyDefaultImageTag`, `github.com/distribution/reference`.

use super::ConfigError;

const DEFAULT_TAG: &str = "latest";
const MAX_TAG_BYTES: usize = 128;
const MAX_PATH_BYTES: usize = 255;

/// The reference for the runtime: as it is, or with `:latest` when it has neither tag nor digest.
pub fn with_default_tag(image: &str) -> Result<String, ConfigError> {
    match parse(image) {
        Ok(Pinned::ByTagOrDigest) => Ok(image.to_owned()),
        Ok(Pinned::Not) => Ok(format!("{image}:{DEFAULT_TAG}")),
        Err(problem) => Err(ConfigError(format!(
            "Failed to apply default image tag {image:?}: couldn't parse image name {image:?}: {problem}"
        ))),
    }
}

/// The repository with its registry, without tag and digest: `docker.io/library/nginx` for `nginx`.
pub fn repository(image: &str) -> String {
    let (domain, remainder) = split_domain(image);
    let named = remainder.split('@').next().unwrap_or_default();
    let path = named.split(':').next().unwrap_or_default();
    match domain {
        Some("index.docker.io") => format!("docker.io/{path}"),
        Some(domain) => format!("{domain}/{path}"),
        None if path.contains('/') => format!("docker.io/{path}"),
        None => format!("docker.io/library/{path}"),
    }
}

enum Pinned {
    Not,
    ByTagOrDigest,
}

const INVALID: &str = "invalid reference format";

fn parse(image: &str) -> Result<Pinned, String> {
    if image.len() == 64 && image.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
        return Err(format!("invalid repository name ({image}), cannot specify 64-byte hexadecimal strings"));
    }
    let (domain, remainder) = split_domain(image);
    let path_of = |text: &str| text.split(':').next().unwrap_or_default().to_owned();
    if path_of(remainder).chars().any(char::is_uppercase) {
        let repository = if domain.is_none() && !remainder.contains('/') { "library/" } else { "" };
        return Err(format!("{INVALID}: repository name ({repository}{}) must be lowercase", path_of(remainder)));
    }
    let (named, digest) = match remainder.split_once('@') {
        Some((named, digest)) => (named, Some(digest)),
        None => (remainder, None),
    };
    let (path, tag) = match named.split_once(':') {
        Some((path, tag)) => (path, Some(tag)),
        None => (named, None),
    };
    let is_valid = domain.is_none_or(is_domain) && path.split('/').all(is_path_component) && tag.is_none_or(is_tag);
    if !is_valid {
        return Err(INVALID.to_owned());
    }
    if path.len() > MAX_PATH_BYTES {
        return Err(format!("repository name must not be more than {MAX_PATH_BYTES} characters"));
    }
    if let Some(digest) = digest {
        check_digest(digest)?;
    }
    Ok(if tag.is_some() || digest.is_some() { Pinned::ByTagOrDigest } else { Pinned::Not })
}

/// The first part is a registry when it looks like a host.
fn split_domain(image: &str) -> (Option<&str>, &str) {
    match image.split_once('/') {
        Some((first, rest))
            if first == "localhost" || first.contains(['.', ':']) || first.chars().any(char::is_uppercase) =>
        {
            (Some(first), rest)
        }
        Some(_) | None => (None, image),
    }
}

fn is_domain(domain: &str) -> bool {
    let (host, port) = match domain.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, Some(port)),
        Some(_) | None => (domain, None),
    };
    let is_port = port.is_none_or(|port| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()));
    let is_host = match host.strip_prefix('[').and_then(|inner| inner.strip_suffix(']')) {
        Some(address) => !address.is_empty() && address.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b':'),
        None => host.split('.').all(is_domain_component),
    };
    is_host && is_port
}

fn is_domain_component(part: &str) -> bool {
    !part.is_empty()
        && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        && !part.starts_with('-')
        && !part.ends_with('-')
}

/// Lower-case words and digits, joined by one of `.`, `_`, `__` or any number of `-`.
fn is_path_component(part: &str) -> bool {
    let is_word = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = part.as_bytes();
    let (Some(first), Some(last)) = (bytes.first(), bytes.last()) else { return false };
    is_word(*first)
        && is_word(*last)
        && bytes
            .split(|byte| is_word(*byte))
            .filter(|separator| !separator.is_empty())
            .all(|separator| matches!(separator, b"." | b"_" | b"__") || separator.iter().all(|byte| *byte == b'-'))
}

fn is_tag(tag: &str) -> bool {
    tag.len() <= MAX_TAG_BYTES
        && tag.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
        && tag.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-'))
}

fn check_digest(digest: &str) -> Result<(), String> {
    let (algorithm, hex) = digest.split_once(':').ok_or(INVALID)?;
    let is_algorithm = algorithm.split(['-', '_', '+', '.']).all(|part| {
        part.bytes().next().is_some_and(|byte| byte.is_ascii_alphabetic())
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric())
    });
    if !is_algorithm || hex.len() < 32 || !hex.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(INVALID.to_owned());
    }
    let length = match algorithm {
        "sha256" => 64,
        "sha384" => 96,
        "sha512" => 128,
        _ => return Err("unsupported digest algorithm".to_owned()),
    };
    if hex.len() != length {
        return Err("invalid checksum digest length".to_owned());
    }
    if hex.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return Err("invalid checksum digest format".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGEST: &str = "sha256:22f892d7672adc0b9c86df67792afdb8b2dc08880f49f669eaaa59c47d7908c2";

    #[test]
    fn names_without_tag_and_digest_mean_latest() {
        let digested = format!("busybox@{DIGEST}");
        let both = format!("registry:5000/a/b:1@{DIGEST}");
        for (image, expected) in [
            ("busybox", "busybox:latest"),
            ("busybox:1.37", "busybox:1.37"),
            ("library/busybox", "library/busybox:latest"),
            ("registry.k8s.io/pause:3.10", "registry.k8s.io/pause:3.10"),
            ("registry:5000/a", "registry:5000/a:latest"),
            ("localhost/a__b--c.d", "localhost/a__b--c.d:latest"),
            ("[fd00::1]:5000/a", "[fd00::1]:5000/a:latest"),
            ("Upper/a", "Upper/a:latest"),
            (&digested, &digested),
            (&both, &both),
        ] {
            assert_eq!(with_default_tag(image).as_deref(), Ok(expected), "{image}");
        }
    }

    #[test]
    fn invalid_image_name_is_refused_in_upstreams_words() {
        for (image, problem) in [
            ("", "invalid reference format"),
            ("Foo", "invalid reference format: repository name (library/Foo) must be lowercase"),
            ("a/B", "invalid reference format: repository name (a/B) must be lowercase"),
            ("a:b:c", "invalid reference format"),
            ("a b", "invalid reference format"),
            ("-a", "invalid reference format"),
            ("a/", "invalid reference format"),
            ("http://x/y", "invalid reference format"),
            ("a@sha256:abc", "invalid reference format"),
            ("a@sha256:22f892d7672adc0b9c86df67792afdb8", "invalid checksum digest length"),
            (
                "22f892d7672adc0b9c86df67792afdb8b2dc08880f49f669eaaa59c47d7908c2",
                "invalid repository name (22f892d7672adc0b9c86df67792afdb8b2dc08880f49f669eaaa59c47d7908c2), cannot specify \
                 64-byte hexadecimal strings",
            ),
        ] {
            let error = with_default_tag(image).unwrap_err();
            assert_eq!(
                error.0,
                format!("Failed to apply default image tag {image:?}: couldn't parse image name {image:?}: {problem}")
            );
        }
    }
}
