//! VMs that are served: their rows, their quotas, and what the engine is told of them.
use anyhow::Context as _;
use slipgate_control::{
    device::Device,
    netlink::Network,
    tap::QUEUE_FRAMES,
    vm::{self, OpenVm},
};
use slipgate_ipc::engine::VmSpec;
use slipgate_policy::document::ConfigError;

use super::Attached;
use crate::config::VmConfig;

/// The gateway's MAC in every guest's network, locally administered: a clone or a restored
/// snapshot finds the one it knew.
const GATEWAY_MAC: [u8; 6] = [0x02, 0x53, 0x4c, 0x47, 0x00, 0x01];

/// Frames of one guest that may be on their way to the engine at once, at most, and as many that the
/// world sends it: room for a burst of first packets, and what another VM's first packet may have to
/// wait behind, at a few microseconds each.
const MOST_CREDITS: u32 = 512;

/// A VM that is served.
#[derive(Debug)]
pub(crate) struct ServedVm {
    pub(crate) config: VmConfig,
    pub(crate) open: OpenVm,
    /// Its TAP; `None` while there is none of that name.
    pub(crate) tap_ifindex: Option<u32>,
    pub(crate) mtu: u32,
}

impl Attached {
    pub(crate) fn open_vms(&mut self) -> anyhow::Result<()> {
        for config in self.config.vms.clone() {
            let tap = tap_of(&config, self.watch.network())?;
            let what = || format!("opening the row of {}", config.name);
            let device = Device::with_index(tap).with_context(what)?;
            // One that its VMM has brought up already would lead to the host's own stack.
            if !self.is_served(tap).with_context(what)? {
                device.set_up(false).with_context(what)?;
            }
            if let Some(mtu) = self.config.network.mtu {
                device.set_mtu(mtu).with_context(what)?;
            }
            let mtu = device.mtu().with_context(what)?;
            let spec = vm::VmSpec {
                name: config.name.clone(),
                guest: config.ip,
                gateway: self.config.network.gateway,
                prefix_len: self.config.network.prefix_len,
                guest_mac: config.mac,
                gateway_mac: GATEWAY_MAC,
                mtu,
                credits: credits_of(self.config.vms.len()),
                policy: self.policy_number(config.policy),
                tap_ifindex: tap,
                port_ifindex: self.port.ifindex,
            };
            let open = vm::open(self.datapath.maps(), &self.owner, &spec).with_context(what)?;
            self.vms.push(ServedVm {
                config,
                open,
                tap_ifindex: Some(tap),
                mtu,
            });
        }
        Ok(())
    }

    /// Has each VM have no more than its quotas say.
    pub(crate) fn set_rates(&self) {
        for vm in &self.vms {
            let rates = vm.config.limits.rates;
            let rates = rates.is_limited().then_some(rates);
            self.datapath.maps().set_rates(vm.open.row, rates);
        }
    }

    /// What the engine is told of all VMs.
    pub(crate) fn vm_specs(&self) -> Vec<VmSpec> {
        self.vms.iter().map(|vm| self.vm_spec(vm)).collect()
    }

    /// What the engine is told of a VM.
    pub(crate) fn vm_spec(&self, vm: &ServedVm) -> VmSpec {
        let network = &self.config.network;
        VmSpec {
            id: vm.open.id,
            row: vm.open.row as u16,
            name: vm.config.name.clone(),
            guest: vm.config.ip,
            gateway: network.gateway,
            dns: network.dns,
            prefix_len: network.prefix_len,
            guest_mac: vm.config.mac,
            gateway_mac: GATEWAY_MAC,
            mtu: u16::try_from(vm.mtu).unwrap_or(u16::MAX),
            max_flows: vm.config.limits.max_flows,
            new_flows_per_second: vm.config.limits.new_flows_per_second,
            policy: vm.config.policy,
            dns_per_second: vm.config.limits.dns_per_second,
        }
    }
}

/// How many frames each of several VMs may have on their way, and as many from the world: all together
/// no more than the port queues, so that no VM's flood costs another one's frame.
fn credits_of(vms: usize) -> u32 {
    let share = QUEUE_FRAMES / 2 / u32::try_from(vms.max(1)).unwrap_or(u32::MAX);
    share.clamp(1, MOST_CREDITS)
}

/// The TAP that is to be served: a device of the tun driver with Ethernet frames. Another one's users
/// would not expect to have it taken down and put behind our programs.
pub(crate) fn tap_of(vm: &VmConfig, network: &Network) -> Result<u32, ConfigError> {
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
