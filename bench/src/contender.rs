//! Contenders: NATs that connect a guest to the world, each in network namespaces of its own.
//!
//! All but two receive the guest's frames through a TAP from the testbed's pump, which stands in
//! for a VMM. pasta and slirp4netns make their TAP in the guest's namespace and read it themselves:
//! one copy less than a VMM would cost them.

pub(crate) mod hop;
mod in_kernel;
mod process;
mod slipgate;
mod stand;
mod user_mode;

use anyhow::Result;
use slipgate_testbed::{
    GUEST_DEVICE, Guest, GuestConfig, World, WorldConfig, baseline, world_ipv6,
};

use self::in_kernel::InKernel;
pub(crate) use self::{
    process::{NatProcess, Scheduled, named, scheduled, version, version_of},
    slipgate::own_version,
    stand::{Link, Stand},
    user_mode::{ALL as USER_MODE, CURRENT as USER_MODE_CURRENT, UserMode},
};
use crate::{
    family::{is_ipv6, without_family},
    machine::Pinning,
    workload_names::ESTABLISHED,
};

/// Name of the contender that all others are compared with.
pub(crate) const REFERENCE: &str = in_kernel::NFTABLES;

/// MTU of every guest and of the uplink, bytes.
pub(crate) const MTU: u32 = 1500;

/// Largest MTU of user mode and of its peers, with which most are fastest.
pub(crate) const LARGEST_MTU: u32 = 65_520;

/// One way for a guest to reach the world.
pub(crate) trait Contender {
    /// Name of the contender, as in `--contenders` and in the table.
    fn name(&self) -> &'static str;

    /// Returns the MTU that the guest sees, bytes.
    fn mtu(&self) -> u32 {
        MTU
    }

    /// Returns the contender's version.
    ///
    /// # Errors
    /// It cannot be measured on this machine.
    fn version(&self) -> Result<String>;

    /// Returns whether the contender can run a workload.
    fn takes_part(&self, workload: &str) -> bool {
        takes_part(self.has_ipv6(), workload)
    }

    /// Returns whether the contender is measured in IPv6 as well.
    fn has_ipv6(&self) -> bool {
        false
    }

    /// Creates a world, a guest in it, and the path between them; with `ipv6` one of that family as
    /// well, which is asked only of contenders that have it.
    fn set_up(&self, pinning: Pinning, ipv6: bool) -> Result<Stand>;
}

/// Whether a contender of another's making, with or without IPv6, can run a workload.
fn takes_part(has_ipv6: bool, workload: &str) -> bool {
    // That one is about slipgate's own programs.
    without_family(workload) != ESTABLISHED && (has_ipv6 || !is_ipv6(workload))
}

/// Returns all contenders, in the order in which they take turns.
pub(crate) fn all() -> Vec<Box<dyn Contender>> {
    let ours = slipgate::Slipgate::ALL.map(|ours| Box::new(ours) as Box<dyn Contender>);
    let in_kernel = [
        InKernel::Nftables,
        InKernel::Hop,
        InKernel::Forwarding,
        InKernel::Einat,
    ];
    let in_kernel = in_kernel.map(|kernel| Box::new(kernel) as Box<dyn Contender>);
    let user_mode = user_mode::ALL.map(|process| Box::new(process) as Box<dyn Contender>);
    ours.into_iter().chain(in_kernel).chain(user_mode).collect()
}

/// Creates a world, with or without forwarding in the host's kernel.
pub(crate) fn make_world(ip_forward: bool, ipv6: bool) -> Result<World> {
    let world = World::with(world(ip_forward))?;
    if ipv6 {
        world.give_ipv6()?;
    }
    Ok(world)
}

/// Creates the guest of a contender that is given a TAP.
pub(crate) fn make_guest(world: &World, pinning: Pinning, ipv6: bool) -> Result<Guest> {
    let guest = Guest::new(world, guest(pinning))?;
    if ipv6 {
        let ns = &guest.ns;
        world_ipv6::enable(ns, &[GUEST_DEVICE])?;
        // The same for all: not by advertisements, which only slipgate sends.
        ns.sysctl(&format!("net.ipv6.conf.{GUEST_DEVICE}.accept_ra"), "0")?;
        let (address, gateway) = (baseline::GUEST6, baseline::GATEWAY6);
        ns.ip(&format!(
            "-6 addr add {address}/64 dev {GUEST_DEVICE} nodad"
        ))?;
        ns.ip(&format!(
            "-6 route add default via {gateway} dev {GUEST_DEVICE}"
        ))?;
    }
    Ok(guest)
}

/// Returns the configuration of a world, with or without forwarding in the host's kernel.
pub(crate) fn world(ip_forward: bool) -> WorldConfig {
    WorldConfig {
        ip_forward,
        mtu: MTU,
        ..WorldConfig::default()
    }
}

/// Returns the configuration of the guest of a contender that is given a TAP.
pub(crate) fn guest(pinning: Pinning) -> GuestConfig {
    GuestConfig {
        mtu: MTU,
        count: false,
        pump_cpu: pinning.middle,
        ..GuestConfig::new("tap0")
    }
}
