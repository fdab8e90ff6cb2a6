//! The served VMs: their rows, their quotas, and their specifications for the engine.
use anyhow::Context as _;
use slipgate_abi::{IfIndex, VmId, maps::DEFAULT_VMS};
use slipgate_control::{
    device::Device,
    netlink::Network,
    tap::QUEUE_FRAMES,
    tap_settings::TapSettings,
    vm::{self, Ipv6Spec, OpenVm},
};
use slipgate_ipc::engine::VmSpec;
use slipgate_model::GuestIpv6;
use slipgate_policy::{LocalAddresses, document::ConfigError};

use super::{
    Attached,
    catalogue::{Compiled, TakenIn},
    rules::Writer,
};
use crate::config::VmConfig;

/// The gateway's MAC in every guest's network, locally administered: a clone or a restored
/// snapshot finds the one it knew.
pub(crate) const GATEWAY_MAC: [u8; 6] = [0x02, 0x53, 0x4c, 0x47, 0x00, 0x01];

/// MTU of a VM whose TAP does not exist yet, L3 bytes: a new TAP's.
const DEFAULT_MTU: u32 = 1_500;

/// Maximum number of frames of one guest in flight to the engine, and of frames from the world to
/// it. It leaves room for a burst of first packets, and bounds the time that another VM's first
/// packet may wait, at a few microseconds per frame.
pub(crate) const MOST_CREDITS: u32 = 512;

/// Number of frames of all guests that are queued for an engine, and of frames from the world to
/// them. The port's queue has room for more only where one frame of each VM takes more.
const QUEUED: u32 = QUEUE_FRAMES / 2;
// Each VM of the default number has a share, and as much is anybody's.
const _: () = assert!(QUEUED / 2 >= DEFAULT_VMS);

/// A VM that this broker serves.
#[derive(Debug)]
pub(crate) struct ServedVm {
    pub(crate) config: VmConfig,
    pub(crate) open: OpenVm,
    /// The worker whose engine serves it.
    pub(crate) worker: usize,
    /// Interface index of its TAP; `None` if no TAP has the name.
    pub(crate) tap_ifindex: Option<IfIndex>,
    /// The TAP as this process found it, in case the start fails.
    pub(crate) found: Option<FoundTap>,
    pub(crate) mtu: u32,
    /// IPv6 network of its guest; `None`: it has none, or not yet.
    pub(crate) ipv6: Option<GuestIpv6>,
    /// Whether its TAP was brought up, so that the engine has the VM.
    pub(crate) is_up: bool,
    /// Whether the engine has said that it is idle.
    pub(crate) is_idle: bool,
    /// Number of definitions that it has had.
    pub(crate) generation: u64,
    /// Whether it is open so that its policy can be learnt.
    pub(crate) is_learning: bool,
}

/// A TAP as it was before this process changed it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FoundTap {
    ifindex: IfIndex,
    settings: TapSettings,
    /// Whether its guest was in service since, however shortly.
    was_served: bool,
}

impl FoundTap {
    /// It has a program and was brought up.
    pub(crate) fn is_served(&mut self) {
        self.was_served = true;
    }

    /// Makes the TAP so again, but for one that was in service, which stays down: its guest would reach
    /// the host's own stack by it. It has no program of this process any more.
    pub(crate) fn restore(&self) {
        let settings = match self.was_served {
            true => self.settings.down(),
            false => self.settings,
        };
        let device = Device::with_index(self.ifindex);
        if let Err(e) = device.and_then(|tap| settings.restore(&tap)) {
            // One that went with its VMM, mostly.
            tracing::debug!("giving a TAP back as it was: {e}");
        }
    }
}

impl ServedVm {
    /// Name of the policy that it has now.
    pub(crate) fn policy(&self) -> Option<String> {
        match self.is_learning {
            true => Some(learning_name(&self.config.name)),
            false => self.config.policy.clone(),
        }
    }
}

/// Name of the policy of a VM that is open, which no other policy can have.
pub(crate) fn learning_name(vm: &str) -> String {
    format!("learning {vm}")
}

impl Attached {
    /// Opens the rows of the configured VMs.
    pub(crate) fn open_vms(&mut self) -> anyhow::Result<()> {
        for config in self.config.vms.clone() {
            let vm = self.open_vm(config)?;
            self.vms.push(vm);
        }
        self.share_credits();
        Ok(())
    }

