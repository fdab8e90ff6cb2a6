//! Connections with guests: look-up for a segment, processing of events, and end.
use slipgate_abi::{Direction, DropReason, Protocol, VmId, segment::Segments};

use super::{
    Connection, Entry, Event, Kind, Name, Question, Relay, Served, Taken,
    dns_stream::DnsStream,
    journal::{By, Ends, Held},
    link::{self, Link, Packets},
    stream::Fate,
};
use crate::{
    datagram::is_unicast,
    packet::{Version, fragment::Fragments, ip::version_of, transport::Tcp},
    poll::Context,
    port::{Outbox, VirtioNetHdr, ethertype_of, single},
    quota::Reserve,
    record::RelayedFlow,
    vm::VmNet,
};
use slipgate_policy::DNS_PORT;

impl Relay {
    /// Processes a TCP segment of a guest.
    pub(super) fn segment(
        &mut self,
        name: Name,
        tcp: Tcp,
        (packet, segments): (&[u8], Segments),
        cx: &mut Context<'_>,
    ) -> Taken {
        if let Some(key) = self.connections.get(&name).copied() {
            self.drive(key, Event::Packet(packet, segments), cx);
            return Taken::Yes;
        }
        let fresh_key = self.fresh_key();
        let Some(served) = self.vms.get_mut(&name.vm) else {
            return Taken::No;
        };
        // Nobody answers from a group's address.
        if tcp.destination != DNS_PORT || !tcp.is_opening_syn() || !is_unicast(name.ours.ip()) {
            return Taken::No;
        }
        if served.counts.dns_connections >= self.limits.dns_connections_per_vm {
            served.counts.dns_refused += 1;
            return Taken::OverLimit;
        }
        let Some((_, syn, _)) = link::segment_of(packet) else {
            return Taken::No;
        };
        let (ends, now_ns) = (name.ends(), cx.now_ns);
        let mut link = Link::to(
            (&served.net, &served.early),
            &mut self.packets,
            ends,
            1,
            now_ns,
        );
        let stream = DnsStream::new(&syn, &self.limits, &mut link);
        served.counts.dns_connections += 1;
        let ends = Ends {
            protocol: Protocol::Tcp,
            guest: name.guest,
            remote: name.ours,
            by: By::Itself,
        };
        let held = Held::Entry(fresh_key);
        let mut flow = self.journal.begin(ends, held, served, cx.now_ns);
        served.counts.sent(&mut flow, segments, cx.now_ns);
        tell(&mut self.packets, &mut flow, served, cx);
        self.insert(fresh_key, name, flow, Kind::Dns(stream));
        self.drive(fresh_key, Event::Timer, cx);
        Taken::Yes
    }

    /// Whether a VM may use one more socket of the host. No VM may take the last ones from the
    /// others, or from other uses of descriptors.
    pub(super) fn has_socket_for(&self, vm: VmId) -> bool {
        self.has_sockets_for(vm, 1)
    }

    /// As [`Relay::has_socket_for`], of so many.
    pub(super) fn has_sockets_for(&self, vm: VmId, more: usize) -> bool {
        let more = more - 1;
        let taken = self.vms.values().map(|served| served.counts.sockets());
        let free = self.limits.sockets.saturating_sub(taken.sum());
        let held = || self.vms.get(&vm).map_or(0, |vm| vm.counts.sockets());
        let reserve = Reserve::new(self.limits.sockets, self.vms.len());
        let free = free.saturating_sub(more);
        free > 0 && reserve.allows(free, || held() + more)
    }

    /// An unused key. A key is reused only after four billion others.
    pub(super) fn fresh_key(&mut self) -> u32 {
        while self.entries.contains_key(&self.next_key) {
            self.next_key = self.next_key.wrapping_add(1);
        }
        let key = self.next_key;
        self.next_key = key.wrapping_add(1);
        key
    }

    pub(super) fn insert(&mut self, key: u32, name: Name, flow: RelayedFlow, kind: Kind) {
        self.connections.insert(name, key);
        let connection = Connection {
            name,
            flow,
            deadline_ns: u64::MAX,
            is_waiting: false,
            kind,
        };
        self.entries
            .insert(key, Entry::Connection(Box::new(connection)));
    }

