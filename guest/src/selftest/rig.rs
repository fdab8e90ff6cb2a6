//! A card that is initialised step by step: queue pair 0, with all buffers under the check's
//! control.
use alloc::{format, vec::Vec};

use super::{Bench, Check, Miss, must, question};
use crate::{
    pci::Registers,
    virtio::{
        dma::Dma,
        net::{Config, Control, LARGEST, WANTED, feature},
        ring::{Ring, Segment, Used},
        transport::{Doorbell, NO_VECTOR, Transport, status},
    },
};

/// Vector of the send queue.
pub(super) const VECTOR: u16 = 1;
/// Length of `struct virtio_net_hdr`, bytes.
pub(super) const HEADER: usize = 12;
const QUEUE_SIZE: u16 = 256;
const ANSWER_NS: u64 = 3_000_000_000;
const ASK_AGAIN_NS: u64 = 500_000_000;
/// Time to wait for an interrupt that must not come, ns.
pub(super) const SETTLE_NS: u64 = 5_000_000;

/// Description of a buffer to the device.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// A single descriptor.
    One,
    /// Three descriptors in a chain.
    Chain,
    /// An indirect table of three.
    Indirect,
}

/// Settings of the card.
#[derive(Clone, Copy)]
pub(super) struct Setup {
    /// Features to negotiate, as far as they are offered.
    pub(super) features: u64,
    /// Description of the buffers of both directions.
    pub(super) shape: Shape,
    /// Least length of a receive buffer, bytes.
    pub(super) buffer: usize,
}

impl Setup {
    /// Returns the number of receive buffers of a queue of `size`, and the length of each in bytes:
    /// [`LARGEST`] bytes in all, and in each where large frames come in one.
    fn buffers(&self, size: usize) -> (usize, usize) {
        let per_buffer = if self.shape == Shape::Chain { 3 } else { 1 };
        let most = (size / per_buffer).max(1);
        let large = self.features & (feature::GUEST_TSO4 | feature::MRG_RXBUF);
        let least = match large == feature::GUEST_TSO4 {
            true => LARGEST,
            false => self.buffer,
        };
        let number = LARGEST.div_ceil(least).max(16).min(most);
        (number, LARGEST.div_ceil(number).max(least))
    }

    /// Ordinary buffers, and these features besides the [`PLAIN`] ones.
    pub(super) const fn with(features: u64) -> Self {
        Setup {
            features: PLAIN | features,
            shape: Shape::One,
            buffer: 2048,
        }
    }
}

/// Features of a check that is about something else.
pub(super) const PLAIN: u64 = feature::MAC | feature::STATUS | feature::CTRL_VQ;

/// Resets the card when dropped. It must be dropped before the memory that the card writes to.
pub(super) struct Running<'a, R: Registers + Clone>(pub(super) &'a Transport<R>);

impl<R: Registers + Clone> Drop for Running<'_, R> {
    fn drop(&mut self) {
        // If the reset fails, the next check's own reset reports it.
        let _ = self.0.reset();
    }
}

/// Card in operation, with the check's rings and buffers.
pub(super) struct Rig<'a, R: Registers + Clone> {
    _running: Running<'a, R>,
    pub(super) bench: &'a Bench<'a, R>,
    pub(super) features: u64,
    pub(super) mac: [u8; 6],
    pub(super) receive: Ring,
    receive_bell: Doorbell<R>,
    pub(super) send: Ring,
    send_bell: Doorbell<R>,
    pub(super) control: Option<Control<R>>,
    receive_memory: Dma,
    send_memory: Dma,
    /// Index of the receive buffer, by head.
    buffers: Vec<usize>,
    /// Number of receive buffers.
    number: usize,
    /// Length of a receive buffer, bytes.
    pub(super) length: usize,
    shape: Shape,
}

