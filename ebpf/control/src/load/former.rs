//! Maps that a slipgate of the version before this one pinned, copied into maps of this version.
//!
//! # Theory of operation
//! The copies are pinned beside the old maps, META's last, and then take their places by renames,
//! META last again. So a start that dies leaves either the old maps, with copies that the next one
//! makes anew, or renames that the next one completes. The old programs run over the old maps until
//! those of this build replace them, right afterwards: what they count meanwhile is not in the
//! copies.
//!
//! While a process of the former version lives, its maps are not copied but refused: it would go on
//! with the old ones.
use std::{
    fs, io,
    mem::offset_of,
    os::fd::{AsFd as _, BorrowedFd},
    path::PathBuf,
};

use slipgate_abi::{ABI_VERSION, NameKey, RefusalCounters, VmCounters};

use crate::{
    Error, Paths, Result,
    bpf::{self, Kind, Shape},
    layout::{MapName, Sizes},
    maps::abi_version_of,
    paths::remove_if_there,
    pins::is_any_alive,
};

/// Key and value of an element.
type Element = (Vec<u8>, Vec<u8>);

/// The version before this one.
pub(super) struct Former {
    pub(super) version: u32,
    /// Makes an element of this version from one of that version. `None`: it is left out.
    pub(super) element: fn(MapName, Element) -> Option<Element>,
}

/// The version whose maps this one reads. A new version has its predecessor here, as long as each
/// element can be made from one.
pub(super) const FORMER: Option<Former> = Some(Former {
    version: 5,
    element: of_version_5,
});

/// Version 6 added IPv6: maps of its own, which version 5 does not have, counters behind those that
/// were there, and fields in place of padding. It also added budgets of bytes, by the last drop
/// reason, and the last three reasons to refuse a flow, which other counters follow; rings of first
/// packets, whose words are behind an owner's; and to the key of a name an IPv6 address, at its end.
fn of_version_5(map: MapName, (mut key, mut value): Element) -> Option<Element> {
    if map == MapName::Counters && value.len() >= ADDED_REFUSAL {
        let zeros = [0; ADDED_REFUSALS * size_of::<u64>()];
        value.splice(ADDED_REFUSAL..ADDED_REFUSAL, zeros);
    }
    if matches!(map, MapName::Drops | MapName::Counters | MapName::Owners) {
        // The size of an element depends on no number of elements.
        value.resize(map.shape(Sizes::of_slots(0)).value as usize, 0);
    }
    if map == MapName::Names {
        key.resize(size_of::<NameKey>(), 0);
    }
    Some((key, value))
}

/// Number of reasons to refuse a flow that version 5 does not have: a spent budget, no address, and no
/// socket.
const ADDED_REFUSALS: usize = 3;
/// Offset of the first of their counters, bytes.
const ADDED_REFUSAL: usize = offset_of!(VmCounters, refused) + size_of::<RefusalCounters>()
    - ADDED_REFUSALS * size_of::<u64>();

/// Path of a copy until it takes the old map's place.
fn copy_of(paths: &Paths, map: MapName) -> PathBuf {
    paths.pin(&format!("{}-new", map.name()))
}

/// Replaces maps of the former version, if those are pinned and no process serves by them.
pub(super) fn convert(paths: &Paths, former: Option<&Former>) -> Result<()> {
    let meta = bpf::obj_get(&paths.pin(MapName::Meta.name()));
    let theirs = meta.ok().and_then(|meta| abi_version_of(meta.as_fd()));
    let Some(former) = former.filter(|former| Some(former.version) == theirs) else {
        return Ok(());
    };
    if is_any_alive(paths)? {
        return Ok(());
    }
    let meta_last = || MapName::ALL.into_iter().rev();
    if !copy_of(paths, MapName::Meta).exists() {
        let entries = |map: MapName| {
            let former = bpf::obj_get(&paths.pin(map.name()));
            let shape = former.and_then(|map| Shape::of(map.as_fd()));
            let what = format!("read the former version's {}", map.name());
            shape.map(|shape| shape.entries).map_err(Error::os(what))
        };
        let sizes = Sizes::read(entries)?;
        for map in meta_last() {
            remove_if_there(&copy_of(paths, map), |path| fs::remove_file(path))?;
            copy(paths, map, former, sizes).map_err(Error::os(format!(
                "copy the former version's {}",
                map.name()
            )))?;
        }
    }
    for map in meta_last() {
        let (from, to) = (copy_of(paths, map), paths.pin(map.name()));
        if from.exists() {
            let what = format!("rename {} to {}", from.display(), to.display());
            fs::rename(&from, &to).map_err(Error::os(what))?;
        }
    }
    tracing::info!(
        "took over the maps of version {} as version {ABI_VERSION}",
        former.version
    );
    Ok(())
}

/// Makes a map of this version, and fills it from the former version's, which may not have it.
fn copy(paths: &Paths, map: MapName, former: &Former, sizes: Sizes) -> io::Result<()> {
    let new = bpf::map_create(map.name(), map.shape(sizes))?;
    if let Ok(old) = bpf::obj_get(&paths.pin(map.name())) {
        for old in elements(old.as_fd())? {
            let Some((key, mut value)) = (former.element)(map, old) else {
                continue;
            };
            let shape = map.shape(sizes);
            let sizes = (key.len() as u32, value.len() as u32);
            if sizes != (shape.key, shape.value) {
                // An engine can write the version, of whatever maps.
                return Err(io::Error::other("an element is not of that version"));
            }
            if map == MapName::Meta {
                value[..4].copy_from_slice(&ABI_VERSION.to_ne_bytes());
            }
            // SAFETY: as many bytes as the map's key and value have.
            unsafe { bpf::update(new.as_fd(), key.as_ptr(), value.as_ptr(), 0)? };
        }
    }
    bpf::obj_pin(new.as_fd(), &copy_of(paths, map))
}

/// The elements of a map, of an array those that are not zero.
fn elements(map: BorrowedFd<'_>) -> io::Result<Vec<Element>> {
    let shape = Shape::of(map)?;
    let (key_bytes, value_bytes) = (shape.key as usize, shape.value as usize);
    let mut all = Vec::new();
    if shape.kind == Kind::MAPPED_ARRAY {
        for index in 0..shape.entries {
            let (key, mut value) = (index.to_ne_bytes().to_vec(), vec![0; value_bytes]);
            // SAFETY: as many bytes as the map's key and value have.
            unsafe { bpf::lookup(map, key.as_ptr(), value.as_mut_ptr())? };
            if value.iter().any(|byte| *byte != 0) {
                all.push((key, value));
            }
        }
        return Ok(all);
    }
    let room = shape.entries as usize;
    let (mut keys, mut values) = (vec![0; room * key_bytes], vec![0; room * value_bytes]);
    let mut cursor = vec![0; key_bytes.max(8)];
    // SAFETY: room for all entries, so that one call returns them; a cursor as large as a key.
    let batch = unsafe {
        bpf::lookup_batch(
            map,
            std::ptr::null(),
            cursor.as_mut_ptr(),
            keys.as_mut_ptr(),
            values.as_mut_ptr(),
            shape.entries,
        )?
    };
    let pairs = keys.chunks(key_bytes).zip(values.chunks(value_bytes));
    let pairs = pairs.take(batch.count as usize);
    Ok(pairs
        .map(|(key, value)| (key.to_vec(), value.to_vec()))
        .collect())
}

#[cfg(test)]
#[path = "former_test.rs"]
mod tests;
