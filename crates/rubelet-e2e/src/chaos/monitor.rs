//! What is sampled all the time: the age of the node's lease and the agent's memory.
//!
//! Owns: the thread that samples, and the highest values since the last reset.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::Context as _;
use jiff::Timestamp;
use rubelet_testbed::{clock, process};

use crate::{control_plane::api::Api, e2e::lock};

const EVERY: Duration = Duration::from_millis(500);

#[derive(Clone, Copy, Debug, Default)]
pub struct Peaks {
    /// Seconds since the lease was renewed.
    pub lease_secs: f64,
    pub resident_mb: f64,
}

#[derive(Debug)]
pub struct Monitor {
    peaks: Arc<Mutex<Peaks>>,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Monitor {
    pub fn start(api: Api, node: &str, pid_file: PathBuf) -> Self {
        let peaks = Arc::new(Mutex::new(Peaks::default()));
        let is_over = Arc::new(AtomicBool::new(false));
        let (seen, over) = (Arc::clone(&peaks), Arc::clone(&is_over));
        let lease = format!("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{node}");
        let thread = thread::spawn(move || {
            while !over.load(Ordering::Relaxed) {
                // The API server and the agent may be away for a moment.
                let age = lease_age(&api, &lease).unwrap_or_default();
                let resident = resident_mb(&pid_file).unwrap_or_default();
                let mut peaks = lock(&seen);
                peaks.lease_secs = peaks.lease_secs.max(age);
                peaks.resident_mb = peaks.resident_mb.max(resident);
                drop(peaks);
                thread::sleep(EVERY);
            }
        });
        Monitor { peaks, is_over, thread: Some(thread) }
    }

    pub fn reset(&self) {
        *lock(&self.peaks) = Peaks::default();
    }

    pub fn peaks(&self) -> Peaks {
        *lock(&self.peaks)
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // Its values are not used any more.
            let _ = thread.join();
        }
    }
}

fn lease_age(api: &Api, path: &str) -> anyhow::Result<f64> {
    let lease = api.get(path)?;
    let renewed: Timestamp = lease["spec"]["renewTime"].as_str().context("no renewTime")?.parse()?;
    Ok(Timestamp::try_from(clock::wall())?.duration_since(renewed).as_secs_f64())
}

fn resident_mb(pid_file: &Path) -> Option<f64> {
    let status = fs::read_to_string(format!("/proc/{}/status", process::from_pid_file(pid_file)?.pid)).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.split_whitespace().next()?.parse::<f64>().ok()? / 1024.0)
}
