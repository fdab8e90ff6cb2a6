//! Counters by name, and the reasons for which packets are dropped and flows refused.
//!
//! `DROPS` and `COUNTERS` are mapped arrays with a row per VM; each field is changed by atomic
//! adds only. The structs are written out with a named field per reason so that `bpftool` prints
//! names; the enums' numbers are the fields' positions.
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Packets and L3 bytes, as if segmented.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counter {
    /// Packets.
    pub packets: u64,
    /// L3 bytes.
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
    /// Why a packet was dropped.
    enum DropReason;
    /// One row of `DROPS`. Written by the programs and the engine alike.
    struct DropCounters of Counter;
    /// An 802.1Q or 802.1ad tag: a guest could hop VLANs by it.
    Tagged tagged,
    /// A source address or MAC that is not the guest's.
    Spoofed spoofed,
    /// Headers that contradict themselves or the frame's length.
    Malformed malformed,
    /// IPv6, not served yet.
    Ipv6 ipv6,
    /// An IPv4 fragment, not served yet.
    Fragment fragment,
    /// An IPv4 header with options, not served yet.
    IpOptions ip_options,
    /// Neither IPv4, IPv6 nor ARP.
    EtherType ether_type,
    /// An IP protocol that has no flows.
    IpProtocol ip_protocol,
    /// A GSO size that no real connection has, meant to cost the host one packet per few bytes.
    GsoBomb gso_bomb,
    /// Too many frames of this VM are already on their way to the engine.
    NoCredit no_credit,
    /// A rule, the verdict `Drop`, or the guard's deny-list.
    Denied denied,
    /// The VM is frozen.
    Frozen frozen,
    /// To a group or broadcast address that nobody serves.
    Group group,
    /// Larger than the link, and not to be answered (no DF, or an answer was not due).
    TooBig too_big,
    /// TTL spent; answered by ICMP within the rate.
    TtlExpired ttl_expired,
    /// No flow, and the packet does not open one (a late segment, an unsolicited answer).
    NoFlow no_flow,
    /// The VM's new flow was refused; see `refused_*`.
    Refused refused,
    /// The engine's frame named no known VM, command or next hop.
    BadCommand bad_command,
    /// The VM's row is gone or belongs to another VM by now.
    StaleVm stale_vm,
    /// The kernel refused to change or redirect the packet.
    KernelRefused kernel_refused,
    /// An ICMP message the engine does not translate.
    IcmpType icmp_type,
    /// A queue in the engine was full.
    EngineBusy engine_busy,
    /// A write to the engine port failed.
    PortWrite port_write,
    /// A service (DHCP, DNS, ARP) could make no sense of it, or had no answer.
    ServiceReject service_reject,
    /// Over the VM's query rate.
    OverRate over_rate,
    /// The TAP's program was gone; what stands behind it dropped the frame.
    Unserved unserved,
    /// Over the VM's packets per second.
    PacketRate packet_rate,
    /// Over the VM's bytes per second.
    ByteRate byte_rate,
    /// Held for inspection: the engine sent its own copy on, which is in the flow, or none.
    Held held,
    /// TCP flags that contradict each other: SYN with FIN or RST.
    BadTcpFlags bad_tcp_flags,
    /// On the tuple of a connection that was inspected, but not where that one stands in sequence space.
    OutOfWindow out_of_window,
}

reasons! {
    /// Why a new flow was refused.
    enum Refusal;
    /// Refused flows by reason, part of a row of `COUNTERS`.
    struct RefusalCounters of u64;
    /// A rule says deny.
    Rule rule,
    /// No rule matched and the default is deny.
    Default default_deny,
    /// One of the safe defaults: host-local, private, link-local, metadata, multicast.
    Protected protected,
    /// The VM has as many flows as it may.
    FlowCap flow_cap,
    /// The VM opens flows faster than it may.
    FlowRate flow_rate,
    /// No port left for this destination.
    PortsExhausted ports_exhausted,
    /// The flow table is full.
    TableFull table_full,
    /// There is no route, or not by the uplink.
    NoRoute no_route,
    /// The kernel refused an insertion.
    Insertion insertion,
    /// One of the safe defaults: DNS over TLS, HTTPS or QUIC, where names are judged.
    DnsElsewhere dns_elsewhere,
    /// What it said, or could not say, is not what its inspect rule lets in.
    Inspection inspection,
}

