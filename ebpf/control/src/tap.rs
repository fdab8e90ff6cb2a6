//! The engine port: a persistent TAP of slipgate's own, over which kernel and engine pass frames.
//!
//! The host must not send a frame of its own on it, nor take one for itself: no ARP, no IPv6, no
//! forwarding, no address. GSO frames pass whole, both ways: offloads are on, and the MTU is as
//! large as it goes. It is persistent so that the programs can name it while no engine runs; its
//! queue then drops, and the link counts what.

use std::{
    ffi::CStr,
    fs::{File, OpenOptions},
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
};

use slipgate_abi::{maps::MAX_OWNERS, portframe::PORT_DEVICE};

use crate::{
    Error, Result,
    attach::{Hook, Program},
    device::Device,
    load::Datapath,
};

/// Frames that wait for the engine at most. Credits per VM keep it from filling.
pub const QUEUE_FRAMES: u32 = 16_384;
/// Of the port's name, before its number: its owner's row, or that and a multiple of
/// [`MAX_OWNERS`] when somebody else's device has the name.
/// Names that are tried.
const NAMES: u32 = 8;
/// The largest MTU of a TAP: 65,535 less an Ethernet header.
const MTU_BYTES: u32 = 65_521;
/// Size of the legacy `virtio_net_hdr`, which precedes each frame on the descriptor, bytes.
pub const VNET_HEADER_BYTES: i32 = 10;

/// `TUN_F_*` of `linux/if_tun.h`.
mod offload {
    pub(super) const CSUM: u32 = 0x01;
    pub(super) const TSO4: u32 = 0x02;
    pub(super) const TSO6: u32 = 0x04;
    pub(super) const TSO_ECN: u32 = 0x08;
    /// Linux 6.2.
    pub(super) const USO4: u32 = 0x20;
    /// Linux 6.2.
    pub(super) const USO6: u32 = 0x40;
}

/// An open engine port.
#[derive(Debug)]
pub struct EnginePort {
    /// `sgport<owner's row>`, or a higher number.
    pub name: String,
    /// Its index.
    pub ifindex: u32,
    /// For the engine: non-blocking; each read and write is a 10-byte `virtio_net_hdr` and a frame.
    pub fd: OwnedFd,
    /// Whether UDP segmentation offload is on too.
    pub uso: bool,
}

impl EnginePort {
    /// Makes or reopens an owner's port. A new one is left down; [`EnginePort::serve`].
    pub fn open(owner_row: u32) -> Result<Self> {
        let (fd, name) = open_or_make(owner_row)?;
        let failed = |what: &str| Error::os(format!("{what} the engine port {name}"));
        set(&fd, libc::TUNSETPERSIST, 1).map_err(failed("make persistent"))?;
        set_pointed(&fd, libc::TUNSETVNETHDRSZ, VNET_HEADER_BYTES)
            .map_err(failed("set the header size of"))?;
        let usual = offload::CSUM | offload::TSO4 | offload::TSO6 | offload::TSO_ECN;
        let uso = set(
            &fd,
            libc::TUNSETOFFLOAD,
            usual | offload::USO4 | offload::USO6,
        )
        .is_ok();
        if !uso {
            set(&fd, libc::TUNSETOFFLOAD, usual).map_err(failed("set offloads of"))?;
        }
        let device = Device::named(&name)?;
        device.disable_ipv6()?;
        device.set_forwarding(false)?;
        device.set_arp(false)?;
        device.set_queue_length(QUEUE_FRAMES)?;
        device.set_mtu(MTU_BYTES)?;
        Ok(Self {
            ifindex: device.ifindex()?,
            fd: fd.into(),
            name,
            uso,
        })
    }

    /// Attaches the port's program, and only then brings it up.
    ///
    /// One that a dead process left is up already, without a queue: the kernel took that away when
    /// the descriptor was closed, and gives it back from a work queue some time after it is opened
    /// again (`linkwatch_event`); until then what is redirected to it is lost. Brought up anew it
    /// has its queue at once.
    pub fn serve(&self, datapath: &Datapath, hook: Hook) -> Result<()> {
        datapath.attach(Program::EnginePort, self.ifindex, hook)?;
        let device = Device::named(&self.name)?;
        device.set_up(false)?;
        device.set_up(true)
    }

    /// Removes an owner's port, when it is there and nobody has it open.
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

fn names_for(owner_row: u32) -> impl Iterator<Item = String> {
    (0..NAMES).map(move |turn| format!("{PORT_DEVICE}{}", owner_row + turn * MAX_OWNERS))
}

/// Whether a device of such a name is one that [`EnginePort::open`] made: its MTU and its silence
/// are nobody else's.
fn is_port(device: &Device) -> bool {
    let silent = device.flags().is_ok_and(|f| f & libc::IFF_NOARP != 0);
    silent && device.mtu().is_ok_and(|mtu| mtu == MTU_BYTES)
}

/// The owner's port, opened, or made under the first name that no device has.
fn open_or_make(owner_row: u32) -> Result<(File, String)> {
    for name in names_for(owner_row) {
        if !Device::named(&name).is_ok_and(|device| is_port(&device)) {
            continue;
        }
        match open_queue(&name, 0) {
            // One that another build made with other flags.
            Err(error) if error.errno() == Some(libc::EINVAL) => {
                EnginePort::remove(owner_row)?;
            }
            other => return other,
        }
    }
    let mut last = String::new();
    for name in names_for(owner_row) {
        if Device::named(&name).is_err() {
            match open_queue(&name, libc::IFF_TUN_EXCL) {
                // Somebody made one just now.
                Err(error) if error.errno() == Some(libc::EBUSY) => {}
                other => return other,
            }
        }
        last = name;
    }
    Err(Error::DeviceExists(last))
}

/// Opens a queue, non-blocking, and makes the TAP if there is none; its name. `more`: `IFF_*`.
pub(crate) fn open_queue(name: &str, more: libc::c_int) -> Result<(File, String)> {
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
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | libc::IFF_MULTI_QUEUE;
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

/// A request whose argument is a number.
fn set(tap: &File, code: libc::Ioctl, value: u32) -> io::Result<()> {
    // SAFETY: these requests take their argument by value.
    if unsafe { libc::ioctl(tap.as_raw_fd(), code, libc::c_ulong::from(value)) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// A request whose argument is a pointer to a number.
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
