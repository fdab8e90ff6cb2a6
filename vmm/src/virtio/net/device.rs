//! The virtio-net device: its threads, activation and reset.
use std::{
    fs::File,
    io,
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread::JoinHandle,
};

use super::{
    CONTROL_QUEUE_SIZE, MAX_QUEUE_PAIRS, NetConfig, NetCounters, NetError, NetLink, NetRates,
    QUEUE_SIZE,
    config_space::ConfigSpace,
    control::{self, Control, Shared},
    features::{Features, Offloads},
    filter::Filter,
    frame_io,
    limits::Limits,
    pieces::Translation,
    queues::Queues,
    ring::Ring,
    rings::{COUNTERS_LEN, FrontEnd, Tally},
    tap::Tap,
    tried,
    waits::Waits,
    worker::{self, Worker},
};
use crate::{
    ThreadKind, ThreadSetup,
    snapshot::{DeviceState, Model, NetState},
    thread,
    virtio::{
        ActivateError, Activation, Signals, VirtioDevice,
        mailbox::{Inbox, Mailbox, mailbox},
    },
};

/// The virtio-net network card.
pub struct Net {
    shared: Arc<Shared>,
    link: Arc<Link>,
    control: Mailbox<control::Command>,
    threads: Vec<JoinHandle<()>>,
    offered: Features,
    queue_sizes: Vec<u16>,
}

/// Handle that changes a card from outside the guest.
#[derive(Clone)]
pub struct NetHandle(Arc<Link>);

struct Link {
    shared: Arc<Shared>,
    /// Signals to the driver; `None` while the card is not active.
    signals: Mutex<Option<Arc<dyn Signals>>>,
}

impl NetHandle {
    /// Requests the driver to announce itself to the network, as after a migration.
    pub fn announce(&self) {
        let changed = self.0.shared.config.set_announce(true);
        self.0.notify_config(changed);
    }

    /// Sets the link state that the driver sees. Frames are not affected.
    pub fn set_link(&self, up: bool) {
        let changed = self.0.shared.config.set_link(up);
        self.0.notify_config(changed);
    }
}

impl Link {
    fn notify_config(&self, changed: bool) {
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
    /// Creates a card, and starts its threads, which sleep until a driver activates the card: one
    /// per queue pair and one for the control queue, each calling `setup` first.
    ///
    /// # Errors
    /// The configuration is invalid, a descriptor is no suitable TAP, or the host refuses a
    /// resource.
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
        let tap = Tap::new(config.taps, config.shared.is_some())?;
        if config.shared.is_some()
            && (tap.link() != NetLink::Rings || pairs > 1 || has_rates(config.rates))
        {
            return Err(NetError::Rings);
        }
        // It is set once, by the first card that has these counters.
        let _ = counters.link.set(tap.link());
        let space = Arc::new(ConfigSpace::new(config.mac, config.mtu, pairs as u16));
        for queue in 1..pairs {
            tap.set_attached(queue, false)
                .map_err(tried("detach a TAP's queue"))?;
        }
        // If a later step fails, the threads end when their mailboxes are dropped.
        let mut threads = Vec::with_capacity(pairs + 1);
        let mut workers = Vec::with_capacity(pairs);
        let limits = Limits::new(config.rates);
        let counted = Arc::clone(&counters);
        for (index, counters) in counters.pairs.iter().enumerate() {
            let (mailbox, inbox) = mailbox().map_err(tried("make an eventfd"))?;
            let name = format!("net-{index}");
            if let Some(file) = &config.shared {
                let front_end = front_end(&tap, file, inbox, &space, &counted)
                    .map_err(tried("share the card's rings"))?;
                workers.push(mailbox);
                let kind = ThreadKind::NetRings;
                let thread = thread::spawn(&name, kind, &setup, || front_end.run());
                threads.push(thread.map_err(tried("start the rings' thread"))?);
                continue;
            }
            let io = frame_io::new(tap.method(config.io), tap.descriptor(index))
                .map_err(tried("set io_uring up"))?;
            let worker = Worker {
                tap: tap.descriptor(index),
                io,
                waits: Waits::new(inbox.descriptor()).map_err(tried("make an epoll"))?,
                inbox,
                counters: Arc::clone(counters),
                limits: limits.clone(),
            };
            workers.push(mailbox);
            let thread = thread::spawn(&name, ThreadKind::NetWorker, &setup, || worker.run());
            threads.push(thread.map_err(tried("start a queue pair's thread"))?);
        }
        let offered = match (Features::offered(tap.offloads(), pairs), tap.link()) {
            (offered, NetLink::Rings) => offered.without_filters(),
            (offered, _) => offered,
        };
        let shared = Arc::new(Shared {
            tap,
            config: space,
            workers,
            counters,
        });
        let (control, inbox) = mailbox().map_err(tried("make an eventfd"))?;
        let thread = Control::new(inbox, Arc::clone(&shared)).map_err(tried("make an epoll"))?;
        let thread = thread::spawn("net-control", ThreadKind::Device, &setup, || thread.run());
        threads.push(thread.map_err(tried("start the control queue's thread"))?);
        let mut queue_sizes = vec![QUEUE_SIZE; 2 * pairs];
        queue_sizes.push(CONTROL_QUEUE_SIZE);
        Ok(Net {
            link: Arc::new(Link {
                shared: Arc::clone(&shared),
                signals: Mutex::new(None),
            }),
            shared,
            control,
            threads,
            offered,
            queue_sizes,
        })
    }

