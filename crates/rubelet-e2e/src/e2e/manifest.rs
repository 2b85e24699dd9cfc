//! Manifests of the tests' pods.
//!
//! Owns: the manifests. Every program here logs its starts and stops in a file on the node, which, unlike reports of
//! the agent or the runtime, cannot be wrong about the number of starts.

use std::path::Path;

use rubelet_testbed::image::BUSYBOX;
use serde_json::{Value, json};

/// A pod of one container `main`.
#[derive(Clone, Debug)]
pub struct Pod {
    pub name: String,
    script: String,
    image: String,
    grace_secs: u64,
    restart: &'static str,
    notes: Option<String>,
}

/// Runs until SIGTERM, and exits at once.
pub const OBEDIENT: &str = "trap 'echo stop >> /notes/main; exit 0' TERM; echo start >> /notes/main; \
                            while :; do sleep 1 & wait $!; done";
/// Needs three seconds to stop.
pub const SLOW_TO_STOP: &str = "trap 'echo term >> /notes/main; sleep 3; echo stop >> /notes/main; exit 0' TERM; \
                                echo start >> /notes/main; while :; do sleep 1 & wait $!; done";
/// Never stops by itself.
pub const STUBBORN: &str = "trap 'echo term >> /notes/main' TERM; echo start >> /notes/main; \
                            while :; do sleep 1 & wait $!; done";

impl Pod {
    pub fn new(name: &str, script: &str) -> Self {
        Pod {
            name: name.to_owned(),
            script: script.to_owned(),
            image: BUSYBOX.to_owned(),
            grace_secs: 10,
            restart: "Always",
            notes: None,
        }
    }

    pub fn image(mut self, image: &str) -> Self {
        self.image = image.to_owned();
        self
    }

    pub fn grace_secs(mut self, secs: u64) -> Self {
        self.grace_secs = secs;
        self
    }

    /// The directory on the node that the pod sees as `/notes`.
    pub fn notes(mut self, dir: &Path) -> Self {
        self.notes = Some(dir.display().to_string());
        self
    }

    pub fn manifest(&self) -> Value {
        let mounts: Vec<Value> = self.notes.iter().map(|_| json!({ "name": "notes", "mountPath": "/notes" })).collect();
        let volumes: Vec<Value> = self
            .notes
            .iter()
            .map(|dir| json!({ "name": "notes", "hostPath": { "path": dir, "type": "DirectoryOrCreate" } }))
            .collect();
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": { "name": self.name },
            "spec": {
                "restartPolicy": self.restart,
                "terminationGracePeriodSeconds": self.grace_secs,
                "containers": [{
                    "name": "main",
                    "image": self.image,
                    "command": ["sh", "-c", self.script],
                    "volumeMounts": mounts,
                }],
                "volumes": volumes,
            },
        })
    }
}
