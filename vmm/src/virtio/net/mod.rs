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
use std::{
    io,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
};

use virtio_bindings::virtio_net::{VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_MQ};

use crate::{
    ThreadKind, ThreadSetup,
    virtio::{ActivateError, Activation, EnabledQueue, Signals, VirtioDevice},
};

mod config_space;
mod control;
mod counters;
mod features;
mod filter;
mod frame_io;
mod header;
mod mailbox;
mod pieces;
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

use config_space::ConfigSpace;
use control::{Control, Shared};
use features::{Features, Offloads};
use mailbox::{Mailbox, mailbox};
use pieces::Translation;
use ring::Ring;
use tap::Tap;
use waits::Waits;
use worker::Worker;

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
    shared: Arc<Shared>,
    link: Arc<Link>,
    control: Mailbox<control::Command>,
    threads: Vec<thread::JoinHandle<()>>,
    offered: Features,
    queue_sizes: Vec<u16>,
}

/// Changes a card from outside the guest.
#[derive(Clone)]
pub struct NetHandle(Arc<Link>);

struct Link {
    shared: Arc<Shared>,
    /// While the driver is there.
    signals: Mutex<Option<Arc<dyn Signals>>>,
}

impl NetHandle {
    /// Asks the driver to announce itself to the network, as after a move.
    pub fn announce(&self) {
        let changed = self.0.shared.config.set_announce(true);
        self.0.tell(changed);
    }

    /// Plugs the cable in, or out. It only tells the driver.
    pub fn set_link(&self, up: bool) {
        let changed = self.0.shared.config.set_link(up);
        self.0.tell(changed);
    }
}

impl Link {
    fn tell(&self, changed: bool) {
        let signals = self.signals.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(signals) = signals.as_ref().filter(|_| changed) {
            signals.config();
        }
    }

    fn set_signals(&self, signals: Option<Arc<dyn Signals>>) {
        *self.signals.lock().unwrap_or_else(PoisonError::into_inner) = signals;
    }
}

impl Net {
    /// Makes a card, and starts its threads, which sleep until the driver is there: one per queue
    /// pair and one for the control queue, each calling `setup` first.
    pub fn new(
        config: NetConfig,
        setup: ThreadSetup,
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
        for queue in 1..pairs {
            tap.set_attached(queue, false)
                .map_err(tried("detach a TAP's queue"))?;
        }
        let mut starting = Starting::default();
        let mut workers = Vec::with_capacity(pairs);
        for (index, counters) in counters.pairs.iter().enumerate() {
            let (mailbox, inbox) = mailbox().map_err(tried("make an eventfd"))?;
            let worker = Worker {
                tap: tap.descriptor(index),
                io: frame_io::new(config.io, tap.descriptor(index))
                    .map_err(tried("set io_uring up"))?,
                waits: Waits::new(inbox.descriptor()).map_err(tried("make an epoll"))?,
                inbox,
                counters: Arc::clone(counters),
            };
            workers.push(mailbox);
            let name = format!("net-{index}");
            starting.thread(name, ThreadKind::NetWorker, &setup, || worker.run())?;
        }
        let offered = Features::offered(tap.offloads(), pairs);
        let shared = Arc::new(Shared {
            tap,
            config: ConfigSpace::new(config.mac, config.mtu, pairs as u16),
            workers,
            counters,
        });
        let (control, inbox) = mailbox().map_err(tried("make an eventfd"))?;
        let thread = Control::new(inbox, Arc::clone(&shared)).map_err(tried("make an epoll"))?;
        starting.thread("net-control".into(), ThreadKind::Device, &setup, || {
            thread.run()
        })?;
        let mut queue_sizes = vec![QUEUE_SIZE; 2 * pairs];
        queue_sizes.push(CONTROL_QUEUE_SIZE);
        Ok(Net {
            link: Arc::new(Link {
                shared: Arc::clone(&shared),
                signals: Mutex::new(None),
            }),
            shared,
            control,
            threads: starting.0,
            offered,
            queue_sizes,
        })
    }

    /// To change the card from outside.
    pub fn handle(&self) -> NetHandle {
        NetHandle(Arc::clone(&self.link))
    }

    /// Has all threads let go of the driver, and the card as it was made.
    fn stop(&mut self) {
        self.link.set_signals(None);
        // It may be waiting for a worker, so it is first.
        self.control.send(control::Command::Stop);
        for worker in &self.shared.workers {
            worker.send(worker::Command::Stop);
        }
        // What fails here fails again, and is reported, on activation.
        let _ = self.shared.tap.set_offloads(Offloads::default());
        for queue in 1..self.shared.tap.queues() {
            let _ = self.shared.tap.set_attached(queue, false);
        }
        self.shared.config.reset();
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
        self.shared.config.read(offset, into);
    }

