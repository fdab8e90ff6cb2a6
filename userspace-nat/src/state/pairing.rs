//! Source addresses of VMs that have a pool of them (`nat_addresses`).
//!
//! # Theory of operation
//! A VM is paired with one address of each family of its pool (RFC 4787 REQ-2): the pool's choice by
//! the VM's name ([`AddressPool::paired`]) among the addresses that the host has now. All its flows
//! are translated to it, and it keeps it for as long as the pool and the host have it, also where an
//! address was added that would be its choice now. An address without a free port toward a
//! destination refuses the flow; none steps in for another.
//!
//! A successor makes the same choice. Where its predecessor made another, before the pool changed,
//! the flows that it left say so ([`Pairing::keep`]).
//!
//! An address that the host loses takes its flows along ([`super::follow`]), and the next flow is
//! paired anew. While the host has none of the pool, flows are refused, counted as `no_address`.
use std::{cell::Cell, net::IpAddr};

use slipgate_policy::AddressPool;

use crate::route::{Route, RouteTable};

/// The pool of a VM, and the addresses that it is paired with.
#[derive(Debug)]
pub(crate) struct Pairing {
    /// Name of the VM, by which its addresses are chosen.
    vm: String,
    pool: AddressPool,
    /// Of IPv4, and of IPv6. They are chosen when they are first asked for.
    paired: [Cell<Paired>; 2],
}

/// Source address that a VM's flows of a family have, as far as it is known.
#[derive(Clone, Copy, Default, Debug)]
enum Paired {
    /// It was not asked for yet.
    #[default]
    Unknown,
    /// The host has none of the pool, as long as the host's addresses stay as they are.
    Nothing,
    With(IpAddr),
}

impl Paired {
    fn address(self) -> Option<IpAddr> {
        match self {
            Self::With(address) => Some(address),
            Self::Unknown | Self::Nothing => None,
        }
    }
}

impl Pairing {
    pub(super) fn new(vm: &str, pool: AddressPool) -> Self {
        Self {
            vm: vm.to_owned(),
            pool,
            paired: Default::default(),
        }
    }

    /// Replaces the pool. The VM keeps the addresses that are of the new one, too. Returns whether
    /// it was another one.
    pub(super) fn change(&mut self, pool: &AddressPool) -> bool {
        if self.pool == *pool {
            return false;
        }
        self.pool = pool.clone();
        for paired in &self.paired {
            let kept = paired.get().address();
            let kept = kept.filter(|address| pool.contains(*address));
            paired.set(kept.map_or(Paired::Unknown, Paired::With));
        }
        true
    }

    /// Notes that the host may have other addresses.
    pub(super) fn look_again(&self) {
        for paired in &self.paired {
            if let Paired::Nothing = paired.get() {
                paired.set(Paired::Unknown);
            }
        }
    }

    /// Pairs the VM with the address that its live flows have, unless it is paired.
    pub(super) fn keep(&self, address: IpAddr) {
        let paired = &self.paired[usize::from(address.is_ipv6())];
        if paired.get().address().is_none() && self.pool.contains(address) {
            paired.set(Paired::With(address));
        }
    }

    /// Whether the VM is paired with an address of each family of the pool.
    pub(super) fn is_complete(&self) -> bool {
        [false, true].into_iter().all(|is_ipv6| {
            let paired = self.paired[usize::from(is_ipv6)].get();
            paired.address().is_some() || !self.pool.has_family(is_ipv6)
        })
    }

    pub(crate) fn pool(&self) -> &AddressPool {
        &self.pool
    }

    /// Returns the address of a family that the VM is paired with; `None` if the host has none of
    /// the pool.
    pub(crate) fn address(&self, is_ipv6: bool, routes: &RouteTable) -> Option<IpAddr> {
        let paired = &self.paired[usize::from(is_ipv6)];
        if let Paired::Nothing = paired.get() {
            return None;
        }
        let present = paired.get().address();
        let present = present.filter(|address| routes.may_send_from(*address));
        let chosen = || {
            let may_have = |address| routes.may_send_from(address);
            self.pool.paired(&self.vm, is_ipv6, may_have)
        };
        let address = present.or_else(chosen);
        paired.set(address.map_or(Paired::Nothing, Paired::With));
        address
    }

    /// Whether a flow may be translated to this address: it is of the pool, or the pool has none of
    /// its family.
    pub(crate) fn may_have(&self, nat: IpAddr) -> bool {
        self.pool.contains(nat) || !self.pool.has_family(nat.is_ipv6())
    }

    /// Returns the same route with the VM's address as its source.
    pub(super) fn applied_to(&self, route: Route, routes: &RouteTable) -> Route {
        let Route::Via {
            ifindex,
            next_hop,
            source,
            mtu,
        } = route
        else {
            return route;
        };
        let is_ipv6 = source.is_ipv6();
        if !self.pool.has_family(is_ipv6) {
            return route;
        }
        match self.address(is_ipv6, routes) {
            Some(source) => Route::Via {
                ifindex,
                next_hop,
                source,
                mtu,
            },
            None => Route::NoSource,
        }
    }
}

#[cfg(test)]
#[path = "pairing_test.rs"]
mod tests;
