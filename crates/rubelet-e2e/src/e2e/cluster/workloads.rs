//! Workloads: plain pods, Deployments, Jobs, StatefulSets, DaemonSets, with upstream's controllers, which
//! depend on the agent's reports.

use std::collections::BTreeSet;

use anyhow::{Context as _, ensure};
use rubelet_testbed::image::BUSYBOX;
use serde_json::{Value, json};

use crate::e2e::{
    cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, pod, recorder, spec},
    node::PodSeen,
};

pub const CASES: &[ClusterCase] = &[
    ClusterCase {
        name: "a Deployment goes from 0 to 20 and back, and rolls out",
        plane: Plane::Shared,
        run: deployment,
    },
    ClusterCase { name: "kubectl run starts a pod, kubectl delete ends it", plane: Plane::Shared, run: by_hand },
    ClusterCase {
        name: "a changed image restarts a container of a pod that never restarts",
        plane: Plane::Shared,
        run: changed_image,
    },
    ClusterCase { name: "a Job tries again after a failure and completes", plane: Plane::Shared, run: job },
    ClusterCase { name: "StatefulSets and DaemonSets keep their pods", plane: Plane::Shared, run: sets },
];

const REPLICAS: u64 = 20;

fn by_hand(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let record = cluster.record()?;
    let node = json!({ "spec": { "nodeName": cluster.name, "terminationGracePeriodSeconds": 2 } }).to_string();
    let image = format!("--image={BUSYBOX}");
    cluster.kubectl(&["run", "web", &image, "--overrides", &node, "--command", "--", "sh", "-c", OBEDIENT])?;
    let pod = cluster.wait_running("web", 60)?;
    ensure!(pod.status()["hostIP"].is_string() && pod.status()["startTime"].is_string(), "{}", pod.status());
    let events = cluster.wait("its events", 10, |cluster| {
        let events = cluster.plane().api().list(&format!("/api/v1/namespaces/{}/events", cluster.name))?;
        let reasons: BTreeSet<String> =
            events.iter().filter_map(|event| event["reason"].as_str().map(str::to_owned)).collect();
        ensure!(reasons.contains("Started"), "{reasons:?}");
        Ok(reasons)
    })?;
    for reason in ["Pulled", "Created", "Started"] {
        ensure!(events.contains(reason), "no event {reason} among {events:?}");
    }
    cluster.kubectl(&["delete", "pod", "web"])?;
    cluster.wait_none(20)?;
    recorder::check_order(&record.finish()?)
}

fn changed_image(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let mut spec = spec(&cluster.name, OBEDIENT);
    spec["restartPolicy"] = json!("Never");
    cluster.apply(pod("once", &spec))?;
    cluster.wait_running("once", 60)?;
    // Another name of the same image is a change, too.
    let other = BUSYBOX.rsplit('/').next().context("an image has a name")?;
    cluster.kubectl(&["set", "image", "pod/once", &format!("main={other}")])?;
    cluster.wait("it runs again", 40, |cluster| {
        let pod = cluster.pod("once")?;
        let main = &pod.status()["containerStatuses"][0];
        ensure!(main["restartCount"] == 1 && main["state"]["running"].is_object(), "{main}");
        ensure!(pod.status()["phase"] == "Running", "{}", pod.status());
        Ok(())
    })?;
    cluster.kubectl(&["delete", "pod", "once"])?;
    cluster.wait_none(30)
}

fn deployment(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let record = cluster.record()?;
    let name = cluster.name.clone();
    let template = |version: &str| {
        let mut spec = spec(&name, OBEDIENT);
        spec["terminationGracePeriodSeconds"] = json!(1);
        json!({ "metadata": { "labels": { "app": "web", "version": version } }, "spec": spec })
    };
    let object = |replicas: u64, version: &str| workload("Deployment", "web", replicas, &template(version));
    cluster.apply(object(0, "one"))?;
    cluster.kubectl(&["scale", "deployment/web", &format!("--replicas={REPLICAS}")])?;
    cluster.wait("20 replicas are ready", 180, |cluster| {
        let status = cluster.object("apps/v1", "deployments/web")?["status"].take();
        ensure!(status["readyReplicas"] == REPLICAS, "{status}");
        Ok(())
    })?;
    cluster.kubectl(&["scale", "deployment/web", "--replicas=3"])?;
    cluster.wait("three replicas are left", 120, |cluster| {
        let left = cluster.pods()?.len();
        ensure!(left == 3, "{left} pods");
        Ok(())
    })?;
    cluster.apply(object(3, "two"))?;
    cluster.kubectl(&["rollout", "status", "deployment/web", "--timeout=50s"])?;
    cluster.wait("only the new version runs", 60, |cluster| {
        let versions: Vec<String> = cluster.pods()?.iter().map(|pod| pod.label("version").to_owned()).collect();
        ensure!(versions == ["two"; 3], "{versions:?}");
        Ok(())
    })?;
    cluster.kubectl(&["scale", "deployment/web", "--replicas=0"])?;
    cluster.wait_none(120)?;
    recorder::check_order(&record.finish()?)
}

