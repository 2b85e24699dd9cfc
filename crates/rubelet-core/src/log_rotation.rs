//! Rotation of container logs.
//!
//! Owns: when the size of a log is looked at, which logs are rotated, and which rotated files are compressed. A log is looked
//! at when it is written to, at most once a second, and when it is expected to be full, so that a fast writer does not fill
//! the disk between two regular looks. Each look asks for a hint of the next write; without hints the regular looks remain.
//! Rotations never wait for compressions. Never: touches a file.
//! Upstream: `container_log_manager.go`, which looks at every log at a fixed interval and compresses before it rotates.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::{
    id::{ContainerId, PodRef, PodUid},
    observation::PodFacts,
    op::{LogOp, LogPlace},
    settings::LogSettings,
    time::{Now, Uptime},
};

/// The shortest time between two looks at one log. The names of rotated files have a resolution of a second, too.
const MIN_INTERVAL: Duration = Duration::from_secs(1);

/// The logs of running containers.
#[derive(Clone, Debug, Default)]
pub struct LogRotation {
    logs: BTreeMap<LogKey, Log>,
    /// By the path of their file, for hints.
    by_path: BTreeMap<String, LogKey>,
    /// When the next size is to be looked at; `None` without logs. The log may be gone by then.
    next_look: Option<Uptime>,
    /// A look is in flight.
    is_looking: bool,
    /// Full logs, in the order of their pods.
    to_rotate: BTreeSet<LogKey>,
    /// Logs with rotated files that are not compressed yet.
    to_compress: BTreeSet<LogKey>,
    under_way: BTreeSet<(LogTask, ContainerId)>,
}

type LogKey = (PodUid, ContainerId);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogTask {
    Rotate,
    Compress,
}

#[derive(Clone, Debug)]
struct Log {
    place: LogPlace,
    look_at: Uptime,
    /// At the last look.
    size_bytes: u64,
    sized_at: Uptime,
    bytes_per_sec: u64,
    /// Its last rotation failed: hints cause no look before this time.
    retry_at: Uptime,
}

impl LogRotation {
    /// Takes in a look at the pod: logs of containers that ended are left as they are.
    pub fn track(&mut self, pod: &PodRef, facts: &PodFacts, settings: &LogSettings, now: Now) {
        if settings.max_bytes.is_none() {
            return;
        }
        let running = || facts.running().filter(|container| !container.log_path.is_empty());
        self.forget(&pod.uid, |id| !running().any(|container| container.id == *id));
        for container in running() {
            // Soon, because only a look asks for hints.
            let look_at = now.uptime + MIN_INTERVAL;
            let log = || Log {
                place: LogPlace {
                    pod: pod.clone(),
                    container: container.name.clone(),
                    id: container.id.clone(),
                    path: container.log_path.clone(),
                },
                look_at,
                size_bytes: 0,
                sized_at: now.uptime,
                bytes_per_sec: 0,
                retry_at: now.uptime,
            };
            let key = (pod.uid.clone(), container.id.clone());
            self.logs.entry(key.clone()).or_insert_with(|| {
                self.next_look = Some(self.next_look.map_or(look_at, |next| next.min(look_at)));
                self.by_path.insert(container.log_path.clone(), key);
                log()
            });
        }
    }

    /// These files were written to since they were looked at. Others than the logs of running containers are ignored.
    pub fn written(&mut self, paths: &[String], now: Now) {
        for path in paths {
            let Some(log) = self.by_path.get(path).and_then(|key| self.logs.get_mut(key)) else { continue };
            let look_at = now.uptime.max(log.sized_at + MIN_INTERVAL).max(log.retry_at);
            log.look_at = log.look_at.min(look_at);
            self.next_look = Some(self.next_look.map_or(log.look_at, |next| next.min(log.look_at)));
        }
    }

    /// The pod is gone.
    pub fn forget_pod(&mut self, uid: &PodUid) {
        self.forget(uid, |_| true);
    }

