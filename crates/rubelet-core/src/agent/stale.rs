//! Entries kept about pods that are gone.
//!
//! Owns: a list that must be empty when the agent is idle, or memory grows with every pod; tests and the simulator check it.
//! Never: removes anything.

use crate::{agent::Agent, api_requests::ApiRequest, flights::Subject, id::PodUid};

impl Agent {
    /// Entries about pods that no source has and that have no record, as `part: pod`.
    pub fn entries_of_gone_pods(&self) -> Vec<String> {
        let is_gone = |uid: &&PodUid| !self.records.contains_key(*uid) && !self.pods.knows(uid);
        let flights = self.outbox.flights.subjects().filter_map(|subject| match subject {
            Subject::Pod(uid, _) => Some(uid),
            Subject::Node(_) | Subject::Api(_) | Subject::Device(_) | Subject::Log(..) => None,
        });
        let uids = [
            ("status manager", self.statuses.uids().collect()),
            ("images", self.images.uids().collect()),
            ("node", self.node.gone.keys().collect()),
            ("logs", self.node.logs.uids().collect()),
            ("devices", self.node.devices.user_uids().collect()),
            ("flights", flights.collect()),
            ("snapshot", self.snapshot.pods.keys().collect::<Vec<_>>()),
        ];
        let uids = uids.into_iter().flat_map(|(part, uids)| uids.into_iter().map(move |uid| (part, uid)));
        let by_uid = uids.filter(|(_, uid)| is_gone(uid)).map(|(part, uid)| format!("{part}: {uid}"));
        let requests = self.api_requests.failed_requests().chain(self.outbox.flights.api_requests());
        let requests = requests.filter(|request| match request {
            ApiRequest::Status(uid) => is_gone(&uid),
            ApiRequest::Mirror(name) => !self.has_full_name(name),
            ApiRequest::Node => false,
        });
        let by_request = requests.map(|request| format!("requests: {request:?}"));
        by_uid.chain(by_request).collect()
    }

    fn has_full_name(&self, name: &str) -> bool {
        self.pods.pod_by_full_name(name).is_some()
            || self.pods.mirror_pod_by_full_name(name).is_some()
            || self.records.values().any(|record| record.id.full_name() == name)
    }
}
