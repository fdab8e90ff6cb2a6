//! Writes frames as the guest's VMM does, or as the guest's driver where there is no VMM.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
};

use anyhow::{Context, Result};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, send, socket};
use slipgate_testbed::{
    NetNs,
    tap::{TapQueue, VNET_HDR_LEN},
};

/// Device that receives the generated frames.
pub(crate) enum Injector {
    /// A queue of the host's TAP.
    Tap(TapQueue),
    /// A packet socket on the guest's device.
    Packet(OwnedFd),
}

impl Injector {
    /// Returns a packet socket on `device` in `ns`.
    pub(crate) fn on_device(ns: &NetNs, device: &str) -> Result<Injector> {
        let index = ns
            .ifindex(device)
            .with_context(|| format!("no device {device}"))?;
        let socket = ns.run(|| packet_socket(index));
        let socket = socket.with_context(|| format!("open a packet socket on {device}"))?;
        Ok(Injector::Packet(socket))
    }

    /// Writes a frame made by [`with_vnet`]. Returns whether it was accepted; a full queue loses
    /// it.
    pub(crate) fn write(&self, frame: &[u8]) -> Result<bool> {
        let sent = match self {
            Injector::Tap(queue) => queue.write(frame),
            Injector::Packet(socket) => {
                let sent = send(
                    socket.as_raw_fd(),
                    &frame[VNET_HDR_LEN..],
                    MsgFlags::empty(),
                );
                sent.map(drop).map_err(io::Error::from)
            }
        };
        let full = [libc::ENOBUFS, libc::EAGAIN, libc::ENETDOWN];
        match sent {
            Ok(()) => Ok(true),
            Err(error) if error.raw_os_error().is_some_and(|e| full.contains(&e)) => Ok(false),
            Err(error) => Err(error).context("write a frame as the guest's VMM"),
        }
    }
}

fn packet_socket(ifindex: u32) -> io::Result<OwnedFd> {
    // Protocol 0: it sends, and receives nothing.
    let socket = socket(
        AddressFamily::Packet,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    let on: libc::c_int = 1;
    // SAFETY: the value is an int and its size is given.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_QDISC_BYPASS,
            (&raw const on).cast(),
            size_of_val(&on) as libc::socklen_t,
        )
    };
    // SAFETY: sockaddr_ll is plain data, for which zeroes are valid.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_ifindex = ifindex as i32;
    // SAFETY: the address is readable for the length given.
    let bound = unsafe {
        libc::bind(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            size_of_val(&address) as libc::socklen_t,
        )
    };
    match set == 0 && bound == 0 {
        true => Ok(socket),
        false => Err(io::Error::last_os_error()),
    }
}
