//! XDP on a guest's TAP: drops frames that `guest_egress` would drop or refuse, before the kernel
//! makes an skb. For devices that carry no GSO frames.
use core::sync::atomic::{
    AtomicU64,
    Ordering::{AcqRel, Relaxed},
};

use aya_ebpf::{
    bindings::xdp_action::{XDP_DROP, XDP_PASS},
    btf_maps::lpm_trie::Key,
    helpers::generated::bpf_ktime_get_coarse_ns,
    programs::XdpContext,
};
use slipgate_abi::{
    DropReason, Ip4, Ip6, Protocol, Tuple, Tuple6, VmRef,
    cell::{load32, load64, store64},
    datapath::{
        Maps,
        guest_egress::DNS_PORT,
        guest_egress6::is_guests,
        identity::{self, same_network},
        ipv4::{IPV4_LEN, Ipv4},
        ipv6::{IPV6_LEN, Ipv6},
        lookup::{is_guest_flow, is_guest_flow6},
        packet::{ETHERNET_LEN, Ethernet, L4, ether_type},
    },
    forward::{DenyKey, DenyKey6},
    segment::Segments,
    vm::VmFlags,
    vm6::Vm6Flags,
};

use crate::{
    drops,
    lookup::BpfMaps,
    maps::{DENY, DENY6},
};

/// Number of denied packets that pass per window, so that the engine can answer them with RST or
/// ICMP.
const ANSWERED_PER_WINDOW: u64 = 64;
const WINDOW_NS: u64 = 100_000_000;

/// Processes a frame from the guest attached to the TAP on which it arrived. Returns an XDP action.
#[inline(always)]
pub(crate) fn run(ctx: &XdpContext) -> u32 {
    let ifindex = ctx.ingress_ifindex() as u32;
    let Some(tap) = BpfMaps.tap(ifindex) else {
        return XDP_PASS;
    };
    let (id, row) = (tap.vm, tap.vm_row);
    let Some(vm) = BpfMaps.vm(row, id) else {
        return XDP_PASS;
    };
    match judge(ctx, vm, row) {
        Some(reason) => {
            let l3_len = (ctx.data_end() - ctx.data()).saturating_sub(ETHERNET_LEN);
            let segments = Segments {
                packets: 1,
                bytes: l3_len as u64,
            };
            drops::count(row, reason, segments);
            XDP_DROP
        }
        None => XDP_PASS,
    }
}

/// Reason to drop the frame; `None` to pass it. Frames that cannot be read here are left to
/// `guest_egress`.
#[inline(always)]
fn judge(ctx: &XdpContext, vm: VmRef, row: u32) -> Option<DropReason> {
    let ethernet = header::<Ethernet>(ctx, 0)?;
    // SAFETY: `header` checked the bounds.
    let (macs, ether_type) = unsafe { ((*ethernet).macs, u16::from_be((*ethernet).ether_type)) };
    if ether_type == ether_type::VLAN || ether_type == ether_type::SERVICE_VLAN {
        return Some(DropReason::Tagged);
    }
    let flags = load32(vm.flags());
    if flags & VmFlags::FROZEN != 0 {
        return Some(DropReason::Frozen);
    }
    if identity::is_foreign(vm, flags, macs) {
        return Some(DropReason::Spoofed);
    }
    if ether_type == ether_type::IPV6 {
        return judge_ipv6(ctx, vm, row, macs);
    }
    if ether_type != ether_type::IPV4 {
        return None;
    }
    let ip = header::<Ipv4>(ctx, ETHERNET_LEN)?;
    // SAFETY: as above.
    let (source, destination) = unsafe {
        (
            Ip4::from_wire((*ip).source),
            Ip4::from_wire((*ip).destination),
        )
    };
    let (guest, gateway, prefix_len) = identity::network(vm);
    // DHCP is sent without an address; `guest_egress` checks it further.
    if source != guest && source != Ip4::UNSPECIFIED {
        return Some(DropReason::Spoofed);
    }
    let key = Key::new(
        64,
        DenyKey {
            policy: policy_of(vm),
            remote: destination,
        },
    );
    DENY.get(&key)?;
    let l4 = header::<L4>(ctx, ETHERNET_LEN + IPV4_LEN)?;
    // SAFETY: `header` checked the bounds.
    let (l4, protocol) = unsafe { (&*l4, (*ip).ttl_protocol.to_ne_bytes()[1]) };
    // A deny rule is about new flows to the world: not about services of ours, and not about what
    // was admitted all the same (a forward's answers).
    if same_network(destination, gateway, prefix_len)
        || u16::from_be(l4.ports[1]) == DNS_PORT
        || is_guest_flow(BpfMaps, &tuple_of(vm, source, destination, protocol, l4))
    {
        return None;
    }
    (!allow_answer(vm)).then_some(DropReason::Denied)
}

