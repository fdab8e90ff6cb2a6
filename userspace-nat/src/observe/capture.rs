//! `slipgate capture`: the packets of one live flow, or of one VM, as the guest sees them.
//!
//! # Theory of operation
//! The engine carries a captured flow for the duration ([`Flows::capture`]): each packet comes over
//! the port, is copied, and goes back to the kernel, which translates and counts it as always. At
//! the end the kernel carries the flow again. No packet is lost by that, or counted twice; it is
//! slower. For a VM this applies to every flow, those opened meanwhile included.
//!
//! Packets from the guest are shown as they arrived. Packets to it are shown with its own address
//! and port and a TTL that is one less, as the kernel is about to make them. Those of a flow to or
//! from another guest's translated address have the comment "hairpin". The engine's own frames (DHCP, DNS, RST ...) are shown as they are.
//!
//! The packets go as pcapng to a socket that the client passed. The engine never waits for it:
//! packets that do not fit in a bounded buffer are lost to the capture, and counted at its end. The
//! capture ends when the client closes its end, when the flow has ended, after the requested number
//! of packets, or after the requested time. The rest of the buffer is then sent as far as the
//! client takes it.
//!
//! [`Flows::capture`]: crate::flow::Flows::capture
use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    time::SystemTime,
};

use nix::sys::socket::{MsgFlags, send};
use slipgate_abi::{Command, Direction, SlotIndex, VmId, VmRow, portframe::PortFlags};
use slipgate_model::{FlowTuple, Subject};

use crate::{
    clock::SECOND_NS,
    datapath::Datapath,
    flow::Flows,
    observe::{
        pcap::guest_macs,
        pcapng::{LinkKind, Shot, Stream},
    },
    packet::{Ip, Packet, ip::End, translation::translate},
    poll::{Interest, Poller, Readiness, Subsystem, Token},
    port::Frame,
    state::{Nat, VmTable},
    stats::Tally,
};

/// Most captures at a time.
pub const MOST_CAPTURES: usize = 8;
/// Most bytes of a capture that wait for its client.
const BUFFER: usize = 4 << 20;
/// Time for which an ended capture waits until its client has taken the rest, ns.
const LINGER_NS: u64 = 2 * SECOND_NS;

/// A request for a capture.
#[derive(Debug)]
pub struct CaptureRequest {
    /// The flow or VM to capture.
    pub subject: Subject,
    /// Stream socket to which pcapng is written.
    pub to: OwnedFd,
    /// Number of packets after which the capture ends; `None`: no limit.
    pub packets: Option<u64>,
    /// Time after which the capture ends, ns; `None`: no limit.
    pub lasts_ns: Option<u64>,
}

/// Reason why a capture was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NotCaptured {
    /// The flow has ended, or belongs to another process.
    #[error("that flow has ended")]
    NoFlow,
    /// The flow is relayed: the kernel does not carry it, and the engine makes its packets.
    #[error(
        "a relayed flow is not captured by itself: `slipgate capture --vm NAME` has its packets \
         among the VM's, and so has `--pcap FILE`"
    )]
    Relayed,
    /// No VM is served in that row.
    #[error("that VM is not served any more")]
    NoVm,
    /// [`MOST_CAPTURES`] are under way.
    #[error("{MOST_CAPTURES} captures are under way already; end one of them")]
    TooMany,
    /// The descriptor is not a stream socket.
    #[error("the descriptor that was sent is no stream socket")]
    Socket,
}

/// The captures that are under way.
#[derive(Debug, Default)]
pub(crate) struct Captures {
    list: Vec<Capture>,
    last_key: u32,
    /// Buffer for a packet as the guest will receive it.
    copy: Vec<u8>,
}

/// The [`Subject`]s that can be captured.
#[derive(Clone, Copy, Debug)]
enum Captured {
    Flow { slot: SlotIndex, generation: u32 },
    Vm { row: VmRow },
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
    /// End of the time in which the rest is sent; `None` while the capture runs.
    lingers_until_ns: Option<u64>,
}

