//! The connection to the engine: requests of the vhost-user protocol (QEMU's
//! docs/interop/vhost-user.rst), and one of slipgate's own, which says where to count.
//!
//! A request is a header of three 32-bit words (number, flags, length of the body) and a body, in the
//! byte order of the host, with descriptors beside it. Only the requests that ask where a ring stands
//! are answered. The VMM's addresses, in which the protocol names rings, are the guest's here.
use std::{
    fs::File,
    io::{self, Read as _},
    os::{
        fd::{AsRawFd as _, RawFd},
        unix::net::UnixStream,
    },
    time::{Duration, Instant},
};

use virtio_bindings::bindings::{
    virtio_config::VIRTIO_F_VERSION_1,
    virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC},
};
use virtio_bindings::virtio_net::VIRTIO_NET_F_MRG_RXBUF;
use vm_memory::{Address as _, GuestMemoryBackend as _, GuestMemoryRegion as _};
use vmm_sys_util::sock_ctrl_msg::ScmSocket as _;

use super::super::features::{Features, Offloads};
use crate::GuestMemory;

/// Time in which the engine has to answer.
pub(super) const ANSWERED_WITHIN: Duration = Duration::from_secs(10);
/// Interval between two attempts to send descriptors of which too many are under way.
const AGAIN_AFTER: Duration = Duration::from_millis(1);

const HEADER_LEN: usize = 12;
/// Flags of a header: version 1, and an answer.
const VERSION: u32 = 1;
const IS_REPLY: u32 = 0x4;
/// Bit 30 of the features: a ring waits to be enabled.
const PROTOCOL_FEATURES: u64 = 1 << 30;
/// In the body of a request about a descriptor: there is none.
const NONE: u64 = 1 << 8;

mod request {
    pub(super) const SET_FEATURES: u32 = 2;
    pub(super) const RESET_OWNER: u32 = 4;
    pub(super) const SET_MEM_TABLE: u32 = 5;
    pub(super) const SET_VRING_NUM: u32 = 8;
    pub(super) const SET_VRING_ADDR: u32 = 9;
    pub(super) const SET_VRING_BASE: u32 = 10;
    pub(super) const GET_VRING_BASE: u32 = 11;
    pub(super) const SET_VRING_KICK: u32 = 12;
    pub(super) const SET_VRING_CALL: u32 = 13;
    pub(super) const SET_VRING_ERR: u32 = 14;
    pub(super) const SET_VRING_ENABLE: u32 = 18;
    /// Slipgate's own: where the engine counts what the rings carry.
    pub(super) const SET_TALLY: u32 = 0x5347_0001;
}

/// Connection to the engine that serves the rings.
pub(super) struct Engine {
    /// `None` once it has ended.
    socket: Option<UnixStream>,
    /// Whether it was told of the memory, which stays the same.
    knows_memory: bool,
}

/// A ring, for its start.
pub(super) struct RingPlace {
    pub(super) size: u16,
    /// Available index from which it goes on.
    pub(super) next: u16,
    /// Guest addresses of descriptors, used and available ring.
    pub(super) parts: [u64; 3],
    pub(super) kick: RawFd,
    /// Descriptor that interrupts the driver; `None`: it wants no interrupts.
    pub(super) call: Option<RawFd>,
    pub(super) broken: RawFd,
}

impl Engine {
    /// `counts`: where it is to count.
    pub(super) fn new(socket: UnixStream, (file, at): (File, u64)) -> io::Result<Engine> {
        let mut engine = Engine {
            socket: Some(socket),
            knows_memory: false,
        };
        // It may not read that before the guest runs.
        engine.send(
            request::SET_TALLY,
            &at.to_ne_bytes(),
            Some(file.as_raw_fd()),
        )?;
        Ok(engine)
    }

    /// Its descriptor, readable when it has ended; `None` once that was noticed.
    pub(super) fn descriptor(&self) -> Option<RawFd> {
        self.socket.as_ref().map(UnixStream::as_raw_fd)
    }

