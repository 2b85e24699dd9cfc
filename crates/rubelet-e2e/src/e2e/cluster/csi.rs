//! Volumes of a real CSI driver: kubernetes-csi's hostpath driver with its provisioner and resizer, and stand-ins for its
//! attacher and its registrar.
//!
//! Owns: the life of such volumes as users see it. Their parts: the driver's deployment, its image, a gate before it, crashes
//! at any moment and in each call, crowds.

mod calls;
mod crashes;
mod crowd;
mod driver;
mod gate;
pub mod image;
mod limits;
pub(super) mod takeover;
mod usage;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

pub use self::crowd::{Cost, crowd_of};
pub(super) use self::crowd::{local_claim, local_volume};
use self::driver::Driver;
use crate::e2e::{
    cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, pod, spec},
    node::PodSeen,
};

/// Long ones first.
pub fn cases() -> impl Iterator<Item = &'static ClusterCase> {
    [calls::CASES, crowd::CASES, crashes::CASES, limits::CASES, takeover::CASES, CASES, usage::CASES]
        .into_iter()
        .flatten()
}

/// Builds the driver in advance.
pub fn build() -> anyhow::Result<()> {
    image::ensure().map(drop)
}

const CASES: &[ClusterCase] = &[
    ClusterCase {
        name: "a StatefulSet's pods find their CSI volumes' data again, and nothing is left of deleted claims",
        plane: Plane::Shared,
        run: stateful_set,
    },
    ClusterCase {
        name: "an inline CSI volume and a generic ephemeral one live as long as their pod",
        plane: Plane::Shared,
        run: ephemeral,
    },
    ClusterCase { name: "a CSI block volume is written and read through its device", plane: Plane::Shared, run: block },
    ClusterCase {
        name: "a ReadWriteOncePod CSI volume waits for the pod before",
        plane: Plane::Shared,
        run: once_per_pod,
    },
];

/// A claim of the driver's class.
fn claim(driver: &Driver, name: &str, mode: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": { "name": name },
        "spec": claim_spec(driver, mode),
    })
}

fn claim_spec(driver: &Driver, mode: &str) -> Value {
    json!({
        "storageClassName": driver.name,
        "accessModes": [mode],
        "resources": { "requests": { "storage": "8Mi" } },
    })
}

/// A spec whose container has `volumes` at `/<name of the volume>`.
pub(super) fn spec_with(cluster: &ClusterNode, script: &str, volumes: &[Value]) -> Value {
    let mut spec = spec(&cluster.name, script);
    let mounts: Vec<Value> = volumes
        .iter()
        .map(|volume| {
            let name = volume["name"].as_str().unwrap_or_default();
            json!({ "name": name, "mountPath": format!("/{name}") })
        })
        .collect();
    spec["terminationGracePeriodSeconds"] = json!(1);
    spec["containers"][0]["volumeMounts"] = json!(mounts);
    spec["volumes"] = json!(volumes);
    spec
}

pub(super) fn claimed(volume: &str, claim: &str) -> Value {
    json!({ "name": volume, "persistentVolumeClaim": { "claimName": claim } })
}

/// Runs a command in the pod's container.
pub(super) fn exec(cluster: &ClusterNode, pod: &str, script: &str) -> anyhow::Result<String> {
    cluster.kubectl(&["exec", pod, "--", "sh", "-c", script])
}

