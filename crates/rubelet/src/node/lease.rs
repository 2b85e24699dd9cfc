//! The node's lease, renewed at a quarter of its duration.
//!
//! Owns: renewing, reading and creating the lease, and the retries. Never: waits for any other part of the agent.
//! Upstream: `component-helpers/apimachinery/lease`.

use std::{sync::Arc, time::Duration};

use k8s_openapi::api::coordination::v1::Lease;
use rubelet_core::{
    node_status::lease::{NAMESPACE, renewed},
    time::scaled,
};
use rubelet_kube::{
    calls, error_chain,
    port::{ApiError, ApiErrorKind, ApiServer, Lane, ObjectPath},
};
use tokio::{sync::watch, time::sleep};

use super::NodeReporting;
use crate::{server::health::LoopHealth, world::Clock};

/// Quick retries of one renewal before the lease is read again.
const TRIES: u32 = 5;
const BACK_OFF_FIRST: Duration = Duration::from_millis(200);
const BACK_OFF_MAX: Duration = Duration::from_secs(7);

/// Renews until it is dropped, while the loop turns. `node_uid` is known once the node is registered.
pub async fn run(
    api: Arc<dyn ApiServer>,
    clock: Clock,
    reporting: Arc<NodeReporting>,
    (node_uid, health): (watch::Receiver<Option<String>>, Arc<LoopHealth>),
) {
    // Up to 4 % longer, so that the nodes of a cluster do not renew in step.
    let stretch = fastrand::Rng::with_seed(reporting.seed()).f64() * 0.04;
    let every = scaled(reporting.lease_duration(), (1.0 + stretch) / 4.0);
    let mut controller = LeaseController { api, clock, reporting, node_uid, lease: None };
    loop {
        // A node whose loop stands still must not look alive because this thread runs on.
        match health.check(controller.clock.now().uptime) {
            Ok(()) => controller.sync().await,
            Err(reason) => tracing::error!("the lease is not renewed: {reason}"),
        }
        sleep(every).await;
    }
}

struct LeaseController {
    api: Arc<dyn ApiServer>,
    clock: Clock,
    reporting: Arc<NodeReporting>,
    node_uid: watch::Receiver<Option<String>>,
    /// As of the last renewal: unless another client writes it, it need not be read.
    lease: Option<Lease>,
}

impl LeaseController {
    async fn sync(&mut self) {
        if let Some(lease) = self.lease.take() {
            match self.retry_update_lease(lease).await {
                Ok(lease) => {
                    self.lease = Some(lease);
                    return;
                }
                Err(error) => tracing::warn!("failed to update lease, reading it again: {}", error_chain(&error)),
            }
        }
        self.lease = match self.backoff_ensure_lease().await {
            Found::Created(lease) => Some(lease),
            Found::Existing(lease) => match self.retry_update_lease(lease).await {
                Ok(lease) => Some(lease),
                Err(error) => {
                    tracing::warn!("failed to update lease: {}", error_chain(&error));
                    None
                }
            },
        };
    }

    async fn retry_update_lease(&self, mut lease: Lease) -> Result<Lease, ApiError> {
        let path = leases().named(self.reporting.setup.name.clone());
        let mut tries = 0;
        loop {
            let next = self.next(Some(&lease));
            let renewed = calls::update(&*self.api, Lane::Lease, path.clone(), &next, self.reporting.timeout()).await;
            let Err(error) = renewed else { return renewed };
            tries += 1;
            if tries == TRIES || error.kind == ApiErrorKind::NotFound {
                return Err(error);
            }
            if error.kind == ApiErrorKind::Conflict {
                match self.backoff_ensure_lease().await {
                    Found::Created(lease) => return Ok(lease),
                    Found::Existing(newer) => lease = newer,
                }
            }
        }
    }

    /// Retries without end; a node without a lease is considered dead.
    async fn backoff_ensure_lease(&self) -> Found {
        let mut wait = BACK_OFF_FIRST;
        loop {
            match self.ensure_lease().await {
                Ok(found) => return found,
                Err(error) => tracing::warn!("failed to ensure lease, will retry in {wait:?}: {}", error_chain(&error)),
            }
            sleep(wait).await;
            wait = wait.saturating_mul(2).min(BACK_OFF_MAX);
        }
    }

