//! An API server for tests: gives scripted responses in order, and records the requests.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
};

use async_trait::async_trait;
use bytes::Bytes;
use rubelet_kube::port::{ApiError, ApiErrorKind, ApiServer, Call, Watch, WatchEvent, WatchStream};
use tokio::sync::Notify;

#[derive(Debug, Default)]
pub(crate) struct FakeApi {
    calls: Mutex<Vec<Call>>,
    answers: Mutex<VecDeque<Result<String, ApiErrorKind>>>,
    watches: Mutex<VecDeque<Vec<WatchEvent>>>,
    called: Notify,
}

impl FakeApi {
    /// Unscripted calls get an empty object, and unscripted watches never send anything.
    pub(crate) fn answering(answers: impl IntoIterator<Item = Result<String, ApiErrorKind>>) -> Arc<Self> {
        Arc::new(FakeApi { answers: Mutex::new(answers.into_iter().collect()), ..FakeApi::default() })
    }

    /// The next watch sends this and then ends.
    pub(crate) fn watched(self: Arc<Self>, events: impl IntoIterator<Item = WatchEvent>) -> Arc<Self> {
        self.watches.lock().unwrap().push_back(events.into_iter().collect());
        self
    }

    pub(crate) fn calls(&self) -> Vec<Call> {
        self.calls.lock().unwrap().clone()
    }

    pub(crate) async fn until_called(&self, times: usize) -> Vec<Call> {
        loop {
            let called = self.called.notified();
            let calls = self.calls();
            if calls.len() >= times {
                return calls;
            }
            called.await;
        }
    }
}

#[async_trait]
impl ApiServer for FakeApi {
    async fn call(&self, call: Call) -> Result<Bytes, ApiError> {
        self.calls.lock().unwrap().push(call.clone());
        self.called.notify_waiters();
        let answer = self.answers.lock().unwrap().pop_front().unwrap_or_else(|| Ok("{}".to_owned()));
        answer.map(Bytes::from).map_err(|kind| ApiError::new(kind, format!("{}: {kind:?}", call.path)))
    }

    async fn watch(&self, watch: Watch) -> Result<WatchStream, ApiError> {
        assert!(watch.query.contains(&("watch", "true".to_owned())), "a server would take this for a list");
        if watch.query.contains(&("sendInitialEvents", "true".to_owned())) {
            return Err(ApiError::new(ApiErrorKind::Invalid, "no streamed lists"));
        }
        let told = self.watches.lock().unwrap().pop_front();
        Ok(match told {
            Some(events) => Box::pin(futures_util::stream::iter(events.into_iter().map(Ok))),
            None => Box::pin(futures_util::stream::pending()),
        })
    }
}