    /// Passes an event to a connection, sends its packets to the guest, and records its next
    /// deadline.
    pub(super) fn drive(&mut self, key: u32, event: Event<'_>, cx: &mut Context<'_>) {
        if self.connect_on(key, event, cx) {
            return;
        }
        let Some(Entry::Connection(connection)) = self.entries.get_mut(&key) else {
            return;
        };
        let name = connection.name;
        let Some(served) = self.vms.get_mut(&name.vm) else {
            return;
        };
        let incoming = served.incoming(event, &mut connection.flow, cx.now_ns);
        let may_send = served.turn.may_send(event, self.turn);
        let (ends, now_ns) = (name.ends(), cx.now_ns);
        let mut link = Link::to(
            (&served.net, &served.early),
            &mut self.packets,
            ends,
            may_send,
            now_ns,
        );
        link.has_room_for = cx.out.room();
        let fate = match &mut connection.kind {
            Kind::Stream(stream) | Kind::Loopback { stream, .. } => {
                let ready = match event {
                    Event::Ready(readiness) => stream.on_ready(readiness, &mut link),
                    _ => Fate::Alive,
                };
                if ready == Fate::Alive {
                    let (fate, moved) = stream.drive(incoming, &self.limits, cx.poller, &mut link);
                    served.counts.bytes_to_guest += moved.to_guest;
                    if moved.to_guest > 0 {
                        served.net.stats.saw(Direction::Rx, now_ns);
                    }
                    served.counts.bytes_from_guest += moved.from_guest;
                    fate
                } else {
                    ready
                }
            }
            Kind::Dns(stream) => {
                if let Event::Answer(message) = event {
                    served.net.stats.saw(Direction::Rx, now_ns);
                    stream.answer(message);
                }
                let questions = &mut self.questions;
                stream.drive(incoming, &self.limits, &mut link, |message| {
                    questions.push_back(Question {
                        vm: name.vm,
                        connection: u64::from(key),
                        message,
                    });
                })
            }
            // `connect_on`'s.
            Kind::Connecting(_) => return,
        };
        let has_more = link.has_more;
        // A reset is sent besides.
        let sent = may_send.saturating_sub(link.may_send);
        served.turn.spend(sent, self.turn);
        tell(&mut self.packets, &mut connection.flow, served, cx);

        self.deadlines.remove(&(connection.deadline_ns, key));
        if fate == Fate::Alive {
            let (end_ns, due_ns) = match &connection.kind {
                Kind::Stream(stream) | Kind::Loopback { stream, .. } => {
                    (stream.end_ns(&self.limits), stream.due_ns())
                }
                Kind::Dns(stream) => (stream.end_ns(&self.limits), stream.due_ns()),
                Kind::Connecting(_) => return,
            };
            // One that waits is driven by its turn, not by what it would send by now.
            let poll_ns = due_ns.filter(|_| !has_more && !connection.is_waiting);
            connection.deadline_ns = poll_ns.map_or(end_ns, |at| at.min(end_ns));
            self.deadlines.insert((connection.deadline_ns, key));
            if has_more {
                self.join(key);
            }
            return;
        }
        if let Kind::Stream(stream) = &connection.kind {
            connection.flow.connect_us = stream.connect_us();
            served.counts.streams_reset += u64::from(fate == Fate::Reset);
        }
        let reason = match fate {
            Fate::Reset => "reset",
            Fate::Closed | Fate::Alive => "closed",
        };
        self.over(key, reason, cx.now_ns);
    }

