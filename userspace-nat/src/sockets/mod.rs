//! The world by sockets of the host: each flow's packets, as the programs translated them, end in a
//! socket of its own, and what the socket receives becomes packets again.
//!
//! # Theory of operation
//! The programs' functions run on a guest's frame as they do in the kernel: they look the flow up,
//! translate it to the host's address and a port, count it, and send it out of the uplink. Here that
//! is this module. It finds the socket by the translated tuple, or makes one that is bound to the
//! translated address and port and connected to the peer: so the world sees the tuple that `flows`
//! shows and records have. What a socket receives goes the way back: a packet of the world, which the
//! programs translate, count and deliver. A packet can be in no flow but one that was admitted, for
//! nothing else is translated.
//!
//! - `stream`: TCP, by [`crate::tcp`]'s state machine, with no buffer between frame and socket;
//! - `datagram`: UDP and ICMP echo. GSO frames become one `UDP_SEGMENT` send, and what `UDP_GRO`
//!   joined one GSO frame. Single datagrams of one flow that are read together leave and arrive so,
//!   too (`burst`, `inbox`). What is too long for its way is the guest's to know (`path_mtu`).
//!
//! Where the VM's rate of bytes is limited, its streams keep to it by themselves (`pace`).
//!
//! A socket lives as long as its flow: once a second those whose flow is gone are closed
//! ([`Sockets::sweep`]). There are as many sockets as flows at most. Whether the host has one for a flow
//! is asked before the flow is admitted ([`HostSockets`]), and with it whether the flow may have its
//! translated port. If it can't be bound or connected for another reason, the guest is told then: RST, or
//! ICMP host unreachable.
mod burst;
mod datagram;
mod errors;
mod inbox;
mod pace;
mod path_mtu;
mod put_off;
mod stream;

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
    io,
    net::IpAddr,
    rc::Rc,
};

use hashbrown::{HashMap, HashSet};
use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use slipgate_abi::{Direction, DropReason, rate::RateRef};
use slipgate_model::{FlowTuple, GuestTcpCounts};

use self::{
    burst::Burst,
    datagram::Datagrams,
    inbox::Inbox,
    pace::{ByteRates, Pace},
    path_mtu::IfTooLong,
    put_off::PutOff,
};
use crate::{
    host_sockets::{HostSockets, is_of_strangers},
    packet::{Packet, Transport, Version},
    payload::Rest,
    port::{ETHERNET_LEN, VNET_LEN, VirtioNetHdr},
    quota::TokenBucket,
    reply::{BURST, RATE_PER_SECOND},
    space::Space,
    tcp::{EarlyRoom, SCRATCH_LEN, Stream},
};

/// Where an L3 packet begins in a frame's buffer, bytes.
const L3_START: usize = VNET_LEN + ETHERNET_LEN;
/// Length of a frame's buffer: of the longest packet.
const BUFFER_LEN: usize = L3_START + 65_535;
/// Frames that one socket may send to its guest in a turn, so that others have theirs.
const FRAMES_PER_TURN: usize = 16;
/// Interval between two looks for sockets whose flow is gone, ns.
pub(crate) const SWEEP_INTERVAL_NS: u64 = 1_000_000_000;

/// Result of a delivery of a packet to the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Delivered {
    /// It is on its way.
    Yes,
    /// It was dropped and counted, or the device took none.
    Dropped,
    /// No flow has its tuple; it was counted.
    NoFlow,
    /// No flow has its tuple, and no port lets it in: on a wire it would be the host's, and is not counted.
    Passed,
}

/// The way to the guest: the programs, and behind them the device or the engine.
pub trait ToGuest {
    /// Whether more stream data should be made for the guest now. If not, an event comes when it should.
    fn has_room(&mut self) -> bool;
    /// Delivers a packet of the world. `frame` has room for the offload header and an Ethernet
    /// header before the packet, which begins behind both.
    fn deliver(&mut self, vnet: VirtioNetHdr, frame: &mut [u8]) -> Delivered;
    /// Room in the guest's memory for the next segment of a flow, whose tuple on the world's side is `tuple`:
    /// for `headers_len` bytes of headers from that of IP on, and `most` of payload. If there is some, the
    /// segment will be delivered if it is no longer than that, and each part of it no longer than the link's
    /// MTU. The caller returns it by one of the two functions below before anything else.
    fn space(&mut self, tuple: &FlowTuple, headers_len: usize, most: usize) -> Option<Space>;
    /// Is done with a space of which nothing came.
    fn forget(&mut self, space: Space);
    /// As [`ToGuest::deliver`], for a segment whose payload, `len` bytes, is in a space. `headers` ends
    /// with its headers.
    fn deliver_in(
        &mut self,
        vnet: VirtioNetHdr,
        headers: &mut [u8],
        space: Space,
        len: usize,
    ) -> Delivered;
    /// Counts a packet of the world that can't be delivered, `len` bytes with both headers.
    fn lost(&mut self, reason: DropReason, vnet: VirtioNetHdr, len: usize);
    /// Counts a packet of the guest's, `len` bytes from its IP header on, as dropped and no more in its
    /// flow, whose tuple on the world's side is `tuple`: the host did not send it.
    fn not_sent(&mut self, tuple: &FlowTuple, reason: DropReason, len: usize);
    /// The gateway's address of a family that the guest has.
    fn gateway(&self, version: Version) -> Option<IpAddr>;
    /// The VM's limits, if it has any.
    fn limits(&self) -> Option<RateRef>;
}

