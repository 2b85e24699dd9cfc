//! Kinds of volumes that moved out of Kubernetes into CSI drivers: cloud disks and shares.
//!
//! Owns: the CSI volume that each stands for.
//! Upstream: `csi-translation-lib`, `pkg/volume/csimigration`.

use std::{borrow::Cow, collections::BTreeMap};

use k8s_openapi::api::core::v1::{
    AWSElasticBlockStoreVolumeSource, AzureDiskVolumeSource, CSIPersistentVolumeSource, GCEPersistentDiskVolumeSource,
    PersistentVolume, PersistentVolumeSpec, SecretReference, Volume,
};

use super::{
    csi::AccessMode,
    topology::{self, Keys, ZONE_DELIMITER},
};

const AWS: &str = "ebs.csi.aws.com";
const AZURE_DISK: &str = "disk.csi.azure.com";
const AZURE_FILE: &str = "file.csi.azure.com";
const CINDER: &str = "cinder.csi.openstack.org";
const GCE: &str = "pd.csi.storage.gke.io";
const PORTWORX: &str = "pxd.portworx.com";
const VSPHERE: &str = "csi.vsphere.vmware.com";

/// Of a disk whose place is not known.
const UNSPECIFIED: &str = "UNSPECIFIED";
/// In the order in which they name the zone of a disk in its handle.
const ZONE_LABELS: [&str; 2] = ["failure-domain.beta.kubernetes.io/zone", "topology.kubernetes.io/zone"];
const AZURE_RESOURCE_GROUP: &str = "kubernetes.io/azure-file-resource-group";
const PORTWORX_SECRET_NAME: &str = "openstorage.io/auth-secret-name";
const PORTWORX_SECRET_NAMESPACE: &str = "openstorage.io/auth-secret-namespace";

/// The persistent volume with a CSI source in place of one that moved. Others stay as they are.
pub fn persistent_volume(volume: &PersistentVolume) -> Result<Cow<'_, PersistentVolume>, String> {
    let Some(spec) = &volume.spec else { return Ok(Cow::Borrowed(volume)) };
    let Some(source) = csi_source(volume, spec).map_err(|why| failed(&why))? else { return Ok(Cow::Borrowed(volume)) };
    let mut translated = volume.clone();
    let driver_keys = keys_of(&source.driver);
    if let Some(spec) = &mut translated.spec {
        if spec.gce_persistent_disk.is_some() {
            spec.access_modes = spec.access_modes.as_deref().map(gce_access_modes);
        }
        spec.csi = Some(source);
    }
    if let Some(keys) = driver_keys {
        topology::translate(&mut translated, &keys);
    }
    Ok(Cow::Owned(translated))
}

/// A driver's topology keys. Shares are to be had everywhere, and Azure's disks keep their labels, as upstream.
fn keys_of(driver: &str) -> Option<Keys> {
    let (zone, region) = match driver {
        AWS => ("topology.ebs.csi.aws.com/zone", None),
        CINDER => ("topology.cinder.csi.openstack.org/zone", None),
        GCE => ("topology.gke.io/zone", None),
        VSPHERE => ("topology.csi.vmware.com/zone", Some("topology.csi.vmware.com/region")),
        _ => return None,
    };
    Some(Keys { zone, region })
}

/// What a volume of a pod stands for, if its kind moved. It is staged like a persistent volume.
#[derive(Clone, Debug, PartialEq)]
pub struct InlineVolume {
    /// As of a persistent volume, unique per disk.
    pub name: String,
    pub source: CSIPersistentVolumeSource,
    pub access_mode: AccessMode,
}

/// The driver of a volume of a pod whose kind moved; `None` for another kind.
pub fn inline_driver(volume: &Volume) -> Option<&'static str> {
    let drivers = [
        (volume.aws_elastic_block_store.is_some(), AWS),
        (volume.azure_disk.is_some(), AZURE_DISK),
        (volume.azure_file.is_some(), AZURE_FILE),
        (volume.cinder.is_some(), CINDER),
        (volume.gce_persistent_disk.is_some(), GCE),
        (volume.portworx_volume.is_some(), PORTWORX),
        (volume.vsphere_volume.is_some(), VSPHERE),
    ];
    drivers.into_iter().find_map(|(is_it, driver)| is_it.then_some(driver))
}

