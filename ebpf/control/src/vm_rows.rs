//! Fields of the rows of `VMS`: the owner, the id and the name of a VM.

use std::sync::atomic::{
    AtomicU32,
    Ordering::{Acquire, Release},
};

use slipgate_abi::{VmId, VmRow};

use crate::maps::{SharedMaps, text_of};

/// Returns the open rows of an owner.
pub fn rows_of(maps: &SharedMaps, owner_row: u32) -> impl Iterator<Item = VmRow> + '_ {
    maps.vm_rows()
        .filter(move |row| owner_of(maps, *row) == Some(owner_row))
}

/// Returns the name in a VM's row; `None` beyond the last row.
pub fn name_of(maps: &SharedMaps, row: VmRow) -> Option<String> {
    let vm = maps.vm(row)?.as_ptr();
    // SAFETY: bytes of a mapped row.
    Some(text_of(&unsafe { (&raw const (*vm).name).read_volatile() }))
}

/// Returns the id in a row; `None` if the row is not open.
pub(crate) fn id_of(maps: &SharedMaps, row: VmRow) -> Option<VmId> {
    let id = VmId::new(maps.vm(row)?.id().load(Acquire));
    id.is_some().then_some(id)
}

pub(crate) fn is_open(maps: &SharedMaps, row: VmRow) -> bool {
    id_of(maps, row).is_some()
}

/// Returns the open row of a VM's name. Any process may have it: every row is looked at, by a word
/// of it where the name is another.
pub(crate) fn row_named(maps: &SharedMaps, name: &str) -> Option<VmRow> {
    let mut first = [0; size_of::<u64>()];
    for (to, from) in first.iter_mut().zip(name.bytes()) {
        *to = from;
    }
    maps.vm_rows().find(|row| {
        is_open(maps, *row)
            && begins_with(maps, *row, first)
            && name_of(maps, *row).is_some_and(|found| found == name)
    })
}

/// Returns the row of `OWNERS` that an open VM of this name belongs to.
pub fn owner_of_name(maps: &SharedMaps, name: &str) -> Option<u32> {
    row_named(maps, name).and_then(|row| owner_of(maps, row))
}

/// Whether the name in a row begins with these bytes.
fn begins_with(maps: &SharedMaps, row: VmRow, first: [u8; size_of::<u64>()]) -> bool {
    maps.vm(row).is_some_and(|vm| {
        // SAFETY: bytes of a mapped row, whose name is longer.
        unsafe {
            (&raw const (*vm.as_ptr()).name)
                .cast::<[u8; 8]>()
                .read_volatile()
                == first
        }
    })
}

/// Returns the row of `OWNERS` in a row; `None` if the row is not open.
pub(crate) fn owner_of(maps: &SharedMaps, row: VmRow) -> Option<u32> {
    is_open(maps, row).then(|| owner_word(maps, row).load(Acquire))
}

pub(crate) fn set_owner(maps: &SharedMaps, row: VmRow, owner: u32) {
    owner_word(maps, row).store(owner, Release);
}

fn owner_word(maps: &SharedMaps, row: VmRow) -> &AtomicU32 {
    let vm = maps.vm(row).expect("a row of VMS").as_ptr();
    // SAFETY: a word of a mapped row.
    unsafe { AtomicU32::from_ptr(&raw mut (*vm).owner) }
}
