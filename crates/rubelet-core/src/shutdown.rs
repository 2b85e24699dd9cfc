//! Graceful node shutdown: the groups of pods, whose turn it is, and what an ended pod reports.
//!
//! Owns: the groups by priority, the state of a shutdown and its deadlines. Never: ends a pod (`agent/shutdown.rs`), takes or
//! releases logind's inhibitor (the shell).
//! Upstream: `pkg/kubelet/nodeshutdown`.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::PodSpec;
use serde::{Deserialize, Serialize};

use crate::{
    config::{
        KubeletConfiguration,
        gates::{Gate, Gates},
    },
    pod::status::{FailureReason, PodFailure},
    time::{Now, Uptime},
};

/// The longest wait for the ends of killed pods and for the last statuses: the API server may have been one of the pods.
const REPORT_TIMEOUT: Duration = Duration::from_secs(5);

/// The priority of `system-cluster-critical`, the lowest of critical pods.
const CRITICAL_PRIORITY: i32 = 2_000_000_000;

/// Pods of this priority or a higher one, below the next group's, have this long to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShutdownGroup {
    pub priority: i32,
    pub period: Duration,
}

/// What logind signals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ShutdownSignal {
    /// The machine is about to shut down or reboot.
    Begins,
    Cancelled,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shutdown {
    #[default]
    None,
    /// The pods of this group end now; those of the groups before it had their time.
    Ending { began: Now, group: usize, ends_at: Uptime },
    /// Every pod had its time; the last of them are being killed, and their statuses sent.
    Reporting { began: Now, until: Uptime },
    /// The machine may go down.
    Over { began_at: Timestamp, ended_at: Timestamp },
}

/// For readers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShutdownView {
    pub began_at: Timestamp,
    /// All pods have ended, or had their time.
    pub ended_at: Option<Timestamp>,
}

impl Shutdown {
    pub fn begin(groups: &[ShutdownGroup], now: Now) -> Self {
        let period = groups.first().map_or(Duration::ZERO, |group| group.period);
        Shutdown::Ending { began: now, group: 0, ends_at: now.uptime + period }
    }

    pub fn is_under_way(&self) -> bool {
        *self != Shutdown::None
    }

    /// The last group whose pods end, and when they must have ended.
    pub fn ending(&self) -> Option<(usize, Uptime)> {
        match *self {
            Shutdown::None => None,
            Shutdown::Ending { group, ends_at, .. } => Some((group, ends_at)),
            Shutdown::Reporting { until, .. } => Some((usize::MAX, until)),
            Shutdown::Over { .. } => Some((usize::MAX, Uptime::ZERO)),
        }
    }

    /// The state after the current group is done or out of time; `next` is the next group that has pods.
    #[must_use]
    pub fn after_group(self, next: Option<usize>, groups: &[ShutdownGroup], now: Now) -> Self {
        let Shutdown::Ending { began, .. } = self else { return self };
        match next.and_then(|next| Some((next, groups.get(next)?))) {
            Some((group, ShutdownGroup { period, .. })) => {
                Shutdown::Ending { began, group, ends_at: now.uptime + *period }
            }
            None => {
                let until = (began.uptime + total(groups)).min(now.uptime + REPORT_TIMEOUT);
                Shutdown::Reporting { began, until }
            }
        }
    }

    /// The end of the current wait.
    pub fn next_wakeup(&self) -> Option<Uptime> {
        match *self {
            Shutdown::Ending { ends_at: moment, .. } | Shutdown::Reporting { until: moment, .. } => Some(moment),
            Shutdown::None | Shutdown::Over { .. } => None,
        }
    }

    pub fn view(&self) -> Option<ShutdownView> {
        match *self {
            Shutdown::None => None,
            Shutdown::Ending { began, .. } | Shutdown::Reporting { began, .. } => {
                Some(ShutdownView { began_at: began.wall, ended_at: None })
            }
            Shutdown::Over { began_at, ended_at } => Some(ShutdownView { began_at, ended_at: Some(ended_at) }),
        }
    }
}

/// The configured groups, lowest priority first; none: pods are not ended at a shutdown.
pub fn groups(config: &KubeletConfiguration, gates: &Gates) -> Vec<ShutdownGroup> {
    if !gates.enabled(Gate::GracefulNodeShutdown) {
        return Vec::new();
    }
    let by_priority = &config.shutdown_grace_period_by_pod_priority;
    if by_priority.is_empty() || !gates.enabled(Gate::GracefulNodeShutdownBasedOnPodPriority) {
        let (all, critical) = (config.shutdown_grace_period, config.shutdown_grace_period_critical_pods);
        return two_groups(all.as_std(), critical.as_std());
    }
    let mut groups: Vec<_> = by_priority
        .iter()
        .map(|given| ShutdownGroup {
            priority: given.priority,
            period: Duration::from_secs(u64::try_from(given.shutdown_grace_period_seconds).unwrap_or(0)),
        })
        .collect();
    groups.sort_by_key(|group| group.priority);
    groups
}

