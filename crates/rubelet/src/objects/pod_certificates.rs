//! Certificates of pods: a key and a request per source of a volume, and again when a certificate is to be renewed.
//!
//! Owns: the keys, which are in memory and in volumes only; the requests, their watches, the hint to the loop and the events.
//! An agent that starts anew asks for all of them again, as upstream does. Never: logs a key; judges a certificate.
//! Upstream: `pkg/kubelet/podcertificate`.

mod keys;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use anyhow::Context as _;
use jiff::Timestamp;
use k8s_openapi::api::{
    certificates::v1beta1::PodCertificateRequest,
    core::v1::{Node, ServiceAccount},
};
use rubelet_core::{
    effect::{EventRecord, InvolvedObject, Severity},
    event::Event,
    event_reasons,
    id::PodRef,
    volumes::pod_certificates::{self, CertificateKey, CertificateTimes, CredentialBundle, Outcome, Refusal},
};
use rubelet_kube::{
    calls, error_chain,
    port::{Lane, ObjectPath},
    reflector::{self, Delta, Selection},
};
use tokio::{
    sync::{mpsc, watch},
    task::{AbortHandle, spawn_blocking},
    time::{sleep, timeout},
};

use self::keys::own_key;
use super::{CALL_TIMEOUT, FIRST_LIST, Shared, locked};
use crate::{
    event_log::EventLog,
    metrics::{Metrics, pod_certificates::CertificateState},
};

const API: &str = "certificates.k8s.io/v1beta1";
/// A request of which nothing is seen any more was deleted.
const ABANDON_TIMEOUT: Duration = Duration::from_secs(600);
/// Between looks at the clock of the wall, which may jump.
const LONGEST_NAP: Duration = Duration::from_secs(60);
const RETRY_MAX: Duration = Duration::from_secs(60);
const NOT_ISSUED: &str = "credential bundle is not issued yet";
/// What pods read, by the source of their volume.
#[derive(Default)]
pub(super) struct CertificateStore(Mutex<BTreeMap<CertificateKey, Entry>>);

/// Where certificates are reported.
pub(super) struct CertificateReports {
    pub events: EventLog,
    pub metrics: Arc<Metrics>,
}

struct Entry {
    credential: watch::Sender<Credential>,
    task: AbortHandle,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[derive(Clone, Debug)]
enum Credential {
    /// With why the last attempt failed.
    Awaited(Option<String>),
    Issued(CredentialBundle),
    /// For good.
    Refused(String),
}

impl CertificateStore {
    /// Updates the certificates of one pod; `begin` starts the task of one.
    pub(super) fn update_needs(
        &self,
        [before, now]: [&BTreeSet<CertificateKey>; 2],
        reports: &CertificateReports,
        begin: impl Fn(&CertificateKey) -> AbortHandle,
    ) {
        let metrics = &reports.metrics.pod_certificates;
        let mut entries = locked(&self.0);
        for key in now.difference(before) {
            let credential = watch::Sender::new(Credential::Awaited(None));
            entries.insert(key.clone(), Entry { credential, task: begin(key) });
            metrics.set(key, CertificateState::NotYetIssued);
        }
        for key in before.difference(now) {
            entries.remove(key);
            metrics.forget(key);
        }
    }

    /// Waits shortly for a certificate that was just requested.
    pub(super) async fn bundle(&self, key: &CertificateKey) -> Result<CredentialBundle, String> {
        let entry = locked(&self.0).get(key).map(|entry| entry.credential.subscribe());
        let Some(mut credential) = entry else { return Err("unimplemented".to_owned()) };
        let known = |credential: &Credential| !matches!(credential, Credential::Awaited(_));
        // In time or not, what is there counts.
        let _ = timeout(FIRST_LIST, credential.wait_for(known)).await;
        let found = credential.borrow().clone();
        match found {
            Credential::Issued(bundle) => Ok(bundle),
            Credential::Refused(error) => Err(error),
            Credential::Awaited(None) => Err(NOT_ISSUED.to_owned()),
            Credential::Awaited(Some(why)) => Err(format!("{NOT_ISSUED}: {why}")),
        }
    }

