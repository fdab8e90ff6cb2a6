//! A VM's rate: what passes over more than a second, judged at the uplink.
//!
//! Frames are offered at many times the rate, and each pause between two offers is known, so that
//! what should have passed is known too, however busy the machine is.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use slipgate_abi::{
    Rate, VmRates, VmRow,
    rate::{BURST_NS, paced_ahead_ns},
};
use slipgate_testbed::{
    Capture, GuestConfig, WorldConfig,
    accounting::{FlowCounts, FlowKey},
    clients::udp,
    frame::FrameBuilder,
    require_root_and_tun,
    servers::{UdpServer, UdpService},
    turns,
    world::{SERVER, UPLINK},
};

use crate::{
    Cell, GATEWAY_MAC, GUEST, GUEST_MAC, Stand, WAIT, guest_errors::send_raw, matrix::matrix,
    stand::maps,
};

matrix! {
    a_guest_s_bytes_per_second_are_held: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    bytes_per_second_to_a_guest_are_held: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
}

const BYTES_PER_SECOND: u64 = 2_000_000;
pub(crate) const PAYLOAD: [u8; 972] = [7; 972];
/// Length of a packet with both headers at most, bytes.
const PACKET_BYTES: u64 = 1_020;
const RATE: Rate = Rate {
    bytes_per_second: BYTES_PER_SECOND,
    packets_per_second: 0,
    budget_bytes: 0,
};
const OFFERED_AT_ONCE: u64 = 20;
const OFFERED_FOR: Duration = Duration::from_millis(1_500);
/// The programs' clock ticks.
const TICK: Duration = Duration::from_millis(10);

/// Time by which a thread may be woken late, and the programs' clock is.
const WAKING: Duration = Duration::from_millis(20);

/// An offer of packets.
pub(crate) struct Offer {
    pub(crate) packets: u64,
    took: Duration,
    /// Times between the packets.
    pauses: Vec<Duration>,
}

pub(crate) fn offer(mut send: impl FnMut()) -> Offer {
    let start = Instant::now();
    let mut last = start;
    let mut offer = Offer {
        packets: 0,
        took: Duration::ZERO,
        pauses: Vec::new(),
    };
    while start.elapsed() < OFFERED_FOR {
        for _ in 0..OFFERED_AT_ONCE {
            send();
        }
        offer.packets += OFFERED_AT_ONCE;
        thread::sleep(Duration::from_millis(1));
        let gap = last.elapsed();
        last = Instant::now();
        offer.pauses.push(gap);
    }
    offer.took = start.elapsed();
    offer
}

impl Offer {
    /// Time of the offer for which pauses cost: what was offered, or waits, makes up for this much of
    /// each.
    fn lost(&self, made_up: Duration) -> Duration {
        let lost = |pause: &Duration| (*pause + TICK).saturating_sub(made_up);
        self.pauses.iter().map(lost).sum()
    }

    /// Checks that what left a queue that shapes, by the time at which it is empty, corresponds to the
    /// rate.
    pub(crate) fn assert_shaped(&self, bytes: u64, bytes_per_second: u64) {
        let ahead = Duration::from_nanos(paced_ahead_ns(bytes_per_second));
        self.assert_rate(bytes, bytes_per_second, ahead);
    }

    /// Checks that the number of bytes that passed corresponds to the rate.
    pub(crate) fn assert_held(&self, bytes: u64, bytes_per_second: u64) {
        self.assert_rate(bytes, bytes_per_second, Duration::from_nanos(BURST_NS));
        // Or nothing was held back.
        assert!(
            self.packets * PACKET_BYTES > 2 * bytes,
            "too little offered"
        );
    }

    /// Checks the bytes against the rate where this much of each pause is made up for.
    fn assert_rate(&self, bytes: u64, bytes_per_second: u64, made_up: Duration) {
        let of = |time: Duration| bytes_per_second as f64 * time.as_secs_f64();
        let lost = self.lost(made_up);
        // What waits in a socket while an engine is woken late passes then.
        let most = of(self.took + made_up + WAKING) + PACKET_BYTES as f64;
        let least = of((self.took + made_up).saturating_sub(lost + 2 * TICK)) * 0.97;
        println!("{bytes} bytes of {least:.0} to {most:.0}");
        assert!(
            (least..=most).contains(&(bytes as f64)),
            "{bytes} passed, {least:.0} to {most:.0} should have, in {:?} ({lost:?} lost)",
            self.took,
        );
    }
}

/// Rate in the tests of traffic that the engine carries, bytes per second.
const SLOW: u64 = 100_000;
/// Payload of datagrams that are too large for a link, bytes.
const LARGE: usize = 8_972;
/// Length of a large packet's fragments together, bytes.
const FRAGMENTS_BYTES: u64 = 9_120;

