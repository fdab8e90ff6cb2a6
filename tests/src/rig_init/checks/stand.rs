//! A world with servers and a guest, and slipgate between them.

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    time::Duration,
};

use slipgate_testbed::{
    Error, Guest, GuestConfig, PinDir, Result, Slipgate, Uplink, World, WorldConfig,
    clients::{icmp, tcp},
    servers::{Answer, DnsServer, TcpServer, TcpService, UdpServer, UdpService, Zone},
    world::{SERVER, SERVER_2, UPLINK},
};

use super::{expect, ipv6::Servers6};

/// Time limit of a step: more than a step takes on an emulated CPU with other load.
pub(super) const WAIT: Duration = Duration::from_secs(8);
pub(super) const NAME: &str = "www.example.test";
/// Address of the guests' resolver, beside the gateway's.
pub(super) const DNS: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 0, 2, 3), 53);
pub(super) const BULK_BYTES: u64 = 4 << 20;

/// World, guest and slipgate of the checks. The guest has IPv6 once its kernel may, if slipgate has
/// [`super::ipv6::FLAGS`]. Removed on drop.
pub(super) struct Stand {
    pub(super) slipgate: Slipgate,
    pub(super) guest: Guest,
    pub(super) world: World,
    pub(super) names: DnsServer,
    pub(super) streams: TcpServer,
    pub(super) echo: TcpServer,
    pub(super) datagrams: UdpServer,
    pub(super) denied: TcpServer,
    pub(super) servers6: Servers6,
}

impl Stand {
    /// Creates a stand with this uplink, and with slipgate running with these additional flags.
    pub(super) fn new(uplink: Uplink, flags: &[&str]) -> Result<Stand> {
        let world = World::with(WorldConfig {
            uplink,
            ..Default::default()
        })?;
        world.give_ipv6()?;
        let net = &world.net;
        let zone = Zone::from([(NAME.to_owned(), Answer::a(SERVER, 60))]);
        let names = DnsServer::start(net, (SERVER, 53), zone)?;
        let streams = TcpServer::start(net, (SERVER, 7000), TcpService::Streams)?;
        let echo = TcpServer::start(net, (SERVER, 7), TcpService::Echo)?;
        let datagrams = UdpServer::start(net, (SERVER, 7), UdpService::Echo)?;
        let denied = TcpServer::start(net, (SERVER_2, 443), TcpService::Close)?;
        let servers6 = Servers6::start(&world)?;
        let guest = Guest::new(&world, GuestConfig::new("tap0"))?;
        let (resolver, denied_ip) = (SERVER.to_string(), SERVER_2.to_string());
        let mut all = vec!["--tap", "tap0", "--uplink", UPLINK, "--dns", &resolver];
        all.extend(["--deny", &denied_ip]);
        all.extend(flags);
        let slipgate = Slipgate::attach(&world.host, &PinDir::new()?, &all)?;
        Ok(Stand {
            slipgate,
            guest,
            world,
            names,
            streams,
            echo,
            datagrams,
            denied,
            servers6,
        })
    }

    /// Streams both ways, each byte checked, and an echo.
    pub(super) fn traffic(&self) -> Result<String> {
        self.try_traffic().map_err(|why| {
            let total = |stats: serde_json::Value| stats["total"].clone();
            let stats = self
                .slipgate
                .stats()
                .map_or_else(|e| e.to_string().into(), total);
            Error::unexpected(format!(
                "{why}; stats {stats}; stderr:\n{}",
                self.slipgate.stderr()
            ))
        })
    }

    fn try_traffic(&self) -> Result<String> {
        let server = self.streams.address();
        let down = self
            .guest
            .run(|| tcp::download(server, BULK_BYTES, 1, WAIT))?;
        let up = self
            .guest
            .run(|| tcp::upload(server, BULK_BYTES, 2, WAIT))?;
        let ping = self.guest.run(|| icmp::ping(SERVER, 2, 56, WAIT))?;
        expect(ping.replies.len() == 2 && ping.corrupt == 0, || {
            format!("of two echoes came {ping:?}")
        })?;
        let mb = |transfer: &tcp::Transfer| transfer.bits_per_second() / 1e6;
        let bytes = BULK_BYTES >> 20;
        Ok(format!(
            "{bytes} MiB down at {:.0} Mb/s, up at {:.0} Mb/s",
            mb(&down),
            mb(&up)
        ))
    }

    /// The pins' names, without the folder of the namespace.
    pub(super) fn pins(&self) -> Vec<String> {
        let pins = self.slipgate.pins().pins();
        let names = pins.iter().filter_map(|pin| pin.file_name()?.to_str());
        names.map(str::to_owned).collect()
    }

    /// An orderly stop, after which no pin and no port is left.
    pub(super) fn stop(&mut self) -> Result<()> {
        let status = self.slipgate.stop()?;
        let pins = self.slipgate.pins().pins();
        let port = self.world.host.ifindex(self.slipgate.engine_port());
        expect(
            status.success() && pins.is_empty() && port.is_none(),
            || {
                let stderr = self.slipgate.stderr();
                format!("stopped with {status}, pins {pins:?}, port {port:?}: {stderr}")
            },
        )
    }
}