    /// Opens the row of a VM, or adopts its predecessor's of this name, and takes its TAP down
    /// until it is served. A VM of a daemon may have no TAP yet. On error its TAP is as it was: it
    /// is touched when all else is certain.
    pub(crate) fn open_vm(&self, config: VmConfig) -> anyhow::Result<ServedVm> {
        let network = self.watch.network();
        let waits = self.config.is_daemon && network.link_by_name(&config.tap).is_none();
        let tap = match waits {
            true => None,
            false => Some(tap_of(&config, network)?),
        };
        let what = || format!("adding {}", config.name);
        let at = self.worker_for(&config.name);
        let worker = &self.workers[at];
        let mtu = match (self.config.network.mtu, tap) {
            (Some(mtu), _) => mtu,
            (None, Some(tap)) => {
                let device = Device::with_index(tap);
                device.and_then(|tap| tap.mtu()).with_context(what)?
            }
            (None, None) => DEFAULT_MTU,
        };
        let ipv6 = self.guest_ipv6(&config, mtu);
        self.check_routed_prefix(ipv6.as_ref()).with_context(what)?;
        let spec = vm::VmSpec {
            name: config.name.clone(),
            guest: config.ip,
            gateway: self.config.network.gateway,
            prefix_len: self.config.network.prefix_len,
            ipv6: ipv6.as_ref().map(ipv6_in_row),
            guest_mac: config.mac,
            gateway_mac: GATEWAY_MAC,
            mtu,
            credits: MOST_CREDITS,
            policy: self.policy_number(self.policies.index_of(&config.policy)),
            tap_ifindex: tap,
            port_ifindex: worker.port.ifindex,
        };
        let maps = self.datapath.maps();
        let open = vm::open(maps, &worker.owner, &spec).with_context(what)?;
        let found = self.prepare_links(&config, &open, tap, ipv6.as_ref());
        let found = match found.with_context(what) {
            Ok(found) => found,
            Err(e) => {
                if !open.adopted
                    && let Err(e) = vm::close(maps, open.row)
                {
                    tracing::warn!("{e}");
                }
                return Err(e);
            }
        };
        Ok(ServedVm {
            config,
            open,
            worker: at,
            tap_ifindex: tap,
            found,
            mtu,
            ipv6,
            is_up: false,
            is_idle: false,
            generation: 1,
            is_learning: false,
        })
    }

    /// Opens the prefix that is routed to a VM, then prepares its TAP. On error both are as they were.
    fn prepare_links(
        &self,
        config: &VmConfig,
        open: &OpenVm,
        tap: Option<IfIndex>,
        ipv6: Option<&GuestIpv6>,
    ) -> anyhow::Result<Option<FoundTap>> {
        self.open_routed_prefix(config, open, ipv6)?;
        let found = tap.map(|tap| self.prepare_tap(tap)).transpose();
        if found.is_err() && !open.adopted {
            self.close_routed_prefix(open, ipv6);
        }
        found
    }

    /// Takes a TAP down, because its VMM may have brought it up, which would lead to the host's own
    /// stack, and sets its MTU. Returns how it was. On error it is as it was.
    fn prepare_tap(&self, ifindex: IfIndex) -> anyhow::Result<FoundTap> {
        let tap = Device::with_index(ifindex)?;
        let settings = TapSettings::of(&tap)?;
        let found = FoundTap {
            ifindex,
            settings,
            was_served: false,
        };
        let mtu = self.config.network.mtu;
        let prepared = mtu.map_or(Ok(()), |mtu| tap.set_mtu(mtu));
        let prepared = prepared.and_then(|()| match self.is_served(ifindex) {
            true => Ok(()),
            false => tap.set_up(false),
        });
        if prepared.is_err() {
            found.restore();
        }
        Ok(prepared.map(|()| found)?)
    }

    /// Puts compiled policies in force for whoever asks from now on.
    pub(crate) fn take_in_policies(
        &mut self,
        compiled: Compiled,
        local: &LocalAddresses,
    ) -> anyhow::Result<TakenIn> {
        let rows = self.rows();
        let writer = Writer {
            maps: self.datapath.maps(),
            paths: self.datapath.paths(),
            rows: &rows,
        };
        self.policies.take_in(writer, compiled, local)
    }

    /// Index of the policy that a VM has now.
    pub(crate) fn policy_index(&self, vm: &ServedVm) -> u32 {
        self.policies.index_of(&vm.policy())
    }

    /// Divides each engine port's queue among the present VMs of its worker.
    pub(crate) fn share_credits(&self) {
        for (at, worker) in self.workers.iter().enumerate() {
            let (share, common) = division(self.vms.of_worker(at));
            let maps = self.datapath.maps();
            worker.owner.divide_queue(maps, share, common);
        }
    }