/// `None` for a volume whose kind did not move.
pub fn inline(volume: &Volume, namespace: &str) -> Result<Option<InlineVolume>, String> {
    inline_volume(volume, namespace).map_err(|why| failed(&why))
}

fn failed(why: &str) -> String {
    format!("failed to translate in-tree pv to CSI: {why}")
}

fn inline_volume(volume: &Volume, namespace: &str) -> Result<Option<InlineVolume>, String> {
    let made = |name: String, source, access_mode| Ok(Some(InlineVolume { name, source, access_mode }));
    let reading = |read_only: Option<bool>| match read_only {
        Some(true) => AccessMode::ReadOnlyMany,
        Some(false) | None => AccessMode::ReadWriteOnce,
    };
    if let Some(disk) = &volume.aws_elastic_block_store {
        let source = aws(disk)?;
        return made(format!("{AWS}-{}", source.volume_handle), source, AccessMode::ReadWriteOnce);
    }
    if let Some(disk) = &volume.azure_disk {
        return made(disk.disk_uri.clone(), azure_disk(disk)?, AccessMode::ReadWriteOnce);
    }
    if let Some(share) = &volume.azure_file {
        let namespace = if namespace.is_empty() { "default" } else { namespace };
        let place = AzureShare { group: "", volume: &volume.name, namespace, secret: &share.secret_name };
        let source = place.source(&share.share_name, share.read_only);
        return made(source.volume_handle.clone(), source, AccessMode::ReadWriteMany);
    }
    if let Some(disk) = &volume.cinder {
        let source = csi(CINDER, disk.volume_id.clone(), disk.fs_type.as_ref(), disk.read_only);
        return made(format!("{CINDER}-{}", disk.volume_id), source, AccessMode::ReadWriteOnce);
    }
    if let Some(disk) = &volume.gce_persistent_disk {
        let handle = format!("projects/{UNSPECIFIED}/zones/{UNSPECIFIED}/disks/{}", disk.pd_name);
        return made(format!("{GCE}-{}", disk.pd_name), gce(disk, handle), reading(disk.read_only));
    }
    if let Some(disk) = &volume.portworx_volume {
        let source = csi(PORTWORX, disk.volume_id.clone(), disk.fs_type.as_ref(), None);
        return made(format!("{PORTWORX}-{}", disk.volume_id), source, reading(disk.read_only));
    }
    if let Some(disk) = &volume.vsphere_volume {
        let source = vsphere(&disk.volume_path, disk.fs_type.as_ref(), disk.storage_policy_name.as_ref());
        return made(format!("{VSPHERE}-{}", disk.volume_path), source, AccessMode::ReadWriteOnce);
    }
    Ok(None)
}

fn csi_source(
    volume: &PersistentVolume,
    spec: &PersistentVolumeSpec,
) -> Result<Option<CSIPersistentVolumeSource>, String> {
    Ok(Some(if let Some(disk) = &spec.aws_elastic_block_store {
        aws(disk)?
    } else if let Some(disk) = &spec.azure_disk {
        azure_disk(disk)?
    } else if let Some(share) = &spec.azure_file {
        let of_claim = spec.claim_ref.as_ref().and_then(|claim| claim.namespace.as_deref());
        let namespace = share.secret_namespace.as_deref().or(of_claim).filter(|namespace| !namespace.is_empty());
        let Some(namespace) = namespace else {
            return Err("could not find a secret namespace in PersistentVolumeSource or ClaimRef".to_owned());
        };
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        let group = annotation(volume, AZURE_RESOURCE_GROUP).unwrap_or_default();
        let place = AzureShare { group, volume: name, namespace, secret: &share.secret_name };
        place.source(&share.share_name, share.read_only)
    } else if let Some(disk) = &spec.cinder {
        csi(CINDER, disk.volume_id.clone(), disk.fs_type.as_ref(), disk.read_only)
    } else if let Some(disk) = &spec.gce_persistent_disk {
        gce(disk, gce_handle(volume, &disk.pd_name)?)
    } else if let Some(disk) = &spec.portworx_volume {
        let source = csi(PORTWORX, disk.volume_id.clone(), disk.fs_type.as_ref(), None);
        let (name, namespace) =
            (annotation(volume, PORTWORX_SECRET_NAME), annotation(volume, PORTWORX_SECRET_NAMESPACE));
        let secret = name.zip(namespace).map(|(name, namespace)| secret_reference(name, namespace));
        CSIPersistentVolumeSource {
            node_stage_secret_ref: secret.clone(),
            node_publish_secret_ref: secret.clone(),
            node_expand_secret_ref: secret,
            ..source
        }
    } else if let Some(disk) = &spec.vsphere_volume {
        vsphere(&disk.volume_path, disk.fs_type.as_ref(), disk.storage_policy_name.as_ref())
    } else {
        return Ok(None);
    }))
}

