//! A frame as the kernel gives it: context fields, bounds-checked headers, the helpers in use.
use aya_ebpf::{
    EbpfContext,
    bindings::{
        __sk_buff, BPF_FIB_LKUP_RET_FWD_DISABLED, BPF_FIB_LKUP_RET_NOT_FWDED, TC_ACT_REDIRECT,
        bpf_fib_lookup as bpf_fib_lookup_params,
    },
    helpers::bpf_probe_read_kernel,
    helpers::generated::{
        bpf_check_mtu, bpf_fib_lookup, bpf_l4_csum_replace, bpf_redirect, bpf_redirect_neigh,
        bpf_skb_change_head, bpf_skb_load_bytes, bpf_skb_pull_data,
    },
    programs::TcContext,
};
use slipgate_abi::{
    Ip4,
    segment::{self, Segments},
    skb::SkbLayout,
};

/// Length of an Ethernet header without tags.
pub(crate) const ETHERNET_LEN: usize = 14;

/// The first half of a TCP, the whole of a UDP header, or an ICMP echo's.
#[repr(C, packed(2))]
#[derive(Clone, Copy)]
pub(crate) struct L4 {
    /// Source and destination port; ICMP: type with code, checksum.
    pub(crate) ports: [u16; 2],
    /// TCP: sequence number; UDP: length, checksum; ICMP: id, sequence number.
    pub(crate) rest: [u16; 2],
}

/// Set by the loader.
#[unsafe(no_mangle)]
static SKB_LAYOUT: SkbLayout = SkbLayout {
    csum_start: 0,
    csum_offset: 0,
    mac_header: 0,
};

/// The kernel refused.
pub(crate) struct Refused;

/// A frame.
#[derive(Clone, Copy)]
pub(crate) struct Skb(*mut __sk_buff);

macro_rules! field {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[inline(always)]
        pub(crate) fn $name(self) -> u32 {
            // SAFETY: the context outlives the program's run.
            unsafe { (*self.0).$name }
        }
    };
}

impl Skb {
    #[inline(always)]
    pub(crate) fn new(ctx: &TcContext) -> Self {
        Self(ctx.as_ptr().cast())
    }

    field!(/// Whole frame, L2 header included, bytes.
        len);
    field!(/// L4 payload per segment; 0 when the frame is one packet.
        gso_size);
    field!(/// The device it came in by.
        ifindex);
    field!(/// 0 (`PACKET_HOST`): sent to the device's own address.
        pkt_type);
    field!(/// Not 0: the stack took an 802.1Q or 802.1ad tag out of it.
        vlan_present);

    /// The EtherType, host order.
    #[inline(always)]
    pub(crate) fn ether_type(self) -> u16 {
        // SAFETY: as for the fields. The word holds a network-order u16.
        u16::from_be(unsafe { (*self.0).protocol } as u16)
    }

    /// For the log macros.
    #[cfg(feature = "log")]
    pub(crate) fn context(self) -> TcContext {
        TcContext::new(self.0)
    }

