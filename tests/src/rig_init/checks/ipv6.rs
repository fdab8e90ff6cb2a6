//! The same guest by IPv6: its own kernel configures it, by router advertisements.

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr},
    time::{Duration, Instant},
};

use slipgate_testbed::{
    GUEST_DEVICE, Guest, NetNs, Result, World,
    clients::{
        dns, icmp,
        tcp::{self, EchoSession},
        udp,
    },
    dns_wire::types,
    kernel_view,
    servers::{Answer, TcpServer, TcpService, UdpServer, UdpService},
    world_ipv6::{self, GATEWAY6, HOST6, ROUTER6, SERVER6, SERVER6_2},
};

use super::{
    expect,
    stand::{BULK_BYTES, Stand, WAIT},
};

/// A name of the server that has an IPv6 address alone.
const NAME6: &str = "six.example.test";
/// Flags of slipgate for it. They cost an emulated CPU half a minute of the verifier, so few stands
/// have them.
pub(super) const FLAGS: [&str; 4] = ["--ipv6", "nat", "--deny", "2001:db8:ff::20"];
/// Ports of the host and of the guest, of the forward.
pub(super) const FORWARD: &str = "tcp:8080:80";
/// Frames by the engine port beside those that open a flow, at most: neighbour discovery, a segment
/// that is sent again, a datagram before its flow is open.
const MORE_FRAMES: u64 = 16;

/// The servers of the world by IPv6.
pub(super) struct Servers6 {
    streams: TcpServer<IpAddr>,
    pub(super) echo: TcpServer<IpAddr>,
    datagrams: UdpServer<IpAddr>,
    denied: TcpServer<IpAddr>,
}

impl Servers6 {
    /// Starts them, in a world that has IPv6.
    ///
    /// # Errors
    /// A port is taken.
    pub(super) fn start(world: &World) -> Result<Self> {
        let (net, server) = (&world.net, IpAddr::from(SERVER6));
        Ok(Self {
            streams: TcpServer::start(net, (server, 7000), TcpService::Streams)?,
            echo: TcpServer::start(net, (server, 7), TcpService::Echo)?,
            datagrams: UdpServer::start(net, (server, 7), UdpService::Echo)?,
            denied: TcpServer::start(net, (SERVER6_2.into(), 443), TcpService::Close)?,
        })
    }
}

/// The guest's kernel finds its router, makes an address of the prefix, and is sure of it.
pub(super) fn configured(stand: &Stand) -> Result<String> {
    let ns = &stand.guest.ns;
    world_ipv6::enable(ns, &[GUEST_DEVICE])?;
    let began = Instant::now();
    while address(ns)?.is_none() || !ns.ip("-6 route")?.contains("default via fe80::") {
        expect(began.elapsed() < WAIT, || {
            format!("after {WAIT:?} the guest has {:?}", ns.ip("-6 addr"))
        })?;
        std::thread::sleep(Duration::from_millis(50));
    }
    let address = address(ns)?.unwrap_or(Ipv6Addr::UNSPECIFIED);
    let took = began.elapsed().as_millis();
    Ok(format!("{address} after {took} ms"))
}

/// The address that the guest made itself of what was advertised, once it is sure of it.
fn address(ns: &NetNs) -> Result<Option<Ipv6Addr>> {
    let of_link = format!("-6 -o addr show dev {GUEST_DEVICE} scope global -tentative");
    let shown = ns.ip(&of_link)?;
    let dynamic = shown.lines().find(|line| line.contains("dynamic"));
    let of_prefix = dynamic.and_then(|line| line.split_whitespace().find(|w| w.ends_with("/64")));
    Ok(of_prefix.and_then(|text| text.trim_end_matches("/64").parse().ok()))
}

