//! Measures the cost of a frame from the guest's ring through the TAP and back into the guest's
//! ring, by each method, at three lengths, with one and two pairs.
//!
//! The driver sleeps on its interrupts as a guest would, and a filter on the TAP turns each frame
//! around: see `tap`.
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use slipgate_testbed::require_root_and_tun;
use slipgate_vmm::virtio::{
    VirtioDevice,
    net::{IoMethod, PairSnapshot},
};

use super::{
    driver::{DriverQueue, HEADER, Interrupts, Rig, Sleeper},
    tap::{datagram, header, segment, turning},
};

const ALL: u64 = u64::MAX;
pub(super) const QUEUE: u16 = 1024;
pub(super) const RUN: Duration = Duration::from_millis(1_500);
/// Buffers in flight per pair: fewer than the TAP's queue holds, so that no frame is lost.
const IN_FLIGHT: u32 = 768;

struct Row {
    frames_per_s: f64,
    cpu_ns: f64,
    driver_ns: f64,
    syscalls: f64,
    interrupts: f64,
    kicks: f64,
    spilled: f64,
    lost: u64,
}

pub(super) fn cpu(clock: libc::clockid_t) -> Duration {
    // SAFETY: a timespec is plain data.
    let mut time: libc::timespec = unsafe { std::mem::zeroed() };
    // SAFETY: the time outlives the call.
    assert_eq!(unsafe { libc::clock_gettime(clock, &raw mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// What a driver did.
pub(super) struct Driven {
    /// CPU time of its thread.
    pub(super) cpu: Duration,
    /// Frames that came back.
    pub(super) frames: u64,
}

/// Returns the length of the buffers for frames of this length.
pub(super) fn buffer_bytes(frame_bytes: u32) -> u32 {
    if frame_bytes > 2_000 { 4_096 } else { 1_536 }
}

/// Makes all receive buffers available, and all send descriptors of one frame. Each descriptor keeps
/// its buffer.
pub(super) fn prepare(rx: &mut DriverQueue, tx: &mut DriverQueue, frame_bytes: u32) {
    let buffer_bytes = buffer_bytes(frame_bytes);
    for index in 0..QUEUE {
        let at = rx.next_buffer(buffer_bytes);
        rx.descriptor(rx.descriptors, index, (at, buffer_bytes, 2, 0));
        rx.offer(index);
        let at = tx.buffers[&0];
        tx.descriptor(
            tx.descriptors,
            index,
            (at, frame_bytes + HEADER as u32, 0, 0),
        );
    }
    rx.kick();
}

/// Returns the frame that is sent, behind its header.
pub(super) fn frame(frame_bytes: usize) -> Vec<u8> {
    if frame_bytes > 2_000 {
        [
            &header(1, 1, [54, 1_448, 34, 16])[..],
            &segment(frame_bytes),
        ]
        .concat()
    } else {
        [&header(0, 0, [0; 4])[..], &datagram(frame_bytes)].concat()
    }
}

/// Keeps frames in flight until `stop` is set.
pub(super) fn drive(
    rx: &mut DriverQueue,
    tx: &mut DriverQueue,
    frame_bytes: u32,
    interrupts: &Interrupts,
    stop: &AtomicBool,
) -> Driven {
    let begin = cpu(libc::CLOCK_THREAD_CPUTIME_ID);
    let sleeper = Sleeper::new(&[
        interrupts.descriptor(rx.index),
        interrupts.descriptor(tx.index),
    ])
    .unwrap();
    prepare(rx, tx, frame_bytes);
    // Buffers that the frame being received still has.
    let (mut frames, mut merged) = (0, 0_u16);
    let (mut free, mut flying) = (u32::from(QUEUE), 0_u32);
    let mut head: u16 = 0;
    let mut touched = 0;
    while !stop.load(Ordering::Relaxed) {
        let mut any = false;
        let (free_before, flying_before) = (free, flying);
        while tx.take_used().is_some() {
            free += 1;
        }
        while let Some((head, len)) = rx.take_used() {
            // Reads from the frame, as a driver would.
            touched += rx.get::<u16>(rx.buffer_of(head)) as u64 + u64::from(len);
            if merged == 0 {
                merged = rx.get::<u16>(rx.buffer_of(head) + 10);
                frames += 1;
            }
            merged = merged.saturating_sub(1);
            flying = flying.saturating_sub(1);
            rx.offer(head);
            any = true;
        }
        any |= free != free_before || flying != flying_before;
        let per_frame = (frame_bytes + HEADER as u32).div_ceil(buffer_bytes(frame_bytes));
        while free > 0 && flying + per_frame <= IN_FLIGHT {
            tx.offer(head);
            head = (head + 1) % QUEUE;
            free -= 1;
            flying += per_frame;
            any = true;
        }
        if any {
            rx.kick();
            tx.kick();
            continue;
        }
        // Ask for an interrupt at the next used buffer of either queue.
        rx.set_used_event(rx.used_idx);
        tx.set_used_event(tx.used_idx.wrapping_add(64));
        if rx.used_idx == rx.used_idx_now() {
            sleeper.sleep(50);
            // Lost frames do not come back.
            if rx.used_idx == rx.used_idx_now() && tx.used_idx == tx.used_idx_now() {
                flying = 0;
            }
        }
    }
    std::hint::black_box(touched);
    Driven {
        cpu: cpu(libc::CLOCK_THREAD_CPUTIME_ID) - begin,
        frames,
    }
}

fn run(io: IoMethod, frame_bytes: usize, pairs: usize) -> Row {
    let (ns, taps) = turning("vmmnetrun", pairs);
    let mut rig = Rig::new(taps, io);
    rig.start(ALL, QUEUE);
    if pairs > 1 {
        assert_eq!(rig.command(4, 0, &(pairs as u16).to_le_bytes()), 0);
    }
    let mut frame = frame(frame_bytes);
    let stop = Arc::new(AtomicBool::new(false));
    let mut threads = Vec::new();
    let mut queues = std::mem::take(&mut rig.queues).into_iter();
    let process = cpu(libc::CLOCK_PROCESS_CPUTIME_ID);
    let begin = Instant::now();
    for pair in 0..pairs {
        let (mut rx, mut tx) = (queues.next().unwrap(), queues.next().unwrap());
        // Each pair has a flow of its own.
        frame[HEADER + 35] = pair as u8;
        let at = tx.next_buffer(frame_bytes as u32 + 12);
        rig.write(at, &frame);
        tx.buffers.insert(0, at);
        let (interrupts, stop) = (Arc::clone(&rig.interrupts), Arc::clone(&stop));
        threads.push(thread::spawn(move || {
            drive(&mut rx, &mut tx, frame_bytes as u32, &interrupts, &stop)
        }));
    }
    thread::sleep(RUN);
    stop.store(true, Ordering::Relaxed);
    let drivers: Duration = threads
        .into_iter()
        .map(|thread| thread.join().unwrap().cpu)
        .sum();
    let elapsed = begin.elapsed();
    let all = cpu(libc::CLOCK_PROCESS_CPUTIME_ID) - process;
    rig.net.reset();
    let counted = rig.counters.snapshot();
    let sum = |of: fn(&PairSnapshot) -> u64| counted.pairs.iter().map(of).sum::<u64>() as f64;
    let frames = sum(|pair| pair.rx_frames);
    assert!(frames > 100.0, "{counted:?}");
    assert!(!rig.needs_reset());
    drop(ns);
    Row {
        frames_per_s: frames / elapsed.as_secs_f64(),
        cpu_ns: (all - drivers).as_nanos() as f64 / frames,
        driver_ns: drivers.as_nanos() as f64 / frames,
        // A frame is counted once on its way out and once on its way in.
        syscalls: sum(|pair| pair.syscalls) / (frames + sum(|pair| pair.tx_frames)),
        interrupts: sum(|pair| pair.interrupts) / frames,
        kicks: sum(|pair| pair.kicks) / frames,
        spilled: sum(|pair| pair.rx_spilled_frames) / frames,
        lost: (sum(|pair| pair.tx_frames) - frames) as u64,
    }
}

#[test]
#[ignore = "a measurement"]
fn ring_to_tap_to_ring() {
    require_root_and_tun!();
    println!(
        "bytes pairs method    frames/s  worker-ns/frame driver-ns  syscalls/frame interrupts kicks spilled lost"
    );
    for pairs in [1, 2] {
        for bytes in [64, 1_500, 60_000] {
            for _ in 0..3 {
                for io in [IoMethod::Vectored, IoMethod::IoUring] {
                    let row = run(io, bytes, pairs);
                    println!(
                        "{bytes:>5} {pairs:>5} {:<9} {:>8.0} {:>15.0} {:>9.0} {:>15.3} {:>10.4} {:>5.4} {:>7.4} {}",
                        format!("{io:?}"),
                        row.frames_per_s,
                        row.cpu_ns,
                        row.driver_ns,
                        row.syscalls,
                        row.interrupts,
                        row.kicks,
                        row.spilled,
                        row.lost,
                    );
                }
            }
        }
    }
}
