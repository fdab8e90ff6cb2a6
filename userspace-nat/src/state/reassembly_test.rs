use proptest::{prelude::*, sample::Index};

use super::*;
use crate::port::ETHERTYPE_IPV4;

const GUEST: Sender = (VmRow::new(1), false);

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

fn add(all: &mut Reassembly, frame: &[u8]) -> Result<Option<Whole>, Contradictory> {
    let ip = Ipv4::parse(&frame[L3_AT..]).unwrap();
    all.add(GUEST, frame, &ip, 0)
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
            let frame = fragment(id, begin * 8, &vec![1; len], has_more);
            match add(&mut all, &frame) {
                Ok(None) => given += 1,
                Ok(Some(done)) => whole += done.frame.len(),
                Err(Contradictory) => {}
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
    all.forget(GUEST.0);
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
