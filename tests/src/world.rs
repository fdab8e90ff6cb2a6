//! The private world: a host with an uplink, and the servers behind it.
//!
//! ```text
//!  guest ns          host ns                               world ns
//!  eth0 ──pump── tap0 [slipgate] up0 ──veth | pump── w0 ── lo: 203.0.113.10, .20
//!                          198.18.0.2/24        198.18.0.1/24
//! ```
//! The world has no route to guests, so a packet that leaves un-NATed is not answered.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::{
    addresses_ipv6::HOST6,
    error::Result,
    ethtool,
    frame::Mac,
    impairment::{Impairment, ImpairmentCounts},
    netns::NetNs,
    owner,
    pump::{Direction, Filter, FrameTap, Pump, Sides},
    tap::{TapOptions, TapQueue},
    turns::{self, Turn},
};

/// The host's uplink device.
pub const UPLINK: &str = "up0";
/// The world's end of the uplink.
pub const WORLD_LINK: &str = "w0";
/// MAC address of slipgate's gateway, the same in every guest's network.
pub const GATEWAY_MAC: Mac = [0x02, 0x53, 0x4c, 0x47, 0x00, 0x01];
/// The world's router address on the uplink.
pub const ROUTER: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
/// The host's first address on the uplink.
pub const HOST: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 2);
/// The first server address.
pub const SERVER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 10);
/// The second server address.
pub const SERVER_2: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 20);

/// Kind of the host's uplink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Uplink {
    /// A veth pair: Ethernet, all in the kernel.
    Veth,
    /// A TUN: no Ethernet header; moved by the testbed, GSO kept when offloads are on.
    Tun,
    /// A TAP whose frames pass a link that loses, duplicates and reorders. No offloads: each packet
    /// meets its own fate.
    Impaired(Impairment),
}

/// Configuration of a [`World`]. Start from `WorldConfig::default()`.
#[derive(Clone, Debug)]
pub struct WorldConfig {
    /// Kind of the uplink.
    pub uplink: Uplink,
    /// The uplink's MTU in bytes, at both ends.
    pub mtu: u32,
    /// Checksum and segmentation offloads at both ends of the uplink.
    pub offloads: bool,
    /// `net.ipv4.ip_forward` on the host.
    pub ip_forward: bool,
    /// The host's uplink addresses, each /24.
    pub host_addresses: Vec<Ipv4Addr>,
    /// The host's address on the uplink by IPv6, in a /64, where [`World::give_ipv6`] is called.
    pub host_address6: Ipv6Addr,
    /// The servers' addresses, on the world's loopback.
    pub server_addresses: Vec<Ipv4Addr>,
}

impl Default for WorldConfig {
    fn default() -> Self {
        WorldConfig {
            uplink: Uplink::Veth,
            mtu: 1500,
            offloads: true,
            ip_forward: false,
            host_addresses: vec![HOST],
            host_address6: HOST6,
            server_addresses: vec![SERVER, SERVER_2],
        }
    }
}

/// The host and world namespaces and the uplink between them. Gone on drop.
pub struct World {
    /// Namespace in which slipgate runs.
    pub host: NetNs,
    /// Namespace in which the servers run.
    pub net: NetNs,
    config: WorldConfig,
    pump: Option<Pump>,
    /// Ends after all else.
    _turn: Turn,
}

impl World {
    /// Makes the default world: veth uplink, offloads on, MTU 1500, no forwarding by the host.
    ///
    /// # Errors
    /// A namespace, device, route or sysctl cannot be made or set.
    pub fn new() -> Result<World> {
        World::with(WorldConfig::default())
    }

