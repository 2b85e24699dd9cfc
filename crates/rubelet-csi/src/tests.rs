//! The client against a driver that the test plays on a socket of its own.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use tempfile::TempDir;
use tokio::{net::UnixListener, task::JoinHandle};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status, transport::Server};

use crate::{
    AccessMode, AccessType, Client, Code, CsiClient, CsiPlugins, Drivers, NodeCapabilities, PublishVolume, Secrets,
    StageVolume, VolumeAccess, VolumeUsage,
    pluginregistration::{
        InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
        registration_server::{Registration, RegistrationServer},
    },
    v1::{
        self,
        node_server::{Node, NodeServer},
    },
};

/// A driver: what it answers, and what it was asked for.
#[derive(Clone, Debug, Default)]
struct FakeDriver {
    /// Of NodePublishVolume.
    failure: Option<Status>,
    authorities: Arc<Mutex<Vec<String>>>,
    published: Arc<Mutex<Vec<v1::NodePublishVolumeRequest>>>,
    notified: Arc<Mutex<Vec<RegistrationStatus>>>,
}

struct Running {
    _dir: TempDir,
    socket: PathBuf,
    server: JoinHandle<()>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.server.abort();
    }
}

fn serve(driver: FakeDriver) -> Running {
    let dir = TempDir::new().unwrap();
    // A name that is no URI.
    let socket = dir.path().join("a socket%.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let authorities = Arc::clone(&driver.authorities);
    let server = Server::builder()
        .layer(tower::util::MapRequestLayer::new(move |request: tonic::codegen::http::Request<_>| {
            authorities.lock().unwrap().push(request.uri().authority().unwrap().to_string());
            request
        }))
        .add_service(NodeServer::new(driver.clone()))
        .add_service(RegistrationServer::new(driver));
    let server = tokio::spawn(async move {
        server.serve_with_incoming(UnixListenerStream::new(listener)).await.unwrap();
    });
    Running { _dir: dir, socket, server }
}

#[tonic::async_trait]
impl Node for FakeDriver {
    async fn node_stage_volume(
        &self,
        _request: Request<v1::NodeStageVolumeRequest>,
    ) -> Result<Response<v1::NodeStageVolumeResponse>, Status> {
        std::future::pending().await
    }

    async fn node_unstage_volume(
        &self,
        _request: Request<v1::NodeUnstageVolumeRequest>,
    ) -> Result<Response<v1::NodeUnstageVolumeResponse>, Status> {
        Ok(Response::new(v1::NodeUnstageVolumeResponse {}))
    }

    async fn node_publish_volume(
        &self,
        request: Request<v1::NodePublishVolumeRequest>,
    ) -> Result<Response<v1::NodePublishVolumeResponse>, Status> {
        self.published.lock().unwrap().push(request.into_inner());
        self.failure.clone().map_or(Ok(Response::new(v1::NodePublishVolumeResponse {})), Err)
    }

    async fn node_unpublish_volume(
        &self,
        _request: Request<v1::NodeUnpublishVolumeRequest>,
    ) -> Result<Response<v1::NodeUnpublishVolumeResponse>, Status> {
        Ok(Response::new(v1::NodeUnpublishVolumeResponse {}))
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<v1::NodeGetVolumeStatsRequest>,
    ) -> Result<Response<v1::NodeGetVolumeStatsResponse>, Status> {
        let usage = v1::VolumeUsage { available: 1, total: 3, used: 2, unit: v1::volume_usage::Unit::Bytes.into() };
        let usage = if request.get_ref().volume_id == "empty" { Vec::new() } else { vec![usage] };
        Ok(Response::new(v1::NodeGetVolumeStatsResponse { usage, volume_condition: None }))
    }

    async fn node_expand_volume(
        &self,
        request: Request<v1::NodeExpandVolumeRequest>,
    ) -> Result<Response<v1::NodeExpandVolumeResponse>, Status> {
        let capacity_bytes = request.into_inner().capacity_range.unwrap_or_default().required_bytes;
        Ok(Response::new(v1::NodeExpandVolumeResponse { capacity_bytes }))
    }

    async fn node_get_capabilities(
        &self,
        _request: Request<v1::NodeGetCapabilitiesRequest>,
    ) -> Result<Response<v1::NodeGetCapabilitiesResponse>, Status> {
        use v1::node_service_capability::{Rpc, Type};
        let capability = |number| v1::NodeServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: number })) };
        // One of them is from the future.
        let capabilities = [1, 5, 99].map(capability).to_vec();
        Ok(Response::new(v1::NodeGetCapabilitiesResponse { capabilities }))
    }

    async fn node_get_info(
        &self,
        _request: Request<v1::NodeGetInfoRequest>,
    ) -> Result<Response<v1::NodeGetInfoResponse>, Status> {
        // Longer than a message may be.
        Ok(Response::new(v1::NodeGetInfoResponse { node_id: "n".repeat(5 << 20), ..Default::default() }))
    }
}

