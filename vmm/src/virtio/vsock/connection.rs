//! One connection: its stage, its socket, and the credit of both directions.
use std::{collections::VecDeque, io::ErrorKind, os::fd::OwnedFd};

use libc::iovec;

use super::{
    VsockCounters, WINDOW_BYTES,
    counters::count,
    packet::{HEADER_BYTES, HOST_CID, Header, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, STREAM, operation},
    sockets,
};
use crate::virtio::pieces::{self, total};

/// Bytes that left the guest's buffer here and of which it was not told, at which it is.
const TOLD_AFTER_BYTES: u32 = WINDOW_BYTES / 4;

/// Ports of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Ports {
    pub(super) host: u32,
    pub(super) guest: u32,
}

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// A program of the host wants it; the guest was asked, or will be.
    Asked { is_sent: bool },
    /// The guest wants it and a program of the host is there; the guest will be told.
    Accepted,
    /// Both ends are connected.
    Open,
}

/// The connection ends at once, with RST to the guest if it knows of it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum End {
    /// All is done, or an end is gone.
    Done,
    /// The guest broke the rules.
    Violation,
}

/// A connection between a program of the host and the guest.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) ports: Ports,
    stage: Stage,
    socket: OwnedFd,
    /// False after the socket had no bytes, until it is signalled.
    readable: bool,
    /// The other end of the socket is closed.
    hung_up: bool,
    /// Bytes of the guest that the socket did not take yet.
    held: VecDeque<u8>,
    /// Which ends still send and receive.
    host: Open,
    guest: Open,
    /// The program was told that the guest sends no more. Once: each time is a signal of the socket.
    is_shut: bool,
    /// State of the host's end, as the guest was told.
    told: Open,
    /// Bytes from the guest, those of them that went on, and the number of which it was told:
    /// modulo 2^32.
    received: u32,
    forwarded: u32,
    announced: u32,
    wants_update: bool,
    /// The guest's buffer; bytes that were sent to it, and those of them that went on.
    room: u32,
    sent: u32,
    accepted: u32,
    /// The guest was asked for its credit, and did not answer yet.
    asked_credit: bool,
}

/// Directions in which an end is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Open {
    sends: bool,
    receives: bool,
}

impl Open {
    const BOTH: Open = Open {
        sends: true,
        receives: true,
    };

    fn is_closed(self) -> bool {
        !self.sends && !self.receives
    }
}

impl Connection {
    /// A connection for which the guest is to be asked.
    pub(super) fn asking(ports: Ports, socket: OwnedFd) -> Connection {
        Connection {
            ports,
            stage: Stage::Asked { is_sent: false },
            socket,
            // Not yet looked at.
            readable: true,
            hung_up: false,
            held: VecDeque::new(),
            host: Open::BOTH,
            guest: Open::BOTH,
            is_shut: false,
            told: Open::BOTH,
            received: 0,
            forwarded: 0,
            announced: 0,
            wants_update: false,
            room: 0,
            sent: 0,
            accepted: 0,
            asked_credit: false,
        }
    }

    /// A connection that the guest has asked for, by this request.
    pub(super) fn accepted(ports: Ports, socket: OwnedFd, request: &Header) -> Connection {
        Connection {
            stage: Stage::Accepted,
            room: request.buf_alloc,
            accepted: request.fwd_cnt,
            ..Connection::asking(ports, socket)
        }
    }

    /// Returns the socket to the host's program.
    pub(super) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Returns whether the guest knows of the connection.
    pub(super) fn is_known(&self) -> bool {
        self.stage != Stage::Asked { is_sent: false }
    }

    /// Returns whether both ends are connected.
    #[cfg(any(test, feature = "fake"))]
    pub(super) fn is_open(&self) -> bool {
        self.stage == Stage::Open
    }

    /// Returns the number of bytes that are held, and panics if it is not what the guest is told.
    #[cfg(any(test, feature = "fake"))]
    pub(super) fn held(&self) -> usize {
        let left = self.received.wrapping_sub(self.forwarded);
        assert_eq!(self.held.len(), left as usize);
        self.held.len()
    }

    /// The socket was signalled.
    ///
    /// # Errors
    /// The connection ends.
    pub(super) fn signalled(&mut self, hung_up: bool, counters: &VsockCounters) -> Result<(), End> {
        self.readable = true;
        self.hung_up |= hung_up;
        match self.stage {
            // Nobody waits for the guest's answer any more.
            Stage::Asked { .. } if self.hung_up => Err(End::Done),
            // What a program has said before its end is the guest's.
            Stage::Asked { .. } | Stage::Accepted => Ok(()),
            Stage::Open => self.flush(counters),
        }
    }

