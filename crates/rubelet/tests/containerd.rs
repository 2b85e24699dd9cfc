//! The CRI client, the effects and the looks, against a real containerd with its network and the testbed's busybox image.
//!
//! `cargo xtask e2e --filter effects` runs them on containerds of its own. At a containerd that is there already:
//! `RUBELET_TEST_CONTAINERD=/path/to/containerd.sock cargo test -p rubelet --test containerd -- --ignored`

#![expect(
    clippy::unwrap_used,
    reason = "a test fails by panicking; clippy knows helpers of tests only inside of a test module"
)]

use std::{collections::BTreeMap, path::Path, sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::Pod;
use rubelet::{
    effects::{Recalled, container, image, sandbox},
    observe,
    world::{Clock, World},
};
use rubelet_core::{
    container::hash,
    effect::{EffectError, ErrorKind, Facts, ImageFacts, Reason},
    event::{Event, EventStream},
    id::{ContainerId, PodRef, SandboxId},
    observation::{ContainerState, Exit, ListedState, PodFacts, SandboxState},
    op::{RunSandbox, StartContainer},
    settings::Settings,
};
use rubelet_cri::client::CriClient;
use rubelet_host::linux::LinuxHost;
use tokio::sync::mpsc;

const BUSYBOX: &str = "docker.io/library/busybox:1.35";

/// A pod of one test with everything it creates, removed on drop.
struct Bed {
    world: World,
    pod: Arc<Pod>,
    at: PodRef,
    /// Last, so that it is dropped after everything in it.
    dir: tempfile::TempDir,
}

impl Bed {
    fn new(name: &str, spec: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut settings = Settings::for_node("node-1");
        settings.root_dir = dir.path().join("root");
        settings.pod_logs_dir = dir.path().join("logs");
        settings.node.memory_capacity_bytes = 1 << 30;
        let host = Arc::new(LinuxHost::default());
        let mut world = World::new(Arc::new(client()), host, Clock::system(), settings);
        world.paths.container_links_dir = dir.path().join("links");
        // The process id keeps two runs at one containerd apart.
        let uid = format!("{name}-{}", std::process::id());
        let json = format!(r#"{{"metadata":{{"name":"{name}","namespace":"test","uid":"{uid}"}},"spec":{spec}}}"#);
        let pod = Arc::new(serde_json::from_str(&json).unwrap());
        std::fs::create_dir_all(world.paths.pod_dir(&uid.as_str().into())).unwrap();
        let at = PodRef { uid: uid.as_str().into(), namespace: "test".into(), name: name.into() };
        Bed { world, pod, at, dir }
    }

    async fn run_sandbox(&self) -> SandboxId {
        let order = RunSandbox {
            uid: self.at.uid.clone(),
            pod: self.pod.clone(),
            attempt: 0,
            cgroup_parent: String::new(),
            volume_groups: Vec::new(),
        };
        match sandbox::run_sandbox(&self.world, &order, &Recalled::new()).await {
            Ok(Facts::Sandbox { id }) => id,
            other => panic!("no sandbox: {other:?}"),
        }
    }

    async fn start(&self, sandbox: &SandboxId, attempt: u32) -> Result<ContainerId, EffectError> {
        let facts = self.inspect().await;
        let order = StartContainer {
            uid: self.at.uid.clone(),
            pod: self.pod.clone(),
            container: "main".to_owned(),
            attempt,
            sandbox: sandbox.clone(),
            sandbox_attempt: 0,
            cgroup_parent: String::new(),
            pod_ips: facts.newest_sandbox().expect("it was just run").ips.clone(),
            host_ips: Vec::new(),
            target: None,
            recursive_read_only_mounts: false,
            claimed: BTreeMap::new(),
            image_volumes: BTreeMap::new(),
            image: self.busybox().await,
        };
        match container::start_container(&self.world, &order, &Recalled::new()).await? {
            Facts::Container { id } => Ok(id),
            other => panic!("no container: {other:?}"),
        }
    }

    async fn busybox(&self) -> ImageFacts {
        match image::inspect_image(&self.world, BUSYBOX).await {
            Ok(Facts::Image(Some(facts))) => facts,
            other => panic!("{BUSYBOX} was not imported: {other:?}"),
        }
    }

    async fn inspect(&self) -> PodFacts {
        match observe::inspect(&self.world, &self.at).await {
            Ok(Facts::Pod(facts)) => facts,
            other => panic!("no look at the pod: {other:?}"),
        }
    }

    async fn exit(&self) -> Exit {
        for _ in 0..100 {
            if let Some(exit) = self.inspect().await.newest_container("main").and_then(|container| container.exit()) {
                return exit.clone();
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("the container did not end within 10 s");
    }

    /// Removes whatever the runtime still has of the pod; twice, because everything may be repeated.
    async fn clean_up(self) {
        for _ in 0..2 {
            remove_all(&self.world, &self.at).await.unwrap();
        }
        let facts = self.inspect().await;
        assert!(facts.containers.is_empty() && facts.sandboxes.is_empty(), "{facts:?}");
    }
}

/// A test that panics does not reach its `clean_up`.
impl Drop for Bed {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        let (world, at) = (self.world.clone(), self.at.clone());
        let removing = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                // The panic stopped the runtime of the test's own connection.
                let world = World { runtime: Arc::new(client()), ..world };
                tokio::time::timeout(Duration::from_secs(30), remove_all(&world, &at)).await
            })
        });
        match removing.join() {
            Ok(Ok(Ok(()))) => {}
            failed => eprintln!("the failed test leaves its pod behind: {failed:?}"),
        }
    }
}

