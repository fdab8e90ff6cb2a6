use core::num::NonZeroU16;

use smoltcp::{
    phy::{Device, PacketMeta, RxToken, TxToken},
    time::Instant,
};

use super::{super::fake, *};
use crate::{
    platform::Nic,
    virtio::{
        net::{WANTED, feature::*},
        ring::feature::{EVENT_IDX, INDIRECT_DESC},
        transport::VERSION_1,
    },
};

const ALL: u64 = VERSION_1 | WANTED;
/// What lets large frames come in.
const LARGE: u64 = GUEST_TSO4 | GUEST_TSO6;
const VECTORS: Vectors<'_> = Vectors {
    apic_ids: &[4, 6],
    queue: 0x43,
    config: 0x42,
    taken: || 17,
};

/// MAC address for a card without one.
const OWN_MAC: [u8; 6] = [6, 1, 2, 3, 4, 5];

fn bring_up(fake: &fake::Card) -> Result<Card<fake::Window>, DeviceError> {
    bring_up_with(fake, 64)
}

fn bring_up_with(fake: &fake::Card, size: u16) -> Result<Card<fake::Window>, DeviceError> {
    let transport = Transport::find(fake, fake::CARD, |at, length| fake.map(at, length))?;
    Card::bring_up(&transport, fake, WANTED, size, VECTORS, OWN_MAC)
}

/// Returns the next received frame.
fn receive(pair: &mut Pair<fake::Window>) -> Option<Vec<u8>> {
    let (frame, _) = pair.receive(Instant::ZERO)?;
    Some(frame.consume(|bytes| bytes.to_vec()))
}

fn send(pair: &mut Pair<fake::Window>, frame: &[u8], segment: Option<u16>) {
    let mut token = pair.transmit(Instant::ZERO).expect("room");
    let mut meta = PacketMeta::default();
    meta.segmentation_offload_size = segment.and_then(NonZeroU16::new);
    token.set_meta(meta);
    token.consume(frame.len(), |bytes| bytes.copy_from_slice(frame));
}

fn frame(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at * 13 + at / 256) as u8).collect()
}

#[test]
fn each_cpu_gets_a_pair_and_its_interrupts() {
    let fake = fake::Card::new(ALL, 8, 17);
    let card = bring_up(&fake).unwrap();
    assert_eq!(
        (card.features, card.most_pairs, card.pairs.len()),
        (ALL, 8, 2)
    );
    let state = fake.0.borrow();
    assert_eq!(state.commands, [[4, 0, 2, 0]], "VQ_PAIRS_SET 2");
    let enabled: Vec<_> = (0..17)
        .filter(|queue| state.queues[*queue].enabled)
        .collect();
    assert_eq!(
        enabled,
        [0, 1, 2, 3, 16],
        "two pairs, and the control queue behind all eight"
    );
    let vectors: Vec<_> = (0..4).map(|queue| state.queues[queue].vector).collect();
    assert_eq!(vectors, [1, 1, 2, 2]);
    assert_eq!(
        state.table[..4],
        [0xFEE0_4000, 0, 0x42, 0],
        "the configuration's, to CPU 0"
    );
    assert_eq!(state.table[4..8], [0xFEE0_4000, 0, 0x43, 0]);
    assert_eq!(state.table[8..12], [0xFEE0_6000, 0, 0x43, 0]);
    assert_eq!(
        state.table[12..16],
        [0, 0, 0, 1].map(|bit| bit | state.table[12] & 1),
        "masked"
    );
    let nic = &card.pairs[1];
    assert_eq!(
        (nic.mac(), nic.pair()),
        ([2, 0, 0, 0xAA, 0xBB, 0xCC], (1, 2))
    );
    assert_eq!(nic.capabilities().max_transmission_unit, 0x578 + 14);
}

#[test]
fn what_needs_something_that_is_missing_is_not_asked_for() {
    for (missing, also) in [
        (CSUM, HOST_TSO4 | HOST_USO),
        (GUEST_CSUM, LARGE | GUEST_ECN),
        (LARGE, GUEST_ECN),
        (MRG_RXBUF, 0),
        (
            CTRL_VQ,
            CTRL_RX | CTRL_VLAN | CTRL_MAC_ADDR | CTRL_GUEST_OFFLOADS | GUEST_ANNOUNCE | MQ,
        ),
        (STATUS, GUEST_ANNOUNCE),
        (EVENT_IDX, 0),
    ] {
        let fake = fake::Card::new(ALL & !missing, 1, 3);
        assert_eq!(bring_up(&fake).unwrap().features, ALL & !missing & !also);
    }
}

