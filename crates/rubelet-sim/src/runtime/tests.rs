//! Tests that the fake behaves like containerd: names collide, stops take time, a disconnected client leaves half a stop behind.

use std::{collections::BTreeMap, future::Future, sync::Arc, time::Duration};

use rubelet_cri::{
    port::{ContainerRuntime, RpcErrorKind},
    v1,
};
use tokio::time::{Instant, timeout};

use super::FakeRuntime;
use crate::{
    faults::FaultRates,
    script::IMAGE,
    simulation::{AgentState, Incarnation, Simulation},
};

struct Fixture {
    simulation: Arc<Simulation>,
    runtime: FakeRuntime,
}

/// Runs a test on a paused clock.
fn play<F: Future<Output = ()>>(steps: impl FnOnce(Fixture) -> F) {
    let tokio = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    tokio.block_on(async {
        let simulation = Simulation::new(1);
        let scheduled = tokio::spawn(simulation.clone().run_scheduled_events());
        simulation.with(|sim| sim.agent = AgentState::Alive(Incarnation(1)));
        steps(Fixture { runtime: FakeRuntime::new(simulation.clone(), Incarnation(1)), simulation }).await;
        scheduled.abort();
    });
}

impl Fixture {
    async fn sandbox(&self, attempt: u32) -> Result<String, RpcErrorKind> {
        self.runtime.run_pod_sandbox(&sandbox_config(attempt), "").await.map_err(|error| error.kind)
    }

    async fn container(&self, sandbox: &str, attempt: u32, program: &str) -> Result<String, RpcErrorKind> {
        let config = v1::ContainerConfig {
            metadata: Some(v1::ContainerMetadata { name: "app".into(), attempt }),
            image: Some(v1::ImageSpec { image: IMAGE.into(), ..Default::default() }),
            command: vec!["sim".into(), program.into()],
            labels: BTreeMap::from([("a".into(), "b".into())]),
            ..Default::default()
        };
        let created = self.runtime.create_container(sandbox, &config, &sandbox_config(0)).await;
        created.map_err(|error| error.kind)
    }

    async fn running(&self, program: &str) -> String {
        let sandbox = self.sandbox(0).await.unwrap();
        let container = self.container(&sandbox, 0, program).await.unwrap();
        self.runtime.start_container(&container).await.unwrap();
        container
    }

    async fn state(&self, id: &str) -> (i32, i32, String) {
        let status = self.runtime.container_status(id).await.unwrap();
        (status.state, status.exit_code, status.reason)
    }
}

fn sandbox_config(attempt: u32) -> v1::PodSandboxConfig {
    let metadata =
        v1::PodSandboxMetadata { name: "web".into(), uid: "u1".into(), namespace: "default".into(), attempt };
    v1::PodSandboxConfig { metadata: Some(metadata), ..Default::default() }
}

const RUNNING: i32 = v1::ContainerState::ContainerRunning as i32;
const EXITED: i32 = v1::ContainerState::ContainerExited as i32;

#[test]
fn second_sandbox_or_container_of_same_attempt_is_rejected() {
    play(|on| async move {
        let sandbox = on.sandbox(0).await.unwrap();
        assert_eq!(on.sandbox(0).await, Err(RpcErrorKind::Other));
        on.container(&sandbox, 0, "run").await.unwrap();
        assert_eq!(on.container(&sandbox, 0, "run").await, Err(RpcErrorKind::Other));
        on.container(&sandbox, 1, "run").await.unwrap();
    });
}

#[test]
fn a_name_is_free_again_after_its_removal() {
    play(|on| async move {
        let sandbox = on.sandbox(0).await.unwrap();
        on.runtime.remove_pod_sandbox(&sandbox).await.unwrap();
        on.sandbox(0).await.unwrap();
    });
}

#[test]
fn container_ignoring_sigterm_is_killed_after_stop_timeout() {
    play(|on| async move {
        let container = on.running("stubborn").await;
        let began = Instant::now();
        on.runtime.stop_container(&container, 10).await.unwrap();
        assert_eq!(began.elapsed().as_secs(), 10);
        assert_eq!(on.state(&container).await, (EXITED, 137, "Error".into()));
    });
}

#[test]
fn abandoned_stop_has_sent_only_sigterm() {
    play(|on| async move {
        let container = on.running("stubborn").await;
        let stopped = timeout(Duration::from_secs(1), on.runtime.stop_container(&container, 10)).await;
        assert!(stopped.is_err());
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(on.state(&container).await.0, RUNNING);
    });
}

