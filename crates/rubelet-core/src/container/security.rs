//! The security context of containers and sandboxes.
//!
//! Owns: users, groups, capabilities, namespaces, seccomp, AppArmor, SELinux, hidden paths; the check of `runAsNonRoot`.
//! Upstream: `kuberuntime/security_context*.go`, `pkg/securitycontext`, `kuberuntime/util`, `security/apparmor`.

use k8s_openapi::api::core::v1::{Container, Pod, PodSecurityContext, PodSpec, SELinuxOptions, SecurityContext};
use rubelet_cri::v1::{
    Capability, Int64Value, LinuxContainerSecurityContext, LinuxSandboxSecurityContext, NamespaceMode, NamespaceOption,
    SeLinuxOption, SecurityProfile, SupplementalGroupsPolicy, security_profile::ProfileType,
};

use super::{ConfigError, all, described, is_host_network};
use crate::{
    effect::ImageUser,
    id::PodUid,
    settings::{DefaultSeccomp, Settings},
};

const APPARMOR_ANNOTATION_PREFIX: &str = "container.apparmor.security.beta.kubernetes.io/";
const MASKED_PATHS: [&str; 12] = [
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];
const READONLY_PATHS: [&str; 5] = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

pub fn of_container(
    pod: &Pod,
    spec: &PodSpec,
    container: &Container,
    image_user: &ImageUser,
    settings: &Settings,
) -> Result<LinuxContainerSecurityContext, ConfigError> {
    let own = container.security_context.clone().unwrap_or_default();
    let of_pod = spec.security_context.clone().unwrap_or_default();
    let (apparmor, apparmor_profile) = apparmor(pod, &of_pod, container)?;
    let is_unmasked = own.proc_mount.as_deref() == Some("Unmasked");
    let mut context = LinuxContainerSecurityContext {
        capabilities: own.capabilities.as_ref().map(|capabilities| Capability {
            add_capabilities: capabilities.add.clone().unwrap_or_default(),
            drop_capabilities: capabilities.drop.clone().unwrap_or_default(),
            ..Capability::default()
        }),
        privileged: own.privileged.unwrap_or(false),
        namespace_options: Some(namespaces(spec)),
        selinux_options: own.se_linux_options.as_ref().or(of_pod.se_linux_options.as_ref()).map(selinux),
        run_as_group: own.run_as_group.or(of_pod.run_as_group).map(int64),
        readonly_rootfs: own.read_only_root_filesystem.unwrap_or(false),
        supplemental_groups: groups(&of_pod),
        supplemental_groups_policy: groups_policy(&of_pod)?,
        no_new_privs: own.allow_privilege_escalation == Some(false),
        masked_paths: if is_unmasked { Vec::new() } else { masked_paths(settings) },
        readonly_paths: if is_unmasked { Vec::new() } else { READONLY_PATHS.map(str::to_owned).to_vec() },
        seccomp: Some(seccomp(&of_pod, &own, settings)?),
        apparmor,
        apparmor_profile,
        ..LinuxContainerSecurityContext::default()
    };
    match (own.run_as_user.or(of_pod.run_as_user), image_user) {
        (Some(user), _) => context.run_as_user = Some(int64(user)),
        (None, ImageUser::Uid(user)) => context.run_as_user = Some(int64(*user)),
        (None, ImageUser::Name(name)) => context.run_as_username = name.clone(),
        // An image without a user runs as root.
        (None, ImageUser::Unset) => context.run_as_user = Some(int64(0)),
    }
    Ok(context)
}

pub fn of_sandbox(spec: &PodSpec) -> Result<LinuxSandboxSecurityContext, ConfigError> {
    let of_pod = spec.security_context.clone().unwrap_or_default();
    let is_privileged = |container: &Container| {
        container.security_context.as_ref().is_some_and(|context| context.privileged == Some(true))
    };
    Ok(LinuxSandboxSecurityContext {
        namespace_options: Some(namespaces(spec)),
        selinux_options: of_pod.se_linux_options.as_ref().map(selinux),
        run_as_user: of_pod.run_as_user.map(int64),
        run_as_group: of_pod.run_as_group.map(int64),
        supplemental_groups: groups(&of_pod),
        supplemental_groups_policy: groups_policy(&of_pod)?,
        privileged: all(spec).any(is_privileged),
        // Always: the pod's own profile may be too narrow for the sandbox's process.
        seccomp: Some(profile(ProfileType::RuntimeDefault)),
        ..LinuxSandboxSecurityContext::default()
    })
}

