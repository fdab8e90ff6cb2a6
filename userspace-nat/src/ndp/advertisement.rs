//! The router advertisement (RFC 4861 section 4.2), with prefix, MTU and resolver. Without a prefix for
//! a guest with a single address, which gets that by DHCPv6.
use std::net::Ipv6Addr;

use slipgate_model::GuestIpv6;

use super::wire::{self, kind, option};
use crate::vm::VmNet;

/// Time for which the guest keeps its default route, seconds: the longest (RFC 8319 section 3). It
/// outlasts every time without an engine.
pub const ROUTER_LIFETIME_S: u16 = u16::MAX;
/// Time for which the guest's addresses are valid, seconds (RFC 4861 section 6.2.1).
pub const VALID_LIFETIME_S: u32 = 30 * 86_400;
/// Time for which new connections use them, seconds (RFC 4861 section 6.2.1).
pub const PREFERRED_LIFETIME_S: u32 = 7 * 86_400;
/// Hop limit that the guest's packets begin with.
const HOP_LIMIT: u8 = 64;

/// Lifetimes that an advertisement says, seconds.
struct Lifetimes {
    router: u16,
    valid: u32,
    preferred: u32,
}

/// Builds the advertisement of a VM's router to an address of the guest's, or to all nodes.
pub fn build(vm: &VmNet, net: &GuestIpv6, to: Ipv6Addr) -> Vec<u8> {
    let lifetimes = Lifetimes {
        router: ROUTER_LIFETIME_S,
        valid: VALID_LIFETIME_S,
        preferred: PREFERRED_LIFETIME_S,
    };
    with(vm, net, to, &lifetimes)
}

/// Builds the one that ends a network of the guest's (RFC 4861 section 6.2.5): it has neither router
/// nor resolver any more, and begins nothing from its addresses. They stay valid for two hours more
/// (RFC 4862 section 5.5.3, e).
pub fn end(vm: &VmNet, net: &GuestIpv6) -> Vec<u8> {
    let none = Lifetimes {
        router: 0,
        valid: 0,
        preferred: 0,
    };
    with(vm, net, wire::ALL_NODES, &none)
}

fn with(vm: &VmNet, net: &GuestIpv6, to: Ipv6Addr, lifetimes: &Lifetimes) -> Vec<u8> {
    /// Addresses by DHCPv6 (flag M).
    const MANAGED: u8 = 0x80;
    /// Other configuration by DHCPv6 (flag O).
    const OTHER_CONFIGURATION: u8 = 0x40;
    /// The guest makes addresses of the prefix itself; it is not on link (flag L is clear).
    const AUTONOMOUS: u8 = 0x40;
    let mut icmp = vec![kind::ROUTER_ADVERTISEMENT, 0, 0, 0];
    let has_prefix = net.single_address().is_none();
    icmp.extend([
        HOP_LIMIT,
        match has_prefix {
            true => OTHER_CONFIGURATION,
            false => MANAGED | OTHER_CONFIGURATION,
        },
    ]);
    icmp.extend(lifetimes.router.to_be_bytes());
    // Reachable time and retransmission timer: not said.
    icmp.extend([0; 8]);

    icmp.extend([option::SOURCE_MAC, 1]);
    icmp.extend(vm.gateway_mac);

    icmp.extend([option::MTU, 1, 0, 0]);
    icmp.extend(u32::from(vm.mtu).to_be_bytes());

    if has_prefix {
        icmp.extend([option::PREFIX, 4, net.prefix.prefix_len(), AUTONOMOUS]);
        icmp.extend(lifetimes.valid.to_be_bytes());
        icmp.extend(lifetimes.preferred.to_be_bytes());
        icmp.extend([0; 4]);
        icmp.extend(net.prefix.network().octets());
    }

    // RFC 8106 section 5.1.
    icmp.extend([option::RESOLVERS, 3, 0, 0]);
    icmp.extend(u32::from(lifetimes.router).to_be_bytes());
    icmp.extend(net.gateway().octets());

    wire::finish(net.gateway_link_local(vm.gateway_mac), to, icmp)
}

#[cfg(test)]
#[path = "advertisement_test.rs"]
mod tests;
