//! The certificates that the agent renews.
//!
//! Owns: their expiry times, and the results of renewals. A certificate that the agent does not renew has no series.
//! Upstream: `pkg/kubelet/certificate/kubelet.go`, `buildKubeletClientConfig` of `cmd/kubelet/app`.

use std::sync::{Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;

use super::{
    family::{Counters, Histograms},
    text::Text,
};

const ROTATION_BOUNDS: &[f64] =
    &[60.0, 3600.0, 14400.0, 86400.0, 604_800.0, 2_592_000.0, 7_776_000.0, 15_552_000.0, 31_104_000.0, 124_416_000.0];

#[derive(Debug)]
pub struct Certificates {
    pub client: Certificate,
    pub serving: Certificate,
}

#[derive(Debug)]
pub struct Certificate {
    ttl: (&'static str, &'static str),
    /// `None`: not renewed by the agent. Inside: its expiry, once there is a certificate.
    end: Mutex<Option<Option<Timestamp>>>,
    errors: Counters<0>,
    /// The age of certificates when they were replaced.
    ages: Option<Histograms<0>>,
}

impl Certificates {
    pub(super) fn new() -> Self {
        Certificates {
            client: Certificate {
                ttl: (
                    "kubelet_certificate_manager_client_ttl_seconds",
                    "[ALPHA] Gauge of the TTL (time-to-live) of the Kubelet's client certificate. The value is in seconds \
                     until certificate expiry (negative if already expired). If client certificate is invalid or unused, the \
                     value will be +INF.",
                ),
                end: Mutex::default(),
                errors: Counters::new(
                    "kubelet_certificate_manager_client_expiration_renew_errors",
                    [],
                    "[ALPHA] Counter of certificate renewal errors.",
                ),
                ages: None,
            },
            serving: Certificate {
                ttl: (
                    "kubelet_certificate_manager_server_ttl_seconds",
                    "[ALPHA] Gauge of the shortest TTL (time-to-live) of the Kubelet's serving certificate. The value is in \
                     seconds until certificate expiry (negative if already expired). If serving certificate is invalid or \
                     unused, the value will be +INF.",
                ),
                end: Mutex::default(),
                errors: Counters::new(
                    "kubelet_server_expiration_renew_errors",
                    [],
                    "[ALPHA] Counter of certificate renewal errors.",
                ),
                ages: Some(Histograms::new(
                    "kubelet_certificate_manager_server_rotation_seconds",
                    [],
                    ROTATION_BOUNDS,
                    "[ALPHA] Histogram of the number of seconds the previous certificate lived before being rotated.",
                )),
            },
        }
    }

    pub fn write(&self, now: Timestamp, text: &mut Text) {
        self.client.write(now, text);
        self.serving.write(now, text);
    }
}

impl Certificate {
    /// The certificate now in use, or none yet.
    pub fn in_use(&self, ends: Option<Timestamp>) {
        *self.lock() = Some(ends);
    }

    pub fn not_renewed(&self) {
        self.errors.inc([]);
    }

    /// A certificate was replaced.
    pub fn replaced(&self, made: Timestamp, now: Timestamp) {
        if let Some(ages) = &self.ages {
            ages.observe([], now.duration_since(made).as_secs_f64());
        }
    }

    fn write(&self, now: Timestamp, text: &mut Text) {
        let Some(end) = *self.lock() else { return };
        let left = end.map_or(f64::INFINITY, |end| end.duration_since(now).as_secs_f64().trunc());
        text.single(self.ttl.0, "gauge", self.ttl.1, left);
        self.errors.write(text);
        if let Some(ages) = &self.ages {
            ages.write(text);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Option<Timestamp>>> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rotated_certificates_have_metrics() {
        let certificates = Certificates::new();
        let at = |secs| Timestamp::from_second(secs).unwrap();
        let shown = |now| {
            let mut text = Text::default();
            certificates.write(at(now), &mut text);
            let page = text.into_string();
            page.lines()
                .filter(|line| !line.starts_with('#') && !line.contains("bucket"))
                .collect::<Vec<_>>()
                .join("\n")
        };
        assert_eq!(shown(0), "");
        certificates.client.in_use(None);
        certificates.client.not_renewed();
        certificates.serving.in_use(Some(at(100)));
        certificates.serving.replaced(at(-20), at(10));
        insta::assert_snapshot!(shown(130), @"
        kubelet_certificate_manager_client_ttl_seconds +Inf
        kubelet_certificate_manager_client_expiration_renew_errors 1
        kubelet_certificate_manager_server_ttl_seconds -30
        kubelet_server_expiration_renew_errors 0
        kubelet_certificate_manager_server_rotation_seconds_sum 30
        kubelet_certificate_manager_server_rotation_seconds_count 1
        ");
    }
}
