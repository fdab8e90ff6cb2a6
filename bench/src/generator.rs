//! Generator of frames that bypasses the guest's stack, which would limit the rate (to about
//! 118,000 small packets per second), and the counter of packets that arrive in the world.
//!
//! Frames are written to a TAP as a VMM writes them: one `write(2)` per frame, with a
//! `virtio_net_hdr` in front. Where the contender itself holds the TAP's descriptor (pasta,
//! slirp4netns), a packet socket sends the frame out of the guest's device and bypasses its
//! queueing discipline.

use std::{
    fs::File,
    net::{IpAddr, SocketAddr, UdpSocket},
    os::unix::fs::FileExt,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use slipgate_testbed::{
    NetNs,
    servers::{UdpServer, UdpService},
    tap::VNET_HDR_LEN,
    world::WORLD_LINK,
};

use crate::{
    contender::Stand,
    family::Family,
    guest_frames::{Kind, datagram_headers_len, frame},
};

/// Length from the Ethernet header to the last byte of payload, bytes, without the frame check
/// sequence: of IPv4 14 + 20 + 8 + 22, of IPv6 14 + 40 + 8 + 2.
pub(crate) const SMALL_FRAME_BYTES: usize = 64;
const PAYLOAD_BYTE: u8 = 0x5a;
/// Payload of a flow's first datagram.
const FIRST_PAYLOAD: [u8; 22] = [PAYLOAD_BYTE; 22];
/// Port of the flow that is established before a flood.
const ECHO_PORT: u16 = 4000;
const GUEST_PORT: u16 = 9000;

/// A UDP flow for which the NAT has seen packets in both directions. The world drops packets of the
/// small frame's length on arrival, so that neither a stack nor a server is measured.
pub(crate) struct EstablishedFlow {
    /// Frame to be repeated.
    pub(crate) frame: Vec<u8>,
    // Keeps the guest's stack from answering replies with ICMP errors.
    _socket: UdpSocket,
    _server: UdpServer<IpAddr>,
}

impl EstablishedFlow {
    /// Sends a datagram by the guest's own stack and awaits its echo.
    pub(crate) fn open(stand: &Stand, family: Family) -> Result<EstablishedFlow> {
        let world = &stand.world.net;
        let to = family.server();
        let payload = [PAYLOAD_BYTE; SMALL_FRAME_BYTES];
        let payload = &payload[..SMALL_FRAME_BYTES - datagram_headers_len(&to)];
        let length = 8 + payload.len();
        drop_on_arrival(world, &format!("udp dport {ECHO_PORT} udp length {length}"))?;
        let server = UdpServer::start(world, (to, ECHO_PORT), UdpService::Echo)?;
        let socket = stand.in_guest(|| converse(family))?;
        let link = stand.link(family)?;
        let frame = frame(
            link,
            GUEST_PORT,
            SocketAddr::new(to, ECHO_PORT),
            Kind::Udp(payload),
        );
        let len = frame.len() - VNET_HDR_LEN;
        ensure!(len == SMALL_FRAME_BYTES, "the small frame has {len} bytes");
        Ok(EstablishedFlow {
            frame,
            _socket: socket,
            _server: server,
        })
    }
}

/// Exchanges a datagram with the first server, with several attempts, because the NAT may have just
/// started.
fn converse(family: Family) -> Result<UdpSocket> {
    const ATTEMPTS: usize = 10;
    let server = SocketAddr::new(family.server(), ECHO_PORT);
    let socket = UdpSocket::bind((family.any(), GUEST_PORT)).context("bind the guest's socket")?;
    socket.set_read_timeout(Some(Duration::from_millis(300)))?;
    socket.connect(server)?;
    for _ in 0..ATTEMPTS {
        let answered = socket
            .send(b"hello")
            .and_then(|_| socket.recv(&mut [0; 64]));
        if answered.is_ok() {
            return Ok(socket);
        }
    }
    bail!("{server} does not answer the guest")
}

/// First packets of flows that the NAT has not seen.
pub(crate) struct NewFlows {
    pub(crate) frames: Vec<Vec<u8>>,
}

/// The protocol of new flows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum FirstPacket {
    Udp,
    TcpSyn,
}

impl NewFlows {
    /// Creates the frames of `count` flows, each with its own port at both ends, to the contender's
    /// destinations of new flows. The world drops them.
    pub(crate) fn prepare(
        stand: &Stand,
        family: Family,
        first: FirstPacket,
        count: u16,
    ) -> Result<NewFlows> {
        // Below lie the ports of servers and of the other floods.
        const FIRST_REMOTE_PORT: u16 = 10_000;
        const GUEST_PORTS: u16 = 20_000;
        let remote = FIRST_REMOTE_PORT..FIRST_REMOTE_PORT + count;
        let protocol = if first == FirstPacket::Udp {
            "udp"
        } else {
            "tcp"
        };
        let ports = format!("{protocol} dport {}-{}", remote.start, remote.end - 1);
        drop_on_arrival(&stand.world.net, &ports)?;
        // The guest must know its gateway before it can be spoken for.
        let at = (family.server(), ECHO_PORT);
        let talk = UdpServer::start(&stand.world.net, at, UdpService::Echo)?;
        drop(stand.in_guest(|| converse(family))?);
        drop(talk);
        let link = stand.link(family)?;
        let to = stand.new_flows_to(family);
        let frame = |(at, port): (usize, u16)| {
            let kind = match first {
                FirstPacket::Udp => Kind::Udp(&FIRST_PAYLOAD),
                FirstPacket::TcpSyn => Kind::Syn(u32::from(port) << 12),
            };
            let guest_port = 20_000 + (at as u16 % GUEST_PORTS);
            frame(
                link,
                guest_port,
                SocketAddr::new(to[at % to.len()], port),
                kind,
            )
        };
        Ok(NewFlows {
            frames: remote.enumerate().map(frame).collect(),
        })
    }
}

/// Makes the world drop matching packets before its stack receives them.
pub(crate) fn drop_on_arrival(world: &NetNs, what: &str) -> Result<()> {
    world.nft(&format!(
        "table netdev bench {{
            chain arrivals {{
                type filter hook ingress device {WORLD_LINK} priority -500
                {what} drop
            }}
        }}"
    ))?;
    Ok(())
}

/// Counter of the packets that have arrived in the world.
pub(crate) struct Arrivals {
    devices: File,
}

impl Arrivals {
    /// Counts arrivals at the world's end of the uplink.
    pub(crate) fn at(world: &NetNs) -> Result<Arrivals> {
        // The file stays with the namespace of the thread that opened it.
        let opened = world.run(|| File::open("/proc/thread-self/net/dev"));
        Ok(Arrivals {
            devices: opened.context("open the world's /proc/net/dev")?,
        })
    }

    /// Number of packets since the world was made.
    pub(crate) fn packets(&self) -> Result<u64> {
        let mut buffer = [0; 2048];
        let len = self
            .devices
            .read_at(&mut buffer, 0)
            .context("read /proc/net/dev")?;
        let text = String::from_utf8_lossy(&buffer[..len]);
        text.lines()
            .find_map(|line| {
                line.trim_start()
                    .strip_prefix(WORLD_LINK)?
                    .strip_prefix(':')
            })
            // Bytes, then packets.
            .and_then(|fields| fields.split_whitespace().nth(1)?.parse().ok())
            .with_context(|| format!("no {WORLD_LINK} in /proc/net/dev:\n{text}"))
    }
}
