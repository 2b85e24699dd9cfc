//! Security contexts.
//!
//! Upstream: validatePodSpecSecurityContext, ValidateSecurityContext, validateSysctls, validateHostUsers.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{AppArmorProfile, PodSpec, SeccompProfile, SecurityContext, Sysctl};

use super::{FieldError, Path, descending_path, names, one_of, quoted};
use crate::container::is_host_network;

pub(super) fn pod(spec: &PodSpec, path: &Path, problems: &mut Vec<FieldError>) {
    if spec.host_users == Some(false) {
        for (field, is_set) in
            [("hostPID", spec.host_pid), ("hostIPC", spec.host_ipc), ("hostNetwork", spec.host_network)]
        {
            if is_set == Some(true) {
                problems.push(FieldError::forbidden(&path.child(field), "when `hostUsers` is false"));
            }
        }
    }
    if spec.share_process_namespace == Some(true) && spec.host_pid == Some(true) {
        let why = "ShareProcessNamespace and HostPID cannot both be enabled";
        problems.push(FieldError::invalid(&path.child("shareProcessNamespace"), true, why));
    }
    let Some(context) = &spec.security_context else { return };
    let path = path.child("securityContext");
    id(context.fs_group, &path.child("fsGroup"), problems);
    id(context.run_as_user, &path.child("runAsUser"), problems);
    id(context.run_as_group, &path.child("runAsGroup"), problems);
    for (index, group) in context.supplemental_groups.iter().flatten().enumerate() {
        id(Some(*group), &path.child("supplementalGroups").index(index), problems);
    }
    sysctls(context.sysctls.as_deref().unwrap_or_default(), spec, &path.child("sysctls"), problems);
    if let Some(policy) = &context.fs_group_change_policy {
        one_of(Some(policy), &["Always", "OnRootMismatch"], &path.child("fsGroupChangePolicy"), problems);
    }
    if let Some(policy) = &context.supplemental_groups_policy {
        one_of(Some(policy), &["Merge", "Strict"], &path.child("supplementalGroupsPolicy"), problems);
    }
    seccomp(context.seccomp_profile.as_ref(), &path.child("seccompProfile"), problems);
    app_armor(context.app_armor_profile.as_ref(), &path.child("appArmorProfile"), problems);
}

pub(super) fn container(context: &SecurityContext, spec: &PodSpec, path: &Path, problems: &mut Vec<FieldError>) {
    id(context.run_as_user, &path.child("runAsUser"), problems);
    id(context.run_as_group, &path.child("runAsGroup"), problems);
    if let Some(kind) = &context.proc_mount {
        let field = path.child("procMount");
        one_of(Some(kind), &["Default", "Unmasked"], &field, problems);
        if kind == "Unmasked" && spec.host_users != Some(false) {
            let why = "`hostUsers` must be false to use `Unmasked`";
            problems.push(FieldError::invalid(&field, quoted(kind), why));
        }
    }
    seccomp(context.seccomp_profile.as_ref(), &path.child("seccompProfile"), problems);
    app_armor(context.app_armor_profile.as_ref(), &path.child("appArmorProfile"), problems);
    if context.allow_privilege_escalation != Some(false) {
        return;
    }
    if context.privileged == Some(true) {
        let why = "cannot set `allowPrivilegeEscalation` to false and `privileged` to true";
        problems.push(FieldError::forbidden(path, why));
    }
    let added = context.capabilities.as_ref().and_then(|capabilities| capabilities.add.as_ref());
    if added.is_some_and(|added| added.iter().any(|capability| capability == "CAP_SYS_ADMIN")) {
        let why = "cannot set `allowPrivilegeEscalation` to false and `capabilities.Add` CAP_SYS_ADMIN";
        problems.push(FieldError::forbidden(path, why));
    }
}

fn id(id: Option<i64>, field: &Path, problems: &mut Vec<FieldError>) {
    if let Some(id) = id.filter(|id| !(0..=i64::from(i32::MAX)).contains(id)) {
        problems.push(FieldError::invalid(field, id, "must be between 0 and 2147483647, inclusive"));
    }
}

fn sysctls(sysctls: &[Sysctl], spec: &PodSpec, path: &Path, problems: &mut Vec<FieldError>) {
    let mut known = BTreeSet::new();
    for (index, Sysctl { name, .. }) in sysctls.iter().enumerate() {
        let field = path.index(index).child("name");
        if name.is_empty() {
            problems.push(FieldError::required(&field, ""));
        } else if !names::is_sysctl(name) {
            let (limit, regex) = (names::MAX_SYSCTL_BYTES, names::SYSCTL);
            let why = format!("must have at most {limit} characters and match regex {regex}");
            problems.push(FieldError::invalid(&field, quoted(name), &why));
        } else if !known.insert(name) {
            problems.push(FieldError::duplicate(&field, quoted(name)));
        }
        let dotted = name.replace('/', ".");
        if is_host_network(spec) && dotted.starts_with("net.") {
            let why = "may not be specified when 'hostNetwork' is true";
            problems.push(FieldError::invalid(&field, quoted(name), why));
        }
        let of_ipc = ["kernel.sem", "kernel.shm", "kernel.msg", "fs.mqueue."];
        if spec.host_ipc == Some(true) && of_ipc.iter().any(|prefix| dotted.starts_with(prefix)) {
            problems.push(FieldError::invalid(&field, quoted(name), "may not be specified when 'hostIPC' is true"));
        }
    }
}

const PROFILE_TYPES: [&str; 3] = ["Localhost", "RuntimeDefault", "Unconfined"];

fn seccomp(profile: Option<&SeccompProfile>, path: &Path, problems: &mut Vec<FieldError>) {
    let Some(profile) = profile else { return };
    one_of(Some(&profile.type_), &PROFILE_TYPES, &path.child("type"), problems);
    let field = path.child("localhostProfile");
    match (&profile.localhost_profile, profile.type_.as_str()) {
        (None, "Localhost") => {
            problems.push(FieldError::required(&field, "must be set when seccomp type is Localhost"));
        }
        (Some(file), "Localhost") => descending_path(file, &field, problems),
        (Some(file), _) => {
            problems.push(FieldError::invalid(&field, quoted(file), "can only be set when seccomp type is Localhost"));
        }
        (None, _) => {}
    }
}

fn app_armor(profile: Option<&AppArmorProfile>, path: &Path, problems: &mut Vec<FieldError>) {
    let Some(profile) = profile else { return };
    one_of(Some(&profile.type_), &PROFILE_TYPES, &path.child("type"), problems);
    let field = path.child("localhostProfile");
    match (&profile.localhost_profile, profile.type_.as_str()) {
        (None, "Localhost") => {
            problems.push(FieldError::required(&field, "must be set when AppArmor type is Localhost"));
        }
        (Some(name), "Localhost") if name.trim() != name => {
            problems.push(FieldError::invalid(&field, quoted(name), "must not be padded with whitespace"));
        }
        (Some(name), "Localhost") if name.is_empty() => {
            problems.push(FieldError::required(&field, "must be set when AppArmor type is Localhost"));
        }
        (Some(_), "Localhost") | (None, _) => {}
        (Some(name), _) => {
            problems.push(FieldError::invalid(&field, quoted(name), "can only be set when AppArmor type is Localhost"));
        }
    }
}
