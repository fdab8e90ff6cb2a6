//! Combinations of a VMM and a network, each in a world of its own.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::Result;
use slipgate_testbed::{
    PinDir, Slipgate, World, baseline,
    builtin_guest::{
        Accelerator, Boot, GuestOutput, Network, OtherVmm, Passage, Qemu, SlipgateRun,
        SocketNetwork,
    },
    world::UPLINK,
};

use super::placement::Placement;
use crate::contender::{self, LARGEST_MTU, MTU, named};

/// A VMM with its network, and the number of its vCPUs and queue pairs where that can vary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contender {
    SlipgateRun(u8),
    /// `slipgate run --mode userspace`, with this MTU.
    SlipgateUserspace(u32),
    QemuTap(u8),
    QemuUser,
    /// The distribution's passt, with this MTU.
    QemuPasst(u32),
    /// The passt that `SLIPGATE_PASST` names.
    QemuNamedPasst(Passage, u32),
    /// The gvproxy that `SLIPGATE_GVPROXY` names.
    QemuGvproxy,
    /// By `slipgate attach --socket` or `--vhost-user`.
    QemuSlipgate(Passage, u32),
    /// Another VMM on a TAP, if its binary is named, behind nftables or `slipgate attach`, with so
    /// many vCPUs and one queue pair.
    Other(OtherVmm, Nat, u8),
}

/// NAT of a TAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Nat {
    Nftables,
    Attach,
}

/// All contenders, in the order in which they take turns.
pub(super) const ALL: [Contender; 24] = [
    Contender::SlipgateRun(1),
    Contender::QemuTap(1),
    Contender::QemuUser,
    Contender::QemuPasst(MTU),
    Contender::QemuNamedPasst(Passage::Stream, MTU),
    Contender::QemuNamedPasst(Passage::VhostUser, MTU),
    Contender::QemuGvproxy,
    Contender::QemuSlipgate(Passage::Stream, MTU),
    Contender::QemuSlipgate(Passage::VhostUser, MTU),
    Contender::SlipgateUserspace(MTU),
    Contender::QemuPasst(LARGEST_MTU),
    Contender::QemuNamedPasst(Passage::Stream, LARGEST_MTU),
    Contender::QemuNamedPasst(Passage::VhostUser, LARGEST_MTU),
    Contender::QemuSlipgate(Passage::Stream, LARGEST_MTU),
    Contender::QemuSlipgate(Passage::VhostUser, LARGEST_MTU),
    Contender::SlipgateUserspace(LARGEST_MTU),
    Contender::SlipgateRun(2),
    Contender::QemuTap(2),
    Contender::Other(OtherVmm::Firecracker, Nat::Nftables, 1),
    Contender::Other(OtherVmm::Firecracker, Nat::Attach, 1),
    Contender::Other(OtherVmm::Firecracker, Nat::Nftables, 2),
    Contender::Other(OtherVmm::Firecracker, Nat::Attach, 2),
    Contender::Other(OtherVmm::CloudHypervisor, Nat::Nftables, 1),
    Contender::Other(OtherVmm::CloudHypervisor, Nat::Attach, 1),
];

/// Flags that take slipgate's quotas out of the way, as in the other benchmarks.
const QUOTAS: [&str; 6] = [
    "--uplink",
    UPLINK,
    "--max-flows",
    "1000000",
    "--new-flows-per-second",
    "10000000",
];

/// The same, of the user-mode engine.
const USERSPACE: [&str; 6] = [
    "--mode",
    "userspace",
    "--max-flows",
    "200000",
    "--new-flows-per-second",
    "10000000",
];

const TAP: &str = "tap0";

/// Variables that name programs that the distribution does not have, or has in an old version.
const PASST: &str = "SLIPGATE_PASST";
const GVPROXY: &str = "SLIPGATE_GVPROXY";

