//! IPv6 (RFC 8200). Packets with extension headers are not translated.
use super::{
    Kernel, Maps,
    drops::NOBODY,
    family::{Family, quote_offset},
    packet::{ETHERNET_LEN, Ethernet, L4, Packet, Ports, ether_type},
    routed_prefix,
    translate::{Rewrite, checksum_flags},
};
use crate::{
    Addresses6Ref, Direction, DropReason, FlowRef, ForwardKey6, ForwardTarget, Ip6, Protocol,
    SlotRef, Tuple, Tuple6, checksum, segment,
};

/// Length of an IPv6 header without extensions, bytes.
pub const IPV6_LEN: usize = 40;

/// Numbers of extension headers in the field of the next header (IANA).
pub(super) mod next_header {
    pub(crate) const HOP_BY_HOP: u8 = 0;
    pub(crate) const ROUTING: u8 = 43;
    pub(crate) const FRAGMENT: u8 = 44;
    pub(crate) const DESTINATION_OPTIONS: u8 = 60;
}

/// The fragment header (RFC 8200 section 4.5).
pub(super) mod fragment {
    /// Flag of the field behind the next header: more fragments follow.
    pub(crate) const MORE: u16 = 1;
    /// Mask of the fragment offset in that field, bytes.
    pub(crate) const OFFSET: u16 = 0xfff8;
    /// Length of the header, bytes.
    pub(crate) const HEADER_LEN: usize = 8;
}

/// ICMPv6 types (RFC 4443, RFC 4861, RFC 2710, RFC 3810).
pub(super) mod icmpv6 {
    /// Errors are the types from 1 on to this one.
    pub(crate) const PARAMETER_PROBLEM: u8 = 4;
    pub(crate) const LISTENER_REPORT: u8 = 131;
    pub(crate) const LISTENER_DONE: u8 = 132;
    pub(crate) const ROUTER_SOLICITATION: u8 = 133;
    pub(crate) const ROUTER_ADVERTISEMENT: u8 = 134;
    pub(crate) const NEIGHBOUR_SOLICITATION: u8 = 135;
    pub(crate) const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
    pub(crate) const REDIRECT: u8 = 137;
    pub(crate) const LISTENER_REPORT_2: u8 = 143;
}

/// IPv6 header (RFC 8200 section 3). Multi-byte fields are in network order.
#[repr(C, packed(2))]
pub struct Ipv6 {
    /// Version, and the upper half of the traffic class.
    pub version_class: u8,
    /// Lower half of the traffic class, and the flow label's first bits.
    pub class_label: u8,
    /// Rest of the flow label.
    pub label: u16,
    /// Length of what follows this header, bytes.
    pub payload_len: u16,
    /// Number of the next header, and hop limit.
    pub next_header_hop_limit: [u8; 2],
    /// Source address, as words in network order.
    pub source: [u32; 4],
    /// Destination address, as words in network order.
    pub destination: [u32; 4],
}

const _: () = assert!(size_of::<Ipv6>() == IPV6_LEN);

/// The headers that a rewrite changes, as one struct so that one bounds check covers them.
#[repr(C, packed(2))]
struct Headers {
    ethernet: Ethernet,
    ip: Ipv6,
    l4: L4,
}

/// The family of IPv6.
#[derive(Clone, Copy, Debug)]
pub struct V6;

impl Family for V6 {
    type Address = Ip6;
    type Tuple = Tuple6;
    type Beside = Addresses6Ref;

    const ETHER_TYPE: u16 = ether_type::IPV6;
    const IP_LEN: usize = IPV6_LEN;
    const UNSPECIFIED: Ip6 = Ip6::UNSPECIFIED;
    const ICMP: Protocol = Protocol::Icmpv6;
    const ECHO: u8 = 128;
    const ECHO_REPLY: u8 = 129;
    const ICMP_HAS_PSEUDO_HEADER: bool = true;