    /// Takes a packet of the guest. `data` is what is behind its header, of the length that it
    /// says.
    ///
    /// # Errors
    /// The connection ends.
    pub(super) fn take(
        &mut self,
        header: &Header,
        data: &[iovec],
        counters: &VsockCounters,
    ) -> Result<(), End> {
        self.room = header.buf_alloc;
        self.accepted = header.fwd_cnt;
        // One that has none still is not asked again: it says when it has.
        self.asked_credit &= self.credit() == 0;
        match (header.op, self.stage) {
            (operation::RESPONSE, Stage::Asked { is_sent: true }) => self.open(counters),
            (operation::RW, Stage::Open) if self.guest.sends => self.forward(data, counters),
            (operation::SHUTDOWN, Stage::Open) => {
                self.guest.sends &= header.flags & SHUTDOWN_SEND == 0;
                if self.guest.receives && header.flags & SHUTDOWN_RECEIVE != 0 {
                    self.guest.receives = false;
                    sockets::shut(&self.socket, libc::SHUT_RD);
                }
                self.flush(counters)
            }
            (operation::CREDIT_UPDATE, Stage::Open) => Ok(()),
            (operation::CREDIT_REQUEST, Stage::Open) => {
                self.wants_update = true;
                Ok(())
            }
            _ => Err(End::Violation),
        }
    }

    /// The guest has accepted.
    fn open(&mut self, counters: &VsockCounters) -> Result<(), End> {
        let line = format!("OK {}\n", self.ports.host);
        // SAFETY: the piece is the line's.
        let written = unsafe { sockets::write(&self.socket, &[sockets::piece(line.as_bytes())]) };
        // It is the first that the socket is given, and there is room.
        if !matches!(written, Ok(bytes) if bytes == line.len()) {
            return Err(End::Done);
        }
        self.stage = Stage::Open;
        count(&counters.opened_by_host, 1);
        Ok(())
    }

    /// Passes the guest's bytes on: into the socket, and what that does not take is held.
    fn forward(&mut self, data: &[iovec], counters: &VsockCounters) -> Result<(), End> {
        let bytes = total(data);
        let window = self.received.wrapping_sub(self.forwarded) as usize + bytes;
        if window > WINDOW_BYTES as usize {
            return Err(End::Violation);
        }
        self.received = self.received.wrapping_add(bytes as u32);
        let mut done = 0;
        if self.host.receives && self.held.is_empty() {
            // SAFETY: mapped memory of the guest.
            done = self.written(unsafe { sockets::write(&self.socket, data) });
        }
        if !self.host.receives {
            // Nobody is there to read them.
            done = bytes;
        } else {
            count(&counters.to_host_bytes, done as u64);
        }
        self.forwarded = self.forwarded.wrapping_add(done as u32);
        if done < bytes {
            let start = self.held.len();
            self.held.resize(start + bytes - done, 0);
            let rest = self.held.range_mut(start..);
            // SAFETY: mapped memory of the guest.
            unsafe { pieces::read_into(data, done, rest) };
            count(&counters.held_bytes, (bytes - done) as u64);
        }
        Ok(())
    }

    /// Writes what is held, as far as the socket takes it, and then closes what the guest has
    /// closed.
    fn flush(&mut self, counters: &VsockCounters) -> Result<(), End> {
        while self.host.receives && !self.held.is_empty() {
            let (front, back) = self.held.as_slices();
            let both = [sockets::piece(front), sockets::piece(back)];
            // SAFETY: the pieces are those of the held bytes.
            let result = unsafe { sockets::write(&self.socket, &both) };
            let done = self.written(result);
            if done == 0 {
                break;
            }
            self.held.drain(..done);
            self.forwarded = self.forwarded.wrapping_add(done as u32);
            count(&counters.to_host_bytes, done as u64);
        }
        if !self.host.receives {
            self.forwarded = self.received;
            self.held = VecDeque::new();
        }
        if self.held.is_empty() {
            // Its room is not kept by an idle connection.
            self.held = VecDeque::new();
            if self.guest.is_closed() {
                return Err(End::Done);
            }
            if !self.guest.sends && !self.is_shut {
                self.is_shut = true;
                sockets::shut(&self.socket, libc::SHUT_WR);
            }
        }
        Ok(())
    }

