//! Early fragments: those of the world that came before the first one of their datagram, of which the
//! programs keep copies ([`slipgate_abi::early_fragment`]).
use std::{net::IpAddr, sync::atomic::Ordering::SeqCst};

use slipgate_abi::{
    PortHeader,
    datapath::fragment_table::{Datagram, Datagram6},
    early_fragment::{MOST_L3_LEN, PLACES, has_hash, taken},
    portframe::link,
};

use super::reassembly::{MOST_FRAGMENTS, patience_ns};
use crate::{
    datapath::Tables,
    packet::{Fragment, Version},
    port::{L3_AT, PORT_HEADER_AT},
};

/// Copies of the fragments that came before a first one.
#[derive(Debug, Default)]
pub(crate) struct Early {
    /// Frames with the first one's header, oldest first.
    pub(crate) frames: Vec<Vec<u8>>,
    /// Copies that were looked into, these and those of other datagrams with the same hash.
    pub(crate) looks: usize,
}

/// Takes the copies of the fragments that came before this first one by its link. `frame` is the first
/// one's. At most [`MOST_FRAGMENTS`] copies are looked into.
pub(crate) fn take(
    tables: &impl Tables,
    frame: &[u8],
    (first, first_link): (&Fragment<'_>, u16),
    now_ns: u64,
) -> Early {
    let mut early = Early::default();
    // Most copies that are looked into may be of other datagrams: one buffer for all.
    let mut buffer = [0; MOST_L3_LEN];
    let patience_ns = patience_ns(first.version() == Version::V6);
    for (place, word) in with_hash(tables, hash_of(first)) {
        early.looks += 1;
        let (Some(tag), Some(copy)) = (tables.early_tag(place), tables.early_fragment(place))
        else {
            break;
        };
        let Some(came) = copy.read(&mut buffer) else {
            continue;
        };
        let l3 = &buffer[..came.len];
        // The programs' clock is some milliseconds behind.
        let is_old = now_ns.saturating_sub(came.at_ns) >= patience_ns;
        if link(came.ifindex) != first_link || is_old || !is_of(l3, first) {
            continue;
        }
        // What was read is one packet only if its tag is still the same.
        let exchanged = tag
            .word()
            .compare_exchange(word, taken(word), SeqCst, SeqCst);
        if exchanged.is_ok() {
            let head = &frame[PORT_HEADER_AT..L3_AT];
            early
                .frames
                .push([&[0; PORT_HEADER_AT][..], head, l3].concat());
        }
    }
    early
}

/// Returns the places and tags of the copies whose datagram has this hash, oldest first; at most
/// [`MOST_FRAGMENTS`].
fn with_hash(tables: &impl Tables, hash: u32) -> Vec<(u32, u64)> {
    let all = (0..PLACES).map_while(|place| {
        let tag = tables.early_tag(place)?;
        Some((place, tag.word().load(SeqCst)))
    });
    let mut found: Vec<_> = all.filter(|(_, word)| has_hash(*word, hash)).collect();
    // Numbers go round. Another engine can write anything, which then comes anywhere.
    if let Some((_, any)) = found.first().copied() {
        found.sort_unstable_by_key(|(_, word)| (*word as u32).wrapping_sub(any as u32) as i32);
    }
    found.truncate(MOST_FRAGMENTS);
    found
}

/// Hash of a fragment's datagram, as in the tag of its copies.
fn hash_of(fragment: &Fragment<'_>) -> u32 {
    let id = fragment.identification;
    match (fragment.source, fragment.destination) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            Datagram::new(from.into(), to.into(), id as u16, fragment.protocol).hash()
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => Datagram6::new(from.into(), to.into(), id).hash(),
        _ => 0,
    }
}

/// Whether a packet is another fragment of the datagram of `first`.
fn is_of(l3: &[u8], first: &Fragment<'_>) -> bool {
    let Ok(fragment) = Fragment::parse(l3) else {
        return false;
    };
    // In IPv6 the protocol may differ among fragments of a datagram.
    let name = |of: &Fragment<'_>| {
        let protocol = (of.version() == Version::V4).then_some(of.protocol);
        (of.source, of.destination, of.identification, protocol)
    };
    fragment.begin > 0 && name(&fragment) == name(first)
}

const _: () = assert!(PORT_HEADER_AT + PortHeader::LEN < L3_AT);
