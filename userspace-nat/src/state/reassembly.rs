//! Reassembly of fragmented IPv4 datagrams (RFC 791 section 3.2, RFC 4787 REQ-14).
//!
//! # Theory of operation
//! Only a first fragment has ports, and fragments come in any order. So no fragment goes on by
//! itself: a datagram is held until it is whole, is judged and translated as one packet, and leaves
//! in fragments no larger than those in which it came, unless these are tiny.
//!
//! A fragment that overlaps another ends its datagram, and so does one that contradicts its length
//! (RFC 5722 section 4, RFC 1858): whoever has an honest reason for it sends exact repetitions only,
//! and these are dropped alone. What comes later of a datagram that was ended is dropped, until the
//! time for its reassembly is over.
//!
//! A VM's guest, and the world that sends to it, have [`MOST_DATAGRAMS`] and [`MOST_BYTES`] each;
//! the oldest datagram makes room. All VMs together have [`MOST_BYTES_IN_ALL`].
use std::collections::{BTreeSet, HashMap, VecDeque};

use slipgate_abi::{Ip4, VmRow, segment::Segments};

use crate::{
    clock::SECOND_NS,
    packet::ipv4::{self, HEADER_LEN, Ipv4},
    port::{L3_AT, VNET_LEN},
};

/// Most datagrams of a sender at once.
const MOST_DATAGRAMS: usize = 16;
/// Most bytes of a sender's datagrams: a few of the largest.
const MOST_BYTES: usize = 256 << 10;
/// Most bytes of all datagrams.
const MOST_BYTES_IN_ALL: usize = 32 << 20;
/// Most fragments of a datagram: the largest over a link of 576 bytes, the least that every host
/// takes (RFC 791), has 119.
const MOST_FRAGMENTS: usize = 128;
/// Time for which a datagram waits for the rest, ns, as Linux does (`net.ipv4.ipfrag_time`).
const PATIENCE_NS: u64 = 30 * SECOND_NS;
/// Longest data of a datagram, bytes.
const MOST_DATA: usize = 65_535 - HEADER_LEN;
/// ECN codepoint "congestion experienced" (RFC 3168 section 5).
const CONGESTION_EXPERIENCED: u8 = 3;

/// Row of the VM, and whether the world is the sender.
type Sender = (VmRow, bool);

/// The datagrams that are not whole.
#[derive(Debug, Default)]
pub(crate) struct Reassembly {
    senders: HashMap<Sender, Datagrams>,
    /// Time at which each sender's oldest datagram expires, ns.
    expiries: BTreeSet<(u64, Sender)>,
    bytes: usize,
    /// Fragments that were dropped and not counted yet.
    lost: Vec<(VmRow, Segments)>,
}

/// Datagrams of a sender, oldest first; there is at least one.
#[derive(Debug, Default)]
struct Datagrams {
    list: VecDeque<Datagram>,
    bytes: usize,
}

#[derive(Debug)]
struct Datagram {
    name: Name,
    expires_ns: u64,
    /// Whether it was ended; it has no data then.
    is_dead: bool,
    /// Beginning and end of each fragment, bytes from the start of the data.
    parts: Vec<(usize, usize)>,
    data: Vec<u8>,
    /// Length of the data; `None` before the last fragment came.
    len: Option<usize>,
    /// Headers of the first fragment, up to the end of its IP header.
    head: Vec<u8>,
    /// Largest fragment, L3 bytes.
    largest: u32,
    /// Fragments that are held, as they came.
    held: Segments,
    is_marked: bool,
}

/// What the fragments of a datagram have in common.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Name {
    source: Ip4,
    destination: Ip4,
    identification: u16,
    protocol: u8,
}

/// A datagram that is whole.
#[derive(Debug)]
pub(crate) struct Whole {
    /// Its frame, as if it had been handed over as one packet.
    pub(crate) frame: Vec<u8>,
    /// Largest fragment in which it came, L3 bytes.
    pub(crate) largest: u32,
}

