use proptest::{prelude::*, sample::Index};

use super::{whole::CONGESTION_EXPERIENCED, *};
use crate::{
    packet::{
        Ipv4, Version,
        ipv4::{self, HEADER_LEN},
        ipv6::FRAGMENT,
    },
    port::{ETHERTYPE_IPV4, ETHERTYPE_IPV6},
};

const GUEST: Sender = Sender {
    row: VmRow::new(1),
    origin: Origin::Guest,
    is_ipv6: false,
};
const GUEST6: Sender = Sender {
    is_ipv6: true,
    ..GUEST
};

/// A frame of a fragment.
fn fragment(id: u16, begin: usize, data: &[u8], has_more: bool) -> Vec<u8> {
    let mut frame = vec![0; L3_AT];
    frame[L3_AT - 2..].copy_from_slice(&ETHERTYPE_IPV4.to_be_bytes());
    let mut ip = [0; HEADER_LEN];
    ip[0] = 0x45;
    ip[2..4].copy_from_slice(&((HEADER_LEN + data.len()) as u16).to_be_bytes());
    ip[4..6].copy_from_slice(&id.to_be_bytes());
    let field = (begin / 8) as u16 | if has_more { 0x2000 } else { 0 };
    ip[6..8].copy_from_slice(&field.to_be_bytes());
    ip[8] = 64;
    ip[9] = 17;
    ip[12..20].copy_from_slice(&[10, 0, 2, 15, 192, 0, 2, 1]);
    ipv4::fill_checksum(&mut ip, HEADER_LEN);
    frame.extend(ip);
    frame.extend(data);
    frame
}

/// A frame of an IPv6 fragment, whose datagram is of this protocol.
fn fragment6(id: u32, begin: usize, data: &[u8], has_more: bool, protocol: u8) -> Vec<u8> {
    let mut frame = vec![0; L3_AT];
    frame[L3_AT - 2..].copy_from_slice(&ETHERTYPE_IPV6.to_be_bytes());
    frame.extend([0x60, 0, 0, 0]);
    frame.extend((8 + data.len() as u16).to_be_bytes());
    frame.extend([FRAGMENT, 64]);
    frame.extend([0xfd; 16]);
    frame.extend([0x20; 16]);
    frame.extend([protocol, 0]);
    frame.extend((begin as u16 | u16::from(has_more)).to_be_bytes());
    frame.extend(id.to_be_bytes());
    frame.extend(data);
    frame
}

fn add(all: &mut Reassembly, frame: &[u8]) -> Result<Option<Whole>, Unfit> {
    let fragment = Fragment::parse(&frame[L3_AT..]).unwrap();
    let sender = match fragment.version() {
        Version::V4 => GUEST,
        Version::V6 => GUEST6,
    };
    all.add(sender, frame, &fragment, 0)
}

fn held(all: &mut Reassembly, frame: &[u8]) {
    assert!(add(all, frame).unwrap().is_none());
}

fn lost(all: &mut Reassembly) -> u64 {
    all.take_lost().iter().map(|(_, lost)| lost.packets).sum()
}

fn is_empty(all: &Reassembly) -> bool {
    all.senders.is_empty() && all.expiries.is_empty() && all.bytes == 0
}

