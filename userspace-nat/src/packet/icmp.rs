//! The header of ICMP (RFC 792) and ICMPv6 (RFC 4443).
use super::{Malformed, Version};

/// Length of the header of queries and errors alike, bytes.
pub const HEADER_LEN: usize = 8;

/// Types of ICMP messages.
pub mod v4 {
    /// Echo reply (RFC 792).
    pub const ECHO_REPLY: u8 = 0;
    /// Destination unreachable (RFC 792).
    pub const UNREACHABLE: u8 = 3;
    /// Source quench (deprecated by RFC 6633).
    pub const SOURCE_QUENCH: u8 = 4;
    /// Redirect (RFC 792).
    pub const REDIRECT: u8 = 5;
    /// Echo request (RFC 792).
    pub const ECHO_REQUEST: u8 = 8;
    /// Time exceeded (RFC 792).
    pub const TIME_EXCEEDED: u8 = 11;
    /// Parameter problem (RFC 792).
    pub const PARAMETER_PROBLEM: u8 = 12;
}

/// Types of ICMPv6 messages.
pub mod v6 {
    /// Destination unreachable (RFC 4443 section 3.1).
    pub const UNREACHABLE: u8 = 1;
    /// Packet too big (RFC 4443 section 3.2).
    pub const TOO_BIG: u8 = 2;
    /// Time exceeded (RFC 4443 section 3.3).
    pub const TIME_EXCEEDED: u8 = 3;
    /// Parameter problem (RFC 4443 section 3.4).
    pub const PARAMETER_PROBLEM: u8 = 4;
    /// First type that is not that of an error (RFC 4443 section 2.1).
    pub const FIRST_INFORMATIONAL: u8 = 128;
    /// Echo request (RFC 4443 section 4.1).
    pub const ECHO_REQUEST: u8 = 128;
    /// Echo reply (RFC 4443 section 4.2).
    pub const ECHO_REPLY: u8 = 129;
    /// Redirect (RFC 4861 section 4.5).
    pub const REDIRECT: u8 = 137;
}

/// Reasons of "destination unreachable" that the engine sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unreachable {
    /// No route to the network.
    Net,
    /// The host is unreachable.
    Host,
    /// No socket is bound to the port.
    Port,
    /// Administratively prohibited (RFC 1812 section 5.2.7.1, RFC 4443 section 3.1).
    Prohibited,
}

impl Unreachable {
    /// Returns the code of the message.
    pub const fn code(self, version: Version) -> u8 {
        match (self, version) {
            (Self::Net, _) => 0,
            (Self::Host, Version::V4) => 1,
            (Self::Host, Version::V6) => 3,
            (Self::Port, Version::V4) => 3,
            (Self::Port, Version::V6) => 4,
            (Self::Prohibited, Version::V4) => 13,
            (Self::Prohibited, Version::V6) => 1,
        }
    }
}

/// Code of ICMP's "destination unreachable": the packet is larger than the next link's MTU, and DF
/// is set.
pub const FRAGMENTATION_NEEDED: u8 = 4;

/// A parsed ICMP or ICMPv6 header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Icmp {
    /// Version of the packet: types mean other things in ICMPv6.
    pub version: Version,
    /// Type of the message.
    pub kind: u8,
    /// Code of the message.
    pub code: u8,
    /// Identifier of an echo request or reply; without meaning in other messages.
    pub id: u16,
}

impl Icmp {
    /// Parses a header.
    ///
    /// # Errors
    /// When the message is shorter than a header.
    pub fn parse(version: Version, l4: &[u8]) -> Result<Self, Malformed> {
        let h: &[u8; HEADER_LEN] = l4.first_chunk().ok_or(Malformed)?;
        Ok(Self {
            version,
            kind: h[0],
            code: h[1],
            id: u16::from_be_bytes([h[4], h[5]]),
        })
    }

    /// Whether the message is an echo request.
    pub fn is_echo_request(&self) -> bool {
        self.kind == echo_request(self.version)
    }

    /// Whether the message is an echo request or reply, which belongs to a flow.
    pub fn is_echo(&self) -> bool {
        self.is_echo_request() || self.kind == echo_reply(self.version)
    }

    /// Whether the message is an error, of whatever type: about one no error is sent.
    pub fn is_error(&self) -> bool {
        match self.version {
            Version::V4 => {
                use v4::{PARAMETER_PROBLEM, REDIRECT, SOURCE_QUENCH, TIME_EXCEEDED, UNREACHABLE};
                matches!(
                    self.kind,
                    UNREACHABLE | SOURCE_QUENCH | REDIRECT | TIME_EXCEEDED | PARAMETER_PROBLEM
                )
            }
            Version::V6 => self.kind < v6::FIRST_INFORMATIONAL || self.kind == v6::REDIRECT,
        }
    }

    /// Whether the message is an error of a type with a meaning beyond its link, so that it is
    /// translated.
    pub fn is_translated_error(&self) -> bool {
        match self.version {
            Version::V4 => self.is_error() && self.kind != v4::REDIRECT,
            Version::V6 => (v6::UNREACHABLE..=v6::PARAMETER_PROBLEM).contains(&self.kind),
        }
    }

    /// Whether the checksum covers a pseudo-header (RFC 4443 section 2.3).
    pub fn has_pseudo_header(&self) -> bool {
        self.version == Version::V6
    }
}

/// Returns the type of an echo request.
pub const fn echo_request(version: Version) -> u8 {
    match version {
        Version::V4 => v4::ECHO_REQUEST,
        Version::V6 => v6::ECHO_REQUEST,
    }
}

/// Returns the type of an echo reply.
pub const fn echo_reply(version: Version) -> u8 {
    match version {
        Version::V4 => v4::ECHO_REPLY,
        Version::V6 => v6::ECHO_REPLY,
    }
}
