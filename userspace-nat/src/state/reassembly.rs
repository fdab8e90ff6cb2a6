//! Reassembly of fragmented datagrams (RFC 791 section 3.2, RFC 8200 section 4.5, RFC 4787 REQ-14).
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
//! A first fragment of IPv6 has all headers up to and with the transport header (RFC 7112), and
//! none but the fragment header in between, or it ends its datagram. A fragment that is a whole
//! datagram is no part of another one, whatever their identification (RFC 6946).
//!
//! A VM's guest, the peers of its flows, and strangers that send to its forwards have
//! [`MOST_DATAGRAMS`] and [`MOST_BYTES`] each, of each family; the oldest datagram makes room. So no
//! stranger takes the room of a flow. All VMs together have [`MOST_BYTES_IN_ALL`], and of
//! these the strangers [`MOST_BYTES_OF_STRANGERS`]. A datagram of which a
//! stranger's fragment came first is a peer's once its first fragment shows a flow.
use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    net::IpAddr,
};

use slipgate_abi::{VmRow, segment::Segments};

use crate::{
    clock::SECOND_NS,
    packet::{Fragment, ipv6::FRAGMENT_HEADER_LEN},
    port::{Frame, L3_AT},
};

mod whole;

use whole::{MOST_DATA, check_headers, check_lengths, frame_of, head_of, is_marked};
pub(crate) use whole::{Unfit, Whole};

/// Most datagrams of a sender at once.
const MOST_DATAGRAMS: usize = 16;
/// Most bytes of a sender's datagrams: a few of the largest.
const MOST_BYTES: usize = 256 << 10;
/// Most bytes of all datagrams.
const MOST_BYTES_IN_ALL: usize = 32 << 20;
/// Most bytes of all strangers' datagrams among them.
const MOST_BYTES_OF_STRANGERS: usize = 8 << 20;
/// Most fragments of a datagram: the largest over a link of 576 bytes, the least that every host
/// takes (RFC 791), has 119.
pub(super) const MOST_FRAGMENTS: usize = 128;
/// Time for which an IPv4 datagram waits for the rest, ns, as Linux does (`net.ipv4.ipfrag_time`).
const PATIENCE_NS: u64 = 30 * SECOND_NS;
/// The same of IPv6 (RFC 8200 section 4.5).
const PATIENCE6_NS: u64 = 60 * SECOND_NS;

/// Time for which a datagram of a family waits for the rest, ns.
pub(super) fn patience_ns(is_ipv6: bool) -> u64 {
    match is_ipv6 {
        true => PATIENCE6_NS,
        false => PATIENCE_NS,
    }
}

/// Who sends a datagram.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Sender {
    /// Row of the VM.
    pub(crate) row: VmRow,
    pub(crate) origin: Origin,
    /// Whether the datagrams are of IPv6.
    pub(crate) is_ipv6: bool,
}

/// Where a VM's datagrams come from.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Origin {
    /// Its guest.
    Guest,
    /// The world, in a flow.
    Peer,
    /// The world, in no flow so far.
    Stranger,
}

impl Origin {
    const ALL: [Self; 3] = [Self::Guest, Self::Peer, Self::Stranger];

    /// Where else the rest of its datagrams may be.
    fn other(self) -> Option<Self> {
        match self {
            Self::Guest => None,
            Self::Peer => Some(Self::Stranger),
            Self::Stranger => Some(Self::Peer),
        }
    }
}

impl Sender {
    fn patience_ns(self) -> u64 {
        patience_ns(self.is_ipv6)
    }
}

/// The datagrams that are not whole.
#[derive(Debug, Default)]
pub(crate) struct Reassembly {
    senders: HashMap<Sender, Datagrams>,
    /// Time at which each sender's oldest datagram expires, ns.
    expiries: BTreeSet<(u64, Sender)>,
    bytes: usize,
    /// Those of strangers among them.
    bytes_of_strangers: usize,
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
    /// Headers of the first fragment, up to the end of its IP header; empty before it came.
    head: Vec<u8>,
    /// Number of the datagram's protocol, from the first fragment.
    protocol: u8,
    /// Largest fragment, L3 bytes.
    largest: u32,
    /// Fragments that are held, as they came.
    held: Segments,
    is_marked: bool,
}

/// Fields that the fragments of one datagram share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Name {
    source: IpAddr,
    destination: IpAddr,
    identification: u32,
    /// Of IPv4 alone: in IPv6 it may differ among fragments of a datagram.
    protocol: Option<u8>,
    /// Link by which those of the world come: another's network could guess the rest, to inject data.
    link: u16,
}

