//! Notices of changed rules of nftables, and so of iptables-nft. Of legacy iptables the kernel gives
//! none.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
};

use netlink_sys::{Socket, protocols::NETLINK_NETFILTER};

use crate::netlink::raw;

/// Watch of the rules that others make or remove. Poll its descriptor, then call
/// [`RuleWatch::take`].
#[derive(Debug)]
pub struct RuleWatch {
    socket: Socket,
}

impl RuleWatch {
    /// Opens a watch of the calling thread's network namespace.
    ///
    /// # Errors
    /// The kernel has no nfnetlink, or the caller lacks CAP_NET_ADMIN.
    pub fn open() -> io::Result<Self> {
        /// Multicast group `NFNLGRP_NFTABLES` of `linux/netfilter/nfnetlink.h`.
        const NFTABLES: u32 = 7;
        let mut socket = Socket::new(NETLINK_NETFILTER)?;
        socket.bind_auto()?;
        socket.set_non_blocking(true)?;
        socket.add_membership(NFTABLES)?;
        Ok(Self { socket })
    }

    /// Reads the notices without blocking. Returns whether a table, chain or rule changed, or may have:
    /// notices may be lost. Changed elements of sets are not meant.
    ///
    /// # Errors
    /// The notices cannot be read.
    pub fn take(&self) -> io::Result<bool> {
        let mut changed = false;
        loop {
            match self.socket.recv_from_full() {
                Ok((datagram, _)) => {
                    let mut kinds = raw::split(&datagram).map(|message| message.message_type());
                    changed = changed || kinds.any(is_of_rules);
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(changed),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => changed = true,
                Err(e) => return Err(e),
            }
        }
    }
}

/// Whether a message of this type says that a table, chain or rule is new or gone
/// (`enum nf_tables_msg_types`).
fn is_of_rules(kind: u16) -> bool {
    const NFT_MSG_NEWTABLE: u16 = 0;
    const NFT_MSG_DELRULE: u16 = 8;
    (NFT_MSG_NEWTABLE..=NFT_MSG_DELRULE).contains(&(kind & 0xff))
}

impl AsFd for RuleWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        let fd: RawFd = self.socket.as_raw_fd();
        // SAFETY: the socket keeps it open as long as `self` lives.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

#[cfg(test)]
#[path = "rule_watch_test.rs"]
mod tests;
