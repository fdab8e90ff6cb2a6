use super::*;

#[test]
fn a_walk_over_more_memory_takes_longer() {
    // 200 KB, and 150 MB: in some cache, and in none of this machine's share.
    let few = ns_of_two_misses(1_000, false).unwrap();
    let many = ns_of_two_misses(800_000, false).unwrap();
    assert!(few > 0.0 && many > few, "{few} {many}");
}

#[test]
#[should_panic(expected = "offset")]
fn a_read_beyond_the_memory_is_refused() {
    let memory = Memory::new(1, false).unwrap();
    memory.read(2 << 20);
}
