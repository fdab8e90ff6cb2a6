//! A VMM with its guest's driver, for tests: it gives two rings in memory of its own, or four, and may do
//! with them, and say on its connection, whatever it likes.
use std::{
    fs::File,
    io::IoSlice,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd, RawFd},
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::{
        epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollTimeout},
        eventfd::{EfdFlags, EventFd},
        memfd::{MFdFlags, memfd_create},
        socket::{
            AddressFamily, Backlog, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, bind,
            connect, getsockname, listen, recv, send, sendmsg, socket, socketpair,
        },
    },
};
use vm_memory::{Bytes as _, FileOffset, GuestAddress, GuestMemoryMmap};

use super::{
    Accepted, Lost, Packet, Rest, RingLink, Wrong,
    message::request,
    session::{RX, TX, feature},
};
use crate::{packet::Version, port::VNET_LEN};

/// Guest address of the memory, its length in bytes, and the VMM's address of it.
pub const MEMORY: u64 = 0x10_0000;
/// Length of the memory, bytes.
pub const MEMORY_LEN: u64 = 1 << 20;
const VMM_AT: u64 = 0x7000_0000_0000;
/// Chains of a ring.
pub const CHAINS: u16 = 64;
/// Places of a ring's parts behind its beginning.
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const RING_LEN: u64 = 0x4000;
/// Rings for which there is room.
const RINGS: usize = 4;
/// Flags of descriptors in a virtqueue.
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const LISTENER_KEY: u64 = 1;
const LINK_KEY: u64 = 2;
const KICK_KEY: u64 = 3;
/// Time for another process to start, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(10);

/// A link with a VMM that is connected to it.
#[derive(Debug)]
pub struct FakeVmm {
    /// The link under test.
    pub link: RingLink,
    /// Memory of the guest, which the link has mapped too.
    pub memory: GuestMemoryMmap,
    /// Why the link closed the connection last.
    pub wrong: Option<Wrong>,
    /// Frames for the guest that the link has dropped.
    pub lost: Vec<Lost>,
    file: OwnedFd,
    epoll: Epoll,
    listener: OwnedFd,
    socket: Option<OwnedFd>,
    kicks: [EventFd; RINGS],
    calls: [EventFd; RINGS],
    /// Chains made available, by ring.
    available: [u16; RINGS],
    /// Where rings go on when they are set up; `None`: behind what is available.
    bases: [Option<u16>; RINGS],
}

