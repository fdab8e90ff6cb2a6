//! The network card: multi-queue virtio-net on a TAP (virtio 1.2 section 5.1).
//!
//! # Theory of operation
//! A TAP with several queues has a descriptor for each. Each descriptor belongs to one queue pair
//! and to one thread ([`worker`]), which moves frames both ways ([`tx`], [`rx`]) by io_uring or by
//! readv and writev ([`frame_io`]). Frames are read straight into the guest's buffers and written
//! straight out of them, with one copy, the kernel's. Offload headers pass through, so that a GSO
//! frame stays whole; the guest's are checked and rewritten first ([`header`]). Workers share
//! nothing but the guest's memory, and allocate nothing once they serve. One more thread carries
//! out the commands of the control queue ([`control`]).
//!
//! The threads live as long as the card. Activation and reset only send them commands and wait for
//! the answer ([`mailbox`](super::mailbox)). So a vCPU thread creates no thread, no mapping and no descriptor, and
//! when a reset returns no thread touches the guest's memory any more.
//!
//! All that the driver writes into a ring is checked as it is read ([`ring`]). An invalid ring ends
//! the service of that queue pair and sets DEVICE_NEEDS_RESET. An invalid frame is given back and
//! counted.
//!
//! A card may give its rings away instead ([`rings`]): another process serves them in memory that both
//! have, and no frame passes this one.
//!
//! A card may have rate limits ([`limits`]). Beyond them frames wait, the guest's in its ring and
//! others in the TAP, and the worker sleeps until the limit opens.
use std::{fs::File, io, os::fd::OwnedFd};

use super::{pieces, ring};

mod config_space;
mod control;
mod counters;
mod device;
mod features;
mod filter;
mod frame_io;
mod header;
mod limits;
mod queues;
mod rings;
mod rx;
#[cfg(any(test, feature = "fake"))]
pub mod stepped;
mod stock;
mod tap;
mod tx;
mod waits;
mod worker;

pub use counters::{DropReason, NetCounters, NetLink, NetSnapshot, PairSnapshot};
pub use device::{Net, NetHandle};
pub use limits::NetRates;

/// Largest number of queue pairs of a card.
pub const MAX_QUEUE_PAIRS: usize = 16;
/// Largest number of descriptors in each RX and TX queue. One system call takes a chain that long.
const QUEUE_SIZE: u16 = 1024;
const CONTROL_QUEUE_SIZE: u16 = 64;

/// Configuration of a card.
#[derive(Debug)]
#[non_exhaustive]
pub struct NetConfig {
    /// MAC address of the card, as the guest reads it.
    pub mac: [u8; 6],
    /// MTU that the guest reads, bytes of L3.
    pub mtu: u16,
    /// One descriptor per queue pair: the queues of one TAP with IFF_VNET_HDR and IFF_NO_PI, and
    /// with IFF_MULTI_QUEUE if there are several. The card sets header size and offloads.
    pub taps: Vec<OwnedFd>,
    /// Method of reading and writing frames.
    pub io: IoMethod,
    /// Limits on the rate of bytes and packets.
    pub rates: NetRates,
    /// The file that the machine's memory is in, of [`shared_bytes`]: the one descriptor of `taps` is a
    /// stream socket then, and the process at its other end serves the rings. Such a card has no
    /// rates.
    pub shared: Option<File>,
}

/// Returns the length of the file that a machine's memory of `memory_bytes` is in when another process
/// serves the rings of its card: behind the memory is what that process counts.
pub fn shared_bytes(memory_bytes: u64) -> u64 {
    memory_bytes.saturating_add(rings::COUNTERS_LEN)
}

impl NetConfig {
    /// Returns a configuration with the default method.
    pub fn new(mac: [u8; 6], mtu: u16, taps: Vec<OwnedFd>) -> NetConfig {
        NetConfig {
            mac,
            mtu,
            taps,
            io: IoMethod::default(),
            rates: NetRates::default(),
            shared: None,
        }
    }
}

/// Method of moving frames between the guest's buffers and the TAP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoMethod {
    /// io_uring on a TAP where the host allows it, else [`IoMethod::Vectored`].
    #[default]
    Auto,
    /// io_uring: one system call for a batch of frames.
    IoUring,
    /// readv and writev: one system call per frame.
    Vectored,
}

/// Reason why a card could not be created.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// No TAP descriptor was given.
    #[error("a network card needs at least one TAP descriptor")]
    NoQueues,
    /// There are more descriptors than [`MAX_QUEUE_PAIRS`].
    #[error("{0} TAP descriptors were given; a card has at most {MAX_QUEUE_PAIRS} queue pairs")]
    TooManyQueues(usize),
    /// A descriptor is neither a TAP queue nor a socket.
    #[error(
        "a descriptor for the network card is neither a TAP queue nor a socket: open /dev/net/tun and TUNSETIFF first"
    )]
    NotATap(#[source] io::Error),
    /// The TAP has the wrong flags.
    #[error(
        "the TAP was opened with flags {flags:#x}; the card needs IFF_TAP, IFF_NO_PI and IFF_VNET_HDR"
    )]
    TapFlags {
        /// Flags that TUNGETIFF returned.
        flags: i32,
    },
    /// Several descriptors belong to a TAP with one queue.
    #[error(
        "{wanted} queue pairs were asked for on a TAP with one queue: make it with IFF_MULTI_QUEUE"
    )]
    OneQueue {
        /// Number of requested queue pairs.
        wanted: usize,
    },
    /// A card whose rings another process serves was given more than it can have.
    #[error("a card whose rings another process serves has one socket, and no rate limits")]
    Rings,
    /// The MTU is below the least that IPv4 allows.
    #[error("an MTU of {0} bytes is below 68 (RFC 791)")]
    Mtu(u16),
    /// The MAC address is a multicast address or zero.
    #[error("{0:02x?} is no unicast MAC address")]
    Mac([u8; 6]),
    /// The counters have another number of queue pairs than the card.
    #[error("counters for {counters} queue pairs were given to a card with {pairs}")]
    Counters {
        /// Number of queue pairs of the counters.
        counters: usize,
        /// Number of queue pairs of the card.
        pairs: usize,
    },
    /// The host refused a call.
    #[error("could not {what}")]
    Host {
        /// Operation that was tried.
        what: &'static str,
        /// Error from the host.
        source: io::Error,
    },
}

fn tried(what: &'static str) -> impl FnOnce(io::Error) -> NetError {
    move |source| NetError::Host { what, source }
}