/// Streams both ways, each byte checked, datagrams and an echo.
pub(super) fn traffic(stand: &Stand) -> Result<String> {
    let Servers6 {
        streams, datagrams, ..
    } = &stand.servers6;
    let (to, guest) = (streams.address(), &stand.guest);
    let down = guest.run(|| tcp::download(to, BULK_BYTES, 3, WAIT))?;
    let up = guest.run(|| tcp::upload(to, BULK_BYTES, 4, WAIT))?;
    let pace = Duration::from_millis(5);
    let echoed = guest.run(|| udp::paced(datagrams.address(), 50, 1_000, pace, WAIT))?;
    expect(echoed.received == 50 && echoed.corrupt == 0, || {
        format!("of 50 datagrams came back {echoed:?}")
    })?;
    let pinged = guest.run(|| icmp::ping6(SERVER6, 56, WAIT))?;
    expect(pinged.is_some(), || "a ping was not answered".into())?;
    let mb = |transfer: &tcp::Transfer| transfer.bits_per_second() / 1e6;
    Ok(format!(
        "{} MiB down at {:.0} Mb/s, up at {:.0} Mb/s",
        BULK_BYTES >> 20,
        mb(&down),
        mb(&up)
    ))
}

/// Of the traffic's packets few leave by the engine port, and `slipgate flows` has all of it.
pub(super) fn in_the_kernel(stand: &Stand) -> Result<String> {
    let frames = || kernel_view::frames_sent(&stand.world.host, stand.slipgate.engine_port());
    let before = frames()?;
    let said = traffic(stand)?;
    let came = frames()? - before;
    // Two streams, datagrams, a ping.
    expect(came <= 4 + MORE_FRAMES, || {
        format!("{came} frames left by the engine port")
    })?;
    let flows = stand.slipgate.flows()?;
    let server = stand.servers6.streams.address().to_string();
    let bulk = flows
        .iter()
        .filter(|flow| flow.remote == server && flow.tx_bytes.max(flow.rx_bytes) > BULK_BYTES);
    expect(bulk.count() == 2, || {
        format!("`slipgate flows` shows {flows:?}")
    })?;
    let source = format!("[{HOST6}]:");
    let ours = |flow: &&slipgate_testbed::slipgate::FlowRow| flow.remote == server;
    expect(
        flows
            .iter()
            .filter(ours)
            .all(|flow| flow.nat.starts_with(&source)),
        || format!("not from {HOST6}: {flows:?}"),
    )?;
    Ok(format!("{said}; {came} frames by the engine port"))
}

/// A name's IPv6 address, asked of the gateway by both transports.
pub(super) fn names(stand: &Stand) -> Result<String> {
    stand.names.set(NAME6, Answer::address(SERVER6, 60));
    let question = dns::question(NAME6, types::AAAA);
    let to = SocketAddr::from((GATEWAY6, 53));
    let by_udp = stand.guest.run(|| dns::ask_udp(to, &question, WAIT))?;
    let by_tcp = stand.guest.run(|| dns::ask_tcp(to, &question, WAIT))?;
    for answer in [by_udp, by_tcp] {
        let mut told = answer.reply.records.iter().map(|record| &record.data);
        let expected = SERVER6.octets().to_vec();
        expect(
            told.next() == Some(&expected) && told.next().is_none(),
            || format!("{NAME6} is {answer:?}"),
        )?;
    }
    Ok(format!("{NAME6} over UDP and TCP"))
}

/// A flow that a rule denies is refused at once.
pub(super) fn refusal(stand: &Stand) -> Result<String> {
    let to = stand.servers6.denied.address();
    let took = stand.guest.run(|| tcp::expect_refused(to))?;
    Ok(format!("by RST after {:.1} ms", took.as_secs_f64() * 1e3))
}

/// A client of the world's comes by a forward, with its own address.
pub(super) fn forward(stand: &Stand) -> Result<String> {
    let Guest { ns, .. } = &stand.guest;
    let any = IpAddr::from(Ipv6Addr::UNSPECIFIED);
    let inside = TcpServer::start(ns, (any, 80), TcpService::Echo)?;
    for host in [IpAddr::from(HOST6), slipgate_testbed::world::HOST.into()] {
        stand.world.net.run(|| {
            let mut stream = tcp::connect(SocketAddr::new(host, 8080), WAIT)?;
            EchoSession::new(&mut stream).round(100_000)
        })?;
    }
    let peers: Vec<IpAddr> = inside.peers().iter().map(SocketAddr::ip).collect();
    let expected: [IpAddr; 2] = [ROUTER6.into(), slipgate_testbed::world::ROUTER.into()];
    expect(peers == expected, || format!("clients were {peers:?}"))?;
    Ok(format!("clients {} and {}", peers[0], peers[1]))
}