fn stateful_set(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let driver = Driver::deploy(cluster)?;
    let script = format!("echo $HOSTNAME >> /data/starts; {OBEDIENT}");
    let mut spec = spec_with(cluster, &script, &[json!({ "name": "data" })]);
    spec.as_object_mut().context("a spec is an object")?.remove("volumes");
    let template = json!({ "metadata": { "name": "data" }, "spec": claim_spec(&driver, "ReadWriteOnce") });
    cluster.apply(json!({
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": { "name": "db" },
        "spec": {
            "serviceName": "db",
            "replicas": 2,
            "podManagementPolicy": "Parallel",
            "selector": { "matchLabels": { "app": "db" } },
            "template": { "metadata": { "labels": { "app": "db" } }, "spec": spec },
            "volumeClaimTemplates": [template],
        },
    }))?;
    for pod in ["db-0", "db-1"] {
        cluster.wait_running(pod, 120)?;
    }
    let first = cluster.pod("db-0")?.uid().to_owned();
    cluster.kubectl(&["delete", "pod", "db-0"])?;
    cluster.wait("another pod has its place", 60, |cluster| {
        let pod = cluster.pod("db-0")?;
        ensure!(pod.uid() != first, "it is still the first one");
        pod.check_running()
    })?;
    check_starts(cluster, &[2, 1])?;
    scale_to_none(cluster)?;
    // The claims are kept, and bound again.
    cluster.kubectl(&["scale", "statefulset/db", "--replicas=3"])?;
    for pod in ["db-0", "db-1", "db-2"] {
        cluster.wait_running(pod, 120)?;
    }
    check_starts(cluster, &[3, 2, 1])?;
    scale_to_none(cluster)?;
    cluster.kubectl(&["delete", "statefulset/db", "pvc/data-db-0", "pvc/data-db-1", "pvc/data-db-2"])?;
    driver.wait_nothing_left(cluster, 90)?;
    driver.remove(cluster)
}

/// Each pod of the StatefulSet finds that many starts on its volume, all of them its own.
fn check_starts(cluster: &ClusterNode, counts: &[usize]) -> anyhow::Result<()> {
    for (number, count) in counts.iter().enumerate() {
        let name = format!("db-{number}");
        let starts = exec(cluster, &name, "cat /data/starts")?;
        ensure!(starts == format!("{name}\n").repeat(*count), "{name} found {starts:?}");
    }
    Ok(())
}

fn scale_to_none(cluster: &ClusterNode) -> anyhow::Result<()> {
    cluster.kubectl(&["scale", "statefulset/db", "--replicas=0"])?;
    cluster.wait("its pods are gone", 60, |cluster| {
        let left: Vec<_> = cluster.pods()?.iter().map(|pod| pod.name().to_owned()).collect();
        ensure!(left.iter().all(|name| !name.starts_with("db-")), "{left:?}");
        Ok(())
    })
}

fn ephemeral(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let driver = Driver::deploy(cluster)?;
    let inline = json!({ "name": "inline", "csi": { "driver": driver.name } });
    let generic = json!({ "name": "generic", "ephemeral": {
        "volumeClaimTemplate": { "spec": claim_spec(&driver, "ReadWriteOnce") },
    } });
    let script = format!("echo of-$HOSTNAME | tee /inline/a > /generic/a; {OBEDIENT}");
    let spec = spec_with(cluster, &script, &[inline, generic]);
    cluster.apply_all(vec![pod("one", &spec), pod("two", &spec)])?;
    for name in ["one", "two"] {
        cluster.wait_running(name, 120)?;
        let written = exec(cluster, name, "cat /inline/a /generic/a")?;
        ensure!(written == format!("of-{name}\nof-{name}\n"), "{name} has {written:?}");
    }
    let volumes = driver.volumes(cluster)?;
    let inline = volumes.iter().filter(|volume| volume["Ephemeral"] == true).count();
    ensure!(volumes.len() == 4 && inline == 2, "the driver has {volumes:?}");
    cluster.kubectl(&["delete", "pod", "one", "two"])?;
    driver.wait_nothing_left(cluster, 90)?;
    let claims = cluster.kubectl(&["get", "pvc", "-o", "name"])?;
    ensure!(claims.is_empty(), "claims are left: {claims}");
    driver.remove(cluster)
}

