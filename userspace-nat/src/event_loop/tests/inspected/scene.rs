//! A guest, a server that notes each byte that reaches it, and an inspected connection of theirs.
use slipgate_abi::{Handover, Refusal, Verdict, VmId, tcp::Flags};

use super::super::rig::*;
use crate::{
    clock::SECOND_NS,
    dns::{
        NamePolicy,
        chain::tests::{a, answer},
    },
    fake::hellos::{self, records},
    inspection::{Refused, RefusedCounts, tcp},
    name_gate::ByRules,
    packet::{Ipv4, Packet, Transport},
};
use slipgate_policy::{Action, Name, Rule, wire};

pub(super) const NAME: &str = "api.ok.test";
pub(super) const GUEST_PORT: u16 = 40_000;
pub(super) const ISN: u32 = u32::MAX - 20;
pub(super) const FIRST: u32 = ISN.wrapping_add(1);
pub(super) const SERVER_ISN: u32 = 9_000;

pub(super) fn setup() -> Setup {
    let rule = |action, text| Rule::parse(action, text).unwrap();
    Setup {
        default: Action::Deny,
        rules: vec![
            rule(Action::Inspect, "*.ok.test"),
            rule(Action::Allow, "open.test"),
        ],
        ..Setup::default()
    }
}

pub(super) fn tell(rig: &Rig, name: &'static str) {
    tell_vm(rig, VmId::new(101), name);
}

pub(super) fn tell_vm(rig: &Rig, vm: VmId, name: &'static str) {
    let mut dns = ByRules(rig.engine.core.rules.judge.clone());
    let now_ns = rig.kernel.borrow().now_ns;
    let wire = wire(name).unwrap();
    let told = answer(name, &[a(name, 60, PEER.octets)]);
    let verdict = dns.answer(vm, Name(&wire), &told, 0, now_ns);
    assert_eq!(verdict, Ok(()));
}

/// A connection and both who are at its ends.
pub(super) struct Scene {
    pub(super) rig: Rig,
    pub(super) nat: At,
    pub(super) server: At,
    /// Bytes that the server has received, by position; further copies of a byte must be the same.
    pub(super) bytes: Vec<Option<u8>>,
    /// Whether the server takes anything in.
    pub(super) server_is_deaf: bool,
    pub(super) server_window: u16,
    pub(super) server_next: u32,
    pub(super) server_fin: bool,
    pub(super) server_reset: bool,
    pub(super) guest_ack: u32,
    pub(super) guest_window: u16,
    pub(super) guest_reset: Option<u32>,
    /// Data of the server's that reached the guest.
    pub(super) heard: Vec<u8>,
}

impl Scene {
    pub(super) fn new() -> Self {
        Self::at(Rig::with(setup()), SERVER)
    }

    pub(super) fn at(rig: Rig, server: At) -> Self {
        Self::with_options(rig, server, [&[2, 4, 0x23, 0], &[2, 4, 5, 0xb4]])
    }

    /// A scene with these TCP options in the SYN, and in the SYN-ACK.
    pub(super) fn with_options(rig: Rig, server: At, options: [&[u8]; 2]) -> Self {
        Self::opened(rig, server, options, 0x7210)
    }

    /// The server's first window is this.
    pub(super) fn at_with_window(rig: Rig, server: At, window: u16) -> Self {
        Self::opened(rig, server, [&[2, 4, 0x23, 0], &[2, 4, 5, 0xb4]], window)
    }

