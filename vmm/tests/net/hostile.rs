//! A driver that breaks the protocol. Each time the card sets DEVICE_NEEDS_RESET and counts it, the
//! worker stops, and after a reset the card works.
use std::sync::atomic::Ordering;

use slipgate_vmm::virtio::{VirtioDevice, net::IoMethod};

use super::driver::{BUFFERS, HEADER, MAC, Rig, eventually, sockets, transmit, wait_receive};

const ALL: u64 = u64::MAX;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const OUTSIDE: u64 = 0x4000_0000_0000;

fn frame() -> Vec<u8> {
    let mut frame = vec![0; HEADER + 60];
    frame[HEADER..HEADER + 6].copy_from_slice(&MAC);
    frame
}

/// Action of a hostile driver on a queue.
type Attack = fn(&mut Rig, usize);

/// Writes one descriptor and makes it available.
fn one(rig: &mut Rig, queue: usize, descriptor: (u64, u32, u16, u16)) {
    let it = &mut rig.queues[queue];
    it.descriptor(it.descriptors, 0, descriptor);
    it.offer(0);
}

const ATTACKS: &[(&str, Attack)] = &[
    ("index jump", |rig, queue| {
        let it = &rig.queues[queue];
        let jump = it.available_idx.wrapping_add(it.size + 1);
        it.half(it.available + 2).store(jump, Ordering::Release);
    }),
    ("index backwards", |rig, queue| {
        let it = &rig.queues[queue];
        let back = it.available_idx.wrapping_sub(1);
        it.half(it.available + 2).store(back, Ordering::Release);
    }),
    ("head outside", |rig, queue| rig.queues[queue].offer(64)),
    ("next outside", |rig, queue| {
        let flags = NEXT | if queue == 0 { WRITE } else { 0 };
        one(rig, queue, (BUFFERS, 20, flags, 64));
    }),
    ("loop", |rig, queue| {
        let flags = NEXT | if queue == 0 { WRITE } else { 0 };
        one(rig, queue, (BUFFERS, 20, flags, 0));
    }),
    ("address outside", |rig, queue| {
        let flags = if queue == 0 { WRITE } else { 0 };
        one(rig, queue, (OUTSIDE, 2_000, flags, 0));
    }),
    ("address over the end", |rig, queue| {
        let flags = if queue == 0 { WRITE } else { 0 };
        one(rig, queue, ((192 << 20) - 100, 2_000, flags, 0));
    }),
    ("address wraps", |rig, queue| {
        let flags = if queue == 0 { WRITE } else { 0 };
        one(rig, queue, (u64::MAX - 10, 2_000, flags, 0));
    }),
    ("wrong direction", |rig, queue| {
        let flags = if queue == 0 { 0 } else { WRITE };
        one(rig, queue, (BUFFERS, 2_000, flags, 0));
    }),
    ("indirect in indirect", |rig, queue| {
        let it = &rig.queues[queue];
        it.descriptor(BUFFERS, 0, (BUFFERS, 16, INDIRECT, 0));
        one(rig, queue, (BUFFERS, 16, INDIRECT, 0));
    }),
    ("indirect behind a buffer in indirect", |rig, queue| {
        let it = &rig.queues[queue];
        let write = if queue == 0 { WRITE } else { 0 };
        it.descriptor(BUFFERS, 0, (BUFFERS + 64, 20, NEXT | write, 1));
        it.descriptor(BUFFERS, 1, (BUFFERS, 16, INDIRECT, 0));
        one(rig, queue, (BUFFERS, 32, INDIRECT, 0));
    }),
    ("indirect and next", |rig, queue| {
        one(rig, queue, (BUFFERS, 16, INDIRECT | NEXT, 0));
    }),
    ("indirect of no entries", |rig, queue| {
        one(rig, queue, (BUFFERS, 0, INDIRECT, 0))
    }),
    ("indirect of half an entry", |rig, queue| {
        one(rig, queue, (BUFFERS, 24, INDIRECT, 0))
    }),
    ("indirect outside", |rig, queue| {
        one(rig, queue, (OUTSIDE, 16, INDIRECT, 0))
    }),
    ("indirect without end", |rig, queue| {
        let it = &rig.queues[queue];
        let write = if queue == 0 { WRITE } else { 0 };
        for index in 0..200 {
            it.descriptor(BUFFERS, index, (BUFFERS, 1, NEXT | write, index + 1));
        }
        one(rig, queue, (BUFFERS, 200 * 16, INDIRECT, 0));
    }),
];

