//! What somebody who counts is told of the traffic.
//!
//! Owns: the words of it. Never: counts; a client without an observer tells nobody.
//! Upstream: `client-go/tools/metrics`.

use std::{fmt, sync::Arc, time::Duration};

use http::{Method, StatusCode};

/// Is told of everything as it happens. Nothing else can happen meanwhile: it must be quick.
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
    /// A request got its turn after this long.
    Waited(Duration),
    /// One try; `None` when there was no answer.
    Tried(Option<StatusCode>),
    /// A call is over, after all its tries.
    Called { took: Duration, sent_bytes: usize, received_bytes: Option<usize> },
}
