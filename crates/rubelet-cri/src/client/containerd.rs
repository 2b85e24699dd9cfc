//! The calls of containerd's own API, on the socket of its CRI.
//!
//! Owns: the namespace of CRI's containers. Never: used where CRI has a call for the same.
//! A runtime that is not containerd answers `Unimplemented`.

use std::time::Duration;

use tonic::{Request, metadata::MetadataValue, transport::Channel};

use super::call;
use crate::{
    port::{RpcErrorKind, RpcResult},
    tasks::{DeleteTaskRequest, KillRequest, WaitRequest, tasks_client::TasksClient},
};

/// Where containerd's CRI keeps its containers.
const CRI_NAMESPACE: &str = "k8s.io";
const SIGKILL: u32 = 9;

/// Each of the three calls has the whole timeout. A task that has ended or is gone needs no kill; a gone one no removal.
pub(super) async fn delete_task(channel: Channel, container_id: &str, timeout: Duration) -> RpcResult<()> {
    let client = TasksClient::with_interceptor(channel, |mut request: Request<()>| {
        request.metadata_mut().insert("containerd-namespace", MetadataValue::from_static(CRI_NAMESPACE));
        Ok(request)
    });
    let (mut killing, mut waiting, mut deleting) = (client.clone(), client.clone(), client);
    let kill = KillRequest { container_id: container_id.to_owned(), signal: SIGKILL, all: true };
    gone_is_done(call("Tasks.Kill", timeout, kill, |request| killing.kill(request)).await)?;
    let wait = WaitRequest { container_id: container_id.to_owned() };
    gone_is_done(call("Tasks.Wait", timeout, wait, |request| waiting.wait(request)).await)?;
    let delete = DeleteTaskRequest { container_id: container_id.to_owned() };
    gone_is_done(call("Tasks.Delete", timeout, delete, |request| deleting.delete(request)).await)
}

fn gone_is_done<Answer>(result: RpcResult<Answer>) -> RpcResult<()> {
    match result {
        Err(error) if error.kind != RpcErrorKind::NotFound => Err(error),
        Ok(_) | Err(_) => Ok(()),
    }
}