/// The fragment contradicts itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Contradictory;

impl Reassembly {
    /// Takes a fragment: `frame`, whose packet is `ip`, without IP options. Returns its datagram if
    /// that is whole now. What is dropped is counted by [`Reassembly::take_lost`].
    ///
    /// # Errors
    /// It is no possible fragment, and is to be dropped by the caller.
    pub(crate) fn add(
        &mut self,
        sender: Sender,
        frame: &[u8],
        ip: &Ipv4<'_>,
        now_ns: u64,
    ) -> Result<Option<Whole>, Contradictory> {
        let data = ip.payload();
        let (begin, end) = (ip.fragment_offset, ip.fragment_offset + data.len());
        if data.is_empty() || ip.more_fragments && !data.len().is_multiple_of(8) || end > MOST_DATA
        {
            return Err(Contradictory);
        }
        let name = Name {
            source: ip.source,
            destination: ip.destination,
            identification: ip.identification,
            protocol: ip.protocol,
        };
        let at = self.place(sender, name, now_ns);
        let Some(datagrams) = self.senders.get_mut(&sender) else {
            return Ok(None);
        };
        let datagram = &mut datagrams.list[at];
        let is_repeated =
            datagram.parts.contains(&(begin, end)) && datagram.data.get(begin..end) == Some(data);
        if datagram.is_dead || is_repeated {
            self.lost.push((sender.0, one(ip)));
            return Ok(None);
        }
        let (before, limit) = (datagram.data.len(), datagrams.bytes);
        let grows = end.saturating_sub(before);
        let has_room = limit + grows <= MOST_BYTES && self.bytes + grows <= MOST_BYTES_IN_ALL;
        datagram.held.packets += 1;
        datagram.held.bytes += ip.bytes.len() as u64;
        if !has_room || !datagram.fits(begin, end, ip.more_fragments) {
            let freed = datagram.kill();
            self.lost.push((sender.0, freed));
            datagrams.bytes -= before;
            self.bytes -= before;
            return Ok(None);
        }
        datagram.put(frame, ip, (begin, end));
        datagrams.bytes += grows;
        self.bytes += grows;
        if !datagram.is_whole() {
            return Ok(None);
        }
        Ok(self.take(sender, at).map(Datagram::into_whole))
    }

    /// Returns the place of a datagram among its sender's, which is made if it is new.
    fn place(&mut self, sender: Sender, name: Name, now_ns: u64) -> usize {
        let known = self.senders.get(&sender).and_then(|datagrams| {
            let mut all = datagrams.list.iter();
            all.position(|datagram| datagram.name == name)
        });
        if let Some(at) = known {
            return at;
        }
        // The oldest makes room, by number or by bytes for a datagram of any length.
        while let Some(datagrams) = self.senders.get(&sender)
            && (datagrams.list.len() >= MOST_DATAGRAMS || datagrams.bytes + MOST_DATA > MOST_BYTES)
        {
            self.lose(sender, 0);
        }
        let expires_ns = now_ns + PATIENCE_NS;
        let datagrams = self.senders.entry(sender).or_default();
        if datagrams.list.is_empty() {
            self.expiries.insert((expires_ns, sender));
        }
        datagrams.list.push_back(Datagram {
            name,
            expires_ns,
            is_dead: false,
            parts: Vec::new(),
            data: Vec::new(),
            len: None,
            head: Vec::new(),
            largest: 0,
            held: Segments {
                packets: 0,
                bytes: 0,
            },
            is_marked: false,
        });
        datagrams.list.len() - 1
    }

    fn take(&mut self, sender: Sender, at: usize) -> Option<Datagram> {
        let datagrams = self.senders.get_mut(&sender)?;
        let datagram = datagrams.list.remove(at)?;
        datagrams.bytes -= datagram.data.len();
        self.bytes -= datagram.data.len();
        if at == 0 {
            self.expiries.remove(&(datagram.expires_ns, sender));
            match datagrams.list.front() {
                Some(next) => {
                    self.expiries.insert((next.expires_ns, sender));
                }
                None => {
                    self.senders.remove(&sender);
                }
            }
        }
        Some(datagram)
    }

