//! [`Kernel`] of the datapath, implemented by an skb and BPF helpers.
use aya_ebpf::{
    EbpfContext,
    bindings::{
        __sk_buff, BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR, BPF_FIB_LKUP_RET_FWD_DISABLED,
        BPF_FIB_LKUP_RET_NOT_FWDED, TC_ACT_REDIRECT, TC_ACT_SHOT, TC_ACT_UNSPEC,
        bpf_fib_lookup as bpf_fib_lookup_params,
    },
    helpers::{
        bpf_probe_read_kernel,
        generated::{
            bpf_check_mtu, bpf_fib_lookup, bpf_ktime_get_coarse_ns, bpf_ktime_get_ns,
            bpf_l4_csum_replace, bpf_redirect, bpf_redirect_neigh, bpf_skb_change_head,
            bpf_skb_change_tail, bpf_skb_load_bytes, bpf_skb_pull_data,
        },
    },
    programs::TcContext,
};
use slipgate_abi::{
    DropReason, Ip4, Ip6,
    datapath::{
        Kernel, PartialChecksum, Program6, Refused,
        pacer::Onward,
        packet::{ETHERNET_LEN, L4},
        translate::checksum_flags,
    },
    rate::pacing_class,
    segment::Segments,
    skb::SkbLayout,
};

use crate::{drops, lookup::BpfMaps, maps::PROGRAMS6};

/// Offsets in `struct sk_buff`, set by the loader.
#[unsafe(no_mangle)]
static SKB_LAYOUT: SkbLayout = SkbLayout {
    csum_start: 0,
    csum_offset: 0,
    mac_header: 0,
};

/// One frame, as the program's context.
#[derive(Clone, Copy)]
pub(crate) struct Skb(*mut __sk_buff);

impl Skb {
    #[inline(always)]
    pub(crate) fn new(ctx: &TcContext) -> Self {
        Self(ctx.as_ptr().cast())
    }

    /// Context of the program, for the log macros.
    #[cfg(feature = "log")]
    pub(crate) fn context(self) -> TcContext {
        TcContext::new(self.0)
    }

    /// Whether the host would forward a packet of a family by this device; `addresses` fills them in.
    #[inline(always)]
    fn is_forwarded(self, family: u8, addresses: impl FnOnce(&mut bpf_fib_lookup_params)) -> bool {
        // SAFETY: plain data.
        let mut params: bpf_fib_lookup_params = unsafe { core::mem::zeroed() };
        params.family = family;
        params.ifindex = self.ifindex();
        addresses(&mut params);
        let len = size_of::<bpf_fib_lookup_params>() as i32;
        // SAFETY: a live context and a struct of the length said.
        let ret = unsafe { bpf_fib_lookup(self.0.cast(), &raw mut params, len, 0) };
        // Not by a route to somewhere, or not by this device: then it is for the host or for nobody.
        ret != i64::from(BPF_FIB_LKUP_RET_NOT_FWDED)
            && ret != i64::from(BPF_FIB_LKUP_RET_FWD_DISABLED)
    }

    /// Field of the kernel's `struct sk_buff`, to which the context points when the program runs.
    #[inline(always)]
    fn kernel_field<T>(self, offset: u32) -> Result<T, Refused> {
        let field = self.0.cast::<u8>().wrapping_add(offset as usize);
        // SAFETY: the helper survives any address.
        unsafe { bpf_probe_read_kernel(field.cast::<T>()) }.map_err(|_| Refused)
    }
}

/// Reads a field of the context.
macro_rules! field {
    ($skb:ident, $name:ident) => {
        // SAFETY: the context outlives the program's run.
        unsafe { (*$skb.0).$name }
    };
}

// SAFETY: `header` checks the bounds as the verifier demands, which also forgets pointers into a
// frame that may have moved.
unsafe impl Kernel for Skb {
    type End = i32;
    type Maps = BpfMaps;

    #[inline(always)]
    fn maps(self) -> BpfMaps {
        BpfMaps
    }

    #[inline(always)]
    fn frame_len(self) -> u32 {
        field!(self, len)
    }

    #[inline(always)]
    fn gso_size(self) -> u32 {
        field!(self, gso_size)
    }

    #[inline(always)]
    fn ifindex(self) -> u32 {
        field!(self, ifindex)
    }

    #[inline(always)]
    fn is_untagged_by_stack(self) -> bool {
        field!(self, vlan_present) != 0
    }

    #[inline(always)]
    fn is_to_this_host(self) -> bool {
        const PACKET_HOST: u32 = 0;
        field!(self, pkt_type) == PACKET_HOST
    }

