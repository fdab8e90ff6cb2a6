//! Frames in both directions, by each method.
use slipgate_vmm::virtio::{VirtioDevice, net::IoMethod};

use super::driver::{
    EVENT_IDX, HEADER, INDIRECT, MRG_RXBUF, Rig, eventually, receive, transmit, wait_receive,
};

const METHODS: [IoMethod; 2] = [IoMethod::Vectored, IoMethod::IoUring];
const PLAIN: [u8; HEADER] = [0; HEADER];
const ALL: u64 = u64::MAX;

/// Returns a frame of `bytes`. Each byte depends on its position.
fn frame(bytes: usize) -> Vec<u8> {
    let mut frame: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
    frame[..6].copy_from_slice(&super::driver::MAC);
    frame
}

fn with_header(header: [u8; HEADER], frame: &[u8]) -> Vec<u8> {
    [&header[..], frame].concat()
}

/// Returns a frame as the guest receives it in one buffer, with its header.
fn received(frame: &[u8]) -> Vec<u8> {
    let mut header = PLAIN;
    header[10] = 1;
    with_header(header, frame)
}

#[test]
fn the_guest_sends() {
    for io in METHODS {
        for features in [0, EVENT_IDX, ALL] {
            let (mut rig, peer) = Rig::on_socket(io, features, 64);
            for bytes in [14, 64, 1514, 60_000, 65_549] {
                rig.send(PLAIN, &frame(bytes));
                assert_eq!(wait_receive(&peer), with_header(PLAIN, &frame(bytes)));
            }
            let pair = rig.pair();
            assert_eq!(
                (pair.tx_frames, pair.tx_bytes),
                (5, 14 + 64 + 1514 + 60_000 + 65_549)
            );
            assert!(!rig.needs_reset());
        }
    }
}

