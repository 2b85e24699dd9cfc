//! Identifiers with distinct types.
//!
//! Owns: the newtypes, and a pod's names. They clone by reference count, because they are the keys of nearly every map.

use std::{fmt, sync::Arc};

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

macro_rules! string_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(Arc<str>);

        impl $name {
            pub fn new(id: impl AsRef<str>) -> Self {
                Self(Arc::from(id.as_ref()))
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl From<&str> for $name {
            fn from(id: &str) -> Self {
                Self::new(id)
            }
        }
    };
}

string_id! {
    /// A pod's UID: the API server's, or for a static pod the one computed from its manifest.
    PodUid
}
string_id! {
    /// The runtime's id of a pod sandbox.
    SandboxId
}
string_id! {
    /// The runtime's ID of a container, without the `containerd://` in front.
    ContainerId
}

/// A pod's name, with the UID that distinguishes pods of the same name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PodRef {
    pub uid: PodUid,
    pub namespace: Arc<str>,
    pub name: Arc<str>,
}

impl PodUid {
    /// Empty only in a pod without a UID.
    pub fn of(pod: &Pod) -> Self {
        PodUid::new(pod.metadata.uid.as_deref().unwrap_or_default())
    }
}

impl PodRef {
    pub fn of(pod: &Pod) -> Self {
        PodRef { uid: PodUid::of(pod), namespace: namespace_of(pod).into(), name: name_of(pod).into() }
    }

    /// A pod that is found only by its directory or its cgroup: its name is unknown.
    pub fn unnamed(uid: PodUid) -> Self {
        PodRef { namespace: "".into(), name: uid.as_str().into(), uid }
    }

    pub fn is_unnamed(&self) -> bool {
        self.namespace.is_empty()
    }

    /// As `full_name_of` the pod.
    pub fn full_name(&self) -> String {
        format!("{}_{}", self.name, self.namespace)
    }
}

impl fmt::Display for PodRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

pub fn name_of(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

pub fn namespace_of(pod: &Pod) -> &str {
    pod.metadata.namespace.as_deref().unwrap_or("default")
}

/// `name_namespace`: upstream's "full name". Only one static pod of a full name may run at a time.
pub fn full_name_of(pod: &Pod) -> String {
    format!("{}_{}", name_of(pod), namespace_of(pod))
}