proptest! {
    /// Whatever the lengths and the order, and however often some come again.
    #[test]
    fn fragments_in_any_order_become_the_datagram(
        units in prop::collection::vec(1_usize..180, 2..12),
        rest in 1_usize..8,
        swaps in prop::collection::vec(any::<(Index, Index)>(), 24),
        again in prop::collection::vec(any::<bool>(), 12),
    ) {
        let lens: Vec<usize> = units.iter().map(|unit| unit * 8).collect();
        let len = lens.iter().sum::<usize>() + rest;
        let data: Vec<u8> = (0..len).map(|at| (at * 7 + at / 256) as u8).collect();
        let mut begin = 0;
        let mut frames: Vec<_> = lens.iter().map(|len| {
            let frame = fragment(9, begin, &data[begin..begin + len], true);
            begin += len;
            frame
        }).collect();
        frames.push(fragment(9, begin, &data[begin..], false));
        for (a, b) in swaps {
            let (a, b) = (a.index(frames.len()), b.index(frames.len()));
            frames.swap(a, b);
        }
        let mut all = Reassembly::default();
        let last = frames.pop().unwrap();
        let mut repeated = 0;
        for (frame, again) in frames.iter().zip(again) {
            held(&mut all, frame);
            if again {
                held(&mut all, frame);
                repeated += 1;
            }
        }
        prop_assert_eq!(lost(&mut all), repeated);
        let whole = add(&mut all, &last).unwrap().unwrap();
        let ip = Ipv4::parse(&whole.frame[L3_AT..]).unwrap();
        prop_assert_eq!(ip.payload(), &data[..]);
        prop_assert!(!ip.is_fragment() && ip.checksum_is_right());
        let largest = lens.iter().max().unwrap().max(&rest);
        prop_assert_eq!(whole.largest as usize, largest + HEADER_LEN);
        prop_assert!(is_empty(&all));
    }

    /// Bounds and counts hold for any fragments at all.
    #[test]
    fn each_fragment_is_held_or_lost(
        fragments in prop::collection::vec((0_u16..20, 0_usize..400, 1_usize..400, any::<bool>()), 1..300),
    ) {
        let mut all = Reassembly::default();
        let (mut given, mut whole) = (0, 0);
        for (id, begin, len, has_more) in fragments {
            if begin == 0 && !has_more {
                continue;
            }
            let frame = fragment(id, begin * 8, &vec![1; len], has_more);
            match add(&mut all, &frame) {
                Ok(None) => given += 1,
                Ok(Some(done)) => whole += done.frame.len(),
                Err(_) => {}
            }
            let (count, bytes) = all.senders.get(&GUEST).map_or((0, 0), |sender| {
                let bytes: usize = sender.list.iter().map(|d| d.data.len()).sum();
                assert_eq!(bytes, sender.bytes);
                (sender.list.len(), bytes)
            });
            prop_assert!(count <= MOST_DATAGRAMS && bytes <= MOST_BYTES && bytes == all.bytes);
        }
        all.expire(PATIENCE_NS);
        prop_assert!(is_empty(&all));
        let lost = lost(&mut all);
        let is_all = lost == given;
        prop_assert!(is_all || whole > 0 && lost < given);
    }
}

#[test]
fn an_overlap_ends_the_datagram() {
    let mut all = Reassembly::default();
    held(&mut all, &fragment(1, 0, &[1; 16], true));
    held(&mut all, &fragment(1, 8, &[2; 16], true));
    assert_eq!(lost(&mut all), 2);
    // What would have made it whole is dropped too, and another datagram is not concerned.
    held(&mut all, &fragment(1, 16, &[1; 8], false));
    held(&mut all, &fragment(1, 0, &[1; 16], true));
    assert_eq!(lost(&mut all), 2);
    held(&mut all, &fragment(2, 0, &[1; 16], true));
    assert!(
        add(&mut all, &fragment(2, 16, &[1; 4], false))
            .unwrap()
            .is_some()
    );
}

#[test]
fn a_repetition_with_other_bytes_is_an_overlap() {
    let mut all = Reassembly::default();
    held(&mut all, &fragment(1, 0, &[1; 16], true));
    held(&mut all, &fragment(1, 0, &[2; 16], true));
    assert_eq!(lost(&mut all), 2);
    held(&mut all, &fragment(1, 16, &[1; 8], false));
    assert_eq!(lost(&mut all), 1);
}

#[test]
fn lengths_that_contradict_each_other_end_the_datagram() {
    for (first, second) in [
        // Behind the last one, and a last one before what came.
        (
            fragment(1, 16, &[1; 8], false),
            fragment(1, 32, &[1; 8], true),
        ),
        (
            fragment(1, 32, &[1; 8], true),
            fragment(1, 16, &[1; 8], false),
        ),
        (
            fragment(1, 16, &[1; 8], false),
            fragment(1, 32, &[1; 8], false),
        ),
    ] {
        let mut all = Reassembly::default();
        held(&mut all, &first);
        held(&mut all, &second);
        assert_eq!(lost(&mut all), 2);
    }
    let mut all = Reassembly::default();
    for contradictory in [
        fragment(1, 0, &[1; 9], true),
        fragment(1, 0, &[], true),
        fragment(1, 65_504, &[1; 16], false),
    ] {
        assert!(add(&mut all, &contradictory).is_err());
    }
    assert!(is_empty(&all));
}

