//! The device that leads to the world.
use anyhow::anyhow;
use slipgate_control::netlink::Network;

use crate::config::Config;
use slipgate_policy::document::ConfigError;

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
        Some(name) => {
            let refused = |problem, remedy| ConfigError::new("--uplink", name, problem, remedy);
            let link = network.link_by_name(name).ok_or_else(|| {
                refused(
                    "there is no such device",
                    "give one that `ip link` shows, or leave it out for the default route's",
                )
            })?;
            if link.loopback {
                return Err(refused(
                    "it is the loopback device, which leads nowhere",
                    "give the device that leads to the world (guests reach the host itself by \
                     its address there)",
                )
                .into());
            }
            link
        }
        None => network.default_uplink().ok_or_else(|| {
            anyhow!(
                "there is no default route: name the device that leads to the world by --uplink"
            )
        })?,
    };
    if let Some(vm) = config.vms.iter().find(|vm| vm.tap == link.name) {
        return Err(anyhow!(
            "the default route leads out of {}, which is the TAP of {}: name the device that \
             leads to the world by --uplink",
            link.name,
            vm.name
        ));
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
) -> Result<(), ConfigError> {
    let Some(source) = config.nat_address else {
        return Ok(());
    };
    if source.is_loopback() {
        return Err(ConfigError::new(
            "--nat-address",
            source,
            "no link carries loopback addresses",
            "give one of the uplink's, as `ip address` shows them",
        ));
    }
    if network.addresses.iter().any(|a| a.address == source) {
        return Ok(());
    }
    Err(ConfigError::new(
        "--nat-address",
        source,
        "it is not an address of this host",
        format!(
            "add it to the uplink: ip address add {source}/32 dev {}",
            uplink.name
        ),
    ))
}
