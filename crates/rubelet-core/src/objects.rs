//! API objects that pods use: config maps, secrets, services, runtime classes, CSI drivers.
//!
//! Owns: their names, the fields that are kept, and upstream's texts for a missing one. Never: reads them; the shell gathers
//! them, and every builder gets what was gathered.
//! Upstream: `pkg/kubelet/configmap`, `pkg/kubelet/secret`.

use std::{collections::BTreeMap, fmt, sync::Arc};

use k8s_openapi::api::{core::v1 as api, node::v1 as node_api, storage::v1 as storage_api};

use crate::volumes::trust_bundles;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ObjectKind {
    ConfigMap,
    Secret,
    RuntimeClass,
    CsiDriver,
    ClusterTrustBundle,
    /// All bundles of one signer, whose name is the key's.
    TrustBundlesOfSigner,
}

impl ObjectKind {
    fn is_trust_bundle(self) -> bool {
        matches!(self, ObjectKind::ClusterTrustBundle | ObjectKind::TrustBundlesOfSigner)
    }

    /// As the API writes it.
    fn word(self) -> &'static str {
        match self {
            ObjectKind::ConfigMap => "ConfigMap",
            ObjectKind::Secret => "Secret",
            ObjectKind::RuntimeClass => "RuntimeClass",
            ObjectKind::CsiDriver => "CSIDriver",
            ObjectKind::ClusterTrustBundle => "ClusterTrustBundle",
            ObjectKind::TrustBundlesOfSigner => "ClusterTrustBundles of signer",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectKey {
    pub kind: ObjectKind,
    /// Empty for cluster-scoped objects.
    pub namespace: String,
    pub name: String,
}

impl ObjectKey {
    pub fn config_map(namespace: &str, name: &str) -> Self {
        ObjectKey { kind: ObjectKind::ConfigMap, namespace: namespace.to_owned(), name: name.to_owned() }
    }

    pub fn secret(namespace: &str, name: &str) -> Self {
        ObjectKey { kind: ObjectKind::Secret, namespace: namespace.to_owned(), name: name.to_owned() }
    }

    /// `None` where the pod names none, which means the runtime's default.
    pub fn runtime_class(spec: &api::PodSpec) -> Option<Self> {
        let name = spec.runtime_class_name.clone().filter(|name| !name.is_empty())?;
        Some(ObjectKey { kind: ObjectKind::RuntimeClass, namespace: String::new(), name })
    }

    pub fn csi_driver(name: &str) -> Self {
        ObjectKey { kind: ObjectKind::CsiDriver, namespace: String::new(), name: name.to_owned() }
    }

    pub fn cluster_trust_bundle(name: &str) -> Self {
        ObjectKey { kind: ObjectKind::ClusterTrustBundle, namespace: String::new(), name: name.to_owned() }
    }

    pub fn trust_bundles_of_signer(signer: &str) -> Self {
        ObjectKey { kind: ObjectKind::TrustBundlesOfSigner, namespace: String::new(), name: signer.to_owned() }
    }

    pub fn is_trust_bundle(&self) -> bool {
        self.kind.is_trust_bundle()
    }

    /// The error when it does not exist.
    pub fn not_found(&self) -> ObjectError {
        let kind = match self.kind {
            ObjectKind::ConfigMap => "configmap",
            ObjectKind::Secret => "secret",
            ObjectKind::RuntimeClass => "runtimeclass.node.k8s.io",
            ObjectKind::CsiDriver => "csidriver.storage.k8s.io",
            ObjectKind::ClusterTrustBundle | ObjectKind::TrustBundlesOfSigner => {
                "clustertrustbundle.certificates.k8s.io"
            }
        };
        ObjectError { kind: ObjectErrorKind::NotFound, message: format!("{kind} {:?} not found", self.name) }
    }

    /// The error when a volume refers to a key it does not have.
    pub fn no_such_key(&self, key: &str) -> String {
        match self.kind {
            ObjectKind::ConfigMap => format!("configmap references non-existent config key: {key}"),
            ObjectKind::Secret => format!("references non-existent secret key: {key}"),
            ObjectKind::RuntimeClass
            | ObjectKind::CsiDriver
            | ObjectKind::ClusterTrustBundle
            | ObjectKind::TrustBundlesOfSigner => {
                format!("{} {:?} has no {key}", self.kind.word(), self.name)
            }
        }
    }

    /// The object is not among the pod's needs. Upstream's text.
    pub fn not_registered(&self) -> ObjectError {
        let message = format!("object {:?}/{:?} not registered", self.namespace, self.name);
        ObjectError { kind: ObjectErrorKind::Unreadable, message }
    }

    /// The error on a standalone node.
    pub fn standalone(&self) -> ObjectError {
        if self.is_trust_bundle() {
            // Also where the gate is off.
            let message = "ClusterTrustBundle projection is not supported in static kubelet mode".to_owned();
            return ObjectError { kind: ObjectErrorKind::Unreadable, message };
        }
        let kind = match self.kind {
            ObjectKind::ConfigMap => "configMap",
            ObjectKind::Secret => "secret",
            ObjectKind::RuntimeClass
            | ObjectKind::CsiDriver
            | ObjectKind::ClusterTrustBundle
            | ObjectKind::TrustBundlesOfSigner => self.kind.word(),
        };
        let message = format!("couldn't get {kind} {}/{}, no kubeClient defined", self.namespace, self.name);
        ObjectError { kind: ObjectErrorKind::Unreadable, message }
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}/{}", self.kind.word(), self.namespace, self.name)
    }
}

/// The fields of an object that are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Object {
    ConfigMap(ConfigMap),
    Secret(Secret),
    RuntimeClass(RuntimeClass),
    CsiDriver(CsiDriver),
    /// By name: one, or all of a signer.
    TrustBundles(BTreeMap<String, TrustBundle>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrustBundle {
    pub labels: BTreeMap<String, String>,
    pub pem: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConfigMap {
    pub data: Data,
    /// In volumes only, not in environments.
    pub binary_data: Data,
    pub is_immutable: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Secret {
    pub secret_type: String,
    pub data: Data,
    pub is_immutable: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeClass {
    pub handler: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CsiDriver {
    pub volume_lifecycle_modes: Vec<String>,
}

/// Values by key.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Data(pub BTreeMap<String, Vec<u8>>);

static NO_DATA: Data = Data(BTreeMap::new());

/// Keys only: values are secrets, and never in a log.
impl fmt::Debug for Data {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl Object {
    /// From the body of a response or a watch event.
    pub fn read(kind: ObjectKind, body: &[u8]) -> Result<Self, serde_json::Error> {
        Ok(match kind {
            ObjectKind::ConfigMap => Object::ConfigMap(serde_json::from_slice::<api::ConfigMap>(body)?.into()),
            ObjectKind::Secret => Object::Secret(serde_json::from_slice::<api::Secret>(body)?.into()),
            ObjectKind::RuntimeClass => {
                let class: node_api::RuntimeClass = serde_json::from_slice(body)?;
                Object::RuntimeClass(RuntimeClass { handler: class.handler })
            }
            ObjectKind::CsiDriver => {
                let spec = serde_json::from_slice::<storage_api::CSIDriver>(body)?.spec;
                let volume_lifecycle_modes = spec.volume_lifecycle_modes.unwrap_or_default();
                Object::CsiDriver(CsiDriver { volume_lifecycle_modes })
            }
            ObjectKind::ClusterTrustBundle | ObjectKind::TrustBundlesOfSigner => {
                Object::TrustBundles(BTreeMap::from([trust_bundles::read(body)?]))
            }
        })
    }

    /// What a volume or an environment can use of it, by key. A runtime class and a CSI driver have none.
    pub fn data(&self) -> &BTreeMap<String, Vec<u8>> {
        match self {
            Object::ConfigMap(ConfigMap { data, .. }) | Object::Secret(Secret { data, .. }) => &data.0,
            Object::RuntimeClass(_) | Object::CsiDriver(_) | Object::TrustBundles(_) => &NO_DATA.0,
        }
    }

    /// What only a volume can use of it, by key.
    pub fn binary_data(&self) -> &BTreeMap<String, Vec<u8>> {
        match self {
            Object::ConfigMap(config_map) => &config_map.binary_data.0,
            Object::Secret(_) | Object::RuntimeClass(_) | Object::CsiDriver(_) | Object::TrustBundles(_) => &NO_DATA.0,
        }
    }

    /// A runtime class's handler cannot change either; but a class that was deleted may come back with another.
    pub fn is_immutable(&self) -> bool {
        match self {
            Object::ConfigMap(ConfigMap { is_immutable, .. }) | Object::Secret(Secret { is_immutable, .. }) => {
                *is_immutable
            }
            Object::RuntimeClass(_) | Object::CsiDriver(_) | Object::TrustBundles(_) => false,
        }
    }
}

impl From<api::ConfigMap> for ConfigMap {
    fn from(config_map: api::ConfigMap) -> Self {
        let data = config_map.data.into_iter().flatten().map(|(key, value)| (key, value.into_bytes()));
        let binary_data = config_map.binary_data.into_iter().flatten().map(|(key, value)| (key, value.0));
        ConfigMap {
            data: Data(data.collect()),
            binary_data: Data(binary_data.collect()),
            is_immutable: config_map.immutable.unwrap_or(false),
        }
    }
}

impl From<api::Secret> for Secret {
    fn from(secret: api::Secret) -> Self {
        Secret {
            secret_type: secret.type_.unwrap_or_default(),
            data: Data(secret.data.into_iter().flatten().map(|(key, value)| (key, value.0)).collect()),
            is_immutable: secret.immutable.unwrap_or(false),
        }
    }
}

/// Why an object is not available.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectError {
    pub kind: ObjectErrorKind,
    pub message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectErrorKind {
    /// An optional reference is skipped.
    NotFound,
    /// Whether it exists is not known.
    Unreadable,
}

pub type Lookup = Result<Arc<Object>, ObjectError>;

/// The gathered objects and errors.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Objects(pub BTreeMap<ObjectKey, Lookup>);

impl Objects {
    /// The result for every key on a standalone node.
    pub fn standalone(keys: impl IntoIterator<Item = ObjectKey>) -> Self {
        let unreadable = |key: ObjectKey| {
            let error = key.standalone();
            (key, Err(error))
        };
        Objects(keys.into_iter().map(unreadable).collect())
    }

    /// `None`: it does not exist, and is optional.
    pub fn find(&self, key: &ObjectKey, presence: Presence) -> Result<Option<&Object>, ObjectError> {
        match self.0.get(key) {
            Some(Ok(object)) => Ok(Some(object)),
            Some(Err(error)) if error.kind == ObjectErrorKind::NotFound && presence == Presence::Optional => Ok(None),
            Some(Err(error)) => Err(error.clone()),
            None => Err(ObjectError { kind: ObjectErrorKind::Unreadable, message: format!("{key} was not gathered") }),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    Required,
    Optional,
}

impl From<Option<bool>> for Presence {
    fn from(optional: Option<bool>) -> Self {
        if optional == Some(true) { Presence::Optional } else { Presence::Required }
    }
}

/// The fields of a service that environments use. Only services with a cluster IP are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    pub cluster_ip: String,
    pub ports: Vec<ServicePort>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    /// Empty for the only port of a service.
    pub name: String,
    pub port: i32,
    pub protocol: String,
}

impl Service {
    /// `None` for a service without a cluster IP or without a port.
    pub fn of(service: &api::Service) -> Option<Self> {
        let spec = service.spec.as_ref()?;
        let cluster_ip = spec.cluster_ip.clone().filter(|ip| !ip.is_empty() && ip != "None")?;
        let ports: Vec<_> = spec.ports.iter().flatten().map(ServicePort::of).collect();
        (!ports.is_empty()).then_some(Service { cluster_ip, ports })
    }
}

impl ServicePort {
    fn of(port: &api::ServicePort) -> Self {
        let protocol = port.protocol.as_deref().filter(|protocol| !protocol.is_empty()).unwrap_or("TCP");
        ServicePort { name: port.name.clone().unwrap_or_default(), port: port.port, protocol: protocol.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(kind: ObjectKind, body: &serde_json::Value) -> Object {
        Object::read(kind, body.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn objects_keep_used_fields_and_debug_hides_values() {
        let secret = json!({"metadata": {"name": "s", "labels": {"a": "b"}}, "data": {"k": "c2VjcmV0"}, "immutable": true, "type": "t"});
        let config_map = json!({"data": {"a": "value"}, "binaryData": {"b": "/w=="}});
        let class = json!({"metadata": {"name": "c"}, "handler": "gvisor"});
        let driver = json!({"metadata": {"name": "d"}, "spec": {"volumeLifecycleModes": ["Persistent", "Ephemeral"]}});
        let objects = [
            (ObjectKind::Secret, secret),
            (ObjectKind::ConfigMap, config_map),
            (ObjectKind::RuntimeClass, class),
            (ObjectKind::CsiDriver, driver),
        ]
        .map(|(kind, body)| read(kind, &body));
        insta::assert_snapshot!(objects.each_ref().map(|object| format!("{object:?}")).join("\n"), @r#"
        Secret(Secret { secret_type: "t", data: {"k"}, is_immutable: true })
        ConfigMap(ConfigMap { data: {"a"}, binary_data: {"b"}, is_immutable: false })
        RuntimeClass(RuntimeClass { handler: "gvisor" })
        CsiDriver(CsiDriver { volume_lifecycle_modes: ["Persistent", "Ephemeral"] })
        "#);
        assert_eq!(objects[0].data()["k"], b"secret");
        assert_eq!(objects[1].data()["a"], b"value");
        assert_eq!(objects[1].binary_data()["b"], [0xff]);
        assert_eq!(objects.map(|object| object.is_immutable()), [true, false, false, false]);
    }

    #[test]
    fn only_optional_objects_may_be_not_found() {
        let (gone, hidden) = (ObjectKey::config_map("n", "gone"), ObjectKey::secret("n", "hidden"));
        let unreadable = ObjectError { kind: ObjectErrorKind::Unreadable, message: "forbidden".to_owned() };
        let objects =
            Objects(BTreeMap::from([(gone.clone(), Err(gone.not_found())), (hidden.clone(), Err(unreadable.clone()))]));
        assert_eq!(objects.find(&gone, Presence::Optional), Ok(None));
        assert_eq!(objects.find(&gone, Presence::Required).unwrap_err().message, r#"configmap "gone" not found"#);
        assert_eq!(objects.find(&hidden, Presence::Optional), Err(unreadable));
    }

    #[test]
    fn services_without_an_address_are_not_kept() {
        let of = |spec: serde_json::Value| {
            Service::of(&serde_json::from_value(json!({"metadata": {"name": "s"}, "spec": spec})).unwrap())
        };
        let port = json!([{"port": 80}]);
        assert_eq!(of(json!({"clusterIP": "None", "ports": port})), None);
        assert_eq!(of(json!({"type": "ExternalName", "externalName": "x"})), None);
        let service = of(json!({"clusterIP": "10.0.0.1", "ports": port})).unwrap();
        assert_eq!(service.ports, [ServicePort { name: String::new(), port: 80, protocol: "TCP".to_owned() }]);
    }
}
