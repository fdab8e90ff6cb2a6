//! Mounting.
use std::{ffi::CStr, io};

use slipgate_testbed::{Result, error::Tried};

/// Mounts a file system that needs no data.
pub(crate) fn mount(kind: &CStr, place: &CStr) -> Result<()> {
    // SAFETY: NUL-terminated strings, no data.
    let mounted = unsafe {
        libc::mount(
            kind.as_ptr(),
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
    mounted.tried(format!("mount {kind:?} on {place:?}"))
}
