//! passt's port specifications (`-t`, `-u`), as `--forward` of slipgate has them.
use std::{net::IpAddr, ops::RangeInclusive};

use slipgate_policy::document::ConfigError;

/// Returns the forwards of one specification: `none`, or `[ADDRESS/]PORT[-PORT][:PORT[-PORT]],…`, of which
/// `~PORT[-PORT]` leaves ports of the host out.
///
/// # Errors
/// It means ports that are not named, a device, or nothing.
pub(super) fn forwards(
    flag: &'static str,
    protocol: &str,
    spec: &str,
) -> Result<Vec<String>, ConfigError> {
    const REMEDY: &str = "name the ports, like 8080:80 or 127.0.0.1/9000-9009";
    let refused = |problem: &str| ConfigError::new(flag, spec, problem, REMEDY);
    if spec == "none" {
        return Ok(Vec::new());
    }
    if matches!(spec, "all" | "auto") {
        return Err(refused(
            "slipgate forwards ports that are named, and no others",
        ));
    }
    let (address, ports) = match spec.rsplit_once('/') {
        None => (None, spec),
        Some((address, _)) if address.contains('%') => {
            return Err(refused("slipgate binds no forward to a device"));
        }
        Some((address, ports)) => {
            let address = address.trim_start_matches('[').trim_end_matches(']');
            let address = address.parse::<IpAddr>();
            (
                Some(address.map_err(|_| refused("not an address before /"))?),
                ports,
            )
        }
    };
    let before = match address {
        None => String::new(),
        Some(IpAddr::V4(address)) => format!("{address}:"),
        Some(IpAddr::V6(address)) => format!("[{address}]:"),
    };
    let (left_out, named): (Vec<_>, Vec<_>) =
        ports.split(',').partition(|part| part.starts_with('~'));
    if named.is_empty() {
        return Err(refused(
            "ports that are left out, and no others, mean all the rest, which slipgate does not forward",
        ));
    }
    const NO_PORTS: &str = "not a port or a range of ports";
    let range = |text: &str| range(text).ok_or_else(|| refused(NO_PORTS));
    let left_out = left_out.iter().map(|part| range(&part[1..]));
    let left_out = left_out.collect::<Result<Vec<_>, _>>()?;
    let mut forwards = Vec::new();
    for part in named {
        let (host, guest) = part.split_once(':').unwrap_or((part, part));
        let (host, guest) = (range(host)?, range(guest)?);
        if host.len() != guest.len() {
            return Err(refused("not as many ports of the guest as of the host"));
        }
        // Of a port of the host to that of the guest.
        let shift = i32::from(*guest.start()) - i32::from(*host.start());
        let of = |ports: &RangeInclusive<u16>| {
            let [first, last] = [*ports.start(), *ports.end()];
            let [to_first, to_last] = [first, last].map(|port| i32::from(port) + shift);
            match first == last {
                true => format!("{protocol}:{before}{first}:{to_first}"),
                false => format!("{protocol}:{before}{first}-{last}:{to_first}-{to_last}"),
            }
        };
        forwards.extend(without(host, &left_out).iter().map(of));
    }
    if forwards.is_empty() {
        return Err(refused("all of its ports are left out"));
    }
    Ok(forwards)
}

/// Reads a port, or a range of ports that does not go down.
fn range(text: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last) = (first.parse().ok()?, last.parse().ok()?);
    (first <= last).then_some(first..=last)
}

/// What is left of a range without these.
fn without(
    ports: RangeInclusive<u16>,
    left_out: &[RangeInclusive<u16>],
) -> Vec<RangeInclusive<u16>> {
    let mut parts = vec![ports];
    for out in left_out {
        let around = |part: RangeInclusive<u16>| {
            let before = *part.start()..=(*part.end()).min(out.start().saturating_sub(1));
            let after = (*part.start()).max(out.end().saturating_add(1))..=*part.end();
            // Of the first port there is nothing before, and of the last nothing after.
            let before = (*out.start() > 0).then_some(before);
            let after = (*out.end() < u16::MAX).then_some(after);
            [before, after]
                .into_iter()
                .flatten()
                .filter(|part| !part.is_empty())
        };
        parts = parts.into_iter().flat_map(around).collect();
    }
    parts
}
