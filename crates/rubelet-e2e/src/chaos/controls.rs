//! Control pods: one is created every few seconds and deleted once it ran. How long each takes to run shows whether a fault
//! reaches pods that have nothing to do with it.
//!
//! Owns: the thread that creates, watches and deletes them, and their times.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use rubelet_testbed::clock::Stopwatch;
use serde_json::{Value, json};

use crate::{
    control_plane::api::Api,
    e2e::{
        cluster::{OBEDIENT, pod, spec},
        lock,
    },
};

/// One pod more every so many seconds.
const EVERY_SECS: f64 = 3.0;
/// It is deleted when it has run this long.
const LIFE_SECS: f64 = 2.0;
/// The precision of the times.
const LOOK_EVERY: Duration = Duration::from_millis(100);
const LABEL: &str = "chaos";

/// Times are seconds since the exam began.
#[derive(Clone, Debug)]
struct Control {
    name: String,
    created: f64,
    running: Option<f64>,
    is_deleted: bool,
}

/// Start times of some control pods, in seconds, in rising order.
#[derive(Clone, Debug, Default)]
pub struct Starts {
    pub secs: Vec<f64>,
    /// Created in that time, and not running until now.
    pub waiting: usize,
}

impl Starts {
    pub fn median(&self) -> Option<f64> {
        // One that still waits is slower than every other.
        self.secs.get((self.secs.len() + self.waiting) / 2).copied()
    }

    pub fn max(&self) -> Option<f64> {
        if self.waiting > 0 { None } else { self.secs.last().copied() }
    }
}

#[derive(Debug)]
pub struct Controls {
    all: Arc<Mutex<Vec<Control>>>,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    epoch: Stopwatch,
}

impl Controls {
    pub fn start(api: Api, node: &str) -> Self {
        let all = Arc::new(Mutex::new(Vec::new()));
        let is_over = Arc::new(AtomicBool::new(false));
        let epoch = Stopwatch::start();
        let churn = Churn { api, node: node.to_owned(), all: Arc::clone(&all), epoch };
        let over = Arc::clone(&is_over);
        let thread = thread::spawn(move || {
            while !over.load(Ordering::Relaxed) {
                churn.step();
                thread::sleep(LOOK_EVERY);
            }
        });
        Controls { all, is_over, thread: Some(thread), epoch }
    }

    pub fn now(&self) -> f64 {
        self.epoch.secs()
    }

    /// Of the pods created in that time.
    pub fn between(&self, from: f64, to: f64) -> Starts {
        let all = lock(&self.all);
        let of_time = all.iter().filter(|control| (from..to).contains(&control.created));
        let (ran, waiting): (Vec<_>, Vec<_>) = of_time.partition(|control| control.running.is_some());
        let mut secs: Vec<f64> = ran.iter().filter_map(|control| Some(control.running? - control.created)).collect();
        secs.sort_by(f64::total_cmp);
        Starts { secs, waiting: waiting.len() }
    }

    /// Those created before this time that do not run yet.
    pub fn waiting_since(&self, before: f64) -> Vec<String> {
        let all = lock(&self.all);
        let late = all.iter().filter(|control| control.running.is_none() && control.created < before);
        late.map(|control| control.name.clone()).collect()
    }
}

impl Drop for Controls {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // Its pods go with the testbed.
            let _ = thread.join();
        }
    }
}

struct Churn {
    api: Api,
    node: String,
    all: Arc<Mutex<Vec<Control>>>,
    epoch: Stopwatch,
}

impl Churn {
    /// A request that fails is made again by the next step.
    fn step(&self) {
        let now = self.epoch.secs();
        let last = lock(&self.all).last().map(|control| control.created);
        if last.is_none_or(|last| now - last >= EVERY_SECS) {
            self.create();
        }
        let path = format!("{}?labelSelector={LABEL}%3Dcontrol", self.pods());
        if let Ok(pods) = self.api.list(&path) {
            self.note_running(&pods);
        }
        self.delete();
    }

    fn create(&self) {
        let name = format!("control-{}", lock(&self.all).len());
        let mut spec = spec(&self.node, OBEDIENT);
        spec["nodeName"] = json!(self.node);
        let mut pod = pod(&name, &spec);
        pod["metadata"]["labels"] = json!({ LABEL: "control" });
        let created = self.epoch.secs();
        if self.api.create(&self.pods(), &pod).is_ok() {
            lock(&self.all).push(Control { name, created, running: None, is_deleted: false });
        }
    }

    fn note_running(&self, pods: &[Value]) {
        let now = self.epoch.secs();
        let mut all = lock(&self.all);
        for pod in pods.iter().filter(|pod| pod["status"]["phase"] == "Running") {
            let control = all.iter_mut().rev().find(|control| pod["metadata"]["name"] == control.name.as_str());
            if let Some(control) = control {
                control.running.get_or_insert(now);
            }
        }
    }

    fn delete(&self) {
        let limit = self.epoch.secs() - LIFE_SECS;
        let of_age = |control: &&Control| !control.is_deleted && control.running.is_some_and(|at| at < limit);
        let ripe: Vec<String> = lock(&self.all).iter().filter(of_age).map(|control| control.name.clone()).collect();
        for name in ripe {
            if self.api.delete(&format!("{}/{name}", self.pods())).is_ok() {
                let mut all = lock(&self.all);
                all.iter_mut().filter(|control| control.name == name).for_each(|control| control.is_deleted = true);
            }
        }
    }

    fn pods(&self) -> String {
        format!("/api/v1/namespaces/{}/pods", self.node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_pod_counts_as_the_slowest() {
        let starts = |secs: &[f64], waiting| Starts { secs: secs.to_vec(), waiting };
        assert_eq!(starts(&[1.0, 2.0, 3.0], 0).median(), Some(2.0));
        assert_eq!(starts(&[1.0, 2.0, 3.0], 0).max(), Some(3.0));
        assert_eq!(starts(&[1.0, 2.0], 1).median(), Some(2.0));
        assert_eq!(starts(&[1.0], 2).median(), None);
        assert_eq!(starts(&[1.0], 2).max(), None);
    }
}
