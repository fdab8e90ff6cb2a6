//! The engine port of the user-mode engine: a guest's link on one side, sockets on the other, and
//! between them the programs' functions over tables in memory.
//!
//! # Theory of operation
//! To the engine this is a port like the kernel's ([`crate::port`]): it reads frames that the programs
//! hand over, and writes frames with commands. What the kernel does otherwise happens here:
//!
//! ```text
//!   guest's link ─ guest_egress ─┬ of a flow ──────────────────────────► sockets ─► world
//!       ▲                        └ to be decided ─► engine ─ engine_port ─┘  │
//!       └──────────────── uplink_ingress ◄──────── packets that the sockets make
//! ```
//!
//! So admission, inspection, quotas, cuts and every counter are the same code in both modes, and a
//! packet is counted when it is translated. Only the engine's thread runs this, so the tables need no
//! other guard; `flows` and `stats` read them from another process, as they read the kernel's.
//!
//! All descriptors (the link's, the sockets) are in one epoll set, which is the engine's too
//! ([`FrameIo::set`]): the engine waits for them with its own, and passes on what is ready.
use std::{
    collections::VecDeque,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::BorrowedFd,
    rc::Rc,
    sync::atomic::Ordering::Relaxed,
};

use nix::{
    errno::Errno,
    sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags},
    unistd::read,
};
use slipgate_abi::{
    Direction, DropReason, FlowRef, ForwardKey, ForwardKey6, Ip4, Ip6, PortHeader, Verdict, VmRow,
    datapath::{Maps, engine_port, guest_egress, identity, uplink_ingress},
    portframe::PortFlags,
    rate::RateRef,
    segment::{self, Segments},
    vm::VmFlags,
};

use slipgate_model::{FlowTuple, GuestTcpCounts, TupleKey, USERSPACE_GUEST, USERSPACE_PORT};

mod in_row;

use self::in_row::InRow;
use crate::{
    clock::{Clock, SystemClock},
    guest_link::{Accepted, GuestLink, Input, Packet as Received, vhost_user::Wrong},
    host_sockets::{HostSockets, is_of_strangers},
    packet::{Ip, Packet, Version},
    payload::Rest,
    port::{
        Batch, ETHERNET_LEN, FrameIo, L3_AT, MAX_FRAME, VNET_LEN, VirtioNetHdr, ethertype_of,
        single,
    },
    sockets::{Delivered, Sockets, ToGuest},
    software::{End, Environment, Frame, Run},
    space::Space,
    stats::VmStats,
};

const GUEST: u32 = USERSPACE_GUEST.get();
const PORT: u32 = USERSPACE_PORT.get();
/// Largest packet that the host's sockets take, bytes. Where a link on the way carries less, the host's
/// kernel cuts it, or refuses it if it has DF; then the guest is told.
const WORLD_MTU: u32 = 65_535;
/// Frames of the guest that are read in one call, so that sockets and the engine have their turns: of a
/// TAP, a system call each; of a stream, of one system call.
const FRAMES_AT_ONCE: usize = 64;
const STREAM_FRAMES_AT_ONCE: usize = 256;
/// Frames that wait for the engine at most. The programs' credits keep the queue shorter.
const MOST_QUEUED: usize = 1_024;

/// Keys in the set that are no socket's: those of sockets are below these.
const LINK: u32 = 1 << 31;
const LISTENER: u32 = LINK + 1;
const KICK: u32 = LINK + 2;
/// The same as data of events, which are tokens of [`crate::poll::Subsystem::Port`].
const LINK_KEY: u64 = LINK as u64;
const LISTENER_KEY: u64 = LISTENER as u64;
const KICK_KEY: u64 = KICK as u64;

/// The tables in memory.
pub trait MemoryTables {
    /// Access for the programs' functions.
    type Maps<'t>: Maps
    where
        Self: 't;

    /// Returns the access for the programs' functions.
    fn maps(&self) -> Self::Maps<'_>;
    /// Returns a VM's counters; row 0 counts what belongs to no VM.
    fn stats(&self, row: VmRow) -> VmStats;
}

