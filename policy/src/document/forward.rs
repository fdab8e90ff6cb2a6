//! `--forward [VM=]tcp|udp:[ADDR:]PORT[-PORT]:PORT[-PORT]`: ports of the host that lead to a guest, and
//! `--forward [VM=]tcp|udp:own:PORT[-PORT]`: ports of the guest's own addresses of IPv6.
use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::{IpNet, Ipv6Net};
use serde::{Deserialize, Serialize};
use slipgate_abi::Protocol;

use super::error::ConfigError;

/// One forwarded port; a range becomes one `Forward` per port.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Forward {
    /// Index of the VM.
    pub vm: usize,
    /// IP protocol number: TCP (6) or UDP (17).
    pub protocol: u8,
    /// Address of the host; 0.0.0.0 or `::`: any of the family. Of a port of the guest's own: its address,
    /// or the first of its prefix for all of these; `::` until they are known.
    pub host: IpAddr,
    /// Whether it is a port of the guest's own addresses, to which packets come without translation.
    pub is_own: bool,
    /// Whether no address was given: the port leads to the guest by IPv6 too, if the guest has it.
    pub is_of_both: bool,
    /// Port of the host.
    pub host_port: u16,
    /// Port of the guest.
    pub guest_port: u16,
    /// Value of the flag, shown as the rule of its flows.
    pub spec: String,
}

const FORMS: &str = "give tcp:8080:80, udp:5353:53, tcp:127.0.0.1:9000-9010:9000-9010, \
                     tcp:[2001:db8::1]:8080:80 or tcp:own:443, \
                     with NAME= before it to name the VM";

impl Forward {
    /// Returns the same forward of the host's IPv6 addresses, if it is one of both families.
    pub fn in_ipv6(&self) -> Option<Self> {
        self.is_of_both.then(|| Self {
            host: Ipv6Addr::UNSPECIFIED.into(),
            is_of_both: false,
            ..self.clone()
        })
    }

    /// Completes a forward of a VM with this routed prefix, or with none: one of its own addresses gets
    /// these, and one that names an address of the prefix is one of its own.
    ///
    /// # Errors
    /// The VM has no addresses of its own, or the port of the guest is another one.
    pub fn settle_own(&mut self, routed: Option<Ipv6Net>) -> Result<(), ConfigError> {
        let refused = |problem: &str, remedy: &str| {
            Err(ConfigError::new("--forward", &self.spec, problem, remedy))
        };
        let is_named = |host: IpAddr| routed.is_some_and(|net| IpNet::V6(net).contains(&host));
        match routed {
            None if self.is_own => refused(
                "the VM has no addresses of its own",
                "give it `--ipv6 routed:PREFIX`, or forward a port of the host like tcp:8080:80",
            ),
            Some(routed) if self.is_own => {
                self.host = routed.network().into();
                Ok(())
            }
            _ if !is_named(self.host) => Ok(()),
            _ if self.host_port != self.guest_port => refused(
                "the address is the guest's own, to which packets come without translation",
                "give the same port twice",
            ),
            // It stands for all of a /64, and no guest has it.
            Some(routed) if routed.prefix_len() < 128 && self.host == routed.network() => refused(
                "no guest has the first address of its prefix, which is that of routers",
                "name another one, or give tcp:own:PORT for all of the guest's",
            ),
            _ => {
                self.is_own = true;
                Ok(())
            }
        }
    }

    /// Whether the two can't be served at the same time.
    fn clashes(&self, other: &Self) -> bool {
        // No two VMs have the same address of their own, and the host has none of them.
        if self.is_own != other.is_own || self.is_own && self.vm != other.vm {
            return false;
        }
        let has_any = self.is_of_any() || other.is_of_any();
        let is_same_host = match self.host.is_ipv4() == other.host.is_ipv4() {
            true => self.host == other.host || has_any,
            false => self.is_of_both || other.is_of_both,
        };
        let is_same_port = self.host_port == other.host_port;
        self.protocol == other.protocol && is_same_port && is_same_host
    }

    /// The same before all of the VMs' prefixes are known: whether the two clash in any case.
    fn clashes_in_any_case(&self, other: &Self) -> bool {
        let is_open = self.may_be_own() || other.may_be_own();
        self.clashes(other) && (!is_open || self.host == other.host)
    }