impl Contender {
    /// Returns the contender's name, as in the tables.
    pub(super) fn name(self) -> &'static str {
        match self {
            Contender::SlipgateRun(1) => "slipgate-run",
            Contender::SlipgateRun(_) => "slipgate-run ×2",
            Contender::SlipgateUserspace(MTU) => "slipgate-run-userspace",
            Contender::SlipgateUserspace(_) => "slipgate-run-userspace-65520",
            Contender::QemuTap(1) => "qemu-tap",
            Contender::QemuTap(_) => "qemu-tap ×2",
            Contender::QemuUser => "qemu-libslirp",
            Contender::QemuPasst(MTU) => "qemu-passt",
            Contender::QemuPasst(_) => "qemu-passt-65520",
            Contender::QemuNamedPasst(Passage::Stream, MTU) => "qemu-passt-current",
            Contender::QemuNamedPasst(Passage::Stream, _) => "qemu-passt-current-65520",
            Contender::QemuNamedPasst(Passage::VhostUser, MTU) => "qemu-passt-vhost-user",
            Contender::QemuNamedPasst(Passage::VhostUser, _) => "qemu-passt-vhost-user-65520",
            Contender::QemuGvproxy => "qemu-gvproxy",
            Contender::QemuSlipgate(Passage::Stream, MTU) => "qemu-socket",
            Contender::QemuSlipgate(Passage::Stream, _) => "qemu-socket-65520",
            Contender::QemuSlipgate(Passage::VhostUser, MTU) => "qemu-vhost-user",
            Contender::QemuSlipgate(Passage::VhostUser, _) => "qemu-vhost-user-65520",
            Contender::Other(OtherVmm::Firecracker, Nat::Nftables, 1) => "firecracker-tap",
            Contender::Other(OtherVmm::Firecracker, Nat::Nftables, _) => "firecracker-tap ×2",
            Contender::Other(OtherVmm::Firecracker, Nat::Attach, 1) => "firecracker-attach",
            Contender::Other(OtherVmm::Firecracker, Nat::Attach, _) => "firecracker-attach ×2",
            Contender::Other(OtherVmm::CloudHypervisor, Nat::Nftables, _) => "cloud-hypervisor-tap",
            Contender::Other(OtherVmm::CloudHypervisor, Nat::Attach, _) => {
                "cloud-hypervisor-attach"
            }
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
            Contender::SlipgateUserspace(mtu) => format!("this commit, user mode, MTU {mtu}"),
            Contender::QemuTap(_) => format!("{}, TAP, nftables masquerade", qemu()?),
            Contender::QemuUser => format!("{}, -netdev user", qemu()?),
            Contender::QemuPasst(mtu) => {
                let passt = contender::version("passt", "passt")?;
                format!("{}, {passt}, MTU {mtu}", qemu()?)
            }
            Contender::QemuNamedPasst(_, mtu) => {
                let passt = contender::version_of(&named(PASST)?)?;
                format!("{}, {passt}, MTU {mtu}", qemu()?)
            }
            Contender::QemuGvproxy => {
                let gvproxy = contender::version_of(&named(GVPROXY)?)?;
                format!("{}, {gvproxy}", qemu()?)
            }
            Contender::QemuSlipgate(_, mtu) => {
                format!("{}, this commit, user mode, MTU {mtu}", qemu()?)
            }
            Contender::Other(vmm, nat, _) => {
                let binary = vmm.binary()?;
                let version = contender::version_of(&binary)?;
                let nat = match nat {
                    Nat::Nftables => "nftables masquerade",
                    Nat::Attach => "slipgate attach",
                };
                format!("{version}, TAP, {nat}")
            }
        })
    }
}

/// A contender's world, ready for a boot.
pub(super) struct Stand {
    contender: Contender,
    /// The network of a guest of QEMU that is reached by a socket.
    by_socket: Option<SocketNetwork>,
    _slipgate: Option<Slipgate>,
    pub(super) world: World,
}