    #[inline(always)]
    fn ether_type(self) -> u16 {
        // The word holds a network-order u16.
        u16::from_be(field!(self, protocol) as u16)
    }

    #[inline(always)]
    fn header<T>(self, offset: usize) -> Option<*mut T> {
        // Volatile: a load that the compiler shares between two checks gets a 32-bit move, and the
        // verifier no longer knows it for a packet's bound.
        // SAFETY: as for the fields.
        let (start, end) = unsafe {
            (
                (&raw const (*self.0).data).read_volatile() as usize,
                (&raw const (*self.0).data_end).read_volatile() as usize,
            )
        };
        (start + offset + size_of::<T>() <= end).then_some((start + offset) as *mut T)
    }

    #[inline(always)]
    fn pull(self, len: u32) -> bool {
        // SAFETY: a live context.
        unsafe { bpf_skb_pull_data(self.0, len) == 0 }
    }

    #[inline(always)]
    fn load(self, offset: usize, header: &mut L4) -> bool {
        let (to, len) = ((&raw mut *header).cast(), size_of_val(header) as u32);
        // SAFETY: a live context and room for `len` bytes, any of which are valid.
        unsafe { bpf_skb_load_bytes(self.0.cast(), offset as u32, to, len) == 0 }
    }

    #[inline(always)]
    unsafe fn copy(self, offset: usize, to: *mut u8, len: u32) -> bool {
        // SAFETY: a live context, and room for `len` bytes as the caller promises.
        unsafe { bpf_skb_load_bytes(self.0.cast(), offset as u32, to.cast(), len) == 0 }
    }

    #[inline(always)]
    fn push_ethernet(self) -> Result<(), Refused> {
        // SAFETY: a live context.
        let ret = unsafe { bpf_skb_change_head(self.0, ETHERNET_LEN as u32, 0) };
        if ret == 0 { Ok(()) } else { Err(Refused) }
    }

    #[inline(always)]
    fn grow(self, by: u32) -> bool {
        let len = self.frame_len() + by;
        // SAFETY: a live context.
        let is_grown = unsafe { bpf_skb_change_tail(self.0, len, 0) == 0 };
        is_grown && self.pull(len)
    }

    #[inline(always)]
    fn l4_checksum_replace(
        self,
        offset: usize,
        from: u32,
        to: u32,
        flags: u64,
    ) -> Result<(), Refused> {
        // SAFETY: a live context.
        let ret = unsafe {
            bpf_l4_csum_replace(self.0, offset as u32, u64::from(from), u64::from(to), flags)
        };
        if ret == 0 { Ok(()) } else { Err(Refused) }
    }

    #[inline(always)]
    fn partial_checksum_place(self) -> Result<i32, Refused> {
        // SAFETY: what the loader has set; volatile, for the compiler knows zeroes.
        let layout = unsafe { (&raw const SKB_LAYOUT).read_volatile() };
        let start: u16 = self.kernel_field(layout.csum_start)?;
        let offset: u16 = self.kernel_field(layout.csum_offset)?;
        let frame: u16 = self.kernel_field(layout.mac_header)?;
        Ok(i32::from(start) + i32::from(offset) - i32::from(frame))
    }

    #[inline(always)]
    fn partial_checksum(self) -> Result<Option<PartialChecksum>, Refused> {
        // SAFETY: as above.
        let layout = unsafe { (&raw const SKB_LAYOUT).read_volatile() };
        // `csum_start` and `csum_offset`, side by side. A packet without has zero there, but for a sum
        // of all its bytes, which a TAP's packets have not.
        if self.kernel_field::<u32>(layout.csum_start)? == 0 {
            return Ok(None);
        }
        let start: u16 = self.kernel_field(layout.csum_start)?;
        let offset: u16 = self.kernel_field(layout.csum_offset)?;
        let frame: u16 = self.kernel_field(layout.mac_header)?;
        let start = start.wrapping_sub(frame);
        Ok(Some(PartialChecksum { start, offset }))
    }

    #[inline(always)]
    fn mtu_of(self, ifindex: u32) -> Option<u32> {
        let mut mtu = 0;
        // SAFETY: a live context. The answer is negative only on error; that the frame itself is
        // too big for the device is told by the MTU too.
        let ret = unsafe { bpf_check_mtu(self.0.cast(), ifindex, &raw mut mtu, 0, 0) };
        (ret >= 0).then_some(mtu)
    }

    #[inline(always)]
    fn is_routed_on(self, source: Ip4, destination: Ip4) -> bool {
        const AF_INET: u8 = 2;
        self.is_forwarded(AF_INET, |params| {
            params.__bindgen_anon_3.ipv4_src = source.to_wire();
            params.__bindgen_anon_4.ipv4_dst = destination.to_wire();
        })
    }

