//! Live relayed flows: enumerates them, and ends them on request.
use slipgate_abi::{Protocol, tcp::Phase};

use super::{Entry, Kind, Relay, journal::Held};
use crate::{context::Context, record::RelayedFlow};

impl Relay {
    /// Live flows from this number on, with the phase of each.
    pub fn live(&self, from: u64) -> impl Iterator<Item = (&RelayedFlow, &'static str)> {
        let live = self.journal.live(from);
        live.filter_map(|(_, held)| match held {
            Held::Entry(key) => match self.entries.get(&key)? {
                Entry::Connection(connection) => {
                    let phase = match &connection.kind {
                        Kind::Stream(stream) | Kind::Loopback { stream, .. } => stream.phase(),
                        Kind::Dns(stream) => stream.phase(),
                        Kind::Connecting(_) => Phase::Opening,
                    };
                    Some((&connection.flow, phase.name()))
                }
                Entry::Exchange(exchange) => Some((&exchange.flow, answered(&exchange.flow))),
                Entry::Listener { .. } | Entry::Datagrams(_) => None,
            },
            Held::Association(vm, port) => {
                let flow = &self.associations.get(vm, port)?.flow;
                Some((flow, answered(flow)))
            }
        })
    }

    /// Ends the flow with this number. Returns whether it was live.
    pub fn cut_flow(&mut self, number: u64, cx: &mut Context<'_>) -> bool {
        match self.journal.held(number) {
            Some(Held::Entry(key)) => self.cut_off(key, "cut", cx),
            Some(Held::Association(vm, port)) => self.end_association(vm, port, "cut", cx.now_ns),
            None => return false,
        }
        true
    }

    /// Ends all relayed flows of a VM. Returns their number.
    pub fn cut(&mut self, vm: u32, cx: &mut Context<'_>) -> usize {
        let all = self.live(0).filter(|(flow, _)| flow.vm == vm);
        let numbers: Vec<u64> = all.map(|(flow, _)| flow.number).collect();
        let cut = numbers.iter().filter(|number| self.cut_flow(**number, cx));
        cut.count()
    }
}

/// Phase of a UDP flow, which has no states: whether it was answered.
fn answered(flow: &RelayedFlow) -> &'static str {
    debug_assert_eq!(flow.protocol, Protocol::Udp);
    match flow.tx.0 > 0 && flow.rx.0 > 0 {
        true => "both-ways",
        false => "one-way",
    }
}