    async fn ensure_lease(&self) -> Result<Found, ApiError> {
        let timeout = self.reporting.timeout();
        let path = leases().named(self.reporting.setup.name.clone());
        match calls::get(&*self.api, Lane::Lease, path, timeout).await {
            Ok(lease) => return Ok(Found::Existing(lease)),
            Err(error) if error.kind == ApiErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        // Without its owner the lease would outlive the node.
        let is_registered = self.node_uid.clone().wait_for(Option::is_some).await.is_ok();
        if !is_registered {
            std::future::pending::<()>().await;
        }
        calls::create(&*self.api, Lane::Lease, leases(), &self.next(None), timeout).await.map(Found::Created)
    }

    fn next(&self, known: Option<&Lease>) -> Lease {
        let node_uid = self.node_uid.borrow().clone();
        let NodeReporting { setup, lease_secs, .. } = &*self.reporting;
        renewed(known, &setup.name, node_uid.as_deref(), *lease_secs, self.clock.now().wall)
    }
}

enum Found {
    Existing(Lease),
    Created(Lease),
}

fn leases() -> ObjectPath {
    ObjectPath::all("coordination.k8s.io/v1", "leases").within(NAMESPACE)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tokio::{task::JoinSet, time::advance};

    use super::*;
    use crate::node::testing::{Answer, CONFLICT, NOT_FOUND, Scripted, UNREACHABLE, reporting};

    fn lease(version: &str) -> Answer {
        Ok(json!({"metadata": {"name": "n1", "resourceVersion": version}, "spec": {"holderIdentity": "n1"}}))
    }

    /// A lease controller with a scripted server. It stops when the test ends.
    struct LeaseFixture {
        api: Arc<Scripted>,
        node_uid: watch::Sender<Option<String>>,
        clock: Clock,
        health: Arc<LoopHealth>,
        _controller: JoinSet<()>,
    }

    impl LeaseFixture {
        fn new(answers: impl IntoIterator<Item = Answer>) -> LeaseFixture {
            let api = Scripted::new(answers);
            let (node_uid, known_uid) = watch::channel(None);
            let (clock, health) = (Clock::system(), Arc::new(LoopHealth::new(Duration::from_secs(60))));
            let mut controller = JoinSet::new();
            let inputs = (known_uid, health.clone());
            controller.spawn(run(api.clone(), clock.clone(), Arc::new(reporting()), inputs));
            LeaseFixture { api, node_uid, clock, health, _controller: controller }
        }

        async fn after(&self, secs: u64) -> Vec<String> {
            sleep(Duration::from_secs(secs)).await;
            self.api.heard()
        }

        fn last_body(&self) -> Value {
            self.api.bodies().pop().unwrap()
        }
    }

    const GET: &str = "Get leases/n1";
    const CREATE: &str = "Create leases";
    const UPDATE: &str = "Update leases/n1";

    #[tokio::test(start_paused = true)]
    async fn existing_lease_is_adopted_and_renewed_without_rereading() {
        let fixture = LeaseFixture::new([lease("1"), lease("2"), lease("3"), lease("4")]);
        assert_eq!(fixture.after(1).await, [GET, UPDATE]);
        assert_eq!(fixture.last_body()["metadata"]["resourceVersion"], "1");
        assert_eq!(fixture.after(9).await.len(), 2);
        assert_eq!(fixture.after(2).await, [GET, UPDATE, UPDATE]);
        assert_eq!(fixture.last_body()["metadata"]["resourceVersion"], "2");
        assert_eq!(fixture.last_body()["spec"]["leaseDurationSeconds"], 40);
    }

    #[tokio::test(start_paused = true)]
    async fn lease_is_not_renewed_while_the_loop_stands_still() {
        let fixture = LeaseFixture::new((0..40).map(|version| lease(&version.to_string())));
        fixture.health.turned(fixture.clock.now().uptime);
        let while_it_turned = fixture.after(300).await.len();
        assert!(while_it_turned > 25, "{while_it_turned}");
        assert!(fixture.after(600).await.len() <= while_it_turned + 1);
        fixture.health.turned(fixture.clock.now().uptime);
        assert!(fixture.after(20).await.len() > while_it_turned + 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_missing_lease_is_made_once_the_node_is_known() {
        let fixture = LeaseFixture::new([NOT_FOUND, lease("1")]);
        assert_eq!(fixture.after(30).await, [GET]);
        fixture.node_uid.send_replace(Some("u1".to_owned()));
        assert_eq!(fixture.after(1).await, [GET, CREATE]);
        assert_eq!(fixture.last_body()["metadata"]["ownerReferences"][0]["uid"], "u1");
    }

    #[tokio::test(start_paused = true)]
    async fn lease_written_by_another_client_is_reread() {
        let fixture = LeaseFixture::new([lease("1"), CONFLICT, lease("7"), lease("8")]);
        assert_eq!(fixture.after(1).await, [GET, UPDATE, GET, UPDATE]);
        assert_eq!(fixture.last_body()["metadata"]["resourceVersion"], "7");
    }

    #[tokio::test(start_paused = true)]
    async fn a_renewal_is_tried_five_times_and_then_looked_up() {
        let failures = std::iter::repeat_n(UNREACHABLE, 5);
        let fixture =
            LeaseFixture::new([lease("1"), lease("2")].into_iter().chain(failures).chain([lease("9"), lease("10")]));
        assert_eq!(fixture.after(1).await, [GET, UPDATE]);
        assert_eq!(fixture.after(11).await[2..], [UPDATE, UPDATE, UPDATE, UPDATE, UPDATE, GET, UPDATE]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_that_was_deleted_is_made_again() {
        let fixture = LeaseFixture::new([lease("1"), lease("2"), NOT_FOUND, NOT_FOUND, lease("3")]);
        fixture.node_uid.send_replace(Some("u1".to_owned()));
        assert_eq!(fixture.after(12).await, [GET, UPDATE, UPDATE, GET, CREATE]);
        advance(Duration::from_secs(1)).await;
    }
}