#[test]
fn the_oldest_datagram_makes_room() {
    let mut all = Reassembly::default();
    for id in 0..=MOST_DATAGRAMS as u16 {
        held(&mut all, &fragment(id, 0, &[1; 8], true));
    }
    assert_eq!(lost(&mut all), 1);
    // Number 1 lives, number 0 does not.
    assert!(
        add(&mut all, &fragment(1, 8, &[1; 8], false))
            .unwrap()
            .is_some()
    );
    held(&mut all, &fragment(0, 8, &[1; 8], false));
}

#[test]
fn datagrams_that_do_not_become_whole_expire_and_go_with_their_vm() {
    let mut all = Reassembly::default();
    held(&mut all, &fragment(1, 0, &[1; 8], true));
    all.expire(PATIENCE_NS - 1);
    assert_eq!(lost(&mut all), 0);
    all.expire(PATIENCE_NS);
    assert_eq!(lost(&mut all), 1);
    held(&mut all, &fragment(1, 0, &[1; 8], true));
    all.forget(VmRow::new(2));
    assert_eq!(lost(&mut all), 0);
    all.forget(GUEST.row);
    assert_eq!(lost(&mut all), 1);
    assert!(is_empty(&all));
}

#[test]
fn congestion_seen_by_a_fragment_is_the_datagrams() {
    let mut all = Reassembly::default();
    held(&mut all, &fragment(1, 0, &[1; 8], true));
    let mut marked = fragment(1, 8, &[1; 8], false);
    marked[L3_AT + 1] |= CONGESTION_EXPERIENCED;
    let whole = add(&mut all, &marked).unwrap().unwrap();
    assert_eq!(whole.frame[L3_AT + 1] & 3, CONGESTION_EXPERIENCED);
}

/// Data that begins as a UDP header does.
fn datagram(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 256) as u8).collect()
}

proptest! {
    #[test]
    fn ipv6_fragments_in_any_order_become_the_datagram(
        units in prop::collection::vec(1_usize..180, 2..12),
        rest in 1_usize..8,
        swaps in prop::collection::vec(any::<(Index, Index)>(), 24),
        others in prop::collection::vec(any::<u8>(), 12),
    ) {
        let lens: Vec<usize> = units.iter().map(|unit| unit * 8).collect();
        let data = datagram(lens.iter().sum::<usize>() + rest);
        let mut begin = 0;
        let mut frames: Vec<_> = lens.iter().zip(others).map(|(len, other)| {
            // The protocol that later ones say does not count (RFC 8200 section 4.5).
            let protocol = if begin == 0 { 17 } else { other };
            let frame = fragment6(9, begin, &data[begin..begin + len], true, protocol);
            begin += len;
            frame
        }).collect();
        frames.push(fragment6(9, begin, &data[begin..], false, 17));
        for (a, b) in swaps {
            let (a, b) = (a.index(frames.len()), b.index(frames.len()));
            frames.swap(a, b);
        }
        let mut all = Reassembly::default();
        let last = frames.pop().unwrap();
        frames.iter().for_each(|frame| held(&mut all, frame));
        let whole = add(&mut all, &last).unwrap().unwrap();
        let ip = crate::packet::Ipv6::parse(&whole.frame[L3_AT..]).unwrap();
        prop_assert_eq!(ip.payload(), &data[..]);
        prop_assert_eq!(ip.next_header, 17);
        let largest = lens.iter().max().unwrap().max(&rest);
        prop_assert_eq!(whole.largest as usize, largest + 48);
        prop_assert!(is_empty(&all));
    }

    /// Bounds and counts hold for any fragments at all.
    #[test]
    fn each_ipv6_fragment_is_held_or_lost(
        fragments in prop::collection::vec(
            (0_u32..20, 0_usize..400, 1_usize..400, any::<bool>(), any::<u8>()), 1..300),
    ) {
        let mut all = Reassembly::default();
        for (id, begin, len, has_more, protocol) in fragments {
            let frame = fragment6(id, begin * 8, &vec![1; len], has_more, protocol);
            let _ = add(&mut all, &frame);
            let (count, bytes) = all.senders.get(&GUEST6).map_or((0, 0), |sender| {
                let bytes: usize = sender.list.iter().map(|d| d.data.len()).sum();
                assert_eq!(bytes, sender.bytes);
                (sender.list.len(), bytes)
            });
            prop_assert!(count <= MOST_DATAGRAMS && bytes <= MOST_BYTES && bytes == all.bytes);
        }
        all.expire(PATIENCE6_NS);
        prop_assert!(is_empty(&all));
    }
}

