//! One ring of the guest's network card: frames out of its chains, and into them.
//!
//! The driver can write all of a ring, its descriptors and its buffers at any time. Each descriptor is
//! read once, into a list; each header is copied once, with the frame, and judged as copied. What can't
//! be is [`Broken`]: the ring is not touched any more until the VMM sets it up again.
//!
//! Of a long frame of TCP only the beginning is copied, which has all headers. The rest of it stays in its
//! chain, for a socket to take it from there ([`Rest`]); the chain is given back when that is done with.
//!
//! A frame in several chains becomes the driver's by one store of the used index, behind all of its
//! elements: a driver that saw the first chain alone would take the frame for a broken one.
use std::{
    fs::File,
    io::Write as _,
    os::fd::OwnedFd,
    os::unix::net::UnixStream,
    sync::{Arc, atomic::Ordering},
};

use slipgate_abi::Protocol;
use virtio_queue::{Queue, QueueOwnedT as _, QueueT};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

use super::message::Wrong;
use crate::{
    guest_buffers::Buffer,
    packet::Ip,
    payload::Rest,
    port::{ETHERNET_LEN, L3_AT, VNET_LEN},
    space::{Head, Parts, Space},
};

/// Chains in a ring at most.
const MOST_CHAINS: u16 = 4_096;
/// Offset of a used ring's elements, and length of each (virtio 1.2, section 2.7.8).
const USED_ELEMENTS: u64 = 4;
const USED_ELEMENT_LEN: u64 = 8;

/// Length of a frame, with its header of [`VNET_LEN`] bytes, up to which it is copied whole. Of frames that
/// are not segmented it is more than most have; what a copy costs is in longer ones.
const SHORT: usize = 4_096;
/// What is copied of a longer frame of TCP: as much as its headers may have, without those extensions of
/// IPv6 with which it is not taken for one of TCP.
pub(super) const BEGINNING: usize = VNET_LEN + ETHERNET_LEN + MOST_IP + MOST_TCP;
const MOST_IP: usize = 60;
const MOST_TCP: usize = 60;

/// The driver has broken the ring's rules.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Broken;

/// A frame of the guest.
#[derive(Debug)]
pub(super) enum Taken {
    /// A frame of this length, with its header of [`VNET_LEN`] bytes. Its chain is given back, unless there
    /// is a rest, which was not copied: then [`Ring::finish`] does it.
    Frame(usize, Option<Rest>),
    /// A chain of so many bytes that can't be one.
    Malformed(usize),
    /// There is none, and a kick tells of the next.
    Nothing,
}

/// Result of putting a frame for the guest into its ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Put {
    /// It is in the ring.
    Yes,
    /// The ring has too few buffers for now; a kick tells of more.
    Later,
    /// It is longer than the driver's buffers.
    TooLong,
}

/// A ring, as the VMM has set it up.
#[derive(Debug, Default)]
pub(super) struct Ring {
    /// The queue's state; `None` while the ring is stopped.
    queue: Option<Queue>,
    is_enabled: bool,
    is_broken: bool,
    /// Settings for its next start.
    size: u16,
    /// Where it goes on, as the VMM has told or was told last.
    base: u16,
    /// The VMM's addresses of descriptors, used and available ring.
    at: Option<[u64; 3]>,
    pub(super) kick: Option<OwnedFd>,
    call: Option<File>,
    /// Where the VMM is told that the ring is broken, until it was.
    err: Option<File>,
    pub(super) counts: Counts,
    /// Available index up to which chains were seen; of those that were too few, some are not taken.
    seen: u16,
    /// Whether the driver is to be told of chains that were given back.
    owes_call: bool,
    /// Whether chains were given back of which the queue did not count all: it can't tell that the
    /// driver does not want to know.
    must_call: bool,
    /// Buffers of chains that are being filled, reused.
    buffers: Vec<Buffer>,
    heads: Vec<Head>,
    /// Chain of the frame whose rest was not copied, and the list for its buffers, reused.
    open: Option<u16>,
    rest: Vec<Buffer>,
}

