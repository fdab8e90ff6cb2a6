//! The addresses that are bound to a guest.
//!
//! A packet whose source is not bound is no guest's. A guest with privacy extensions (RFC 8981) uses
//! a new address each day and keeps the old ones for a week, so several are bound: the link-local
//! one, in whose place a new one comes at once, and as many of the prefix as a row of `VMS6` has
//! places. When all of these are taken, the one that has been silent for longest makes room, if that is [`MIN_SILENCE_NS`]; otherwise the new one is
//! refused. So a guest that sends from ever new addresses changes few of its own, and none of
//! another's.
//!
//! The programs note the time of packets that they hand over, and not of those that they translate.
//! If an address makes room whose flows are busy, its next packet that is handed over binds it again,
//! if there is room; packets of its flows pass all the same.
use std::{
    net::{IpAddr, Ipv6Addr},
    sync::atomic::Ordering::Relaxed,
};

use slipgate_abi::{Ip6, Vm6Ref, vm6::GUEST_ADDRESSES};

use crate::{clock::SECOND_NS, vm::VmNet};

/// Silence after which an address may make room for another, ns.
pub const MIN_SILENCE_NS: u64 = 30 * SECOND_NS;

/// Place of the link-local address.
const LINK_LOCAL: usize = 0;

/// Result of an attempt to bind an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bound {
    /// It was bound already.
    Known,
    /// It is bound now.
    New,
    /// It is bound now, in place of this one.
    InPlaceOf(Ipv6Addr),
    /// All places are taken by addresses that were used lately.
    Refused,
}

/// Binds an address of the guest's prefix or link to the VM of this row, or notes that it is used.
/// The caller has checked that the address may be the guest's ([`super::is_guests`]).
pub fn bind(row: Vm6Ref, address: Ipv6Addr, now_ns: u64) -> Bound {
    let wanted = Ip6::from(address);
    if let Some(place) = row.place_of(wanted) {
        row.used_ns(place).store(now_ns, Relaxed);
        return Bound::Known;
    }
    let places = match address.is_unicast_link_local() {
        true => LINK_LOCAL..LINK_LOCAL + 1,
        false => LINK_LOCAL + 1..GUEST_ADDRESSES,
    };
    let used = |place: &usize| match row.guest_address(*place).is(Ip6::UNSPECIFIED) {
        true => None,
        false => Some(row.used_ns(*place).load(Relaxed)),
    };
    // Of the free ones, which `None` precedes, the first.
    let Some(place) = places.min_by_key(&used) else {
        return Bound::Refused;
    };
    let Some(last_used) = used(&place) else {
        row.bind(place, wanted, now_ns);
        return Bound::New;
    };
    // No flow has a link-local source: a guest that booted with another MAC needs the new one at once.
    if place != LINK_LOCAL && now_ns.saturating_sub(last_used) < MIN_SILENCE_NS {
        return Bound::Refused;
    }
    let before = row.guest_address(place);
    row.bind(place, wanted, now_ns);
    Bound::InPlaceOf(before.into())
}

/// Forgets an address that the guest has given back. Its next packet from it would bind it again.
pub fn release(row: Vm6Ref, address: Ipv6Addr) {
    if let Some(place) = row.place_of(address.into()) {
        row.bind(place, Ip6::UNSPECIFIED, 0);
    }
}

/// Returns the address of the prefix that the guest used last, by which the world reaches it through a
/// forward; `None` if none is bound. An address that spoke lately is in use, whatever the others are.
pub fn used_last(row: Vm6Ref) -> Option<Ipv6Addr> {
    let places = LINK_LOCAL + 1..GUEST_ADDRESSES;
    let bound = places.filter(|place| !row.guest_address(*place).is(Ip6::UNSPECIFIED));
    let last = bound.max_by_key(|place| row.used_ns(*place).load(Relaxed))?;
    Some(row.guest_address(last).into())
}

/// Returns the guest's address to which a packet of the world leads that has the address `world`: of
/// IPv6 the one that the guest used last. `None` if it has none of the family yet. `row` looks up the
/// VM's element of `VMS6`.
pub fn guest_for(
    vm: &VmNet,
    world: IpAddr,
    row: impl FnOnce() -> Option<Vm6Ref>,
) -> Option<IpAddr> {
    match world {
        IpAddr::V4(_) => Some(vm.guest.into()),
        IpAddr::V6(_) => {
            vm.ipv6?;
            used_last(row()?).map(IpAddr::V6)
        }
    }
}

/// Returns the addresses that are bound, the link-local one first.
pub fn bound(row: Vm6Ref) -> Vec<Ipv6Addr> {
    let all = (0..GUEST_ADDRESSES).map(|place| row.guest_address(place));
    let bound = all.filter(|address| !address.is(Ip6::UNSPECIFIED));
    bound.map(Ipv6Addr::from).collect()
}

#[cfg(test)]
#[path = "addresses_test.rs"]
mod tests;