#[test]
fn rfc5722_an_overlap_of_ipv6_ends_the_datagram() {
    let mut all = Reassembly::default();
    held(&mut all, &fragment6(1, 0, &datagram(16), true, 17));
    held(&mut all, &fragment6(1, 8, &datagram(16), true, 17));
    assert_eq!(lost(&mut all), 2);
    held(&mut all, &fragment6(1, 16, &datagram(8), false, 17));
    assert_eq!(lost(&mut all), 1);
    assert!(all.expire(PATIENCE6_NS).is_empty(), "silently");
}

#[test]
fn rfc7112_a_first_fragment_has_all_headers() {
    for (protocol, short, enough) in [(17, 7, 8), (6, 19, 20), (58, 7, 8)] {
        let first = |len: usize| {
            let mut data = datagram(24);
            // A TCP header without options.
            data[12] = 0x50;
            data.truncate(len);
            fragment6(1, 0, &data, len.is_multiple_of(8), protocol)
        };
        let mut all = Reassembly::default();
        held(&mut all, &fragment6(1, 24, &[1; 8], false, protocol));
        assert_eq!(add(&mut all, &first(short)).unwrap_err(), Unfit::Headers);
        assert_eq!(lost(&mut all), 1, "its datagram ends");
        held(&mut all, &fragment6(1, 24, &[1; 8], false, protocol));
        assert_eq!(lost(&mut all), 1);
        all.forget(GUEST.row);
        assert!(add(&mut all, &first(enough)).is_ok(), "{protocol}");
    }
    for extension in [0, 43, 44, 51, 60] {
        let mut all = Reassembly::default();
        let first = fragment6(1, 0, &[0; 16], true, extension);
        assert_eq!(add(&mut all, &first).unwrap_err(), Unfit::Extension);
    }
}

#[test]
fn rfc6946_an_atomic_fragment_is_no_part_of_another_datagram() {
    let mut all = Reassembly::default();
    held(&mut all, &fragment6(1, 8, &[1; 8], false, 17));
    let frame = fragment6(1, 0, &datagram(11), false, 17);
    let fragment = Fragment::parse(&frame[L3_AT..]).unwrap();
    assert!(fragment.is_atomic());
    let whole = Whole::of_atomic(&frame, &fragment).unwrap();
    assert_eq!(whole.frame.len(), L3_AT + 40 + 11);
    assert_eq!(whole.frame[L3_AT + 6], 17);
    let first = fragment6(1, 0, &datagram(8), true, 17);
    assert!(add(&mut all, &first).unwrap().is_some());
}

#[test]
fn first_fragments_of_ipv6_are_told_when_their_time_is_over() {
    let mut all = Reassembly::default();
    let first = fragment6(1, 0, &datagram(16), true, 17);
    held(&mut all, &first);
    held(&mut all, &fragment6(1, 24, &[1; 8], true, 17));
    held(&mut all, &fragment6(2, 24, &[1; 8], true, 17));
    held(&mut all, &fragment(3, 0, &[1; 8], true));
    assert!(all.expire(PATIENCE6_NS - 1).is_empty());
    assert_eq!(lost(&mut all), 1, "the IPv4 datagram");
    let told = [(GUEST.row, first[L3_AT..].to_vec())];
    assert_eq!(all.expire(PATIENCE6_NS), told);
    assert_eq!(lost(&mut all), 3);
}

