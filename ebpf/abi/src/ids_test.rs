extern crate std;

use std::{collections::BTreeSet, format};

use super::*;

#[test]
fn an_id_prints_as_its_integer_and_says_its_type_to_who_debugs() {
    assert_eq!(format!("{:>4}|", VmId::new(7)), "   7|");
    assert_eq!(format!("{:?}", VmRow::new(3)), "VmRow(3)");
    assert_eq!(u32::from(RuleIndex::new(9)), 9);
}

#[test]
fn rows_are_those_that_the_map_has() {
    let rows: BTreeSet<_> = VmRow::all().collect();
    assert_eq!(rows.len(), MAX_VMS as usize - 1);
    assert!(!rows.contains(&VmRow::NOBODY));
    for row in rows {
        assert_eq!(VmRow::from_word(row.word()), Some(row));
    }
    assert_eq!(VmRow::from_word(0), Some(VmRow::NOBODY));
    for word in [MAX_VMS, 1 << 16, u32::MAX] {
        assert_eq!(VmRow::from_word(word), None);
    }
}

#[test]
fn a_slot_lies_in_its_chunk() {
    for (slot, chunk) in [(0, 0), (SLOTS_PER_CHUNK - 1, 0), (SLOTS_PER_CHUNK, 1)] {
        assert_eq!(SlotIndex::new(slot).chunk(), chunk);
        let first = SlotIndex::of_chunk(chunk);
        assert_eq!(first.get() + SlotIndex::new(slot).position() as u32, slot);
    }
}

#[test]
fn zero_is_nobody() {
    assert!(!VmId::NONE.is_some() && VmId::new(1).is_some());
    assert!(!IfIndex::NONE.is_some() && IfIndex::new(1).is_some());
}
