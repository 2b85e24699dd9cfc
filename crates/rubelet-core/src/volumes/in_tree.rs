//! Kinds of volumes that the node mounts itself, without a driver.
//!
//! Owns: which of them a persistent volume, or a volume of a pod, is. Never: mounts it.
//! Upstream: the plugins of `pkg/volume` beside `csi`.

use std::path::PathBuf;

use k8s_openapi::api::core::v1::{PersistentVolumeSpec, Volume};

use super::{
    claims::{PersistentKind, PersistentSource},
    fc::FcVolume,
    flex::FlexVolume,
    host_path_type,
    iscsi::IscsiVolume,
    local::LocalVolume,
    nfs::NfsVolume,
};

/// Whether users may choose options of the mount.
pub fn takes_mount_options(spec: &PersistentVolumeSpec) -> bool {
    let is_disk = spec.local.is_some() || spec.iscsi.is_some() || spec.fc.is_some();
    spec.csi.is_some() || spec.nfs.is_some() || is_disk
}

/// The kind of a persistent volume without a driver, or why it cannot be used. `namespace` is that of its claim.
pub fn kind(
    name: &str,
    spec: &PersistentVolumeSpec,
    namespace: &str,
    mount_options: &[String],
) -> Result<PersistentKind, String> {
    if let Some(source) = &spec.host_path {
        let Some(must_be) = host_path_type(source) else {
            let unknown = source.type_.as_deref().unwrap_or_default();
            return Err(format!("hostPath.type {unknown} is not supported"));
        };
        return Ok(PersistentKind::HostPath { path: PathBuf::from(&source.path), must_be });
    }
    if let Some(source) = &spec.local {
        return Ok(PersistentKind::Local(LocalVolume::new(source, mount_options)));
    }
    if let Some(source) = &spec.nfs {
        return Ok(PersistentKind::Nfs(NfsVolume::new(source, mount_options)));
    }
    if let Some(source) = &spec.iscsi {
        return iscsi(IscsiVolume::persistent(source, namespace, mount_options));
    }
    if let Some(source) = &spec.fc {
        return FcVolume::new(source, mount_options).map(PersistentKind::Fc);
    }
    if let Some(source) = &spec.flex_volume {
        return FlexVolume::persistent(source, namespace).map(PersistentKind::Flex);
    }
    Err(format!("the kind of PV {name} is not supported yet"))
}

/// The volume as a device for containers.
pub fn as_block(name: &str, kind: PersistentKind) -> Result<PersistentKind, String> {
    match kind {
        PersistentKind::Local(volume) => Ok(PersistentKind::Local(LocalVolume { is_block: true, ..volume })),
        PersistentKind::Iscsi(volume) => Ok(PersistentKind::Iscsi(IscsiVolume { is_block: true, ..volume })),
        PersistentKind::Fc(volume) => Ok(PersistentKind::Fc(FcVolume { is_block: true, ..volume })),
        PersistentKind::Csi(_) | PersistentKind::HostPath { .. } | PersistentKind::Nfs(_) | PersistentKind::Flex(_) => {
            Err(format!("PV {name} cannot be used as a block volume: its kind has no device"))
        }
    }
}

fn iscsi(volume: IscsiVolume) -> Result<PersistentKind, String> {
    match volume.problem() {
        Some(problem) => Err(problem),
        None => Ok(PersistentKind::Iscsi(volume)),
    }
}

/// A volume that the pod's spec describes fully.
pub fn is_inline(volume: &Volume) -> bool {
    volume.nfs.is_some() || volume.iscsi.is_some() || volume.fc.is_some() || volume.flex_volume.is_some()
}

/// What it is, or why it cannot be used; `None` for a volume of another kind.
pub fn inline(volume: &Volume, namespace: &str) -> Result<Option<PersistentSource>, String> {
    let (kind, read_only) = if let Some(source) = &volume.nfs {
        (PersistentKind::Nfs(NfsVolume::new(source, &[])), source.read_only)
    } else if let Some(source) = &volume.iscsi {
        (iscsi(IscsiVolume::inline(source, namespace))?, source.read_only)
    } else if let Some(source) = &volume.fc {
        (PersistentKind::Fc(FcVolume::new(source, &[])?), source.read_only)
    } else if let Some(source) = &volume.flex_volume {
        (PersistentKind::Flex(FlexVolume::inline(source, namespace)?), source.read_only)
    } else {
        return Ok(None);
    };
    let (name, read_only) = (volume.name.clone(), read_only.unwrap_or(false));
    Ok(Some(PersistentSource { name, read_only, is_exclusive: false, kind, size: None, group: None }))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn volume_of_a_pod_is_read_from_its_spec() {
        let read = |volume: Value| {
            let volume = serde_json::from_value(volume).unwrap();
            assert!(is_inline(&volume) || volume.empty_dir.is_some());
            inline(&volume, "prod").unwrap().map(|source| {
                let path = source.path(Path::new("/pod"));
                format!("{} {} {}", source.plugin(), path.display(), source.read_only)
            })
        };
        let nfs = json!({"name": "v", "nfs": {"server": "s", "path": "/", "readOnly": true}});
        assert_eq!(read(nfs).as_deref(), Some("kubernetes.io/nfs /pod/volumes/kubernetes.io~nfs/v true"));
        let iscsi =
            json!({"name": "v", "iscsi": {"targetPortal": "10.0.0.1", "iqn": "iqn.2001-04.com.example:a", "lun": 0}});
        assert_eq!(read(iscsi).as_deref(), Some("kubernetes.io/iscsi /pod/volumes/kubernetes.io~iscsi/v false"));
        let fc = json!({"name": "v", "fc": {"wwids": ["3600508b4"], "readOnly": true}});
        assert_eq!(read(fc).as_deref(), Some("kubernetes.io/fc /pod/volumes/kubernetes.io~fc/v true"));
        let flex = json!({"name": "v", "flexVolume": {"driver": "vendor/cifs"}});
        assert_eq!(read(flex).as_deref(), Some("vendor/cifs /pod/volumes/vendor~cifs/v false"));
        assert_eq!(read(json!({"name": "v", "emptyDir": {}})), None);
    }
}
