//! The programs' decisions on a frame in memory: [`slipgate_abi::datapath`] without a kernel.
//!
//! The user-mode engine runs them on each frame of its guest, over tables in memory that it shares
//! with nobody ([`crate::userspace_port`]); the engine's tests run them over `crate::fake`. So in
//! every mode the same functions look flows up, translate, count and drop.
#![expect(
    unsafe_code,
    reason = "the programs access headers by pointers into the frame, as in the kernel"
)]
use std::{cell::Cell, marker::PhantomData};

use slipgate_abi::{
    DropReason, Ip4, Ip6, checksum,
    datapath::{
        self, Maps, PartialChecksum, Program6, Refused, pacer::Onward, packet::L4,
        translate::checksum_flags,
    },
    segment::Segments,
};

use crate::port::{ETHERNET_LEN, VirtioNetHdr};

/// Surroundings of a program's run: the maps, the clocks, and the state of devices.
pub trait Environment: Copy {
    /// Access to the maps.
    type Maps: Maps;

    /// Handle to the maps.
    fn maps(self) -> Self::Maps;
    /// MTU of a device, bytes.
    fn mtu_of(self, ifindex: u32) -> Option<u32>;
    /// Whether the host would route a packet to this destination on to another host.
    fn is_routed_on(self, destination: Ip4) -> bool;
    /// As [`Environment::is_routed_on`], for IPv6.
    fn is_routed_on6(self, destination: Ip6) -> bool;
    /// Returns the present time, ns.
    fn now_ns(self) -> u64;
    /// Counts a packet that is dropped, in a VM's row or in that of none.
    fn count_drop(self, row: u32, reason: DropReason, segments: Segments);
}

/// Outcome of a program's run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// It was dropped and counted under this reason.
    Dropped(DropReason),
    /// Dropped without a count: the engine handles the packet itself.
    Discarded,
    /// Freed: the engine has a copy.
    Copied,
    /// Left to the host.
    Passed,
    /// Sent out of the device with this ifindex.
    Redirected(u32),
}

/// A frame under way, in a buffer with room before it for an Ethernet header.
#[derive(Debug)]
pub struct Frame<'b> {
    buffer: *mut u8,
    start: Cell<usize>,
    /// Where what is here of it ends in the buffer, and its bytes behind that, which are elsewhere.
    end: usize,
    rest_len: usize,
    /// Offload header of the frame.
    pub vnet: VirtioNetHdr,
    /// Ifindex of the device on which the frame arrived.
    pub ifindex: u32,
    /// EtherType of the frame, host order.
    pub ether_type: u16,
    /// Whether it was sent to the device's own L2 address.
    pub is_to_this_host: bool,
    /// Whether the stack removed a tag from it.
    pub is_untagged_by_stack: bool,
    borrowed: PhantomData<&'b mut [u8]>,
}

impl<'b> Frame<'b> {
    /// A frame that begins `start` bytes into `buffer`, with whatever L2 header it has.
    ///
    /// # Panics
    /// `start` is behind the buffer's end, or the frame would begin at an odd address: both are the
    /// caller's layout, not the frame's contents.
    pub fn new(
        vnet: VirtioNetHdr,
        ifindex: u32,
        ether_type: u16,
        buffer: &'b mut [u8],
        start: usize,
    ) -> Self {
        assert!(start <= buffer.len());
        // The programs read headers at two-byte alignment.
        assert!((buffer.as_ptr() as usize + start).is_multiple_of(2));
        Self {
            end: buffer.len(),
            rest_len: 0,
            buffer: buffer.as_mut_ptr(),
            start: Cell::new(start),
            vnet,
            ifindex,
            ether_type,
            is_to_this_host: true,
            is_untagged_by_stack: false,
            borrowed: PhantomData,
        }
    }

    /// The frame has so many bytes more, which are not in its buffer: of a packet whose headers are.
    pub fn with_rest(self, rest_len: usize) -> Self {
        Self { rest_len, ..self }
    }

    /// Returns where the frame begins in its buffer now.
    pub fn start(&self) -> usize {
        self.start.get()
    }

    /// Bytes of the frame in its buffer.
    fn len_here(&self) -> usize {
        self.end - self.start.get()
    }

    fn at(&self, offset: usize) -> *mut u8 {
        self.buffer.wrapping_add(self.start.get() + offset)
    }
}

/// A program's run on a frame.
#[derive(Clone, Copy, Debug)]
pub struct Run<'f, E> {
    environment: E,
    frame: &'f Frame<'f>,
}

