use vm_memory::{Bytes, GuestMemoryBackend};

use super::*;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

#[test]
fn memory_lies_around_the_hole() {
    for bytes in [64 * MIB, 3 * GIB, 3 * GIB + PAGE_SIZE, 8 * GIB] {
        let memory = create(bytes).unwrap();
        assert_eq!(total_bytes(&memory), bytes);
        assert_eq!(low_end(&memory), bytes.min(3 * GIB));
        let last = if bytes > 3 * GIB {
            bytes + GIB - 1
        } else {
            bytes - 1
        };
        assert_eq!(memory.last_addr().0, last);
        // The last byte of RAM is writable; the hole is not.
        memory.write_obj(1u8, GuestAddress(last)).unwrap();
        assert!(memory.write_obj(1u8, GuestAddress(last + 1)).is_err());
        assert!(memory.write_obj(1u8, GuestAddress(3 * GIB)).is_err());
    }
}

#[test]
fn odd_sizes_are_refused() {
    for bytes in [0, PAGE_SIZE, MIN_BYTES - 1, MIN_BYTES + 1, u64::MAX] {
        assert!(
            matches!(create(bytes), Err(MemoryError::Size(_))),
            "{bytes}"
        );
    }
    for bytes in [u64::MAX - PAGE_SIZE + 1, 1 << 52] {
        let refused = create(bytes).unwrap_err();
        assert!(
            refused.to_string().contains("give less memory"),
            "{refused}"
        );
    }
}

#[test]
fn huge_pages_take_whole_ones_and_what_the_host_lacks_is_said_with_a_remedy() {
    let odd = create_huge(HUGE_PAGE_BYTES * 4 + PAGE_SIZE).unwrap_err();
    assert!(odd.to_string().contains("a multiple of 2 MiB"), "{odd}");
    // More than any host has.
    let refused = create_huge(1 << 44).unwrap_err().to_string();
    for part in ["huge pages", "vm.nr_hugepages=8388608", "HugePages_Free"] {
        assert!(refused.contains(part), "{refused}");
    }
}