    /// Returns a VM's index among the served ones.
    pub(crate) fn index_of(&self, name: &str) -> Option<usize> {
        self.vms.named(name)
    }

    /// Returns the names of VMs' TAPs that are not there now, or are not served.
    pub(crate) fn absent_taps(&self) -> impl Iterator<Item = &str> {
        let absent = self.vms.iter().filter(|vm| vm.tap_ifindex.is_none());
        absent.map(|vm| &*vm.config.tap)
    }

    /// Returns a VM's index among the served ones, by its id.
    pub(crate) fn index_of_id(&self, id: VmId) -> Option<usize> {
        self.vms.with_id(id)
    }

    /// Returns the specifications of a worker's VMs for its engine.
    pub(crate) fn vm_specs(&self, worker: usize) -> Vec<VmSpec> {
        let vms = self.vms.iter().filter(|vm| vm.worker == worker);
        vms.map(|vm| self.vm_spec(vm)).collect()
    }

    /// Returns the specification of one VM for the engine.
    pub(crate) fn vm_spec(&self, vm: &ServedVm) -> VmSpec {
        let network = &self.config.network;
        VmSpec {
            id: vm.open.id,
            row: vm.open.row,
            name: vm.config.name.clone(),
            labels: vm.config.labels.clone(),
            guest: vm.config.ip,
            gateway: network.gateway,
            dns: network.dns,
            prefix_len: network.prefix_len,
            ipv6: vm.ipv6,
            guest_mac: vm.config.mac,
            gateway_mac: GATEWAY_MAC,
            mtu: u16::try_from(vm.mtu).unwrap_or(u16::MAX),
            max_flows: vm.config.limits.max_flows,
            new_flows_per_second: vm.config.limits.new_flows_per_second,
            policy: self.policy_index(vm),
            uplink: self.own_uplink(vm),
            routes: self.routes_of(&vm.config).cloned(),
            nat_addresses: self.pool_of(&vm.config),
            host_loopback: vm.config.host_loopback.clone(),
            dns_per_second: vm.config.limits.dns_per_second,
            idle_after_s: vm.config.idle_after.unwrap_or(self.config.idle_after),
            is_idle: vm.is_idle,
        }
    }
}

/// Returns what the programs have to know of a guest's IPv6.
pub(crate) fn ipv6_in_row(net: &GuestIpv6) -> Ipv6Spec {
    Ipv6Spec {
        prefix: net.prefix.network(),
        gateway: net.gateway(),
        gateway_local: net.gateway_link_local(GATEWAY_MAC),
    }
}

/// Divides the queue among several VMs: returns the number of frames that each may have in flight
/// whatever others have, and the number of frames of all VMs from which on each has its share only.
/// Half of the queue is shares, the rest is anybody's, so no VM's flood causes the loss of another's
/// frame, and what the others do not use is of use to one.
fn division(vms: usize) -> (u32, u32) {
    let vms = u32::try_from(vms.max(1)).unwrap_or(u32::MAX);
    let share = (QUEUED / 2 / vms).clamp(1, MOST_CREDITS);
    (share, QUEUED.saturating_sub(share.saturating_mul(vms)))
}

/// Returns the TAP of a VM, which must be a device of the tun driver with Ethernet frames. Another
/// device could be in use and must not be taken down.
///
/// # Errors
/// The device does not exist, or is not a TAP.
pub(crate) fn tap_of(vm: &VmConfig, network: &Network) -> Result<IfIndex, ConfigError> {
    let refused =
        |problem: String, remedy: String| Err(ConfigError::new("--tap", &vm.tap, problem, remedy));
    let Some(link) = network.link_by_name(&vm.tap) else {
        return refused(
            format!("the TAP of {} is not there", vm.name),
            format!(
                "start its VMM first, or make it with `ip tuntap add {} mode tap`",
                vm.tap
            ),
        );
    };
    let is = match link.kind.as_deref() {
        Some("tun") if link.has_l2 => return Ok(link.ifindex),
        Some("tun") => "a TUN device, without Ethernet frames",
        Some(kind) => &format!("a {kind} device"),
        None if link.loopback => "the loopback device",
        None => "no virtual device",
    };
    refused(
        format!("it is {is}, not a TAP"),
        "give the one that the VMM has open, as `ip tuntap` shows it".into(),
    )
}

#[cfg(test)]
#[path = "vms_test.rs"]
mod tests;
