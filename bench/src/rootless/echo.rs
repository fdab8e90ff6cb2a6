//! Echoes of small datagrams through a contender, of ends that cost little.
//!
//! Both ends receive what waits by one call and send as many by another. With a call for each datagram
//! a client and a server that share a CPU take about 8 µs of it for an echo, as much as the contenders
//! take of theirs, and what was compared were the ends.
#![expect(
    unsafe_code,
    reason = "nix's recvmmsg does not restore the lengths of its headers before the next call"
)]
use std::{
    io::{self, ErrorKind},
    net::UdpSocket,
    os::fd::AsRawFd as _,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use nix::libc;
use slipgate_testbed::world::SERVER;

use super::{
    footprint::Worker,
    udp::{bound, greeted},
};
use crate::{contender::Stand, workload::Limits};

const PORT: u16 = 7006;
/// Echoes under way, and their payload.
const UNDER_WAY: usize = 32;
const ECHO_BYTES: usize = 22;

/// What was measured.
pub(super) struct Echoes {
    pub(super) thousand_per_second: f64,
    /// CPU time of the contender for each, µs.
    pub(super) cpu_us: f64,
}

/// Has [`UNDER_WAY`] echoes under way between the guest and a server of the world.
pub(super) fn measure(stand: &Stand, limits: Limits) -> Result<Echoes> {
    let server = bound(&stand.world.net, Some((SERVER, PORT).into()))?;
    let client = bound(stand.guest_ns(), None)?;
    client.connect((SERVER, PORT))?;
    server.connect(greeted(&client, &server)?)?;
    let worker = Worker::of(stand)?;
    let has_ended = AtomicBool::new(false);
    let (count, took, cpu) = thread::scope(|scope| {
        let echoing = scope.spawn(|| echo(&server, &has_ended));
        let measured = (|| -> Result<_> {
            exchange(&client, limits.short / 10)?;
            let before = worker.time()?;
            let (count, took) = exchange(&client, limits.short)?;
            Ok((count, took, worker.time()?.saturating_sub(before)))
        })();
        has_ended.store(true, Relaxed);
        let echoed = echoing.join();
        if let Ok(echoed) = echoed {
            echoed?;
        }
        measured
    })?;
    ensure!(count > 0, "no echo of {SERVER}:{PORT}");
    Ok(Echoes {
        thousand_per_second: count as f64 / took.as_secs_f64() / 1e3,
        cpu_us: cpu.as_secs_f64() * 1e6 / count as f64,
    })
}

/// Sends back what comes until `has_ended`.
fn echo(socket: &UdpSocket, has_ended: &AtomicBool) -> io::Result<()> {
    let mut batch = Batch::new();
    while !has_ended.load(Relaxed) {
        // If not: nothing came for a while, or a message about an earlier datagram.
        if let Ok(count) = batch.receive(socket) {
            batch.send(socket, count)?;
        }
    }
    Ok(())
}

/// Has [`UNDER_WAY`] datagrams under way for a time. Returns how many came back.
fn exchange(socket: &UdpSocket, time: Duration) -> Result<(u64, Duration)> {
    let (mut count, started) = (0, Instant::now());
    let mut batch = Batch::new();
    while started.elapsed() < time {
        batch.send(socket, UNDER_WAY)?;
        while started.elapsed() < time {
            match batch.receive(socket) {
                Ok(received) => {
                    count += received as u64;
                    batch.send(socket, received)?;
                }
                // All that was under way is lost.
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok((count, started.elapsed()))
}

/// Datagrams of [`ECHO_BYTES`] that one call receives or sends, on a connected socket.
struct Batch {
    payloads: Vec<[u8; ECHO_BYTES]>,
}

impl Batch {
    fn new() -> Batch {
        Batch {
            payloads: vec![[0x5a; ECHO_BYTES]; UNDER_WAY],
        }
    }

    /// Waits for a datagram, for the socket's time-out at most, and receives what waits behind it.
    /// Returns how many.
    fn receive(&mut self, socket: &UdpSocket) -> io::Result<usize> {
        self.call(UNDER_WAY, |headers| {
            // SAFETY: the headers, and all that they point to, live until the call returns, and are of
            // the lengths given.
            unsafe {
                libc::recvmmsg(
                    socket.as_raw_fd(),
                    headers.as_mut_ptr(),
                    headers.len() as libc::c_uint,
                    libc::MSG_WAITFORONE as _,
                    std::ptr::null_mut(),
                )
            }
        })
    }

    /// Sends the first `count`.
    fn send(&mut self, socket: &UdpSocket, count: usize) -> io::Result<()> {
        let sent = self.call(count, |headers| {
            // SAFETY: as above.
            unsafe {
                libc::sendmmsg(
                    socket.as_raw_fd(),
                    headers.as_mut_ptr(),
                    headers.len() as libc::c_uint,
                    0,
                )
            }
        })?;
        match sent == count {
            true => Ok(()),
            false => Err(io::Error::other(format!(
                "{sent} of {count} datagrams sent"
            ))),
        }
    }

    /// Has `call` receive or send the first `count`. Returns how many it did.
    fn call(
        &mut self,
        count: usize,
        call: impl FnOnce(&mut [libc::mmsghdr]) -> libc::c_int,
    ) -> io::Result<usize> {
        let payloads = self.payloads[..count].iter_mut();
        let mut parts: Vec<_> = payloads
            .map(|payload| libc::iovec {
                iov_base: payload.as_mut_ptr().cast(),
                iov_len: payload.len(),
            })
            .collect();
        let headers = parts.iter_mut().map(|part| {
            // SAFETY: it is plain data, for which zeroes are valid: no address, no control data.
            let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
            header.msg_hdr.msg_iov = part;
            header.msg_hdr.msg_iovlen = 1;
            header
        });
        let mut headers: Vec<_> = headers.collect();
        usize::try_from(call(&mut headers)).map_err(|_| io::Error::last_os_error())
    }
}

#[cfg(test)]
#[path = "echo_test.rs"]
mod tests;
