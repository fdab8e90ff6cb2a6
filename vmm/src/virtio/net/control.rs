//! The control queue (virtio 1.2 section 5.1.6.5). It has a thread of its own, because its commands
//! change the TAP and wait for the workers.
use std::{
    io,
    os::fd::AsRawFd,
    sync::{Arc, mpsc},
};

use libc::iovec;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_CTRL_ANNOUNCE, VIRTIO_NET_CTRL_ANNOUNCE_ACK, VIRTIO_NET_CTRL_GUEST_OFFLOADS,
    VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET, VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MAC_ADDR_SET,
    VIRTIO_NET_CTRL_MAC_TABLE_SET, VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET,
    VIRTIO_NET_CTRL_RX, VIRTIO_NET_CTRL_RX_ALLMULTI, VIRTIO_NET_CTRL_RX_ALLUNI,
    VIRTIO_NET_CTRL_RX_NOBCAST, VIRTIO_NET_CTRL_RX_NOMULTI, VIRTIO_NET_CTRL_RX_NOUNI,
    VIRTIO_NET_CTRL_RX_PROMISC, VIRTIO_NET_ERR, VIRTIO_NET_F_CTRL_GUEST_OFFLOADS,
    VIRTIO_NET_F_CTRL_MAC_ADDR, VIRTIO_NET_F_CTRL_RX, VIRTIO_NET_F_CTRL_RX_EXTRA,
    VIRTIO_NET_F_GUEST_ANNOUNCE, VIRTIO_NET_F_MQ, VIRTIO_NET_OK,
};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::{
    config_space::ConfigSpace,
    counters::{NetCounters, NetLink},
    features::{Features, Offloads},
    filter::{Filter, MAX_ADDRESSES, Table},
    pieces::{self, Translation, total},
    ring::{Broken, Published, Ring},
    tap::Tap,
    worker,
};
use crate::{
    GuestMemory,
    snapshot::{FilterState, Progress},
    virtio::{
        EnabledQueue, Signals,
        mailbox::{Inbox, Mailbox, Rested},
    },
};

/// Length of the longest command, bytes. Linux's longest is a MAC table.
const MAX_COMMAND_BYTES: usize = 4096;

/// Command to the control thread.
pub(super) enum Command {
    /// Serve a control queue: the driver activated the card.
    Start(Box<Start>),
    /// Stop serving: the driver reset the card.
    Stop,
    /// Rest, and say how far the queue is served and what the driver has set.
    Suspend(mpsc::Sender<Saved>),
    /// Go on after a rest.
    Resume,
    /// End the thread: the card is dropped.
    Exit,
}

/// Queue that [`Command::Start`] has served, and its context.
pub(super) struct Start {
    pub(super) memory: Arc<GuestMemory>,
    pub(super) features: Features,
    pub(super) queue: EnabledQueue,
    pub(super) signals: Arc<dyn Signals>,
    /// Number of queue pairs that the driver enabled.
    pub(super) pairs: usize,
    /// Number of active queue pairs, and the filter.
    pub(super) set: (usize, Filter),
}

/// State of the control queue in a snapshot.
pub(super) struct Saved {
    pub(super) progress: Progress,
    pub(super) active: usize,
    pub(super) filter: FilterState,
}

/// State of the control thread.
pub(super) struct Control {
    pub(super) inbox: Inbox<Command>,
    pub(super) shared: Arc<Shared>,
    pub(super) epoll: Epoll,
}

/// State that control commands change.
pub(super) struct Shared {
    pub(super) tap: Tap,
    pub(super) config: Arc<ConfigSpace>,
    pub(super) workers: Vec<Mailbox<worker::Command>>,
    pub(super) counters: Arc<NetCounters>,
}

