//! Labels and annotations on sandboxes and containers, which identify their pod.
//!
//! Owns: label and annotation names, their values, and reading them back. They are state: a restarted or replaced agent has no
//! other.
//! Upstream: `kuberuntime/labels.go`.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{Container, ContainerPort, LifecycleHandler, Pod},
    apimachinery::pkg::util::intstr::IntOrString,
};
use serde::Serialize;

use super::{go_json, hash};
use crate::id::{PodRef, PodUid, name_of, namespace_of};

pub const POD_NAME: &str = "io.kubernetes.pod.name";
pub const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
pub const POD_UID: &str = "io.kubernetes.pod.uid";
pub const CONTAINER_NAME: &str = "io.kubernetes.container.name";

const DELETION_GRACE_PERIOD: &str = "io.kubernetes.pod.deletionGracePeriod";
const TERMINATION_GRACE_PERIOD: &str = "io.kubernetes.pod.terminationGracePeriod";
const HASH: &str = "io.kubernetes.container.hash";
const RESTART_COUNT: &str = "io.kubernetes.container.restartCount";
const TERMINATION_MESSAGE_PATH: &str = "io.kubernetes.container.terminationMessagePath";
const TERMINATION_MESSAGE_POLICY: &str = "io.kubernetes.container.terminationMessagePolicy";
const PRE_STOP_HANDLER: &str = "io.kubernetes.container.preStopHandler";
const PORTS: &str = "io.kubernetes.container.ports";

pub type Map = BTreeMap<String, String>;

pub fn of_sandbox(pod: &Pod, uid: &PodUid) -> Map {
    let mut labels = pod.metadata.labels.clone().unwrap_or_default();
    labels.extend(of_pod(name_of(pod), namespace_of(pod), uid));
    labels
}

pub fn of_container(container: &Container, pod: &Pod, uid: &PodUid) -> Map {
    let mut labels = of_pod(name_of(pod), namespace_of(pod), uid);
    labels.insert(CONTAINER_NAME.to_owned(), container.name.clone());
    labels
}

/// The labels by which a pod's sandboxes and containers are found.
pub fn of_pod(name: &str, namespace: &str, uid: &PodUid) -> Map {
    Map::from([
        (POD_NAME.to_owned(), name.to_owned()),
        (POD_NAMESPACE.to_owned(), namespace.to_owned()),
        (POD_UID.to_owned(), uid.as_str().to_owned()),
    ])
}

pub fn selector(uid: &PodUid) -> Map {
    Map::from([(POD_UID.to_owned(), uid.as_str().to_owned())])
}

pub fn annotations(container: &Container, pod: &Pod, attempt: u32) -> Map {
    let mut annotations = Map::from([
        (HASH.to_owned(), hash::to_text(hash::hash(container))),
        (RESTART_COUNT.to_owned(), attempt.to_string()),
        (TERMINATION_MESSAGE_PATH.to_owned(), container.termination_message_path.clone().unwrap_or_default()),
        (TERMINATION_MESSAGE_POLICY.to_owned(), container.termination_message_policy.clone().unwrap_or_default()),
    ]);
    if let Some(grace_secs) = pod.metadata.deletion_grace_period_seconds {
        annotations.insert(DELETION_GRACE_PERIOD.to_owned(), grace_secs.to_string());
    }
    if let Some(grace_secs) = pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds) {
        annotations.insert(TERMINATION_GRACE_PERIOD.to_owned(), grace_secs.to_string());
    }
    if let Some(handler) = container.lifecycle.as_ref().and_then(|lifecycle| lifecycle.pre_stop.as_ref()) {
        annotations.insert(PRE_STOP_HANDLER.to_owned(), go_json::to_string(&Handler::from(handler)));
    }
    if let Some(ports) = container.ports.as_ref().filter(|ports| !ports.is_empty()) {
        let ports: Vec<Port<'_>> = ports.iter().map(Port::from).collect();
        annotations.insert(PORTS.to_owned(), go_json::to_string(&ports));
    }
    annotations
}

/// The pod of this object; `None` if no kubelet created it.
pub fn owner(labels: &Map) -> Option<PodRef> {
    let uid = labels.get(POD_UID).filter(|uid| !uid.is_empty())?;
    Some(PodRef {
        uid: PodUid::new(uid),
        namespace: labels.get(POD_NAMESPACE)?.as_str().into(),
        name: labels.get(POD_NAME)?.as_str().into(),
    })
}

/// A container's annotations, read back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Annotated {
    pub hash: Option<u64>,
    pub restart_count: Option<u32>,
    pub termination_message_path: String,
    pub falls_back_to_logs: bool,
}

impl Annotated {
    pub fn read(annotations: &Map) -> Self {
        let text = |name: &str| annotations.get(name).map(String::as_str);
        Annotated {
            hash: text(HASH).and_then(hash::from_text),
            restart_count: text(RESTART_COUNT).and_then(|count| count.parse().ok()),
            termination_message_path: text(TERMINATION_MESSAGE_PATH).unwrap_or_default().to_owned(),
            falls_back_to_logs: text(TERMINATION_MESSAGE_POLICY) == Some("FallbackToLogsOnError"),
        }
    }
}

/// `ContainerPort` with its fields in Go's order.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Port<'a> {
    #[serde(skip_serializing_if = "is_empty")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "is_zero")]
    host_port: Option<i32>,
    container_port: i32,
    #[serde(skip_serializing_if = "is_empty")]
    protocol: Option<&'a str>,
    #[serde(rename = "hostIP", skip_serializing_if = "is_empty")]
    host_ip: Option<&'a str>,
}

