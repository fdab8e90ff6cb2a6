//! `slipgate capture`: one live flow's packets, or all of one VM's, as the guest sees them.
//!
//! # Theory of operation
//! A flow that is captured is carried by the engine meanwhile ([`Flows::capture`]): each packet
//! comes over the port, is copied, and goes back to the kernel, which translates and counts it as
//! ever. At the end the kernel takes it over again. Nothing is lost by that, or counted twice; it is
//! slower. Of a VM every flow is, those that open meanwhile too.
//!
//! What the guest sends is shown as it came. What goes to it is shown with its own address and port
//! and a TTL that is one less, as the kernel is about to make it; the engine's own frames (DHCP,
//! DNS, RST ...) as they are.
//!
//! The packets go to a socket that the client brought, as pcapng. It is never waited for: what does
//! not fit in a bounded buffer is lost to the capture, and said at its end. The capture is over when
//! the client closes its end, when the flow is no more, after as many packets as were asked for, or
//! at its time; what is buffered then is sent as far as the client takes it.
//!
//! [`Flows::capture`]: crate::flow::Flows::capture
use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    time::SystemTime,
};

use nix::sys::socket::{MsgFlags, send};
use serde::{Deserialize, Serialize};
use slipgate_abi::{Command, Direction, PortHeader, Tuple, portframe::PortFlags};

use crate::{
    clock::SECOND_NS,
    datapath::Datapath,
    observe::{
        pcap::guest_macs,
        pcapng::{Link, Shot, Stream},
    },
    packet::{
        Ipv4, Packet, checksum,
        ipv4::{self, End},
        transport::Transport,
    },
    poll::{Interest, Poller, Readiness, Subsystem, Token},
    port::{ETHERTYPE_IPV4, Frame},
    record::RelayedId,
    state::Core,
    stats::Tally,
};

/// Captures at once.
pub const MOST_CAPTURES: usize = 8;
/// Most of a capture that waits for its client, bytes.
const BUFFER: usize = 4 << 20;
/// How long an ended capture waits for its client to take the rest, ns.
const LINGER_NS: u64 = 2 * SECOND_NS;

/// Flows that are meant.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Subject {
    /// One flow.
    Flow {
        /// Its slot.
        slot: u32,
        /// The slot's generation.
        generation: u32,
    },
    /// One that is relayed.
    Relayed(RelayedId),
    /// Everything of a VM.
    Vm {
        /// Its row.
        row: u16,
    },
}

/// A capture that is asked for.
#[derive(Debug)]
pub struct CaptureRequest {
    /// Of what.
    pub subject: Subject,
    /// A stream socket, to which pcapng is written.
    pub to: OwnedFd,
    /// Ends after so many packets.
    pub packets: Option<u64>,
    /// Ends after so long, ns.
    pub lasts_ns: Option<u64>,
}

/// Why none was begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NotCaptured {
    /// The flow has ended, or is another process's.
    #[error("that flow has ended")]
    NoFlow,
    /// The kernel never has it, and the engine makes its packets itself.
    #[error(
        "a relayed flow is not captured by itself: `slipgate capture --vm NAME` has its packets \
         among the VM's, and so has `--pcap FILE`"
    )]
    Relayed,
    /// There is no such VM.
    #[error("that VM is not served any more")]
    NoVm,
    /// [`MOST_CAPTURES`] are under way.
    #[error("{MOST_CAPTURES} captures are under way already; end one of them")]
    TooMany,
    /// The descriptor is of no use.
    #[error("the descriptor that was sent is no stream socket")]
    Socket,
}

/// Those under way.
#[derive(Debug, Default)]
pub(crate) struct Captures {
    list: Vec<Capture>,
    last_key: u32,
    /// A packet as the guest will get it.
    copy: Vec<u8>,
}

/// What can be captured of all [`Subject`]s.
#[derive(Clone, Copy, Debug)]
enum Captured {
    Flow { slot: u32, generation: u32 },
    Vm { row: u16 },
}

#[derive(Debug)]
struct Capture {
    key: u32,
    what: Captured,
    to: OwnedFd,
    stream: Stream,
    left: Option<u64>,
    until_ns: Option<u64>,
    waits_for_room: bool,
    /// Over; what is buffered may still go until then.
    lingers_until_ns: Option<u64>,
}

