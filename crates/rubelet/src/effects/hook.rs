//! Hooks: one thing a container is told when it starts or stops.
//!
//! Owns: the call, and why it failed in upstream's words. Never: decides what a failure leads to.
//! Upstream: `lifecycle/handlers.go`.

use std::time::Duration;

use rubelet_core::{
    effect::{EffectError, ErrorKind, Facts},
    pod::hooks::{HookAction, HookOrder},
    probes::HttpGet,
};
use rubelet_host::port::HttpCheck;
use tokio::time::timeout;

use crate::world::World;

/// A hook that does not end in its time is left behind, and that is no failure.
pub async fn run_hook(world: &World, order: &HookOrder) -> Result<Facts, EffectError> {
    match timeout(order.limit, run(world, order)).await {
        Ok(Err(message)) => Err(EffectError { kind: ErrorKind::Retry, message }),
        Ok(Ok(())) | Err(_) => Ok(Facts::Nothing),
    }
}

async fn run(world: &World, order: &HookOrder) -> Result<(), String> {
    match &order.action {
        HookAction::Exec { command } => exec(world, order, command).await,
        HookAction::Http(get) => http(world, order, get).await,
        HookAction::Sleep { secs } => {
            tokio::time::sleep(Duration::from_secs(*secs)).await;
            Ok(())
        }
        HookAction::Invalid(why) => Err(format!("Cannot run handler: {why}")),
    }
}

async fn exec(world: &World, order: &HookOrder, command: &[String]) -> Result<(), String> {
    let answer = world.runtime.exec_sync(order.id.as_str(), command, order.limit).await;
    let (error, output) = match answer {
        Ok(answer) if answer.exit_code == 0 => return Ok(()),
        Ok(answer) => {
            let stderr = String::from_utf8_lossy(&answer.stderr).into_owned();
            let error = format!("command '{}' exited with {}: {stderr}", command.join(" "), answer.exit_code);
            (error, [answer.stdout, answer.stderr].concat())
        }
        Err(error) => (error.grpc_text(), Vec::new()),
    };
    let (words, output) = (command.join(" "), String::from_utf8_lossy(&output));
    Err(format!("Exec lifecycle hook ([{words}]) for {} failed - error: {error}, message: {output:?}", subject(order)))
}

/// Whatever the container answers, it was told.
async fn http(world: &World, order: &HookOrder, get: &HttpGet) -> Result<(), String> {
    let check = HttpCheck { url: get.url.clone(), headers: get.headers.clone(), timeout: order.limit };
    match world.host.check_http(&check).await {
        Ok(_) => Ok(()),
        Err(error) => {
            Err(format!("HTTP lifecycle hook for {} failed - error: Get {:?}: {error}", subject(order), get.url))
        }
    }
}

fn subject(order: &HookOrder) -> String {
    let pod = &order.pod;
    format!("Container {:?} in Pod \"{}_{}({})\"", order.container, pod.name, pod.namespace, pod.uid)
}