    /// A header in the linear part, `None` if it does not end there. Any helper that may move the
    /// packet (all below but the redirects) ends the pointer's life.
    #[inline(always)]
    pub(crate) fn header<T>(self, offset: usize) -> Option<*mut T> {
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

    /// A header, made linear if need be; `None` if the frame ends before.
    #[inline(always)]
    pub(crate) fn pulled_header<T>(self, offset: usize) -> Option<*mut T> {
        if let Some(header) = self.header(offset) {
            return Some(header);
        }
        let needed = (offset + size_of::<T>()) as u32;
        // SAFETY: a live context.
        if self.len() < needed || unsafe { bpf_skb_pull_data(self.0, needed) } != 0 {
            return None;
        }
        self.header(offset)
    }

    /// Copies a header from an offset that only the packet tells; `false` if the frame ends before.
    #[inline(always)]
    pub(crate) fn load(self, offset: usize, header: &mut L4) -> bool {
        let (to, len) = ((&raw mut *header).cast(), size_of_val(header) as u32);
        // SAFETY: a live context and room for `len` bytes, any of which are valid.
        unsafe { bpf_skb_load_bytes(self.0.cast(), offset as u32, to, len) == 0 }
    }

    /// What it counts as while its headers are unknown: those of a plain TCP segment are taken.
    #[inline(always)]
    pub(crate) fn rough_segments(self, l2_len: usize) -> Segments {
        let l3_len = self.len().saturating_sub(l2_len as u32);
        segment::count(l3_len, 40, self.gso_size())
    }

    /// Replaces a word under the L4 checksum at `offset`: in full, partial or complete state.
    /// `flags` holds the word's size.
    #[inline(always)]
    pub(crate) fn l4_checksum_replace(
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

    /// Makes room for an Ethernet header before an L3 packet; all zero but for the EtherType,
    /// which is the caller's to write.
    #[inline(always)]
    pub(crate) fn push_ethernet(self) -> Result<(), Refused> {
        // SAFETY: a live context.
        let ret = unsafe { bpf_skb_change_head(self.0, ETHERNET_LEN as u32, 0) };
        if ret == 0 { Ok(()) } else { Err(Refused) }
    }

    /// Where the kernel will store a partial checksum, bytes from the frame's start; negative
    /// before it.
    #[inline(always)]
    pub(crate) fn partial_checksum_place(self) -> Result<i32, Refused> {
        // SAFETY: what the loader has set; volatile, for the compiler knows zeroes.
        let layout = unsafe { (&raw const SKB_LAYOUT).read_volatile() };
        let start = self.kernel_field(layout.csum_start)?;
        let offset = self.kernel_field(layout.csum_offset)?;
        let frame = self.kernel_field(layout.mac_header)?;
        Ok(i32::from(start) + i32::from(offset) - i32::from(frame))
    }

    /// A field of the kernel's own struct, to which the context points when the program runs.
    #[inline(always)]
    fn kernel_field(self, offset: u32) -> Result<u16, Refused> {
        let field = self.0.cast::<u8>().wrapping_add(offset as usize);
        // SAFETY: the helper survives any address.
        unsafe { bpf_probe_read_kernel(field.cast::<u16>()) }.map_err(|_| Refused)
    }

    /// The MTU of a device; `None` when it is gone.
    #[inline(always)]
    pub(crate) fn mtu_of(self, ifindex: u32) -> Option<u32> {
        let mut mtu = 0;
        // SAFETY: a live context. The answer is negative only on error; that the frame itself is
        // too big for the device is told by the MTU too.
        let ret = unsafe { bpf_check_mtu(self.0.cast(), ifindex, &raw mut mtu, 0, 0) };
        (ret >= 0).then_some(mtu)
    }

    /// Whether the host would route it on: it came in by the host's MAC, but it is another's.
    #[inline(always)]
    pub(crate) fn is_routed_on(self, source: Ip4, destination: Ip4) -> bool {
        const AF_INET: u8 = 2;
        // SAFETY: plain data.
        let mut params: bpf_fib_lookup_params = unsafe { core::mem::zeroed() };
        params.family = AF_INET;
        params.ifindex = self.ifindex();
        params.__bindgen_anon_3.ipv4_src = source.to_wire();
        params.__bindgen_anon_4.ipv4_dst = destination.to_wire();
        let len = size_of::<bpf_fib_lookup_params>() as i32;
        // SAFETY: a live context and a struct of the length said.
        let ret = unsafe { bpf_fib_lookup(self.0.cast(), &raw mut params, len, 0) };
        // Not by a route to somewhere, or not by this device: then it is for the host or for nobody.
        ret != i64::from(BPF_FIB_LKUP_RET_NOT_FWDED)
            && ret != i64::from(BPF_FIB_LKUP_RET_FWD_DISABLED)
    }
}

/// Sends the frame out of a device.
#[inline(always)]
pub(crate) fn redirect(ifindex: u32) -> i32 {
    // SAFETY: no pointers.
    (unsafe { bpf_redirect(ifindex, 0) }) as i32
}

/// As [`redirect`], with the L2 header made by the kernel's neighbour table.
#[inline(always)]
pub(crate) fn redirect_by_neighbour(ifindex: u32) -> i32 {
    // SAFETY: null parameters of length 0 are allowed: the kernel looks the route up.
    let ret = unsafe { bpf_redirect_neigh(ifindex, core::ptr::null_mut(), 0, 0) };
    debug_assert!(ret == i64::from(TC_ACT_REDIRECT));
    ret as i32
}
