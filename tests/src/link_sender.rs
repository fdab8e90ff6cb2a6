//! A neighbour on the uplink's link that sends arbitrary frames.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
};

use crate::{
    error::{Error, Result, Tried, checked_len},
    frame::{FrameBuilder, Mac},
    netns::NetNs,
    sockets,
    world::{UPLINK, WORLD_LINK, World},
};

/// Sends frames out of the world's end of a veth uplink to the host's MAC, with any addresses in
/// them.
pub struct LinkSender {
    socket: OwnedFd,
    macs: (Mac, Mac),
}

impl LinkSender {
    /// Opens a sender on the world's end of its uplink.
    ///
    /// # Errors
    /// The socket can't be opened.
    pub fn new(world: &World) -> Result<LinkSender> {
        let missing = || Error::unexpected(format!("`{WORLD_LINK}`: there is no such device"));
        let ifindex = world.net.ifindex(WORLD_LINK).ok_or_else(missing)?;
        let socket = world.net.run(|| packet_socket(ifindex));
        Ok(LinkSender {
            socket: socket.tried(format!("open a packet socket on `{WORLD_LINK}`"))?,
            macs: (mac(&world.net, WORLD_LINK)?, mac(&world.host, UPLINK)?),
        })
    }

    /// Sends a frame; the MAC addresses are filled in.
    ///
    /// # Errors
    /// The packet socket refuses the frame.
    pub fn send(&self, frame: &FrameBuilder) -> Result<()> {
        let (_, bytes) = frame.clone().macs(self.macs.0, self.macs.1).build();
        // SAFETY: the buffer is readable for the length given.
        let sent = unsafe {
            libc::send(
                self.socket.as_raw_fd(),
                bytes.as_ptr().cast(),
                bytes.len(),
                0,
            )
        };
        checked_len(sent).map(drop).tried("send a frame by hand")
    }
}

fn packet_socket(ifindex: u32) -> io::Result<OwnedFd> {
    // Nothing is received.
    let socket = sockets::packet(libc::SOCK_RAW, 0)?;
    sockets::bind_to_link(&socket, ifindex, 0)?;
    Ok(socket)
}

fn mac(ns: &NetNs, device: &str) -> Result<Mac> {
    let shown = ns.ip(&format!("link show dev {device}"))?;
    let unknown = || Error::unexpected(format!("no MAC address in {shown:?}"));
    let mut words = shown.split_whitespace();
    let text = words.find(|word| *word == "link/ether").and(words.next());
    let octets = text.ok_or_else(unknown)?.split(':');
    let octets: Option<Vec<u8>> = octets
        .map(|octet| u8::from_str_radix(octet, 16).ok())
        .collect();
    octets
        .and_then(|all| all.try_into().ok())
        .ok_or_else(unknown)
}