/// How many rules are told apart in a row of `COUNTERS`.
pub const COUNTED_RULES: usize = 16;

/// New flows that a rule refused.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RuleRefusals {
    /// The rule's element of `RULES` + 1; 0: free.
    pub rule: u32,
    /// Zero.
    pub pad: u32,
    /// How many flows.
    pub flows: u64,
}

/// What a row of `COUNTERS` said before the counts of a flow that ends were added: whoever dies in
/// between leaves it, and the adopter restores it before the flow's end is told again.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EndedBefore {
    /// The flow's slot + 1, while counts are being added; else 0.
    pub slot: u32,
    /// The slot's generation.
    pub generation: u32,
    /// [`VmCounters::ended_tx`].
    pub tx: Counter,
    /// [`VmCounters::ended_rx`].
    pub rx: Counter,
    /// [`VmCounters::ended`].
    pub ended: u64,
}

/// One row of `COUNTERS`: what userspace counted for a VM. It outlives the engine.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VmCounters {
    /// From the guest to the engine: every frame that came over the port.
    pub engine_rx_from_guest: Counter,
    /// From the world to the engine over the port, for this VM.
    pub engine_rx_from_world: Counter,
    /// From the engine to the guest: its own answers.
    pub engine_tx_to_guest: Counter,
    /// From the engine to the world: as-is emissions (translated errors, fragments).
    pub engine_tx_to_world: Counter,
    /// Guest to world of flows that have ended (live ones are in their slots).
    pub ended_tx: Counter,
    /// World to guest of flows that have ended.
    pub ended_rx: Counter,
    /// Frames handed over that never came out at the engine.
    pub lost_after_redirect: u64,
    /// Flows admitted.
    pub admitted: u64,
    /// Flows ended.
    pub ended: u64,
    /// DNS questions from the guest.
    pub dns_queries: u64,
    /// Of those, answered from the cache.
    pub dns_cache_hits: u64,
    /// Of those, answered SERVFAIL for want of an upstream answer.
    pub dns_failures: u64,
    /// DHCP messages.
    pub dhcp_messages: u64,
    /// ARP requests that the engine answered.
    pub arp_answers: u64,
    /// Echo requests to the gateway answered.
    pub echo_answers: u64,
    /// RST and ICMP errors sent to the guest for refused flows.
    pub refusals_answered: u64,
    /// Flows refused, by reason.
    pub refused: RefusalCounters,
    /// Flows refused by the first rules that refused any.
    pub refused_by_rule: [RuleRefusals; COUNTED_RULES],
    /// Flows refused by all further rules.
    pub refused_by_other_rules: u64,
    /// Records of ended flows that could not be written to the flow log.
    pub records_lost: u64,
    /// Packets that `--pcap` or a capture had no room for.
    pub pcap_lost: u64,
    /// See there.
    pub ended_before: EndedBefore,
}

/// Adds to a live counter.
///
/// # Safety
/// `counter` points into a mapped row that both sides change by atomics only.
#[inline(always)]
pub unsafe fn add(counter: *mut Counter, packets: u64, bytes: u64) {
    // SAFETY: the caller's promise; the fields have the atomic's size and alignment.
    unsafe {
        AtomicU64::from_ptr(&raw mut (*counter).packets).fetch_add(packets, Relaxed);
        AtomicU64::from_ptr(&raw mut (*counter).bytes).fetch_add(bytes, Relaxed);
    }
}

/// Counts a dropped packet in a live row of `DROPS`.
///
/// # Safety
/// `row` points to a mapped row that both sides change by atomics only.
#[inline(always)]
pub unsafe fn drop_packet(row: *mut DropCounters, reason: DropReason, packets: u64, bytes: u64) {
    // SAFETY: the struct is an array of counters in the order of the enum (asserted above).
    unsafe { add(row.cast::<Counter>().add(reason as usize), packets, bytes) }
}
