//! Tests that count the resources of a process, and therefore run in their own.

use std::{process::Command, time::Duration};

use tokio::time::{sleep, timeout};

/// Runs the test in its own process, where descriptors can be counted; returns whether this is that process.
pub(crate) fn is_alone(module: &str, test: &str) -> bool {
    const ALONE: &str = "RUBELET_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let name = format!("{}::{test}", module.split_once("::").unwrap().1);
    let run = Command::new(std::env::current_exe().unwrap()).args(["--exact", &name]).env(ALONE, "1").output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stdout));
    assert!(String::from_utf8_lossy(&run.stdout).contains("1 passed"), "no test is named {name}");
    false
}

pub(crate) fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// The number of abandoned streams: more than a node has in a day.
pub(crate) fn many() -> usize {
    std::env::var("RUBELET_TEST_STREAMS").map_or(1_000, |text| text.parse().unwrap())
}

/// Waits until at most these tasks are left: the listener, and those unrelated to streams.
pub(crate) async fn settle(tasks: usize) {
    let alive = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let quiet = async {
        while alive() > tasks {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_secs(30), quiet).await.unwrap_or_else(|_| panic!("{} tasks are left", alive()));
}