/// The port of one guest.
#[derive(Debug)]
pub struct UserspacePort<T> {
    tables: T,
    sockets: Sockets,
    epoll: Rc<Epoll>,
    /// Events that were not handled yet.
    ready: Vec<(u32, EpollFlags)>,
    link: GuestLink,
    /// Frames for the engine.
    queue: VecDeque<Vec<u8>>,
    /// Frame of the guest or the engine that is being handled.
    frame: Box<[u8]>,
    /// Whether there is something to do at once, without an event.
    has_more: bool,
    /// Whether relayed connections may fill the link's queue beyond where flows stop. That is so in every
    /// second turn: in the others the queue becomes shorter, until flows have room too.
    is_relays_turn: bool,
    in_row: InRow,
}

/// Where frames go from here.
struct Out<'p, T> {
    tables: &'p T,
    link: &'p mut GuestLink,
    queue: &'p mut VecDeque<Vec<u8>>,
    now_ns: u64,
}

struct Surroundings<'p, T> {
    tables: &'p T,
    now_ns: u64,
}

impl<T> Clone for Surroundings<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Surroundings<'_, T> {}

impl<'p, T: MemoryTables> Environment for Surroundings<'p, T> {
    type Maps = T::Maps<'p>;

    fn maps(self) -> Self::Maps {
        self.tables.maps()
    }

    fn mtu_of(self, _ifindex: u32) -> Option<u32> {
        Some(WORLD_MTU)
    }

    fn is_routed_on(self, _destination: Ip4) -> bool {
        false
    }

    fn is_routed_on6(self, _destination: Ip6) -> bool {
        false
    }

    fn now_ns(self) -> u64 {
        self.now_ns
    }

    fn count_drop(self, row: u32, reason: DropReason, segments: Segments) {
        let row = VmRow::from_word(row).unwrap_or(VmRow::NOBODY);
        self.tables.stats(row).dropped(reason, segments);
    }
}

impl<T: MemoryTables> Out<'_, T> {
    fn surroundings(&self) -> Surroundings<'_, T> {
        Surroundings {
            tables: self.tables,
            now_ns: self.now_ns,
        }
    }

    /// Passes a frame on to the guest or the engine, if a program sent it there. Returns whether it
    /// went to the world instead.
    fn pass_on(&mut self, end: End, frame: &[u8]) -> bool {
        match end {
            End::Redirected(GUEST) => {
                if let Some(reason) = self.link.send(frame) {
                    let vnet = frame.first_chunk().map(VirtioNetHdr::decode);
                    self.count_lost(reason, vnet.unwrap_or_default(), frame.len());
                }
                false
            }
            End::Redirected(PORT) => {
                if self.has_place() {
                    self.queue.push_back(frame.to_vec());
                }
                false
            }
            End::Redirected(_) => true,
            End::Dropped(_) | End::Discarded | End::Copied | End::Passed => false,
        }
    }

    /// Whether one more frame may wait for the engine.
    fn has_place(&self) -> bool {
        self.queue.len() < MOST_QUEUED
    }

    /// Has the programs judge a frame of the world, whose last `rest_len` bytes are elsewhere.
    fn judge_of_world(&self, vnet: VirtioNetHdr, bytes: &mut [u8], rest_len: usize) -> End {
        bytes[..VNET_LEN].copy_from_slice(&vnet.encode());
        bytes[VNET_LEN..L3_AT - 2].fill(0);
        let ether_type = ethertype_of(&bytes[L3_AT..]);
        bytes[L3_AT - 2..L3_AT].copy_from_slice(&ether_type.to_be_bytes());
        let frame = Frame::new(vnet, 0, ether_type, bytes, VNET_LEN).with_rest(rest_len);
        let run = Run::new(self.surroundings(), &frame);
        uplink_ingress::run::<_, ETHERNET_LEN>(run)
    }

    /// Counts a frame that the guest's link did not take, `len` bytes with both headers.
    fn count_lost(&self, reason: DropReason, vnet: VirtioNetHdr, len: usize) {
        let l3_len = len.saturating_sub(L3_AT);
        let lost = match vnet.gso_type {
            VirtioNetHdr::GSO_NONE => single(l3_len),
            _ => {
                let headers_len = usize::from(vnet.hdr_len).saturating_sub(ETHERNET_LEN);
                segment::count(l3_len as u32, headers_len as u32, vnet.gso_size.into())
            }
        };
        self.count_of_guest(reason, lost);
    }

    fn count_of_guest(&self, reason: DropReason, lost: Segments) {
        let row = self.tables.maps().tap(GUEST).map_or(0, |tap| tap.vm_row);
        self.surroundings().count_drop(row, reason, lost);
    }
}

