//! Tests that the rules of CSI volumes can be broken.

use std::path::{Path, PathBuf};

use rubelet_csi::{AccessMode, CsiError};
use rubelet_kube::port::{ObjectPath, Verb};
use serde_json::{Value, json};

use super::*;
use crate::{
    csi::{
        act::CsiAct,
        attacher::Attachment,
        driver::{Device, DriverScript},
        objects::ClaimScript,
    },
    invariants::csi::KUBELET,
    play::predicates::NODE,
};

const DRIVER: &str = "d.sim";

/// What an agent would do, call by call: no call is checked here but by the rules.
struct Node<'a> {
    sim: &'a mut SimState,
    device: Device,
}

fn staging(device: &Device) -> PathBuf {
    device.staging_dir().join("globalmount")
}

fn target(uid: &str) -> PathBuf {
    Path::new(KUBELET).join("pods").join(uid).join("volumes/kubernetes.io~csi/pv-data/mount")
}

impl Node<'_> {
    fn call(&mut self, act: &CsiAct) {
        self.sim.check_csi_call(DRIVER, act);
        self.sim.rules.csi_begins(self.sim.now, DRIVER, act);
        let answer: Result<(), CsiError> = self.sim.perform_csi(DRIVER, act);
        self.sim.rules.csi_returned(DRIVER, act);
        if answer.is_ok() {
            self.sim.rules.csi_succeeded(act);
        }
    }

    fn attach(&mut self) -> &mut Self {
        self.sim.csi.attachments.insert(self.device.clone(), Attachment::Attached);
        self
    }

    fn report_in_use(&mut self, is_in_use: bool) -> &mut Self {
        let names = if is_in_use { vec![self.device.unique_name()] } else { Vec::new() };
        let path = ObjectPath::all("v1", "nodes").named(NODE).sub("status");
        let mut node = self.sim.ask(Verb::Get, path.clone(), Value::Null).unwrap();
        node["status"]["volumesInUse"] = names.into();
        self.sim.ask(Verb::Update, path, node).unwrap();
        self
    }

    fn stage(&mut self) -> &mut Self {
        self.stage_with("")
    }

    fn stage_with(&mut self, options: &str) -> &mut Self {
        let staging = staging(&self.device);
        self.sim.disk.make_dir(&staging, 0o750).unwrap();
        self.call(&CsiAct::Stage { handle: self.device.handle.clone(), staging, options: options.to_owned() });
        self
    }

    fn unstage(&mut self) -> &mut Self {
        let act = CsiAct::Unstage { handle: self.device.handle.clone(), staging: staging(&self.device) };
        self.call(&act);
        self
    }

    fn publish(&mut self, uid: &str) -> &mut Self {
        self.sim.disk.make_dir(target(uid).parent().unwrap(), 0o750).unwrap();
        let act = self.publication(uid);
        self.call(&act);
        self
    }

    fn publication(&self, uid: &str) -> CsiAct {
        let (handle, staging) = (self.device.handle.clone(), Some(staging(&self.device)));
        CsiAct::Publish { handle, staging, target: target(uid), mode: AccessMode::SingleNodeWriter }
    }

    fn unpublish(&mut self, uid: &str) -> &mut Self {
        let act = CsiAct::Unpublish { handle: self.device.handle.clone(), target: target(uid) };
        self.call(&act);
        self
    }

    /// A container of the pod, which mounts the volume.
    fn start(&mut self, uid: &str) -> &mut Self {
        let home = sandbox(self.sim, uid, 0);
        let mount = v1::Mount { host_path: target(uid).to_string_lossy().into_owned(), ..Default::default() };
        let config = v1::ContainerConfig {
            metadata: Some(v1::ContainerMetadata { name: "app".into(), attempt: 0 }),
            image: Some(v1::ImageSpec { image: IMAGE.into(), ..Default::default() }),
            command: vec!["sim".into(), "run".into()],
            mounts: vec![mount],
            ..Default::default()
        };
        let id = self.sim.perform(&Act::Create { sandbox: home, config: Arc::new(config) }).unwrap();
        self.sim.perform(&Act::Start(id)).unwrap();
        self
    }
}

