//! ARP and DHCP.
//!
//! Input: `knobs (1) | bits (1) | packet …`. Knobs: bit 0 takes ARP, else DHCP; bit 1 fixes the
//! guest's MAC.
use userspace_nat::{arp, datagram::Datagram, dhcp, fake::packets::is_right, vm::VmNet};

use crate::{
    dress::dress,
    tape::Tape,
    vms::{ip, spec, with_vm},
};

/// The guest's MAC, if it is fixed.
pub(crate) const MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];

/// Passes one packet to a service.
pub fn services(input: &[u8]) {
    let mut tape = Tape::new(input);
    let (knobs, bits) = (tape.u8(), tape.u8());
    let mut packet = tape.rest().to_vec();
    let mut spec = spec(1, 101, 10);
    spec.guest_mac = (knobs & 2 != 0).then_some(MAC);
    with_vm(spec, |vm| {
        if knobs & 1 != 0 {
            ask_arp(&vm, &packet);
        } else {
            dress(&mut packet, bits, ip(0, 0, 0, 0));
            ask_dhcp(&vm, &packet);
        }
    });
}

fn ask_arp(vm: &VmNet, packet: &[u8]) {
    if let Ok(outcome) = arp::handle(vm, packet)
        && let Some(reply) = outcome.reply
    {
        // RFC 826: an Ethernet and IPv4 reply is 28 bytes, from the gateway's MAC.
        assert_eq!(reply.len(), 28);
        assert_eq!(reply[..8], [0, 1, 8, 0, 6, 4, 0, 2]);
        assert_eq!(reply[8..14], vm.gateway_mac);
    }
}

fn ask_dhcp(vm: &VmNet, packet: &[u8]) {
    let Ok(outcome) = dhcp::handle(vm, packet) else {
        return;
    };
    assert!(outcome.guest_mac.is_none_or(|mac| mac[0] & 1 == 0));
    let Some(reply) = outcome.reply else { return };
    assert!(is_right(&reply));
    let datagram = Datagram::parse(&reply).expect("a datagram");
    assert_eq!((datagram.from.port(), datagram.to.port()), (67, 68));
    assert!(datagram.payload.len() >= 300, "RFC 1542 section 2.1");
    assert!(
        datagram.payload.len() <= 576 - 28 || packet.len() > 300,
        "RFC 2131 section 2: what every client takes, but for an id it sent itself"
    );
    assert!(datagram.payload.contains(&255), "the end option");
}
