//! `vsock`: streams between programs of the host and a port of the guest, and those that the guest
//! opens.
mod client;
mod messages;

use alloc::{
    collections::VecDeque,
    format,
    string::{String, ToString as _},
    vec,
    vec::Vec,
};

use self::client::Client;
use crate::{
    command::{VsockService, VsockWork},
    json::Object,
    pci::Registers,
    platform::Platform,
    virtio::{
        DeviceError,
        vsock::{Header, PACKET_BYTES, Vsock, operation},
    },
};

/// Longest time without a packet of the host.
const PATIENCE_NS: u64 = 60_000_000_000;
/// Size of the buffer of a stream that is echoed, and of one that a sink takes, which is Linux's
/// default; bytes.
const BUFFER_BYTES: u32 = 64 << 10;
const SINK_BYTES: u32 = 256 << 10;
/// Bytes that a sink takes before it says so.
const TOLD_AFTER_BYTES: u32 = 64 << 10;
/// Flags of a SHUTDOWN packet.
const RECEIVES_NO_MORE: u32 = 1;
const SENDS_NO_MORE: u32 = 2;

/// Does one `vsock` workload, and returns its line of output, and whether it passed.
pub fn work<R: Registers + Clone>(
    device: Option<&mut Vsock<R>>,
    platform: &impl Platform,
    work: VsockWork,
) -> (Object, bool) {
    let VsockWork {
        service,
        port,
        count,
    } = work;
    let line = Object::about("workload", "vsock")
        .text("action", service.name())
        .number("port", port.into());
    let Some(device) = device else {
        return (line.text("error", "there is no vsock device"), false);
    };
    let line = line.number("cid", device.cid());
    let started_ns = platform.now_ns();
    if let VsockService::Connect(bytes) = service {
        let mut client = Client {
            device,
            port,
            bytes,
            ended: 0,
            returned: 0,
        };
        let done = client.run(platform, count);
        return concluded(line, client.ended, client.returned, done);
    }
    if let VsockService::Messages(messages) | VsockService::Abort(messages) = service {
        let mut client = messages::Client {
            device,
            port,
            count: messages,
            aborts: matches!(service, VsockService::Abort(_)),
            tally: messages::Tally::default(),
        };
        let done = client.run(platform, count);
        let tally = client.tally;
        let line = line
            .number("messages_sent", tally.sent)
            .number("messages_received", tally.received)
            .number("credit_waits", tally.credit_waits)
            .microseconds("took_us", platform.now_ns() - started_ns);
        return concluded(line, tally.connections, tally.received_bytes, done);
    }
    let mut server = Server {
        device,
        service,
        port,
        streams: Vec::new(),
        ended: 0,
        bytes: 0,
    };
    let done = server.run(platform, count);
    concluded(line, server.ended, server.bytes, done)
}

fn concluded(
    line: Object,
    connections: u32,
    bytes: u64,
    done: Result<(), String>,
) -> (Object, bool) {
    let line = line
        .number("connections", connections.into())
        .number("bytes", bytes);
    match done {
        Ok(()) => (line, true),
        Err(why) => (line.text("error", &why), false),
    }
}

/// The server of a port.
struct Server<'a, R: Registers + Clone> {
    device: &'a mut Vsock<R>,
    service: VsockService,
    port: u32,
    streams: Vec<Stream>,
    ended: u32,
    /// Bytes that were sent, and by a sink those that were taken.
    bytes: u64,
}

/// A connection of the server.
#[derive(Default)]
struct Stream {
    guest_port: u32,
    host_port: u32,
    /// The host's buffer, and how much left it.
    room: u32,
    accepted: u32,
    sent: u32,
    /// Size of the own buffer, bytes that left it, and those of them that the host knows of.
    buffer: u32,
    forwarded: u32,
    told: u32,
    /// Bytes to be sent: those of an echo and a receipt.
    held: VecDeque<u8>,
    /// Bytes that a source has left to send, and a sink to take.
    left: u64,
    /// The host sends no more; it receives no more either.
    host_is_done: bool,
    host_is_gone: bool,
    /// The guest has said that it is done.
    is_closed: bool,
}

