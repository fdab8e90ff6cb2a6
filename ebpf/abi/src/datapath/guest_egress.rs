//! Frames from a guest. Packets of established flows go to the world, packets that need a decision
//! go to the engine, and packets that no guest may send are dropped. Those of IPv6 go on in
//! [`guest_egress6`](super::guest_egress6).
use core::sync::atomic::Ordering::Relaxed;

use super::{
    Kernel, Maps as _, Program6, arp, connection,
    drops::{NOBODY, drop_frame, drop_packet},
    egress_path::path_of,
    family::Family,
    handover::hand_over,
    handshake, identity,
    ipv4::V4,
    lookup::{self, Flow},
    pacer::Onward,
    packet::{ETHERNET_LEN, Ethernet, Macs, PADDED_LEN, Packet, ether_type},
    rate,
    translate::{self, Rewrite},
};
use crate::{
    Direction, DropReason, Handover, Ip4, Verdict, VmRef,
    cell::{load32, store64},
    portframe::PortFlags,
    segment::{MIN_TCP_GSO_SIZE, MIN_UDP_GSO_SIZE},
    vm::VmFlags,
};

/// Port of DNS. Packets to it go to the resolver, whatever their destination address.
pub const DNS_PORT: u16 = 53;
const DHCP_SERVER_PORT: u16 = 67;
const DHCP_CLIENT_PORT: u16 = 68;

/// A frame that may be a guest's, from an Ethernet header on that was checked.
#[derive(Clone, Copy)]
pub(super) struct Arrival {
    /// Id of the VM.
    pub(super) id: u32,
    /// Row of the VM.
    pub(super) row: u32,
    pub(super) vm: VmRef,
    /// Flags of the VM's row, [`crate::VmFlags`].
    pub(super) flags: u32,
    pub(super) macs: Macs,
}

impl Arrival {
    /// Whether the frame is to a group of hosts.
    #[inline(always)]
    pub(super) fn is_to_group(&self) -> bool {
        self.macs[0].to_ne_bytes()[0] & 1 != 0
    }
}

/// Finds the VM attached to the TAP on which a frame arrived, and checks the frame up to its
/// Ethernet header.
///
/// # Errors
/// The end of the run: the frame was dropped.
#[inline(always)]
pub(super) fn arrive<K: Kernel>(kernel: K) -> Result<Arrival, K::End> {
    let Some(tap) = kernel.maps().tap(kernel.ifindex()) else {
        let end = drop_frame::<K, ETHERNET_LEN>(kernel, NOBODY, DropReason::StaleVm);
        return Err(end);
    };
    let (id, row) = (tap.vm, tap.vm_row);
    let Some(vm) = kernel.maps().vm(row, id) else {
        let end = drop_frame::<K, ETHERNET_LEN>(kernel, NOBODY, DropReason::StaleVm);
        return Err(end);
    };
    let dropped = |reason| Err(drop_frame::<K, ETHERNET_LEN>(kernel, row, reason));
    let ether_type = kernel.ether_type();
    if kernel.is_untagged_by_stack()
        || ether_type == ether_type::VLAN
        || ether_type == ether_type::SERVICE_VLAN
    {
        return dropped(DropReason::Tagged);
    }
    let flags = load32(vm.flags());
    if flags & VmFlags::FROZEN != 0 {
        return dropped(DropReason::Frozen);
    }
    let Some(ethernet) = kernel.pulled_header::<Ethernet>(0) else {
        return dropped(DropReason::Malformed);
    };
    // SAFETY: `pulled_header` checked the bounds.
    let macs = unsafe { (*ethernet).macs };
    if identity::is_foreign(vm, flags, macs) {
        return dropped(DropReason::Spoofed);
    }
    Ok(Arrival {
        id,
        row,
        vm,
        flags,
        macs,
    })
}

