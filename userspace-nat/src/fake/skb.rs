//! [`Kernel`](slipgate_abi::datapath::Kernel) in memory: a frame, the tables, and the helpers.
use std::cell::Cell;

use slipgate_abi::{
    DropReason, FlowRef, ForwardKey, ForwardTarget, Ip4, NextHopRef, OwnerRef, SequencesRef,
    SlotIndex, SlotRef, TapEntry, Tuple, VmRef, checksum,
    datapath::{
        self, Refused,
        fragment_table::{Fragment, PLACES},
        packet::L4,
        translate::checksum_flags,
    },
    maps::{MAX_NEXT_HOPS, MAX_OWNERS, MAX_VMS},
    rate::RateRef,
    segment::Segments,
};

use super::{Kernel, Shared};
use crate::port::{ETHERNET_LEN, VirtioNetHdr};

/// A frame under way. Aligned to two bytes at least, as the kernel's are.
#[derive(Debug)]
pub(super) struct Frame {
    buffer: Shared<u64>,
    start: Cell<usize>,
    end: usize,
    /// Offload header of the frame.
    pub(super) vnet: VirtioNetHdr,
    /// Ifindex of the device on which the frame arrived.
    pub(super) ifindex: u32,
    /// EtherType of the frame, host order.
    pub(super) ether_type: u16,
    /// Whether it was sent to the device's own L2 address.
    pub(super) is_to_this_host: bool,
    /// Whether the stack removed a tag from it.
    pub(super) is_untagged_by_stack: bool,
}

impl Frame {
    /// Room before a frame for an Ethernet header; keeps what begins there aligned.
    const HEADROOM: usize = 16;

    /// A frame, from whatever L2 header it has on.
    pub(super) fn new(vnet: VirtioNetHdr, ifindex: u32, ether_type: u16, bytes: &[u8]) -> Self {
        let end = Self::HEADROOM + bytes.len();
        let buffer = Shared::<u64>::zeroed(end.div_ceil(8));
        let frame = Self {
            buffer,
            start: Cell::new(Self::HEADROOM),
            end,
            vnet,
            ifindex,
            ether_type,
            is_to_this_host: true,
            is_untagged_by_stack: false,
        };
        // SAFETY: room for so many bytes behind the headroom; nobody else has the buffer.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), frame.at(0), bytes.len()) };
        frame
    }

    /// Returns the present bytes of the frame.
    pub(super) fn bytes(&self) -> Vec<u8> {
        // SAFETY: initialised, in bounds; pointers into it are used while a program runs only.
        unsafe { std::slice::from_raw_parts(self.at(0), self.len()) }.to_vec()
    }

    fn len(&self) -> usize {
        self.end - self.start.get()
    }

    fn at(&self, offset: usize) -> *mut u8 {
        let bytes = self.buffer.at(0).cast::<u8>();
        bytes.wrapping_add(self.start.get() + offset)
    }

    fn gso_size(&self) -> u32 {
        match self.vnet.gso_type {
            VirtioNetHdr::GSO_NONE => 0,
            _ => self.vnet.gso_size.into(),
        }
    }
}

/// Outcome of a program's run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum End {
    Dropped(DropReason),
    Discarded,
    Passed,
    Redirected(u32),
}

/// A program's run on a frame.
#[derive(Clone, Copy)]
pub(super) struct Run<'k> {
    pub(super) kernel: &'k Kernel,
    pub(super) frame: &'k Frame,
}

// SAFETY: references point into allocations that live as long as the kernel.
unsafe impl datapath::Maps for &Kernel {
    fn tap(self, ifindex: u32) -> Option<TapEntry> {
        self.taps.get(&ifindex).copied()
    }

    fn vm_row(self, row: u32) -> Option<VmRef> {
        (row < MAX_VMS).then(|| Kernel::vm(self, row as u16))
    }

    fn owner(self, row: u32) -> Option<OwnerRef> {
        (row < MAX_OWNERS).then(|| Kernel::owner_row(self, row))
    }

    fn rates(self, row: u32) -> Option<RateRef> {
        (row < MAX_VMS).then(|| Kernel::rates(self, row as u16))
    }

    fn flow(self, tuple: &Tuple) -> Option<FlowRef> {
        self.flows.get(tuple).copied()
    }

    fn insert_flow(self, tuple: &Tuple, flow: FlowRef) -> bool {
        let mut ordered = self.ordered.borrow_mut();
        let fails = self.faults.order_fails.get();
        self.faults.order_fails.set(fails.saturating_sub(1));
        let capacity = self.faults.map_capacity;
        let is_full = capacity != 0 && self.flows.len() + ordered.len() >= capacity;
        let is_taken = self.flows.contains_key(tuple) || ordered.iter().any(|(t, _)| t == tuple);
        if fails > 0 || is_full || is_taken {
            return false;
        }
        let world = self.slot(flow.index()).world_tuple();
        assert!(
            tuple.scope == Tuple::WORLD || ordered.contains(&(world, flow)),
            "the guest's packets would go out before the answers are known: the host would reset them"
        );
        ordered.push((*tuple, flow));
        true
    }

    fn delete_flow(self, tuple: &Tuple) {
        self.ordered.borrow_mut().retain(|(t, _)| t != tuple);
    }