#[test]
fn a_frame_may_lie_in_any_pieces() {
    let whole = with_header(PLAIN, &frame(600));
    for io in METHODS {
        for indirect in [false, true] {
            let (mut rig, peer) = Rig::on_socket(io, ALL, 64);
            if indirect {
                assert!(rig.net.features() & INDIRECT != 0);
                rig.tx().use_indirect();
            }
            for cuts in [
                &[12][..],
                &[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
                &[5, 0, 30],
                &[11, 2],
                &[12, 14, 20, 20],
                &[611],
            ] {
                let mut buffers = Vec::new();
                let mut rest = &whole[..];
                for cut in cuts.iter().copied().chain([usize::MAX]) {
                    let (part, behind) = rest.split_at(cut.min(rest.len()));
                    let at = rig.tx().next_buffer(part.len() as u32);
                    rig.write(at, part);
                    buffers.push((at, part.len() as u32, false));
                    rest = behind;
                }
                let head = rig.tx().add(&buffers);
                rig.tx().kick();
                assert_eq!(rig.tx().wait_used(), (head, 0));
                assert_eq!(wait_receive(&peer), whole, "{cuts:?}");
            }
        }
    }
}

#[test]
fn the_guest_receives() {
    for io in METHODS {
        for features in [0, EVENT_IDX, MRG_RXBUF, ALL] {
            let (mut rig, peer) = Rig::on_socket(io, features, 64);
            rig.post(8, 66_000);
            for bytes in [14, 64, 1514, 60_000, 65_553] {
                transmit(&peer, &with_header(PLAIN, &frame(bytes)));
                assert_eq!(rig.receive(), received(&frame(bytes)));
            }
            let pair = rig.pair();
            assert_eq!(
                (pair.rx_frames, pair.rx_buffers, pair.rx_spilled_frames),
                (5, 5, 0)
            );
        }
    }
}

#[test]
fn buffers_are_merged_and_what_is_left_over_is_used_next() {
    for io in METHODS {
        let (mut rig, peer) = Rig::on_socket(io, ALL, 256);
        rig.post(200, 1_000);
        let sizes = [3_000, 20_000, 988, 989, 64, 60_000, 1_500, 1_988];
        for bytes in sizes {
            transmit(&peer, &with_header(PLAIN, &frame(bytes)));
            let got = rig.receive();
            let count = (bytes + HEADER).div_ceil(1_000);
            assert_eq!(usize::from(u16::from_le_bytes([got[10], got[11]])), count);
            assert_eq!(&got[HEADER..], frame(bytes), "{bytes}");
        }
        let pair = rig.pair();
        let buffers: usize = sizes
            .iter()
            .map(|bytes| (bytes + HEADER).div_ceil(1_000))
            .sum();
        assert_eq!(pair.rx_buffers, buffers as u64);
        // The first, and those much longer than all before.
        assert!((1..=4).contains(&pair.rx_spilled_frames), "{pair:?}");
        assert!(!rig.needs_reset());
    }
}

#[test]
fn a_burst_comes_out_in_order() {
    for io in METHODS {
        let (mut rig, peer) = Rig::on_socket(io, ALL, 256);
        rig.post(250, 2_000);
        let sizes: Vec<usize> = (0..60).map(|at| 60 + (at * 977) % 5_000).collect();
        for bytes in &sizes {
            transmit(&peer, &with_header(PLAIN, &frame(*bytes)));
        }
        for bytes in &sizes {
            assert_eq!(&rig.receive()[HEADER..], frame(*bytes));
        }
    }
}

#[test]
fn frames_wait_in_the_tap_while_the_guest_has_no_buffers() {
    for io in METHODS {
        for features in [0, ALL] {
            let (mut rig, peer) = Rig::on_socket(io, features, 64);
            for bytes in [100, 200, 300] {
                transmit(&peer, &with_header(PLAIN, &frame(bytes)));
            }
            eventually("the wait is counted", || rig.pair().rx_waits > 0);
            std::thread::sleep(std::time::Duration::from_millis(20));
            let before = rig.pair();
            std::thread::sleep(std::time::Duration::from_millis(50));
            assert_eq!(rig.pair().syscalls, before.syscalls, "it sleeps");
            assert_eq!(before.rx_frames, 0);
            rig.post(3, 2_000);
            for bytes in [100, 200, 300] {
                assert_eq!(rig.receive(), received(&frame(bytes)));
            }
            assert_eq!(rig.pair().drops.values().sum::<u64>(), 0);
        }
    }
}

#[test]
fn a_spilled_frame_waits_for_the_buffers_it_lacks() {
    for io in METHODS {
        let (mut rig, peer) = Rig::on_socket(io, ALL, 64);
        rig.post(2, 1_000);
        transmit(&peer, &with_header(PLAIN, &frame(5_000)));
        transmit(&peer, &with_header(PLAIN, &frame(70)));
        std::thread::sleep(std::time::Duration::from_millis(10));
        assert!(rig.rx().take_used().is_none());
        rig.post(10, 1_000);
        assert_eq!(&rig.receive()[HEADER..], frame(5_000));
        assert_eq!(&rig.receive()[HEADER..], frame(70));
        assert_eq!(rig.pair().drops.values().sum::<u64>(), 0);
    }
}

#[test]
fn a_frame_that_no_buffers_come_for_is_dropped_and_counted() {
    for io in METHODS {
        let (mut rig, peer) = Rig::on_socket(io, ALL, 64);
        rig.post(3, 1_000);
        transmit(&peer, &with_header(PLAIN, &frame(5_000)));
        transmit(&peer, &with_header(PLAIN, &frame(70)));
        assert_eq!(&rig.receive()[HEADER..], frame(70));
        assert_eq!(rig.dropped("rx_ring_size"), 1);
    }
}

#[test]
fn a_frame_longer_than_a_buffer_that_can_not_be_merged_is_dropped_and_counted() {
    for io in METHODS {
        let (mut rig, peer) = Rig::on_socket(io, 0, 64);
        rig.post(2, 1_526);
        transmit(&peer, &with_header(PLAIN, &frame(1_515)));
        transmit(&peer, &with_header(PLAIN, &frame(1_514)));
        assert_eq!(rig.receive(), received(&frame(1_514)));
        assert_eq!(rig.dropped("rx_buffer_size"), 1);
        // The buffer was not lost.
        transmit(&peer, &with_header(PLAIN, &frame(80)));
        assert_eq!(rig.receive(), received(&frame(80)));
    }
}

#[test]
fn a_checksum_flag_is_cleared_for_a_guest_that_did_not_ask_for_it() {
    let mut header = PLAIN;
    header[0] = 2;
    for (features, flags) in [(ALL, 2), (ALL & !2, 0)] {
        let (mut rig, peer) = Rig::on_socket(IoMethod::Auto, features, 64);
        rig.post(1, 2_000);
        transmit(&peer, &with_header(header, &frame(80)));
        assert_eq!(rig.receive()[0], flags);
    }
}

/// The TAP may hold frames from before a reset, made for a driver that accepted more.
#[test]
fn a_frame_that_the_guest_did_not_negotiate_is_dropped_and_counted() {
    const GUEST_CSUM: u64 = 1 << 1;
    const GUEST_TSO4: u64 = 1 << 7;
    let checksum = [1, 0, 0, 0, 0, 0, 34, 0, 16, 0, 0, 0];
    let gso = [1, 1, 54, 0, 200, 0, 34, 0, 16, 0, 0, 0];
    for (header, lacking) in [(checksum, GUEST_CSUM), (gso, GUEST_CSUM), (gso, GUEST_TSO4)] {
        for io in METHODS {
            let (mut rig, peer) = Rig::on_socket(io, ALL & !lacking, 64);
            rig.post(2, 2_000);
            transmit(&peer, &with_header(header, &frame(1_000)));
            transmit(&peer, &with_header(PLAIN, &frame(80)));
            assert_eq!(rig.receive(), received(&frame(80)));
            assert_eq!(rig.dropped("rx_offload"), 1);
        }
    }
    // With all features, both pass.
    let (mut rig, peer) = Rig::on_socket(IoMethod::Auto, ALL, 64);
    rig.post(2, 2_000);
    for header in [checksum, gso] {
        transmit(&peer, &with_header(header, &frame(1_000)));
        assert_eq!(rig.receive()[..2], header[..2]);
    }
}

#[test]
fn bad_frames_are_given_back_counted_and_never_sent() {
    for io in METHODS {
        let (mut rig, peer) = Rig::on_socket(io, ALL & !(1 << 14), 64);
        let mut gso = PLAIN;
        gso[1] = 1;
        let mut checksum = PLAIN;
        checksum[0] = 1;
        checksum[6] = 200;
        for (header, bytes, reason) in [
            (PLAIN, 13, "tx_short"),
            (PLAIN, 65_550, "tx_long"),
            (gso, 1_000, "tx_gso"),
            (checksum, 100, "tx_checksum"),
        ] {
            rig.send(header, &frame(bytes.max(14))[..bytes]);
            assert_eq!(rig.dropped(reason), 1);
        }
        rig.send(PLAIN, &frame(77));
        assert_eq!(wait_receive(&peer), with_header(PLAIN, &frame(77)));
        assert!(receive(&peer).is_none());
        assert_eq!(rig.pair().drops.values().sum::<u64>(), 4);
    }
}

#[test]
fn what_the_tap_does_not_take_waits_in_order() {
    for io in METHODS {
        let (mut rig, peer) = Rig::on_socket(io, ALL, 64);
        // Each is a fifteenth of the socket's capacity.
        let mut sent = 0_u32;
        while sent < 60 {
            let mut bytes = frame(60_000);
            bytes[20..24].copy_from_slice(&sent.to_le_bytes());
            rig.add_on(1, &with_header(PLAIN, &bytes));
            sent += 1;
        }
        rig.tx().kick();
        eventually("the wait is counted", || rig.pair().tx_waits > 0);
        for number in 0..60_u32 {
            let got = wait_receive(&peer);
            assert_eq!(got[HEADER + 20..HEADER + 24], number.to_le_bytes());
        }
        eventually("all were taken", || rig.pair().tx_frames == 60);
        assert_eq!(rig.pair().drops.values().sum::<u64>(), 0);
    }
}

/// The peer makes room while a batch is being sent.
#[test]
fn no_frame_overtakes_another_on_a_socket() {
    const BATCH: u32 = 60;
    let (mut rig, peer) = Rig::on_socket(IoMethod::Auto, ALL, 64);
    for _ in 0..50 {
        for number in 0..BATCH {
            let mut bytes = frame(if number % 2 == 0 { 60_000 } else { 60 });
            bytes[20..24].copy_from_slice(&number.to_le_bytes());
            rig.add_on(1, &with_header(PLAIN, &bytes));
        }
        let numbers = std::thread::scope(|scope| {
            let taken = scope.spawn(|| {
                let frames = std::iter::repeat_with(|| receive(&peer)).flatten();
                let number = |frame: Vec<u8>| *frame[HEADER + 20..].first_chunk().unwrap();
                let numbers = frames.map(number).map(u32::from_le_bytes);
                numbers.take(BATCH as usize).collect::<Vec<_>>()
            });
            rig.tx().kick();
            taken.join().unwrap()
        });
        assert_eq!(numbers, (0..BATCH).collect::<Vec<_>>());
        for _ in 0..BATCH {
            rig.tx().wait_used();
        }
    }
}

#[test]
fn interrupts_come_when_they_are_wanted_and_once_a_batch() {
    for event_idx in [false, true] {
        let features = if event_idx { ALL } else { ALL & !EVENT_IDX };
        let (mut rig, _peer) = Rig::on_socket(IoMethod::Auto, features, 256);
        // No interrupt is wanted.
        if event_idx {
            rig.tx().set_used_event(0x7fff);
        } else {
            rig.tx().set_no_interrupt(true);
        }
        for _ in 0..4 {
            rig.send(PLAIN, &frame(60));
        }
        eventually("they are counted", || rig.pair().interrupts_suppressed == 4);
        assert_eq!(rig.interrupts.count(1), 0);
        // One interrupt is wanted, for the last of a batch.
        if event_idx {
            let last = rig.tx().available_idx + 31;
            rig.tx().set_used_event(last);
        } else {
            rig.tx().set_no_interrupt(false);
        }
        for _ in 0..32 {
            rig.add_on(1, &with_header(PLAIN, &frame(60)));
        }
        rig.tx().kick();
        eventually("all are given back", || rig.pair().tx_frames == 36);
        eventually("it comes", || rig.interrupts.count(1) > 0);
        let count = rig.interrupts.count(1);
        assert!(count == 1 || (!event_idx && count < 8), "{count}");
    }
}

#[test]
fn a_card_that_rests_moves_nothing_and_goes_on() {
    for io in METHODS {
        let (mut rig, peer) = Rig::on_socket(io, ALL, 64);
        rig.post(8, 66_000);
        transmit(&peer, &with_header(PLAIN, &frame(500)));
        assert_eq!(rig.receive(), received(&frame(500)));
        rig.net.suspend();
        transmit(&peer, &with_header(PLAIN, &frame(700)));
        rig.add_on(1, &with_header(PLAIN, &frame(90)));
        rig.tx().kick();
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert_eq!(rig.pair().rx_frames, 1, "it rests");
        rig.net.resume();
        assert_eq!(rig.receive(), received(&frame(700)));
        assert_eq!(wait_receive(&peer), with_header(PLAIN, &frame(90)));
        assert!(!rig.needs_reset());
    }
}

/// The buffers that the former card had taken, and what the driver had set, are the new one's.
#[test]
fn another_card_goes_on_with_the_same_rings() {
    const CTRL_MAC: u8 = 1;
    const ADDR_SET: u8 = 1;
    let mac = [2, 9, 9, 9, 9, 9];
    for io in METHODS {
        let (mut rig, peer) = Rig::on_socket(io, ALL, 64);
        assert_eq!(rig.command(CTRL_MAC, ADDR_SET, &mac), 0);
        // More buffers than frames: the rest is in the card's hands.
        rig.post(8, 2_000);
        for bytes in [500, 600] {
            transmit(&peer, &with_header(PLAIN, &frame(bytes)));
            assert_eq!(rig.receive(), received(&frame(bytes)));
        }
        rig.send(PLAIN, &frame(77));
        let state = rig.net.suspend();
        drop(peer);
        let (ours, peer) = super::driver::sockets();
        rig.replace(vec![ours], io, &state);
        for bytes in [700, 800, 900, 1_000, 1_100, 1_200] {
            transmit(&peer, &with_header(PLAIN, &frame(bytes)));
            assert_eq!(rig.receive(), received(&frame(bytes)));
        }
        // It takes no buffer twice.
        transmit(&peer, &with_header(PLAIN, &frame(1_300)));
        rig.post(1, 2_000);
        assert_eq!(rig.receive(), received(&frame(1_300)));
        rig.send(PLAIN, &frame(78));
        let mut seen = [0; 6];
        rig.net.read_config(0, &mut seen);
        assert_eq!(seen, mac);
        assert_eq!(rig.command(CTRL_MAC, ADDR_SET, &super::driver::MAC), 0);
        assert!(!rig.needs_reset());
    }
}