#[test]
fn stopping_a_sandbox_kills_its_containers() {
    play(|on| async move {
        let container = on.running("run").await;
        let sandbox = on.simulation.look(|sim| sim.runtime.picture.containers[&container].sandbox.clone());
        on.runtime.stop_pod_sandbox(&sandbox).await.unwrap();
        assert_eq!(on.state(&container).await, (EXITED, 137, "Error".into()));
        on.runtime.remove_pod_sandbox(&sandbox).await.unwrap();
        assert!(on.runtime.container_status(&container).await.is_err());
        on.runtime.stop_pod_sandbox(&sandbox).await.unwrap();
        on.runtime.remove_container(&container).await.unwrap();
    });
}

#[test]
fn fake_programs_exit_as_scripted() {
    for (program, expected) in
        [("exit 3 after 2s", (3, "Error")), ("exit 0 after 1s", (0, "Completed")), ("oom after 1s", (137, "OOMKilled"))]
    {
        play(|on| async move {
            let container = on.running(program).await;
            tokio::time::sleep(Duration::from_millis(500)).await;
            assert_eq!(on.state(&container).await.0, RUNNING);
            tokio::time::sleep(Duration::from_secs(3)).await;
            assert_eq!(on.state(&container).await, (EXITED, expected.0, expected.1.into()));
        });
    }
}

#[test]
fn a_container_starts_once_and_only_in_a_living_sandbox() {
    play(|on| async move {
        let container = on.running("run").await;
        assert!(on.runtime.start_container(&container).await.is_err());
        let (sandbox, next) = {
            let sandbox = on.simulation.look(|sim| sim.runtime.picture.containers[&container].sandbox.clone());
            (sandbox.clone(), on.container(&sandbox, 1, "run").await.unwrap())
        };
        on.runtime.stop_pod_sandbox(&sandbox).await.unwrap();
        assert!(on.runtime.start_container(&next).await.is_err());
    });
}

#[test]
fn stopped_runtime_refuses_calls_and_containers_keep_running() {
    play(|on| async move {
        let container = on.running("run").await;
        on.simulation.with(super::SimState::take_runtime_down);
        let answer = on.runtime.container_status(&container).await;
        assert_eq!(answer.unwrap_err().kind, RpcErrorKind::Unavailable);
        on.simulation.with(super::SimState::bring_runtime_up);
        assert_eq!(on.state(&container).await.0, RUNNING);
    });
}

#[test]
fn a_call_done_but_answered_with_an_error_was_done() {
    play(|on| async move {
        on.simulation.with(|sim| sim.faults.storm = Some(FaultRates { done_but_error: 1.0, ..FaultRates::default() }));
        assert!(on.sandbox(0).await.is_err());
        on.simulation.with(|sim| sim.faults.storm = None);
        assert_eq!(on.runtime.list_pod_sandbox(None).await.unwrap().len(), 1);
    });
}

#[test]
fn stale_list_shows_past_state() {
    play(|on| async move {
        on.running("run").await;
        let then = on.simulation.look(|sim| sim.now);
        tokio::time::sleep(Duration::from_secs(2)).await;
        on.simulation.with(|sim| sim.exit_container("c00002", 1, "Error"));
        let (old, new) = on.simulation.look(|sim| {
            let states = |picture: &super::store::Picture| picture.list_containers(None)[0].state;
            (states(sim.runtime.picture_at(then)), states(sim.runtime.picture_at(sim.now)))
        });
        assert_eq!((old, new), (RUNNING, EXITED));
    });
}

#[test]
fn runtime_events_name_the_pod_and_can_be_lost() {
    play(|on| async move {
        let mut events = on.runtime.container_events().await.unwrap();
        let container = on.running("run").await;
        let event = events.recv().await.unwrap();
        let uid = event.pod_sandbox_status.and_then(|status| status.metadata).map(|metadata| metadata.uid);
        assert_eq!((event.container_id, uid), (container, Some("u1".into())));
        assert!(events.try_recv().is_ok());
        on.simulation.with(|sim| {
            sim.faults.storm = Some(FaultRates { event_lost: 1.0, ..FaultRates::default() });
            sim.exit_container("c00002", 1, "Error");
        });
        assert!(events.try_recv().is_err());
    });
}

#[test]
fn calls_of_a_dead_agent_have_no_effect() {
    play(|on| async move {
        on.simulation.with(|sim| sim.agent = AgentState::Dead(Incarnation(1)));
        assert!(timeout(Duration::from_secs(3600), on.sandbox(0)).await.is_err());
        assert!(on.simulation.look(|sim| sim.runtime.picture.sandboxes.is_empty()));
    });
}
