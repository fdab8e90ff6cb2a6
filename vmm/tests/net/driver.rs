//! A virtio-net driver over real guest memory, and a socket or a TAP behind the card.
use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsRawFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering, fence},
    },
    time::{Duration, Instant},
};

use slipgate_vmm::{
    GuestMemory, ThreadSetup,
    snapshot::{DeviceState, Progress},
    virtio::{
        Activation, EnabledQueue, Signals, VirtioDevice,
        net::{IoMethod, Net, NetConfig, NetCounters, NetRates, PairSnapshot},
    },
};
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemoryBackend};
use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::{EFD_NONBLOCK, EventFd},
};

pub(crate) const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
pub(crate) const HEADER: usize = 12;
/// Feature bits of the ring.
pub(crate) const INDIRECT: u64 = 1 << 28;
pub(crate) const EVENT_IDX: u64 = 1 << 29;
/// Feature bits of the device.
pub(crate) const MRG_RXBUF: u64 = 1 << 15;
pub(crate) const CTRL_VQ: u64 = 1 << 17;
pub(crate) const MQ: u64 = 1 << 22;

pub(crate) const MEMORY: usize = 192 << 20;
/// Length of each queue's buffer area, bytes.
const BUFFER_AREA: u64 = 0x40_0000;
const RINGS: u64 = 0x1_0000;
/// Address of the buffer areas.
pub(crate) const BUFFERS: u64 = 0x100_0000;
/// Longest wait for any event.
const PATIENCE: Duration = Duration::from_secs(10);

/// Interrupts by queue, and signals of the device.
pub(crate) struct Interrupts {
    queues: Vec<(AtomicU64, EventFd)>,
    pub(crate) config: AtomicU64,
    pub(crate) needs_reset: AtomicBool,
}

impl Interrupts {
    /// Returns the interrupts of so many queues.
    pub(crate) fn of(queues: usize) -> Interrupts {
        let interrupt = |_| (AtomicU64::new(0), EventFd::new(EFD_NONBLOCK).unwrap());
        Interrupts {
            queues: (0..queues).map(interrupt).collect(),
            config: AtomicU64::new(0),
            needs_reset: AtomicBool::new(false),
        }
    }

    pub(crate) fn count(&self, queue: usize) -> u64 {
        self.queues[queue].0.load(Ordering::Acquire)
    }

    pub(crate) fn descriptor(&self, queue: usize) -> &EventFd {
        &self.queues[queue].1
    }
}

impl Signals for Interrupts {
    fn queue(&self, index: u16) {
        let (count, event) = &self.queues[usize::from(index)];
        count.fetch_add(1, Ordering::AcqRel);
        event.write(1).unwrap();
    }

    fn config(&self) {
        self.config.fetch_add(1, Ordering::AcqRel);
    }

    fn needs_reset(&self) {
        self.needs_reset.store(true, Ordering::Release);
    }
}

/// A card, its memory, and the driver's side of its queues.
pub(crate) struct Rig {
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) net: Net,
    pub(crate) counters: Arc<NetCounters>,
    pub(crate) interrupts: Arc<Interrupts>,
    pub(crate) queues: Vec<DriverQueue>,
    pub(crate) features: u64,
}

pub(crate) fn unconfined() -> ThreadSetup {
    ThreadSetup::new(|_| Ok(()))
}

/// Returns the memory of a driver.
pub(crate) fn memory() -> Arc<GuestMemory> {
    Arc::new(GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap())
}

/// Returns a pair of connected sockets that preserve message boundaries.
pub(crate) fn sockets() -> (OwnedFd, OwnedFd) {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, setsockopt, socketpair, sockopt};
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let (a, b) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).unwrap();
    for socket in [&a, &b] {
        setsockopt(socket, sockopt::SndBuf, &(1 << 20)).unwrap();
    }
    (a, b)
}

impl Rig {
    /// Returns a card on these descriptors, not yet active.
    pub(crate) fn new(taps: Vec<OwnedFd>, io: IoMethod) -> Rig {
        Rig::limited(taps, io, NetRates::default())
    }

