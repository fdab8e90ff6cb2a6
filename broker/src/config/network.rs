//! The network that guests see: their address, the gateway, the DNS address.
use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::Ipv6Net;
use serde::{Deserialize, Serialize};
use slipgate_model::Ipv6Mode;
use slipgate_policy::document::ConfigError;

/// The guests' network. Every VM has a separate network with these addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GuestNetwork {
    /// The guests' address, unless a VM has its own.
    pub guest: Ipv4Addr,
    /// The router, which answers ARP and ping; not the host.
    pub gateway: Ipv4Addr,
    /// The DNS server offered by DHCP.
    pub dns: Ipv4Addr,
    /// Prefix length of the guest network, bits.
    pub prefix_len: u8,
    /// MTU of the guest's link, L3 bytes; `None`: the TAP's.
    pub mtu: Option<u32>,
    /// Whether guests have IPv6, unless a VM says otherwise.
    pub ipv6: Ipv6Mode,
    /// Prefix of the guests' IPv6 addresses, of 64 bits, unless a VM has its own.
    pub ipv6_prefix: Ipv6Net,
    /// Prefix that the network routes to this host, of which VMs get a /64 each, or an address each if
    /// it is longer; `None`: there is none.
    #[serde(default)]
    pub ipv6_pool: Option<Ipv6Net>,
}

/// Smallest MTU of a link with IPv6, bytes (RFC 8200 section 5).
pub const MIN_MTU6: u32 = 1_280;

/// Checks a prefix of guests' IPv6 addresses.
///
/// # Errors
/// It is no /64 whose addresses guests can have; the error names `flag`.
pub fn check_ipv6_prefix(flag: &'static str, given: &str) -> Result<Ipv6Net, ConfigError> {
    const LIKE: &str = "give one like fd12:3456:789a:1::/64";
    let refused = |problem: &str| Err(ConfigError::new(flag, given, problem, LIKE));
    let Ok(prefix) = given.parse::<Ipv6Net>() else {
        return refused("not an IPv6 prefix");
    };
    if prefix.prefix_len() != 64 {
        return refused("guests make their addresses themselves, which takes a prefix of 64 bits");
    }
    if prefix.trunc() != prefix {
        return refused("it has bits beyond the first 64");
    }
    match unfit_for_guests(prefix.network()) {
        Some(problem) => refused(problem),
        None => Ok(prefix),
    }
}

/// Returns the reason for which guests can't have the addresses of a prefix, if there is one.
/// `first`: its first address.
pub(super) fn unfit_for_guests(first: Ipv6Addr) -> Option<&'static str> {
    // RFC 4291 section 2.4: the rest of global unicast space is not assigned.
    let is_global = first.segments()[0] & 0xe000 == 0x2000;
    if !is_global && !first.is_unique_local() {
        return Some("neither a unique local prefix (fd00::/8) nor one of 2000::/3");
    }
    let is_6to4_or_teredo = matches!(first.segments(), [0x2002, ..] | [0x2001, 0, ..]);
    is_6to4_or_teredo.then_some("its addresses stand for IPv4 addresses (6to4, Teredo)")
}

impl GuestNetwork {
    /// The same, as clients are told.
    pub(crate) fn for_clients(&self) -> slipgate_ipc::client::GuestNetwork {
        slipgate_ipc::client::GuestNetwork {
            guest: self.guest,
            prefix_len: self.prefix_len,
            gateway: self.gateway,
            dns: self.dns,
            mtu: self.mtu,
        }
    }

    /// Checks that an address can be a guest's.
    ///
    /// # Errors
    /// It cannot; the error names `flag`.
    pub fn check_guest(&self, flag: &'static str, guest: Ipv4Addr) -> Result<(), ConfigError> {
        self.check_host(flag, &guest.to_string(), guest)?;
        if guest == self.gateway {
            return Err(ConfigError::new(
                flag,
                guest,
                "that is the gateway's address",
                "give the guest another, or --gateway another",
            ));
        }
        if guest == self.dns {
            return Err(ConfigError::new(
                flag,
                guest,
                format!(
                    "that is the DNS server's address (the one after the gateway {})",
                    self.gateway
                ),
                "give the guest another",
            ));
        }
        Ok(())
    }

    /// Checks that an address is a host address in this network.
    ///
    /// # Errors
    /// It is not; the error names `flag` and its value `given`.
    pub fn check_host(
        &self,
        flag: &'static str,
        given: &str,
        a: Ipv4Addr,
    ) -> Result<(), ConfigError> {
        if a.is_multicast() || a.is_loopback() || a.is_unspecified() || a.octets()[0] >= 240 {
            return Err(ConfigError::new(
                flag,
                given,
                "not a unicast address",
                "give one like 10.0.2.15",
            ));
        }
        if !self.contains(a) {
            return Err(ConfigError::new(
                flag,
                given,
                format!(
                    "outside the gateway's network {}/{}",
                    self.network(),
                    self.prefix_len
                ),
                format!(
                    "give one from {} to {}, or another --gateway and --prefix",
                    Ipv4Addr::from_bits(self.network().to_bits() + 1),
                    Ipv4Addr::from_bits(self.broadcast().to_bits() - 1)
                ),
            ));
        }
        if a == self.network() || a == self.broadcast() {
            return Err(ConfigError::new(
                flag,
                given,
                format!(
                    "the first or the last address of {}/{}",
                    self.network(),
                    self.prefix_len
                ),
                "give one between them",
            ));
        }
        Ok(())
    }

    fn mask(&self) -> u32 {
        u32::MAX << (32 - u32::from(self.prefix_len))
    }

    /// Returns the network address.
    pub fn network(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.gateway.to_bits() & self.mask())
    }

    /// Returns the broadcast address, the network's last.
    pub fn broadcast(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.gateway.to_bits() | !self.mask())
    }

    /// Whether an address is in the network.
    pub fn contains(&self, a: Ipv4Addr) -> bool {
        a.to_bits() & self.mask() == self.network().to_bits()
    }
}

#[cfg(test)]
#[path = "network_test.rs"]
mod tests;
