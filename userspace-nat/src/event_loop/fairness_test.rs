use std::collections::VecDeque;

use proptest::prelude::*;
use slipgate_abi::{PortHeader, portframe::PortFlags};

use super::*;
use crate::port::{ETHERTYPE_AT, L3_AT, PORT_HEADER_AT};

/// A frame of a VM or of the world to it, with a number as its packet.
fn frame(row: u16, from_world: bool, number: u32) -> Vec<u8> {
    let mut frame = vec![0; L3_AT + 4];
    let header = PortHeader {
        code: 1,
        flags: if from_world {
            PortFlags::FROM_UPLINK
        } else {
            0
        },
        vm_row: row,
        id: 7,
    };
    frame[PORT_HEADER_AT..ETHERTYPE_AT].copy_from_slice(&header.encode());
    frame[ETHERTYPE_AT..L3_AT].copy_from_slice(&0x0800u16.to_be_bytes());
    frame[L3_AT..].copy_from_slice(&number.to_be_bytes());
    frame
}

/// Takes as many frames as a batch holds, if all have room.
fn read(batch: &mut Batch, waiting: &mut Waiting, queue: &mut VecDeque<Vec<u8>>) {
    if !waiting.has_room() {
        return;
    }
    for frame in queue.drain(..queue.len().min(BATCH)) {
        let fill = |buffer: &mut [u8]| {
            buffer[..frame.len()].copy_from_slice(&frame);
            Ok(frame.len())
        };
        assert!(batch.push_with(fill).unwrap());
    }
    waiting.take(batch, 0);
}

/// Handles one frame. Returns whose it was, and its number.
fn handle(batch: &mut Batch, waiting: &mut Waiting, cost: usize) -> Option<(u16, bool, u32)> {
    let turn = waiting.next()?;
    let bytes = batch.kept_mut(turn.frame).to_vec();
    waiting.done(turn, cost);
    batch.release(turn.frame);
    let frame = Frame::parse(&bytes).unwrap();
    let number = u32::from_be_bytes(frame.l3.try_into().unwrap());
    Some((frame.header.vm_row, frame.is_from_world(), number))
}

#[test]
fn frames_that_come_while_one_is_handled_wait_behind_it() {
    let (mut batch, mut waiting) = (Batch::keeping(MOST_WAITING), Waiting::default());
    let mut queue = VecDeque::from([frame(1, false, 0)]);
    read(&mut batch, &mut waiting, &mut queue);
    let turn = waiting.next().unwrap();
    // Of its sender, and of another, which has cost nothing yet.
    queue.extend([frame(1, false, 1), frame(2, false, 2)]);
    read(&mut batch, &mut waiting, &mut queue);
    let handled = turn.frame;
    waiting.done(turn, 1);
    batch.release(handled);
    let rest: Vec<_> = std::iter::from_fn(|| handle(&mut batch, &mut waiting, 1)).collect();
    assert_eq!(rest, [(2, false, 2), (1, false, 1)]);
    assert!(waiting.is_empty());
}

#[test]
fn a_newcomer_is_served_within_two_frames_whatever_waits() {
    let (mut batch, mut waiting) = (Batch::keeping(MOST_WAITING), Waiting::default());
    let mut queue: VecDeque<_> = (0..u32::from(MOST_WAITING) - RING_LEN)
        .map(|n| frame(1, false, n))
        .collect();
    while !queue.is_empty() {
        read(&mut batch, &mut waiting, &mut queue);
    }
    let mut newcomers = 0;
    for round in 0..100 {
        for _ in 0..3 {
            assert_eq!(handle(&mut batch, &mut waiting, 1).unwrap().0, 1);
        }
        if waiting.has_room() {
            newcomers += 1;
            queue.push_back(frame(2, false, round));
            read(&mut batch, &mut waiting, &mut queue);
            let next = [
                handle(&mut batch, &mut waiting, 1),
                handle(&mut batch, &mut waiting, 1),
            ];
            assert!(next.contains(&Some((2, false, round))), "{next:?}");
        }
    }
    assert!(newcomers > 50, "{newcomers}");
}

