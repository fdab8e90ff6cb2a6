//! IPv6 of a VM's guest, from its row of `VMS6`.
use std::net::Ipv6Addr;

use serde::Serialize;
use slipgate_abi::{Vm6, vm6::Vm6Flags};

/// Prefix of a guest, and the addresses that it uses.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct GuestIpv6 {
    /// The /64 of which the guest makes its addresses, or its single address, a /128.
    pub(crate) prefix: String,
    /// Addresses that are bound to the guest, the link-local one first.
    pub(crate) addresses: Vec<Ipv6Addr>,
}

impl GuestIpv6 {
    /// Reads a row; `None` if the VM has no IPv6.
    pub(crate) fn of(row: &Vm6) -> Option<Self> {
        let bound = row.guests.into_iter().map(Ipv6Addr::from);
        let len = match row.flags & Vm6Flags::SINGLE {
            0 => 64,
            _ => 128,
        };
        (row.flags & Vm6Flags::ON != 0).then(|| Self {
            prefix: format!("{}/{len}", Ipv6Addr::from(row.prefix)),
            addresses: bound.filter(|address| !address.is_unspecified()).collect(),
        })
    }

    /// The addresses in words.
    pub(crate) fn text(&self) -> String {
        let texts: Vec<String> = self.addresses.iter().map(ToString::to_string).collect();
        match texts.is_empty() {
            true => format!("IPv6 {}: no address in use", self.prefix),
            false => format!("IPv6 {}: {}", self.prefix, texts.join(", ")),
        }
    }
}

#[cfg(test)]
#[path = "ipv6_test.rs"]
mod tests;
