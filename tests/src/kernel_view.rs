//! The kernel's own counters of a device, and the pinned maps through bpftool.

use std::{net::SocketAddrV4, path::PathBuf, process::Command};

use crate::{
    error::{Error, Result, Tried},
    netns::NetNs,
    pins::PinDir,
};
use serde_json::Value;

/// Returns the number of frames that the stack has sent on `device`; for a TAP, the frames that its
/// descriptor returned.
///
/// # Errors
/// There is no such device.
pub fn frames_sent(ns: &NetNs, device: &str) -> Result<u64> {
    let shown = ns.ip(&format!("-s -j link show dev {device}"))?;
    let parsed: Value = serde_json::from_str(&shown).unwrap_or_default();
    let packets = parsed[0]["stats64"]["tx"]["packets"].as_u64();
    packets.ok_or_else(|| Error::unexpected(format!("`ip -s -j link` of {device} shows: {shown}")))
}

/// Returns a counter of the protocols of the calling thread's namespace: of `/proc/net/FILE` (`snmp`,
/// `netstat`), where a line of names is followed by one of values, the one of this `protocol` (`Tcp`) and
/// `name` (`OutRsts`).
///
/// # Errors
/// There is no such file or counter.
pub fn protocol_counter(file: &str, protocol: &str, name: &str) -> Result<u64> {
    let path = format!("/proc/thread-self/net/{file}");
    let text = std::fs::read_to_string(&path).tried(format!("read {path}"))?;
    let of_protocol = |line: &&str| line.split(':').next() == Some(protocol);
    let mut lines = text.lines().filter(of_protocol).map(str::split_whitespace);
    let (names, values) = (lines.next(), lines.next());
    let mut pairs = names
        .into_iter()
        .flatten()
        .zip(values.into_iter().flatten());
    let found = pairs.find(|(of, _)| *of == name);
    let value = found.and_then(|(_, value)| value.parse().ok());
    value.ok_or_else(|| Error::unexpected(format!("{path} has no {name} of {protocol}")))
}

/// Returns the elements of the pinned map `name`, as printed by `bpftool -j`; named fields are
/// under `formatted`.
///
/// # Errors
/// `bpftool` fails, for example because nothing is pinned under this name.
pub fn dump(ns: &NetNs, pins: &PinDir, name: &str) -> Result<Vec<Value>> {
    let text = bpftool(ns, &["-j", "map", "dump", "pinned", &pin(pins, name)?])?;
    serde_json::from_str(&text)
        .map_err(|error| Error::unexpected(format!("`bpftool -j map dump` of {name}: {error}")))
}

/// Returns the number of guests' frames that the programs handed to the engines whose maps are
/// pinned here, by the engine port or by the ring of first packets. They are counted in credits
/// (`slipgate_abi::segment::credits`): a UDP GSO frame counts as its datagrams.
///
/// # Errors
/// `bpftool` fails, or its output lacks the counter.
pub fn handed_over(ns: &NetNs, pins: &PinDir) -> Result<u64> {
    let rows = dump(ns, pins, "OWNERS")?;
    let counts = rows.iter().map(|row| {
        let count = &row["formatted"]["value"]["handed_over"];
        count
            .as_u64()
            .ok_or_else(|| Error::unexpected(format!("a row of OWNERS: {row}")))
    });
    counts.sum()
}

/// Returns the slot of the flow from `guest` to `remote`, as bpftool prints it, with named fields.
///
/// # Errors
/// `bpftool` fails, or there is no such flow.
pub fn slot_by_name(
    ns: &NetNs,
    pins: &PinDir,
    guest: SocketAddrV4,
    remote: SocketAddrV4,
) -> Result<String> {
    let entries = dump(ns, pins, "FLOWS")?;
    let wanted = |entry: &&Value| {
        let key = &entry["formatted"]["key"];
        key["scope"] != 0
            && key["local_port"] == guest.port()
            && key["remote_port"] == remote.port()
    };
    let found = entries.iter().find(wanted);
    let slot = found.and_then(|entry| entry["formatted"]["value"]["slot"].as_u64());
    let slot = slot.ok_or_else(|| {
        Error::unexpected(format!(
            "no flow {guest} to {remote} in {} entries",
            entries.len()
        ))
    })?;
    let key = (slot as u32).to_ne_bytes().map(|byte| byte.to_string());
    let slots = pin(pins, "SLOTS")?;
    let mut args = vec!["map", "lookup", "pinned", &slots, "key"];
    args.extend(key.iter().map(String::as_str));
    bpftool(ns, &args)
}

fn pin(pins: &PinDir, name: &str) -> Result<String> {
    let found = pins.pins().into_iter().find(|path| path.ends_with(name));
    let none = || Error::unexpected(format!("{name} is not pinned under {:?}", pins.path()));
    let path: PathBuf = pins.path().join(found.ok_or_else(none)?);
    Ok(path.display().to_string())
}

fn bpftool(ns: &NetNs, args: &[&str]) -> Result<String> {
    let mut command = Command::new("bpftool");
    command.args(args);
    Ok(String::from_utf8_lossy(&ns.output(command)?.stdout).into_owned())
}