    #[inline(always)]
    fn is_routed_on6(self, source: Ip6, destination: Ip6) -> bool {
        const AF_INET6: u8 = 10;
        self.is_forwarded(AF_INET6, |params| {
            params.__bindgen_anon_3.ipv6_src = source.to_words();
            params.__bindgen_anon_4.ipv6_dst = destination.to_words();
        })
    }

    #[inline(always)]
    fn now_ns(self) -> u64 {
        // SAFETY: no arguments.
        unsafe { bpf_ktime_get_ns() }
    }

    #[inline(always)]
    fn coarse_now_ns(self) -> u64 {
        // SAFETY: no arguments.
        unsafe { bpf_ktime_get_coarse_ns() }
    }

    #[inline(always)]
    fn go_on(self, program: Program6) -> Result<i32, Refused> {
        // SAFETY: a live context. Nothing that has a destructor is alive.
        unsafe { PROGRAMS6.tail_call(&TcContext::new(self.0), program as u32) };
        Err(Refused)
    }

    #[inline(always)]
    fn drop_counted(self, row: u32, reason: DropReason, segments: Segments) -> i32 {
        shoot(self, row, reason as u32, segments.packets, segments.bytes)
    }

    #[inline(always)]
    fn discard(self) -> i32 {
        TC_ACT_SHOT as i32
    }

    #[inline(always)]
    fn copied(self) -> i32 {
        // A chain of tcx programs would go on after `TC_ACT_STOLEN`.
        TC_ACT_SHOT as i32
    }

    #[inline(always)]
    fn pass(self) -> i32 {
        TC_ACT_UNSPEC
    }

    #[inline(always)]
    fn redirect(self, ifindex: u32) -> i32 {
        // SAFETY: no pointers.
        (unsafe { bpf_redirect(ifindex, 0) }) as i32
    }

    #[inline(always)]
    fn redirect_by_neighbour(self, ifindex: u32) -> i32 {
        // SAFETY: null parameters of length 0 are allowed: the kernel looks the route up.
        let ret = unsafe { bpf_redirect_neigh(ifindex, core::ptr::null_mut(), 0, 0) };
        debug_assert!(ret == i64::from(TC_ACT_REDIRECT));
        ret as i32
    }

    #[inline(always)]
    fn redirect_paced(self, pacer: u32, row: u32, onward: Onward) -> i32 {
        // SAFETY: fields that a program may write.
        unsafe {
            (*self.0).mark = onward.mark();
            (*self.0).priority = pacing_class(row);
        }
        self.redirect(pacer)
    }

    #[inline(always)]
    fn take_mark(self) -> u32 {
        let mark = field!(self, mark);
        // Rules of the host may go by either.
        // SAFETY: as above.
        unsafe {
            (*self.0).mark = 0;
            (*self.0).priority = 0;
        }
        mark
    }

    #[cfg(feature = "log")]
    #[inline(always)]
    fn log_hand_over(self, row: u32, code: u8, flags: u8) {
        log_hand_over(self, row, code, flags);
    }
}

/// A function of its own, called before the one that hands over: the log's stack does not fit beside
/// both of theirs, 512 bytes in all.
#[cfg(feature = "log")]
#[inline(never)]
fn log_hand_over(skb: Skb, row: u32, code: u8, flags: u8) -> u32 {
    use slipgate_abi::datapath::Kernel;
    aya_log_ebpf::debug!(
        &skb.context(),
        "hand over: ifindex {} vm row {} why {} flags {}",
        skb.ifindex(),
        row,
        code,
        flags
    );
    0
}

const _: () = {
    assert!(checksum_flags::PSEUDO_HDR == BPF_F_PSEUDO_HDR as u64);
    assert!(checksum_flags::MARK_MANGLED_0 == BPF_F_MARK_MANGLED_0 as u64);
};

/// Counts a packet and drops it. Arguments are words, as a BPF function call requires.
#[inline(never)]
fn shoot(skb: Skb, row: u32, reason: u32, packets: u64, bytes: u64) -> i32 {
    #[cfg(feature = "log")]
    {
        use slipgate_abi::datapath::Kernel;
        aya_log_ebpf::debug!(
            &skb.context(),
            "drop: ifindex {} vm row {} reason {} packets {} bytes {}",
            skb.ifindex(),
            row,
            reason,
            packets,
            bytes
        );
    }
    #[cfg(not(feature = "log"))]
    let _ = skb;
    if let Some(&reason) = DropReason::ALL.get(reason as usize) {
        drops::count(row, reason, Segments { packets, bytes });
    }
    TC_ACT_SHOT
}
