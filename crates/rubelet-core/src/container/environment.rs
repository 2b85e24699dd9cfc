//! The environment of a container, and the values of `$(NAME)`.
//!
//! Owns: env and envFrom, their precedence, their maximum length, and the objects they need. Never: reads the API server; the
//! objects come in as `Sources`.
//! Upstream: `makeEnvironmentVariables`.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
};

use k8s_openapi::api::core::v1::{Container, EnvFromSource, EnvVarSource, FileKeySelector, ObjectFieldSelector, Pod};

use self::files::{FileKey, FileValues};
use super::{
    ConfigError,
    expansion::{ExecSpace, expand, shown},
    find,
    mounts::pod_dir,
};
use crate::{
    downward_api::{metadata_value, resource_value},
    id::namespace_of,
    objects::{Object, ObjectKey, Objects, Presence},
    op::StartContainer,
    pod_manager::is_static_pod,
    settings::Settings,
    volumes,
};

pub mod files;
pub mod services;

/// The longest path the kernel accepts, without the NUL at its end.
const MAX_PATH_BYTES: usize = 4095;

/// By name. Values are bytes: a secret may hold anything.
pub type Variables = BTreeMap<String, Vec<u8>>;

/// The variables of a container, and the space they leave for its command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Environment {
    pub variables: Variables,
    pub space: ExecSpace,
}

impl Environment {
    fn new(page_bytes: usize) -> Self {
        Environment { variables: Variables::new(), space: ExecSpace::new(page_bytes) }
    }

    pub fn value(&self, name: &str) -> Option<&[u8]> {
        self.variables.get(name).map(Vec::as_slice)
    }

    fn set(&mut self, name: String, value: Vec<u8>) -> Result<(), ConfigError> {
        if let Some(replaced) = self.variables.remove(&name) {
            self.space.give_back(string_bytes(&name, replaced.len()));
        }
        self.space.take(string_bytes(&name, value.len()), || described(&name))?;
        self.variables.insert(name, value);
        Ok(())
    }

    /// The value of a variable of this name with its references expanded.
    fn expanded(&self, name: &str, text: &str) -> Result<Vec<u8>, ConfigError> {
        let refused = || self.space.refusal(&described(name));
        let limit_bytes = self.space.next_bytes().checked_sub(string_bytes(name, 0)).ok_or_else(refused)?;
        expand(text, limit_bytes, |name| self.value(name)).ok_or_else(refused)
    }
}

/// `NAME=value`.
fn string_bytes(name: &str, value_bytes: usize) -> usize {
    name.len() + 1 + value_bytes
}

fn described(name: &str) -> String {
    format!("environment variable {}", shown(name))
}

/// The inputs of an environment beside the pod.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// At least those of `needs`.
    pub objects: Objects,
    pub services: Services,
    /// At least those of `files::needs`, of volumes that are set up.
    pub files: FileValues,
}

/// The service variables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Services {
    /// They were not read yet.
    Unread,
    Read(Variables),
}

impl Default for Services {
    /// There are none.
    fn default() -> Self {
        Services::Read(Variables::new())
    }
}

/// The objects without which the container's environment cannot be made.
pub fn needs(pod: &Pod, container: &Container) -> BTreeSet<ObjectKey> {
    let namespace = namespace_of(pod);
    let mut keys = BTreeSet::new();
    for source in container.env_from.iter().flatten() {
        keys.extend(env_from_key(namespace, source).map(|(key, _)| key));
    }
    for source in container.env.iter().flatten().filter_map(|variable| variable.value_from.as_ref()) {
        let config_map = source.config_map_key_ref.as_ref();
        keys.extend(config_map.map(|key| ObjectKey::config_map(namespace, &key.name)));
        keys.extend(source.secret_key_ref.as_ref().map(|key| ObjectKey::secret(namespace, &key.name)));
    }
    keys
}

