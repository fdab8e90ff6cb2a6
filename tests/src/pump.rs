//! The thread that stands in for a VMM, or for a wire: it moves frames between two TAPs.
//!
//! Theory of operation. What a stack transmits on a TAP is read from the TAP's descriptor with its
//! vnet header and written, header and all, into the other TAP's descriptor, where it is received.
//! So a GSO frame stays one frame, and a partial checksum stays partial. One thread serves both
//! directions, up to [`BATCH`] frames from a queue before it looks at the next, and sleeps in `poll`
//! when there is nothing. A write that fails (device down: EIO) loses that frame, and is counted.

use std::{
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use crate::{
    accounting::FlowCounts,
    error::{Result, Tried, checked},
    frame::Packet,
    impairment::{ImpairedLink, Impairment, ImpairmentCounts},
    pcap::{LinkType, PcapWriter},
    tap::{FRAME_MAX, TapQueue, VNET_HDR_LEN, VnetHdr},
};

const BATCH: usize = 64;
/// Frames a subscriber may leave unread; the next one is lost to it, and counted.
const UNREAD_MAX: usize = 65_536;

/// Which way a frame went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the guest (or the host, on an uplink) outward.
    Out,
    /// Toward the guest (or the host).
    In,
}

/// What a filter wants done with a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Let it pass.
    Pass,
    /// Lose it.
    Lose,
    /// Let it pass that many times in all.
    Repeat(usize),
    /// Send this instead.
    Replace(VnetHdr, Vec<u8>),
}

/// Looks at every frame before it is counted and moved on.
pub type Filter = Box<dyn FnMut(Direction, &VnetHdr, &[u8]) -> Fate + Send>;

/// A frame seen on the pump.
#[derive(Clone, Debug)]
pub struct SeenFrame {
    /// Which way it went.
    pub direction: Direction,
    /// Its offload header.
    pub vnet: VnetHdr,
    /// The frame, whole.
    pub bytes: Vec<u8>,
}

impl SeenFrame {
    /// Its IPv4 packet, if it has one.
    pub fn packet(&self) -> Option<Packet<'_>> {
        Packet::parse_ethernet(&self.bytes)
    }
}

/// Frames and bytes one way; a GSO frame is one frame.
#[derive(Debug, Default)]
struct Moved {
    frames: AtomicU64,
    bytes: AtomicU64,
    failed: AtomicU64,
}

/// What a pump has moved one way. A GSO frame is one frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MovedCounts {
    /// Frames written into the other side.
    pub frames: u64,
    /// Their bytes, Ethernet header included, vnet header not.
    pub bytes: u64,
    /// Frames the other side's device refused (it was down, for one).
    pub failed: u64,
}

#[derive(Default)]
struct Hooks {
    filter: Option<Filter>,
    subscribers: Vec<(mpsc::SyncSender<SeenFrame>, Arc<AtomicU64>)>,
    pcap: Option<PcapWriter>,
}

struct Shared {
    wake: OwnedFd,
    stop: AtomicBool,
    paused: AtomicBool,
    count: bool,
    ethernet: bool,
    moved: [Moved; 2],
    hooked: AtomicBool,
    hooks: Mutex<Hooks>,
    flows: Mutex<[FlowCounts; 2]>,
    impaired: Mutex<[ImpairmentCounts; 2]>,
}

/// Both sides of a pump.
pub(crate) struct Sides {
    /// The side `Out` frames come from: a guest's `eth0`, or an uplink. Empty: a hand-made guest.
    pub(crate) inner: Vec<TapQueue>,
    /// The side `Out` frames go to: the guest's TAP on the host, or the world's end.
    pub(crate) outer: Vec<TapQueue>,
    /// Whether frames have an Ethernet header.
    pub(crate) ethernet: bool,
    /// Whether flows are counted.
    pub(crate) count: bool,
    /// What the link does to frames, each way.
    pub(crate) impairment: Option<Impairment>,
}

/// A running pump; stops on drop.
pub(crate) struct Pump {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Pump {
    pub(crate) fn start(name: &str, sides: Sides) -> Result<Pump> {
        // SAFETY: eventfd takes numbers and returns a descriptor or -1.
        let wake = checked(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })
            .tried("make an eventfd")?;
        let shared = Arc::new(Shared {
            // SAFETY: a fresh descriptor that nothing else owns.
            wake: unsafe { std::os::fd::FromRawFd::from_raw_fd(wake) },
            stop: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            count: sides.count,
            ethernet: sides.ethernet,
            moved: Default::default(),
            hooked: AtomicBool::new(false),
            hooks: Mutex::default(),
            flows: Mutex::default(),
            impaired: Mutex::default(),
        });
        let mut run = Run::new(shared.clone(), sides);
        let thread = std::thread::Builder::new()
            .name(format!("pump-{name}"))
            .spawn(move || run.run())
            .tried("start a pump thread")?;
        Ok(Pump {
            shared,
            thread: Some(thread),
        })
    }

