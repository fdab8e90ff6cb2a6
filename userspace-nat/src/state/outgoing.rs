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
    segment::{self, IPV6_FRAGMENT_HEADERS_LEN, Segments},
    vm::VmFlags,
};

use crate::{
    datapath::Tables,
    packet::{
        Packet, Version,
        fragment::Fragments,
        ip::version_of,
        ipv4::{self, HEADER_LEN},
        ipv6,
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

    /// Sets an identification of the engine's in an IPv4 packet. Guests choose theirs independently,
    /// and behind one address these would collide (RFC 6864 section 5.3). IPv6 fragments get one that
    /// nobody can predict (RFC 7739) where they are made.
    pub(crate) fn set_identification(&mut self) {
        if version_of(&self.packet) != Some(Version::V4) {
            return;
        }
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
        let (fragments, repeated) = match version_of(&self.packet) {
            Some(Version::V6) => match segment::fragments6(len as u32, mtu) {
                1 => (1, 0),
                fragments => {
                    let headers = fragments as usize * IPV6_FRAGMENT_HEADERS_LEN as usize;
                    (fragments, headers - ipv6::HEADER_LEN)
                }
            },
            _ => {
                let fragments = segment::fragments(len as u32, mtu);
                (fragments, (fragments as usize - 1) * HEADER_LEN)
            }
        };
        let bytes = len + repeated;
        if !self.queue.has_room(fragments as usize, bytes) {
            return Err(DropReason::EngineBusy);
        }
        let charged = Segments {
            packets: fragments,
            bytes: bytes as u64,
        };
        charge(tables, vm, to, charged, now_ns)?;
        let mut packets = Fragments::new(&self.packet, mtu, rand::random());
        while let Some(fragment) = packets.next_fragment() {
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
pub(crate) fn charge(
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
