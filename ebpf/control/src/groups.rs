//! Frames to groups on an uplink.
//!
//! Neighbours ask for an address by a frame to a group that the address gives (RFC 4861 section 2.3).
//! A network card passes only groups that somebody has joined, and no socket has guests' addresses.
//! So where neighbours are to be answered for guests, the card passes all groups: as long as a packet
//! socket asks for it, and with no setting of the device's own.
use std::{
    io, mem,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
};

use slipgate_abi::IfIndex;

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

fn failed(what: String) -> Error {
    Error::Os {
        what,
        answer: io::Error::last_os_error(),
    }
}