    /// Returns how many bytes the socket took. One that takes no more for good is noted.
    fn written(&mut self, result: std::io::Result<usize>) -> usize {
        match result {
            Ok(done) => done,
            Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
            Err(_) => {
                self.host.receives = false;
                0
            }
        }
    }

    /// Writes the next packet for the guest into a buffer of the driver, and returns its length.
    /// `None`: there is none now. `scratch` is room for pieces.
    ///
    /// # Errors
    /// The connection ends.
    ///
    /// # Safety
    /// The buffer is mapped memory of the guest, which the driver gave to be written.
    pub(super) unsafe fn next_packet(
        &mut self,
        cid: u32,
        buffer: &[iovec],
        scratch: &mut Vec<iovec>,
        counters: &VsockCounters,
    ) -> Result<Option<usize>, End> {
        let mut header = Header {
            src_cid: HOST_CID,
            dst_cid: cid.into(),
            src_port: self.ports.host,
            dst_port: self.ports.guest,
            kind: STREAM,
            buf_alloc: WINDOW_BYTES,
            ..Header::default()
        };
        // SAFETY: as of this function.
        let what = unsafe { self.next_operation(&mut header, buffer, scratch) }?;
        let Some(op) = what else { return Ok(None) };
        header.op = op;
        header.fwd_cnt = self.forwarded;
        self.announced = self.forwarded;
        self.wants_update = false;
        count(&counters.to_guest_bytes, header.len.into());
        // SAFETY: as of this function.
        unsafe { pieces::write(buffer, 0, &header.to_bytes()) };
        Ok(Some(HEADER_BYTES + header.len as usize))
    }

    /// # Safety
    /// As of [`Connection::next_packet`].
    unsafe fn next_operation(
        &mut self,
        header: &mut Header,
        buffer: &[iovec],
        scratch: &mut Vec<iovec>,
    ) -> Result<Option<u16>, End> {
        match &mut self.stage {
            Stage::Asked { is_sent: true } => return Ok(None),
            Stage::Asked { is_sent } => {
                *is_sent = true;
                return Ok(Some(operation::REQUEST));
            }
            Stage::Accepted => {
                self.stage = Stage::Open;
                return Ok(Some(operation::RESPONSE));
            }
            Stage::Open => {}
        }
        if self.guest.receives && self.host.sends && self.readable {
            // SAFETY: as of this function.
            let read = unsafe { self.read(buffer, scratch) }?;
            if read > 0 {
                header.len = read;
                return Ok(Some(operation::RW));
            }
        }
        if self.hung_up && (!self.host.sends || !self.guest.receives) {
            self.host = Open {
                sends: false,
                receives: false,
            };
        }
        if self.told != self.host {
            self.told = self.host;
            if !self.host.sends {
                header.flags |= SHUTDOWN_SEND;
            }
            if !self.host.receives {
                header.flags |= SHUTDOWN_RECEIVE;
            }
            return Ok(Some(operation::SHUTDOWN));
        }
        let untold = self.forwarded.wrapping_sub(self.announced);
        if self.wants_update || untold >= TOLD_AFTER_BYTES {
            return Ok(Some(operation::CREDIT_UPDATE));
        }
        let has_more = self.guest.receives && self.host.sends && self.readable;
        if has_more && self.credit() == 0 && !self.asked_credit {
            self.asked_credit = true;
            return Ok(Some(operation::CREDIT_REQUEST));
        }
        Ok(None)
    }

    /// Reads from the socket into a buffer of the driver, behind the header. Returns the number of
    /// bytes.
    ///
    /// # Safety
    /// As of [`Connection::next_packet`].
    unsafe fn read(&mut self, buffer: &[iovec], scratch: &mut Vec<iovec>) -> Result<u32, End> {
        scratch.clear();
        let credit = self.credit() as usize;
        pieces::append_part(buffer, HEADER_BYTES, credit, scratch);
        if scratch.is_empty() {
            return Ok(0);
        }
        // SAFETY: as of this function.
        match unsafe { sockets::read(&self.socket, scratch) } {
            Ok(0) => {
                self.host.sends = false;
                Ok(0)
            }
            Ok(done) => {
                self.sent = self.sent.wrapping_add(done as u32);
                Ok(done as u32)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.readable = false;
                Ok(0)
            }
            Err(_) => Err(End::Done),
        }
    }

    /// Returns how many bytes the guest may be sent.
    fn credit(&self) -> u32 {
        let under_way = self.sent.wrapping_sub(self.accepted);
        self.room.saturating_sub(under_way)
    }
}