fn broken_on(claim: &ClaimScript, steps: impl FnOnce(&mut Node<'_>)) -> Vec<&'static str> {
    broken_by_pod(&PodScript::from("web").claim("data"), claim, steps)
}

fn broken_by_pod(pod: &PodScript, claim: &ClaimScript, steps: impl FnOnce(&mut Node<'_>)) -> Vec<&'static str> {
    broken_by(pod, |sim| {
        let node = json!({ "metadata": { "name": NODE } });
        sim.ask(Verb::Create, ObjectPath::all("v1", "nodes"), node).unwrap();
        sim.install_driver(DriverScript::from(DRIVER).labelled());
        sim.create_claim(claim);
        steps(&mut Node { sim, device: claim.device() });
    })
}

fn broken(steps: impl FnOnce(&mut Node<'_>)) -> Vec<&'static str> {
    broken_on(&ClaimScript::new("data", DRIVER), steps)
}

#[test]
fn volume_used_in_order_breaks_no_rule() {
    let broken = broken(|node| {
        node.attach().report_in_use(true).stage().publish("u1").publish("u2").start("u1");
        node.unpublish("u2");
        let ids: Vec<String> = node.sim.runtime.running().map(|it| it.id.clone()).collect();
        ids.iter().for_each(|id| node.sim.exit_container(id, 0, "Completed"));
        node.unpublish("u1").unstage().report_in_use(false);
        node.sim.check_detach(&node.device.clone());
    });
    assert_eq!(broken, Vec::<&str>::new());
}

#[test]
fn use_before_attachment_or_report_breaks_a_rule() {
    let rule = "a volume is used only when attached and reported in use";
    assert_eq!(
        broken(|node| {
            node.report_in_use(true).stage();
        }),
        [rule]
    );
    assert_eq!(
        broken(|node| {
            node.attach().stage();
        }),
        [rule]
    );
}

#[test]
fn publication_before_staging_breaks_a_rule() {
    let early = broken(|node| {
        node.attach().report_in_use(true).publish("u1");
    });
    assert_eq!(early, ["nothing is published before it is staged"]);
}

#[test]
fn unstaging_under_a_publication_breaks_a_rule() {
    let rule = "nothing is unstaged while it is published";
    let under = broken(|node| {
        node.attach().report_in_use(true).stage().publish("u1").unstage();
    });
    assert_eq!(under, [rule, rule], "the call, and what it did");
}

#[test]
fn second_pod_of_an_exclusive_volume_breaks_a_rule() {
    let claim = || ClaimScript::new("data", DRIVER).exclusive();
    let two = broken_on(&claim(), |node| {
        node.attach().report_in_use(true).stage().publish("u1").publish("u1").publish("u2");
    });
    let rule = "a ReadWriteOncePod volume has one pod";
    assert_eq!(two, [rule, rule], "the call, and what it did");
    for (claim, expected) in [(claim(), Some(rule)), (ClaimScript::new("data", DRIVER), None)] {
        let two_calls = broken_on(&claim, |node| {
            node.attach().report_in_use(true).stage();
            for uid in ["u1", "u2"] {
                let act = node.publication(uid);
                node.sim.check_csi_call(DRIVER, &act);
                node.sim.rules.csi_begins(node.sim.now, DRIVER, &act);
            }
        });
        assert_eq!(two_calls, Vec::from_iter(expected), "both calls are under way");
    }
}

#[test]
fn expansion_before_publication_breaks_a_rule() {
    let expand = |node: &mut Node<'_>| {
        let (handle, path) = (node.device.handle.clone(), target("u1"));
        node.call(&CsiAct::Expand { handle, path, bytes: 1 });
    };
    let early = broken(|node| {
        expand(node.attach().report_in_use(true).stage());
    });
    assert_eq!(early, ["nothing is expanded before it is published"]);
    let in_time = broken(|node| {
        expand(node.attach().report_in_use(true).stage().publish("u1"));
    });
    assert_eq!(in_time, [""; 0]);
}

#[test]
fn detachment_under_a_mount_or_a_call_breaks_a_rule() {
    let rule = "nothing is detached while it is staged";
    let under_mount = broken(|node| {
        node.attach().report_in_use(true).stage();
        node.sim.check_detach(&node.device.clone());
    });
    assert_eq!(under_mount, [rule]);
    let under_call = broken(|node| {
        let act = CsiAct::Stage {
            handle: node.device.handle.clone(),
            staging: staging(&node.device),
            options: String::new(),
        };
        node.sim.rules.csi_begins(node.sim.now, DRIVER, &act);
        node.sim.check_detach(&node.device.clone());
    });
    assert_eq!(under_call, [rule]);
}

#[test]
fn two_calls_on_one_path_break_a_rule() {
    let twice = broken(|node| {
        let act = CsiAct::Stage {
            handle: node.device.handle.clone(),
            staging: staging(&node.device),
            options: String::new(),
        };
        node.sim.rules.csi_begins(node.sim.now, DRIVER, &act);
        node.sim.rules.csi_begins(node.sim.now, DRIVER, &act);
    });
    assert_eq!(twice, ["one call per staging or target path"]);
}

#[test]
fn container_without_its_volume_breaks_a_rule() {
    let rule = "a container starts when its volumes are published";
    assert_eq!(
        broken(|node| {
            node.attach().report_in_use(true).stage().start("u1");
        }),
        [rule]
    );
    let unconfirmed = broken(|node| {
        node.attach().report_in_use(true).stage().publish("u1");
        node.sim.rules.mounts_forgotten();
        node.start("u1");
    });
    assert_eq!(unconfirmed, [rule], "its publication was not answered");
    let forgotten = broken(|node| {
        let home = sandbox(node.sim, "u1", 0);
        super::start(node.sim, &home, "app", 0);
    });
    assert_eq!(forgotten, [rule], "it has no mount of it");
}

#[test]
fn volume_with_the_label_of_another_pod_breaks_a_rule() {
    let (own, other) = (r#"context="u:r:t:s0:c1,c2""#, r#"context="u:r:t:s0:c3,c4""#);
    let rule = "a volume has the label of its pod";
    for (level, options, expected) in [
        (Some("s0:c1,c2"), own, None),
        (Some("s0:c1,c2"), other, Some(rule)),
        (Some("s0:c1,c2"), "", Some(rule)),
        (None, "", None),
        (None, own, Some(rule)),
    ] {
        let pod = level.into_iter().fold(PodScript::from("web").claim("data"), PodScript::level);
        let found = broken_by_pod(&pod, &ClaimScript::new("data", DRIVER).exclusive(), |node| {
            node.attach().report_in_use(true).stage_with(options).publish("u1").start("u1");
        });
        assert_eq!(found, Vec::from_iter(expected), "{level:?} on {options:?}");
    }
}

#[test]
fn unpublishing_under_a_container_breaks_a_rule() {
    let under = broken(|node| {
        node.attach().report_in_use(true).stage().publish("u1").start("u1").unpublish("u1");
    });
    assert_eq!(under, ["no volume is unpublished under a container"]);
}