async fn remove_all(world: &World, at: &PodRef) -> Result<(), EffectError> {
    let Facts::Pod(facts) = observe::inspect(world, at).await? else { panic!("a look at a pod shows a pod") };
    for found in &facts.containers {
        container::stop_container(world, &found.id, 0).await?;
        container::remove_container(world, &found.id).await?;
    }
    for found in &facts.sandboxes {
        sandbox::stop_sandbox(world, &found.id).await?;
        sandbox::remove_sandbox(world, &found.id).await?;
    }
    Ok(())
}

fn client() -> CriClient {
    CriClient::new(&socket(), "", Duration::from_secs(30)).unwrap()
}

fn socket() -> String {
    std::env::var("RUBELET_TEST_CONTAINERD").expect(
        "RUBELET_TEST_CONTAINERD names the socket of a containerd; `cargo xtask e2e --filter effects` brings its own",
    )
}

fn entries(dir: &Path) -> Vec<String> {
    let read = std::fs::read_dir(dir).into_iter().flatten();
    read.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[tokio::test]
#[ignore = "needs a containerd: run `cargo xtask e2e --filter effects`"]
async fn a_pod_is_run_found_and_taken_away() {
    let bed = Bed::new(
        "life",
        r#"{"dnsPolicy":"Default","terminationGracePeriodSeconds":7,"hostname":"h","subdomain":"s",
            "volumes":[{"name":"tmp","emptyDir":{}}],
            "containers":[{"name":"main","image":"docker.io/library/busybox:1.35","workingDir":"/tmp",
                "command":["sh","-c","trap 'exit 3' TERM; echo $(WHO) $HOSTNAME; cat /etc/hosts; touch /vol/here; while :; do sleep 0.1; done"],
                "env":[{"name":"WHO","value":"me"}],
                "terminationMessagePath":"/dev/termination-log","terminationMessagePolicy":"File",
                "volumeMounts":[{"name":"tmp","mountPath":"/vol"}],
                "resources":{"limits":{"cpu":"500m","memory":"64Mi"}}}]}"#,
    );
    let volume = bed.world.paths.volumes_dir(&bed.at.uid).join("kubernetes.io~empty-dir/tmp");
    std::fs::create_dir_all(&volume).unwrap();
    let sandbox_id = bed.run_sandbox().await;
    let id = bed.start(&sandbox_id, 0).await.unwrap();

    let facts = bed.inspect().await;
    let (sandbox, main) = (facts.newest_sandbox().unwrap(), facts.newest_container("main").unwrap());
    assert_eq!((sandbox.state, sandbox.attempt, sandbox.host_network), (SandboxState::Ready, 0, false));
    assert!(sandbox.ips[0].starts_with("10."), "{sandbox:?}");
    assert_eq!((&main.id, &main.sandbox, main.attempt), (&id, &sandbox_id, 0));
    assert_eq!(main.hash, Some(hash(&bed.pod.spec.as_ref().unwrap().containers[0])));
    assert!(matches!(main.state, ContainerState::Running { .. }), "{main:?}");

    let Ok(Facts::Listing(listing)) = observe::relist(&bed.world).await else { panic!("no relist") };
    let listed = &listing.pods[&bed.at.uid];
    assert!(listed.agrees_with(&facts), "{listed:?} {facts:?}");
    assert_eq!(listed.containers[&id], ListedState::Running);

    let link = bed.world.paths.container_links_dir.join(format!("life_test_main-{id}.log"));
    let log = std::fs::read_link(&link).unwrap();
    let log_dir = format!("logs/test_life_{}/main", bed.at.uid);
    assert_eq!(log, bed.dir.path().join(&log_dir).join("0.log"));
    // The program writes after it has started, so the log comes a little later.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let text = std::fs::read_to_string(&log).unwrap();
    assert!(text.contains("stdout F me h\n"), "{text}");
    assert!(text.contains("# Kubernetes-managed hosts file."), "{text}");
    assert!(text.contains(&format!("{}\th.s.test.svc.\th", sandbox.ips[0])), "{text}");
    assert!(volume.join("here").exists());

    // A second start of the same attempt fails instead of starting twice.
    let doubled = bed.start(&sandbox_id, 0).await.unwrap_err();
    assert_eq!(doubled.kind, ErrorKind::Reject(Reason::CreateContainerError), "{doubled}");
    assert_eq!(bed.inspect().await.containers.len(), 1);

    container::stop_container(&bed.world, &id, 5).await.unwrap();
    let exit = bed.exit().await;
    assert_eq!((exit.code, exit.reason.as_str()), (3, "Error"));
    assert!(exit.started_at.unwrap() <= exit.finished_at);
    container::remove_container(&bed.world, &id).await.unwrap();
    assert_eq!(entries(&bed.dir.path().join(&log_dir)), Vec::<String>::new());
    assert_eq!(entries(&bed.world.paths.container_links_dir), Vec::<String>::new());
    sandbox::stop_sandbox(&bed.world, &sandbox_id).await.unwrap();
    assert_eq!(bed.inspect().await.newest_sandbox().unwrap().state, SandboxState::NotReady);
    bed.clean_up().await;
}