#[test]
fn what_can_not_be_driven_is_refused() {
    let legacy = fake::Card::new(ALL & !VERSION_1, 1, 3);
    assert_eq!(
        bring_up(&legacy).err(),
        Some(DeviceError::Missing("VERSION_1"))
    );
    let choosy = fake::Card::new(ALL, 1, 3);
    choosy.0.borrow_mut().refuses = EVENT_IDX;
    assert_eq!(bring_up(&choosy).err(), Some(DeviceError::Features(ALL)));
    let bare = fake::Card::new(ALL, 1, 3);
    crate::pci::ConfigSpace::write(&bare, fake::CARD, 0x70, 0);
    assert_eq!(
        bring_up(&bare).err(),
        Some(DeviceError::Missing("device configuration"))
    );
}

#[test]
fn few_vectors_mean_few_pairs() {
    let fake = fake::Card::new(ALL, 8, 2);
    assert_eq!(bring_up(&fake).unwrap().pairs.len(), 1);
    assert!(fake.0.borrow().commands.is_empty());
}

#[test]
fn a_card_without_a_mac_address_gets_one() {
    let fake = fake::Card::new(ALL & !MAC, 1, 3);
    assert_eq!(bring_up(&fake).unwrap().pairs[0].mac(), OWN_MAC);
}

#[test]
fn any_frame_fits_the_receive_buffers_of_any_queue() {
    for size in [1, 2, 4, 16, 64, 256] {
        for missing in [
            0,
            LARGE,
            MRG_RXBUF,
            MRG_RXBUF | GUEST_TSO4,
            MRG_RXBUF | LARGE,
        ] {
            let fake = fake::Card::new(ALL & !missing, 1, 3);
            let _card = bring_up_with(&fake, size).unwrap();
            let buffers = fake.offered_buffers(0);
            let what = format!("{size}, without {missing:#x}: {buffers:?}");
            assert!(buffers.iter().sum::<u32>() >= 65_562, "{what}");
            let least = match missing & MRG_RXBUF != 0 && missing & LARGE != LARGE {
                true => 65_562,
                false => 4096,
            };
            assert!(buffers.iter().all(|length| *length >= least), "{what}");
            assert!(buffers.len() >= usize::from(size.min(64)), "{what}");
        }
    }
}

#[test]
fn large_frames_come_in_one_buffer_each_where_buffers_can_not_be_merged() {
    let fake = fake::Card::new(ALL & !MRG_RXBUF, 1, 3);
    let mut card = bring_up_with(&fake, 256).unwrap();
    assert_ne!(card.features & GUEST_TSO4, 0);
    let pair = &mut card.pairs[0];
    for round in 0..300 {
        let sent = frame([60, 1514, 4085, 65_535][round % 4]);
        fake.deliver(0, 1, &sent);
        assert_eq!(receive(pair), Some(sent), "round {round}");
        assert!(pair.arm());
    }
    let counters = pair.counters();
    assert_eq!((counters.rx_frames, counters.rx_merged), (300, 0));
}

#[test]
fn frames_come_in_whole_however_many_and_however_large() {
    let fake = fake::Card::new(ALL, 2, 5);
    let mut card = bring_up(&fake).unwrap();
    let pair = &mut card.pairs[1];
    assert!(pair.arm());
    for round in 0..300 {
        let sent = frame([60, 1514, 4084, 4085, 9000, 65_535][round % 6]);
        fake.deliver(1, 1, &sent);
        assert!(!pair.arm(), "one is there");
        assert_eq!(receive(pair), Some(sent), "round {round}");
        assert_eq!(receive(pair), None);
        assert!(pair.arm());
    }
    let counters = pair.counters();
    assert_eq!(
        (
            counters.rx_frames,
            counters.rx_merged,
            counters.rx_checksum_offloaded
        ),
        (300, 150, 300)
    );
    assert_eq!((counters.rx_dropped, counters.interrupts), (0, 17));
}

