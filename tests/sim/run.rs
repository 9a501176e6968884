//! A client that asks all it has to, over as many connections as that takes.

use super::{Client, Cut, Ending, Plan, Protocol, Replay, World};

/// A world with a client and a server in it.
pub struct Run<P: Protocol> {
    plan: P::Plan,
    pub world: World<P>,
    pub client: P::Client,
    pub server: P::Server,
}

impl<P: Protocol> Run<P> {
    pub fn new(plan: P::Plan, client: P::Client, server: P::Server, is_traced: bool) -> Self {
        Self { plan, world: World::new(plan, is_traced), client, server }
    }

    /// See [`World::connect`].
    pub fn connect(&mut self, cut: Option<Cut>) -> (Ending<P::Fault>, u64) {
        let ended = self.world.connect(&mut self.client, &mut self.server, cut);
        let _replay = Replay(self.plan);
        P::check(&mut self.client, &self.server);
        ended
    }

    /// Connects until all was asked. Gives how the connections ended.
    pub fn finish(&mut self) -> Vec<Ending<P::Fault>> {
        let faults = self.plan.faults();
        let mut endings = Vec::new();
        while !self.client.is_done() {
            let _replay = Replay(self.plan);
            assert!(endings.len() < P::CONNECTIONS_MAX, "too many connections");
            let (ending, _) = self.connect(None);
            let is_expected = match &ending {
                Ending::Whole => true,
                Ending::Lost(_) => faults.drop_per_mille > 0,
                Ending::Refused => faults.shortage_per_mille > 0,
                Ending::Fault(fault) => P::is_expected(&self.plan, fault),
                Ending::Cut | Ending::Stalled => false,
            };
            assert!(is_expected, "{ending:?} after {} answers", self.client.answered());
            endings.push(ending);
        }
        endings
    }
}

/// Two runs of one plan, which `run` makes with a trace, are the same to the last event.
pub fn assert_replays<P: Protocol>(plan: P::Plan, run: impl Fn() -> Run<P>) {
    let lines = || {
        let mut run = run();
        run.finish();
        run.world.take_lines()
    };
    let (first, second) = (lines(), lines());
    let _replay = Replay(plan);
    assert!(first.len() > 100, "{} lines", first.len());
    for (at, (first, second)) in first.iter().zip(&second).enumerate() {
        assert_eq!(first, second, "line {at}");
    }
    assert_eq!(first.len(), second.len());
}
