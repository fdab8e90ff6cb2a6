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
fn rows_are_as_many_as_there_are_vms() {
    for vms in [1, 4_096, MOST_VMS] {
        let rows: BTreeSet<_> = VmRow::of(vms).collect();
        assert_eq!(rows.len(), vms as usize);
        assert!(!rows.contains(&VmRow::NOBODY));
        assert_eq!(rows.last().unwrap().word(), vms);
        for row in rows {
            assert_eq!(VmRow::from_word(row.word()), Some(row));
        }
    }
    assert_eq!(VmRow::of(u32::MAX).len(), MOST_VMS as usize);
    assert_eq!(VmRow::from_word(0), Some(VmRow::NOBODY));
    for word in [MOST_VMS + 1, u32::MAX] {
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