#[tonic::async_trait]
impl Registration for FakeDriver {
    async fn get_info(&self, _request: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        let name = "hostpath.csi.k8s.io".to_owned();
        Ok(Response::new(PluginInfo { r#type: "CSIPlugin".to_owned(), name, ..PluginInfo::default() }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        self.notified.lock().unwrap().push(request.into_inner());
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

/// The client of a driver that is registered with this socket.
fn client(socket: &Path, plugins: CsiClient) -> Client {
    let drivers = Drivers::over(Arc::new(plugins));
    drivers.register("d", socket.to_owned());
    drivers.client("d").unwrap()
}

fn access() -> VolumeAccess {
    VolumeAccess {
        mode: AccessMode::SingleNodeWriter,
        access_type: AccessType::Mount {
            fs_type: "ext4".to_owned(),
            mount_flags: vec!["noatime".to_owned()],
            volume_mount_group: Some(2000),
        },
    }
}

fn map(key: &str, value: &str) -> BTreeMap<String, String> {
    BTreeMap::from([(key.to_owned(), value.to_owned())])
}

fn publication() -> PublishVolume {
    PublishVolume {
        handle: "vol-1".to_owned(),
        staging_path: None,
        target_path: PathBuf::from("/target"),
        access: access(),
        read_only: true,
        publish_context: map("device", "hidden-1"),
        volume_context: map("csi.storage.k8s.io/serviceAccount.tokens", "hidden-2"),
        secrets: Secrets::new(map("password", "hidden-3")),
    }
}

fn staging() -> StageVolume {
    let PublishVolume { handle, access, publish_context, volume_context, secrets, .. } = publication();
    StageVolume { handle, staging_path: PathBuf::from("/staging"), access, publish_context, volume_context, secrets }
}

#[tokio::test]
async fn a_publication_arrives_whole() {
    let driver = FakeDriver::default();
    let running = serve(driver.clone());
    client(&running.socket, CsiClient::default()).publish(publication()).await.unwrap();
    let published = driver.published.lock().unwrap().pop().unwrap();
    assert_eq!((published.volume_id.as_str(), published.target_path.as_str()), ("vol-1", "/target"));
    assert_eq!((published.staging_target_path.as_str(), published.readonly), ("", true));
    assert_eq!(published.secrets, map("password", "hidden-3"));
    let capability = published.volume_capability.unwrap();
    assert_eq!(capability.access_mode.unwrap().mode, 1);
    let Some(v1::volume_capability::AccessType::Mount(mount)) = capability.access_type else { panic!("not a mount") };
    assert_eq!((mount.fs_type.as_str(), mount.volume_mount_group.as_str()), ("ext4", "2000"));
    assert_eq!(*driver.authorities.lock().unwrap(), ["localhost"]);
}

#[tokio::test]
async fn error_codes_and_texts_are_gos() {
    let cases = [
        (Status::internal("disk is broken"), "rpc error: code = Internal desc = disk is broken", false),
        (Status::aborted("pending"), "rpc error: code = Aborted desc = pending", true),
        (Status::cancelled("x"), "rpc error: code = Canceled desc = x", true),
        (Status::resource_exhausted("x"), "rpc error: code = ResourceExhausted desc = x", true),
        (Status::unavailable("x"), "rpc error: code = Unavailable desc = x", true),
        (Status::unknown("x"), "rpc error: code = Unknown desc = x", false),
        (Status::not_found("x"), "rpc error: code = NotFound desc = x", false),
    ];
    for (status, text, is_uncertain) in cases {
        let running = serve(FakeDriver { failure: Some(status), ..FakeDriver::default() });
        let error = client(&running.socket, CsiClient::default()).publish(publication()).await.unwrap_err();
        assert_eq!((error.to_string().as_str(), error.is_uncertain()), (text, is_uncertain));
    }
}

#[tokio::test]
async fn a_driver_that_hangs_ends_at_the_deadline() {
    let running = serve(FakeDriver::default());
    let client = client(&running.socket, CsiClient::with_timeout(Duration::from_millis(50)));
    let error = client.stage(staging()).await.unwrap_err();
    assert_eq!(error.to_string(), "rpc error: code = DeadlineExceeded desc = context deadline exceeded");
    assert!(error.is_uncertain());
}

#[tokio::test]
async fn a_socket_that_is_never_read_ends_at_the_deadline() {
    let dir = TempDir::new().unwrap();
    let socket = dir.path().join("s");
    let _listener = UnixListener::bind(&socket).unwrap();
    let error = client(&socket, CsiClient::with_timeout(Duration::from_millis(50))).capabilities().await.unwrap_err();
    assert_eq!(error.code, Some(Code::DeadlineExceeded));
    let error = CsiClient::default().plugin_info(&socket).await.unwrap_err();
    assert_eq!(error.code, Some(Code::DeadlineExceeded));
}

#[tokio::test]
async fn a_connection_that_breaks_leaves_the_outcome_open() {
    let dir = TempDir::new().unwrap();
    let socket = dir.path().join("s");
    let listener = UnixListener::bind(&socket).unwrap();
    let server = tokio::spawn(async move { drop(listener.accept().await.unwrap()) });
    let error = client(&socket, CsiClient::default()).unstage("vol-1", Path::new("/staging")).await.unwrap_err();
    server.await.unwrap();
    assert!(error.is_uncertain(), "{error}");
    // The listener is closed, its file is still there.
    let error = client(&socket, CsiClient::default()).unstage("vol-1", Path::new("/staging")).await.unwrap_err();
    let dialing = format!("dial unix {}: connect: connection refused", socket.display());
    assert_eq!(
        error.to_string(),
        format!(
            "rpc error: code = Unavailable desc = connection error: desc = \"transport: Error while dialing: {dialing}\""
        )
    );
}

#[tokio::test]
async fn a_response_that_is_too_large_is_an_error() {
    let running = serve(FakeDriver::default());
    assert!(client(&running.socket, CsiClient::default()).node_info().await.is_err());
}

#[tokio::test]
async fn capabilities_and_stats_are_read() {
    let running = serve(FakeDriver::default());
    let client = client(&running.socket, CsiClient::default());
    let expected =
        NodeCapabilities { stage_unstage: true, single_node_multi_writer: true, ..NodeCapabilities::default() };
    assert_eq!(client.capabilities().await, Ok(expected));
    let stats = client.stats("vol-1", Path::new("/v"), None).await.unwrap();
    assert_eq!((stats.bytes, stats.inodes), (Some(VolumeUsage { available: 1, total: 3, used: 2 }), None));
    let error = client.stats("empty", Path::new("/v"), None).await.unwrap_err();
    assert_eq!(error.to_string(), "failed to get usage from response. usage is nil");
}

#[tokio::test]
async fn a_plugin_is_told_the_outcome() {
    let driver = FakeDriver::default();
    let running = serve(driver.clone());
    let client = CsiClient::default();
    assert_eq!(client.plugin_info(&running.socket).await.unwrap().name, "hostpath.csi.k8s.io");
    client.notify_registration(&running.socket, Err("no".to_owned())).await.unwrap();
    client.notify_registration(&running.socket, Ok(())).await.unwrap();
    let notified = driver.notified.lock().unwrap().clone();
    let expected = [(false, "no"), (true, "")];
    let expected =
        expected.map(|(plugin_registered, error)| RegistrationStatus { plugin_registered, error: error.into() });
    assert_eq!(notified, expected);
}

#[test]
fn debug_output_holds_no_secret() {
    for shown in [format!("{:?}", publication()), format!("{:?}", staging())] {
        assert!(shown.contains("vol-1") && !shown.contains("hidden"), "{shown}");
    }
    let messages = [format!("{:?}", publication().into_message()), format!("{:?}", staging().into_message())];
    for shown in messages {
        assert!(shown.contains("vol-1") && !shown.contains("hidden"), "{shown}");
    }
}

#[test]
fn drivers_come_and_go() {
    let drivers = Drivers::default();
    let error = drivers.client("d").unwrap_err();
    assert_eq!(error.to_string(), "driver name d not found in the list of registered CSI drivers");
    assert!(!error.is_uncertain());
    for socket in ["/s", "/other"] {
        drivers.register("d", socket.into());
        let client = format!("{:?}", drivers.client("d").unwrap());
        assert!(client.contains(&format!("{socket:?}")), "{client}");
    }
    drivers.unregister("d");
    assert!(drivers.client("d").is_err());
}
