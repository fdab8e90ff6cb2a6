use super::*;
use proptest::prelude::*;

fn full(words: &[u16]) -> u16 {
    let mut sum: u32 = words.iter().map(|w| u32::from(*w)).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

proptest! {
    /// RFC 1624: an update equals a recomputation, wherever the word stands.
    #[test]
    fn update16_equals_recomputation(mut words in prop::collection::vec(any::<u16>(), 2..20), new: u16, at: prop::sample::Index) {
        // An all-zero header has two representations of its sum; real headers are never all zero.
        words.push(0x4500);
        let at = at.index(words.len() - 1);
        let before = full(&words);
        let old = core::mem::replace(&mut words[at], new);
        prop_assert_eq!(update16(before, old, new), full(&words));
    }

    /// The difference of an address's words is what four updates make, and the sum of words is what
    /// the words sum up to.
    #[test]
    fn a_difference_is_four_updates(checksum: u16, old: [u32; 4], new: [u32; 4]) {
        let by_words = (0..4).fold(checksum, |sum, word| update32(sum, old[word], new[word]));
        // A word of ones is zero in one's complement: only the new one counts.
        let by_difference = update32(checksum, u32::MAX, difference128(old, new));
        // Zero has two representations.
        let same = |a: u16, b: u16| a == b || (a | b == 0xffff && a & b == 0);
        prop_assert!(same(by_difference, by_words), "{by_difference:04x} {by_words:04x}");
    }

    #[test]
    fn the_checksum_of_a_sum_is_that_of_its_words(words in prop::collection::vec(any::<u16>(), 1..40)) {
        let sum = words.iter().map(|word| u64::from(*word)).sum();
        prop_assert_eq!(of_sum(sum), full(&words));
    }

    #[test]
    fn update32_equals_two_16(checksum: u16, old: u32, new: u32) {
        let halves = |w: u32| ((w & 0xffff) as u16, (w >> 16) as u16);
        let ((ol, oh), (nl, nh)) = (halves(old), halves(new));
        let two = update16(update16(checksum, ol, nl), oh, nh);
        prop_assert_eq!(update32(checksum, old, new), two);
    }
}
