use std::{
    io::ErrorKind,
    os::fd::{AsRawFd, OwnedFd},
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use super::{Direction, Fate, Shared, Sides, locked};
use crate::{
    frame::Packet,
    impairment::ImpairedLink,
    tap::{FRAME_MAX, TapQueue, VNET_HDR_LEN, VnetHdr},
};

const BATCH: usize = 64;

pub(super) struct Run {
    shared: Arc<Shared>,
    sides: Sides,
    links: Option<[ImpairedLink; 2]>,
    buffer: Vec<u8>,
}

impl Run {
    pub(super) fn new(shared: Arc<Shared>, sides: Sides) -> Self {
        let link = |how, direction| ImpairedLink::new(how, direction);
        let links = sides.impairment.map(|how| [link(how, 0), link(how, 1)]);
        Run {
            shared,
            sides,
            links,
            buffer: vec![0; FRAME_MAX],
        }
    }

    pub(super) fn run(&mut self) {
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

    /// Returns the time until the next impaired frame is due, ms, rounded up; -1 (no limit) if
    /// there is none.
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
            if self.shared.count {
                let vnet = VnetHdr::parse(&self.buffer[..header]).unwrap_or_default();
                let packet = match self.sides.ethernet {
                    true => Packet::of_ethernet(bytes),
                    false => Packet::of_ip(bytes),
                };
                locked(&self.shared.flows)[direction as usize].add(&vnet, packet.as_ref());
            }
            self.pass(direction, header, len, now);
        }
    }

    /// Has the hooks decide about the frame in the buffer, and does what they say.
    fn pass(&mut self, direction: Direction, header: usize, len: usize, now: Instant) {
        let Run {
            shared,
            sides,
            links,
            buffer,
        } = self;
        let shared: &Shared = shared;
        let whole = &buffer[..len];
        let (vnet, bytes) = whole.split_at(header);
        let vnet = VnetHdr::parse(vnet).unwrap_or_default();
        let mut hooks = locked(&shared.hooks);
        hooks.show(0, direction, &vnet, bytes);
        let mut fate = hooks.judge(direction, &vnet, bytes);
        let mut written = 0;
        'judged: loop {
            let changes = hooks.changes();
            let replaced;
            let (times, frame) = match &fate {
                Fate::Pass => (1, whole),
                Fate::Lose => (0, whole),
                Fate::Repeat(times) => (*times, whole),
                Fate::Replace(vnet, bytes) => {
                    replaced = [&vnet.to_bytes()[..header], &bytes[..]].concat();
                    (1, &replaced[..])
                }
            };
            while written < times {
                if let Some(links) = links {
                    links[direction as usize].push(now, frame);
                } else if let Some(full) = sides.write(shared, direction, frame) {
                    drop(hooks);
                    full.wait(libc::POLLOUT);
                    hooks = locked(&shared.hooks);
                    hooks.show(changes, direction, &vnet, bytes);
                    if hooks.has_other_filter(changes) {
                        fate = hooks.judge(direction, &vnet, bytes);
                    }
                    continue 'judged;
                }
                written += 1;
            }
            return;
        }
    }

    fn move_due(&mut self) {
        let Some(links) = &mut self.links else { return };
        let now = Instant::now();
        for direction in [Direction::Out, Direction::In] {
            while let Some(frame) = links[direction as usize].pop(now) {
                while let Some(full) = self.sides.write(&self.shared, direction, &frame) {
                    full.wait(libc::POLLOUT);
                }
            }
        }
        *locked(&self.shared.impaired) = [links[0].counts, links[1].counts];
    }
}

impl Sides {
    /// Writes a frame, and counts it. Returns the queue that has no room for it, if that is so: a pair's, since
    /// a TAP is never full.
    fn write(&self, shared: &Shared, direction: Direction, frame: &[u8]) -> Option<&TapQueue> {
        let queues = match direction {
            Direction::Out => &self.outer,
            Direction::In => &self.inner,
        };
        let moved = &shared.moved[direction as usize];
        // A hand-made guest has none: its frames are read by subscribers.
        let queue = self.queue_for(queues, frame)?;
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
            Err(error)
                if error.kind() == ErrorKind::WouldBlock && !shared.stop.load(Ordering::SeqCst) =>
            {
                return Some(queue);
            }
            Err(_) => {
                moved.failed.fetch_add(1, Ordering::Relaxed);
            }
        }
        None
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
