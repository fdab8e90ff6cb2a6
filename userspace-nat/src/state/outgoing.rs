//! Frames on their way out, and the packets that the engine itself changes and sends on.
//!
//! Each packet is charged to its VM's rates once, where it is sent on for the last time. The
//! programs charge the packets that they translate, whether or not these came through the engine
//! before. The engine charges the packets that it translates and sends unchanged: fragments and
//! ICMP errors. The charge is for the packets that are sent: a fragmented packet is charged as its
//! fragments. The engine's own answers and relayed data are not charged.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{
    Direction, DropReason,
    segment::{self, Segments},
    vm::VmFlags,
};

use crate::{
    datapath::Tables,
    packet::{
        Packet,
        ipv4::{self, HEADER_LEN},
    },
    port::{Outbox, Side, single},
    vm::VmNet,
};

/// Most bytes of frames that wait to be written.
const QUEUE_BYTES: usize = 4 << 20;

/// The frames that wait to be written to the port, and the packet that is being changed.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) queue: Outbox,
    /// The packet that is being changed.
    pub(crate) packet: Vec<u8>,
    /// IPv4 identification of the last packet fragmented.
    identification: u16,
}

impl Outgoing {
    pub(super) fn new() -> Self {
        Self {
            queue: Outbox::new(QUEUE_BYTES),
            packet: Vec::with_capacity(2_048),
            identification: rand::random(),
        }
    }

    /// Copies a packet, to be changed and sent.
    pub(crate) fn copy(&mut self, packet: &Packet<'_>) -> &mut Vec<u8> {
        self.packet.clear();
        self.packet.extend_from_slice(packet.ip.bytes);
        &mut self.packet
    }

    /// Sets an identification of the engine's. Guests choose theirs independently, and behind one
    /// address these would collide (RFC 6864 section 5.3).
    pub(crate) fn set_identification(&mut self) {
        self.identification = self.identification.wrapping_add(1);
        self.packet[4..6].copy_from_slice(&self.identification.to_be_bytes());
        ipv4::fill_checksum(&mut self.packet, HEADER_LEN);
    }

    /// Charges the VM for the packet, and sends it.
    ///
    /// # Errors
    /// Returns the reason for which the packet is dropped.
    pub(crate) fn send(
        &mut self,
        tables: &impl Tables,
        vm: &VmNet,
        to: Side,
        now_ns: u64,
    ) -> Result<(), DropReason> {
        charge(tables, vm, to, single(self.packet.len()), now_ns)?;
        let sent = self.queue.packet(vm, to, &self.packet);
        sent.map_err(|_| DropReason::EngineBusy)
    }

    /// Charges the VM for the packet, and sends it in fragments that its link carries.
    ///
    /// # Errors
    /// Returns the reason for which the packet is dropped as a whole.
    pub(crate) fn send_fragments(
        &mut self,
        tables: &impl Tables,
        vm: &VmNet,
        to: Side,
        mtu: u32,
        now_ns: u64,
    ) -> Result<(), DropReason> {
        let len = self.packet.len();
        let fragments = segment::fragments(len as u32, mtu);
        let bytes = len + (fragments as usize - 1) * HEADER_LEN;
        if !self.queue.has_room(fragments as usize, bytes) {
            return Err(DropReason::EngineBusy);
        }
        let charged = Segments {
            packets: fragments,
            bytes: bytes as u64,
        };
        charge(tables, vm, to, charged, now_ns)?;
        let mut packets = Fragments::new(&self.packet, mtu);
        while let Some(fragment) = packets.next() {
            let sent = self.queue.packet(vm, to, fragment);
            debug_assert!(sent.is_ok(), "there is room for all");
        }
        Ok(())
    }
}

/// Charges a VM for packets that are about to be sent on, from it or to it.
///
/// # Errors
/// Returns the reason to drop them. The programs would drop them later too, but would not count
/// them as one packet.
fn charge(
    tables: &impl Tables,
    vm: &VmNet,
    to: Side,
    segments: Segments,
    now_ns: u64,
) -> Result<(), DropReason> {
    let direction = match to {
        Side::World(_) => Direction::Tx,
        Side::Guest => Direction::Rx,
    };
    let live = tables.vm(vm.row);
    let flags = live.map_or(0, |live| live.flags().load(Relaxed));
    if flags & VmFlags::FROZEN != 0 {
        return Err(DropReason::Frozen);
    }
    let limited = flags & VmFlags::LIMITED != 0;
    match tables.rates(vm.row).filter(|_| limited) {
        Some(rates) => rates.take(direction, segments, now_ns),
        None => Ok(()),
    }
}

/// Iterator over the fragments of a packet without IP options.
struct Fragments<'a> {
    packet: &'a [u8],
    offset: usize,
    step: usize,
    buffer: Vec<u8>,
}

impl<'a> Fragments<'a> {
    fn new(packet: &'a [u8], mtu: u32) -> Self {
        let step = segment::fragment_payload(mtu) as usize;
        Self {
            packet,
            offset: 0,
            step,
            buffer: Vec::with_capacity(HEADER_LEN + step),
        }
    }

    fn next(&mut self) -> Option<&[u8]> {
        let payload = &self.packet[HEADER_LEN..];
        if self.offset >= payload.len() {
            return None;
        }
        let end = (self.offset + self.step).min(payload.len());
        let more = end < payload.len();
        self.buffer.clear();
        self.buffer.extend_from_slice(&self.packet[..HEADER_LEN]);
        self.buffer.extend_from_slice(&payload[self.offset..end]);
        let total = self.buffer.len() as u16;
        let word = (self.offset / 8) as u16 | if more { 0x2000 } else { 0 };
        self.buffer[2..4].copy_from_slice(&total.to_be_bytes());
        self.buffer[6..8].copy_from_slice(&word.to_be_bytes());
        ipv4::fill_checksum(&mut self.buffer, HEADER_LEN);
        self.offset = end;
        Some(&self.buffer)
    }
}