    #[inline(always)]
    fn protocol(number: u8) -> Option<Protocol> {
        Protocol::from_ip6(number)
    }

    #[inline(always)]
    fn parse<K: Kernel, const L2: usize>(kernel: K) -> Result<Packet<Self>, DropReason> {
        let Some(ip) = kernel.pulled_header::<Ipv6>(L2) else {
            return Err(DropReason::Malformed);
        };
        // SAFETY: `pulled_header` checked the bounds.
        let ip = unsafe { &*ip };
        if ip.version_class >> 4 != 6 {
            return Err(DropReason::Malformed);
        }
        let gso_size = kernel.gso_size();
        let room = kernel.frame_len().wrapping_sub(L2 as u32);
        let payload_len = u32::from(u16::from_be(ip.payload_len));
        let mut l3_len = payload_len + IPV6_LEN as u32;
        // GRO leaves 0 in what outgrows the field (BIG TCP).
        if payload_len == 0 && gso_size != 0 {
            l3_len = room;
        }
        // What segmentation makes of a frame follows from its length, not from the header's.
        if l3_len > room || (gso_size != 0 && l3_len != room) {
            return Err(DropReason::Malformed);
        }
        let [protocol, hop_limit] = ip.next_header_hop_limit;
        let source = Ip6::from_words(ip.source);
        let destination = Ip6::from_words(ip.destination);
        Ok(Packet::of_network(
            (source, destination),
            (protocol, hop_limit),
            l3_len,
            gso_size,
        ))
    }

    #[inline(always)]
    fn protocol_of<K: Kernel>(kernel: K) -> Option<u8> {
        let ip = kernel.pulled_header::<Ipv6>(ETHERNET_LEN)?;
        // SAFETY: `pulled_header` checked the bounds.
        let [protocol, _] = unsafe { (*ip).next_header_hop_limit };
        Some(protocol)
    }

    #[inline(always)]
    fn credits(l3_len: u32, protocol: u8, gso_size: u32) -> u64 {
        segment::credits6(l3_len, protocol, gso_size)
    }

    #[inline(always)]
    fn tuple(scope: u32, local: (Ip6, u16), remote: (Ip6, u16), protocol: u8) -> Tuple6 {
        Tuple6::of_words(scope, local, remote, protocol)
    }

    #[inline(always)]
    fn entry<M: Maps>(maps: M, tuple: &Tuple6) -> Option<FlowRef> {
        maps.flow6(tuple)
    }

    #[inline(always)]
    fn insert<M: Maps>(maps: M, tuple: &Tuple6, flow: FlowRef) -> bool {
        maps.insert_flow6(tuple, flow)
    }

    #[inline(always)]
    fn delete<M: Maps>(maps: M, tuple: &Tuple6) {
        maps.delete_flow6(tuple);
    }

    #[inline(always)]
    fn forward<M: Maps>(maps: M, host: Ip6, port: u16, protocol: u8) -> Option<ForwardTarget> {
        match maps.forward6(&ForwardKey6::new(host, port, protocol)) {
            None if !host.is_unspecified() => {
                maps.forward6(&ForwardKey6::of_routed_port(host, port, protocol))
            }
            of_one => of_one,
        }
    }

    #[inline(always)]
    fn leave<K: Kernel>(kernel: K, packet: &Packet<Self>) -> K::End {
        routed_prefix::leave(kernel, packet)
    }

    #[inline(always)]
    fn is_loopback(address: Ip6) -> bool {
        address.is_loopback()
    }

    #[inline(always)]
    fn is_routed_on<K: Kernel>(kernel: K, source: Ip6, destination: Ip6) -> bool {
        routed_prefix::row_of(kernel, &destination) != NOBODY
            || kernel.is_routed_on6(source, destination)
    }

    #[inline(always)]
    fn beside<M: Maps>(maps: M, slot: SlotRef, index: u32) -> Option<Addresses6Ref> {
        if !slot.is_ipv6() {
            return None;
        }
        maps.addresses6(index)
    }