    fn slot(self, index: u32) -> Option<SlotRef> {
        ((index as usize) < self.slots.len()).then(|| Kernel::slot(self, SlotIndex::new(index)))
    }

    fn sequences(self, slot: u32) -> Option<SequencesRef> {
        ((slot as usize) < self.sequences.len())
            .then(|| Kernel::sequences(self, SlotIndex::new(slot)))
    }

    fn next_hop(self, index: u32) -> Option<NextHopRef> {
        // SAFETY: in bounds; the allocation lives as long as the kernel.
        (index < MAX_NEXT_HOPS)
            .then(|| unsafe { NextHopRef::new(self.next_hops.at(index as usize)) })
    }

    fn forward(self, key: &ForwardKey) -> Option<ForwardTarget> {
        let (row, id) = *self.forwards.get(&(key.host, key.port, key.protocol))?;
        Some(ForwardTarget {
            vm: id,
            vm_row: row.into(),
            guest_port: 0,
            pad: [0; 6],
        })
    }

    fn fragment(self, place: u32) -> Option<*mut Fragment> {
        ((place as usize) < PLACES).then(|| self.fragments.at(place as usize))
    }
}

// SAFETY: `header` checks the bounds; frames move by `push_ethernet` only, within their buffer.
unsafe impl<'k> datapath::Kernel for Run<'k> {
    type End = End;
    type Maps = &'k Kernel;

    fn maps(self) -> &'k Kernel {
        self.kernel
    }

    fn frame_len(self) -> u32 {
        self.frame.len() as u32
    }

    fn gso_size(self) -> u32 {
        self.frame.gso_size()
    }

    fn ifindex(self) -> u32 {
        self.frame.ifindex
    }

    fn is_untagged_by_stack(self) -> bool {
        self.frame.is_untagged_by_stack
    }

    fn is_to_this_host(self) -> bool {
        self.frame.is_to_this_host
    }

    fn ether_type(self) -> u16 {
        self.frame.ether_type
    }

    fn header<T>(self, offset: usize) -> Option<*mut T> {
        (offset + size_of::<T>() <= self.frame.len()).then(|| self.frame.at(offset).cast())
    }

    /// Returns whether the frame has `len` bytes. The whole frame is linear, so nothing has to be
    /// pulled.
    fn pull(self, len: u32) -> bool {
        len as usize <= self.frame.len()
    }

    fn load(self, offset: usize, header: &mut L4) -> bool {
        let from = self.header::<L4>(offset);
        if let Some(from) = from {
            // SAFETY: in bounds; any bytes are a header.
            *header = unsafe { from.read_unaligned() };
        }
        from.is_some()
    }

    fn push_ethernet(self) -> Result<(), Refused> {
        let start = &self.frame.start;
        start.set(start.get().checked_sub(ETHERNET_LEN).ok_or(Refused)?);
        Ok(())
    }

    /// Implements `bpf_l4_csum_replace` (net/core/filter.c, net/core/utils.c).
    fn l4_checksum_replace(
        self,
        offset: usize,
        from: u32,
        to: u32,
        flags: u64,
    ) -> Result<(), Refused> {
        const MANGLED_0: u16 = 0xffff;
        let field = self.header::<u16>(offset).ok_or(Refused)?;
        // SAFETY: in bounds.
        let sum = unsafe { field.read_unaligned() };
        let may_be_absent = flags & checksum_flags::MARK_MANGLED_0 != 0;
        if may_be_absent && sum == 0 {
            return Ok(());
        }
        let mut new = if !self.frame.vnet.needs_csum() {
            checksum::update32(sum, from, to)
        } else if flags & checksum_flags::PSEUDO_HDR != 0 {
            // The field holds the pseudo-header's sum itself, not its complement.
            !checksum::update32(!sum, from, to)
        } else {
            sum
        };
        if may_be_absent && new == 0 {
            new = MANGLED_0;
        }
        // SAFETY: as above.
        unsafe { field.write_unaligned(new) };
        Ok(())
    }

    fn partial_checksum_place(self) -> Result<i32, Refused> {
        let vnet = self.frame.vnet;
        Ok(i32::from(vnet.csum_start) + i32::from(vnet.csum_offset))
    }

    fn mtu_of(self, _ifindex: u32) -> Option<u32> {
        Some(self.kernel.device_mtu)
    }

    fn is_routed_on(self, _source: Ip4, destination: Ip4) -> bool {
        self.kernel.routed_on.contains(&destination)
    }

    fn now_ns(self) -> u64 {
        self.kernel.now_ns
    }

    fn coarse_now_ns(self) -> u64 {
        self.kernel.now_ns
    }

    fn drop_counted(self, row: u32, reason: DropReason, segments: Segments) -> End {
        if row < MAX_VMS {
            self.kernel.stats(row as u16).dropped(reason, segments);
        }
        End::Dropped(reason)
    }

    fn discard(self) -> End {
        End::Discarded
    }

    fn pass(self) -> End {
        End::Passed
    }

    fn redirect(self, ifindex: u32) -> End {
        End::Redirected(ifindex)
    }

    fn redirect_by_neighbour(self, ifindex: u32) -> End {
        End::Redirected(ifindex)
    }
}
