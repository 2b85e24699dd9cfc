//! The configuration of the kubelet's port.
//!
//! Owns: from `authentication`, `authorization` and the TLS fields to the filters, and the log lines about them at start.
//! Upstream: `BuildAuth`, `InitializeTLS`.

use std::{path::PathBuf, sync::Arc};

use rubelet_core::config::{self, KubeletConfiguration, gates::Gate};
use serde_json::{Value, json};

use super::{
    Guard, Secured,
    authentication::{Authentication, TokenReviewer},
    authorization::{Authorization, ExecVerb, WebhookAuthorizer},
    certificates::CertificateAuthenticator,
    pages::Pages,
    tls::{Tls, TlsSettings},
};
use crate::{certs::ServingFiles, cli::Options, server::ServerContext, world::World};

impl Secured {
    pub(crate) fn new(options: &Options, world: &World, context: ServerContext, files: ServingFiles) -> Self {
        let told = &options.config;
        let client_authority = &told.authentication.x509.client_ca_file;
        let (tls, unknown) = Tls::new(TlsSettings {
            certificate: files.certificate,
            key: files.key,
            client_authority: (!client_authority.is_empty()).then(|| PathBuf::from(client_authority)),
            min_version: told.tls_min_version.clone(),
            cipher_suites: told.tls_cipher_suites.clone(),
            curves: told.tls_curve_preferences.clone(),
        });
        for suite in unknown.suites {
            tracing::warn!(suite, "tlsCipherSuites: unsupported cipher suite ignored");
        }
        for curve in unknown.curves {
            tracing::warn!(curve, "tlsCurvePreferences: unsupported curve ignored");
        }
        let guard = Guard {
            authentication: authentication(options, world, tls),
            authorization: authorization(options, world),
            exec_verb: if options.flags.rubelet_exec_needs_create { ExecVerb::Create } else { ExecVerb::OfMethod },
        };
        Secured {
            context,
            runtime: world.runtime.clone(),
            guard: Arc::new(guard),
            configuration: Arc::new(shown(told)),
            debugging: told.enable_debugging_handlers,
            translates_websockets: options.gates.enabled(Gate::ExtendWebSocketsToKubelet),
            pages: Arc::new(Pages::of(options)),
        }
    }
}

/// The configuration without credentials; upstream shows these headers.
fn shown(config: &KubeletConfiguration) -> Value {
    let mut shown = config::shown(config);
    let headers = shown.get_mut("staticPodURLHeader").and_then(Value::as_object_mut);
    for values in headers.into_iter().flat_map(|headers| headers.values_mut()) {
        *values = json!(["<masked>"]);
    }
    shown
}

fn authentication(options: &Options, world: &World, tls: Tls) -> Authentication {
    let told = &options.config.authentication;
    let cluster = world.cluster.clone().filter(|_| told.webhook.enabled);
    if told.webhook.enabled && cluster.is_none() {
        tracing::info!("no API server, token authentication disabled");
    }
    Authentication {
        certificates: Arc::new(CertificateAuthenticator { tls: Arc::new(tls), clock: world.clock.clone() }),
        tokens: cluster
            .map(|cluster| TokenReviewer::new(cluster, told.webhook.cache_ttl.as_std(), world.clock.clone())),
        anonymous: told.anonymous.enabled,
    }
}

fn authorization(options: &Options, world: &World) -> Authorization {
    let told = &options.config.authorization;
    match (&world.cluster, told.mode.as_str()) {
        (_, "AlwaysAllow") => Authorization::AlwaysAllow,
        (None, _) => {
            tracing::info!("no API server, all requests to the kubelet's port forbidden");
            Authorization::NoApiServer
        }
        (Some(cluster), _) => {
            let (allowed, denied) =
                (told.webhook.cache_authorized_ttl.as_std(), told.webhook.cache_unauthorized_ttl.as_std());
            let node_name = &world.settings.node_name;
            Authorization::Webhook(WebhookAuthorizer::new(
                cluster.clone(),
                node_name,
                allowed,
                denied,
                world.clock.clone(),
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manifest_url_headers_are_masked() {
        let headers = [("Authorization".to_owned(), vec!["Bearer secret".to_owned()])];
        let config = KubeletConfiguration { static_pod_url_header: headers.into(), ..KubeletConfiguration::default() };
        let shown = shown(&config);
        assert_eq!(shown["staticPodURLHeader"], json!({ "Authorization": ["<masked>"] }));
        assert!(shown.get("syncFrequency").is_some());
    }
}
