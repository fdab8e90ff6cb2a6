//! Mounting.
use std::{ffi::CStr, io};

use slipgate_testbed::{Result, error::Tried};

/// Mounts a file system that needs no data.
pub(crate) fn mount(kind: &CStr, place: &CStr) -> Result<()> {
    mount_from(kind, kind, place)
}

/// Mounts the file system of a device.
pub(crate) fn mount_from(device: &CStr, kind: &CStr, place: &CStr) -> Result<()> {
    // SAFETY: NUL-terminated strings, no data.
    let mounted = unsafe {
        libc::mount(
            device.as_ptr(),
            place.as_ptr(),
            kind.as_ptr(),
            0,
            std::ptr::null(),
        )
    };
    let mounted = match mounted {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    mounted.tried(format!("mount {device:?} on {place:?}"))
}

/// Takes a file system away, when all that was written there is on its device.
pub(crate) fn unmount(place: &CStr) -> Result<()> {
    // SAFETY: a NUL-terminated string.
    let unmounted = match unsafe { libc::umount2(place.as_ptr(), 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    unmounted.tried(format!("unmount {place:?}"))
}
