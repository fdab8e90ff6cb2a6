//! `nat_addresses` and `[egress]`: as whom and by which device a policy's VMs reach the world.
use toml::Spanned;

use super::{error::ConfigError, file::PolicyFile, schema};
use crate::{AddressPool, Egress, PoolError};

/// Name of the setting, as in policy files and VMs' definitions.
pub const NAT_ADDRESSES: &str = "nat_addresses";

/// Returns the addresses of a policy in a file.
///
/// # Errors
/// One can't be the source of packets to the world, or there are too many.
pub(super) fn pool_of_file(
    file: &PolicyFile,
    said: &[Spanned<String>],
) -> Result<AddressPool, ConfigError> {
    let texts: Vec<&String> = said.iter().map(Spanned::get_ref).collect();
    AddressPool::parse(&texts).map_err(|(at, error)| {
        let span = said.get(at).map(Spanned::span).unwrap_or_default();
        file.error(&span, error.to_string(), remedy(error))
    })
}

/// Returns the addresses that are given for a VM alone.
///
/// # Errors
/// As those of a policy.
pub fn pool_of_vm(texts: &[String]) -> Result<AddressPool, ConfigError> {
    AddressPool::parse(texts).map_err(|(at, error)| {
        let given = texts.get(at).map_or("", String::as_str);
        ConfigError::new(NAT_ADDRESSES, given, error.to_string(), remedy(error))
    })
}

/// Returns the device of a policy in a file.
///
/// # Errors
/// There can be no device of that name.
pub(super) fn of_file(file: &PolicyFile, said: &schema::Egress) -> Result<Egress, ConfigError> {
    let Some(uplink) = &said.uplink else {
        return Ok(Egress::default());
    };
    let name = uplink.get_ref();
    if !is_device_name(name) {
        let problem = format!("{name:?} can't be a network device");
        return Err(file.error(&uplink.span(), problem, "give one that `ip link` shows"));
    }
    Ok(Egress {
        uplink: Some(name.clone()),
    })
}

/// Whether a network device can have this name (`dev_valid_name` in the kernel).
fn is_device_name(name: &str) -> bool {
    let is_plain = |c: char| !c.is_whitespace() && !c.is_control() && !"/:%".contains(c);
    (1..=15).contains(&name.len()) && ![".", ".."].contains(&name) && name.chars().all(is_plain)
}

fn remedy(error: PoolError) -> &'static str {
    match error {
        PoolError::Text | PoolError::NotUnicast => "give addresses of this host's uplink",
        PoolError::HostBits => "give the prefix's first address, or one address without a prefix",
        PoolError::TooMany => "leave some out, or divide the VMs among several policies",
    }
}

#[cfg(test)]
#[path = "egress_test.rs"]
mod tests;
