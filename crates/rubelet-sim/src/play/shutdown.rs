//! A shutdown of the machine, as logind announces it.

use rubelet_core::{event::Event, shutdown::ShutdownSignal};

use crate::play::Play;

impl Play {
    /// The machine is about to go down.
    pub(crate) fn begin_shutdown(&mut self) -> &mut Self {
        self.change(|sim| {
            sim.log("play", "a shutdown begins");
            sim.rules.shutdown_begins(sim.now, &sim.snapshot, &sim.runtime.picture);
        });
        self.announce_shutdown();
        self
    }

    pub(crate) fn cancel_shutdown(&mut self) -> &mut Self {
        self.change(|sim| {
            sim.log("play", "the shutdown is cancelled");
            sim.rules.shutdown_ends();
        });
        self.signal(ShutdownSignal::Cancelled);
        self
    }

    /// A new process asks logind, which knows.
    pub(super) fn announce_shutdown(&mut self) {
        if self.look(|sim| sim.rules.is_shutting_down()) {
            self.signal(ShutdownSignal::Begins);
        }
    }

    fn signal(&mut self, signal: ShutdownSignal) {
        if let Some(agent) = &self.agent {
            agent.handles.inbox.try_send(Event::Shutdown(signal)).expect("the inbox has room");
        }
    }
}
