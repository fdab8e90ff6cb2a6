//! The control queue, configuration space, queues and resets.
use std::{
    os::fd::{AsRawFd, OwnedFd},
    sync::Arc,
};

use slipgate_vmm::{
    ThreadSetup,
    virtio::{
        ActivateError, Activation, VirtioDevice,
        net::{IoMethod, Net, NetConfig, NetCounters, NetError},
    },
};

use super::driver::{
    CTRL_VQ, DriverQueue, HEADER, MAC, MQ, Rig, eventually, receive_any, sockets, transmit,
    unconfined, wait_receive,
};

const ALL: u64 = u64::MAX;
const OK: u8 = 0;
const ERR: u8 = 1;
const OTHER: [u8; 6] = [2, 0, 0, 0, 0, 9];
const GROUP: [u8; 6] = [1, 0, 0x5e, 0, 0, 7];
const BROADCAST: [u8; 6] = [0xff; 6];

fn config<const N: usize>(net: &Net, offset: usize) -> [u8; N] {
    let mut bytes = [0xaa; N];
    net.read_config(offset, &mut bytes);
    bytes
}

fn frame_to(mac: [u8; 6], number: u8) -> Vec<u8> {
    let mut frame = vec![number; HEADER + 60];
    frame[..HEADER].fill(0);
    frame[HEADER..HEADER + 6].copy_from_slice(&mac);
    frame
}

/// Returns those of four addresses whose frames pass the filter.
fn let_through(rig: &mut Rig, peer: &OwnedFd) -> Vec<[u8; 6]> {
    let looked_at = |rig: &Rig| rig.pair().rx_frames + rig.dropped("rx_filtered");
    let before = looked_at(rig);
    for mac in [MAC, OTHER, GROUP, BROADCAST] {
        transmit(peer, &frame_to(mac, 1));
    }
    eventually("all were looked at", || looked_at(rig) == before + 4);
    // A frame is counted before it is published.
    let counted = rig.pair().rx_frames as u16;
    eventually("all are there", || rig.rx().used_idx_now() == counted);
    let mut through = Vec::new();
    while let Some((head, _)) = rig.rx().take_used() {
        let at = rig.rx().buffers[&head];
        through.push(rig.read(at + HEADER as u64, 6).try_into().unwrap());
    }
    through
}

#[test]
fn the_configuration_space_is_read_at_any_offset() {
    let (mut rig, _peer) = Rig::on_socket(IoMethod::Auto, ALL, 64);
    let whole: [u8; 24] = config(&rig.net, 0);
    assert_eq!(whole[..6], MAC);
    assert_eq!(whole[6..12], [1, 0, 1, 0, 0xdc, 5]);
    assert_eq!(whole[12..17], [0x10, 0x27, 0, 0, 1]);
    assert_eq!(whole[17..], [0; 7]);
    for (at, byte) in whole.iter().enumerate() {
        assert_eq!(config::<1>(&rig.net, at), [*byte]);
    }
    assert_eq!(config::<4>(&rig.net, usize::MAX - 1), [0; 4]);
    rig.net.write_config(0, &[0xff; 17]);
    assert_eq!(config::<24>(&rig.net, 0), whole);
}

#[test]
fn filters_let_through_what_the_guest_wants() {
    let (mut rig, peer) = Rig::on_socket(IoMethod::Auto, ALL, 64);
    rig.post(60, 2_000);
    assert_eq!(let_through(&mut rig, &peer), [MAC, OTHER, GROUP, BROADCAST]);
    type Step = (u8, u8, &'static [u8], &'static [[u8; 6]]);
    let steps: [Step; 9] = [
        (0, 0, &[0], &[MAC, BROADCAST]),
        (0, 1, &[1], &[MAC, GROUP, BROADCAST]),
        (0, 2, &[1], &[MAC, OTHER, GROUP, BROADCAST]),
        (0, 3, &[1], &[MAC, OTHER, BROADCAST]),
        (0, 4, &[1], &[BROADCAST]),
        (0, 5, &[1], &[]),
        (0, 0, &[1], &[MAC, OTHER, GROUP, BROADCAST]),
        (0, 0, &[0], &[]),
        (0, 4, &[0], &[MAC, OTHER]),
    ];
    for (class, command, data, expected) in steps {
        assert_eq!(rig.command(class, command, data), OK);
        assert_eq!(
            let_through(&mut rig, &peer),
            expected,
            "{class} {command} {data:?}"
        );
    }
    assert!(rig.dropped("rx_filtered") > 0);
}

fn mac_table(unicast: &[[u8; 6]], multicast: &[[u8; 6]]) -> Vec<u8> {
    let part = |macs: &[[u8; 6]]| {
        let count = (macs.len() as u32).to_le_bytes();
        [&count[..], &macs.concat()].concat()
    };
    [part(unicast), part(multicast)].concat()
}