    /// A certificate that was issued is used until another is.
    fn set(&self, key: &CertificateKey, credential: Credential, report: impl FnOnce()) {
        let entries = locked(&self.0);
        // The pod may have ended meanwhile.
        let Some(entry) = entries.get(key) else { return };
        report();
        entry.credential.send_if_modified(|known| {
            let is_news = !matches!((&*known, &credential), (Credential::Issued(_), Credential::Awaited(_)));
            if is_news {
                *known = credential;
            }
            is_news
        });
    }
}

/// Requests certificates for a source, for as long as its pod needs them or until one is refused.
pub(super) async fn follow(shared: Arc<Shared>, key: CertificateKey) {
    let mut times: Option<CertificateTimes> = None;
    loop {
        if let Some(times) = times {
            shared.sleep_until(times.renew_at).await;
        }
        let obtained = tokio::select! {
            biased;
            // Neither is awaited again after the other has ended; the second one never does.
            obtained = obtain(&shared, &key) => obtained,
            () = shared.report_delay(&key, times) => continue,
        };
        let pod = format!("{}/{}", key.namespace, key.pod_name);
        let is_final = obtained.is_err();
        match obtained {
            Ok((bundle, next)) => {
                tracing::info!(pod, volume = key.volume, signer = key.signer, renewal = %next.renew_at, "pod certificate issued");
                let report = || shared.count(&key, CertificateState::Issued(next));
                shared.certificates.set(&key, Credential::Issued(bundle), report);
                times = Some(next);
            }
            Err(refusal) => {
                let state = CertificateState::refused(&refusal);
                let Refusal { kind, event, error } = refusal;
                tracing::warn!(pod, volume = key.volume, signer = key.signer, "pod certificate refused: {error}");
                shared.record(&key, kind, event);
                shared.certificates.set(&key, Credential::Refused(error), || shared.count(&key, state));
            }
        }
        if let Some(inbox) = shared.inbox.get() {
            // The loop has ended; the hint has no receiver.
            let _ = inbox.send(Event::Refresh { pod: key.pod_uid.clone() }).await;
        }
        if is_final {
            return;
        }
    }
}

/// Until one is issued or refused.
async fn obtain(shared: &Shared, key: &CertificateKey) -> Result<(CredentialBundle, CertificateTimes), Refusal> {
    let mut pause = Duration::from_secs(1);
    loop {
        let error = match attempt(shared, key).await {
            Ok(Attempt::Issued(bundle, times)) => return Ok((bundle, times)),
            Ok(Attempt::Refused(refusal)) => return Err(refusal),
            Ok(Attempt::Gone { name }) => {
                format!("PodCertificateRequest \"{}/{name}\" appears to have been deleted", key.namespace)
            }
            Err(error) => error_chain(error.as_ref()),
        };
        let pod = format!("{}/{}", key.namespace, key.pod_name);
        tracing::warn!(
            pod,
            volume = key.volume,
            signer = key.signer,
            "failed to get pod certificate, will retry: {error}"
        );
        shared.certificates.set(key, Credential::Awaited(Some(error)), || {});
        sleep(pause).await;
        pause = pause.saturating_mul(2).min(RETRY_MAX);
    }
}

enum Attempt {
    Issued(CredentialBundle, CertificateTimes),
    Refused(Refusal),
    Gone { name: String },
}

async fn attempt(shared: &Shared, key: &CertificateKey) -> anyhow::Result<Attempt> {
    let key_type = key.key_type.clone();
    let own = match spawn_blocking(move || own_key(&key_type)).await.context("while generating keypair")? {
        Ok(own) => own,
        Err(error) => return Ok(Attempt::Refused(Refusal::failed(&format!("while generating keypair: {error}")))),
    };
    let api = &*shared.api;
    let account = ObjectPath::all("v1", "serviceaccounts").within(&*key.namespace).named(&*key.service_account);
    let account: ServiceAccount =
        calls::get(api, Lane::Ordinary, account, CALL_TIMEOUT).await.context("while fetching service account")?;
    let node = ObjectPath::all("v1", "nodes").named(&*shared.node_name);
    let node: Node = calls::get(api, Lane::Ordinary, node, CALL_TIMEOUT).await.context("while getting node object")?;
    let uid = |uid: Option<String>| uid.unwrap_or_default();
    let (account_uid, node_uid) = (uid(account.metadata.uid), uid(node.metadata.uid));
    let body = key.request(&account_uid, (&shared.node_name, &node_uid), own.stub);
    let collection = ObjectPath::all(API, "podcertificaterequests").within(&*key.namespace);
    let created: PodCertificateRequest = calls::create(api, Lane::Ordinary, collection, &body, CALL_TIMEOUT)
        .await
        .context("while creating PodCertificateRequest")?;
    let name = created.metadata.name.unwrap_or_default();
    Ok(match timeout(ABANDON_TIMEOUT, outcome(shared, key, &name)).await.unwrap_or(None) {
        Some(Outcome::Issued { chain, times }) => Attempt::Issued(CredentialBundle { key: own.key, chain }, times),
        Some(Outcome::Refused(refusal)) => Attempt::Refused(refusal),
        Some(Outcome::Pending) | None => Attempt::Gone { name },
    })
}

/// Watches one request until it is decided; `None` if it is deleted before. The API server lets a node watch requests only
/// with its own name.
async fn outcome(shared: &Shared, key: &CertificateKey, name: &str) -> Option<Outcome> {
    let collection = ObjectPath::all(API, "podcertificaterequests").within(&*key.namespace);
    let fields = Some(format!("spec.nodeName={},metadata.name={name}", shared.node_name));
    let (sender, mut changes) = mpsc::channel(1);
    let decided = async {
        while let Some(change) = changes.recv().await {
            let body = match change {
                // A cache of the server may not have it yet.
                Delta::Replaced(objects) => objects.into_iter().next(),
                Delta::Applied(object) => Some(object),
                Delta::Deleted(_) => return None,
            };
            let Some(body) = body else { continue };
            match serde_json::from_slice(&body) {
                Ok(request) => match pod_certificates::outcome(key, &request) {
                    Outcome::Pending => {}
                    decided => return Some(decided),
                },
                Err(error) => tracing::warn!(name, "failed to decode PodCertificateRequest: {error}"),
            }
        }
        None
    };
    let selection = Selection { collection, fields };
    tokio::select! {
        biased;
        // Neither is awaited again after the other has ended.
        decided = decided => decided,
        () = reflector::follow(&*shared.api, &selection, shared.seed(name), &sender) => None,
    }
}

impl Shared {
    async fn sleep_until(&self, due: Timestamp) {
        loop {
            let left = Duration::try_from(due.duration_since(self.clock.now().wall)).unwrap_or_default();
            if left.is_zero() {
                return;
            }
            sleep(left.min(LONGEST_NAP)).await;
        }
    }

