//! UDP clients: a probe that distinguishes an answer from an ICMP error, and paced, numbered
//! datagrams.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    os::fd::AsRawFd,
    time::{Duration, Instant},
};

use super::IcmpError;
use crate::{
    error::{Result, Tried, checked_len},
    pattern::Pattern,
    sockets,
};

/// Response to a datagram, and the time until it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UdpOutcome {
    /// The echo came back.
    Answered(Duration),
    /// An ICMP error came back.
    Refused(IcmpError, Duration),
    /// No response arrived in time.
    TimedOut,
}

/// Sends one datagram and returns the response.
///
/// # Errors
/// The socket fails; no response in time is no error.
pub fn probe(
    address: impl Into<SocketAddr>,
    payload: &[u8],
    timeout: Duration,
) -> Result<UdpOutcome> {
    let address = address.into();
    let what = || format!("send a datagram to {address}");
    let socket = sockets::udp_toward(address).tried(what())?;
    let (level, option) = match address {
        SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_RECVERR),
        SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_RECVERR),
    };
    sockets::set(&socket, level, option, 1).tried(what())?;
    socket.connect(address).tried(what())?;
    let started = Instant::now();
    socket.send(payload).tried(what())?;
    let mut buffer = [0; 65536];
    loop {
        let left = timeout.saturating_sub(started.elapsed());
        if left.is_zero() {
            return Ok(UdpOutcome::TimedOut);
        }
        let wait_ms = left.as_micros().div_ceil(1000) as i32;
        let events = sockets::poll(&socket, libc::POLLIN, wait_ms).tried(what())?;
        if events & libc::POLLERR != 0
            && let Some(error) = queued_error(&socket).tried(what())?
        {
            return Ok(UdpOutcome::Refused(error, started.elapsed()));
        }
        if events & libc::POLLIN != 0 {
            socket.recv(&mut buffer).tried(what())?;
            return Ok(UdpOutcome::Answered(started.elapsed()));
        }
    }
}

/// The ICMP error that waits on a socket with IP_RECVERR (ip(7)) or IPV6_RECVERR.
pub(crate) fn queued_error(socket: &impl AsRawFd) -> io::Result<Option<IcmpError>> {
    let mut control = [0u64; 64];
    let mut payload = [0u8; 64];
    let mut part = libc::iovec {
        iov_base: payload.as_mut_ptr().cast(),
        iov_len: payload.len(),
    };
    // SAFETY: msghdr is plain data, for which zeroes are valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
    // SAFETY: all buffers in the message are live and of the lengths given.
    match checked_len(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) }) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
        other => other?,
    };
    // SAFETY: the kernel filled the control buffer and its length.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    while !header.is_null() {
        // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR return headers inside the buffer, or null; the data
        // of an IP_RECVERR message is a sock_extended_err.
        unsafe {
            let kind = ((*header).cmsg_level, (*header).cmsg_type);
            if matches!(
                kind,
                (libc::IPPROTO_IP, libc::IP_RECVERR) | (libc::IPPROTO_IPV6, libc::IPV6_RECVERR)
            ) {
                let error: libc::sock_extended_err = libc::CMSG_DATA(header)
                    .cast::<libc::sock_extended_err>()
                    .read_unaligned();
                let origins = [libc::SO_EE_ORIGIN_ICMP, libc::SO_EE_ORIGIN_ICMP6];
                if origins.contains(&error.ee_origin) {
                    return Ok(Some(IcmpError {
                        kind: error.ee_type,
                        code: error.ee_code,
                    }));
                }
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    Ok(None)
}

/// Results of a paced series.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PacedReport {
    /// Number of datagrams sent.
    pub sent: u64,
    /// Different ones that came back.
    pub received: u64,
    /// Copies beyond the first.
    pub duplicated: u64,
    /// Number of datagrams that arrived after one with a higher number.
    pub reordered: u64,
    /// Number of datagrams whose bytes differ from those sent.
    pub corrupt: u64,
    /// The numbers that never came back.
    pub missing: Vec<u64>,
}

impl PacedReport {
    /// Datagrams that never came back.
    pub fn lost(&self) -> u64 {
        self.missing.len() as u64
    }
}

/// Sends `count` numbered datagrams of `size` (at least 8) payload bytes, one each `interval`, to
/// an echo server on one flow, and waits `linger` for the last.
///
/// # Errors
/// The socket fails.
pub fn paced(
    address: impl Into<SocketAddr>,
    count: u64,
    size: usize,
    interval: Duration,
    linger: Duration,
) -> Result<PacedReport> {
    let address = address.into();
    let what = || format!("send paced datagrams to {address}");
    let socket = connected(address).tried(what())?;
    let mut report = Paced::new(count, size);
    let started = Instant::now();
    for number in 0..count {
        let due = started + interval * number as u32;
        report.receive_until(&socket, due).tried(what())?;
        match socket.send(&numbered(number, report.size)) {
            // An ICMP error for an earlier one shows here; the datagram counts as sent, and lost.
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(error) if error.kind() == io::ErrorKind::HostUnreachable => {}
            Err(error) => return Err(error).tried(what()),
        }
    }
    report
        .receive_until(&socket, Instant::now() + linger)
        .tried(what())?;
    Ok(report.finish(count))
}

