//! Where the guard runs: XDP drops before an skb is made, but linearises large frames on a device
//! that offers TSO, so there it is only put on demand.
use std::{ffi::c_void, io, os::fd::AsRawFd as _};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use slipgate_control::{
    Datapath, Result,
    attach::{Program, XdpMode},
};

use crate::{args::Xdp, config::Config};

/// Puts the guard on a TAP, or takes it off, as `--xdp` says.
pub(super) fn guard(datapath: &Datapath, config: &Config, name: &str, ifindex: u32) -> Result<()> {
    let wanted = match config.xdp {
        Xdp::On => true,
        Xdp::Off => false,
        Xdp::Auto => offers_tso(name).is_ok_and(|tso| !tso),
    };
    if !wanted {
        return datapath.detach(Program::Guard, ifindex).map(drop);
    }
    match datapath.attach_guard(ifindex, XdpMode::Native) {
        Err(native) if config.xdp == Xdp::On => {
            tracing::warn!("no native XDP on {name} ({native}); using the generic one");
            datapath.attach_guard(ifindex, XdpMode::Generic)
        }
        Err(native) => {
            tracing::debug!("no native XDP on {name} ({native})");
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

/// `ETHTOOL_GTSO`, <linux/ethtool.h>: whether TCP segmentation offload is on.
fn offers_tso(name: &str) -> io::Result<bool> {
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
