//! Probes: one check of one container.
//!
//! Owns: the result of a check and upstream's texts. Never: counts results; the core has the thresholds.
//! Upstream: `prober.go` (runProbeWithRetries), `probe/{exec,http,tcp,grpc}`.

use std::io;

use rubelet_core::{
    config::GoDuration,
    effect::{EffectError, Facts},
    probes::{HttpGet, ProbeAction, ProbeOutcome, ProbeRequest},
};
use rubelet_cri::port::RpcErrorKind;
use rubelet_host::{
    address,
    port::{CheckError, GrpcCheck, GrpcFailure, HttpCheck, TcpCheck},
};

use crate::world::World;

/// The number of tries of a probe that returns an error.
const MAX_TRIES: u32 = 3;
/// The part of a command's output that is received and shown, for hooks too: upstream's limit for probes.
pub(super) const OUTPUT_LIMIT_BYTES: usize = 10 << 10;

pub(super) async fn probe(world: &World, order: &ProbeRequest) -> Result<Facts, EffectError> {
    let mut outcome = once(world, order).await;
    for _ in 1..MAX_TRIES {
        if !matches!(outcome, ProbeOutcome::Discarded(_) | ProbeOutcome::Unknown(_)) {
            break;
        }
        outcome = once(world, order).await;
    }
    Ok(Facts::Probe(outcome))
}

async fn once(world: &World, order: &ProbeRequest) -> ProbeOutcome {
    match &order.action {
        ProbeAction::Exec { command } => exec(world, order, command).await,
        ProbeAction::Http(get) => http(world, order, get).await,
        ProbeAction::Tcp { host, port } => {
            let pod = order.pod.uid.clone();
            let check = TcpCheck { pod, host: host.clone(), port: *port, timeout: order.timeout };
            match world.host.check_tcp(&check).await {
                Ok(()) => ProbeOutcome::Success,
                Err(error) => no_connection(&error, error.to_string()),
            }
        }
        ProbeAction::Grpc { host, port, service, user_agent } => {
            let check = GrpcCheck {
                host: host.clone(),
                port: *port,
                service: service.clone(),
                user_agent: user_agent.clone(),
                timeout: order.timeout,
            };
            match world.host.check_grpc(&check).await {
                Ok(()) => ProbeOutcome::Success,
                Err(GrpcFailure::Exhausted(error)) => ProbeOutcome::Unknown(error),
                Err(failure) => ProbeOutcome::Failure(grpc_text(&failure, &check)),
            }
        }
    }
}

async fn exec(world: &World, order: &ProbeRequest, command: &[String]) -> ProbeOutcome {
    match world.runtime.exec_sync(order.id.as_str(), command, order.timeout, Some(OUTPUT_LIMIT_BYTES)).await {
        Ok(answer) if answer.exit_code == 0 => ProbeOutcome::Success,
        Ok(answer) => ProbeOutcome::Failure(combined_output(&answer.stdout, &answer.stderr)),
        Err(error) if error.kind == RpcErrorKind::DeadlineExceeded => {
            let after = GoDuration::from(order.timeout);
            ProbeOutcome::Failure(format!("command timed out: {:?} timed out after {after}", command.join(" ")))
        }
        Err(error) => ProbeOutcome::Unknown(error.grpc_text()),
    }
}

async fn http(world: &World, order: &ProbeRequest, get: &HttpGet) -> ProbeOutcome {
    let (url, headers) = (get.url.clone(), get.headers.clone());
    let check = HttpCheck { pod: order.pod.uid.clone(), url, headers, timeout: order.timeout };
    match world.host.check_http(&check).await {
        Ok(answer) => match answer.status {
            200..=299 => ProbeOutcome::Success,
            300..=399 => {
                let body = String::from_utf8_lossy(&answer.body);
                ProbeOutcome::Warning(format!("Probe terminated redirects, Response body: {body}"))
            }
            // The text omits the body, which may hold secrets.
            status => ProbeOutcome::Failure(format!("HTTP probe failed with statuscode: {status}")),
        },
        Err(error @ CheckError::Body(_)) => ProbeOutcome::Discarded(error.to_string()),
        Err(CheckError::Io(error)) => no_connection(&error, format!("Get {:?}: {error}", get.url)),
        Err(error @ CheckError::PlainHttp) => ProbeOutcome::Failure(format!("Get {:?}: {error}", get.url)),
    }
}

/// A node without descriptors, memory or ports knows nothing of the container; upstream restarts it for that.
fn no_connection(error: &io::Error, message: String) -> ProbeOutcome {
    match error.kind() {
        io::ErrorKind::OutOfMemory => ProbeOutcome::Unknown(message),
        _ => ProbeOutcome::Failure(message),
    }
}

fn grpc_text(failure: &GrpcFailure, check: &GrpcCheck) -> String {
    let limit = GoDuration::from(check.timeout);
    match failure {
        GrpcFailure::Unreachable => {
            let address = address(&check.host, check.port);
            format!("timeout: failed to connect service {address:?} within {limit}: context deadline exceeded")
        }
        GrpcFailure::Exhausted(error) => error.clone(),
        GrpcFailure::Late => format!("timeout: health rpc did not complete within {limit}"),
        GrpcFailure::Unimplemented(said) => {
            format!("error: this server does not implement the grpc health protocol (grpc.health.v1.Health): {said}")
        }
        GrpcFailure::Rpc(error) => format!("error: health rpc probe failed: {error}"),
        GrpcFailure::Unhealthy(status) => format!("service unhealthy (responded with {status:?})"),
    }
}

/// Both streams, one after the other, up to the limit.
pub(super) fn combined_output(stdout: &[u8], stderr: &[u8]) -> String {
    let mut bytes = [stdout, stderr].concat();
    bytes.truncate(OUTPUT_LIMIT_BYTES);
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn probe_without_descriptors_is_unknown() {
        let outcome = |kind| no_connection(&io::Error::new(kind, "dial"), "dial".to_owned());
        assert_eq!(outcome(io::ErrorKind::OutOfMemory), ProbeOutcome::Unknown("dial".to_owned()));
        assert_eq!(outcome(io::ErrorKind::ConnectionRefused), ProbeOutcome::Failure("dial".to_owned()));
    }

    #[test]
    fn unhealthy_grpc_server_has_upstreams_message() {
        let check = GrpcCheck {
            host: "fd00::1".to_owned(),
            port: 5000,
            timeout: Duration::from_secs(3),
            ..GrpcCheck::default()
        };
        let failures = [
            GrpcFailure::Unreachable,
            GrpcFailure::Late,
            GrpcFailure::Unimplemented("unknown service".to_owned()),
            GrpcFailure::Rpc("rpc error: code = NotFound desc = who?".to_owned()),
            GrpcFailure::Unhealthy("NOT_SERVING".to_owned()),
        ];
        let told: Vec<_> = failures.iter().map(|failure| grpc_text(failure, &check)).collect();
        insta::assert_snapshot!(told.join("\n"), @r#"
        timeout: failed to connect service "[fd00::1]:5000" within 3s: context deadline exceeded
        timeout: health rpc did not complete within 3s
        error: this server does not implement the grpc health protocol (grpc.health.v1.Health): unknown service
        error: health rpc probe failed: rpc error: code = NotFound desc = who?
        service unhealthy (responded with "NOT_SERVING")
        "#);
    }
}