/// As [`judge`], of an IPv6 frame. Frames with extension headers are left to `guest_egress`, which drops
/// them, and hands fragments over within the VM's credits.
#[inline(always)]
fn judge_ipv6(ctx: &XdpContext, vm: VmRef, row: u32, [first, ..]: [u16; 6]) -> Option<DropReason> {
    let vm6 = BpfMaps.vm6(row)?;
    if load32(vm6.flags()) & Vm6Flags::ON == 0 {
        let is_group = first.to_ne_bytes()[0] & 1 != 0;
        return Some(match is_group {
            true => DropReason::Group,
            false => DropReason::Ipv6,
        });
    }
    let ip = header::<Ipv6>(ctx, ETHERNET_LEN)?;
    // SAFETY: `header` checked the bounds.
    let ip = unsafe { &*ip };
    if ip.version_class >> 4 != 6 {
        return None;
    }
    let source = Ip6::from_words(ip.source);
    let destination = Ip6::from_words(ip.destination);
    // Without an address a guest probes and solicits; `guest_egress` checks these further.
    if !source.is(Ip6::UNSPECIFIED) && !is_guests(vm6, source) {
        return Some(DropReason::Spoofed);
    }
    let key = Key::new(
        160,
        DenyKey6 {
            policy: policy_of(vm),
            remote: destination.octets,
        },
    );
    DENY6.get(&key)?;
    let l4 = header::<L4>(ctx, ETHERNET_LEN + IPV6_LEN)?;
    // SAFETY: `header` checked the bounds.
    let (ports, rest) = unsafe { ((*l4).ports, (*l4).rest) };
    let [protocol, _] = ip.next_header_hop_limit;
    let (local_port, remote_port) = match Protocol::from_ip6(protocol)?.is_icmp() {
        true => (u16::from_be(rest[0]), 0),
        false => (u16::from_be(ports[0]), u16::from_be(ports[1])),
    };
    // As in `judge`: what stays on the link, services of ours, and what was admitted.
    if destination.same_prefix(vm6.gateway())
        || destination.is_link_local()
        || destination.is_multicast()
        || remote_port == DNS_PORT
    {
        return None;
    }
    let (local, remote) = ((source, local_port), (destination, remote_port));
    let tuple = Tuple6::of_words(load32(vm.id()), local, remote, protocol);
    (!is_guest_flow6(BpfMaps, &tuple) && !allow_answer(vm)).then_some(DropReason::Denied)
}

/// Number of a VM's policy, as keys have it.
#[inline(always)]
fn policy_of(vm: VmRef) -> [u8; 4] {
    // SAFETY: a live row whose identity is constant while its TAP is attached.
    unsafe { (*vm.as_ptr()).policy }.to_be_bytes()
}

/// Tuple of a packet without IP options. For a packet with options, it is some other tuple.
#[inline(always)]
fn tuple_of(vm: VmRef, local: Ip4, remote: Ip4, protocol: u8, l4: &L4) -> Tuple {
    let (local_port, remote_port) = if protocol == Protocol::Icmp as u8 {
        (l4.rest[0], 0)
    } else {
        (l4.ports[0], l4.ports[1])
    };
    Tuple {
        scope: load32(vm.id()),
        local,
        remote,
        local_port: u16::from_be(local_port),
        remote_port: u16::from_be(remote_port),
        protocol,
        pad: [0; 3],
    }
}

/// Takes one packet of the window's allowance. Returns whether any was left.
#[inline(always)]
fn allow_answer(vm: VmRef) -> bool {
    let row = vm.as_ptr();
    // SAFETY: a live row; these fields are changed by atomics only.
    let (window, passed) = unsafe {
        (
            AtomicU64::from_ptr(&raw mut (*row).guard_window_ns),
            AtomicU64::from_ptr(&raw mut (*row).guard_passed),
        )
    };
    // SAFETY: no arguments.
    let now = unsafe { bpf_ktime_get_coarse_ns() };
    let started = load64(window);
    if now.wrapping_sub(started) >= WINDOW_NS
        && window
            .compare_exchange(started, now, Relaxed, Relaxed)
            .is_ok()
    {
        store64(passed, 0);
    }
    // Not relaxed: LLVM 22 then takes the instruction that does not fetch, and compares the addend.
    passed.fetch_add(1, AcqRel) < ANSWERED_PER_WINDOW
}

#[inline(always)]
fn header<T>(ctx: &XdpContext, offset: usize) -> Option<*const T> {
    let (start, end) = (ctx.data(), ctx.data_end());
    (start + offset + size_of::<T>() <= end).then_some((start + offset) as *const T)
}
