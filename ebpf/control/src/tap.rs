//! The engine port: a persistent TAP of slipgate's own, over which kernel and engine pass frames.
//!
//! The host must neither send frames of its own on it nor receive one: no ARP, no IPv6, no
//! forwarding, no address. GSO frames pass whole, both ways: offloads are on, and the MTU is the
//! largest possible. The TAP is persistent so that the programs can name it while no engine runs.
//! Its queue then drops, and the link counts the drops.

use std::{
    ffi::CStr,
    fs::{File, OpenOptions},
    io,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::fs::{MetadataExt as _, OpenOptionsExt},
    },
};

use slipgate_abi::{
    IfIndex,
    maps::{DEFAULT_VMS, MAX_OWNERS, MOST_VMS},
    portframe::PORT_DEVICE,
};

use crate::{
    Error, Result,
    attach::{Hook, Program},
    device::Device,
    load::Datapath,
    paths::netns_inode,
};

/// Maximum number of frames that wait for the engine. Credits per VM keep the queue from filling.
pub const QUEUE_FRAMES: u32 = 16_384;
/// Number of names that are tried. A name is [`PORT_DEVICE`] and a number: the owner's row, plus a
/// multiple of [`MAX_OWNERS`] if another device has the name.
const NAMES: u32 = 8;
/// `TUNGETDEVNETNS` of `linux/if_tun.h`: a descriptor of the device's network namespace.
const TUNGETDEVNETNS: libc::Ioctl = 0x54e3;
/// The largest MTU of a TAP: 65,535 less an Ethernet header.
const MTU_BYTES: u32 = 65_521;
/// Size of the legacy `virtio_net_hdr`, which precedes each frame on the descriptor, bytes.
pub const VNET_HEADER_BYTES: i32 = 10;

/// Offload flags `TUN_F_*` of `linux/if_tun.h`.
mod offload {
    pub(super) const CSUM: u32 = 0x01;
    pub(super) const TSO4: u32 = 0x02;
    pub(super) const TSO6: u32 = 0x04;
    pub(super) const TSO_ECN: u32 = 0x08;
    /// Available since Linux 6.2.
    pub(super) const USO4: u32 = 0x20;
    /// Available since Linux 6.2.
    pub(super) const USO6: u32 = 0x40;
}

/// An open engine port.
#[derive(Debug)]
pub struct EnginePort {
    /// Name of the device: `sgport<owner's row>`, or with a higher number.
    pub name: String,
    /// Index of the device.
    pub ifindex: IfIndex,
    /// Descriptor for the engine, non-blocking: each read and write is a 10-byte `virtio_net_hdr`
    /// and a frame.
    pub fd: OwnedFd,
    /// Whether UDP segmentation offload is on too.
    pub uso: bool,
    /// Whether the descriptor is a predecessor's, with the frames that wait in its queue.
    pub handed_over: bool,
}

impl EnginePort {
    /// Makes or reopens an owner's port. A new one is down until [`EnginePort::serve`].
    /// `handed_over`: descriptors of a predecessor; one of this owner's port is taken out and stays
    /// in use.
    ///
    /// # Errors
    /// The device cannot be opened or configured, or other devices have all the names.
    pub fn open(owner_row: u32, handed_over: &mut Vec<OwnedFd>) -> Result<Self> {
        Self::open_for(owner_row, DEFAULT_VMS, handed_over)
    }

    /// The same with a queue that has room for two frames of each of `vms` VMs, twice, and for
    /// [`QUEUE_FRAMES`] at least.
    ///
    /// # Errors
    /// As [`EnginePort::open`].
    pub fn open_for(owner_row: u32, vms: u32, handed_over: &mut Vec<OwnedFd>) -> Result<Self> {
        let mut ports = handed_over.iter().enumerate();
        let port = ports.find_map(|(at, fd)| Some((at, name_of_port(fd, owner_row)?)));
        let port = port.map(|(at, name)| (name, File::from(handed_over.swap_remove(at))));
        let handed_over = port.is_some();
        let (fd, name) = match port {
            Some((name, fd)) => (fd, name),
            None => open_or_make(owner_row)?,
        };
        let failed = |what: &str| Error::os(format!("{what} the engine port {name}"));
        set(&fd, libc::TUNSETPERSIST, 1).map_err(failed("make persistent"))?;
        let uso = queue_for_frames(&fd).map_err(failed("set header size and offloads of"))?;
        let device = Device::named(&name)?;
        device.disable_ipv6()?;
        device.set_forwarding(false)?;
        device.set_arp(false)?;
        device.set_queue_length(QUEUE_FRAMES.max(4 * vms.min(MOST_VMS)))?;
        device.set_mtu(MTU_BYTES)?;
        Ok(Self {
            ifindex: device.ifindex()?,
            fd: fd.into(),
            name,
            uso,
            handed_over,
        })
    }

    /// Attaches the port's program, and only then brings the port up.
    ///
    /// A port that a dead process left is up already, without a queue: the kernel removed the queue
    /// when the descriptor was closed, and restores it from a work queue some time after the port
    /// is opened again (`linkwatch_event`). Until then, packets redirected to it are lost. A port
    /// that is brought down and up has its queue at once. A descriptor that was handed over kept
    /// its queue, with frames in it, which going down would empty.
    ///
    /// # Errors
    /// The program cannot be attached, or the device's flags cannot be changed.
    pub fn serve(&self, datapath: &Datapath, hook: Hook) -> Result<()> {
        datapath.attach(Program::EnginePort, self.ifindex, hook)?;
        let device = Device::named(&self.name)?;
        if !self.handed_over {
            device.set_up(false)?;
        }
        device.set_up(true)
    }

