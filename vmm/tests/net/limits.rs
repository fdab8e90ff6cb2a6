//! Rate limits: what is beyond them waits, is not lost, and costs no thread anything.
use std::time::{Duration, Instant};

use slipgate_vmm::virtio::{
    VirtioDevice,
    net::{IoMethod, NetRates},
    rate::{BucketConfig, RateConfig},
};

use super::driver::{HEADER, MAC, Rig, eventually, receive, sockets, transmit, wait_receive};

const METHODS: [IoMethod; 2] = [IoMethod::Vectored, IoMethod::IoUring];
const ALL: u64 = u64::MAX;
const HOUR: Duration = Duration::from_secs(3600);
/// Values of `virtio_net_hdr` for a TCP segment over IPv4: GSO type and flag.
const TCPV4: u8 = 1;
const NEEDS_CSUM: u8 = 1;

/// At most `size` packets at once, and the same in each `refill`.
fn packets(size: u64, refill: Duration) -> RateConfig {
    let operations = Some(BucketConfig {
        size,
        one_time_burst: 0,
        refill,
    });
    RateConfig {
        operations,
        bytes: None,
    }
}

fn limited(io: IoMethod, rates: NetRates) -> (Rig, std::os::fd::OwnedFd) {
    let (ours, theirs) = sockets();
    let mut rig = Rig::limited(vec![ours], io, rates);
    rig.start(ALL, 64);
    (rig, theirs)
}

/// A frame with its header, and its number in it.
fn frame(number: u8) -> Vec<u8> {
    let mut frame = vec![number; HEADER + 100];
    frame[..HEADER].fill(0);
    frame[HEADER..HEADER + 6].copy_from_slice(&MAC);
    frame
}

/// Fails unless the worker makes no system call for a while.
fn assert_sleeps(rig: &Rig) {
    // It may still be polling.
    std::thread::sleep(Duration::from_millis(20));
    let before = rig.pair().syscalls;
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(rig.pair().syscalls, before, "it sleeps");
}

#[test]
fn frames_beyond_the_limit_wait_in_the_ring_and_no_reset_renews_it() {
    for io in METHODS {
        let tx = packets(4, HOUR);
        let (mut rig, peer) = limited(
            io,
            NetRates {
                tx,
                ..NetRates::default()
            },
        );
        for number in 0..10 {
            rig.add_on(1, &frame(number));
        }
        rig.tx().kick();
        for number in 0..4 {
            assert_eq!(wait_receive(&peer), frame(number));
        }
        eventually("the wait is counted", || rig.pair().tx_throttled == 1);
        assert_sleeps(&rig);
        // The other direction is not concerned.
        rig.post(1, 2_000);
        transmit(&peer, &frame(77));
        assert_eq!(rig.receive()[HEADER..], frame(77)[HEADER..]);
        // A command is heard, and the card's next driver has no more than this one.
        rig.net.reset();
        rig.start(ALL, 64);
        rig.add_on(1, &frame(99));
        rig.tx().kick();
        eventually("the wait is counted", || rig.pair().tx_throttled == 2);
        assert_eq!(receive(&peer), None);
        assert_eq!(rig.pair().tx_frames, 4);
        assert_eq!(rig.pair().drops.values().sum::<u64>(), 0);
    }
}

#[test]
fn frames_beyond_the_limit_stay_in_the_tap() {
    for io in METHODS {
        let rx = packets(4, HOUR);
        let (mut rig, peer) = limited(
            io,
            NetRates {
                rx,
                ..NetRates::default()
            },
        );
        rig.post(32, 2_000);
        for number in 0..10 {
            transmit(&peer, &frame(number));
        }
        for number in 0..4 {
            assert_eq!(rig.receive()[HEADER..], frame(number)[HEADER..]);
        }
        eventually("the wait is counted", || rig.pair().rx_throttled == 1);
        assert_sleeps(&rig);
        assert_eq!(rig.pair().rx_frames, 4);
        rig.add_on(1, &frame(77));
        rig.tx().kick();
        assert_eq!(wait_receive(&peer), frame(77));
    }
}

#[test]
fn the_rate_is_held_and_nothing_is_lost() {
    const FRAMES: u8 = 24;
    for io in METHODS {
        // 100 a second, four at once.
        let rate = packets(4, Duration::from_millis(40));
        let begin = Instant::now();
        let (mut rig, peer) = limited(io, NetRates { tx: rate, rx: rate });
        rig.post(32, 2_000);
        for number in 0..FRAMES {
            rig.add_on(1, &frame(number));
            transmit(&peer, &frame(number));
        }
        rig.tx().kick();
        for number in 0..FRAMES {
            assert_eq!(wait_receive(&peer), frame(number));
            assert_eq!(rig.receive()[HEADER..], frame(number)[HEADER..]);
        }
        let least = Duration::from_millis(10) * u32::from(FRAMES - 4 - 1);
        assert!(begin.elapsed() >= least, "{:?}", begin.elapsed());
        let pair = rig.pair();
        assert!(pair.tx_throttled > 0 && pair.rx_throttled > 0);
        assert_eq!(pair.drops.values().sum::<u64>(), 0);
    }
}

#[test]
fn a_gso_frame_is_as_many_packets_as_it_becomes() {
    for io in METHODS {
        let tx = packets(20, HOUR);
        let (mut rig, peer) = limited(
            io,
            NetRates {
                tx,
                ..NetRates::default()
            },
        );
        // 10 segments of 1,000 bytes behind 54 of headers: twice, and a third that waits.
        let mut whole = vec![0; HEADER + 54 + 10_000];
        whole[0] = NEEDS_CSUM;
        whole[1] = TCPV4;
        for (at, half) in [(2, 54_u16), (4, 1_000), (6, 34), (8, 16)] {
            whole[at..at + 2].copy_from_slice(&half.to_le_bytes());
        }
        for _ in 0..3 {
            rig.add_on(1, &whole);
        }
        rig.tx().kick();
        eventually("the wait is counted", || rig.pair().tx_throttled == 1);
        assert_eq!(
            [wait_receive(&peer).len(), wait_receive(&peer).len()],
            [whole.len(); 2]
        );
        assert_eq!(receive(&peer), None);
    }
}