const fn delivered(end: End) -> Delivered {
    match end {
        End::Redirected(_) => Delivered::Yes,
        End::Passed => Delivered::Passed,
        End::Dropped(DropReason::NoFlow) => Delivered::NoFlow,
        End::Dropped(_) | End::Discarded | End::Copied => Delivered::Dropped,
    }
}

impl<T: MemoryTables> ToGuest for Out<'_, T> {
    fn has_room(&mut self) -> bool {
        self.link.room(false).is_some_and(|room| room > 0)
    }

    fn deliver(&mut self, vnet: VirtioNetHdr, bytes: &mut [u8]) -> Delivered {
        // Before it is counted in its flow.
        if let Some(reason) = self.link.refusal(vnet, bytes.len() - VNET_LEN) {
            self.count_lost(reason, vnet, bytes.len());
            return Delivered::Dropped;
        }
        let end = self.judge_of_world(vnet, bytes, 0);
        self.pass_on(end, bytes);
        delivered(end)
    }

    fn space(&mut self, tuple: &FlowTuple, headers_len: usize, most: usize) -> Option<Space> {
        let GuestLink::Rings(link) = &mut *self.link else {
            return None;
        };
        // What is in its buffers the guest has. So nothing may be decided about the segment later.
        let maps = self.tables.maps();
        let tap = maps.tap(GUEST)?;
        let vm = maps.vm(tap.vm_row, tap.vm)?;
        let undecided = VmFlags::FROZEN | VmFlags::ASLEEP | VmFlags::LIMITED;
        if vm.flags().load(Relaxed) & undecided != 0 {
            return None;
        }
        let slot = maps.slot(flow_of(&maps, tuple)?.slot)?;
        if slot.verdict().load(Relaxed) != Verdict::Fast as u32 {
            return None;
        }
        link.space(Version::of(tuple.remote), ETHERNET_LEN + headers_len, most)
    }

    fn forget(&mut self, space: Space) {
        if let GuestLink::Rings(link) = &mut *self.link {
            link.forget(space);
        }
    }

    fn deliver_in(
        &mut self,
        vnet: VirtioNetHdr,
        headers: &mut [u8],
        space: Space,
        len: usize,
    ) -> Delivered {
        let end = self.judge_of_world(vnet, headers, len);
        match end {
            End::Redirected(GUEST) => {
                if let GuestLink::Rings(link) = &mut *self.link
                    && let Some(reason) = link.put_space(headers, space, len)
                {
                    self.count_lost(reason, vnet, headers.len() + len);
                }
            }
            // Nothing of ours: somebody else has changed the VM's row meanwhile.
            End::Redirected(_) => {
                let mut whole = [&headers[..], &vec![0; len]].concat();
                if space.copy_to(&mut whole[headers.len()..]) {
                    self.pass_on(end, &whole);
                }
                self.forget(space);
            }
            End::Dropped(_) | End::Discarded | End::Copied | End::Passed => self.forget(space),
        }
        delivered(end)
    }

    fn lost(&mut self, reason: DropReason, vnet: VirtioNetHdr, len: usize) {
        self.count_lost(reason, vnet, len);
    }

    fn not_sent(&mut self, tuple: &FlowTuple, reason: DropReason, len: usize) {
        let maps = self.tables.maps();
        // It was counted in this turn, in which no flow ends.
        if let Some(slot) = flow_of(&maps, tuple).and_then(|flow| maps.slot(flow.slot)) {
            slot.tx_packets().fetch_sub(1, Relaxed);
            slot.tx_bytes().fetch_sub(len as u64, Relaxed);
        }
        let limits = maps.tap(GUEST).and_then(|tap| maps.rates(tap.vm_row));
        if let Some(limits) = limits.filter(|limits| limits.budget(Direction::Tx).is_some()) {
            // The broker may have begun a new day meanwhile.
            let used = limits.used(Direction::Tx);
            let _ = used.fetch_update(Relaxed, Relaxed, |used| {
                Some(used.saturating_sub(len as u64))
            });
        }
        self.count_of_guest(reason, single(len));
    }

    fn limits(&self) -> Option<RateRef> {
        let maps = self.tables.maps();
        let tap = maps.tap(GUEST)?;
        let flags = maps.vm(tap.vm_row, tap.vm)?.flags().load(Relaxed);
        match flags & VmFlags::LIMITED {
            0 => None,
            _ => maps.rates(tap.vm_row),
        }
    }

    fn gateway(&self, version: Version) -> Option<IpAddr> {
        let maps = self.tables.maps();
        let tap = maps.tap(GUEST)?;
        match version {
            Version::V4 => {
                let (_, gateway, _) = identity::network(maps.vm(tap.vm_row, tap.vm)?);
                Some(Ipv4Addr::from(gateway).into())
            }
            Version::V6 => Some(Ipv6Addr::from(maps.vm6(tap.vm_row)?.gateway()).into()),
        }
    }
}

