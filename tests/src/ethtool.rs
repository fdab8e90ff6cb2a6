//! A device's offloads, by the ethtool ioctls (include/uapi/linux/ethtool.h).

use std::io;

use crate::{
    error::{Result, Tried, checked},
    netns::NetNs,
};

const SIOCETHTOOL: libc::c_ulong = 0x8946;
const ETHTOOL_GTSO: u32 = 0x1e;
const SET: [(&str, u32); 5] = [
    ("rx-checksumming", 0x15),      // ETHTOOL_SRXCSUM
    ("tx-checksumming", 0x17),      // ETHTOOL_STXCSUM; segmentation offloads depend on it
    ("tcp-segmentation", 0x1f),     // ETHTOOL_STSO
    ("generic-segmentation", 0x24), // ETHTOOL_SGSO
    ("generic-receive", 0x2c),      // ETHTOOL_SGRO
];

#[repr(C)]
struct EthtoolValue {
    command: u32,
    data: u32,
}

/// Turns checksum and segmentation offloads of `device` on or off. Offloads that the device cannot
/// change are left as they are.
///
/// # Errors
/// There is no such device.
pub fn set_offloads(ns: &NetNs, device: &str, on: bool) -> Result<()> {
    for (name, command) in SET {
        match ns.run(|| ethtool(device, command, on.into())) {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
            other => drop(other.tried(format!("set {name} of {device} to {on}"))?),
        }
    }
    Ok(())
}

/// Whether `device` accepts TCP segments to be segmented later (TSO).
///
/// # Errors
/// The device does not exist.
pub fn has_tso(ns: &NetNs, device: &str) -> Result<bool> {
    let value = ns.run(|| ethtool(device, ETHTOOL_GTSO, 0));
    Ok(value.tried(format!("read the TSO setting of {device}"))? != 0)
}

fn ethtool(device: &str, command: u32, data: u32) -> io::Result<u32> {
    let socket = std::net::UdpSocket::bind("127.0.0.1:0")?;
    let mut value = EthtoolValue { command, data };
    // SAFETY: ifreq is plain data, for which zeroes are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (slot, byte) in request.ifr_name.iter_mut().take(15).zip(device.bytes()) {
        *slot = byte as libc::c_char;
    }
    request.ifr_ifru.ifru_data = (&raw mut value).cast();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&socket);
    // SAFETY: the request and the value it points to outlive the call.
    checked(unsafe { libc::ioctl(fd, SIOCETHTOOL, &raw mut request) })?;
    Ok(value.data)
}
