//! Actions of users and the cluster: changes of pods in the API, and outages of its server.
//!
//! Owns: the methods of a play that concern the API server. A user's request is a request like any other.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use rubelet_core::{event::Source, manifest};
use rubelet_kube::port::{ApiError, ObjectPath, PatchKind, Verb};
use serde_json::{Value, json};

use crate::{
    api::{act::Request, store::Key},
    play::{Play, predicates::NODE},
    script::{IMAGE, PodScript},
    simulation::{ScheduledEvent, SimState},
};

/// How much time a pod gets to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Within {
    ItsOwnTime,
    Secs(i64),
}

impl Play {
    /// The node belongs to a cluster. Must be called before the agent starts.
    pub(crate) fn in_cluster(&mut self) -> &mut Self {
        self.sources.push(Source::Api);
        self
    }

    /// A node of a cluster with a running agent.
    pub(crate) fn clustered(seed: u64) -> Self {
        let mut play = Self::before_start(seed);
        play.in_cluster().start_agent();
        play
    }

    /// Creates a pod in the API, bound to this node.
    #[track_caller]
    pub(crate) fn create(&mut self, script: impl Into<PodScript>) -> &mut Self {
        let script = script.into();
        self.wanted.insert(script.name.clone(), script.clone());
        self.change(|sim| {
            sim.rules.learn(&script);
            let pod = sim.ask(Verb::Create, pods(), bound(&script)).expect("the name is free");
            let uid = pod["metadata"]["uid"].as_str().unwrap_or_default();
            sim.log("play", format!("create {} v{} {uid}", script.name, script.version));
            sim.rules.pod_made(uid);
        })
    }

