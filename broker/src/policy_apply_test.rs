use super::*;

fn counts(cut: u64, kept: u64, left: u64) -> Applied {
    Applied { cut, kept, left }
}

#[test]
fn a_change_is_done_when_every_worker_has_answered_once() {
    let mut applying = Applying {
        id: 7,
        change: Change::default(),
        awaited: (0..3).collect(),
        counts: Applied::default(),
    };
    assert!(!applying.answered(1, 7, counts(1, 10, 0)));
    // An answer to an earlier change, one that was given already, and one of nobody's.
    assert!(!applying.answered(0, 6, counts(100, 100, 100)));
    assert!(!applying.answered(1, 7, counts(100, 100, 100)));
    assert!(!applying.answered(9, 7, counts(100, 100, 100)));
    assert!(!applying.answered(0, 7, counts(2, 20, u64::MAX)));
    assert!(applying.answered(2, 7, counts(3, 30, 1)));
    assert_eq!(applying.counts, counts(6, 60, u64::MAX));
}
