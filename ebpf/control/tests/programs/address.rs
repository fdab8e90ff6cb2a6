//! ARP from a guest.
use std::net::Ipv4Addr;

use slipgate_abi::{DropReason, Handover, portframe::PortFlags, vm::VmFlags};

use crate::{datapath::*, frame::*, loaded};

const EGRESS: &str = "guest_egress";

#[test]
fn arp_for_the_gateway_is_answered_in_place() {
    for sender in [GUEST, Ipv4Addr::UNSPECIFIED] {
        let datapath = loaded!();
        datapath.vms.change(ROW, |vm| vm.credits = 0);
        let run = datapath.run(EGRESS, &arp(1, sender, GATEWAY));
        assert_eq!(run.action, REDIRECT);
        let mut expected = Vec::from(GUEST_MAC);
        expected.extend(GATEWAY_MAC);
        expected.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 2]);
        expected.extend(GATEWAY_MAC);
        expected.extend(GATEWAY.octets());
        expected.extend(GUEST_MAC);
        expected.extend(sender.octets());
        assert_eq!(run.frame, expected);
        assert_eq!(datapath.vms.get(ROW).arp_answered, 1);
        assert_eq!(datapath.tally(), 1);
    }
}

#[test]
fn other_arp_goes_to_the_engine_or_is_dropped() {
    let other = Ipv4Addr::new(10, 0, 2, 3);
    for frame in [
        arp(1, GUEST, other),
        arp(2, GUEST, GATEWAY),
        arp(1, GUEST, GUEST),
    ] {
        let datapath = loaded!();
        datapath.expect_handover(EGRESS, &frame, Handover::Arp, PortFlags::GROUP);
    }
    let datapath = loaded!();
    datapath.expect_drop(EGRESS, &arp(1, other, GATEWAY), ROW, DropReason::Spoofed);
    for (at, reason) in [
        (15, DropReason::Malformed),
        (16, DropReason::Malformed),
        (18, DropReason::Malformed),
    ] {
        let datapath = loaded!();
        let mut frame = arp(1, GUEST, GATEWAY);
        frame[at] ^= 1;
        datapath.expect_drop(EGRESS, &frame, ROW, reason);
    }
    let datapath = loaded!();
    let short = &arp(1, GUEST, GATEWAY)[..41];
    datapath.expect_drop(EGRESS, short, ROW, DropReason::Malformed);
    // A sender MAC that is not the guest's would poison a cache.
    let datapath = loaded!();
    datapath.vms.change(ROW, |vm| vm.flags = VmFlags::CHECK_MAC);
    let mut frame = arp(1, GUEST, GATEWAY);
    frame[22] ^= 1;
    datapath.expect_drop(EGRESS, &frame, ROW, DropReason::Spoofed);
}