    pub fn uids(&self) -> impl Iterator<Item = &PodUid> {
        self.logs.keys().map(|(uid, _)| uid)
    }

    /// Drops the pod's logs of these containers.
    fn forget(&mut self, uid: &PodUid, is_meant: impl Fn(&ContainerId) -> bool) {
        let from = (uid.clone(), ContainerId::new(""));
        let known = self.logs.range(from..).take_while(|((pod, _), _)| pod == uid).map(|(key, _)| key);
        for key in known.filter(|(_, id)| is_meant(id)).cloned().collect::<Vec<_>>() {
            let path = self.logs.remove(&key).map(|log| log.place.path).unwrap_or_default();
            // Another container may have the path by now.
            if self.by_path.get(&path) == Some(&key) {
                self.by_path.remove(&path);
            }
            self.to_rotate.remove(&key);
            self.to_compress.remove(&key);
        }
    }

    /// The logs whose size is to be looked at now; the look counts as in flight. Those that are due soon come along.
    pub fn due(&mut self, now: Now) -> Vec<LogPlace> {
        if self.next_wakeup().is_none_or(|next| next > now.uptime) {
            return Vec::new();
        }
        let until = now.uptime + MIN_INTERVAL;
        let due: Vec<_> = self.logs.values().filter(|log| log.look_at < until).map(|log| log.place.clone()).collect();
        self.is_looking = !due.is_empty();
        self.next_look = self.earliest_look();
        due
    }

    pub fn next_wakeup(&self) -> Option<Uptime> {
        self.next_look.filter(|_| !self.is_looking)
    }

    fn earliest_look(&self) -> Option<Uptime> {
        self.logs.values().map(|log| log.look_at).min()
    }

    /// The sizes of these logs are known; `None` where the file is missing.
    pub fn measured(
        &mut self,
        asked: &[LogPlace],
        sizes: &BTreeMap<ContainerId, Option<u64>>,
        settings: &LogSettings,
        now: Now,
    ) {
        self.is_looking = false;
        for place in asked {
            let key = (place.pod.uid.clone(), place.id.clone());
            let Some(log) = self.logs.get_mut(&key) else { continue };
            match sizes.get(&place.id) {
                Some(Some(size)) => log.grow(*size, now),
                // Its rotation was cut off before the runtime opened a new file: rotating it makes one.
                Some(None) => log.size_bytes = u64::MAX,
                // The look failed.
                None => {}
            }
            log.look_at = log.next_look(settings, now);
            let is_rotating = self.under_way.contains(&(LogTask::Rotate, place.id.clone()));
            if log.is_full(settings) && !is_rotating {
                self.to_rotate.insert(key);
            }
        }
        self.next_look = self.earliest_look();
    }

    /// The operations to send now, rotations first.
    pub fn plan(&mut self, settings: &LogSettings) -> Vec<(LogTask, ContainerId, LogOp)> {
        let mut ops = Vec::new();
        for task in [LogTask::Rotate, LogTask::Compress] {
            let busy = self.under_way.iter().filter(|(known, _)| *known == task).count();
            let free = usize::try_from(settings.workers).unwrap_or(usize::MAX).saturating_sub(busy);
            let waiting = match task {
                LogTask::Rotate => &mut self.to_rotate,
                LogTask::Compress => &mut self.to_compress,
            };
            let is_free = |(_, id): &&LogKey| !self.under_way.contains(&(task, id.clone()));
            let next = waiting.iter().filter(is_free).take(free).cloned().collect::<Vec<_>>();
            for key in next {
                waiting.remove(&key);
                let Some(log) = self.logs.get(&key) else { continue };
                let place = log.place.clone();
                let max_files = settings.max_files;
                let op = match task {
                    LogTask::Rotate => LogOp::Rotate { log: place, max_files },
                    LogTask::Compress => LogOp::Compress { log: place },
                };
                self.under_way.insert((task, key.1.clone()));
                ops.push((task, key.1, op));
            }
        }
        ops
    }

