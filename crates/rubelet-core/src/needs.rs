//! The API objects and tokens a pod needs, and for how long.
//!
//! Owns: every object, token and certificate that a pod's spec refers to, and how long they are kept for it. Never: reads them; the shell
//! keeps its watches equal to the needs in the snapshot.
//! Upstream: `VisitPodConfigmapNames`, `VisitPodSecretNames`; RegisterPod and UnregisterPod in `kubelet.go`.

use std::{collections::BTreeSet, sync::Arc};

use k8s_openapi::api::core::v1::Pod;

use crate::{
    container::{self, environment},
    id::namespace_of,
    objects::ObjectKey,
    pod::{Lifecycle, PodRecord},
    snapshot::PodView,
    volumes::{self, VolumeSource, claims::PersistentKind, files::TokenKey, pod_certificates::CertificateKey},
};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    pub objects: BTreeSet<ObjectKey>,
    pub tokens: BTreeSet<TokenKey>,
    pub certificates: BTreeSet<CertificateKey>,
}

impl Needs {
    /// Everything the spec refers to. As upstream, a reference without a name does not count. Unlike upstream, volumes that no
    /// container mounts, or that cannot be set up, do not count: nothing would read their objects.
    pub fn of(pod: &Pod) -> Self {
        let mut needs = Needs::default();
        let Some(spec) = &pod.spec else { return needs };
        for container in spec.init_containers.iter().flatten().chain(&spec.containers) {
            needs.objects.extend(environment::needs(pod, container));
        }
        for ephemeral in spec.ephemeral_containers.iter().flatten() {
            needs.objects.extend(environment::needs(pod, &container::of_ephemeral(ephemeral)));
        }
        for volume in volumes::volumes_to_mount(pod) {
            match volume.source {
                VolumeSource::Files(files) => needs.append(files.needs()),
                VolumeSource::Csi { driver } => needs.objects.extend([ObjectKey::csi_driver(&driver)]),
                VolumeSource::EmptyDir { .. }
                | VolumeSource::HostPath { .. }
                | VolumeSource::Claim(_)
                | VolumeSource::Invalid(_)
                | VolumeSource::InTree
                | VolumeSource::GitRepo
                | VolumeSource::Unsupported(_) => {}
            }
        }
        let pull_secrets = spec.image_pull_secrets.iter().flatten();
        needs.objects.extend(pull_secrets.map(|secret| ObjectKey::secret(namespace_of(pod), &secret.name)));
        needs.objects.extend(ObjectKey::runtime_class(spec));
        needs.objects.retain(|key| !key.name.is_empty());
        needs
    }

    fn append(&mut self, mut other: Needs) {
        self.objects.append(&mut other.objects);
        self.tokens.append(&mut other.tokens);
        self.certificates.append(&mut other.certificates);
    }
}

/// What to keep for the pod from now on; `last` is its view in the previous snapshot.
/// Needs begin with the first look at a pod that should run: nothing is started before it, and it may show that the pod has
/// already completed. A terminating pod keeps its needs, as a recalled start may still read them, until its containers have
/// terminated and its volumes are torn down.
pub fn published(record: &PodRecord, last: Option<&PodView>) -> Arc<Needs> {
    match record.lifecycle {
        Lifecycle::Syncing if record.facts.is_some() => match last {
            // The pod is the same, so its needs are.
            Some(last) if Arc::ptr_eq(&last.pod, &record.pod) && *last.needs != Needs::default() => {
                with_claimed(record, last.needs.clone())
            }
            Some(_) | None => with_claimed(record, Arc::new(Needs::of(&record.pod))),
        },
        Lifecycle::Terminating { .. } => last.map(|last| last.needs.clone()).unwrap_or_default(),
        Lifecycle::Waiting | Lifecycle::Syncing | Lifecycle::Terminated { .. } | Lifecycle::Finished { .. } => {
            Arc::default()
        }
    }
}

