//! IPv4 (RFC 791): the half of the datapath that is IPv4's alone.
use super::{
    Kernel, Maps,
    family::{Family, quote_offset},
    packet::{Ethernet, L4, Packet, Ports, ether_type},
    translate::{Rewrite, checksum_flags},
};
use crate::{
    Direction, DropReason, FlowRef, ForwardKey, ForwardTarget, Ip4, Protocol, SlotRef, Tuple,
    checksum, segment,
};

/// Length of an IPv4 header without options, bytes. Headers with options are not translated.
pub const IPV4_LEN: usize = 20;

/// IPv4 header without options (RFC 791). Multi-byte fields are in network order.
#[repr(C, packed(2))]
pub struct Ipv4 {
    /// Version, and header length in 32-bit words.
    pub version_ihl: u8,
    /// DSCP and ECN bits (RFC 2474, RFC 3168).
    pub tos: u8,
    /// Length of header and payload, bytes.
    pub total_len: u16,
    /// Identification of the datagram.
    pub id: u16,
    /// Flags and fragment offset.
    pub fragment: u16,
    /// TTL and protocol as one word, as the header checksum covers them.
    pub ttl_protocol: u16,
    /// Checksum of the header.
    pub checksum: u16,
    /// Source address, network order.
    pub source: u32,
    /// Destination address, network order.
    pub destination: u32,
}

/// The headers that a rewrite changes, as one struct so that one bounds check covers them.
#[repr(C, packed(2))]
struct Headers {
    ethernet: Ethernet,
    ip: Ipv4,
    l4: L4,
}

/// The family of IPv4.
#[derive(Clone, Copy, Debug)]
pub struct V4;

impl Family for V4 {
    type Address = Ip4;
    type Tuple = Tuple;
    type Beside = ();

    const ETHER_TYPE: u16 = ether_type::IPV4;
    const IP_LEN: usize = IPV4_LEN;
    const UNSPECIFIED: Ip4 = Ip4::UNSPECIFIED;
    const ICMP: Protocol = Protocol::Icmp;
    const ECHO: u8 = 8;
    const ECHO_REPLY: u8 = 0;
    const ICMP_HAS_PSEUDO_HEADER: bool = false;

    #[inline(always)]
    fn protocol(number: u8) -> Option<Protocol> {
        Protocol::from_ip(number)
    }

    #[inline(always)]
    fn parse<K: Kernel, const L2: usize>(kernel: K) -> Result<Packet<Self>, DropReason> {
        let Some(ip) = kernel.pulled_header::<Ipv4>(L2) else {
            return Err(DropReason::Malformed);
        };
        // SAFETY: `pulled_header` checked the bounds.
        let ip = unsafe { &*ip };
        if ip.version_ihl != 0x45 {
            return Err(if ip.version_ihl > 0x45 && ip.version_ihl <= 0x4f {
                DropReason::IpOptions
            } else {
                DropReason::Malformed
            });
        }
        // Offset or "more fragments".
        if ip.fragment & u16::to_be(0x3fff) != 0 {
            return Err(DropReason::Fragment);
        }
        let gso_size = kernel.gso_size();
        let room = kernel.frame_len().wrapping_sub(L2 as u32);
        let mut l3_len = u32::from(u16::from_be(ip.total_len));
        // GRO leaves 0 in what outgrows the field (BIG TCP).
        if l3_len == 0 && gso_size != 0 {
            l3_len = room;
        }
        // What segmentation makes of a frame follows from its length, not from the header's.
        if l3_len > room || l3_len < IPV4_LEN as u32 || (gso_size != 0 && l3_len != room) {
            return Err(DropReason::Malformed);
        }
        let [ttl, protocol] = ip.ttl_protocol.to_ne_bytes();
        let (source, destination) = (Ip4::from_wire(ip.source), Ip4::from_wire(ip.destination));
        Ok(Packet::of_network(
            (source, destination),
            (protocol, ttl),
            l3_len,
            gso_size,
        ))
    }

    #[inline(always)]
    fn protocol_of<K: Kernel>(kernel: K) -> Option<u8> {
        let ip = kernel.pulled_header::<Ipv4>(super::packet::ETHERNET_LEN)?;
        // SAFETY: `pulled_header` checked the bounds.
        let [_, protocol] = unsafe { (*ip).ttl_protocol }.to_ne_bytes();
        Some(protocol)
    }

    #[inline(always)]
    fn credits(l3_len: u32, protocol: u8, gso_size: u32) -> u64 {
        segment::credits(l3_len, protocol, gso_size)
    }

