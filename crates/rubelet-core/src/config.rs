//! KubeletConfiguration v1beta1: types, defaults, merging, validation, feature gates.
//!
//! Owns: the meaning of a configuration. Never: reads files or flags; `rubelet/src/cli/` does and passes documents.
//! Upstream: `pkg/kubelet/apis/config`, `cmd/kubelet/app`.

mod complete;
mod document;
mod duration;
pub mod gates;
mod names;
mod quantity;
mod types;
mod validate;

pub use self::{
    complete::{API_VERSION, Checked, ConfigProblem, Draft, FlagValue, KIND, Origin},
    document::{Mismatch, at, shown},
    duration::{FlushForm, FlushFrequency, GoDuration},
    names::node_labels,
    quantity::QuantityText,
    types::{
        AnonymousAuthentication, Authentication, Authorization, CrashLoopBackOff, Field, KubeletConfiguration,
        LogOptions, LogRouting, Logging, MemoryReservation, MemorySwap, Rule, ShutdownGracePeriodByPodPriority,
        Tracing, UserNamespaces, VModule, WebhookAuthentication, WebhookAuthorization, X509Authentication,
    },
    validate::Host,
};
