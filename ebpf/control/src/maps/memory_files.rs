//! The mapped arrays as files of memory, for `--mode userspace`: a file for each, named as its map, in
//! a directory that only its user can enter. Descriptors are passed in the order of the maps, as the
//! kernel's are; in place of each hash there is a file without contents.
use std::{
    fs::{File, OpenOptions},
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
    path::Path,
};

use slipgate_abi::{ABI_VERSION, maps::SLOTS_PER_CHUNK};

use crate::{
    Error, Result,
    layout::{Kind, MapName, Shape, Sizes},
    paths::remove_if_there,
};

/// Whether there are such files in a directory.
pub(crate) fn are_in(dir: &Path) -> bool {
    dir.join(MapName::Meta.name()).is_file() && !is_bpffs(dir)
}

/// Whether a directory is of the kernel's file system for pins, where a pin looks like a file too.
fn is_bpffs(dir: &Path) -> bool {
    dir.starts_with(crate::paths::BPFFS)
}

/// Whether these are files, not maps of the kernel.
pub(crate) fn are_files(fds: &[OwnedFd]) -> bool {
    let meta = fds.get(MapName::Meta as usize);
    meta.is_some_and(|fd| length(fd).is_some())
}

/// Length of a file; `None` of what is no file.
fn length(fd: &OwnedFd) -> Option<u64> {
    let file = File::from(fd.as_fd().try_clone_to_owned().ok()?);
    let metadata = file.metadata().ok()?;
    metadata.is_file().then_some(metadata.len())
}

fn len_of(shape: Shape) -> u64 {
    match shape.kind {
        Kind::MAPPED_ARRAY => u64::from(shape.value).next_multiple_of(8) * u64::from(shape.entries),
        _ => 0,
    }
}

/// Makes the files, all zero.
pub(crate) fn make(dir: &Path, sizes: Sizes) -> Result<()> {
    for map in MapName::ALL {
        let path = dir.join(map.name());
        let failed = || Error::os(format!("make {}", path.display()));
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .map_err(failed())?;
        file.set_len(len_of(map.shape(sizes))).map_err(failed())?;
    }
    Ok(())
}

/// Opens the file of every map, in the order of [`MapName::ALL`].
pub(crate) fn open(dir: &Path) -> Result<Vec<OwnedFd>> {
    MapName::ALL
        .into_iter()
        .map(|map| {
            let path = dir.join(map.name());
            let file = OpenOptions::new().read(true).write(true).open(&path);
            file.map(OwnedFd::from)
                .map_err(Error::os(format!("open {}", path.display())))
        })
        .collect()
}

/// Removes the file of every map; one that is missing is no error.
pub(crate) fn remove(dir: &Path) -> Result<()> {
    for map in MapName::ALL {
        remove_if_there(&dir.join(map.name()), |file| std::fs::remove_file(file))?;
    }
    Ok(())
}

/// Checks that the files have the lengths of the maps. Returns the maps' sizes.
pub(crate) fn check(fds: &[OwnedFd]) -> Result<Sizes> {
    let of = |map: MapName| fds.get(map as usize).and_then(length).unwrap_or(0);
    let elements = |map: MapName| {
        let one = u64::from(map.shape(ONE_EACH).value).next_multiple_of(8);
        u32::try_from(of(map) / one).map_err(|_| too_long(map))
    };
    let sizes = Sizes::read(elements)?;
    let sizes = Sizes {
        slots: sizes.slots / SLOTS_PER_CHUNK * SLOTS_PER_CHUNK,
        ..sizes
    };
    for map in MapName::ALL {
        let (got, expected) = (of(map), len_of(map.shape(sizes)));
        if got != expected || sizes.slots == 0 {
            return Err(Error::Descriptor {
                map: map.name(),
                got: format!("a file of {got} bytes"),
                expected: format!("one of {expected} (layout {ABI_VERSION})"),
            });
        }
    }
    Ok(sizes)
}

/// The least sizes, of which each element's size can be read.
const ONE_EACH: Sizes = Sizes {
    slots: 1,
    vms: 1,
    rules: 1,
};

fn too_long(map: MapName) -> Error {
    Error::Descriptor {
        map: map.name(),
        got: "a file of more elements than a map can have".into(),
        expected: format!("one of layout {ABI_VERSION}"),
    }
}
