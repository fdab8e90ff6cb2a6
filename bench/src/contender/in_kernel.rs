//! Contenders whose packets stay in the kernel.

use std::process::Command;

use anyhow::Result;
use slipgate_testbed::{
    baseline,
    world::{HOST, UPLINK},
};

use super::{
    Contender, Stand, hop, make_guest, make_world,
    process::{self, NatProcess},
};
use crate::{
    family::without_family,
    machine::{self, Pinning},
};

pub(super) enum InKernel {
    /// nftables' masquerade, the usual NAT of TAP devices, to which all ratios refer.
    Nftables,
    /// The same, and each SYN passes a process that does nothing ([`hop`]).
    Hop,
    /// IP forwarding without NAT: the upper limit of the machine. A low result shows that the
    /// machine was disturbed.
    Forwarding,
    /// einat (EHfive/einat-ebpf), another eBPF NAT, where it is installed.
    ///
    /// It translates at TC on the uplink; the host forwards. Its default ports and its
    /// endpoint-independent mapping are left unchanged.
    Einat,
}

pub(super) const NFTABLES: &str = "nftables";

impl Contender for InKernel {
    fn name(&self) -> &'static str {
        match self {
            Self::Nftables => NFTABLES,
            Self::Hop => "nftables-hop",
            Self::Forwarding => "forwarding",
            Self::Einat => "einat",
        }
    }

    fn version(&self) -> Result<String> {
        match self {
            Self::Nftables | Self::Hop => process::version("nft", "nftables"),
            Self::Forwarding => Ok(format!("Linux {}", machine::kernel())),
            Self::Einat => process::version("einat", "einat"),
        }
    }

    fn has_ipv6(&self) -> bool {
        // einat is a NAT of IPv4 by default.
        !matches!(self, Self::Einat)
    }

    fn takes_part(&self, workload: &str) -> bool {
        // It is about the first packet of a connection only.
        match self {
            Self::Hop => without_family(workload) == "connect-close",
            _ => super::takes_part(self.has_ipv6(), workload),
        }
    }

    fn set_up(&self, pinning: Pinning, ipv6: bool) -> Result<Stand> {
        let world = make_world(true, ipv6)?;
        let guest = make_guest(&world, pinning, ipv6)?;
        match self {
            Self::Nftables | Self::Hop if ipv6 => baseline::masquerade6(&world, &guest)?,
            Self::Forwarding if ipv6 => baseline::plain_forwarding6(&world, &guest)?,
            _ => {}
        }
        match self {
            Self::Nftables | Self::Hop => baseline::masquerade(&world, &guest)?,
            Self::Forwarding | Self::Einat => baseline::plain_forwarding(&world, &guest)?,
        }
        if matches!(self, Self::Hop) {
            let process = hop::start(&world, &guest, pinning)?;
            return Stand::in_kernel(world, guest).served_by(process);
        }
        if !matches!(self, Self::Einat) {
            return Ok(Stand::in_kernel(world, guest));
        }
        // What it does not translate shall not be answered.
        let route = format!("route del {}/32 via {HOST}", guest.config().address);
        world.net.ip(&route)?;
        let mut command = Command::new("einat");
        command.args(["--ifname", UPLINK]);
        let process = NatProcess::start(&world.host, command, pinning)?;
        Stand::in_kernel(world, guest).served_by(process)
    }
}