    /// Deletes a pod of the API gracefully.
    pub(crate) fn delete(&mut self, name: &str, within: Within) -> &mut Self {
        self.wanted.remove(name);
        self.change(|sim| {
            let options = match within {
                Within::ItsOwnTime => json!({}),
                Within::Secs(secs) => json!({ "gracePeriodSeconds": secs }),
            };
            sim.log("play", format!("delete {name} {options}"));
            let Ok(before) = sim.ask(Verb::Delete, pods().named(name), options) else { return };
            let uid = before["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
            let now = sim.ask(Verb::Get, pods().named(name), Value::Null);
            if let Some(secs) = now.ok().and_then(|pod| pod["metadata"]["deletionGracePeriodSeconds"].as_i64()) {
                sim.rules.end_asked(&uid, secs);
            }
        })
    }

    /// Force-deletes a pod of the API.
    pub(crate) fn force_delete(&mut self, name: &str) -> &mut Self {
        self.delete(name, Within::Secs(0))
    }

    /// Replaces the pod by another of the same name.
    pub(crate) fn recreate(&mut self, script: impl Into<PodScript>) -> &mut Self {
        let script = script.into();
        self.force_delete(&script.name).create(script)
    }

    /// A foreign write to a pod's status; for a static pod, by its mirror pod's name.
    pub(crate) fn overwrite_status(&mut self, name: &str, status: &Value) -> &mut Self {
        // Of a pod that its node ended nothing is left but its status: with another one it is a new pod.
        if self.look(|sim| sim.api.object(&Key::pod(name)).is_some_and(|pod| pod["status"]["phase"] == "Failed")) {
            return self;
        }
        if status.get("containerStatuses").is_some() {
            self.change(|sim| {
                let uid = sim.api.object(&Key::pod(name)).and_then(|pod| pod["metadata"]["uid"].as_str());
                if let Some(uid) = uid.map(str::to_owned) {
                    sim.rules.restart_counts_overwritten(&uid);
                }
            });
        }
        self.edit(name, pods().named(name).sub("status"), json!({ "status": status }))
    }

    /// Changes a label, which restarts nothing.
    pub(crate) fn label(&mut self, name: &str, value: &str) -> &mut Self {
        self.edit(name, pods().named(name), json!({ "metadata": { "labels": { "touched": value } } }))
    }

    /// Changes a container's image, which restarts it whatever its restart policy.
    pub(crate) fn edit_image(&mut self, pod: &str, container: &str, image: &str) -> &mut Self {
        let script = self.wanted.get_mut(pod).expect("the play created the pod");
        let list = if script.is_init(container) { "initContainers" } else { "containers" };
        script.set_image(container, image);
        self.change(|sim| {
            let uid = sim.api.object(&Key::pod(pod)).and_then(|pod| pod["metadata"]["uid"].as_str());
            if let Some(uid) = uid.map(str::to_owned) {
                sim.rules.image_edited(&uid, container, image);
            }
        });
        self.edit(pod, pods().named(pod), json!({ "spec": { list: [{ "name": container, "image": image }] } }))
    }

    /// Sets `activeDeadlineSeconds`.
    pub(crate) fn set_deadline(&mut self, pod: &str, secs: i64) -> &mut Self {
        let script = self.wanted.get_mut(pod).expect("the play created the pod");
        script.deadline_secs = Some(secs);
        self.edit(pod, pods().named(pod), json!({ "spec": { "activeDeadlineSeconds": secs } }))
    }

    /// Adds an ephemeral container. It starts once.
    pub(crate) fn debug(&mut self, pod: &str, name: &str, program: &str) -> &mut Self {
        let container = json!({
            "name": name,
            "image": IMAGE,
            "command": ["sim", program],
            "imagePullPolicy": "IfNotPresent",
            "terminationMessagePath": "/dev/termination-log",
            "terminationMessagePolicy": "File",
        });
        let path = pods().named(pod).sub("ephemeralcontainers");
        self.edit(pod, path, json!({ "spec": { "ephemeralContainers": [container] } }))
    }

    fn edit(&mut self, name: &str, path: ObjectPath, patch: Value) -> &mut Self {
        self.change(|sim| {
            sim.log("play", format!("edit {name} {patch}"));
            if let Ok(pod) = sim.ask(Verb::Patch(PatchKind::StrategicMerge), path, patch) {
                sim.rules.pod_edited(name, pod["metadata"]["uid"].as_str().unwrap_or_default());
            }
        })
    }

    /// Creates or replaces a config map of the pods' namespace.
    pub(crate) fn put_config_map(&mut self, name: &str, data: &Value) -> &mut Self {
        self.change(|sim| {
            sim.log("play", format!("config map {name} {data}"));
            let path = ObjectPath::all("v1", "configmaps").within("default");
            let body = json!({ "metadata": { "name": name, "namespace": "default" }, "data": data });
            let made = sim.ask(Verb::Create, path.clone(), body.clone());
            made.or_else(|_| sim.ask(Verb::Update, path.named(name), body)).expect("there is one to replace");
        })
    }

    /// The API server refuses connections.
    pub(crate) fn partition(&mut self) -> &mut Self {
        self.change(SimState::take_api_down)
    }

    pub(crate) fn partition_for(&mut self, time: Duration) -> &mut Self {
        self.partition().change(|sim| sim.schedule_in(time, ScheduledEvent::ApiReturns))
    }

    /// Packets to the API server are dropped for a while.
    pub(crate) fn silence_for(&mut self, time: Duration) -> &mut Self {
        self.change(|sim| {
            sim.silence_api();
            sim.schedule_in(time, ScheduledEvent::ApiReturns);
        })
    }

    /// The agent's credentials expire, and are renewed after a while.
    pub(crate) fn expire_credentials_for(&mut self, time: Duration) -> &mut Self {
        self.change(|sim| {
            sim.expire_credentials();
            sim.schedule_in(time, ScheduledEvent::ApiReturns);
        })
    }

    /// The server has the pod in a form that cannot be decoded.
    #[track_caller]
    pub(crate) fn garble(&mut self, name: &str) -> &mut Self {
        self.rewrite(name, |pod| pod["spec"]["containers"] = json!({ "unknown": "form" }))
    }

    /// A finalizer keeps the pod in the API.
    #[track_caller]
    pub(crate) fn hold(&mut self, name: &str) -> &mut Self {
        self.rewrite(name, |pod| pod["metadata"]["finalizers"] = json!(["example.com/hold"]))
    }

    pub(crate) fn let_go(&mut self, name: &str) -> &mut Self {
        self.edit(name, pods().named(name), json!({ "metadata": { "finalizers": null } }))
    }

    /// Replaces the pod's object without the server's validation.
    #[track_caller]
    pub(crate) fn rewrite(&mut self, name: &str, change: impl FnOnce(&mut Value)) -> &mut Self {
        self.change(|sim| {
            sim.log("play", format!("rewrite {name}"));
            let key = Key::pod(name);
            let mut object = Value::clone(sim.api.object(&key).expect("the pod is there"));
            change(&mut object);
            let object = sim.api.put(key, object);
            sim.rules.pod_edited(name, object["metadata"]["uid"].as_str().unwrap_or_default());
        })
    }

    /// A second server's cache becomes stale, without effect until the agent is connected to it.
    pub(crate) fn lag(&mut self) -> &mut Self {
        self.change(|sim| {
            sim.log("world", "the second API server falls behind");
            sim.api.fall_behind();
        })
    }

    /// From now on the agent is connected to the second server.
    pub(crate) fn fail_over(&mut self) -> &mut Self {
        self.change(|sim| {
            sim.log("world", "the agent's connections go to the second API server");
            sim.api.fail_over();
        })
    }

    /// The second server's cache catches up.
    pub(crate) fn catch_up(&mut self) -> &mut Self {
        self.change(SimState::catch_up)
    }

    pub(crate) fn catch_up_in(&mut self, time: Duration) -> &mut Self {
        self.change(|sim| sim.schedule_in(time, ScheduledEvent::ApiCatchesUp))
    }

    pub(crate) fn heal(&mut self) -> &mut Self {
        self.change(SimState::heal_api)
    }

    pub(crate) fn restart_api(&mut self) -> &mut Self {
        self.change(SimState::restart_api)
    }
}

impl SimState {
    /// A request of another client, on a connection that never fails.
    pub(crate) fn ask(&mut self, verb: Verb, path: ObjectPath, body: Value) -> Result<Value, ApiError> {
        let request = Request { verb, path, query: Vec::new(), body };
        self.serve(&request).map(|object| Value::clone(&object))
    }
}

fn pods() -> ObjectPath {
    ObjectPath::all("v1", "pods").within("default")
}

/// The script's pod as the API server would hold it, with its defaults.
fn bound(script: &PodScript) -> Value {
    let mut pod: Pod = serde_json::from_value(script.manifest()).expect("a script is a pod");
    manifest::set_defaults(&mut pod);
    pod.spec.get_or_insert_default().node_name = Some(NODE.to_owned());
    serde_json::to_value(&pod).expect("a pod is JSON")
}