fn job(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let record = cluster.record()?;
    let notes = cluster.node.notes("job");
    // The first run of each fails.
    let flaky = |policy: &str| {
        let mut spec = spec(&cluster.name, &format!("[ -e /notes/{policy} ] && exit 0; touch /notes/{policy}; exit 3"));
        spec["restartPolicy"] = json!(policy);
        spec["containers"][0]["volumeMounts"] = json!([{ "name": "notes", "mountPath": "/notes" }]);
        spec["volumes"] = json!([{ "name": "notes", "hostPath": { "path": notes, "type": "DirectoryOrCreate" } }]);
        spec
    };
    for (name, policy) in [("anew", "Never"), ("again", "OnFailure")] {
        cluster.apply(json!({
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": { "name": name },
            "spec": { "backoffLimit": 3, "template": { "spec": flaky(policy) } },
        }))?;
    }
    for name in ["anew", "again"] {
        cluster.wait(&format!("job {name} completes"), 90, |cluster| {
            let status = cluster.object("batch/v1", &format!("jobs/{name}"))?["status"].take();
            ensure!(status["succeeded"] == 1, "{status}");
            Ok(())
        })?;
    }
    let pods = cluster.pods()?;
    let phases = |job: &str| {
        let of_job = pods.iter().filter(|pod| pod.label("job-name") == job);
        of_job.map(|pod| (pod.phase().to_owned(), restarts(pod))).collect::<BTreeSet<_>>()
    };
    let anew = phases("anew");
    ensure!(anew == BTreeSet::from([("Failed".to_owned(), 0), ("Succeeded".to_owned(), 0)]), "anew: {anew:?}");
    let again = phases("again");
    ensure!(again == BTreeSet::from([("Succeeded".to_owned(), 1)]), "again: {again:?}");
    let failed = pods.iter().find(|pod| pod.phase() == "Failed").context("no failed pod")?;
    let ended = &failed.container("main")["state"]["terminated"];
    ensure!(ended["exitCode"] == 3 && ended["reason"] == "Error", "{ended}");
    cluster.kubectl(&["delete", "job", "anew", "again"])?;
    cluster.wait_none(60)?;
    recorder::check_order(&record.finish()?)
}

fn sets(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let record = cluster.record()?;
    let template =
        |app: &str| json!({ "metadata": { "labels": { "app": app } }, "spec": spec(&cluster.name, OBEDIENT) });
    let mut daemons = workload("DaemonSet", "agent", 1, &template("agent"));
    daemons["spec"].as_object_mut().expect("a spec is an object").remove("replicas");
    let mut stateful = workload("StatefulSet", "db", 3, &template("db"));
    stateful["spec"]["serviceName"] = json!("db");
    cluster.apply_all(vec![daemons, stateful])?;
    let ready = |cluster: &ClusterNode| {
        let db = cluster.object("apps/v1", "statefulsets/db")?["status"].take();
        ensure!(db["readyReplicas"] == 3, "db: {db}");
        let agent = cluster.object("apps/v1", "daemonsets/agent")?["status"].take();
        ensure!(agent["numberReady"] == 1, "agent: {agent}");
        Ok(())
    };
    cluster.wait("all are ready", 120, ready)?;
    let pods = cluster.pods()?;
    let names: Vec<&str> = pods.iter().map(PodSeen::name).filter(|name| name.starts_with("db-")).collect();
    ensure!(names == ["db-0", "db-1", "db-2"], "{names:?}");
    // Each was ready before the next one started.
    let started =
        |pod: &str| cluster.pod(pod).map(|pod| pod.status()["startTime"].as_str().unwrap_or_default().to_owned());
    ensure!(
        started("db-0")? <= started("db-1")? && started("db-1")? <= started("db-2")?,
        "they did not start in order"
    );
    let before = cluster.pod("db-1")?.uid().to_owned();
    cluster.kubectl(&["delete", "pod", "db-1"])?;
    cluster.kubectl(&["delete", "pod", "--selector=app=agent"])?;
    cluster.wait("another pod has the same name", 60, |cluster| {
        let pod = cluster.pod("db-1")?;
        ensure!(pod.uid() != before, "it is still the old one");
        pod.check_running()
    })?;
    cluster.wait("all are ready again", 60, ready)?;
    cluster.kubectl(&["delete", "statefulset/db", "daemonset/agent"])?;
    cluster.wait_none(60)?;
    recorder::check_order(&record.finish()?)
}

fn workload(kind: &str, name: &str, replicas: u64, template: &Value) -> Value {
    json!({
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": { "name": name },
        "spec": {
            "replicas": replicas,
            "selector": { "matchLabels": { "app": template["metadata"]["labels"]["app"] } },
            "template": template,
        },
    })
}

fn restarts(pod: &PodSeen) -> i64 {
    pod.container("main")["restartCount"].as_i64().unwrap_or(-1)
}
