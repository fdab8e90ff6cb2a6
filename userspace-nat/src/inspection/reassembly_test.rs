use proptest::prelude::*;

use super::*;

#[test]
fn out_of_order_pieces_are_put_together() {
    let mut stream = Reassembly::new(u32::MAX - 2);
    assert!(stream.insert(2, b"fg", true));
    assert!(stream.insert(u32::MAX, b"cd", false));
    assert_eq!((stream.whole(), stream.is_ended()), (&b""[..], false));
    assert!(stream.insert(u32::MAX - 2, b"ab", false));
    assert_eq!(stream.whole(), b"abcd");
    assert!(stream.insert(0, b"dXf", false), "the d and the f are there");
    assert_eq!(stream.whole(), b"abcdXfg");
    assert!(stream.is_ended());
}

#[test]
fn what_is_released_is_gone_and_its_copies_are_not_kept() {
    let mut stream = Reassembly::new(10);
    stream.insert(10, b"abc", false);
    stream.insert(15, b"fg", false);
    stream.release(2);
    assert_eq!((stream.begin(), stream.whole()), (12, &b"c"[..]));
    assert!(stream.insert(10, b"XXXde", false));
    assert_eq!(stream.whole(), b"cdefg");
    stream.release(100);
    assert_eq!(
        (stream.begin(), stream.whole(), stream.held()),
        (17, &b""[..], 0)
    );
}

#[test]
fn what_is_out_of_bounds_is_not_kept() {
    let mut stream = Reassembly::new(0);
    assert!(!stream.insert(MAX_LEN as u32 - 1, b"ab", true));
    assert!(!stream.is_ended());
    assert!(!stream.insert(MAX_LEN as u32 + 1, b"a", false));
    assert!(stream.insert(1 << 31, b"a", false), "of the past");
    for gap in 0..2 * MAX_GAPS as u32 {
        let kept = stream.insert(1 + 2 * gap, b"a", false);
        assert_eq!(
            kept,
            stream.islands.len() <= MAX_GAPS && gap < MAX_GAPS as u32 - 1,
            "{gap}"
        );
    }
    assert!(stream.held() <= MAX_LEN);
}

#[test]
fn nothing_at_all_takes_no_room_and_is_there() {
    let mut stream = Reassembly::new(0);
    assert!(stream.insert(MAX_LEN as u32 - 1, b"", true));
    assert_eq!(stream.held(), 0);
    assert!(stream.insert(0, b"abc", false));
    assert!(stream.insert(100, b"", false) && stream.has(100, b""));
}

#[test]
fn nothing_is_kept_behind_the_end() {
    let mut stream = Reassembly::new(0);
    assert!(stream.insert(0, b"ab", true));
    assert!(!stream.insert(1, b"bc", false));
    assert_eq!((stream.whole(), stream.is_ended()), (&b"ab"[..], true));
    let mut stream = Reassembly::new(0);
    stream.insert(3, b"d", false);
    stream.insert(0, b"ab", true);
    assert!(!stream.is_ended(), "bytes behind it came first");
}

proptest! {
    /// Against the plainest model: an array of what came first.
    #[test]
    fn the_first_copy_is_the_only_one(
        begin in any::<u32>(),
        segments in prop::collection::vec((-20i32..200, prop::collection::vec(any::<u8>(), 0..40)), 0..60),
    ) {
        let mut model = [None; 300];
        let mut stream = Reassembly::new(begin);
        for (from, segment) in segments {
            let kept = stream.insert(begin.wrapping_add_signed(from), &segment, false);
            let gaps = stream.islands.len();
            prop_assert!(kept || gaps >= MAX_GAPS || from + segment.len() as i32 > 0);
            if kept {
                for (at, byte) in (from..).zip(&segment) {
                    if let Ok(at) = usize::try_from(at) {
                        model[at].get_or_insert(*byte);
                    }
                }
            }
            let whole: Vec<u8> = model.iter().map_while(|byte| *byte).collect();
            prop_assert_eq!(stream.whole(), whole);
            prop_assert!(stream.held() >= stream.bytes.len() && stream.held() <= 300 + GROWTH);
            for pair in stream.islands.windows(2) {
                prop_assert!(pair[0].1 < pair[1].0);
            }
        }
    }
}
