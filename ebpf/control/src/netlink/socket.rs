//! Route netlink sockets: requests with their answers, dumps, and notifications.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkBuffer, NetlinkHeader, NetlinkMessage,
    NetlinkPayload,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

use slipgate_abi::IfIndex;

use super::raw::{attributes, split};
use crate::{Error, Result};

/// Socket for requests, one at a time.
#[derive(Debug)]
pub(crate) struct Requests {
    socket: Socket,
    sequence: u32,
}

impl Requests {
    /// Opens a socket in the calling thread's network namespace.
    pub(crate) fn open() -> Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE).map_err(Error::os("open a netlink socket"))?;
        socket
            .bind_auto()
            .and_then(|_| socket.connect(&SocketAddr::new(0, 0)))
            .map_err(Error::os("bind a netlink socket"))?;
        Ok(Self {
            socket,
            sequence: 0,
        })
    }

    /// Sends a request and waits for its acknowledgement.
    pub(crate) fn send(
        &mut self,
        request: RouteNetlinkMessage,
        flags: u16,
        what: &str,
    ) -> Result<()> {
        self.exchange(request, flags | NLM_F_ACK, what, |_| {})
    }

    /// Sends a question about one thing, and calls `each` with each message of the answer.
    pub(crate) fn ask(
        &mut self,
        request: RouteNetlinkMessage,
        what: &str,
        mut each: impl FnMut(RouteNetlinkMessage),
    ) -> Result<()> {
        self.exchange(request, NLM_F_ACK, what, &mut each)
    }

    /// Sends a dump request, and calls `each` with each message of the answer.
    pub(crate) fn dump(
        &mut self,
        request: RouteNetlinkMessage,
        what: &str,
        mut each: impl FnMut(RouteNetlinkMessage),
    ) -> Result<()> {
        self.exchange(request, NLM_F_DUMP, what, &mut each)
    }

    fn exchange(
        &mut self,
        request: RouteNetlinkMessage,
        flags: u16,
        what: &str,
        mut each: impl FnMut(RouteNetlinkMessage),
    ) -> Result<()> {
        self.sequence += 1;
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::from(request));
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        self.socket.send(&bytes, 0).map_err(Error::os(what))?;
        loop {
            let (datagram, _) = self.socket.recv_from_full().map_err(Error::os(what))?;
            for message in messages(&datagram) {
                let message = message?;
                if message.header.sequence_number != self.sequence {
                    continue;
                }
                match message.payload {
                    NetlinkPayload::Done(_) => return Ok(()),
                    NetlinkPayload::Error(answer) => {
                        return match answer.code {
                            None => Ok(()),
                            Some(_) => Err(Error::os(what)(answer.to_io())),
                        };
                    }
                    NetlinkPayload::InnerMessage(inner) => each(inner),
                    _ => {}
                }
            }
        }
    }
}

/// Socket for notifications of multicast groups.
#[derive(Debug)]
pub(crate) struct Notices {
    socket: Socket,
}

/// Result of a receive call.
pub(crate) enum Notice {
    /// Notification of a change.
    Message(RouteNetlinkMessage),
    /// Forwarding of IPv4 packets was turned on for this device.
    Forwarding(IfIndex),
    /// Notifications were lost (ENOBUFS): the whole state must be requested again.
    Overrun,
}

impl Notices {
    /// Joins groups (`RTNLGRP_*`) in the calling thread's network namespace.
    pub(crate) fn join(groups: &[u32]) -> Result<Self> {
        let failed = || Error::os("follow changes by netlink");
        let mut socket = Socket::new(NETLINK_ROUTE).map_err(failed())?;
        socket.bind_auto().map_err(failed())?;
        socket.set_non_blocking(true).map_err(failed())?;
        // A router's full table changes in bursts. Without the capability the kernel's cap holds.
        let _ = socket.set_rx_buf_sz(4 << 20);
        for group in groups {
            socket.add_membership(*group).map_err(failed())?;
        }
        Ok(Self { socket })
    }

    /// Reads all waiting notifications without blocking.
    pub(crate) fn drain(&self, mut each: impl FnMut(Notice)) -> Result<()> {
        loop {
            match self.socket.recv_from_full() {
                Ok((datagram, _)) => {
                    for ifindex in split(&datagram).filter_map(|message| forwards(&message)) {
                        each(Notice::Forwarding(ifindex));
                    }
                    for message in messages(&datagram) {
                        // A message that the crate cannot parse is not about the network state.
                        if let Ok(NetlinkMessage {
                            payload: NetlinkPayload::InnerMessage(inner),
                            ..
                        }) = message
                        {
                            each(Notice::Message(inner));
                        }
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {
                    each(Notice::Overrun);
                }
                Err(error) => return Err(Error::os("read netlink notices")(error)),
            }
        }
    }
}

impl AsFd for Notices {
    fn as_fd(&self) -> BorrowedFd<'_> {
        let fd: RawFd = self.socket.as_raw_fd();
        // SAFETY: the socket keeps it open as long as `self` lives.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

/// Returns the device for which a message says that it forwards IPv4 packets (`RTM_NEWNETCONF` of
/// `linux/netconf.h`, which the route crate does not know).
fn forwards(message: &NetlinkBuffer<&[u8]>) -> Option<IfIndex> {
    const RTM_NEWNETCONF: u16 = 80;
    const NETCONFA_IFINDEX: u16 = 1;
    const NETCONFA_FORWARDING: u16 = 2;
    /// `struct netconfmsg`, one byte, padded.
    const HEADER_BYTES: usize = 4;
    if message.message_type() != RTM_NEWNETCONF {
        return None;
    }
    let (mut ifindex, mut is_on) = (0, false);
    for (kind, value) in attributes(message.payload().get(HEADER_BYTES..)?) {
        let value = value
            .first_chunk()
            .map_or(0, |value| i32::from_ne_bytes(*value));
        match kind {
            NETCONFA_IFINDEX => ifindex = value,
            NETCONFA_FORWARDING => is_on = value != 0,
            _ => {}
        }
    }
    // `all` and `default` have negative numbers.
    let ifindex = u32::try_from(ifindex).ok().filter(|_| is_on)?;
    Some(IfIndex::new(ifindex))
}

/// Returns the messages of a datagram.
fn messages(datagram: &[u8]) -> impl Iterator<Item = Result<NetlinkMessage<RouteNetlinkMessage>>> {
    split(datagram).map(|message| {
        let read = NetlinkMessage::deserialize(message.into_inner());
        read.map_err(|error| Error::Netlink(error.to_string()))
    })
}
