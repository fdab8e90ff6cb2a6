//! Port I/O of 8 and 32 bits, and of a whole string.
//!
//! # Safety
//! The port must be one that a PC has, and what it does must be wanted.
use super::{call_in_8, call_in_32, call_out_8, call_out_32, call_out_string, ring0};

/// Reads a byte.
///
/// # Safety
/// See the module.
pub(crate) unsafe fn read8(port: u16) -> u8 {
    // SAFETY: the caller's.
    unsafe { ring0(call_in_8, 0, 0, port.into(), 0).0 as u8 }
}

/// Reads 32 bits.
///
/// # Safety
/// See the module.
pub(crate) unsafe fn read32(port: u16) -> u32 {
    // SAFETY: the caller's.
    unsafe { ring0(call_in_32, 0, 0, port.into(), 0).0 as u32 }
}

/// Writes a byte.
///
/// # Safety
/// See the module.
pub(crate) unsafe fn write8(port: u16, value: u8) {
    // SAFETY: the caller's.
    unsafe { ring0(call_out_8, value.into(), 0, port.into(), 0) };
}

/// Writes 32 bits.
///
/// # Safety
/// See the module.
pub(crate) unsafe fn write32(port: u16, value: u32) {
    // SAFETY: the caller's.
    unsafe { ring0(call_out_32, value.into(), 0, port.into(), 0) };
}

/// Writes `bytes` one after the other: one exit, where the host can.
///
/// # Safety
/// See the module.
pub(crate) unsafe fn write_string(port: u16, bytes: &[u8]) {
    // SAFETY: the caller's; the bytes are only read.
    unsafe {
        ring0(
            call_out_string,
            0,
            bytes.len() as u64,
            port.into(),
            bytes.as_ptr() as u64,
        )
    };
}