/// A socket, with the flow that it is for.
#[derive(Debug)]
struct Endpoint {
    tuple: FlowTuple,
    socket: Kind,
    /// Time for which the earliest entry in the heap of timers is, ns.
    scheduled_ns: Option<u64>,
    is_queued: bool,
    /// Whether it is in the row of streams that wait to send to the guest, and of those whose guest waits
    /// for its window.
    waits_to_send: bool,
    waits_for_window: bool,
    /// Bytes by which turns of the rate have opened its guest's window.
    allowed: u32,
}

#[derive(Debug)]
enum Kind {
    Stream(Box<Stream>),
    Datagrams(Datagrams),
}

/// All sockets of a guest's flows.
#[derive(Debug)]
pub struct Sockets {
    endpoints: HashMap<u32, Endpoint>,
    by_tuple: HashMap<FlowTuple, u32>,
    next_key: u32,
    /// Timers: due time and key. An entry may be of a time that is no longer due.
    timers: BinaryHeap<Reverse<(u64, u32)>>,
    /// Sockets with something to send to the guest: data, or an acknowledgement.
    queued: VecDeque<u32>,
    sweep_due_ns: u64,
    /// Frame that is being made.
    buffer: Box<[u8]>,
    /// Whether the guest's device takes UDP GSO frames.
    joins_datagrams: bool,
    /// Datagrams of the guest's that leave at the end of the turn.
    burst: Burst,
    /// Datagrams that were received.
    inbox: Inbox,
    /// MTU of its link, bytes.
    mtu: u16,
    error: Vec<u8>,
    /// Allowance for messages that the gateway sends about datagrams that are too long.
    told: TokenBucket,
    /// Where bytes go that are not looked at.
    scratch: Box<[u8]>,
    /// Room for the guest's segments that came early.
    early: EarlyRoom,
    put_off: PutOff,
    pace: Pace,
    host: Rc<HostSockets>,
}

impl Sockets {
    /// No sockets yet. `joins_datagrams`: whether the guest's device takes UDP GSO frames; `mtu`: of its
    /// link, bytes; `most_files`: descriptors that the process may have.
    pub fn new(joins_datagrams: bool, mtu: u16, most_files: u64) -> Self {
        let host = Rc::new(HostSockets::new(most_files));
        Self {
            endpoints: HashMap::new(),
            by_tuple: HashMap::new(),
            next_key: 0,
            timers: BinaryHeap::new(),
            queued: VecDeque::new(),
            sweep_due_ns: 0,
            buffer: vec![0; BUFFER_LEN].into_boxed_slice(),
            joins_datagrams,
            burst: Burst::default(),
            inbox: Inbox::default(),
            mtu,
            error: Vec::new(),
            told: TokenBucket::new(RATE_PER_SECOND, BURST),
            scratch: vec![0; SCRATCH_LEN].into_boxed_slice(),
            early: EarlyRoom::default(),
            put_off: PutOff::new(host.clone()),
            pace: Pace::default(),
            host,
        }
    }

    /// The host's sockets for flows, which admission asks for.
    pub fn host(&self) -> Rc<HostSockets> {
        self.host.clone()
    }

    /// What is kept of the guest's segments, and counts of them.
    pub fn tcp_counts(&self) -> GuestTcpCounts {
        self.early.counts()
    }

    /// The connections: their tuples, and sockets as long as they have one.
    #[cfg(test)]
    pub(crate) fn streams(
        &self,
    ) -> impl Iterator<Item = (FlowTuple, Option<&std::os::fd::OwnedFd>)> + Clone {
        self.endpoints
            .values()
            .filter_map(|endpoint| match &endpoint.socket {
                Kind::Stream(stream) => Some((endpoint.tuple, stream.socket())),
                Kind::Datagrams(_) => None,
            })
    }

    /// Returns the number of sockets.
    pub fn len(&self) -> usize {
        self.endpoints.len()
    }