impl Control {
    pub(super) fn new(inbox: Inbox<Command>, shared: Arc<Shared>) -> io::Result<Control> {
        let epoll = Epoll::new()?;
        let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, 0);
        epoll.ctl(ControlOperation::Add, inbox.descriptor(), event)?;
        Ok(Control {
            inbox,
            shared,
            epoll,
        })
    }

    /// Runs until the card is dropped.
    pub(super) fn run(self) {
        while let Some(mut command) = self.inbox.wait() {
            // `serve` returns the next command.
            while let Command::Start(start) = command {
                let kick = start.queue.kick.as_raw_fd();
                let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, 1);
                let added = self.epoll.ctl(ControlOperation::Add, kick, event);
                self.inbox.answer();
                command = match added.and_then(|()| self.serve(&start)) {
                    Ok(command) => command,
                    Err(_) => {
                        self.shared.counters.control.broken.add(1);
                        start.signals.needs_reset();
                        match self.inbox.wait() {
                            Some(command) => command,
                            None => return,
                        }
                    }
                };
                let none = EpollEvent::default();
                let _ = self.epoll.ctl(ControlOperation::Delete, kick, none);
            }
            self.inbox.answer();
            if matches!(command, Command::Exit) {
                return;
            }
        }
    }

    /// Serves the queue until a command arrives. An error is a broken ring.
    fn serve(&self, start: &Start) -> io::Result<Command> {
        let memory = Translation::new(Arc::clone(&start.memory));
        let mut session = Session::new(Arc::clone(&self.shared), start.features, start.pairs);
        (session.active, session.filter) = start.set.clone();
        let mut ring =
            Ring::of(&start.queue, start.features.0, &memory).map_err(io::Error::other)?;
        loop {
            match self.inbox.take() {
                None => {}
                Some(Command::Suspend(to)) => {
                    let _ = to.send(Saved {
                        progress: ring.progress(start.queue.index, []),
                        active: session.active,
                        filter: session.filter.state(),
                    });
                    drop(to);
                    match self.inbox.rest(|next| matches!(next, Command::Resume)) {
                        Rested::Resumed => {}
                        Rested::Command(command) => return Ok(command),
                        // The card is dropped.
                        Rested::Over => return Ok(Command::Exit),
                    }
                }
                Some(command) => return Ok(command),
            }
            ring.quiet();
            while let Some(head) = ring.next().map_err(io::Error::other)? {
                session
                    .carry_out(head, &mut ring, &memory)
                    .map_err(io::Error::other)?;
                if ring.publish() == Published::Interrupt {
                    start.signals.queue(start.queue.index);
                }
                if self.inbox.rung() {
                    break;
                }
            }
            if !self.inbox.rung() && !ring.listen().map_err(io::Error::other)? {
                let mut events = [EpollEvent::default(); 2];
                match self.epoll.wait(-1, &mut events) {
                    Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
                    _ => {}
                }
            }
        }
    }
}

/// State that one driver has set by commands.
pub(super) struct Session {
    shared: Arc<Shared>,
    features: Features,
    /// Number of queue pairs that the driver enabled.
    pairs: usize,
    active: usize,
    filter: Filter,
}

impl Session {
    pub(super) fn new(shared: Arc<Shared>, features: Features, pairs: usize) -> Session {
        Session {
            filter: Filter::new(shared.config.mac()),
            shared,
            features,
            pairs,
            active: 1,
        }
    }

    /// Carries out one command and acknowledges it.
    pub(super) fn carry_out(
        &mut self,
        head: u16,
        ring: &mut Ring,
        memory: &Translation,
    ) -> Result<(), Broken> {
        let (mut command, mut answer) = (Vec::<iovec>::new(), Vec::<iovec>::new());
        ring.walk(head, memory, |buffer| {
            if !buffer.writable && !answer.is_empty() {
                return Err(Broken::Direction);
            }
            let list = if buffer.writable {
                &mut answer
            } else {
                &mut command
            };
            memory.append(buffer.guest, buffer.bytes, list)
        })?;
        let mut bytes = [0; MAX_COMMAND_BYTES];
        // SAFETY: the pieces are the guest's, kept mapped by the translation.
        let length = unsafe { pieces::read(&command, 0, &mut bytes) };
        let done = match bytes.get(..length) {
            Some([class, command_number, data @ ..]) if total(&command) == length => {
                self.command(*class, *command_number, data)
            }
            _ => None,
        };
        let counters = &self.shared.counters.control;
        counters.commands.add(1);
        counters.refused.add(done.is_none().into());
        let ack = match done {
            Some(()) => VIRTIO_NET_OK as u8,
            None => VIRTIO_NET_ERR as u8,
        };
        // SAFETY: as above, and writable.
        let written = unsafe { pieces::write(&answer, 0, &[ack]) };
        ring.push_used(head, written as u32);
        Ok(())
    }

    /// Carries out a command. Returns `None` to refuse it.
    fn command(&mut self, class: u8, command: u8, data: &[u8]) -> Option<()> {
        match (u32::from(class), u32::from(command)) {
            (VIRTIO_NET_CTRL_RX, mode) => self.rx_mode(mode, data),
            (VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MAC_TABLE_SET) => self.mac_table(data),
            (VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MAC_ADDR_SET) => self.mac(data),
            (VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET) => self.pairs(data),
            (VIRTIO_NET_CTRL_GUEST_OFFLOADS, VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET) => {
                self.offloads(data)
            }
            (VIRTIO_NET_CTRL_ANNOUNCE, VIRTIO_NET_CTRL_ANNOUNCE_ACK) => {
                self.needs(VIRTIO_NET_F_GUEST_ANNOUNCE)?;
                self.shared.config.set_announce(false);
                Some(())
            }
            _ => None,
        }
    }