    pub(crate) fn moved(&self, direction: Direction) -> MovedCounts {
        let moved = &self.shared.moved[direction as usize];
        MovedCounts {
            frames: moved.frames.load(Ordering::Relaxed),
            bytes: moved.bytes.load(Ordering::Relaxed),
            failed: moved.failed.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn flows(&self, direction: Direction) -> FlowCounts {
        locked(&self.shared.flows)[direction as usize].clone()
    }

    pub(crate) fn impaired(&self, direction: Direction) -> ImpairmentCounts {
        locked(&self.shared.impaired)[direction as usize]
    }

    pub(crate) fn set_paused(&self, paused: bool) {
        self.shared.paused.store(paused, Ordering::SeqCst);
        self.wake();
    }

    pub(crate) fn set_filter(&self, filter: Option<Filter>) {
        self.hook(|hooks| hooks.filter = filter);
    }

    pub(crate) fn subscribe(&self) -> FrameTap {
        let (sender, frames) = mpsc::sync_channel(UNREAD_MAX);
        let missed = Arc::new(AtomicU64::new(0));
        self.hook(|hooks| hooks.subscribers.push((sender, missed.clone())));
        FrameTap { frames, missed }
    }

    pub(crate) fn write_pcap(&self, path: &Path) -> Result<()> {
        let link = if self.shared.ethernet {
            LinkType::Ethernet
        } else {
            LinkType::Ip
        };
        let writer = PcapWriter::create(path, link).tried(format!("create {}", path.display()))?;
        self.hook(|hooks| hooks.pcap = Some(writer));
        Ok(())
    }

    fn hook(&self, change: impl FnOnce(&mut Hooks)) {
        change(&mut locked(&self.shared.hooks));
        self.shared.hooked.store(true, Ordering::SeqCst);
    }

    fn wake(&self) {
        // SAFETY: writes the 8 bytes of a u64 to our own eventfd.
        unsafe { libc::write(self.shared.wake.as_raw_fd(), (&raw const ONE).cast(), 8) };
    }
}

static ONE: u64 = 1;

impl Drop for Pump {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        if let Some(pcap) = &mut locked(&self.shared.hooks).pcap {
            let _ = pcap.flush();
        }
    }
}

/// The frames that pass a pump from the moment it was made, as copies.
#[derive(Debug)]
pub struct FrameTap {
    frames: mpsc::Receiver<SeenFrame>,
    missed: Arc<AtomicU64>,
}

impl FrameTap {
    /// The next frame that `wanted` picks; others are thrown away. `None` after `timeout`.
    pub fn wait_for(
        &self,
        timeout: Duration,
        mut wanted: impl FnMut(&SeenFrame) -> bool,
    ) -> Option<SeenFrame> {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.frames.recv_timeout(left) {
                Ok(frame) if wanted(&frame) => return Some(frame),
                Ok(_) => {}
                Err(_) => return None,
            }
        }
    }

    /// The next frame toward the guest.
    pub fn next_in(&self, timeout: Duration) -> Option<SeenFrame> {
        self.wait_for(timeout, |frame| frame.direction == Direction::In)
    }

    /// All frames waiting now.
    pub fn drain(&self) -> Vec<SeenFrame> {
        self.frames.try_iter().collect()
    }