/// Sends `count` numbered datagrams of `size` bytes in one call with UDP_SEGMENT (udp(7)), so that
/// they leave the guest as one GSO frame, to an echo server, and waits `linger` for the echoes.
/// All of it must fit in 64 KiB.
///
/// # Errors
/// The socket fails, or the kernel refuses UDP_SEGMENT.
pub fn burst(
    address: impl Into<SocketAddr>,
    count: u64,
    size: u16,
    linger: Duration,
) -> Result<PacedReport> {
    let address = address.into();
    let what = || format!("send {count} datagrams of {size} bytes in one to {address}");
    let socket = connected(address).tried(what())?;
    sockets::set(&socket, SOL_UDP, UDP_SEGMENT, size.into()).tried(what())?;
    let all: Vec<u8> = (0..count)
        .flat_map(|number| numbered(number, size.into()))
        .collect();
    socket.send(&all).tried(what())?;
    let mut report = Paced::new(count, size.into());
    report
        .receive_until(&socket, Instant::now() + linger)
        .tried(what())?;
    Ok(report.finish(count))
}

/// Asks a [`UdpService::Burst`](crate::servers::UdpService) server, which sends `count` numbered
/// datagrams of `size` bytes as one GSO frame, and waits `linger` for them.
///
/// # Errors
/// The socket fails.
pub fn ask_burst(
    address: impl Into<SocketAddr>,
    count: u64,
    size: u16,
    linger: Duration,
) -> Result<PacedReport> {
    let address = address.into();
    let what = || format!("ask {address} for {count} datagrams of {size} bytes");
    let socket = connected(address).tried(what())?;
    socket.send(b"go").tried(what())?;
    let mut report = Paced::new(count, size.into());
    report
        .receive_until(&socket, Instant::now() + linger)
        .tried(what())?;
    Ok(report.finish(count))
}

pub(crate) const SOL_UDP: i32 = 17;
pub(crate) const UDP_SEGMENT: i32 = 103;

fn connected(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = sockets::udp_toward(address)?;
    sockets::set_receive_buffer(&socket, 16 << 20)?;
    socket.connect(address)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// Datagram `number`: the number and predictable bytes.
pub(crate) fn numbered(number: u64, size: usize) -> Vec<u8> {
    let mut bytes = vec![0; size.max(8)];
    bytes[..8].copy_from_slice(&number.to_be_bytes());
    Pattern::new(number).fill(&mut bytes[8..]);
    bytes
}

#[derive(Default)]
struct Paced {
    size: usize,
    seen: Vec<u32>,
    highest: Option<u64>,
    report: PacedReport,
}

impl Paced {
    fn new(count: u64, size: usize) -> Paced {
        Paced {
            size: size.max(8),
            seen: vec![0; count as usize],
            ..Default::default()
        }
    }

    fn receive_until(&mut self, socket: &UdpSocket, deadline: Instant) -> io::Result<()> {
        let mut buffer = vec![0; 65536];
        loop {
            match socket.recv(&mut buffer) {
                Ok(len) => self.take(&buffer[..len]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() || self.report.received as usize == self.seen.len() {
                        return Ok(());
                    }
                    if left < Duration::from_millis(1) {
                        std::thread::sleep(left);
                        continue;
                    }
                    sockets::poll(socket, libc::POLLIN, left.as_millis() as i32)?;
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                Err(error) if error.kind() == io::ErrorKind::HostUnreachable => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn take(&mut self, bytes: &[u8]) {
        let number = bytes.first_chunk().map(|first| u64::from_be_bytes(*first));
        let slot = number.and_then(|number| self.seen.get_mut(usize::try_from(number).ok()?));
        let (Some(number), Some(times)) = (number, slot) else {
            self.report.corrupt += 1;
            return;
        };
        *times += 1;
        if *times > 1 {
            self.report.duplicated += 1;
            return;
        }
        self.report.received += 1;
        if bytes.len() != self.size || Pattern::new(number).check(&bytes[8..]).is_err() {
            self.report.corrupt += 1;
        }
        if self.highest > Some(number) {
            self.report.reordered += 1;
        } else {
            self.highest = Some(number);
        }
    }

    fn finish(mut self, sent: u64) -> PacedReport {
        let missing = self
            .seen
            .iter()
            .enumerate()
            .filter(|(_, times)| **times == 0);
        self.report.missing = missing.map(|(number, _)| number as u64).collect();
        self.report.sent = sent;
        self.report
    }
}
