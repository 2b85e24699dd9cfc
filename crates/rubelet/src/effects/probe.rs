//! Probes: one question to one container.
//!
//! Owns: what an answer counts as, in upstream's words. Never: counts answers; the core has the thresholds.
//! Upstream: `prober.go` (runProbeWithRetries), `probe/{exec,http,tcp,grpc}`.

use std::time::Duration;

use rubelet_core::{
    config::GoDuration,
    effect::{EffectError, Facts},
    probes::{HttpGet, ProbeAction, ProbeOrder, ProbeOutcome},
};
use rubelet_cri::port::RpcErrorKind;
use rubelet_host::port::HttpCheck;

use crate::world::World;

/// A probe that could not be made is made again, this often in all.
const MAX_TRIES: u32 = 3;
/// What an event shows of a command's output.
const OUTPUT_LIMIT_BYTES: usize = 10 << 10;

pub async fn probe(world: &World, order: &ProbeOrder) -> Result<Facts, EffectError> {
    let mut outcome = once(world, order).await;
    for _ in 1..MAX_TRIES {
        if !matches!(outcome, ProbeOutcome::Unknown(_)) {
            break;
        }
        outcome = once(world, order).await;
    }
    Ok(Facts::Probe(outcome))
}

async fn once(world: &World, order: &ProbeOrder) -> ProbeOutcome {
    match &order.action {
        ProbeAction::Exec { command } => exec(world, order, command).await,
        ProbeAction::Http(get) => http(world, get, order.timeout).await,
        ProbeAction::Tcp { host, port } => match world.host.check_tcp(host, *port, order.timeout).await {
            Ok(()) => ProbeOutcome::Success,
            Err(error) => ProbeOutcome::Failure(error.to_string()),
        },
        ProbeAction::Grpc { .. } => ProbeOutcome::Unknown("gRPC probes are not supported yet".to_owned()),
    }
}

async fn exec(world: &World, order: &ProbeOrder, command: &[String]) -> ProbeOutcome {
    match world.runtime.exec_sync(order.id.as_str(), command, order.timeout).await {
        Ok(answer) if answer.exit_code == 0 => ProbeOutcome::Success,
        Ok(answer) => ProbeOutcome::Failure(output(&answer.stdout, &answer.stderr)),
        Err(error) if error.kind == RpcErrorKind::DeadlineExceeded => {
            let after = GoDuration::from(order.timeout);
            ProbeOutcome::Failure(format!("command timed out: {:?} timed out after {after}", command.join(" ")))
        }
        Err(error) => ProbeOutcome::Unknown(error.grpc_text()),
    }
}

async fn http(world: &World, get: &HttpGet, timeout: Duration) -> ProbeOutcome {
    let check = HttpCheck { url: get.url.clone(), headers: get.headers.clone(), timeout };
    match world.host.check_http(&check).await {
        Ok(answer) => match answer.status {
            200..=299 => ProbeOutcome::Success,
            300..=399 => {
                let body = String::from_utf8_lossy(&answer.body);
                ProbeOutcome::Warning(format!("Probe terminated redirects, Response body: {body}"))
            }
            // The body stays out of it: it may hold what is nobody's business.
            status => ProbeOutcome::Failure(format!("HTTP probe failed with statuscode: {status}")),
        },
        Err(error) => ProbeOutcome::Failure(format!("Get {:?}: {error}", get.url)),
    }
}

/// Both streams, one after the other, as far as anybody reads.
fn output(stdout: &[u8], stderr: &[u8]) -> String {
    let mut bytes = [stdout, stderr].concat();
    bytes.truncate(OUTPUT_LIMIT_BYTES);
    String::from_utf8_lossy(&bytes).into_owned()
}
