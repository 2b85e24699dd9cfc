//! Flights: effects that were sent and whose result is pending.
//!
//! Owns: one flight per subject (invariant I4), and the deadline of each result. Never: decides on an effect.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::{
    api_requests::ApiRequest,
    effect::EffectId,
    id::{ContainerId, PodUid},
    images::ImageTarget,
    log_rotation::LogTask,
    node::Routine,
    op::{ContainerOp, Op},
    probes::{ProbeKind, exec_slots::ExecSlots},
    time::{Now, Uptime},
    volumes::{devices::DeviceName, teardown::PodVolume},
};

/// The shell returns a result before the deadline; if that result is lost, the agent stops waiting this long after it.
const LOST_AFTER: Duration = Duration::from_secs(10);

/// What an effect changes. At most one flight per subject.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    Node(Routine),
    Api(ApiRequest),
    Pod(PodUid, PodSubject),
    /// Staging and unstaging it.
    Device(DeviceName),
    Log(ContainerId, LogTask),
}

/// The part of a pod that an effect changes. Parts are independent of each other.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PodSubject {
    Look,
    /// The cgroup, directories and sandboxes, and the end of volumes: one after the other.
    Pod,
    /// The volume of this name in the spec.
    Volume(String),
    /// The end of one volume.
    Unmount(PodVolume),
    /// Refreshing volumes that are set up, which blocks nothing else.
    Volumes,
    /// A container name: the starts and stops of all attempts together.
    Container(String),
    /// The removal of one dead container, which blocks nothing of the other attempts.
    Removal(ContainerId),
    Image(ImageTarget),
    Probe(ContainerId, ProbeKind),
}

