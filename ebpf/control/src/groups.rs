//! Frames to groups on an uplink.
//!
//! Neighbours ask for an address by a frame to a group that the address gives (RFC 4861 section 2.3).
//! A network card passes only groups that somebody has joined, and no socket has guests' addresses.
//! So where neighbours are to be answered for guests, the card passes all groups: as long as a packet
//! socket asks for it, and with no setting of the device's own.
//!
//! A switch that follows listeners (MLD snooping) passes the frames to a group only where somebody has said
//! that he listens. So the groups of guests' addresses are joined ([`SolicitedGroups`]): the kernel sends the
//! reports (RFC 3810), and answers queries.
use std::{
    collections::{HashMap, hash_map::Entry},
    io, mem,
    net::{Ipv6Addr, UdpSocket},
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
};

use slipgate_abi::{IfIndex, Ip6};

use crate::{Error, Result};

/// Has links pass frames to all groups, until it is dropped. It receives none itself.
#[derive(Debug)]
pub struct AllGroups {
    socket: OwnedFd,
}

impl AllGroups {
    /// Makes one for no link. It needs `CAP_NET_RAW`, which [`AllGroups::pass_on`] does not.
    ///
    /// # Errors
    /// The kernel refuses a packet socket.
    pub fn open() -> Result<Self> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
        // SAFETY: no pointers. Protocol 0: it receives nothing.
        let socket = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
        if socket < 0 {
            return Err(failed("open a packet socket".to_owned()));
        }
        // SAFETY: a descriptor that is nobody else's.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        Ok(Self { socket })
    }

    /// Has a link pass frames to all groups. To ask again changes nothing that lasts longer.
    ///
    /// # Errors
    /// The link is gone.
    pub fn pass_on(&self, link: IfIndex) -> Result<()> {
        // SAFETY: integers and octets, for which zero is valid.
        let mut request: libc::packet_mreq = unsafe { mem::zeroed() };
        request.mr_ifindex = link.get() as libc::c_int;
        request.mr_type = libc::PACKET_MR_ALLMULTI as libc::c_ushort;
        // SAFETY: the option's struct and its size.
        let done = unsafe {
            libc::setsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_ADD_MEMBERSHIP,
                (&raw const request).cast(),
                mem::size_of_val(&request) as libc::socklen_t,
            )
        };
        match done {
            0 => Ok(()),
            _ => Err(failed(format!("have link {link} pass all groups"))),
        }
    }
}

/// The groups by which neighbours ask for addresses, joined on their links until it is dropped. It
/// receives none of the packets.
#[derive(Debug, Default)]
pub struct SolicitedGroups {
    /// Each has as many groups as the kernel lets a socket have (`net.core.optmem_max`).
    sockets: Vec<UdpSocket>,
    joined: HashMap<(IfIndex, Ipv6Addr), Joined>,
}

#[derive(Debug)]
struct Joined {
    socket: usize,
    /// Number of addresses: the group has 24 bits of an address.
    addresses: u32,
}

impl SolicitedGroups {
    /// Joins the group of an address on a link.
    ///
    /// # Errors
    /// The link is gone or has no IPv6, or there is no memory or descriptor.
    pub fn join(&mut self, link: IfIndex, address: Ipv6Addr) -> Result<()> {
        let group = solicited_node(address);
        match self.joined.entry((link, group)) {
            Entry::Occupied(mut joined) => joined.get_mut().addresses += 1,
            Entry::Vacant(new) => {
                let socket = join_by_one(&mut self.sockets, link, group)
                    .map_err(|answer| failed_by(format!("join {group} on link {link}"), answer))?;
                new.insert(Joined {
                    socket,
                    addresses: 1,
                });
            }
        }
        Ok(())
    }

    /// Leaves the group of an address that was joined for it, if no other address is of that group.
    pub fn leave(&mut self, link: IfIndex, address: Ipv6Addr) {
        let group = solicited_node(address);
        let Entry::Occupied(mut joined) = self.joined.entry((link, group)) else {
            return;
        };
        joined.get_mut().addresses -= 1;
        if joined.get().addresses == 0 {
            let Joined { socket, .. } = joined.remove();
            // Of a link that is gone the kernel has left it already.
            let _ = self.sockets[socket].leave_multicast_v6(&group, link.get());
        }
    }
}

/// Joins a group by the first socket that may have more, or by a new one. Returns its index.
fn join_by_one(sockets: &mut Vec<UdpSocket>, link: IfIndex, group: Ipv6Addr) -> io::Result<usize> {
    for (at, socket) in sockets.iter().enumerate().rev() {
        match socket.join_multicast_v6(&group, link.get()) {
            Ok(()) => return Ok(at),
            Err(full) if is_full(&full) => {}
            Err(error) => return Err(error),
        }
    }
    let socket = unbound_socket()?;
    socket.join_multicast_v6(&group, link.get())?;
    sockets.push(socket);
    Ok(sockets.len() - 1)
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::ENOBUFS))
}

/// Returns a socket that has no port, and so receives nothing.
fn unbound_socket() -> io::Result<UdpSocket> {
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC;
    // SAFETY: no pointers.
    let socket = unsafe { libc::socket(libc::AF_INET6, kind, 0) };
    if socket < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a descriptor that is nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(socket) }.into())
}

/// Group to which neighbours send solicitations for an address (RFC 4291 section 2.7.1).
fn solicited_node(address: Ipv6Addr) -> Ipv6Addr {
    Ip6::from(address).solicited_node().into()
}

fn failed_by(what: String, answer: io::Error) -> Error {
    Error::Os { what, answer }
}

fn failed(what: String) -> Error {
    Error::Os {
        what,
        answer: io::Error::last_os_error(),
    }
}

#[cfg(test)]
#[path = "groups_test.rs"]
mod tests;
