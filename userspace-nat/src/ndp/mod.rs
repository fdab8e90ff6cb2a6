//! Neighbour discovery toward the guest (RFC 4861, RFC 4862): slipgate is the only router on the
//! guest's link, and its only neighbour.
//!
//! # Theory of operation
//! A guest makes its addresses by itself (SLAAC): a link-local one, then one or more of the prefix
//! that advertisements name. So each of its messages may tell of a new address, which is then bound
//! to the VM ([`addresses`]).
//!
//! | message of the guest | answer |
//! | --- | --- |
//! | router solicitation | advertisement, to the guest alone |
//! | neighbour solicitation for an address of the gateway | advertisement with the gateway's MAC (the programs answer it first, also while the engine is down) |
//! | duplicate address detection of an address of its own | none: the address is free, and bound to it |
//! | neighbour solicitation for another address of the prefix | advertisement with the gateway's MAC, so that packets to it are refused and not lost |
//! | neighbour advertisement, multicast listener reports | none |
//! | router advertisement, redirect | none: dropped (RA guard, RFC 6105) |
//!
//! Advertisements say: address configuration by the prefix, which is not on link (the guest reaches
//! all by the router, RFC 5942 section 4), no addresses by DHCPv6 but the rest (flag O), the MTU, and
//! the resolver (RFC 8106). Their lifetimes are long: a guest's routes and addresses outlive any
//! time for which no engine runs. When they are sent is decided by [`schedule`].
//!
//! A guest with a single address has no prefix: advertisements send it to DHCPv6 for its address (flag
//! M), and that address is bound besides the link-local one, and no other.
//!
//! Messages are validated as RFC 4861 sections 6.1 and 7.1 require; an invalid one is dropped as
//! malformed. Options are read as far as they are needed, and each must have a length.
pub mod addresses;
pub mod advertisement;
pub mod schedule;
pub mod wire;

use std::net::Ipv6Addr;

use slipgate_abi::DropReason;
use slipgate_model::GuestIpv6;

use self::wire::{Message, Ndp};
use crate::{stats::Tally, vm::VmNet};

/// Result of a message of the guest.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Outcome {
    /// Message that is sent to the guest.
    pub reply: Reply,
    /// Address of the guest that the message shows to be in use, or about to be: to be bound.
    pub address: Option<Ipv6Addr>,
}

/// Answer to a message of the guest.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Reply {
    /// No answer is due.
    #[default]
    None,
    /// A neighbour advertisement: an IPv6 packet.
    Packet(Vec<u8>),
    /// A router advertisement to this address. It is the caller's to send, within a rate.
    RouterAdvertisement(Ipv6Addr),
}

/// Answers a guest's ICMPv6 packet about neighbours, routers or listeners, given without Ethernet
/// header.
///
/// # Errors
/// The drop reason to count if the message is invalid, comes from another sender than the guest, or
/// is not for a guest to send.
pub fn handle(vm: &VmNet, net: &GuestIpv6, packet: &[u8]) -> Result<Outcome, DropReason> {
    let received = wire::parse(packet).map_err(|_| DropReason::Malformed)?;
    let Ndp {
        source, message, ..
    } = received;
    if !source.is_unspecified() && !is_guests(net, vm.gateway_mac, source) {
        return Err(DropReason::Spoofed);
    }
    let is_anothers = |mac: Option<[u8; 6]>| {
        mac.is_some_and(|mac| mac[0] & 1 != 0 || vm.guest_mac.is_some_and(|known| known != mac))
    };
    let own = Some(source).filter(|source| !source.is_unspecified());
    match message {
        Message::RouterSolicitation { mac } if is_anothers(mac) => Err(DropReason::Spoofed),
        Message::NeighbourSolicitation { mac, .. } if is_anothers(mac) => Err(DropReason::Spoofed),
        Message::RouterSolicitation { .. } => Ok(Outcome {
            reply: Reply::RouterAdvertisement(own.unwrap_or(wire::ALL_NODES)),
            address: own,
        }),
        Message::NeighbourSolicitation { target, .. } => {
            neighbour_solicitation(vm, net, source, target)
        }
        Message::NeighbourAdvertisement { target } => Ok(Outcome {
            reply: Reply::None,
            address: Some(target).filter(|target| is_guests(net, vm.gateway_mac, *target)),
        }),
        Message::Listeners => Ok(Outcome::default()),
        Message::RouterAdvertisement | Message::Redirect => Err(DropReason::RouterAdvertisement),
        Message::Other => Err(DropReason::ServiceReject),
    }
}

fn neighbour_solicitation(
    vm: &VmNet,
    net: &GuestIpv6,
    source: Ipv6Addr,
    target: Ipv6Addr,
) -> Result<Outcome, DropReason> {
    let is_gateways = net.is_gateways(target, vm.gateway_mac);
    if source.is_unspecified() && !is_gateways {
        // Duplicate address detection (RFC 4862 section 5.4): nobody else is on the link.
        if !is_guests(net, vm.gateway_mac, target) {
            return Err(DropReason::Spoofed);
        }
        return Ok(Outcome {
            reply: Reply::None,
            address: Some(target),
        });
    }
    if !is_gateways && !net.gateway_net().contains(&target) {
        return Err(DropReason::ServiceReject);
    }
    // To a probe for the gateway's address the answer goes to all (RFC 4861 section 7.2.4).
    let to = match source.is_unspecified() {
        true => wire::ALL_NODES,
        false => source,
    };
    vm.stats.tally(Tally::NdpAnswer, 1);
    Ok(Outcome {
        reply: Reply::Packet(wire::neighbour_advertisement(wire::Answer {
            target,
            mac: vm.gateway_mac,
            to,
            is_solicited: !source.is_unspecified(),
            // For addresses that are not its own the gateway is a proxy (RFC 4861 section 7.2.8).
            overrides: is_gateways,
        })),
        address: Some(source).filter(|source| !source.is_unspecified()),
    })
}

/// Whether an address may be the guest's: of its prefix or link-local, and not the gateway's, nor
/// the anycast address of the prefix (RFC 4291 section 2.6.1).
pub fn is_guests(net: &GuestIpv6, gateway_mac: [u8; 6], address: Ipv6Addr) -> bool {
    let is_of_link = address.is_unicast_link_local() && !is_zero_host(address);
    let is_of_prefix = net.prefix.contains(&address) && !is_zero_host(address);
    (is_of_link || is_of_prefix) && !net.is_gateways(address, gateway_mac)
}

/// Whether the lower 64 bits are zero.
fn is_zero_host(address: Ipv6Addr) -> bool {
    address.to_bits() as u64 == 0
}

#[cfg(test)]
#[path = "ndp_test.rs"]
mod tests;
