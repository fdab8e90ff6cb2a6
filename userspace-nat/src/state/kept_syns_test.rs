use super::{KeptSyns, LONGEST, MOST};
use slipgate_abi::{SlotIndex, VmRow};

const VM: VmRow = VmRow::new(1);

fn slot(number: usize) -> SlotIndex {
    SlotIndex::new(number as u32)
}

/// Keeps SYNs of a VM in the slots of a range. Each is a flow's first.
fn keep(kept: &mut KeptSyns, row: VmRow, slots: std::ops::Range<usize>) {
    for number in slots {
        kept.keep(row, slot(number), 1, b"more");
    }
}

/// Checks that the parts of the store agree. Returns how many SYNs each of two VMs has.
fn lengths(kept: &KeptSyns, rows: [VmRow; 2]) -> [usize; 2] {
    let sum: usize = kept.orders.values().map(|order| order.len()).sum();
    assert_eq!((kept.len, kept.lengths.len()), (sum, kept.orders.len()));
    for (length, row) in &kept.lengths {
        assert_eq!(kept.orders[row].len(), *length);
    }
    rows.map(|row| kept.orders.get(&row).map_or(0, |order| order.len()))
}

#[test]
fn a_syn_is_taken_once_and_by_its_own_flow() {
    let mut kept = KeptSyns::default();
    kept.keep(VM, slot(7), 3, b"syn");
    kept.keep(VM, slot(8), 1, b"other");
    assert_eq!(kept.take(slot(8), 2), None, "a later flow of the slot");
    assert_eq!(kept.take(slot(7), 3).as_deref(), Some(&b"syn"[..]));
    assert_eq!(kept.take(slot(7), 3), None);
}

#[test]
fn the_oldest_is_forgotten_at_the_bound_and_a_slot_used_again_keeps_its_newest() {
    let mut kept = KeptSyns::default();
    kept.keep(VM, slot(0), 1, b"old");
    kept.keep(VM, slot(0), 2, b"new");
    keep(&mut kept, VM, 2..MOST + 1);
    assert_eq!(kept.len, MOST);
    assert_eq!(
        kept.take(slot(0), 2).as_deref(),
        Some(&b"new"[..]),
        "the entry that was forgotten was of the slot's former flow"
    );
    kept.keep(VM, slot(MOST + 1), 1, b"one too many");
    assert_eq!((kept.len, kept.frames.len()), (MOST, MOST));
    kept.keep(VM, slot(MOST + 2), 1, b"and another");
    assert_eq!(kept.take(slot(2), 1), None, "the oldest but one");
}

#[test]
fn a_vm_that_opens_many_pushes_out_no_other_vms() {
    let mut kept = KeptSyns::default();
    let other = VmRow::new(2);
    keep(&mut kept, other, 0..10);
    keep(&mut kept, VM, 10..3 * MOST);
    assert_eq!(lengths(&kept, [VM, other]), [MOST - 10, 10]);
    for number in 0..10 {
        assert!(kept.take(slot(number), 1).is_some(), "{number}");
    }
}

#[test]
fn a_full_store_is_shared_equally_by_those_who_want_it() {
    let mut kept = KeptSyns::default();
    let other = VmRow::new(2);
    keep(&mut kept, VM, 0..MOST);
    keep(&mut kept, other, MOST..2 * MOST);
    assert_eq!(lengths(&kept, [VM, other]), [MOST / 2, MOST / 2]);
    assert!(
        kept.take(slot(MOST / 2), 1).is_some(),
        "its newest are left"
    );
    assert!(kept.take(slot(MOST / 2 - 1), 1).is_none());
    keep(&mut kept, VM, 2 * MOST..2 * MOST + 100);
    assert_eq!(lengths(&kept, [VM, other]), [MOST / 2, MOST / 2]);
}

#[test]
fn a_vm_that_is_gone_leaves_nothing() {
    let mut kept = KeptSyns::default();
    keep(&mut kept, VM, 0..5);
    keep(&mut kept, VmRow::new(2), 5..6);
    kept.forget(VM);
    assert_eq!(lengths(&kept, [VM, VmRow::new(2)]), [0, 1]);
    assert_eq!((kept.len, kept.frames.len()), (1, 1));
    assert!(kept.take(slot(5), 1).is_some());
}

#[test]
fn a_syn_with_payload_is_not_kept() {
    let mut kept = KeptSyns::default();
    kept.keep(VM, slot(1), 1, &[0; LONGEST + 1]);
    assert_eq!(kept.take(slot(1), 1), None);
}
