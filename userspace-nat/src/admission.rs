//! Admission: whether a packet that has no flow opens one.
//!
//! # Theory of operation
//! A guest's SYN, first datagram or echo request, or the world's first packet to a forward, comes
//! here as it was sent. In order: is it known already (a retransmission, a packet that was on its
//! way while the first was handled: sent on as it is); does it open a flow at all; do the rules
//! allow it; is the VM below its cap and rate; does a route lead there by an uplink; is a port
//! left; a slot; the kernel's two entries. Only then is the packet given back to the kernel, which
//! translates and counts it like all that follow.
//!
//! So admission is idempotent: what a repeated packet finds is the flow. A SYN with another
//! sequence number on a tuple in use is a new connection: the old flow is unlinked and recorded,
//! the new one decided on its own. So is any SYN on the tuple of a connection that was inspected and
//! that the kernel has.
//!
//! Rules come before quotas, so that what may never be does not use up what may. What is refused
//! after them was work all the same, and keeps its token of the rate. What the world opens by a forward
//! is in [`inbound`].
mod inbound;
pub(crate) mod worlds_rate;

use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{
    Direction, Protocol, Refusal, Tuple, Verdict,
    slot::SlotFlags,
    tcp::{Phase, TcpBits},
};

use crate::{
    clock::MILLISECOND_NS,
    datapath::Datapath,
    engine::core::{Core, VmState},
    flow::{EndReason, NewFlow, OpenError},
    nat_ports::{Destination, Freed, PortPool},
    packet::{
        Packet, Transport,
        icmp::ECHO_REQUEST,
        transport::{OPTION_TIMESTAMPS, tcp_options},
    },
    quota::worlds_share,
    route::Route,
};

/// What becomes of a packet that came here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admission {
    /// It belongs to this flow: back to the kernel with it.
    Flow {
        /// The flow's slot.
        slot: u32,
    },
    /// It belongs to this flow, which was cut.
    Cut {
        /// The flow's slot.
        slot: u32,
    },
    /// It opens no flow and belongs to none.
    NoFlow,
    /// It would open a flow that may not be.
    Refused(Refusal),
}

/// Who opens a flow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Opener {
    /// The guest.
    Guest,
    /// The world, by this tuple and number of its SYN.
    World((Tuple, u32)),
}

/// A refusal, and the element of `RULES` that it is due to.
pub(crate) struct Refused {
    pub(crate) reason: Refusal,
    pub(crate) rule: Option<u32>,
}

impl From<Refusal> for Refused {
    fn from(reason: Refusal) -> Self {
        Self { reason, rule: None }
    }
}

/// How often at most a VM's flows are searched for some that give way because it ran into its cap, ns.
const CAP_COLLECT_INTERVAL_NS: u64 = 5 * MILLISECOND_NS;
/// Ports to try when others have the translated tuple in the kernel.
const PORT_TRIES: usize = 8;
/// Of these, before what is kept for our process is tried.
const COMMON_PORT_TRIES: usize = 4;

impl<D: Datapath> Core<D> {
    /// Decides about a packet of a guest.
    pub(crate) fn admit_outbound(
        &mut self,
        vm: &mut VmState,
        packet: &Packet<'_>,
        now_ns: u64,
    ) -> Admission {
        let Some(tuple) = packet.tuple(vm.net.id, Direction::Tx) else {
            return Admission::NoFlow;
        };
        let known = self.flows.by_guest(&tuple);
        if let Some(admission) = self.admit_known(known, packet, Direction::Tx, now_ns) {
            return admission;
        }
        let Some(isn) = opens(packet) else {
            return Admission::NoFlow;
        };
        match self.open_outbound(vm, packet, tuple, isn, now_ns) {
            Ok(slot) => Admission::Flow { slot },
            Err(refused) => self.refuse(vm.net.id, &tuple, refused, now_ns),
        }
    }

    /// What becomes of a packet whose tuple a flow has; `None`: it may open another, and what was there
    /// is unlinked.
    fn admit_known(
        &mut self,
        known: Option<u32>,
        packet: &Packet<'_>,
        from: Direction,
        now_ns: u64,
    ) -> Option<Admission> {
        let slot = known?;
        if self.belongs(slot, packet, from) {
            if self.flows.revive(&mut self.datapath, slot) {
                return Some(Admission::Flow { slot });
            }
            if self.flows.is_cut(slot) {
                return Some(Admission::Cut { slot });
            }
        }
        let reason = EndReason::TupleReused;
        self.flows.unlink(&mut self.datapath, slot, reason, now_ns);
        None
    }

    /// Notes what is refused, for the records.
    pub(crate) fn refuse(
        &mut self,
        vm: u32,
        tuple: &Tuple,
        refused: Refused,
        now_ns: u64,
    ) -> Admission {
        let Refused { reason, rule } = refused;
        self.refusals.note(vm, reason.name(), rule, tuple, now_ns);
        Admission::Refused(reason)
    }

