//! Ping, on a raw socket (root), so that errors are seen with their type and code.

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    time::{Duration, Instant},
};

use super::IcmpError;
use crate::{
    error::{Result, Tried, checked, checked_len},
    frame::{FrameBuilder, Packet},
    sockets,
};

/// Responses to a series of echo requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PingReport {
    /// Number of requests sent.
    pub sent: u16,
    /// Round-trip time of each reply, in order of arrival.
    pub replies: Vec<Duration>,
    /// Errors that quote one of our requests, with who sent them.
    pub errors: Vec<(IcmpError, Ipv4Addr)>,
    /// Number of replies whose payload differs from the request's.
    pub corrupt: u64,
}

/// Sends `count` echo requests of `size` payload bytes one after another, with `timeout` for each.
///
/// # Errors
/// The socket cannot be made, or sending fails.
pub fn ping(address: Ipv4Addr, count: u16, size: usize, timeout: Duration) -> Result<PingReport> {
    ping_with_ttl(address, count, size, 64, timeout)
}

/// Sends echo requests as [`ping`] does, with a TTL.
///
/// # Errors
/// As [`ping`].
pub fn ping_with_ttl(
    address: Ipv4Addr,
    count: u16,
    size: usize,
    ttl: u8,
    timeout: Duration,
) -> Result<PingReport> {
    let what = || format!("ping {address}");
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
    // SAFETY: socket takes numbers and returns a descriptor or -1.
    let fd = checked(unsafe { libc::socket(libc::AF_INET, kind, libc::IPPROTO_ICMP) });
    // SAFETY: a fresh descriptor that nothing else owns.
    let socket = unsafe { OwnedFd::from_raw_fd(fd.tried(what())?) };
    sockets::set(&socket, libc::IPPROTO_IP, libc::IP_TTL, ttl.into()).tried(what())?;
    // The descriptor and time tell parallel pings apart.
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let ident = (now.unwrap_or_default().subsec_nanos() >> 4) as u16 ^ fd_number(&socket);
    let payload: Vec<u8> = (0..size).map(|at| at as u8).collect();
    let mut report = PingReport::default();
    for sequence in 0..count {
        let request = FrameBuilder::ping(Ipv4Addr::UNSPECIFIED, address, ident, sequence);
        let packet = request.payload(&payload).build_ip();
        let started = Instant::now();
        send(&socket, address, &packet[20..]).tried(what())?;
        report.sent += 1;
        report
            .await_answer(&socket, (ident, sequence), &payload, started, timeout)
            .tried(what())?;
    }
    Ok(report)
}

/// Sends one echo request of `size` payload bytes to an IPv6 address. Returns the time until its
/// reply, if one came in time with the same payload.
///
/// # Errors
/// The socket cannot be made, or sending fails.
pub fn ping6(address: Ipv6Addr, size: usize, timeout: Duration) -> Result<Option<Duration>> {
    const REQUEST: u8 = 128;
    const REPLY: u8 = 129;
    let what = || format!("ping {address}");
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
    // SAFETY: socket takes numbers and returns a descriptor or -1.
    let fd = checked(unsafe { libc::socket(libc::AF_INET6, kind, libc::IPPROTO_ICMPV6) });
    // SAFETY: a fresh descriptor that nothing else owns.
    let socket = UdpSocket::from(unsafe { OwnedFd::from_raw_fd(fd.tried(what())?) });
    let to = SocketAddr::from((address, 0));
    socket.connect(to).tried(what())?;
    let payload = (0..size).map(|at| at as u8);
    // The kernel fills in the checksum.
    let message: Vec<u8> = [REQUEST, 0, 0, 0, 0x5a, 0x5a, 0, 7]
        .into_iter()
        .chain(payload)
        .collect();
    let started = Instant::now();
    socket.send(&message).tried(what())?;
    let mut buffer = vec![0; 65536];
    loop {
        let left = timeout.saturating_sub(started.elapsed());
        if left.is_zero() {
            return Ok(None);
        }
        socket.set_read_timeout(Some(left)).tried(what())?;
        match socket.recv(&mut buffer) {
            Ok(len) if buffer[0] == REPLY && buffer[4..len] == message[4..] => {
                return Ok(Some(started.elapsed()));
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error).tried(what()),
        }
    }
}

fn fd_number(socket: &OwnedFd) -> u16 {
    (socket.as_raw_fd() as u16) << 10
}

fn send(socket: &OwnedFd, address: Ipv4Addr, message: &[u8]) -> io::Result<()> {
    // SAFETY: sockaddr_in is plain data, for which zeroes are valid.
    let mut to: libc::sockaddr_in = unsafe { std::mem::zeroed() };
    to.sin_family = libc::AF_INET as u16;
    to.sin_addr.s_addr = u32::from_ne_bytes(address.octets());
    let len = size_of_val(&to) as libc::socklen_t;
    // SAFETY: message and address are readable for the lengths given.
    checked_len(unsafe {
        libc::sendto(
            socket.as_raw_fd(),
            message.as_ptr().cast(),
            message.len(),
            0,
            (&raw const to).cast(),
            len,
        )
    })
    .map(drop)
}

impl PingReport {
    fn await_answer(
        &mut self,
        socket: &OwnedFd,
        (ident, sequence): (u16, u16),
        payload: &[u8],
        started: Instant,
        timeout: Duration,
    ) -> io::Result<()> {
        let mut buffer = [0u8; 65536];
        loop {
            let left = timeout.saturating_sub(started.elapsed());
            if left.is_zero() {
                return Ok(());
            }
            let wait_ms = left.as_micros().div_ceil(1000) as i32;
            if sockets::poll(socket, libc::POLLIN, wait_ms)? & libc::POLLIN == 0 {
                continue;
            }
            // SAFETY: the buffer is writable for its length.
            let len = checked_len(unsafe {
                libc::recv(
                    socket.as_raw_fd(),
                    buffer.as_mut_ptr().cast(),
                    buffer.len(),
                    0,
                )
            })?;
            let Some(packet) = Packet::parse_ip(&buffer[..len]) else {
                continue;
            };
            let ours = |l4: &[u8]| {
                l4.get(4..8) == Some(&[ident.to_be_bytes(), sequence.to_be_bytes()].concat())
            };
            match packet.icmp() {
                Some((0, 0)) if ours(packet.transport()) => {
                    self.corrupt += u64::from(packet.payload() != payload);
                    self.replies.push(started.elapsed());
                    return Ok(());
                }
                Some((kind @ (3 | 11 | 12), code)) => {
                    let quoted = Packet::parse_ip(packet.payload());
                    if quoted.is_some_and(|quoted| quoted.protocol == 1 && ours(quoted.transport()))
                    {
                        self.errors
                            .push((IcmpError { kind, code }, *packet.source.ip()));
                        return Ok(());
                    }
                }
                _ => {}
            }
        }
    }
}
