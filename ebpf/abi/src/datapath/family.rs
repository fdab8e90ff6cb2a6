//! Differences between IPv4 and IPv6, so that the rest of the datapath is written once.
//!
//! A program processes packets of one family only. Those of IPv4 pass IPv6 packets on by a tail
//! call ([`super::Program6`]): 512 bytes of stack do not hold both.
use super::{
    Kernel, Maps,
    packet::{Packet, QUOTED},
    translate::Rewrite,
};
use crate::{DropReason, FlowRef, ForwardTarget, Protocol, SlotRef};

/// One of the two families.
pub trait Family: Copy + Sized {
    /// Address in network order.
    type Address: Copy;
    /// Key in the table of flows.
    type Tuple: Copy;
    /// State of a flow that its slot has no room for: of IPv6, the addresses.
    type Beside: Copy;

    /// EtherType of the packets.
    const ETHER_TYPE: u16;
    /// Length of the IP header without options or extensions, bytes.
    const IP_LEN: usize;
    /// The unspecified address, which stands for any of the host's in forwards.
    const UNSPECIFIED: Self::Address;
    /// Protocol of an echo.
    const ICMP: Protocol;
    /// ICMP type of an echo request.
    const ECHO: u8;
    /// ICMP type of an echo reply.
    const ECHO_REPLY: u8;
    /// Whether the checksum of ICMP covers the addresses.
    const ICMP_HAS_PSEUDO_HEADER: bool;

    /// The protocol with this number in the IP header; `None` if slipgate has no flows of it.
    fn protocol(number: u8) -> Option<Protocol>;

    /// Parses the IP header at offset `L2`.
    ///
    /// # Errors
    /// `Malformed`; in IPv4 also `IpOptions` or `Fragment`.
    fn parse<K: Kernel, const L2: usize>(kernel: K) -> Result<Packet<Self>, DropReason>;

    /// Protocol of a GSO frame that has an Ethernet header; `None` if it has no IP header.
    fn protocol_of<K: Kernel>(kernel: K) -> Option<u8>;

    /// Number of credits of a frame on its way to the engine, with its length from the IP header
    /// on, bytes.
    fn credits(l3_len: u32, protocol: u8, gso_size: u32) -> u64;

    /// Tuple of a packet on one link: of its scope, the local end and the peer.
    fn tuple(
        scope: u32,
        local: (Self::Address, u16),
        remote: (Self::Address, u16),
        protocol: u8,
    ) -> Self::Tuple;

    /// Entry of the table of flows.
    fn entry<M: Maps>(maps: M, tuple: &Self::Tuple) -> Option<FlowRef>;

    /// Inserts an entry, on an order. Returns whether it is in the table now.
    fn insert<M: Maps>(maps: M, tuple: &Self::Tuple, flow: FlowRef) -> bool;

    /// Deletes an entry that this run inserted.
    fn delete<M: Maps>(maps: M, tuple: &Self::Tuple);

    /// Entry of the table of forwards for an address and a port of the host.
    fn forward<M: Maps>(
        maps: M,
        host: Self::Address,
        port: u16,
        protocol: u8,
    ) -> Option<ForwardTarget>;

    /// Leaves a packet of the world to the host, or drops it if it is to a guest's routed prefix.
    fn leave<K: Kernel>(kernel: K, packet: &Packet<Self>) -> K::End;
    /// Whether an address is a loopback address.
    fn is_loopback(address: Self::Address) -> bool;

    /// Whether the host would route a packet with these addresses to another host
    /// ([`Kernel::is_routed_on`]), or it is to a guest's routed prefix.
    fn is_routed_on<K: Kernel>(
        kernel: K,
        source: Self::Address,
        destination: Self::Address,
    ) -> bool;

    /// Returns the flow's state outside its slot; `None` if the flow is of the other family.
    fn beside<M: Maps>(maps: M, slot: SlotRef, index: u32) -> Option<Self::Beside>;

    /// Tuple of a flow on the guest's link.
    fn guest_tuple(slot: SlotRef, beside: Self::Beside) -> Self::Tuple;

    /// Tuple of a flow on the world's link.
    fn world_tuple(slot: SlotRef, beside: Self::Beside) -> Self::Tuple;

    /// Whether two tuples are equal.
    fn is_same(a: &Self::Tuple, b: &Self::Tuple) -> bool;

    /// Address of a flow's guest.
    fn guest(slot: SlotRef, beside: Self::Beside) -> Self::Address;

    /// Address of a flow's guest as the world sees it.
    fn nat(slot: SlotRef, beside: Self::Beside) -> Self::Address;

    /// Updates the L4 checksum at `offset` for an address that changes.
    ///
    /// # Errors
    /// `KernelRefused` if the kernel refuses.
    fn replace_address<K: Kernel>(
        kernel: K,
        offset: usize,
        from: Self::Address,
        to: Self::Address,
        flags: u64,
    ) -> Result<(), DropReason>;

    /// Writes what a rewrite changes, but for the L4 checksum: MAC addresses, hop limit, address,
    /// and port or query id.
    ///
    /// # Errors
    /// `KernelRefused` if the frame is too short now.
    fn write<K: Kernel>(
        kernel: K,
        packet: &Packet<Self>,
        to: &Rewrite<Self>,
    ) -> Result<(), DropReason>;

    /// Tuple on the world's link of the flow whose packet an ICMP error quotes behind its header;
    /// `None` if it quotes no packet that a flow can have.
    fn quoted<K: Kernel, const L2: usize>(kernel: K) -> Option<Self::Tuple>;
}

/// Offset of the packet that an ICMP error quotes, bytes from its IP header.
pub(super) const fn quote_offset<F: Family>() -> usize {
    F::IP_LEN + QUOTED
}
