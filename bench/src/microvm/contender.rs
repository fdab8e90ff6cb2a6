//! Combinations of a VMM and a network, each in a world of its own.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::Result;
use slipgate_testbed::{
    World, baseline,
    builtin_guest::{Accelerator, Boot, GuestOutput, Network, Passt, Qemu, SlipgateRun},
    world::UPLINK,
};

use super::placement::Placement;
use crate::contender::{self, MTU};

/// A VMM with its network, and the number of its vCPUs and queue pairs where that can vary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contender {
    SlipgateRun(u8),
    QemuTap(u8),
    QemuUser,
    QemuPasst,
}

/// All contenders, in the order in which they take turns.
pub(super) const ALL: [Contender; 6] = [
    Contender::SlipgateRun(1),
    Contender::QemuTap(1),
    Contender::QemuUser,
    Contender::QemuPasst,
    Contender::SlipgateRun(2),
    Contender::QemuTap(2),
];

const TAP: &str = "tap0";

impl Contender {
    /// Returns the contender's name, as in the tables.
    pub(super) fn name(self) -> &'static str {
        match self {
            Contender::SlipgateRun(1) => "slipgate-run",
            Contender::SlipgateRun(_) => "slipgate-run ×2",
            Contender::QemuTap(1) => "qemu-tap",
            Contender::QemuTap(_) => "qemu-tap ×2",
            Contender::QemuUser => "qemu-libslirp",
            Contender::QemuPasst => "qemu-passt",
        }
    }

    /// Returns the contender's version.
    ///
    /// # Errors
    /// It cannot run on this machine.
    pub(super) fn version(self) -> Result<String> {
        let qemu = || contender::version("qemu-system-x86_64", "qemu-system-x86");
        Ok(match self {
            Contender::SlipgateRun(_) => "this commit, hybrid".to_owned(),
            Contender::QemuTap(_) => format!("{}, TAP, nftables masquerade", qemu()?),
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
        let tap = match contender {
            Contender::QemuTap(pairs) => Some(pairs),
            _ => None,
        };
        let world = World::with(contender::world(tap.is_some()))?;
        if let Some(pairs) = tap {
            // QEMU does not open a single queue of a device made for many.
            let many = if pairs > 1 { "multi_queue" } else { "" };
            world
                .host
                .ip(&format!("tuntap add {TAP} mode tap vnet_hdr {many}"))?;
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

    /// Boots the guest with a command line of workloads. Returns its output.
    pub(super) fn boot(&self, line: &str, timeout: Duration) -> Result<GuestOutput> {
        // Where nobody leases addresses, the guest brings its own.
        let own = "address 10.0.2.15/24 10.0.2.2; ";
        let line = match self.contender {
            Contender::QemuTap(_) => format!("{own}{line}"),
            _ => line.to_owned(),
        };
        let cpus = match self.contender {
            Contender::SlipgateRun(cpus) | Contender::QemuTap(cpus) => cpus,
            _ => 1,
        };
        let boot = Boot {
            timeout,
            cpus,
            ..Boot::new(&self.world.host, &line)
        };
        // libslirp and passt do better where the scheduler puts them: their threads would share a CPU.
        let is_placed = matches!(
            self.contender,
            Contender::SlipgateRun(1) | Contender::QemuTap(1)
        );
        let placement = Placement::here().filter(|_| is_placed);
        let ended = AtomicBool::new(false);
        thread::scope(|scope| {
            if let Some(placement) = placement {
                let ended = &ended;
                scope.spawn(move || placement.keep(&self.world.host, ended));
            }
            let output = self.run(&boot);
            ended.store(true, Ordering::Relaxed);
            output
        })
    }

    fn run(&self, boot: &Boot<'_>) -> Result<GuestOutput> {
        let qemu = |network| Qemu {
            boot: boot.clone(),
            accelerator: Accelerator::Kvm,
            network,
        };
        let output = match (self.contender, &self.passt) {
            (Contender::SlipgateRun(_), _) => {
                // Its quotas are out of the way, as in the other benchmarks.
                let flags = [
                    "--uplink",
                    UPLINK,
                    "--max-flows",
                    "1000000",
                    "--new-flows-per-second",
                    "10000000",
                ];
                let run = SlipgateRun {
                    boot: boot.clone(),
                    flags: &flags,
                };
                run.run()?.0
            }
            (Contender::QemuTap(_), _) => qemu(Network::Tap(TAP.to_owned(), MTU)).run()?,
            (_, Some(passt)) => qemu(passt.network()).run()?,
            (_, None) => qemu(Network::User).run()?,
        };
        Ok(output)
    }
}
