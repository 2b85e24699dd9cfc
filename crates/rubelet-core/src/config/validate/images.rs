//! Rules about the verification of pull credentials for present images.

use super::Rules;
use crate::config::gates::Gate;

impl Rules<'_> {
    pub(super) fn image_verification(&mut self) {
        const POLICY: &str = "imagePullCredentialsVerificationPolicy";
        const LIST: &str = "preloadedImagesVerificationAllowlist";
        let config = self.config;
        let policy = config.image_pull_credentials_verification_policy.as_str();
        let patterns = &config.preloaded_images_verification_allowlist;
        if !self.gates.enabled(Gate::KubeletEnsureSecretPulledImages) {
            let gate = "must not be set if KubeletEnsureSecretPulledImages feature gate is not enabled";
            if !policy.is_empty() {
                self.invalid(POLICY, format!("`{POLICY}` {gate}"));
            }
            if !patterns.is_empty() {
                self.invalid(LIST, format!("`{LIST}` {gate}"));
            }
            return;
        }
        let policies = ["NeverVerify", "NeverVerifyPreloadedImages", "NeverVerifyAllowlistedImages", "AlwaysVerify"];
        if !policies.contains(&policy) {
            let allowed = r#"Valid options are "NeverVerify", "NeverVerifyPreloadedImages", "NeverVerifyAllowlistedImages" or "AlwaysVerify""#;
            self.invalid(POLICY, format!("option {policy:?} specified for {POLICY}. {allowed}"));
        }
        if !patterns.is_empty() && policy != "NeverVerifyAllowlistedImages" {
            // The spelling is upstream's.
            let unless = r#"if `imagePullCredentialsVertificationPolicy` is not "NeverVerifyAllowlistedImages""#;
            self.invalid(LIST, format!("can't set `{LIST}` {unless}"));
        } else if let Some(error) = patterns.iter().find_map(|pattern| check_pattern(pattern).err()) {
            self.invalid(LIST, format!("invalid image pattern in `{LIST}`: {error}"));
        }
    }
}

/// `registry/path` without tag and digest, or `registry/path/*`.
fn check_pattern(pattern: &str) -> Result<(), String> {
    if pattern != pattern.trim() {
        return Err(format!("leading/trailing spaces are not allowed: {pattern}"));
    }
    let (name, is_wildcard) = match pattern.strip_suffix('*') {
        Some(prefix) if prefix.ends_with('/') => (prefix, true),
        Some(_) | None => (pattern, false),
    };
    if name.is_empty() {
        return Err(format!("the supplied pattern is too short: {pattern}"));
    }
    if name.contains('*') {
        return Err(format!("not a valid wildcard pattern, only patterns ending with '/*' are allowed: {pattern}"));
    }
    if is_wildcard {
        return if name.len() == 1 { Err("at least registry hostname is required".to_owned()) } else { Ok(()) };
    }
    let repository = without_tag_and_digest(name);
    if !is_repository(repository) {
        let lower = is_repository(&repository.to_lowercase());
        let why = if lower { "repository name must be lowercase" } else { "invalid reference format" };
        return Err(format!("failed to parse as an image name: {why}"));
    }
    if repository != name {
        return Err(format!("neither tag nor digest is accepted in an image reference: {pattern}"));
    }
    Ok(())
}

fn without_tag_and_digest(name: &str) -> &str {
    let name = name.split_once('@').map_or(name, |(name, _)| name);
    match name.rsplit_once(':') {
        Some((before, tag)) if !tag.contains('/') => before,
        Some(_) | None => name,
    }
}

/// The grammar of an image's name: an optional registry, then path components.
fn is_repository(name: &str) -> bool {
    match name.split_once('/') {
        Some((first, rest)) if is_registry(first) => rest.split('/').all(is_path_component),
        Some(_) | None => name.split('/').all(is_path_component),
    }
}

fn is_registry(text: &str) -> bool {
    let (host, port) = text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port)));
    let is_label = |label: &str| {
        let inner = label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        !label.is_empty() && inner && !label.starts_with('-') && !label.ends_with('-')
    };
    let is_port = |port: &str| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    host.split('.').all(is_label) && port.is_none_or(is_port)
}

/// Lower-case words joined by `.`, `_`, `__` or dashes.
fn is_path_component(text: &str) -> bool {
    let is_word_byte = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let is_separator =
        |run: &str| matches!(run, "." | "_" | "__") || (!run.is_empty() && run.bytes().all(|b| b == b'-'));
    let starts_and_ends =
        text.bytes().next().is_some_and(is_word_byte) && text.bytes().last().is_some_and(is_word_byte);
    let separators = text.split(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit()).filter(|run| !run.is_empty());
    starts_and_ends && separators.into_iter().all(is_separator)
}
