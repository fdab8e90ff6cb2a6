//! TCP tracking, after RFC 6146 section 3.5.2 as RFC 7857 asks, in bits that are only ever set.
//!
//! # Theory of operation
//! Programs on several CPUs and the engine see segments of one connection at once. A state number
//! would need a compare-and-swap and could go backwards; bits are added by an atomic OR, written
//! only when new, and the phase is derived from them. Only a reset is taken back: RFC 6146's TRANS
//! returns to ESTABLISHED when a segment other than RST follows.
//!
//! Sequence numbers are the peers' affair, but for two: where each side's FIN ends. Whoever
//! acknowledges that has all that the other side sent (RFC 9293 section 3.6), so a connection whose
//! two FINs are acknowledged is over, exactly, and what a link loses before is still sent again
//! through a living flow. What may come after it are copies: of the second FIN, when its
//! acknowledgement was lost behind us, and of that. Every other bit is a hint that starts a timer.
//!
//! | phase | bits | a flow in it |
//! | --- | --- | --- |
//! | Opening | not both SYNs | lives 4 min; a SYN with another ISN goes to the engine |
//! | Established | both SYNs | lives 2 h 4 min of silence |
//! | Closing | both FINs | lives 4 min |
//! | Closed | both FINs, each acknowledged | as Closing, but ends when its slot, port or tuple is wanted |
//! | Reset | RST, no other segment since | lives 4 min |
//!
//! A connection that was inspected and then released to the kernel is [`TcpBits::HELD`] to its sequence
//! numbers ([`crate::sequence`]), and its reset is for good: what the numbers do not believe is not
//! noted.
//!
//! TIME-WAIT is the side's that had to acknowledge a FIN after its own (RFC 9293 section 3.6.1); a
//! peer's FIN that acknowledges the guest's shows that the peer has none.

use crate::Direction;

/// Bits of a segment's flag octet (RFC 9293 section 3.1).
#[derive(Debug)]
pub struct Flags;

impl Flags {
    /// FIN.
    pub const FIN: u8 = 0x01;
    /// SYN.
    pub const SYN: u8 = 0x02;
    /// RST.
    pub const RST: u8 = 0x04;
    /// ACK.
    pub const ACK: u8 = 0x10;

    /// Whether a segment opens a connection: a SYN that answers none.
    #[inline(always)]
    pub const fn open(flags: u8) -> bool {
        flags & (Self::SYN | Self::ACK | Self::FIN | Self::RST) == Self::SYN
    }

    /// Whether flags contradict each other: a SYN that ends what it begins. Stacks differ in what they
    /// make of it (RFC 9293 has no such segment), so nobody is to find out.
    #[inline(always)]
    pub const fn are_contradictory(flags: u8) -> bool {
        flags & Self::SYN != 0 && flags & (Self::FIN | Self::RST) != 0
    }
}

/// What of a segment matters here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// [`Flags`].
    pub flags: u8,
    /// Its sequence number.
    pub sequence: u32,
    /// Sequence number behind it: its own, and its payload, SYN and FIN; see [`end_of`].
    pub end: u32,
    /// Its acknowledgement number.
    pub acknowledgement: u32,
    /// The window field, as it stands there.
    pub window: u16,
}

impl Segment {
    /// Of these header fields, and so many bytes of payload.
    #[inline(always)]
    pub const fn new(
        flags: u8,
        sequence: u32,
        payload_len: u32,
        acknowledgement: u32,
        window: u16,
    ) -> Self {
        Self {
            flags,
            sequence,
            end: end_of(sequence, flags, payload_len),
            acknowledgement,
            window,
        }
    }
}

/// What stands behind a segment in sequence space (RFC 9293 section 3.4).
#[inline(always)]
pub const fn end_of(sequence: u32, flags: u8, payload_len: u32) -> u32 {
    let syn = (flags & Flags::SYN != 0) as u32;
    let fin = (flags & Flags::FIN != 0) as u32;
    sequence.wrapping_add(payload_len).wrapping_add(syn + fin)
}

/// What was seen of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct TcpBits(pub u32);