    /// Whether it is of all addresses of the host of a family, or of all of the guest's own.
    fn is_of_any(&self) -> bool {
        // No guest has the first address of its /64.
        let is_first =
            |host: IpAddr| matches!(host, IpAddr::V6(host) if host.to_bits() as u64 == 0);
        self.host.is_unspecified() || self.is_own && is_first(self.host)
    }

    /// Whether it may turn out to be of the guest's own address, when the VM's prefix is known.
    fn may_be_own(&self) -> bool {
        let has_one = |host: Ipv6Addr| !host.is_unspecified() && !host.is_loopback();
        let is_named = matches!(self.host, IpAddr::V6(host) if has_one(host));
        !self.is_own && is_named && self.host_port == self.guest_port
    }
}

/// Checks that no port is given twice, once it is settled which are of guests' own addresses. `vms`: the
/// VMs' names, in order; a single one is "the guest".
///
/// # Errors
/// Two forwards clash: the error names both.
pub fn check_clashes(forwards: &[Forward], vms: &[&str]) -> Result<(), ConfigError> {
    let mut by_port: HashMap<(u8, u16), Vec<&Forward>> = HashMap::new();
    for forward in forwards {
        let before = by_port
            .entry((forward.protocol, forward.host_port))
            .or_default();
        if let Some(other) = before.iter().find(|other| other.clashes(forward)) {
            return Err(clash(forward, other, vms));
        }
        before.push(forward);
    }
    Ok(())
}

/// Error: a port was given already, by `other`.
fn clash(forward: &Forward, other: &Forward, vms: &[&str]) -> ConfigError {
    let vm = match vms {
        [_] => "the guest",
        _ => vms[other.vm],
    };
    let Forward {
        spec, host_port, ..
    } = other;
    let (problem, remedy) = match other.is_own {
        true => (
            format!("port {host_port} of {vm}'s own address is open by {spec} already"),
            "give each port once: own is all of the guest's own addresses",
        ),
        false => (
            format!(
                "port {host_port} leads to port {} of {vm} already",
                other.guest_port
            ),
            "give each host port once",
        ),
    };
    ConfigError::new("--forward", &forward.spec, problem, remedy)
}

/// Parses the values of `--forward`. `vms`: the VMs' names, in order.
pub(super) fn parse(specs: &[String], vms: &[&str]) -> Result<Vec<Forward>, ConfigError> {
    let mut all: Vec<Forward> = Vec::new();
    for spec in specs {
        add(&mut all, spec, vms)?;
    }
    Ok(all)
}

/// Parses the forwards in the definition of a VM of this name, in the form of `--forward`.
///
/// # Errors
/// A forward can't be parsed, names another VM, or uses a host port twice.
pub fn forwards_of_vm(specs: &[String], name: &str) -> Result<Vec<Forward>, ConfigError> {
    let mut all = Vec::new();
    for spec in specs {
        add(&mut all, spec, &[name])
            .map_err(|e| ConfigError::new("forwards", spec, e.problem, e.remedy))?;
    }
    Ok(all)
}

/// Parses one value and adds its ports to the others.
pub(super) fn add(all: &mut Vec<Forward>, spec: &str, vms: &[&str]) -> Result<(), ConfigError> {
    for forward in parse_spec(spec, vms)? {
        if let Some(other) = all.iter().find(|f| f.clashes_in_any_case(&forward)) {
            return Err(clash(&forward, other, vms));
        }
        all.push(forward);
    }
    if all.len() > slipgate_abi::maps::MAX_FORWARDS as usize {
        return Err(ConfigError::new(
            "--forward",
            format!("({} ports)", all.len()),
            "too many ports",
            format!("at most {} can be", slipgate_abi::maps::MAX_FORWARDS),
        ));
    }
    Ok(())
}

