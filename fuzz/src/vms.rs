//! VMs for the targets.
use slipgate_abi::{DropCounters, Ip4, VmCounters, VmId, VmRow};
use userspace_nat::{
    stats::VmStats,
    vm::{VmNet, VmSpec},
};

pub(crate) const GUEST: Ip4 = ip(10, 0, 2, 15);
pub(crate) const GATEWAY: Ip4 = ip(10, 0, 2, 2);
pub(crate) const RESOLVER: Ip4 = ip(10, 0, 2, 3);
/// Address of the host on its uplink.
pub(crate) const HOST: Ip4 = ip(192, 0, 2, 1);
/// Address of a peer in the world.
pub(crate) const PEER: Ip4 = ip(198, 51, 100, 7);

pub(crate) const fn ip(a: u8, b: u8, c: u8, d: u8) -> Ip4 {
    Ip4 {
        octets: [a, b, c, d],
    }
}

pub(crate) fn spec(row: u16, id: u32, max_flows: u32) -> VmSpec {
    VmSpec {
        id: VmId::new(id),
        row: VmRow::new(row),
        name: format!("vm{row}"),
        labels: Default::default(),
        guest: GUEST.into(),
        gateway: GATEWAY.into(),
        dns: RESOLVER.into(),
        prefix_len: 24,
        ipv6: None,
        guest_mac: None,
        gateway_mac: [2, 0, 0, 0, 0, 1],
        mtu: 1_500,
        max_flows,
        new_flows_per_second: 1_000_000,
        policy: 0,
        host_loopback: Vec::new(),
        dns_per_second: 0,
        idle_after_s: 0,
        uplink: None,
        routes: None,
        nat_addresses: Default::default(),
        is_idle: false,
    }
}

/// Runs `with` a VM that is counted in rows of its own.
pub(crate) fn with_vm(spec: VmSpec, with: impl FnOnce(VmNet)) {
    let mut counters = VmCounters::default();
    let mut drops = DropCounters::default();
    // SAFETY: the rows outlive the VM, which can't leave `with` alive: nothing keeps it.
    let stats = unsafe { VmStats::new(&mut counters, &mut drops) };
    with(VmNet::new(spec, stats));
}