    /// Whether a packet is of the flow that has its tuple, and not of a new connection. The side that
    /// opened a flow may have opened another by the same name; a SYN of the peer on a flow of the
    /// guest's is a simultaneous open (RFC 5382 REQ-2), or its receiver's to challenge (RFC 5961). A SYN
    /// of the guest on a flow of the world's is a connection of the guest's own: that somebody has sent
    /// a packet in a remote's name to a forward does not mean that the guest may connect there.
    fn belongs(&self, slot: u32, packet: &Packet<'_>, from: Direction) -> bool {
        let Transport::Tcp(tcp) = packet.transport else {
            return true;
        };
        if !tcp.is_opening_syn() {
            return true;
        }
        let live = self.datapath.slot(slot);
        let again = live.isn() == tcp.sequence;
        match (from, live.flags() & SlotFlags::INBOUND != 0) {
            // A retransmission, unless the connection was inspected and let go: its opener has said and
            // heard more than that since, and what it opens by the same number nobody has looked at.
            (Direction::Tx, false) => again && !self.was_let_go(slot),
            (Direction::Tx, true) => false,
            // Anybody can send a SYN in the peer's name: it does not end a connection that lives.
            (Direction::Rx, true) => {
                again || TcpBits(live.tcp().load(Relaxed)).phase() == Phase::Established
            }
            (Direction::Rx, false) => true,
        }
    }

    fn open_outbound(
        &mut self,
        vm: &mut VmState,
        packet: &Packet<'_>,
        guest: Tuple,
        isn: u32,
        now_ns: u64,
    ) -> Result<u32, Refused> {
        let protocol = Protocol::from_ip(guest.protocol).ok_or(Refusal::Insertion)?;
        let to = slipgate_policy::Destination {
            addr: guest.remote.into(),
            port: guest.remote_port,
            protocol,
        };
        let verdict = self.judge.borrow().decide(vm.net.id, to, now_ns);
        let decision = verdict.decision;
        if let Some(refusal) = decision.refusal {
            let rule = self.rule_base + decision.rule.0;
            vm.net.stats.refused_by(rule);
            return Err(Refused {
                reason: refusal,
                rule: Some(rule),
            });
        }
        let route = self.routes.lookup(to.addr);
        // A rule opened an address of the host's own: it has no link to leave by.
        if route == Route::HostLocal {
            return Err(Refusal::Protected.into());
        }
        let (hop, source) = route.hop().ok_or(Refusal::NoRoute)?;
        if verdict.inspect && !self.may_inspect(vm, packet) {
            let rule = self.rule_base + decision.rule.0;
            vm.net.stats.refused_by(rule);
            return Err(Refused {
                reason: Refusal::Inspection,
                rule: Some(rule),
            });
        }
        self.charge(vm, Opener::Guest, now_ns)?;
        let flow = NewFlow {
            guest,
            vm_row: vm.net.row,
            protocol,
            nat: source.into(),
            nat_port: 0,
            rule: self.rule_base + decision.rule.0,
            uplink_ifindex: hop.ifindex,
            next_hop: self.next_hop(hop, guest.remote),
            isn,
            inbound: false,
            verdict: if verdict.inspect {
                Verdict::Engine
            } else {
                Verdict::Fast
            },
        };
        let opened = self.open_with_port(flow, has_timestamps(packet), now_ns);
        if let (Ok(slot), true) = (&opened, verdict.inspect) {
            let http = self.judge.borrow().policy(vm.net.id).http(decision.rule);
            self.begin_inspection(vm, packet, *slot, http, now_ns);
        }
        if let (Ok(slot), Some(name)) = (&opened, verdict.name) {
            let generation = self.datapath.slot(*slot).generation().load(Relaxed);
            self.opened_by.insert(*slot, (generation, name));
        }
        Ok(self.settle(vm, opened, now_ns)?)
    }

    fn open_with_port(
        &mut self,
        mut flow: NewFlow,
        timestamps: bool,
        now_ns: u64,
    ) -> Result<u32, Refusal> {
        let to = Destination {
            nat: flow.nat,
            remote: flow.guest.remote,
            remote_port: flow.guest.remote_port,
            protocol: flow.protocol,
        };
        let vm = flow.guest.scope;
        if flow.verdict == Verdict::Engine && !self.flows.ports.may_inspect(vm) {
            return Err(Refusal::PortsExhausted);
        }
        let mut swept = false;
        for tried in 0..PORT_TRIES {
            let ports = &mut self.flows.ports;
            let common = |ports: &mut PortPool| ports.pick(to, vm, timestamps, now_ns);
            let mut port = match tried {
                ..COMMON_PORT_TRIES => common(ports).or_else(|| ports.pick_kept(to, vm)),
                _ => ports.pick_kept(to, vm).or_else(|| common(ports)),
            };
            if port.is_none() {
                let reclaimed = self.flows.reclaim_port(&mut self.datapath, to, vm, now_ns);
                port = reclaimed.or_else(|| common(&mut self.flows.ports));
            }
            let port = port.ok_or(Refusal::PortsExhausted)?;
            flow.nat_port = port;
            let refusal = match self.flows.open(&mut self.datapath, &flow, now_ns) {
                Ok(slot) => return Ok(slot),
                Err(OpenError::WorldTaken) => {
                    // Another process has it; try again no sooner than if it had just ended.
                    self.flows.ports.free(to, port, vm, Freed::Taken, now_ns);
                    continue;
                }
                Err(OpenError::GuestTaken) if !swept && self.sweep(&flow.guest) => {
                    swept = true;
                    self.flows.ports.put_back(to, port, vm);
                    continue;
                }
                Err(OpenError::NoSlot) => {
                    // For the next: a slot rests.
                    let row = flow.vm_row;
                    self.flows.make_room(&mut self.datapath, row, false, now_ns);
                    Refusal::TableFull
                }
                Err(OpenError::MapFull) => Refusal::TableFull,
                Err(OpenError::GuestTaken | OpenError::Kernel(_)) => Refusal::Insertion,
            };
            self.flows.ports.put_back(to, port, vm);
            return Err(refusal);
        }
        Err(Refusal::PortsExhausted)
    }

