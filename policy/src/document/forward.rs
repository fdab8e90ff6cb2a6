//! `--forward [VM=]tcp|udp:[ADDR:]PORT[-PORT]:PORT[-PORT]`: ports of the host that lead to a guest.
use std::net::Ipv4Addr;

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
    /// Address of the host; 0.0.0.0: any.
    pub host: Ipv4Addr,
    /// Port of the host.
    pub host_port: u16,
    /// Port of the guest.
    pub guest_port: u16,
    /// Value of the flag, shown as the rule of its flows.
    pub spec: String,
}

const FORMS: &str = "give tcp:8080:80, udp:5353:53 or tcp:127.0.0.1:9000-9010:9000-9010, \
                     with NAME= before it to name the VM";

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
        let clash = all.iter().find(|f| {
            f.protocol == forward.protocol
                && f.host_port == forward.host_port
                && (f.host == forward.host
                    || f.host.is_unspecified()
                    || forward.host.is_unspecified())
        });
        if let Some(other) = clash {
            return Err(ConfigError::new(
                "--forward",
                spec,
                format!(
                    "port {} leads to port {} of {} already",
                    other.host_port,
                    other.guest_port,
                    match vms {
                        [_] => "the guest",
                        _ => vms[other.vm],
                    }
                ),
                "give each host port once",
            ));
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
    let parts: Vec<_> = rest.split(':').collect();
    let (protocol, host, host_ports, guest_ports) = match parts[..] {
        [protocol, host_ports, guest_ports] => (protocol, None, host_ports, guest_ports),
        [protocol, host, host_ports, guest_ports] => {
            (protocol, Some(host), host_ports, guest_ports)
        }
        _ => return Err(form("not PROTOCOL:[ADDR:]PORT:PORT")),
    };
    let protocol = match protocol {
        "tcp" => Protocol::Tcp,
        "udp" => Protocol::Udp,
        _ => return Err(form(&format!("{protocol:?} is neither tcp nor udp"))),
    };
    let host = match host {
        None => Ipv4Addr::UNSPECIFIED,
        Some(text) => address("--forward", text)?,
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
            host_port,
            guest_port,
            spec: spec.to_owned(),
        })
        .collect())
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