impl Captures {
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Starts a capture of a flow or VM.
    pub(crate) fn begin<D: Datapath>(
        &mut self,
        nat: &mut Nat<D>,
        vms: &mut VmTable,
        poller: &Poller,
        request: CaptureRequest,
        now_ns: u64,
    ) -> Result<(), NotCaptured> {
        if self.list.len() >= MOST_CAPTURES {
            return Err(NotCaptured::TooMany);
        }
        let (what, row) = match request.subject {
            Subject::Flow { slot, generation } => {
                let entry = nat.flows.entry(slot);
                let is_there = entry.is_some_and(|entry| entry.generation == generation);
                let row = is_there.then(|| nat.datapath.slot(slot).row());
                let what = Captured::Flow { slot, generation };
                (what, row.ok_or(NotCaptured::NoFlow)?)
            }
            Subject::Relayed(_) => return Err(NotCaptured::Relayed),
            Subject::Vm { row } => (Captured::Vm { row }, row),
        };
        let vm = vms.get(row).ok_or(NotCaptured::NoVm)?;
        let mut stream = Stream::new(BUFFER);
        stream.describe(vm.net.id, &vm.net.name, LinkKind::Guest);
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
        capture.hold(nat, vms, true);
        self.list.push(capture);
        Ok(())
    }

    /// Handles a client's socket that was closed or is writable again.
    pub(crate) fn on_ready<D: Datapath>(
        &mut self,
        nat: &mut Nat<D>,
        vms: &mut VmTable,
        poller: &Poller,
        readiness: Readiness,
    ) {
        let key = readiness.token.key;
        let Some(at) = self.list.iter().position(|capture| capture.key == key) else {
            return;
        };
        if readiness.failed || !self.list[at].send(poller) {
            self.remove(nat, vms, poller, at);
        }
    }

    /// Returns the time at which [`Captures::work`] is due, ns.
    pub(crate) fn next_deadline_ns(&self) -> Option<u64> {
        let due = |capture: &Capture| capture.lingers_until_ns.or(capture.until_ns);
        self.list.iter().filter_map(due).min()
    }

    /// Sends the captured packets, and ends the captures that are over.
    pub(crate) fn work<D: Datapath>(
        &mut self,
        nat: &mut Nat<D>,
        vms: &mut VmTable,
        poller: &Poller,
        now_ns: u64,
        wall: SystemTime,
    ) {
        for at in (0..self.list.len()).rev() {
            let capture = &mut self.list[at];
            if capture.lingers_until_ns.is_none() && capture.is_over(&nat.flows, vms, now_ns) {
                capture.stream.end(wall);
                capture.lingers_until_ns = Some(now_ns + LINGER_NS);
                self.let_go(nat, vms, at);
            }
            let capture = &mut self.list[at];
            let takes = capture.send(poller);
            let over = capture.lingers_until_ns;
            if !takes || over.is_some_and(|until| now_ns >= until || capture.stream.waiting() == 0)
            {
                self.remove(nat, vms, poller, at);
            }
        }
    }

    /// Ends all captures: the engine stops. Clients receive what their sockets accept at once.
    pub(crate) fn end<D: Datapath>(
        &mut self,
        nat: &mut Nat<D>,
        vms: &mut VmTable,
        poller: &Poller,
        wall: SystemTime,
    ) {
        for at in (0..self.list.len()).rev() {
            let capture = &mut self.list[at];
            if capture.lingers_until_ns.is_none() {
                capture.stream.end(wall);
            }
            capture.send(poller);
            self.remove(nat, vms, poller, at);
        }
    }

    /// Captures a frame that a guest sent, as it was read from the port.
    pub(crate) fn read(&mut self, flows: &Flows, vms: &VmTable, bytes: &[u8], at: SystemTime) {
        let Some(frame) = Frame::parse(bytes) else {
            return;
        };
        if frame.header.flags & PortFlags::FROM_UPLINK == 0 {
            let slot = || flow_of(flows, &frame, Direction::Tx);
            self.take(flows, vms, &frame, (frame.l3, true), slot, at);
        }
    }

    /// Captures a frame that goes to a guest, as it is written to the port.
    pub(crate) fn written(&mut self, flows: &Flows, vms: &VmTable, bytes: &[u8], at: SystemTime) {
        let Some(frame) = Frame::parse(bytes) else {
            return;
        };
        match Command::from_u8(frame.header.code) {
            Some(Command::ToGuest) => {
                let slot = || flow_of(flows, &frame, Direction::Rx);
                self.take(flows, vms, &frame, (frame.l3, false), slot, at);
            }
            Some(Command::Deliver) => {
                let Some((slot, packet)) = delivered(flows, &frame) else {
                    return;
                };
                let mut copy = std::mem::take(&mut self.copy);
                as_delivered(flows, slot, &frame, &packet, &mut copy);
                self.take(flows, vms, &frame, (&copy, false), || Some(slot), at);
                self.copy = copy;
            }
            Some(Command::Forward | Command::Emit | Command::EmitBy | Command::Open) | None => {}
        }
    }