/// Services first, then envFrom, then env: the later wins.
pub fn environment(
    order: &StartContainer,
    container: &Container,
    sources: &Sources,
    settings: &Settings,
) -> Result<Environment, ConfigError> {
    let mut environment = Environment::new(settings.node.page_bytes);
    match &sources.services {
        Services::Read(variables) => {
            for (name, value) in variables {
                environment.set(name.clone(), value.clone())?;
            }
        }
        // A static pod does not wait for the cluster.
        Services::Unread if is_static_pod(&order.pod) => {}
        Services::Unread => {
            let message = "services have not yet been read at least once, cannot construct envvars";
            return Err(ConfigError(message.to_owned()));
        }
    }
    for source in container.env_from.iter().flatten() {
        let Some((key, presence)) = env_from_key(namespace_of(&order.pod), source) else { continue };
        let Some(object) = found(&sources.objects, &key, presence)? else { continue };
        let prefix = source.prefix.as_deref().unwrap_or_default();
        for (name, value) in object.data() {
            environment.set(format!("{prefix}{name}"), value.clone())?;
        }
    }
    for variable in container.env.iter().flatten() {
        let value = match (variable.value.as_deref(), &variable.value_from) {
            (Some(value), _) if !value.is_empty() => Some(environment.expanded(&variable.name, value)?),
            (_, Some(source)) => resolve(source, order, container, sources, settings)?,
            (_, None) => Some(Vec::new()),
        };
        if let Some(value) = value {
            environment.set(variable.name.clone(), value)?;
        }
    }
    Ok(environment)
}

/// A name without a value is an error: the path would mean another place without it.
pub fn expand_path(expression: &str, environment: &Environment) -> Result<Option<String>, ConfigError> {
    let mut missing = BTreeSet::new();
    let expanded = expand(expression, MAX_PATH_BYTES, |name| {
        let value = environment.value(name).filter(|value| !value.is_empty());
        if value.is_none() {
            missing.insert(name.to_owned());
        }
        value
    });
    if missing.is_empty() {
        return Ok(expanded.map(|path| String::from_utf8_lossy(&path).into_owned()));
    }
    Err(ConfigError(format!("missing value for {}", missing.into_iter().collect::<Vec<_>>().join(", "))))
}

fn env_from_key(namespace: &str, source: &EnvFromSource) -> Option<(ObjectKey, Presence)> {
    if let Some(config_map) = &source.config_map_ref {
        return Some((ObjectKey::config_map(namespace, &config_map.name), config_map.optional.into()));
    }
    let secret = source.secret_ref.as_ref()?;
    Some((ObjectKey::secret(namespace, &secret.name), secret.optional.into()))
}

/// `None`: the variable is not set.
fn resolve(
    source: &EnvVarSource,
    order: &StartContainer,
    container: &Container,
    sources: &Sources,
    settings: &Settings,
) -> Result<Option<Vec<u8>>, ConfigError> {
    let (pod, namespace) = (&order.pod, namespace_of(&order.pod));
    if let Some(field) = &source.field_ref {
        field_value(field, order, settings).map(|value| Some(value.into_bytes()))
    } else if let Some(field) = &source.resource_field_ref {
        let of = match field.container_name.as_deref() {
            None | Some("") => Cow::Borrowed(container),
            Some(other) => find(pod, other).map_err(|_| ConfigError(format!("container {other} not found")))?,
        };
        resource_value(field, &of, settings.node.allocatable).map(|value| Some(value.into_bytes()))
    } else if let Some(key) = &source.config_map_key_ref {
        let object = ObjectKey::config_map(namespace, &key.name);
        value_of(&sources.objects, &object, &key.key, key.optional.into())
    } else if let Some(key) = &source.secret_key_ref {
        value_of(&sources.objects, &ObjectKey::secret(namespace, &key.name), &key.key, key.optional.into())
    } else if let Some(key) = source.file_key_ref.as_ref().filter(|_| settings.node.env_files_enabled) {
        file_value(key, order, &sources.files, settings)
    } else {
        Ok(Some(Vec::new()))
    }
}

