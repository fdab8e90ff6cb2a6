//! Descriptors of the maps: opened by their pins, and verified.
use std::{
    io::ErrorKind,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
};

use slipgate_abi::ABI_VERSION;

use crate::{
    Error, Result, bpf,
    layout::{MAPS, MapName, Shape, Sizes},
};

/// Opens the pin of every map.
pub(crate) fn open_pins(pin_dir: &Path) -> Result<Vec<OwnedFd>> {
    MapName::ALL
        .into_iter()
        .map(|map| {
            let path = pin_dir.join(map.name());
            bpf::obj_get(&path).map_err(|error| match error.kind() {
                ErrorKind::NotFound => none_there(pin_dir),
                _ => Error::os(format!("open the pinned map {}", path.display()))(error),
            })
        })
        .collect()
}

/// Returns the error of a missing pin: nothing is pinned, or the maps are of a version without this
/// map.
fn none_there(pin_dir: &Path) -> Error {
    let meta = bpf::obj_get(&pin_dir.join(MapName::Meta.name()));
    let theirs = meta.ok().and_then(|meta| abi_version_of(meta.as_fd()));
    match theirs {
        Some(theirs) if theirs != ABI_VERSION && theirs != 0 => Error::AbiVersion {
            pin_dir: pin_dir.into(),
            theirs,
            ours: ABI_VERSION,
        },
        _ => Error::NothingPinned {
            pin_dir: pin_dir.into(),
        },
    }
}

/// Refuses pinned maps of another version or shape, and returns their sizes.
pub(crate) fn check_pinned(fds: &[OwnedFd], pin_dir: &Path) -> Result<Sizes> {
    let their_version = abi_version_of(fds[MapName::Meta as usize].as_fd()).unwrap_or(0);
    let shape =
        |fd: BorrowedFd<'_>| Shape::of(fd).map_err(Error::os("ask for a pinned map's shape"));
    if their_version != ABI_VERSION && their_version != 0 {
        return Err(Error::AbiVersion {
            pin_dir: pin_dir.into(),
            theirs: their_version,
            ours: ABI_VERSION,
        });
    }
    let sizes = Sizes::read(|map| Ok(shape(fds[map as usize].as_fd())?.entries))?;
    for (map, fd) in MapName::ALL.into_iter().zip(fds) {
        let (theirs, ours) = (shape(fd.as_fd())?, map.shape(sizes));
        if theirs != ours {
            return Err(Error::Layout {
                map: map.name(),
                pin_dir: pin_dir.into(),
                their_version,
                our_version: ABI_VERSION,
                theirs: theirs.to_string(),
                ours: ours.to_string(),
            });
        }
    }
    Ok(sizes)
}

/// Returns the version in META, which is its first word in every version. `None` if it cannot be
/// read.
pub(crate) fn abi_version_of(meta: BorrowedFd<'_>) -> Option<u32> {
    let shape = Shape::of(meta).ok()?;
    if shape.key != 4 || shape.value < 4 {
        return None;
    }
    let mut value = vec![0u8; shape.value as usize];
    // SAFETY: key and value have the sizes that the kernel just reported.
    let found = unsafe { bpf::lookup(meta, [0u8; 4].as_ptr(), value.as_mut_ptr()) }.ok()?;
    let word = value.first_chunk::<4>().copied()?;
    found.then(|| u32::from_ne_bytes(word))
}

/// Checks that the descriptors are the maps, in order. Returns their sizes.
pub(super) fn check_descriptors(fds: &[OwnedFd]) -> Result<Sizes> {
    let wrong = |map: MapName, got: String, expected: String| Error::Descriptor {
        map: map.name(),
        got,
        expected,
    };
    if fds.len() != MAPS {
        return Err(wrong(
            MapName::Meta,
            format!("{} descriptors", fds.len()),
            format!("{MAPS}, the first"),
        ));
    }
    let shape = |map: MapName| {
        Shape::of(fds[map as usize].as_fd())
            .map_err(|error| wrong(map, format!("no map ({error})"), "a map".into()))
    };
    let sizes = Sizes::read(|map| Ok(shape(map)?.entries))?;
    for map in MapName::ALL {
        let (got, expected) = (shape(map)?, map.shape(sizes));
        if got != expected {
            return Err(wrong(map, got.to_string(), expected.to_string()));
        }
    }
    Ok(sizes)
}
