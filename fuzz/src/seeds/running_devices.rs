//! The devices of a running VM as a snapshot has them: served in part, with more that waits.
use std::{
    thread,
    time::{Duration, Instant},
};

use slipgate_vmm::{
    fake::Driver,
    interrupt::MsiMessage,
    snapshot::{FunctionState, Progress},
};
use vm_memory::{Bytes as _, GuestAddress};

use crate::{
    driver::descriptor,
    snapshot::{
        devices::{BALLOON, DISK, Devices, MEMORY_BYTES, NET, PAIRS, SERVED, VSOCK, patches},
        kind,
    },
};

const SIZE: u16 = 16;
/// First descriptor of a queue's second chain.
const SECOND: u16 = 8;
/// Longest seed: libFuzzer changes one place of an input at a time.
const MAX_BYTES: usize = 4_096;
/// Functions' queues are at most so many.
const MAX_QUEUES: u64 = 8;
/// Time for a device to give chains back.
const SERVED_WITHIN: Duration = Duration::from_secs(20);
/// Length for which a descriptor's buffer has room.
const ROOM: u64 = 0x100;
const HEADER_BYTES: usize = 44;

/// What is with the devices beside what they have served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum More {
    /// Nothing but buffers for what comes.
    None,
    /// A chain in each queue that they have not seen.
    Offered,
    /// The same, and of the disk's they have taken the one of its first queue.
    Taken,
}

/// Devices whose queues have served a chain each.
pub(super) fn running(more: More) -> Vec<u8> {
    let guest = Guest::boot();
    guest.offer_all(0);
    guest.await_served();
    guest.devices.root.suspend();
    if more != More::None {
        // These are in the memory only.
        guest.offer_all(SECOND);
    }
    let (address, mut states) = guest.devices.root.state();
    let has_taken = queues(&mut states, NET).any(|queue| !queue.taken.is_empty());
    assert!(has_taken, "the card has taken buffers for frames");
    if more == More::Taken {
        let queue = queues(&mut states, DISK).find(|queue| queue.queue == 0);
        let queue = queue.expect("the disk's first queue is served");
        queue.next_available += 1;
        queue.taken = vec![SECOND];
    }
    let state = postcard::to_stdvec(&(address, states)).expect("plain data");
    let content = guest.devices.content();
    let seed = [&[kind::DEVICES][..], &patches(&content), &state].concat();
    assert!(seed.len() <= MAX_BYTES, "a seed of {} bytes", seed.len());
    seed
}

/// Returns how far a function's queues are served.
fn queues(states: &mut [FunctionState], function: u8) -> impl Iterator<Item = &mut Progress> {
    let transport = states[usize::from(function)].transport.as_mut();
    let device = transport.and_then(|transport| transport.device.as_mut());
    device.expect("it serves").queues.iter_mut()
}

/// A driver of each device.
struct Guest {
    devices: Devices,
}

impl Guest {
    fn boot() -> Self {
        let devices = Devices::new();
        for function in [NET, DISK, VSOCK, BALLOON] {
            let driver = Driver::find(&devices.root, function);
            assert!(driver.negotiate(driver.offered()));
            let queues = u16::from_le_bytes(driver.read(driver.common + 18));
            for queue in 0..queues {
                let ring = ring(function, queue);
                let rings = [ring, ring + 0x200, ring + 0x400];
                driver.set_up_queue(queue, SIZE, rings, queue + 1);
                let message = MsiMessage {
                    address: 0xfee0_0000,
                    data: 0x30 + u32::from(queue),
                };
                driver.set_message(queue + 1, message);
            }
            driver.set_config_vector(0);
            driver.set_msix(true, false);
            assert!(driver.driver_ok(), "function {function} serves");
        }
        Self { devices }
    }

