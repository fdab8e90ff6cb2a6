//! The programs that the common case does not attach.

use std::fs;

use slipgate_testbed::{Result, Uplink, error::Tried};

use super::{
    expect, ipv6,
    stand::{Stand, WAIT},
};
use slipgate_testbed::clients::tcp;

/// The build that logs passes the verifier too, and logs.
pub(super) fn logging_build() -> Result<String> {
    let mut stand = Stand::new(Uplink::Veth, &["--bpf-log", "--log", "debug"])?;
    let said = stand.traffic()?;
    stand.stop()?;
    let stderr = stand.slipgate.stderr();
    let lines = stderr
        .lines()
        .filter(|line| line.contains("program="))
        .count();
    expect(lines > 0, || {
        format!("the programs said nothing in:\n{stderr}")
    })?;
    Ok(format!("{said}; {lines} lines from the programs"))
}

/// The guard in the TUN driver.
pub(super) fn native_guard() -> Result<String> {
    let mut stand = Stand::new(Uplink::Veth, &["--xdp", "on"])?;
    let link = stand.world.host.ip("link show tap0")?;
    expect(link.contains(" xdp "), || {
        format!("no native XDP on: {link}")
    })?;
    let said = stand.traffic()?;
    stand.stop()?;
    Ok(said)
}

/// Attaches the same program in the stack (generic XDP), as on a device whose driver has no XDP. It
/// is attached by hand, because every TAP has XDP.
pub(super) fn generic_guard() -> Result<String> {
    let mut stand = Stand::new(Uplink::Veth, &[])?;
    let pins = stand.slipgate.pins();
    let guard = pins.pins().into_iter().find(|pin| pin.ends_with("guard"));
    let guard = pins.path().join(guard.unwrap_or_default());
    let host = &stand.world.host;
    host.ip(&format!(
        "link set tap0 xdpgeneric pinned {}",
        guard.display()
    ))?;
    let link = host.ip("link show tap0")?;
    expect(link.contains("xdpgeneric"), || {
        format!("no generic XDP on: {link}")
    })?;
    let said = stand.traffic()?;
    stand.stop()?;
    Ok(said)
}

/// A TUN as uplink: its packets begin with the IP header, of either family.
pub(super) fn uplink_without_l2() -> Result<String> {
    let mut stand = Stand::new(Uplink::Tun, &ipv6::FLAGS)?;
    let pins = stand.pins();
    let attached = pins.iter().any(|pin| pin.starts_with("uplink_ingress_l3-"));
    expect(attached, || {
        format!("uplink_ingress_l3 is not attached: {pins:?}")
    })?;
    let said = stand.traffic()?;
    let echo = stand.echo.address();
    stand
        .guest
        .run(|| tcp::request_response(echo, 20, 100, WAIT))?;
    ipv6::configured(&stand)?;
    let by_ipv6 = ipv6::traffic(&stand)?;
    stand.stop()?;
    Ok(format!("{said}, by IPv6 {by_ipv6}"))
}

/// Checks that bpffs is empty after all stands are gone.
pub(super) fn nothing_is_left() -> Result<String> {
    let left = fs::read_dir("/sys/fs/bpf").tried("list bpffs")?;
    let left: Vec<_> = left.flatten().map(|entry| entry.path()).collect();
    expect(left.is_empty(), || format!("left: {left:?}"))?;
    Ok("nothing".into())
}