    fn take(
        &mut self,
        flows: &Flows,
        vms: &VmTable,
        frame: &Frame<'_>,
        (l3, from_guest): (&[u8], bool),
        slot: impl FnOnce() -> Option<SlotIndex>,
        at: SystemTime,
    ) {
        let (vm_row, id) = (frame.header.row(), VmId::new(frame.header.id));
        let Some(vm) = vms.get(vm_row).filter(|vm| vm.net.id == id) else {
            return;
        };
        let found = slot().and_then(|slot| Some((slot, flows.entry(slot)?)));
        let slot = found.map(|(slot, entry)| (slot, entry.generation));
        let comment = match found {
            Some((_, entry)) if entry.is_hairpin() => "hairpin",
            _ => "",
        };
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
                link: LinkKind::Guest,
                macs: guest_macs(&vm.net, !from_guest),
                ethertype: frame.ethertype,
                l3,
                inbound: from_guest,
                at,
                comment,
            };
            match capture.stream.add(&shot) {
                true => capture.left = capture.left.map(|left| left - 1),
                false => vm.net.stats.tally(Tally::PcapLost, 1),
            }
        }
    }

    fn remove<D: Datapath>(
        &mut self,
        nat: &mut Nat<D>,
        vms: &mut VmTable,
        poller: &Poller,
        at: usize,
    ) {
        if self.list[at].lingers_until_ns.is_none() {
            self.list[at].lingers_until_ns = Some(0);
            self.let_go(nat, vms, at);
        }
        let capture = self.list.swap_remove(at);
        // Closing the socket would not remove it from the epoll set: the client may have it too. It
        // is in the set, so there is no error.
        let _ = poller.remove(&capture.to);
    }

    /// Returns the flows to the kernel, except those that another capture holds.
    fn let_go<D: Datapath>(&self, nat: &mut Nat<D>, vms: &mut VmTable, at: usize) {
        self.list[at].hold(nat, vms, false);
        for other in &self.list {
            if other.lingers_until_ns.is_none() {
                other.hold(nat, vms, true);
            }
        }
    }
}

impl Capture {
    fn hold<D: Datapath>(&self, nat: &mut Nat<D>, vms: &mut VmTable, held: bool) {
        let slots = match self.what {
            Captured::Flow { slot, generation } => {
                let entry = nat.flows.entry(slot);
                let same = entry.is_some_and(|entry| entry.generation == generation);
                if same { vec![slot] } else { Vec::new() }
            }
            Captured::Vm { row } => nat.flows.slots_of(row).to_vec(),
        };
        for slot in slots {
            nat.flows.capture(&mut nat.datapath, slot, held);
        }
        if let Captured::Vm { row } = self.what {
            vms.capture_new_flows(row, held);
        }
    }

    fn is_over(&self, flows: &Flows, vms: &VmTable, now_ns: u64) -> bool {
        let gone = match self.what {
            Captured::Flow { slot, generation } => {
                let entry = flows.entry(slot);
                entry.is_none_or(|entry| entry.generation != generation)
            }
            Captured::Vm { row } => vms.get(row).is_none(),
        };
        gone || self.left == Some(0) || self.until_ns.is_some_and(|until| now_ns >= until)
    }

    /// Sends the waiting bytes as far as the client takes them. Returns `false` when the client is
    /// gone.
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

/// Returns the flow of a packet on the guest's link.
fn flow_of(flows: &Flows, frame: &Frame<'_>, direction: Direction) -> Option<SlotIndex> {
    let packet = Packet::parse(Ip::parse(frame.l3).ok()?).ok()?;
    flows.by_guest(&packet.tuple(frame.header.id, direction)?)
}

/// Returns the flow of a packet that the kernel will translate and deliver, with the packet.
fn delivered<'a>(flows: &Flows, frame: &Frame<'a>) -> Option<(SlotIndex, Packet<'a>)> {
    let packet = Packet::parse(Ip::parse(frame.l3).ok()?).ok()?;
    let tuple = packet.tuple(FlowTuple::WORLD, Direction::Rx)?;
    Some((flows.by_world(&tuple)?, packet))
}

/// Writes the packet to `copy` as the kernel will deliver it. A checksum that a device was to
/// complete is completed.
fn as_delivered(
    flows: &Flows,
    slot: SlotIndex,
    frame: &Frame<'_>,
    packet: &Packet<'_>,
    copy: &mut Vec<u8>,
) {
    copy.clear();
    copy.extend_from_slice(packet.ip.bytes);
    let Some(entry) = flows.entry(slot) else {
        return;
    };
    let guest = (entry.guest.local, entry.guest.local_port);
    translate(copy, packet, frame.vnet, End::Destination, guest);
}