/// The error in the file is not reported: it is read on the node.
fn file_value(
    selector: &FileKeySelector,
    order: &StartContainer,
    files: &FileValues,
    settings: &Settings,
) -> Result<Option<Vec<u8>>, ConfigError> {
    let FileKeySelector { volume_name, path, key, optional } = selector;
    let pod_dir = pod_dir(&settings.root_dir, &order.uid);
    let dir = volumes::mounted_empty_dir(&order.pod, &pod_dir, volume_name)
        .ok_or_else(|| ConfigError(format!("cannot find the volume {volume_name:?} referenced by FileKeyRef")))?;
    match files.get(&FileKey::from(selector)) {
        Some(Ok(value)) if !value.is_empty() => Ok(Some(value.clone())),
        Some(Ok(_)) if *optional == Some(true) => Ok(None),
        Some(Ok(_)) => {
            let file = dir.join(path.trim_start_matches('/'));
            Err(ConfigError(format!("environment variable key {key:?} not found in file {file:?}")))
        }
        Some(Err(_)) | None => Err(ConfigError("couldn't parse env file".to_owned())),
    }
}

fn value_of(
    objects: &Objects,
    object: &ObjectKey,
    key: &str,
    presence: Presence,
) -> Result<Option<Vec<u8>>, ConfigError> {
    let Some(found) = found(objects, object, presence)? else { return Ok(None) };
    match found.data().get(key) {
        None if presence == Presence::Required => Err(ConfigError(format!("couldn't find key {key} in {object}"))),
        value => Ok(value.cloned()),
    }
}

fn found<'a>(objects: &'a Objects, key: &ObjectKey, presence: Presence) -> Result<Option<&'a Object>, ConfigError> {
    objects.find(key, presence).map_err(|error| ConfigError(error.message))
}

fn field_value(
    field: &ObjectFieldSelector,
    order: &StartContainer,
    settings: &Settings,
) -> Result<String, ConfigError> {
    let spec = order.pod.spec.as_ref();
    Ok(match field.field_path.as_str() {
        "spec.nodeName" => spec
            .and_then(|spec| spec.node_name.clone())
            .filter(|node| !node.is_empty())
            .unwrap_or_else(|| settings.node_name.clone()),
        "spec.serviceAccountName" => spec.and_then(|spec| spec.service_account_name.clone()).unwrap_or_default(),
        "status.hostIP" => order.host_ips.first().cloned().unwrap_or_default(),
        "status.hostIPs" => order.host_ips.join(","),
        "status.podIP" => pod_ips(order).first().cloned().unwrap_or_default(),
        "status.podIPs" => pod_ips(order).join(","),
        metadata => return metadata_value(&order.pod, &order.uid, metadata),
    })
}

