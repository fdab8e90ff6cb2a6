//! A serving worker allocates nothing, whatever frames pass.
use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    sync::atomic::{AtomicU64, Ordering},
};

use slipgate_vmm::virtio::{VirtioDevice, net::IoMethod};

#[allow(dead_code)]
#[path = "net/driver.rs"]
mod driver;

use driver::{HEADER, MAC, Rig, receive, transmit};

/// Allocator that counts the allocations of threads other than the test's.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static IS_TEST: Cell<bool> = const { Cell::new(false) };
}

// SAFETY: all calls are passed to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !IS_TEST.try_with(Cell::get).unwrap_or(true) {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Passes frames both ways: short, long, merged, spilled, and refused ones.
fn traffic(rig: &mut Rig, peer: &std::os::fd::OwnedFd) {
    for (round, bytes) in [60, 1_500, 9_000, 60, 30_000, 60, 60_000, 700]
        .into_iter()
        .enumerate()
    {
        let mut frame = vec![round as u8; bytes];
        frame[..6].copy_from_slice(&MAC);
        rig.send([0; HEADER], &frame);
        rig.send([0xff; HEADER], &frame);
        while receive(peer).is_some() {}
        rig.post(40, 2_000);
        transmit(peer, &[&[0; HEADER][..], &frame].concat());
        transmit(peer, &[&[0; HEADER][..], &frame[..60]].concat());
        rig.receive();
        rig.receive();
        while rig.rx().available_idx.wrapping_sub(rig.rx().used_idx) > 128 {
            transmit(peer, &[&[0; HEADER][..], &frame[..60]].concat());
            rig.receive();
        }
    }
}

#[test]
fn a_worker_allocates_nothing_once_it_serves() {
    IS_TEST.set(true);
    for io in [IoMethod::Vectored, IoMethod::IoUring] {
        let (mut rig, peer) = Rig::on_socket(io, u64::MAX, 256);
        // The workers have allocated all they need when their first frame has passed.
        rig.send([0; HEADER], &[0; 60]);
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        assert!(before > 0, "a worker's own buffers are counted");
        for _ in 0..50 {
            traffic(&mut rig, &peer);
        }
        assert!(rig.pair().rx_frames > 1_000 && rig.pair().rx_spilled_frames > 0);
        assert_eq!(ALLOCATIONS.load(Ordering::Relaxed), before);
        rig.net.reset();
    }
}