fn block(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let driver = Driver::deploy(cluster)?;
    let mut raw = claim(&driver, "raw", "ReadWriteOnce");
    raw["spec"]["volumeMode"] = json!("Block");
    cluster.apply(raw)?;
    let write = "echo through-the-device | dd of=/dev/raw bs=64 seek=1 conv=notrunc,sync && sync";
    let mut writer = spec(&cluster.name, &format!("[ -b /dev/raw ] && {write} && {OBEDIENT}"));
    writer["terminationGracePeriodSeconds"] = json!(1);
    writer["containers"][0]["volumeDevices"] = json!([{ "name": "raw", "devicePath": "/dev/raw" }]);
    writer["volumes"] = json!([claimed("raw", "raw")]);
    let mut reader = writer.clone();
    reader["containers"][0]["command"] = json!(["sh", "-c", OBEDIENT]);
    for (name, spec) in [("writer", writer), ("reader", reader)] {
        cluster.apply(pod(name, &spec))?;
        cluster.wait_running(name, 120)?;
        cluster.wait("what was written is on the device", 10, |cluster| {
            let read = exec(cluster, name, "dd if=/dev/raw bs=64 skip=1 count=1 2>/dev/null | tr -d '\\0'")?;
            ensure!(read == "through-the-device\n", "{name} reads {read:?}");
            Ok(())
        })?;
        cluster.kubectl(&["delete", "pod", name])?;
    }
    cluster.kubectl(&["delete", "pvc", "raw"])?;
    driver.wait_nothing_left(cluster, 90)?;
    driver.remove(cluster)
}

/// The pods name their node themselves: the scheduler, which also knows the rule, would not let the second one reach it.
fn once_per_pod(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let driver = Driver::deploy(cluster)?;
    cluster.apply(claim(&driver, "data", "ReadWriteOncePod"))?;
    wait_bound(cluster, "data")?;
    let bound = |script: &str| {
        let mut spec = spec_with(cluster, script, &[claimed("data", "data")]);
        spec["nodeName"] = json!(cluster.name);
        spec
    };
    cluster.apply(pod("first", &bound(&format!("echo first > /data/by; {OBEDIENT}"))))?;
    cluster.wait_running("first", 120)?;
    cluster.apply(pod("second", &bound(OBEDIENT)))?;
    let message = "volume uses the ReadWriteOncePod access mode and is already in use by another pod";
    let event = wait_event(cluster, "second", "FailedMount", message)?;
    ensure!(event["type"] == "Warning", "{event}");
    ensure!(cluster.pod("second")?.phase() == "Pending", "the second pod does not wait");
    cluster.kubectl(&["delete", "pod", "first"])?;
    cluster.wait_running("second", 150)?;
    let by = exec(cluster, "second", "cat /data/by")?;
    ensure!(by == "first\n", "the second pod finds {by:?}");
    cluster.kubectl(&["delete", "pod/second", "pvc/data"])?;
    driver.wait_nothing_left(cluster, 90)?;
    driver.remove(cluster)
}

fn wait_bound(cluster: &ClusterNode, claim: &str) -> anyhow::Result<()> {
    cluster.wait(&format!("claim {claim} is bound"), 60, |cluster| {
        let claim = cluster.object("v1", &format!("persistentvolumeclaims/{claim}"))?;
        ensure!(claim["status"]["phase"] == "Bound", "{}", claim["status"]);
        Ok(())
    })
}

/// Waits for an event about an object of the namespace with this reason and this text in its message.
fn wait_event(cluster: &ClusterNode, object: &str, reason: &str, message: &str) -> anyhow::Result<Value> {
    cluster.wait(&format!("event {reason} of {object}"), 60, |cluster| {
        let mut events = cluster.plane().api().list(&format!("/api/v1/namespaces/{}/events", cluster.name))?;
        events.retain(|event| event["involvedObject"]["name"] == object);
        let says = |event: &Value| event["message"].as_str().is_some_and(|text| text.contains(message));
        let event = events.iter().find(|event| event["reason"] == reason && says(event)).cloned();
        event.with_context(|| format!("no {message:?} in events: {events:?}"))
    })
}

/// No pod of the test is left, but the driver's.
fn wait_only_driver(cluster: &ClusterNode, limit_secs: u64) -> anyhow::Result<()> {
    cluster.wait("the test's pods are gone", limit_secs, |cluster| {
        let pods = cluster.pods()?;
        let left: Vec<&str> = pods.iter().map(PodSeen::name).filter(|name| !driver::is_own(name)).collect();
        ensure!(left.is_empty(), "left: {left:?}");
        Ok(())
    })
}