    /// An operation has ended. A failed one is repeated when the log is next looked at and found full.
    pub fn done(&mut self, task: LogTask, place: &LogPlace, is_done: bool, settings: &LogSettings, now: Now) {
        self.under_way.remove(&(task, place.id.clone()));
        let key = (place.pod.uid.clone(), place.id.clone());
        let Some(log) = self.logs.get_mut(&key).filter(|_| task == LogTask::Rotate) else { return };
        if is_done {
            (log.size_bytes, log.sized_at) = (0, now.uptime);
            // The new file has no hints before a look.
            log.look_at = now.uptime + MIN_INTERVAL;
            self.to_compress.insert(key);
        } else {
            log.retry_at = now.uptime + settings.interval;
            log.look_at = log.retry_at;
        }
        self.next_look = self.earliest_look();
    }
}

impl Log {
    fn is_full(&self, settings: &LogSettings) -> bool {
        settings.max_bytes.is_some_and(|max| self.size_bytes >= max)
    }

    fn grow(&mut self, size_bytes: u64, now: Now) {
        let millis = u64::try_from(now.uptime.since(self.sized_at).as_millis()).unwrap_or(u64::MAX).max(1);
        let grown = size_bytes.saturating_sub(self.size_bytes);
        self.bytes_per_sec = grown.saturating_mul(1000).checked_div(millis).unwrap_or(0);
        (self.size_bytes, self.sized_at) = (size_bytes, now.uptime);
    }