/// Rejects a container with runAsNonRoot that would or might run as root.
pub fn verify_run_as_non_root(
    pod: &Pod,
    uid: &PodUid,
    container: &Container,
    image_user: &ImageUser,
) -> Result<(), ConfigError> {
    let own = container.security_context.as_ref();
    let of_pod = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
    let is_required = own
        .and_then(|context| context.run_as_non_root)
        .or(of_pod.and_then(|context| context.run_as_non_root))
        .unwrap_or(false);
    if !is_required {
        return Ok(());
    }
    let run_as_user = own.and_then(|context| context.run_as_user).or(of_pod.and_then(|context| context.run_as_user));
    let place = format!("(pod: \"{}\", container: {})", described(pod, uid.as_str()), container.name);
    let problem = match (run_as_user, image_user) {
        (Some(0), _) => format!("container's runAsUser breaks non-root policy {place}"),
        (Some(_), _) => return Ok(()),
        (None, ImageUser::Name(name)) => format!(
            "container has runAsNonRoot and image has non-numeric user ({name}), cannot verify user is non-root {place}"
        ),
        (None, ImageUser::Unset | ImageUser::Uid(0)) => {
            format!("container has runAsNonRoot and image will run as root {place}")
        }
        (None, ImageUser::Uid(user)) if !(0..=i64::from(i32::MAX)).contains(user) => format!(
            "container has runAsNonRoot and image has an invalid user id ({user}). (Must be 1-({max})): must be between 0 \
             and {max}, inclusive {place}",
            max = i32::MAX
        ),
        (None, ImageUser::Uid(_)) => return Ok(()),
    };
    Err(ConfigError(problem))
}

fn namespaces(spec: &PodSpec) -> NamespaceOption {
    let pid = if spec.host_pid == Some(true) {
        NamespaceMode::Node
    } else if spec.share_process_namespace == Some(true) {
        NamespaceMode::Pod
    } else {
        NamespaceMode::Container
    };
    NamespaceOption {
        network: if is_host_network(spec) { NamespaceMode::Node } else { NamespaceMode::Pod }.into(),
        pid: pid.into(),
        ipc: if spec.host_ipc == Some(true) { NamespaceMode::Node } else { NamespaceMode::Pod }.into(),
        ..NamespaceOption::default()
    }
}

fn groups(of_pod: &PodSecurityContext) -> Vec<i64> {
    of_pod.fs_group.into_iter().chain(of_pod.supplemental_groups.iter().flatten().copied()).collect()
}

fn groups_policy(of_pod: &PodSecurityContext) -> Result<i32, ConfigError> {
    match of_pod.supplemental_groups_policy.as_deref() {
        None => Ok(0),
        Some(policy) => SupplementalGroupsPolicy::from_str_name(policy)
            .map(i32::from)
            .ok_or_else(|| ConfigError(format!("unsupported supplementalGroupsPolicy: {policy}"))),
    }
}

fn seccomp(
    of_pod: &PodSecurityContext,
    own: &SecurityContext,
    settings: &Settings,
) -> Result<SecurityProfile, ConfigError> {
    let Some(wanted) = own.seccomp_profile.as_ref().or(of_pod.seccomp_profile.as_ref()) else {
        return Ok(profile(match settings.node.default_seccomp {
            DefaultSeccomp::RuntimeDefault => ProfileType::RuntimeDefault,
            DefaultSeccomp::Unconfined => ProfileType::Unconfined,
        }));
    };
    match (wanted.type_.as_str(), wanted.localhost_profile.as_deref()) {
        ("RuntimeDefault", _) => Ok(profile(ProfileType::RuntimeDefault)),
        ("Localhost", None | Some("")) => {
            Err(ConfigError("localhostProfile must be set if seccompProfile type is Localhost.".to_owned()))
        }
        ("Localhost", Some(file)) => {
            let path = settings.root_dir.join("seccomp").join(file);
            Ok(SecurityProfile { localhost_ref: path.display().to_string(), ..profile(ProfileType::Localhost) })
        }
        (_, _) => Ok(profile(ProfileType::Unconfined)),
    }
}

