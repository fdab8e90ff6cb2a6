//! Offloads of a device, read by ethtool.
use std::{ffi::c_void, io, os::fd::AsRawFd as _};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

/// Returns whether TCP segmentation offload is on (`ETHTOOL_GTSO`, <linux/ethtool.h>).
///
/// # Errors
/// There is no such device, or it does not support the request.
pub fn offers_tso(name: &str) -> io::Result<bool> {
    const ETHTOOL_GTSO: u32 = 0x1e;
    #[repr(C)]
    struct Value {
        command: u32,
        data: u32,
    }
    let mut value = Value {
        command: ETHTOOL_GTSO,
        data: 0,
    };
    // SAFETY: plain integers and pointers, for which zero is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().take(15).zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = (&raw mut value).cast::<c_void>().cast();
    let socket = socket(
        AddressFamily::Inet,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    // SAFETY: the request's struct, whose data points to the command's, alive during the call.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(value.data != 0)
}
