use proptest::prelude::*;

use super::*;
use crate::test_vm;

const GUEST_MAC: EthernetAddress = EthernetAddress([2, 0, 0, 0, 0, 15]);
const GUEST: [u8; 4] = [10, 0, 2, 15];

fn packet(operation: ArpOperation, mac: EthernetAddress, from: [u8; 4], to: [u8; 4]) -> Vec<u8> {
    let arp = ArpRepr::EthernetIpv4 {
        operation,
        source_hardware_addr: mac,
        source_protocol_addr: from.into(),
        target_hardware_addr: EthernetAddress([0; 6]),
        target_protocol_addr: to.into(),
    };
    let mut out = vec![0; arp.buffer_len()];
    arp.emit(&mut ArpPacket::new_unchecked(&mut out));
    out
}

fn ask(from: [u8; 4], to: [u8; 4]) -> Result<Outcome, DropReason> {
    handle(
        &test_vm::vm(1),
        &packet(ArpOperation::Request, GUEST_MAC, from, to),
    )
}

#[test]
fn rfc826_our_addresses_and_the_network_answer_with_the_gateways_mac() {
    let vm = test_vm::vm(1);
    for target in [[10, 0, 2, 2], [10, 0, 2, 3], [10, 0, 2, 77]] {
        let request = packet(ArpOperation::Request, GUEST_MAC, GUEST, target);
        let outcome = handle(&vm, &request).unwrap();
        let reply = outcome.reply.expect("a reply");
        assert_eq!(
            ArpRepr::parse(&ArpPacket::new_checked(&reply).unwrap()).unwrap(),
            ArpRepr::EthernetIpv4 {
                operation: ArpOperation::Reply,
                source_hardware_addr: EthernetAddress(vm.gateway_mac),
                source_protocol_addr: target.into(),
                target_hardware_addr: GUEST_MAC,
                target_protocol_addr: GUEST.into(),
            }
        );
        assert_eq!(outcome.guest_mac, Some(GUEST_MAC.0));
    }
    assert_eq!(vm.stats.snapshot().0.arp_answers, 3);
}

#[test]
fn rfc5227_a_probe_for_the_guests_own_address_finds_it_free() {
    assert_eq!(ask([0; 4], GUEST).unwrap().reply, None);
    // An announcement.
    assert_eq!(ask(GUEST, GUEST).unwrap().reply, None);
    // A probe for an address that is not the guest's finds it taken.
    assert!(ask([0; 4], [10, 0, 2, 20]).unwrap().reply.is_some());
}

#[test]
fn spoofed_senders_are_rejected() {
    assert_eq!(ask([10, 0, 2, 16], [10, 0, 2, 2]), Err(DropReason::Spoofed));
    let mut vm = test_vm::vm(1);
    vm.guest_mac = Some([2, 0, 0, 0, 0, 99]);
    let request = packet(ArpOperation::Request, GUEST_MAC, GUEST, [10, 0, 2, 2]);
    assert_eq!(handle(&vm, &request), Err(DropReason::Spoofed));
    vm.guest_mac = Some(GUEST_MAC.0);
    let outcome = handle(&vm, &request).unwrap();
    assert!(outcome.reply.is_some());
    assert_eq!(
        outcome.guest_mac, None,
        "it is configured: there is nothing to learn"
    );
    let group = packet(
        ArpOperation::Request,
        EthernetAddress([255; 6]),
        GUEST,
        [10, 0, 2, 2],
    );
    assert_eq!(handle(&test_vm::vm(1), &group), Err(DropReason::Spoofed));
}

#[test]
fn what_is_no_host_of_the_network_is_not_answered() {
    for target in [[10, 0, 3, 1], [10, 0, 2, 0], [10, 0, 2, 255], [8, 8, 8, 8]] {
        assert_eq!(
            ask(GUEST, target),
            Err(DropReason::ServiceReject),
            "{target:?}"
        );
    }
}

#[test]
fn rfc3021_both_ends_of_a_31_are_hosts() {
    let mut vm = test_vm::vm(1);
    vm.prefix_len = 31;
    let request = packet(ArpOperation::Request, GUEST_MAC, GUEST, [10, 0, 2, 14]);
    assert!(handle(&vm, &request).unwrap().reply.is_some());
}

#[test]
fn replies_are_heard_and_not_answered() {
    let reply = packet(ArpOperation::Reply, GUEST_MAC, GUEST, [10, 0, 2, 2]);
    let outcome = handle(&test_vm::vm(1), &reply).unwrap();
    assert_eq!(
        outcome,
        Outcome {
            reply: None,
            guest_mac: Some(GUEST_MAC.0)
        }
    );
}

#[test]
fn malformed_packets_are_counted_as_such() {
    let whole = packet(ArpOperation::Request, GUEST_MAC, GUEST, [10, 0, 2, 2]);
    for len in 0..whole.len() {
        assert_eq!(
            handle(&test_vm::vm(1), &whole[..len]),
            Err(DropReason::Malformed)
        );
    }
    let mut token_ring = whole.clone();
    token_ring[1] = 6;
    assert_eq!(
        handle(&test_vm::vm(1), &token_ring),
        Err(DropReason::Malformed)
    );
}

proptest! {
    #[test]
    fn hostile_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..64), prefix in 0u8..=32) {
        let mut vm = test_vm::vm(1);
        vm.prefix_len = prefix;
        let _ = handle(&vm, &bytes);
        let mut well_formed = bytes;
        well_formed.resize(28, 0);
        well_formed[..6].copy_from_slice(&[0, 1, 8, 0, 6, 4]);
        let _ = handle(&vm, &well_formed);
    }
}
