//! The device that leads to the world.
use std::net::IpAddr;

use anyhow::{Context as _, anyhow, bail};
use slipgate_abi::IfIndex;
use slipgate_control::{
    attach::Program,
    netlink::{Changes, Network},
};
use slipgate_policy::document::ConfigError;

use super::Attached;
use crate::config::Config;

/// Device that leads to the outside network.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Uplink {
    pub(crate) name: String,
    pub(crate) ifindex: IfIndex,
    pub(crate) has_l2: bool,
}

/// The device that was named, or the default route's.
pub(crate) fn find(config: &Config, network: &Network) -> anyhow::Result<Uplink> {
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
pub(crate) fn check_source(
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
    if network
        .addresses
        .iter()
        .any(|a| a.address == IpAddr::V4(source))
    {
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

impl Attached {
    pub(crate) fn attach_uplink(&self) -> anyhow::Result<()> {
        let Uplink {
            name,
            ifindex,
            has_l2,
        } = &self.uplink;
        if self.is_served(*ifindex) {
            bail!(
                "--uplink {name}: it is the TAP of a guest that slipgate serves; give the device that \
                 leads to the world"
            );
        }
        self.attach_to(name, *ifindex, *has_l2)
    }

    /// Attaches the program to a device that leads to the world.
    pub(super) fn attach_to(
        &self,
        name: &str,
        ifindex: IfIndex,
        has_l2: bool,
    ) -> anyhow::Result<()> {
        self.datapath
            .attach(Program::uplink(has_l2), ifindex, self.hook)
            .with_context(|| format!("attaching to the uplink {name}"))
    }

    /// Whether a change of links may be one of the uplink, or of a link that the host's routes name.
    pub(crate) fn concerns_routing(&self, changes: &Changes) -> bool {
        let network = self.watch.network();
        let is_uplinks = |name: &String| {
            *name == self.uplink.name
                || self.config.uplink.as_ref() == Some(name)
                || self.vm_uplinks.is_named(name)
                || self.vms.has_uplink(name)
                || self.is_named_vrf(name)
        };
        let is_routed = |name: &String| {
            let link = network.link_by_name(name);
            link.is_some_and(|link| network.is_routed(link.ifindex))
        };
        let mut named = changes.named.iter();
        changes.missed
            || changes.routes
            || changes.addresses
            || named.any(|name| is_uplinks(name) || is_routed(name))
    }

    /// Attaches to the uplink when it is another device than before.
    pub(crate) fn follow_uplink(&mut self) -> anyhow::Result<()> {
        let now = match find(&self.config, self.watch.network()) {
            Ok(uplink) => uplink,
            Err(e) => {
                tracing::debug!("no uplink now: {e:#}");
                return Ok(());
            }
        };
        if now == self.uplink {
            return Ok(());
        }
        tracing::info!(
            "the uplink is {} now, it was {}",
            now.name,
            self.uplink.name
        );
        let before = std::mem::replace(&mut self.uplink, now);
        if let Err(e) = self.attach_uplink() {
            // Gone again already, most likely: the next notice tries again.
            tracing::warn!("{e:#}");
            self.uplink = before;
        }
        Ok(())
    }
}