    #[inline(always)]
    fn tuple(scope: u32, local: (Ip4, u16), remote: (Ip4, u16), protocol: u8) -> Tuple {
        Tuple::of_words(scope, local, remote, protocol)
    }

    #[inline(always)]
    fn entry<M: Maps>(maps: M, tuple: &Tuple) -> Option<FlowRef> {
        maps.flow(tuple)
    }

    #[inline(always)]
    fn insert<M: Maps>(maps: M, tuple: &Tuple, flow: FlowRef) -> bool {
        maps.insert_flow(tuple, flow)
    }

    #[inline(always)]
    fn delete<M: Maps>(maps: M, tuple: &Tuple) {
        maps.delete_flow(tuple);
    }

    #[inline(always)]
    fn forward<M: Maps>(maps: M, host: Ip4, port: u16, protocol: u8) -> Option<ForwardTarget> {
        maps.forward(&ForwardKey {
            host,
            port,
            protocol,
            pad: 0,
        })
    }

    #[inline(always)]
    fn leave<K: Kernel>(kernel: K, _packet: &Packet<Self>) -> K::End {
        kernel.pass()
    }

    #[inline(always)]
    fn is_loopback(address: Ip4) -> bool {
        address.is_loopback()
    }

    #[inline(always)]
    fn is_routed_on<K: Kernel>(kernel: K, source: Ip4, destination: Ip4) -> bool {
        kernel.is_routed_on(source, destination)
    }

    #[inline(always)]
    fn beside<M: Maps>(_maps: M, slot: SlotRef, _index: u32) -> Option<()> {
        (!slot.is_ipv6()).then_some(())
    }

    #[inline(always)]
    fn guest_tuple(slot: SlotRef, (): ()) -> Tuple {
        slot.guest_tuple()
    }

    #[inline(always)]
    fn world_tuple(slot: SlotRef, (): ()) -> Tuple {
        slot.world_tuple()
    }

    #[inline(always)]
    fn is_same(a: &Tuple, b: &Tuple) -> bool {
        a == b
    }

    #[inline(always)]
    fn guest(slot: SlotRef, (): ()) -> Ip4 {
        slot.guest()
    }

    #[inline(always)]
    fn nat(slot: SlotRef, (): ()) -> Ip4 {
        slot.nat()
    }

    #[inline(always)]
    fn replace_address<K: Kernel>(
        kernel: K,
        offset: usize,
        from: Ip4,
        to: Ip4,
        flags: u64,
    ) -> Result<(), DropReason> {
        let flags = flags | checksum_flags::PSEUDO_HDR | 4;
        Ok(kernel.l4_checksum_replace(offset, from.to_wire(), to.to_wire(), flags)?)
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
        headers.ethernet.ether_type = ether_type::IPV4.to_be();

        let from_guest = matches!(to.direction, Direction::Tx);
        let old_address = if from_guest {
            packet.source
        } else {
            packet.destination
        };
        let old_ttl = headers.ip.ttl_protocol;
        let [ttl, protocol] = old_ttl.to_ne_bytes();
        let new_ttl = u16::from_ne_bytes([ttl.wrapping_sub(1), protocol]);
        headers.ip.ttl_protocol = new_ttl;
        headers.ip.checksum = checksum::update32(
            checksum::update16(headers.ip.checksum, old_ttl, new_ttl),
            old_address.to_wire(),
            to.address.to_wire(),
        );
        if from_guest {
            headers.ip.source = to.address.to_wire();
        } else {
            headers.ip.destination = to.address.to_wire();
        }
        headers.l4.set_port(packet.is_icmp(), from_guest, to.port);
        Ok(())
    }

    #[inline(always)]
    fn quoted<K: Kernel, const L2: usize>(kernel: K) -> Option<Tuple> {
        #[repr(C, packed(2))]
        struct Quoted {
            ip: Ipv4,
            l4: L4,
        }
        let quoted = kernel.pulled_header::<Quoted>(L2 + quote_offset::<Self>())?;
        // SAFETY: `pulled_header` checked the bounds.
        let quoted = unsafe { &*quoted };
        let [_, number] = quoted.ip.ttl_protocol.to_ne_bytes();
        if quoted.ip.version_ihl != 0x45 || quoted.ip.fragment & u16::to_be(0x1fff) != 0 {
            return None;
        }
        let Ports { from, to } = quoted.l4.quoted_ports::<Self>(number)?;
        Some(Self::tuple(
            Tuple::WORLD,
            (Ip4::from_wire(quoted.ip.source), from),
            (Ip4::from_wire(quoted.ip.destination), to),
            number,
        ))
    }
}
