//! The network card: multi-queue virtio-net on a TAP.
use std::{io, os::fd::OwnedFd, sync::Arc};

use crate::{
    ThreadSetup,
    virtio::{ActivateError, Activation, VirtioDevice},
};

mod config_space;
mod counters;
mod features;
mod tap;

pub use counters::{DropReason, NetCounters, NetSnapshot, PairSnapshot};

use config_space::ConfigSpace;
use features::Features;
use tap::Tap;

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

/// The card.
pub struct Net {
    tap: Arc<Tap>,
    config: Arc<ConfigSpace>,
    offered: Features,
    queue_sizes: Vec<u16>,
}

impl Net {
    /// Makes a card, and starts its threads, which sleep until the driver is there: one per queue
    /// pair and one for the control queue, each calling `threads` first.
    pub fn new(
        config: NetConfig,
        _threads: ThreadSetup,
        counters: Arc<NetCounters>,
    ) -> Result<Net, NetError> {
        let pairs = config.taps.len();
        if pairs > MAX_QUEUE_PAIRS {
            return Err(NetError::TooManyQueues(pairs));
        }
        if config.mtu < 68 {
            return Err(NetError::Mtu(config.mtu));
        }
        if config.mac[0] & 1 != 0 || config.mac == [0; 6] {
            return Err(NetError::Mac(config.mac));
        }
        if counters.pairs.len() != pairs {
            return Err(NetError::Counters {
                counters: counters.pairs.len(),
                pairs,
            });
        }
        let tap = Tap::new(config.taps)?;
        let offered = Features::offered(tap.offloads(), pairs);
        let mut queue_sizes = vec![QUEUE_SIZE; 2 * pairs];
        queue_sizes.push(CONTROL_QUEUE_SIZE);
        Ok(Net {
            config: Arc::new(ConfigSpace::new(config.mac, config.mtu, pairs as u16)),
            offered,
            queue_sizes,
            tap: Arc::new(tap),
        })
    }
}

impl VirtioDevice for Net {
    fn device_id(&self) -> u16 {
        1
    }

    fn pci_class(&self) -> u32 {
        // Network controller, Ethernet.
        0x02_00_00
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn features(&self) -> u64 {
        self.offered.0
    }

    fn read_config(&self, offset: usize, into: &mut [u8]) {
        self.config.read(offset, into);
    }

    fn write_config(&mut self, _offset: usize, _bytes: &[u8]) {
        // All of it is read-only to a driver of virtio 1; the MAC is set by the control queue.
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let _ = activation;
        Err(ActivateError::Host {
            what: "the workers are still being written",
            source: io::ErrorKind::Unsupported.into(),
        })
    }

    fn reset(&mut self) {
        let _ = self.tap.set_offloads(features::Offloads::default());
    }
}