/// Processes a frame from the guest attached to the TAP on which it arrived.
#[inline(always)]
pub fn run<K: Kernel>(kernel: K) -> K::End {
    // Without the program no guest has IPv6.
    if kernel.ether_type() == ether_type::IPV6
        && let Ok(end) = kernel.go_on(Program6::GuestEgress)
    {
        return end;
    }
    let arrival = match arrive(kernel) {
        Ok(arrival) => arrival,
        Err(end) => return end,
    };
    let Arrival {
        id, row, vm, flags, ..
    } = arrival;
    let group = arrival.is_to_group();
    let port_flags = if group { PortFlags::GROUP } else { 0 };
    if kernel.ether_type() != ether_type::IPV4 {
        return match kernel.ether_type() {
            ether_type::ARP => arp::run(kernel, row, vm, port_flags),
            _ if group => drop_frame::<K, ETHERNET_LEN>(kernel, row, DropReason::Group),
            ether_type::IPV6 => drop_frame::<K, ETHERNET_LEN>(kernel, row, DropReason::Ipv6),
            _ => drop_frame::<K, ETHERNET_LEN>(kernel, row, DropReason::EtherType),
        };
    }
    let mut packet = match V4::parse::<K, ETHERNET_LEN>(kernel) {
        Ok(packet) => packet,
        // The engine tells the guest.
        Err(DropReason::IpOptions) if !group => {
            return hand_over::<V4, K, ETHERNET_LEN>(kernel, row, Handover::Uncommon, 0);
        }
        Err(DropReason::Fragment) if !group && kernel.gso_size() == 0 => {
            return hand_over::<V4, K, ETHERNET_LEN>(kernel, row, Handover::Fragment, 0);
        }
        Err(reason) => return drop_frame::<K, ETHERNET_LEN>(kernel, row, reason),
    };
    if has_more_behind(kernel, &packet) {
        return drop_frame::<K, ETHERNET_LEN>(kernel, row, DropReason::Malformed);
    }
    let transport = packet.parse_transport::<K, ETHERNET_LEN>(kernel);

    let (guest, gateway, prefix_len) = identity::network(vm);
    if packet.source != guest || group {
        return unusual(kernel, row, &packet, guest, port_flags);
    }
    if matches!(transport, Err(DropReason::Malformed)) {
        return drop_packet(kernel, row, DropReason::Malformed, packet.segments());
    }
    if connection::contradicts_itself(&packet) {
        return drop_packet(kernel, row, DropReason::BadTcpFlags, packet.segments());
    }
    if packet.gso_size != 0
        && let Err(reason) = check_gso(&packet)
    {
        return drop_packet(kernel, row, reason, packet.segments());
    }
    if identity::same_network(packet.destination, gateway, prefix_len) {
        let dhcp = packet.destination == gateway && is_dhcp(&packet);
        let why = if dhcp {
            Handover::Dhcp
        } else {
            Handover::Local
        };
        return hand_over::<V4, K, ETHERNET_LEN>(kernel, row, why, 0);
    }
    if let Err(reason) = transport {
        return drop_packet(kernel, row, reason, packet.segments());
    }
    if packet.is_icmp() {
        if packet.icmp_type != V4::ECHO {
            return hand_over::<V4, K, ETHERNET_LEN>(kernel, row, Handover::Icmp, 0);
        }
    } else if packet.destination_port == DNS_PORT {
        return hand_over::<V4, K, ETHERNET_LEN>(kernel, row, Handover::Miss, 0);
    }
    match lookup::guest_flow(kernel.maps(), id, &packet) {
        Some(flow) => send_to_world::<V4, K, false>(kernel, row, flags, &packet, flow),
        None => hand_over::<V4, K, ETHERNET_LEN>(kernel, row, Handover::Miss, 0),
    }
}

/// Whether there are bytes behind the packet, which would travel uncounted. A short frame may be
/// padded.
#[inline(always)]
pub(super) fn has_more_behind<K: Kernel, F: Family>(kernel: K, packet: &Packet<F>) -> bool {
    kernel.frame_len() > PADDED_LEN && kernel.frame_len() != packet.l3_len + ETHERNET_LEN as u32
}

/// Processes a packet with a source address other than the guest's, or to a group address. Only
/// DHCP is accepted.
#[inline(always)]
fn unusual<K: Kernel>(
    kernel: K,
    row: u32,
    packet: &Packet<V4>,
    guest: Ip4,
    port_flags: u8,
) -> K::End {
    let reason = if packet.source != guest && packet.source != Ip4::UNSPECIFIED {
        DropReason::Spoofed
    } else if is_dhcp(packet) && packet.gso_size == 0 {
        return hand_over::<V4, K, ETHERNET_LEN>(kernel, row, Handover::Dhcp, port_flags);
    } else if port_flags & PortFlags::GROUP != 0 {
        DropReason::Group
    } else {
        DropReason::Spoofed
    };
    drop_packet(kernel, row, reason, packet.segments())
}

#[inline(always)]
fn is_dhcp(packet: &Packet<V4>) -> bool {
    packet.is_udp()
        && packet.source_port == DHCP_CLIENT_PORT
        && packet.destination_port == DHCP_SERVER_PORT
}

