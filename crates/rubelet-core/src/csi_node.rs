//! What a CSI driver that registers changes in the API: the Node's annotation and labels, and the CSINode object.
//!
//! Owns: which plugin is accepted, and the next versions of both objects. Never: calls a driver or the API.
//! Upstream: `pkg/volume/csi/nodeinfomanager`, `RegistrationHandler.ValidatePlugin`.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Component, Path, PathBuf},
    time::Duration,
};

use k8s_openapi::{
    api::{
        core::v1::Node,
        storage::v1::{CSIDriver, CSINode, CSINodeDriver, CSINodeSpec, VolumeNodeResources},
    },
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference},
};
use serde_json::{Value, json};

/// The one type of plugin that this agent accepts.
pub const CSI_PLUGIN_TYPE: &str = "CSIPlugin";
/// Of a driver's name: CSI's limit.
const MAX_NAME_BYTES: usize = 63;
/// Maps each driver to what it calls this node.
const NODE_ID_ANNOTATION: &str = "csi.volume.kubernetes.io/nodeid";
const MIGRATED_ANNOTATION: &str = "storage.alpha.kubernetes.io/migrated-plugins";
/// The kinds of volumes in Kubernetes that are served by CSI drivers today, sorted.
const MIGRATED_PLUGINS: [&str; 7] = [
    "kubernetes.io/aws-ebs",
    "kubernetes.io/azure-disk",
    "kubernetes.io/azure-file",
    "kubernetes.io/cinder",
    "kubernetes.io/gce-pd",
    "kubernetes.io/portworx-volume",
    "kubernetes.io/vsphere-volume",
];

/// A plugin's GetInfo response.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PluginInfo {
    pub kind: String,
    pub name: String,
    /// Empty: the socket that was asked.
    pub endpoint: String,
    pub versions: Vec<String>,
}

/// A plugin that may register.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcceptedPlugin {
    pub name: String,
    pub endpoint: PathBuf,
    pub version: DriverVersion,
}

/// The highest version of CSI that a driver supports; it is shown as the driver wrote it, without a `v`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DriverVersion(Vec<u64>);

/// A driver's NodeGetInfo response.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverOnNode {
    pub name: String,
    pub node_id: String,
    /// How many volumes it can attach here; `None`: no limit.
    pub max_volumes: Option<i64>,
    pub topology: BTreeMap<String, String>,
}

/// Accepts a plugin, or says why not, as its owner is told. `registered` is the version of the driver that has the name.
pub fn accept(
    info: &PluginInfo,
    socket: &Path,
    registered: impl FnOnce(&str) -> Option<DriverVersion>,
) -> Result<AcceptedPlugin, String> {
    let PluginInfo { kind, name, endpoint, versions } = info;
    if kind != CSI_PLUGIN_TYPE {
        let socket = socket.display();
        return Err(format!(
            "RegisterPlugin error -- no handler registered for plugin type: {kind} at socket {socket}"
        ));
    }
    let endpoint = if endpoint.is_empty() { socket.to_owned() } else { PathBuf::from(endpoint) };
    let refused = |why: String| {
        let endpoint = endpoint.display();
        let why = format!("validation failed for CSI Driver {name} at endpoint {endpoint}: {why}");
        Err(format!("RegisterPlugin error -- plugin validation failed with err: {why}"))
    };
    if !is_driver_name(name) {
        return refused(format!("{name:?} is not a name of a CSI driver"));
    }
    if !endpoint.is_absolute() || endpoint.components().any(|part| part == Component::ParentDir) {
        return refused("the endpoint must be an absolute path without ..".to_owned());
    }
    let failed = format!("kubernetes.io/csi: ValidatePlugin for CSI driver {name:?} failed.");
    if versions.is_empty() {
        return refused(format!("{failed} Plugin returned an empty list for supported versions"));
    }
    let version = match DriverVersion::highest(versions) {
        Ok(version) => version,
        Err(why) => {
            return refused(format!("{failed} None of the versions specified {versions:?} are supported. err={why}"));
        }
    };
    match registered(name) {
        Some(known) if known >= version => refused(format!(
            "{failed} Another driver with the same name is already registered with a higher supported version: \"{known}\""
        )),
        _ => Ok(AcceptedPlugin { name: name.clone(), endpoint, version }),
    }
}

