//! Sockets of the host for flows, made before they are needed.
//!
//! # Theory of operation
//! A flow that the host has no socket for must be refused before it is admitted, visibly, and must not
//! take from live ones. So admission asks first ([`HostSockets::lacks`]): a socket of the flow's kind is
//! made then and kept, and the flow takes it when its first packet leaves. That makes no more system
//! calls than to make it later, and one socket more of each kind. When the thread has nothing else to do,
//! the next one of a kind that was taken is made ([`HostSockets::make_next`]), so that a first packet does
//! not wait for that.
//!
//! The host may also refuse a socket its translated port: another process has bound it since, or the
//! connection before is in TIME-WAIT, which is the host's where the guest closed first. Linux passes
//! over a TIME-WAIT only if that connection had timestamps. So once a flow is in the tables, and before
//! its first packet leaves, its socket is bound and connected ([`HostSockets::claim`]), and if the port
//! is busy the flow gets another one. The first packet takes the socket ([`HostSockets::open`]). That
//! makes no more system calls, either.
//!
//! Where several flows have one translated port ([`crate::flow::mappings`]), a socket more has that port,
//! which is connected to nobody ([`shared`]): it gets what comes from others than the flows' peers.
//!
//! The kernel gives the lowest number that is free. A number close to the limit therefore says that
//! nearly all are used, by whatever: the last [`KEPT`] are not for flows, but for relayed connections,
//! resolvers, a guest that connects again, and captures. Sockets that are only kept ready for relays
//! ([`crate::relay::NamespaceSockets`]) are none of the last ones either.
use std::{
    cell::{Cell, RefCell, RefMut},
    collections::VecDeque,
    io,
    net::IpAddr,
    os::fd::{AsRawFd, OwnedFd},
};

use nix::{
    errno::Errno,
    sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, setsockopt, socket, sockopt},
};
use slipgate_abi::Protocol;
use slipgate_model::FlowTuple;

use crate::inet::keep_urgent_in_place;

mod opening;
mod shared;

pub(crate) use self::{opening::Busy, shared::is_of_strangers};
use self::{
    opening::{NotOpened, open},
    shared::SharedPorts,
};

/// Descriptors that flows leave for other things.
pub const KEPT: u64 = 64;

/// Kinds of sockets: TCP, UDP, ICMP, and UDP for a shared port, each of two families.
const KINDS: usize = 8;
/// The last of these, in IPv4.
const STRANGERS: usize = 3;
/// From a kind in IPv4 to that in IPv6.
const IPV6: usize = 4;
/// Sockets at most that were claimed and that no packet has taken yet.
const MOST_CLAIMED: usize = 16;

/// The host's sockets for flows.
#[derive(Debug)]
pub struct HostSockets {
    /// Descriptors that the process may have.
    most: u64,
    /// One of each kind at most, ready.
    made: RefCell<[Option<OwnedFd>; KINDS]>,
    /// What was taken last.
    taken: Cell<Option<(IpAddr, Protocol)>>,
    /// Sockets of flows whose first packet has not left, or why they have none. The oldest is first.
    claimed: RefCell<VecDeque<(FlowTuple, io::Result<OwnedFd>)>>,
    /// Sockets whose connections are over, to be closed when there is time.
    closing: RefCell<Vec<OwnedFd>>,
    /// Ports that several flows have.
    pub(crate) shared: SharedPorts,
    /// What the host says to each claim in place of making a socket.
    #[cfg(test)]
    pub(crate) refuses: Cell<Option<Busy>>,
}

impl HostSockets {
    /// `most`: descriptors that the process may have (`RLIMIT_NOFILE`).
    pub fn new(most: u64) -> Self {
        Self {
            most,
            made: RefCell::new([const { None }; KINDS]),
            taken: Cell::new(None),
            claimed: RefCell::default(),
            closing: RefCell::default(),
            shared: SharedPorts::default(),
            #[cfg(test)]
            refuses: Cell::default(),
        }
    }

    /// Makes the socket of a flow whose first packet is about to leave, for [`HostSockets::open`]. Any
    /// error but that of a busy port is kept too: the packet's sender is told of it.
    ///
    /// # Errors
    /// The host does not let the flow have its translated port toward the peer.
    pub(crate) fn claim(&self, tuple: &FlowTuple) -> Result<(), Busy> {
        #[cfg(test)]
        if let Some(busy) = self.refuses.get() {
            return Err(busy);
        }
        let mut opened = open(tuple, self);
        if matches!(opened, Err(NotOpened::Busy(Busy::Waits, _))) && self.close_all() {
            // It may have been one of these.
            opened = open(tuple, self);
        }
        let opened = match opened {
            Err(NotOpened::Busy(busy, _)) => return Err(busy),
            opened => opened.map_err(io::Error::from),
        };
        let mut claimed = self.claimed.borrow_mut();
        if claimed.len() == MOST_CLAIMED {
            claimed.pop_front();
        }
        claimed.push_back((*tuple, opened));
        Ok(())
    }

    /// Takes the socket that was claimed for a flow, or why there is none.
    pub(crate) fn take_claimed(&self, tuple: &FlowTuple) -> Option<io::Result<OwnedFd>> {
        let mut claimed = self.claimed.borrow_mut();
        let at = claimed.iter().rposition(|(of, _)| of == tuple)?;
        claimed.remove(at).map(|(_, opened)| opened)
    }

