//! Tests that hold for flows of either family: each runs for IPv4 and IPv6.
mod astray;
mod behaviour;
mod between;
mod challenged;
mod changes;
mod errors;
mod flows;
mod forwards;
mod fragments;
mod mappings;
mod own_ports;
mod routed;
mod rules;
mod spread;

use std::net::IpAddr;

use slipgate_abi::VmId;
use slipgate_policy::{Name, wire};

use super::rig::*;
use crate::{
    dns::{
        NamePolicy,
        chain::tests::{a, aaaa, answer},
    },
    name_gate::ByRules,
    packet::{Ip, Packet, Transport, Version},
};

/// Address and port of either family.
type End = (IpAddr, u16);

/// The addresses of a family.
#[derive(Clone, Copy, Debug)]
struct Family {
    version: Version,
    guest: IpAddr,
    gateway: IpAddr,
    nat: IpAddr,
    peer: IpAddr,
    /// Type and code of ICMP errors: unreachable by prohibition, and time exceeded.
    prohibited: [u8; 2],
    expired: [u8; 2],
    /// Space that is protected.
    private: IpAddr,
}

fn families() -> [Family; 2] {
    [
        Family {
            version: Version::V4,
            guest: GUEST.into(),
            gateway: GATEWAY.into(),
            nat: NAT.into(),
            peer: PEER.into(),
            prohibited: [3, 13],
            expired: [11, 0],
            private: "10.1.2.3".parse().unwrap(),
        },
        Family {
            version: Version::V6,
            guest: GUEST6.into(),
            gateway: "fd00:0:0:2::1".parse().unwrap(),
            nat: NAT6.into(),
            peer: PEER6.into(),
            prohibited: [1, 1],
            expired: [3, 0],
            private: "fd00:77::3".parse().unwrap(),
        },
    ]
}

impl Family {
    fn server(&self) -> End {
        (self.peer, 443)
    }

    fn header_len(&self) -> usize {
        self.version.header_len()
    }

    /// The kinds of packets that open flows from this port of the guest, or with this query id.
    fn openers(&self, port: u16) -> [Vec<u8>; 3] {
        [
            syn((self.guest, port), self.server(), 7),
            udp((self.guest, port), self.server(), b"x"),
            echo(self.guest, self.peer, true, port, b"x"),
        ]
    }

    /// Builds the peer's answer to a translated opener.
    fn answer(&self, sent: &[u8]) -> Vec<u8> {
        let packet = read(sent);
        let ports = packet.transport.ports().unwrap();
        let nat = (packet.ip.source, ports.0);
        match packet.transport {
            Transport::Tcp(tcp) => syn_ack(self.server(), nat, 9_000, tcp.sequence + 1),
            Transport::Udp(_) => udp(self.server(), nat, b"y"),
            _ => echo(self.peer, packet.ip.source, false, ports.0, b"x"),
        }
    }
}

fn setup() -> Setup {
    Setup {
        ipv6: Some("fd00:0:0:2::/64".parse().unwrap()),
        ..Setup::default()
    }
}

fn read(packet: &[u8]) -> Packet<'_> {
    assert!(is_right(packet), "{packet:02x?}");
    Packet::parse(Ip::parse(packet).unwrap()).unwrap()
}

/// Type and code of the ICMP message in a packet.
fn icmp(packet: &[u8]) -> [u8; 2] {
    let payload = read(packet).ip.payload();
    [payload[0], payload[1]]
}

impl Rig {
    /// Opens a connection of VM 1. Returns its end on the uplink.
    fn connect_to(&mut self, family: Family, port: u16, isn: u32) -> End {
        let guest = (family.guest, port);
        self.guest(1, &syn(guest, family.server(), isn));
        let sent = self.at_world().pop().expect("the SYN goes out");
        let nat = (family.nat, read(&sent).transport.ports().unwrap().0);
        let back = syn_ack(family.server(), nat, 9_000, isn + 1);
        assert_eq!(self.world(&back), Handling::Fast);
        let answer = ack(guest, family.server(), 0, isn + 1, 9_001);
        assert_eq!(self.guest(1, &answer), Handling::Fast);
        self.at_world();
        self.at_guest();
        nat
    }
}

/// DNS tells VM 1 that a name has the peer's address.
fn tell(rig: &Rig, family: Family, name: &'static str) {
    let mut dns = ByRules(rig.engine.core.rules.judge.clone());
    let now_ns = rig.kernel.borrow().now_ns;
    let wire = wire(name).unwrap();
    let record = match family.peer {
        IpAddr::V4(addr) => a(name, 60, addr.octets()),
        IpAddr::V6(addr) => aaaa(name, 60, addr),
    };
    let told = answer(name, &[record]);
    let verdict = dns.answer(VmId::new(101), Name(&wire), &told, 0, now_ns);
    assert_eq!(verdict, Ok(()));
}