impl Reassembly {
    /// Takes a fragment, which is in `frame`. Returns its datagram if that is whole now. What is
    /// dropped is counted by [`Reassembly::take_lost`].
    ///
    /// # Errors
    /// It is no possible fragment, and is to be dropped by the caller.
    pub(crate) fn add(
        &mut self,
        sender: Sender,
        frame: &[u8],
        fragment: &Fragment<'_>,
        now_ns: u64,
    ) -> Result<Option<Whole>, Unfit> {
        let data = fragment.data;
        let (begin, end) = (fragment.begin, fragment.begin + data.len());
        check_lengths(fragment)?;
        let name = Name {
            source: fragment.source,
            destination: fragment.destination,
            identification: fragment.identification,
            protocol: (!sender.is_ipv6).then_some(fragment.protocol),
            link: Frame::parse(frame).map_or(0, |frame| frame.link),
        };
        let (sender, at) = self.place(sender, name, now_ns);
        let Some(datagrams) = self.senders.get_mut(&sender) else {
            return Ok(None);
        };
        let datagram = &mut datagrams.list[at];
        if let Err(unfit) = check_headers(fragment) {
            self.end(sender, at);
            return Err(unfit);
        }
        let is_repeated =
            datagram.parts.contains(&(begin, end)) && datagram.data.get(begin..end) == Some(data);
        if datagram.is_dead || is_repeated {
            self.lost.push((sender.row, one(fragment)));
            return Ok(None);
        }
        let (before, limit) = (datagram.data.len(), datagrams.bytes);
        let grows = end.saturating_sub(before);
        let has_room = limit + grows <= MOST_BYTES
            && self.bytes + grows <= MOST_BYTES_IN_ALL
            && (sender.origin != Origin::Stranger
                || self.bytes_of_strangers + grows <= MOST_BYTES_OF_STRANGERS);
        datagram.held.packets += 1;
        datagram.held.bytes += fragment.packet.len() as u64;
        if !has_room || !datagram.fits(begin, end, fragment.has_more) {
            self.end(sender, at);
            return Ok(None);
        }
        datagram.put(frame, fragment, (begin, end));
        let is_whole = datagram.is_whole();
        datagrams.bytes += grows;
        self.grow(sender, grows);
        if !is_whole {
            return Ok(None);
        }
        Ok(self.take(sender, at).map(Datagram::into_whole))
    }

    /// Returns the sender of a datagram and its place among theirs; it is made if it is new.
    fn place(&mut self, sender: Sender, name: Name, now_ns: u64) -> (Sender, usize) {
        if let Some(at) = self.find(sender, name) {
            return (sender, at);
        }
        let other = sender
            .origin
            .other()
            .map(|origin| Sender { origin, ..sender });
        let known = other.and_then(|other| Some((other, self.find(other, name)?)));
        if let Some((other, at)) = known
            && other.origin == Origin::Peer
        {
            return (other, at);
        }
        // That of a stranger, if there is one: a flow has it now.
        let known = known.and_then(|(other, at)| self.take(other, at));
        let datagram = known.unwrap_or_else(|| Datagram::new(name, now_ns + sender.patience_ns()));
        // The oldest makes room, by number or by bytes for a datagram of any length.
        while let Some(datagrams) = self.senders.get(&sender)
            && (datagrams.list.len() >= MOST_DATAGRAMS || datagrams.bytes + MOST_DATA > MOST_BYTES)
        {
            self.lose(sender, 0);
        }
        (sender, self.put(sender, datagram))
    }

    fn find(&self, sender: Sender, name: Name) -> Option<usize> {
        let datagrams = self.senders.get(&sender)?;
        let mut all = datagrams.list.iter();
        all.position(|datagram| datagram.name == name)
    }

    /// Puts a datagram in its place by age. Returns the place.
    fn put(&mut self, sender: Sender, datagram: Datagram) -> usize {
        let (expires_ns, bytes) = (datagram.expires_ns, datagram.data.len());
        let datagrams = self.senders.entry(sender).or_default();
        let at = datagrams
            .list
            .partition_point(|other| other.expires_ns <= expires_ns);
        if at == 0 {
            if let Some(oldest) = datagrams.list.front() {
                self.expiries.remove(&(oldest.expires_ns, sender));
            }
            self.expiries.insert((expires_ns, sender));
        }
        datagrams.list.insert(at, datagram);
        datagrams.bytes += bytes;
        self.grow(sender, bytes);
        at
    }

    fn grow(&mut self, sender: Sender, bytes: usize) {
        self.bytes += bytes;
        if sender.origin == Origin::Stranger {
            self.bytes_of_strangers += bytes;
        }
    }

    fn shrink(&mut self, sender: Sender, bytes: usize) {
        self.bytes -= bytes;
        if sender.origin == Origin::Stranger {
            self.bytes_of_strangers -= bytes;
        }
    }