impl Captures {
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Begins one.
    pub(crate) fn begin<D: Datapath>(
        &mut self,
        core: &mut Core<D>,
        poller: &Poller,
        request: CaptureRequest,
        now_ns: u64,
    ) -> Result<(), NotCaptured> {
        if self.list.len() >= MOST_CAPTURES {
            return Err(NotCaptured::TooMany);
        }
        let (what, row) = match request.subject {
            Subject::Flow { slot, generation } => {
                let entry = core.flows.entry(slot);
                let is_there = entry.is_some_and(|entry| entry.generation == generation);
                let row = is_there.then(|| core.datapath.slot(slot).vm_row() as u16);
                let what = Captured::Flow { slot, generation };
                (what, row.ok_or(NotCaptured::NoFlow)?)
            }
            Subject::Relayed(_) => return Err(NotCaptured::Relayed),
            Subject::Vm { row } => (Captured::Vm { row }, row),
        };
        let vm = core.vm(row).ok_or(NotCaptured::NoVm)?;
        let mut stream = Stream::new(BUFFER);
        stream.describe(vm.net.id, &vm.net.name, Link::Guest);
        self.last_key = self.last_key.wrapping_add(1);
        let key = self.last_key;
        let token = Token {
            subsystem: Subsystem::Capture,
            key,
        };
        let added = poller.add(&request.to, token, Interest::None);
        added.map_err(|_| NotCaptured::Socket)?;
        let capture = Capture {
            key,
            what,
            to: request.to,
            stream,
            left: request.packets,
            until_ns: request.lasts_ns.map(|ns| now_ns.saturating_add(ns)),
            waits_for_room: false,
            lingers_until_ns: None,
        };
        capture.hold(core, true);
        self.list.push(capture);
        Ok(())
    }

    /// A client's end was closed, or it has room again.
    pub(crate) fn on_ready<D: Datapath>(
        &mut self,
        core: &mut Core<D>,
        poller: &Poller,
        readiness: Readiness,
    ) {
        let key = readiness.token.key;
        let Some(at) = self.list.iter().position(|capture| capture.key == key) else {
            return;
        };
        if readiness.failed || !self.list[at].send(poller) {
            self.remove(core, poller, at);
        }
    }

    /// When [`Captures::work`] is due, ns.
    pub(crate) fn next_deadline_ns(&self) -> Option<u64> {
        let due = |capture: &Capture| capture.lingers_until_ns.or(capture.until_ns);
        self.list.iter().filter_map(due).min()
    }

    /// Sends on what was taken, and ends what is over.
    pub(crate) fn work<D: Datapath>(
        &mut self,
        core: &mut Core<D>,
        poller: &Poller,
        now_ns: u64,
        wall: SystemTime,
    ) {
        for at in (0..self.list.len()).rev() {
            let capture = &mut self.list[at];
            if capture.lingers_until_ns.is_none() && capture.is_over(core, now_ns) {
                capture.stream.end(wall);
                capture.lingers_until_ns = Some(now_ns + LINGER_NS);
                self.let_go(core, at);
            }
            let capture = &mut self.list[at];
            let takes = capture.send(poller);
            let over = capture.lingers_until_ns;
            if !takes || over.is_some_and(|until| now_ns >= until || capture.stream.waiting() == 0)
            {
                self.remove(core, poller, at);
            }
        }
    }

    /// Ends them all: the engine does. What the clients take at once they get.
    pub(crate) fn end<D: Datapath>(
        &mut self,
        core: &mut Core<D>,
        poller: &Poller,
        wall: SystemTime,
    ) {
        for at in (0..self.list.len()).rev() {
            let capture = &mut self.list[at];
            if capture.lingers_until_ns.is_none() {
                capture.stream.end(wall);
            }
            capture.send(poller);
            self.remove(core, poller, at);
        }
    }

