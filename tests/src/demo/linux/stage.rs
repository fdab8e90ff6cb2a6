//! The private world of the demonstration: servers, guest, and slipgate between them.

use std::{collections::HashMap, net::SocketAddrV4, path::PathBuf};

use slipgate_testbed::{
    Guest, GuestConfig, PinDir, Result, Slipgate, World,
    error::Tried,
    servers::{Answer, DnsServer, HttpServer, TcpServer, TcpService, UdpServer, UdpService, Zone},
    world::{HOST, SERVER, SERVER_2, UPLINK},
};

use crate::progress::Progress;

/// The name that the guest looks up.
pub(crate) const NAME: &str = "www.example.test";
/// The VM's name in slipgate's output.
pub(crate) const VM: &str = "guest";
/// The rule under which one server is out of reach.
pub(crate) const DENIED: &str = "203.0.113.20";

/// Everything that is there. Gone when it is dropped, also after a panic.
pub(crate) struct Stage {
    pub(crate) world: World,
    pub(crate) guest: Guest,
    pub(crate) slipgate: Slipgate,
    pub(crate) servers: Servers,
    pub(crate) flow_log: PathBuf,
    scratch: tempfile::TempDir,
}

pub(crate) struct Servers {
    pub(crate) names: DnsServer,
    pub(crate) web: HttpServer,
    pub(crate) close: TcpServer,
    pub(crate) streams: TcpServer,
    pub(crate) echo: UdpServer,
    /// Runs, and a rule denies it.
    pub(crate) denied: TcpServer,
}

impl Stage {
    pub(crate) fn set_up(progress: &mut Progress) -> Result<Stage> {
        let world = World::new()?;
        let servers = Servers::start(&world)?;
        let guest = Guest::new(&world, GuestConfig::new("tap0").unconfigured())?;
        progress.step(
            "world",
            &format!("host {HOST}, servers {SERVER} and {SERVER_2}, a guest at tap0"),
        );
        let scratch = tempfile::tempdir().tried("make a directory for the flow log")?;
        let flow_log = scratch.path().join("flows.jsonl");
        let pins = PinDir::new()?;
        let resolver = servers.names.address().to_string();
        let vm = format!("name={VM},tap=tap0");
        let log = flow_log.display().to_string();
        let args = [
            "--vm",
            &vm,
            "--uplink",
            UPLINK,
            "--dns",
            &resolver,
            "--deny",
            DENIED,
            "--flow-log",
            &log,
        ];
        let slipgate = Slipgate::attach(&world.host, &pins, &args)?;
        let ready = slipgate.ready_line().trim_start_matches("slipgate: ");
        progress.step("attach", ready);
        Ok(Stage {
            world,
            guest,
            slipgate,
            servers,
            flow_log,
            scratch,
        })
    }

    /// An orderly stop: it must end with 0 and leave nothing.
    pub(crate) fn tear_down(&mut self, progress: &mut Progress) -> Result<()> {
        let status = self.slipgate.stop()?;
        let records = std::fs::read_to_string(&self.flow_log).tried("read the flow log")?;
        let pins = self.slipgate.pins().pins();
        let port = self.world.host.ifindex(self.slipgate.engine_port());
        progress.check(
            status.success() && pins.is_empty() && port.is_none(),
            &format!(
                "stopped in order: {} flows recorded, no pin and no device left",
                records.matches(r#""event":"flow_end""#).count()
            ),
        );
        drop(std::fs::remove_dir_all(self.scratch.path()));
        Ok(())
    }
}

impl Servers {
    fn start(world: &World) -> Result<Servers> {
        let net = &world.net;
        let zone = Zone::from([(NAME.to_owned(), Answer::a(SERVER, 60))]);
        let pages = HashMap::from([("/".to_owned(), b"Hello from the world.\n".to_vec())]);
        Ok(Servers {
            names: DnsServer::start(net, (SERVER, 53), zone)?,
            web: HttpServer::start(net, (SERVER, 80), pages)?,
            close: TcpServer::start(net, (SERVER, 7001), TcpService::Close)?,
            streams: TcpServer::start(net, (SERVER, 7000), TcpService::Streams)?,
            echo: UdpServer::start(net, (SERVER, 7), UdpService::Echo)?,
            denied: TcpServer::start(net, (SERVER_2, 443), TcpService::Close)?,
        })
    }

    pub(crate) fn denied_address(&self) -> SocketAddrV4 {
        self.denied.address()
    }
}
