//! Hand-over of a frame to the engine: unchanged, except for a header in place of the MAC
//! addresses.
//!
//! Credits bound the number of a VM's frames that are queued at once: the programs count frames
//! handed over, the engine counts frames received. So one VM's flood neither fills the port's queue
//! nor delays the admission of another's flows. Each VM has a share of the queue, and more of what
//! the others leave ([`crate::maps::Owner`]). Frames from the world have credits of their own, so
//! that a flood of a VM takes none from the guest. First packets to forwards, which any host may
//! send, and fragments of such, may use half of those, so that they leave the rest to the VM's peers.
//!
//! A guest's short first packets take the ring of first packets where they can
//! ([`crate::first_packet`]). They need the same credits.
use core::sync::atomic::Ordering::Relaxed;

use super::{
    Kernel, Maps as _, drops,
    family::Family,
    first_packets::{self, Queued},
    identity,
    packet::{ETHERNET_LEN, Ethernet, Macs},
};
use crate::{
    DropReason, Handover, PortHeader,
    cell::{load32, load64},
    portframe::{PortFlags, link},
    segment::MAX_GSO_FRAME_LEN,
};

/// Hands a frame of the VM in `row`, of family `F` or no IP, to the engine. `L2` is the length of its L2 header, 0 if the
/// packet has none.
#[cold]
#[inline(always)]
pub fn hand_over<F: Family, K: Kernel, const L2: usize>(
    kernel: K,
    row: u32,
    why: Handover,
    flags: u8,
) -> K::End {
    kernel.log_hand_over(row, why as u8, flags);
    if L2 == 0 {
        hand_over_packet::<F, K>(kernel, row, why as u8, flags)
    } else {
        hand_over_frame::<F, K>(kernel, row, why as u8, flags)
    }
}

#[inline(never)]
fn hand_over_frame<F: Family, K: Kernel>(kernel: K, row: u32, code: u8, flags: u8) -> K::End {
    give::<F, K>(kernel, row, code, flags)
}

#[inline(never)]
fn hand_over_packet<F: Family, K: Kernel>(kernel: K, row: u32, code: u8, flags: u8) -> K::End {
    if kernel.push_ethernet().is_err() {
        return drops::drop_frame::<K, 0>(kernel, row, DropReason::KernelRefused);
    }
    give::<F, K>(kernel, row, code, flags)
}

#[inline(always)]
fn give<F: Family, K: Kernel>(kernel: K, row: u32, code: u8, flags: u8) -> K::End {
    let Some(vm) = kernel.maps().vm_row(row) else {
        return drops::drop_frame::<K, ETHERNET_LEN>(kernel, drops::NOBODY, DropReason::StaleVm);
    };
    let mut cost = F::credits(kernel.frame_len() - ETHERNET_LEN as u32, 0, 0);
    if kernel.gso_size() != 0 {
        let Some(protocol) = F::protocol_of(kernel) else {
            return drops::drop_frame::<K, ETHERNET_LEN>(kernel, row, DropReason::Malformed);
        };
        if kernel.frame_len() >= MAX_GSO_FRAME_LEN {
            return drops::drop_frame::<K, ETHERNET_LEN>(kernel, row, DropReason::TooBig);
        }
        cost = F::credits(
            kernel.frame_len() - ETHERNET_LEN as u32,
            protocol,
            kernel.gso_size(),
        );
    }
    let Some(ethernet) = kernel.pulled_header::<Ethernet>(0) else {
        return drops::drop_frame::<K, ETHERNET_LEN>(kernel, row, DropReason::Malformed);
    };
    let from_world = flags & PortFlags::FROM_UPLINK != 0;
    // SAFETY: these fields change only while the row has no TAP; a u32 does not tear.
    let (mut credits, port, owner_row) = unsafe {
        let vm = vm.as_ptr();
        let credits = if from_world {
            &raw const (*vm).world_credits
        } else {
            &raw const (*vm).credits
        };
        (
            credits.read_volatile(),
            (&raw const (*vm).port_ifindex).read_volatile(),
            (&raw const (*vm).owner).read_volatile(),
        )
    };
    let Some(owner) = kernel.maps().owner(owner_row) else {
        return drops::drop_frame::<K, ETHERNET_LEN>(kernel, row, DropReason::StaleVm);
    };
    let mut share = load32(owner.share());
    if code == Handover::Forward as u8 || flags & PortFlags::STRANGER != 0 {
        credits = credits.div_ceil(2);
        share = share.div_ceil(2);
    }
    let (handed_over, taken_in) = vm.under_way(from_world);
    // What several CPUs find free at once overshoots by a frame each at most. Signed, so that a
    // count that is too high by whatever mistake shuts nobody out.
    let under_way = load64(handed_over).wrapping_sub(load64(taken_in)) as i64;
    let (all_handed_over, all_taken_in) = owner.under_way(from_world);
    let has_room = under_way < i64::from(share) || {
        let all = load64(all_handed_over).wrapping_sub(load64(all_taken_in)) as i64;
        all < i64::from(load32(owner.common()))
    };
    if under_way >= i64::from(credits) || !has_room {
        return drops::drop_frame::<K, ETHERNET_LEN>(kernel, row, DropReason::NoCredit);
    }
    // The kernel would lose it without a trace.
    if port == 0 {
        return drops::drop_frame::<K, ETHERNET_LEN>(kernel, row, DropReason::EngineBusy);
    }
    handed_over.fetch_add(cost, Relaxed);
    all_handed_over.fetch_add(cost, Relaxed);
    let mut header = PortHeader {
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
    if code == Handover::Miss as u8 && !from_world {
        match first_packets::queue::<F, K>(kernel, owner, owner_row, header) {
            Queued::Yes => return kernel.copied(),
            Queued::Asleep => header.flags |= PortFlags::WAKE,
            Queued::No => {
                owner.port_handed().fetch_add(1, Relaxed);
            }
        }
    }
    // SAFETY: arrays of bytes and of halves of the same length; any bits are valid.
    ethernet.macs = unsafe { core::mem::transmute::<[u8; PortHeader::LEN], Macs>(header.encode()) };
    if from_world {
        let ether_type = if code == Handover::Fragment as u8 {
            link(kernel.ifindex())
        } else {
            F::ETHER_TYPE
        };
        ethernet.ether_type = ether_type.to_be();
    }
    kernel.redirect(port)
}
