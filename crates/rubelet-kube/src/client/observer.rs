//! The observer of the client's traffic.
//!
//! Owns: the trait. Never: counts.
//! Upstream: `client-go/tools/metrics`.

use std::{fmt, sync::Arc, time::Duration};

use http::{Method, StatusCode};

/// Called synchronously for each event: it must be quick.
#[derive(Clone)]
pub struct Observer(Arc<dyn Fn(&Observed<'_>) + Send + Sync>);

impl Observer {
    pub fn new(observe: impl Fn(&Observed<'_>) + Send + Sync + 'static) -> Self {
        Observer(Arc::new(observe))
    }

    pub(super) fn tell(&self, observed: &Observed<'_>) {
        (self.0)(observed);
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Observer")
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Observed<'a> {
    pub method: &'a Method,
    /// With its port, as the kubeconfig has it.
    pub host: &'a str,
    pub what: Occurrence,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occurrence {
    /// The rate limiter delayed a request this long.
    Waited(Duration),
    /// One try; `None` without a response.
    Tried(Option<StatusCode>),
    /// A call ended, after all its tries.
    Called { took: Duration, sent_bytes: usize, received_bytes: Option<usize> },
}
