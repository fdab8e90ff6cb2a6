//! Checks a fragment by itself, and builds the datagram of which all fragments are there.
use slipgate_abi::Protocol;

use crate::{
    packet::{
        Fragment, Transport, Version, ipv4,
        ipv6::{EXTENSIONS, FRAGMENT},
        transport::UDP_HEADER_LEN,
    },
    port::{ETHERTYPE_AT, L3_AT, VNET_LEN, ethertype_of},
};

/// Longest data of a datagram of either family, bytes.
pub(super) const MOST_DATA: usize = 65_535;
/// ECN codepoint "congestion experienced" (RFC 3168 section 5).
pub(super) const CONGESTION_EXPERIENCED: u8 = 3;

/// A datagram that is whole.
#[derive(Debug)]
pub(crate) struct Whole {
    /// Its frame, as if it had been handed over as one packet.
    pub(crate) frame: Vec<u8>,
    /// Largest fragment in which it came, L3 bytes.
    pub(crate) largest: u32,
}

/// Why a fragment is none of any datagram that could become whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Unfit {
    /// It has no data.
    Empty,
    /// Its length is no multiple of eight, though more fragments follow.
    Length,
    /// It reaches behind the end of the longest datagram.
    End,
    /// The first fragment ends before the transport header does (RFC 7112).
    Headers,
    /// An extension header follows the fragment header.
    Extension,
}

impl Whole {
    /// The datagram of a fragment that is all of it (RFC 6946).
    ///
    /// # Errors
    /// When it is not possible.
    pub(crate) fn of_atomic(frame: &[u8], fragment: &Fragment<'_>) -> Result<Self, Unfit> {
        check_lengths(fragment)?;
        check_headers(fragment)?;
        let head = head_of(frame, fragment.version());
        Ok(Self {
            frame: frame_of(head, fragment.protocol, fragment.data, false),
            largest: fragment.packet.len() as u32,
        })
    }
}

/// Checks what a fragment says of its place in a datagram.
pub(super) fn check_lengths(fragment: &Fragment<'_>) -> Result<(), Unfit> {
    let (data, end) = (fragment.data, fragment.begin + fragment.data.len());
    // IPv4's length counts the header.
    let most = match fragment.version() {
        Version::V4 => MOST_DATA - ipv4::HEADER_LEN,
        Version::V6 => MOST_DATA,
    };
    if data.is_empty() {
        return Err(Unfit::Empty);
    }
    if fragment.has_more && !data.len().is_multiple_of(8) {
        return Err(Unfit::Length);
    }
    if end > most {
        return Err(Unfit::End);
    }
    Ok(())
}

/// Checks that the first fragment of an IPv6 datagram has all its headers, and no extension header.
pub(super) fn check_headers(fragment: &Fragment<'_>) -> Result<(), Unfit> {
    if fragment.version() == Version::V4 || fragment.begin > 0 {
        return Ok(());
    }
    let next = fragment.protocol;
    if EXTENSIONS.contains(&next) || next == FRAGMENT {
        return Err(Unfit::Extension);
    }
    // Of UDP the length is that of the datagram, which is not here.
    let is_there = match Protocol::from_number(next) {
        Some(Protocol::Udp) => fragment.data.len() >= UDP_HEADER_LEN,
        _ => Transport::parse(Version::V6, next, fragment.data).is_ok(),
    };
    match is_there {
        true => Ok(()),
        false => Err(Unfit::Headers),
    }
}

/// The headers of a frame up to the end of its IP header.
pub(super) fn head_of(frame: &[u8], version: Version) -> Vec<u8> {
    frame[..L3_AT + version.header_len()].to_vec()
}

/// The frame of a datagram, without offload metadata: fragments have whole checksums.
pub(super) fn frame_of(head: Vec<u8>, protocol: u8, data: &[u8], is_marked: bool) -> Vec<u8> {
    let mut frame = head;
    frame[..VNET_LEN].fill(0);
    // A fragment of the world has its link there.
    let ethertype = ethertype_of(&frame[L3_AT..]);
    frame[ETHERTYPE_AT..L3_AT].copy_from_slice(&ethertype.to_be_bytes());
    frame.extend_from_slice(data);
    let ip = &mut frame[L3_AT..];
    if ip[0] >> 4 == 6 {
        ip[4..6].copy_from_slice(&(data.len() as u16).to_be_bytes());
        ip[6] = protocol;
        if is_marked {
            ip[1] |= CONGESTION_EXPERIENCED << 4;
        }
        return frame;
    }
    let len = ip.len() as u16;
    ip[2..4].copy_from_slice(&len.to_be_bytes());
    ip[6..8].fill(0);
    if is_marked {
        ip[1] |= CONGESTION_EXPERIENCED;
    }
    ipv4::fill_checksum(ip, ipv4::HEADER_LEN);
    frame
}

/// Whether a router marked a fragment for congestion.
pub(super) fn is_marked(fragment: &Fragment<'_>) -> bool {
    let class = match fragment.version() {
        Version::V4 => fragment.packet[1],
        Version::V6 => fragment.packet[1] >> 4,
    };
    class & CONGESTION_EXPERIENCED == CONGESTION_EXPERIENCED
}
