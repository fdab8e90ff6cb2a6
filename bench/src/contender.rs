//! Contenders: each connects a guest to the world, in a private world of its own.
//!
//! All but two get the guest's frames through a TAP from the testbed's pump, which stands for a
//! VMM. pasta and slirp4netns make their TAP in the guest's namespace and read it themselves: one
//! copy less than a VMM would cost them.

mod einat;
mod forwarding;
mod nftables;
mod pasta;
mod process;
mod slipgate;
mod slirp4netns;
mod stand;

use anyhow::Result;
use slipgate_testbed::{GuestConfig, WorldConfig};

pub(crate) use self::{
    process::{NatProcess, Scheduled, version},
    slipgate::own_version,
    stand::{Link, Stand},
};
use crate::{machine::Pinning, workload_names::ESTABLISHED};

/// The contender that all are compared with.
pub(crate) const REFERENCE: &str = nftables::NAME;

/// The MTU that all have, bytes; the uplink's always.
pub(crate) const MTU: u32 = 1500;

/// One way for a guest to reach the world.
pub(crate) trait Contender {
    /// Name of the contender, as in `--contenders` and in the table.
    fn name(&self) -> &'static str;

    /// The MTU the guest sees, bytes.
    fn mtu(&self) -> u32 {
        MTU
    }

    /// Its version, or why it can't be measured on this machine.
    fn version(&self) -> Result<String>;

    /// Whether it takes part in a workload.
    fn takes_part(&self, workload: &str) -> bool {
        // That one is about slipgate's own programs.
        workload != ESTABLISHED
    }

    /// Makes a world, a guest in it, and the way between them.
    fn set_up(&self, pinning: Pinning) -> Result<Stand>;
}

/// All contenders, in the order in which they take turns.
pub(crate) fn all() -> Vec<Box<dyn Contender>> {
    let ours = slipgate::Slipgate::ALL.map(|ours| Box::new(ours) as Box<dyn Contender>);
    let peers: [Box<dyn Contender>; 7] = [
        Box::new(nftables::Nftables),
        Box::new(forwarding::Forwarding),
        Box::new(einat::Einat),
        Box::new(pasta::Pasta::equal()),
        Box::new(slirp4netns::Slirp4netns::equal()),
        Box::new(pasta::Pasta::best()),
        Box::new(slirp4netns::Slirp4netns::best()),
    ];
    ours.into_iter().chain(peers).collect()
}

/// The world of a contender that forwards in the kernel, or of one that does not.
pub(crate) fn world(ip_forward: bool) -> WorldConfig {
    WorldConfig {
        ip_forward,
        mtu: MTU,
        ..WorldConfig::default()
    }
}

/// The guest of a contender that is given a TAP.
pub(crate) fn guest(pinning: Pinning) -> GuestConfig {
    GuestConfig {
        mtu: MTU,
        count: false,
        pump_cpu: pinning.middle,
        ..GuestConfig::new("tap0")
    }
}
