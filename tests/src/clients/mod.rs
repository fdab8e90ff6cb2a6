//! Clients, to be called inside a guest: `guest.run(|| tcp::connect_close(address, timeout))`.

pub mod api;
pub mod dns;
pub mod http;
pub mod icmp;
pub mod stun;
pub mod tcp;
pub mod udp;

/// An ICMP error that came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IcmpError {
    /// Type (RFC 792): 3 is destination unreachable, 11 time exceeded.
    pub kind: u8,
    /// Code: 3/13 is "administratively prohibited".
    pub code: u8,
}

impl IcmpError {
    /// Communication administratively prohibited (RFC 1812, 5.2.7.1).
    pub const PROHIBITED: IcmpError = IcmpError { kind: 3, code: 13 };
}