    /// Frames lost to this reader because it left too many unread.
    pub fn missed(&self) -> u64 {
        self.missed.load(Ordering::Relaxed)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Run {
    shared: Arc<Shared>,
    sides: Sides,
    links: Option<[ImpairedLink; 2]>,
    buffer: Vec<u8>,
}

impl Run {
    fn new(shared: Arc<Shared>, sides: Sides) -> Self {
        let link = |how, direction| ImpairedLink::new(how, direction);
        let links = sides.impairment.map(|how| [link(how, 0), link(how, 1)]);
        Run {
            shared,
            sides,
            links,
            buffer: vec![0; FRAME_MAX],
        }
    }

    fn run(&mut self) {
        let queues: Vec<(Direction, TapQueue)> = [
            (Direction::Out, self.sides.inner.clone()),
            (Direction::In, self.sides.outer.clone()),
        ]
        .into_iter()
        .flat_map(|(direction, queues)| queues.into_iter().map(move |queue| (direction, queue)))
        .collect();
        let pollfd = |fd: &OwnedFd| libc::pollfd {
            fd: fd.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        let mut polled = vec![pollfd(&self.shared.wake)];
        polled.extend(queues.iter().map(|(_, queue)| pollfd(queue.fd())));

        while !self.shared.stop.load(Ordering::SeqCst) {
            let watched = if self.shared.paused.load(Ordering::SeqCst) {
                1
            } else {
                polled.len()
            };
            polled.iter_mut().for_each(|fd| fd.revents = 0);
            // SAFETY: the array is writable and at least `watched` long.
            unsafe {
                libc::poll(
                    polled.as_mut_ptr(),
                    watched as libc::nfds_t,
                    self.timeout_ms(),
                )
            };
            if polled[0].revents != 0 {
                let mut count = 0u64;
                // SAFETY: reads 8 bytes into a u64.
                unsafe { libc::read(polled[0].fd, (&raw mut count).cast(), 8) };
            }
            for (at, (direction, queue)) in queues.iter().enumerate() {
                let events = polled[at + 1].revents;
                if events & libc::POLLIN != 0 {
                    self.move_batch(*direction, queue);
                } else if events != 0 {
                    // The device is gone (deleted under us): stop watching its descriptor.
                    polled[at + 1].fd = -1;
                }
            }
            self.move_due();
        }
    }

    /// Until the next impaired frame is due, rounded up; -1 (for ever) when there is none.
    fn timeout_ms(&self) -> i32 {
        let due = self
            .links
            .iter()
            .flatten()
            .filter_map(ImpairedLink::next_due)
            .min();
        due.map_or(-1, |due| {
            due.saturating_duration_since(Instant::now())
                .as_micros()
                .div_ceil(1000) as i32
        })
    }

    fn move_batch(&mut self, direction: Direction, queue: &TapQueue) {
        let shared = self.shared.clone();
        let mut hooks = shared
            .hooked
            .load(Ordering::SeqCst)
            .then(|| locked(&shared.hooks));
        let mut flows = shared.count.then(|| locked(&shared.flows));
        let now = Instant::now();
        for _ in 0..BATCH {
            let Ok(len) = queue.read(&mut self.buffer) else {
                break;
            };
            let header = if queue.has_vnet_hdr() {
                VNET_HDR_LEN
            } else {
                0
            };
            let Some(bytes) = self.buffer.get(header..len) else {
                continue;
            };
            let vnet = VnetHdr::parse(&self.buffer[..header]).unwrap_or_default();
            let fate = hooks
                .as_mut()
                .map_or(Fate::Pass, |hooks| hooks.see(direction, &vnet, bytes));
            if let Some(flows) = &mut flows {
                let packet = match self.sides.ethernet {
                    true => Packet::parse_ethernet(bytes),
                    false => Packet::parse_ip(bytes),
                };
                flows[direction as usize].add(&vnet, packet.as_ref());
            }
            let mut replaced = Vec::new();
            let (times, frame) = match fate {
                Fate::Pass => (1, &self.buffer[..len]),
                Fate::Lose => (0, &self.buffer[..len]),
                Fate::Repeat(times) => (times, &self.buffer[..len]),
                Fate::Replace(vnet, bytes) => {
                    replaced.extend_from_slice(&vnet.to_bytes()[..header]);
                    replaced.extend_from_slice(&bytes);
                    (1, &replaced[..])
                }
            };
            for _ in 0..times {
                match &mut self.links {
                    Some(links) => links[direction as usize].push(now, frame),
                    None => self.sides.write(&shared, direction, frame),
                }
            }
        }
    }

    fn move_due(&mut self) {
        let Some(links) = &mut self.links else { return };
        let now = Instant::now();
        for direction in [Direction::Out, Direction::In] {
            while let Some(frame) = links[direction as usize].pop(now) {
                self.sides.write(&self.shared, direction, &frame);
            }
        }
        *locked(&self.shared.impaired) = [links[0].counts, links[1].counts];
    }
}

impl Hooks {
    fn see(&mut self, direction: Direction, vnet: &VnetHdr, bytes: &[u8]) -> Fate {
        if let Some(pcap) = &mut self.pcap {
            let _ = pcap.write(bytes);
        }
        self.subscribers.retain(|(sender, missed)| {
            match sender.try_send(SeenFrame {
                direction,
                vnet: *vnet,
                bytes: bytes.to_vec(),
            }) {
                Ok(()) => true,
                Err(mpsc::TrySendError::Full(_)) => {
                    missed.fetch_add(1, Ordering::Relaxed);
                    true
                }
                Err(mpsc::TrySendError::Disconnected(_)) => false,
            }
        });
        self.filter
            .as_mut()
            .map_or(Fate::Pass, |filter| filter(direction, vnet, bytes))
    }
}

impl Sides {
    fn write(&self, shared: &Shared, direction: Direction, frame: &[u8]) {
        let queues = match direction {
            Direction::Out => &self.outer,
            Direction::In => &self.inner,
        };
        let moved = &shared.moved[direction as usize];
        let Some(queue) = self.queue_for(queues, frame) else {
            return; // A hand-made guest: its frames are read by subscribers.
        };
        match queue.write(frame) {
            Ok(()) => {
                let header = if queue.has_vnet_hdr() {
                    VNET_HDR_LEN
                } else {
                    0
                };
                moved.frames.fetch_add(1, Ordering::Relaxed);
                moved
                    .bytes
                    .fetch_add((frame.len() - header) as u64, Ordering::Relaxed);
            }
            Err(_) => {
                moved.failed.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// A flow keeps to one queue, as a guest's driver does it.
    fn queue_for<'a>(&self, queues: &'a [TapQueue], frame: &[u8]) -> Option<&'a TapQueue> {
        if queues.len() < 2 {
            return queues.first();
        }
        let packet = Packet::parse_ethernet(frame.get(VNET_HDR_LEN..)?);
        let hash = packet.map_or(0, |packet| {
            usize::from(packet.source.port()) ^ usize::from(packet.destination.port())
        });
        queues.get(hash % queues.len())
    }
}
