//! Runs the suite: ginkgo starts several processes of it and gives each the next spec.
//!
//! Owns: the flags of both, and the progress line.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, bail};
use rubelet_testbed::{
    clock::{self, Stopwatch},
    command::command,
    tail,
};

use crate::conformance::Options;

/// A full run takes a quarter of an hour on a quiet machine.
const LIMIT: Duration = Duration::from_secs(3 * 3600);

#[derive(Debug)]
pub struct Suite<'a> {
    /// The directory of ginkgo and the suite.
    pub bin: &'a Path,
    /// The directory of their output.
    pub out: &'a Path,
    pub kubeconfig: &'a Path,
    pub kubectl: &'a Path,
    /// The agent's root directory, where CSI drivers have their sockets.
    pub root_dir: &'a Path,
}

impl Suite<'_> {
    /// Runs to the end; returns ginkgo's report. Failed specs are no error.
    pub fn run(&self, options: &Options) -> anyhow::Result<PathBuf> {
        let (log, report) = (self.out.join("suite.log"), self.out.join("suite.json"));
        // An old report must not be taken for this run's.
        let _ = fs::remove_file(&report);
        let mut ginkgo = command(self.bin.join("ginkgo"), ["run", "--no-color", "--keep-going", "--timeout=3h"]);
        ginkgo.arg(format!("--procs={}", options.processes));
        ginkgo.arg(format!("--focus={}", options.focus)).arg(format!("--skip={}", options.skip));
        ginkgo.arg(format!("--output-dir={}", self.out.display())).arg("--json-report=suite.json");
        ginkgo.arg(self.bin.join("e2e.test")).arg("--");
        ginkgo.arg(format!("--kubeconfig={}", self.kubeconfig.display()));
        ginkgo.arg(format!("--kubectl-path={}", self.kubectl.display()));
        ginkgo.arg(format!("--kubelet-root-dir={}", self.root_dir.display()));
        ginkgo.args([
            "--provider=skeleton",
            "--num-nodes=1",
            "--disable-log-dump",
            "--e2e-verify-service-account=false",
        ]);
        let output = fs::File::create(&log)?;
        ginkgo.stdout(Stdio::from(output.try_clone()?)).stderr(Stdio::from(output));
        println!("running the suite, {} specs at a time; its output goes to {}", options.processes, log.display());
        let mut child = ginkgo.spawn().context("cannot run ginkgo")?;
        let watch = Stopwatch::start();
        let mut said = Progress::default();
        let ended = clock::poll(LIMIT, Duration::from_secs(5), || {
            let now = Progress::of(&fs::read_to_string(&log).unwrap_or_default());
            if now != said {
                println!("{:>5.0} s: {} passed, {} failed", watch.secs(), now.passed, now.failed);
                said = now;
            }
            child.try_wait().transpose()
        });
        if ended.is_none() {
            // Our child still runs: kill and reap it, so that nothing is left.
            let _ = child.kill();
            let _ = child.wait();
        }
        if !report.exists() {
            bail!("ginkgo wrote no report; the end of its output:\n{}", tail(&log, 20));
        }
        Ok(report)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Progress {
    passed: usize,
    failed: usize,
}

impl Progress {
    /// Ginkgo prints a dot for each spec that passed, and a headline for each that did not.
    fn of(log: &str) -> Self {
        let headlines = log.lines().filter(|line| line.starts_with("• [FAILED]")).count();
        let dots = log.matches('•').count();
        Progress { passed: dots.saturating_sub(headlines), failed: headlines }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dots_are_passed_specs_and_headlines_failed_ones() {
        let log = "SS•S••\n------\n• [FAILED] [3.2 seconds]\n[sig-node] Pods\n------\n•S\n";
        assert_eq!(Progress::of(log), Progress { passed: 4, failed: 1 });
    }
}
