//! Header of a frame on the engine port, in the twelve bytes of its two MAC addresses.
//!
//! L3 and above cross the port unchanged, so the MAC addresses are the only room for metadata
//! between kernel and engine. The first byte is that of a locally administered unicast address: the
//! kernel drops redirected frames with the multicast bit. The host sometimes transmits frames of
//! its own on a TAP; the magic distinguishes them.
//!
//! ```text
//!  0    1    2    3    4    5    6    7    8    9    10   11
//! 0x02 'S'  'G'  ver  code flag vm row(BE)  VM id, or next hop (BE)
//! ```
//!
//! An EtherType follows, and L3. The packet shows its version itself, so a fragment of the world
//! has its [`link`] in that place.

use crate::{
    SlotIndex, VmRow,
    maps::{MAX_CHUNKS, SLOTS_PER_CHUNK},
};

/// Link by which a fragment of the world came, as its frame on the port has it: the lower half of
/// the ifindex. All fragments of a datagram come by one link: another's network could guess its
/// name, to inject data.
#[inline(always)]
pub const fn link(ifindex: u32) -> u16 {
    ifindex as u16
}

/// Decoded header of a frame on the engine port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PortHeader {
    /// Number of a [`Handover`] (kernel to engine) or a [`Command`] (engine to kernel).
    pub code: u8,
    /// [`PortFlags`] bits of the frame.
    pub flags: u8,
    /// Row of the VM in `VMS`.
    pub vm_row: u16,
    /// Id of the VM. With [`Command::Emit`] an index into `NEXT_HOPS`; with [`Command::EmitBy`] an
    /// ifindex; with [`Command::Open`] an [`Order`].
    pub id: u32,
}

/// Prefix of an engine port's name; a number follows.
pub const PORT_DEVICE: &str = "sgport";

/// Whether a device of this name may be an engine port. No other device should have such a name.
pub fn is_port_device(name: &str) -> bool {
    let number = name.strip_prefix(PORT_DEVICE);
    number.is_some_and(|number| number.parse::<u32>().is_ok())
}

/// Version of the header. Frames of another version are dropped.
pub const PORT_VERSION: u8 = 1;

impl PortHeader {
    /// Length of the encoded header, bytes: both MAC addresses.
    pub const LEN: usize = 12;

    /// Row of the VM in `VMS`.
    pub const fn row(&self) -> VmRow {
        VmRow::new(self.vm_row)
    }

    /// The header's twelve bytes as they appear on the port.
    #[inline(always)]
    pub const fn encode(self) -> [u8; Self::LEN] {
        let row = self.vm_row.to_be_bytes();
        let id = self.id.to_be_bytes();
        [
            0x02,
            b'S',
            b'G',
            PORT_VERSION,
            self.code,
            self.flags,
            row[0],
            row[1],
            id[0],
            id[1],
            id[2],
            id[3],
        ]
    }

    /// Decodes the twelve bytes; `None` if the magic or the version differs.
    #[inline(always)]
    pub const fn decode(b: &[u8; Self::LEN]) -> Option<Self> {
        if b[0] != 0x02 || b[1] != b'S' || b[2] != b'G' || b[3] != PORT_VERSION {
            return None;
        }
        Some(Self {
            code: b[4],
            flags: b[5],
            vm_row: u16::from_be_bytes([b[6], b[7]]),
            id: u32::from_be_bytes([b[8], b[9], b[10], b[11]]),
        })
    }
}

/// Flow that a frame of [`Command::Open`] opens: the index of its slot, and the lower ten bits of
/// the slot's generation, by which an order that comes too late is recognized.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Order {
    /// Index of the slot in `SLOTS`.
    pub slot: u32,
    generation: u32,
}

/// Bits of an order that hold the slot's index.
const SLOT_BITS: u32 = 22;
const _: () = assert!(1 << SLOT_BITS == MAX_CHUNKS * SLOTS_PER_CHUNK);

impl Order {
    /// Order to open the flow of a slot in this generation.
    pub const fn new(slot: SlotIndex, generation: u32) -> Self {
        Self::decode(slot.get() | generation << SLOT_BITS)
    }

    /// The order as [`PortHeader::id`].
    pub const fn encode(self) -> u32 {
        self.slot | self.generation << SLOT_BITS
    }

    /// The order of a header's `id`; each number is one.
    #[inline(always)]
    pub const fn decode(id: u32) -> Self {
        Self {
            slot: id & ((1 << SLOT_BITS) - 1),
            generation: id >> SLOT_BITS,
        }
    }

    /// Whether the order is about this generation of its slot.
    #[inline(always)]
    pub const fn is_of(self, generation: u32) -> bool {
        (generation ^ self.generation) << SLOT_BITS == 0
    }
}

/// Names of the bits in [`PortHeader::flags`].
#[derive(Debug)]
pub struct PortFlags;

