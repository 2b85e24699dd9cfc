//! The sysctls a pod may set.
//!
//! Owns: the safe ones, and what `allowedUnsafeSysctls` adds. Never: sets one.
//! Upstream: `sysctl/{allowlist,safe_sysctls}.go`, `component-helpers/node/util/sysctl`.

use k8s_openapi::api::core::v1::PodSpec;

use crate::{
    container::is_host_network,
    pod::status::{FailureReason, PodFailure},
};

/// They affect the pod alone. All are namespaced in every kernel Rubelet runs on.
const SAFE: &[&str] = &[
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
];

pub(super) fn refusal(spec: &PodSpec, allowed: &[String]) -> Option<PodFailure> {
    let sysctls = spec.security_context.iter().flat_map(|context| context.sysctls.iter().flatten());
    let names = sysctls.map(|sysctl| normalized(&sysctl.name));
    let refusal = names.filter_map(|name| forbidden(&name, spec, allowed)).next()?;
    Some(PodFailure::new(FailureReason::SysctlForbidden, format!("forbidden sysctl: {refusal}")))
}

fn forbidden(name: &str, spec: &PodSpec, allowed: &[String]) -> Option<String> {
    let patterns = SAFE.iter().map(|safe| (*safe).to_owned()).chain(allowed.iter().map(|pattern| normalized(pattern)));
    let listed = patterns.into_iter().find(|pattern| match pattern.split_once('*') {
        Some((prefix, _)) => name.starts_with(prefix),
        None => name == pattern,
    });
    if listed.is_none() {
        return Some(format!("{name:?} not allowlisted"));
    }
    let shared = if name.starts_with("net.") {
        is_host_network(spec).then_some("Net")
    } else {
        spec.host_ipc.unwrap_or(false).then_some("IPC")
    };
    shared.map(|namespace| format!("{name:?} not allowed with host {namespace} enabled"))
}

/// `net/ipv4/conf/eth0.1/x` is `net.ipv4.conf.eth0/1.x`: the first separator determines the form.
fn normalized(name: &str) -> String {
    if name.find(['.', '/']).is_none_or(|first| name[first..].starts_with('.')) {
        return name.to_owned();
    }
    let swapped = |letter| match letter {
        '.' => '/',
        '/' => '.',
        other => other,
    };
    name.chars().map(swapped).collect()
}
