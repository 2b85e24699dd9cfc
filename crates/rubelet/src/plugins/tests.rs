//! The watcher against plugins that the test plays on sockets of its own.

use std::{future::pending, sync::Arc};

use rubelet_csi::{
    pluginregistration::{
        InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
        registration_server::{Registration, RegistrationServer},
    },
    v1,
};
use tempfile::TempDir;
use tokio::{net::UnixListener, sync::mpsc, task::JoinSet};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status, transport::Server};

use super::*;
use crate::{fake_api::FakeApi, world::testing::world_in};

mod hostile;

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

const DRIVER: &str = "d.example.com";

/// A driver with its registrar, on one socket.
#[derive(Clone)]
struct FakePlugin {
    version: &'static str,
    told: mpsc::UnboundedSender<RegistrationStatus>,
}

#[tonic::async_trait]
impl Registration for FakePlugin {
    async fn get_info(&self, _request: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: "CSIPlugin".to_owned(),
            name: DRIVER.to_owned(),
            endpoint: String::new(),
            supported_versions: vec![self.version.to_owned()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        self.told.send(request.into_inner()).unwrap();
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

macro_rules! node_service {
    ($($call:ident($request:ident) -> $response:ident;)*) => {
        #[tonic::async_trait]
        impl v1::node_server::Node for FakePlugin {
            $(async fn $call(&self, _request: Request<v1::$request>) -> Result<Response<v1::$response>, Status> {
                Err(Status::unimplemented("nothing here calls it"))
            })*

            async fn node_get_info(
                &self,
                _request: Request<v1::NodeGetInfoRequest>,
            ) -> Result<Response<v1::NodeGetInfoResponse>, Status> {
                Ok(Response::new(v1::NodeGetInfoResponse { node_id: "n1-id".to_owned(), ..Default::default() }))
            }
        }
    };
}

node_service! {
    node_stage_volume(NodeStageVolumeRequest) -> NodeStageVolumeResponse;
    node_unstage_volume(NodeUnstageVolumeRequest) -> NodeUnstageVolumeResponse;
    node_publish_volume(NodePublishVolumeRequest) -> NodePublishVolumeResponse;
    node_unpublish_volume(NodeUnpublishVolumeRequest) -> NodeUnpublishVolumeResponse;
    node_get_volume_stats(NodeGetVolumeStatsRequest) -> NodeGetVolumeStatsResponse;
    node_expand_volume(NodeExpandVolumeRequest) -> NodeExpandVolumeResponse;
    node_get_capabilities(NodeGetCapabilitiesRequest) -> NodeGetCapabilitiesResponse;
}

/// An agent's watcher over a registry of its own.
struct Stage {
    _dir: TempDir,
    world: World,
    api: Arc<FakeApi>,
    events: mpsc::Receiver<Event>,
    told: mpsc::UnboundedReceiver<RegistrationStatus>,
    telling: mpsc::UnboundedSender<RegistrationStatus>,
    tasks: JoinSet<()>,
}

impl Stage {
    async fn set() -> Stage {
        let dir = TempDir::new().unwrap();
        let world = world_in(dir.path());
        let api = FakeApi::answering([]);
        let (inbox, events) = mpsc::channel(16);
        let (telling, told) = mpsc::unbounded_channel();
        let mut stage = Stage { _dir: dir, world, api, events, told, telling, tasks: JoinSet::new() };
        world_registry(&stage.world).await;
        let csi_node = CsiNodeWriter::new(stage.api.clone(), "n1".to_owned());
        let (states, seen) = watch::channel(NodeWatchState::Unseen);
        let watching = run(stage.world.clone(), csi_node, seen, inbox);
        stage.tasks.spawn(async move {
            watching.await;
            drop(states);
        });
        stage
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.world.paths.root_dir.join(REGISTRY).join(name)
    }

    /// The plugin serves until its handle is aborted.
    fn plug_in(&mut self, socket: &str, version: &'static str) -> tokio::task::AbortHandle {
        let plugin = FakePlugin { version, told: self.telling.clone() };
        let listener = UnixListener::bind(self.socket(socket)).unwrap();
        self.tasks.spawn(async move {
            let server = Server::builder()
                .add_service(RegistrationServer::new(plugin.clone()))
                .add_service(v1::node_server::NodeServer::new(plugin));
            server.serve_with_incoming(UnixListenerStream::new(listener)).await.unwrap();
        })
    }

    async fn until_driver_is(&self, is_registered: bool) {
        let waiting = async {
            while self.world.csi.client(DRIVER).is_ok() != is_registered {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(PATIENCE, waiting).await.expect("the driver becomes that");
    }

    /// What a plugin is told next.
    async fn told(&mut self) -> Result<(), String> {
        let status = timeout(PATIENCE, self.told.recv()).await.expect("a plugin is told").unwrap();
        if status.plugin_registered { Ok(()) } else { Err(status.error) }
    }
}

async fn world_registry(world: &World) {
    world.host.make_dir(&world.paths.root_dir.join(REGISTRY), REGISTRY_MODE).await.unwrap();
}

#[tokio::test]
async fn plugin_is_registered_as_long_as_its_socket_is_there() {
    let mut stage = Stage::set().await;
    let plugin = stage.plug_in("d-reg.sock", "1.0.0");
    assert_eq!(stage.told().await, Ok(()));
    stage.until_driver_is(true).await;
    let event = timeout(PATIENCE, stage.events.recv()).await.unwrap();
    assert_eq!(event, Some(Event::DriverRegistered { driver: DRIVER.to_owned() }));
    let calls = stage.api.calls();
    assert!(calls.iter().any(|call| call.body.as_ref().is_some_and(|body| body.windows(5).any(|it| it == b"n1-id"))));
    let written = calls.len();
    plugin.abort();
    std::fs::remove_file(stage.socket("d-reg.sock")).unwrap();
    stage.until_driver_is(false).await;
    timeout(PATIENCE, stage.api.until_called(written + 1)).await.expect("it is removed from the API too");
}

#[tokio::test]
async fn socket_made_anew_under_the_same_name_registers_again() {
    let mut stage = Stage::set().await;
    let old = stage.plug_in("d-reg.sock", "1.0.0");
    assert_eq!(stage.told().await, Ok(()));
    old.abort();
    // Under one look: there is a socket before and after.
    std::fs::remove_file(stage.socket("d-reg.sock")).unwrap();
    stage.plug_in("d-reg.sock", "1.0.0");
    assert_eq!(stage.told().await, Ok(()));
    stage.until_driver_is(true).await;
}

#[tokio::test]
async fn second_plugin_of_a_name_is_refused_and_its_end_changes_nothing() {
    let mut stage = Stage::set().await;
    stage.plug_in("a.sock", "1.1.0");
    assert_eq!(stage.told().await, Ok(()));
    let liar = stage.plug_in("b.sock", "1.1.0");
    let refused = stage.told().await.unwrap_err();
    assert!(refused.contains("Another driver with the same name is already registered"), "{refused}");
    liar.abort();
    std::fs::remove_file(stage.socket("b.sock")).unwrap();
    // The agent has seen the end of the one before it answers the next.
    stage.plug_in("b.sock", "1.1.0");
    let refused = stage.told().await.unwrap_err();
    assert!(refused.contains("Another driver with the same name is already registered"), "{refused}");
    let registered = format!("{:?}", stage.world.csi.client(DRIVER).unwrap());
    assert!(registered.contains("a.sock"), "{registered}");
}

#[tokio::test]
async fn socket_that_hangs_delays_no_other() {
    let mut stage = Stage::set().await;
    let hanging = UnixListener::bind(stage.socket("a-hangs.sock")).unwrap();
    stage.tasks.spawn(async move {
        let _held = hanging;
        pending().await
    });
    std::fs::write(stage.socket("no-socket"), "x").unwrap();
    std::fs::create_dir(stage.socket("dir")).unwrap();
    stage.plug_in("dir/d-reg.sock", "1.0.0");
    assert_eq!(stage.told().await, Ok(()));
}

#[tokio::test(start_paused = true)]
async fn node_is_not_ready_while_csi_node_cannot_be_made() {
    use rubelet_kube::port::ApiErrorKind;
    let api = FakeApi::answering(std::iter::repeat_n(Err(ApiErrorKind::Unreachable), 8));
    let (inbox, mut events) = mpsc::channel(4);
    make_csi_node(&CsiNodeWriter::new(api, "n1".to_owned()), &inbox).await;
    drop(inbox);
    let mut sent = Vec::new();
    while let Some(event) = events.recv().await {
        sent.push(event);
    }
    assert_eq!(sent, [Event::CsiNode { is_made: false }, Event::CsiNode { is_made: true }]);
}
