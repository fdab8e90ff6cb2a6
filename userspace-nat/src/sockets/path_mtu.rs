//! What a datagram longer than the way to its peer carries becomes: fragments, or an error.
//!
//! # Theory of operation
//! A router fragments an IPv4 datagram without DF where a link needs it, and answers any other one with
//! the link's MTU (RFC 4787 REQ-13). Here the host's kernel knows the MTU of a socket's way: that of its
//! link, of its route, and what routers have told (RFC 1191, RFC 8201). So each socket is set to what
//! the guest's datagram asks for (`IP_MTU_DISCOVER`, ip(7); `IPV6_MTU_DISCOVER`, ipv6(7)), and again when
//! the next one asks for the other. A datagram that is too long is refused by `EMSGSIZE`, with the MTU in
//! the socket's error queue. It is counted as `too_big` in place of its flow, and the gateway tells the
//! guest. What a router behind tells comes as any message of the network ([`super::errors`]), and the
//! kernel keeps it in mind.
//!
//! A datagram that came in fragments may leave in fragments, of IPv6 too: the socket is its sender.
//!
//! Datagrams that leave together (`UDP_SEGMENT`) are refused together. They leave one by one then, so
//! that only those are lost that are too long.
use std::{io, os::fd::OwnedFd};

use nix::{
    libc,
    sys::socket::{getsockopt, setsockopt, sockopt},
};
use slipgate_abi::{DropReason, Protocol};
use slipgate_model::FlowTuple;

use super::{
    Sockets, ToGuest,
    errors::{MOST_QUOTED, Message},
};
use crate::{
    packet::{Version, transport::UDP_HEADER_LEN},
    reply::IcmpError,
};

/// `nix` has no names for these options.
mod option {
    use nix::{
        getsockopt_impl, libc, setsockopt_impl,
        sys::socket::sockopt::{GetStruct, SetStruct},
    };

    #[derive(Clone, Copy, Debug)]
    pub(super) struct Ipv4MtuDiscover;
    setsockopt_impl!(
        Ipv4MtuDiscover,
        libc::IPPROTO_IP,
        libc::IP_MTU_DISCOVER,
        libc::c_int,
        SetStruct<'_, libc::c_int>
    );

    #[derive(Clone, Copy, Debug)]
    pub(super) struct Ipv6MtuDiscover;
    setsockopt_impl!(
        Ipv6MtuDiscover,
        libc::IPPROTO_IPV6,
        libc::IPV6_MTU_DISCOVER,
        libc::c_int,
        SetStruct<'_, libc::c_int>
    );

    #[derive(Clone, Copy, Debug)]
    pub(super) struct Ipv6Mtu;
    getsockopt_impl!(
        Ipv6Mtu,
        libc::IPPROTO_IPV6,
        libc::IPV6_MTU,
        libc::c_int,
        GetStruct<libc::c_int>
    );
}

/// How a datagram leaves that is longer than the way to its peer carries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum IfTooLong {
    /// Not at all: its sender is told.
    Refused,
    /// In fragments.
    InFragments,
}

impl IfTooLong {
    /// Value of the option of a socket of this family.
    fn value(self, version: Version) -> libc::c_int {
        match (self, version) {
            (Self::Refused, Version::V4) => libc::IP_PMTUDISC_DO,
            (Self::Refused, Version::V6) => libc::IPV6_PMTUDISC_DO,
            // With `WANT` those that a link carries would have DF.
            (Self::InFragments, Version::V4) => libc::IP_PMTUDISC_DONT,
            (Self::InFragments, Version::V6) => libc::IPV6_PMTUDISC_WANT,
        }
    }
}

/// What a socket was set to; `None`: nothing, as it was made.
pub(super) type Setting = Option<IfTooLong>;

/// Sets a socket to what a packet of `len` bytes asks for, if it makes a difference.
pub(super) fn set(
    socket: &OwnedFd,
    setting: &mut Setting,
    wanted: IfTooLong,
    (version, len): (Version, usize),
) {
    // A socket as it is made sends what every way carries with DF.
    let is_short = len <= version.least_mtu() as usize;
    let is_as_made = setting.is_none() && wanted == IfTooLong::Refused && is_short;
    if *setting == Some(wanted) || is_as_made {
        return;
    }
    let value = wanted.value(version);
    let done = match version {
        Version::V4 => setsockopt(socket, option::Ipv4MtuDiscover, &value),
        Version::V6 => setsockopt(socket, option::Ipv6MtuDiscover, &value),
    };
    if done.is_ok() {
        *setting = Some(wanted);
    }
}

/// Returns the MTU of the way that the socket's last datagram would have taken.
pub(super) fn mtu_of(socket: &OwnedFd, version: Version) -> Option<u32> {
    let mtu = match version {
        Version::V4 => getsockopt(socket, sockopt::IpMtu),
        Version::V6 => getsockopt(socket, option::Ipv6Mtu),
    };
    u32::try_from(mtu.ok()?).ok()
}

/// Whether a send was refused because the datagram is too long for its way.
pub(super) fn is_too_long(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EMSGSIZE)
}

/// Length of a flow's packet with this payload, bytes.
pub(super) fn packet_len(tuple: &FlowTuple, payload_len: usize) -> usize {
    let is_udp = tuple.protocol == Protocol::Udp as u8;
    let l4 = if is_udp { UDP_HEADER_LEN } else { 0 };
    Version::of(tuple.remote).header_len() + l4 + payload_len
}

impl Sockets {
    /// Counts a guest's datagram that is too long for its way, and unless `is_told` tells the guest of the
    /// way's MTU if it is known. Returns whether it has been told.
    pub(super) fn too_long(
        &mut self,
        tuple: &FlowTuple,
        payload: &[u8],
        (mtu, is_told): (Option<u32>, bool),
        guest: &mut impl ToGuest,
        now_ns: u64,
    ) -> bool {
        guest.not_sent(tuple, DropReason::TooBig, packet_len(tuple, payload.len()));
        if is_told {
            return true;
        }
        let version = Version::of(tuple.remote);
        // No MTU: the kernel has forgotten the way meanwhile, and the next datagram asks again.
        let (Some(mtu), Some(from)) = (mtu, guest.gateway(version)) else {
            return false;
        };
        // As all that the gateway answers (RFC 1812 section 4.3.2.8, RFC 4443 section 2.4).
        if !self.told.take(now_ns) {
            return false;
        }
        let message = Message {
            from,
            kind: IcmpError::TooBig(mtu).header(version),
            payload: payload[..payload.len().min(MOST_QUOTED)].to_vec(),
        };
        self.tell(tuple, &message, guest);
        true
    }
}

#[cfg(test)]
#[path = "path_mtu_test.rs"]
mod tests;
