//! `vsock`: streams between the guest and programs of the host.
use alloc::{
    collections::VecDeque,
    format,
    string::{String, ToString as _},
    vec::Vec,
};

use crate::{
    command::VsockWork,
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
/// Size of a stream's buffer, bytes.
const BUFFER_BYTES: u32 = 64 << 10;
/// Flags of a SHUTDOWN packet.
const RECEIVES_NO_MORE: u32 = 1;
const SENDS_NO_MORE: u32 = 2;

/// Does one `vsock` workload, and returns its line of output, and whether it passed.
pub fn work<R: Registers + Clone>(
    device: Option<&mut Vsock<R>>,
    platform: &impl Platform,
    work: VsockWork,
) -> (Object, bool) {
    let VsockWork::Echo { port, count } = work;
    let line = Object::about("workload", "vsock")
        .text("action", "echo")
        .number("port", port.into());
    let Some(device) = device else {
        return (line.text("error", "there is no vsock device"), false);
    };
    let line = line.number("cid", device.cid());
    let mut echo = Echo {
        device,
        port,
        streams: Vec::new(),
        ended: 0,
        bytes: 0,
    };
    let done = echo.run(platform, count);
    let line = line
        .number("connections", echo.ended.into())
        .number("bytes", echo.bytes);
    match done {
        Ok(()) => (line, true),
        Err(why) => (line.text("error", &why), false),
    }
}

/// A server that returns what it receives.
struct Echo<'a, R> {
    device: &'a mut Vsock<R>,
    port: u32,
    streams: Vec<Stream>,
    ended: u32,
    bytes: u64,
}

/// A connection of the echo server.
#[derive(Default)]
struct Stream {
    guest_port: u32,
    host_port: u32,
    /// The host's buffer, and how much left it.
    room: u32,
    accepted: u32,
    sent: u32,
    /// Bytes that left the own buffer.
    forwarded: u32,
    /// Bytes to be sent back.
    held: VecDeque<u8>,
    /// The host sends no more.
    host_is_done: bool,
    /// The guest has said that it is done.
    is_closed: bool,
}

impl<R: Registers + Clone> Echo<'_, R> {
    fn run(&mut self, platform: &impl Platform, count: u32) -> Result<(), String> {
        let mut until = platform.now_ns() + PATIENCE_NS;
        while self.ended < count {
            if let Some((header, data)) = self.device.receive() {
                until = platform.now_ns() + PATIENCE_NS;
                self.take(&header, &data).map_err(|e| e.to_string())?;
            }
            self.send_back().map_err(|e| e.to_string())?;
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
                ..Stream::default()
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
            operation::RW => stream.held.extend(data),
            operation::SHUTDOWN => stream.host_is_done |= header.flags & SENDS_NO_MORE != 0,
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

    /// Sends back what is held, as far as the host has room, and says when that was all.
    fn send_back(&mut self) -> Result<(), DeviceError> {
        for stream in &mut self.streams {
            let bytes = stream.held.len().min(PACKET_BYTES);
            let bytes = bytes.min(stream.credit() as usize);
            if bytes > 0 {
                let data: Vec<u8> = stream.held.drain(..bytes).collect();
                stream.forwarded = stream.forwarded.wrapping_add(bytes as u32);
                stream.sent = stream.sent.wrapping_add(bytes as u32);
                self.bytes += bytes as u64;
                self.device.send(&stream.header(operation::RW), &data)?;
            }
            if stream.host_is_done && stream.held.is_empty() && !stream.is_closed {
                stream.is_closed = true;
                let mut header = stream.header(operation::SHUTDOWN);
                header.flags = RECEIVES_NO_MORE | SENDS_NO_MORE;
                self.device.send(&header, &[])?;
            }
        }
        Ok(())
    }
}

impl Stream {
    fn header(&self, op: u16) -> Header {
        Header {
            guest_port: self.guest_port,
            host_port: self.host_port,
            op,
            flags: 0,
            buf_alloc: BUFFER_BYTES,
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