#[tokio::test]
#[ignore = "needs a containerd: run `cargo xtask e2e --filter effects`"]
async fn last_words_come_from_the_file_or_from_the_log() {
    for (policy, command, message) in [
        ("File", "echo to the log; echo -n why > /dev/termination-log; exit 1", "why"),
        ("File", "echo to the log; exit 1", ""),
        ("FallbackToLogsOnError", "echo to the log; exit 1", "to the log\n"),
        ("FallbackToLogsOnError", "echo to the log; exit 0", ""),
    ] {
        let bed = Bed::new(
            "words",
            &format!(
                r#"{{"dnsPolicy":"Default","containers":[{{"name":"main","image":"{BUSYBOX}","command":["sh","-c","{command}"],
                    "terminationMessagePath":"/dev/termination-log","terminationMessagePolicy":"{policy}"}}]}}"#
            ),
        );
        let sandbox = bed.run_sandbox().await;
        bed.start(&sandbox, 4).await.unwrap();
        assert_eq!(bed.exit().await.message, message, "{policy} {command}");
        let attempt = bed.inspect().await.newest_container("main").unwrap().attempt;
        assert_eq!(attempt, 4);
        bed.clean_up().await;
    }
}

#[tokio::test]
#[ignore = "needs a containerd: run `cargo xtask e2e --filter effects`"]
async fn failures_carry_upstreams_reasons() {
    let bed = Bed::new(
        "fail",
        r#"{"hostNetwork":true,"dnsPolicy":"Default","containers":[{"name":"main","image":"docker.io/library/busybox:1.35","command":["/no/such/program"]}]}"#,
    );
    let sandbox = bed.run_sandbox().await;
    assert!(bed.inspect().await.newest_sandbox().unwrap().host_network);
    let failed = bed.start(&sandbox, 0).await.unwrap_err();
    assert_eq!(failed.kind, ErrorKind::Reject(Reason::RunContainerError), "{failed}");
    assert!(failed.message.contains("/no/such/program"), "{failed}");
    let exit = bed.exit().await;
    assert_eq!((exit.code, exit.reason.as_str()), (128, "StartError"));

    let failed = image::pull_image(&bed.world, &bed.at, "localhost:1/none:1", &[]).await.unwrap_err();
    assert_eq!(failed.kind, ErrorKind::Reject(Reason::ErrImagePull), "{failed}");
    let failed = image::inspect_image(&bed.world, "Not A Name").await.unwrap_err();
    assert_eq!(failed.kind, ErrorKind::Reject(Reason::InvalidImageName), "{failed}");
    assert_eq!(image::inspect_image(&bed.world, "localhost:1/none").await, Ok(Facts::Image(None)));
    bed.clean_up().await;
}