/// CSI's rule: it becomes part of paths and of object names.
fn is_driver_name(name: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.';
    let ends = [name.bytes().next(), name.bytes().next_back()];
    name.len() <= MAX_NAME_BYTES
        && name.bytes().all(is_inner)
        && ends.iter().all(|end| end.is_some_and(|byte| byte.is_ascii_alphanumeric()))
}

impl DriverVersion {
    /// Of those with major version 0 or 1, which must be 1: later ones need not be compatible.
    fn highest(versions: &[String]) -> Result<Self, String> {
        let known =
            versions.iter().filter_map(|text| DriverVersion::parse(text)).filter(|version| version.major() <= 1);
        let Some(highest) = known.max() else {
            return Err(format!(
                "could not find a highest supported version from versions ([{}]) reported by this driver",
                versions.join(" ")
            ));
        };
        if highest.major() != 1 {
            return Err(format!("highest supported version reported by driver is {highest}, must be v1.x"));
        }
        Ok(highest)
    }

    /// `1.2`, `v1.2.3`, with or without a suffix.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim().trim_start_matches('v');
        let digits = text.find(|at: char| !at.is_ascii_digit() && at != '.').map_or(text, |end| &text[..end]);
        let parts: Option<Vec<u64>> = digits.trim_end_matches('.').split('.').map(|part| part.parse().ok()).collect();
        parts.filter(|parts| parts.len() >= 2).map(DriverVersion)
    }

    fn major(&self) -> u64 {
        self.0.first().copied().unwrap_or(0)
    }
}

impl std::fmt::Display for DriverVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts: Vec<_> = self.0.iter().map(u64::to_string).collect();
        f.write_str(&parts.join("."))
    }
}

/// The merge patch that adds the driver to the Node object; `None` if it has it. A label that has another value is an error.
pub fn node_patch_with(node: &Node, driver: &DriverOnNode) -> Result<Option<Value>, String> {
    if driver.node_id.is_empty() {
        return Err("error adding CSI driver node info: driverNodeID must not be empty".to_owned());
    }
    let no_labels = BTreeMap::new();
    let labels = node.metadata.labels.as_ref().unwrap_or(&no_labels);
    for (key, value) in &driver.topology {
        if let Some(known) = labels.get(key).filter(|known| *known != value) {
            return Err(format!(
                "detected topology value collision: driver reported {key:?}:{value:?} but existing label is {key:?}:{known:?}"
            ));
        }
    }
    let mut metadata = serde_json::Map::new();
    let missing: BTreeMap<_, _> = driver.topology.iter().filter(|(key, _)| !labels.contains_key(*key)).collect();
    if !missing.is_empty() {
        metadata.insert("labels".to_owned(), json!(missing));
    }
    let mut ids = node_ids(node)?;
    if ids.insert(driver.name.clone(), driver.node_id.clone()).as_ref() != Some(&driver.node_id) {
        metadata.insert("annotations".to_owned(), json!({NODE_ID_ANNOTATION: json!(ids).to_string()}));
    }
    Ok((!metadata.is_empty()).then(|| json!({"metadata": metadata})))
}

/// The merge patch that removes the driver from the Node object; `None` if it does not have it. Labels stay: volumes may have
/// been made for them.
pub fn node_patch_without(node: &Node, driver: &str) -> Result<Option<Value>, String> {
    let mut ids = node_ids(node)?;
    if ids.remove(driver).is_none() {
        return Ok(None);
    }
    let left = if ids.is_empty() { Value::Null } else { json!(json!(ids).to_string()) };
    Ok(Some(json!({"metadata": {"annotations": {NODE_ID_ANNOTATION: left}}})))
}

fn node_ids(node: &Node) -> Result<BTreeMap<String, String>, String> {
    let known = node.metadata.annotations.as_ref().and_then(|annotations| annotations.get(NODE_ID_ANNOTATION));
    let Some(text) = known.filter(|text| !text.is_empty()) else { return Ok(BTreeMap::new()) };
    let parsed: Result<Option<_>, _> = serde_json::from_str(text);
    parsed.map(Option::unwrap_or_default).map_err(|error| {
        format!("failed to parse node's {NODE_ID_ANNOTATION:?} annotation value ({text:?}) err={error}")
    })
}

