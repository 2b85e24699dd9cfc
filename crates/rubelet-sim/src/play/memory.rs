//! Once settled, the agent keeps no state of removed pods.
//!
//! Owns: that check. It uses the agent's own list (`Agent::entries_of_gone_pods`).

use crate::simulation::SimState;

pub(super) fn complaint(sim: &SimState) -> Option<String> {
    sim.stale_entries.first().map(|entry| format!("the agent still keeps something of a pod that is gone: {entry}"))
}

#[cfg(test)]
mod tests {
    use crate::play::Play;

    #[test]
    fn entry_of_a_pod_that_is_gone_is_a_complaint() {
        let play = Play::seeded(1);
        assert_eq!(play.look(super::complaint), None);
        play.simulation.with(|sim| sim.stale_entries.push("images: u1".to_owned()));
        let complaint = "the agent still keeps something of a pod that is gone: images: u1";
        assert_eq!(play.look(super::complaint).as_deref(), Some(complaint));
    }
}
