//! The ICMP header (RFC 792).
use super::Malformed;

/// Length of the header of queries and errors alike, bytes.
pub const HEADER_LEN: usize = 8;

/// Type of an echo reply.
pub const ECHO_REPLY: u8 = 0;
/// Type of "destination unreachable".
pub const UNREACHABLE: u8 = 3;
/// Source quench (deprecated by RFC 6633).
pub const SOURCE_QUENCH: u8 = 4;
/// Type of a redirect.
pub const REDIRECT: u8 = 5;
/// Type of an echo request.
pub const ECHO_REQUEST: u8 = 8;
/// Type of "time exceeded".
pub const TIME_EXCEEDED: u8 = 11;
/// Type of "parameter problem".
pub const PARAMETER_PROBLEM: u8 = 12;

/// Codes of [`UNREACHABLE`] that the engine sends.
#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unreachable {
    /// No route to the network.
    Net = 0,
    /// The host is unreachable.
    Host = 1,
    /// No socket is bound to the port.
    Port = 3,
    /// The packet is larger than the next link's MTU, and DF is set.
    FragmentationNeeded = 4,
    /// Administratively prohibited (RFC 1812 section 5.2.7.1).
    Prohibited = 13,
}

/// A parsed ICMP header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Icmp {
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
    pub fn parse(l4: &[u8]) -> Result<Self, Malformed> {
        let h: &[u8; HEADER_LEN] = l4.first_chunk().ok_or(Malformed)?;
        Ok(Self {
            kind: h[0],
            code: h[1],
            id: u16::from_be_bytes([h[4], h[5]]),
        })
    }

    /// Whether the message is an echo request or reply, which belongs to a flow.
    pub fn is_echo(&self) -> bool {
        matches!(self.kind, ECHO_REQUEST | ECHO_REPLY)
    }

    /// Whether the message is an error, which quotes the packet it is about.
    pub fn is_error(&self) -> bool {
        matches!(
            self.kind,
            UNREACHABLE | SOURCE_QUENCH | REDIRECT | TIME_EXCEEDED | PARAMETER_PROBLEM
        )
    }
}
