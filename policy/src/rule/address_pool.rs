//! Pools of source addresses toward the world (`nat_addresses`).
//!
//! A pool is shared by VMs, but a VM is *paired* with one address of each family (RFC 4787 REQ-2):
//! the one that gets the highest score with the VM's name (rendezvous hashing). So every process
//! comes to the same address without a word, the VM has it again when it comes back, and an address
//! that is added or removed concerns the VMs that it takes or leaves and no other.
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Most addresses of a pool, of both families.
pub const MOST_POOL_ADDRESSES: usize = 1_024;

/// Source addresses of which each VM has one of each family. An empty pool leaves the choice to the
/// host's routes.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct AddressPool(Vec<IpNet>);

/// Reason for which a text is no part of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum PoolError {
    /// It is neither an address nor a prefix.
    #[error("not an address like 198.51.100.20, nor a prefix like 198.51.100.8/30")]
    Text,
    /// The address has bits beyond the prefix.
    #[error("the address has bits beyond its prefix")]
    HostBits,
    /// Packets to the world can't have it as their source.
    #[error("packets to the world can't have that source")]
    NotUnicast,
    /// There are too many.
    #[error("a pool has {MOST_POOL_ADDRESSES} addresses at most")]
    TooMany,
}

impl AddressPool {
    /// Reads addresses and prefixes, whose addresses are all meant. What is given twice counts once.
    ///
    /// # Errors
    /// A text can't be used; its place among the texts is returned, too.
    pub fn parse(texts: &[impl AsRef<str>]) -> Result<Self, (usize, PoolError)> {
        let nets = texts.iter().enumerate().map(|(at, text)| {
            let net = parse_one(text.as_ref()).map_err(|e| (at, e))?;
            match size(&net) <= MOST_POOL_ADDRESSES {
                true => Ok(net),
                false => Err((at, PoolError::TooMany)),
            }
        });
        let nets: Vec<IpNet> = nets.collect::<Result<_, _>>()?;
        let mut nets = IpNet::aggregate(&nets);
        nets.sort_unstable();
        match nets.iter().map(size).sum::<usize>() <= MOST_POOL_ADDRESSES {
            true => Ok(Self(nets)),
            false => Err((texts.len() - 1, PoolError::TooMany)),
        }
    }

    /// Whether it has no address.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns its prefixes, as short as possible and in order.
    pub fn prefixes(&self) -> &[IpNet] {
        &self.0
    }

    /// Returns its addresses and prefixes as texts, which [`AddressPool::parse`] reads.
    pub fn texts(&self) -> Vec<String> {
        let text = |net: &IpNet| match net.prefix_len() == net.max_prefix_len() {
            true => net.addr().to_string(),
            false => net.to_string(),
        };
        self.0.iter().map(text).collect()
    }

    /// Returns its addresses, in order.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> + Clone {
        self.0.iter().flat_map(|net| {
            let first = bits_of(net.network());
            (first..first + size(net) as u128).map(|bits| match net {
                IpNet::V4(_) => IpAddr::V4((bits as u32).into()),
                IpNet::V6(_) => IpAddr::V6(bits.into()),
            })
        })
    }

    /// Returns its addresses of one family, in order.
    pub fn of_family(&self, is_ipv6: bool) -> impl Iterator<Item = IpAddr> {
        let all = self.addresses();
        all.filter(move |address| address.is_ipv6() == is_ipv6)
    }

    /// Whether it has addresses of a family.
    pub fn has_family(&self, is_ipv6: bool) -> bool {
        let mut nets = self.0.iter();
        nets.any(|net| net.addr().is_ipv6() == is_ipv6)
    }

    /// Whether an address is one of it.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.iter().any(|net| net.contains(&address))
    }

    /// Returns an address that is in both pools, if there is one.
    pub fn common_with(&self, other: &Self) -> Option<IpAddr> {
        let others = || other.0.iter();
        let common = |net: &IpNet| {
            let inner = others().find(|other| net.contains(&other.addr()));
            let outer = others().any(|other| other.contains(&net.addr()));
            inner.map(IpNet::addr).or(outer.then(|| net.addr()))
        };
        self.0.iter().find_map(common)
    }

    /// Returns the address of a family that a VM of this name is paired with, of those that
    /// `may_have` says; `None` if there is none.
    pub fn paired(
        &self,
        vm: &str,
        is_ipv6: bool,
        may_have: impl Fn(IpAddr) -> bool,
    ) -> Option<IpAddr> {
        let vm = digest(vm);
        let mut best: Option<(u64, IpAddr)> = None;
        for address in self.of_family(is_ipv6) {
            let score = score(vm, address);
            if best.is_none_or(|(most, _)| score > most) && may_have(address) {
                best = Some((score, address));
            }
        }
        best.map(|(_, address)| address)
    }
}

fn parse_one(text: &str) -> Result<IpNet, PoolError> {
    let address = text.parse::<IpAddr>().map(IpNet::from);
    let net = address.or_else(|_| text.parse::<IpNet>());
    let net = net.map_err(|_| PoolError::Text)?;
    if net.trunc() != net {
        return Err(PoolError::HostBits);
    }
    let is_refused = match net {
        IpNet::V4(net) => {
            let (first, last) = (net.network(), net.broadcast());
            first.is_loopback() || first.octets()[0] == 0 || last.octets()[0] >= 224
        }
        IpNet::V6(net) => {
            let first = net.network();
            let is_mapped = first.to_ipv4_mapped().is_some();
            first.is_loopback()
                || first.is_unspecified()
                || first.is_multicast()
                || first.is_unicast_link_local()
                || is_mapped
        }
    };
    match is_refused {
        true => Err(PoolError::NotUnicast),
        false => Ok(net),
    }
}

/// Number of addresses of a prefix; more than a pool may have is as good as any such number.
fn size(net: &IpNet) -> usize {
    let bits = u32::from(net.max_prefix_len() - net.prefix_len());
    1 << bits.min(32)
}

fn bits_of(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits(),
    }
}

/// FNV-1a: a number of a name, the same in all processes and versions.
fn digest(name: &str) -> u64 {
    let each = name.bytes();
    each.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Score of an address with a VM: all processes and versions must compute the same.
fn score(vm: u64, address: IpAddr) -> u64 {
    let bits = bits_of(address);
    [bits as u64, (bits >> 64) as u64]
        .into_iter()
        .fold(vm, |score, part| mixed(score ^ mixed(part)))
}

/// The finalizer of `SplitMix64`.
const fn mixed(x: u64) -> u64 {
    let mut x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
#[path = "address_pool_test.rs"]
mod tests;
