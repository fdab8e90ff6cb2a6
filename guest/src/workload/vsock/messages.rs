//! `vsock messages` and `vsock abort`: connections to a program of the host, all at once. On each,
//! numbered messages go both ways beside each other, and each that comes is checked.
//!
//! The guest begins with the number of the connection, in 8 bytes, little-endian. Message `n` of an
//! end is `n` in 8 bytes, little-endian, and `31 n mod 241` bytes of a pattern, which goes on from
//! message to message. Its seed is twice the connection's number for the guest, and one more for the
//! host. Each message of the guest is a packet of its own, unless the host has no room for all of it.
use alloc::{
    format,
    string::{String, ToString as _},
    vec::Vec,
};

use super::{BUFFER_BYTES, PATIENCE_NS, RECEIVES_NO_MORE, SENDS_NO_MORE, Stream, TOLD_AFTER_BYTES};
use crate::{
    pattern::Pattern,
    pci::Registers,
    platform::Platform,
    virtio::vsock::{Header, Vsock, operation},
};

/// Guest's port of the first connection of a workload.
const FIRST_PORT: u32 = 32_768;
const BOTH: u32 = RECEIVES_NO_MORE | SENDS_NO_MORE;
/// Length of a message's number.
const NUMBER_BYTES: usize = 8;

/// Messages of one end, made or checked one after the other.
struct Messages {
    pattern: Pattern,
    /// The message that is made or checked now, and how much of it was.
    now: Vec<u8>,
    at: usize,
    /// Its number, which is that of the messages before it.
    number: u64,
}

impl Messages {
    fn new(seed: u64) -> Messages {
        let mut messages = Messages {
            pattern: Pattern::new(seed),
            now: Vec::new(),
            at: 0,
            number: 0,
        };
        messages.make();
        messages
    }

    /// Makes the message of the present number.
    fn make(&mut self) {
        let body = (self.number.wrapping_mul(31) % 241) as usize;
        self.at = 0;
        self.now.clear();
        self.now.extend(self.number.to_le_bytes());
        self.now.resize(NUMBER_BYTES + body, 0);
        self.pattern.fill(&mut self.now[NUMBER_BYTES..]);
    }

    /// Returns the rest of the present message, up to so many bytes, and goes on behind it.
    fn take(&mut self, most: usize) -> Vec<u8> {
        let end = self.now.len().min(self.at + most);
        let part = self.now[self.at..end].to_vec();
        self.advance(part.len());
        part
    }

    /// Checks the next bytes.
    fn check(&mut self, mut bytes: &[u8]) -> Result<(), String> {
        while !bytes.is_empty() {
            let due = &self.now[self.at..];
            let (part, rest) = bytes.split_at(bytes.len().min(due.len()));
            if let Some(wrong) = part.iter().zip(due).position(|(got, due)| got != due) {
                let (at, number) = (self.at + wrong, self.number);
                return Err(format!("byte {at} of message {number} is wrong"));
            }
            self.advance(part.len());
            bytes = rest;
        }
        Ok(())
    }

    fn advance(&mut self, bytes: usize) {
        self.at += bytes;
        if self.at == self.now.len() {
            self.number += 1;
            self.make();
        }
    }

    /// Whether exactly so many messages were made or checked.
    fn are(&self, count: u64) -> bool {
        (self.number, self.at) == (count, 0)
    }
}

/// The client of a port of the host.
pub(super) struct Client<'a, R: Registers + Clone> {
    pub(super) device: &'a mut Vsock<R>,
    pub(super) port: u32,
    /// Messages of each connection, each way.
    pub(super) count: u64,
    /// Whether the guest resets each connection behind its last message.
    pub(super) aborts: bool,
    pub(super) tally: Tally,
}

/// What the connections did.
#[derive(Default)]
pub(super) struct Tally {
    /// Connections that ended as they should.
    pub(super) connections: u32,
    pub(super) sent: u64,
    pub(super) received: u64,
    pub(super) received_bytes: u64,
    /// Times that a connection had something to send, and the host no room.
    pub(super) credit_waits: u64,
}

/// One of the connections.
struct Talk {
    stream: Stream,
    is_open: bool,
    greeting: Option<[u8; NUMBER_BYTES]>,
    sending: Messages,
    due: Messages,
    /// The guest has said that it sends no more; that it is done; the host that it sends no more.
    has_sent: bool,
    is_closed: bool,
    host_has_sent: bool,
    waits_for_credit: bool,
    is_over: bool,
}

