//! To the engine: the frame as it came, with a header in place of the MAC addresses.
//!
//! How many frames of a VM may be on their way at once is bounded by credits: the programs count
//! out, the engine counts in. So one VM's flood neither fills the port's queue nor delays the
//! admission of another's flows. What the world sends has credits of its own, so that whoever floods
//! a VM takes none of what the guest sends; and of these first packets to forwards, which anybody may
//! send, have half, so that they take none of what the VM's peers send.
use core::sync::atomic::Ordering::Relaxed;

use slipgate_abi::{
    DropReason, Handover, PortHeader,
    cell::{load32, load64},
    portframe::PortFlags,
    segment::{self, MAX_GSO_FRAME_LEN},
};

use crate::{
    drops, identity,
    maps::vm_row,
    packet::{ETHERNET_LEN, Ethernet, Ipv4, Macs, ether_type},
    skb::{Skb, redirect},
};

/// Hands over a frame of the VM in `row`. `L2` is 0 where the packet has no Ethernet header yet.
#[cold]
#[inline(always)]
pub(crate) fn hand_over<const L2: usize>(skb: Skb, row: u32, why: Handover, flags: u8) -> i32 {
    if L2 == 0 {
        hand_over_packet(skb, row, why as u8, flags)
    } else {
        hand_over_frame(skb, row, why as u8, flags)
    }
}

#[inline(never)]
fn hand_over_frame(skb: Skb, row: u32, code: u8, flags: u8) -> i32 {
    give(skb, row, code, flags)
}

#[inline(never)]
fn hand_over_packet(skb: Skb, row: u32, code: u8, flags: u8) -> i32 {
    if skb.push_ethernet().is_err() {
        return drops::drop_frame::<0>(skb, row, DropReason::KernelRefused);
    }
    give(skb, row, code, flags)
}

#[inline(always)]
fn give(skb: Skb, row: u32, code: u8, flags: u8) -> i32 {
    #[cfg(feature = "log")]
    aya_log_ebpf::debug!(
        &skb.context(),
        "hand over: ifindex {} vm row {} why {} flags {}",
        skb.ifindex(),
        row,
        code,
        flags
    );
    let Some(vm) = vm_row(row) else {
        return drops::drop_frame::<ETHERNET_LEN>(skb, drops::NOBODY, DropReason::StaleVm);
    };
    let mut cost = segment::credits(skb.len() - ETHERNET_LEN as u32, 0, 0);
    if skb.gso_size() != 0 {
        let Some(ip) = skb.pulled_header::<Ipv4>(ETHERNET_LEN) else {
            return drops::drop_frame::<ETHERNET_LEN>(skb, row, DropReason::Malformed);
        };
        // SAFETY: `pulled_header` checked the bounds.
        let [_, protocol] = unsafe { (*ip).ttl_protocol }.to_ne_bytes();
        if skb.len() >= MAX_GSO_FRAME_LEN {
            return drops::drop_frame::<ETHERNET_LEN>(skb, row, DropReason::TooBig);
        }
        cost = segment::credits(skb.len() - ETHERNET_LEN as u32, protocol, skb.gso_size());
    }
    let Some(ethernet) = skb.pulled_header::<Ethernet>(0) else {
        return drops::drop_frame::<ETHERNET_LEN>(skb, row, DropReason::Malformed);
    };
    let from_world = flags & PortFlags::FROM_UPLINK != 0;
    // SAFETY: these fields change only while the row has no TAP; a u32 does not tear.
    let (mut credits, port) = unsafe {
        let vm = vm.as_ptr();
        let credits = if from_world {
            &raw const (*vm).world_credits
        } else {
            &raw const (*vm).credits
        };
        (
            credits.read_volatile(),
            (&raw const (*vm).port_ifindex).read_volatile(),
        )
    };
    if code == Handover::Forward as u8 {
        credits = credits.div_ceil(2);
    }
    let (handed_over, taken_in) = vm.under_way(from_world);
    // What several CPUs find free at once overshoots by a frame each at most. Signed, so that a
    // count that is too high by whatever mistake shuts nobody out.
    let under_way = load64(handed_over).wrapping_sub(load64(taken_in)) as i64;
    if under_way >= i64::from(credits) {
        return drops::drop_frame::<ETHERNET_LEN>(skb, row, DropReason::NoCredit);
    }
    // The kernel would lose it without a trace.
    if port == 0 {
        return drops::drop_frame::<ETHERNET_LEN>(skb, row, DropReason::EngineBusy);
    }
    handed_over.fetch_add(cost, Relaxed);
    let header = PortHeader {
        code,
        flags,
        vm_row: row as u16,
        id: load32(vm.id()),
    };
    // SAFETY: `pulled_header` checked the bounds.
    let ethernet = unsafe { &mut *ethernet };
    if !from_world {
        identity::learn(vm, ethernet.macs);
    }
    // SAFETY: arrays of bytes and of halves of the same length; any bits are valid.
    ethernet.macs = unsafe { core::mem::transmute::<[u8; PortHeader::LEN], Macs>(header.encode()) };
    if from_world {
        ethernet.ether_type = ether_type::IPV4.to_be();
    }
    redirect(port)
}