    fn opened(rig: Rig, server: At, options: [&[u8]; 2], window: u16) -> Self {
        tell(&rig, NAME);
        let mut scene = Self {
            rig,
            nat: (NAT, 0),
            server,
            bytes: Vec::new(),
            server_is_deaf: false,
            server_window: 0x7210,
            server_next: SERVER_ISN + 1,
            server_fin: false,
            server_reset: false,
            guest_ack: FIRST,
            guest_window: 0,
            guest_reset: None,
            heard: Vec::new(),
        };
        let sent = {
            let from = (GUEST, GUEST_PORT);
            let syn = tcp(from, server, Flags::SYN, ISN, 0, options[0], b"");
            scene.rig.guest(1, &syn)
        };
        assert_eq!(sent, Handling::Engine(Handover::Miss));
        let sent = scene.rig.at_world().pop().expect("the SYN goes out");
        scene.nat.1 = u16::from_be_bytes([sent[20], sent[21]]);
        let flags = Flags::SYN | Flags::ACK;
        let to = scene.nat;
        let syn_ack = tcp(server, to, flags, SERVER_ISN, FIRST, options[1], b"");
        scene.rig.world(&with_window(syn_ack, window));
        let came = scene.rig.at_guest().pop().expect("the SYN-ACK comes").1;
        scene.take_at_guest(&came);
        scene.guest(0, b"", 0);
        assert_eq!(
            scene.rig.at_world().len(),
            1,
            "the handshake is the server's"
        );
        scene
    }

    /// The guest sends payload from this place of its stream on.
    pub(super) fn guest(&mut self, at: usize, payload: &[u8], flags: u8) -> Handling {
        let packet = self.segment(at, payload, flags);
        self.rig.guest(1, &packet)
    }

    pub(super) fn segment(&self, at: usize, payload: &[u8], flags: u8) -> Vec<u8> {
        let (from, sequence) = ((GUEST, GUEST_PORT), FIRST.wrapping_add(at as u32));
        let flags = flags | Flags::ACK;
        tcp(
            from,
            self.server,
            flags,
            sequence,
            self.server_next,
            &[],
            payload,
        )
    }

    /// The server says something.
    pub(super) fn server(&mut self, payload: &[u8], flags: u8) {
        let ack = self.server_ack();
        let flags = flags | Flags::ACK;
        let packet = tcp(
            self.server,
            self.nat,
            flags,
            self.server_next,
            ack,
            &[],
            payload,
        );
        let len = payload.len() as u32 + u32::from(flags & Flags::FIN != 0);
        self.server_next += len;
        self.rig.world(&packet);
    }

    pub(super) fn received(&self) -> Vec<u8> {
        self.bytes.iter().map_while(|byte| *byte).collect()
    }

    pub(super) fn server_ack(&self) -> u32 {
        let received = self.received().len() as u32 + u32::from(self.server_fin);
        FIRST.wrapping_add(received)
    }

    /// Until nobody has anything to say: the server acknowledges what it gets.
    pub(super) fn settle(&mut self) {
        loop {
            let at_world = self.rig.at_world();
            for packet in &at_world {
                self.take_at_server(packet);
            }
            for (vm, packet) in self.rig.at_guest() {
                assert_eq!(vm, 101);
                self.take_at_guest(&packet);
            }
            if at_world.is_empty() {
                return;
            }
        }
    }

    pub(super) fn take_at_server(&mut self, packet: &[u8]) {
        assert!(is_right(packet));
        let packet = Packet::parse(Ipv4::parse(packet).unwrap()).unwrap();
        let Transport::Tcp(tcp) = packet.transport else {
            panic!("{packet:?}")
        };
        let (nat, port) = self.nat;
        assert_eq!((packet.ip.source, tcp.source), (nat.into(), port));
        if self.server_is_deaf {
            return;
        }
        self.server_reset |= tcp.has(Flags::RST);
        let payload = &packet.ip.payload()[tcp.header_len..];
        let at = tcp.sequence.wrapping_sub(FIRST) as usize;
        if !payload.is_empty() && self.bytes.len() < at + payload.len() {
            self.bytes.resize(at + payload.len(), None);
        }
        for (place, byte) in self.bytes.iter_mut().skip(at).zip(payload) {
            assert_eq!(*place.get_or_insert(*byte), *byte, "another copy");
        }
        self.server_fin |= tcp.has(Flags::FIN) && at + payload.len() == self.received().len();
        if !payload.is_empty() || tcp.has(Flags::FIN) {
            let (from, to) = (self.server, self.nat);
            let reply = tcp_with_window(
                from,
                to,
                self.server_next,
                self.server_ack(),
                self.server_window,
            );
            self.rig.world(&reply);
        }
    }

