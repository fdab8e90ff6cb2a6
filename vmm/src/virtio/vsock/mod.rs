//! virtio-vsock (OASIS virtio 1.2, section 5.10): stream connections between the guest and
//! programs of the host, which use a Unix socket.
//!
//! # Theory of operation
//! The device is given a listening Unix socket. A program of the host connects to it, writes
//! `CONNECT <port>\n`, gets `OK <host port>\n`, and is then connected to the guest's port; it is
//! disconnected if the guest refuses. (Firecracker's convention.)
//!
//! A guest that asks for a connection to a port of the host gets the program that listens for that.
//! No thread here may make a socket or open a path, so another process connects ([`Connector`]): it
//! is told the port, and answers with a connected socket or with none. The device does not wait for
//! it. Until the answer comes the connection is pending, in a place of its own among the others. It
//! is refused by RST when there is no program, no answer within two seconds, or too much pending.
//!
//! One thread waits for the driver's notifications and for the sockets (edge-triggered), and moves
//! the bytes. Those of a guest's packet go from its buffers into the socket by one writev(2); what
//! the socket does not take is held, and written when it can be. Those for the guest are read from
//! the socket by readv(2) straight into the driver's buffers, behind the packet's header.
//!
//! Each direction of a connection has a credit (5.10.6.3): a side may have sent so much more than
//! the other has forwarded as the other has buffer. The guest gets [`WINDOW_BYTES`], so no more is
//! ever held; one that sends more loses the connection. From the socket no more is read than the
//! guest has credit for.
//!
//! ```text
//!  host                                             guest
//!  connect, "CONNECT 5\n"  ── Greeting ──
//!                             Asked ────── REQUEST ───►  listens on port 5
//!  "OK 1073741824\n"       ◄─ Open ◄────── RESPONSE ───
//!  bytes                   ◄────────────── RW ────────►  bytes
//!  shutdown(SHUT_WR)       ─────────────── SHUTDOWN ──►  end of file
//!  end of file             ◄────────────── SHUTDOWN ───  shutdown(SHUT_WR)
//!
//!                             Pending  ◄── REQUEST ────  connects to port 52
//!  connector: connected   ──  Accepted
//!  (or refuses            ──  Free ─────── RST ───────►)
//!  accepted                   Open ─────── RESPONSE ──►
//! ```
//! A side's SHUTDOWN says that it sends no more, or receives no more, or both. When the guest has
//! said both, what is held still goes to the host's program, then the connection ends with RST.
//! When the host's program is gone, the guest is told both, and answers by RST.
//!
//! All that a guest sends is hostile. A packet without a whole header, with a length beyond its
//! end, or from another source is dropped and counted; one for no connection is refused by RST.
//! RSTs that wait for the driver's buffers are bounded by [`MAX_RESETS`], at which no further
//! packet of the driver is taken; connections by [`MAX_CONNECTIONS`]. An invalid ring ends in
//! DEVICE_NEEDS_RESET. A reset ends all connections.
mod connection;
mod counters;
mod device;
mod packet;
mod requests;
mod sockets;
#[cfg(any(test, feature = "fake"))]
pub mod stepped;
mod switch;
mod worker;

pub use counters::{VsockCounters, VsockSnapshot};
pub use device::Vsock;
pub use requests::{Answer, Connector};

use std::{io, os::unix::net::UnixListener};

/// Most bytes of a connection that are held for the host's program: the guest's credit.
pub const WINDOW_BYTES: u32 = 128 << 10;
/// Most connections at a time, with those that did not say yet where to, and those that the guest
/// asked for.
pub const MAX_CONNECTIONS: usize = 256;
/// Most requests of the guest that the connector has not answered.
pub const MAX_REQUESTS: usize = 64;
/// Number of RSTs that wait for the driver's buffers at which no packet of the driver is taken.
pub const MAX_RESETS: usize = 256;
/// Addresses that a guest may have: lower ones are reserved, the highest means any.
pub const GUEST_CIDS: std::ops::RangeInclusive<u32> = 3..=u32::MAX - 1;

/// Numbers of the queues: packets for the guest, and packets of the guest.
const RX: u16 = 0;
const TX: u16 = 1;
/// Number of the queue for events.
const EVENTS: u16 = 2;
const QUEUE_SIZE: u16 = 256;

/// Configuration of the vsock device.
#[derive(Debug)]
pub struct VsockConfig {
    /// Address of the guest, one of [`GUEST_CIDS`].
    pub cid: u32,
    /// Socket to which programs of the host connect; non-blocking.
    pub listener: UnixListener,
    /// Whoever connects the guest to programs of the host; `None`: the guest's requests are refused.
    pub connector: Option<Box<dyn Connector>>,
}

/// Reason why the vsock device could not be created.
#[derive(Debug, thiserror::Error)]
pub enum VsockError {
    /// The address is reserved.
    #[error("the address {0} is reserved: give one of {first} to {last}",
        first = GUEST_CIDS.start(), last = GUEST_CIDS.end())]
    Cid(u32),
    /// The host refused a call.
    #[error("could not {what}")]
    Host {
        /// Operation that was tried.
        what: &'static str,
        /// Error from the host.
        source: io::Error,
    },
}