    /// Makes a world with the given configuration.
    ///
    /// Waits if another test of this process runs alone: see [`turns`].
    ///
    /// # Errors
    /// As [`World::new`].
    pub fn with(config: WorldConfig) -> Result<World> {
        let turn = turns::shared();
        owner::sweep_processes();
        let (host, net) = (NetNs::new("host")?, NetNs::new("world")?);
        let pump = match config.uplink {
            Uplink::Veth => {
                let peer = net.path();
                host.ip(&format!(
                    "link add {UPLINK} type veth peer name {WORLD_LINK} netns {}",
                    peer.display()
                ))?;
                None
            }
            Uplink::Tun => Some(pumped_uplink(&host, &net, &config, false, None)?),
            Uplink::Impaired(how) => Some(pumped_uplink(&host, &net, &config, true, Some(how))?),
        };
        let world = World {
            host,
            net,
            config,
            pump,
            _turn: turn,
        };
        world.set_up()?;
        Ok(world)
    }

    /// Sets TCP's congestion control for later connections of the host and of the servers.
    ///
    /// # Errors
    /// The kernel does not have it.
    pub fn set_congestion_control(&self, name: &str) -> Result<()> {
        self.host.set_congestion_control(name)?;
        self.net.set_congestion_control(name).map(drop)
    }

    fn set_up(&self) -> Result<()> {
        let WorldConfig {
            mtu,
            offloads,
            ip_forward,
            ..
        } = self.config;
        for (ns, device) in [(&self.host, UPLINK), (&self.net, WORLD_LINK)] {
            if self.config.uplink == Uplink::Veth {
                ethtool::set_offloads(ns, device, offloads)?;
            }
            ns.ip(&format!("link set {device} mtu {mtu} up"))?;
        }
        self.host
            .sysctl("net.ipv4.ip_forward", if ip_forward { "1" } else { "0" })?;
        for address in &self.config.host_addresses {
            self.host
                .ip(&format!("addr add {address}/24 dev {UPLINK}"))?;
        }
        self.net
            .ip(&format!("addr add {ROUTER}/24 dev {WORLD_LINK}"))?;
        for address in &self.config.server_addresses {
            self.net.ip(&format!("addr add {address}/32 dev lo"))?;
        }
        self.host
            .ip(&format!("route add default via {ROUTER} dev {UPLINK}"))?;
        Ok(())
    }

    /// Returns the configuration of the world.
    pub fn config(&self) -> &WorldConfig {
        &self.config
    }

    /// Frames that an impaired uplink has affected in that direction; zero for other uplinks.
    pub fn impaired(&self, direction: Direction) -> ImpairmentCounts {
        self.pump
            .as_ref()
            .map(|pump| pump.impaired(direction))
            .unwrap_or_default()
    }

    /// Copies of all frames on a pumped uplink (TUN or impaired); `None` on a veth, where
    /// [`crate::Capture`] does it.
    pub fn frames(&self) -> Option<FrameTap> {
        self.pump.as_ref().map(Pump::subscribe)
    }

    /// Decides over each frame on a pumped uplink (TUN or impaired). On a veth there is no pump and
    /// `false` is returned.
    pub fn set_filter(&self, filter: Option<Filter>) -> bool {
        self.pump
            .as_ref()
            .map(|pump| pump.set_filter(filter))
            .is_some()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.host.kill_processes();
        self.net.kill_processes();
    }
}

fn pumped_uplink(
    host: &NetNs,
    net: &NetNs,
    config: &WorldConfig,
    ethernet: bool,
    impairment: Option<Impairment>,
) -> Result<Pump> {
    // On an impaired link each packet meets its own fate, so none may stand for many.
    let offloads = config.offloads && impairment.is_none();
    let options = TapOptions {
        ethernet,
        vnet_hdr: true,
        offloads,
        queues: 1,
    };
    let inner = TapQueue::open(host, UPLINK, options)?;
    let outer = TapQueue::open(net, WORLD_LINK, options)?;
    Pump::start(
        "uplink",
        Sides {
            inner,
            outer,
            ethernet,
            count: false,
            impairment,
            cpu: None,
        },
    )
}