/// Refuses segment sizes that no real connection has.
///
/// # Errors
/// `GsoBomb` for such a size, `Malformed` for GSO of another protocol.
#[inline(always)]
pub(super) fn check_gso<F: Family>(packet: &Packet<F>) -> Result<(), DropReason> {
    if packet.is_tcp() {
        if packet.gso_size < MIN_TCP_GSO_SIZE {
            return Err(DropReason::GsoBomb);
        }
    } else if packet.is_udp() {
        if packet.gso_size < MIN_UDP_GSO_SIZE {
            return Err(DropReason::GsoBomb);
        }
    } else {
        return Err(DropReason::Malformed);
    }
    Ok(())
}

/// Sends a packet from a guest by its flow. `flags` are the VM's. With `ENGINE`, the packet comes
/// from the engine, which has decided, so it never returns there.
#[inline(always)]
pub(super) fn send_to_world<F: Family, K: Kernel, const ENGINE: bool>(
    kernel: K,
    row: u32,
    flags: u32,
    packet: &Packet<F>,
    flow: Flow<F>,
) -> K::End {
    let slot = flow.slot;
    let verdict = load32(slot.verdict());
    if verdict != Verdict::Fast as u32 {
        if verdict == Verdict::Drop as u32 {
            return drop_packet(kernel, row, DropReason::Denied, packet.segments());
        }
        let known = verdict == Verdict::Engine as u32 || verdict == Verdict::Closing as u32;
        if !ENGINE {
            let why = if known {
                Handover::Verdict
            } else {
                Handover::Miss
            };
            return hand_over::<F, K, ETHERNET_LEN>(kernel, row, why, 0);
        }
        if !known {
            return drop_packet(kernel, row, DropReason::NoFlow, packet.segments());
        }
    }
    if !ENGINE
        && connection::opens(packet)
        && !connection::opener_again(packet, slot, Direction::Tx)
    {
        return hand_over::<F, K, ETHERNET_LEN>(kernel, row, Handover::Syn, 0);
    }
    if connection::is_strange(kernel, packet, flow) {
        return drop_packet(kernel, row, DropReason::OutOfWindow, packet.segments());
    }
    if packet.ttl <= 1 {
        if ENGINE {
            return drop_packet(kernel, row, DropReason::TtlExpired, packet.segments());
        }
        return hand_over::<F, K, ETHERNET_LEN>(kernel, row, Handover::TtlExpired, 0);
    }
    let Some(path) = path_of(kernel, slot) else {
        return drop_packet(kernel, row, DropReason::KernelRefused, packet.segments());
    };
    if packet.largest() > path.mtu {
        if ENGINE {
            return drop_packet(kernel, row, DropReason::TooBig, packet.segments());
        }
        // It is the engine's to charge, and to find out whether it goes on.
        if flags & VmFlags::LIMITED != 0
            && let Err(reason) = rate::look(kernel, row, Direction::Tx)
        {
            return drop_packet(kernel, row, reason, packet.segments());
        }
        return hand_over::<F, K, ETHERNET_LEN>(kernel, row, Handover::TooBig, 0);
    }
    let mut pacer = 0;
    if flags & VmFlags::LIMITED != 0 {
        match rate::take(kernel, row, Direction::Tx, packet.segments()) {
            Ok(device) => pacer = device,
            Err(reason) => return drop_packet(kernel, row, reason, packet.segments()),
        }
    }
    let to = Rewrite {
        direction: Direction::Tx,
        address: F::nat(slot, flow.beside),
        port: slot.nat_port(),
        macs: path.macs,
    };
    if let Err(reason) = translate::rewrite(kernel, packet, &to) {
        return drop_packet(kernel, row, reason, packet.segments());
    }
    let segments = packet.segments();
    slot.tx_packets().fetch_add(segments.packets, Relaxed);
    slot.tx_bytes().fetch_add(segments.bytes, Relaxed);
    // Before the bits, which tell that there is something new to see ([`crate::activity`]).
    store64(slot.tx_last_ns(), kernel.coarse_now_ns());
    connection::note(kernel, packet, flow, Direction::Tx);
    handshake::note(kernel, packet, slot, Direction::Tx);
    if pacer != 0 {
        let onward = Onward {
            ifindex: path.ifindex,
            by_neighbour: path.neighbour_unknown,
        };
        kernel.redirect_paced(pacer, row, onward)
    } else if path.neighbour_unknown {
        kernel.redirect_by_neighbour(path.ifindex)
    } else {
        kernel.redirect(path.ifindex)
    }
}
