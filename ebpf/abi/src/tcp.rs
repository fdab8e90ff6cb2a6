//! TCP tracking, after RFC 6146 section 3.5.2 as RFC 7857 asks, in bits that are only ever set.
//!
//! # Theory of operation
//! Programs on several CPUs and the engine see segments of one connection at once. A state number
//! would need a compare-and-swap and could go backwards; bits are added by an atomic OR, written
//! only when new, and the phase is derived from them. Only a reset is taken back: RFC 6146's TRANS
//! returns to ESTABLISHED when a segment other than RST follows.
//!
//! No sequence numbers are tracked: the peers do that. So a bit is a hint that starts a timer, and
//! never frees a flow by itself.
//!
//! | phase | bits | a flow in it |
//! | --- | --- | --- |
//! | Opening | not both SYNs | lives 4 min; a SYN with another ISN goes to the engine |
//! | Established | both SYNs | lives 2 h 4 min of silence |
//! | Closing | both FINs | lives 4 min |
//! | Closed | both FINs, and the first closer's ACK after them | as Closing, but may be ended early when its slot, port or tuple is wanted |
//! | Reset | RST, no other segment since | lives 4 min |

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
    /// The peer's FIN came first: it is the peer that holds TIME-WAIT.
    pub const PEER_CLOSED_FIRST: u32 = 32;
    /// The first closer acknowledged after both FINs.
    pub const LAST_ACK: u32 = 64;

    /// Bits that a segment adds, and bits that it takes back.
    #[inline(always)]
    pub const fn observe(self, direction: Direction, flags: u8) -> (TcpBits, TcpBits) {
        if flags & Flags::RST != 0 {
            return (TcpBits(Self::RST), TcpBits(0));
        }
        let tx = matches!(direction, Direction::Tx);
        let mut add = 0;
        if flags & Flags::SYN != 0 {
            add |= if tx { Self::SYN_TX } else { Self::SYN_RX };
        }
        let both = Self::FIN_TX | Self::FIN_RX;
        if flags & Flags::FIN != 0 {
            if !tx && self.0 & both == 0 {
                add |= Self::PEER_CLOSED_FIRST;
            }
            add |= if tx { Self::FIN_TX } else { Self::FIN_RX };
        } else if self.0 & both == both {
            let first_closer_is_peer = self.0 & Self::PEER_CLOSED_FIRST != 0;
            if tx != first_closer_is_peer {
                add |= Self::LAST_ACK;
            }
        }
        (TcpBits(add), TcpBits(self.0 & Self::RST))
    }

    /// Where the connection stands.
    #[inline(always)]
    pub const fn phase(self) -> Phase {
        let fins = Self::FIN_TX | Self::FIN_RX;
        let syns = Self::SYN_TX | Self::SYN_RX;
        if self.0 & fins == fins {
            if self.0 & Self::LAST_ACK != 0 {
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
    /// Both FINs seen and acknowledged by the first closer.
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
