//! When each pod is to be planned again.
//!
//! Owns: the order of these times, so that the cost of a turn does not depend on the number of pods.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    id::PodUid,
    time::{Now, Uptime},
};

#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Timers {
    by_pod: BTreeMap<PodUid, Uptime>,
    in_order: BTreeSet<(Uptime, PodUid)>,
}

impl Timers {
    /// `None`: only an event plans the pod again.
    pub(super) fn set(&mut self, uid: &PodUid, moment: Option<Uptime>) {
        if self.by_pod.get(uid).copied() == moment {
            return;
        }
        if let Some(known) = self.by_pod.remove(uid) {
            self.in_order.remove(&(known, uid.clone()));
        }
        if let Some(moment) = moment {
            self.by_pod.insert(uid.clone(), moment);
            self.in_order.insert((moment, uid.clone()));
        }
    }

    /// The pods whose time has come. They stay due until they are set again.
    pub(super) fn due(&self, now: Now) -> Vec<PodUid> {
        let due = self.in_order.iter().take_while(|(moment, _)| *moment <= now.uptime);
        due.map(|(_, uid)| uid.clone()).collect()
    }

    pub(super) fn next_wakeup(&self) -> Option<Uptime> {
        self.in_order.first().map(|(moment, _)| *moment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::later;

    #[test]
    fn pod_is_due_until_its_timer_is_set_again() {
        let (a, b) = (PodUid::new("a"), PodUid::new("b"));
        let mut timers = Timers::default();
        timers.set(&a, Some(later(5).uptime));
        timers.set(&b, Some(later(3).uptime));
        assert_eq!((timers.due(later(2)), timers.next_wakeup()), (vec![], Some(later(3).uptime)));
        assert_eq!(timers.due(later(5)), [b.clone(), a.clone()]);
        timers.set(&b, Some(later(9).uptime));
        assert_eq!((timers.due(later(5)), timers.next_wakeup()), (vec![a.clone()], Some(later(5).uptime)));
        timers.set(&a, None);
        timers.set(&b, None);
        assert_eq!((timers.due(later(99)), timers.next_wakeup()), (vec![], None));
    }
}