    /// The same with rate limits.
    pub(crate) fn limited(taps: Vec<OwnedFd>, io: IoMethod, rates: NetRates) -> Rig {
        let pairs = taps.len();
        let counters = NetCounters::new(pairs);
        let mut config = NetConfig::new(MAC, 1500, taps);
        config.io = io;
        config.rates = rates;
        let net = Net::new(config, unconfined(), Arc::clone(&counters)).expect("a card");
        Rig {
            memory: memory(),
            net,
            counters,
            interrupts: Arc::new(Interrupts::of(2 * pairs + 1)),
            queues: Vec::new(),
            features: 0,
        }
    }

    /// Returns an active card with one pair on a socket, and the other socket. The driver
    /// negotiates `features`, as far as they are offered.
    pub(crate) fn on_socket(io: IoMethod, features: u64, queue_size: u16) -> (Rig, OwnedFd) {
        let (ours, theirs) = sockets();
        let mut rig = Rig::new(vec![ours], io);
        rig.start(features, queue_size);
        (rig, theirs)
    }

    /// Activates the card with those of `features` that are offered.
    pub(crate) fn start(&mut self, features: u64, queue_size: u16) {
        self.features = self.net.features() & features;
        let count = self.net.queue_sizes().len();
        self.queues = (0..count)
            .map(|index| {
                let size = queue_size.min(self.net.queue_sizes()[index]);
                DriverQueue::new(&self.memory, index, size, self.features)
            })
            .collect();
        self.activate();
    }

    /// Puts another card on other descriptors in the place of this one, which was suspended; it goes
    /// on where that was.
    pub(crate) fn replace(&mut self, taps: Vec<OwnedFd>, io: IoMethod, state: &DeviceState) {
        let mut config = NetConfig::new(MAC, 1500, taps);
        config.io = io;
        self.net = Net::new(config, unconfined(), Arc::clone(&self.counters)).expect("a card");
        let enabled = self.queues.iter().map(|queue| {
            let mut enabled = queue.enabled();
            let of_queue = |progress: &&Progress| usize::from(progress.queue) == queue.index;
            let progress = state.queues.iter().find(of_queue).expect("its progress");
            enabled.queue.set_next_avail(progress.next_available);
            enabled.queue.set_next_used(progress.next_used);
            enabled.taken = progress.taken.clone();
            enabled
        });
        let activation = Activation {
            memory: Arc::clone(&self.memory),
            features: self.features,
            queues: enabled.collect(),
            signals: self.interrupts.clone(),
            restored: Some(state.model.clone()),
        };
        self.net.activate(activation).expect("the card goes on");
    }

    fn activate(&mut self) {
        let enabled = self.queues.iter().map(DriverQueue::enabled).collect();
        let activation = Activation {
            memory: Arc::clone(&self.memory),
            features: self.features,
            queues: enabled,
            signals: self.interrupts.clone(),
            restored: None,
        };
        self.net.activate(activation).expect("the card starts");
    }

    pub(crate) fn rx(&mut self) -> &mut DriverQueue {
        &mut self.queues[0]
    }

    pub(crate) fn tx(&mut self) -> &mut DriverQueue {
        &mut self.queues[1]
    }

    pub(crate) fn control(&mut self) -> &mut DriverQueue {
        self.queues.last_mut().unwrap()
    }

    pub(crate) fn write(&self, at: u64, bytes: &[u8]) {
        use vm_memory::Bytes;
        self.memory.write_slice(bytes, GuestAddress(at)).unwrap();
    }

    pub(crate) fn read(&self, at: u64, len: usize) -> Vec<u8> {
        use vm_memory::Bytes;
        let mut bytes = vec![0; len];
        self.memory
            .read_slice(&mut bytes, GuestAddress(at))
            .unwrap();
        bytes
    }

    /// Adds `count` RX buffers of `bytes`, and notifies.
    pub(crate) fn post(&mut self, count: u64, bytes: u32) {
        self.post_on(0, count, bytes);
    }

    /// The same on one of the receive queues.
    pub(crate) fn post_on(&mut self, queue: usize, count: u64, bytes: u32) {
        let queue = &mut self.queues[queue];
        for _ in 0..count {
            let at = queue.next_buffer(bytes);
            queue.add(&[(at, bytes, true)]);
        }
        queue.kick();
    }