fn csi(driver: &str, handle: String, fs_type: Option<&String>, read_only: Option<bool>) -> CSIPersistentVolumeSource {
    CSIPersistentVolumeSource {
        driver: driver.to_owned(),
        volume_handle: handle,
        fs_type: fs_type.cloned(),
        read_only,
        volume_attributes: Some(BTreeMap::new()),
        ..CSIPersistentVolumeSource::default()
    }
}

fn with_attribute(mut source: CSIPersistentVolumeSource, key: &str, value: String) -> CSIPersistentVolumeSource {
    source.volume_attributes.get_or_insert_default().insert(key.to_owned(), value);
    source
}

fn annotation<'a>(volume: &'a PersistentVolume, key: &str) -> Option<&'a str> {
    volume.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

fn secret_reference(name: &str, namespace: &str) -> SecretReference {
    SecretReference { name: Some(name.to_owned()), namespace: Some(namespace.to_owned()) }
}

fn aws(disk: &AWSElasticBlockStoreVolumeSource) -> Result<CSIPersistentVolumeSource, String> {
    let handle = aws_volume_id(&disk.volume_id)?;
    let source = csi(AWS, handle, disk.fs_type.as_ref(), disk.read_only);
    Ok(with_attribute(source, "partition", disk.partition.unwrap_or(0).to_string()))
}

/// `aws://<zone>/<id>`, or the id alone.
fn aws_volume_id(id: &str) -> Result<String, String> {
    let Some(rest) = id.strip_prefix("aws://") else { return Ok(id.to_owned()) };
    let path = rest.split_once('/').map_or("", |(_zone, path)| path).trim_matches('/');
    if path.starts_with("vol-") && !path.contains('/') {
        return Ok(path.to_owned());
    }
    Err(format!("failed to translate Kubernetes ID to EBS Volume ID Invalid format for AWS volume ({id})"))
}

fn azure_disk(disk: &AzureDiskVolumeSource) -> Result<CSIPersistentVolumeSource, String> {
    const MANAGED: &str = "Managed";
    if let Some(kind) = disk.kind.as_ref().filter(|kind| !kind.eq_ignore_ascii_case(MANAGED)) {
        return Err(format!("kind({kind}) is not supported in csi migration"));
    }
    let mut source = csi(AZURE_DISK, disk.disk_uri.clone(), disk.fs_type.as_ref(), disk.read_only);
    source = with_attribute(source, "kind", MANAGED.to_owned());
    if let Some(mode) = disk.caching_mode.as_ref().filter(|mode| !mode.is_empty()) {
        source = with_attribute(source, "cachingmode", mode.clone());
    }
    if let Some(fs_type) = &disk.fs_type {
        source = with_attribute(source, "fstype", fs_type.clone());
    }
    Ok(source)
}

/// Where a share of files belongs.
struct AzureShare<'a> {
    group: &'a str,
    volume: &'a str,
    namespace: &'a str,
    secret: &'a str,
}

impl AzureShare<'_> {
    fn source(&self, share: &str, read_only: Option<bool>) -> CSIPersistentVolumeSource {
        let AzureShare { group, volume, namespace, secret } = self;
        let account = storage_account(secret);
        let handle = format!("{group}#{account}#{share}#{volume}#{namespace}");
        let source = csi(AZURE_FILE, handle, None, read_only);
        let source = with_attribute(source, "sharename", share.to_owned());
        CSIPersistentVolumeSource { node_stage_secret_ref: Some(secret_reference(secret, namespace)), ..source }
    }
}

