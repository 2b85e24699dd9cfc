//! recursiveReadOnly mounts.
//!
//! Owns: `recursiveReadOnly` of a volume mount, against what the pod's runtime handler supports. Never: mounts anything.
//! Upstream: `resolveRecursiveReadOnly`, `runtimeHandlerSupportsRecursiveReadOnlyMounts` in `kubelet_pods.go`.

use k8s_openapi::api::core::v1::{PodSpec, VolumeMount};

use super::ConfigError;
use crate::observation::{RuntimeStatus, SandboxFacts};

/// The features of the runtime handler of the pod's sandbox. Before there is a sandbox, only the handler of a pod without a
/// RuntimeClass is known.
pub fn is_supported(spec: &PodSpec, sandbox: Option<&SandboxFacts>, runtime: &RuntimeStatus) -> bool {
    let has_class = spec.runtime_class_name.as_ref().is_some_and(|class| !class.is_empty());
    let name = match sandbox {
        Some(sandbox) => sandbox.runtime_handler.as_str(),
        None if has_class => return false,
        None => "",
    };
    runtime.handlers.iter().any(|handler| handler.name == name && handler.recursive_read_only_mounts)
}

pub fn resolve(mount: &VolumeMount, is_supported: bool) -> Result<bool, ConfigError> {
    let mode = match mount.recursive_read_only.as_deref() {
        None | Some("Disabled") => return Ok(false),
        Some(mode) => mode,
    };
    let name = &mount.name;
    if mount.read_only != Some(true) {
        return Err(ConfigError(format!(
            "volume {name:?} requested recursive read-only mode, but it is not read-only"
        )));
    }
    if let Some(propagation) = mount.mount_propagation.as_deref().filter(|propagation| *propagation != "None") {
        return Err(ConfigError(format!(
            "volume {name:?} requested recursive read-only mode, but it is not compatible with propagation {propagation:?}"
        )));
    }
    match mode {
        "IfPossible" => Ok(is_supported),
        "Enabled" if is_supported => Ok(true),
        "Enabled" => Err(ConfigError(format!(
            "volume {name:?} requested recursive read-only mode, but it is not supported by the runtime"
        ))),
        other => Err(ConfigError(format!("unknown recursive read-only mode {other:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observation::RuntimeHandler;

    #[test]
    fn recursive_read_only_needs_private_mount_and_runtime_support() {
        let not_supported =
            r#"volume "data" requested recursive read-only mode, but it is not supported by the runtime"#;
        let not_read_only = r#"volume "data" requested recursive read-only mode, but it is not read-only"#;
        let propagated = r#"volume "data" requested recursive read-only mode, but it is not compatible with propagation "HostToContainer""#;
        let unknown = r#"unknown recursive read-only mode "Sometimes""#;
        let cases = [
            (r#""readOnly":true"#, Ok(false), Ok(false)),
            (r#""recursiveReadOnly":"Disabled""#, Ok(false), Ok(false)),
            (r#""recursiveReadOnly":"IfPossible","readOnly":true"#, Ok(true), Ok(false)),
            (r#""recursiveReadOnly":"Enabled","readOnly":true"#, Ok(true), Err(not_supported)),
            (
                r#""recursiveReadOnly":"Enabled","readOnly":true,"mountPropagation":"None""#,
                Ok(true),
                Err(not_supported),
            ),
            (r#""recursiveReadOnly":"IfPossible""#, Err(not_read_only), Err(not_read_only)),
            (
                r#""recursiveReadOnly":"Enabled","readOnly":true,"mountPropagation":"HostToContainer""#,
                Err(propagated),
                Err(propagated),
            ),
            (r#""recursiveReadOnly":"Sometimes","readOnly":true"#, Err(unknown), Err(unknown)),
        ];
        for (fields, supported, unsupported) in cases {
            let mount: VolumeMount =
                serde_json::from_str(&format!(r#"{{"name":"data","mountPath":"/data",{fields}}}"#)).unwrap();
            for (is_supported, expected) in [(true, supported), (false, unsupported)] {
                let expected = expected.map_err(str::to_owned);
                assert_eq!(resolve(&mount, is_supported).map_err(|error| error.0), expected, "{fields} {is_supported}");
            }
        }
    }

    #[test]
    fn the_handler_of_the_sandbox_decides_before_the_class() {
        let handler = |name: &str, recursive_read_only_mounts| RuntimeHandler {
            name: name.to_owned(),
            recursive_read_only_mounts,
            ..RuntimeHandler::default()
        };
        let runtime =
            RuntimeStatus { handlers: vec![handler("", true), handler("plain", false)], ..RuntimeStatus::default() };
        let sandbox_of = |handler: &str| {
            let mut sandbox = crate::test_support::facts("").sandboxes.remove(0);
            sandbox.runtime_handler = handler.to_owned();
            sandbox
        };
        let cases = [
            (None, None, true),
            (Some("class"), None, false),
            (Some("class"), Some(""), true),
            (Some("class"), Some("plain"), false),
            (None, Some("unknown"), false),
        ];
        for (class, sandbox, expected) in cases {
            let spec = PodSpec { runtime_class_name: class.map(str::to_owned), ..PodSpec::default() };
            let sandbox = sandbox.map(sandbox_of);
            assert_eq!(is_supported(&spec, sandbox.as_ref(), &runtime), expected, "{class:?} {sandbox:?}");
        }
        assert!(
            !is_supported(&PodSpec::default(), None, &RuntimeStatus::default()),
            "a runtime that names no handlers"
        );
    }
}
