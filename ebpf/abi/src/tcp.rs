//! TCP tracking, after RFC 6146 section 3.5.2 as RFC 7857 asks, in bits that are only ever set.
//!
//! # Theory of operation
//! Programs on several CPUs and the engine see segments of one connection at once. A state number
//! would need a compare-and-swap and could go backwards; bits are added by an atomic OR, written
//! only when new, and the phase is derived from them. Only a reset is taken back: RFC 6146's TRANS
//! returns to ESTABLISHED when a segment other than RST follows.
//!
//! Two sequence numbers are tracked: the end of each side's FIN. A side that acknowledges the
//! other's FIN has received everything the other sent (RFC 9293 section 3.6). So a connection is
//! over exactly when both FINs are acknowledged, and segments lost before that are retransmitted
//! through a live flow. Only copies may follow: of the second FIN, if its acknowledgement was lost
//! after it passed here, and of that acknowledgement. Every other bit is a hint that starts a
//! timer.
//!
//! | phase | bits | a flow in it |
//! | --- | --- | --- |
//! | Opening | not both SYNs | lives 4 min; a SYN with another ISN goes to the engine |
//! | Established | both SYNs | lives 2 h 4 min of silence |
//! | Closing | both FINs | lives 4 min |
//! | Closed | both FINs, each acknowledged | as Closing, but ends when its slot, port or tuple is wanted |
//! | Reset | RST, no other segment since | lives 4 min |
//!
//! A connection that was inspected and then released to the kernel is [`TcpBits::HELD`] to its
//! sequence numbers ([`crate::sequence`]). Segments outside them are not recorded, and so its reset
//! is final.
//!
//! The side that acknowledges a FIN after it sent its own is in TIME-WAIT (RFC 9293 section 3.6.1).
//! If the peer's FIN acknowledges the guest's, the peer is not.

use crate::Direction;

/// Bits of a segment's flag octet (RFC 9293 section 3.1).
#[derive(Debug)]
pub struct Flags;

impl Flags {
    /// The sender has no more data.
    pub const FIN: u8 = 0x01;
    /// Carries the sender's initial sequence number.
    pub const SYN: u8 = 0x02;
    /// Aborts the connection at once.
    pub const RST: u8 = 0x04;
    /// The acknowledgement number is valid.
    pub const ACK: u8 = 0x10;

    /// Whether a segment with these flags opens a connection: a SYN without ACK, FIN or RST.
    #[inline(always)]
    pub const fn open(flags: u8) -> bool {
        flags & (Self::SYN | Self::ACK | Self::FIN | Self::RST) == Self::SYN
    }

    /// Whether the flags contradict each other: a SYN that also ends the connection. RFC 9293 has
    /// no such segment, and stacks differ in how they treat it, so none is let through.
    #[inline(always)]
    pub const fn are_contradictory(flags: u8) -> bool {
        flags & Self::SYN != 0 && flags & (Self::FIN | Self::RST) != 0
    }
}

/// The fields of a TCP segment that tracking uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// [`Flags`] bits of the segment.
    pub flags: u8,
    /// Sequence number of the segment's first octet.
    pub sequence: u32,
    /// Sequence number after the segment's payload, SYN and FIN; see [`end_of`].
    pub end: u32,
    /// Acknowledgement number; valid only with [`Flags::ACK`].
    pub acknowledgement: u32,
    /// Window field, not scaled.
    pub window: u16,
}

impl Segment {
    /// A segment with these header fields and `payload_len` bytes of payload.
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

/// Sequence number after a segment with this payload length in bytes (RFC 9293 section 3.4).
#[inline(always)]
pub const fn end_of(sequence: u32, flags: u8, payload_len: u32) -> u32 {
    let syn = (flags & Flags::SYN != 0) as u32;
    let fin = (flags & Flags::FIN != 0) as u32;
    sequence.wrapping_add(payload_len).wrapping_add(syn + fin)
}

/// Events seen on a connection, as a set of bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct TcpBits(pub u32);

impl TcpBits {
    /// The guest sent a SYN.
    pub const SYN_TX: u32 = 1;
    /// The peer sent a SYN.
    pub const SYN_RX: u32 = 2;
    /// The guest sent a FIN.
    pub const FIN_TX: u32 = 4;
    /// The peer sent a FIN.
    pub const FIN_RX: u32 = 8;
    /// Either side sent a RST, and no other segment followed.
    pub const RST: u32 = 16;
    /// The peer's FIN did not acknowledge the guest's, so the peer will be in TIME-WAIT.
    pub const PEER_TIME_WAIT: u32 = 32;
    /// The peer acknowledged the guest's FIN.
    pub const FIN_TX_ACKED: u32 = 64;
    /// The guest acknowledged the peer's FIN.
    pub const FIN_RX_ACKED: u32 = 128;
    /// The connection was inspected and released: its segments must lie within its
    /// [`crate::sequence::Sequences`].
    pub const HELD: u32 = 256;
    /// The engine has set this to learn whether the connection moves anything, and no segment but
    /// keep-alives and bare acknowledgements was seen since ([`crate::activity`]).
    pub const QUIET: u32 = 512;

    const FINS: u32 = Self::FIN_TX | Self::FIN_RX;
    const FINS_ACKED: u32 = Self::FIN_TX_ACKED | Self::FIN_RX_ACKED;

    /// Whether a segment with these flags can change the bits. Most segments of an established
    /// connection cannot: not even [`Self::QUIET`] costs those anything, because the first segment
    /// with content clears it.
    #[inline(always)]
    pub const fn is_concerned_by(self, flags: u8) -> bool {
        flags & (Flags::SYN | Flags::FIN | Flags::RST) != 0
            || self.0 & (Self::FINS | Self::RST | Self::HELD | Self::QUIET) != 0
    }

    /// Whether a peer's segment with these flags acknowledges something to a guest that has sent a SYN
    /// and got no answer yet: it is no answer to that SYN.
    #[inline(always)]
    pub const fn is_challenged_by(self, flags: u8) -> bool {
        const ASKED: u32 = TcpBits::SYN_TX;
        const ANSWERED: u32 = TcpBits::SYN_RX;
        self.0 & (ASKED | ANSWERED) == ASKED
            && flags & (Flags::ACK | Flags::SYN | Flags::RST) == Flags::ACK
    }

    /// Returns the bits that a segment adds, and the bits that it clears. `fin_end` is the sequence
    /// number after the other side's FIN; it is used only once that FIN was seen.
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
        // A FIN is the last octet, so no acknowledgement exceeds its end.
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

    /// Phase of the connection that the bits amount to.
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

/// Phase of a connection; the module's table describes each.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Phase {
    /// One side's SYN, or none, was seen.
    Opening,
    /// Both SYNs were seen.
    Established,
    /// Both FINs were seen.
    Closing,
    /// Both FINs were seen and acknowledged: no data is in flight any more.
    Closed,
    /// A RST was seen, and no other segment since.
    Reset,
}

impl Phase {
    /// Name of the phase in output.
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