impl<'a, R: Registers + Clone> Rig<'a, R> {
    pub(super) fn new(bench: &'a Bench<'a, R>, setup: Setup) -> Result<Self, Miss> {
        let transport = bench.transport;
        let features = transport.negotiate(setup.features & (WANTED | setup.features))?;
        must!(
            transport.msix.vectors() > VECTOR,
            "only {} MSI-X vectors",
            transport.msix.vectors()
        );
        transport.msix.enable(bench.config);
        transport.msix.route(VECTOR, bench.apic_id, bench.interrupt);
        let (receive, receive_bell) = transport.make_queue(0, QUEUE_SIZE, NO_VECTOR, features)?;
        let (send, send_bell) = transport.make_queue(1, QUEUE_SIZE, VECTOR, features)?;
        let config = Config::read(transport, features, bench.own_mac);
        let mut control = None;
        if features & feature::CTRL_VQ != 0 {
            let index = if features & feature::MQ != 0 {
                config.most_pairs * 2
            } else {
                2
            };
            let (ring, bell) = transport.make_queue(index, QUEUE_SIZE, NO_VECTOR, features)?;
            control = Some(Control::new(ring, bell));
        }
        transport.start();
        must!(
            transport.status() & status::NEEDS_RESET == 0,
            "the device needs a reset after DRIVER_OK"
        );
        let negotiated = Setup { features, ..setup };
        let (number, length) = negotiated.buffers(receive.size().into());
        let mut rig = Rig {
            _running: Running(transport),
            bench,
            features,
            mac: config.mac,
            buffers: alloc::vec![usize::MAX; usize::from(receive.size())],
            receive,
            receive_bell,
            send,
            send_bell,
            control,
            receive_memory: Dma::new(number * length),
            send_memory: Dma::new(4096),
            number,
            length,
            shape: setup.shape,
        };
        for buffer in 0..number {
            rig.offer_buffer(buffer)?;
        }
        rig.send.disarm();
        Ok(rig)
    }

    /// Splits a buffer by the `Shape`: behind the header, and once more.
    fn segments(&self, start: u64, length: usize, device_writes: bool) -> Vec<Segment> {
        let piece = |offset: usize, length: usize| Segment {
            address: start + offset as u64,
            length: length as u32,
            device_writes,
        };
        match self.shape {
            Shape::One => alloc::vec![piece(0, length)],
            _ => alloc::vec![
                piece(0, HEADER),
                piece(HEADER, 100),
                piece(HEADER + 100, length - HEADER - 100),
            ],
        }
    }

    fn offer_buffer(&mut self, buffer: usize) -> Check {
        let start = self.receive_memory.address(buffer * self.length);
        let segments = self.segments(start, self.length, true);
        let head = match self.shape {
            Shape::Indirect => self.receive.offer_indirect(&segments),
            _ => self.receive.offer(&segments),
        };
        let head = head.ok_or("no room in the receive queue")?;
        self.buffers[usize::from(head)] = buffer;
        if self.receive.wants_kick() {
            self.receive_bell.ring();
        }
        Ok(())
    }

    /// Sends a frame behind a header. Does not wait.
    pub(super) fn send(&mut self, header: [u8; HEADER], frame: &[u8]) -> Check {
        // SAFETY: the frame before has been waited for.
        unsafe {
            self.send_memory
                .bytes_mut(0, HEADER)
                .copy_from_slice(&header);
            self.send_memory
                .bytes_mut(HEADER, frame.len())
                .copy_from_slice(frame);
        }
        let segments = self.segments(self.send_memory.address(0), HEADER + frame.len(), false);
        let head = match self.shape {
            Shape::Indirect => self.send.offer_indirect(&segments),
            _ => self.send.offer(&segments),
        };
        head.ok_or("no room in the send queue")?;
        if self.send.wants_kick() {
            self.send_bell.ring();
        }
        Ok(())
    }

    /// Sends the request, and waits until the device has returned the buffer.
    pub(super) fn send_and_wait(&mut self) -> Check {
        self.send([0; HEADER], &question::ask(self.mac, 0))?;
        self.await_sent()
    }

    /// Waits until the device has returned the sent buffer.
    pub(super) fn await_sent(&mut self) -> Check {
        let send = &self.send;
        must!(
            self.bench.wait(ANSWER_NS, || send.has_used()),
            "a frame that was sent is not returned"
        );
        let used = self
            .send
            .take_used()
            .ok_or("the device returned what it did not have")?;
        self.send.release(used.head);
        Ok(())
    }

