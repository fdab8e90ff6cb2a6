//! Index of live relayed flows, and records of their starts and ends until the engine fetches them.
use std::{
    collections::{BTreeMap, VecDeque},
    net::SocketAddr,
    rc::Rc,
};

use slipgate_abi::{Protocol, RuleIndex, VmId, tcp::Phase};

use super::{Relay, Served};
use crate::{
    poll::Context,
    record::{RelayedEnd, RelayedFlow},
    stats::{Tally, VmStats},
};

/// Most records kept; a turn of the event loop makes far fewer.
const MOST_WAITING: usize = 16_384;

/// Live flows, and records that were not fetched yet. A closed journal takes no records.
#[derive(Debug, Default)]
pub(super) struct Journal {
    open: bool,
    number: u64,
    live: BTreeMap<u64, Held>,
    records: VecDeque<(RelayedFlow, Option<RelayedEnd>)>,
}

/// Place of a live flow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Held {
    /// A connection or an exchange, by its key.
    Entry(u32),
    /// A client of a forwarded UDP port, by VM and port of the gateway.
    Association(VmId, u16),
}

/// Endpoints of a VM's flow.
#[derive(Clone, Debug)]
pub(super) struct Ends {
    pub(super) protocol: Protocol,
    pub(super) guest: SocketAddr,
    pub(super) remote: SocketAddr,
    pub(super) by: By,
}

/// Reason for which a flow is relayed.
#[derive(Clone, Debug)]
pub(super) enum By {
    /// Slipgate serves it itself.
    Itself,
    /// A forward: the host's address, and the rule's index into `RULES`.
    Forward { at: SocketAddr, rule: RuleIndex },
    /// A port mapped to the host's loopback: the relay's address there, the service's port, and the
    /// rule that listed it.
    Loopback {
        from: SocketAddr,
        to: SocketAddr,
        rule: Rc<str>,
    },
}

impl Journal {
    pub(super) fn set_open(&mut self, open: bool) {
        self.open = open;
    }

    pub(super) fn next(&mut self) -> Option<(RelayedFlow, Option<RelayedEnd>)> {
        self.records.pop_front()
    }

    /// Numbers and places of the live flows from this number on.
    pub(super) fn live(&self, from: u64) -> impl Iterator<Item = (u64, Held)> {
        self.live
            .range(from..)
            .map(|(number, held)| (*number, *held))
    }

    /// Place of the flow with this number; `None` if it has ended.
    pub(super) fn held(&self, number: u64) -> Option<Held> {
        self.live.get(&number).copied()
    }

    /// Records the start of a flow.
    pub(super) fn begin(
        &mut self,
        ends: Ends,
        held: Held,
        served: &mut Served,
        now_ns: u64,
    ) -> RelayedFlow {
        self.number += 1;
        self.live.insert(self.number, held);
        served.live.insert(self.number);
        served.counts.begun += 1;
        let (nat, rule, host, rule_text) = match ends.by {
            By::Itself => (None, None, None, None),
            By::Forward { at, rule } => (Some(at), Some(rule), None, None),
            By::Loopback { from, to, rule } => (Some(from), None, Some(to), Some(rule)),
        };
        let flow = RelayedFlow {
            number: self.number,
            vm: served.net.id,
            protocol: ends.protocol,
            guest: ends.guest,
            remote: ends.remote,
            inbound: rule.is_some(),
            nat,
            rule,
            host,
            rule_text,
            opened_ns: now_ns,
            connect_us: 0,
            tx: (0, 0),
            rx: (0, 0),
            last_ns: now_ns,
        };
        self.put(flow.clone(), None, served.net.stats);
        flow
    }

    /// Records the end of a flow. `reason` is the word for records.
    pub(super) fn end(
        &mut self,
        flow: &RelayedFlow,
        reason: &'static str,
        served: &mut Served,
        at_ns: u64,
    ) {
        self.live.remove(&flow.number);
        served.live.remove(&flow.number);
        served.counts.ended += 1;
        let end = RelayedEnd { reason, at_ns };
        self.put(flow.clone(), Some(end), served.net.stats);
    }

    fn put(&mut self, flow: RelayedFlow, end: Option<RelayedEnd>, stats: VmStats) {
        if !self.open {
            return;
        }
        if self.records.len() >= MOST_WAITING {
            stats.tally(Tally::RecordLost, 1);
            return;
        }
        self.records.push_back((flow, end));
    }
}

impl Relay {
    /// Live flows from this number on, with the phase of each.
    pub fn live(&self, from: u64) -> impl Iterator<Item = (&RelayedFlow, &'static str)> {
        let live = self.journal.live(from);
        live.filter_map(|(_, held)| {
            let flow = self.flow_at(held)?;
            let phase = match held {
                Held::Entry(key) => self.entries.get(&key)?.phase(),
                Held::Association(..) => None,
            };
            Some((flow, phase.map_or_else(|| answered(flow), Phase::name)))
        })
    }

    /// Ends the flow with this number; `why` goes into its record. Returns whether it was live.
    pub fn cut_flow(&mut self, number: u64, why: &'static str, cx: &mut Context<'_>) -> bool {
        self.end_flow(number, why, cx)
    }

    /// Ends all relayed flows of a VM. Returns their number.
    pub fn cut(&mut self, vm: VmId, why: &'static str, cx: &mut Context<'_>) -> usize {
        let live = self.vms.get(&vm).map(|served| served.live.clone());
        let live = live.unwrap_or_default();
        let cut = live
            .iter()
            .filter(|number| self.cut_flow(**number, why, cx));
        cut.count()
    }

    /// Ends the flow with this number. `reason` is the word for records. Returns whether it was
    /// live.
    pub(super) fn end_flow(
        &mut self,
        number: u64,
        reason: &'static str,
        cx: &mut Context<'_>,
    ) -> bool {
        match self.journal.held(number) {
            Some(Held::Entry(key)) => {
                let first = cx.out.len();
                self.cut_off(key, reason, cx);
                // Nothing came for the guest, so this is no reason to wake it.
                cx.out.are_unprompted_from(first);
            }
            Some(Held::Association(vm, port)) => self.end_association(vm, port, reason, cx.now_ns),
            None => return false,
        }
        true
    }

    /// Flow with this number; `None` if it has ended.
    pub(super) fn flow(&self, number: u64) -> Option<&RelayedFlow> {
        self.flow_at(self.journal.held(number)?)
    }

    fn flow_at(&self, held: Held) -> Option<&RelayedFlow> {
        match held {
            Held::Entry(key) => self.entries.get(&key)?.flow(),
            Held::Association(vm, port) => Some(&self.associations.get(vm, port)?.flow),
        }
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
