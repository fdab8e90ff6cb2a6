//! `--pcap`: a dump of the frames that the engine reads from its port and writes to it.
//!
//! Frames are copied to a bounded buffer and handed over once a turn to a thread that writes
//! ([`Output`]). Frames that the file does not take in time are lost and counted as `pcap_lost` of
//! their VM.
//!
//! Each frame is shown on the link whose addresses it has: frames from and to the guest on the VM's
//! link, frames from and to the world on the uplink. A frame that is read, decided on and returned
//! to the kernel appears twice, with the reason for its handover and with the engine's command.
use std::{
    io::Write,
    time::{Duration, SystemTime},
};

use slipgate_abi::{Command, Handover, VmId, portframe::PortFlags};

use crate::{
    datapath::Datapath,
    observe::pcapng::{LinkKind, Shot, Stream},
    port::Frame,
    record::Output,
    state::{Nat, VmTable},
    stats::Tally,
    vm::VmNet,
};

/// Most bytes that wait to be written: several turns' worth of whole batches.
const BUFFER: usize = 16 << 20;

/// A dump that is being written.
pub(crate) struct PortDump {
    stream: Stream,
    output: Output,
}

/// Direction of a frame on the port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Direction {
    /// From the kernel to the engine.
    Read,
    /// From the engine to the kernel.
    Written,
}

impl std::fmt::Debug for PortDump {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.stream.fmt(f)
    }
}

impl PortDump {
    pub(crate) fn new(output: Output) -> Self {
        Self {
            stream: Stream::new(BUFFER),
            output,
        }
    }

    /// Replaces the file (rotation). Waiting frames go to the old file, as far as there is room.
    pub(crate) fn set_file(&mut self, file: Box<dyn Write + Send>) {
        self.flush();
        self.stream = Stream::new(BUFFER);
        self.output.set_file(file);
    }

    /// Adds a frame with all its headers.
    pub(crate) fn add<D: Datapath>(
        &mut self,
        nat: &Nat<D>,
        vms: &VmTable,
        bytes: &[u8],
        direction: Direction,
        at: SystemTime,
    ) {
        let Some(frame) = Frame::parse(bytes) else {
            return;
        };
        let code = frame.header.code;
        let (link, comment) = match direction {
            Direction::Read if frame.header.flags & PortFlags::FROM_UPLINK != 0 => {
                (LinkKind::Uplink, handover(code))
            }
            Direction::Read => (LinkKind::Guest, handover(code)),
            Direction::Written if frame.header.flags & PortFlags::HAIRPIN != 0 => {
                (LinkKind::Uplink, "hairpin: translate and deliver")
            }
            Direction::Written => command(code),
        };
        let vm = vms.get(frame.header.row()).map(|vm| &vm.net);
        let shot = Shot {
            vm: vm.map_or(VmId::NONE, |vm| vm.id),
            name: vm.map_or("?", |vm| &vm.name),
            link,
            macs: vm.map_or_else(Default::default, |vm| match link {
                LinkKind::Guest => {
                    guest_macs(vm, direction == Direction::Written && comment == TO_GUEST)
                }
                LinkKind::Uplink => Default::default(),
            }),
            ethertype: frame.ethertype,
            l3: frame.l3,
            inbound: direction == Direction::Read,
            at,
            comment,
        };
        if !self.stream.add(&shot) {
            let stats = vm.map_or_else(|| nat.datapath.nobody(), |vm| vm.stats);
            stats.tally(Tally::PcapLost, 1);
        }
    }

    /// Hands over the waiting frames. Frames that find no room now are handed over later.
    pub(crate) fn flush(&mut self) {
        if self.stream.waiting() > 0 {
            let _ = self.stream.drain(|bytes| self.output.take_some(bytes));
        }
    }

    /// Waits, at most `within`, until the frames handed over are written.
    pub(crate) fn finish(&mut self, within: Duration) {
        self.flush();
        self.output.finish(within);
    }
}

const TO_GUEST: &str = "to guest";

/// Returns destination and source MAC on a guest's link.
pub(crate) fn guest_macs(vm: &VmNet, to_guest: bool) -> [[u8; 6]; 2] {
    let guest = vm.guest_mac.unwrap_or_default();
    match to_guest {
        true => [guest, vm.gateway_mac],
        false => [vm.gateway_mac, guest],
    }
}

fn handover(code: u8) -> &'static str {
    match Handover::from_u8(code) {
        Some(Handover::Miss) => "miss",
        Some(Handover::Syn) => "another SYN",
        Some(Handover::Verdict) => "held or closing flow",
        Some(Handover::TtlExpired) => "TTL spent",
        Some(Handover::TooBig) => "too big",
        Some(Handover::Arp) => "ARP",
        Some(Handover::Dhcp) => "DHCP",
        Some(Handover::Local) => "to the guest's network",
        Some(Handover::Icmp) => "ICMP",
        Some(Handover::Forward) => "to a forward",
        Some(Handover::Uncommon) => "IP options",
        Some(Handover::Asleep) => "to a VM that sleeps",
        Some(Handover::Fragment) => "fragment",
        Some(Handover::Ndp) => "neighbour discovery",
        Some(Handover::Address) => "new address of the guest",
        Some(Handover::Challenge) => "of a former connection",
        None => "?",
    }
}

fn command(code: u8) -> (LinkKind, &'static str) {
    match Command::from_u8(code) {
        Some(Command::ToGuest) => (LinkKind::Guest, TO_GUEST),
        Some(Command::Forward) => (LinkKind::Guest, "translate and send"),
        Some(Command::Open) => (LinkKind::Guest, "open, translate and send"),
        Some(Command::Deliver) => (LinkKind::Uplink, "translate and deliver"),
        Some(Command::Emit | Command::EmitBy) => (LinkKind::Uplink, "to the world"),
        None => (LinkKind::Uplink, "?"),
    }
}
