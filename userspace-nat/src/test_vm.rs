//! A VM as tests of the services use it.
use slipgate_abi::{DropCounters, VmCounters, VmId, VmRow};

use crate::{
    stats::VmStats,
    vm::{VmNet, VmSpec},
};

/// 10.0.2.15/24 behind 10.0.2.2, whose MAC is not configured; counted in rows of its own.
pub(crate) fn vm(id: u32) -> VmNet {
    let counters = Box::leak(Box::new(VmCounters::default()));
    let drops = Box::leak(Box::new(DropCounters::default()));
    let spec = VmSpec {
        id: VmId::new(id),
        row: VmRow::new(id as u16),
        name: format!("vm{id}"),
        labels: Default::default(),
        guest: [10, 0, 2, 15].into(),
        gateway: [10, 0, 2, 2].into(),
        dns: [10, 0, 2, 3].into(),
        prefix_len: 24,
        ipv6: None,
        guest_mac: None,
        gateway_mac: [0x52, 0x55, 10, 0, 2, 2],
        mtu: 1500,
        max_flows: 100,
        new_flows_per_second: 100,
        policy: 0,
        host_loopback: Vec::new(),
        dns_per_second: 0,
        idle_after_s: 0,
        uplink: None,
        routes: None,
        nat_addresses: Default::default(),
        is_idle: false,
    };
    // SAFETY: the rows are leaked, so they stay.
    VmNet::new(spec, unsafe { VmStats::new(counters, drops) })
}

/// The same with IPv6: fd00:1:2:3::/64.
pub(crate) fn vm6(id: u32) -> VmNet {
    let mut vm = vm(id);
    let prefix = "fd00:1:2:3::/64".parse().expect("a prefix");
    vm.ipv6 = Some(slipgate_model::GuestIpv6 {
        prefix,
        is_routed: false,
    });
    vm
}