impl PodSubject {
    /// Effects on these change the pod; those on others only read, or concern an image.
    fn is_changed(&self) -> bool {
        match self {
            PodSubject::Pod
            | PodSubject::Volume(_)
            | PodSubject::Unmount(_)
            | PodSubject::Volumes
            | PodSubject::Container(_)
            | PodSubject::Removal(_) => true,
            PodSubject::Look | PodSubject::Image(_) | PodSubject::Probe(..) => false,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Flight {
    pub id: EffectId,
    pub op: Op,
    pub sent_at: Uptime,
    /// Without a result by then, the effect has failed.
    pub give_up_at: Uptime,
}

impl Flight {
    /// When the container must be gone by its grace period; `None` when nothing is being stopped.
    pub fn stops_by(&self) -> Option<Uptime> {
        match &self.op {
            Op::Container(ContainerOp::Stop { grace_secs, .. }) => {
                Some(self.sent_at + Duration::from_secs(u64::try_from(*grace_secs).unwrap_or(0)))
            }
            _ => None,
        }
    }
}

#[derive(Clone, Debug, Default)]
pub struct Flights {
    last_id: u64,
    flights: BTreeMap<Subject, Flight>,
    subjects: BTreeMap<EffectId, Subject>,
    give_up: BTreeSet<(Uptime, EffectId)>,
    pub exec_slots: ExecSlots,
}

impl Flights {
    pub fn begin(&mut self, subject: Subject, op: Op, deadline: Duration, now: Now) -> EffectId {
        self.last_id += 1;
        let id = EffectId(self.last_id);
        let give_up_at = now.uptime + deadline + LOST_AFTER;
        assert!(!self.flights.contains_key(&subject), "one effect at a time per subject: {subject:?}, {op}");
        if is_exec_probe(&op) {
            self.exec_slots.take();
        }
        self.subjects.insert(id, subject.clone());
        self.give_up.insert((give_up_at, id));
        self.flights.insert(subject, Flight { id, op, sent_at: now.uptime, give_up_at });
        id
    }

    /// Removes the flight; `None` when it was already dropped.
    pub fn end(&mut self, id: EffectId) -> Option<(Subject, Flight)> {
        let subject = self.subjects.remove(&id)?;
        let flight = self.flights.remove(&subject).expect("every subject in the index has its flight");
        self.give_up.remove(&(flight.give_up_at, id));
        if is_exec_probe(&flight.op) {
            self.exec_slots.release();
        }
        Some((subject, flight))
    }

    pub fn get(&self, subject: &Subject) -> Option<&Flight> {
        self.flights.get(subject)
    }

    pub fn contains(&self, subject: &Subject) -> bool {
        self.flights.contains_key(subject)
    }

    /// A container is being started from the image of this ID.
    pub fn uses_image(&self, id: &str) -> bool {
        let uses = |op: &Op| match op {
            Op::Container(ContainerOp::Start(order)) => {
                order.image.id == id || order.image_volumes.values().any(|image| image == id)
            }
            _ => false,
        };
        self.flights.values().any(|flight| uses(&flight.op))
    }

    /// Some dead container is being removed.
    pub fn has_removals(&self) -> bool {
        self.subjects().any(|subject| matches!(subject, Subject::Pod(_, PodSubject::Removal(_))))
    }

    pub fn subjects(&self) -> impl Iterator<Item = &Subject> {
        self.flights.keys()
    }

    pub fn of_pod<'a>(&'a self, uid: &'a PodUid) -> PodFlights<'a> {
        PodFlights { flights: self, uid }
    }

    /// Requests to the API server in flight.
    pub fn api_requests(&self) -> impl Iterator<Item = &ApiRequest> {
        let from = Subject::Api(ApiRequest::FIRST);
        self.flights.range(from..).map_while(|(subject, _)| match subject {
            Subject::Api(request) => Some(request),
            Subject::Node(_) | Subject::Pod(..) | Subject::Device(_) | Subject::Log(..) => None,
        })
    }

    /// Moves the deadline of the result to this time, if that is earlier.
    pub fn hasten(&mut self, subject: &Subject, moment: Uptime) {
        let Some(flight) = self.flights.get_mut(subject) else { return };
        if moment < flight.give_up_at {
            self.give_up.remove(&(flight.give_up_at, flight.id));
            flight.give_up_at = moment;
            self.give_up.insert((moment, flight.id));
        }
    }

    /// Effects whose result did not come in time.
    pub fn overdue(&self, now: Now) -> Vec<EffectId> {
        self.give_up.iter().take_while(|(moment, _)| *moment <= now.uptime).map(|(_, id)| *id).collect()
    }

    pub fn next_wakeup(&self) -> Option<Uptime> {
        self.give_up.first().map(|(moment, _)| *moment)
    }
}

fn is_exec_probe(op: &Op) -> bool {
    matches!(op, Op::Container(ContainerOp::Probe(order)) if order.is_exec())
}

/// The flights of one pod.
#[derive(Clone, Copy, Debug)]
pub struct PodFlights<'a> {
    flights: &'a Flights,
    uid: &'a PodUid,
}

impl<'a> PodFlights<'a> {
    pub fn all(self) -> impl Iterator<Item = (&'a PodSubject, &'a Flight)> {
        let uid = self.uid;
        let from = Subject::Pod(uid.clone(), PodSubject::Look);
        self.flights.flights.range(from..).map_while(move |(subject, flight)| match subject {
            Subject::Pod(owner, part) if owner == uid => Some((part, flight)),
            Subject::Pod(..) | Subject::Node(_) | Subject::Api(_) | Subject::Device(_) | Subject::Log(..) => None,
        })
    }

    /// A volume is being set up.
    pub fn has_volumes(self) -> bool {
        self.all().any(|(part, _)| matches!(part, PodSubject::Volume(_)))
    }

    /// Flights that may change the pod.
    pub fn changes(self) -> impl Iterator<Item = (&'a PodSubject, &'a Flight)> {
        self.all().filter(|(part, _)| part.is_changed())
    }

    pub fn exec_probes(self) -> usize {
        self.all().filter(|(_, flight)| is_exec_probe(&flight.op)).count()
    }

    pub fn has_changes(self) -> bool {
        self.changes().next().is_some()
    }

    pub fn get(self, part: &PodSubject) -> Option<&'a Flight> {
        self.flights.get(&Subject::Pod(self.uid.clone(), part.clone()))
    }

    pub fn contains(self, part: &PodSubject) -> bool {
        self.get(part).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{op::NodeOp, test_support::later};

    fn pod(uid: &str, part: PodSubject) -> Subject {
        Subject::Pod(PodUid::new(uid), part)
    }

    fn begun(subjects: &[Subject]) -> Flights {
        let mut flights = Flights::default();
        for (secs, subject) in (1..).zip(subjects) {
            flights.begin(subject.clone(), NodeOp::Relist.into(), Duration::from_secs(secs), later(0));
        }
        flights
    }

    #[test]
    fn flights_of_a_pod_are_its_own() {
        let container = || PodSubject::Container("a".to_owned());
        let flights = begun(&[
            pod("p", PodSubject::Look),
            pod("p", container()),
            pod("q", PodSubject::Pod),
            Subject::Api(ApiRequest::Node),
            Subject::Node(Routine::Relist),
        ]);
        let (p, q) = (PodUid::new("p"), PodUid::new("q"));
        let of_p: Vec<_> = flights.of_pod(&p).all().map(|(part, _)| part.clone()).collect();
        assert_eq!(of_p, [PodSubject::Look, container()]);
        let changes: Vec<_> = flights.of_pod(&p).changes().map(|(part, _)| part.clone()).collect();
        assert_eq!(changes, [container()], "a look changes nothing");
        assert!(flights.of_pod(&q).contains(&PodSubject::Pod) && !flights.of_pod(&q).contains(&PodSubject::Look));
        assert_eq!(flights.api_requests().collect::<Vec<_>>(), [&ApiRequest::Node]);
    }

    #[test]
    fn flight_is_overdue_ten_seconds_after_its_deadline() {
        let (first, second) = (pod("p", PodSubject::Look), pod("p", PodSubject::Pod));
        let mut flights = begun(&[first, second.clone()]);
        assert_eq!((flights.overdue(later(10)), flights.next_wakeup()), (vec![], Some(later(11).uptime)));
        assert_eq!(flights.overdue(later(12)), [EffectId(1), EffectId(2)]);
        flights.hasten(&second, later(5).uptime);
        flights.hasten(&second, later(7).uptime);
        assert_eq!((flights.overdue(later(5)), flights.next_wakeup()), (vec![EffectId(2)], Some(later(5).uptime)));
        assert_eq!(flights.end(EffectId(2)).map(|(subject, _)| subject), Some(second));
        assert_eq!(flights.end(EffectId(2)), None, "a result that comes twice counts once");
        assert_eq!(flights.next_wakeup(), Some(later(11).uptime));
        flights.end(EffectId(1));
        assert_eq!((flights.next_wakeup(), flights.subjects().count()), (None, 0));
    }

    #[test]
    #[should_panic(expected = "one effect at a time per subject")]
    fn second_effect_on_a_subject_is_a_bug() {
        begun(&[pod("p", PodSubject::Pod), pod("p", PodSubject::Pod)]);
    }
}
