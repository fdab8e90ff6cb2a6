//! Clients, to be called inside a guest: `guest.run(|| tcp::connect_close(address, timeout))`.

pub mod api;
pub mod dns;
pub mod http;
pub mod icmp;
pub mod nat_discovery;
pub mod stun;
pub mod tcp;
pub mod udp;

/// An ICMP error that came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IcmpError {
    /// Type (RFC 792, or RFC 4443 for ICMPv6): 3 is destination unreachable, 11 time exceeded.
    pub kind: u8,
    /// Code: 3/13 is "administratively prohibited".
    pub code: u8,
}

impl IcmpError {
    /// Communication administratively prohibited (RFC 1812, 5.2.7.1).
    pub const PROHIBITED: IcmpError = IcmpError { kind: 3, code: 13 };
    /// The same of ICMPv6 (RFC 4443, 3.1).
    pub const PROHIBITED6: IcmpError = IcmpError { kind: 1, code: 1 };
}
