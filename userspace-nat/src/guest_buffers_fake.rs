//! A guest's memory of two regions, for tests.
use std::{
    os::{fd::OwnedFd, unix::net::UnixStream},
    sync::Arc,
};

use vm_memory::{GuestAddress, GuestMemoryMmap};

/// Address of the first region.
pub(crate) const MEMORY: u64 = 0x10_0000;
/// Length of each, bytes.
pub(crate) const LEN: usize = 1 << 20;

/// The predictable byte at a place.
pub(crate) fn byte(at: usize) -> u8 {
    (at * 7 / 3) as u8
}

/// Two regions, one behind the other.
pub(crate) fn memory() -> Arc<GuestMemoryMmap> {
    let ranges = [
        (GuestAddress(MEMORY), LEN),
        (GuestAddress(MEMORY + LEN as u64), LEN),
    ];
    GuestMemoryMmap::from_ranges(&ranges).unwrap().into()
}

/// Two sockets, neither of which waits.
pub(crate) fn pair() -> (OwnedFd, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    theirs.set_nonblocking(true).unwrap();
    (ours.into(), theirs)
}
