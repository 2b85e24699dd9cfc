//! The digest of a state: two states with one digest are taken for one.
//!
//! Owns: what of a state counts. Left out: what never changes in the model, counters that only grow (effect IDs, versions
//! of statuses), the phases of the node's routines. Times count relative to the present; those long past are equal.

use std::{
    fmt::Write as _,
    hash::{DefaultHasher, Hasher as _},
};

use crate::{
    agent::{
        Agent,
        tests::model::{
            UID,
            state::State,
            world::{Progress, World},
        },
    },
    effect::Facts,
    flights::Flight,
    id::PodUid,
    node::Node,
    observation::{ContainerState, Listing, PodFacts},
    op::{ApiOp, Op},
    pod::{Failure, PodRecord},
    time::Uptime,
};

/// Longer than every wait that is counted from a past time.
const LONG_AGO_SECS: u64 = 60;

/// Failures after which a back-off grows no more.
const LONGEST_BACK_OFF: u32 = 5;

pub(super) fn digest(state: &State) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(text(state).as_bytes());
    hasher.finish()
}

/// What of the state counts, for people.
pub(super) fn text(state: &State) -> String {
    let mut text = String::with_capacity(8192);
    write_agent(&mut text, &state.agent);
    write_flights(&mut text, state);
    write_world(&mut text, &state.world, state);
    relative(&text, state.now().uptime)
}

fn write_agent(text: &mut String, agent: &Agent) {
    let Agent {
        settings: _,
        // The API server's pods, which the agent is told of at once.
        config: _,
        pods: _,
        records,
        images,
        statuses,
        api_requests,
        node,
        outbox: _,
        touched: _,
        // By the records.
        timers: _,
        snapshot: _,
    } = agent;
    for record in records.values() {
        write_record(text, record);
    }
    let uid = PodUid::new(UID);
    if let Some(known) = statuses.versioned_pod_status(&uid) {
        write!(text, "|{:?}{:?}", known.reclaimed, known.status).expect("a string takes all");
    }
    write!(text, "|{:?}|{images:?}|{api_requests:?}", statuses.progress(&uid)).expect("a string takes all");
    write_node(text, node);
}

fn write_record(text: &mut String, record: &PodRecord) {
    let PodRecord {
        id,
        // As the API server has it.
        pod: _,
        desired,
        arrival: _,
        lifecycle,
        // For static pods.
        since: _,
        facts,
        look,
        is_fresh,
        failures,
        container_records,
        instances,
        probes,
        failure,
        prepared,
        volumes,
        refresh_at,
        remains,
        mounted,
        rejected,
        stopped_sandboxes,
        wake_at,
        waits_for,
    } = record;
    write!(text, "{}{desired:?}{lifecycle:?}{look:?}{is_fresh}", id.name).expect("a string takes all");
    for (subject, Failure { retry_at, count, message, cure }) in failures {
        let count = count.min(&LONGEST_BACK_OFF);
        write!(text, "{subject:?}{retry_at:?}{count}{message}{cure:?}").expect("a string takes all");
    }
    write!(text, "{container_records:?}{instances:?}{probes:?}{failure:?}").expect("a string takes all");
    write!(text, "{prepared:?}{volumes:?}{refresh_at:?}{remains:?}{mounted:?}{rejected:?}")
        .expect("a string takes all");
    write!(text, "{stopped_sandboxes:?}{wake_at:?}{waits_for:?}").expect("a string takes all");
    if let Some(facts) = facts {
        write_facts(text, facts);
    }
}

fn write_facts(text: &mut String, facts: &PodFacts) {
    // A container that exited since the last look did so just now: the wall clock stands still.
    let PodFacts { looked_at: _, sandboxes, containers, logged_attempts } = facts;
    write!(text, "[{logged_attempts:?}").expect("a string takes all");
    for sandbox in sandboxes {
        write!(text, "{}{:?}", sandbox.id, sandbox.state).expect("a string takes all");
    }
    for container in containers {
        let exit = match &container.state {
            ContainerState::Exited(exit) => Some((exit.code, exit.started_at.is_some())),
            ContainerState::Created | ContainerState::Running { .. } | ContainerState::Unknown => None,
        };
        write!(text, "{}{:?}{exit:?}", container.id, container.listed_state()).expect("a string takes all");
    }
    text.push(']');
}

fn write_node(text: &mut String, node: &Node) {
    if let Some(Listing { looked_at, pods }) = &node.listing {
        // What it says of a known pod was compared when it came.
        write!(text, "|{looked_at:?}{:?}", pods.keys()).expect("a string takes all");
    }
    write!(text, "|{:?}{:?}", node.gone, node.is_ready()).expect("a string takes all");
}

fn write_flights(text: &mut String, state: &State) {
    let flights = &state.agent.outbox.flights;
    let mut count = 0;
    for subject in flights.subjects() {
        // The deadline is as long after the sending as the operation says.
        let Flight { id, op, sent_at: _, give_up_at } = flights.get(subject).expect("it has a flight");
        let Some(effect) = state.world.effects.iter().find(|effect| effect.id == *id) else {
            panic!("the shell does not know of {op}");
        };
        count += 1;
        write!(text, "|{give_up_at:?}{}", effect.is_recalled).expect("a string takes all");
        match op {
            Op::Api(ApiOp::PatchStatus { version, patch, .. }) => {
                let current = state.agent.statuses.versioned_pod_status(&PodUid::new(UID));
                let is_current = current.is_some_and(|current| current.version == *version);
                write!(text, "{is_current}{patch}").expect("a string takes all");
            }
            other => write!(text, "{other}").expect("a string takes all"),
        }
        match &effect.progress {
            Progress::Done(Ok(Facts::Pod(facts))) => write_facts(text, facts),
            other => write!(text, "{other:?}").expect("a string takes all"),
        }
    }
    assert_eq!(count, state.world.effects.len(), "every effect has a flight");
}

fn write_world(text: &mut String, world: &World, state: &State) {
    write_facts(text, &world.runtime);
    let waited = world.deleted_at.map(|at| (state.at_secs - at).min(LONG_AGO_SECS));
    let status = world.api.as_ref().map(|pod| &pod.status);
    write!(text, "{:?}{:?}{waited:?}{status:?}", world.disk, world.left).expect("a string takes all");
    write!(text, "{:?}", world.history()).expect("a string takes all");
}

/// Replaces every uptime (`+3600s`) by its distance from now.
fn relative(text: &str, now: Uptime) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('+') {
        let (before, after) = rest.split_at(at + 1);
        out.push_str(before);
        let digits = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
        let (number, tail) = after.split_at(digits);
        rest = match number.parse().ok().filter(|_| tail.starts_with('s')) {
            Some(secs) => {
                let moment = Uptime::from_secs(secs);
                let (ahead, ago) = (moment.since(now).as_secs(), now.since(moment).as_secs().min(LONG_AGO_SECS));
                write!(out, "{ahead}-{ago}").expect("a string takes all");
                tail
            }
            None => after,
        };
    }
    out.push_str(rest);
    out
}