#[test]
fn mac_tables_and_addresses_are_set() {
    let (mut rig, peer) = Rig::on_socket(IoMethod::Auto, ALL, 64);
    rig.post(60, 2_000);
    assert_eq!(rig.command(0, 0, &[0]), OK);
    assert_eq!(rig.command(1, 0, &mac_table(&[OTHER], &[GROUP])), OK);
    assert_eq!(let_through(&mut rig, &peer), [MAC, OTHER, GROUP, BROADCAST]);
    assert_eq!(rig.command(1, 0, &mac_table(&[], &[GROUP])), OK);
    assert_eq!(let_through(&mut rig, &peer), [MAC, GROUP, BROADCAST]);
    // Too many addresses to keep: all of that kind pass.
    assert_eq!(rig.command(1, 0, &mac_table(&[[2; 6]; 100], &[])), OK);
    assert_eq!(let_through(&mut rig, &peer), [MAC, OTHER, BROADCAST]);
    assert_eq!(rig.command(1, 0, &mac_table(&[], &[])), OK);
    assert_eq!(rig.command(1, 1, &OTHER), OK);
    assert_eq!(config::<6>(&rig.net, 0), OTHER);
    assert_eq!(let_through(&mut rig, &peer), [OTHER, BROADCAST]);
    rig.net.reset();
    assert_eq!(config::<6>(&rig.net, 0), MAC);
}

#[test]
fn commands_that_make_no_sense_are_refused_and_counted() {
    let (mut rig, _peer) = Rig::on_socket(IoMethod::Auto, ALL, 64);
    let huge = [&u32::MAX.to_le_bytes()[..], &[0; 20]].concat();
    let bad: [(u8, u8, &[u8]); 16] = [
        (9, 0, &[0]),
        (0, 9, &[0]),
        (0, 0, &[2]),
        (0, 0, &[0, 0]),
        (1, 0, &[1, 0, 0, 0]),
        (1, 0, &[0; 9]),
        (1, 0, &huge),
        (1, 1, &GROUP),
        (1, 1, &[0; 5]),
        (1, 2, &[0]),
        (2, 0, &[1, 0]),
        (4, 0, &[1, 0]),
        (5, 0, &[0; 4]),
        (5, 0, &(1_u64 << 63).to_le_bytes()),
        (3, 1, &[0]),
        (1, 0, &[0; 5_000]),
    ];
    for (number, (class, command, data)) in bad.into_iter().enumerate() {
        assert_eq!(
            rig.command(class, command, data),
            ERR,
            "{class} {command} {data:?}"
        );
        let counters = rig.counters.snapshot();
        assert_eq!(counters.control_refused, number as u64 + 1);
    }
    assert!(!rig.needs_reset());
    assert_eq!(rig.command(0, 1, &[1]), OK);
}

#[test]
fn commands_need_their_feature() {
    let (mut rig, _peer) = Rig::on_socket(IoMethod::Auto, CTRL_VQ, 64);
    let commands: [(u8, u8, &[u8]); 6] = [
        (0, 0, &[1]),
        (0, 2, &[1]),
        (1, 0, &mac_table(&[], &[])),
        (1, 1, &OTHER),
        (5, 0, &[0; 8]),
        (3, 0, &[0]),
    ];
    for (class, command, data) in commands {
        assert_eq!(rig.command(class, command, data), ERR, "{class} {command}");
    }
}

#[test]
fn an_announcement_is_asked_for_and_acknowledged() {
    let (mut rig, _peer) = Rig::on_socket(IoMethod::Auto, ALL, 64);
    let handle = rig.net.handle();
    let interrupts = Arc::clone(&rig.interrupts);
    let told = || interrupts.config.load(std::sync::atomic::Ordering::Acquire);
    handle.announce();
    assert_eq!((config::<2>(&rig.net, 6), told()), ([3, 0], 1));
    handle.announce();
    assert_eq!(told(), 1);
    assert_eq!(rig.command(3, 0, &[]), OK);
    assert_eq!(config::<2>(&rig.net, 6), [1, 0]);
    handle.set_link(false);
    assert_eq!((config::<2>(&rig.net, 6), told()), ([0, 0], 2));
    handle.set_link(true);
    assert_eq!((config::<2>(&rig.net, 6), told()), ([1, 0], 3));
    rig.net.reset();
    handle.announce();
    assert_eq!(told(), 3, "there is nobody to tell");
}