#[test]
fn congestion_seen_by_an_ipv6_fragment_is_the_datagrams() {
    let mut all = Reassembly::default();
    held(&mut all, &fragment6(1, 0, &datagram(8), true, 17));
    let mut marked = fragment6(1, 8, &[1; 8], false, 17);
    marked[L3_AT + 1] |= 0x30;
    let whole = add(&mut all, &marked).unwrap().unwrap();
    assert_eq!(whole.frame[L3_AT + 1], 0x30);
}

const PEER: Sender = Sender {
    origin: Origin::Peer,
    ..GUEST
};
const STRANGER: Sender = Sender {
    origin: Origin::Stranger,
    ..GUEST
};

fn add_of(all: &mut Reassembly, sender: Sender, frame: &[u8], now_ns: u64) -> Option<Whole> {
    let fragment = Fragment::parse(&frame[L3_AT..]).unwrap();
    all.add(sender, frame, &fragment, now_ns).unwrap()
}

#[test]
fn a_strangers_datagram_is_a_peers_once_a_flow_has_it() {
    for senders in [[STRANGER, PEER, STRANGER], [STRANGER, STRANGER, PEER]] {
        let mut all = Reassembly::default();
        let parts = [
            fragment(1, 16, &[1; 8], false),
            fragment(1, 8, &[1; 8], true),
            fragment(1, 0, &[1; 8], true),
        ];
        let whole = senders.iter().zip(&parts).map(|(sender, frame)| {
            let whole = add_of(&mut all, *sender, frame, 0);
            assert!(all.senders.len() <= 1, "one datagram");
            whole.is_some()
        });
        assert_eq!(whole.collect::<Vec<_>>(), [false, false, true]);
        assert!(is_empty(&all) && lost(&mut all) == 0);
    }
    // It keeps its time: the oldest of the peers' is the first to go.
    let mut all = Reassembly::default();
    add_of(&mut all, STRANGER, &fragment(1, 8, &[1; 8], true), 0);
    add_of(&mut all, PEER, &fragment(2, 8, &[1; 8], true), 5);
    add_of(&mut all, PEER, &fragment(1, 16, &[1; 8], true), 9);
    assert_eq!(all.next_deadline_ns(), Some(PATIENCE_NS));
    all.expire(PATIENCE_NS);
    assert_eq!(lost(&mut all), 2);
    assert_eq!(all.next_deadline_ns(), Some(PATIENCE_NS + 5));
    all.expire(PATIENCE_NS + 5);
    assert!(is_empty(&all) && lost(&mut all) == 1);
}

#[test]
fn a_flood_of_strangers_takes_no_room_of_a_peer() {
    let mut all = Reassembly::default();
    add_of(&mut all, PEER, &fragment(1, 0, &[1; 8], true), 0);
    for id in 2..200 {
        add_of(&mut all, STRANGER, &fragment(id, 0, &[1; 8], true), 1);
    }
    assert_eq!(lost(&mut all), 198 - MOST_DATAGRAMS as u64);
    let whole = add_of(&mut all, PEER, &fragment(1, 8, &[1; 8], false), 2);
    assert!(whole.is_some());
    all.forget(GUEST.row);
    assert!(is_empty(&all));
}

/// A fragment near the end of a datagram takes room for all of it.
#[test]
fn strangers_of_many_vms_leave_room_for_peers() {
    let mut all = Reassembly::default();
    let far = fragment(1, 65_000, &[1; 8], true);
    for row in 1..1_000 {
        let of = Sender {
            row: VmRow::new(row),
            ..STRANGER
        };
        add_of(&mut all, of, &far, 0);
    }
    assert!(all.bytes_of_strangers <= MOST_BYTES_OF_STRANGERS);
    add_of(&mut all, PEER, &far, 0);
    assert_eq!(all.bytes, all.bytes_of_strangers + 65_008);
    for row in 1..1_000 {
        all.forget(VmRow::new(row));
    }
    assert_eq!((all.bytes, all.bytes_of_strangers), (0, 0));
}