    /// Takes what a guest sent, as it came over the port.
    pub(crate) fn read<D: Datapath>(&mut self, core: &Core<D>, bytes: &[u8], at: SystemTime) {
        let Some(frame) = Frame::parse(bytes) else {
            return;
        };
        if frame.header.flags & PortFlags::FROM_UPLINK == 0 {
            let slot = || flow_of(core, &frame, Direction::Tx);
            self.take(core, &frame, frame.l3, slot, true, at);
        }
    }

    /// Takes what goes to a guest, as it is written to the port.
    pub(crate) fn written<D: Datapath>(&mut self, core: &Core<D>, bytes: &[u8], at: SystemTime) {
        let Some(frame) = Frame::parse(bytes) else {
            return;
        };
        match Command::from_u8(frame.header.code) {
            Some(Command::ToGuest) => {
                let slot = || flow_of(core, &frame, Direction::Rx);
                self.take(core, &frame, frame.l3, slot, false, at);
            }
            Some(Command::Deliver) => {
                let Some((slot, packet)) = delivered(core, &frame) else {
                    return;
                };
                let mut copy = std::mem::take(&mut self.copy);
                as_delivered(core, slot, &frame, &packet, &mut copy);
                self.take(core, &frame, &copy, || Some(slot), false, at);
                self.copy = copy;
            }
            Some(Command::Forward | Command::Emit | Command::EmitBy) | None => {}
        }
    }

    fn take<D: Datapath>(
        &mut self,
        core: &Core<D>,
        frame: &Frame<'_>,
        l3: &[u8],
        slot: impl FnOnce() -> Option<u32>,
        from_guest: bool,
        at: SystemTime,
    ) {
        let PortHeader { vm_row, id, .. } = frame.header;
        let Some(vm) = core.vm(vm_row).filter(|vm| vm.net.id == id) else {
            return;
        };
        let wants_flow = |c: &Capture| matches!(c.what, Captured::Flow { .. });
        let slot = self.list.iter().any(wants_flow).then(slot).flatten();
        let slot = slot.and_then(|slot| Some((slot, core.flows.entry(slot)?.generation)));
        for capture in &mut self.list {
            let is_its = match capture.what {
                Captured::Vm { row } => row == vm_row,
                Captured::Flow {
                    slot: s,
                    generation,
                } => slot == Some((s, generation)),
            };
            if !is_its || capture.lingers_until_ns.is_some() || capture.left == Some(0) {
                continue;
            }
            let shot = Shot {
                vm: id,
                name: &vm.net.name,
                link: Link::Guest,
                macs: guest_macs(&vm.net, !from_guest),
                ethertype: frame.ethertype,
                l3,
                inbound: from_guest,
                at,
                comment: "",
            };
            match capture.stream.add(&shot) {
                true => capture.left = capture.left.map(|left| left - 1),
                false => vm.net.stats.tally(Tally::PcapLost, 1),
            }
        }
    }

    fn remove<D: Datapath>(&mut self, core: &mut Core<D>, poller: &Poller, at: usize) {
        if self.list[at].lingers_until_ns.is_none() {
            self.list[at].lingers_until_ns = Some(0);
            self.let_go(core, at);
        }
        let capture = self.list.swap_remove(at);
        // Closing it would not take it out of the epoll set: the client may have it too. It is in
        // the set, so there is no error.
        let _ = poller.remove(&capture.to);
    }

    /// Gives the flows back to the kernel, but those that another capture has.
    fn let_go<D: Datapath>(&self, core: &mut Core<D>, at: usize) {
        self.list[at].hold(core, false);
        for other in &self.list {
            if other.lingers_until_ns.is_none() {
                other.hold(core, true);
            }
        }
    }
}

impl Capture {
    fn hold<D: Datapath>(&self, core: &mut Core<D>, held: bool) {
        let slots = match self.what {
            Captured::Flow { slot, generation } => {
                let entry = core.flows.entry(slot);
                let same = entry.is_some_and(|entry| entry.generation == generation);
                if same { vec![slot] } else { Vec::new() }
            }
            Captured::Vm { row } => core.flows.slots_of(row).to_vec(),
        };
        for slot in slots {
            core.flows.capture(&mut core.datapath, slot, held);
        }
        if let Captured::Vm { row } = self.what {
            core.capture_new_flows(row, held);
        }
    }