impl<T: MemoryTables> UserspacePort<T> {
    /// A port over the guest's link. `takes_uso`: whether it takes UDP GSO frames; `mtu`: its MTU,
    /// bytes; `most_files`: descriptors that the process may have.
    ///
    /// # Errors
    /// The kernel gives no epoll descriptor.
    pub fn new(
        tables: T,
        link: GuestLink,
        takes_uso: bool,
        mtu: u16,
        most_files: u64,
    ) -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        match &link {
            GuestLink::Tap(queue) => {
                epoll.add(queue, EpollEvent::new(EpollFlags::EPOLLIN, LINK_KEY))?;
            }
            GuestLink::Stream(link) => link.watch(&epoll, LISTENER_KEY)?,
            GuestLink::Packets(link) => link.watch(&epoll, LINK_KEY)?,
            GuestLink::Rings(link) => link.watch(&epoll, LISTENER_KEY, LINK_KEY)?,
        }
        Ok(Self {
            tables,
            sockets: Sockets::new(takes_uso, mtu, most_files),
            epoll: Rc::new(epoll),
            ready: Vec::new(),
            link,
            queue: VecDeque::new(),
            frame: vec![0; MAX_FRAME].into_boxed_slice(),
            has_more: false,
            is_relays_turn: false,
            in_row: InRow::default(),
        })
    }

    fn parts(&mut self, now_ns: u64) -> (&mut Sockets, &Epoll, Out<'_, T>, &mut [u8]) {
        let out = Out {
            tables: &self.tables,
            link: &mut self.link,
            queue: &mut self.queue,
            now_ns,
        };
        (&mut self.sockets, &self.epoll, out, &mut self.frame)
    }

    /// Handles a frame of the guest or the engine, `len` bytes in the buffer, but for its rest: that is of a
    /// long frame of TCP, whose headers are in the buffer.
    fn handle(&mut self, len: usize, rest: Option<&Rest>, from: u32, now_ns: u64) {
        let (sockets, epoll, mut out, buffer) = self.parts(now_ns);
        let rest_len = rest.map_or(0, Rest::len);
        let bytes = &mut buffer[..len - rest_len];
        let Some(vnet) = bytes.first_chunk().map(VirtioNetHdr::decode) else {
            return;
        };
        let ether_type = match bytes.get(L3_AT - 2..L3_AT) {
            Some(ether_type) => u16::from_be_bytes([ether_type[0], ether_type[1]]),
            None => 0,
        };
        let command = bytes[VNET_LEN..].first_chunk().and_then(PortHeader::decode);
        let came_in_fragments = from == PORT
            && command.is_some_and(|command| command.flags & PortFlags::REASSEMBLED != 0);
        let end = {
            let frame = Frame::new(vnet, from, ether_type, bytes, VNET_LEN).with_rest(rest_len);
            let run = Run::new(out.surroundings(), &frame);
            match from {
                GUEST => guest_egress::run(run),
                _ => engine_port::run(run),
            }
        };
        if let Some(rest) = rest {
            if matches!(end, End::Redirected(GUEST | PORT)) {
                if matches!(end, End::Redirected(PORT)) && !out.has_place() {
                    // It would be copied for nothing.
                    return;
                }
                let (_, behind) = buffer[..len].split_at_mut(len - rest_len);
                if !rest.copy_to(behind) {
                    // Its place was checked.
                    return out.count_lost(DropReason::Malformed, vnet, len);
                }
                out.pass_on(end, &buffer[..len]);
            } else if out.pass_on(end, bytes)
                && let Ok(packet) = Packet::parse_beginning(&bytes[L3_AT..], rest_len)
            {
                sockets.take_long(&packet, rest, epoll, &mut out, now_ns);
            }
            return;
        }
        if out.pass_on(end, bytes)
            && let Ok(ip) = Ip::parse(&bytes[L3_AT..])
            && let Ok(packet) = Packet::parse(ip)
        {
            let how = (vnet, came_in_fragments);
            sockets.take(&packet, how, epoll, &mut out, now_ns);
        }
    }

    fn read_link(&mut self, now_ns: u64) -> io::Result<()> {
        for nth in 0..FRAMES_AT_ONCE {
            match &mut self.link {
                GuestLink::Tap(queue) => match read(queue, &mut self.frame) {
                    Ok(len) => {
                        self.handle(len, None, GUEST, now_ns);
                        if !self.in_row.goes_on_after(nth + 1) {
                            return Ok(());
                        }
                    }
                    Err(Errno::EAGAIN) => return Ok(()),
                    Err(Errno::EINTR) => {}
                    Err(error) => return Err(error.into()),
                },
                GuestLink::Packets(link) => {
                    let received = link.next(&mut self.frame);
                    if !self.received(received, now_ns) {
                        return Ok(());
                    }
                }
                GuestLink::Rings(link) => {
                    let (received, rest) = link.next(&mut self.frame);
                    let Some(rest) = rest else {
                        if !self.received(received, now_ns) {
                            return Ok(());
                        }
                        continue;
                    };
                    if let Received::Frame(len) = received {
                        self.handle(len, Some(&rest), GUEST, now_ns);
                    }
                    if let GuestLink::Rings(link) = &mut self.link {
                        let broken = link.finish(rest);
                        self.received(broken, now_ns);
                    }
                }
                GuestLink::Stream(_) => {
                    self.read_stream(now_ns);
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Handles what came from the guest. Returns whether there was something.
    fn received(&mut self, received: Received, now_ns: u64) -> bool {
        match received {
            Received::Frame(len) => self.handle(len, None, GUEST, now_ns),
            Received::Malformed(len) => {
                let (_, _, out, _) = self.parts(now_ns);
                out.count_of_guest(DropReason::Malformed, single(len));
            }
            Received::Nothing => return false,
        }
        true
    }

    /// Handles messages of a VMM that has given its rings.
    fn hear_vmm(&mut self, now_ns: u64) {
        let GuestLink::Rings(link) = &mut self.link else {
            return;
        };
        match link.hear(&self.epoll, KICK_KEY) {
            None => {}
            Some(why @ Wrong::NoPlace) => {
                tracing::warn!(
                    "the VMM's connection was closed, because it sent {why}. Raise the limit of open files \
                     (`ulimit -n`; fs.file-max and fs.epoll.max_user_watches for the host), and let the VMM \
                     connect again"
                );
                self.count_refused(now_ns);
            }
            Some(why) => {
                tracing::debug!("the VMM's connection was closed, because it sent {why}");
            }
        }
    }

    /// Counts a guest's connection that was refused or closed because the host is short of something.
    fn count_refused(&mut self, now_ns: u64) {
        let (_, _, out, _) = self.parts(now_ns);
        out.count_of_guest(DropReason::EngineBusy, single(0));
    }

    fn read_stream(&mut self, now_ns: u64) {
        for nth in 0..STREAM_FRAMES_AT_ONCE {
            let GuestLink::Stream(link) = &mut self.link else {
                return;
            };
            if nth == 0
                && let Some(end) = link.fill()
            {
                return self.ended(end, now_ns);
            }
            match link.next(&mut self.frame) {
                Input::Frame(len) => self.handle(len, None, GUEST, now_ns),
                Input::Nothing => return,
                end => return self.ended(end, now_ns),
            }
        }
    }

    /// Counts what a connection's end has cut off, or was the reason of.
    fn ended(&mut self, how: Input, now_ns: u64) {
        let cut = match how {
            Input::Ended(0) | Input::Frame(_) | Input::Nothing => return,
            Input::Ended(cut) => cut,
            Input::Closed(why) => {
                tracing::debug!("the guest's connection was closed: {why}");
                0
            }
        };
        let (_, _, out, _) = self.parts(now_ns);
        out.count_of_guest(DropReason::Malformed, single(cut));
    }

    /// Whether frames of the guest were read that are not handled.
    fn has_input(&self) -> bool {
        match &self.link {
            GuestLink::Stream(link) => link.has_input(),
            GuestLink::Rings(link) => link.has_input(),
            GuestLink::Tap(_) | GuestLink::Packets(_) => false,
        }
    }

    /// Writes what is queued for the guest, and accepts one if there is none. Returns whether it did:
    /// what waited for a guest has room now.
    fn settle_link(&mut self, now_ns: u64) -> io::Result<bool> {
        let link = match &mut self.link {
            GuestLink::Stream(link) => link,
            GuestLink::Packets(link) => {
                link.settle(&self.epoll, LINK_KEY, now_ns)?;
                return Ok(false);
            }
            GuestLink::Rings(link) => {
                let lost = link.settle();
                let has_drained = link.has_drained();
                let accepted = link.accept(&self.epoll, LINK_KEY, now_ns);
                let (_, _, out, _) = self.parts(now_ns);
                for lost in lost {
                    out.count_lost(lost.reason, lost.vnet, lost.len);
                }
                return Ok(self.has_accepted(accepted, now_ns) || has_drained);
            }
            GuestLink::Tap(_) => return Ok(false),
        };
        let end = link.settle(&self.epoll, LINK_KEY, now_ns)?;
        let accepted = link.accept(&self.epoll, LINK_KEY, now_ns);
        if let Some(end) = end {
            self.ended(end, now_ns);
        }
        Ok(self.has_accepted(accepted, now_ns))
    }

    fn has_accepted(&mut self, accepted: Accepted, now_ns: u64) -> bool {
        if accepted == Accepted::Refused {
            self.count_refused(now_ns);
        }
        accepted == Accepted::Yes
    }

    /// Does what sockets owe and what is due, and sends it.
    fn work(&mut self, now_ns: u64) -> io::Result<()> {
        let (sockets, epoll, mut out, _) = self.parts(now_ns);
        let is_more = sockets.work(epoll, &mut out, now_ns);
        let maps = out.tables.maps();
        sockets.sweep(now_ns, |tuple: &FlowTuple| match is_of_strangers(tuple) {
            true => is_open(&maps, tuple),
            false => flow_of(&maps, tuple).is_some(),
        });
        let is_new = self.settle_link(now_ns)?;
        self.has_more = is_more || is_new || !self.queue.is_empty() || self.has_input();
        Ok(())
    }

    fn pass_queue(&mut self, batch: &mut Batch) -> io::Result<()> {
        while !batch.is_full()
            && let Some(frame) = self.queue.pop_front()
        {
            batch.push_with(|buffer| {
                buffer[..frame.len()].copy_from_slice(&frame);
                Ok(frame.len())
            })?;
        }
        Ok(())
    }
}

/// Returns a flow by its tuple, of either family.
fn flow_of(maps: &impl Maps, tuple: &FlowTuple) -> Option<FlowRef> {
    match tuple.key()? {
        TupleKey::V4(tuple) => maps.flow(&tuple),
        TupleKey::V6(tuple) => maps.flow6(&tuple),
    }
}

/// Whether the programs hand over what strangers send to a translated port.
fn is_open(maps: &impl Maps, tuple: &FlowTuple) -> bool {
    let FlowTuple {
        local,
        local_port: port,
        protocol,
        ..
    } = *tuple;
    let target = match local {
        IpAddr::V4(local) => maps.forward(&ForwardKey::new(local.into(), port, protocol)),
        IpAddr::V6(local) => maps.forward6(&ForwardKey6::new(local.into(), port, protocol)),
    };
    target.is_some()
}

impl<T: MemoryTables> FrameIo for UserspacePort<T> {
    fn recv(&mut self, batch: &mut Batch) -> io::Result<()> {
        let now_ns = SystemClock.now_ns();
        self.is_relays_turn = !self.is_relays_turn;
        if self.sockets.has_waiting() {
            // Before datagrams take what streams have waited for.
            let (sockets, epoll, mut out, _) = self.parts(now_ns);
            sockets.send_in_turns(epoll, &mut out, now_ns);
        }
        // What was left of the last turn comes without an event.
        let mut is_readable = self.has_input();
        let mut ready = std::mem::take(&mut self.ready);
        for (key, flags) in ready.drain(..) {
            match key {
                LINK => {
                    is_readable = true;
                    self.hear_vmm(now_ns);
                }
                KICK => {
                    is_readable = true;
                    if let GuestLink::Rings(link) = &mut self.link {
                        link.kicked();
                    }
                }
                LISTENER => {}
                key => {
                    let (sockets, _, mut out, _) = self.parts(now_ns);
                    sockets.ready(key, flags, &mut out, now_ns);
                }
            }
        }
        self.ready = ready;
        self.in_row.begin_turn(is_readable);
        if is_readable {
            self.read_link(now_ns)?;
        }
        // Before what is left is looked at.
        self.pass_queue(batch)?;
        self.work(now_ns)?;
        self.pass_queue(batch)
    }

    fn send(&mut self, frame: &[u8]) -> io::Result<()> {
        let now_ns = SystemClock.now_ns();
        let len = frame.len().min(self.frame.len());
        self.frame[..len].copy_from_slice(&frame[..len]);
        self.handle(len, None, PORT, now_ns);
        self.work(now_ns)
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn set(&self) -> Option<Rc<Epoll>> {
        Some(self.epoll.clone())
    }

    fn on_ready(&mut self, key: u32, flags: EpollFlags) {
        self.ready.push((key, flags));
    }

    fn next_deadline_ns(&self) -> Option<u64> {
        let due = [self.sockets.due_ns(), self.link.due_ns()];
        due.into_iter().flatten().min()
    }

    fn rest(&mut self) -> bool {
        if self.sockets.has_put_off() {
            let (sockets, epoll, mut out, _) = self.parts(SystemClock.now_ns());
            let now_ns = out.now_ns;
            sockets.do_put_off(epoll, &mut out, now_ns);
            // An error shows again in the next turn, which is at once then.
            let is_new = self.settle_link(now_ns).unwrap_or(true);
            // Nobody looks at a new deadline before the next turn.
            let is_due = self.link.due_ns().is_some();
            self.has_more |= is_new || is_due || !self.queue.is_empty() || self.has_input();
        }
        let host = self.sockets.host();
        host.give_up_claims();
        host.make_next();
        self.has_more
    }

    fn room(&mut self) -> usize {
        // Where there is no guest a frame is dropped, not kept for it.
        self.link.room(self.is_relays_turn).unwrap_or(usize::MAX)
    }

    fn has_more(&self) -> bool {
        self.has_more || !self.ready.is_empty()
    }

    fn host_sockets(&self) -> Option<Rc<HostSockets>> {
        Some(self.sockets.host())
    }

    fn tcp_counts(&self) -> GuestTcpCounts {
        self.sockets.tcp_counts()
    }

    fn is_looked_at(&self) -> bool {
        true
    }
}

#[cfg(test)]
#[path = "userspace_port_budget_test.rs"]
mod budget_tests;
#[cfg(test)]
#[path = "userspace_port_rings_test.rs"]
mod rings_tests;
#[cfg(test)]
#[path = "userspace_port_space_test.rs"]
mod space_tests;
#[cfg(test)]
#[path = "userspace_port_test.rs"]
mod tests;