impl<'f, E: Environment> Run<'f, E> {
    /// A run on this frame.
    pub fn new(environment: E, frame: &'f Frame<'f>) -> Self {
        Self { environment, frame }
    }
}

// SAFETY: `header` checks the bounds, and the frame begins at an even address; it moves by
// `push_ethernet` only, by an even length within its buffer, which it borrows for as long as it
// lives.
unsafe impl<E: Environment> datapath::Kernel for Run<'_, E> {
    type End = End;
    type Maps = E::Maps;

    fn maps(self) -> E::Maps {
        self.environment.maps()
    }

    fn frame_len(self) -> u32 {
        (self.frame.len_here() + self.frame.rest_len) as u32
    }

    fn gso_size(self) -> u32 {
        match self.frame.vnet.gso_type {
            VirtioNetHdr::GSO_NONE => 0,
            _ => self.frame.vnet.gso_size.into(),
        }
    }

    fn ifindex(self) -> u32 {
        self.frame.ifindex
    }

    /// Packets that sockets received have no device.
    fn arrived_by(self, uplink: u32) -> bool {
        [0, uplink].contains(&self.frame.ifindex)
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
        let end = offset.checked_add(size_of::<T>())?;
        (end <= self.frame.len_here()).then(|| self.frame.at(offset).cast())
    }

    /// Returns whether the frame has `len` bytes. Its headers are linear, so nothing has to be pulled.
    fn pull(self, len: u32) -> bool {
        len as usize <= self.frame.len_here()
    }

    fn load(self, offset: usize, header: &mut L4) -> bool {
        let from = self.header::<L4>(offset);
        if let Some(from) = from {
            // SAFETY: in bounds; any bytes are a header.
            *header = unsafe { from.read_unaligned() };
        }
        from.is_some()
    }

    unsafe fn copy(self, offset: usize, to: *mut u8, len: u32) -> bool {
        let end = offset.checked_add(len as usize);
        let is_there = end.is_some_and(|end| end <= self.frame.len_here());
        if is_there {
            // SAFETY: in bounds; room for `len` bytes as the caller promises.
            unsafe { to.copy_from_nonoverlapping(self.frame.at(offset), len as usize) };
        }
        is_there
    }

    fn push_ethernet(self) -> Result<(), Refused> {
        let start = &self.frame.start;
        start.set(start.get().checked_sub(ETHERNET_LEN).ok_or(Refused)?);
        Ok(())
    }

    /// No link here has neighbours that are answered.
    fn grow(self, _by: u32) -> bool {
        false
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
        const LENGTH: u64 = 0xf;
        let field = self.header::<u16>(offset).ok_or(Refused)?;
        // SAFETY: in bounds.
        let sum = unsafe { field.read_unaligned() };
        let may_be_absent = flags & checksum_flags::MARK_MANGLED_0 != 0;
        if may_be_absent && sum == 0 {
            return Ok(());
        }
        // Without a length, the new word is a difference.
        let from = if flags & LENGTH == 0 { u32::MAX } else { from };
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

    fn partial_checksum(self) -> Result<Option<PartialChecksum>, Refused> {
        let vnet = self.frame.vnet;
        Ok(vnet.needs_csum().then_some(PartialChecksum {
            start: vnet.csum_start,
            offset: vnet.csum_offset,
        }))
    }

    fn mtu_of(self, ifindex: u32) -> Option<u32> {
        self.environment.mtu_of(ifindex)
    }

    fn is_routed_on(self, _source: Ip4, destination: Ip4) -> bool {
        self.environment.is_routed_on(destination)
    }

    fn is_routed_on6(self, _source: Ip6, destination: Ip6) -> bool {
        self.environment.is_routed_on6(destination)
    }

    fn now_ns(self) -> u64 {
        self.environment.now_ns()
    }

    fn coarse_now_ns(self) -> u64 {
        self.environment.now_ns()
    }

    fn go_on(self, program: Program6) -> Result<End, Refused> {
        Ok(program.run(self))
    }

    fn drop_counted(self, row: u32, reason: DropReason, segments: Segments) -> End {
        self.environment.count_drop(row, reason, segments);
        End::Dropped(reason)
    }

    fn discard(self) -> End {
        End::Discarded
    }

    fn copied(self) -> End {
        End::Copied
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

    /// There is no queue here, and no table names a pacer.
    fn redirect_paced(self, _pacer: u32, _row: u32, onward: Onward) -> End {
        End::Redirected(onward.ifindex)
    }

    fn take_mark(self) -> u32 {
        0
    }
}
