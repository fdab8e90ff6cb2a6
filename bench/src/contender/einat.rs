//! einat (EHfive/einat-ebpf), another eBPF NAT, where it is installed.
//!
//! It translates at TC on the uplink; the host forwards. Its default ports and its
//! endpoint-independent mapping are left unchanged.

use std::process::Command;

use anyhow::Result;
use slipgate_testbed::{
    Guest, World, baseline,
    world::{HOST, UPLINK},
};

use super::{
    Contender, Stand, guest,
    process::{self, NatProcess},
    world,
};
use crate::machine::Pinning;

pub(super) struct Einat;

impl Contender for Einat {
    fn name(&self) -> &'static str {
        "einat"
    }

    fn version(&self) -> Result<String> {
        process::version("einat", "einat")
    }

    fn set_up(&self, pinning: Pinning) -> Result<Stand> {
        let world = World::with(world(true))?;
        let guest = Guest::new(&world, guest(pinning))?;
        baseline::plain_forwarding(&world, &guest)?;
        // What it does not translate shall not be answered.
        let route = format!("route del {}/32 via {HOST}", guest.config().address);
        world.net.ip(&route)?;
        let mut command = Command::new("einat");
        command.args(["--ifname", UPLINK]);
        let process = NatProcess::start(&world.host, command, pinning)?;
        Stand::in_kernel(world, guest).served_by(process)
    }
}