#[test]
fn who_was_silent_does_not_make_up_for_it() {
    let (mut batch, mut waiting) = (Batch::keeping(MOST_WAITING), Waiting::default());
    let mut queue: VecDeque<_> = (0..200).map(|n| frame(1, false, n)).collect();
    for _ in 0..4 {
        read(&mut batch, &mut waiting, &mut queue);
    }
    for _ in 0..100 {
        handle(&mut batch, &mut waiting, 1).unwrap();
    }
    queue.extend((0..50).map(|n| frame(2, false, n)));
    read(&mut batch, &mut waiting, &mut queue);
    let next: Vec<_> = (0..40)
        .map(|_| handle(&mut batch, &mut waiting, 1).unwrap().0)
        .collect();
    let first = next.iter().filter(|row| **row == 1).count();
    assert!((19..=21).contains(&first), "{next:?}");
}

proptest! {
    /// Nothing is lost, each sender's frames keep their order, and senders who have frames waiting
    /// get equal shares of the work, to within one frame's cost each.
    #[test]
    fn senders_share_the_work(
        frames in prop::collection::vec((0u16..5, any::<bool>()), 1..600),
        costs in prop::collection::vec(1usize..45, 10),
        per_read in 1usize..64,
    ) {
        let cost_of = |row: u16, world: bool| costs[usize::from(row) * 2 + usize::from(world)];
        let numbered = frames.iter().zip(0..);
        let mut queue: VecDeque<_> = numbered.map(|((row, world), n)| frame(*row, *world, n)).collect();
        let (mut batch, mut waiting) = (Batch::keeping(MOST_WAITING), Waiting::default());
        while !queue.is_empty() && waiting.has_room() {
            read(&mut batch, &mut waiting, &mut queue);
        }
        let mut handled: Vec<(u16, bool, u32)> = Vec::new();
        let mut spent = [0; 10];
        let (mut credited, mut served) = ([0u64; 10], [0u64; 10]);
        let mut left = [0usize; 10];
        for (row, world) in &frames {
            left[usize::from(*row) * 2 + usize::from(*world)] += 1;
        }
        let most = *costs.iter().max().unwrap();
        while !waiting.is_empty() {
            for _ in 0..per_read {
                let Some(next) = waiting.next() else { break };
                let parsed = Frame::parse(batch.kept_mut(next.frame)).unwrap();
                let (row, world) = (parsed.header.vm_row, parsed.is_from_world());
                let number = u32::from_be_bytes(parsed.l3.try_into().unwrap());
                let cost = cost_of(row, world);
                waiting.done(next, cost);
                batch.release(next.frame);
                let sender = usize::from(row) * 2 + usize::from(world);
                credited[sender] += next.credits;
                prop_assert!(credited[sender] > served[sender]);
                served[sender] += 1;
                prop_assert!(next.credits <= CREDITED_AT_ONCE as u64);
                handled.push((row, world, number));
                spent[sender] += cost;
                left[sender] -= 1;
                // All began together: who still waits has had no less than others, but for a frame.
                let waits = (0..10).filter(|at| left[*at] > 0).map(|at| spent[at]);
                if let Some(least) = waits.min() {
                    prop_assert!(spent[sender] <= least + most, "{spent:?}");
                }
            }
            read(&mut batch, &mut waiting, &mut queue);
        }
        prop_assert_eq!(handled.len(), frames.len());
        prop_assert_eq!(credited, served);
        for sender in 0..10u16 {
            let of = |entry: &&(u16, bool, u32)| entry.0 * 2 + u16::from(entry.1) == sender;
            let numbers: Vec<u32> = handled.iter().filter(of).map(|entry| entry.2).collect();
            prop_assert!(numbers.is_sorted(), "{:?}", numbers);
        }
        prop_assert_eq!(waiting.free.len(), waiting.frames.len());
        prop_assert!(waiting.senders.is_empty());
    }
}