impl Stand {
    pub(super) fn new(contender: Contender) -> Result<Stand> {
        let (pairs, nat) = match contender {
            Contender::QemuTap(pairs) => (pairs, Some(Nat::Nftables)),
            Contender::Other(_, nat, _) => (1, Some(nat)),
            _ => (1, None),
        };
        let world = World::with(contender::world(nat == Some(Nat::Nftables)))?;
        if nat.is_some() {
            // No VMM but slipgate's opens a single queue of a device made for many.
            let many = if pairs > 1 { "multi_queue" } else { "" };
            world
                .host
                .ip(&format!("tuntap add {TAP} mode tap vnet_hdr {many}"))?;
        }
        let mut slipgate = None;
        match nat {
            Some(Nat::Nftables) => baseline::masquerade_tap(&world, TAP)?,
            Some(Nat::Attach) => {
                let flags = [&["--tap", TAP][..], &QUOTAS].concat();
                slipgate = Some(Slipgate::attach(&world.host, &PinDir::new()?, &flags)?);
            }
            None => {}
        }
        let by_socket = match contender {
            Contender::QemuPasst(mtu) => {
                let passt =
                    SocketNetwork::passt(&world.host, "passt".as_ref(), mtu, Passage::Stream);
                Some(passt?)
            }
            Contender::QemuNamedPasst(passage, mtu) => {
                let program = named(PASST)?;
                Some(SocketNetwork::passt(&world.host, &program, mtu, passage)?)
            }
            Contender::QemuGvproxy => {
                Some(SocketNetwork::gvproxy(&world.host, &named(GVPROXY)?, MTU)?)
            }
            Contender::QemuSlipgate(passage, mtu) => {
                let slipgate = SocketNetwork::slipgate(&world.host, mtu, passage, &QUOTAS)?;
                Some(slipgate)
            }
            _ => None,
        };
        Ok(Stand {
            contender,
            by_socket,
            _slipgate: slipgate,
            world,
        })
    }

    /// Boots the guest with a command line of workloads. Returns its output.
    pub(super) fn boot(&self, line: &str, timeout: Duration) -> Result<GuestOutput> {
        // Where nobody leases addresses, the guest brings its own.
        let own = "address 10.0.2.15/24 10.0.2.2; ";
        let line = match self.contender {
            Contender::QemuTap(_) | Contender::Other(_, Nat::Nftables, _) => format!("{own}{line}"),
            _ => line.to_owned(),
        };
        let cpus = match self.contender {
            Contender::SlipgateRun(cpus)
            | Contender::QemuTap(cpus)
            | Contender::Other(_, _, cpus) => cpus,
            _ => 1,
        };
        let boot = Boot {
            timeout,
            cpus,
            ..Boot::new(&self.world.host, &line)
        };
        // libslirp, passt and a user-mode slipgate do better where the scheduler puts them: their threads
        // would share a CPU.
        let is_placed = matches!(
            self.contender,
            Contender::SlipgateRun(1) | Contender::QemuTap(1) | Contender::Other(_, _, 1)
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
        let by_socket = self.by_socket.as_ref().map(SocketNetwork::network);
        let output = match (self.contender, by_socket) {
            (Contender::SlipgateRun(_), _) => {
                let run = SlipgateRun {
                    boot: boot.clone(),
                    flags: &QUOTAS,
                };
                run.run()?.0
            }
            (Contender::SlipgateUserspace(mtu), _) => {
                let mtu = mtu.to_string();
                let run = SlipgateRun {
                    boot: boot.clone(),
                    flags: &[&USERSPACE[..], &["--mtu", &mtu]].concat(),
                };
                run.run()?.0
            }
            (Contender::Other(vmm, ..), _) => vmm.run(boot, TAP)?,
            (Contender::QemuTap(_), _) => qemu(Network::Tap(TAP.to_owned(), MTU)).run()?,
            (_, Some(socket)) => qemu(socket).run()?,
            (_, None) => qemu(Network::User).run()?,
        };
        Ok(output)
    }
}

#[cfg(test)]
#[path = "contender_test.rs"]
mod tests;