fn parse_spec(spec: &str, vms: &[&str]) -> Result<Vec<Forward>, ConfigError> {
    let err =
        |problem: String, remedy: String| ConfigError::new("--forward", spec, problem, remedy);
    let form = |problem: &str| err(problem.into(), FORMS.into());
    let (vm, rest) = match spec.split_once('=') {
        Some((name, rest)) => {
            let vm = vms.iter().position(|vm| *vm == name);
            let vm = vm.ok_or_else(|| {
                let remedy = match vms {
                    [_] => format!("there is only one, so leave {name}= out"),
                    _ => format!("give one of {}", vms.join(", ")),
                };
                err(format!("there is no VM {name:?}"), remedy)
            })?;
            (vm, rest)
        }
        None if vms.len() == 1 => (0, spec),
        None => {
            return Err(err(
                "there are several VMs".into(),
                format!("say which, like {}={spec}", vms[0]),
            ));
        }
    };
    const NOT: &str = "not PROTOCOL:[ADDR:]PORT:PORT";
    let (protocol, rest) = rest.split_once(':').ok_or_else(|| form(NOT))?;
    let (host, ports) = split_host(rest).ok_or_else(|| form(NOT))?;
    let is_own = matches!(host, Some(Host::Own));
    let (host_ports, guest_ports) = match ports.split_once(':') {
        None if is_own => (ports, ports),
        Some((ports, again)) if is_own && ports != again => {
            return Err(err(
                "packets to the guest's own addresses come without translation".into(),
                format!("give the ports once, like {protocol}:own:{again}"),
            ));
        }
        Some((host_ports, guest_ports)) if !guest_ports.contains(':') => (host_ports, guest_ports),
        _ => return Err(form(NOT)),
    };
    let protocol = match protocol {
        "tcp" => Protocol::Tcp,
        "udp" => Protocol::Udp,
        _ => return Err(form(&format!("{protocol:?} is neither tcp nor udp"))),
    };
    let is_of_both = host.is_none();
    let host = match host {
        None => Ipv4Addr::UNSPECIFIED.into(),
        Some(Host::Own) => Ipv6Addr::UNSPECIFIED.into(),
        Some(Host::V4(text)) => address("--forward", text)?.into(),
        Some(Host::V6(text)) => address6(text).map_err(|problem| err(problem, FORMS.into()))?,
    };
    let range = |text| {
        parse_range(text).ok_or_else(|| form(&format!("{text:?} is no port or range of ports")))
    };
    let (host_ports, guest_ports) = (range(host_ports)?, range(guest_ports)?);
    if host_ports.len() != guest_ports.len() {
        return Err(err(
            format!(
                "{} host ports lead to {} guest ports",
                host_ports.len(),
                guest_ports.len()
            ),
            "give ranges of the same length".into(),
        ));
    }
    Ok(host_ports
        .zip(guest_ports)
        .map(|(host_port, guest_port)| Forward {
            vm,
            protocol: protocol as u8,
            host,
            is_own,
            is_of_both,
            host_port,
            guest_port,
            spec: spec.to_owned(),
        })
        .collect())
}

/// The address in a forward, as text.
enum Host<'t> {
    /// All of the guest's own.
    Own,
    V4(&'t str),
    V6(&'t str),
}

/// Splits `[ADDR:]PORTS:PORTS`, where an IPv6 address is in brackets. `None`: a bracket is not closed.
fn split_host(text: &str) -> Option<(Option<Host<'_>>, &str)> {
    if let Some(ports) = text.strip_prefix("own:") {
        return Some((Some(Host::Own), ports));
    }
    if let Some(text) = text.strip_prefix('[') {
        let (host, ports) = text.split_once("]:")?;
        return Some((Some(Host::V6(host)), ports));
    }
    Some(match text.split_once(':') {
        Some((host, ports)) if ports.contains(':') => (Some(Host::V4(host)), ports),
        _ => (None, text),
    })
}

/// Parses an IPv6 address of the host that clients can reach.
fn address6(text: &str) -> Result<IpAddr, String> {
    let address: Ipv6Addr = text
        .parse()
        .map_err(|_| format!("{text:?} is not an IPv6 address"))?;
    if address.is_unicast_link_local() || address.is_multicast() {
        return Err(format!("{address} has a meaning on one link only"));
    }
    if address.to_ipv4_mapped().is_some() {
        return Err(format!("{address} stands for an IPv4 address"));
    }
    Ok(address.into())
}

/// Parses a port or a range, `80` or `80-90`, from 1. Returns `None` if the text is neither.
pub fn parse_range(text: &str) -> Option<std::ops::RangeInclusive<u16>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last) = (first.parse().ok()?, last.parse().ok()?);
    (first > 0 && first <= last).then_some(first..=last)
}

/// Parses an IPv4 address.
///
/// # Errors
/// The text is not an IPv4 address; the error names the flag.
pub fn address(flag: &'static str, given: &str) -> Result<Ipv4Addr, ConfigError> {
    given.trim().parse().map_err(|_| {
        ConfigError::new(
            flag,
            given,
            "not an IPv4 address",
            "give four numbers like 10.0.2.15",
        )
    })
}

#[cfg(test)]
#[path = "forward_test.rs"]
mod tests;
