//! Frames for guests whose MAC is not known.
//!
//! # Theory of operation
//! The programs learn a guest's MAC from its frames, and until then address frames to all. A guest's
//! stack takes a datagram of its own that comes so, but no TCP segment: a connection by a forward to a
//! guest that has sent nothing yet would begin with its client's second SYN, a second later. So a frame
//! for such a guest is kept here ([`Unaddressed::keeps`]), the guest is asked by ARP at once, then every
//! [`ASK_INTERVAL_NS`], and the frame is sent when the programs know its MAC. One that was kept for
//! [`PATIENCE_NS`], or that finds no room, is sent to all: nothing is dropped here.
//!
//! The programs answer some frames of the guest themselves, so the MAC may be known before the engine
//! reads a frame: it is looked at in each turn.
use std::collections::{BTreeMap, VecDeque};

use slipgate_abi::{Command, VmId, VmRow};

use crate::{
    arp,
    clock::{MILLISECOND_NS, SECOND_NS},
    datapath::{Datapath, Tables},
    port::{ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Frame, VirtioNetHdr},
    state::Core,
};

/// Time for which a frame waits for its guest's MAC, ns: a guest that comes up meanwhile gets it.
const PATIENCE_NS: u64 = 2 * SECOND_NS;
/// Interval between two ARP requests for a guest for which frames wait, ns.
const ASK_INTERVAL_NS: u64 = 250 * MILLISECOND_NS;
/// Most frames that wait for one guest.
const MOST_FRAMES: usize = 32;
/// Most bytes of the frames that wait for one guest.
const MOST_BYTES: usize = 64 << 10;
/// Most guests for which frames wait, all of which a turn looks at.
const MOST_GUESTS: usize = 64;

/// Frames that wait until their guest's MAC is known.
#[derive(Debug, Default)]
pub(crate) struct Unaddressed {
    guests: BTreeMap<VmRow, Waiting>,
}

#[derive(Debug)]
struct Waiting {
    id: VmId,
    frames: VecDeque<Vec<u8>>,
    bytes: usize,
    next_ask_ns: u64,
    /// When the first of them is sent to all, ns.
    until_ns: u64,
}

impl Unaddressed {
    /// Whether no frame waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.guests.is_empty()
    }

    /// Keeps a frame that goes to a guest whose MAC is not known. Returns whether it is kept: else it is
    /// to be sent.
    pub(crate) fn keeps(&mut self, tables: &impl Tables, frame: &[u8], now_ns: u64) -> bool {
        let Some((row, id)) = to_one_guest(frame) else {
            return false;
        };
        let is_known = tables.vm(row).is_none_or(|vm| vm.knows_guest_mac());
        // What comes behind others that wait must not overtake them.
        let is_behind = !self.is_empty() && self.guests.contains_key(&row);
        (!is_known || is_behind) && self.keep(row, id, frame, now_ns)
    }

    /// Keeps a frame for a guest. Returns whether there was room.
    fn keep(&mut self, row: VmRow, id: VmId, frame: &[u8], now_ns: u64) -> bool {
        let full = self.guests.len() >= MOST_GUESTS;
        let waiting = match self.guests.get_mut(&row) {
            Some(waiting) => waiting,
            None if full => return false,
            None => self.guests.entry(row).or_insert(Waiting {
                id,
                frames: VecDeque::new(),
                bytes: 0,
                next_ask_ns: now_ns,
                until_ns: now_ns + PATIENCE_NS,
            }),
        };
        let has_room = waiting.id == id
            && waiting.frames.len() < MOST_FRAMES
            && waiting.bytes + frame.len() <= MOST_BYTES;
        if has_room {
            waiting.bytes += frame.len();
            waiting.frames.push_back(frame.to_vec());
        }
        has_room
    }

    /// Takes the frames, in their order, of guests whose MAC is known now or whose frames have waited
    /// for long enough.
    fn take_due(&mut self, tables: &impl Tables, now_ns: u64) -> Vec<Vec<u8>> {
        let mut due = Vec::new();
        self.guests.retain(|row, waiting| {
            let waits = now_ns < waiting.until_ns
                && tables.vm(*row).is_some_and(|vm| !vm.knows_guest_mac());
            if !waits {
                due.extend(waiting.frames.drain(..));
            }
            waits
        });
        due
    }

    /// Takes the frames of all guests.
    pub(crate) fn take_all(&mut self) -> Vec<Vec<u8>> {
        let guests = std::mem::take(&mut self.guests);
        guests
            .into_values()
            .flat_map(|waiting| waiting.frames)
            .collect()
    }

    /// Rows of the guests that are to be asked for their MAC now.
    fn take_due_to_ask(&mut self, now_ns: u64) -> Vec<VmRow> {
        let due = self
            .guests
            .iter_mut()
            .filter(|(_, waiting)| waiting.next_ask_ns <= now_ns);
        due.map(|(row, waiting)| {
            waiting.next_ask_ns = now_ns + ASK_INTERVAL_NS;
            *row
        })
        .collect()
    }

    /// Returns when a guest is to be asked, or a frame to be sent as it is, ns.
    pub(crate) fn next_deadline_ns(&self) -> Option<u64> {
        let of = |waiting: &Waiting| waiting.next_ask_ns.min(waiting.until_ns);
        self.guests.values().map(of).min()
    }
}

impl<D: Datapath> Core<D> {
    /// Asks guests for their MAC, and takes the frames that need not wait any more.
    pub(crate) fn go_on_addressing(&mut self, now_ns: u64) -> Vec<Vec<u8>> {
        let due = self.unaddressed.take_due(&self.nat.datapath, now_ns);
        for row in self.unaddressed.take_due_to_ask(now_ns) {
            if let Some(vm) = self.vms.get(row) {
                let request = arp::request(&vm.net);
                let vnet = VirtioNetHdr::default();
                // A full outbox is ignored: the request is repeated.
                let queue = &mut self.out.queue;
                let _ = queue.to_guest(&vm.net, ETHERTYPE_ARP, vnet, &request);
            }
        }
        due
    }
}

/// Row and id of the VM to whose guest alone a frame goes, as an IP packet.
fn to_one_guest(frame: &[u8]) -> Option<(VmRow, VmId)> {
    let Frame {
        header,
        ethertype,
        l3,
        ..
    } = Frame::parse(frame)?;
    let to_one = match Command::from_u8(header.code)? {
        // To its translated address, which is one host's.
        Command::Deliver => true,
        Command::ToGuest => match ethertype {
            // From 224.0.0.0 on are groups, and the broadcast address.
            ETHERTYPE_IPV4 => *l3.get(16)? < 224,
            ETHERTYPE_IPV6 => *l3.get(24)? != 0xff,
            _ => false,
        },
        _ => false,
    };
    to_one.then(|| (header.row(), VmId::new(header.id)))
}

#[cfg(test)]
#[path = "unaddressed_test.rs"]
mod tests;
