use super::*;

#[test]
fn a_tag_is_never_zero_and_has_its_hash() {
    for hash in [0, 1, 2, 0x9e37_79b0, u32::MAX] {
        for number in [0, 1, u64::from(u32::MAX), u64::MAX] {
            let tag = tag(hash, number);
            assert_ne!(tag, 0);
            assert!(has_hash(tag, hash));
            assert!(!has_hash(tag, hash ^ 2));
        }
    }
    assert!(!has_hash(0, 0), "no copy");
}

#[test]
fn a_place_is_claimed_for_later_copies_and_while_nobody_fills_one_in() {
    for number in [5, u64::from(u32::MAX) - 3, u64::from(u32::MAX) + 9] {
        let (hash, round) = (7, u64::from(PLACES));
        let later = number + round;
        assert_eq!(place(number), place(later));
        assert!(may_claim(0, number), "nothing was there");
        for before in [tag(hash, number), taken(number)] {
            assert!(may_claim(before, later));
            assert!(!may_claim(before, number));
        }
        assert!(!may_claim(claim(number), later), "a run stalls in it");
        // One that stalled before it came there.
        for before in [tag(hash, later), taken(later), claim(later)] {
            assert!(!may_claim(before, number));
        }
    }
}

#[test]
fn what_is_no_copy_has_no_hash() {
    for number in [0, 1, u64::from(u32::MAX)] {
        for hash in [0, 1, 2, 3, 4, 5, u32::MAX] {
            assert!(!has_hash(claim(number), hash));
            assert!(!has_hash(taken(number), hash));
        }
    }
}
