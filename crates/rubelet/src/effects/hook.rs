//! Lifecycle hooks: postStart and preStop.
//!
//! Owns: the call, and upstream's text of its failure. Never: decides what a failure leads to.
//! Upstream: `lifecycle/handlers.go`.

use std::time::Duration;

use rubelet_core::{
    effect::{EffectError, ErrorKind, Facts},
    pod::hooks::{HookAction, HookRequest},
    probes::HttpGet,
};
use rubelet_host::port::{CheckError, HttpCheck};
use tokio::time::timeout;

use crate::{
    effects::probe::{OUTPUT_LIMIT_BYTES, combined_output},
    world::World,
};

/// A preStop hook that exceeds its time is abandoned, which is not a failure.
pub(super) async fn run_hook(world: &World, order: &HookRequest) -> Result<Facts, EffectError> {
    match timeout(order.limit, run(world, order)).await {
        Ok(Err(message)) => Err(EffectError { kind: ErrorKind::Retry, message }),
        Ok(Ok(facts)) => Ok(facts),
        Err(_) => Ok(Facts::Nothing),
    }
}

async fn run(world: &World, order: &HookRequest) -> Result<Facts, String> {
    match &order.action {
        HookAction::Exec { command } => exec(world, order, command).await.map(|()| Facts::Nothing),
        HookAction::Http(get) => http(world, order, get).await,
        HookAction::Sleep { secs } => {
            tokio::time::sleep(Duration::from_secs(*secs)).await;
            Ok(Facts::Nothing)
        }
        HookAction::Invalid(why) => Err(format!("Cannot run handler: {why}")),
    }
}

async fn exec(world: &World, order: &HookRequest, command: &[String]) -> Result<(), String> {
    let answer = world.runtime.exec_sync(order.id.as_str(), command, order.limit, Some(OUTPUT_LIMIT_BYTES)).await;
    let (error, output) = match answer {
        Ok(answer) if answer.exit_code == 0 => return Ok(()),
        Ok(answer) => {
            let stderr = String::from_utf8_lossy(&answer.stderr).into_owned();
            let error = format!("command '{}' exited with {}: {stderr}", command.join(" "), answer.exit_code);
            (error, combined_output(&answer.stdout, &answer.stderr))
        }
        Err(error) => (error.grpc_text(), String::new()),
    };
    let words = command.join(" ");
    Err(format!("Exec lifecycle hook ([{words}]) for {} failed - error: {error}, message: {output:?}", subject(order)))
}

/// Any HTTP response is a success. If the container does not serve TLS, the hook falls back to HTTP, as upstream does, without
/// the Authorization header.
async fn http(world: &World, order: &HookRequest, get: &HttpGet) -> Result<Facts, String> {
    let (url, headers) = (get.url.clone(), get.headers.clone());
    let mut check = HttpCheck { pod: order.pod.uid.clone(), url, headers, timeout: order.limit };
    let error = match world.host.check_http(&check).await {
        Ok(_) | Err(CheckError::Body(_)) => return Ok(Facts::Nothing),
        Err(error) => error,
    };
    if let (CheckError::PlainHttp, Some(rest)) = (&error, get.url.strip_prefix("https://")) {
        check.url = format!("http://{rest}");
        check.headers.retain(|(name, _)| !name.eq_ignore_ascii_case("Authorization"));
        if matches!(world.host.check_http(&check).await, Ok(_) | Err(CheckError::Body(_))) {
            let address = rest.split('/').next().unwrap_or_default().to_owned();
            return Ok(Facts::HookFellBack { address });
        }
    }
    Err(format!("HTTP lifecycle hook for {} failed - error: Get {:?}: {error}", subject(order), get.url))
}

fn subject(order: &HookRequest) -> String {
    let pod = &order.pod;
    format!("Container {:?} in Pod \"{}_{}({})\"", order.container, pod.name, pod.namespace, pod.uid)
}

#[cfg(test)]
mod tests {
    use rubelet_core::{id::ContainerId, pod::hooks::Hook};
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
    };

    use super::*;
    use crate::{effects::directories::tests::pod_ref, world::testing::world_in};

    #[tokio::test]
    async fn https_hook_falls_back_to_http_without_authorization() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let url = format!("https://{address}/stop");
        let headers = vec![("Authorization".to_owned(), "secret".to_owned()), ("X-Kept".to_owned(), "yes".to_owned())];
        let order = HookRequest {
            pod: pod_ref("uid-1"),
            container: "app".to_owned(),
            id: ContainerId::new("c1"),
            hook: Hook::PreStop,
            action: HookAction::Http(HttpGet { url: url.clone(), headers }),
            limit: Duration::from_secs(5),
        };
        // The error of Go's server for a client with TLS, then a success.
        let serve = async {
            let mut heard = Vec::new();
            for answer in ["400 Bad Request", "200 OK"] {
                let (mut connection, _) = listener.accept().await.unwrap();
                let mut request = vec![0; 8192];
                let read = connection.read(&mut request).await.unwrap();
                heard.push(String::from_utf8_lossy(&request[..read]).into_owned());
                let text = format!("HTTP/1.1 {answer}\r\nContent-Length: 0\r\n\r\n");
                connection.write_all(text.as_bytes()).await.unwrap();
            }
            heard
        };
        let dir = tempfile::tempdir().unwrap();
        let world = world_in(dir.path());
        let (told, heard) = tokio::join!(run_hook(&world, &order), serve);
        assert_eq!(told, Ok(Facts::HookFellBack { address: address.clone() }));
        assert!(heard[1].starts_with("GET /stop ") && heard[1].contains("x-kept: yes"), "{}", heard[1]);
        assert!(!heard[1].contains("secret"), "{}", heard[1]);

        drop(listener);
        let refused = run_hook(&world, &order).await.unwrap_err().message;
        let expected = format!(
            "HTTP lifecycle hook for Container \"app\" in Pod \"web_default(uid-1)\" failed - error: Get {url:?}: dial tcp {address}: connect: connection refused"
        );
        assert_eq!(refused, expected);
    }
}
