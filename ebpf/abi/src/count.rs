//! Named counters of a VM, and the reasons for which packets are dropped and flows refused.
//!
//! `DROPS` and `COUNTERS` are mapped arrays with a row for each VM; each field changes by atomic
//! adds only. The structs are written out with a named field per reason so that `bpftool` prints
//! names; the enums' numbers are the fields' positions.
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Packets and L3 bytes, counted as if segmented.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counter {
    /// Number of packets after segmentation.
    pub packets: u64,
    /// Number of L3 bytes.
    pub bytes: u64,
}

macro_rules! reasons {
    ($(#[$em:meta])* enum $Enum:ident; $(#[$sm:meta])* struct $Struct:ident of $Cell:ty;
     $($(#[$doc:meta])* $Variant:ident $field:ident,)+) => {
        $(#[$em])*
        #[repr(u32)]
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum $Enum { $($(#[$doc])* $Variant,)+ }

        impl $Enum {
            /// Every reason, in the order of the struct's fields.
            pub const ALL: &'static [Self] = &[$(Self::$Variant,)+];

            /// The field's name, used in output.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$Variant => stringify!($field),)+ }
            }
        }

        $(#[$sm])*
        #[repr(C)]
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct $Struct { $($(#[$doc])* pub $field: $Cell,)+ }

        const _: () = assert!(size_of::<$Struct>() == size_of::<$Cell>() * $Enum::ALL.len());

        impl $Struct {
            /// The value for one reason.
            pub const fn get(&self, reason: $Enum) -> $Cell {
                match reason { $($Enum::$Variant => self.$field,)+ }
            }
        }
    };
}

reasons! {
    /// Reason for which a packet is dropped.
    enum DropReason;
    /// One row of `DROPS`: dropped packets of a VM by reason. Programs and engine both write it.
    struct DropCounters of Counter;
    /// The frame has an 802.1Q or 802.1ad tag, by which a guest could reach another VLAN.
    Tagged tagged,
    /// The source address or MAC is not the guest's.
    Spoofed spoofed,
    /// The headers contradict each other or the frame's length.
    Malformed malformed,
    /// The packet is IPv6, which the VM does not have.
    Ipv6 ipv6,
    /// The packet is a fragment of a datagram that overlapped itself, had no room, or did not become
    /// whole in time.
    Fragment fragment,
    /// The IPv4 header has options, which are not supported.
    IpOptions ip_options,
    /// The EtherType is none of IPv4, IPv6 and ARP.
    EtherType ether_type,
    /// The IP protocol is none of TCP, UDP and ICMP.
    IpProtocol ip_protocol,
    /// The GSO size is smaller than any real connection has: the host would process one packet for
    /// every few bytes.
    GsoBomb gso_bomb,
    /// Too many frames of this VM, in this direction, are queued for the engine.
    NoCredit no_credit,
    /// A rule, the verdict `Drop`, or the guard's deny list refuses the packet.
    Denied denied,
    /// The VM is frozen.
    Frozen frozen,
    /// The destination is a multicast or broadcast address that no service uses.
    Group group,
    /// The packet exceeds the link's MTU, and no ICMP error is due (for one, because DF is clear).
    TooBig too_big,
    /// The TTL is used up. An ICMP error answers, within the rate.
    TtlExpired ttl_expired,
    /// The packet has no flow and cannot open one (a late segment, an unsolicited reply).
    NoFlow no_flow,
    /// The VM's new flow was refused; the `refused_*` counters give the reason.
    Refused refused,
    /// The engine's frame named no known VM, command or next hop.
    BadCommand bad_command,
    /// The VM was removed, its row belongs to another VM, or its TAP is detached.
    StaleVm stale_vm,
    /// The kernel refused to change or redirect the packet.
    KernelRefused kernel_refused,
    /// The ICMP type is one that the engine does not translate.
    IcmpType icmp_type,
    /// A queue in the engine was full.
    EngineBusy engine_busy,
    /// A write to the engine port failed.
    PortWrite port_write,
    /// A service (DHCP, DNS, ARP) could not parse the request, or had no answer.
    ServiceReject service_reject,
    /// The VM exceeded the query rate of a service, such as DNS or the gateway's echo.
    OverRate over_rate,
    /// The TAP had lost its program, so the fallback program dropped the frame.
    Unserved unserved,
    /// The VM exceeded its packets per second.
    PacketRate packet_rate,
    /// The VM exceeded its bytes per second.
    ByteRate byte_rate,
    /// The packet was held for inspection. The engine sends a copy of its own, counted in the flow,
    /// or none.
    Held held,
    /// TCP flags contradict each other: SYN with FIN or RST.
    BadTcpFlags bad_tcp_flags,
    /// The segment has the tuple of an inspected connection, but lies outside its sequence numbers.
    OutOfWindow out_of_window,
    /// The IPv6 packet has a hop-by-hop, routing or destination options header.
    ExtensionHeader extension_header,
    /// The source address is of the VM's prefix, but the VM has as many addresses as it may have.
    AddressBound address_bound,
    /// A router advertisement or a redirect from the guest, which is no router (RFC 6105).
    RouterAdvertisement router_advertisement,
    /// The VM has spent its budget of bytes.
    ByteBudget byte_budget,
    /// The flow would come in by a forward of IPv6, and the guest has no address of IPv6 yet.
    NoAddress no_address,
}

reasons! {
    /// Reason for which a new flow is refused.
    enum Refusal;
    /// Refused flows by reason, part of a row of `COUNTERS`.
    struct RefusalCounters of u64;
    /// A rule denies the flow.
    Rule rule,
    /// No rule matched, and the default is deny.
    Default default_deny,
    /// The destination is protected by default: host-local, private, link-local, metadata or
    /// multicast.
    Protected protected,
    /// The VM has reached its limit of flows.
    FlowCap flow_cap,
    /// The VM opens flows faster than its limit allows.
    FlowRate flow_rate,
    /// No translated port is left for this destination.
    PortsExhausted ports_exhausted,
    /// The flow table is full.
    TableFull table_full,
    /// The host has no route to the destination, or none by the uplink.
    NoRoute no_route,
    /// The kernel refused an insertion into the flow table.
    Insertion insertion,
    /// The flow would carry DNS over TLS, HTTPS or QUIC, which is protected by default where rules
    /// match names.
    DnsElsewhere dns_elsewhere,
    /// The first data of the flow is not what its inspect rule admits, or could not be inspected.
    Inspection inspection,
    /// The VM has spent its budget of bytes.
    ByteBudget byte_budget,
    /// The flow would come in by a forward of IPv6, and the guest has no address of IPv6 yet; or it
    /// would go out, and none of the VM's `nat_addresses` is the host's.
    NoAddress no_address,
    /// User mode: the host gives no socket for the flow. The engine's descriptors are used up but for a
    /// few that are kept for other things, or the host is short of descriptors or memory.
    NoSocket no_socket,
}

/// Number of rules whose refusals a row of `COUNTERS` counts separately.
pub const COUNTED_RULES: usize = 16;

/// Number of new flows that one rule refused.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RuleRefusals {
    /// Index into `RULES`, plus 1; 0 if the entry is free.
    pub rule: u32,
    /// Explicit padding, always zero.
    pub pad: u32,
    /// Number of flows that the rule refused.
    pub flows: u64,
}

/// Copy of some fields of a row of `COUNTERS`, saved before the counts of an ended flow are added.
/// If the process dies before it is done, its successor restores them and then reports the flow's
/// end again, so nothing is counted twice.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EndedBefore {
    /// Index of the flow's slot, plus 1, while counts are being added; else 0.
    pub slot: u32,
    /// Generation of the slot.
    pub generation: u32,
    /// Saved value of [`VmCounters::ended_tx`].
    pub tx: Counter,
    /// Saved value of [`VmCounters::ended_rx`].
    pub rx: Counter,
    /// Saved value of [`VmCounters::ended`].
    pub ended: u64,
}

/// One row of `COUNTERS`: events of a VM that userspace counts. The row outlives the engine.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VmCounters {
    /// Frames that the engine received from the guest over the port.
    pub engine_rx_from_guest: Counter,
    /// Frames for this VM that the engine received from the world over the port.
    pub engine_rx_from_world: Counter,
    /// Frames that the engine sent to the guest: its own answers.
    pub engine_tx_to_guest: Counter,
    /// Packets that the engine sent to the world as they are: translated ICMP errors, fragments.
    pub engine_tx_to_world: Counter,
    /// Guest-to-world traffic of flows that have ended. Live flows are counted in their slots.
    pub ended_tx: Counter,
    /// World-to-guest traffic of flows that have ended.
    pub ended_rx: Counter,
    /// Frames that the kernel handed over and that never arrived at the engine.
    pub lost_after_redirect: u64,
    /// Number of flows admitted.
    pub admitted: u64,
    /// Number of flows ended.
    pub ended: u64,
    /// DNS queries from the guest.
    pub dns_queries: u64,
    /// DNS queries answered from the cache.
    pub dns_cache_hits: u64,
    /// DNS queries answered with SERVFAIL because no upstream answered.
    pub dns_failures: u64,
    /// DHCP messages from the guest.
    pub dhcp_messages: u64,
    /// ARP requests that the engine answered.
    pub arp_answers: u64,
    /// ICMP echo requests to the gateway that the engine answered.
    pub echo_answers: u64,
    /// RSTs and ICMP errors sent to the guest for refused flows.
    pub refusals_answered: u64,
    /// Number of flows refused, by reason.
    pub refused: RefusalCounters,
    /// Number of flows refused by each of the first [`COUNTED_RULES`] rules that refused any.
    pub refused_by_rule: [RuleRefusals; COUNTED_RULES],
    /// Number of flows refused by all further rules.
    pub refused_by_other_rules: u64,
    /// Records of ended flows that could not be written to the flow log.
    pub records_lost: u64,
    /// Packets that `--pcap` or a capture had no room for.
    pub pcap_lost: u64,
    /// Journal of the ended flow that is being added to this row.
    pub ended_before: EndedBefore,
    /// Neighbour solicitations that the engine answered.
    pub ndp_answers: u64,
    /// Router advertisements sent to the guest.
    pub router_advertisements: u64,
    /// Time of the guest's last packet that counts as activity, as far as it is not in the slot of a
    /// live flow, `CLOCK_MONOTONIC` ns; 0 if there was none. See [`crate::activity`].
    pub last_from_guest_ns: u64,
    /// The same of the last packet to the guest.
    pub last_to_guest_ns: u64,
}

/// Adds packets and bytes to a live counter.
///
/// # Safety
/// `counter` points into a mapped row that programs and userspace change by atomics only.
#[inline(always)]
pub unsafe fn add(counter: *mut Counter, packets: u64, bytes: u64) {
    // SAFETY: the caller's promise; the fields have the atomic's size and alignment.
    unsafe {
        AtomicU64::from_ptr(&raw mut (*counter).packets).fetch_add(packets, Relaxed);
        AtomicU64::from_ptr(&raw mut (*counter).bytes).fetch_add(bytes, Relaxed);
    }
}

/// Counts dropped packets and their bytes in a live row of `DROPS`.
///
/// # Safety
/// `row` points to a mapped row that programs and userspace change by atomics only.
#[inline(always)]
pub unsafe fn drop_packet(row: *mut DropCounters, reason: DropReason, packets: u64, bytes: u64) {
    // SAFETY: the struct is an array of counters in the order of the enum (asserted above).
    unsafe { add(row.cast::<Counter>().add(reason as usize), packets, bytes) }
}