    /// Closes the connection to the engine.
    pub(super) fn leave(&mut self) {
        if let Some(socket) = self.socket.take() {
            // The card has a copy.
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Tells what the driver has accepted, as far as it is the engine's.
    pub(super) fn set_features(&mut self, features: u64) -> io::Result<()> {
        let offloads = Features::of_offloads(Offloads::of_rings());
        let ring = [
            VIRTIO_NET_F_MRG_RXBUF,
            VIRTIO_RING_F_INDIRECT_DESC,
            VIRTIO_RING_F_EVENT_IDX,
            VIRTIO_F_VERSION_1,
        ];
        let known = ring.iter().fold(offloads, |known, bit| known | 1 << bit);
        // The transport takes no driver without it, and does not tell the card.
        let told = features & known | 1 << VIRTIO_F_VERSION_1 | PROTOCOL_FEATURES;
        self.send(request::SET_FEATURES, &told.to_ne_bytes(), None)
    }

    /// Tells where the guest's memory is. It is in one file.
    pub(super) fn set_memory(&mut self, memory: &GuestMemory) -> io::Result<()> {
        if self.knows_memory {
            return Ok(());
        }
        let mut table = Vec::new();
        let mut fds = Vec::new();
        for region in memory.iter() {
            let file = region.file_offset().ok_or_else(not_shared)?;
            let start = region.start_addr().raw_value();
            let words = [start, region.len(), start, file.start()];
            table.extend(words.iter().flat_map(|word| word.to_ne_bytes()));
            fds.push(file.file().as_raw_fd());
        }
        let count = (fds.len() as u64).to_ne_bytes();
        self.send(request::SET_MEM_TABLE, &[&count, &table[..]].concat(), fds)?;
        self.knows_memory = true;
        Ok(())
    }

    /// Has the engine start a ring at this place.
    pub(super) fn start(&mut self, ring: u32, place: &RingPlace) -> io::Result<()> {
        self.send_words(request::SET_VRING_NUM, [ring, place.size.into()])?;
        self.send_words(request::SET_VRING_BASE, [ring, place.next.into()])?;
        // Without flags, and without a log.
        let [descriptors, used, available] = place.parts;
        let longs = [ring.into(), descriptors, used, available, 0];
        let body: Vec<u8> = longs
            .iter()
            .flat_map(|long: &u64| long.to_ne_bytes())
            .collect();
        self.send(request::SET_VRING_ADDR, &body, None)?;
        self.send_fd(request::SET_VRING_ERR, ring, Some(place.broken))?;
        self.set_call(ring, place.call)?;
        self.send_fd(request::SET_VRING_KICK, ring, Some(place.kick))?;
        self.send_words(request::SET_VRING_ENABLE, [ring, 1])
    }

    /// Tells what interrupts the driver.
    pub(super) fn set_call(&mut self, ring: u32, call: Option<RawFd>) -> io::Result<()> {
        self.send_fd(request::SET_VRING_CALL, ring, call)
    }

    /// Tells that the driver is no more.
    pub(super) fn reset(&mut self) -> io::Result<()> {
        self.send(request::RESET_OWNER, &[], None)
    }

    /// Stops a ring. Returns the available index from which it would go on. The engine does not touch
    /// it any more.
    pub(super) fn stop(&mut self, ring: u32) -> io::Result<u16> {
        self.send_words(request::GET_VRING_BASE, [ring, 0])?;
        let answer = self.answer(request::GET_VRING_BASE)?;
        match answer {
            [told, next] if told == ring => u16::try_from(next).map_err(|_| nonsense()),
            _ => Err(nonsense()),
        }
    }

    fn send_words(&mut self, number: u32, words: [u32; 2]) -> io::Result<()> {
        let body: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.send(number, &body, None)
    }

    fn send_fd(&mut self, number: u32, ring: u32, fd: Option<RawFd>) -> io::Result<()> {
        let none = if fd.is_none() { NONE } else { 0 };
        let told = u64::from(ring) | none;
        self.send(number, &told.to_ne_bytes(), fd)
    }

    fn send(
        &mut self,
        number: u32,
        body: &[u8],
        fds: impl IntoIterator<Item = RawFd>,
    ) -> io::Result<()> {
        let socket = self.socket.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        let header = [number, VERSION, body.len() as u32];
        let header: Vec<u8> = header.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let message = [&header, body].concat();
        let fds: Vec<RawFd> = fds.into_iter().collect();
        let until = Instant::now() + ANSWERED_WITHIN;
        loop {
            let sent = socket.send_with_fds(&[&message[..]], &fds);
            match sent.map_err(io::Error::from) {
                Ok(sent) if sent == message.len() => return Ok(()),
                // A message is much shorter than what the kernel takes whole.
                Ok(_) => return Err(io::ErrorKind::WriteZero.into()),
                Err(error) => await_room(socket.as_raw_fd(), error, until)?,
            }
        }
    }

    /// Reads an answer of two words.
    fn answer(&mut self, number: u32) -> io::Result<[u32; 2]> {
        let until = Instant::now() + ANSWERED_WITHIN;
        let mut socket = self.socket.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        let mut bytes = [0; HEADER_LEN + 8];
        let mut read = 0;
        while read < bytes.len() {
            match socket.read(&mut bytes[read..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(some) => read += some,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    await_event(socket.as_raw_fd(), libc::POLLIN, until)?;
                }
                Err(error) => return Err(error),
            }
        }
        let mut words = bytes.chunks_exact(4).map(|word| {
            let word: [u8; 4] = word.try_into().unwrap_or_default();
            u32::from_ne_bytes(word)
        });
        let mut next = || words.next().unwrap_or_default();
        let header = [next(), next(), next()];
        match header == [number, VERSION | IS_REPLY, 8] {
            true => Ok([next(), next()]),
            false => Err(nonsense()),
        }
    }
}

/// Waits until a send may succeed that has failed with this error.
///
/// # Errors
/// The error, if time does not mend it or is up.
fn await_room(fd: RawFd, error: io::Error, until: Instant) -> io::Result<()> {
    if Instant::now() >= until {
        return Err(error);
    }
    match error.raw_os_error() {
        Some(libc::EINTR) => Ok(()),
        // The engine has many messages to read.
        Some(libc::EAGAIN) => await_event(fd, libc::POLLOUT, until),
        // The user has as many descriptors under way as the kernel allows, of other sockets too.
        Some(libc::ETOOMANYREFS) => {
            std::thread::sleep(AGAIN_AFTER);
            Ok(())
        }
        _ => Err(error),
    }
}

fn await_event(fd: RawFd, events: libc::c_short, until: Instant) -> io::Result<()> {
    let left = until.saturating_duration_since(Instant::now());
    let mut wanted = libc::pollfd {
        fd,
        events,
        revents: 0,
    };
    let millis = libc::c_int::try_from(left.as_millis()).unwrap_or(libc::c_int::MAX);
    // SAFETY: one element, which outlives the call.
    match unsafe { libc::poll(&raw mut wanted, 1, millis) } {
        0 => Err(io::ErrorKind::TimedOut.into()),
        _ => Ok(()),
    }
}

fn not_shared() -> io::Error {
    io::Error::other("the guest's memory is in no file that could be shared")
}

fn nonsense() -> io::Error {
    io::Error::other("the engine's answer is to no question")
}
