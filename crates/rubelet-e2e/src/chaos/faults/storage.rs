//! Faults of file systems: one that hangs under pods, and one that is full under the agent.

use std::{
    fs::{self, File},
    io::Write as _,
    path::PathBuf,
    time::Duration,
};

use anyhow::Context as _;
use serde_json::{Value, json};

use super::Injected;
use crate::{
    chaos::{exam::Exam, verify::Expected},
    e2e::cluster::{OBEDIENT, spec},
    fuse::FuseMount,
};

/// More than any pool of threads that an agent may have for blocking calls.
const ON_HUNG_MOUNT: usize = 75;
/// Between two of them: other starts should wait for the mount, if for anything, and not for 75 sandboxes made at once.
const BETWEEN_PODS: Duration = Duration::from_millis(200);
/// For each other place where a file system can hang.
const FEW: usize = 5;

#[derive(Debug)]
struct Hung {
    /// The directory that pods have as a volume.
    dir: PathBuf,
    /// Appears when the containers that wait for it should end.
    signal: PathBuf,
    scratch: Vec<String>,
    ending: Vec<String>,
    users: Vec<String>,
    /// How many of them were created.
    created: usize,
    mounts: Vec<FuseMount>,
}

/// A mount that never answers: below volumes of pods to start, below an emptyDir of pods that are deleted, and below the
/// termination messages of containers that end.
pub fn hung_mount(exam: &mut Exam) -> anyhow::Result<Box<dyn Injected>> {
    let names = |kind: &str, count| (0..count).map(|number| format!("{kind}-{number}")).collect::<Vec<_>>();
    let hung = Hung {
        dir: exam.dir("hung")?,
        signal: exam.dir("signals")?.join("end"),
        scratch: names("scratch", FEW),
        ending: names("ending", FEW),
        users: names("user", ON_HUNG_MOUNT),
        created: 0,
        mounts: Vec::new(),
    };
    fs::create_dir_all(hung.dir.join("part"))?;
    let _ = fs::remove_file(&hung.signal);
    for name in &hung.scratch {
        exam.create(name, &with_volume(json!({ "emptyDir": {} }), &json!({}), OBEDIENT), Expected::Ready)?;
    }
    let source = json!({ "hostPath": { "path": exam.dir("signals")? } });
    for name in &hung.ending {
        let mut spec = with_volume(source.clone(), &json!({}), "while [ ! -e /volume/end ]; do sleep 1; done");
        spec["restartPolicy"] = json!("Never");
        exam.create(name, &spec, Expected::Ready)?;
    }
    exam.settle(Duration::from_secs(120)).context("the fault's pods run")?;
    Ok(Box::new(hung))
}

impl Hung {
    fn pod_dir(exam: &Exam, pod: &str) -> anyhow::Result<PathBuf> {
        Ok(exam.cluster.node.agent.root_dir().join("pods").join(exam.pod(pod)?.uid()))
    }
}

impl Injected for Hung {
    fn strike(&mut self, exam: &mut Exam) -> anyhow::Result<()> {
        self.mounts.push(FuseMount::hung(&self.dir)?);
        for name in &self.scratch {
            let volume = Hung::pod_dir(exam, name)?.join("volumes/kubernetes.io~empty-dir/volume");
            self.mounts.push(FuseMount::hung(&volume)?);
            exam.delete(name)?;
        }
        for name in &self.ending {
            self.mounts.push(FuseMount::hung(&Hung::pod_dir(exam, name)?.join("containers/main"))?);
            exam.expect(name, Expected::Succeeded);
        }
        fs::write(&self.signal, "")?;
        Ok(())
    }

    fn tick(&mut self, exam: &mut Exam, since: Duration, _hold: Duration) -> anyhow::Result<()> {
        for (number, name) in self.users.iter().enumerate().skip(self.created) {
            if since < BETWEEN_PODS * u32::try_from(number)? {
                break;
            }
            let source =
                json!({ "hostPath": { "path": self.dir, "type": if number % 2 == 0 { "Directory" } else { "" } } });
            let part = if number % 2 == 0 { json!({}) } else { json!({ "subPath": "part" }) };
            exam.create(name, &with_volume(source, &part, OBEDIENT), Expected::Ready)?;
            self.created += 1;
        }
        Ok(())
    }

    fn end(&mut self, _exam: &mut Exam) -> anyhow::Result<()> {
        self.mounts.iter_mut().for_each(FuseMount::release);
        Ok(())
    }

    fn clean_up(&mut self, exam: &mut Exam) -> anyhow::Result<()> {
        exam.remove(&[self.scratch.as_slice(), &self.ending, &self.users[..self.created]].concat())
    }

    fn note(&self) -> String {
        format!("{} pods on the mount", self.created)
    }
}

/// A busybox pod with one volume at `/volume`; `part` has more fields of its mount.
fn with_volume(source: Value, part: &Value, script: &str) -> Value {
    let mut spec = spec("", script);
    let mut volume = source;
    volume["name"] = json!("volume");
    let mut mount = json!({ "name": "volume", "mountPath": "/volume" });
    if let (Some(mount), Some(part)) = (mount.as_object_mut(), part.as_object()) {
        mount.extend(part.clone());
    }
    spec["volumes"] = json!([volume]);
    spec["containers"][0]["volumeMounts"] = json!([mount]);
    spec
}

/// The agent's root directory has no room.
#[derive(Debug)]
struct DiskFull {
    path: PathBuf,
    file: Option<File>,
}

pub fn disk_full(exam: &mut Exam) -> anyhow::Result<Box<dyn Injected>> {
    let path = exam.cluster.node.agent.root_dir().join("filler");
    Ok(Box::new(DiskFull { path, file: None }))
}

impl DiskFull {
    /// Takes what is free: whole blocks first, then the rest.
    fn fill(&mut self) {
        let Some(file) = &mut self.file else { return };
        for size in [1 << 20, 1 << 12, 1] {
            while file.write(&vec![0; size]).is_ok_and(|written| written > 0) {}
        }
    }
}

impl Injected for DiskFull {
    fn strike(&mut self, _exam: &mut Exam) -> anyhow::Result<()> {
        self.file = Some(File::create(&self.path)?);
        self.fill();
        Ok(())
    }

    /// Pods that end free some of it.
    fn tick(&mut self, _exam: &mut Exam, _since: Duration, _hold: Duration) -> anyhow::Result<()> {
        self.fill();
        Ok(())
    }

    fn end(&mut self, _exam: &mut Exam) -> anyhow::Result<()> {
        self.file = None;
        fs::remove_file(&self.path).context("free the agent's disk")
    }
}