    fn is_over<D: Datapath>(&self, core: &Core<D>, now_ns: u64) -> bool {
        let gone = match self.what {
            Captured::Flow { slot, generation } => {
                let entry = core.flows.entry(slot);
                entry.is_none_or(|entry| entry.generation != generation)
            }
            Captured::Vm { row } => core.vm(row).is_none(),
        };
        gone || self.left == Some(0) || self.until_ns.is_some_and(|until| now_ns >= until)
    }

    /// Sends what waits as far as the client takes it; `false` when it is gone.
    fn send(&mut self, poller: &Poller) -> bool {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        let fd = self.to.as_raw_fd();
        let sent = self
            .stream
            .drain(|bytes| send(fd, bytes, flags).map_err(io::Error::from));
        if sent.is_err() {
            return false;
        }
        let waits = self.stream.waiting() > 0;
        if waits != self.waits_for_room {
            self.waits_for_room = waits;
            let token = Token {
                subsystem: Subsystem::Capture,
                key: self.key,
            };
            let interest = if waits {
                Interest::Write
            } else {
                Interest::None
            };
            return poller.modify(self.to.as_fd(), token, interest).is_ok();
        }
        true
    }
}

/// The flow of a packet on the guest's link.
fn flow_of<D: Datapath>(core: &Core<D>, frame: &Frame<'_>, way: Direction) -> Option<u32> {
    if frame.ethertype != ETHERTYPE_IPV4 {
        return None;
    }
    let packet = Packet::parse(Ipv4::parse(frame.l3).ok()?).ok()?;
    core.flows.by_guest(&packet.tuple(frame.header.id, way)?)
}

/// The flow of a packet that the kernel is to translate and deliver.
fn delivered<'a, D: Datapath>(core: &Core<D>, frame: &Frame<'a>) -> Option<(u32, Packet<'a>)> {
    let packet = Packet::parse(Ipv4::parse(frame.l3).ok()?).ok()?;
    let tuple = packet.tuple(Tuple::WORLD, Direction::Rx)?;
    Some((core.flows.by_world(&tuple)?, packet))
}

/// The packet as the kernel will deliver it. A checksum that a device was to complete is completed.
fn as_delivered<D: Datapath>(
    core: &Core<D>,
    slot: u32,
    frame: &Frame<'_>,
    packet: &Packet<'_>,
    copy: &mut Vec<u8>,
) {
    copy.clear();
    copy.extend_from_slice(packet.ip.bytes);
    let Some(entry) = core.flows.entry(slot) else {
        return;
    };
    let (old, new) = (packet.ip.destination, entry.guest.local);
    ipv4::set_address(copy, End::Destination, new);
    ipv4::decrement_ttl(copy);
    let l4 = &mut copy[packet.ip.header_len..];
    let port = entry.guest.local_port;
    // Where the port and the checksum stand.
    let (port_at, sum_at) = match packet.transport {
        Transport::Tcp(_) => (2, 16),
        Transport::Udp(_) => (2, 6),
        Transport::Icmp(_) => (4, 2),
        Transport::Other => return,
    };
    let old_port = u16::from_be_bytes([l4[port_at], l4[port_at + 1]]);
    l4[port_at..port_at + 2].copy_from_slice(&port.to_be_bytes());
    let is_icmp = matches!(packet.transport, Transport::Icmp(_));
    if frame.vnet.needs_csum() && !is_icmp {
        let (source, protocol) = (packet.ip.source, packet.ip.protocol);
        l4[sum_at..sum_at + 2].fill(0);
        let sum = checksum::Sum::default()
            .pseudo(source, new, protocol, l4.len())
            .bytes(l4)
            .finish();
        l4[sum_at..sum_at + 2].copy_from_slice(&sum.to_be_bytes());
        return;
    }
    let mut sum = [l4[sum_at], l4[sum_at + 1]];
    // A UDP checksum of zero is none (RFC 768).
    if sum == [0; 2] && matches!(packet.transport, Transport::Udp(_)) {
        return;
    }
    if !is_icmp {
        checksum::replace_address(&mut sum, old, new);
    }
    checksum::replace16(&mut sum, old_port, port);
    l4[sum_at..sum_at + 2].copy_from_slice(&sum);
}
