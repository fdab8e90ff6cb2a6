//! The thread of the vsock device.
use std::{
    os::{
        fd::{AsRawFd, RawFd},
        unix::net::UnixListener,
    },
    rc::Rc,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use libc::iovec;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::{
    Connector, EVENTS, MAX_CONNECTIONS, RX, TX, VsockCounters, counters::count,
    packet::HEADER_BYTES, requests::Requests, switch::Switch,
};
use crate::{
    snapshot::{Model, Progress},
    virtio::{
        Activation, Signals,
        device::EnabledQueue,
        mailbox::{Inbox, Rested},
        pieces::{self, Translation, total},
        ring::{Broken, Published, Ring},
    },
};

/// Numbers of what else is watched; sockets have those below [`MAX_CONNECTIONS`].
const COMMAND: u64 = MAX_CONNECTIONS as u64;
const LISTENER: u64 = COMMAND + 1;
const KICK: u64 = COMMAND + 2;
const ANSWERS: u64 = COMMAND + 3;
/// Most signals that are taken at a time.
pub(super) const SIGNALS: usize = 64;
/// VIRTIO_VSOCK_EVENT_TRANSPORT_RESET: all connections have ended, and the address may be another.
const TRANSPORT_RESET: [u8; 4] = [0; 4];

/// Command to the thread.
pub(super) enum Command {
    Start(Box<Activation>),
    /// Drop the activation and all connections.
    Stop,
    /// Rest, and say how far the queues are served, and the next port of the host's ends. The
    /// connections stay.
    Suspend(mpsc::Sender<(Vec<Progress>, u32)>),
    Resume,
    Exit,
}

/// State of the thread.
pub(super) struct Worker {
    pub(super) cid: u32,
    pub(super) inbox: Inbox<Command>,
    pub(super) listener: UnixListener,
    pub(super) connector: Option<Box<dyn Connector>>,
    pub(super) answered_within: Duration,
    pub(super) epoll: Epoll,
    pub(super) counters: Arc<VsockCounters>,
}

impl Worker {
    /// Body of the thread.
    pub(super) fn run(mut self) {
        let requests = Rc::new(Requests::new(self.connector.take(), self.answered_within));
        let mut command = self.inbox.wait();
        while let Some(given) = command {
            self.inbox.answer();
            command = match given {
                Command::Start(activation) => self.serve(*activation, &requests),
                Command::Stop | Command::Suspend(_) | Command::Resume => self.wait(&requests),
                Command::Exit => return,
            };
        }
    }

    /// Serves until there is another command, which is returned. The activation is dropped by
    /// then, and all connections are closed.
    fn serve(&self, activation: Activation, requests: &Rc<Requests>) -> Option<Command> {
        let Activation {
            memory,
            features,
            queues,
            signals,
            restored,
        } = activation;
        let memory = Translation::new(memory);
        let watched = self.descriptors(&queues, requests);
        let served = self.watch(&watched).and_then(|()| {
            let mut switch = self.switch(requests);
            let mut queues = Queues::new(&queues, features, memory, &*signals)?;
            if let Some(Model::Vsock { next_port }) = restored {
                switch.begin_at(next_port);
                queues.tell_of_reset()?;
            }
            self.answer(queues, switch)
        });
        self.unwatch(&watched);
        drop(queues);
        served.unwrap_or_else(|Stopped| {
            count(&self.counters.broken_rings, 1);
            signals.needs_reset();
            drop(signals);
            self.wait(requests)
        })
    }

    /// Waits for a command while there is no driver. What the last one has asked for, and did not live
    /// to get, is answered meanwhile: its programs are disconnected then, and not when the next driver
    /// comes, of which there may be none.
    fn wait(&self, requests: &Requests) -> Option<Command> {
        loop {
            while let Ok(Some(_)) = requests.next() {}
            let answers = requests.descriptor().filter(|_| requests.are_under_way());
            if answers.is_none() {
                return self.inbox.wait();
            }
            if let Some(command) = self.inbox.take() {
                return Some(command);
            }
            match self.inbox.wait_beside(answers, None, None) {
                Ok(woken) if woken.command => self.inbox.quiet(),
                Ok(_) => {}
                // Without the wait for both, answers are taken when there is a driver.
                Err(_) => return self.inbox.wait(),
            }
        }
    }

    /// Returns what is watched besides sockets, each with its number.
    pub(super) fn descriptors(
        &self,
        queues: &[EnabledQueue],
        requests: &Requests,
    ) -> Vec<(RawFd, u64)> {
        let answers = requests.descriptor();
        [(self.inbox.descriptor(), COMMAND)]
            .into_iter()
            .chain([(self.listener.as_raw_fd(), LISTENER)])
            .chain(answers.map(|answers| (answers, ANSWERS)))
            .chain(queues.iter().map(|queue| (queue.kick.as_raw_fd(), KICK)))
            .collect()
    }

    pub(super) fn watch(&self, descriptors: &[(RawFd, u64)]) -> Result<(), Stopped> {
        for (descriptor, number) in descriptors {
            let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, *number);
            let added = self.epoll.ctl(ControlOperation::Add, *descriptor, event);
            added.map_err(|_| Stopped)?;
        }
        Ok(())
    }

    pub(super) fn unwatch(&self, descriptors: &[(RawFd, u64)]) {
        for (descriptor, _) in descriptors {
            // One that could not be added is not there.
            let none = EpollEvent::default();
            let _ = self.epoll.ctl(ControlOperation::Delete, *descriptor, none);
        }
    }

    /// Returns a switch without connections.
    pub(super) fn switch(&self, requests: &Rc<Requests>) -> Switch<'_> {
        let counters = self.counters.clone();
        Switch::new(self.cid, &self.epoll, counters, requests.clone())
    }

    fn answer(
        &self,
        mut queues: Queues<'_>,
        mut switch: Switch<'_>,
    ) -> Result<Option<Command>, Stopped> {
        // Those that came before the driver.
        switch.accept(&self.listener);
        let mut events = [EpollEvent::default(); SIGNALS];
        loop {
            match self.inbox.take() {
                None => {}
                Some(Command::Suspend(to)) => {
                    let _ = to.send((queues.progress(), switch.next_port()));
                    drop(to);
                    match self.inbox.rest(|next| matches!(next, Command::Resume)) {
                        Rested::Resumed => {}
                        Rested::Command(command) => return Ok(Some(command)),
                        Rested::Over => return Ok(None),
                    }
                }
                command => return Ok(command),
            }
            let is_busy = queues.exchange(&mut switch)?;
            let timeout = if is_busy { 0 } else { patience(&switch) };
            self.take_signals(&mut switch, timeout, &mut events)?;
            expire(&mut switch, Instant::now);
        }
    }

    /// Waits for signals, `timeout` ms or with -1 for ever, and takes them. Returns their number.
    pub(super) fn take_signals(
        &self,
        switch: &mut Switch<'_>,
        timeout: i32,
        events: &mut [EpollEvent; SIGNALS],
    ) -> Result<usize, Stopped> {
        let ready = match self.epoll.wait(timeout, events) {
            Ok(ready) => ready,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => 0,
            Err(_) => return Err(Stopped),
        };
        for event in &events[..ready] {
            match event.data() {
                COMMAND => self.inbox.quiet(),
                LISTENER => switch.accept(&self.listener),
                ANSWERS => switch.answered(),
                KICK => {}
                slot => switch.signalled(slot as usize, event.event_set()),
            }
        }
        Ok(ready)
    }
}