/// A pod on the host's network has the host's addresses.
fn pod_ips(order: &StartContainer) -> &[String] {
    let is_host_network = order.pod.spec.as_ref().is_some_and(super::is_host_network);
    if order.pod_ips.is_empty() && is_host_network { &order.host_ips } else { &order.pod_ips }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{effect::ImageFacts, settings::Allocatable, test_support::object_of};

    fn order(container: &str) -> StartContainer {
        let pod: Pod = serde_json::from_str(&format!(
            r#"{{"metadata":{{"name":"web","namespace":"prod","labels":{{"app":"x","t":"a\"b"}},"annotations":{{"k":"v"}}}},
                "spec":{{"serviceAccountName":"sa","containers":[{container}]}}}}"#
        ))
        .unwrap();
        StartContainer {
            uid: "u-1".into(),
            pod: Arc::new(pod),
            container: "c".to_owned(),
            attempt: 0,
            sandbox: "s".into(),
            sandbox_attempt: 0,
            cgroup_parent: String::new(),
            pod_ips: vec!["10.0.0.5".to_owned(), "fd00::5".to_owned()],
            host_ips: vec!["192.0.2.1".to_owned(), "2001:db8::1".to_owned()],
            target: None,
            recursive_read_only_mounts: false,
            claimed: BTreeMap::new(),
            image_volumes: BTreeMap::new(),
            image: ImageFacts::default(),
        }
    }

    fn resolved(container: &str) -> Result<String, ConfigError> {
        resolved_with(container, &Sources::default())
    }

    fn resolved_with(container: &str, sources: &Sources) -> Result<String, ConfigError> {
        let order = order(container);
        let mut settings = Settings::for_node("node-1");
        settings.node.allocatable =
            Allocatable { cpu_millis: 1900, memory_bytes: 1 << 30, ephemeral_storage_bytes: 0, pods: 0 };
        let environment = environment(&order, &order.pod.spec.as_ref().unwrap().containers[0], sources, &settings)?;
        let lines: Vec<String> = environment
            .variables
            .iter()
            .map(|(name, value)| format!("{name}={}", String::from_utf8_lossy(value)))
            .collect();
        Ok(lines.join(" "))
    }

    type Data<'a> = &'a [(&'a str, &'a str)];

    /// Objects of the pod's namespace; what is `None` is not there.
    fn objects(known: &[(ObjectKey, Option<Data<'_>>)]) -> Objects {
        let lookup = |(key, data): &(ObjectKey, Option<Data<'_>>)| {
            let object = data.map(|data| Arc::new(object_of(key.kind, data)));
            (key.clone(), object.ok_or_else(|| key.not_found()))
        };
        Objects(known.iter().map(lookup).collect())
    }

    fn field(path: &str) -> Result<String, ConfigError> {
        resolved(&format!(
            r#"{{"name":"c","env":[{{"name":"V","valueFrom":{{"fieldRef":{{"fieldPath":"{path}"}}}}}}]}}"#
        ))
    }

    fn resource(resource: &str, divisor: &str) -> Result<String, ConfigError> {
        resolved(&format!(
            r#"{{"name":"c","resources":{{"requests":{{"cpu":"250m","memory":"100Mi"}},"limits":{{"memory":"200Mi"}}}},
                "env":[{{"name":"V","valueFrom":{{"resourceFieldRef":{{"resource":"{resource}","divisor":"{divisor}"}}}}}}]}}"#
        ))
    }

    #[test]
    fn fields_of_the_pod_are_known_without_an_api_server() {
        for (path, value) in [
            ("metadata.name", "web"),
            ("metadata.namespace", "prod"),
            ("metadata.uid", "u-1"),
            ("metadata.labels", "app=\"x\"\nt=\"a\\\"b\""),
            ("metadata.labels['app']", "x"),
            ("metadata.annotations['none']", ""),
            ("spec.nodeName", "node-1"),
            ("spec.serviceAccountName", "sa"),
            ("status.hostIP", "192.0.2.1"),
            ("status.hostIPs", "192.0.2.1,2001:db8::1"),
            ("status.podIP", "10.0.0.5"),
            ("status.podIPs", "10.0.0.5,fd00::5"),
        ] {
            assert_eq!(field(path), Ok(format!("V={value}")), "{path}");
        }
        assert_eq!(field("spec.hostname"), Err(ConfigError("unsupported fieldPath: spec.hostname".to_owned())));
    }

    #[test]
    fn resources_are_rounded_up_to_the_divisor() {
        for (name, divisor, value) in [
            ("requests.cpu", "0", "1"),
            ("requests.cpu", "1m", "250"),
            ("limits.cpu", "1m", "1900"),
            ("limits.cpu", "0", "2"),
            ("requests.memory", "1Mi", "100"),
            ("limits.memory", "1Gi", "1"),
            ("limits.memory", "0", "209715200"),
        ] {
            assert_eq!(resource(name, divisor), Ok(format!("V={value}")), "{name} {divisor}");
        }
        assert!(resource("limits.gpu", "0").is_err());
    }

    #[test]
    fn later_variables_expand_earlier_ones_and_win() {
        let container = r#"{"name":"c","env":[{"name":"A","value":"1"},{"name":"B","value":"$(A)-$(Z)"},{"name":"A","value":"2"},{"name":"Z"}]}"#;
        assert_eq!(resolved(container), Ok("A=2 B=1-$(Z) Z=".to_owned()));
    }

    #[test]
    fn the_objects_a_container_needs_are_named() {
        let order = order(
            r#"{"name":"c","envFrom":[{"configMapRef":{"name":"m"}},{"secretRef":{"name":"s"}}],
                "env":[{"name":"A","valueFrom":{"secretKeyRef":{"name":"s","key":"k"}}},
                       {"name":"B","valueFrom":{"configMapKeyRef":{"name":"n","key":"k"}}},
                       {"name":"C","value":"1"}]}"#,
        );
        let needs = needs(&order.pod, &find(&order.pod, "c").unwrap());
        let names: Vec<_> = needs.iter().map(ToString::to_string).collect();
        assert_eq!(names, ["ConfigMap prod/m", "ConfigMap prod/n", "Secret prod/s"]);
    }

    #[test]
    fn env_wins_over_env_from_and_both_over_services() {
        let sources = Sources {
            objects: objects(&[
                (ObjectKey::config_map("prod", "m"), Some(&[("A", "map"), ("B", "map"), ("K", "v")])),
                (ObjectKey::secret("prod", "s"), Some(&[("B", "secret")])),
            ]),
            services: Services::Read(Variables::from([
                ("A".to_owned(), b"service".to_vec()),
                ("DB".to_owned(), b"10.0.0.9".to_vec()),
            ])),
            ..Sources::default()
        };
        let container = r#"{"name":"c",
            "envFrom":[{"configMapRef":{"name":"m"}},{"secretRef":{"name":"s"}},{"prefix":"P_","configMapRef":{"name":"m"}}],
            "env":[{"name":"K","value":"$(B)@$(DB)"},{"name":"S","valueFrom":{"secretKeyRef":{"name":"s","key":"B"}}}]}"#;
        assert_eq!(
            resolved_with(container, &sources).unwrap(),
            "A=map B=secret DB=10.0.0.9 K=secret@10.0.0.9 P_A=map P_B=map P_K=v S=secret"
        );
    }

    #[test]
    fn env_from_is_bounded_before_names_and_values_are_joined() {
        let keys: Vec<String> = (0..2000).map(|n| format!("K{n}")).collect();
        let data: Vec<_> = keys.iter().map(|key| (key.as_str(), "v")).collect();
        let objects = objects(&[(ObjectKey::config_map("prod", "m"), Some(&data))]);
        let sources = Sources { objects, ..Sources::default() };
        let refused = |prefixes: &[String]| {
            let from = |prefix: &String| format!(r#"{{"prefix":"{prefix}","configMapRef":{{"name":"m"}}}}"#);
            let from: Vec<_> = prefixes.iter().map(from).collect();
            resolved_with(&format!(r#"{{"name":"c","envFrom":[{}]}}"#, from.join(",")), &sources).unwrap_err().0
        };
        let long = refused(&["P".repeat(10_000)]);
        assert!(long.starts_with("environment variable \"PPPP") && long.len() < 500, "{long}");
        let many = refused(&(0..1000).map(|n| format!("P{n}_")).collect::<Vec<_>>());
        assert!(many.contains("K") && many.contains("is too long"), "{many}");
    }

    #[test]
    fn missing_object_gives_upstreams_error_unless_optional() {
        let sources = Sources {
            objects: objects(&[
                (ObjectKey::config_map("prod", "m"), Some(&[("k", "v")])),
                (ObjectKey::secret("prod", "s"), Some(&[("k", "v")])),
                (ObjectKey::config_map("prod", "gone"), None),
                (ObjectKey::secret("prod", "gone"), None),
            ]),
            ..Sources::default()
        };
        let key = |kind: &str, name: &str, optional: bool| {
            let reference = format!(r#"{{"name":"{name}","key":"x","optional":{optional}}}"#);
            resolved_with(
                &format!(r#"{{"name":"c","env":[{{"name":"V","valueFrom":{{"{kind}KeyRef":{reference}}}}}]}}"#),
                &sources,
            )
            .map_err(|error| error.0)
        };
        assert_eq!(key("configMap", "m", false).unwrap_err(), "couldn't find key x in ConfigMap prod/m");
        assert_eq!(key("secret", "s", false).unwrap_err(), "couldn't find key x in Secret prod/s");
        assert_eq!(key("configMap", "gone", false).unwrap_err(), r#"configmap "gone" not found"#);
        assert_eq!(key("secret", "gone", false).unwrap_err(), r#"secret "gone" not found"#);
        for (kind, name) in [("configMap", "m"), ("secret", "s"), ("configMap", "gone"), ("secret", "gone")] {
            assert_eq!(key(kind, name, true).as_deref(), Ok(""), "{kind} {name}");
        }
        let from = |optional: bool| {
            let source = format!(r#"{{"secretRef":{{"name":"gone","optional":{optional}}}}}"#);
            resolved_with(&format!(r#"{{"name":"c","envFrom":[{source}]}}"#), &sources).map_err(|error| error.0)
        };
        assert_eq!(from(false).unwrap_err(), r#"secret "gone" not found"#);
        assert_eq!(from(true).as_deref(), Ok(""));
    }

    #[test]
    fn variables_come_from_files_of_volumes_that_a_container_mounts() {
        let value = |volume: &str, key: &str, optional: bool| {
            let reference =
                format!(r#"{{"volumeName":"{volume}","path":"/dir/env","key":"{key}","optional":{optional}}}"#);
            let mut order = order(&format!(
                r#"{{"name":"c","env":[{{"name":"V","valueFrom":{{"fileKeyRef":{reference}}}}}],
                    "volumeMounts":[{{"name":"data","mountPath":"/x"}},{{"name":"host","mountPath":"/y"}}]}}"#
            ));
            let spec = Arc::make_mut(&mut order.pod).spec.as_mut().unwrap();
            spec.volumes = serde_json::from_value(serde_json::json!([
                {"name": "data", "emptyDir": {}}, {"name": "unused", "emptyDir": {}},
                {"name": "host", "hostPath": {"path": "/etc"}},
            ]))
            .unwrap();
            let container = order.pod.spec.as_ref().unwrap().containers[0].clone();
            let found = |key: &str| match key {
                "A" => Ok(b"$(B)".to_vec()),
                "gone" => Ok(Vec::new()),
                _ => Err(files::EnvFileError("/secret place".to_owned())),
            };
            let files = files::needs(&container).into_iter().map(|file| (file.clone(), found(&file.key))).collect();
            let sources = Sources { files, ..Sources::default() };
            let made = environment(&order, &container, &sources, &Settings::for_node("node"));
            made.map(|made| made.variables.get("V").map(|value| String::from_utf8(value.clone()).unwrap()))
                .map_err(|error| error.0)
        };
        assert_eq!(value("data", "A", false), Ok(Some("$(B)".to_owned())), "it is not expanded");
        assert_eq!(value("data", "gone", true), Ok(None));
        let file = "/var/lib/kubelet/pods/u-1/volumes/kubernetes.io~empty-dir/data/dir/env";
        let missing = format!("environment variable key \"gone\" not found in file {file:?}");
        assert_eq!(value("data", "gone", false), Err(missing));
        assert_eq!(value("data", "broken", true), Err("couldn't parse env file".to_owned()));
        for volume in ["unused", "host", "none"] {
            let missing = format!("cannot find the volume {volume:?} referenced by FileKeyRef");
            assert_eq!(value(volume, "A", true), Err(missing));
        }
    }

    #[test]
    fn only_api_pods_wait_for_services() {
        let sources = Sources { services: Services::Unread, ..Sources::default() };
        let message = "services have not yet been read at least once, cannot construct envvars";
        assert_eq!(resolved_with(r#"{"name":"c"}"#, &sources).unwrap_err().0, message);
        let mut order = order(r#"{"name":"c"}"#);
        let annotations = Arc::make_mut(&mut order.pod).metadata.annotations.get_or_insert_default();
        annotations.insert("kubernetes.io/config.source".to_owned(), "file".to_owned());
        let container = &*find(&order.pod, "c").unwrap();
        let environment = environment(&order, container, &sources, &Settings::for_node("n")).unwrap();
        assert_eq!(environment.variables, Variables::new());
    }
}