/// From the name of its secret, which is `azure-storage-account-<account>-secret`, or any other.
fn storage_account(secret: &str) -> &str {
    let after = secret.split_once("azure-storage-account-").map(|(_, rest)| rest);
    let account = after.and_then(|rest| rest.rsplit_once("-secret")).map(|(account, _)| account);
    account.filter(|account| !account.is_empty()).unwrap_or(secret)
}

fn gce(disk: &GCEPersistentDiskVolumeSource, handle: String) -> CSIPersistentVolumeSource {
    let partition = disk.partition.filter(|number| *number != 0).map(|number| number.to_string());
    let source = csi(GCE, handle, disk.fs_type.as_ref(), disk.read_only);
    with_attribute(source, "partition", partition.unwrap_or_default())
}

/// A disk of several zones is one of their region.
fn gce_handle(volume: &PersistentVolume, disk: &str) -> Result<String, String> {
    let labels = volume.metadata.labels.as_ref();
    let mut of_label = ZONE_LABELS.iter().filter_map(|key| labels?.get(*key)).filter(|zones| !zones.is_empty());
    let zones: Vec<&str> = of_label.next().map(|zones| zones.split(ZONE_DELIMITER).collect()).unwrap_or_default();
    Ok(match zones[..] {
        [] => format!("projects/{UNSPECIFIED}/zones/{UNSPECIFIED}/disks/{disk}"),
        [zone] => format!("projects/{UNSPECIFIED}/zones/{zone}/disks/{disk}"),
        [first, ..] => {
            let region = region(first)?;
            for zone in &zones {
                if self::region(zone)? != region {
                    let all = zones.join(" ");
                    return Err(format!(
                        "failed to get region from zones: multiple or no regions gotten from zones, got: {all}"
                    ));
                }
            }
            format!("projects/{UNSPECIFIED}/regions/{region}/disks/{disk}")
        }
    })
}

fn region(zone: &str) -> Result<String, String> {
    match zone.split('-').collect::<Vec<_>>()[..] {
        [locale, region, _zone] => Ok(format!("{locale}-{region}")),
        _ => Err(format!(
            "failed to get region from zones: zone in unexpected format, expected: {{locale}}-{{region}}-{{zone}}, got: {zone}"
        )),
    }
}

/// As the old plugin, which attached every disk for one writer unless it was only read.
fn gce_access_modes(modes: &[String]) -> Vec<String> {
    let is_only_read = modes.iter().any(|mode| mode == "ReadOnlyMany")
        && !modes.iter().any(|mode| mode == "ReadWriteOnce" || mode == "ReadWriteMany");
    vec![if is_only_read { "ReadOnlyMany" } else { "ReadWriteOnce" }.to_owned()]
}

