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
    Kernel,
    drops::{NOBODY, drop_packet},
    fragment_table::{self, Datagram},
    ipv4::{IPV4_LEN, Ipv4, V4},
    packet::ETHERNET_LEN,
    world_fragments::{flow_row, hand_over_of},
};
use crate::{DropReason, Ip4, segment::Segments};

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
        let row = if header_len < IPV4_LEN {
            NOBODY
        } else {
            let ends = (
                Ip4::from_wire(datagram.source),
                Ip4::from_wire(datagram.destination),
            );
            flow_row::<V4, K>(kernel, ends, protocol, L2 + header_len)
        };
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
    hand_over_of::<V4, K, L2>(kernel, row, segments)
}
