//! The guest's IPv6 address, of the prefix that a router advertises (RFC 4861, RFC 4862).
//!
//! CPU 0 asks for a router when a workload needs IPv6, and the guest takes the first one that
//! advertised a prefix for addresses, asked or not. Until then it sends nothing by IPv6. The address
//! ends in the MAC address (EUI-64). The guest probes for its addresses once, and uses them meanwhile
//! (as RFC 4429): it is alone with its router, which learns of them by the probes.

use core::net::Ipv6Addr;

use smoltcp::{
    phy::{ChecksumCapabilities, Device, TxToken},
    wire::{
        EthernetAddress, EthernetFrame, EthernetProtocol, Icmpv6Packet, Icmpv6Repr, IpProtocol,
        Ipv6Packet, Ipv6Repr, NdiscPrefixInfoFlags, NdiscRepr,
    },
};

use super::stack::{Stack, Turn};
use crate::platform::{Nic, Platform};

/// Least MTU of a link with IPv6 (RFC 8200, 5).
const MTU_MIN: u32 = 1280;
/// Time after which an unanswered question is sent again, ns.
const RETRY_NS: u64 = 1_000_000_000;
/// Hop limit of all messages, which shows that no router has passed them on.
const HOP_LIMIT: u8 = 255;
const ALL_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2);

/// IPv6 configuration of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv6Lease {
    /// Address of the guest.
    pub address: Ipv6Addr,
    /// Length of the prefix whose other addresses are neighbours', bits.
    pub prefix: u8,
    /// Link-local address of the router.
    pub router: Ipv6Addr,
    /// Largest IP packet, bytes; `None` if the router does not say it.
    pub mtu: Option<u16>,
}

/// Returns the guest's link-local address.
pub fn link_local(mac: [u8; 6]) -> Ipv6Addr {
    with_prefix(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), mac)
}

/// Returns the address with the first half of `prefix` and an EUI-64 (RFC 4291, appendix A).
fn with_prefix(prefix: Ipv6Addr, mac: [u8; 6]) -> Ipv6Addr {
    let [a, b, c, d, e, f] = mac;
    let mut octets = prefix.octets();
    octets[8..].copy_from_slice(&[a ^ 2, b, c, 0xFF, 0xFE, d, e, f]);
    octets.into()
}

/// Asks for a router, unless one has advertised a prefix, until one does. Returns `None` if none does
/// until `deadline_ns`.
pub fn acquire<P: Platform, N: Nic>(
    stack: &mut Stack<'_, P, N>,
    deadline_ns: u64,
) -> Option<Ipv6Lease> {
    let mut due_ns = stack.now_ns();
    stack.drive(|stack| {
        if let Some(lease) = stack.device.ipv6() {
            return Turn::Done(Some(*lease));
        }
        let now_ns = stack.now_ns();
        if now_ns >= deadline_ns {
            return Turn::Done(None);
        }
        if now_ns >= due_ns {
            solicit_router(stack);
            due_ns = now_ns + RETRY_NS;
        }
        Turn::Waiting(Some(due_ns.min(deadline_ns)))
    })
}

/// Asks once for a router, and does not wait for the answer.
pub fn solicit_router<P: Platform, N: Nic>(stack: &mut Stack<'_, P, N>) {
    let mac = EthernetAddress(stack.device.nic.mac());
    let lladdr = Some(mac.into());
    let own = link_local(mac.0);
    send(
        stack,
        (own, ALL_ROUTERS),
        NdiscRepr::RouterSolicit { lladdr },
    );
}

/// Asks whether another has the guest's addresses (RFC 4862, 5.4.2), and for the router's MAC address,
/// on behalf of all CPUs.
pub(super) fn announce<P: Platform, N: Nic>(stack: &mut Stack<'_, P, N>, lease: &Ipv6Lease) {
    let mac = EthernetAddress(stack.device.nic.mac());
    let own = link_local(mac.0);
    let mut ask = |source, target_addr, lladdr| {
        let question = NdiscRepr::NeighborSolicit {
            target_addr,
            lladdr,
        };
        send(stack, (source, solicited_node(target_addr)), question);
    };
    ask(Ipv6Addr::UNSPECIFIED, own, None);
    ask(Ipv6Addr::UNSPECIFIED, lease.address, None);
    ask(own, lease.router, Some(mac.into()));
}

