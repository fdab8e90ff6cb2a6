//! ARP from a guest (RFC 826). Requests for the gateway are answered here, so that a guest keeps
//! its neighbour entry while the engine is down or busy. Other ARP frames go to the engine.
use core::sync::atomic::Ordering::Relaxed;

use super::{
    Kernel,
    drops::drop_frame,
    handover::hand_over,
    identity,
    ipv4::V4,
    packet::{ETHERNET_LEN, Ethernet, PADDED_LEN},
};
use crate::{DropReason, Handover, Ip4, VmRef, cell::load32, vm::VmFlags};

const REQUEST: u16 = 1;
const REPLY: u16 = 2;

/// ARP packet for IPv4 over Ethernet, with the Ethernet header before it.
#[repr(C, packed(2))]
struct Arp {
    ethernet: Ethernet,
    hardware: u16,
    protocol: u16,
    lengths: [u8; 2],
    operation: u16,
    sender_mac: [u16; 3],
    sender: u32,
    target_mac: [u16; 3],
    target: u32,
}

/// Processes an ARP frame of the VM in `row`.
#[inline(always)]
pub(super) fn run<K: Kernel>(kernel: K, row: u32, vm: VmRef, flags: u8) -> K::End {
    let Some(arp) = kernel.pulled_header::<Arp>(0) else {
        return drop_frame::<K, ETHERNET_LEN>(kernel, row, DropReason::Malformed);
    };
    // SAFETY: `pulled_header` checked the bounds.
    let arp = unsafe { &mut *arp };
    if arp.hardware != u16::to_be(1) || arp.protocol != u16::to_be(0x0800) || arp.lengths != [6, 4]
    {
        return drop_frame::<K, ETHERNET_LEN>(kernel, row, DropReason::Malformed);
    }
    let (guest, gateway, _) = identity::network(vm);
    let macs = identity::guest_macs(vm);
    let sender = Ip4::from_wire(arp.sender);
    let wrong_mac = load32(vm.flags()) & VmFlags::CHECK_MAC != 0
        && arp.sender_mac != [macs[0], macs[1], macs[2]];
    // A probe (RFC 5227) has no sender address yet.
    if wrong_mac || (sender != guest && sender != Ip4::UNSPECIFIED) {
        return drop_frame::<K, ETHERNET_LEN>(kernel, row, DropReason::Spoofed);
    }
    identity::learn(vm, arp.ethernet.macs);
    if arp.operation != u16::to_be(REQUEST) || Ip4::from_wire(arp.target) != gateway {
        return hand_over::<V4, K, ETHERNET_LEN>(kernel, row, Handover::Arp, flags);
    }
    // A longer one would come back as long, past the guest's rates.
    if kernel.frame_len() > PADDED_LEN {
        return drop_frame::<K, ETHERNET_LEN>(kernel, row, DropReason::Malformed);
    }
    let asker = arp.ethernet.macs;
    let ours = [macs[3], macs[4], macs[5]];
    arp.ethernet.macs = [asker[3], asker[4], asker[5], ours[0], ours[1], ours[2]];
    arp.operation = u16::to_be(REPLY);
    arp.target_mac = arp.sender_mac;
    arp.target = arp.sender;
    arp.sender_mac = ours;
    arp.sender = gateway.to_wire();
    vm.arp_answered().fetch_add(1, Relaxed);
    kernel.redirect(kernel.ifindex())
}