impl<R: Registers + Clone> Client<'_, R> {
    /// Goes on to the end of every connection, also when one fails.
    ///
    /// # Errors
    /// A connection failed, or the device did. The error is the first.
    pub(super) fn run(&mut self, platform: &impl Platform, connections: u32) -> Result<(), String> {
        let mut failed = Ok(());
        let mut talks = Vec::new();
        for number in 0..connections {
            let talk = Talk::new(self.port, number);
            self.send(&talk.stream.header(operation::REQUEST), &[])?;
            talks.push(talk);
        }
        let mut until = platform.now_ns() + PATIENCE_NS;
        while !talks.is_empty() {
            if let Some((header, data)) = self.device.receive() {
                until = platform.now_ns() + PATIENCE_NS;
                let of = |talk: &&mut Talk| {
                    let ports = (talk.stream.guest_port, talk.stream.host_port);
                    ports == (header.guest_port, header.host_port)
                };
                if let Some(talk) = talks.iter_mut().find(of) {
                    let taken = self.take(talk, &header, &data);
                    self.note(talk, taken, &mut failed)?;
                } else if header.op != operation::RST {
                    let other = Stream {
                        guest_port: header.guest_port,
                        host_port: header.host_port,
                        ..Stream::default()
                    };
                    self.send(&other.header(operation::RST), &[])?;
                }
            }
            for talk in talks.iter_mut().filter(|talk| !talk.is_over) {
                self.go_on(talk)?;
            }
            talks.retain(|talk| !talk.is_over);
            if platform.now_ns() > until {
                return Err(format!("no packet for {} s", PATIENCE_NS / 1_000_000_000));
            }
            core::hint::spin_loop();
        }
        failed
    }

    /// Notes the end of a connection. One that has failed is reset.
    fn note(
        &mut self,
        talk: &mut Talk,
        taken: Result<(), String>,
        failed: &mut Result<(), String>,
    ) -> Result<(), String> {
        let Err(why) = taken else {
            return Ok(());
        };
        talk.is_over = true;
        if failed.is_ok() {
            *failed = Err(why);
        }
        self.send(&talk.stream.header(operation::RST), &[])
    }

    fn take(&mut self, talk: &mut Talk, header: &Header, data: &[u8]) -> Result<(), String> {
        let stream = &mut talk.stream;
        stream.note(header);
        match header.op {
            operation::RESPONSE => talk.is_open = true,
            operation::RST if talk.is_closed => self.end(talk),
            operation::RST if !talk.is_open => return Err("the host refuses by reset".into()),
            operation::RST => {
                let got = talk.due.number;
                return Err(format!("the host has reset it, after {got} messages"));
            }
            operation::RW => {
                let before = talk.due.number;
                talk.due.check(data)?;
                self.tally.received += talk.due.number - before;
                self.tally.received_bytes += data.len() as u64;
                stream.forwarded = stream.forwarded.wrapping_add(data.len() as u32);
                if stream.forwarded.wrapping_sub(stream.told) >= TOLD_AFTER_BYTES / 2 {
                    stream.told = stream.forwarded;
                    let update = stream.header(operation::CREDIT_UPDATE);
                    self.send(&update, &[])?;
                }
            }
            operation::CREDIT_REQUEST => {
                let update = stream.header(operation::CREDIT_UPDATE);
                self.send(&update, &[])?;
            }
            operation::SHUTDOWN => {
                talk.host_has_sent |= header.flags & SENDS_NO_MORE != 0;
                let is_gone = header.flags & RECEIVES_NO_MORE != 0;
                let got = talk.due.number;
                if talk.host_has_sent && !talk.due.are(self.count) {
                    return Err(format!("{got} messages came, and then an end"));
                }
                if is_gone && !talk.has_sent {
                    return Err(format!("the host takes no more, after {got} messages"));
                }
                if is_gone && talk.host_has_sent {
                    // It waits for nothing but this.
                    self.send(&talk.stream.header(operation::RST), &[])?;
                    self.end(talk);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Sends what is next and the host has room for, and then that it was all.
    fn go_on(&mut self, talk: &mut Talk) -> Result<(), String> {
        if !talk.is_open {
            return Ok(());
        }
        if !talk.has_sent {
            let credit = talk.stream.credit() as usize;
            let waits = credit == 0;
            self.tally.credit_waits += u64::from(waits && !talk.waits_for_credit);
            talk.waits_for_credit = waits;
            if waits {
                return Ok(());
            }
            if let Some(greeting) = talk.greeting.take() {
                // The first that is sent: there is room.
                return self.send_data(talk, &greeting);
            }
            if talk.sending.number < self.count {
                let before = talk.sending.number;
                let data = talk.sending.take(credit);
                self.tally.sent += talk.sending.number - before;
                self.send_data(talk, &data)?;
            }
            if talk.sending.number == self.count {
                if self.aborts {
                    self.send(&talk.stream.header(operation::RST), &[])?;
                    self.end(talk);
                    return Ok(());
                }
                talk.has_sent = true;
                let mut end = talk.stream.header(operation::SHUTDOWN);
                end.flags = SENDS_NO_MORE;
                self.send(&end, &[])?;
            }
        }
        if talk.has_sent && talk.host_has_sent && !talk.is_closed {
            talk.is_closed = true;
            let mut end = talk.stream.header(operation::SHUTDOWN);
            end.flags = BOTH;
            self.send(&end, &[])?;
        }
        Ok(())
    }

    fn end(&mut self, talk: &mut Talk) {
        talk.is_over = true;
        self.tally.connections += 1;
    }

    fn send_data(&mut self, talk: &mut Talk, data: &[u8]) -> Result<(), String> {
        let stream = &mut talk.stream;
        stream.sent = stream.sent.wrapping_add(data.len() as u32);
        stream.told = stream.forwarded;
        let header = stream.header(operation::RW);
        self.send(&header, data)
    }

    fn send(&mut self, header: &Header, data: &[u8]) -> Result<(), String> {
        let sent = self.device.send(header, data);
        sent.map_err(|e| e.to_string())
    }
}

impl Talk {
    fn new(port: u32, number: u32) -> Talk {
        let connection = u64::from(number);
        Talk {
            stream: Stream {
                guest_port: FIRST_PORT.wrapping_add(number),
                host_port: port,
                buffer: BUFFER_BYTES,
                ..Stream::default()
            },
            is_open: false,
            greeting: Some(connection.to_le_bytes()),
            sending: Messages::new(2 * connection),
            due: Messages::new(2 * connection + 1),
            has_sent: false,
            is_closed: false,
            host_has_sent: false,
            waits_for_credit: false,
            is_over: false,
        }
    }
}

#[cfg(test)]
#[path = "messages_test.rs"]
mod tests;