/// A CSINode object without drivers.
pub fn initial(node_name: &str, node_uid: &str) -> CSINode {
    let owner = OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: node_name.to_owned(),
        uid: node_uid.to_owned(),
        ..OwnerReference::default()
    };
    let annotations = BTreeMap::from([(MIGRATED_ANNOTATION.to_owned(), MIGRATED_PLUGINS.join(","))]);
    CSINode {
        metadata: ObjectMeta {
            name: Some(node_name.to_owned()),
            annotations: Some(annotations),
            owner_references: Some(vec![owner]),
            ..ObjectMeta::default()
        },
        spec: CSINodeSpec { drivers: Vec::new() },
    }
}

/// Whether the object is of this Node, and not of an earlier one with the same name.
pub fn is_of_node(object: &CSINode, node_name: &str, node_uid: &str) -> bool {
    let mut owners = object.metadata.owner_references.iter().flatten();
    owners.any(|owner| owner.kind == "Node" && owner.name == node_name && owner.uid == node_uid)
}

/// The object with the annotation of this version; `None` if it has it.
pub fn annotated(object: &CSINode) -> Option<CSINode> {
    let known = object.metadata.annotations.as_ref().and_then(|annotations| annotations.get(MIGRATED_ANNOTATION));
    let known: BTreeSet<&str> = known.map(|text| text.split(',').collect()).unwrap_or_default();
    if known == BTreeSet::from(MIGRATED_PLUGINS) {
        return None;
    }
    let mut object = object.clone();
    let annotations = object.metadata.annotations.get_or_insert_default();
    annotations.insert(MIGRATED_ANNOTATION.to_owned(), MIGRATED_PLUGINS.join(","));
    Some(object)
}

/// The object with the driver; `None` if it has it as it is.
pub fn with_driver(object: &CSINode, driver: &DriverOnNode) -> Option<CSINode> {
    let count = driver.max_volumes.filter(|count| *count > 0);
    let count = count.map(|count| i32::try_from(count).unwrap_or(i32::MAX));
    let entry = CSINodeDriver {
        name: driver.name.clone(),
        node_id: driver.node_id.clone(),
        topology_keys: Some(driver.topology.keys().cloned().collect()),
        allocatable: count.map(|count| VolumeNodeResources { count: Some(count) }),
    };
    let annotated = annotated(object);
    let same = |known: &CSINodeDriver| {
        let keys = |driver: &CSINodeDriver| driver.topology_keys.iter().flatten().cloned().collect::<BTreeSet<_>>();
        let count = |driver: &CSINodeDriver| driver.allocatable.as_ref().and_then(|resources| resources.count);
        known.name == entry.name
            && known.node_id == entry.node_id
            && keys(known) == keys(&entry)
            && count(known) == count(&entry)
    };
    if annotated.is_none() && object.spec.drivers.iter().any(same) {
        return None;
    }
    let mut object = annotated.unwrap_or_else(|| object.clone());
    object.spec.drivers.retain(|known| known.name != driver.name);
    object.spec.drivers.push(entry);
    Some(object)
}

/// How often the driver is asked how many volumes it can have here; `None`: only when it registers.
pub fn update_period(driver: &CSIDriver) -> Option<Duration> {
    let secs = driver.spec.node_allocatable_update_period_seconds?;
    u64::try_from(secs).ok().filter(|secs| *secs > 0).map(Duration::from_secs)
}