fn vsphere(path: &str, fs_type: Option<&String>, policy: Option<&String>) -> CSIPersistentVolumeSource {
    let source = csi(VSPHERE, path.to_owned(), fs_type, None);
    match policy.filter(|policy| !policy.is_empty()) {
        Some(policy) => with_attribute(source, "storagepolicyname", policy.clone()),
        None => source,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn shown(source: &CSIPersistentVolumeSource) -> String {
        let attributes = source.volume_attributes.clone().unwrap_or_default();
        let secret = source.node_stage_secret_ref.as_ref();
        let secret = secret.map(|it| format!("{:?}/{:?}", it.namespace, it.name)).unwrap_or_default();
        let (fs_type, read_only) = (source.fs_type.as_deref().unwrap_or("-"), source.read_only.unwrap_or(false));
        format!("{} {} {fs_type} {read_only} {attributes:?} {secret}", source.driver, source.volume_handle)
    }

    #[test]
    fn persistent_volume_that_moved_has_its_csi_source() {
        let translated = |metadata: Value, field: &str, source: Value| {
            let mut metadata = metadata;
            metadata["name"] = json!("pv");
            let modes = json!(["ReadWriteMany"]);
            let mut spec = json!({"accessModes": modes, "claimRef": {"namespace": "prod", "name": "c"}});
            spec[field] = source;
            let volume = serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap();
            match persistent_volume(&volume) {
                Ok(volume) => {
                    let spec = volume.spec.as_ref().expect("a spec");
                    format!("{} {:?}", shown(spec.csi.as_ref().expect("a source")), spec.access_modes.as_ref().unwrap())
                }
                Err(error) => error,
            }
        };
        let zones = |zones: &str| json!({"labels": {"topology.kubernetes.io/zone": zones}});
        let share = json!({"secretName": "azure-storage-account-a1-secret", "shareName": "s"});
        let grouped = json!({"annotations": {AZURE_RESOURCE_GROUP: "rg"}});
        let secret = json!({"annotations": {PORTWORX_SECRET_NAME: "n", PORTWORX_SECRET_NAMESPACE: "ns"}});
        let disk = json!({"pdName": "d", "partition": 2});
        let lines = [
            translated(json!({}), "awsElasticBlockStore", json!({"volumeID": "aws://z/vol-1", "fsType": "xfs"})),
            translated(json!({}), "awsElasticBlockStore", json!({"volumeID": "aws://z/disk"})),
            translated(json!({}), "azureDisk", json!({"diskName": "d", "diskURI": "/sub/d", "cachingMode": "None"})),
            translated(json!({}), "azureDisk", json!({"diskName": "d", "diskURI": "/sub/d", "kind": "Dedicated"})),
            translated(grouped, "azureFile", share),
            translated(json!({}), "azureFile", json!({"secretName": "x", "shareName": "s", "secretNamespace": "y"})),
            translated(json!({}), "cinder", json!({"volumeID": "c-1", "readOnly": true})),
            translated(json!({}), "gcePersistentDisk", disk.clone()),
            translated(zones("us-west1-a"), "gcePersistentDisk", disk.clone()),
            translated(zones("us-west1-a__us-west1-b"), "gcePersistentDisk", disk.clone()),
            translated(zones("us-west1-a__us-east1-b"), "gcePersistentDisk", disk),
            translated(secret, "portworxVolume", json!({"volumeID": "p-1", "fsType": "ext4"})),
            translated(json!({}), "vsphereVolume", json!({"volumePath": "[ds] v.vmdk", "storagePolicyName": "gold"})),
        ];
        insta::assert_snapshot!(lines.join("\n"), @r#"
        ebs.csi.aws.com vol-1 xfs false {"partition": "0"}  ["ReadWriteMany"]
        failed to translate in-tree pv to CSI: failed to translate Kubernetes ID to EBS Volume ID Invalid format for AWS volume (aws://z/disk)
        disk.csi.azure.com /sub/d - false {"cachingmode": "None", "kind": "Managed"}  ["ReadWriteMany"]
        failed to translate in-tree pv to CSI: kind(Dedicated) is not supported in csi migration
        file.csi.azure.com rg#a1#s#pv#prod - false {"sharename": "s"} Some("prod")/Some("azure-storage-account-a1-secret") ["ReadWriteMany"]
        file.csi.azure.com #x#s#pv#y - false {"sharename": "s"} Some("y")/Some("x") ["ReadWriteMany"]
        cinder.csi.openstack.org c-1 - true {}  ["ReadWriteMany"]
        pd.csi.storage.gke.io projects/UNSPECIFIED/zones/UNSPECIFIED/disks/d - false {"partition": "2"}  ["ReadWriteOnce"]
        pd.csi.storage.gke.io projects/UNSPECIFIED/zones/us-west1-a/disks/d - false {"partition": "2"}  ["ReadWriteOnce"]
        pd.csi.storage.gke.io projects/UNSPECIFIED/regions/us-west1/disks/d - false {"partition": "2"}  ["ReadWriteOnce"]
        failed to translate in-tree pv to CSI: failed to get region from zones: multiple or no regions gotten from zones, got: us-west1-a us-east1-b
        pxd.portworx.com p-1 ext4 false {} Some("ns")/Some("n") ["ReadWriteMany"]
        csi.vsphere.vmware.com [ds] v.vmdk - false {"storagepolicyname": "gold"}  ["ReadWriteMany"]
        "#);
        let local = json!({"metadata": {}, "spec": {"local": {"path": "/d"}}});
        let local = serde_json::from_value(local).unwrap();
        assert!(matches!(persistent_volume(&local), Ok(Cow::Borrowed(_))));
    }

    #[test]
    fn places_of_a_disk_that_moved_are_its_drivers() {
        let zone_of = |field: &str, source: Value| {
            let at = json!([{"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["z"]}]);
            let affinity = json!({"required": {"nodeSelectorTerms": [{"matchExpressions": at}]}});
            let mut spec = json!({"nodeAffinity": affinity, "claimRef": {"namespace": "prod", "name": "c"}});
            spec[field] = source;
            let volume = serde_json::from_value(json!({"metadata": {"name": "pv"}, "spec": spec})).unwrap();
            let translated = persistent_volume(&volume).unwrap();
            let translated = serde_json::to_value(&*translated).unwrap();
            let terms = &translated["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"];
            format!("{field}: {}", terms[0]["matchExpressions"][0]["key"])
        };
        let lines = [
            zone_of("awsElasticBlockStore", json!({"volumeID": "vol-1"})),
            zone_of("azureDisk", json!({"diskName": "d", "diskURI": "/sub/d"})),
            zone_of("azureFile", json!({"secretName": "x", "shareName": "s"})),
            zone_of("cinder", json!({"volumeID": "c-1"})),
            zone_of("gcePersistentDisk", json!({"pdName": "d"})),
            zone_of("portworxVolume", json!({"volumeID": "p-1"})),
            zone_of("vsphereVolume", json!({"volumePath": "[ds] v.vmdk"})),
            zone_of("local", json!({"path": "/d"})),
        ];
        insta::assert_snapshot!(lines.join("\n"), @r#"
        awsElasticBlockStore: "topology.ebs.csi.aws.com/zone"
        azureDisk: "topology.kubernetes.io/zone"
        azureFile: "topology.kubernetes.io/zone"
        cinder: "topology.cinder.csi.openstack.org/zone"
        gcePersistentDisk: "topology.gke.io/zone"
        portworxVolume: "topology.kubernetes.io/zone"
        vsphereVolume: "topology.csi.vmware.com/zone"
        local: "topology.kubernetes.io/zone"
        "#);
    }

    #[test]
    fn volume_of_a_pod_that_moved_is_named_after_its_disk() {
        let translated = |field: &str, source: Value| {
            let mut volume = json!({"name": "v"});
            volume[field] = source;
            let volume: Volume = serde_json::from_value(volume).unwrap();
            assert_eq!(inline_driver(&volume).is_some(), field != "emptyDir");
            match inline(&volume, "prod") {
                Ok(Some(InlineVolume { name, source, access_mode })) => {
                    format!("{name}: {} {access_mode:?}", shown(&source))
                }
                Ok(None) => "stays".to_owned(),
                Err(error) => error,
            }
        };
        let lines = [
            translated("awsElasticBlockStore", json!({"volumeID": "vol-1", "partition": 1})),
            translated("azureDisk", json!({"diskName": "d", "diskURI": "/sub/d", "fsType": "ext4", "readOnly": true})),
            translated("azureFile", json!({"secretName": "any", "shareName": "s"})),
            translated("cinder", json!({"volumeID": "c-1"})),
            translated("gcePersistentDisk", json!({"pdName": "d", "readOnly": true})),
            translated("portworxVolume", json!({"volumeID": "p-1"})),
            translated("vsphereVolume", json!({"volumePath": "[ds] v.vmdk"})),
            translated("emptyDir", json!({})),
        ];
        insta::assert_snapshot!(lines.join("\n"), @r#"
        ebs.csi.aws.com-vol-1: ebs.csi.aws.com vol-1 - false {"partition": "1"}  ReadWriteOnce
        /sub/d: disk.csi.azure.com /sub/d ext4 true {"fstype": "ext4", "kind": "Managed"}  ReadWriteOnce
        #any#s#v#prod: file.csi.azure.com #any#s#v#prod - false {"sharename": "s"} Some("prod")/Some("any") ReadWriteMany
        cinder.csi.openstack.org-c-1: cinder.csi.openstack.org c-1 - false {}  ReadWriteOnce
        pd.csi.storage.gke.io-d: pd.csi.storage.gke.io projects/UNSPECIFIED/zones/UNSPECIFIED/disks/d - true {"partition": ""}  ReadOnlyMany
        pxd.portworx.com-p-1: pxd.portworx.com p-1 - false {}  ReadWriteOnce
        csi.vsphere.vmware.com-[ds] v.vmdk: csi.vsphere.vmware.com [ds] v.vmdk - false {}  ReadWriteOnce
        stays
        "#);
    }
}
