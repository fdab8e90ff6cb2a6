//! passt's port specifications (`-t`, `-u`), as `--forward` of slipgate has them.
use std::net::IpAddr;

use slipgate_policy::document::ConfigError;

/// Returns the forwards of one specification: `none`, or `[ADDRESS/]PORT[-PORT][:PORT[-PORT]],…`.
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
    let forward = |ports: &str| {
        if ports.starts_with('~') {
            return Err(refused(
                "ports that are left out mean all others, which slipgate does not forward",
            ));
        }
        let (host, guest) = ports.split_once(':').unwrap_or((ports, ports));
        let is_range = |text: &str| text.split('-').all(|port| port.parse::<u16>().is_ok());
        match is_range(host) && is_range(guest) {
            true => Ok(format!("{protocol}:{before}{host}:{guest}")),
            false => Err(refused("not a port or a range of ports")),
        }
    };
    ports.split(',').map(forward).collect()
}
