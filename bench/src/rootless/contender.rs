//! slipgate as a user without privileges, and its peers.

use std::process::Command;

use anyhow::{Context as _, Result};
use slipgate_testbed::{NetNs, OrdinaryUser, World};

use super::{exec_processes::Started, forward, splice_loop};
use crate::{
    contender::{
        Contender, LARGEST_MTU, MTU, NatProcess, Stand, USER_MODE, USER_MODE_CURRENT, UserMode,
        own_version, world,
    },
    machine::Pinning,
    relay,
};

/// Name of the device in the command's namespace.
const DEVICE: &str = "tap0";
/// Command that runs inside. It does nothing: clients enter its namespace.
const COMMAND: [&str; 2] = ["sleep", "infinity"];

/// Flags that take slipgate's quotas out of the way, as in the other benchmarks.
const QUOTAS: [&str; 4] = [
    "--max-flows",
    "200000",
    "--new-flows-per-second",
    "100000000",
];

/// All contenders, in the order in which they take turns.
pub(super) fn all() -> Vec<Box<dyn Contender>> {
    let ours = [
        Exec::new("slipgate-exec", MTU, None),
        Exec::new("slipgate-exec-65520", LARGEST_MTU, None),
    ];
    let ours = ours.map(|ours| Box::new(ours) as Box<dyn Contender>);
    let peers = USER_MODE.into_iter().chain(USER_MODE_CURRENT);
    let peers = peers.map(|peer| Box::new(peer) as Box<dyn Contender>);
    ours.into_iter().chain(peers).collect()
}

/// Contenders that lead a port of the host's loopback to the guest.
pub(super) fn forwarding() -> Vec<Box<dyn Contender>> {
    vec![
        Box::new(Exec::new("slipgate-exec", MTU, Some(forward::RULE))),
        Box::new(UserMode::forwarding("pasta", forward::PORTS)),
        Box::new(SpliceLoop),
        relay::rinetd(),
    ]
}

/// The contender `slipgate exec`.
struct Exec {
    name: &'static str,
    mtu: u32,
    forward: Option<&'static str>,
}

impl Exec {
    const fn new(name: &'static str, mtu: u32, forward: Option<&'static str>) -> Self {
        Self { name, mtu, forward }
    }
}

impl Contender for Exec {
    fn name(&self) -> &'static str {
        self.name
    }

    fn mtu(&self) -> u32 {
        self.mtu
    }

    fn version(&self) -> Result<String> {
        own_version()
    }

    fn set_up(&self, pinning: Pinning, _ipv6: bool) -> Result<Stand> {
        let world = World::with(world(false))?;
        let user = OrdinaryUser::new()?;
        let mtu = self.mtu.to_string();
        let mut args = vec!["exec", "--dns", "none", "--log", "warn", "--mtu", &mtu];
        args.extend(QUOTAS);
        args.extend(self.forward.iter().flat_map(|rule| ["--forward", rule]));
        args.push("--");
        args.extend(COMMAND);
        let mut process = NatProcess::start(&world.host, user.slipgate(&args), pinning)?;
        let started = Started::of(&mut process, COMMAND[0])?;
        let guest = NetNs::of_process(&format!("guest-of-{}", self.name), started.command)?;
        Stand::of_child(world, (guest, DEVICE), process, started.engine)
    }
}

/// A loop that splices between a socket of the host and one of the guest's namespace.
struct SpliceLoop;

impl Contender for SpliceLoop {
    fn name(&self) -> &'static str {
        forward::REFERENCE
    }

    fn version(&self) -> Result<String> {
        Ok("splice, two threads a connection".to_owned())
    }

    fn set_up(&self, pinning: Pinning, _ipv6: bool) -> Result<Stand> {
        let world = World::with(world(false))?;
        let guest = NetNs::new("guest-of-splice-loop")?;
        let command: Command = splice_loop::command(&guest)?;
        let process = NatProcess::start(&world.host, command, pinning)?;
        Stand::of_process_without_device(world, guest, process)
            .context("start the loop that splices")
    }
}