#[tokio::test]
#[ignore = "needs a containerd: run `cargo xtask e2e --filter effects`"]
async fn a_container_that_was_only_created_is_started_by_resuming() {
    let bed = Bed::new(
        "resume",
        r#"{"dnsPolicy":"Default","containers":[{"name":"main","image":"docker.io/library/busybox:1.35","command":["sleep","60"]}]}"#,
    );
    let sandbox = bed.run_sandbox().await;
    let order = StartContainer {
        uid: bed.at.uid.clone(),
        pod: bed.pod.clone(),
        container: "main".to_owned(),
        attempt: 0,
        sandbox: sandbox.clone(),
        sandbox_attempt: 0,
        cgroup_parent: String::new(),
        pod_ips: Vec::new(),
        host_ips: Vec::new(),
        target: None,
        recursive_read_only_mounts: false,
        claimed: BTreeMap::new(),
        image_volumes: BTreeMap::new(),
        image: bed.busybox().await,
    };
    // The state after an agent was killed in the middle.
    let settings = &bed.world.settings;
    let identity =
        rubelet_core::container::Identity { uid: &bed.at.uid, attempt: 0, cgroup_parent: "", volume_groups: &[] };
    let sandbox_config =
        rubelet_core::container::sandbox_config(&bed.pod, identity, settings, "nameserver 1.1.1.1").unwrap();
    let config = rubelet_core::container::container_config(
        &order,
        &rubelet_core::container::environment::Sources::default(),
        settings,
    )
    .unwrap();
    std::fs::create_dir_all(Path::new(&sandbox_config.log_directory).join("main")).unwrap();
    let id = bed.world.runtime.create_container(sandbox.as_str(), &config, &sandbox_config).await.unwrap();
    assert_eq!(bed.inspect().await.newest_container("main").unwrap().state, ContainerState::Created);
    for _ in 0..2 {
        container::resume_container(&bed.world, &ContainerId::new(&id), &Recalled::new()).await.unwrap();
        assert!(bed.inspect().await.newest_container("main").unwrap().is_running());
    }
    assert_eq!(entries(&bed.world.paths.container_links_dir).len(), 1);
    bed.clean_up().await;
}