/// Frames and bytes that a ring has carried.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Counts {
    pub(super) frames: u64,
    /// Bytes of the frames, from the Ethernet header on.
    pub(super) bytes: u64,
    /// Chains in which they were.
    pub(super) chains: u64,
    /// Bytes that sockets took straight out of them, or that were received straight into them.
    pub(super) direct: u64,
    /// Times that the driver was told of chains, and that it did not want to know or could not be told.
    pub(super) calls: u64,
    pub(super) calls_suppressed: u64,
}

impl Counts {
    pub(super) fn frame(&mut self, len: usize) {
        self.frames += 1;
        self.bytes += len as u64;
    }
}

/// Parts of the ring's format that the driver has accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Format {
    /// Length of a frame's header: 10 bytes, or 12 with the number of buffers.
    pub(super) header_len: usize,
    /// Whether a frame may be in several chains.
    pub(super) merges: bool,
    pub(super) event_idx: bool,
}

impl Ring {
    pub(super) fn set_size(&mut self, size: u32) -> Result<(), Wrong> {
        self.size = u16::try_from(size).map_err(|_| Wrong::Ring)?;
        match self.size.is_power_of_two() && self.size <= MOST_CHAINS {
            true => Ok(()),
            false => Err(Wrong::Ring),
        }
    }

    pub(super) fn set_base(&mut self, base: u32) -> Result<(), Wrong> {
        self.base = u16::try_from(base).map_err(|_| Wrong::Ring)?;
        Ok(())
    }

    /// Sets the VMM's addresses of descriptors, used and available ring.
    pub(super) fn set_addresses(&mut self, at: [u64; 3]) {
        self.at = Some(at);
    }

    pub(super) fn set_call(&mut self, call: Option<OwnedFd>) {
        self.call = call.and_then(never_waiting);
        // It may have missed one, unless the ring is at its beginning.
        let may_have_missed = self.queue.is_some() || self.base != 0;
        self.owes_call = self.call.is_some() && may_have_missed;
    }

    pub(super) fn set_err(&mut self, err: Option<OwnedFd>) {
        self.err = err.and_then(never_waiting);
    }

    /// Tells the VMM once that the ring is broken, if it is.
    pub(super) fn tell_broken(&mut self) {
        if self.is_broken
            && let Some(mut err) = self.err.take()
        {
            let _ = err.write(&1_u64.to_ne_bytes());
        }
    }

    pub(super) fn enable(&mut self, is_enabled: bool) {
        self.is_enabled = is_enabled;
    }

    pub(super) fn is_running(&self) -> bool {
        self.queue.is_some() && self.is_enabled && !self.is_broken
    }

    pub(super) fn is_broken(&self) -> bool {
        self.is_broken
    }

    /// Starts the ring. `address`: the guest's address of one of the VMM's.
    pub(super) fn start(
        &mut self,
        format: Format,
        memory: &GuestMemoryMmap,
        address: impl Fn(u64) -> Option<GuestAddress>,
    ) -> Result<(), Wrong> {
        let at = self.at.ok_or(Wrong::Ring)?;
        let address = |nth: usize| address(at[nth]).ok_or(Wrong::Ring);
        let made = || -> Result<Queue, virtio_queue::Error> {
            let mut queue = Queue::new(MOST_CHAINS)?;
            queue.try_set_size(self.size)?;
            Ok(queue)
        };
        let mut queue = made().map_err(|_| Wrong::Ring)?;
        let (descriptors, used, available) = (address(0)?, address(1)?, address(2)?);
        queue
            .try_set_desc_table_address(descriptors)
            .and_then(|()| queue.try_set_used_ring_address(used))
            .and_then(|()| queue.try_set_avail_ring_address(available))
            .map_err(|_| Wrong::Ring)?;
        queue.set_event_idx(format.event_idx);
        // Whatever was taken was given back, so the ring goes on behind that. What the VMM has told is no
        // better: Cloud Hypervisor takes the driver's own index when it connects again and when it restores
        // a guest, and the guest would never get back the buffers that are in the ring by then.
        let used = queue.used_idx(memory, Ordering::Acquire);
        self.base = used.map_err(|_| Wrong::Ring)?.0;
        // Of what was given back before, whose interrupt may not have come.
        self.owes_call |= self.call.is_some() && self.base != 0;
        queue.set_next_avail(self.base);
        queue.set_next_used(self.base);
        queue.set_ready(true);
        if !queue.is_valid(memory) {
            return Err(Wrong::Ring);
        }
        self.is_broken = false;
        self.queue = Some(queue);
        Ok(())
    }