impl Offer {
    /// Asserts that some of the traffic passed, and no more than the rate permits.
    fn assert_within(&self, what: &str, bytes: u64, bytes_per_second: u64) {
        let of = |time: Duration| bytes_per_second as f64 * time.as_secs_f64();
        // What the engine sends does not wait in the queue that shapes: it may use all of it at once.
        let at_once = BURST_NS.max(paced_ahead_ns(bytes_per_second));
        let most = of(self.took + Duration::from_nanos(at_once) + TICK) + FRAGMENTS_BYTES as f64;
        println!(
            "{what}: {bytes} bytes of {most:.0} in {:?}, {} packets offered",
            self.took, self.packets
        );
        assert!(
            (most * 0.4..=most).contains(&(bytes as f64)),
            "{what}: {bytes} bytes passed, {most:.0} at most should have"
        );
    }
}

/// All that went to this address, fragments too.
fn to(counts: &FlowCounts, address: Ipv4Addr) -> u64 {
    counts.sum(|key| key.destination.ip() == address).bytes
}

/// A stand whose VM gets its rate from [`set`]; in user mode by this flag, as there are no maps.
fn stand(cell: Cell, flag: &str) -> Stand {
    match cell.is_hybrid() {
        true => Stand::of(cell, &[]),
        false => Stand::of(cell, &[flag, &BYTES_PER_SECOND.to_string()]),
    }
}

fn echo(stand: &Stand) -> UdpServer<IpAddr> {
    let at = (stand.cell.server(), 7);
    UdpServer::start(&stand.world.net, at, UdpService::Echo).unwrap()
}

/// Gives the only VM rates that are policed, which those of flags are only in user mode.
fn set(stand: &Stand, rates: VmRates) {
    use std::sync::atomic::Ordering::Acquire;
    if !stand.cell.is_hybrid() {
        return;
    }
    let maps = maps(stand.slipgate.pins());
    let is_open = |row: &VmRow| maps.vm(*row).unwrap().id().load(Acquire) != 0;
    let row = maps.vm_rows().find(is_open).expect("a VM");
    assert!(maps.set_rates(row, Some(rates)));
}

/// An open flow from the guest's port; its translated address.
fn open(stand: &Stand, server: &UdpServer<IpAddr>) -> (SocketAddr, SocketAddr) {
    stand
        .run(|| udp::probe(server.address(), b"x", WAIT))
        .unwrap();
    let flow = stand.flow_to(server.address());
    (flow.guest.parse().unwrap(), flow.nat.parse().unwrap())
}

fn a_guest_s_bytes_per_second_are_held(cell: Cell) {
    let _turn = turns::alone("it compares a rate with what passed in a time");
    let stand = stand(cell, "--tx-bytes-per-second");
    let server = echo(&stand);
    let (guest, nat) = open(&stand, &server);
    // Or the guest answers the echoes with ICMP errors, which are charged too.
    let _socket = stand.run(|| UdpSocket::bind(guest)).unwrap();
    set(
        &stand,
        VmRates {
            tx: RATE,
            ..VmRates::default()
        },
    );
    let datagram = cell.datagram(guest.port(), server.address());
    let (vnet, frame) = datagram.payload(&PAYLOAD).build();
    let watching = Capture::start(&stand.world.host, UPLINK).unwrap();
    let offer = offer(|| stand.guest.inject(vnet, &frame).unwrap());
    let sent = watching.finish().unwrap().sent;
    let sent = sent.of(FlowKey::udp(nat, server.address()));
    offer.assert_held(sent.bytes, BYTES_PER_SECOND);
    // Each is in one place.
    let dropped = stand.dropped("byte_rate");
    assert_eq!(sent.packets + dropped, offer.packets);
    let flow = stand.flow_to(server.address());
    assert_eq!(flow.tx_packets, 1 + sent.packets, "{flow:?}");
}