/// Returns the group to which questions for a neighbour's address go (RFC 4291, 2.7.1).
fn solicited_node(target: Ipv6Addr) -> Ipv6Addr {
    let [.., a, b, c] = target.octets();
    Ipv6Addr::from([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, a, b, c])
}

/// Sends a message to a multicast group, unless the queue is full.
fn send<P: Platform, N: Nic>(
    stack: &mut Stack<'_, P, N>,
    (source, group): (Ipv6Addr, Ipv6Addr),
    message: NdiscRepr<'_>,
) {
    let mac = stack.device.nic.mac();
    let message = Icmpv6Repr::Ndisc(message);
    let packet = Ipv6Repr {
        src_addr: source,
        dst_addr: group,
        next_header: IpProtocol::Icmpv6,
        payload_len: message.buffer_len(),
        hop_limit: HOP_LIMIT,
    };
    let now = stack.tick();
    let Some(token) = stack.device.transmit(now) else {
        return;
    };
    let len = EthernetFrame::<&[u8]>::buffer_len(packet.buffer_len() + message.buffer_len());
    token.consume(len, |bytes| {
        let [.., a, b, c, d] = group.octets();
        let mut frame = EthernetFrame::new_unchecked(bytes);
        frame.set_src_addr(EthernetAddress(mac));
        frame.set_dst_addr(EthernetAddress([0x33, 0x33, a, b, c, d]));
        frame.set_ethertype(EthernetProtocol::Ipv6);
        let mut ip = Ipv6Packet::new_unchecked(frame.payload_mut());
        packet.emit(&mut ip);
        message.emit(
            &packet.src_addr,
            &packet.dst_addr,
            &mut Icmpv6Packet::new_unchecked(ip.payload_mut()),
            &ChecksumCapabilities::default(),
        );
    });
    stack.device.nic.flush();
}

/// Returns what a frame gives the guest, if it is the advertisement of a default router with a prefix
/// for addresses (RFC 4861, 6.1.2; RFC 4862, 5.5.3).
pub(super) fn advertised(frame: &[u8], mac: [u8; 6]) -> Option<Ipv6Lease> {
    let frame = EthernetFrame::new_checked(frame).ok()?;
    if frame.ethertype() != EthernetProtocol::Ipv6 {
        return None;
    }
    let packet = Ipv6Packet::new_checked(frame.payload()).ok()?;
    let router = packet.src_addr();
    if packet.next_header() != IpProtocol::Icmpv6
        || packet.hop_limit() != HOP_LIMIT
        || !router.is_unicast_link_local()
    {
        return None;
    }
    let icmp = Icmpv6Packet::new_checked(packet.payload()).ok()?;
    let sums = ChecksumCapabilities::default();
    let Ok(Icmpv6Repr::Ndisc(NdiscRepr::RouterAdvert {
        router_lifetime,
        mtu,
        prefix_info: Some(prefix),
        ..
    })) = Icmpv6Repr::parse(&router, &packet.dst_addr(), &icmp, &sums)
    else {
        return None;
    };
    if !prefix.is_valid_prefix_info()
        || prefix.prefix_len != 64
        || prefix.valid_lifetime.total_micros() == 0
        || router_lifetime.total_micros() == 0
    {
        return None;
    }
    let is_on_link = prefix.flags.contains(NdiscPrefixInfoFlags::ON_LINK);
    Some(Ipv6Lease {
        address: with_prefix(prefix.prefix, mac),
        prefix: if is_on_link { prefix.prefix_len } else { 128 },
        router,
        mtu: mtu
            .filter(|mtu| *mtu >= MTU_MIN)
            .and_then(|mtu| mtu.try_into().ok()),
    })
}

#[cfg(test)]
#[path = "ipv6_test.rs"]
mod tests;
