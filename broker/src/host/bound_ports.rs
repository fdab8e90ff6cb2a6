//! Ports of the host's own sockets among those for translated flows: the engine keeps clear.
use std::{collections::BTreeSet, fs, io, ops::RangeInclusive};

use slipgate_abi::Protocol;

/// Returns IP protocol and port of every bound socket in the ranges, sorted; `None` if they can't be
/// read now.
pub(crate) fn bound<'a>(
    ranges: impl IntoIterator<Item = &'a RangeInclusive<u16>>,
) -> Option<Vec<(u8, u16)>> {
    let ranges: Vec<_> = ranges.into_iter().collect();
    let mut ports = BTreeSet::new();
    for (protocol, tables) in [
        (Protocol::Tcp, ["tcp", "tcp6"]),
        (Protocol::Udp, ["udp", "udp6"]),
    ] {
        for table in tables {
            let text = match fs::read_to_string(format!("/proc/thread-self/net/{table}")) {
                Ok(text) => text,
                // A kernel without IPv6.
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => {
                    tracing::debug!("looking for bound ports in {table}: {e}");
                    return None;
                }
            };
            for port in local_ports(&text) {
                if ranges.iter().any(|range| range.contains(&port)) {
                    ports.insert((protocol as u8, port));
                }
            }
        }
    }
    Some(ports.into_iter().collect())
}

/// Returns the ports of the second column, in hexadecimal
/// (Documentation/networking/proc_net_tcp.rst).
fn local_ports(table: &str) -> impl Iterator<Item = u16> {
    table.lines().skip(1).filter_map(|line| {
        let local = line.split_whitespace().nth(1)?;
        u16::from_str_radix(local.rsplit_once(':')?.1, 16).ok()
    })
}

#[cfg(test)]
#[path = "bound_ports_test.rs"]
mod tests;