impl<'a> From<&'a ContainerPort> for Port<'a> {
    fn from(port: &'a ContainerPort) -> Self {
        Port {
            name: port.name.as_deref(),
            host_port: port.host_port,
            container_port: port.container_port,
            protocol: port.protocol.as_deref(),
            host_ip: port.host_ip.as_deref(),
        }
    }
}

/// `LifecycleHandler` with its fields in Go's order.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Handler<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    exec: Option<Exec<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    http_get: Option<HttpGet<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tcp_socket: Option<TcpSocket<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sleep: Option<Sleep>,
}

#[derive(Serialize)]
struct Exec<'a> {
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    command: &'a [String],
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct HttpGet<'a> {
    #[serde(skip_serializing_if = "is_empty")]
    path: Option<&'a str>,
    port: &'a IntOrString,
    #[serde(skip_serializing_if = "is_empty")]
    host: Option<&'a str>,
    #[serde(skip_serializing_if = "is_empty")]
    scheme: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    http_headers: Vec<Header<'a>>,
}

#[derive(Serialize)]
struct Header<'a> {
    name: &'a str,
    value: &'a str,
}

#[derive(Serialize)]
struct TcpSocket<'a> {
    port: &'a IntOrString,
    #[serde(skip_serializing_if = "is_empty")]
    host: Option<&'a str>,
}

#[derive(Serialize)]
struct Sleep {
    seconds: i64,
}

impl<'a> From<&'a LifecycleHandler> for Handler<'a> {
    fn from(handler: &'a LifecycleHandler) -> Self {
        Handler {
            exec: handler.exec.as_ref().map(|exec| Exec { command: exec.command.as_deref().unwrap_or_default() }),
            http_get: handler.http_get.as_ref().map(|get| HttpGet {
                path: get.path.as_deref(),
                port: &get.port,
                host: get.host.as_deref(),
                scheme: get.scheme.as_deref(),
                http_headers: get
                    .http_headers
                    .iter()
                    .flatten()
                    .map(|header| Header { name: &header.name, value: &header.value })
                    .collect(),
            }),
            tcp_socket: handler
                .tcp_socket
                .as_ref()
                .map(|socket| TcpSocket { port: &socket.port, host: socket.host.as_deref() }),
            sleep: handler.sleep.as_ref().map(|sleep| Sleep { seconds: sleep.seconds }),
        }
    }
}

/// Go omits empty strings and zeros, not just absent ones.
fn is_empty(text: &Option<&str>) -> bool {
    text.is_none_or(str::is_empty)
}

fn is_zero(number: &Option<i32>) -> bool {
    number.is_none_or(|number| number == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected text was printed by upstream's `json.Marshal` of the same values.
    #[test]
    fn annotations_are_upstreams_byte_for_byte() {
        let pod: Pod = serde_json::from_str(
            r#"{"metadata":{"name":"web-node","namespace":"prod","deletionGracePeriodSeconds":3},
                "spec":{"terminationGracePeriodSeconds":30,"containers":[{
                    "name":"web","image":"nginx:1.27","terminationMessagePath":"/dev/termination-log","terminationMessagePolicy":"File",
                    "ports":[{"name":"http","containerPort":80,"protocol":"TCP"},{"hostIP":"10.0.0.1","hostPort":443,"containerPort":443,"protocol":"TCP"}],
                    "lifecycle":{"preStop":{"httpGet":{"scheme":"HTTP","path":"/a?b=<c>&d","port":"http","httpHeaders":[{"name":"X","value":"y"}]}}}}]}}"#,
        )
        .unwrap();
        let container = &pod.spec.as_ref().unwrap().containers[0];
        let lines: Vec<String> =
            annotations(container, &pod, 2).iter().map(|(name, value)| format!("{name}={value}")).collect();
        insta::assert_snapshot!(lines.join("\n"), @r#"
        io.kubernetes.container.hash=e220f96
        io.kubernetes.container.ports=[{"name":"http","containerPort":80,"protocol":"TCP"},{"hostPort":443,"containerPort":443,"protocol":"TCP","hostIP":"10.0.0.1"}]
        io.kubernetes.container.preStopHandler={"httpGet":{"path":"/a?b=\u003cc\u003e\u0026d","port":"http","scheme":"HTTP","httpHeaders":[{"name":"X","value":"y"}]}}
        io.kubernetes.container.restartCount=2
        io.kubernetes.container.terminationMessagePath=/dev/termination-log
        io.kubernetes.container.terminationMessagePolicy=File
        io.kubernetes.pod.deletionGracePeriod=3
        io.kubernetes.pod.terminationGracePeriod=30
        "#);
        let read = Annotated::read(&annotations(container, &pod, 2));
        assert_eq!((read.hash, read.restart_count), (Some(0xe220f96), Some(2)));
    }

    #[test]
    fn owner_is_read_back_from_the_labels_of_a_sandbox() {
        let pod: Pod = serde_json::from_str(
            r#"{"metadata":{"name":"a","namespace":"b","labels":{"app":"x","io.kubernetes.pod.uid":"forged"}}}"#,
        )
        .unwrap();
        let labels = of_sandbox(&pod, &PodUid::new("u"));
        assert_eq!(labels.get("app").map(String::as_str), Some("x"));
        assert_eq!(
            owner(&labels).map(|owner| (owner.uid.clone(), owner.to_string())),
            Some(("u".into(), "b/a".to_owned()))
        );
        assert_eq!(owner(&Map::new()), None);
    }
}
