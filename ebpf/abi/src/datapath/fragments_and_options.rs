//! Packets from the world that are not translated here: fragments, and packets with IP options.
//!
//! Of a live flow, fragments are handed to the engine, which reassembles the datagram, and packets
//! with options are dropped and counted in its VM's row. The host has no socket for them: it would
//! reassemble a fragmented segment and answer it with RST. A first fragment has the ports; a table
//! attributes the later ones to its flow ([`super::fragment_table`]). Fragments that arrive before
//! the first are left to the host, which never completes the datagram.
//!
//! "No VM" is row 0 here, not `None`: on Linux 6.1 the verifier refuses a spilled `Option`'s
//! payload.
use super::{
    Kernel, Maps as _,
    drops::{NOBODY, drop_packet},
    family::Family as _,
    fragment_table::{self, Datagram},
    handover::hand_over,
    ipv4::{IPV4_LEN, Ipv4, V4},
    lookup,
    packet::{ETHERNET_LEN, L4},
};
use crate::{
    DropReason, Handover, Ip4, Protocol, Tuple, Verdict, cell::load32, portframe::PortFlags,
    segment::Segments, vm::VmFlags,
};

/// Flag of the IPv4 header: more fragments follow.
const MORE: u16 = 0x2000;
/// Mask of the fragment offset, in units of 8 bytes.
const OFFSET: u16 = 0x1fff;

/// Processes a packet whose header at offset `L2` was rejected for `reason`; passes it to the host
/// unless the reason is a fragment or IP options.
#[cold]
#[inline(always)]
pub(super) fn run<K: Kernel, const L2: usize>(kernel: K, reason: DropReason) -> K::End {
    if !matches!(reason, DropReason::Fragment | DropReason::IpOptions) {
        return kernel.pass();
    }
    if L2 == 0 {
        packet(kernel)
    } else {
        frame(kernel)
    }
}

#[inline(never)]
fn frame<K: Kernel>(kernel: K) -> K::End {
    look::<K, ETHERNET_LEN>(kernel)
}

#[inline(never)]
fn packet<K: Kernel>(kernel: K) -> K::End {
    look::<K, 0>(kernel)
}

#[inline(always)]
fn look<K: Kernel, const L2: usize>(kernel: K) -> K::End {
    let Some(ip) = kernel.pulled_header::<Ipv4>(L2) else {
        return kernel.pass();
    };
    // SAFETY: `pulled_header` checked the bounds.
    let ip = unsafe { &*ip };
    let header_len = usize::from(ip.version_ihl & 0xf) * 4;
    let fragment = u16::from_be(ip.fragment);
    let [_, protocol] = ip.ttl_protocol.to_ne_bytes();
    let datagram = Datagram {
        source: ip.source,
        destination: ip.destination,
        id: ip.id,
        protocol: u16::from(protocol),
    };
    let segments = Segments {
        packets: 1,
        bytes: u64::from(u16::from_be(ip.total_len)),
    };
    let is_fragment = fragment & (MORE | OFFSET) != 0;
    let reason = if is_fragment {
        DropReason::Fragment
    } else {
        DropReason::IpOptions
    };
    let row = if fragment & OFFSET != 0 {
        fragment_table::row_of(kernel, &datagram)
    } else {
        let row = flow_row::<K, L2>(kernel, &datagram, header_len);
        if is_fragment {
            fragment_table::remember(kernel, &datagram, row);
        }
        row
    };
    if row == NOBODY {
        return kernel.pass();
    }
    if !is_fragment || header_len != IPV4_LEN || kernel.gso_size() != 0 {
        return drop_packet(kernel, row, reason, segments);
    }
    let vm = kernel.maps().vm_row(row);
    if vm.is_some_and(|vm| load32(vm.flags()) & VmFlags::FROZEN != 0) {
        return drop_packet(kernel, row, DropReason::Frozen, segments);
    }
    hand_over::<V4, K, L2>(kernel, row, Handover::Fragment, PortFlags::FROM_UPLINK)
}

/// Row of the VM that has a live flow by this uplink for this packet, whose ports follow `header_len` bytes of IP
/// header; `NOBODY` if there is no such flow.
#[inline(always)]
fn flow_row<K: Kernel, const L2: usize>(kernel: K, datagram: &Datagram, header_len: usize) -> u32 {
    let Some(protocol) = Protocol::from_ip(datagram.protocol as u8) else {
        return NOBODY;
    };
    let mut l4 = L4 {
        ports: [0; 2],
        rest: [0; 2],
    };
    if header_len < IPV4_LEN || !kernel.load(L2 + header_len, &mut l4) {
        return NOBODY;
    }
    let (ports, rest) = (l4.ports, l4.rest);
    let (local_port, remote_port) = match protocol {
        Protocol::Icmp if ports[0].to_ne_bytes()[0] != V4::ECHO_REPLY => return NOBODY,
        Protocol::Icmp | Protocol::Icmpv6 => (u16::from_be(rest[0]), 0),
        Protocol::Tcp | Protocol::Udp => (u16::from_be(ports[1]), u16::from_be(ports[0])),
    };
    let found = lookup::world_flow_by::<_, V4>(
        kernel.maps(),
        &Tuple {
            scope: Tuple::WORLD,
            local: Ip4::from_wire(datagram.destination),
            remote: Ip4::from_wire(datagram.source),
            local_port,
            remote_port,
            protocol: datagram.protocol as u8,
            pad: [0; 3],
        },
    );
    let Some(slot) = found else { return NOBODY };
    let row = slot.vm_row();
    let live = load32(slot.verdict()) != Verdict::Free as u32
        && kernel.arrived_by(load32(slot.uplink_ifindex()));
    if live && kernel.maps().vm(row, slot.vm()).is_some() {
        row
    } else {
        NOBODY
    }
}