    /// Removes an owner's port if it exists. Returns whether there was one.
    ///
    /// # Errors
    /// The device cannot be removed.
    pub fn remove(owner_row: u32) -> Result<bool> {
        let mut removed = false;
        for name in names_for(owner_row) {
            if let Some(device) = Device::named(&name).ok().filter(is_port) {
                crate::netlink::remove_link(device.ifindex()?, &name)?;
                removed = true;
            }
        }
        Ok(removed)
    }
}

/// Returns the names that an owner's port may have.
fn names_for(owner_row: u32) -> impl Iterator<Item = String> {
    (0..NAMES).map(move |turn| format!("{PORT_DEVICE}{}", owner_row + turn * MAX_OWNERS))
}

/// Returns the name of an owner's port in this network namespace, if the descriptor is of its queue.
fn name_of_port(fd: &OwnedFd, owner_row: u32) -> Option<String> {
    let name = name_here(fd)?;
    let is_owners = names_for(owner_row).any(|its| its == name);
    let is_it = is_owners && Device::named(&name).is_ok_and(|device| is_port(&device));
    is_it.then_some(name)
}

/// Returns the name of the interface that a descriptor of `/dev/net/tun` is a queue of, if it is in
/// this network namespace. It takes `CAP_NET_ADMIN`.
pub fn name_here(fd: &impl AsRawFd) -> Option<String> {
    // SAFETY: a struct of integers that only the kernel interprets.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // SAFETY: the request with its struct.
    if unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNGETIFF, &raw mut request) } < 0 {
        return None;
    }
    // SAFETY: the call takes no argument.
    let netns = unsafe { libc::ioctl(fd.as_raw_fd(), TUNGETDEVNETNS, 0) };
    if netns < 0 {
        return None;
    }
    // SAFETY: the kernel made it for us just now.
    let netns = File::from(unsafe { OwnedFd::from_raw_fd(netns) });
    let is_here = netns.metadata().ok()?.ino() == netns_inode().ok()?;
    // SAFETY: filled and terminated by the call.
    let name = unsafe { CStr::from_ptr(request.ifr_name.as_ptr()) };
    is_here.then(|| name.to_string_lossy().into_owned())
}

/// Whether a device with such a name was made by [`EnginePort::open`]: no other device has its MTU
/// and `IFF_NOARP`.
fn is_port(device: &Device) -> bool {
    let silent = device.flags().is_ok_and(|f| f & libc::IFF_NOARP != 0);
    silent && device.mtu().is_ok_and(|mtu| mtu == MTU_BYTES)
}

/// Opens the owner's port, or makes it under the first free name. Returns its name too.
fn open_or_make(owner_row: u32) -> Result<(File, String)> {
    for name in names_for(owner_row) {
        if !Device::named(&name).is_ok_and(|device| is_port(&device)) {
            continue;
        }
        match open_queue(&name, libc::IFF_MULTI_QUEUE) {
            // Another build made the port with other flags.
            Err(error) if error.errno() == Some(libc::EINVAL) => {
                EnginePort::remove(owner_row)?;
            }
            other => return other,
        }
    }
    let mut last = String::new();
    for name in names_for(owner_row) {
        if Device::named(&name).is_err() {
            match open_queue(&name, libc::IFF_MULTI_QUEUE | libc::IFF_TUN_EXCL) {
                // Another process made a device of this name just now.
                Err(error) if error.errno() == Some(libc::EBUSY) => {}
                other => return other,
            }
        }
        last = name;
    }
    Err(Error::DeviceExists(last))
}

/// Opens a non-blocking queue, and makes the TAP if it does not exist. Returns its name too.
/// `more`: `IFF_*` flags besides those that each TAP has.
///
/// # Errors
/// The device cannot be opened.
pub fn open_queue(name: &str, more: libc::c_int) -> Result<(File, String)> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")
        .map_err(Error::os(
            "open /dev/net/tun (is the module there? `modprobe tun`)",
        ))?;
    // SAFETY: a struct of integers that only the kernel interprets.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = (flags | more) as i16;
    // SAFETY: the request with its struct.
    if unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) } < 0 {
        return Err(Error::os(format!("open the TAP {name}"))(
            io::Error::last_os_error(),
        ));
    }
    // SAFETY: filled and terminated by the call.
    let name = unsafe { CStr::from_ptr(request.ifr_name.as_ptr()) };
    Ok((file, name.to_string_lossy().into_owned()))
}

/// Has frames on a queue begin with the legacy header, and GSO frames pass whole. Returns whether those
/// of UDP do too.
pub(crate) fn queue_for_frames(queue: &File) -> io::Result<bool> {
    set_pointed(queue, libc::TUNSETVNETHDRSZ, VNET_HEADER_BYTES)?;
    let usual = offload::CSUM | offload::TSO4 | offload::TSO6 | offload::TSO_ECN;
    let with_uso = usual | offload::USO4 | offload::USO6;
    if set(queue, libc::TUNSETOFFLOAD, with_uso).is_ok() {
        return Ok(true);
    }
    set(queue, libc::TUNSETOFFLOAD, usual).map(|()| false)
}

/// Makes an `ioctl` request whose argument is a number.
pub(crate) fn set(tap: &File, code: libc::Ioctl, value: u32) -> io::Result<()> {
    // SAFETY: these requests take their argument by value.
    if unsafe { libc::ioctl(tap.as_raw_fd(), code, libc::c_ulong::from(value)) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Makes an `ioctl` request whose argument points to a number.
fn set_pointed(tap: &File, code: libc::Ioctl, value: i32) -> io::Result<()> {
    // SAFETY: these requests read one int.
    if unsafe { libc::ioctl(tap.as_raw_fd(), code, &raw const value) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
#[path = "tap_test.rs"]
mod tests;
