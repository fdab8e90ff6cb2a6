//! The device that leads to the world.
use anyhow::{anyhow, bail};
use slipgate_control::netlink::Network;

use crate::config::Config;

/// The device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Uplink {
    pub(super) name: String,
    pub(super) ifindex: u32,
    pub(super) has_l2: bool,
}

/// The device that was named, or the default route's.
pub(super) fn find(config: &Config, network: &Network) -> anyhow::Result<Uplink> {
    let link = match &config.uplink {
        Some(name) => network.link_by_name(name).ok_or_else(|| {
            anyhow!("--uplink {name}: there is no such device; give one that `ip link` shows")
        })?,
        None => network.default_uplink().ok_or_else(|| {
            anyhow!(
                "there is no default route: name the device that leads to the world by --uplink"
            )
        })?,
    };
    if config.vms.iter().any(|vm| vm.tap == link.name) {
        bail!(
            "the default route leads out of {}, which is a guest's TAP: give --uplink",
            link.name
        );
    }
    Ok(Uplink {
        name: link.name.clone(),
        ifindex: link.ifindex,
        has_l2: link.has_l2,
    })
}

/// Answers come back only to an address that is the host's.
pub(super) fn check_source(
    config: &Config,
    uplink: &Uplink,
    network: &Network,
) -> anyhow::Result<()> {
    let Some(source) = config.nat_address else {
        return Ok(());
    };
    if network.addresses.iter().any(|a| a.address == source) {
        return Ok(());
    }
    bail!(
        "--nat-address {source}: it is not an address of this host; add it to the uplink: ip \
         address add {source}/32 dev {}",
        uplink.name
    )
}