    /// Sends DHCPDISCOVER until an offer comes. Returns the offer with its header, and its number
    /// of buffers.
    pub(super) fn ask(
        &mut self,
        prepare: impl Fn(&mut [u8; question::BYTES]) -> [u8; HEADER],
    ) -> Result<(Vec<u8>, usize), Miss> {
        let mut transaction = [0; 4];
        self.bench.platform.random(&mut transaction);
        let transaction = u32::from_ne_bytes(transaction);
        let end = self.bench.platform.now_ns() + ANSWER_NS;
        while self.bench.platform.now_ns() < end {
            let mut frame = question::ask(self.mac, transaction);
            let header = prepare(&mut frame);
            self.send(header, &frame)?;
            self.await_sent()?;
            let again = self.bench.platform.now_ns() + ASK_AGAIN_NS;
            while self.bench.platform.now_ns() < again {
                let left = again.saturating_sub(self.bench.platform.now_ns());
                let receive = &self.receive;
                if !self.bench.wait(left, || receive.has_used()) {
                    break;
                }
                let (frame, buffers) = self.take()?;
                if question::is_answer(&frame[HEADER..], transaction) {
                    return Ok((frame, buffers));
                }
            }
        }
        Err(format!("no DHCP offer within {} s", ANSWER_NS / 1_000_000_000).into())
    }

    /// Takes a received frame with its header, and offers its buffers again.
    fn take(&mut self) -> Result<(Vec<u8>, usize), Miss> {
        let mut frame = self.take_buffer()?;
        must!(
            frame.len() >= HEADER,
            "a received buffer of {} bytes",
            frame.len()
        );
        let mut buffers = 1;
        if self.features & feature::MRG_RXBUF != 0 {
            buffers = usize::from(u16::from_le_bytes([frame[10], frame[11]]));
            must!(
                (1..=self.number).contains(&buffers),
                "a frame of {buffers} buffers"
            );
            for _ in 1..buffers {
                // All of a frame's buffers are returned at once.
                must!(
                    self.receive.has_used(),
                    "a frame of {buffers} buffers has fewer"
                );
                frame.extend(self.take_buffer()?);
            }
        }
        Ok((frame, buffers))
    }

    fn take_buffer(&mut self) -> Result<Vec<u8>, Miss> {
        let Used { head, written } = self
            .receive
            .take_used()
            .ok_or("the device returned what it did not have")?;
        let buffer = self.buffers[usize::from(head)];
        let written = written as usize;
        must!(
            written <= self.length,
            "{written} bytes in a buffer of {}",
            self.length
        );
        // SAFETY: the device has returned it.
        let bytes = unsafe { self.receive_memory.bytes(buffer * self.length, written) }.to_vec();
        self.receive.release(head);
        self.offer_buffer(buffer)?;
        Ok(bytes)
    }

    /// Sends a control command, and waits for the answer.
    pub(super) fn command(
        &mut self,
        command: (u8, u8),
        data: &[u8],
    ) -> Result<(), crate::virtio::DeviceError> {
        let bench = self.bench;
        let end = bench.platform.now_ns() + ANSWER_NS;
        let control = self
            .control
            .as_mut()
            .ok_or(crate::virtio::DeviceError::Missing("control queue"))?;
        control.send(command, data, || {
            bench.platform.idle(Some(bench.platform.now_ns() + 50_000));
            bench.platform.now_ns() < end
        })
    }
}

impl<R> Bench<'_, R> {
    /// Waits until `done`. Returns false if `ns` pass before.
    pub(super) fn wait(&self, ns: u64, done: impl Fn() -> bool) -> bool {
        let end = self.platform.now_ns() + ns;
        while !done() {
            let now = self.platform.now_ns();
            if now >= end {
                return done();
            }
            self.platform.idle(Some(end.min(now + 50_000)));
        }
        true
    }

    /// Waits for the interrupts since `before` to be `count`, and for no more to come.
    pub(super) fn expect_interrupts(&self, before: u64, count: u64, when: &str) -> Check {
        let since = || (self.taken)() - before;
        if count > 0 {
            self.wait(ANSWER_NS, || since() >= count);
        }
        self.wait(SETTLE_NS, || since() > count);
        must!(
            since() == count,
            "{} interrupts instead of {count} {when}",
            since()
        );
        Ok(())
    }
}