/// The object without the driver; `None` if it does not have it.
pub fn without_driver(object: &CSINode, driver: &str) -> Option<CSINode> {
    object.spec.drivers.iter().any(|known| known.name == driver).then(|| {
        let mut object = object.clone();
        object.spec.drivers.retain(|known| known.name != driver);
        object
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(name: &str, endpoint: &str, versions: &[&str]) -> PluginInfo {
        PluginInfo {
            kind: CSI_PLUGIN_TYPE.to_owned(),
            name: name.to_owned(),
            endpoint: endpoint.to_owned(),
            versions: versions.iter().map(ToString::to_string).collect(),
        }
    }

    #[test]
    fn a_plugin_is_accepted_or_told_why_not() {
        let long = "d".repeat(64);
        let rows = [
            info("d.example.com", "", &["1.0.0"]),
            info("d.example.com", "/var/lib/kubelet/plugins/d/csi.sock", &["0.3.0", "v1.4.0", "2.0.0", "1.10"]),
            info("d", "/x/../etc/csi.sock", &["1.0.0"]),
            info("d", "csi.sock", &["1.0.0"]),
            info("../d", "", &["1.0.0"]),
            info("", "", &["1.0.0"]),
            info(&long, "", &["1.0.0"]),
            info("d", "", &[]),
            info("d", "", &["0.3.0"]),
            info("d", "", &["2.0.0", "next"]),
            info("known", "", &["1.2.0"]),
            info("known", "", &["1.3.0"]),
            PluginInfo { kind: "DevicePlugin".to_owned(), ..info("d", "", &["v1beta1"]) },
        ];
        let registered = |name: &str| DriverVersion::parse("1.2.0").filter(|_| name == "known");
        let lines: Vec<_> = rows
            .iter()
            .map(|info| match accept(info, Path::new("/r/d-reg.sock"), registered) {
                Ok(accepted) => format!("{} {} {}", accepted.name, accepted.endpoint.display(), accepted.version),
                Err(why) => why,
            })
            .collect();
        insta::assert_snapshot!(lines.join("\n"), @r#"
        d.example.com /r/d-reg.sock 1.0.0
        d.example.com /var/lib/kubelet/plugins/d/csi.sock 1.10
        RegisterPlugin error -- plugin validation failed with err: validation failed for CSI Driver d at endpoint /x/../etc/csi.sock: the endpoint must be an absolute path without ..
        RegisterPlugin error -- plugin validation failed with err: validation failed for CSI Driver d at endpoint csi.sock: the endpoint must be an absolute path without ..
        RegisterPlugin error -- plugin validation failed with err: validation failed for CSI Driver ../d at endpoint /r/d-reg.sock: "../d" is not a name of a CSI driver
        RegisterPlugin error -- plugin validation failed with err: validation failed for CSI Driver  at endpoint /r/d-reg.sock: "" is not a name of a CSI driver
        RegisterPlugin error -- plugin validation failed with err: validation failed for CSI Driver dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd at endpoint /r/d-reg.sock: "dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd" is not a name of a CSI driver
        RegisterPlugin error -- plugin validation failed with err: validation failed for CSI Driver d at endpoint /r/d-reg.sock: kubernetes.io/csi: ValidatePlugin for CSI driver "d" failed. Plugin returned an empty list for supported versions
        RegisterPlugin error -- plugin validation failed with err: validation failed for CSI Driver d at endpoint /r/d-reg.sock: kubernetes.io/csi: ValidatePlugin for CSI driver "d" failed. None of the versions specified ["0.3.0"] are supported. err=highest supported version reported by driver is 0.3.0, must be v1.x
        RegisterPlugin error -- plugin validation failed with err: validation failed for CSI Driver d at endpoint /r/d-reg.sock: kubernetes.io/csi: ValidatePlugin for CSI driver "d" failed. None of the versions specified ["2.0.0", "next"] are supported. err=could not find a highest supported version from versions ([2.0.0 next]) reported by this driver
        RegisterPlugin error -- plugin validation failed with err: validation failed for CSI Driver known at endpoint /r/d-reg.sock: kubernetes.io/csi: ValidatePlugin for CSI driver "known" failed. Another driver with the same name is already registered with a higher supported version: "1.2.0"
        known /r/d-reg.sock 1.3.0
        RegisterPlugin error -- no handler registered for plugin type: DevicePlugin at socket /r/d-reg.sock
        "#);
    }

    fn driver(name: &str) -> DriverOnNode {
        let topology = BTreeMap::from([("z/zone".to_owned(), "a".to_owned()), ("h/host".to_owned(), "n".to_owned())]);
        DriverOnNode { name: name.to_owned(), node_id: format!("{name}-id"), max_volumes: Some(3), topology }
    }

    fn node(metadata: &Value) -> Node {
        serde_json::from_value(json!({"metadata": metadata})).unwrap()
    }

    #[test]
    fn node_gets_the_drivers_name_for_it_and_the_topology_labels() {
        let show = |patch: Result<Option<Value>, String>| match patch {
            Ok(patch) => patch.map_or("nothing".to_owned(), |patch| patch.to_string()),
            Err(error) => error,
        };
        let both = json!({
            "annotations": {"csi.volume.kubernetes.io/nodeid": r#"{"d":"d-id","e":"x"}"#},
            "labels": {"z/zone": "a", "h/host": "n"},
        });
        let lines = [
            show(node_patch_with(&node(&json!({})), &driver("d"))),
            show(node_patch_with(&node(&both), &driver("d"))),
            show(node_patch_with(&node(&both), &driver("e"))),
            show(node_patch_with(&node(&json!({"labels": {"z/zone": "b"}})), &driver("d"))),
            show(node_patch_with(&node(&json!({})), &DriverOnNode::default())),
            show(node_patch_with(
                &node(&json!({"annotations": {"csi.volume.kubernetes.io/nodeid": "["}})),
                &driver("d"),
            )),
            show(node_patch_without(&node(&both), "d")),
            show(node_patch_without(&node(&both), "f")),
            show(node_patch_without(
                &node(&json!({"annotations": {"csi.volume.kubernetes.io/nodeid": r#"{"d":"d-id"}"#}})),
                "d",
            )),
        ];
        insta::assert_snapshot!(lines.join("\n"), @r#"
        {"metadata":{"annotations":{"csi.volume.kubernetes.io/nodeid":"{\"d\":\"d-id\"}"},"labels":{"h/host":"n","z/zone":"a"}}}
        nothing
        {"metadata":{"annotations":{"csi.volume.kubernetes.io/nodeid":"{\"d\":\"d-id\",\"e\":\"e-id\"}"}}}
        detected topology value collision: driver reported "z/zone":"a" but existing label is "z/zone":"b"
        error adding CSI driver node info: driverNodeID must not be empty
        failed to parse node's "csi.volume.kubernetes.io/nodeid" annotation value ("[") err=invalid type: sequence, expected a map at line 1 column 0
        {"metadata":{"annotations":{"csi.volume.kubernetes.io/nodeid":"{\"e\":\"x\"}"}}}
        nothing
        {"metadata":{"annotations":{"csi.volume.kubernetes.io/nodeid":null}}}
        "#);
    }

    #[test]
    fn csi_node_lists_each_driver_once() {
        let made = initial("n1", "u1");
        assert!(is_of_node(&made, "n1", "u1"));
        assert!(!is_of_node(&made, "n1", "u2"), "a node that was made anew owns nothing of the old one");
        assert_eq!(annotated(&made), None);
        let one = with_driver(&made, &driver("d")).expect("it is new");
        assert_eq!(with_driver(&one, &driver("d")), None);
        let fewer = with_driver(&one, &DriverOnNode { max_volumes: None, ..driver("d") }).expect("the limit changed");
        assert_eq!(fewer.spec.drivers.len(), 1);
        assert_eq!(fewer.spec.drivers[0].allocatable, None);
        let huge = with_driver(&made, &DriverOnNode { max_volumes: Some(i64::MAX), ..driver("d") }).unwrap();
        assert_eq!(huge.spec.drivers[0].allocatable.as_ref().unwrap().count, Some(i32::MAX));
        insta::assert_snapshot!(serde_json::to_string(&one).unwrap(), @r#"{"apiVersion":"storage.k8s.io/v1","kind":"CSINode","metadata":{"annotations":{"storage.alpha.kubernetes.io/migrated-plugins":"kubernetes.io/aws-ebs,kubernetes.io/azure-disk,kubernetes.io/azure-file,kubernetes.io/cinder,kubernetes.io/gce-pd,kubernetes.io/portworx-volume,kubernetes.io/vsphere-volume"},"name":"n1","ownerReferences":[{"apiVersion":"v1","kind":"Node","name":"n1","uid":"u1"}]},"spec":{"drivers":[{"allocatable":{"count":3},"name":"d","nodeID":"d-id","topologyKeys":["h/host","z/zone"]}]}}"#);
        assert_eq!(without_driver(&one, "d").map(|object| object.spec.drivers), Some(Vec::new()));
        assert_eq!(without_driver(&one, "e"), None);
        let mut old = one;
        old.metadata.annotations = None;
        assert!(annotated(&old).is_some() && with_driver(&old, &driver("d")).is_some());
    }
}
