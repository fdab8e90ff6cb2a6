//! Packets from the world that are not translated here: fragments, and packets with IP options.
//!
//! Of a live flow, fragments are handed to the engine, which reassembles the datagram, and packets
//! with options are dropped and counted in its VM's row. The host has no socket for them: it would
//! reassemble a fragmented segment and answer it with RST. Fragments of a first packet to a forward are
//! handed over, too. A first fragment has the ports; a table
//! attributes the later ones to its flow or forward ([`super::fragment_table`]). Fragments that arrive
//! before the first are left to the host, and a copy is kept for the engine
//! ([`super::early_fragments`]).
//!
//! "No VM" is row 0 here, not `None`: on Linux 6.1 the verifier refuses a spilled `Option`'s
//! payload.
use super::{
    Kernel,
    drops::{NOBODY, drop_packet},
    early_fragments::{TAKEN, keep},
    fragment_table::{self, Datagram},
    ipv4::{IPV4_LEN, Ipv4, V4},
    packet::ETHERNET_LEN,
    world_fragments::{flow_row, forward_row, hand_over_of, row_in},
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

/// A function of its own for its stack ([`forward_row`]).
#[inline(never)]
fn forwarded<K: Kernel>(kernel: K, ends: &(Ip4, Ip4), number: u8, at: usize, end: usize) -> u32 {
    forward_row::<V4, K>(kernel, *ends, number, at, end)
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
    // What the engine can reassemble.
    let is_plain = header_len == IPV4_LEN && kernel.gso_size() == 0;
    let whose = if fragment & OFFSET != 0 {
        match fragment_table::whose(kernel, &datagram) {
            NOBODY if is_plain => keep(kernel, &datagram, L2, segments.bytes as u32),
            known => known,
        }
    } else {
        let mut whose = NOBODY;
        if header_len >= IPV4_LEN {
            let ends = (
                Ip4::from_wire(datagram.source),
                Ip4::from_wire(datagram.destination),
            );
            let (at, end) = (L2 + header_len, L2 + segments.bytes as usize);
            whose = flow_row::<V4, K>(kernel, ends, protocol, (at, end));
            if whose == NOBODY && is_fragment && is_plain {
                whose = forwarded(kernel, &ends, protocol, at, end);
            }
        }
        if is_fragment {
            fragment_table::remember(kernel, &datagram, whose);
        }
        whose
    };
    if whose == TAKEN {
        return kernel.discard();
    }
    if !fragment_table::is_guests(whose) {
        return kernel.pass();
    }
    if !is_fragment || !is_plain {
        return drop_packet(kernel, row_in(whose), reason, segments);
    }
    hand_over_of::<V4, K, L2>(kernel, whose, segments)
}
