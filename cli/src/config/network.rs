//! `--guest-ip`, `--gateway`, `--prefix`, `--ipv6`, `--ipv6-prefix`, `--mtu`: the network that
//! guests see.
use std::net::Ipv4Addr;

use ipnet::Ipv6Net;
use slipgate_broker::config::{GuestNetwork, MIN_MTU6, check_ipv6_prefix, check_routed_pool};
use slipgate_model::{GuestIpv6, Ipv6Mode};
use slipgate_policy::document::{ConfigError, address};

use crate::args::{Ipv6, NatArgs};

/// Prefix of guests' IPv6 addresses unless another is given: a unique local one (RFC 4193). As with
/// IPv4, every VM has the same, so that a clone of a machine keeps its addresses.
pub(super) const IPV6_PREFIX: Ipv6Net = GuestIpv6::GATEWAY_NET;

impl From<&Ipv6> for Ipv6Mode {
    fn from(mode: &Ipv6) -> Self {
        match mode {
            Ipv6::Off => Self::Off,
            Ipv6::Nat => Self::Nat,
            Ipv6::Auto => Self::Auto,
            Ipv6::Routed(_) => Self::Routed,
        }
    }
}

/// Returns the prefix of `--ipv6 routed:PREFIX`, which the network routes to this host.
fn routed_pool(ipv6: &Ipv6) -> Result<Option<Ipv6Net>, ConfigError> {
    match ipv6 {
        Ipv6::Routed(Some(prefix)) => check_routed_pool("--ipv6", prefix).map(Some),
        // Each VM is to have one of its own then.
        Ipv6::Routed(None) | Ipv6::Off | Ipv6::Nat | Ipv6::Auto => Ok(None),
    }
}

/// Checks the flags of the guest network.
pub(super) fn parse(args: &NatArgs) -> Result<GuestNetwork, ConfigError> {
    let guest = address("--guest-ip", &args.guest_ip)?;
    let gateway = address("--gateway", &args.gateway)?;
    let bits = gateway.to_bits();
    let mut network = GuestNetwork {
        guest,
        gateway,
        dns: gateway,
        prefix_len: args.prefix,
        mtu: args.mtu,
        ipv6: (&args.ipv6).into(),
        ipv6_pool: routed_pool(&args.ipv6)?,
        ipv6_prefix: match &args.ipv6_prefix {
            None => IPV6_PREFIX,
            Some(prefix) => check_ipv6_prefix("--ipv6-prefix", prefix)?,
        },
    };
    if let Some(mtu) = args.mtu.filter(|mtu| *mtu < MIN_MTU6)
        && matches!(network.ipv6, Ipv6Mode::Nat | Ipv6Mode::Routed)
    {
        return Err(ConfigError::new(
            "--mtu",
            mtu,
            format!("a link with IPv6 carries packets of {MIN_MTU6} bytes"),
            "give 1280 or more, or --ipv6 off",
        ));
    }
    network.check_host("--gateway", &args.gateway, gateway)?;
    // The DNS address is the first one after the gateway that is a host's and nobody's yet;
    // in a network of two hosts the gateway itself must do.
    network.dns = [1, 2]
        .into_iter()
        .filter_map(|step| bits.checked_add(step).map(Ipv4Addr::from_bits))
        .find(|&a| a != guest && network.contains(a) && a != network.broadcast())
        .unwrap_or(gateway);
    network.check_guest("--guest-ip", guest)?;
    Ok(network)
}
