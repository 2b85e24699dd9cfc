//! Metrics of SELinux labels of volumes.
//!
//! Owns: upstream's names, and when each is counted: when the finding about a pod's volume changes. Gauges that only grow, as
//! upstream's. That a label cannot be made of a container's options does not occur here.
//! Upstream: `volumemanager/cache/desired_state_of_wold_selinux_metrics.go`.

use rubelet_core::{
    snapshot::Snapshot,
    volumes::selinux::{LabelFinding, LabelReport},
};

use super::{family::Gauges, text::Text};

#[derive(Debug)]
pub(super) struct SelinuxMetrics {
    pod_mismatch_errors: Gauges<1>,
    pod_mismatch_warnings: Gauges<1>,
    volume_mismatch_errors: Gauges<2>,
    volume_mismatch_warnings: Gauges<2>,
    admitted: Gauges<2>,
    container_errors: Gauges<1>,
    container_warnings: Gauges<1>,
}

impl SelinuxMetrics {
    pub(super) fn new() -> Self {
        SelinuxMetrics {
            pod_mismatch_errors: Gauges::new(
                "volume_manager_selinux_pod_context_mismatch_errors_total",
                ["access_mode"],
                "[ALPHA] Number of errors when a Pod defines different SELinux contexts for its containers that use the same \
                 volume. Kubelet can't start such a Pod then and it will retry, therefore value of this metric may not represent \
                 the actual nr. of Pods.",
            ),
            pod_mismatch_warnings: Gauges::new(
                "volume_manager_selinux_pod_context_mismatch_warnings_total",
                ["access_mode"],
                "[ALPHA] Number of errors when a Pod defines different SELinux contexts for its containers that use the same \
                 volume. They are not errors yet, but they will become real errors when SELinuxMountReadWriteOncePod feature is \
                 expanded to all volume access modes.",
            ),
            volume_mismatch_errors: Gauges::new(
                "volume_manager_selinux_volume_context_mismatch_errors_total",
                ["volume_plugin", "access_mode"],
                "[ALPHA] Number of errors when a Pod uses a volume that is already mounted with a different SELinux context than \
                 the Pod needs. Kubelet can't start such a Pod then and it will retry, therefore value of this metric may not \
                 represent the actual nr. of Pods.",
            ),
            volume_mismatch_warnings: Gauges::new(
                "volume_manager_selinux_volume_context_mismatch_warnings_total",
                ["volume_plugin", "access_mode"],
                "[ALPHA] Number of errors when a Pod uses a volume that is already mounted with a different SELinux context than \
                 the Pod needs. They are not errors yet, but they will become real errors when SELinuxMountReadWriteOncePod \
                 feature is expanded to all volume access modes.",
            ),
            admitted: Gauges::new(
                "volume_manager_selinux_volumes_admitted_total",
                ["volume_plugin", "access_mode"],
                "[ALPHA] Number of volumes whose SELinux context was fine and will be mounted with mount -o context option.",
            ),
            container_errors: Gauges::new(
                "volume_manager_selinux_container_errors_total",
                ["access_mode"],
                "[ALPHA] Number of errors when kubelet cannot compute SELinux context for a container. Kubelet can't start such \
                 a Pod then and it will retry, therefore value of this metric may not represent the actual nr. of containers.",
            ),
            container_warnings: Gauges::new(
                "volume_manager_selinux_container_warnings_total",
                ["access_mode"],
                "[ALPHA] Number of errors when kubelet cannot compute SELinux context for a container that are ignored. They \
                 will become real errors when SELinuxMountReadWriteOncePod feature is expanded to all volume access modes.",
            ),
        }
    }

    pub(super) fn turned(&self, before: &Snapshot, after: &Snapshot) {
        for uid in &after.changed {
            let Some(view) = after.pods.get(uid) else { continue };
            let earlier = |name: &str| before.pods.get(uid).and_then(|view| view.volumes.get(name));
            for (name, known) in &view.volumes {
                if earlier(name).is_none_or(|earlier| earlier.label != known.label) {
                    self.found(&known.label);
                }
            }
        }
    }

    fn found(&self, LabelReport { finding, plugin, access_mode: mode }: &LabelReport) {
        match finding {
            LabelFinding::Nothing => {}
            LabelFinding::Admitted => self.admitted.add([plugin, mode], 1.0),
            LabelFinding::PodMismatch { is_error: true } => self.pod_mismatch_errors.add([mode], 1.0),
            LabelFinding::PodMismatch { is_error: false } => self.pod_mismatch_warnings.add([mode], 1.0),
            LabelFinding::VolumeMismatch { is_error: true } => self.volume_mismatch_errors.add([plugin, mode], 1.0),
            LabelFinding::VolumeMismatch { is_error: false } => self.volume_mismatch_warnings.add([plugin, mode], 1.0),
        }
    }

    pub(super) fn write(&self, text: &mut Text) {
        self.container_errors.write(text);
        self.container_warnings.write(text);
        self.pod_mismatch_errors.write(text);
        self.pod_mismatch_warnings.write(text);
        self.volume_mismatch_errors.write(text);
        self.volume_mismatch_warnings.write(text);
        self.admitted.write(text);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use rubelet_core::{id::PodUid, pod::VolumeRecord};
    use serde_json::json;

    use super::*;
    use crate::server::views::tests::{snapshot, view};

    #[test]
    fn findings_are_counted_when_they_change() {
        let metrics = SelinuxMetrics::new();
        let with = |findings: &[(&str, LabelFinding)]| {
            let mut pod = view("prod", "web", &["a"], &[], json!({}));
            for (name, finding) in findings {
                let label =
                    LabelReport { finding: *finding, plugin: "kubernetes.io/csi/d".into(), access_mode: "RWOP" };
                pod.volumes.insert((*name).to_owned(), VolumeRecord { label, ..VolumeRecord::default() });
            }
            let changed = BTreeSet::from([PodUid::new("u1")]);
            Snapshot { changed, ..snapshot("n1", [("u1", pod)]) }
        };
        let error = LabelFinding::VolumeMismatch { is_error: true };
        let waits = with(&[("a", error), ("b", LabelFinding::PodMismatch { is_error: false })]);
        let runs = with(&[("a", LabelFinding::Admitted), ("b", LabelFinding::Nothing)]);
        for (before, after) in [(&Snapshot::default(), &waits), (&waits, &waits), (&waits, &runs), (&runs, &runs)] {
            metrics.turned(before, after);
        }
        let mut text = Text::default();
        metrics.write(&mut text);
        let page = text.into_string();
        let lines: Vec<_> = page.lines().filter(|line| !line.starts_with('#')).collect();
        insta::assert_snapshot!(lines.join("\n"), @r#"
        volume_manager_selinux_pod_context_mismatch_warnings_total{access_mode="RWOP"} 1
        volume_manager_selinux_volume_context_mismatch_errors_total{volume_plugin="kubernetes.io/csi/d",access_mode="RWOP"} 1
        volume_manager_selinux_volumes_admitted_total{volume_plugin="kubernetes.io/csi/d",access_mode="RWOP"} 1
        "#);
    }
}