    /// Sends one frame from one buffer, header in front, and waits until the buffer was given back.
    pub(crate) fn send(&mut self, header: [u8; HEADER], frame: &[u8]) {
        self.add_on(1, &[&header[..], frame].concat());
        self.tx().kick();
        self.tx().wait_used();
    }

    /// Adds a frame with its header in one buffer to one of the transmit queues, without a
    /// notification.
    pub(crate) fn add_on(&mut self, queue: usize, bytes: &[u8]) {
        let len = bytes.len() as u32;
        let at = self.queues[queue].next_buffer(len);
        self.write(at, bytes);
        self.queues[queue].add(&[(at, len, false)]);
    }

    /// Waits for the next received frame: its bytes with the header, from all its buffers.
    pub(crate) fn receive(&mut self) -> Vec<u8> {
        let (head, len) = self.rx().wait_used();
        let at = self.rx().buffers[&head];
        let mut bytes = self.read(at, len as usize);
        for _ in 1..u16::from_le_bytes([bytes[10], bytes[11]]) {
            let (head, len) = self.rx().wait_used();
            let at = self.rx().buffers[&head];
            bytes.extend(self.read(at, len as usize));
        }
        bytes
    }

    pub(crate) fn pair(&self) -> PairSnapshot {
        self.counters.snapshot().pairs[0].clone()
    }

    pub(crate) fn dropped(&self, reason: &str) -> u64 {
        self.pair().drops[reason]
    }

    /// Sends a command on the control queue. Returns the answer.
    pub(crate) fn command(&mut self, class: u8, command: u8, data: &[u8]) -> u8 {
        let bytes = [&[class, command], data].concat();
        let at = self.control().next_buffer(8192);
        self.write(at, &bytes);
        self.write(at + 8191, &[0xff]);
        let len = bytes.len() as u32;
        self.control().add(&[
            (at, 2, false),
            (at + 2, len - 2, false),
            (at + 8191, 1, true),
        ]);
        self.control().kick();
        self.control().wait_used();
        self.read(at + 8191, 1)[0]
    }

    pub(crate) fn needs_reset(&self) -> bool {
        self.interrupts.needs_reset.load(Ordering::Acquire)
    }
}