    fn needs(&self, feature: u32) -> Option<()> {
        self.features.has(feature).then_some(())
    }

    fn rx_mode(&mut self, mode: u32, data: &[u8]) -> Option<()> {
        let on = match data {
            [0] => false,
            [1] => true,
            _ => return None,
        };
        let filter = &mut self.filter;
        let (flag, feature) = match mode {
            VIRTIO_NET_CTRL_RX_PROMISC => (&mut filter.promiscuous, VIRTIO_NET_F_CTRL_RX),
            VIRTIO_NET_CTRL_RX_ALLMULTI => (&mut filter.all_multicast, VIRTIO_NET_F_CTRL_RX),
            VIRTIO_NET_CTRL_RX_ALLUNI => (&mut filter.all_unicast, VIRTIO_NET_F_CTRL_RX_EXTRA),
            VIRTIO_NET_CTRL_RX_NOMULTI => (&mut filter.no_multicast, VIRTIO_NET_F_CTRL_RX_EXTRA),
            VIRTIO_NET_CTRL_RX_NOUNI => (&mut filter.no_unicast, VIRTIO_NET_F_CTRL_RX_EXTRA),
            VIRTIO_NET_CTRL_RX_NOBCAST => (&mut filter.no_broadcast, VIRTIO_NET_F_CTRL_RX_EXTRA),
            _ => return None,
        };
        if !self.features.has(feature) {
            return None;
        }
        *flag = on;
        self.send_filter();
        Some(())
    }

    fn mac_table(&mut self, data: &[u8]) -> Option<()> {
        self.needs(VIRTIO_NET_F_CTRL_RX)?;
        let (unicast, rest) = table(data)?;
        let (multicast, rest) = table(rest)?;
        if !rest.is_empty() {
            return None;
        }
        self.filter.unicast = unicast;
        self.filter.multicast = multicast;
        self.send_filter();
        Some(())
    }

    fn mac(&mut self, data: &[u8]) -> Option<()> {
        self.needs(VIRTIO_NET_F_CTRL_MAC_ADDR)?;
        let mac: [u8; 6] = data.try_into().ok()?;
        if mac[0] & 1 != 0 {
            return None;
        }
        self.shared.config.set_mac(mac);
        self.filter.mac = mac;
        self.send_filter();
        Some(())
    }

    fn offloads(&mut self, data: &[u8]) -> Option<()> {
        self.needs(VIRTIO_NET_F_CTRL_GUEST_OFFLOADS)?;
        let bits = u64::from_le_bytes(data.try_into().ok()?);
        let offloads = Offloads::from_command(bits, self.features)?;
        self.shared.tap.set_offloads(offloads).ok()?;
        if self.shared.tap.link() == NetLink::Rings {
            for worker in &self.shared.workers {
                worker.send(worker::Command::Offloads(offloads));
            }
        }
        Some(())
    }

    /// Sets the number of active queue pairs. Frames may go to new queues before the driver gets
    /// the acknowledgement, and must not go to the old ones after it (section 5.1.6.5.6).
    fn pairs(&mut self, data: &[u8]) -> Option<()> {
        self.needs(VIRTIO_NET_F_MQ)?;
        let wanted = usize::from(u16::from_le_bytes(data.try_into().ok()?));
        if wanted == 0 || wanted > self.pairs {
            return None;
        }
        let Shared { tap, workers, .. } = &*self.shared;
        while self.active < wanted {
            tap.set_attached(self.active, true).ok()?;
            workers
                .get(self.active)?
                .send(worker::Command::Active(true));
            self.active += 1;
        }
        while self.active > wanted {
            let last = self.active - 1;
            workers.get(last)?.send(worker::Command::Active(false));
            tap.set_attached(last, false).ok()?;
            self.active = last;
        }
        Some(())
    }

    /// Returns the filter for the workers; `None` passes all frames.
    pub(super) fn filter(&self) -> Option<Arc<Filter>> {
        self.filter.for_workers()
    }

    fn send_filter(&self) {
        let filter = self.filter();
        for worker in &self.shared.workers {
            worker.send(worker::Command::Filter(filter.clone()));
        }
    }
}

/// Parses a `struct virtio_net_ctrl_mac`. Returns the table and the bytes after it.
fn table(data: &[u8]) -> Option<(Table, &[u8])> {
    let (count, rest) = data.split_first_chunk()?;
    let count = usize::try_from(u32::from_le_bytes(*count)).ok()?;
    let (addresses, rest) = rest.split_at_checked(count.checked_mul(6)?)?;
    if count > MAX_ADDRESSES {
        return Some((Table::All, rest));
    }
    let addresses = addresses
        .chunks_exact(6)
        .filter_map(|mac| mac.try_into().ok());
    Some((Table::These(addresses.collect()), rest))
}