    /// Whether there is no socket.
    pub fn is_empty(&self) -> bool {
        self.endpoints.is_empty()
    }

    /// Takes a translated packet of the guest. `came_in_fragments`: it was put together of some.
    pub fn take(
        &mut self,
        packet: &Packet<'_>,
        (vnet, came_in_fragments): (VirtioNetHdr, bool),
        epoll: &Epoll,
        guest: &mut impl ToGuest,
        now_ns: u64,
    ) {
        let Some(tuple) = packet.tuple(FlowTuple::WORLD, Direction::Tx) else {
            // An ICMP error about what the world sent: its socket's own kernel has no use for it.
            return;
        };
        match packet.transport {
            Transport::Tcp(tcp) => {
                self.take_segment(tuple, (packet, &tcp, None), epoll, guest, now_ns)
            }
            Transport::Udp(_) | Transport::Icmp(_) => {
                let if_too_long = match packet.ip.dont_fragment && !came_in_fragments {
                    true => IfTooLong::Refused,
                    false => IfTooLong::InFragments,
                };
                self.take_datagram(tuple, packet, (vnet, if_too_long), epoll, guest, now_ns);
            }
            Transport::Other => {}
        }
    }

    /// Takes a translated segment of the guest, of which `packet` is the beginning
    /// ([`Packet::parse_beginning`]) and `rest` the end.
    pub fn take_long(
        &mut self,
        packet: &Packet<'_>,
        rest: &Rest,
        epoll: &Epoll,
        guest: &mut impl ToGuest,
        now_ns: u64,
    ) {
        if let Some(tuple) = packet.tuple(FlowTuple::WORLD, Direction::Tx)
            && let Transport::Tcp(tcp) = packet.transport
        {
            self.take_segment(tuple, (packet, &tcp, Some(rest)), epoll, guest, now_ns);
        }
    }

    /// Handles the readiness of a socket, by its key.
    pub fn ready(&mut self, key: u32, flags: EpollFlags, guest: &mut impl ToGuest, now_ns: u64) {
        let Some(endpoint) = self.endpoints.get_mut(&key) else {
            return;
        };
        match &mut endpoint.socket {
            Kind::Stream(_) => self.stream_ready(key, flags, guest, now_ns),
            Kind::Datagrams(_) => self.datagrams_ready(key, flags, guest),
        }
    }

    /// Does what is due, and sends what is queued for the guest: data, and the acknowledgements that
    /// this turn led to. Returns whether more is to be sent in the next turn, without an event.
    pub fn work(&mut self, epoll: &Epoll, guest: &mut impl ToGuest, now_ns: u64) -> bool {
        self.send_burst(guest, now_ns);
        self.await_strangers(epoll);
        if self.put_off.is_due(now_ns) {
            self.do_put_off(epoll, guest, now_ns);
        }
        while let Some(&Reverse((due_ns, key))) = self.timers.peek()
            && due_ns <= now_ns
        {
            self.timers.pop();
            if let Some(endpoint) = self.endpoints.get_mut(&key)
                && endpoint.scheduled_ns == Some(due_ns)
            {
                endpoint.scheduled_ns = None;
                self.stream_due(key, guest, now_ns);
            }
        }
        if self.queued.is_empty() && self.pace.is_idle() {
            return false;
        }
        let rates = ByteRates::of(guest);
        self.open_due_windows(rates.from_guest.as_ref(), now_ns);
        for _ in 0..self.queued.len() {
            if !guest.has_room() {
                return false;
            }
            let Some(key) = self.queued.pop_front() else {
                break;
            };
            if let Some(endpoint) = self.endpoints.get_mut(&key) {
                endpoint.is_queued = false;
                self.stream_sends(key, rates, epoll, guest, now_ns);
            }
        }
        let have_turns = self.has_waiting() && self.send_in_turns(epoll, guest, now_ns);
        (have_turns || !self.queued.is_empty()) && guest.has_room()
    }

    /// Returns the time at which [`Sockets::work`] or [`Sockets::sweep`] has something to do, ns.
    pub fn due_ns(&self) -> Option<u64> {
        let timer = self.timers.peek().map(|Reverse((due_ns, _))| *due_ns);
        let sweep = (!self.endpoints.is_empty()).then_some(self.sweep_due_ns);
        timer
            .into_iter()
            .chain(sweep)
            .chain(self.put_off.due_ns())
            .chain(self.pace.due_ns())
            .min()
    }