/// The profile, and the deprecated field for runtimes before 1.30.
fn apparmor(
    pod: &Pod,
    of_pod: &PodSecurityContext,
    container: &Container,
) -> Result<(Option<SecurityProfile>, String), ConfigError> {
    let own = container.security_context.as_ref().and_then(|context| context.app_armor_profile.as_ref());
    // Static pods may have only the deprecated annotation: the API server did not convert it.
    let annotation = pod
        .metadata
        .annotations
        .as_ref()
        .and_then(|all| all.get(&(APPARMOR_ANNOTATION_PREFIX.to_owned() + &container.name)));
    let (kind, file) = match (own, annotation.and_then(|text| apparmor_annotation(text)), &of_pod.app_armor_profile) {
        (Some(own), _, _) => (own.type_.as_str(), own.localhost_profile.as_deref()),
        (None, Some(annotated), _) => annotated,
        (None, None, Some(of_pod)) => (of_pod.type_.as_str(), of_pod.localhost_profile.as_deref()),
        (None, None, None) => return Ok((None, String::new())),
    };
    match (kind, file) {
        ("RuntimeDefault", _) => Ok((Some(profile(ProfileType::RuntimeDefault)), "runtime/default".to_owned())),
        ("Unconfined", _) => Ok((Some(profile(ProfileType::Unconfined)), "unconfined".to_owned())),
        ("Localhost", Some(file)) => Ok((
            Some(SecurityProfile { localhost_ref: file.to_owned(), ..profile(ProfileType::Localhost) }),
            format!("localhost/{file}"),
        )),
        ("Localhost", None) => Err(ConfigError("missing localhost apparmor profile name".to_owned())),
        (other, _) => Err(ConfigError(format!("unknown apparmor profile type: {other:?}"))),
    }
}

fn apparmor_annotation(text: &str) -> Option<(&str, Option<&str>)> {
    match text {
        "runtime/default" => Some(("RuntimeDefault", None)),
        "unconfined" => Some(("Unconfined", None)),
        other => other.strip_prefix("localhost/").map(|file| ("Localhost", Some(file))),
    }
}

fn masked_paths(settings: &Settings) -> Vec<String> {
    MASKED_PATHS
        .iter()
        .map(|&path| path.to_owned())
        .chain(settings.node.thermal_throttle_paths.iter().cloned())
        .collect()
}

fn selinux(options: &SELinuxOptions) -> SeLinuxOption {
    SeLinuxOption {
        user: options.user.clone().unwrap_or_default(),
        role: options.role.clone().unwrap_or_default(),
        r#type: options.type_.clone().unwrap_or_default(),
        level: options.level.clone().unwrap_or_default(),
    }
}

fn profile(kind: ProfileType) -> SecurityProfile {
    SecurityProfile { profile_type: kind.into(), localhost_ref: String::new() }
}

