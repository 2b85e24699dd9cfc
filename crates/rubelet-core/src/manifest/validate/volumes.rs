//! Volumes and where containers mount them.
//!
//! Upstream: ValidateVolumes, ValidateVolumeMounts.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Container, PodSpec, Volume, VolumeMount};
use serde_json::Value;

use super::{
    FieldError, PULL_POLICIES, Path, descending_path, invalid, names, no_backsteps, one_of, quoted, resources,
};

/// Checks the pod's volumes; returns the names of the valid ones, which mounts may refer to.
pub(super) fn volumes<'a>(spec: &'a PodSpec, path: &Path, problems: &mut Vec<FieldError>) -> BTreeSet<&'a str> {
    let mut known = BTreeSet::new();
    for (index, volume) in spec.volumes.iter().flatten().enumerate() {
        let path = path.index(index);
        let name_path = path.child("name");
        let before = problems.len();
        source(volume, &path, problems);
        if volume.name.is_empty() {
            problems.push(FieldError::required(&name_path, ""));
        } else {
            invalid(&name_path, &volume.name, &names::dns_label(&volume.name), problems);
        }
        if known.contains(volume.name.as_str()) {
            problems.push(FieldError::duplicate(&name_path, quoted(&volume.name)));
        }
        if problems.len() == before {
            known.insert(volume.name.as_str());
        }
    }
    known
}

fn source(volume: &Volume, path: &Path, problems: &mut Vec<FieldError>) {
    let Ok(Value::Object(fields)) = serde_json::to_value(volume) else { return };
    let mut types: Vec<&str> = fields.keys().map(String::as_str).filter(|name| *name != "name").collect();
    types.sort_by_key(|name| (*name != "emptyDir", *name != "hostPath", *name));
    for surplus in types.iter().skip(1) {
        problems.push(FieldError::forbidden(&path.child(surplus), "may not specify more than 1 volume type"));
    }
    if let Some(limit) = volume.empty_dir.as_ref().and_then(|empty_dir| empty_dir.size_limit.as_ref()) {
        resources::amount(limit, &path.child("emptyDir").child("sizeLimit"), problems);
    }
    if let Some(image) = volume.image.as_ref().filter(|_| types.first() == Some(&"image")) {
        let path = path.child("image");
        if image.reference.as_deref().is_none_or(str::is_empty) {
            problems.push(FieldError::required(&path.child("reference"), ""));
        }
        one_of(image.pull_policy.as_deref(), &PULL_POLICIES, &path.child("pullPolicy"), problems);
    }
    if let Some(host_path) = &volume.host_path {
        let path = path.child("hostPath");
        if host_path.path.is_empty() {
            problems.push(FieldError::required(&path.child("path"), ""));
            return;
        }
        no_backsteps(&host_path.path, &path.child("path"), problems);
        let types =
            ["", "BlockDevice", "CharDevice", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket"];
        let kind = host_path.type_.as_deref().unwrap_or_default();
        if !types.contains(&kind) {
            problems.push(FieldError::unsupported(&path.child("type"), kind, &types));
        }
    }
}

pub(super) fn mounts(container: &Container, volumes: &BTreeSet<&str>, path: &Path, problems: &mut Vec<FieldError>) {
    let mut mount_paths = BTreeSet::new();
    for (index, mount) in container.volume_mounts.iter().flatten().enumerate() {
        let path = path.index(index);
        if mount.name.is_empty() {
            problems.push(FieldError::required(&path.child("name"), ""));
        }
        if !volumes.contains(mount.name.as_str()) {
            problems.push(FieldError::not_found(&path.child("name"), &mount.name));
        }
        if mount.mount_path.is_empty() {
            problems.push(FieldError::required(&path.child("mountPath"), ""));
        }
        if !mount_paths.insert(mount.mount_path.as_str()) {
            problems.push(FieldError::invalid(&path.child("mountPath"), quoted(&mount.mount_path), "must be unique"));
        }
        sub_path(mount, &path, problems);
        propagation(mount, container, &path, problems);
    }
}

fn sub_path(mount: &VolumeMount, path: &Path, problems: &mut Vec<FieldError>) {
    let [sub_path, expression] =
        [&mount.sub_path, &mount.sub_path_expr].map(|text| text.as_deref().unwrap_or_default());
    descending_path(sub_path, &path.child("subPath"), problems);
    descending_path(expression, &path.child("subPathExpr"), problems);
    if !sub_path.is_empty() && !expression.is_empty() {
        let why = "subPathExpr and subPath are mutually exclusive";
        problems.push(FieldError::invalid(&path.child("subPathExpr"), quoted(expression), why));
    }
}

fn propagation(mount: &VolumeMount, container: &Container, path: &Path, problems: &mut Vec<FieldError>) {
    let field = path.child("mountPropagation");
    if let Some(mode) = &mount.mount_propagation {
        one_of(Some(mode), &["Bidirectional", "HostToContainer", "None"], &field, problems);
        let is_privileged = container.security_context.as_ref().is_some_and(|context| context.privileged == Some(true));
        if mode == "Bidirectional" && !is_privileged {
            let why = "Bidirectional mount propagation is available only to privileged containers";
            problems.push(FieldError::forbidden(&field, why));
        }
    }
    let field = path.child("recursiveReadOnly");
    match mount.recursive_read_only.as_deref() {
        None | Some("Disabled") => {}
        Some("Enabled" | "IfPossible") => {
            if mount.read_only != Some(true) {
                problems.push(FieldError::forbidden(&field, "may only be specified when readOnly is true"));
            }
            if mount.mount_propagation.as_deref().is_some_and(|mode| mode != "None") {
                let why = "may only be specified when mountPropagation is None or not specified";
                problems.push(FieldError::forbidden(&field, why));
            }
        }
        Some(other) => problems.push(FieldError::unsupported(&field, other, &["Disabled", "Enabled", "IfPossible"])),
    }
}