impl TcpBits {
    /// SYN from the guest.
    pub const SYN_TX: u32 = 1;
    /// SYN from the peer.
    pub const SYN_RX: u32 = 2;
    /// FIN from the guest.
    pub const FIN_TX: u32 = 4;
    /// FIN from the peer.
    pub const FIN_RX: u32 = 8;
    /// RST from either, and nothing else since.
    pub const RST: u32 = 16;
    /// The peer's FIN did not acknowledge the guest's: the peer holds TIME-WAIT.
    pub const PEER_TIME_WAIT: u32 = 32;
    /// The peer acknowledged the guest's FIN.
    pub const FIN_TX_ACKED: u32 = 64;
    /// The guest acknowledged the peer's FIN.
    pub const FIN_RX_ACKED: u32 = 128;
    /// It was inspected and released: its segments are held to [`crate::sequence::Sequences`].
    pub const HELD: u32 = 256;

    const FINS: u32 = Self::FIN_TX | Self::FIN_RX;
    const FINS_ACKED: u32 = Self::FIN_TX_ACKED | Self::FIN_RX_ACKED;

    /// Whether a segment with these flags can tell anything: not in the midst of a connection.
    #[inline(always)]
    pub const fn is_concerned_by(self, flags: u8) -> bool {
        flags & (Flags::SYN | Flags::FIN | Flags::RST) != 0
            || self.0 & (Self::FINS | Self::RST | Self::HELD) != 0
    }

    /// Bits that a segment adds, and bits that it takes back. `fin_end`: what stands behind the
    /// other side's FIN, believed once that FIN was seen.
    #[inline(always)]
    pub const fn observe(
        self,
        direction: Direction,
        segment: &Segment,
        fin_end: u32,
    ) -> (Self, Self) {
        let flags = segment.flags;
        if flags & Flags::RST != 0 {
            return (Self(Self::RST), Self(0));
        }
        let (syn, fin, other_fin, other_fin_acked) = match direction {
            Direction::Tx => (Self::SYN_TX, Self::FIN_TX, Self::FIN_RX, Self::FIN_RX_ACKED),
            Direction::Rx => (Self::SYN_RX, Self::FIN_RX, Self::FIN_TX, Self::FIN_TX_ACKED),
        };
        let mut add = 0;
        if flags & Flags::SYN != 0 {
            add |= syn;
        }
        // Nothing comes behind a FIN, so nobody acknowledges more.
        if self.0 & other_fin != 0 && flags & Flags::ACK != 0 && segment.acknowledgement == fin_end
        {
            add |= other_fin_acked;
        }
        if flags & Flags::FIN != 0 {
            let first = self.0 & fin == 0;
            let acknowledges = (self.0 | add) & other_fin_acked != 0;
            if first && matches!(direction, Direction::Rx) && !acknowledges {
                add |= Self::PEER_TIME_WAIT;
            }
            add |= fin;
        }
        let revived = if self.0 & Self::HELD == 0 {
            self.0 & Self::RST
        } else {
            0
        };
        (Self(add), Self(revived))
    }

    /// Where the connection stands.
    #[inline(always)]
    pub const fn phase(self) -> Phase {
        let syns = Self::SYN_TX | Self::SYN_RX;
        if self.0 & Self::FINS == Self::FINS {
            if self.0 & Self::FINS_ACKED == Self::FINS_ACKED {
                Phase::Closed
            } else {
                Phase::Closing
            }
        } else if self.0 & Self::RST != 0 {
            Phase::Reset
        } else if self.0 & syns == syns {
            Phase::Established
        } else {
            Phase::Opening
        }
    }
}

/// Where a connection stands; see the module's table.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Phase {
    /// Not both SYNs seen.
    Opening,
    /// Both SYNs seen.
    Established,
    /// Both FINs seen.
    Closing,
    /// Both FINs seen and acknowledged: nothing is under way any more.
    Closed,
    /// Reset.
    Reset,
}

impl Phase {
    /// The name used in output.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Opening => "opening",
            Self::Established => "established",
            Self::Closing => "closing",
            Self::Closed => "closed",
            Self::Reset => "reset",
        }
    }
}

#[cfg(test)]
#[path = "tcp_test.rs"]
mod tests;