impl PortFlags {
    /// The frame came from an uplink, with L3 as the world sent it. Otherwise it came from the
    /// guest.
    pub const FROM_UPLINK: u8 = 1;
    /// The frame was sent to an L2 group address.
    pub const GROUP: u8 = 2;
    /// The engine led the frame back in, translated by its sender's flow, as if it came from an
    /// uplink. The kernel sets it never.
    pub const HAIRPIN: u8 = 4;
    /// The frame only wakes the engine: its packet is in the ring of first packets, and counted there.
    pub const WAKE: u8 = 8;
    /// A command's packet was put together of fragments, and may leave in fragments again. Only the
    /// port of user mode looks at it.
    pub const REASSEMBLED: u8 = 16;
    /// A fragment's datagram is of no flow: it is to a forward, or to a prefix of the VM. It uses the
    /// credits of first packets to forwards, and the engine holds it apart from those of flows.
    pub const STRANGER: u8 = 32;
}

/// Reason for which the kernel hands a frame to the engine.
#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Handover {
    /// No flow has the packet's tuple: it is the first packet of a flow, or a late one.
    Miss = 1,
    /// A SYN on a tuple in use that does not retransmit the SYN that opened the flow.
    Syn = 2,
    /// The flow's verdict is `Engine` or `Closing`.
    Verdict = 3,
    /// The TTL or hop limit is 1: an ICMP time exceeded is due.
    TtlExpired = 4,
    /// The packet exceeds the next hop's MTU.
    TooBig = 5,
    /// An ARP frame that the kernel did not answer.
    Arp = 6,
    /// A DHCP message, from 0.0.0.0 or the guest's address; or one of DHCPv6.
    Dhcp = 7,
    /// A packet to the gateway or another address of the guest's own network. IPv6: also to a
    /// link-local address.
    Local = 8,
    /// An ICMP or ICMPv6 message other than an echo, from either side. From the uplink: an error that quotes
    /// a packet of one of this VM's flows.
    Icmp = 9,
    /// From the uplink: a packet to a forward that has no flow yet.
    Forward = 10,
    /// From the guest: a packet with IPv4 options, for the engine to refuse.
    Uncommon = 11,
    /// From the uplink: a packet of a flow whose VM sleeps.
    Asleep = 12,
    /// A fragment, for the engine to reassemble. From the uplink: of a datagram whose first
    /// fragment has a flow's tuple; or that of a forward, or to a prefix of the VM, with
    /// [`PortFlags::STRANGER`]. From the uplink the frame has its [`link`] in place of the EtherType.
    Fragment = 13,
    /// From the guest: a message of neighbour discovery that the kernel did not answer, or of
    /// multicast listener discovery (RFC 4861, RFC 3810).
    Ndp = 14,
    /// From the guest: an IPv6 packet from an address of the VM's prefix, or a link-local one, that
    /// is not bound to it. The engine binds the address, and then handles the packet.
    Address = 15,
    /// From the uplink: a bare acknowledgement to a connection that the guest has asked for and nobody has
    /// answered. It is of a former connection with the same tuple, most likely of one that its server has
    /// in TIME-WAIT (RFC 9293 section 3.10.7.4).
    Challenge = 16,
}

impl Handover {
    /// The reason with this number; `None` if no reason has it.
    pub const fn from_u8(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::Miss,
            2 => Self::Syn,
            3 => Self::Verdict,
            4 => Self::TtlExpired,
            5 => Self::TooBig,
            6 => Self::Arp,
            7 => Self::Dhcp,
            8 => Self::Local,
            9 => Self::Icmp,
            10 => Self::Forward,
            11 => Self::Uncommon,
            12 => Self::Asleep,
            13 => Self::Fragment,
            14 => Self::Ndp,
            15 => Self::Address,
            16 => Self::Challenge,
            _ => return None,
        })
    }
}

/// Action that the engine requests for a frame it writes to the port.
#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Command {
    /// Deliver the packet unchanged to the VM's TAP, with L2 addresses from its row.
    ToGuest = 1,
    /// Treat the packet as just sent by the VM: translate it by its flow under any verdict but
    /// `Drop`, count it, and send it. A packet without flow is dropped as `NoFlow`.
    Forward = 2,
    /// Treat the packet as just received by the uplink: translate it by its flow under any verdict
    /// but `Drop`, count it, and deliver it.
    Deliver = 3,
    /// Send the packet unchanged by the next hop whose index is the header's `id`.
    Emit = 4,
    /// Send the packet unchanged by the uplink whose ifindex is the header's `id`; the kernel
    /// resolves the neighbour.
    EmitBy = 5,
    /// Insert both tuples of the flow that the header's `id` names, an [`Order`], and then treat
    /// the packet, the flow's first, as with [`Command::Forward`]. If the order can't be carried
    /// out, the frame is discarded and not counted: the engine handles the packet itself
    /// ([`crate::slot::OrderState`]).
    Open = 6,
}

impl Command {
    /// The command with this number; `None` if no command has it.
    #[inline(always)]
    pub const fn from_u8(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::ToGuest,
            2 => Self::Forward,
            3 => Self::Deliver,
            4 => Self::Emit,
            5 => Self::EmitBy,
            6 => Self::Open,
            _ => return None,
        })
    }
}
