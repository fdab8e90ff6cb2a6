//! The VMMs and networks that take part, each in a world of its own.

use std::time::Duration;

use anyhow::Result;
use slipgate_testbed::{
    World, baseline,
    builtin_guest::{Accelerator, Boot, GuestOutput, Network, Passt, Qemu, SlipgateRun},
    world::UPLINK,
};

use crate::contender::{self, MTU};

/// A VMM and its way to the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contender {
    SlipgateRun,
    QemuTap,
    QemuUser,
    QemuPasst,
}

/// In the order in which they take turns.
pub(super) const ALL: [Contender; 4] = [
    Contender::SlipgateRun,
    Contender::QemuTap,
    Contender::QemuUser,
    Contender::QemuPasst,
];

const TAP: &str = "tap0";

impl Contender {
    /// As in the tables.
    pub(super) fn name(self) -> &'static str {
        match self {
            Contender::SlipgateRun => "slipgate-run",
            Contender::QemuTap => "qemu-tap",
            Contender::QemuUser => "qemu-libslirp",
            Contender::QemuPasst => "qemu-passt",
        }
    }

    /// What it is, or why this machine has it not.
    pub(super) fn version(self) -> Result<String> {
        let qemu = || contender::version("qemu-system-x86_64", "qemu-system-x86");
        Ok(match self {
            Contender::SlipgateRun => "this commit, hybrid".to_owned(),
            Contender::QemuTap => format!("{}, TAP, nftables masquerade", qemu()?),
            Contender::QemuUser => format!("{}, -netdev user", qemu()?),
            Contender::QemuPasst => {
                let passt = contender::version("passt", "passt")?;
                format!("{}, {passt}", qemu()?)
            }
        })
    }
}

/// A contender's world, ready for a boot.
pub(super) struct Stand {
    contender: Contender,
    passt: Option<Passt>,
    pub(super) world: World,
}

impl Stand {
    pub(super) fn new(contender: Contender) -> Result<Stand> {
        let world = World::with(contender::world(contender == Contender::QemuTap))?;
        if contender == Contender::QemuTap {
            let made = format!("tuntap add {TAP} mode tap multi_queue vnet_hdr");
            world.host.ip(&made)?;
            baseline::masquerade_tap(&world, TAP)?;
        }
        let passt = match contender {
            Contender::QemuPasst => Some(Passt::start(&world.host, MTU)?),
            _ => None,
        };
        Ok(Stand {
            contender,
            passt,
            world,
        })
    }

    /// Boots the guest, to do what the line says.
    pub(super) fn boot(&self, line: &str, timeout: Duration) -> Result<GuestOutput> {
        // Where nobody leases addresses, the guest brings its own.
        let own = "address 10.0.2.15/24 10.0.2.2; ";
        let line = match self.contender {
            Contender::QemuTap => format!("{own}{line}"),
            _ => line.to_owned(),
        };
        let boot = Boot {
            timeout,
            ..Boot::new(&self.world.host, &line)
        };
        let qemu = |network| Qemu {
            boot: boot.clone(),
            accelerator: Accelerator::Kvm,
            network,
        };
        let output = match (self.contender, &self.passt) {
            (Contender::SlipgateRun, _) => {
                let flags = ["--uplink", UPLINK];
                let run = SlipgateRun {
                    boot,
                    flags: &flags,
                };
                run.run()?.0
            }
            (Contender::QemuTap, _) => qemu(Network::Tap(TAP.to_owned(), MTU)).run()?,
            (_, Some(passt)) => qemu(passt.network()).run()?,
            (_, None) => qemu(Network::User).run()?,
        };
        Ok(output)
    }
}
