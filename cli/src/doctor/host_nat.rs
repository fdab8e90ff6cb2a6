//! Whether the host's own NAT and sockets keep clear of guests' tuples: those of the slipgate that
//! serves here, or those of a start with the flags that are given.
use std::{
    net::{IpAddr, Ipv4Addr},
    ops::RangeInclusive,
    path::Path,
};

use slipgate_broker::host::GuestsAt;
use slipgate_control::{Network, host::HostFacts};
use slipgate_ipc::client::{ClientAnswer, ClientRequest, HostNatStatus, ask};
use slipgate_policy::document::address;
use userspace_nat::nat_ports::DEFAULT_RANGE;

use super::{Finding, State};
use crate::{args::DoctorArgs, brokers, config};

const WHAT: &str = "host's NAT";

/// What a start would be given.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Planned {
    ports: Vec<RangeInclusive<u16>>,
    address: Option<Ipv4Addr>,
    /// Whether flags say so; otherwise it is the default.
    is_given: bool,
}

impl Planned {
    /// Reads the flags.
    ///
    /// # Errors
    /// A range of ports or the address is none.
    pub(super) fn parse(args: &DoctorArgs) -> anyhow::Result<Self> {
        let nat_ports = args.nat_ports.as_deref();
        let nat_ports = nat_ports.map(|given| config::ports("--nat-ports", given));
        let eim_ports = args.eim_ports.as_deref();
        let eim_ports = eim_ports.map(|given| config::ports("--eim-ports", given));
        let nat_address = args.nat_address.as_ref();
        let nat_address = nat_address.map(|given| address("--nat-address", given));
        let is_given = nat_ports.is_some() || eim_ports.is_some() || nat_address.is_some();
        let nat_ports = nat_ports.unwrap_or(Ok(DEFAULT_RANGE))?;
        let eim_ports = eim_ports.transpose()?;
        Ok(Self {
            ports: [nat_ports].into_iter().chain(eim_ports).collect(),
            address: nat_address.transpose()?,
            is_given,
        })
    }
}

/// Reports on what the host may share with guests. `statuses`: answers of the brokers that serve here.
pub(super) fn found(
    planned: &Planned,
    statuses: &[HostNatStatus],
    facts: &HostFacts,
    (network, uplink): (&Network, Option<&str>),
) -> Vec<Finding> {
    let at_uplink = |status: &&HostNatStatus| {
        uplink.is_none_or(|name| name == status.uplink || status.has_further(name))
    };
    if !planned.is_given {
        let mut by_it = statuses.iter().filter(at_uplink).peekable();
        if by_it.peek().is_some() {
            return by_it.flat_map(|status| of_broker(status, uplink)).collect();
        }
    }
    let link = match uplink {
        Some(name) => network.link_by_name(name),
        None => network.default_uplink(),
    };
    let Some(link) = link else {
        return Vec::new();
    };
    let guests = GuestsAt::new((&link.name, link.ifindex), true);
    let guests = GuestsAt {
        ipv4: Some(planned.address.map(IpAddr::V4).into_iter().collect()),
        ..guests
    };
    let mut met: Vec<String> = Vec::new();
    for ports in &planned.ports {
        let new = facts.meets(&guests.tuples(network, ports));
        met.extend(
            new.into_iter()
                .filter(|new| !met.contains(new))
                .collect::<Vec<_>>(),
        );
    }
    let whose = match planned.is_given {
        true => "",
        false => "the default ",
    };
    // Nobody who serves here leaves by the uplink that was asked about.
    let others = match statuses {
        [] => String::new(),
        _ if planned.is_given => String::new(),
        _ => format!(
            " (a start's: the slipgate that serves here leaves by {})",
            Vec::from_iter(statuses.iter().map(|it| &*it.uplink)).join(", ")
        ),
    };
    match (met.is_empty(), &facts.source_nat) {
        (false, _) => {
            let remedy = "a start is refused until then, unless --host-nat share accepts it";
            notes(met.iter(), &format!("{remedy}{others}"))
        }
        (true, Some(_)) => vec![Finding::ok(
            WHAT,
            format!(
                "keeps clear of {whose}ports {} at {}{others}",
                texts(planned.ports.iter().map(|of| (*of.start(), *of.end()))),
                link.name
            ),
        )],
        (true, None) => vec![Finding::ok(WHAT, "unknown: seeing it needs CAP_NET_ADMIN")],
    }
}

/// Reports what a slipgate that serves here says. `uplink`: the one that was asked about.
fn of_broker(status: &HostNatStatus, uplink: Option<&str>) -> Vec<Finding> {
    let ports = texts(status.ports.iter().copied());
    let uplink = uplink.unwrap_or(&status.uplink);
    match (status.shared.is_empty(), status.is_known) {
        (false, _) => {
            let left = match status.left_alone {
                0 => String::new(),
                count => format!(
                    ". Guests' new flows leave {count} ports to connections that the host's NAT has"
                ),
            };
            let remedy = format!(
                "slipgate serves guests here with these ports, and goes on: connections may break \
                 until then{left}"
            );
            notes(status.shared.iter(), &remedy)
        }
        (true, true) => vec![Finding::ok(
            WHAT,
            format!("keeps clear of the ports {ports} of the slipgate that serves by {uplink}"),
        )],
        (true, false) => vec![Finding::ok(
            WHAT,
            "unknown to the slipgate that serves here",
        )],
    }
}

fn notes<'a>(met: impl Iterator<Item = &'a String>, remedy: &str) -> Vec<Finding> {
    met.map(|met| Finding::ok(WHAT, met).with(State::Note, remedy))
        .collect()
}

fn texts(ports: impl Iterator<Item = (u16, u16)>) -> String {
    let ports: Vec<String> = ports
        .map(|(first, last)| format!("{first}-{last}"))
        .collect();
    ports.join(", ")
}

/// Asks the brokers that serve here. One that does not answer, or is of another version, is left out.
pub(super) fn ask_brokers(pin_dir: &Path) -> Vec<HostNatStatus> {
    let sockets = brokers::sockets(pin_dir).unwrap_or_default();
    let answers = sockets
        .iter()
        .filter_map(|socket| match ask(socket, ClientRequest::HostNat) {
            Ok(ClientAnswer::HostNat { status }) => Some(status),
            _ => None,
        });
    answers.collect()
}

#[cfg(test)]
#[path = "host_nat_test.rs"]
mod tests;