    /// Returns the socket of a flow: the one that was claimed for it, or one that is made now.
    ///
    /// # Errors
    /// The host refuses, or no packet may go there.
    pub(crate) fn open(&self, tuple: &FlowTuple) -> io::Result<OwnedFd> {
        let claimed = self.take_claimed(tuple);
        claimed.unwrap_or_else(|| Ok(open(tuple, self)?))
    }

    /// Gives a flow this socket, as if it had been claimed.
    #[cfg(test)]
    pub(crate) fn put_claimed(&self, tuple: FlowTuple, socket: OwnedFd) {
        self.claimed.borrow_mut().push_back((tuple, Ok(socket)));
    }

    /// Closes what was claimed and not taken: the first packets did not leave.
    pub(crate) fn give_up_claims(&self) {
        self.claimed.borrow_mut().clear();
    }

    /// Sockets that are to be closed when there is time.
    pub(crate) fn closing(&self) -> RefMut<'_, Vec<OwnedFd>> {
        self.closing.borrow_mut()
    }

    /// Closes these now. Returns whether there were any.
    pub(crate) fn close_all(&self) -> bool {
        let mut closing = self.closing();
        let were_some = !closing.is_empty();
        closing.clear();
        were_some
    }

    /// Whether the host has no socket for one more flow to `remote`, since it is out of descriptors or
    /// memory. What else it may refuse, the flow's first packet shows.
    pub fn lacks(&self, remote: IpAddr, protocol: Protocol) -> bool {
        let Ok(mut made) = self.made.try_borrow_mut() else {
            return false;
        };
        let mut lacks = |kind: usize| {
            let place = &mut made[kind];
            if place.is_some() {
                return false;
            }
            match self.make(remote, protocol) {
                Ok(socket) => {
                    *place = Some(socket);
                    false
                }
                Err(error) => is_shortage(&error),
            }
        };
        // The flow may be the first of its port, which then has a socket for strangers besides.
        let is_shared = protocol == Protocol::Udp && self.shared.has_any();
        lacks(kind_of(remote, protocol)) || (is_shared && lacks(strangers_of(remote)))
    }

    /// Takes a socket of this kind, which does not block.
    ///
    /// # Errors
    /// The host refuses to make one.
    pub(crate) fn take(&self, remote: IpAddr, protocol: Protocol) -> io::Result<OwnedFd> {
        self.taken.set(Some((remote, protocol)));
        let made = self.made.try_borrow_mut().ok();
        let made = made.and_then(|mut made| made[kind_of(remote, protocol)].take());
        made.map_or_else(|| self.make(remote, protocol), Ok)
    }

    /// Makes the next socket of the kind that was taken last.
    pub(crate) fn make_next(&self) {
        if let Some((remote, protocol)) = self.taken.take() {
            // Why there is none, admission finds out.
            self.lacks(remote, protocol);
        }
    }

    fn make(&self, remote: IpAddr, protocol: Protocol) -> io::Result<OwnedFd> {
        let (family, ping) = match remote {
            IpAddr::V4(_) => (AddressFamily::Inet, SockProtocol::Icmp),
            IpAddr::V6(_) => (AddressFamily::Inet6, SockProtocol::IcmpV6),
        };
        let (kind, protocol) = match protocol {
            Protocol::Tcp => (SockType::Stream, None),
            Protocol::Icmp | Protocol::Icmpv6 => (SockType::Datagram, Some(ping)),
            Protocol::Udp => (SockType::Datagram, None),
        };
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let socket = socket(family, kind, flags, protocol)?;
        if socket.as_raw_fd() as u64 >= self.most.saturating_sub(KEPT) {
            return Err(Errno::EMFILE.into());
        }
        if remote.is_ipv6() {
            // The kernel refuses IPv4 addresses in IPv6 form then, too.
            setsockopt(&socket, sockopt::Ipv6V6Only, &true)?;
        }
        if kind == SockType::Stream {
            keep_urgent_in_place(&socket);
        }
        // A port is used for many destinations at once, each with a socket of its own.
        setsockopt(&socket, sockopt::ReuseAddr, &true)?;
        Ok(socket)
    }

    /// Has a port that is shared be held by a socket that is connected to nobody, before a flow's own is bound
    /// to it.
    ///
    /// # Errors
    /// Another socket of the host has the port, or there is no descriptor left.
    fn hold_shared(&self, tuple: &FlowTuple) -> Result<(), NotOpened> {
        if self.shared.is_held(tuple) {
            return Ok(());
        }
        let made = self.made.borrow_mut()[strangers_of(tuple.remote)].take();
        let socket = made.map_or_else(|| self.make(tuple.remote, Protocol::Udp), Ok);
        self.shared.hold(tuple, socket.map_err(NotOpened::Refused)?)
    }
}

fn strangers_of(remote: IpAddr) -> usize {
    STRANGERS + IPV6 * usize::from(remote.is_ipv6())
}

fn kind_of(remote: IpAddr, protocol: Protocol) -> usize {
    let of_family = match protocol {
        Protocol::Tcp => 0,
        Protocol::Udp => 1,
        Protocol::Icmp | Protocol::Icmpv6 => 2,
    };
    of_family + IPV6 * usize::from(remote.is_ipv6())
}

/// Whether an error is about what the host is short of, and not about this socket.
fn is_shortage(error: &io::Error) -> bool {
    use nix::libc::{EMFILE, ENFILE, ENOBUFS, ENOMEM};
    matches!(
        error.raw_os_error(),
        Some(EMFILE | ENFILE | ENOBUFS | ENOMEM)
    )
}

#[cfg(test)]
#[path = "host_sockets_test.rs"]
mod tests;
