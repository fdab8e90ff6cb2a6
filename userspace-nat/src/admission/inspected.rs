//! Flows under inspect rules: the start of their sessions, and how they are recognized later.
use std::sync::atomic::Ordering::Relaxed;

use crate::{
    datapath::Datapath,
    inspection::{quic, sessions::Kind, tcp::Session},
    packet::{Packet, Transport},
    state::{Core, VmState},
};
use slipgate_policy::{self, Http};

impl<D: Datapath> Core<D> {
    /// Begins the inspection of a flow that a packet has opened.
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

    /// Whether a flow was inspected and has been released to the kernel.
    pub(crate) fn was_let_go(&self, slot: u32) -> bool {
        let is_held = self.flows.entry(slot).is_some_and(|entry| entry.is_held());
        !is_held && self.has_inspect_rule(slot)
    }

    /// Whether an inspect rule admitted a flow, or a rule that is no longer known in a policy that
    /// has inspect rules.
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