    /// Removes a connection or an exchange that has ended. `reason` is the word for records.
    pub(super) fn over(&mut self, key: u32, reason: &'static str, now_ns: u64) {
        let (deadline_ns, flow, kind) = match self.entries.remove(&key) {
            Some(Entry::Connection(connection)) => {
                self.connections.remove(&connection.name);
                (
                    connection.deadline_ns,
                    connection.flow,
                    Some(connection.kind),
                )
            }
            Some(Entry::Exchange(exchange)) => {
                self.exchanges.remove(&exchange.name);
                (exchange.deadline_ns, exchange.flow, None)
            }
            _ => return,
        };
        self.deadlines.remove(&(deadline_ns, key));
        if let Some(served) = self.vms.get_mut(&flow.vm) {
            let counts = &mut served.counts;
            let count = match kind {
                Some(Kind::Stream(_)) => &mut counts.streams,
                Some(Kind::Dns(_)) => &mut counts.dns_connections,
                Some(Kind::Connecting(_) | Kind::Loopback { .. }) => &mut counts.loopback_streams,
                None => &mut counts.loopback_exchanges,
            };
            *count -= 1;
            self.journal.end(&flow, reason, served, now_ns);
        }
    }

    /// Ends a connection with a reset to both sides, or an exchange.
    pub(super) fn cut_off(&mut self, key: u32, reason: &'static str, cx: &mut Context<'_>) {
        if matches!(self.entries.get(&key), Some(Entry::Spliced(_))) {
            return self.reset_spliced(key, reason, cx.now_ns);
        }
        if let Some(Entry::Connection(connection)) = self.entries.get_mut(&key)
            && let Some(served) = self.vms.get_mut(&connection.name.vm)
        {
            let (ends, now_ns) = (connection.name.ends(), cx.now_ns);
            let mut link = Link::to(
                (&served.net, &served.early),
                &mut self.packets,
                ends,
                1,
                now_ns,
            );
            match &mut connection.kind {
                Kind::Stream(stream) | Kind::Loopback { stream, .. } => {
                    stream.reset(&mut link);
                }
                Kind::Dns(stream) => drop(stream.reset(&mut link)),
                Kind::Connecting(connecting) => connecting.refuse(&mut link),
            }
            tell(&mut self.packets, &mut connection.flow, served, cx);
        }
        self.over(key, reason, cx.now_ns);
    }
}

/// Sends packets of a flow to the guest. A packet for which the outbox has no room is lost, as on a
/// full link.
pub(super) fn tell(
    packets: &mut Packets,
    flow: &mut RelayedFlow,
    served: &mut Served,
    cx: &mut Context<'_>,
) {
    for (offload, packet, counted) in packets.frames() {
        if send_counted(offload, packet, counted, &served.net, cx.out) {
            served.counts.received(flow, counted, cx.now_ns);
        }
    }
    packets.clear();
}

/// Sends a datagram, in fragments if the guest's link does not take it whole: its sender is this NAT.
/// All of them, or none: returns whether it was sent.
pub(super) fn send(mut packet: Vec<u8>, vm: &VmNet, out: &mut Outbox) -> bool {
    let (len, mtu) = (packet.len(), u32::from(vm.mtu));
    if len <= mtu as usize {
        return send_counted(VirtioNetHdr::default(), &packet, single(len), vm, out);
    }
    if version_of(&packet) == Some(Version::V4) {
        // Not atomic any more (RFC 6864 section 4).
        packet[4..6].copy_from_slice(&rand::random::<[u8; 2]>());
    }
    let mut fragments = Fragments::new(&packet, mtu, rand::random());
    let mut pieces = Vec::new();
    while let Some(fragment) = fragments.next_fragment() {
        pieces.push(fragment.to_vec());
    }
    let bytes = pieces.iter().map(Vec::len).sum();
    if !out.has_room(pieces.len(), bytes) {
        vm.stats.dropped(DropReason::EngineBusy, single(len));
        return false;
    }
    for piece in pieces {
        let counted = single(piece.len());
        send_counted(VirtioNetHdr::default(), &piece, counted, vm, out);
    }
    true
}

fn send_counted(
    offload: VirtioNetHdr,
    packet: &[u8],
    counted: Segments,
    vm: &VmNet,
    out: &mut Outbox,
) -> bool {
    let sent = out.to_guest(vm, ethertype_of(packet), offload, packet);
    if sent.is_err() {
        vm.stats.dropped(DropReason::EngineBusy, counted);
    }
    sent.is_ok()
}
