//! What stands in the twelve MAC bytes of a frame on the engine port.
//!
//! L3 and up go over the port untouched, so the MAC addresses are the only room for what one side
//! must tell the other. The first byte is a locally administered unicast one: the kernel drops
//! redirected frames with the multicast bit. The host now and then transmits frames of its own on
//! a TAP; the magic tells them apart.
//!
//! ```text
//!  0    1    2    3    4    5    6    7    8    9    10   11
//! 0x02 'S'  'G'  ver  code flag vm row(BE)  VM id, or next hop (BE)
//! ```

use crate::VmRow;

/// A decoded header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PortHeader {
    /// A [`Handover`] (kernel to engine) or a [`Command`] (engine to kernel), as its number.
    pub code: u8,
    /// [`PortFlags`].
    pub flags: u8,
    /// Row in `VMS`.
    pub vm_row: u16,
    /// The VM's id; with [`Command::Emit`] an index into `NEXT_HOPS`, with
    /// [`Command::EmitBy`] an ifindex.
    pub id: u32,
}

/// What an engine port's name begins with; a number follows.
pub const PORT_DEVICE: &str = "sgport";

/// Whether a device of this name may be an engine port: no other device should be called so.
pub fn is_port_device(name: &str) -> bool {
    let number = name.strip_prefix(PORT_DEVICE);
    number.is_some_and(|number| number.parse::<u32>().is_ok())
}

/// Version in the header; a frame of another is dropped.
pub const PORT_VERSION: u8 = 1;

impl PortHeader {
    /// Length on the wire, bytes: both MAC addresses.
    pub const LEN: usize = 12;

    /// The VM's row.
    pub const fn row(&self) -> VmRow {
        VmRow::new(self.vm_row)
    }

    /// As it stands on the wire.
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

    /// `None` when the magic or the version is another's.
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

/// Bits of [`PortHeader::flags`].
#[derive(Debug)]
pub struct PortFlags;

impl PortFlags {
    /// The frame came from an uplink (its L3 is as the world sent it); else from the guest.
    pub const FROM_UPLINK: u8 = 1;
    /// It was sent to an L2 group address.
    pub const GROUP: u8 = 2;
}

/// Why the kernel hands a frame to the engine.
#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Handover {
    /// No flow has this tuple: a first packet, or a late one.
    Miss = 1,
    /// A SYN on a tuple in use that is not the retransmission of its opener.
    Syn = 2,
    /// The flow's verdict is `Engine` or `Closing`.
    Verdict = 3,
    /// TTL is 1: an ICMP time exceeded is due.
    TtlExpired = 4,
    /// Larger than the next hop's MTU.
    TooBig = 5,
    /// ARP that the kernel did not answer.
    Arp = 6,
    /// DHCP, from 0.0.0.0 or the guest's address.
    Dhcp = 7,
    /// For the gateway or another address of the guest's own network.
    Local = 8,
    /// An ICMP message that is no echo, from either side; from the uplink: an error whose inner
    /// header is a flow of this VM.
    Icmp = 9,
    /// From the uplink: for a forward, no flow yet.
    Forward = 10,
    /// An IPv4 fragment or a header with options, for the engine to count or complete.
    Uncommon = 11,
}

impl Handover {
    /// From its number.
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
            _ => return None,
        })
    }
}

/// What the engine wants done with a frame it writes.
#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Command {
    /// Deliver as it is to the VM's TAP, with L2 from its row.
    ToGuest = 1,
    /// Treat as just sent by the VM: translate by its flow, whatever the verdict but `Drop`,
    /// count, and send on. A miss is dropped as `NoFlow`.
    Forward = 2,
    /// Treat as just received by the uplink: translate by its flow, whatever the verdict but
    /// `Drop`, count, and deliver.
    Deliver = 3,
    /// Send as it is by the next hop in the header's `id`.
    Emit = 4,
    /// Send as it is by the uplink whose ifindex is the header's `id`; the kernel resolves the
    /// neighbour.
    EmitBy = 5,
}

impl Command {
    /// From its number.
    #[inline(always)]
    pub const fn from_u8(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::ToGuest,
            2 => Self::Forward,
            3 => Self::Deliver,
            4 => Self::Emit,
            5 => Self::EmitBy,
            _ => return None,
        })
    }
}