    /// Events about a certificate that is not renewed. Never ends.
    async fn report_delay(&self, key: &CertificateKey, times: Option<CertificateTimes>) {
        if let Some(CertificateTimes { overdue_at, not_after, .. }) = times {
            let mut reports = [
                (overdue_at, event_reasons::CERTIFICATE_OVERDUE_FOR_REFRESH, "PodCertificate refresh overdue"),
                (not_after, event_reasons::CERTIFICATE_EXPIRED, "PodCertificate expired"),
            ];
            reports.sort_by_key(|(at, ..)| *at);
            for (at, reason, message) in reports {
                self.sleep_until(at).await;
                self.record(key, reason, message.to_owned());
            }
        }
        std::future::pending().await
    }

    fn count(&self, key: &CertificateKey, state: CertificateState) {
        if let Some(reports) = self.certificate_reports.get() {
            reports.metrics.pod_certificates.set(key, state);
        }
    }

    fn record(&self, key: &CertificateKey, reason: &str, message: String) {
        let Some(CertificateReports { events, .. }) = self.certificate_reports.get() else { return };
        let (namespace, name) = (key.namespace.as_str().into(), key.pod_name.as_str().into());
        let pod = PodRef { uid: key.pod_uid.clone(), namespace, name };
        let event = EventRecord::new(InvolvedObject::Pod(pod), Severity::Warning, reason, message);
        events.record(event, self.clock.now().wall);
    }
}