#[test]
fn queue_pairs_are_turned_on_and_off() {
    let ((a, peer_a), (b, peer_b)) = (sockets(), sockets());
    let mut rig = Rig::new(vec![a, b], IoMethod::Auto);
    rig.start(ALL, 64);
    assert_eq!(config::<2>(&rig.net, 8), [2, 0]);
    rig.post_on(0, 8, 2_000);
    rig.post_on(2, 8, 2_000);
    transmit(&peer_a, &frame_to(MAC, 1));
    transmit(&peer_b, &frame_to(MAC, 2));
    rig.queues[0].wait_used();
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert!(
        rig.queues[2].take_used().is_none(),
        "the second pair is off"
    );
    for wrong in [0_u16, 3, 0x8000] {
        assert_eq!(rig.command(4, 0, &wrong.to_le_bytes()), ERR);
    }
    assert_eq!(rig.command(4, 0, &[2, 0]), OK);
    rig.queues[2].wait_used();
    assert_eq!(rig.command(4, 0, &[1, 0]), OK);
    let before = rig.counters.snapshot().pairs[1].rx_frames;
    transmit(&peer_b, &frame_to(MAC, 3));
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert_eq!(rig.counters.snapshot().pairs[1].rx_frames, before);
    assert_eq!(rig.command(4, 0, &[2, 0]), OK);
    rig.queues[2].wait_used();
}

/// The largest number of pairs that is promised.
#[test]
fn sixteen_queue_pairs_carry_frames_each_and_a_seventeenth_is_refused() {
    const PAIRS: usize = 16;
    const BURST: u8 = 15;
    for io in [IoMethod::Vectored, IoMethod::IoUring] {
        let (ours, peers): (Vec<_>, Vec<_>) = (0..PAIRS).map(|_| sockets()).unzip();
        let mut rig = Rig::new(ours, io);
        rig.start(ALL, 64);
        assert_eq!(config::<2>(&rig.net, 8), [PAIRS as u8, 0]);
        assert_eq!(rig.queues.len(), 2 * PAIRS + 1);
        assert_eq!(rig.command(4, 0, &[PAIRS as u8 + 1, 0]), ERR);
        assert_eq!(rig.command(4, 0, &[PAIRS as u8, 0]), OK);
        // All at once, both ways; a frame's content identifies its pair and its number.
        let content = |pair: usize, nth: u8| pair as u8 * BURST + nth;
        for (pair, peer) in peers.iter().enumerate() {
            for nth in 0..BURST {
                transmit(peer, &frame_to(MAC, content(pair, nth)));
                rig.add_on(2 * pair + 1, &frame_to(OTHER, content(pair, nth)));
            }
            rig.post_on(2 * pair, BURST.into(), 2_000);
            rig.queues[2 * pair + 1].kick();
        }
        for (pair, peer) in peers.iter().enumerate() {
            for nth in 0..BURST {
                let (head, bytes) = rig.queues[2 * pair].wait_used();
                let at = rig.queues[2 * pair].buffers[&head];
                let got = rig.read(at, bytes as usize);
                assert_eq!(got[HEADER + 20], content(pair, nth), "to pair {pair}");
                let sent = wait_receive(peer);
                assert_eq!(sent, frame_to(OTHER, content(pair, nth)), "of pair {pair}");
            }
        }
        let each = u64::from(BURST);
        for pair in rig.counters.snapshot().pairs {
            assert_eq!((pair.rx_frames, pair.tx_frames), (each, each));
        }
        assert!(!rig.needs_reset());
    }
}

#[test]
fn without_mq_the_third_queue_is_the_control_queue() {
    let ((a, _peer_a), (b, _peer_b)) = (sockets(), sockets());
    let mut rig = Rig::new(vec![a, b], IoMethod::Auto);
    rig.start(ALL & !MQ, 64);
    rig.queues.truncate(3);
    assert_eq!(rig.command(0, 1, &[1]), OK);
}

#[test]
fn a_reset_hands_everything_back_and_the_card_serves_again() {
    for io in [IoMethod::Vectored, IoMethod::IoUring] {
        let (mut rig, peer) = Rig::on_socket(io, ALL, 64);
        for round in 0..20_u8 {
            rig.post(4, 2_000);
            transmit(&peer, &frame_to(MAC, round));
            assert_eq!(rig.receive()[HEADER + 20], round);
            rig.send([0; HEADER], &frame_to(MAC, round)[HEADER..]);
            assert_eq!(wait_receive(&peer)[HEADER + 20], round);
            rig.net.reset();
            let used = (rig.rx().used_idx_now(), rig.tx().used_idx_now());
            transmit(&peer, &frame_to(MAC, 100 + round));
            rig.tx().kick_event.write(1).unwrap();
            std::thread::sleep(std::time::Duration::from_millis(2));
            assert_eq!((rig.rx().used_idx_now(), rig.tx().used_idx_now()), used);
            rig.start(ALL, 64);
            rig.post(1, 2_000);
            assert_eq!(rig.receive()[HEADER + 20], 100 + round);
        }
        rig.net.reset();
        rig.net.reset();
    }
}

