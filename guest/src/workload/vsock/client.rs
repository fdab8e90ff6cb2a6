//! `vsock connect`: connections of the guest to a program of the host, one after the other. Each
//! sends bytes, says that these were all, and is to get the same back.
use alloc::{format, string::String, vec};

use super::{BUFFER_BYTES, PATIENCE_NS, RECEIVES_NO_MORE, SENDS_NO_MORE, Stream, TOLD_AFTER_BYTES};
use crate::{
    pattern::Pattern,
    pci::Registers,
    platform::Platform,
    virtio::vsock::{Header, PACKET_BYTES, Vsock, operation},
};

/// Guest's port of the first connection.
const FIRST_PORT: u32 = 49_152;
const BOTH: u32 = RECEIVES_NO_MORE | SENDS_NO_MORE;

/// The client of a port of the host.
pub(super) struct Client<'a, R: Registers + Clone> {
    pub(super) device: &'a mut Vsock<R>,
    pub(super) port: u32,
    /// Bytes that each connection sends.
    pub(super) bytes: u64,
    /// Connections that are done.
    pub(super) ended: u32,
    /// Bytes that came back.
    pub(super) returned: u64,
}

/// A connection of the client.
struct Exchange {
    stream: Stream,
    is_open: bool,
    /// Bytes that are still to be sent, and those that are to come back.
    sending: Pattern,
    due: Pattern,
    /// The host was told that no more is sent; and that no more is received.
    has_sent: bool,
    is_closed: bool,
    is_over: bool,
}

impl<R: Registers + Clone> Client<'_, R> {
    pub(super) fn run(&mut self, platform: &impl Platform, count: u32) -> Result<(), String> {
        for number in 0..count {
            self.exchange(platform, number)?;
            self.ended += 1;
        }
        Ok(())
    }

    fn exchange(&mut self, platform: &impl Platform, number: u32) -> Result<(), String> {
        let mut exchange = Exchange {
            stream: Stream {
                guest_port: FIRST_PORT.wrapping_add(number),
                host_port: self.port,
                buffer: BUFFER_BYTES,
                left: self.bytes,
                ..Stream::default()
            },
            is_open: false,
            sending: Pattern::new(number.into()),
            due: Pattern::new(number.into()),
            has_sent: false,
            is_closed: false,
            is_over: false,
        };
        self.send(&exchange.stream.header(operation::REQUEST), &[])?;
        let mut until = platform.now_ns() + PATIENCE_NS;
        while !exchange.is_over {
            if let Some((header, data)) = self.device.receive() {
                until = platform.now_ns() + PATIENCE_NS;
                self.take(&mut exchange, &header, &data)?;
            }
            self.go_on(&mut exchange)?;
            if platform.now_ns() > until {
                return Err(format!("no packet for {} s", PATIENCE_NS / 1_000_000_000));
            }
            core::hint::spin_loop();
        }
        Ok(())
    }

    fn take(
        &mut self,
        exchange: &mut Exchange,
        header: &Header,
        data: &[u8],
    ) -> Result<(), String> {
        let Exchange { stream, .. } = exchange;
        if (header.guest_port, header.host_port) != (stream.guest_port, stream.host_port) {
            if header.op == operation::RST {
                return Ok(());
            }
            let other = Stream {
                guest_port: header.guest_port,
                host_port: header.host_port,
                ..Stream::default()
            };
            return self.send(&other.header(operation::RST), &[]);
        }
        stream.note(header);
        match header.op {
            operation::RESPONSE if !exchange.is_open => exchange.is_open = true,
            operation::RST if !exchange.is_open => return Err("the host refuses by reset".into()),
            operation::RST if exchange.is_closed => exchange.is_over = true,
            operation::RST => {
                let got = exchange.due.position();
                return Err(format!("the host has reset it, after {got} bytes"));
            }
            operation::RW => {
                let right = exchange.due.check(data);
                right.map_err(|at| format!("byte {at} is another than was sent"))?;
                stream.forwarded = stream.forwarded.wrapping_add(data.len() as u32);
                self.returned += data.len() as u64;
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
            operation::SHUTDOWN if header.flags & SENDS_NO_MORE != 0 => {
                let got = exchange.due.position();
                if got != self.bytes {
                    return Err(format!("{got} bytes came back, and then an end"));
                }
                exchange.is_closed = true;
                // One that is gone waits for nothing but this.
                exchange.is_over = header.flags & BOTH == BOTH;
                let op = match exchange.is_over {
                    true => operation::RST,
                    false => operation::SHUTDOWN,
                };
                let mut end = exchange.stream.header(op);
                end.flags = BOTH;
                self.send(&end, &[])?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Sends what the host has room for, and then that it was all.
    fn go_on(&mut self, exchange: &mut Exchange) -> Result<(), String> {
        if !exchange.is_open || exchange.has_sent || exchange.is_closed {
            return Ok(());
        }
        let stream = &mut exchange.stream;
        let room = PACKET_BYTES.min(stream.credit() as usize) as u64;
        let mut data = vec![0; room.min(stream.left) as usize];
        if !data.is_empty() {
            exchange.sending.fill(&mut data);
            stream.left -= data.len() as u64;
            stream.sent = stream.sent.wrapping_add(data.len() as u32);
            stream.told = stream.forwarded;
            let header = stream.header(operation::RW);
            self.send(&header, &data)?;
        }
        if exchange.stream.left == 0 {
            exchange.has_sent = true;
            let mut end = exchange.stream.header(operation::SHUTDOWN);
            end.flags = SENDS_NO_MORE;
            self.send(&end, &[])?;
        }
        Ok(())
    }

    fn send(&mut self, header: &Header, data: &[u8]) -> Result<(), String> {
        let sent = self.device.send(header, data);
        sent.map_err(|e| format!("{e}"))
    }
}