#[tokio::test]
#[ignore = "needs a containerd: run `cargo xtask e2e --filter effects`"]
async fn runtime_reports_version_and_events_become_hints() {
    let bed = Bed::new(
        "events",
        r#"{"dnsPolicy":"Default","containers":[{"name":"main","image":"docker.io/library/busybox:1.35","command":["true"]}]}"#,
    );
    let (sender, mut hints) = mpsc::channel(16);
    let world = bed.world.clone();
    let following = tokio::spawn(async move { observe::events::follow(&world, &sender).await });
    tokio::time::sleep(Duration::from_secs(2)).await;
    let Ok(Facts::Runtime(status)) = observe::check_runtime(&bed.world).await else { panic!("no answer") };
    assert_eq!((status.name.as_str(), &status.runtime_problem, &status.network_problem), ("containerd", &None, &None));
    let is_old = status.version.trim_start_matches('v').starts_with("1.");
    let is_up = hints.try_recv() == Ok(Event::RuntimeEvents(EventStream::Up));
    assert_eq!(is_up, !is_old, "{status:?}");
    if is_old {
        assert_eq!(following.await.unwrap(), observe::events::Ended::Unsupported);
    } else {
        let sandbox = bed.run_sandbox().await;
        bed.start(&sandbox, 0).await.unwrap();
        let ours = Some(Event::Hint { pod: bed.at.uid.clone() });
        // There are hints about other tests' pods, too.
        let hinted = async { while hints.recv().await != ours {} };
        tokio::time::timeout(Duration::from_secs(5), hinted).await.unwrap();
        drop(hints);
        assert_eq!(following.await.unwrap(), observe::events::Ended::Unwanted);
    }
    bed.clean_up().await;
}

/// A proxy socket of the runtime that can be removed or made silent.
struct Door {
    at: std::path::PathBuf,
    task: tokio::task::JoinHandle<()>,
}

impl Door {
    fn open(at: &Path, to: &str) -> Self {
        let listener = tokio::net::UnixListener::bind(at).unwrap();
        let to = to.to_owned();
        let task = tokio::spawn(async move {
            // Connections end with this task, as they do with a runtime.
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((mut inner, _)) = listener.accept().await {
                let to = to.clone();
                connections.spawn(async move {
                    let mut outer = tokio::net::UnixStream::connect(&to).await.unwrap();
                    let _ = tokio::io::copy_bidirectional(&mut inner, &mut outer).await;
                });
            }
        });
        Door { at: at.to_owned(), task }
    }

    async fn close(self) {
        self.task.abort();
        let _ = self.task.await;
        std::fs::remove_file(&self.at).unwrap();
    }
}

#[tokio::test]
#[ignore = "needs a containerd: run `cargo xtask e2e --filter effects`"]
async fn a_runtime_that_went_away_is_found_again_when_it_returns() {
    let mut bed = Bed::new("door", r#"{"containers":[]}"#);
    let at = bed.dir.path().join("door.sock");
    let client = CriClient::new(&format!("unix://{}", at.display()), "", Duration::from_secs(1)).unwrap();
    bed.world.runtime = Arc::new(client);
    let unavailable = |result: Result<Facts, EffectError>| result.unwrap_err().kind == ErrorKind::Unavailable;

    assert!(unavailable(observe::check_runtime(&bed.world).await), "nothing is there yet");
    let door = Door::open(&at, &socket());
    assert!(observe::check_runtime(&bed.world).await.is_ok());
    door.close().await;
    // The client reconnects until its deadline.
    let away = observe::relist(&bed.world).await.unwrap_err().kind;
    assert!(matches!(away, ErrorKind::Unavailable | ErrorKind::TimedOut), "it went away: {away:?}");
    // Listens, but never responds.
    let silent = tokio::net::UnixListener::bind(&at).unwrap();
    let asked = tokio::time::Instant::now();
    let late = observe::inspect(&bed.world, &bed.at).await.unwrap_err();
    assert_eq!(late.kind, ErrorKind::TimedOut, "it says nothing");
    assert!(asked.elapsed() < Duration::from_secs(3), "the deadline holds: {:?}", asked.elapsed());
    drop(silent);
    std::fs::remove_file(&at).unwrap();
    let door = Door::open(&at, &socket());
    let mut answered = false;
    for _ in 0..20 {
        answered = observe::check_runtime(&bed.world).await.is_ok();
        if answered {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(answered, "it is back");
    door.close().await;
}