fn bytes_per_second_to_a_guest_are_held(cell: Cell) {
    let _turn = turns::alone("it compares a rate with what passed in a time");
    let stand = stand(cell, "--rx-bytes-per-second");
    let server = echo(&stand);
    let (_, nat) = open(&stand, &server);
    let before = stand.flow_to(server.address());
    set(
        &stand,
        VmRates {
            rx: RATE,
            ..VmRates::default()
        },
    );
    let watching = Capture::start(&stand.world.host, UPLINK).unwrap();
    let offer = offer(|| {
        server.send_to(&PAYLOAD, nat).unwrap();
    });
    thread::sleep(Duration::from_millis(50));
    let came = watching.finish().unwrap().received;
    let came = came.of(FlowKey::udp(server.address(), nat));
    let flow = stand.flow_to(server.address());
    offer.assert_held(flow.rx_bytes - before.rx_bytes, BYTES_PER_SECOND);
    let passed = flow.rx_packets - before.rx_packets;
    let counted = passed + stand.dropped("byte_rate");
    match cell.is_hybrid() {
        true => assert_eq!(counted, came.packets),
        // The host's socket may lose some while the engine does not read.
        false => assert!(counted <= came.packets, "{counted} of {}", came.packets),
    }
    assert_eq!(came.packets, offer.packets);
}

#[test]
fn large_datagrams_and_errors_do_not_go_round_a_guest_s_rate() {
    require_root_and_tun!();
    let _turn = turns::alone("it compares a rate with what passed in a time");
    let stand = Stand::new(&["--tx-bytes-per-second", "100000"]);
    let server = UdpServer::start(&stand.world.net, (SERVER, 7), UdpService::Sink).unwrap();
    let sent = datagram_to(&server, 972);
    stand.guest.inject(sent.0, &sent.1).unwrap();
    let flow = crate::eventually("the flow", || stand.flows_to(server.address()).pop());
    let nat: SocketAddrV4 = flow.nat.parse().unwrap();
    // Now an error may be about it.
    server.send_to(b"y", nat).unwrap();
    let quoted = FrameBuilder::udp(
        server.address(),
        flow.guest.parse::<SocketAddrV4>().unwrap(),
    )
    .payload(&[7; 500])
    .build_ip();
    let error = FrameBuilder::icmp(GUEST, SERVER, 3, 3, [0; 4])
        .macs(GUEST_MAC, GATEWAY_MAC)
        .payload(&quoted)
        .build();
    for (what, (vnet, frame)) in [
        ("ordinary datagrams", datagram_to(&server, 972)),
        ("large datagrams", datagram_to(&server, LARGE)),
        ("errors", error),
    ] {
        let watching = Capture::start(&stand.world.host, UPLINK).unwrap();
        let offer = offer(|| stand.guest.inject(vnet, &frame).unwrap());
        let sent = watching.finish().unwrap().sent;
        offer.assert_within(what, to(&sent, SERVER), SLOW);
    }
    assert!(stand.dropped("byte_rate") > 0);
}

/// A datagram of the guest's port 5,000 that may be fragmented.
fn datagram_to(server: &UdpServer, payload: usize) -> (slipgate_testbed::tap::VnetHdr, Vec<u8>) {
    crate::datagram(5_000, server.address())
        .dont_fragment(false)
        .payload(&vec![7; payload])
        .build()
}

#[test]
fn large_datagrams_and_errors_do_not_go_round_the_rate_to_a_guest() {
    require_root_and_tun!();
    let _turn = turns::alone("it compares a rate with what passed in a time");
    let world = WorldConfig {
        mtu: 9_000,
        ..WorldConfig::default()
    };
    let stand = Stand::with(
        world,
        GuestConfig::new("tap0"),
        &["--rx-bytes-per-second", "100000"],
    );
    let server = UdpServer::start(&stand.world.net, (SERVER, 7), UdpService::Sink).unwrap();
    server.allow_fragments().unwrap();
    let address = server.address();
    let (vnet, frame) = crate::datagram(5_000, address).build();
    stand.guest.inject(vnet, &frame).unwrap();
    let flow = crate::eventually("the flow", || stand.flows_to(address).pop());
    let nat: SocketAddrV4 = flow.nat.parse().unwrap();
    let quoted = FrameBuilder::udp(nat, address)
        .payload(&[7; 500])
        .build_ip();
    let error = FrameBuilder::icmp(SERVER, *nat.ip(), 3, 1, [0; 4])
        .payload(&quoted)
        .build_ip();
    for what in ["ordinary datagrams", "large datagrams", "errors"] {
        let watching = Capture::start(&stand.world.host, "tap0").unwrap();
        let offer = stand.world.net.run(|| match what {
            "errors" => offer(|| send_raw(*nat.ip(), &error[20..])),
            _ => {
                let payload = vec![
                    7;
                    if what.starts_with("large") {
                        LARGE
                    } else {
                        972
                    }
                ];
                offer(|| drop(server.send_to(&payload, nat)))
            }
        });
        thread::sleep(Duration::from_millis(50));
        let came = watching.finish().unwrap().sent;
        offer.assert_within(what, to(&came, GUEST), SLOW);
    }
    assert!(stand.dropped("byte_rate") > 0);
}
