//! Every order of events in a pod's life: the agent over a small model of its node, explored exhaustively.
//!
//! The pod of an API server has a sidecar and two main containers. A state is the agent and the world around it; from each
//! state every transition is taken: a call takes place, its result arrives, a process exits, the pod is deleted, a timer
//! fires, a call fails, a result or a container event is lost, the agent dies and starts again with what the runtime and the
//! API server have, after each effect in flight has taken place or not. Budgets bound how often the last ones happen
//! (`world.rs`); within them the exploration is complete. In every state the rules hold (`rules.rs`), and without further
//! chances every path ends in a settled state: nothing is under way, and the node is as the pod asks for it.
//!
//! Time moves only when a timer fires, so the number of states is finite: see `digest.rs` for what makes two states one. Left
//! out, or simplified:
//! - The wall clock stands still. Waits that grow with the length of a run (a crash loop that expires) are not explored.
//! - The node's routines run when nothing else is left to do, or with another timer, not at every moment. The check of the
//!   runtime, the QoS cgroups and the scan of directories are answered at once; relists are not.
//! - Steps on the disk, images and requests to the API server take place with their result: nobody else sees them earlier.
//! - The watch shows a change at once. A status reaches the API server at once, unless a delay is spent on it.
//! - A container event comes at once or never; our own starts and stops cause none.
//! - No probes, hooks, pulls or volumes that change; the sandbox does not die by itself.

mod digest;
mod explore;
mod rules;
mod state;
mod world;

use explore::{Figures, Violation, explore};
use state::State;
use world::{Budget, Defect};

const UID: &str = "u1";
const GRACE_SECS: u32 = 30;
/// Longer than the interval of every routine of the node.
const ROUTINES_SECS: u64 = 300;

const NOTHING: Budget = Budget { exits: 0, faults: 0, delays: 0, deaths: 0, deletions: 0 };

/// Small enough to be explored with every `cargo test`.
const SMALL: &str = "sidecar s | main a";
const WHOLE: &str = "sidecar s | main a | main b";

/// Explores all lives of a pod with this restart policy and these containers, and prints how many states they have.
fn holds(policy: &str, containers: &str, budget: Budget) {
    let pod = format!("{policy} | {containers}");
    match explore(State::initial(&pod, budget, None)) {
        Ok(figures) => println!("{pod}, {budget:?}: {figures}"),
        Err(violation) => panic!("{pod}, {budget:?}: {violation}"),
    }
}

#[test]
fn pod_settles_whatever_the_order_of_results() {
    holds("always", WHOLE, NOTHING);
}

#[test]
fn agent_may_die_at_any_point() {
    holds("always", WHOLE, Budget { deaths: 1, ..NOTHING });
    holds("never", SMALL, Budget { deaths: 1, exits: 1, ..NOTHING });
}

#[test]
fn pod_may_be_deleted_at_any_point() {
    holds("always", SMALL, Budget { deletions: 1, ..NOTHING });
}

#[test]
fn call_may_fail_at_any_point() {
    holds("always", SMALL, Budget { faults: 1, ..NOTHING });
}

#[test]
#[ignore = "minutes: cargo xtask model"]
fn whole_pod_is_deleted_and_the_agent_dies() {
    holds("always", WHOLE, Budget { deletions: 1, deaths: 1, ..NOTHING });
}

#[test]
#[ignore = "minutes: cargo xtask model"]
fn whole_pod_is_deleted_and_a_container_exits() {
    holds("always", WHOLE, Budget { deletions: 1, exits: 1, ..NOTHING });
}

#[test]
#[ignore = "minutes: cargo xtask model"]
fn pod_is_deleted_late_or_with_a_fault() {
    holds("always", WHOLE, Budget { deletions: 1, delays: 1, ..NOTHING });
    holds("always", SMALL, Budget { deletions: 1, faults: 1, ..NOTHING });
}

#[test]
#[ignore = "minutes: cargo xtask model"]
fn whole_pod_has_an_exit_and_the_agent_dies() {
    holds("always", WHOLE, Budget { exits: 1, deaths: 1, ..NOTHING });
    holds("onfailure", WHOLE, Budget { exits: 1, deaths: 1, ..NOTHING });
    holds("never", WHOLE, Budget { exits: 1, deaths: 1, ..NOTHING });
}

#[test]
#[ignore = "minutes: cargo xtask model"]
fn whole_pod_runs_to_its_end() {
    holds("onfailure", WHOLE, Budget { exits: 2, ..NOTHING });
    holds("never", WHOLE, Budget { exits: 3, ..NOTHING });
    holds("never", WHOLE, Budget { exits: 1, faults: 1, ..NOTHING });
}

fn with_defect(defect: Defect) -> Result<Figures, Violation> {
    explore(State::initial(&format!("always | {WHOLE}"), NOTHING, Some(defect)))
}

#[test]
fn explorer_finds_a_container_that_starts_too_early() {
    let violation = with_defect(Defect::SidecarDoesNotRun).expect_err("a rule is broken");
    assert_eq!(violation.rule, "a runs before the sidecar has started");
    let last = violation.path.last().map(String::as_str);
    assert_eq!((violation.path.len(), last), (19, Some("StartContainer default/web/a#0: takes place")), "{violation}");
}

#[test]
fn explorer_finds_a_pod_that_never_settles() {
    for (defect, expected) in
        [(Defect::LooksGetNoResult, "Relist: answered"), (Defect::StartsFailForEver, "a timer fires after 15 s")]
    {
        let violation = with_defect(defect).expect_err("a rule is broken");
        assert!(violation.rule.starts_with("the pod never settles"), "{violation}");
        assert!(violation.path.iter().any(|step| step == expected), "{violation}");
    }
}