    /// Stops the ring, which goes on where it is at its next start.
    pub(super) fn pause(&mut self) {
        if let Some(queue) = self.queue.take() {
            self.base = queue.next_avail();
            self.open = None;
        }
    }

    /// Stops the ring, until the VMM gives it another kick. Returns where it is to go on.
    pub(super) fn stop(&mut self) -> u16 {
        self.pause();
        self.kick = None;
        self.base
    }

    /// Copies the guest's next frame to the beginning of `into`, or its beginning.
    pub(super) fn take(
        &mut self,
        format: Format,
        memory: &Arc<GuestMemoryMmap>,
        into: &mut [u8],
    ) -> Result<Taken, Broken> {
        let Some(queue) = self.queue.as_mut().filter(|_| !self.is_broken) else {
            return Ok(Taken::Nothing);
        };
        self.buffers.clear();
        let taken = next_chain(queue, memory, &mut self.buffers, false);
        let taken = taken.and_then(|head| {
            let Some(head) = head else {
                self.seen = queue.next_avail();
                return Ok(Taken::Nothing);
            };
            let taken = copy_out(&self.buffers, format, memory, into, &mut self.rest)?;
            match taken {
                Taken::Frame(_, Some(_)) => self.open = Some(head),
                _ => give_back(queue, memory, head, 0)?,
            }
            Ok(taken)
        });
        match taken {
            Ok(Taken::Frame(..) | Taken::Malformed(_)) => {
                self.owes_call = true;
                self.counts.chains += 1;
            }
            Ok(Taken::Nothing) => {}
            Err(Broken) => self.is_broken = true,
        }
        taken
    }

    /// Gives back the chain of the frame that was taken last, whose rest this is.
    pub(super) fn finish(&mut self, memory: &GuestMemoryMmap, rest: Rest) -> Result<(), Broken> {
        self.counts.direct += rest.sent() as u64;
        self.rest = rest.into_buffers();
        let open = self.open.take();
        let Some(queue) = self.queue.as_mut().filter(|_| !self.is_broken) else {
            return Ok(());
        };
        let given = match open {
            Some(head) => give_back(queue, memory, head, 0),
            None => Ok(()),
        };
        self.is_broken |= given.is_err();
        given
    }

    /// Puts a frame into the ring, behind its header of [`VNET_LEN`] bytes.
    pub(super) fn put(
        &mut self,
        format: Format,
        memory: &GuestMemoryMmap,
        parts: [&[u8]; 2],
    ) -> Result<Put, Broken> {
        let needed = format.header_len + parts[1].len();
        let found = self.find_chains(format, memory, needed)?;
        if found != Put::Yes {
            return Ok(found);
        }
        let Some(queue) = self.queue.as_mut() else {
            return Ok(Put::Later);
        };
        let written = copy_in(&self.buffers, format, memory, parts, self.heads.len());
        let given = written.and_then(|()| give_back_all(queue, memory, &self.heads, needed));
        self.gave_back(self.heads.len(), given)
    }

    /// Notes that so many chains of a frame were given back.
    fn gave_back(&mut self, chains: usize, given: Result<(), Broken>) -> Result<Put, Broken> {
        self.is_broken |= given.is_err();
        self.owes_call = true;
        self.must_call |= chains > 1;
        self.counts.chains += chains as u64;
        given.map(|()| Put::Yes)
    }