impl FakeVmm {
    /// A VMM that has connected, and has said nothing.
    pub fn new() -> Self {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = memfd_create(c"guest", flags).expect("a file of memory");
        let file_of = |fd: &OwnedFd| File::from(fd.try_clone().expect("a copy"));
        file_of(&file).set_len(MEMORY_LEN).expect("its length");
        let offset = FileOffset::new(file_of(&file), 0);
        let range = (GuestAddress(MEMORY), MEMORY_LEN as usize, Some(offset));
        let memory = GuestMemoryMmap::from_ranges_with_files([range]).expect("memory");
        let listener = stream_socket();
        // An abstract address that the kernel chooses.
        bind(listener.as_raw_fd(), &UnixAddr::new_unnamed()).expect("an address");
        listen(&listener, Backlog::new(8).expect("a backlog")).expect("to listen");
        let link = RingLink::new(listener.try_clone().expect("a copy"), false);
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).expect("epoll");
        link.watch(&epoll, LISTENER_KEY, LINK_KEY)
            .expect("to watch");
        let event = || {
            let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
            EventFd::from_flags(flags).expect("an event")
        };
        let mut vmm = Self {
            link,
            memory,
            wrong: None,
            lost: Vec::new(),
            file,
            epoll,
            listener,
            socket: None,
            kicks: [(); RINGS].map(|()| event()),
            calls: [(); RINGS].map(|()| event()),
            available: [0; RINGS],
            bases: [None; RINGS],
        };
        vmm.connect();
        vmm
    }

    /// Slipgate's own VMM, which is connected from the start.
    pub fn own() -> Self {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let pair = socketpair(AddressFamily::Unix, SockType::Stream, None, flags);
        let (ours, theirs) = pair.expect("a pair of sockets");
        let mut vmm = Self::new();
        let seals = FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK);
        fcntl(&vmm.file, seals).expect("to fix its length");
        vmm.link = RingLink::of_own_vmm(theirs);
        vmm.epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).expect("epoll");
        let watched = vmm.link.watch(&vmm.epoll, LISTENER_KEY, LINK_KEY);
        watched.expect("to watch");
        vmm.socket = Some(ours);
        vmm
    }

    /// Sets where a ring is to go on when it is set up the next time.
    pub fn set_base(&mut self, nth: usize, base: u16) {
        self.bases[nth] = Some(base);
    }

    /// Connects, anew if it was connected.
    pub fn connect(&mut self) {
        self.let_go();
        self.connect_unheard();
        self.turn();
    }

    /// Ends its connection, and waits until the link has heard of it: a process that another test starts
    /// just now has copies of all sockets until it runs its program.
    pub fn let_go(&mut self) {
        self.socket = None;
        let deadline = Instant::now() + PATIENCE;
        self.turn();
        while self.link.vmm.is_some() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
            self.turn();
        }
    }

    /// Connects, and waits to be accepted.
    pub fn connect_unheard(&mut self) {
        let socket = stream_socket();
        let address = getsockname::<UnixAddr>(self.listener.as_raw_fd()).expect("an address");
        connect(socket.as_raw_fd(), &address).expect("to connect");
        self.socket = Some(socket);
    }

    /// Whether the link has not closed the connection.
    pub fn is_connected(&self) -> bool {
        let socket = self.socket.as_ref().expect("it has connected");
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_PEEK;
        let peeked = recv(socket.as_raw_fd(), &mut [0], flags);
        !matches!(peeked, Ok(0) | Err(Errno::ECONNRESET | Errno::EPIPE))
    }

    /// Whether the link closes the connection, or has done so: see [`FakeVmm::let_go`].
    pub fn is_closed(&self) -> bool {
        let deadline = Instant::now() + PATIENCE;
        while self.is_connected() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        !self.is_connected()
    }

    /// Lets the link do what there is to do, as the port does; frames of the guest wait. Returns the
    /// frames for the guest that it dropped.
    pub fn turn(&mut self) -> Vec<Lost> {
        let mut lost = Vec::new();
        loop {
            let mut events = [EpollEvent::empty(); 8];
            let ready = self.epoll.wait(&mut events, EpollTimeout::ZERO);
            for event in &events[..ready.unwrap_or(0)] {
                match event.data() {
                    LINK_KEY => {
                        let wrong = self.link.hear(&self.epoll, KICK_KEY);
                        self.wrong = wrong.or(self.wrong);
                    }
                    KICK_KEY => self.link.kicked(),
                    _ => {}
                }
            }
            lost.extend(self.link.settle());
            // What is due some time is due now.
            let now_ns = self.link.due_ns().unwrap_or(0);
            let accepted = self.link.accept(&self.epoll, LINK_KEY, now_ns);
            if accepted != Accepted::Yes && ready.unwrap_or(0) == 0 {
                self.lost.extend(&lost);
                return lost;
            }
        }
    }

    /// Reads a frame of the guest, whole.
    pub fn next(&mut self, into: &mut [u8]) -> Packet {
        let (packet, rest) = self.next_beginning(into);
        if let Packet::Frame(len) = packet
            && let Some(rest) = rest
        {
            // What is left of the frame before does not count.
            into[len - rest.len()..len].fill(0xee);
            let is_copied = rest.copy_to(&mut into[len - rest.len()..len]);
            assert!(is_copied, "it was checked");
            assert_eq!(self.link.finish(rest), Packet::Nothing);
        }
        packet
    }

    /// Reads a frame of the guest, or the beginning of one, with its rest.
    pub fn next_beginning(&mut self, into: &mut [u8]) -> (Packet, Option<Rest>) {
        self.turn();
        self.link.next(into)
    }

    /// Has bytes of a socket received into room for `most` bytes of payload in the guest's buffers, and the
    /// frame put into its ring, if `comes` says so. Returns whether the link took it, if there was room.
    pub fn receive(&mut self, most: usize, sent: &[u8], comes: bool) -> Option<bool> {
        const HEADERS: [u8; VNET_LEN + 54] = [0x45; VNET_LEN + 54];
        let space = self
            .link
            .space(Version::V4, HEADERS.len() - VNET_LEN, most)?;
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let pair = socketpair(AddressFamily::Unix, SockType::Stream, None, flags);
        let (ours, theirs) = pair.expect("a pair of sockets");
        let _ = send(theirs.as_raw_fd(), sent, MsgFlags::MSG_NOSIGNAL);
        let got = space.receive(&ours, &mut [], MsgFlags::MSG_DONTWAIT);
        let Some(got) = got.ok().filter(|_| comes) else {
            self.link.forget(space);
            return Some(false);
        };
        assert!(got <= most, "no more than there is room for");
        Some(self.link.put_space(&HEADERS, space, got).is_none())
    }

    /// Says something, with descriptors. What is not taken is lost.
    pub fn say(&mut self, bytes: &[u8], fds: &[RawFd]) {
        self.say_unheard(bytes, fds);
        self.turn();
    }

    fn say_unheard(&self, bytes: &[u8], fds: &[RawFd]) {
        let rights = [ControlMessage::ScmRights(fds)];
        let rights = if fds.is_empty() { &[][..] } else { &rights };
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        if let Some(socket) = &self.socket {
            let parts = [IoSlice::new(bytes)];
            let _ = sendmsg::<()>(socket.as_raw_fd(), &parts, rights, flags, None);
        }
    }

    /// Makes a request, with descriptors.
    pub fn ask(&mut self, number: u32, body: &[u8], fds: &[RawFd]) {
        self.ask_unheard(number, body, fds);
        self.turn();
    }

    /// Makes a request, of which the link has yet to hear.
    pub fn ask_unheard(&self, number: u32, body: &[u8], fds: &[RawFd]) {
        let words = [number, 1, body.len() as u32];
        let header = words.iter().flat_map(|word| word.to_ne_bytes());
        let message: Vec<u8> = header.chain(body.iter().copied()).collect();
        self.say_unheard(&message, fds);
    }

    /// The answers that have come.
    pub fn answers(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; 4_096];
        let socket = self.socket.as_ref().expect("it has connected");
        let len = recv(socket.as_raw_fd(), &mut bytes, MsgFlags::MSG_DONTWAIT);
        bytes.truncate(len.unwrap_or(0));
        bytes
    }

    /// The descriptor of the memory, and those of kicks and calls, of the receiving ring first.
    pub fn fds(&self) -> [RawFd; 5] {
        let [rx, tx, ..] = self.kicks.each_ref().map(|it| it.as_fd().as_raw_fd());
        let [to_rx, to_tx, ..] = self.calls.each_ref().map(|it| it.as_fd().as_raw_fd());
        [self.file.as_raw_fd(), rx, tx, to_rx, to_tx]
    }

    /// Gives memory and rings, as QEMU does.
    pub fn set_up(&mut self, features: u64) {
        let [memory, ..] = self.fds();
        self.ask(request::SET_OWNER, &[], &[]);
        self.ask(request::SET_PROTOCOL_FEATURES, &0_u64.to_ne_bytes(), &[]);
        self.ask(request::SET_FEATURES, &features.to_ne_bytes(), &[]);
        let table = [MEMORY, MEMORY_LEN, VMM_AT, 0];
        let table = [&[1_u32.to_ne_bytes(), [0; 4]].concat()[..], &longs(&table)].concat();
        self.ask(request::SET_MEM_TABLE, &table, &[memory]);
        self.give_pair(0);
    }

    /// Gives a pair of rings.
    pub fn give_pair(&mut self, pair: usize) {
        for nth in [2 * pair + RX, 2 * pair + TX] {
            let [kick, call] = [&self.kicks, &self.calls].map(|of| of[nth].as_fd().as_raw_fd());
            let number = (nth as u32).to_ne_bytes();
            let word = |word: u32| [number, word.to_ne_bytes()].concat();
            let told = longs(&[nth as u64]);
            self.ask(request::SET_VRING_NUM, &word(CHAINS.into()), &[]);
            let base = self.bases[nth].take().unwrap_or(self.available[nth]);
            self.ask(request::SET_VRING_BASE, &word(base.into()), &[]);
            let at = VMM_AT + nth as u64 * RING_LEN;
            let places = longs(&[at, at + USED, at + AVAILABLE, 0]);
            let body = [&word(0)[..], &places].concat();
            self.ask(request::SET_VRING_ADDR, &body, &[]);
            self.ask(request::SET_VRING_CALL, &told, &[call]);
            self.ask(request::SET_VRING_KICK, &told, &[kick]);
            self.ask(request::SET_VRING_ENABLE, &word(1), &[]);
        }
    }

    /// Has the rings begin anew, as a driver does that is loaded again.
    pub fn clear_rings(&mut self) {
        self.poke(MEMORY, &[0; RINGS * RING_LEN as usize]);
        self.available = [0; RINGS];
        self.bases = [None; RINGS];
    }

    /// Stops a ring. Returns where it is to go on, as the link says.
    pub fn stop(&mut self, nth: usize) -> u32 {
        let body = [(nth as u32).to_ne_bytes(), [0; 4]].concat();
        self.answers();
        self.ask(request::GET_VRING_BASE, &body, &[]);
        let answer = self.answers();
        let base = answer.last_chunk().map(|base| u32::from_ne_bytes(*base));
        base.expect("an answer")
    }

    /// Makes a chain available whose buffers are these: guest address, length, and whether the device
    /// writes. They take the descriptors from `first` on.
    pub fn make_available(&mut self, nth: usize, first: u16, buffers: &[(u64, u32, bool)]) {
        let at = MEMORY + nth as u64 * RING_LEN;
        for (offset, (address, len, writable)) in buffers.iter().enumerate() {
            let index = (first + offset as u16) % CHAINS;
            let is_last = offset + 1 == buffers.len();
            let flags = if is_last { 0 } else { NEXT } | if *writable { WRITE } else { 0 };
            let next = (index + 1) % CHAINS;
            let descriptor = [
                &address.to_le_bytes()[..],
                &len.to_le_bytes(),
                &flags.to_le_bytes(),
                &next.to_le_bytes(),
            ];
            self.poke(at + 16 * u64::from(index), &descriptor.concat());
        }
        let entry = u64::from(self.available[nth] % CHAINS);
        self.poke(at + AVAILABLE + 4 + 2 * entry, &first.to_le_bytes());
        self.available[nth] = self.available[nth].wrapping_add(1);
        self.poke(at + AVAILABLE + 2, &self.available[nth].to_le_bytes());
    }

    /// Writes to the guest's memory, if it is there.
    pub fn poke(&mut self, address: u64, bytes: &[u8]) {
        let _ = self.memory.write_slice(bytes, GuestAddress(address));
    }

    /// Reads the guest's memory.
    pub fn peek(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let read = self.memory.read_slice(&mut bytes, GuestAddress(address));
        read.expect("within the memory");
        bytes
    }

    /// Chains that the device has given back of a ring, each with the bytes it has written.
    pub fn used(&self, nth: usize) -> Vec<(u32, u32)> {
        let at = MEMORY + nth as u64 * RING_LEN + USED;
        let index = self.peek(at + 2, 2);
        let count = u16::from_le_bytes([index[0], index[1]]);
        let word = |at: u64| {
            let bytes = self.peek(at, 4);
            u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
        };
        let from = count.saturating_sub(CHAINS);
        let element = |nth: u16| at + 4 + 8 * u64::from(nth % CHAINS);
        (from..count)
            .map(|nth| (word(element(nth)), word(element(nth) + 4)))
            .collect()
    }

    /// Signals a ring's doorbell.
    pub fn kick(&mut self, nth: usize) {
        let _ = self.kicks[nth].write(1);
        self.turn();
    }

    /// How often the device has called since the last time.
    pub fn calls(&self, nth: usize) -> u64 {
        self.calls[nth].read().unwrap_or(0)
    }
}

impl Default for FakeVmm {
    fn default() -> Self {
        Self::new()
    }
}

/// Features of a driver that accepts all but the protocol's.
pub const ALL: u64 = feature::ALL & !feature::EVENT_IDX;

fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_ne_bytes()).collect()
}

fn stream_socket() -> OwnedFd {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    socket(AddressFamily::Unix, SockType::Stream, flags, None).expect("a socket")
}
