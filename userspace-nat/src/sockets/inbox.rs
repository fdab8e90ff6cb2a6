//! Datagrams that one system call takes out of a socket, and those of one length joined.
#![expect(
    unsafe_code,
    reason = "nix's recvmmsg does not restore the lengths of its headers before the next call"
)]
use std::{
    io::Error,
    mem::{size_of, zeroed},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{AsRawFd, OwnedFd},
};

use nix::{errno::Errno, libc};

use super::BUFFER_LEN;

/// Datagrams that one call takes at most.
const AT_ONCE: usize = 32;
/// Room of each, bytes: a multiple of a cache line.
const SLOT_LEN: usize = BUFFER_LEN.next_multiple_of(64);
/// Longest payload behind the headers of a joined frame, bytes.
const MOST_JOINED: usize = 65_535 - 48;
/// Room for what the kernel says about a datagram: one int.
const CONTROL_LEN: usize = 32;

/// A datagram, or several that the kernel joined.
#[derive(Clone, Copy, Debug)]
pub(super) struct Received {
    pub(super) from: Option<SocketAddr>,
    pub(super) len: usize,
    /// Length of each, if the kernel joined several.
    pub(super) segment_len: Option<u16>,
    /// Whether it is longer than its room: its end is lost.
    pub(super) is_cut: bool,
}

/// Received datagrams, each in a place of its own with room for headers before it.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    /// Allocated with the first datagram; of a place only what datagrams filled takes memory.
    bytes: Vec<u8>,
    received: Vec<Received>,
}

#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Control([u8; CONTROL_LEN]);

impl Inbox {
    /// Receives what waits, each `start` bytes into its place. Returns the number.
    ///
    /// # Errors
    /// Nothing waits, or the socket has an error.
    pub(super) fn receive(&mut self, socket: &OwnedFd, start: usize) -> nix::Result<usize> {
        self.received.clear();
        if self.bytes.is_empty() {
            self.bytes = vec![0; AT_ONCE * SLOT_LEN];
        }
        // SAFETY: all of these are plain data, for which zeroes are valid.
        let (mut headers, mut names, mut parts): (
            [libc::mmsghdr; AT_ONCE],
            [libc::sockaddr_in6; AT_ONCE],
            [libc::iovec; AT_ONCE],
        ) = unsafe { zeroed() };
        let mut controls = [Control([0; CONTROL_LEN]); AT_ONCE];
        let places = self.bytes.chunks_exact_mut(SLOT_LEN);
        for (nth, place) in places.enumerate() {
            let room = &mut place[start..BUFFER_LEN];
            parts[nth].iov_base = room.as_mut_ptr().cast();
            parts[nth].iov_len = room.len();
            let header = &mut headers[nth].msg_hdr;
            header.msg_iov = &raw mut parts[nth];
            header.msg_iovlen = 1;
            header.msg_name = (&raw mut names[nth]).cast();
            header.msg_namelen = size_of::<libc::sockaddr_in6>() as libc::socklen_t;
            header.msg_control = (&raw mut controls[nth]).cast();
            header.msg_controllen = CONTROL_LEN as _;
        }
        // SAFETY: the headers, and all that they point to, live until the call returns and are of the
        // lengths given.
        let count = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                headers.as_mut_ptr(),
                AT_ONCE as libc::c_uint,
                libc::MSG_DONTWAIT as _,
                std::ptr::null_mut(),
            )
        };
        let Ok(count) = usize::try_from(count) else {
            return Err(Errno::from_raw(
                Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
            ));
        };
        let received = headers.iter().zip(&names).take(count);
        self.received
            .extend(received.map(|(header, name)| Received {
                from: address_of(name),
                len: header.msg_len as usize,
                segment_len: segment_len(&header.msg_hdr),
                is_cut: header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0,
            }));
        Ok(count)
    }

    /// Returns what was received as the nth, joined with those behind it that have its sender and
    /// length, or are the last and shorter: and how many these are. `joins`: whether they may be joined
    /// if each has this length.
    pub(super) fn joined(
        &mut self,
        nth: usize,
        start: usize,
        joins: impl Fn(usize) -> bool,
    ) -> Option<(Received, usize)> {
        let first = *self.received.get(nth)?;
        let mut joined = first;
        let mut count = 1;
        let is_alone = first.segment_len.is_some() || first.is_cut || first.len == 0;
        if is_alone || !joins(first.len) {
            return Some((joined, count));
        }
        let (to, others) = self.bytes[nth * SLOT_LEN..].split_at_mut(SLOT_LEN);
        for (next, place) in self.received[nth + 1..]
            .iter()
            .zip(others.chunks_exact(SLOT_LEN))
        {
            let fits = next.from == first.from
                && next.segment_len.is_none()
                && !next.is_cut
                && (1..=first.len).contains(&next.len)
                && joined.len + next.len <= MOST_JOINED;
            if !fits {
                break;
            }
            let end = start + joined.len;
            to[end..end + next.len].copy_from_slice(&place[start..start + next.len]);
            joined.len += next.len;
            joined.segment_len = u16::try_from(first.len).ok();
            count += 1;
            if next.len < first.len {
                break;
            }
        }
        Some((joined, count))
    }

    /// The place of the nth, from where its frame's headers may begin.
    pub(super) fn place(&mut self, nth: usize) -> &mut [u8] {
        &mut self.bytes[nth * SLOT_LEN..][..BUFFER_LEN]
    }
}

/// Reads the sender's address, which the kernel wrote.
fn address_of(name: &libc::sockaddr_in6) -> Option<SocketAddr> {
    match i32::from(name.sin6_family) {
        libc::AF_INET6 => {
            let address = Ipv6Addr::from(name.sin6_addr.s6_addr);
            Some((address, u16::from_be(name.sin6_port)).into())
        }
        libc::AF_INET => {
            // SAFETY: of the two the address of IPv6 is the longer, and any bytes are one of IPv4.
            let name: libc::sockaddr_in = unsafe { std::mem::transmute_copy(name) };
            let address = Ipv4Addr::from(u32::from_be(name.sin_addr.s_addr));
            Some((IpAddr::from(address), u16::from_be(name.sin_port)).into())
        }
        _ => None,
    }
}

/// Returns the length of each datagram that the kernel joined (`UDP_GRO`).
fn segment_len(header: &libc::msghdr) -> Option<u16> {
    // SAFETY: the kernel filled the control buffer and its length; the two calls return headers inside
    // of it, or null, and the data of this message is an int.
    unsafe {
        let mut message = libc::CMSG_FIRSTHDR(header);
        while let Some(it) = message.as_ref() {
            if it.cmsg_level == libc::SOL_UDP && it.cmsg_type == libc::UDP_GRO {
                let len: libc::c_int = libc::CMSG_DATA(message)
                    .cast::<libc::c_int>()
                    .read_unaligned();
                return u16::try_from(len).ok();
            }
            message = libc::CMSG_NXTHDR(header, message);
        }
    }
    None
}

#[cfg(test)]
#[path = "inbox_test.rs"]
mod tests;