    pub(super) fn take_at_guest(&mut self, packet: &[u8]) {
        assert!(is_right(packet), "{packet:02x?}");
        let packet = Packet::parse(Ipv4::parse(packet).unwrap()).unwrap();
        let Transport::Tcp(tcp) = packet.transport else {
            return;
        };
        if tcp.has(Flags::RST) {
            self.guest_reset = Some(tcp.sequence);
            return;
        }
        let l4 = packet.ip.payload();
        self.heard.extend_from_slice(&l4[tcp.header_len..]);
        let window = u16::from_be_bytes([l4[14], l4[15]]);
        let edge = |ack: u32, window: u16| ack.wrapping_add(window.into());
        let moved =
            edge(tcp.acknowledgement, window).wrapping_sub(edge(self.guest_ack, self.guest_window));
        assert!(moved as i32 >= 0, "the window's end went back");
        assert!(tcp.acknowledgement.wrapping_sub(self.guest_ack) as i32 >= 0);
        (self.guest_ack, self.guest_window) = (tcp.acknowledgement, window);
    }

    /// How much of the guest's stream it believes to be there.
    pub(super) fn acknowledged(&self) -> usize {
        self.guest_ack.wrapping_sub(FIRST) as usize
    }

    pub(super) fn verdict(&self) -> Option<Verdict> {
        use std::sync::atomic::Ordering::Relaxed;
        let kernel = self.rig.kernel.borrow();
        let slot = *kernel.slots_in_use().first()?;
        Verdict::from_u32(kernel.slot(slot).verdict().load(Relaxed))
    }

    pub(super) fn assert_refused(&mut self, why: Refused) {
        self.settle();
        let mut counts = RefusedCounts::default();
        counts.add(why);
        assert_eq!(
            self.rig.engine.core.inspected.counts(VmId::new(101)),
            counts
        );
        let expected = SERVER_ISN + 1 + self.heard.len() as u32;
        assert_eq!(self.guest_reset, Some(expected), "{why:?}");
        assert!(self.server_reset);
        assert_eq!(self.rig.refused(1, Refusal::Inspection), 1);
        self.guest(0, b"GET", 0);
        self.server(b"x", 0);
        let heard = self.heard.len();
        self.settle();
        assert_eq!(self.heard.len(), heard, "it is over");
        self.rig.pass(SECOND_NS);
        self.rig.assert_empty();
        assert_eq!(self.rig.records()[0]["end"], "inspection");
        assert_eq!(self.rig.engine.core.inspected.sessions(), (0, 0, 0));
    }
}

pub(super) fn tcp_with_window(from: At, to: At, seq: u32, ack: u32, window: u16) -> Vec<u8> {
    let segment = tcp::Segment {
        sequence: seq,
        acknowledgement: ack,
        flags: Flags::ACK,
        window,
        time: None,
        payload: &[],
    };
    let mut out = Vec::new();
    let at = |(addr, port): At| (addr.into(), port);
    segment.build(&mut out, at(from), at(to));
    out
}

/// The same segment with another window.
pub(super) fn with_window(mut packet: Vec<u8>, window: u16) -> Vec<u8> {
    let ip = Ipv4::parse(&packet).unwrap();
    let (from, to) = (ip.source, ip.destination);
    packet[34..36].copy_from_slice(&window.to_be_bytes());
    packet[36..38].fill(0);
    let l4 = &packet[20..];
    let sum = crate::packet::checksum::Sum::default()
        .pseudo(from, to, 6, l4.len())
        .bytes(l4)
        .finish();
    packet[36..38].copy_from_slice(&sum.to_be_bytes());
    packet
}

pub(super) fn hello(name: &str) -> Vec<u8> {
    records(&hellos::client_hello(name), 1_000)
}

pub(super) fn hellos_name(stream: &[u8]) -> Option<String> {
    let hello = crate::inspection::tls::client_hello(stream).ok()??;
    Some(hello.name.name().without_dot())
}
