//! The API's objects that pods are made of: config maps, secrets, services, runtime classes, CSI drivers.
//!
//! Owns: what they are called, what of them counts, and upstream's words for one that is missing. Never: reads them; the
//! shell gathers them, and every builder gets what was gathered.
//! Upstream: `pkg/kubelet/configmap`, `pkg/kubelet/secret`.

use std::{collections::BTreeMap, fmt, sync::Arc};

use k8s_openapi::api::{core::v1 as api, node::v1::RuntimeClass, storage::v1::CSIDriver};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ObjectKind {
    ConfigMap,
    Secret,
    RuntimeClass,
    CsiDriver,
}

impl ObjectKind {
    /// As the API writes it.
    fn word(self) -> &'static str {
        match self {
            ObjectKind::ConfigMap => "ConfigMap",
            ObjectKind::Secret => "Secret",
            ObjectKind::RuntimeClass => "RuntimeClass",
            ObjectKind::CsiDriver => "CSIDriver",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectKey {
    pub kind: ObjectKind,
    /// Empty for what belongs to the whole cluster.
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

    /// `None` where the pod names none, and the runtime's default is meant.
    pub fn runtime_class(spec: &api::PodSpec) -> Option<Self> {
        let name = spec.runtime_class_name.clone().filter(|name| !name.is_empty())?;
        Some(ObjectKey { kind: ObjectKind::RuntimeClass, namespace: String::new(), name })
    }

    pub fn csi_driver(name: &str) -> Self {
        ObjectKey { kind: ObjectKind::CsiDriver, namespace: String::new(), name: name.to_owned() }
    }

    /// What people are told when it is not there.
    pub fn not_found(&self) -> ObjectError {
        let kind = match self.kind {
            ObjectKind::ConfigMap => "configmap",
            ObjectKind::Secret => "secret",
            ObjectKind::RuntimeClass => "runtimeclass.node.k8s.io",
            ObjectKind::CsiDriver => "csidriver.storage.k8s.io",
        };
        ObjectError { kind: ObjectErrorKind::NotFound, message: format!("{kind} {:?} not found", self.name) }
    }

    /// What people are told when a volume wants a key of it that it does not have.
    pub fn no_such_key(&self, key: &str) -> String {
        match self.kind {
            ObjectKind::ConfigMap => format!("configmap references non-existent config key: {key}"),
            ObjectKind::Secret => format!("references non-existent secret key: {key}"),
            ObjectKind::RuntimeClass | ObjectKind::CsiDriver => {
                format!("{} {:?} has no {key}", self.kind.word(), self.name)
            }
        }
    }

    /// What people are told on a node that belongs to no cluster.
    pub fn standalone(&self) -> ObjectError {
        let kind = match self.kind {
            ObjectKind::ConfigMap => "configMap",
            ObjectKind::Secret => "secret",
            ObjectKind::RuntimeClass | ObjectKind::CsiDriver => self.kind.word(),
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

/// What of an object is kept.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Object {
    /// What an environment and a volume can have.
    pub data: BTreeMap<String, Vec<u8>>,
    /// What only a volume can have.
    pub binary_data: BTreeMap<String, Vec<u8>>,
    pub is_immutable: bool,
    /// Of a secret: what it says it holds.
    pub secret_type: String,
}

/// Values are secrets: never in a log.
impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys: Vec<_> = self.data.keys().chain(self.binary_data.keys()).collect();
        f.debug_struct("Object").field("keys", &keys).field("is_immutable", &self.is_immutable).finish()
    }
}

impl From<api::ConfigMap> for Object {
    fn from(config_map: api::ConfigMap) -> Self {
        let data = config_map.data.into_iter().flatten().map(|(key, value)| (key, value.into_bytes()));
        let binary_data = config_map.binary_data.into_iter().flatten().map(|(key, value)| (key, value.0));
        Object {
            data: data.collect(),
            binary_data: binary_data.collect(),
            is_immutable: config_map.immutable.unwrap_or(false),
            ..Object::default()
        }
    }
}

impl From<api::Secret> for Object {
    fn from(secret: api::Secret) -> Self {
        Object {
            data: secret.data.into_iter().flatten().map(|(key, value)| (key, value.0)).collect(),
            is_immutable: secret.immutable.unwrap_or(false),
            secret_type: secret.type_.unwrap_or_default(),
            ..Object::default()
        }
    }
}

/// The key under which a runtime class has the name of its handler.
pub const HANDLER: &str = "handler";

impl From<RuntimeClass> for Object {
    fn from(class: RuntimeClass) -> Self {
        let data = BTreeMap::from([(HANDLER.to_owned(), class.handler.into_bytes())]);
        // Its handler cannot change; but one that was deleted may come back with another.
        Object { data, ..Object::default() }
    }
}

/// The key under which a CSI driver has the kinds of volumes it is for, with a comma between them.
pub const LIFECYCLE_MODES: &str = "volumeLifecycleModes";

impl From<CSIDriver> for Object {
    fn from(driver: CSIDriver) -> Self {
        let modes = driver.spec.volume_lifecycle_modes.unwrap_or_default().join(",");
        Object { data: BTreeMap::from([(LIFECYCLE_MODES.to_owned(), modes.into_bytes())]), ..Object::default() }
    }
}

/// Why an object cannot be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectError {
    pub kind: ObjectErrorKind,
    pub message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectErrorKind {
    /// Who refers to it as optional can do without.
    NotFound,
    /// It may be there or not.
    Unreadable,
}

pub type Lookup = Result<Arc<Object>, ObjectError>;

/// What was gathered, good and bad.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Objects(pub BTreeMap<ObjectKey, Lookup>);

impl Objects {
    /// What a node without a cluster has of them.
    pub fn standalone(keys: impl IntoIterator<Item = ObjectKey>) -> Self {
        let unreadable = |key: ObjectKey| {
            let error = key.standalone();
            (key, Err(error))
        };
        Objects(keys.into_iter().map(unreadable).collect())
    }

    /// `None`: it is not there, and optional.
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

/// What of a service ends up in environments. Only services with an address of their own are kept.
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
    /// `None` for a service without an address, or without a port.
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

    #[test]
    fn only_data_is_kept_and_never_shown() {
        let secret: api::Secret = serde_json::from_value(
            json!({"metadata": {"name": "s", "labels": {"a": "b"}}, "data": {"k": "c2VjcmV0"}, "immutable": true}),
        )
        .unwrap();
        let object = Object::from(secret);
        assert_eq!(object.data["k"], b"secret");
        assert_eq!(format!("{object:?}"), r#"Object { keys: ["k"], is_immutable: true }"#);
        let config_map: api::ConfigMap =
            serde_json::from_value(json!({"data": {"a": "1"}, "binaryData": {"b": "/w=="}})).unwrap();
        let object = Object::from(config_map);
        assert_eq!((&object.data["a"][..], &object.binary_data["b"][..]), (&b"1"[..], &[0xff][..]));
    }

    #[test]
    fn only_what_is_optional_may_be_missing_and_only_if_it_is_not_there() {
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
