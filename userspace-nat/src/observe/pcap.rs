//! `--pcap`: what the engine reads from its port and writes to it, for other tools to look at.
//!
//! Frames are copied to a bounded buffer and handed over once a turn, to a thread that writes
//! ([`Output`]). What the file does not take in time is lost and counted as `pcap_lost` of its VM.
//!
//! Each frame is shown on the link whose addresses it has: what a guest sent and what goes to it on
//! the VM's, what came from the world and leaves for it on the uplink's. A frame that comes, is
//! decided on and goes back to the kernel is there twice, with what it came for and what is done.
use std::{
    io::Write,
    time::{Duration, SystemTime},
};

use slipgate_abi::{Command, Handover, portframe::PortFlags};

use crate::{
    datapath::Datapath,
    observe::pcapng::{Link, Shot, Stream},
    port::Frame,
    record::Output,
    state::Core,
    stats::Tally,
    vm::VmNet,
};

/// Most that waits to be written, bytes: several turns' worth of whole batches.
const BUFFER: usize = 16 << 20;

/// A file that is being written.
pub(crate) struct PortDump {
    stream: Stream,
    output: Output,
}

/// Which way a frame went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
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

    /// Goes on in another file (rotation). What waits goes to the old one, as far as it keeps up.
    pub(crate) fn set_file(&mut self, file: Box<dyn Write + Send>) {
        self.flush();
        self.stream = Stream::new(BUFFER);
        self.output.set_file(file);
    }

    /// Takes a frame with all its headers.
    pub(crate) fn add<D: Datapath>(
        &mut self,
        core: &Core<D>,
        bytes: &[u8],
        way: Way,
        at: SystemTime,
    ) {
        let Some(frame) = Frame::parse(bytes) else {
            return;
        };
        let code = frame.header.code;
        let (link, comment) = match way {
            Way::Read if frame.header.flags & PortFlags::FROM_UPLINK != 0 => {
                (Link::Uplink, handover(code))
            }
            Way::Read => (Link::Guest, handover(code)),
            Way::Written => command(code),
        };
        let vm = core.vm(frame.header.vm_row).map(|vm| &vm.net);
        let shot = Shot {
            vm: vm.map_or(0, |vm| vm.id),
            name: vm.map_or("?", |vm| &vm.name),
            link,
            macs: vm.map_or_else(Default::default, |vm| match link {
                Link::Guest => guest_macs(vm, way == Way::Written && comment == TO_GUEST),
                Link::Uplink => Default::default(),
            }),
            ethertype: frame.ethertype,
            l3: frame.l3,
            inbound: way == Way::Read,
            at,
            comment,
        };
        if !self.stream.add(&shot) {
            let stats = vm.map_or_else(|| core.nobody(), |vm| vm.stats);
            stats.tally(Tally::PcapLost, 1);
        }
    }

    /// Hands over what waits. What finds no room now is tried again.
    pub(crate) fn flush(&mut self) {
        if self.stream.waiting() > 0 {
            let _ = self.stream.drain(|bytes| self.output.take_some(bytes));
        }
    }

    /// Waits until what was handed over is written, so long at most.
    pub(crate) fn finish(&mut self, within: Duration) {
        self.flush();
        self.output.finish(within);
    }
}

const TO_GUEST: &str = "to guest";

/// Destination and source on a guest's link.
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
        Some(Handover::Uncommon) => "fragment or options",
        None => "?",
    }
}

fn command(code: u8) -> (Link, &'static str) {
    match Command::from_u8(code) {
        Some(Command::ToGuest) => (Link::Guest, TO_GUEST),
        Some(Command::Forward) => (Link::Guest, "translate and send"),
        Some(Command::Deliver) => (Link::Uplink, "translate and deliver"),
        Some(Command::Emit | Command::EmitBy) => (Link::Uplink, "to the world"),
        None => (Link::Uplink, "?"),
    }
}