    #[inline(always)]
    fn guest_tuple(slot: SlotRef, addresses: Addresses6Ref) -> Tuple6 {
        addresses.guest_tuple(slot)
    }

    #[inline(always)]
    fn world_tuple(slot: SlotRef, addresses: Addresses6Ref) -> Tuple6 {
        addresses.world_tuple(slot)
    }

    #[inline(always)]
    fn is_same(a: &Tuple6, b: &Tuple6) -> bool {
        a.is(b)
    }

    #[inline(always)]
    fn guest(_slot: SlotRef, addresses: Addresses6Ref) -> Ip6 {
        addresses.guest()
    }

    #[inline(always)]
    fn nat(_slot: SlotRef, addresses: Addresses6Ref) -> Ip6 {
        addresses.nat()
    }

    /// One call for all words of the address: with a length of 0, the helper takes the difference of
    /// their sums.
    #[inline(always)]
    fn replace_address<K: Kernel>(
        kernel: K,
        offset: usize,
        from: Ip6,
        to: Ip6,
        flags: u64,
    ) -> Result<(), DropReason> {
        let difference = checksum::difference128(from.to_words(), to.to_words());
        let flags = flags | checksum_flags::PSEUDO_HDR;
        Ok(kernel.l4_checksum_replace(offset, 0, difference, flags)?)
    }

    #[inline(always)]
    fn write<K: Kernel>(
        kernel: K,
        packet: &Packet<Self>,
        to: &Rewrite<Self>,
    ) -> Result<(), DropReason> {
        let headers = kernel
            .header::<Headers>(0)
            .ok_or(DropReason::KernelRefused)?;
        // SAFETY: `header` checked the bounds.
        let headers = unsafe { &mut *headers };
        if let Some(macs) = to.macs {
            headers.ethernet.macs = macs;
        }
        headers.ethernet.ether_type = ether_type::IPV6.to_be();

        let [protocol, hop_limit] = headers.ip.next_header_hop_limit;
        headers.ip.next_header_hop_limit = [protocol, hop_limit.wrapping_sub(1)];
        let from_guest = matches!(to.direction, Direction::Tx);
        if from_guest {
            headers.ip.source = to.address.to_words();
        } else {
            headers.ip.destination = to.address.to_words();
        }
        headers.l4.set_port(packet.is_icmp(), from_guest, to.port);
        Ok(())
    }

    #[inline(always)]
    fn quoted<K: Kernel, const L2: usize>(kernel: K) -> Option<Tuple6> {
        #[repr(C, packed(2))]
        struct Quoted {
            ip: Ipv6,
            l4: L4,
        }
        let quoted = kernel.pulled_header::<Quoted>(L2 + quote_offset::<Self>())?;
        // SAFETY: `pulled_header` checked the bounds.
        let quoted = unsafe { &*quoted };
        if quoted.ip.version_class >> 4 != 6 {
            return None;
        }
        let [mut number, _] = quoted.ip.next_header_hop_limit;
        let (source, destination) = (quoted.ip.source, quoted.ip.destination);
        let mut l4 = quoted.l4;
        // A first fragment: the engine sends datagrams that it got in fragments.
        if number == next_header::FRAGMENT {
            let ([next, field], offset) = (l4.ports, L2 + quote_offset::<Self>() + IPV6_LEN);
            if u16::from_be(field) & fragment::OFFSET != 0
                || !kernel.load(offset + fragment::HEADER_LEN, &mut l4)
            {
                return None;
            }
            [number, _] = next.to_ne_bytes();
        }
        let Ports { from, to } = l4.quoted_ports::<Self>(number)?;
        Some(Self::tuple(
            Tuple::WORLD,
            (Ip6::from_words(source), from),
            (Ip6::from_words(destination), to),
            number,
        ))
    }
}
