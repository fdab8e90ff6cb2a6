//! slirp4netns: NAT by libslirp. It makes its own TAP in the guest's namespace.

use std::process::Command;

use anyhow::Result;
use slipgate_testbed::{GUEST_DEVICE, NetNs, World};

use super::{
    Contender, MTU, Stand,
    process::{self, NatProcess},
    world,
};
use crate::machine::Pinning;

/// Largest MTU of slirp4netns, bytes, with which it is fastest.
const BEST_MTU: u32 = 65520;

pub(super) struct Slirp4netns {
    name: &'static str,
    mtu: u32,
}

impl Slirp4netns {
    pub(super) fn equal() -> Self {
        Slirp4netns {
            name: "slirp4netns",
            mtu: MTU,
        }
    }

    pub(super) fn best() -> Self {
        Slirp4netns {
            name: "slirp4netns-65520",
            mtu: BEST_MTU,
        }
    }
}

impl Contender for Slirp4netns {
    fn name(&self) -> &'static str {
        self.name
    }

    fn mtu(&self) -> u32 {
        self.mtu
    }

    fn version(&self) -> Result<String> {
        process::version("slirp4netns", "slirp4netns")
    }

    fn set_up(&self, pinning: Pinning) -> Result<Stand> {
        let world = World::with(world(false))?;
        let guest = NetNs::new("guest-of-slirp4netns")?;
        let mut command = Command::new("slirp4netns");
        command.args(["--configure", "--netns-type=path"]);
        command.arg(format!("--mtu={}", self.mtu));
        command.arg(guest.path()).arg(GUEST_DEVICE);
        let process = NatProcess::start(&world.host, command, pinning)?;
        Stand::of_process(world, guest, process)
    }
}