    /// Room for a frame of which `at` bytes are headers, without that of [`VNET_LEN`] bytes, and `most` at
    /// most are payload. Its chains stay available.
    pub(super) fn space(
        &mut self,
        format: Format,
        memory: &Arc<GuestMemoryMmap>,
        (at, most): (usize, usize),
    ) -> Option<Space> {
        let at = format.header_len + at;
        let from = self.queue.as_ref()?.next_avail();
        // One that has broken the ring is told so by the next frame.
        let found = self.find_chains(format, memory, at + most);
        self.queue.as_mut()?.set_next_avail(from);
        if found != Ok(Put::Yes) {
            return None;
        }
        let parts = Parts {
            buffers: std::mem::take(&mut self.buffers),
            heads: std::mem::take(&mut self.heads),
            from,
            at,
        };
        match Space::new(memory, parts, most) {
            Ok(space) => Some(space),
            Err(unused) => {
                (self.buffers, self.heads) = (unused.buffers, unused.heads);
                None
            }
        }
    }

    /// Is done with a space of which nothing came.
    pub(super) fn forget(&mut self, space: Space) {
        let parts = space.into_parts();
        (self.buffers, self.heads) = (parts.buffers, parts.heads);
    }

    /// Puts the frame into the ring whose payload, `len` bytes, is in a space: its headers, behind that of
    /// [`VNET_LEN`] bytes. The space is the last that was found, and no frame was put since.
    pub(super) fn put_space(
        &mut self,
        format: Format,
        memory: &GuestMemoryMmap,
        headers: [&[u8]; 2],
        (space, len): (Space, usize),
    ) -> Result<Put, Broken> {
        let parts = space.into_parts();
        (self.buffers, self.heads) = (parts.buffers, parts.heads);
        let needed = parts.at + len;
        let Some(queue) = self.queue.as_mut().filter(|_| !self.is_broken) else {
            return Err(Broken);
        };
        let mut room = 0;
        let last = self.heads.iter().position(|(_, more)| {
            room += more;
            room >= needed
        });
        let is_in_place =
            queue.next_avail() == parts.from && format.header_len + headers[1].len() == parts.at;
        let Some(last) = last.filter(|_| is_in_place) else {
            return Err(Broken);
        };
        let filled = last + 1;
        queue.set_next_avail(parts.from.wrapping_add(filled as u16));
        let written = copy_in(&self.buffers, format, memory, headers, filled);
        let given =
            written.and_then(|()| give_back_all(queue, memory, &self.heads[..filled], needed));
        if given.is_ok() {
            self.counts.direct += len as u64;
        }
        self.gave_back(filled, given)
    }

    /// Takes chains that have room for so many bytes, into the lists ([`Put::Yes`]). Otherwise none is
    /// taken.
    fn find_chains(
        &mut self,
        format: Format,
        memory: &GuestMemoryMmap,
        needed: usize,
    ) -> Result<Put, Broken> {
        let Some(queue) = self.queue.as_mut().filter(|_| !self.is_broken) else {
            return Ok(Put::Later);
        };
        let before = queue.next_avail();
        self.heads.clear();
        self.buffers.clear();
        let mut room = 0;
        while room < needed && (format.merges || self.heads.is_empty()) {
            let known = self.buffers.len();
            let head = match next_chain(queue, memory, &mut self.buffers, true) {
                Ok(Some(head)) => head,
                Ok(None) => {
                    self.seen = queue.next_avail();
                    queue.set_next_avail(before);
                    // With all of its buffers it would be no other.
                    let is_full = self.heads.len() == usize::from(queue.size());
                    return Ok(if is_full { Put::TooLong } else { Put::Later });
                }
                Err(Broken) => {
                    self.is_broken = true;
                    return Err(Broken);
                }
            };
            let new = &self.buffers[known..];
            let more: usize = new.iter().map(|(_, len)| *len as usize).sum();
            self.heads.push((head, more));
            room += more;
        }
        if room < needed {
            queue.set_next_avail(before);
            return Ok(Put::TooLong);
        }
        Ok(Put::Yes)
    }

    /// Asks for a kick when the driver adds a chain to those that were seen. Returns whether it has
    /// already.
    pub(super) fn listen(&mut self, memory: &GuestMemoryMmap) -> bool {
        let Some(queue) = self.queue.as_mut().filter(|_| !self.is_broken) else {
            return false;
        };
        let next = queue.next_avail();
        queue.set_next_avail(self.seen);
        let has_more = queue.enable_notification(memory);
        queue.set_next_avail(next);
        has_more.unwrap_or(false)
    }

