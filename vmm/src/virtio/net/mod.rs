//! The network card: multi-queue virtio-net on a TAP (virtio 1.2 section 5.1).
//!
//! # Theory of operation
//! A TAP with several queues has a descriptor for each, and each belongs to one queue pair and to
//! one thread ([`worker`]), which moves frames both ways ([`tx`], [`rx`]) with what the host has
//! for that ([`frame_io`]). Frames are read straight into the guest's buffers and written straight out
//! of them, one copy, the kernel's. Offload headers pass through, so that a GSO frame stays whole;
//! the guest's are checked and rewritten first ([`header`]). Workers share nothing but the guest's
//! memory, and allocate nothing once they serve. One more thread carries out the commands of the
//! control queue ([`control`]).
//!
//! The threads live as long as the card. Activation and reset only tell them what to serve, and
//! wait for the answer ([`mailbox`]); so a vCPU thread makes no thread, no mapping and no
//! descriptor, and when a reset returns nobody touches the guest's memory any more.
//!
//! What the driver writes into a ring is checked as it is read ([`ring`]). A ring that makes no
//! sense ends the service of that queue pair and sets DEVICE_NEEDS_RESET; a frame that makes none
//! is given back and counted.
use std::{io, os::fd::OwnedFd};

mod config_space;
mod control;
mod counters;
mod device;
mod features;
mod filter;
mod frame_io;
mod header;
mod mailbox;
mod pieces;
mod queues;
mod ring;
mod rx;
#[cfg(any(test, feature = "fake"))]
pub mod stepped;
mod stock;
mod tap;
mod tx;
mod waits;
mod worker;

pub use counters::{DropReason, NetCounters, NetSnapshot, PairSnapshot};
pub use device::{Net, NetHandle};

/// The most queue pairs a card may have.
pub const MAX_QUEUE_PAIRS: usize = 16;
/// Descriptors in each RX and TX queue, at most. One system call takes a chain that long.
const QUEUE_SIZE: u16 = 1024;
const CONTROL_QUEUE_SIZE: u16 = 64;

/// What to make a card of.
#[derive(Debug)]
#[non_exhaustive]
pub struct NetConfig {
    /// The address that the guest is told.
    pub mac: [u8; 6],
    /// The MTU that the guest is told, bytes of L3.
    pub mtu: u16,
    /// One descriptor per queue pair: the queues of one TAP with IFF_VNET_HDR and IFF_NO_PI, more
    /// than one of them with IFF_MULTI_QUEUE. The card sets header size and offloads.
    pub taps: Vec<OwnedFd>,
    /// How frames are read and written.
    pub io: IoMethod,
}

impl NetConfig {
    /// The usual choices.
    pub fn new(mac: [u8; 6], mtu: u16, taps: Vec<OwnedFd>) -> NetConfig {
        NetConfig {
            mac,
            mtu,
            taps,
            io: IoMethod::default(),
        }
    }
}

/// How frames go between the guest's buffers and the TAP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoMethod {
    /// io_uring where the host allows it, else [`IoMethod::Vectored`].
    #[default]
    Auto,
    /// io_uring: one system call for a batch of frames.
    IoUring,
    /// readv and writev: one system call per frame.
    Vectored,
}

/// Why a card could not be made.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// No TAP descriptor was given.
    #[error("a network card needs at least one TAP descriptor")]
    NoQueues,
    /// More descriptors than queue pairs.
    #[error("{0} TAP descriptors were given; a card has at most {MAX_QUEUE_PAIRS} queue pairs")]
    TooManyQueues(usize),
    /// A descriptor is no TAP.
    #[error(
        "a descriptor for the network card is neither a TAP queue nor a socket: open /dev/net/tun and TUNSETIFF first"
    )]
    NotATap(#[source] io::Error),
    /// A TAP of the wrong kind.
    #[error(
        "the TAP was opened with flags {flags:#x}; the card needs IFF_TAP, IFF_NO_PI and IFF_VNET_HDR"
    )]
    TapFlags {
        /// What TUNGETIFF said.
        flags: i32,
    },
    /// Several descriptors of a TAP with one queue.
    #[error(
        "{wanted} queue pairs were asked for on a TAP with one queue: make it with IFF_MULTI_QUEUE"
    )]
    OneQueue {
        /// Queue pairs asked for.
        wanted: usize,
    },
    /// The driver must not be told such an MTU.
    #[error("an MTU of {0} bytes is below 68 (RFC 791)")]
    Mtu(u16),
    /// The address is a group's or zero.
    #[error("{0:02x?} is no unicast MAC address")]
    Mac([u8; 6]),
    /// The counters are for another card.
    #[error("counters for {counters} queue pairs were given to a card with {pairs}")]
    Counters {
        /// Pairs that are counted.
        counters: usize,
        /// Pairs of the card.
        pairs: usize,
    },
    /// The host refused something.
    #[error("could not {what}")]
    Host {
        /// What was tried.
        what: &'static str,
        /// What the host said.
        source: io::Error,
    },
}

fn tried(what: &'static str) -> impl FnOnce(io::Error) -> NetError {
    move |source| NetError::Host { what, source }
}