    /// Offers a chain to each queue, the first descriptor of which is this one.
    fn offer_all(&self, first: u16) {
        let round = u8::from(first > 0);
        for pair in 0..PAIRS as u16 {
            // For frames that come, and a broadcast with an offload header of nothing.
            self.offer(NET, 2 * pair, first, &[(&[], 0x100, true)]);
            let frame = [
                &[0; 12][..],
                &[0xff; 6],
                &[2, 0, 0, 0, 0, 1, 8, 0],
                &[0; 46],
            ]
            .concat();
            self.offer(NET, 2 * pair + 1, first, &[(&frame, frame.len(), false)]);
        }
        let both_pairs = [4, 0, 2, 0];
        let command = [(&both_pairs[..2], 2, false), (&both_pairs[2..], 2, false)];
        let command = [&command[..], &[(&[], 1, true)]].concat();
        self.offer(NET, 2 * PAIRS as u16, first, &command);
        let read = [[0; 8], [1 + round, 0, 0, 0, 0, 0, 0, 0]].concat();
        let parts = [(&read[..], 16, false), (&[], 512, true)];
        let parts = [&parts[..], &[(&[], 1, true)]].concat();
        self.offer(DISK, 0, first, &parts);
        let write = [[1, 0, 0, 0, 0, 0, 0, 0], [5 + round, 0, 0, 0, 0, 0, 0, 0]].concat();
        let parts = [(&write[..], 16, false), (&[0xa5; 8], 512, false)];
        let parts = [&parts[..], &[(&[], 1, true)]].concat();
        self.offer(DISK, 1, first, &parts);
        self.offer(VSOCK, 0, first, &[(&[], 0x100, true)]);
        if first > 0 {
            // For the event that the machine was restored.
            self.offer(VSOCK, 2, first, &[(&[], 8, true)]);
        }
        // A request that nobody takes, which is reset.
        let request = vsock_request(1_000 + u32::from(round));
        self.offer(VSOCK, 1, first, &[(&request, HEADER_BYTES, false)]);
        let page = (MEMORY_BYTES as u32 / 4096 - 1 - u32::from(round)).to_le_bytes();
        self.offer(BALLOON, 0, first, &[(&page, 4, false)]);
        self.offer(BALLOON, 1, first, &[(&page, 4, false)]);
    }

    /// Writes a chain of parts, each with its content, its length and whether the device writes it.
    fn offer(&self, function: u8, queue: u16, first: u16, parts: &[(&[u8], usize, bool)]) {
        let ring = ring(function, queue);
        let mut buffer = buffers(function, queue) + u64::from(first) * ROOM;
        for (index, (content, bytes, is_written)) in (first..).zip(parts) {
            let goes_on = usize::from(index - first) + 1 < parts.len();
            let flags = u8::from(goes_on) | u8::from(*is_written) << 1;
            let entry = descriptor(buffer, *bytes as u32, flags, index + 1);
            self.write(ring + 16 * u64::from(index), &entry);
            self.write(buffer, content);
            buffer += (*bytes as u64).next_multiple_of(ROOM);
        }
        let offered = self.half(ring + 0x202);
        let slot = ring + 0x204 + 2 * u64::from(offered % SIZE);
        self.write(slot, &first.to_le_bytes());
        self.write(ring + 0x202, &(offered + 1).to_le_bytes());
        let driver = Driver::find(&self.devices.root, function);
        let bell = driver.bell(queue);
        assert!(self.devices.fabric.ring(bell), "there is a bell");
    }

    fn await_served(&self) {
        let until = Instant::now() + SERVED_WITHIN;
        let waits = |(function, queue): &(u8, u16)| self.half(ring(*function, *queue) + 0x402) == 0;
        while let Some(queue) = SERVED.iter().find(|queue| waits(queue)) {
            assert!(Instant::now() < until, "{queue:?} is not served");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn half(&self, at: u64) -> u16 {
        let mut bytes = [0; 2];
        let read = self.devices.memory.read_slice(&mut bytes, GuestAddress(at));
        read.expect("within the memory");
        u16::from_le_bytes(bytes)
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        let written = self.devices.memory.write_slice(bytes, GuestAddress(at));
        written.expect("within the memory");
    }
}

fn place(function: u8, queue: u16) -> u64 {
    u64::from(function - 1) * MAX_QUEUES + u64::from(queue)
}

/// Address of a queue's rings.
fn ring(function: u8, queue: u16) -> u64 {
    0x1000 + place(function, queue) * 0x800
}

/// Address of a queue's buffers.
fn buffers(function: u8, queue: u16) -> u64 {
    0x1_4000 + place(function, queue) * 0x1000
}

/// The header of a request for a connection (virtio 1.2, 5.10.6).
fn vsock_request(port: u32) -> Vec<u8> {
    let mut header = Vec::new();
    header.extend(7_u64.to_le_bytes());
    header.extend(2_u64.to_le_bytes());
    header.extend(port.to_le_bytes());
    header.extend(52_u32.to_le_bytes());
    header.extend(0_u32.to_le_bytes());
    // Stream, REQUEST.
    header.extend([1, 0, 1, 0]);
    header.extend(0_u32.to_le_bytes());
    header.extend(0x1_0000_u32.to_le_bytes());
    header.extend(0_u32.to_le_bytes());
    assert_eq!(header.len(), HEADER_BYTES);
    header
}