#[test]
fn a_set_of_queues_that_makes_no_card_is_refused() {
    let (mut rig, _peer) = Rig::on_socket(IoMethod::Auto, ALL, 64);
    rig.net.reset();
    let mut activate = |queues: Vec<&DriverQueue>| {
        rig.net.activate(Activation {
            memory: Arc::clone(&rig.memory),
            features: ALL,
            queues: queues.iter().map(|queue| queue.enabled()).collect(),
            signals: rig.interrupts.clone(),
            restored: None,
        })
    };
    let queue = |index| DriverQueue::new(&rig.memory, index, 64, ALL);
    let [rx, tx, control] = [0, 1, 2].map(queue);
    let mut outside = queue(0);
    outside.used = 0x7fff_fffc;
    for queues in [vec![], vec![&rx], vec![&tx, &control], vec![&outside, &tx]] {
        let refused = activate(queues);
        assert!(
            matches!(refused, Err(ActivateError::Queues { .. })),
            "{refused:?}"
        );
    }
    activate(vec![&rx, &tx]).unwrap();
}

#[test]
fn a_card_that_can_not_be_is_refused() {
    let make = |mac, mtu, taps: Vec<OwnedFd>, pairs| {
        Net::new(
            NetConfig::new(mac, mtu, taps),
            unconfined(),
            NetCounters::new(pairs),
        )
        .err()
    };
    let one = || vec![sockets().0];
    assert!(matches!(
        make(MAC, 1500, vec![], 0),
        Some(NetError::NoQueues)
    ));
    assert!(matches!(make(MAC, 67, one(), 1), Some(NetError::Mtu(67))));
    assert!(matches!(
        make(GROUP, 1500, one(), 1),
        Some(NetError::Mac(_))
    ));
    assert!(matches!(
        make([0; 6], 1500, one(), 1),
        Some(NetError::Mac(_))
    ));
    assert!(matches!(
        make(MAC, 1500, one(), 2),
        Some(NetError::Counters { .. })
    ));
    let many = (0..17).map(|_| sockets().0).collect();
    assert!(matches!(
        make(MAC, 1500, many, 17),
        Some(NetError::TooManyQueues(17))
    ));
    let file = std::fs::File::open("/dev/null").unwrap().into();
    assert!(matches!(
        make(MAC, 1500, vec![file], 1),
        Some(NetError::NotATap(_))
    ));
    let refuse = ThreadSetup::new(|_| Err(std::io::ErrorKind::PermissionDenied.into()));
    let config = NetConfig::new(MAC, 1500, one());
    let refused = Net::new(config, refuse.clone(), NetCounters::new(1)).unwrap();
    refuse.finish().unwrap_err();
    drop(refused);
}

#[test]
fn no_thread_and_no_descriptor_stays_when_a_card_goes() {
    let (ours, peer) = sockets();
    let number = ours.as_raw_fd();
    let rig = Rig::new(vec![ours], IoMethod::Auto);
    drop(rig);
    // The io_uring instance releases the socket a little later than its own descriptor.
    eventually("the socket is closed", || {
        // Behind what it has told of offloads.
        while let Ok(1..) = nix::unistd::read(&peer, &mut [0; 4]) {}
        matches!(nix::unistd::read(&peer, &mut [0; 1]), Ok(0))
    });
    assert!(number >= 0);
}

#[test]
fn what_a_tap_would_be_told_a_sockets_peer_is_told() {
    let (ours, peer) = sockets();
    let copy = ours.try_clone().unwrap();
    let mut rig = Rig::new(vec![ours], IoMethod::Auto);
    let told = || -> Vec<u32> {
        let messages = std::iter::from_fn(|| receive_any(&peer));
        let offloads = messages.map(|message| u32::from_le_bytes(message.try_into().unwrap()));
        offloads.collect()
    };
    assert!(told().is_empty(), "there is no driver yet");
    rig.start(ALL, 64);
    // TUN_F_CSUM, TSO4, TSO6, TSO_ECN, USO4, USO6.
    assert_eq!(told(), [0x6f]);
    let set = |rig: &mut Rig, features: u64| rig.command(5, 0, &features.to_le_bytes());
    // VIRTIO_NET_F_GUEST_CSUM and GUEST_TSO4.
    assert_eq!(set(&mut rig, 1 << 1 | 1 << 7), OK);
    assert_eq!(set(&mut rig, 1 << 1 | 1 << 7), OK);
    assert_eq!(told(), [0x03], "once");
    // Its queue is full: it is told once it has read.
    while nix::unistd::write(&copy, &frame_to(MAC, 1)).is_ok() {}
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            eventually("it is told", || {
                let messages = std::iter::from_fn(|| receive_any(&peer));
                messages.filter(|message| *message == [0; 4]).count() == 1
            });
        });
        assert_eq!(set(&mut rig, 0), OK);
        reader.join().unwrap();
    });
}