    /// Returns a handle that changes the card from outside.
    pub fn handle(&self) -> NetHandle {
        NetHandle(Arc::clone(&self.link))
    }

    /// Stops all threads, and restores the card's initial state.
    fn stop(&mut self) {
        self.link.set_signals(None);
        // The control thread may be waiting for a worker, so it is stopped first.
        self.control.send(control::Command::Stop);
        for worker in &self.shared.workers {
            worker.send(worker::Command::Stop);
        }
        // A failure here occurs again, and is reported, on activation.
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
        // All fields are read-only to a virtio 1 driver; the control queue sets the MAC address.
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let features = Features(activation.features & self.offered.0);
        let queues = Queues::sort(activation.queues, features, self.shared.tap.queues())?;
        let memory = Translation::new(Arc::clone(&activation.memory));
        let all = queues.pairs.iter().flat_map(|(rx, tx)| [rx, tx]);
        for queue in all.chain(&queues.control) {
            // Checks only: the workers make rings of their own.
            Ring::new(&queue.queue, features.0, &memory).map_err(|_| ActivateError::Queues {
                enabled: queues.enabled,
                why: "a ring lies outside the guest's memory",
            })?;
        }
        let pairs = queues.pairs.len();
        // What a driver sets before it knows more, or has set before it was saved.
        let mut offloads = features.guest_offloads();
        let mut set = (1, Filter::new(self.shared.config.mac()));
        if let Some(Model::Net(state)) = &activation.restored {
            offloads = Offloads(offloads.0 & state.offloads).consistent();
            self.shared.config.set_mac(state.mac);
            let active = usize::from(state.pairs).clamp(1, pairs);
            set = (active, Filter::of(state.mac, &state.filter));
        }
        let host = |what| move |source| ActivateError::Host { what, source };
        self.shared
            .tap
            .set_offloads(offloads)
            .map_err(host("could not set the TAP's offloads"))?;
        for queue in 1..set.0 {
            self.shared
                .tap
                .set_attached(queue, true)
                .map_err(host("could not attach a TAP's queue"))?;
        }
        self.link.set_signals(Some(Arc::clone(&activation.signals)));
        for (index, (rx, tx)) in queues.pairs.into_iter().enumerate() {
            let start = worker::Start {
                memory: Arc::clone(&activation.memory),
                features,
                rx,
                tx,
                signals: Arc::clone(&activation.signals),
                active: index < set.0,
                filter: set.1.for_workers(),
                offloads,
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
                set,
            };
            self.control.send(control::Command::Start(Box::new(start)));
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.stop();
    }

    fn is_signalled_by_others(&self) -> bool {
        self.shared.tap.link() == NetLink::Rings
    }

    fn vector_changed(&mut self, index: u16) {
        if self.shared.tap.link() == NetLink::Rings {
            for worker in &self.shared.workers {
                worker.send(worker::Command::Vector(index));
            }
        }
    }

    fn suspend(&mut self) -> DeviceState {
        // The control thread may be waiting for a worker, so it rests first.
        let (to, saved) = mpsc::channel();
        self.control.send(control::Command::Suspend(to));
        let (to, progress) = mpsc::channel();
        for worker in &self.shared.workers {
            worker.send(worker::Command::Suspend(to.clone()));
        }
        drop(to);
        let mac = self.shared.config.mac();
        let mut state = NetState {
            mac,
            offloads: self.shared.tap.set().0,
            pairs: 1,
            filter: Filter::new(mac).state(),
        };
        let mut queues: Vec<_> = progress.try_iter().collect();
        // Without a control queue nothing was set.
        if let Ok(saved) = saved.try_recv() {
            queues.push(saved.progress);
            state.pairs = u16::try_from(saved.active).unwrap_or(1);
            state.filter = saved.filter;
        }
        DeviceState {
            queues,
            model: Model::Net(state),
        }
    }

    fn resume(&mut self) {
        for worker in &self.shared.workers {
            worker.send(worker::Command::Resume);
        }
        self.control.send(control::Command::Resume);
    }
}

/// Returns the front end of the rings, and has what the engine counts read with the others.
fn front_end(
    tap: &Tap,
    file: &File,
    inbox: Inbox<worker::Command>,
    config: &Arc<ConfigSpace>,
    counters: &NetCounters,
) -> io::Result<FrontEnd> {
    let length = file.metadata()?.len();
    let at = length.checked_sub(COUNTERS_LEN);
    let at = at.ok_or_else(|| io::Error::other("the shared file is too short"))?;
    // It is set once, by the first card that has these counters.
    let _ = counters.tally.set(Tally::map(file.try_clone()?, at)?);
    let counted = Arc::clone(&counters.pairs[0]);
    let socket = tap.socket()?;
    FrontEnd::new(
        socket,
        (file.try_clone()?, at),
        inbox,
        Arc::clone(config),
        counted,
    )
}

fn has_rates(rates: NetRates) -> bool {
    rates != NetRates::default()
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
