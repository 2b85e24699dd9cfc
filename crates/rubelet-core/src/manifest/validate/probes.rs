//! Probes and lifecycle hooks.
//!
//! Upstream: validateProbe, validateHandler, validateLifecycle.

use k8s_openapi::{
    api::core::v1::{Container, ExecAction, HTTPGetAction, Lifecycle, LifecycleHandler, Probe},
    apimachinery::pkg::util::intstr::IntOrString,
};

use super::{FieldError, Path, invalid, names, not_negative, one_of};

pub(super) fn container(container: &Container, grace_secs: i64, path: &Path, problems: &mut Vec<FieldError>) {
    if let Some(lifecycle) = &container.lifecycle {
        hooks(lifecycle, grace_secs, &path.child("lifecycle"), problems);
    }
    for (probe, name) in [(&container.liveness_probe, "livenessProbe"), (&container.startup_probe, "startupProbe")] {
        if let Some(found) = probe {
            let path = path.child(name);
            checks(found, &path, problems);
            if let Some(threshold) = found.success_threshold.filter(|threshold| *threshold != 1) {
                problems.push(FieldError::invalid(&path.child("successThreshold"), threshold, "must be 1"));
            }
        }
    }
    if let Some(probe) = &container.readiness_probe {
        let path = path.child("readinessProbe");
        checks(probe, &path, problems);
        if let Some(grace) = probe.termination_grace_period_seconds {
            let field = path.child("terminationGracePeriodSeconds");
            problems.push(FieldError::invalid(&field, grace, "must not be set for readinessProbes"));
        }
    }
}

/// Fields that an init container which is no sidecar may not have.
pub(super) fn forbidden(container: &Container, path: &Path, problems: &mut Vec<FieldError>) {
    for (field, is_set) in [
        ("lifecycle", container.lifecycle.is_some()),
        ("livenessProbe", container.liveness_probe.is_some()),
        ("readinessProbe", container.readiness_probe.is_some()),
        ("startupProbe", container.startup_probe.is_some()),
    ] {
        if is_set {
            let why = "may not be set for init containers without restartPolicy=Always";
            problems.push(FieldError::forbidden(&path.child(field), why));
        }
    }
}

fn checks(probe: &Probe, path: &Path, problems: &mut Vec<FieldError>) {
    let found = [
        ("exec", probe.exec.is_some()),
        ("httpGet", probe.http_get.is_some()),
        ("tcpSocket", probe.tcp_socket.is_some()),
        ("grpc", probe.grpc.is_some()),
    ];
    one_handler(&found, path, problems);
    exec(probe.exec.as_ref(), &path.child("exec"), problems);
    http_get(probe.http_get.as_ref(), &path.child("httpGet"), problems);
    if let Some(tcp) = &probe.tcp_socket {
        port(&tcp.port, &path.child("tcpSocket").child("port"), problems);
    }
    if let Some(grpc) = &probe.grpc {
        port(&IntOrString::Int(grpc.port), &path.child("grpc").child("port"), problems);
    }
    for (field, value) in [
        ("initialDelaySeconds", probe.initial_delay_seconds),
        ("timeoutSeconds", probe.timeout_seconds),
        ("periodSeconds", probe.period_seconds),
        ("successThreshold", probe.success_threshold),
        ("failureThreshold", probe.failure_threshold),
    ] {
        not_negative(value, &path.child(field), problems);
    }
    if let Some(grace) = probe.termination_grace_period_seconds.filter(|grace| *grace <= 0) {
        let field = path.child("terminationGracePeriodSeconds");
        problems.push(FieldError::invalid(&field, grace, "must be greater than 0"));
    }
}

fn hooks(lifecycle: &Lifecycle, grace_secs: i64, path: &Path, problems: &mut Vec<FieldError>) {
    for (handler, name) in [(&lifecycle.post_start, "postStart"), (&lifecycle.pre_stop, "preStop")] {
        if let Some(handler) = handler {
            hook(handler, grace_secs, &path.child(name), problems);
        }
    }
}

fn hook(handler: &LifecycleHandler, grace_secs: i64, path: &Path, problems: &mut Vec<FieldError>) {
    let found = [
        ("exec", handler.exec.is_some()),
        ("httpGet", handler.http_get.is_some()),
        ("tcpSocket", handler.tcp_socket.is_some()),
        ("sleep", handler.sleep.is_some()),
    ];
    one_handler(&found, path, problems);
    exec(handler.exec.as_ref(), &path.child("exec"), problems);
    http_get(handler.http_get.as_ref(), &path.child("httpGet"), problems);
    if let Some(tcp) = &handler.tcp_socket {
        port(&tcp.port, &path.child("tcpSocket").child("port"), problems);
    }
    if let Some(sleep) = handler.sleep.as_ref().filter(|sleep| !(0..=grace_secs).contains(&sleep.seconds)) {
        let why = format!("must be non-negative and less than terminationGracePeriodSeconds ({grace_secs})");
        problems.push(FieldError::invalid(&path.child("sleep"), sleep.seconds, &why));
    }
}

fn one_handler(found: &[(&str, bool)], path: &Path, problems: &mut Vec<FieldError>) {
    let mut set = found.iter().filter(|(_, is_set)| *is_set);
    if set.next().is_none() {
        problems.push(FieldError::required(path, "must specify a handler type"));
    }
    for (surplus, _) in set {
        problems.push(FieldError::forbidden(&path.child(surplus), "may not specify more than 1 handler type"));
    }
}

fn exec(action: Option<&ExecAction>, path: &Path, problems: &mut Vec<FieldError>) {
    if action.is_some_and(|action| action.command.as_ref().is_none_or(Vec::is_empty)) {
        problems.push(FieldError::required(&path.child("command"), ""));
    }
}

fn http_get(action: Option<&HTTPGetAction>, path: &Path, problems: &mut Vec<FieldError>) {
    let Some(action) = action else { return };
    port(&action.port, &path.child("port"), problems);
    one_of(action.scheme.as_deref(), &["HTTP", "HTTPS"], &path.child("scheme"), problems);
    for header in action.http_headers.iter().flatten() {
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        if header.name.is_empty() || !header.name.bytes().all(is_allowed) {
            let why = "a valid HTTP header must consist of alphanumeric characters or '-' (e.g. 'X-Header-Name', \
                       regex used for validation is '[-A-Za-z0-9]+')";
            invalid(&path.child("httpHeaders"), &header.name, &[why.to_owned()], problems);
        }
    }
}

fn port(port: &IntOrString, field: &Path, problems: &mut Vec<FieldError>) {
    match port {
        IntOrString::Int(number) => {
            let messages = names::port_number(*number);
            problems.extend(messages.iter().map(|message| FieldError::invalid(field, number, message)));
        }
        IntOrString::String(name) => invalid(field, name, &names::port(name), problems),
    }
}