    /// Asks for no kicks.
    pub(super) fn be_quiet(&mut self, memory: &GuestMemoryMmap) {
        if let Some(queue) = self.queue.as_mut().filter(|_| !self.is_broken) {
            // A ring out of memory is found broken by the next frame.
            let _ = queue.disable_notification(memory);
        }
    }

    /// Tells the driver of chains that were given back, if it wants to know.
    pub(super) fn call(&mut self, memory: &GuestMemoryMmap) {
        if !std::mem::take(&mut self.owes_call) {
            return;
        }
        let Some(queue) = self.queue.as_mut().filter(|_| !self.is_broken) else {
            return;
        };
        // Always asked: the queue counts from the last time on.
        let is_wanted = queue.needs_notification(memory).unwrap_or(false);
        let is_wanted = std::mem::take(&mut self.must_call) || is_wanted;
        // Without a descriptor it wants no interrupts.
        let is_wanted = is_wanted && self.call.is_some();
        match is_wanted {
            true => self.counts.calls += 1,
            false => self.counts.calls_suppressed += 1,
        }
        if let Some(call) = self.call.as_mut().filter(|_| is_wanted) {
            // One whose counter is full has been told often enough.
            let _ = call.write(&1_u64.to_ne_bytes());
        }
    }
}

/// The descriptor may be anything: no call of it is to wait. One that can't be set so is no event, and
/// tells nobody anything.
fn never_waiting(descriptor: OwnedFd) -> Option<File> {
    let event = UnixStream::from(descriptor);
    let is_set = event.set_nonblocking(true).is_ok();
    is_set.then(|| File::from(OwnedFd::from(event)))
}

/// Takes the next chain, and appends its buffers, all of which the device may write (`writable`) or read.
/// None is empty, and a chain has as many as the ring has descriptors at most (virtio 1.2, section
/// 2.7.5.3.1), so what a frame costs is bounded.
fn next_chain(
    queue: &mut Queue,
    memory: &GuestMemoryMmap,
    buffers: &mut Vec<Buffer>,
    writable: bool,
) -> Result<Option<u16>, Broken> {
    let before = buffers.len();
    let most = usize::from(queue.size());
    let mut chains = queue.iter(memory).map_err(|_| Broken)?;
    let Some(chain) = chains.next() else {
        return Ok(None);
    };
    let head = chain.head_index();
    for descriptor in chain {
        let has_place = buffers.len() - before < most;
        if descriptor.is_write_only() != writable || descriptor.len() == 0 || !has_place {
            return Err(Broken);
        }
        buffers.push((descriptor.addr(), descriptor.len()));
    }
    // One without any is no chain: its first descriptor is none, or loops.
    match buffers.len() == before || head >= queue.size() {
        true => Err(Broken),
        false => Ok(Some(head)),
    }
}

fn give_back(
    queue: &mut Queue,
    memory: &GuestMemoryMmap,
    head: u16,
    len: u32,
) -> Result<(), Broken> {
    queue.add_used(memory, head, len).map_err(|_| Broken)
}

/// Gives the chains of one frame back, each with its room, of which `needed` bytes were filled. Only the
/// last one moves the used index.
fn give_back_all(
    queue: &mut Queue,
    memory: &GuestMemoryMmap,
    heads: &[Head],
    needed: usize,
) -> Result<(), Broken> {
    let Some(((last, _), others)) = heads.split_last() else {
        return Ok(());
    };
    let mut left = needed;
    for (head, room) in others {
        let len = left.min(*room);
        left -= len;
        let next = queue.next_used();
        let offset = USED_ELEMENTS + USED_ELEMENT_LEN * u64::from(next % queue.size());
        // The head, then the length, each of 32 bits.
        let element = (len as u64) << 32 | u64::from(*head);
        memory
            .write_obj(element.to_le(), GuestAddress(queue.used_ring() + offset))
            .map_err(|_| Broken)?;
        queue.set_next_used(next.wrapping_add(1));
    }
    give_back(queue, memory, *last, left as u32)
}