    /// Closes the sockets whose flow is gone, once a second. `has_flow` is asked of the socket that a shared
    /// port has besides, too, whose peer is nobody: whether strangers are let in there.
    pub fn sweep(&mut self, now_ns: u64, has_flow: impl Fn(&FlowTuple) -> bool) {
        if now_ns < self.sweep_due_ns {
            return;
        }
        self.sweep_due_ns = now_ns + SWEEP_INTERVAL_NS;
        // A shared port's own socket stays with those of its flows.
        let mut in_use = HashSet::new();
        if self.host.shared.are_some_held() {
            let tuples = self.endpoints.values().map(|endpoint| &endpoint.tuple);
            let of_flows = tuples.filter(|tuple| !is_of_strangers(tuple) && has_flow(tuple));
            in_use.extend(of_flows.map(FlowTuple::local_addr));
        }
        let stays = |tuple: &FlowTuple| {
            has_flow(tuple) || is_of_strangers(tuple) && in_use.contains(&tuple.local_addr())
        };
        let gone = self.endpoints.iter();
        let gone = gone.filter(|(_, endpoint)| !stays(&endpoint.tuple));
        let gone: Vec<u32> = gone.map(|(key, _)| *key).collect();
        for key in gone {
            self.abort(key);
        }
    }

    /// Adds a socket that is to be waited for. Returns its key.
    fn add(&mut self, tuple: FlowTuple, socket: Kind) -> u32 {
        let key = loop {
            self.next_key = self.next_key.wrapping_add(1) & KEYS;
            if !self.endpoints.contains_key(&self.next_key) {
                break self.next_key;
            }
        };
        self.by_tuple.insert(tuple, key);
        let is_stream = matches!(socket, Kind::Stream(_));
        let endpoint = Endpoint {
            tuple,
            socket,
            scheduled_ns: None,
            is_queued: false,
            waits_to_send: false,
            waits_for_window: false,
            allowed: 0,
        };
        self.pace.streams += usize::from(is_stream);
        self.endpoints.insert(key, endpoint);
        key
    }

    /// Forgets a socket, which is closed.
    fn remove(&mut self, key: u32) {
        drop(self.take_out(key));
    }

    /// Forgets a socket that nobody waits at any more, and returns it.
    fn take_out(&mut self, key: u32) -> Option<Kind> {
        let mut endpoint = self.endpoints.remove(&key)?;
        self.host.shared.release(&endpoint.tuple);
        self.pace.give_back(&mut endpoint);
        self.pace.streams -= usize::from(matches!(endpoint.socket, Kind::Stream(_)));
        self.wait_no_more(&endpoint);
        if self.by_tuple.get(&endpoint.tuple) == Some(&key) {
            self.by_tuple.remove(&endpoint.tuple);
        }
        Some(endpoint.socket)
    }

    /// Closes a socket whose flow is gone: a connection by an RST.
    fn abort(&mut self, key: u32) {
        if let Some(endpoint) = self.endpoints.get_mut(&key)
            && let Kind::Stream(stream) = &mut endpoint.socket
        {
            stream.reset_peer();
        }
        self.remove(key);
    }

    /// Has a socket send in this turn's end.
    fn queue(&mut self, key: u32) {
        if let Some(endpoint) = self.endpoints.get_mut(&key)
            && !endpoint.is_queued
        {
            endpoint.is_queued = true;
            self.queued.push_back(key);
        }
    }

    /// Has a timer run out at this time, or before.
    fn schedule(&mut self, key: u32, due_ns: u64) {
        if let Some(endpoint) = self.endpoints.get_mut(&key)
            && endpoint.scheduled_ns.is_none_or(|at| due_ns < at)
        {
            endpoint.scheduled_ns = Some(due_ns);
            self.timers.push(Reverse((due_ns, key)));
        }
    }
}

/// Keys are below this mask: the rest is for other descriptors of the same set.
const KEYS: u32 = 0x7fff_ffff;

/// Adds a socket to the set, once: edge-triggered, since what was peeked stays readable.
fn watch(
    epoll: &Epoll,
    socket: &std::os::fd::OwnedFd,
    key: u32,
    flags: EpollFlags,
) -> io::Result<()> {
    Ok(epoll.add(socket, EpollEvent::new(flags, key.into()))?)
}

/// The methods of [`ToGuest`] of a guest whose memory no socket writes to.
#[cfg(test)]
macro_rules! no_space {
    () => {
        fn space(
            &mut self,
            _: &slipgate_model::FlowTuple,
            _: usize,
            _: usize,
        ) -> Option<$crate::space::Space> {
            None
        }

        fn forget(&mut self, _: $crate::space::Space) {}

        fn deliver_in(
            &mut self,
            _: $crate::port::VirtioNetHdr,
            _: &mut [u8],
            _: $crate::space::Space,
            _: usize,
        ) -> $crate::sockets::Delivered {
            unreachable!("there is no space");
        }
    };
}
#[cfg(test)]
pub(crate) use no_space;