fn int64(value: i64) -> Int64Value {
    Int64Value { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(spec: &str) -> Pod {
        serde_json::from_str(&format!(r#"{{"metadata":{{"name":"p","namespace":"n"}},"spec":{spec}}}"#)).unwrap()
    }

    fn context(spec: &str, user: &ImageUser) -> LinuxContainerSecurityContext {
        let pod = pod(spec);
        let spec = pod.spec.as_ref().unwrap();
        of_container(&pod, spec, &spec.containers[0], user, &Settings::for_node("n")).unwrap()
    }

    #[test]
    fn container_security_context_overrides_the_pods() {
        let made = context(
            r#"{"hostNetwork":true,"shareProcessNamespace":true,
                "securityContext":{"runAsUser":1,"runAsGroup":2,"fsGroup":3,"supplementalGroups":[4,5],"seccompProfile":{"type":"RuntimeDefault"}},
                "containers":[{"name":"c","securityContext":{"runAsUser":9,"privileged":true,"allowPrivilegeEscalation":false,
                    "readOnlyRootFilesystem":true,"capabilities":{"add":["NET_ADMIN"],"drop":["ALL"]},
                    "seccompProfile":{"type":"Localhost","localhostProfile":"a/b.json"}}}]}"#,
            &ImageUser::Uid(7),
        );
        insta::assert_debug_snapshot!((
            &made.run_as_user, &made.run_as_group, &made.supplemental_groups, &made.capabilities, &made.seccomp,
            &made.namespace_options, made.privileged, made.no_new_privs, made.readonly_rootfs, made.masked_paths.len(),
        ), @r#"
        (
            Some(
                Int64Value {
                    value: 9,
                },
            ),
            Some(
                Int64Value {
                    value: 2,
                },
            ),
            [
                3,
                4,
                5,
            ],
            Some(
                Capability {
                    add_capabilities: [
                        "NET_ADMIN",
                    ],
                    drop_capabilities: [
                        "ALL",
                    ],
                    add_ambient_capabilities: [],
                },
            ),
            Some(
                SecurityProfile {
                    profile_type: Localhost,
                    localhost_ref: "/var/lib/kubelet/seccomp/a/b.json",
                },
            ),
            Some(
                NamespaceOption {
                    network: Node,
                    pid: Pod,
                    ipc: Pod,
                    target_id: "",
                    userns_options: None,
                },
            ),
            true,
            true,
            true,
            12,
        )
        "#);
    }

    #[test]
    fn local_seccomp_profile_without_a_name_is_refused() {
        for profile in [r#"{"type":"Localhost"}"#, r#"{"type":"Localhost","localhostProfile":""}"#] {
            let pod =
                pod(&format!(r#"{{"containers":[{{"name":"c","securityContext":{{"seccompProfile":{profile}}}}}]}}"#));
            let spec = pod.spec.as_ref().unwrap();
            let made = of_container(&pod, spec, &spec.containers[0], &ImageUser::Unset, &Settings::for_node("n"));
            assert!(made.unwrap_err().0.starts_with("localhostProfile must be set"), "{profile}");
        }
    }

    #[test]
    fn image_user_is_used_without_run_as_user() {
        let bare = r#"{"containers":[{"name":"c"}]}"#;
        let who = |user: &ImageUser| {
            let made = context(bare, user);
            (made.run_as_user.map(|user| user.value), made.run_as_username)
        };
        assert_eq!(who(&ImageUser::Unset), (Some(0), String::new()));
        assert_eq!(who(&ImageUser::Uid(7)), (Some(7), String::new()));
        assert_eq!(who(&ImageUser::Name("www".to_owned())), (None, "www".to_owned()));
    }

    #[test]
    fn run_as_non_root_is_enforced_with_upstreams_errors() {
        let check = |context: &str, user: ImageUser| {
            let pod = pod(&format!(r#"{{"securityContext":{context},"containers":[{{"name":"c"}}]}}"#));
            let container = &pod.spec.as_ref().unwrap().containers[0];
            verify_run_as_non_root(&pod, &"u".into(), container, &user).map_err(|error| error.0)
        };
        let required = r#"{"runAsNonRoot":true}"#;
        assert_eq!(check("{}", ImageUser::Unset), Ok(()));
        assert_eq!(check(required, ImageUser::Uid(1)), Ok(()));
        assert_eq!(check(r#"{"runAsNonRoot":true,"runAsUser":5}"#, ImageUser::Unset), Ok(()));
        assert_eq!(
            check(r#"{"runAsNonRoot":true,"runAsUser":0}"#, ImageUser::Unset),
            Err("container's runAsUser breaks non-root policy (pod: \"p_n(u)\", container: c)".to_owned())
        );
        assert_eq!(
            check(required, ImageUser::Unset),
            Err("container has runAsNonRoot and image will run as root (pod: \"p_n(u)\", container: c)".to_owned())
        );
        assert_eq!(
            check(required, ImageUser::Name("www".to_owned())),
            Err("container has runAsNonRoot and image has non-numeric user (www), cannot verify user is non-root \
                 (pod: \"p_n(u)\", container: c)"
                .to_owned())
        );
    }

    #[test]
    fn unmasked_proc_hides_nothing() {
        let made = context(
            r#"{"hostUsers":false,"containers":[{"name":"c","securityContext":{"procMount":"Unmasked"}}]}"#,
            &ImageUser::Unset,
        );
        assert!(made.masked_paths.is_empty() && made.readonly_paths.is_empty());
    }
}