/// Copies a frame out of its buffers, without what its header has behind [`VNET_LEN`] bytes, if it can be
/// one: with a header, and not longer than `into`. Of a long one of TCP only the beginning, if the rest can
/// stay where it is; `list` is for the buffers in which that is.
fn copy_out(
    buffers: &[Buffer],
    format: Format,
    memory: &Arc<GuestMemoryMmap>,
    into: &mut [u8],
    list: &mut Vec<Buffer>,
) -> Result<Taken, Broken> {
    let total: u64 = buffers.iter().map(|(_, len)| u64::from(*len)).sum();
    let total = usize::try_from(total).map_err(|_| Broken)?;
    let skipped = format.header_len - VNET_LEN;
    let Some(len) = total.checked_sub(skipped).filter(|len| *len > VNET_LEN) else {
        return Ok(Taken::Malformed(total));
    };
    if len > into.len() {
        return Ok(Taken::Malformed(len));
    }
    let (header, frame) = into[..len].split_at_mut(VNET_LEN);
    let is_long = len > SHORT;
    let beginning = match is_long {
        true => BEGINNING - VNET_LEN,
        false => frame.len(),
    };
    let (beginning, behind) = frame.split_at_mut(beginning);
    let mut source = Source::of(buffers);
    let mut ignored = [0; 2];
    for part in [header, &mut ignored[..skipped], &mut *beginning] {
        source.read(memory, part)?;
    }
    if is_long && is_tcp(&beginning[L3_AT - VNET_LEN..]) {
        list.clear();
        list.extend(source.left());
        match Rest::new(memory, std::mem::take(list)) {
            Ok(rest) => return Ok(Taken::Frame(len, Some(rest))),
            Err(unused) => *list = unused,
        }
    }
    source.read(memory, behind)?;
    Ok(Taken::Frame(len, None))
}

/// Whether a packet is of TCP, by its beginning.
fn is_tcp(packet: &[u8]) -> bool {
    Ip::parse_truncated(packet).is_ok_and(|ip| ip.protocol == Protocol::Tcp as u8)
}

/// Bytes of a chain that were not read.
#[derive(Debug)]
struct Source<'b> {
    buffers: std::slice::Iter<'b, Buffer>,
    address: GuestAddress,
    left: u32,
}

impl<'b> Source<'b> {
    fn of(buffers: &'b [Buffer]) -> Self {
        Self {
            buffers: buffers.iter(),
            address: GuestAddress(0),
            left: 0,
        }
    }

    /// Reads the next bytes.
    fn read(&mut self, memory: &GuestMemoryMmap, mut into: &mut [u8]) -> Result<(), Broken> {
        while !into.is_empty() {
            if self.left == 0 {
                (self.address, self.left) = *self.buffers.next().ok_or(Broken)?;
                continue;
            }
            let some = into.len().min(self.left as usize);
            let (now, later) = into.split_at_mut(some);
            memory.read_slice(now, self.address).map_err(|_| Broken)?;
            into = later;
            self.left -= some as u32;
            self.address = GuestAddress(self.address.0.wrapping_add(some as u64));
        }
        Ok(())
    }

    /// The buffers in which they are.
    fn left(&self) -> impl Iterator<Item = Buffer> {
        let begun = (self.left > 0).then_some((self.address, self.left));
        begun.into_iter().chain(self.buffers.clone().copied())
    }
}

/// Copies a frame into buffers that have room for it.
fn copy_in(
    buffers: &[Buffer],
    format: Format,
    memory: &GuestMemoryMmap,
    [header, frame]: [&[u8]; 2],
    chains: usize,
) -> Result<(), Broken> {
    let count = (chains as u16).to_le_bytes();
    let parts = [header, &count[..format.header_len - VNET_LEN], frame];
    let mut target = buffers.iter().copied();
    let (mut address, mut left) = (GuestAddress(0), 0);
    for mut part in parts {
        while !part.is_empty() {
            if left == 0 {
                (address, left) = target.next().ok_or(Broken)?;
                continue;
            }
            let some = part.len().min(left as usize);
            memory
                .write_slice(&part[..some], address)
                .map_err(|_| Broken)?;
            part = &part[some..];
            left -= some as u32;
            address = GuestAddress(address.0.wrapping_add(some as u64));
        }
    }
    Ok(())
}