    /// Drops a datagram with all its fragments.
    fn lose(&mut self, sender: Sender, at: usize) {
        if let Some(datagram) = self.take(sender, at) {
            self.lost.push((sender.0, datagram.held));
        }
    }

    /// Drops the datagrams that had their time.
    pub(crate) fn expire(&mut self, now_ns: u64) {
        while let Some(&(at, sender)) = self.expiries.first()
            && at <= now_ns
        {
            self.lose(sender, 0);
        }
    }

    /// Drops the datagrams of a VM that is gone.
    pub(crate) fn forget(&mut self, row: VmRow) {
        for sender in [(row, false), (row, true)] {
            while self.senders.contains_key(&sender) {
                self.lose(sender, 0);
            }
        }
    }

    /// Returns when [`Reassembly::expire`] is due, ns.
    pub(crate) fn next_deadline_ns(&self) -> Option<u64> {
        self.expiries.first().map(|(at, _)| *at)
    }

    /// Returns the fragments that were dropped since the last call, by row.
    pub(crate) fn take_lost(&mut self) -> Vec<(VmRow, Segments)> {
        std::mem::take(&mut self.lost)
    }
}

impl Datagram {
    /// Whether a fragment agrees with those that came before.
    fn fits(&self, begin: usize, end: usize, has_more: bool) -> bool {
        let overlaps = |(b, e): &(usize, usize)| begin < *e && *b < end;
        let is_right_len = match (has_more, self.len) {
            (true, len) => len.is_none_or(|len| end < len),
            (false, len) => len.is_none() && self.data.len() <= end,
        };
        is_right_len && self.parts.len() < MOST_FRAGMENTS && !self.parts.iter().any(overlaps)
    }

    fn put(&mut self, frame: &[u8], ip: &Ipv4<'_>, (begin, end): (usize, usize)) {
        if self.data.len() < end {
            self.data.resize(end, 0);
        }
        self.data[begin..end].copy_from_slice(ip.payload());
        self.parts.push((begin, end));
        if !ip.more_fragments {
            self.len = Some(end);
        }
        if begin == 0 {
            self.head = frame[..L3_AT + HEADER_LEN].to_vec();
        }
        self.largest = self.largest.max(ip.bytes.len() as u32);
        self.is_marked |= ip.bytes[1] & CONGESTION_EXPERIENCED == CONGESTION_EXPERIENCED;
    }

    fn is_whole(&self) -> bool {
        let came: usize = self.parts.iter().map(|(begin, end)| end - begin).sum();
        self.len == Some(came)
    }

    /// Ends it. Returns the fragments that were held.
    fn kill(&mut self) -> Segments {
        self.is_dead = true;
        self.parts = Vec::new();
        self.data = Vec::new();
        let none = Segments {
            packets: 0,
            bytes: 0,
        };
        std::mem::replace(&mut self.held, none)
    }

    /// Its frame, without offload metadata: fragments have whole checksums.
    fn into_whole(self) -> Whole {
        let mut frame = self.head;
        frame[..VNET_LEN].fill(0);
        frame.extend_from_slice(&self.data);
        let ip = &mut frame[L3_AT..];
        let len = ip.len() as u16;
        ip[2..4].copy_from_slice(&len.to_be_bytes());
        ip[6..8].fill(0);
        if self.is_marked {
            ip[1] |= CONGESTION_EXPERIENCED;
        }
        ipv4::fill_checksum(ip, HEADER_LEN);
        Whole {
            frame,
            largest: self.largest,
        }
    }
}

/// A fragment as it is counted.
fn one(ip: &Ipv4<'_>) -> Segments {
    Segments {
        packets: 1,
        bytes: ip.bytes.len() as u64,
    }
}

#[cfg(test)]
#[path = "reassembly_test.rs"]
mod tests;