    /// When it will be full, if it goes on growing as it did.
    fn next_look(&self, settings: &LogSettings, now: Now) -> Uptime {
        let left = settings.max_bytes.unwrap_or(u64::MAX).saturating_sub(self.size_bytes);
        let secs = left.checked_div(self.bytes_per_sec).unwrap_or(u64::MAX);
        let full_in = Duration::from_secs(secs).clamp(MIN_INTERVAL, settings.interval.max(MIN_INTERVAL));
        now.uptime + full_in
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::{facts, later};

    const MIB: u64 = 1 << 20;

    fn settings() -> LogSettings {
        LogSettings { max_bytes: Some(10 * MIB), ..LogSettings::default() }
    }

    struct Fixture {
        logs: LogRotation,
        settings: LogSettings,
    }

    impl Fixture {
        /// Running containers, one per pod.
        fn with(pods: &[&str]) -> Self {
            let mut fixture = Fixture { logs: LogRotation::default(), settings: settings() };
            for pod in pods {
                fixture.see(pod, "a: running 5s");
            }
            fixture
        }

        /// The same after a first look, as of which the interval counts.
        fn quiet(pods: &[&str]) -> Self {
            let mut fixture = Fixture::with(pods);
            for log in fixture.logs.logs.values_mut() {
                log.look_at = later(10).uptime;
            }
            fixture.logs.next_look = fixture.logs.earliest_look();
            fixture
        }

        fn see(&mut self, pod: &str, state: &str) {
            let pod = PodRef { uid: PodUid::new(pod), namespace: "default".into(), name: pod.into() };
            let mut facts = facts(state);
            for container in &mut facts.containers {
                container.id = ContainerId::new(format!("{}-{}", pod.name, container.id));
                container.log_path = format!("/logs/{}/0.log", container.id);
            }
            self.logs.track(&pod, &facts, &self.settings, later(0));
        }

        /// Of a copy, so that no look is in flight afterwards.
        fn due(&self, secs: u64) -> Vec<String> {
            self.logs.clone().due(later(secs)).into_iter().map(|log| log.id.to_string()).collect()
        }

        /// The sizes that a look at this time finds of the logs that are due.
        fn measured(&mut self, secs: u64, sizes: &[Option<u64>]) {
            let due = self.logs.due(later(secs));
            assert_eq!(due.len(), sizes.len());
            let sizes = due.iter().map(|log| log.id.clone()).zip(sizes.iter().copied()).collect();
            self.logs.measured(&due, &sizes, &self.settings, later(secs));
        }

        fn written(&mut self, pod: &str, secs: u64) {
            self.logs.written(&[format!("/logs/{pod}-a0/0.log")], later(secs));
        }

        fn planned(&mut self) -> Vec<String> {
            let ops = self.logs.plan(&self.settings);
            ops.into_iter().map(|(task, id, _)| format!("{task:?} {id}")).collect()
        }

        fn done(&mut self, task: LogTask, pod: &str, is_done: bool, secs: u64) {
            let key = (PodUid::new(pod), ContainerId::new(format!("{pod}-a0")));
            let place = self.logs.logs[&key].place.clone();
            self.logs.done(task, &place, is_done, &self.settings, later(secs));
        }
    }

    #[test]
    fn quiet_logs_are_looked_at_together_at_the_interval() {
        let mut test = Fixture::quiet(&["p", "q"]);
        assert_eq!((test.due(9), test.logs.next_wakeup()), (vec![], Some(later(10).uptime)));
        assert_eq!(test.due(10), ["p-a0", "q-a0"]);
        test.measured(10, &[Some(0), Some(5 * MIB / 10)]);
        assert_eq!((test.planned(), test.logs.next_wakeup()), (vec![], Some(later(20).uptime)));
    }

    #[test]
    fn fast_log_is_looked_at_when_it_is_expected_to_be_full() {
        let mut test = Fixture::quiet(&["p", "q"]);
        // 10 MiB in 10 s would be full now; 8 MiB are full in 2.5 s.
        test.measured(10, &[Some(8 * MIB), Some(0)]);
        assert_eq!(test.logs.next_wakeup(), Some(later(12).uptime));
        assert_eq!(test.due(12), ["p-a0"]);
        test.measured(12, &[Some(9 * MIB)]);
        assert_eq!(test.logs.next_wakeup(), Some(later(14).uptime));
        test.measured(14, &[Some(10 * MIB)]);
        assert_eq!(test.planned(), ["Rotate p-a0"]);
    }

    #[test]
    fn writer_of_any_speed_is_looked_at_once_a_second() {
        let mut test = Fixture::quiet(&["p"]);
        test.measured(10, &[Some(2000 * MIB)]);
        assert_eq!(test.planned(), ["Rotate p-a0"]);
        test.done(LogTask::Rotate, "p", true, 10);
        assert_eq!(test.logs.next_wakeup(), Some(later(11).uptime));
    }

    #[test]
    fn rotation_does_not_wait_for_compression() {
        let mut test = Fixture::with(&["p", "q"]);
        test.measured(10, &[Some(10 * MIB), Some(11 * MIB)]);
        assert_eq!(test.planned(), ["Rotate p-a0"], "one worker");
        assert_eq!(test.planned(), [] as [&str; 0]);
        test.done(LogTask::Rotate, "p", true, 10);
        assert_eq!(test.planned(), ["Rotate q-a0", "Compress p-a0"]);
        test.done(LogTask::Rotate, "q", true, 11);
        assert_eq!(test.planned(), [] as [&str; 0], "the one worker still compresses");
        test.done(LogTask::Compress, "p", true, 12);
        assert_eq!(test.planned(), ["Compress q-a0"]);
    }

    #[test]
    fn failed_rotation_is_repeated_at_the_interval() {
        let mut test = Fixture::with(&["p"]);
        test.measured(10, &[Some(10 * MIB)]);
        test.planned();
        test.done(LogTask::Rotate, "p", false, 11);
        assert_eq!((test.planned(), test.logs.next_wakeup()), (vec![], Some(later(21).uptime)));
        test.measured(21, &[Some(12 * MIB)]);
        assert_eq!(test.planned(), ["Rotate p-a0"]);
    }

    #[test]
    fn log_that_is_being_rotated_is_not_rotated_again() {
        let mut test = Fixture::with(&["p"]);
        test.measured(10, &[Some(10 * MIB)]);
        test.planned();
        test.measured(11, &[Some(11 * MIB)]);
        test.done(LogTask::Rotate, "p", true, 12);
        assert_eq!(test.planned(), ["Compress p-a0"]);
    }

    #[test]
    fn one_look_is_in_flight_at_a_time() {
        let mut test = Fixture::with(&["p"]);
        assert_eq!(test.logs.due(later(10)).len(), 1);
        test.see("q", "a: running 5s");
        assert_eq!((test.due(100), test.logs.next_wakeup()), (vec![], None));
    }

    #[test]
    fn missing_log_is_rotated_to_be_opened_again() {
        let mut test = Fixture::with(&["p"]);
        test.measured(10, &[None]);
        assert_eq!(test.planned(), ["Rotate p-a0"]);
    }

    #[test]
    fn logs_of_ended_containers_and_gone_pods_are_left_alone() {
        let mut test = Fixture::with(&["p", "q"]);
        test.measured(10, &[Some(10 * MIB), Some(10 * MIB)]);
        test.see("p", "a: exit(0) 5s");
        test.logs.forget_pod(&PodUid::new("q"));
        assert_eq!((test.planned(), test.due(100)), (vec![], vec![]));
    }

    #[test]
    fn new_log_is_looked_at_after_a_second() {
        let test = Fixture::with(&["p"]);
        assert_eq!((test.due(0), test.due(1)), (vec![], vec!["p-a0".to_owned()]));
    }

    #[test]
    fn written_log_is_looked_at_at_once_but_once_a_second() {
        let mut test = Fixture::quiet(&["p", "q"]);
        test.written("p", 4);
        assert_eq!(test.due(4), ["p-a0"]);
        test.measured(4, &[Some(1)]);
        assert_eq!(test.logs.next_wakeup(), Some(later(10).uptime), "q is quiet");
        test.written("p", 4);
        assert_eq!((test.due(4), test.due(5)), (vec![], vec!["p-a0".to_owned()]));
        test.measured(5, &[Some(200 * MIB)]);
        assert_eq!(test.planned(), ["Rotate p-a0"]);
    }

    #[test]
    fn hint_during_a_look_causes_another_look() {
        let mut test = Fixture::quiet(&["p", "q"]);
        test.written("p", 4);
        let due = test.logs.due(later(4));
        test.written("q", 4);
        let sizes = due.iter().map(|log| (log.id.clone(), Some(0))).collect();
        test.logs.measured(&due, &sizes, &test.settings, later(4));
        assert_eq!(test.due(4), ["q-a0"]);
    }

    #[test]
    fn new_file_of_a_rotated_log_is_looked_at_after_a_second() {
        let mut test = Fixture::quiet(&["p"]);
        // It became full slowly.
        test.measured(1000, &[Some(10 * MIB)]);
        test.planned();
        test.done(LogTask::Rotate, "p", true, 1000);
        assert_eq!(test.logs.next_wakeup(), Some(later(1001).uptime));
    }

    #[test]
    fn hints_do_not_hasten_a_failed_rotation() {
        let mut test = Fixture::quiet(&["p"]);
        test.measured(10, &[Some(10 * MIB)]);
        test.planned();
        test.done(LogTask::Rotate, "p", false, 11);
        test.written("p", 12);
        assert_eq!(test.logs.next_wakeup(), Some(later(21).uptime));
    }

    #[test]
    fn hints_of_gone_containers_are_ignored() {
        let mut test = Fixture::quiet(&["p"]);
        test.see("p", "a: exit(0) 5s");
        test.written("p", 4);
        assert_eq!((test.due(4), test.logs.by_path.len()), (vec![], 0));
    }

    #[test]
    fn nothing_is_looked_at_if_rotation_is_off() {
        let mut test =
            Fixture { logs: LogRotation::default(), settings: LogSettings { max_bytes: None, ..settings() } };
        test.see("p", "a: running 5s");
        assert_eq!((test.due(100), test.logs.next_wakeup()), (vec![], None));
    }
}
