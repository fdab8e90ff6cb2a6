//! TCP connections made segment by segment, past the guest's own stack.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicU16, Ordering},
};

use slipgate_testbed::{
    frame::{self, FrameBuilder, tcp_flags},
    pump::FrameTap,
};

use super::{Service, Stage};
use crate::{GATEWAY_MAC, GUEST_MAC, WAIT};

type Packet<'a> = frame::Packet<'a, SocketAddr>;

/// The guest's ports for connections by hand, below those of its own stack.
const PORTS: std::ops::Range<u16> = 20_000..21_000;

/// Whether a packet to the guest is for a connection by hand.
pub(super) fn is_one(packet: &Packet<'_>) -> bool {
    packet.protocol == 6 && PORTS.contains(&packet.destination.port())
}

/// A connection without a stack: the test itself sends, acknowledges and retransmits.
pub(super) struct ByHand<'s> {
    stage: &'s Stage,
    seen: FrameTap,
    pub(super) local: SocketAddr,
    server: SocketAddr,
    begin: u32,
    server_begin: u32,
    server_next: u32,
}

impl<'s> ByHand<'s> {
    /// Opens one from a port of its own.
    pub(super) fn connect(stage: &'s Stage, server: Service) -> ByHand<'s> {
        static PORT: AtomicU16 = AtomicU16::new(PORTS.start);
        let port = PORT.fetch_add(1, Ordering::Relaxed);
        Self::connect_from(stage, port, 0x7fff_ff00, server).expect("a SYN-ACK")
    }

    /// Opens one from this port and with this initial sequence number. `None`: it was refused.
    pub(super) fn connect_from(
        stage: &'s Stage,
        port: u16,
        isn: u32,
        server: Service,
    ) -> Option<ByHand<'s>> {
        let mut connection = ByHand {
            stage,
            seen: stage.stand.guest.frames().unwrap(),
            local: SocketAddr::new(stage.stand.cell.guest(), port),
            server: stage.address(server),
            begin: isn.wrapping_add(1),
            server_begin: 0,
            server_next: 0,
        };
        connection.send(&connection.syn(isn));
        let (flags, sequence) = connection.awaits("an answer to the SYN", |flags, packet| {
            let answers = flags & (tcp_flags::SYN | tcp_flags::RST) != 0;
            let (sequence, acknowledged) = packet.tcp_numbers()?;
            (answers && acknowledged == isn.wrapping_add(1)).then_some((flags, sequence))
        });
        if flags & tcp_flags::RST != 0 {
            return None;
        }
        connection.server_begin = sequence.wrapping_add(1);
        connection.server_next = connection.server_begin;
        connection.send(&connection.segment(0, b""));
        Some(connection)
    }

    fn bare(&self) -> FrameBuilder {
        FrameBuilder::tcp(self.local, self.server).macs(GUEST_MAC, GATEWAY_MAC)
    }

    /// A SYN from its port.
    pub(super) fn syn(&self, isn: u32) -> FrameBuilder {
        self.bare().flags(tcp_flags::SYN).numbers(isn, 0)
    }

    /// Returns the first segment after such a SYN, whichever side answered it.
    pub(super) fn first_after(&self, isn: u32, bytes: &[u8]) -> FrameBuilder {
        let numbers = (isn.wrapping_add(1), self.server_next);
        self.segment(0, bytes).numbers(numbers.0, numbers.1)
    }

    /// The ACK of the handshake again, with bytes behind it: all that a server with SYN cookies
    /// needs to make a connection (RFC 4987 section 3.6).
    pub(super) fn handshake_again(&self, bytes: &[u8]) -> FrameBuilder {
        self.segment(0, bytes)
            .numbers(self.begin, self.server_begin)
    }

    /// Ends a stream of that many bytes, and awaits that the server ends its own and knows.
    pub(super) fn close(&mut self, place: usize) {
        let fin = self.segment(place, b"");
        self.send(&fin.flags(tcp_flags::FIN | tcp_flags::ACK));
        self.awaits("the server's end", |flags, _| {
            (flags & tcp_flags::FIN != 0).then_some(())
        });
        self.server_next = self.server_next.wrapping_add(1);
        self.send(&self.segment(place + 1, b""));
    }

    /// A segment of the bytes at this place of the stream.
    pub(super) fn segment(&self, place: usize, bytes: &[u8]) -> FrameBuilder {
        let sequence = self.begin.wrapping_add(place as u32);
        self.bare()
            .flags(tcp_flags::ACK | tcp_flags::PSH)
            .numbers(sequence, self.server_next)
            .payload(bytes)
    }

    pub(super) fn send(&self, frame: &FrameBuilder) {
        let (vnet, frame) = frame.build();
        self.stage.stand.guest.inject(vnet, &frame).unwrap();
    }

    /// Sends the bytes at this place.
    pub(super) fn say(&self, place: usize, bytes: &[u8]) {
        self.send(&self.segment(place, bytes));
    }

    /// Awaits the echo of all bytes before this place, and acknowledges it.
    pub(super) fn await_echo(&mut self, place: usize) {
        let mut next = self.server_next;
        let wanted = self.server_begin.wrapping_add(place as u32);
        if next != wanted {
            self.awaits("the echo", |_, packet| {
                let (sequence, _) = packet.tcp_numbers()?;
                if sequence == next {
                    next = next.wrapping_add(packet.payload().len() as u32);
                }
                (next == wanted).then_some(())
            });
        }
        self.server_next = next;
        self.send(&self.segment(place, b""));
    }

    fn awaits<T>(&self, what: &str, mut wanted: impl FnMut(u8, &Packet<'_>) -> Option<T>) -> T {
        let mut found = None;
        self.seen.wait_for(WAIT, |frame| {
            let packet = frame.packet_of_either();
            let ours = packet
                .filter(|packet| packet.source == self.server && packet.destination == self.local);
            found = ours.and_then(|packet| wanted(packet.tcp_flags()?, &packet));
            found.is_some()
        });
        let arrivals = || self.stage.arrivals();
        found.unwrap_or_else(|| panic!("not within 5 s: {what}; arrived:\n{}", arrivals()))
    }
}
