//! Port I/O of 8, 16 and 32 bits, and of a byte string.
//!
//! # Safety
//! The port must be one that a PC has, and the access's effect must be intended.
use super::{call_in_8, call_in_32, call_out_8, call_out_16, call_out_32, call_out_string, ring0};

/// Reads one byte from a port.
///
/// # Safety
/// The port must exist, and the effect of the read must be intended.
pub(crate) unsafe fn read8(port: u16) -> u8 {
    // SAFETY: the caller's promise.
    unsafe { ring0(call_in_8, 0, 0, port.into(), 0).0 as u8 }
}

/// Reads 32 bits from a port.
///
/// # Safety
/// The port must exist, and the effect of the read must be intended.
pub(crate) unsafe fn read32(port: u16) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { ring0(call_in_32, 0, 0, port.into(), 0).0 as u32 }
}

/// Writes one byte to a port.
///
/// # Safety
/// The port must exist, and the effect of the write must be intended.
pub(crate) unsafe fn write8(port: u16, value: u8) {
    // SAFETY: the caller's promise.
    unsafe { ring0(call_out_8, value.into(), 0, port.into(), 0) };
}

/// Writes 16 bits to a port.
///
/// # Safety
/// The port must exist, and the effect of the write must be intended.
pub(crate) unsafe fn write16(port: u16, value: u16) {
    // SAFETY: the caller's promise.
    unsafe { ring0(call_out_16, value.into(), 0, port.into(), 0) };
}

/// Writes 32 bits to a port.
///
/// # Safety
/// The port must exist, and the effect of the write must be intended.
pub(crate) unsafe fn write32(port: u16, value: u32) {
    // SAFETY: the caller's promise.
    unsafe { ring0(call_out_32, value.into(), 0, port.into(), 0) };
}

/// Writes `bytes` one after the other, each by an access of its own.
///
/// # Safety
/// The port must exist, and the effect of the writes must be intended.
pub(crate) unsafe fn write_string(port: u16, bytes: &[u8]) {
    // SAFETY: the caller's promise; the bytes are only read.
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