#[test]
fn a_broken_ring_needs_a_reset_and_harms_nobody_else() {
    for io in [IoMethod::Vectored, IoMethod::IoUring] {
        for queue in [0, 1] {
            for (name, attack) in ATTACKS {
                let ((a, peer_a), (b, peer_b)) = (sockets(), sockets());
                let mut rig = Rig::new(vec![a, b], io);
                rig.start(ALL, 64);
                assert_eq!(rig.command(4, 0, &[2, 0]), 0);
                attack(&mut rig, queue);
                rig.queues[queue].kick_event.write(1).unwrap();
                eventually(name, || rig.needs_reset());
                assert_eq!(rig.pair().broken_rings, 1, "{name}");
                // The other pair goes on.
                rig.add_on(3, &frame());
                rig.queues[3].kick();
                wait_receive(&peer_b);
                // This pair works after a reset.
                rig.net.reset();
                rig.start(ALL, 64);
                rig.send([0; HEADER], &frame()[HEADER..]);
                wait_receive(&peer_a);
                rig.post(1, 2_000);
                transmit(&peer_a, &frame());
                rig.receive();
            }
        }
    }
}

#[test]
fn a_broken_control_queue_needs_a_reset() {
    for (name, attack) in ATTACKS
        .iter()
        .filter(|(name, _)| *name != "wrong direction")
    {
        let (mut rig, _peer) = Rig::on_socket(IoMethod::Auto, ALL, 64);
        attack(&mut rig, 2);
        rig.queues[2].kick_event.write(1).unwrap();
        eventually(name, || rig.needs_reset());
        assert_eq!(rig.counters.snapshot().control_broken_rings, 1, "{name}");
        rig.net.reset();
        rig.start(ALL, 64);
        assert_eq!(rig.command(0, 1, &[1]), 0);
    }
}

#[test]
fn indirect_tables_need_to_be_negotiated() {
    let (mut rig, _peer) = Rig::on_socket(IoMethod::Auto, ALL & !(1 << 28), 64);
    rig.tx().use_indirect();
    let at = rig.tx().next_buffer(100);
    rig.tx().add(&[(at, 72, false)]);
    rig.tx().kick();
    eventually("it is noticed", || rig.needs_reset());
}

#[test]
fn the_same_buffer_twice_is_the_drivers_own_harm() {
    let (mut rig, peer) = Rig::on_socket(IoMethod::Auto, ALL, 64);
    let it = &mut rig.queues[0];
    it.descriptor(it.descriptors, 0, (BUFFERS, 1_000, WRITE, 0));
    for _ in 0..64 {
        it.offer(0);
    }
    it.kick();
    for _ in 0..30 {
        transmit(&peer, &vec![1; 5_000]);
    }
    eventually("as many as there are buffers", || {
        rig.rx().used_idx_now() >= 60
    });
    rig.net.reset();
}

#[test]
fn a_header_that_changes_after_the_check_is_not_sent() {
    // The checked copy is what is sent: whatever the guest writes meanwhile, the peer sees one of
    // the two headers whole, and never an invalid one.
    let (mut rig, peer) = Rig::on_socket(IoMethod::Auto, ALL, 64);
    let at = rig.tx().next_buffer(100);
    rig.write(at, &frame());
    let memory = std::sync::Arc::clone(&rig.memory);
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let stopped = std::sync::Arc::clone(&stop);
    let flipper = std::thread::spawn(move || {
        use vm_memory::{Bytes, GuestAddress};
        while !stopped.load(Ordering::Relaxed) {
            for gso_type in [0x7f_u8, 0] {
                memory.write_obj(gso_type, GuestAddress(at + 1)).unwrap();
            }
        }
    });
    for _ in 0..2_000 {
        rig.tx().add(&[(at, 72, false)]);
        rig.tx().kick();
        rig.tx().wait_used();
        while let Some(got) = super::driver::receive(&peer) {
            assert_eq!(got[1], 0);
        }
    }
    stop.store(true, Ordering::Relaxed);
    flipper.join().unwrap();
}