/// Waits until a condition is true.
pub(crate) fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !so() {
        assert!(
            begin.elapsed() < PATIENCE,
            "{what}: not within {PATIENCE:?}"
        );
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// The driver's side of a queue. Descriptors are used one after the other.
pub(crate) struct DriverQueue {
    pub(crate) index: usize,
    pub(crate) size: u16,
    pub(crate) descriptors: u64,
    pub(crate) available: u64,
    pub(crate) used: u64,
    base: *mut u8,
    pub(crate) kick_event: EventFd,
    event_idx: bool,
    indirect: bool,
    next_descriptor: u16,
    pub(crate) available_idx: u16,
    kicked_idx: u16,
    pub(crate) used_idx: u16,
    next_buffer: u64,
    /// Address of each chain's first buffer, by the chain's head.
    pub(crate) buffers: BTreeMap<u16, u64>,
    pub(crate) notified: u64,
}

// SAFETY: the pointer is to memory that the rig keeps mapped.
unsafe impl Send for DriverQueue {}

impl DriverQueue {
    pub(crate) fn new(
        memory: &Arc<GuestMemory>,
        index: usize,
        size: u16,
        features: u64,
    ) -> DriverQueue {
        let at = RINGS + index as u64 * 0x1_0000;
        let base = memory.get_host_address(GuestAddress(0)).unwrap();
        let queue = DriverQueue {
            index,
            size,
            descriptors: at,
            available: at + 0x8000,
            used: at + 0xa000,
            base,
            kick_event: EventFd::new(EFD_NONBLOCK).unwrap(),
            event_idx: features & EVENT_IDX != 0,
            indirect: false,
            next_descriptor: 0,
            available_idx: 0,
            kicked_idx: 0,
            used_idx: 0,
            next_buffer: BUFFERS + index as u64 * BUFFER_AREA,
            buffers: BTreeMap::new(),
            notified: 0,
        };
        // SAFETY: the rings lie within the memory.
        unsafe { base.add(at as usize).write_bytes(0, 0x1_0000) };
        queue
    }

    /// Returns the queue in the form in which the transport hands it over.
    pub(crate) fn enabled(&self) -> EnabledQueue {
        let mut queue = Queue::new(1024).unwrap();
        queue.set_size(self.size);
        queue.set_desc_table_address(Some(self.descriptors as u32), Some(0));
        queue.set_avail_ring_address(Some(self.available as u32), Some(0));
        queue.set_used_ring_address(Some(self.used as u32), Some(0));
        queue.set_ready(true);
        EnabledQueue {
            index: self.index as u16,
            queue,
            kick: self.kick_event.try_clone().unwrap(),
            taken: Vec::new(),
        }
    }

    /// Uses indirect tables for chains from now on.
    pub(crate) fn use_indirect(&mut self) {
        self.indirect = true;
    }

    /// Returns an address for a buffer. Addresses are reused in turn.
    pub(crate) fn next_buffer(&mut self, bytes: u32) -> u64 {
        let area = BUFFERS + self.index as u64 * BUFFER_AREA;
        if self.next_buffer + u64::from(bytes) > area + BUFFER_AREA {
            self.next_buffer = area;
        }
        let at = self.next_buffer;
        self.next_buffer += u64::from(bytes).next_multiple_of(16);
        at
    }

    pub(crate) fn half(&self, at: u64) -> &AtomicU16 {
        // SAFETY: within the memory, aligned.
        unsafe { AtomicU16::from_ptr(self.base.add(at as usize).cast()) }
    }

    pub(crate) fn put<T>(&self, at: u64, value: T) {
        // SAFETY: within the memory.
        unsafe {
            self.base
                .add(at as usize)
                .cast::<T>()
                .write_unaligned(value)
        };
    }

    pub(crate) fn get<T: Copy>(&self, at: u64) -> T {
        // SAFETY: within the memory; any bits are a value of the integers read.
        unsafe { self.base.add(at as usize).cast::<T>().read_unaligned() }
    }

    pub(crate) fn descriptor(
        &self,
        table: u64,
        index: u16,
        (at, bytes, flags, next): (u64, u32, u16, u16),
    ) {
        let here = table + 16 * u64::from(index);
        self.put(here, at);
        self.put(here + 8, bytes);
        self.put(here + 12, flags);
        self.put(here + 14, next);
    }

    /// Makes a chain of (address, bytes, writable) available, without a notification.
    pub(crate) fn add(&mut self, buffers: &[(u64, u32, bool)]) -> u16 {
        let flags = |index: usize, writable: bool| {
            u16::from(index + 1 < buffers.len()) | u16::from(writable) << 1
        };
        let head = self.next_descriptor % self.size;
        if self.indirect {
            let table = self.descriptors + 0xc000 + u64::from(head % 64) * 256;
            for (index, (at, bytes, writable)) in buffers.iter().enumerate() {
                let next = index as u16 + 1;
                self.descriptor(
                    table,
                    index as u16,
                    (*at, *bytes, flags(index, *writable), next),
                );
            }
            self.descriptor(
                self.descriptors,
                head,
                (table, 16 * buffers.len() as u32, 4, 0),
            );
            self.next_descriptor = self.next_descriptor.wrapping_add(1);
        } else {
            for (index, (at, bytes, writable)) in buffers.iter().enumerate() {
                let here = self.next_descriptor % self.size;
                self.next_descriptor = self.next_descriptor.wrapping_add(1);
                let next = self.next_descriptor % self.size;
                let flags = flags(index, *writable);
                self.descriptor(self.descriptors, here, (*at, *bytes, flags, next));
            }
        }
        if let Some((at, ..)) = buffers.first() {
            self.buffers.insert(head, *at);
        }
        self.offer(head);
        head
    }

    /// Puts a chain on the available ring.
    pub(crate) fn offer(&mut self, head: u16) {
        let entry = u64::from(self.available_idx & (self.size - 1));
        self.put(self.available + 4 + 2 * entry, head);
        self.available_idx = self.available_idx.wrapping_add(1);
        self.half(self.available + 2)
            .store(self.available_idx, Ordering::Release);
    }

    /// Notifies, if the device wants a notification.
    pub(crate) fn kick(&mut self) {
        fence(Ordering::SeqCst);
        let (old, new) = (self.kicked_idx, self.available_idx);
        self.kicked_idx = new;
        let wanted = if self.event_idx {
            let at = self.used + 4 + 8 * u64::from(self.size);
            let event = self.half(at).load(Ordering::Acquire);
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            self.half(self.used).load(Ordering::Acquire) & 1 == 0
        };
        if wanted {
            self.notified += 1;
            self.kick_event.write(1).unwrap();
        }
    }

    /// Returns the address of a chain's first buffer, from its descriptor.
    pub(crate) fn buffer_of(&self, head: u16) -> u64 {
        self.get(self.descriptors + 16 * u64::from(head))
    }

    pub(crate) fn used_idx_now(&self) -> u16 {
        self.half(self.used + 2).load(Ordering::Acquire)
    }

    /// Returns the next chain that was given back, and the bytes written to it.
    pub(crate) fn take_used(&mut self) -> Option<(u16, u32)> {
        if self.used_idx == self.used_idx_now() {
            return None;
        }
        let at = self.used + 4 + 8 * u64::from(self.used_idx & (self.size - 1));
        self.used_idx = self.used_idx.wrapping_add(1);
        let head = self.get::<u32>(at);
        Some((u16::try_from(head).unwrap(), self.get::<u32>(at + 4)))
    }

    pub(crate) fn wait_used(&mut self) -> (u16, u32) {
        let mut taken = None;
        eventually("a chain is given back", || {
            taken = self.take_used();
            taken.is_some()
        });
        taken.unwrap()
    }

    /// Asks for an interrupt when the used index passes `event`.
    pub(crate) fn set_used_event(&self, event: u16) {
        let at = self.available + 4 + 2 * u64::from(self.size);
        self.half(at).store(event, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// Turns interrupts off or on, without EVENT_IDX.
    pub(crate) fn set_no_interrupt(&self, none: bool) {
        self.half(self.available)
            .store(none.into(), Ordering::Release);
        fence(Ordering::SeqCst);
    }
}

/// Reads one message; `None` when none is waiting.
pub(crate) fn receive_any(from: &OwnedFd) -> Option<Vec<u8>> {
    let mut bytes = vec![0; 70_000];
    match nix::unistd::read(from, &mut bytes) {
        Ok(count) => {
            bytes.truncate(count);
            Some(bytes)
        }
        Err(nix::Error::EAGAIN) => None,
        Err(error) => panic!("{error}"),
    }
}

/// Reads one frame, and skips what a card tells of offloads; `None` when none is waiting.
pub(crate) fn receive(from: &OwnedFd) -> Option<Vec<u8>> {
    std::iter::from_fn(|| receive_any(from)).find(|message| message.len() != 4)
}

pub(crate) fn wait_receive(from: &OwnedFd) -> Vec<u8> {
    let mut got = None;
    eventually("a frame arrives", || {
        got = receive(from);
        got.is_some()
    });
    got.unwrap()
}

pub(crate) fn transmit(to: &OwnedFd, bytes: &[u8]) {
    let sent = nix::unistd::write(to, bytes).unwrap();
    assert_eq!(sent, bytes.len());
}

/// Sleeps until one of the eventfds is signalled or the time is over.
pub(crate) struct Sleeper(Epoll);

impl Sleeper {
    pub(crate) fn new(events: &[&EventFd]) -> io::Result<Sleeper> {
        let epoll = Epoll::new()?;
        for event in events {
            let set = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, 0);
            epoll.ctl(ControlOperation::Add, event.as_raw_fd(), set)?;
        }
        Ok(Sleeper(epoll))
    }

    pub(crate) fn sleep(&self, millis: i32) {
        let mut events = [EpollEvent::default(); 2];
        let _ = self.0.wait(millis, &mut events);
    }
}