#[test]
fn what_nobody_vouches_for_is_checked() {
    let fake = fake::Card::new(ALL, 1, 3);
    let mut card = bring_up(&fake).unwrap();
    let pair = &mut card.pairs[0];
    // UDP in IPv4 with a checksum of 1, which is wrong.
    let mut bad = vec![0; 60];
    bad[12..34].copy_from_slice(&[
        8, 0, 0x45, 0, 0, 40, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
    ]);
    bad[38..42].copy_from_slice(&[0, 20, 0, 1]);
    fake.deliver(0, 0, &bad);
    fake.deliver(0, 0, &frame(60));
    assert_eq!(receive(pair), Some(frame(60)));
    assert_eq!(pair.counters().rx_dropped, 1);
    fake.deliver(0, 2, &bad);
    assert_eq!(
        receive(pair),
        Some(bad),
        "the device has found its checksum good"
    );
}

#[test]
fn rubbish_is_dropped_and_counted() {
    let fake = fake::Card::new(ALL & !MRG_RXBUF, 1, 3);
    let mut card = bring_up(&fake).unwrap();
    let pair = &mut card.pairs[0];
    for round in 0..200 {
        fake.deliver_rubbish(0, round % 12);
        assert_eq!(receive(pair), None);
        assert!(pair.arm());
    }
    assert_eq!(pair.counters().rx_dropped, 200);
    fake.deliver(0, 1, &frame(99));
    assert_eq!(receive(pair), Some(frame(99)));
}

#[test]
fn frames_go_out_with_one_notification() {
    let fake = fake::Card::new(ALL & !EVENT_IDX, 1, 3);
    let mut card = bring_up(&fake).unwrap();
    let pair = &mut card.pairs[0];
    fake.0.borrow_mut().notified.clear();
    let frames: Vec<_> = [60, 1514, 2036, 2037, 65_535].map(frame).into();
    frames.iter().for_each(|frame| send(pair, frame, None));
    assert!(fake.0.borrow().sent.is_empty());
    pair.flush();
    pair.flush();
    let state = fake.0.borrow();
    assert_eq!(state.notified, [1]);
    let sent: Vec<_> = state
        .sent
        .iter()
        .map(|(queue, bytes)| (*queue, bytes[12..].to_vec()))
        .collect();
    assert_eq!(
        sent,
        frames
            .into_iter()
            .map(|frame| (1, frame))
            .collect::<Vec<_>>()
    );
    assert_eq!(pair.in_flight(), 0);
}

#[test]
fn a_full_queue_takes_no_more_until_some_are_gone() {
    let fake = fake::Card::new(ALL, 1, 3);
    let mut card = bring_up(&fake).unwrap();
    let pair = &mut card.pairs[0];
    for round in 0..5 {
        fake.0.borrow_mut().stalled = true;
        let mut count = 0;
        while pair.transmit(Instant::ZERO).is_some() {
            send(pair, &frame(100), None);
            count += 1;
        }
        assert_eq!(
            (count, pair.in_flight()),
            (64, 0),
            "round {round}; not told to the device yet"
        );
        assert!(pair.arm(), "waits for room");
        assert_eq!(pair.in_flight(), 64);
        fake.deliver(0, 1, &frame(60));
        assert_eq!(receive(pair), None, "an answer to it would have no room");
        fake.resume();
        assert!(!pair.arm(), "there is room");
        assert_eq!(receive(pair), Some(frame(60)));
    }
    assert_eq!(fake.0.borrow().sent.len(), 5 * 64);
    assert_eq!(pair.counters().tx_frames, 5 * 64);
}

#[test]
fn commands_are_answered() {
    for features in [ALL, ALL & !INDIRECT_DESC, ALL & !EVENT_IDX] {
        let fake = fake::Card::new(features, 1, 3);
        let mut card = bring_up(&fake).unwrap();
        let control = card.control.as_mut().unwrap();
        for _ in 0..100 {
            assert_eq!(
                control.send(command::MAC_ADDRESS, &[1; 6], || false),
                Ok(())
            );
            let refused = Err(DeviceError::Refused {
                class: 9,
                command: 3,
            });
            assert_eq!(control.send((9, 3), &[], || false), refused);
        }
        assert_eq!(
            fake.0.borrow().commands[..2],
            [vec![1, 1, 1, 1, 1, 1, 1, 1], vec![9, 3]]
        );
    }
}

#[test]
fn a_card_that_does_not_answer_is_given_up() {
    let fake = fake::Card::new(ALL, 1, 3);
    let mut card = bring_up(&fake).unwrap();
    fake.0.borrow_mut().status = 0;
    let mut patience = 5;
    let answer = card
        .control
        .as_mut()
        .unwrap()
        .send(command::PROMISCUOUS, &[1], || {
            patience -= 1;
            patience > 0
        });
    assert_eq!(answer, Err(DeviceError::Silent("a control command")));
}
