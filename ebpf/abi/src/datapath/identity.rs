//! Addresses of a VM, from its row. They are constant while its TAP is attached, except a MAC that
//! is learned.
use super::packet::Macs;
use crate::{Ip4, Vm, VmRef, cell::load32, vm::VmFlags};

/// The guest's and the gateway's MAC, in the order of a frame to the guest.
#[inline(always)]
pub fn guest_macs(vm: VmRef) -> Macs {
    // SAFETY: a live row; the two arrays lie side by side, 2-aligned (asserted below).
    unsafe { (&raw const (*vm.as_ptr()).guest_mac).cast::<Macs>().read() }
}

const _: () = {
    use core::mem::offset_of;
    assert!(offset_of!(Vm, gateway_mac) == offset_of!(Vm, guest_mac) + 6);
    assert!(offset_of!(Vm, guest_mac) % 2 == 0);
    assert!(offset_of!(Vm, foreign_mac) % 2 == 0);
};

/// Whether a frame with these addresses has the guest's MAC as source.
#[inline(always)]
pub fn sent_by(vm: VmRef, macs: Macs) -> bool {
    let ours = guest_macs(vm);
    macs[3] == ours[0] && macs[4] == ours[1] && macs[5] == ours[2]
}

/// Whether a frame must be dropped because its source is not the configured MAC. The source is noted
/// in the row, so that the operator can be told.
#[inline(always)]
pub fn is_foreign(vm: VmRef, flags: u32, macs: Macs) -> bool {
    if flags & VmFlags::CHECK_MAC == 0 || sent_by(vm, macs) {
        return false;
    }
    // SAFETY: a live row; the field is 2-aligned (asserted above).
    unsafe {
        let mac = (&raw mut (*vm.as_ptr()).foreign_mac).cast::<[u16; 3]>();
        mac.write([macs[3], macs[4], macs[5]]);
    }
    true
}

/// Learns the guest's MAC from a frame it sent, if none was configured: a guest may have another
/// MAC after each start. This is done on ARP, by which a guest announces itself, and on packets
/// that go to the engine (a flow's first packets), never on the fast path. Meanwhile a frame may be
/// sent to a mix of two MACs of the same guest, which is no worse than the old one.
#[inline(always)]
pub fn learn(vm: VmRef, macs: Macs) {
    let is_group = macs[3].to_ne_bytes()[0] & 1 != 0;
    if is_group || load32(vm.flags()) & VmFlags::CHECK_MAC != 0 || sent_by(vm, macs) {
        return;
    }
    // SAFETY: a live row; the field is 2-aligned (asserted above).
    unsafe {
        let mac = (&raw mut (*vm.as_ptr()).guest_mac).cast::<[u16; 3]>();
        mac.write([macs[3], macs[4], macs[5]]);
    }
}

/// The guest's address, the gateway's address and the prefix length of their network.
#[inline(always)]
pub fn network(vm: VmRef) -> (Ip4, Ip4, u32) {
    let row = vm.as_ptr();
    // SAFETY: a live row whose identity is constant while its TAP is attached.
    unsafe { ((*row).guest, (*row).gateway, (*row).prefix_len) }
}

/// Whether two addresses share a prefix of this length.
#[inline(always)]
pub fn same_network(a: Ip4, b: Ip4, prefix_len: u32) -> bool {
    let differ = u32::from_be(a.to_wire() ^ b.to_wire());
    match prefix_len {
        0 => true,
        1..=31 => differ >> (32 - prefix_len) == 0,
        _ => differ == 0,
    }
}
