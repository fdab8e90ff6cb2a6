//! `--guest-ip`, `--gateway`, `--prefix`, `--mtu`: the network that guests see.
use std::net::Ipv4Addr;

use slipgate_broker::config::GuestNetwork;
use slipgate_policy::document::{ConfigError, address};

use crate::args::NatArgs;

/// Checks what was typed.
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
    };
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