    fn take(&mut self, sender: Sender, at: usize) -> Option<Datagram> {
        let datagrams = self.senders.get_mut(&sender)?;
        let datagram = datagrams.list.remove(at)?;
        datagrams.bytes -= datagram.data.len();
        let bytes = datagram.data.len();
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
        self.shrink(sender, bytes);
        Some(datagram)
    }

    /// Ends a datagram: its fragments are dropped, and it stays so that those to come are too.
    fn end(&mut self, sender: Sender, at: usize) {
        let Some(datagrams) = self.senders.get_mut(&sender) else {
            return;
        };
        let datagram = &mut datagrams.list[at];
        let bytes = datagram.data.len();
        datagrams.bytes -= bytes;
        self.lost.push((sender.row, datagram.kill()));
        self.shrink(sender, bytes);
    }

    /// Drops a datagram with all its fragments.
    fn lose(&mut self, sender: Sender, at: usize) {
        if let Some(datagram) = self.take(sender, at) {
            self.lost.push((sender.row, datagram.held));
        }
    }

    /// Drops the datagrams that had their time. Returns the first fragments, by row, of guests' IPv6
    /// datagrams among them: a guest is told (RFC 8200 section 4.5).
    pub(crate) fn expire(&mut self, now_ns: u64) -> Vec<(VmRow, Vec<u8>)> {
        let mut overdue = Vec::new();
        while let Some(&(at, sender)) = self.expiries.first()
            && at <= now_ns
        {
            if sender.is_ipv6
                && sender.origin == Origin::Guest
                && let Some(datagrams) = self.senders.get(&sender)
                && let Some(first) = datagrams.list.front().and_then(Datagram::first_fragment)
            {
                overdue.push((sender.row, first));
            }
            self.lose(sender, 0);
        }
        overdue
    }

    /// Drops the datagrams of a VM that is gone.
    pub(crate) fn forget(&mut self, row: VmRow) {
        let each = Origin::ALL.map(|origin| [(origin, false), (origin, true)]);
        for (origin, is_ipv6) in each.into_iter().flatten() {
            let sender = Sender {
                row,
                origin,
                is_ipv6,
            };
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
    fn new(name: Name, expires_ns: u64) -> Self {
        Self {
            name,
            expires_ns,
            is_dead: false,
            parts: Vec::new(),
            data: Vec::new(),
            len: None,
            head: Vec::new(),
            protocol: 0,
            largest: 0,
            held: Segments {
                packets: 0,
                bytes: 0,
            },
            is_marked: false,
        }
    }

    /// Whether a fragment agrees with those that came before.
    fn fits(&self, begin: usize, end: usize, has_more: bool) -> bool {
        let overlaps = |(b, e): &(usize, usize)| begin < *e && *b < end;
        let is_right_len = match (has_more, self.len) {
            (true, len) => len.is_none_or(|len| end < len),
            (false, len) => len.is_none() && self.data.len() <= end,
        };
        is_right_len && self.parts.len() < MOST_FRAGMENTS && !self.parts.iter().any(overlaps)
    }

    fn put(&mut self, frame: &[u8], fragment: &Fragment<'_>, (begin, end): (usize, usize)) {
        if self.data.len() < end {
            self.data.resize(end, 0);
        }
        self.data[begin..end].copy_from_slice(fragment.data);
        self.parts.push((begin, end));
        if !fragment.has_more {
            self.len = Some(end);
        }
        if begin == 0 {
            self.head = head_of(frame, fragment.version());
            self.protocol = fragment.protocol;
        }
        self.largest = self.largest.max(fragment.packet.len() as u32);
        self.is_marked |= is_marked(fragment);
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

    /// The first fragment of an IPv6 datagram, if it came. The datagram is its name, and the fragments
    /// behind it have come or not.
    fn first_fragment(&self) -> Option<Vec<u8>> {
        let head = self.head.get(L3_AT..).filter(|_| !self.is_dead)?;
        let (_, end) = self.parts.iter().find(|(begin, _)| *begin == 0)?;
        let [a, b, c, d] = self.name.identification.to_be_bytes();
        let header: [u8; FRAGMENT_HEADER_LEN] = [self.protocol, 0, 0, 1, a, b, c, d];
        Some([head, &header, self.data.get(..*end)?].concat())
    }

    fn into_whole(self) -> Whole {
        Whole {
            frame: frame_of(self.head, self.protocol, &self.data, self.is_marked),
            largest: self.largest,
        }
    }
}

/// A fragment as it is counted.
fn one(fragment: &Fragment<'_>) -> Segments {
    Segments {
        packets: 1,
        bytes: fragment.packet.len() as u64,
    }
}

#[cfg(test)]
#[path = "reassembly_test.rs"]
mod tests;
