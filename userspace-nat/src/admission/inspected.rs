//! Flows under inspect rules: how they begin, and which they were.
use std::sync::atomic::Ordering::Relaxed;

use crate::{
    datapath::Datapath,
    inspection::{quic, sessions::Kind, tcp::Session},
    packet::{Packet, Transport},
    state::{Core, VmState},
};
use slipgate_policy::{self, Http};

impl<D: Datapath> Core<D> {
    /// A flow under an inspect rule was opened by a packet.
    pub(super) fn begin_inspection(
        &mut self,
        vm: &VmState,
        packet: &Packet<'_>,
        slot: u32,
        http: Http,
        now_ns: u64,
    ) {
        let generation = self.datapath.slot(slot).generation().load(Relaxed);
        let kind = match packet.transport {
            Transport::Tcp(tcp) => {
                let header = packet.ip.payload().get(..tcp.header_len);
                let header = header.unwrap_or_default();
                let mtus = (self.uplink_mtu(slot), self.path_mtu(&vm.net, slot));
                let session = Session::new(tcp.sequence, header, mtus, http, now_ns);
                Kind::Tcp(Box::new(session))
            }
            _ => Kind::Quic {
                flow: quic::Flow::default(),
                ends_ns: None,
                named: Vec::new(),
            },
        };
        self.inspected.add(slot, generation, &vm.net, kind);
    }

    /// Whether a flow was inspected and is not any more.
    pub(crate) fn was_let_go(&self, slot: u32) -> bool {
        let is_held = self.flows.entry(slot).is_some_and(|entry| entry.is_held());
        !is_held && self.has_inspect_rule(slot)
    }

    /// Whether an inspect rule let a flow in, or a rule that is not known any more where there are
    /// such rules.
    pub(crate) fn has_inspect_rule(&self, slot: u32) -> bool {
        let live = self.datapath.slot(slot);
        let rule = live
            .rule()
            .checked_sub(self.rule_base)
            .map(slipgate_policy::RuleId);
        let judge = self.judge.borrow();
        let policy = judge.policy(live.vm());
        let known = rule.filter(|rule| policy.has(*rule));
        policy.inspections().0 && known.is_none_or(|rule| policy.inspects(rule))
    }
}
