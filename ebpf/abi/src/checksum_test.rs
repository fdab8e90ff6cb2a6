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

    #[test]
    fn update32_equals_two_16(checksum: u16, old: u32, new: u32) {
        let halves = |w: u32| ((w & 0xffff) as u16, (w >> 16) as u16);
        let ((ol, oh), (nl, nh)) = (halves(old), halves(new));
        let two = update16(update16(checksum, ol, nl), oh, nh);
        prop_assert_eq!(update32(checksum, old, new), two);
    }
}
