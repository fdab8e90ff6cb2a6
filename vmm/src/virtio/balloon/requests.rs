//! Requests of the driver, one of each queue in turn.
use std::sync::Arc;

use libc::iovec;

use super::{
    BalloonCounters, DEFLATE, INFLATE, MAX_LIST_BYTES, PAGE_BYTES, Pages, REPORTS, counters::count,
    pages::Given,
};
use crate::{
    GuestMemory,
    snapshot::Progress,
    virtio::{
        EnabledQueue, Signals,
        pieces::{self, Translation, total},
        ring::{Broken, Published, Ring},
    },
};

/// The queues in use, and what carries their requests out.
pub(super) struct Requests<'a> {
    rings: Vec<(u16, Ring)>,
    served: Served<'a>,
}

impl<'a> Requests<'a> {
    pub(super) fn new(
        queues: &[EnabledQueue],
        features: u64,
        memory: Arc<GuestMemory>,
        counters: &'a BalloonCounters,
    ) -> Result<Self, Broken> {
        let served = Served {
            pages: Pages::of(&memory),
            memory: Translation::new(memory),
            counters,
            list: Vec::new(),
            pieces: Vec::new(),
        };
        let ring = |queue: &EnabledQueue| {
            let ring = Ring::of(queue, features, &served.memory)?;
            Ok((queue.index, ring))
        };
        let rings: Result<_, Broken> = queues.iter().map(ring).collect();
        Ok(Self {
            rings: rings?,
            served,
        })
    }

    /// How far the queues are served. Requests are carried out in order, so none is taken and not
    /// given back.
    pub(super) fn progress(&self) -> Vec<Progress> {
        let rings = self.rings.iter();
        rings
            .map(|(index, ring)| ring.progress(*index, []))
            .collect()
    }

    /// Carries out a request of each queue that has one: no more, so that a command does not wait for
    /// what a guest adds. Returns whether there was any.
    pub(super) fn turn(&mut self, signals: &dyn Signals) -> Result<bool, Broken> {
        let mut is_busy = false;
        for (index, ring) in &mut self.rings {
            ring.quiet();
            if let Some(head) = ring.next()? {
                self.served.take(*index, ring, head)?;
                ring.push_used(head, 0);
                if ring.publish() == Published::Interrupt {
                    signals.queue(*index);
                }
                is_busy = true;
            }
        }
        Ok(is_busy)
    }

    /// Asks for notifications. Returns whether there is a request already.
    pub(super) fn listen(&mut self) -> Result<bool, Broken> {
        let mut is_busy = false;
        for (_, ring) in &mut self.rings {
            is_busy |= ring.listen()?;
        }
        Ok(is_busy)
    }
}

/// What carries requests out.
struct Served<'a> {
    pages: Pages,
    memory: Translation,
    counters: &'a BalloonCounters,
    /// Pages of a request, as numbers of 4 KiB; kept for its memory.
    list: Vec<u32>,
    pieces: Vec<iovec>,
}

impl Served<'_> {
    fn take(&mut self, index: u16, ring: &Ring, head: u16) -> Result<(), Broken> {
        match index {
            INFLATE => {
                self.read_list(ring, head)?;
                count(&self.counters.inflated_pages, self.list.len() as u64);
                self.list.sort_unstable();
                let mut next = 0;
                while let Some(first) = self.list.get(next).copied() {
                    next += 1;
                    // One that is listed twice is in the run already.
                    let mut last = first;
                    while let Some(page) = self.list.get(next)
                        && *page - last <= 1
                    {
                        last = *page;
                        next += 1;
                    }
                    let pages = u64::from(last - first) + 1;
                    let at = u64::from(first) * PAGE_BYTES;
                    let given = self.pages.give_back(at, pages * PAGE_BYTES);
                    self.note(given);
                }
            }
            DEFLATE => {
                self.read_list(ring, head)?;
                count(&self.counters.deflated_pages, self.list.len() as u64);
            }
            REPORTS.. => {
                // No guest has more to report than its memory. Without this bound each descriptor of a
                // chain could name all of it.
                let (mut reported, mut left) = (0, self.pages.total_bytes());
                ring.walk(head, &self.memory, |buffer| {
                    if !buffer.writable {
                        return Err(Broken::Direction);
                    }
                    let bytes = u64::from(buffer.bytes);
                    reported += bytes;
                    let part = bytes.min(left);
                    left -= part;
                    let mut given = self.pages.give_back(buffer.guest, part);
                    given.invalid += bytes - part;
                    self.note(given);
                    Ok(())
                })?;
                count(&self.counters.reported_bytes, reported);
            }
        }
        Ok(())
    }

    /// Reads the list of pages of a request.
    fn read_list(&mut self, ring: &Ring, head: u16) -> Result<(), Broken> {
        self.pieces.clear();
        self.list.clear();
        let (mut left, mut beyond) = (MAX_LIST_BYTES, 0);
        ring.walk(head, &self.memory, |buffer| {
            if buffer.writable {
                return Err(Broken::Direction);
            }
            let part = buffer.bytes.min(left);
            left -= part;
            beyond += u64::from(buffer.bytes - part);
            self.memory.append(buffer.guest, part, &mut self.pieces)
        })?;
        count(&self.counters.invalid_bytes, beyond / 4 * PAGE_BYTES);
        for at in (0..total(&self.pieces)).step_by(4) {
            let mut page = [0; 4];
            // SAFETY: the pieces are within the guest's memory, which `memory` keeps mapped.
            if unsafe { pieces::read(&self.pieces, at, &mut page) } == page.len() {
                self.list.push(u32::from_le_bytes(page));
            }
        }
        Ok(())
    }

    fn note(&self, given: Given) {
        let Given {
            discarded,
            kept,
            invalid,
            failed,
        } = given;
        for (counter, many) in [
            (&self.counters.discarded_bytes, discarded),
            (&self.counters.kept_bytes, kept),
            (&self.counters.invalid_bytes, invalid),
            (&self.counters.failed, failed),
        ] {
            count(counter, many);
        }
    }
}
