//! A process that hands each SYN back as it came: what any NAT pays whose decision is made in user space.
//!
//! nftables masquerades, but each SYN from the guest's TAP goes to a TAP of this process first, which reads
//! it and writes it, one at a time, and does nothing else. So the distance to
//! [`NFTABLES`](super::in_kernel::NFTABLES) is a wake-up, two switches of the CPU and two system calls.

use std::{
    env,
    io::{Read as _, Write as _},
    process::Command,
};

use anyhow::{Context as _, Result};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use slipgate_control::tap::open_queue;
use slipgate_testbed::{Guest, World};

use super::process::NatProcess;
use crate::machine::Pinning;

/// Argument that starts this program as the process.
const ROLE: &str = "hop";
/// Its TAP, in the host's namespace.
const DEVICE: &str = "hop0";
/// Bytes of a frame without segmentation offload, with its `virtio_net_hdr`.
const FRAME_MAX: usize = 2048;

/// Leads SYNs of `guest` through a process.
///
/// # Errors
/// A device, a rule or the process cannot be made.
pub(super) fn start(world: &World, guest: &Guest, pinning: Pinning) -> Result<NatProcess> {
    let (host, tap) = (&world.host, guest.tap());
    host.ip(&format!("tuntap add {DEVICE} mode tap vnet_hdr"))?;
    // The frame's destination is the TAP's MAC, and its source is routed to the TAP.
    let mac = host.run(|| mac_of(tap))?;
    host.ip(&format!("link set {DEVICE} address {mac} up"))?;
    for device in ["all", DEVICE] {
        host.sysctl(&format!("net.ipv4.conf.{device}.rp_filter"), "0")?;
    }
    let mut command = Command::new(env::current_exe().context("find this program")?);
    command.arg(ROLE);
    let process = NatProcess::start(host, command, pinning)?;
    host.nft(&format!(
        "table netdev hop {{
            chain ingress {{
                type filter hook ingress device \"{tap}\" priority 0;
                tcp flags & (syn | ack) == syn fwd to \"{DEVICE}\"
            }}
        }}"
    ))?;
    Ok(process)
}

fn mac_of(device: &str) -> Result<String> {
    let addresses = nix::ifaddrs::getifaddrs().context("list the addresses of devices")?;
    let mac = addresses
        .filter(|address| address.interface_name == device)
        .find_map(|address| address.address?.as_link_addr()?.addr());
    let mac = mac.with_context(|| format!("{device} has no MAC"))?;
    Ok(mac.map(|byte| format!("{byte:02x}")).join(":"))
}

/// Hands frames back if this program was started for it; `None` otherwise.
pub(crate) fn as_hop() -> Option<Result<()>> {
    let _ = crate::role_arguments(ROLE)?;
    Some((|| {
        let (mut tap, _) = open_queue(DEVICE, 0)?;
        // To read is to wait.
        fcntl(&tap, FcntlArg::F_SETFL(OFlag::empty())).context("have reads of the TAP wait")?;
        let mut frame = [0; FRAME_MAX];
        loop {
            let len = tap.read(&mut frame).context("read a frame")?;
            tap.write_all(&frame[..len]).context("write a frame")?;
        }
    })())
}
