//! IPv6 packets from the world, which [`uplink_ingress`](super::uplink_ingress) passes on. Those of
//! established flows go to their guest, their fragments and first packets to forwards to the engine.
//! Everything else is the host's, neighbour discovery of the uplink above all, but for what is to a
//! prefix that is routed to a guest ([`super::routed_prefix`]).
use super::{
    Kernel,
    family::Family as _,
    fragments6,
    ipv6::{V6, icmpv6, next_header},
    lookup, routed_prefix,
    uplink_ingress::{forward, icmp_error, send_to_guest},
};
use crate::{Verdict, cell::load32};

/// Processes a packet that arrived by an uplink. `L2` is the length of its L2 header, bytes.
#[inline(always)]
pub(super) fn run<K: Kernel, const L2: usize>(kernel: K) -> K::End {
    if kernel.is_untagged_by_stack() {
        return kernel.pass();
    }
    let Ok(mut packet) = V6::parse::<K, L2>(kernel) else {
        return kernel.pass();
    };
    // To a group, or seen only because the device is promiscuous.
    if L2 != 0 && !kernel.is_to_this_host() {
        return routed_prefix::group::<K, L2>(kernel, &mut packet);
    }
    if packet.parse_transport::<K, L2>(kernel).is_err() {
        if packet.protocol == next_header::FRAGMENT {
            return fragments6::from_world::<K, L2>(kernel, &packet);
        }
        return routed_prefix::leave(kernel, &packet);
    }
    if packet.is_icmp() && packet.icmp_type != V6::ECHO_REPLY {
        return match packet.icmp_type {
            1..=icmpv6::PARAMETER_PROBLEM => icmp_error::<V6, K, L2>(kernel, &packet),
            icmpv6::NEIGHBOUR_SOLICITATION if L2 != 0 => {
                routed_prefix::neighbour_of_uplink(kernel, &packet)
            }
            _ => routed_prefix::leave(kernel, &packet),
        };
    }
    match lookup::world_flow(kernel.maps(), &packet) {
        Some(flow) if load32(flow.slot.verdict()) != Verdict::Free as u32 => {
            send_to_guest::<V6, K, L2, false>(kernel, &packet, flow)
        }
        _ => forward::<V6, K, L2>(kernel, &packet),
    }
}
