//! The engine's end of the ring of first packets ([`slipgate_abi::first_packet`]).
use std::sync::atomic::{
    Ordering::{Acquire, Relaxed, Release, SeqCst},
    fence,
};

use slipgate_abi::{DropReason, VmRef, first_packet::RING_LEN};

use crate::{
    clock::SECOND_NS,
    datapath::Tables,
    port::{Batch, Frame, single},
    state::credits::{credits_of, take_in},
};

/// Age beyond which a packet that an earlier engine left is dropped, ns: its sender has given up, or
/// sent it again.
const MOST_AGE_NS: u64 = 5 * SECOND_NS;
/// Most looks at places that are claimed and not published, in one reading: some ten times as long as a
/// program takes, unless its CPU is taken away meanwhile.
const MOST_LOOKS: u32 = 500;

/// State of the ring.
#[derive(Debug)]
pub(super) struct FirstPackets {
    /// Number of the packet that is read next.
    head: u64,
    /// Number up to which an earlier engine may have left packets.
    left_until: u64,
    /// Whether there is a ring.
    is_there: bool,
    is_open: bool,
}

impl FirstPackets {
    /// Takes the ring over, where an earlier engine has left it.
    pub(super) fn new(tables: &impl Tables) -> Self {
        let row = tables.own_row();
        Self {
            head: row.ring_head().load(Acquire),
            left_until: row.ring_tail().load(Acquire),
            is_there: tables.first_packet(0).is_some(),
            is_open: false,
        }
    }

    /// Whether there is a ring: in user mode there is none.
    pub(super) fn is_there(&self) -> bool {
        self.is_there
    }

    /// Whether the next packet is there.
    pub(super) fn has_more(&self, tables: &impl Tables) -> bool {
        let place = tables.first_packet(self.head);
        place.is_some_and(|place| place.has(self.head))
    }

    /// Has the programs use the ring.
    pub(super) fn open(&mut self, tables: &impl Tables) {
        if self.is_there && !self.is_open {
            tables.own_row().ring_open().store(1, Release);
            self.is_open = true;
        }
    }

    /// Has the programs use the port, whose frames wake the engine. A program that has seen the ring
    /// open wakes it too, unless its packet is there now: so [`FirstPackets::has_more`] is to be asked
    /// again.
    pub(super) fn close(&mut self, tables: &impl Tables) {
        if self.is_open {
            tables.own_row().ring_open().store(0, SeqCst);
            fence(SeqCst);
            self.is_open = false;
        }
    }

    /// Moves up to `most` packets to the batch, and frees their places. Returns whether the ring was
    /// found empty. `is_before_port`: frames that were just read from the port are to follow these, so
    /// it waits a little for a place that a program has claimed and not published yet.
    pub(super) fn take(
        &mut self,
        tables: &impl Tables,
        batch: &mut Batch,
        (most, is_before_port): (usize, bool),
        now_ns: u64,
    ) -> bool {
        let first = self.head;
        let mut is_empty = false;
        if is_before_port {
            self.await_claimed(tables);
        }
        // Its length bounds the loop while programs go on filling the ring.
        for _ in 0..most.min(RING_LEN as usize) {
            let number = self.head;
            let Some(place) = tables.first_packet(number) else {
                is_empty = true;
                break;
            };
            let mut read = None;
            let is_kept = batch.push_more(|buffer| {
                read = place.read(number, buffer);
                read.map_or(0, |(len, _)| len)
            });
            let Some((len, at_ns)) = read else {
                is_empty = is_kept;
                break;
            };
            self.head = number.wrapping_add(1);
            let is_left = self.left_until.wrapping_sub(number) as i64 > 0;
            // The time may be another process's word.
            let is_old = is_left && at_ns.saturating_add(MOST_AGE_NS) < now_ns;
            if len > 0 && is_old {
                drop_old(tables, batch.last());
                batch.drop_last();
            }
        }
        if self.head != first {
            tables.own_row().ring_head().store(self.head, Release);
        }
        is_empty
    }

    /// Waits for the packets whose numbers are claimed now, one after the other, [`MOST_LOOKS`] long in
    /// all: a program that waits for its CPU must not stop the engine.
    fn await_claimed(&self, tables: &impl Tables) {
        let claimed_until = tables.own_row().ring_tail().load(Acquire);
        let mut number = self.head;
        let mut looks = 0;
        // The ring's length bounds it, whatever the count says.
        let until = self.head.wrapping_add(u64::from(RING_LEN));
        while number != claimed_until && number != until && looks < MOST_LOOKS {
            let place = tables.first_packet(number);
            if place.is_some_and(|place| place.has(number)) {
                number = number.wrapping_add(1);
                continue;
            }
            looks += 1;
            std::hint::spin_loop();
        }
    }

    /// Notes that the engine has read this many first packets by its port, behind what the ring had.
    pub(super) fn read_by_port(tables: &impl Tables, packets: u64) {
        if packets == 0 {
            return;
        }
        let row = tables.own_row();
        let (handed, taken) = (row.port_handed(), row.port_taken());
        // A frame that the kernel segmented arrives as several.
        let out = handed.load(Relaxed).saturating_sub(taken.load(Relaxed));
        taken.fetch_add(packets.min(out), Release);
    }
}

/// Counts a packet that is too old to be handled. Its row may be another VM's now.
fn drop_old(tables: &impl Tables, bytes: &[u8]) {
    let Some(frame) = Frame::parse(bytes) else {
        return;
    };
    let (row, id) = (frame.header.row(), frame.header.id);
    let is_its_vm = |vm: VmRef| vm.id().load(Relaxed) == id;
    let (stats, reason) = match tables.vm(row).is_some_and(is_its_vm) {
        true => (tables.stats(row), DropReason::EngineBusy),
        false => (tables.nobody(), DropReason::StaleVm),
    };
    if reason == DropReason::EngineBusy {
        take_in(tables, (row, false), credits_of(&frame));
    }
    stats.dropped(reason, single(frame.l3.len()));
}
