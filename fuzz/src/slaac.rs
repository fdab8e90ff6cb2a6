//! Neighbour discovery and DHCPv6: what a guest sends to configure its IPv6.
//!
//! Input: `knobs (1) | packet …`. Knobs: bit 0 takes DHCPv6, else neighbour discovery; bit 1 fixes
//! the guest's MAC; bit 2 corrects lengths, hop limit, ports and checksum; bit 3 sets the guest's
//! link-local source; bit 4 gives the guest a single address, which it gets by DHCPv6; bit 5 makes that
//! the host's, so that it can't be given.
use std::net::Ipv6Addr;

use slipgate_abi::DropReason;
use slipgate_model::GuestIpv6;
use userspace_nat::{
    datagram::Datagram,
    dhcpv6::{self, AddressUse},
    ndp::{self, Reply, advertisement, wire},
    packet::checksum::Sum,
    vm::VmNet,
};

use crate::{
    services::MAC,
    tape::Tape,
    vms::{spec, with_vm},
};

/// Length of an IPv6 header, bytes.
const HEADER_LEN: usize = wire::HEADER_LEN;
const UDP: u8 = 17;

/// Knobs of the input.
pub(crate) mod knob {
    pub(crate) const DHCP: u8 = 1;
    pub(crate) const FIXED_MAC: u8 = 2;
    pub(crate) const CORRECT: u8 = 4;
    pub(crate) const OWN_SOURCE: u8 = 8;
    pub(crate) const SINGLE: u8 = 16;
    pub(crate) const WITHHELD: u8 = 32;
}

/// The guest's link-local address.
pub(crate) const GUEST_LOCAL: [u8; 16] =
    [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xfe, 0, 0, 9];

/// Passes one packet to neighbour discovery or to DHCPv6.
pub fn slaac(input: &[u8]) {
    let mut tape = Tape::new(input);
    let knobs = tape.u8();
    let mut packet = tape.rest().to_vec();
    let has = |knob: u8| knobs & knob != 0;
    let protocol = if has(knob::DHCP) { UDP } else { wire::ICMPV6 };
    if has(knob::OWN_SOURCE) && packet.len() >= HEADER_LEN {
        packet[8..24].copy_from_slice(&GUEST_LOCAL);
    }
    if has(knob::CORRECT) {
        correct(&mut packet, protocol);
    }
    let prefix = match has(knob::SINGLE) {
        true => "2001:db8:7::17/128",
        false => "fd00:1:2:3::/64",
    };
    let net = GuestIpv6 {
        prefix: prefix.parse().expect("a prefix"),
        is_routed: has(knob::SINGLE),
    };
    let mut spec = spec(1, 101, 10);
    spec.guest_mac = has(knob::FIXED_MAC).then_some(MAC);
    spec.ipv6 = Some(net);
    with_vm(spec, |vm| match has(knob::DHCP) {
        true => ask_dhcp(&vm, &net, &packet, has(knob::WITHHELD)),
        false => discover(&vm, &net, &packet),
    });
}

fn correct(packet: &mut [u8], protocol: u8) {
    if packet.len() < HEADER_LEN + 8 {
        return;
    }
    let len = packet.len() - HEADER_LEN;
    packet[0] = 0x60;
    packet[4..6].copy_from_slice(&(len as u16).to_be_bytes());
    packet[6..8].copy_from_slice(&[protocol, 255]);
    if protocol == UDP {
        packet[HEADER_LEN..HEADER_LEN + 4].copy_from_slice(&[2, 34, 2, 35]);
        packet[HEADER_LEN + 4..HEADER_LEN + 6].copy_from_slice(&(len as u16).to_be_bytes());
        return;
    }
    packet[HEADER_LEN + 2..HEADER_LEN + 4].fill(0);
    let sum = Sum::default()
        .bytes(&packet[8..40])
        .bytes(&(len as u32).to_be_bytes());
    let sum = sum
        .bytes(&[0, 0, 0, protocol])
        .bytes(&packet[HEADER_LEN..])
        .finish();
    packet[HEADER_LEN + 2..HEADER_LEN + 4].copy_from_slice(&sum.to_be_bytes());
}

fn discover(vm: &VmNet, net: &GuestIpv6, packet: &[u8]) {
    let outcome = match ndp::handle(vm, net, packet) {
        Ok(outcome) => outcome,
        Err(reason) => {
            return assert!(matches!(
                reason,
                DropReason::Malformed
                    | DropReason::Spoofed
                    | DropReason::RouterAdvertisement
                    | DropReason::ServiceReject
            ));
        }
    };
    let is_guests = |address| ndp::is_guests(net, vm.gateway_mac, address);
    // No address of another's is bound.
    assert!(outcome.address.is_none_or(is_guests));
    let (reply, most) = match outcome.reply {
        Reply::None => return,
        Reply::Packet(reply) => (reply, 72),
        Reply::RouterAdvertisement(to) => (advertisement::build(vm, net, to), 128),
    };
    assert!(reply.len() <= most);
    // It is valid, and for the guest alone.
    let read = wire::parse(&reply).expect("a valid message");
    assert!(read.destination == wire::ALL_NODES || is_guests(read.destination));
    let is_proxied = net.gateway_net().contains(&read.source);
    assert!(!is_guests(read.source) || is_proxied);
}

fn ask_dhcp(vm: &VmNet, net: &GuestIpv6, packet: &[u8], is_withheld: bool) {
    let Ok(Some(answer)) = dhcpv6::handle(vm, net, packet, is_withheld) else {
        return;
    };
    let own = net.single_address().filter(|_| !is_withheld);
    if let AddressUse::Granted(address) | AddressUse::Released(address) = answer.address {
        assert_eq!(Some(address), own);
    }
    // It fits into a packet of any link.
    assert!(answer.packet.len() <= 1_280);
    let datagram = Datagram::parse(&answer.packet).expect("a datagram");
    assert_eq!((datagram.from.port(), datagram.to.port()), (547, 546));
    let kind = datagram.payload[0];
    assert!(kind == 7 || kind == 2 && net.single_address().is_some());
    assert_eq!(
        datagram.payload[1..4],
        packet[HEADER_LEN + 9..HEADER_LEN + 12]
    );
    check_options(&datagram.payload[4..], own);
}

/// Checks that options are whole, and that no other address than the guest's is given.
fn check_options(mut rest: &[u8], own: Option<Ipv6Addr>) {
    const IA_NA: u16 = 3;
    const IA_ADDRESS: u16 = 5;
    while !rest.is_empty() {
        let word = |at: usize| u16::from_be_bytes([rest[at], rest[at + 1]]);
        let (code, len) = (word(0), usize::from(word(2)));
        let data = &rest[4..4 + len];
        match code {
            IA_NA => check_options(&data[12..], own),
            IA_ADDRESS => {
                let address: [u8; 16] = data[..16].try_into().expect("an address");
                let is_ended = data[16..24] == [0; 8];
                assert!(is_ended || Some(Ipv6Addr::from(address)) == own);
            }
            _ => {}
        }
        rest = &rest[4 + len..];
    }
}