/// And what drivers want for the pod's volumes, which is known once they are resolved.
fn with_claimed(record: &PodRecord, mut needs: Arc<Needs>) -> Arc<Needs> {
    for source in record.volumes.values().filter_map(|volume| volume.claimed.as_ref()) {
        let PersistentKind::Csi(volume) = &source.kind else { continue };
        for (_, key) in volume.tokens(&record.pod) {
            if !needs.tokens.contains(&key) {
                Arc::make_mut(&mut needs).tokens.insert(key);
            }
        }
    }
    needs
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        event::Source,
        explain,
        flights::Flights,
        id::PodRef,
        images::Images,
        observation::PodFacts,
        pod::{Desired, Grace, TerminationCause, plan::PodState},
        test_support::now,
    };

    fn pod(spec: &Value) -> Pod {
        let metadata = json!({"name": "web", "namespace": "prod", "uid": "u-1"});
        serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
    }

    fn shown(needs: &Needs) -> String {
        let tokens = needs.tokens.iter().map(|key| format!("token of {} for {:?}", key.service_account, key.audience));
        needs.objects.iter().map(ToString::to_string).chain(tokens).collect::<Vec<_>>().join(", ")
    }

    #[test]
    fn each_reference_in_a_spec_is_a_need() {
        let env = |source: Value| json!([{"name": "c", "env": [{"name": "A", "valueFrom": source}]}]);
        let from = |source: Value| json!([{"name": "c", "envFrom": [source]}]);
        let with = |volume: Value| {
            let mut volume = volume;
            volume["name"] = json!("v");
            let mounts = json!([{"name": "v", "mountPath": "/v"}]);
            json!({"containers": [{"name": "c", "volumeMounts": mounts}], "volumes": [volume]})
        };
        let key = json!({"name": "x", "key": "k", "optional": true});
        for (spec, expected) in [
            (json!({"containers": [{"name": "c", "env": [{"name": "A", "value": "x"}]}]}), ""),
            (json!({"containers": env(json!({"configMapKeyRef": key}))}), "ConfigMap prod/x"),
            (json!({"containers": env(json!({"secretKeyRef": key}))}), "Secret prod/x"),
            (
                json!({"containers": [], "initContainers": from(json!({"configMapRef": {"name": "x"}}))}),
                "ConfigMap prod/x",
            ),
            (
                json!({"containers": [], "ephemeralContainers": from(json!({"secretRef": {"name": "x"}}))}),
                "Secret prod/x",
            ),
            (json!({"containers": [], "ephemeralContainers": env(json!({"secretKeyRef": key}))}), "Secret prod/x"),
            (json!({"containers": [], "imagePullSecrets": [{"name": "x"}, {"name": ""}]}), "Secret prod/x"),
            (json!({"containers": [], "runtimeClassName": "x"}), "RuntimeClass /x"),
            (json!({"containers": [], "runtimeClassName": ""}), ""),
            (with(json!({"configMap": {"name": "x", "optional": true}})), "ConfigMap prod/x"),
            (with(json!({"secret": {"secretName": "x"}})), "Secret prod/x"),
            (with(json!({"secret": {}})), ""),
            (with(json!({"csi": {"driver": "x"}})), "CSIDriver /x"),
            (with(json!({"emptyDir": {}})), ""),
            (json!({"containers": [], "volumes": [{"name": "v", "secret": {"secretName": "not-mounted"}}]}), ""),
            (
                with(json!({"projected": {"sources": [
                    {"secret": {"name": "s"}},
                    {"configMap": {"name": "m"}},
                    {"serviceAccountToken": {"path": "t", "audience": "a"}},
                ]}})),
                r#"ConfigMap prod/m, Secret prod/s, token of default for Some("a")"#,
            ),
        ] {
            assert_eq!(shown(&Needs::of(&pod(&spec))), expected, "{spec}");
        }
    }

    #[test]
    fn needs_last_from_the_first_look_until_the_containers_have_ended() {
        let pod = pod(&json!({"containers": [], "runtimeClassName": "x"}));
        let record = PodRecord::new(PodRef::of(&pod), Arc::new(pod), Desired::By(Source::Api), 1, now());
        let (cause, grace) = (TerminationCause::Removed, Grace::starting(30, now()));
        let life = [
            (Lifecycle::Waiting, false, ""),
            (Lifecycle::Syncing, false, ""),
            (Lifecycle::Syncing, true, "RuntimeClass /x"),
            (Lifecycle::terminating(grace, cause), true, "RuntimeClass /x"),
            (Lifecycle::Terminated { cause }, true, ""),
            (Lifecycle::Finished { cause }, true, ""),
        ];
        let flights = Flights::default();
        let mut last = None;
        for (lifecycle, was_looked_at, expected) in life {
            let facts = was_looked_at.then(|| Arc::new(PodFacts::default()));
            let record = PodRecord { lifecycle, facts, ..record.clone() };
            let needs = published(&record, last.as_ref());
            assert_eq!(shown(&needs), expected, "{:?}", record.lifecycle);
            let state = PodState { record: &record, flights: flights.of_pod(&record.id.uid) };
            last = Some(PodView { needs, ..explain::pod_view(state, Arc::default(), &Images::default(), now()) });
        }
        let ending = PodRecord { lifecycle: Lifecycle::terminating(grace, cause), ..record };
        assert_eq!(shown(&published(&ending, None)), "", "nothing is started for a pod found at its end");
    }
}