/// `shutdownGracePeriod` and, as a part of it, `shutdownGracePeriodCriticalPods`. Whole seconds, as upstream.
fn two_groups(all: Duration, critical: Duration) -> Vec<ShutdownGroup> {
    match all.checked_sub(critical) {
        Some(others) if !all.is_zero() => {
            let group =
                |priority, period: Duration| ShutdownGroup { priority, period: Duration::from_secs(period.as_secs()) };
            vec![group(0, others), group(CRITICAL_PRIORITY, critical)]
        }
        Some(_) | None => Vec::new(),
    }
}

/// How long a shutdown may take: what logind must wait for the inhibitor.
pub fn total(groups: &[ShutdownGroup]) -> Duration {
    groups.iter().fold(Duration::ZERO, |sum, group| sum.saturating_add(group.period))
}

/// The last group whose priority is not above the pod's; the first for a pod below all.
pub fn group_of(groups: &[ShutdownGroup], spec: &PodSpec) -> usize {
    let priority = spec.priority.unwrap_or(0);
    groups.partition_point(|group| group.priority <= priority).saturating_sub(1)
}

/// The status of a pod that a shutdown ends.
pub fn failure() -> PodFailure {
    const MESSAGE: &str = "Pod was terminated in response to imminent node shutdown.";
    PodFailure { reason: FailureReason::Terminated, message: MESSAGE.to_owned(), disruption: Some(MESSAGE.to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::{GoDuration, ShutdownGracePeriodByPodPriority},
        test_support::later,
    };

    fn secs(groups: &[ShutdownGroup]) -> Vec<(i32, u64)> {
        groups.iter().map(|group| (group.priority, group.period.as_secs())).collect()
    }

    fn group(priority: i32, secs: u64) -> ShutdownGroup {
        ShutdownGroup { priority, period: Duration::from_secs(secs) }
    }

    #[test]
    fn periods_make_groups_sorted_by_priority() {
        let with = |all: i64, critical: i64, by_priority: &[(i32, i64)]| KubeletConfiguration {
            shutdown_grace_period: GoDuration::from_secs(all),
            shutdown_grace_period_critical_pods: GoDuration::from_secs(critical),
            shutdown_grace_period_by_pod_priority: by_priority
                .iter()
                .map(|&(priority, shutdown_grace_period_seconds)| ShutdownGracePeriodByPodPriority {
                    priority,
                    shutdown_grace_period_seconds,
                })
                .collect(),
            ..KubeletConfiguration::default()
        };
        let groups = |all, critical, by_priority| secs(&groups(&with(all, critical, by_priority), &Gates::default()));
        assert!(groups(0, 0, &[]).is_empty());
        assert_eq!(groups(30, 10, &[]), [(0, 20), (CRITICAL_PRIORITY, 10)]);
        assert_eq!(groups(30, 0, &[]), [(0, 30), (CRITICAL_PRIORITY, 0)]);
        assert!(groups(10, 30, &[]).is_empty());
        assert_eq!(groups(0, 0, &[(1000, 20), (0, -5), (10, 7)]), [(0, 0), (10, 7), (1000, 20)]);
        assert_eq!(total(&super::groups(&with(0, 0, &[(1000, 20), (10, 7)]), &Gates::default())).as_secs(), 27);
    }

    #[test]
    fn pod_belongs_to_the_highest_group_not_above_it() {
        let groups = [group(10, 1), group(100, 1), group(1000, 1)];
        let of = |priority| group_of(&groups, &PodSpec { priority, ..PodSpec::default() });
        let cases = [None, Some(-1), Some(10), Some(99), Some(100), Some(999), Some(1000), Some(i32::MAX)];
        assert_eq!(cases.map(of), [0, 0, 0, 0, 1, 1, 2, 2]);
    }

    #[test]
    fn deadlines_follow_groups_and_the_last_wait_is_for_statuses() {
        let groups = [group(0, 20), group(10, 7), group(1000, 10)];
        let begun = Shutdown::begin(&groups, later(0));
        assert_eq!(begun.next_wakeup(), Some(later(20).uptime));
        let second = begun.after_group(Some(2), &groups, later(3));
        assert_eq!(second.ending(), Some((2, later(13).uptime)));
        // Time is left: the statuses may take some of it.
        let early = second.after_group(None, &groups, later(4));
        assert_eq!(early.next_wakeup(), Some(later(9).uptime));
        let late = second.after_group(None, &groups, later(36));
        assert_eq!(late.next_wakeup(), Some(later(37).uptime));
        assert_eq!(late.view().and_then(|view| view.ended_at), None);
        let over = Shutdown::Over { began_at: later(0).wall, ended_at: later(37).wall };
        assert_eq!(over.view().and_then(|view| view.ended_at), Some(later(37).wall));
        assert_eq!((over.next_wakeup(), over.ending()), (None, Some((usize::MAX, Uptime::ZERO))));
    }
}
