//! `nat_addresses` and `[egress]`: as whom, by which device and by which routes a policy's VMs reach
//! the world.
use toml::Spanned;

use super::{
    error::ConfigError,
    file::PolicyFile,
    schema::{self, RoutesOf},
};
use crate::{AddressPool, Egress, EgressRoutes, PoolError};

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

/// Returns the device and the routes of a policy in a file. `flag`: the routes of policies that name
/// none.
///
/// # Errors
/// There can be no device of that name, no such table or mark; or a table is given with a mark or with
/// other routes.
pub(super) fn of_file(
    file: &PolicyFile,
    said: &schema::Egress,
    flag: Option<RoutesOf>,
) -> Result<Egress, ConfigError> {
    let uplink = match &said.uplink {
        Some(name) => Some(device(file, name.get_ref(), &name.span())?),
        None => None,
    };
    let table = match &said.table {
        Some(table) => Some(table_of(file, table)?),
        None => None,
    };
    if let (Some(_), Some(mark)) = (&table, &said.mark) {
        return Err(file.error(
            &mark.span(),
            "the routes are those of egress.table already".to_owned(),
            "give one of the two: a table alone, or a mark that the host's rules lead to one",
        ));
    }
    if let (Some(_), Some(routes)) = (&table, &said.routes) {
        return Err(file.error(
            &routes.span(),
            "the routes are those of egress.table already".to_owned(),
            "give one of the two: a table alone, or routes = \"host\" for all that the host's rules say",
        ));
    }
    let mark = said.mark.as_ref();
    if let Some(mark) = mark.filter(|mark| *mark.get_ref() == 0) {
        return Err(file.error(
            &mark.span(),
            "0 is no mark: packets without a mark have it".to_owned(),
            "give the mark of an `ip rule`, or leave it out for the table main; routes = \"host\" has \
             the rules decide about packets without a mark",
        ));
    }
    let mark = mark.map(|mark| *mark.get_ref());
    let by_default = flag.filter(|_| said.routes.is_none() && mark.is_none());
    let routes = match said.routes.as_ref().map(|it| *it.get_ref()).or(by_default) {
        Some(RoutesOf::Host) => Some(EgressRoutes::Host {
            mark: mark.unwrap_or(0),
        }),
        Some(RoutesOf::Uplink) | None => mark.map(EgressRoutes::Mark),
    };
    Ok(Egress {
        uplink,
        routes: table.or(routes),
    })
}

/// Returns the settings that the flag alone gives.
pub(super) fn by_flag(routes: Option<RoutesOf>) -> Egress {
    let is_hosts = routes == Some(RoutesOf::Host);
    Egress {
        uplink: None,
        routes: is_hosts.then_some(EgressRoutes::Host { mark: 0 }),
    }
}

fn table_of(
    file: &PolicyFile,
    said: &Spanned<schema::EgressTable>,
) -> Result<EgressRoutes, ConfigError> {
    match said.get_ref() {
        schema::EgressTable::Vrf(name) => device(file, name, &said.span()).map(EgressRoutes::Vrf),
        schema::EgressTable::Number(number) if OWN_TABLES.contains(number) => Err(file.error(
            &said.span(),
            format!("the table {number} is the kernel's own"),
            "leave it out for the table main (254), or give another one that `ip route show table \
             all` shows",
        )),
        schema::EgressTable::Number(number) => Ok(EgressRoutes::Table(*number)),
    }
}

/// The tables unspec, default, main and local of `linux/rtnetlink.h`.
const OWN_TABLES: [u32; 4] = [0, 253, 254, 255];

fn device(
    file: &PolicyFile,
    name: &str,
    span: &std::ops::Range<usize>,
) -> Result<String, ConfigError> {
    if is_device_name(name) {
        return Ok(name.to_owned());
    }
    let problem = format!("{name:?} can't be a network device");
    Err(file.error(span, problem, "give one that `ip link` shows"))
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