/// Refuses the requests that have waited too long. The time is asked for only if one waits.
pub(super) fn expire(switch: &mut Switch<'_>, now: impl FnOnce() -> Instant) {
    let Some(until) = switch.next_expiry() else {
        return;
    };
    let now = now();
    if until <= now {
        // What was answered during a pause is answered in time.
        switch.answered();
        switch.expire(now);
    }
}

/// Returns for how long to wait for a signal, ms; -1: for ever.
fn patience(switch: &Switch<'_>) -> i32 {
    match switch.next_expiry() {
        None => -1,
        Some(until) => {
            let left = until.saturating_duration_since(Instant::now());
            // Not so short that it would have to wait again.
            left.as_millis() as i32 + 1
        }
    }
}

/// The queues in use.
pub(super) struct Queues<'a> {
    rx: Ring,
    tx: Ring,
    /// The queue for events; `None` if the driver does not use it.
    events: Option<Ring>,
    memory: Translation,
    signals: &'a dyn Signals,
    /// Buffer that was taken from the rx queue and not used yet: its chain and its pieces.
    buffer: Option<u16>,
    buffer_pieces: Vec<iovec>,
    packet: Vec<iovec>,
}

impl<'a> Queues<'a> {
    pub(super) fn new(
        queues: &[EnabledQueue],
        features: u64,
        memory: Translation,
        signals: &'a dyn Signals,
    ) -> Result<Queues<'a>, Broken> {
        let ring = |index| {
            let queue = queues.iter().find(|queue| queue.index == index);
            queue
                .map(|queue| Ring::of(queue, features, &memory))
                .transpose()
        };
        Ok(Queues {
            rx: ring(RX)?.ok_or(Broken::Rings)?,
            tx: ring(TX)?.ok_or(Broken::Rings)?,
            events: ring(EVENTS)?,
            memory,
            signals,
            buffer: None,
            buffer_pieces: Vec::new(),
            packet: Vec::new(),
        })
    }

    /// Returns how far the queues are served.
    fn progress(&self) -> Vec<Progress> {
        let events = self.events.iter();
        let mut all = vec![self.rx.progress(RX, self.buffer), self.tx.progress(TX, [])];
        all.extend(events.map(|ring| ring.progress(EVENTS, [])));
        all
    }

    /// Tells the driver that all connections have ended (5.10.6.7), if it has a buffer for that. One
    /// that has none learns it when it uses a connection.
    pub(super) fn tell_of_reset(&mut self) -> Result<(), Broken> {
        let Some(ring) = &mut self.events else {
            return Ok(());
        };
        let Some(head) = ring.next()? else {
            return Ok(());
        };
        let list = &mut self.packet;
        list.clear();
        ring.walk(head, &self.memory, |buffer| match buffer.writable {
            true => self.memory.append(buffer.guest, buffer.bytes, list),
            false => Err(Broken::Direction),
        })?;
        // SAFETY: mapped memory of the guest, which the driver gave to be written.
        let written = unsafe { pieces::write(list, 0, &TRANSPORT_RESET) };
        ring.push_used(head, written as u32);
        if ring.publish() == Published::Interrupt {
            self.signals.queue(EVENTS);
        }
        Ok(())
    }

    /// Takes the guest's packets and gives it those for it, a queue's length of each at most.
    /// Returns whether there is more to do at once.
    pub(super) fn exchange(&mut self, switch: &mut Switch<'_>) -> Result<bool, Stopped> {
        self.tx.quiet();
        self.rx.quiet();
        for _ in 0..self.tx.size() {
            if !switch.can_take() {
                break;
            }
            let Some(head) = self.tx.next()? else { break };
            let packet = &mut self.packet;
            packet.clear();
            self.tx.walk(head, &self.memory, |buffer| {
                // Buffers for the device to write have no meaning here.
                match buffer.writable {
                    true => Ok(()),
                    false => self.memory.append(buffer.guest, buffer.bytes, packet),
                }
            })?;
            switch.take(packet);
            self.tx.push_used(head, 0);
        }
        for _ in 0..self.rx.size() {
            if !switch.has_output() || !self.take_buffer()? {
                break;
            }
            // SAFETY: mapped memory of the guest, which the driver gave to be written, with room
            // for a header.
            let written = unsafe { switch.next_packet(&self.buffer_pieces) };
            let (Some(written), Some(head)) = (written, self.buffer) else {
                break;
            };
            self.rx.push_used(head, written as u32);
            self.buffer = None;
        }
        for (ring, index) in [(&mut self.rx, RX), (&mut self.tx, TX)] {
            if ring.publish() == Published::Interrupt {
                self.signals.queue(index);
            }
        }
        let has_buffers = self.buffer.is_some() || switch.has_output() && self.rx.listen()?;
        let is_busy = switch.has_output() && has_buffers;
        Ok(self.tx.listen()? && switch.can_take() || is_busy)
    }

    /// Takes a buffer for the guest's next packet, unless there is one. Returns whether there is.
    fn take_buffer(&mut self) -> Result<bool, Broken> {
        if self.buffer.is_some() {
            return Ok(true);
        }
        let Some(head) = self.rx.next()? else {
            return Ok(false);
        };
        let pieces = &mut self.buffer_pieces;
        pieces.clear();
        self.rx
            .walk(head, &self.memory, |buffer| match buffer.writable {
                true => self.memory.append(buffer.guest, buffer.bytes, pieces),
                false => Err(Broken::Direction),
            })?;
        if total(pieces) < HEADER_BYTES {
            return Err(Broken::Header);
        }
        self.buffer = Some(head);
        Ok(true)
    }
}

/// The queues can't be served any more: the driver's rings are invalid, or the host failed.
pub(super) struct Stopped;

impl From<Broken> for Stopped {
    fn from(_: Broken) -> Self {
        Stopped
    }
}