    /// Deletes a tuple that no flow of ours has, although its scope is ours: a deletion failed
    /// once. Returns whether it is gone.
    fn sweep(&mut self, tuple: &Tuple) -> bool {
        self.flows.by_guest(tuple).is_none() && self.datapath.remove(tuple).unwrap_or(false)
    }

    /// Cap and rate. What the world opened and nobody has shown to be behind makes room, and not
    /// sooner than the new one may be.
    pub(crate) fn charge(
        &mut self,
        vm: &mut VmState,
        by: Opener,
        now_ns: u64,
    ) -> Result<(), Refusal> {
        let mut leaves = None;
        if self.is_at_cap(vm, by) {
            let row = vm.net.row;
            leaves = self.flows.oldest_unproven(&self.datapath, row, now_ns);
        }
        if leaves.is_none() && self.is_at_cap(vm, by) {
            // The world's share only flows of the world's can leave. Who looks among those in vain takes
            // no look from the guest.
            let from_world = by != Opener::Guest && self.is_at_worlds_share(vm);
            let after_ns = &mut vm.collect_after_ns[usize::from(from_world)];
            if now_ns >= *after_ns {
                *after_ns = now_ns + CAP_COLLECT_INTERVAL_NS;
                let row = vm.net.row;
                self.flows
                    .make_room(&mut self.datapath, row, from_world, now_ns);
            }
            if self.is_at_cap(vm, by) {
                return Err(Refusal::FlowCap);
            }
        }
        let within_share = match by {
            Opener::Guest => true,
            Opener::World(first) => vm.from_world.take(first, now_ns),
        };
        if !within_share || !vm.new_flows.take(now_ns) {
            return Err(Refusal::FlowRate);
        }
        if let Some(slot) = leaves {
            self.flows.end_unproven(&mut self.datapath, slot, now_ns);
        }
        Ok(())
    }

    /// Counts an admission, and remembers it for the records.
    fn settle(
        &mut self,
        vm: &VmState,
        opened: Result<u32, Refusal>,
        now_ns: u64,
    ) -> Result<u32, Refusal> {
        if opened == Err(Refusal::TableFull)
            && let row = vm.net.row
            && let Some(slot) = self.flows.oldest_unproven(&self.datapath, row, now_ns)
        {
            // Its slot may be taken in a second, when who was refused asks again.
            self.flows.end_unproven(&mut self.datapath, slot, now_ns);
        }
        if let Ok(slot) = opened {
            vm.net.stats.tally(crate::stats::Tally::Admitted, 1);
            if vm.is_captured {
                self.flows.capture(&mut self.datapath, slot, true);
            }
            if self.records_starts {
                self.started.push(slot);
            }
        }
        opened
    }

    fn is_at_cap(&self, vm: &VmState, by: Opener) -> bool {
        let (row, cap) = (vm.net.row, vm.net.max_flows);
        self.flows.count(row) + vm.loopback_flows as usize >= cap as usize
            || by != Opener::Guest && self.is_at_worlds_share(vm)
    }

    fn is_at_worlds_share(&self, vm: &VmState) -> bool {
        let worlds = worlds_share(vm.net.max_flows) as usize;
        self.flows.count_from_world(vm.net.row) >= worlds
    }
}

/// Whether a packet may open a flow; the SYN's sequence number, or 0.
pub(crate) fn opens(packet: &Packet<'_>) -> Option<u32> {
    match packet.transport {
        Transport::Tcp(tcp) => tcp.is_opening_syn().then_some(tcp.sequence),
        Transport::Udp(udp) => (udp.source != 0 && udp.destination != 0).then_some(0),
        Transport::Icmp(icmp) => (icmp.kind == ECHO_REQUEST).then_some(0),
        Transport::Other => None,
    }
}

fn has_timestamps(packet: &Packet<'_>) -> bool {
    let Transport::Tcp(tcp) = packet.transport else {
        return false;
    };
    let header = packet
        .ip
        .payload()
        .get(..tcp.header_len)
        .unwrap_or_default();
    tcp_options(header).any(|(kind, ..)| kind == OPTION_TIMESTAMPS)
}