    fn write_config(&mut self, _offset: usize, _bytes: &[u8]) {
        // All of it is read-only to a driver of virtio 1; the MAC is set by the control queue.
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let features = Features(activation.features & self.offered.0);
        let queues = Queues::sort(activation.queues, features, self.shared.tap.queues())?;
        let memory = Translation::new(Arc::clone(&activation.memory));
        let all = queues.pairs.iter().flat_map(|(rx, tx)| [rx, tx]);
        for queue in all.chain(&queues.control) {
            // The workers make their own.
            Ring::new(&queue.queue, features, &memory).map_err(|_| ActivateError::Queues {
                enabled: queues.enabled,
                why: "a ring lies outside the guest's memory",
            })?;
        }
        let offloads = features.guest_offloads();
        let host = |what| move |source| ActivateError::Host { what, source };
        self.shared
            .tap
            .set_offloads(offloads)
            .map_err(host("could not set the TAP's offloads"))?;
        self.link.set_signals(Some(Arc::clone(&activation.signals)));
        let pairs = queues.pairs.len();
        for (index, (rx, tx)) in queues.pairs.into_iter().enumerate() {
            let start = worker::Start {
                memory: Arc::clone(&activation.memory),
                features,
                rx,
                tx,
                signals: Arc::clone(&activation.signals),
                active: index == 0,
            };
            self.shared.workers[index].send(worker::Command::Start(Box::new(start)));
        }
        if let Some(queue) = queues.control {
            let start = control::Start {
                memory: activation.memory,
                features,
                queue,
                signals: activation.signals,
                pairs,
            };
            self.control.send(control::Command::Start(Box::new(start)));
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.stop();
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        self.stop();
        self.control.send(control::Command::Exit);
        for worker in &self.shared.workers {
            worker.send(worker::Command::Exit);
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// The threads of a card that is being made. Should that fail, they end as their mailboxes go.
#[derive(Default)]
struct Starting(Vec<thread::JoinHandle<()>>);

impl Starting {
    /// Starts a thread, and waits until it was confined.
    fn thread(
        &mut self,
        name: String,
        kind: ThreadKind,
        setup: &ThreadSetup,
        run: impl FnOnce() + Send + 'static,
    ) -> Result<(), NetError> {
        let (ready, is_ready) = mpsc::channel();
        let setup = Arc::clone(setup);
        let body = move || {
            let confined = setup(kind);
            let go = confined.is_ok();
            let _ = ready.send(confined);
            if go {
                run();
            }
        };
        let thread = thread::Builder::new().name(name).spawn(body);
        self.0.push(thread.map_err(tried("start a thread"))?);
        let confined = is_ready
            .recv()
            .unwrap_or_else(|_| Err(io::ErrorKind::Other.into()));
        confined.map_err(tried("confine a thread"))
    }
}

/// The queues by their use (section 5.1.2).
struct Queues {
    enabled: usize,
    /// Receive and transmit, from the first on.
    pairs: Vec<(EnabledQueue, EnabledQueue)>,
    control: Option<EnabledQueue>,
}

impl Queues {
    fn sort(
        enabled: Vec<EnabledQueue>,
        features: Features,
        pairs: usize,
    ) -> Result<Queues, ActivateError> {
        let count = enabled.len();
        let pairs = if features.has(VIRTIO_NET_F_MQ) {
            pairs
        } else {
            1
        };
        let mut queues: Vec<Option<EnabledQueue>> = (0..=2 * pairs).map(|_| None).collect();
        for queue in enabled {
            if let Some(place) = queues.get_mut(usize::from(queue.index)) {
                *place = Some(queue);
            }
        }
        let control = queues.pop().flatten();
        let mut queues = queues.into_iter();
        let mut whole = Vec::with_capacity(pairs);
        while let (Some(Some(rx)), Some(Some(tx))) = (queues.next(), queues.next()) {
            whole.push((rx, tx));
        }
        if whole.is_empty() {
            return Err(ActivateError::Queues {
                enabled: count,
                why: "the first receive or transmit queue is not among them",
            });
        }
        Ok(Queues {
            enabled: count,
            pairs: whole,
            control: control.filter(|_| features.has(VIRTIO_NET_F_CTRL_VQ)),
        })
    }
}

fn tried(what: &'static str) -> impl FnOnce(io::Error) -> NetError {
    move |source| NetError::Host { what, source }
}