impl<R: Registers + Clone> Server<'_, R> {
    fn run(&mut self, platform: &impl Platform, count: u32) -> Result<(), String> {
        let mut until = platform.now_ns() + PATIENCE_NS;
        while self.ended < count {
            if let Some((header, data)) = self.device.receive() {
                until = platform.now_ns() + PATIENCE_NS;
                self.take(&header, &data).map_err(|e| e.to_string())?;
            }
            self.send().map_err(|e| e.to_string())?;
            if platform.now_ns() > until {
                return Err(format!("no packet for {} s", PATIENCE_NS / 1_000_000_000));
            }
            core::hint::spin_loop();
        }
        Ok(())
    }

    fn take(&mut self, header: &Header, data: &[u8]) -> Result<(), DeviceError> {
        let ports = (header.guest_port, header.host_port);
        let of = |stream: &Stream| (stream.guest_port, stream.host_port) == ports;
        let Some(at) = self.streams.iter().position(of) else {
            let mut stream = Stream {
                guest_port: header.guest_port,
                host_port: header.host_port,
                ..Stream::of(self.service)
            };
            return match header.op {
                operation::RST => Ok(()),
                operation::REQUEST if header.guest_port == self.port => {
                    stream.note(header);
                    self.device.send(&stream.header(operation::RESPONSE), &[])?;
                    self.streams.push(stream);
                    Ok(())
                }
                _ => self.device.send(&stream.header(operation::RST), &[]),
            };
        };
        let stream = &mut self.streams[at];
        stream.note(header);
        match header.op {
            operation::RW => match self.service {
                VsockService::Echo => stream.held.extend(data),
                VsockService::Sink(all) => {
                    let bytes = data.len() as u64;
                    self.bytes += bytes;
                    stream.sink(bytes, all);
                    if stream.forwarded.wrapping_sub(stream.told) >= TOLD_AFTER_BYTES {
                        let update = stream.header(operation::CREDIT_UPDATE);
                        stream.told = stream.forwarded;
                        self.device.send(&update, &[])?;
                    }
                }
                // Nobody reads it.
                _ => stream.forwarded = stream.forwarded.wrapping_add(data.len() as u32),
            },
            operation::SHUTDOWN => {
                stream.host_is_done |= header.flags & SENDS_NO_MORE != 0;
                let both = RECEIVES_NO_MORE | SENDS_NO_MORE;
                stream.host_is_gone |= header.flags & both == both;
            }
            operation::CREDIT_REQUEST => {
                let update = stream.header(operation::CREDIT_UPDATE);
                self.device.send(&update, &[])?;
            }
            operation::RST => {
                self.streams.swap_remove(at);
                self.ended += 1;
            }
            _ => {}
        }
        Ok(())
    }

    /// Sends what there is to send, as far as the host has room, and ends the streams for which that
    /// was all.
    fn send(&mut self) -> Result<(), DeviceError> {
        let mut at = 0;
        while let Some(stream) = self.streams.get_mut(at) {
            let data = stream.next(self.service);
            if !data.is_empty() {
                let bytes = data.len();
                stream.sent = stream.sent.wrapping_add(bytes as u32);
                stream.told = stream.forwarded;
                if !matches!(self.service, VsockService::Sink(_)) {
                    self.bytes += bytes as u64;
                }
                self.device.send(&stream.header(operation::RW), &data)?;
            }
            if stream.host_is_gone {
                // Nobody takes what is left. As Linux does: what waits for the end need wait no longer.
                self.device.send(&stream.header(operation::RST), &[])?;
                self.streams.swap_remove(at);
                self.ended += 1;
                continue;
            }
            if stream.host_is_done && !stream.has_more(self.service) && !stream.is_closed {
                stream.is_closed = true;
                let mut header = stream.header(operation::SHUTDOWN);
                header.flags = RECEIVES_NO_MORE | SENDS_NO_MORE;
                self.device.send(&header, &[])?;
            }
            at += 1;
        }
        Ok(())
    }
}

impl Stream {
    fn of(service: VsockService) -> Stream {
        let (buffer, left) = match service {
            VsockService::Echo
            | VsockService::Connect(_)
            | VsockService::Messages(_)
            | VsockService::Abort(_) => (BUFFER_BYTES, 0),
            VsockService::Sink(bytes) => (SINK_BYTES, bytes),
            VsockService::Source(bytes) => (BUFFER_BYTES, bytes),
        };
        Stream {
            buffer,
            left,
            ..Stream::default()
        }
    }

    /// Takes bytes that come to a sink. With the last of all that are due, the receipt is to be sent:
    /// their number, little-endian.
    fn sink(&mut self, bytes: u64, all: u64) {
        self.forwarded = self.forwarded.wrapping_add(bytes as u32);
        if self.left > 0 {
            self.left = self.left.saturating_sub(bytes);
            if self.left == 0 {
                self.held.extend(all.to_le_bytes());
            }
        }
    }

    /// Whether there is more to be sent.
    fn has_more(&self, service: VsockService) -> bool {
        let is_source = matches!(service, VsockService::Source(_));
        !self.held.is_empty() || is_source && self.left > 0
    }

    /// Returns the data of the next packet; none if there are none or the host has no room.
    fn next(&mut self, service: VsockService) -> Vec<u8> {
        let room = PACKET_BYTES.min(self.credit() as usize);
        if let VsockService::Source(_) = service {
            let bytes = (room as u64).min(self.left);
            self.left -= bytes;
            return vec![0; bytes as usize];
        }
        let bytes = self.held.len().min(room);
        if let VsockService::Echo = service {
            self.forwarded = self.forwarded.wrapping_add(bytes as u32);
        }
        self.held.drain(..bytes).collect()
    }

    fn header(&self, op: u16) -> Header {
        Header {
            guest_port: self.guest_port,
            host_port: self.host_port,
            op,
            flags: 0,
            buf_alloc: self.buffer,
            fwd_cnt: self.forwarded,
        }
    }

    /// Notes the host's credit.
    fn note(&mut self, header: &Header) {
        self.room = header.buf_alloc;
        self.accepted = header.fwd_cnt;
    }

    fn credit(&self) -> u32 {
        let under_way = self.sent.wrapping_sub(self.accepted);
        self.room.saturating_sub(under_way)
    }
}
