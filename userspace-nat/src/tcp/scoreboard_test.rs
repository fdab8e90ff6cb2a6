//! Ranges against a plain set of numbers.
use proptest::prelude::*;

use super::*;

const UNACKNOWLEDGED: u32 = u32::MAX - 20;

fn numbered(offset: u32) -> u32 {
    UNACKNOWLEDGED.wrapping_add(offset)
}

fn blocks(all: &[(u32, u32)]) -> SackBlocks {
    let mut blocks = SackBlocks::default();
    for (first, end) in all {
        blocks.push((numbered(*first), numbered(*end)));
    }
    blocks
}

#[test]
fn what_was_never_sent_is_acknowledged_or_is_no_range_is_ignored() {
    let mut board = Scoreboard::default();
    let bad = blocks(&[(0, 10), (50, 101), (20, 20), (30, 25)]);
    board.note(&bad, UNACKNOWLEDGED, numbered(100));
    assert!(board.is_empty());
    // A duplicate (RFC 2883), of what is acknowledged.
    let mut duplicate = SackBlocks::default();
    duplicate.push((
        UNACKNOWLEDGED.wrapping_sub(9),
        UNACKNOWLEDGED.wrapping_sub(3),
    ));
    board.note(&duplicate, UNACKNOWLEDGED, numbered(100));
    assert!(board.is_empty());
}

#[test]
fn its_ranges_are_bounded() {
    let mut board = Scoreboard::default();
    for nth in 0..10_000 {
        let block = blocks(&[(10 + 4 * nth, 12 + 4 * nth)]);
        board.note(&block, UNACKNOWLEDGED, numbered(50_000));
    }
    assert_eq!(board.0.len(), MOST_RANGES);
    board.acknowledged(numbered(50_000));
    assert_eq!(board.0.capacity(), 0);
}

#[test]
fn rfc6675_4_three_ranges_or_more_than_two_segments_behind_it_mean_lost() {
    let lost_before = |all: &[(u32, u32)]| {
        let mut board = Scoreboard::default();
        board.note(&blocks(all), UNACKNOWLEDGED, numbered(100_000));
        board.lost_before(1_000)
    };
    assert_eq!(lost_before(&[]), None);
    assert_eq!(lost_before(&[(1_000, 3_000)]), None);
    assert_eq!(lost_before(&[(1_000, 3_001)]), Some(numbered(1_000)));
    assert_eq!(lost_before(&[(10, 20), (30, 40)]), None);
    let three = lost_before(&[(10, 20), (30, 40), (50, 60)]);
    assert_eq!(three, Some(numbered(10)));
    let two = lost_before(&[(10, 20), (3_000, 4_000), (5_000, 7_000)]);
    assert_eq!(two, Some(numbered(3_000)));
}

proptest! {
    #[test]
    fn ranges_are_those_of_a_set(
        all in prop::collection::vec((1_u32..200, 1_u32..20), 1..40),
        acknowledged in 0_u32..100,
        at in 0_u32..260,
    ) {
        let mut board = Scoreboard::default();
        let mut set = [false; 260];
        for (first, len) in &all {
            board.note(&blocks(&[(*first, first + len)]), UNACKNOWLEDGED, numbered(250));
            set[*first as usize..(first + len) as usize].fill(true);
        }
        let ranges: Vec<_> = board.0.clone();
        for pair in ranges.windows(2) {
            prop_assert!(before(pair[0].1, pair[1].0), "apart: {:?}", ranges);
        }
        let of_set = set.iter().filter(|has| **has).count() as u32;
        let of_ranges: u32 = ranges.iter().map(|(first, end)| end.wrapping_sub(*first)).sum();
        prop_assert_eq!(of_set, of_ranges);
        let next = (at as usize..260).find(|at| !set[*at]).map_or(260, |at| at as u32);
        prop_assert_eq!(board.skip(numbered(at)), numbered(next));
        board.acknowledged(numbered(acknowledged));
        prop_assert!(board.0.iter().all(|(first, _)| before(numbered(acknowledged), *first)));
    }
}
