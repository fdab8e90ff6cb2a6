use super::*;

const SECOND_NS: u64 = 1_000_000_000;

#[test]
fn a_chunk_says_whose_it_is_or_since_when_it_is_nobodys() {
    assert_eq!(Chunk(0).owner(), None);
    for row in [0, 1, MAX_OWNERS - 1] {
        assert_eq!(Chunk::of(row).owner(), Some(row));
        assert!(!Chunk::of(row).has_rested(1_000 * SECOND_NS));
    }
    for second in [0, 1, 77, 1 << 24, u64::from(u32::MAX)] {
        let freed_ns = second * SECOND_NS + 999_999_999;
        let chunk = Chunk::free_since(freed_ns);
        assert_eq!(chunk.owner(), None);
        assert_ne!(chunk, Chunk(0));
        for (later_ns, rested) in [(0, false), (SLOT_REST_NS, false), (2 * SECOND_NS + 1, true)] {
            assert_eq!(
                chunk.has_rested(freed_ns + later_ns),
                rested,
                "{second} {later_ns}"
            );
        }
    }
    assert!(Chunk(0).has_rested(0), "nobody ever had it");
}

/// Each takes as much as it may, one after the other.
fn taken_by(chunks: u32, owners: u32) -> [u32; MAX_OWNERS as usize] {
    let (mut free, mut taken) = (chunks, [0; MAX_OWNERS as usize]);
    for (held, owners) in taken.iter_mut().zip(1..=owners) {
        while may_claim_chunk(chunks, free, *held, owners) {
            (free, *held) = (free - 1, *held + 1);
        }
    }
    taken
}

#[test]
fn who_comes_late_finds_chunks_too() {
    let taken = taken_by(64, 12);
    assert_eq!(taken[..12], [48, 5, 3, 1, 1, 1, 1, 1, 1, 1, 1, 0]);
    // However few there are, one alone has more than half of them, and the only one.
    assert_eq!(
        [1, 2, 3, 4, 5].map(|chunks| taken_by(chunks, 1)[0]),
        [1, 2, 3, 3, 4]
    );
}
