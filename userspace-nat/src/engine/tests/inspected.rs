//! Inspected connections, with a server that notes each byte that reaches it.
use proptest::prelude::*;
use slipgate_abi::{DropReason, Handover, Protocol, Refusal, Verdict, tcp::Flags};

use super::rig::*;
use crate::{
    clock::SECOND_NS,
    dns::{
        Name, NamePolicy, NameVerdict,
        chain::tests::{a, answer},
    },
    fake::{
        hellos::{self, record, records},
        initials,
    },
    inspect::{Refused, RefusedCounts, quic::Version, tcp},
    packet::{Ipv4, Packet, Transport},
    port::VirtioNetHdr,
    rules::{Action, ByRules, Rule, wire},
};

const NAME: &str = "api.ok.test";
const GUEST_PORT: u16 = 40_000;
const ISN: u32 = u32::MAX - 20;
const FIRST: u32 = ISN.wrapping_add(1);
const SERVER_ISN: u32 = 9_000;

fn setup() -> Setup {
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

fn tell(rig: &Rig, name: &'static str) {
    let mut dns = ByRules(rig.engine.core.judge.clone());
    let now_ns = rig.kernel.borrow().now_ns;
    let wire = wire(name).unwrap();
    let told = answer(name, &[a(name, 60, PEER.octets)]);
    let verdict = dns.answer(101, Name(&wire), &told, 0, now_ns);
    assert_eq!(verdict, NameVerdict::Allow);
}

/// A connection and both who are at its ends.
struct Scene {
    rig: Rig,
    nat: At,
    server: At,
    /// What the server has, by place; more than one copy of a byte must be alike.
    bytes: Vec<Option<u8>>,
    /// Whether the server takes anything in.
    server_is_deaf: bool,
    server_window: u16,
    server_next: u32,
    server_fin: bool,
    server_reset: bool,
    guest_ack: u32,
    guest_window: u16,
    guest_reset: Option<u32>,
    /// Data of the server's that reached the guest.
    heard: Vec<u8>,
}

impl Scene {
    fn new() -> Self {
        Self::at(Rig::with(setup()), SERVER)
    }

    fn at(rig: Rig, server: At) -> Self {
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
        let sent = scene.rig.guest(1, &syn((GUEST, GUEST_PORT), server, ISN));
        assert_eq!(sent, Way::Engine(Handover::Miss));
        let sent = scene.rig.at_world().pop().expect("the SYN goes out");
        scene.nat.1 = u16::from_be_bytes([sent[20], sent[21]]);
        scene
            .rig
            .world(&syn_ack(server, scene.nat, SERVER_ISN, FIRST));
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
    fn guest(&mut self, at: usize, payload: &[u8], flags: u8) -> Way {
        let packet = self.segment(at, payload, flags);
        self.rig.guest(1, &packet)
    }

    fn segment(&self, at: usize, payload: &[u8], flags: u8) -> Vec<u8> {
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
    fn server(&mut self, payload: &[u8], flags: u8) {
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

    fn received(&self) -> Vec<u8> {
        self.bytes.iter().map_while(|byte| *byte).collect()
    }

    fn server_ack(&self) -> u32 {
        let received = self.received().len() as u32 + u32::from(self.server_fin);
        FIRST.wrapping_add(received)
    }

    /// Until nobody has anything to say: the server acknowledges what it gets.
    fn settle(&mut self) {
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

    fn take_at_server(&mut self, packet: &[u8]) {
        assert!(is_right(packet));
        let packet = Packet::parse(Ipv4::parse(packet).unwrap()).unwrap();
        let Transport::Tcp(tcp) = packet.transport else {
            panic!("{packet:?}")
        };
        assert_eq!((packet.ip.source, tcp.source), self.nat);
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

    fn take_at_guest(&mut self, packet: &[u8]) {
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
    fn acknowledged(&self) -> usize {
        self.guest_ack.wrapping_sub(FIRST) as usize
    }

    fn verdict(&self) -> Option<Verdict> {
        use std::sync::atomic::Ordering::Relaxed;
        let kernel = self.rig.kernel.borrow();
        let slot = *kernel.slots_in_use().first()?;
        Verdict::from_u32(kernel.slot(slot).verdict().load(Relaxed))
    }

    fn assert_refused(&mut self, why: Refused) {
        self.settle();
        let mut counts = RefusedCounts::default();
        counts.add(why);
        assert_eq!(self.rig.engine.core.inspected.counts(101), counts);
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

fn tcp_with_window(from: At, to: At, seq: u32, ack: u32, window: u16) -> Vec<u8> {
    let segment = tcp::Segment {
        sequence: seq,
        acknowledgement: ack,
        flags: Flags::ACK,
        window,
        time: None,
        payload: &[],
    };
    let mut out = Vec::new();
    segment.build(&mut out, from, to);
    out
}

fn hello(name: &str) -> Vec<u8> {
    records(&hellos::client_hello(name), 1_000)
}

#[test]
fn an_allowed_name_goes_on_and_then_the_kernel_takes_over() {
    let mut scene = Scene::new();
    assert_eq!(scene.verdict(), Some(Verdict::Engine));
    let hello = hello(NAME);
    assert_eq!(scene.guest(0, &hello, 0), Way::Engine(Handover::Verdict));
    scene.settle();
    assert_eq!(scene.received(), hello);
    assert_eq!(scene.acknowledged(), hello.len());
    assert_eq!(
        scene.verdict(),
        Some(Verdict::Engine),
        "the server may ask again"
    );
    // The handshake's last acknowledgement, and the hello.
    assert_eq!(scene.rig.dropped(1, DropReason::Held), 2);

    scene.server(&hellos::server_hello(false), 0);
    scene.settle();
    assert_eq!(scene.heard, hellos::server_hello(false));
    assert_eq!(scene.verdict(), Some(Verdict::Fast));
    assert_eq!(scene.guest(hello.len(), b"more", 0), Way::Fast);
    // A late copy of other bytes goes by the kernel: the server has had them.
    assert_eq!(scene.rig.engine.core.inspected.sessions(), (0, 0, 0));
    scene.rig.assert_paired();
    scene.rig.pass(10 * 60 * SECOND_NS);
    assert_eq!(scene.rig.flows(), 1);
}

#[test]
fn what_is_not_let_in_is_reset_on_both_sides_and_none_of_it_goes_on() {
    for (why, said) in [
        (Refused::Name, hello("evil.test")),
        (Refused::Name, hello("other.ok.test")),
        (Refused::Name, hello("open.test")),
        (
            Refused::NoName,
            records(&hellos::client_hello_with(&[]), 100),
        ),
        (Refused::Malformed, record(22, &[2, 0, 0, 1, 0])),
        (
            Refused::Unknown,
            b"SSH-2.0-x\r\n".map(|b| b | 0x20).to_vec(),
        ),
        (
            Refused::Name,
            b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n".to_vec(),
        ),
        (
            Refused::NoName,
            b"GET / HTTP/1.1\r\nHost: 198.51.100.7\r\n\r\n".to_vec(),
        ),
    ] {
        let mut scene = Scene::new();
        scene.guest(0, &said, 0);
        assert_eq!(scene.received(), b"");
        scene.assert_refused(why);
        assert_eq!(scene.received(), b"");
    }
}

#[test]
fn a_name_that_shares_the_address_must_have_been_asked_for_too() {
    let mut scene = Scene::new();
    tell(&scene.rig, "open.test");
    let hello = hello("open.test");
    scene.guest(0, &hello, 0);
    scene.settle();
    assert_eq!(scene.received(), hello);
}

#[test]
fn a_byte_at_a_time_does_not_stall() {
    let mut scene = Scene::new();
    let hello = records(&hellos::client_hello(NAME), 3);
    for (at, byte) in hello.iter().enumerate() {
        scene.guest(at, &[*byte], 0);
        scene.settle();
        assert_eq!(scene.acknowledged(), at + 1);
    }
    assert_eq!(scene.received(), hello);
}

#[test]
fn the_first_copy_is_the_one_that_is_inspected_and_sent() {
    let (good, bad) = (hello(NAME), hello("api.no.test"));
    assert_eq!(good.len(), bad.len());
    let mut scene = Scene::new();
    scene.guest(50, &good[50..], 0);
    scene.guest(0, &bad[..60], 0);
    scene.guest(50, &bad[50..], 0);
    scene.settle();
    let mixed = [&bad[..50], &good[50..]].concat();
    match hellos_name(&mixed) {
        Some(name) if name == NAME => assert_eq!(scene.received(), mixed),
        _ => scene.assert_refused(Refused::Name),
    }

    // Bad ones that never arrive do not come first.
    let mut scene = Scene::new();
    let mut corrupt = scene.segment(0, &bad, 0);
    *corrupt.last_mut().unwrap() ^= 1;
    scene.rig.guest(1, &corrupt);
    let dying = with_ttl(scene.segment(0, &bad, 0), 1);
    scene.rig.guest(1, &dying);
    let mut partial = scene.segment(0, &bad, 0);
    partial[36..38].fill(0);
    let vnet = VirtioNetHdr {
        flags: VirtioNetHdr::NEEDS_CSUM,
        csum_start: 34,
        csum_offset: 16,
        ..VirtioNetHdr::default()
    };
    scene.rig.kernel.borrow_mut().guest_sends(1, vnet, &partial);
    scene.rig.turn();
    assert_eq!(scene.rig.dropped(1, DropReason::Malformed), 2);
    scene.guest(0, &good, 0);
    scene.settle();
    assert_eq!(scene.received(), good);
}

fn hellos_name(stream: &[u8]) -> Option<String> {
    let hello = crate::inspect::tls::client_hello(stream).ok()??;
    Some(hello.name.name().without_dot())
}

#[test]
fn a_second_hello_is_held_to_the_rules_too() {
    let mut scene = Scene::new();
    let first = hello(NAME);
    let second = hello("evil.test");
    // At once, before the server has answered.
    scene.guest(0, &[&first[..], &second].concat(), 0);
    scene.settle();
    assert_eq!(scene.received(), first);
    scene.server(&hellos::server_hello(true), 0);
    scene.assert_refused(Refused::Name);
    assert_eq!(scene.received(), first);

    let mut scene = Scene::new();
    scene.guest(0, &first, 0);
    scene.settle();
    scene.server(&hellos::server_hello(true), 0);
    let ccs = record(20, &[1]);
    scene.guest(first.len(), &[&ccs[..], &first].concat(), 0);
    scene.settle();
    assert_eq!(scene.received(), [&first[..], &ccs, &first].concat());
    scene.server(&hellos::server_hello(false), 0);
    scene.settle();
    assert_eq!(scene.verdict(), Some(Verdict::Fast));
}

#[test]
fn what_the_server_does_not_get_is_sent_again() {
    let mut scene = Scene::new();
    scene.server_is_deaf = true;
    let hello = hello(NAME);
    scene.guest(0, &hello, 0);
    scene.settle();
    scene.rig.pass(SECOND_NS / 2);
    assert!(!scene.rig.at_world().is_empty());
    scene.server_is_deaf = false;
    scene.rig.pass(SECOND_NS);
    scene.settle();
    assert_eq!(scene.received(), hello);
    let sent = |scene: &mut Scene| scene.rig.at_world().len();
    scene.rig.pass(60 * SECOND_NS);
    assert_eq!(sent(&mut scene), 0, "it has it");

    let mut scene = Scene::new();
    scene.server_is_deaf = true;
    scene.guest(0, &hello, 0);
    scene.rig.pass(120 * SECOND_NS);
    assert_eq!(scene.rig.engine.core.inspected.counts(101).untaken, 1);
}

#[test]
fn patience_ends() {
    let mut scene = Scene::new();
    scene.rig.pass(tcp::SILENT_NS - SECOND_NS);
    scene.settle();
    assert_eq!(scene.guest_reset, None);
    scene.rig.pass(SECOND_NS);
    scene.assert_refused(Refused::Silent);

    let mut scene = Scene::new();
    let hello = hello(NAME);
    for at in 0..20 {
        scene.guest(at, &hello[at..=at], 0);
        scene.rig.pass(SECOND_NS / 2 - 1);
    }
    scene.settle();
    assert_eq!(scene.guest_reset, None);
    scene.rig.pass(SECOND_NS);
    scene.assert_refused(Refused::Slow);
}

#[test]
fn a_server_that_speaks_first_is_heard() {
    let mut scene = Scene::new();
    scene.server(b"220 mail.ok.test\r\n", 0);
    scene.settle();
    assert_eq!(scene.heard, b"220 mail.ok.test\r\n");
    scene.guest(0, b"", 0);
    scene.settle();
    scene.guest(0, b"ehlo x\r\n", 0);
    scene.assert_refused(Refused::Unknown);
}

#[test]
fn each_request_of_a_connection_is_held_to_the_rules() {
    let mut scene = Scene::at(Rig::with(setup()), (PEER, 80));
    let request = |host: &str| format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n").into_bytes();
    let good = request(NAME);
    let mut at = 0;
    for _ in 0..3 {
        scene.guest(at, &good, 0);
        at += good.len();
        scene.settle();
        scene.server(b"HTTP/1.1 204 x\r\n\r\n", 0);
        scene.settle();
        assert_eq!(scene.verdict(), Some(Verdict::Engine));
        assert_eq!((scene.received().len(), scene.acknowledged()), (at, at));
        // Long after DNS told, too.
        scene.rig.pass(60 * SECOND_NS);
    }
    scene.guest(at, &[request(NAME), request("evil.test")].concat(), 0);
    scene.assert_refused(Refused::Name);
    assert_eq!(scene.received().len(), at);
}

#[test]
fn a_long_body_is_sent_on_as_the_server_takes_it() {
    let mut scene = Scene::at(Rig::with(setup()), (PEER, 80));
    let body: Vec<u8> = (0..200_000u32).map(|n| (n % 251) as u8).collect();
    let head = format!(
        "POST / HTTP/1.1\r\nHost: {NAME}\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    let stream = [head.as_bytes(), &body].concat();
    let mut at = 0;
    let mut rounds = 0;
    while at < stream.len() {
        let window = usize::from(scene.guest_window).min(stream.len() - at);
        for (n, piece) in stream[at..at + window].chunks(1_400).enumerate() {
            // Some are lost on the way.
            if (rounds + n) % 7 != 3 {
                scene.guest(at + n * 1_400, piece, 0);
            }
        }
        scene.settle();
        at = scene.acknowledged();
        rounds += 1;
        assert!(rounds < 2_000, "{at}");
    }
    scene.guest(at, b"", Flags::FIN);
    scene.settle();
    assert!(scene.received() == stream && scene.server_fin);
    assert_eq!(scene.acknowledged(), stream.len() + 1);
    assert_eq!(scene.verdict(), Some(Verdict::Fast));
}

#[test]
fn a_shut_window_is_asked_about_until_it_opens() {
    let mut scene = Scene::at(Rig::with(setup()), (PEER, 80));
    let body = vec![7; 5_000];
    let head = format!("POST / HTTP/1.1\r\nHost: {NAME}\r\nContent-Length: 5000\r\n\r\n");
    scene.server_window = 0;
    scene.guest(0, head.as_bytes(), 0);
    scene.settle();
    scene.guest(head.len(), &body, 0);
    scene.settle();
    assert_eq!(scene.received().len(), head.len());
    scene.rig.pass(5 * SECOND_NS);
    assert!(!scene.rig.at_world().is_empty(), "probes");
    scene.server_window = 1_000;
    for _ in 0..40 {
        scene.rig.pass(SECOND_NS);
        scene.settle();
    }
    assert_eq!(scene.received().len(), head.len() + body.len());
}

#[test]
fn no_payload_goes_before_the_handshake() {
    let mut rig = Rig::with(setup());
    tell(&rig, NAME);
    let guest = (GUEST, GUEST_PORT);
    rig.guest(1, &tcp(guest, SERVER, Flags::SYN, ISN, 0, &[], b"GET"));
    rig.guest(1, &syn(guest, SERVER, ISN));
    rig.guest(
        1,
        &tcp(guest, SERVER, Flags::ACK, FIRST, 1, &[], &hello(NAME)),
    );
    let sent = rig.at_world();
    assert_eq!(sent.len(), 1);
    assert_eq!(&sent[0][33..34], &[Flags::SYN]);
}

#[test]
fn resets_end_it() {
    let mut scene = Scene::new();
    scene.guest(0, &hello(NAME)[..20], 0);
    scene.settle();
    scene.guest(20, b"", Flags::RST);
    scene.settle();
    assert!(scene.server_reset);
    assert_eq!(scene.received(), b"");
    scene.rig.pass(400 * SECOND_NS);
    scene.rig.assert_empty();

    // A reset that is not quite right is none; nor is a flow that it seemed to end let go.
    let mut scene = Scene::new();
    let wrong = ack(SERVER, scene.nat, Flags::RST, scene.server_next + 5, FIRST);
    scene.rig.world(&wrong);
    scene.rig.at_guest();
    scene.rig.pass(240 * SECOND_NS - 1);
    let hello = hello("evil.test");
    scene.guest(0, &hello, 0);
    scene.settle();
    assert_eq!(scene.received(), b"");
}

#[test]
fn an_engine_that_is_gone_leaves_nothing_that_was_not_decided() {
    let mut scene = Scene::new();
    scene.guest(0, &hello(NAME)[..20], 0);
    scene.settle();
    let (rig, adoption) = scene.rig.restart(&setup());
    assert_eq!((adoption.live, adoption.refused), (0, 1));
    scene.rig = rig;
    scene.guest(0, &hello("evil.test"), 0);
    scene.settle();
    assert_eq!(scene.received(), b"");

    let mut scene = Scene::new();
    let good = hello(NAME);
    scene.guest(0, &good, 0);
    scene.settle();
    scene.server(&hellos::server_hello(false), 0);
    scene.settle();
    let (rig, adoption) = scene.rig.restart(&setup());
    assert_eq!((adoption.live, adoption.refused), (1, 0));
    scene.rig = rig;
    assert_eq!(scene.guest(good.len(), b"more", 0), Way::Fast);

    // What a capture has the engine carry was let go before, or was not.
    let slot = scene.rig.kernel.borrow().slots_in_use()[0];
    for held in [false, true] {
        let core = &mut scene.rig.engine.core;
        core.flows.capture(&mut core.datapath, slot, true);
        if held {
            core.flows.hold(&mut core.datapath, slot);
        }
        assert_eq!(scene.verdict(), Some(Verdict::Engine));
        let (rig, adoption) = scene.rig.restart(&setup());
        assert_eq!(adoption.refused, usize::from(held));
        assert_eq!(adoption.live, usize::from(!held));
        scene.rig = rig;
        if !held {
            assert_eq!(scene.guest(good.len(), b"more", 0), Way::Fast);
        }
    }
}

#[test]
fn sessions_and_what_they_hold_have_bounds() {
    use super::super::inspected::MAX_SESSIONS;
    let mut rig = Rig::with(Setup {
        slots: 8_192,
        max_flows: 8_000,
        ..setup()
    });
    tell(&rig, NAME);
    for n in 0..=MAX_SESSIONS {
        let to = (PEER, 443 + (n % 2) as u16);
        rig.guest(1, &syn((GUEST, 1_024 + n as u16), to, 1));
    }
    assert_eq!(rig.flows(), MAX_SESSIONS);
    assert_eq!(rig.refused(1, Refusal::Inspection), 1);
    assert_eq!(rig.engine.core.inspected.counts(101).limit, 1);
    let to = crate::rules::Destination {
        addr: PEER.into(),
        port: 443,
        protocol: Protocol::Tcp,
    };
    assert!(
        rig.engine
            .core
            .judge
            .borrow()
            .decide(101, to, rig.kernel.borrow().now_ns)
            .inspect
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// Any cuts, order and overlaps with other bytes: the decision is about what reaches the server.
    #[test]
    fn what_reaches_the_server_is_what_was_decided_about(
        good in any::<bool>(),
        pieces in prop::collection::vec((0usize..130, 1usize..60, any::<bool>()), 1..40),
    ) {
        let (name, other) = if good { (NAME, "api.no.test") } else { ("api.no.test", NAME) };
        let (stream, other) = (hello(name), hello(other));
        let mut scene = Scene::new();
        let mut first = vec![None; stream.len()];
        let all = [(0, stream.len(), false)];
        for (at, len, is_other) in pieces.into_iter().chain(all) {
            let at = at.min(stream.len() - 1);
            let end = (at + len).min(stream.len());
            let piece = if is_other { &other } else { &stream };
            scene.guest(at, &piece[at..end], 0);
            for place in at..end {
                first[place].get_or_insert(piece[place]);
            }
        }
        scene.settle();
        let first: Vec<u8> = first.into_iter().flatten().collect();
        let allowed = hellos_name(&first).is_some_and(|name| name == NAME);
        let expected: &[u8] = if allowed { &first } else { b"" };
        prop_assert_eq!(scene.received(), expected);
        prop_assert_eq!(scene.guest_reset.is_some(), !allowed);
    }
}

/// What a QUIC client sends: an Initial of this connection with a part of a hello.
fn initial(id: &[u8], number: u32, at: usize, part: &[u8]) -> Vec<u8> {
    let payload = initials::crypto(at, part);
    let datagram = initials::initial(Version::One, id, id, number, &payload);
    udp((GUEST, GUEST_PORT), SERVER, &datagram)
}

#[test]
fn quic_is_held_until_its_hello_is_whole_and_stays_in_the_engine() {
    let mut rig = Rig::with(setup());
    tell(&rig, NAME);
    let hello = hellos::client_hello(NAME);
    let (begin, end) = hello.split_at(40);
    rig.guest(1, &initial(b"one", 1, 40, end));
    assert!(rig.at_world().is_empty());
    rig.guest(1, &initial(b"one", 0, 0, begin));
    let sent = rig.at_world();
    assert_eq!(sent.len(), 2, "in the order in which they came");
    assert!(sent.iter().all(|packet| is_right(packet)));
    assert_eq!(sent[0].len(), initial(b"one", 1, 40, end).len());
    let nat = (NAT, u16::from_be_bytes([sent[0][20], sent[0][21]]));
    let answer = udp(SERVER, nat, b"\xc0answer");
    assert_eq!(rig.world(&answer), Way::Engine(Handover::Verdict));
    assert_eq!(rig.at_guest().len(), 1);
    rig.guest(1, &udp((GUEST, GUEST_PORT), SERVER, b"\x40data"));
    assert_eq!(rig.at_world().len(), 1);

    // Another connection in the same flow.
    let evil = hellos::client_hello("evil.test");
    let way = rig.guest(1, &initial(b"two", 0, 0, &evil));
    assert_eq!(way, Way::Engine(Handover::Verdict));
    assert!(rig.at_world().is_empty());
    assert_eq!(rig.at_guest()[0].1[20..22], [3, 13], "prohibited");
    assert_eq!(rig.engine.core.inspected.counts(101).name, 1);
    rig.guest(1, &udp((GUEST, GUEST_PORT), SERVER, b"\x40data"));
    assert!(rig.at_world().is_empty());
    rig.pass(SECOND_NS);
    rig.assert_empty();
    let record = rig.records().remove(0);
    assert_eq!(
        (&record["end"], &record["dns_name"]),
        (&"inspection".into(), &NAME.into())
    );
    assert_eq!(record["tx_packets"], 3);
}

#[test]
fn what_is_not_quic_does_not_go_out_over_udp() {
    let mut rig = Rig::with(setup());
    tell(&rig, NAME);
    for (n, other) in [&b"\x16\xfe\xfd"[..], b"", b"\x40short", b"\xc0\0\0\0\x07"]
        .iter()
        .enumerate()
    {
        rig.guest(1, &udp((GUEST, GUEST_PORT + n as u16), SERVER, other));
        rig.guest(1, &udp((GUEST, GUEST_PORT + n as u16), SERVER, other));
    }
    assert_eq!(rig.at_world(), Vec::<Vec<u8>>::new());
    rig.pass(SECOND_NS);
    // One that was bad on the wire, or is half a hello, goes nowhere.
    let good = initial(b"one", 0, 0, &hellos::client_hello(NAME));
    let mut corrupt = good.clone();
    *corrupt.last_mut().unwrap() ^= 1;
    rig.guest(1, &corrupt);
    rig.guest(1, &initial(b"two", 0, 0, &hellos::client_hello(NAME)[..40]));
    assert_eq!(rig.at_world(), Vec::<Vec<u8>>::new());
    rig.pass(tcp::SLOW_NS + SECOND_NS);
    assert_eq!(rig.engine.core.inspected.counts(101).slow, 1);
    rig.assert_empty();
    rig.guest(1, &good);
    assert_eq!(rig.at_world().len(), 1);
    let handed = rig
        .kernel
        .borrow()
        .stats(1)
        .snapshot()
        .0
        .engine_rx_from_guest;
    let (_, drops) = rig.kernel.borrow().stats(1).snapshot();
    let dropped: u64 = DropReason::ALL
        .iter()
        .map(|reason| drops.get(*reason).packets)
        .sum();
    assert_eq!(handed.packets, dropped + 1, "each is counted once");
}

#[test]
fn an_end_without_a_name_is_refused_and_nothing_behind_it_goes_on() {
    let evil = b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n";
    for before in [&b""[..], &evil[..10]] {
        let mut scene = Scene::new();
        scene.guest(0, before, Flags::FIN);
        scene.settle();
        assert!(!scene.server_fin);
        // Had the server been asked, it would have acknowledged the end.
        let end = FIRST.wrapping_add(1 + before.len() as u32);
        scene
            .rig
            .world(&ack(SERVER, scene.nat, 0, scene.server_next, end));
        assert_ne!(scene.guest(1 + before.len(), evil, 0), Way::Fast);
        assert_ne!(scene.guest(0, evil, 0), Way::Fast);
        scene.assert_refused(match before {
            [] => Refused::NoName,
            _ => Refused::Malformed,
        });
        assert_eq!(scene.received(), b"");
    }
}

#[test]
fn what_is_behind_an_end_goes_nowhere() {
    let mut scene = Scene::new();
    let good = hello(NAME);
    scene.server_is_deaf = true;
    scene.guest(0, &good, Flags::FIN);
    scene.guest(good.len() + 1, b"behind", 0);
    scene.settle();
    scene.server_is_deaf = false;
    scene.rig.pass(SECOND_NS);
    scene.settle();
    assert!(scene.server_fin);
    assert_eq!(scene.received(), good);
    assert_eq!(scene.verdict(), Some(Verdict::Fast));
}

/// Points behind the next byte.
fn urgent(packet: Vec<u8>) -> Vec<u8> {
    let mut packet = packet;
    packet[33] |= 0x20;
    packet[39] = 1;
    let parsed = Ipv4::parse(&packet).unwrap();
    let (source, destination) = (parsed.source, parsed.destination);
    packet[36..38].fill(0);
    let sum = crate::packet::checksum::Sum::default()
        .pseudo(source, destination, 6, packet.len() - 20)
        .bytes(&packet[20..])
        .finish();
    packet[36..38].copy_from_slice(&sum.to_be_bytes());
    packet
}

#[test]
fn urgent_data_goes_nowhere_before_the_kernel_has_the_flow() {
    let mut scene = Scene::new();
    let good = hello(NAME);
    let only = urgent(scene.segment(0, b"", 0));
    scene.rig.guest(1, &only);
    let with = urgent(scene.segment(0, &good, 0));
    scene.rig.guest(1, &with);
    let again = urgent(syn((GUEST, GUEST_PORT), SERVER, ISN));
    scene.rig.guest(1, &again);
    assert_eq!(scene.rig.at_world(), Vec::<Vec<u8>>::new());
    scene.guest(0, &good, 0);
    scene.settle();
    let late = urgent(scene.segment(good.len(), b"", 0));
    scene.rig.guest(1, &late);
    assert_eq!(scene.rig.at_world(), Vec::<Vec<u8>>::new());
    assert_eq!(scene.received(), good);

    let mut rig = Rig::with(setup());
    tell(&rig, NAME);
    rig.guest(1, &urgent(syn((GUEST, GUEST_PORT), SERVER, ISN)));
    assert_eq!(rig.at_world(), Vec::<Vec<u8>>::new());
}

#[test]
fn headers_say_no_more_than_a_connection_needs() {
    // MPTCP, an unknown option, and what lies behind the options' end.
    let odd = [
        30, 4, 0, 1, 254, 4, 0xbe, 0xef, 3, 3, 7, 0, 0xbe, 0xef, 0xbe, 0xef,
    ];
    let mut rig = Rig::with(setup());
    tell(&rig, NAME);
    let from = (GUEST, GUEST_PORT);
    for _ in 0..2 {
        rig.guest(1, &tcp(from, SERVER, Flags::SYN, ISN, 0, &odd, b""));
        let sent = rig.at_world().pop().expect("the SYN goes out");
        assert!(is_right(&sent));
        assert_eq!(
            sent[40..56],
            [1, 1, 1, 1, 1, 1, 1, 1, 3, 3, 7, 1, 1, 1, 1, 1]
        );
    }

    let mut scene = Scene::new();
    let next = scene.server_next;
    let with = tcp(from, SERVER, Flags::ACK, FIRST, next, &odd, b"");
    scene.rig.guest(1, &with);
    let sent = scene.rig.at_world().pop().expect("it is acknowledged");
    assert_eq!(
        (sent.len(), is_right(&sent)),
        (40, true),
        "none before a name"
    );
    let good = hello(NAME);
    scene.guest(0, &good, 0);
    scene.settle();
    let at = FIRST.wrapping_add(good.len() as u32);
    let with = tcp(from, SERVER, Flags::ACK, at, next, &odd, b"");
    scene.rig.guest(1, &with);
    let sent = scene.rig.at_world().pop().expect("it is acknowledged");
    assert_eq!((&sent[40..], is_right(&sent)), (&[1; 16][..], true));
}

#[test]
fn errors_of_a_guest_carry_nothing_past_inspection() {
    let mut scene = Scene::new();
    let about = tcp(
        SERVER,
        (GUEST, GUEST_PORT),
        Flags::ACK,
        SERVER_ISN + 1,
        FIRST,
        &[],
        &[7; 900],
    );
    let error = icmp_error(GUEST, PEER, 3, 3, &about);
    scene.rig.guest(1, &error);
    assert_eq!(scene.rig.at_world(), Vec::<Vec<u8>>::new());
    assert_eq!(scene.rig.dropped(1, DropReason::Refused), 1);
    scene.guest(0, &hello(NAME), 0);
    scene.settle();
    scene.rig.guest(1, &error);
    let sent = scene.rig.at_world().pop().expect("it goes on");
    assert_eq!((sent.len(), is_right(&sent)), (56, true));

    cut_all(&mut scene.rig);
    scene.rig.at_world();
    scene.rig.guest(1, &error);
    let inward = icmp_error(PEER, NAT, 3, 1, &tcp(scene.nat, SERVER, 0, 1, 1, &[], b""));
    scene.rig.at_guest();
    scene.rig.world(&inward);
    assert_eq!(scene.rig.at_world(), Vec::<Vec<u8>>::new());
    assert_eq!(scene.rig.at_guest(), []);
    assert_eq!(scene.rig.dropped(1, DropReason::Denied), 2);
}

/// Within the grace.
fn cut_all(rig: &mut Rig) {
    use super::super::{ControlMessage, Subject};
    let what = Subject::Vm { row: 1 };
    rig.tell(ControlMessage::Cut { request: 1, what });
}

#[test]
fn a_session_sends_nothing_more_into_a_flow_that_is_cut() {
    let mut scene = Scene::new();
    scene.server_is_deaf = true;
    scene.guest(0, &hello(NAME), 0);
    // The last moment before it would send again.
    let due_ns = scene.rig.engine.core.inspected.next_deadline_ns().unwrap();
    let now_ns = scene.rig.kernel.borrow().now_ns;
    scene.rig.pass(due_ns - now_ns - 1);
    scene.rig.at_world();
    cut_all(&mut scene.rig);
    scene.rig.at_world();
    scene.rig.pass(1_000_000);
    assert_eq!(scene.rig.at_world(), Vec::<Vec<u8>>::new());
    assert_eq!(scene.rig.engine.core.inspected.sessions(), (0, 0, 0));
}

#[test]
fn a_frozen_guest_is_waited_for() {
    use super::super::ControlMessage;
    let mut scene = Scene::new();
    scene.guest(0, &hello(NAME)[..20], 0);
    scene.settle();
    scene.rig.pass(tcp::SLOW_NS - SECOND_NS);
    scene.rig.kernel.borrow().set_frozen(1, true);
    scene.rig.pass(30 * SECOND_NS);
    scene.rig.tell(ControlMessage::Thaw { request: 3, row: 1 });
    scene.rig.replies();
    scene.rig.kernel.borrow().set_frozen(1, false);
    scene.rig.pass(tcp::SLOW_NS - SECOND_NS);
    let good = hello(NAME);
    scene.guest(20, &good[20..], 0);
    scene.settle();
    assert_eq!(scene.received(), good);
}

#[test]
fn a_path_that_carries_less_is_sent_less_for_good() {
    let longest = |rig: &mut Rig| {
        let lens = rig.at_world().into_iter().map(|packet| packet.len());
        lens.max().unwrap_or_default()
    };
    let head = format!("POST / HTTP/1.1\r\nHost: {NAME}\r\nContent-Length: 9000\r\n\r\n");
    let begin = || {
        let mut scene = Scene::at(Rig::with(setup()), (PEER, 80));
        scene.server_is_deaf = true;
        let body = [head.as_bytes(), &[7; 1_400]].concat();
        scene.guest(0, &body[..1_400], 0);
        scene.guest(1_400, &body[1_400..], 0);
        (scene, body.len())
    };
    // It is silent about it.
    let (mut scene, len) = begin();
    assert!(longest(&mut scene.rig) > 700);
    scene.rig.pass(8 * SECOND_NS);
    scene.rig.at_world();
    let all = FIRST.wrapping_add(len as u32);
    let next = scene.server_next;
    let has_some = ack(scene.server, scene.nat, 0, next, all.wrapping_sub(1_000));
    scene.rig.world(&has_some);
    scene.guest(len, &[7; 1_400], 0);
    let sent = longest(&mut scene.rig);
    assert!(sent > 40 && sent <= 40 + 536, "{sent}");

    // A router tells.
    let (mut scene, _) = begin();
    let sent = scene.rig.at_world().pop().unwrap();
    let mut error = icmp_error(PEER, NAT, 3, 4, &sent);
    error[26..28].copy_from_slice(&700u16.to_be_bytes());
    crate::packet::build::fill_icmp_checksum(&mut error[20..]);
    scene.rig.world(&error);
    scene.rig.pass(2 * SECOND_NS);
    let sent = longest(&mut scene.rig);
    assert!(sent > 40 && sent <= 700, "{sent}");
}

#[test]
fn an_answer_from_far_away_is_no_matter() {
    let mut scene = Scene::new();
    scene.guest(0, &hello(NAME), 0);
    scene.settle();
    for far in [0, 1, u32::MAX] {
        let sequence = scene.server_next.wrapping_add(1 << 31).wrapping_add(far);
        let ack = scene.server_ack();
        let packet = tcp(SERVER, scene.nat, Flags::ACK, sequence, ack, &[], b"far");
        scene.rig.world(&packet);
    }
    assert_eq!(scene.verdict(), Some(Verdict::Engine));
}

#[test]
fn what_goes_at_once_takes_nothing_along_that_is_held() {
    let mut rig = Rig::with(setup());
    tell(&rig, NAME);
    rig.guest(1, &initial(b"one", 0, 0, &hellos::client_hello(NAME)));
    assert_eq!(rig.at_world().len(), 1);
    let evil = hellos::client_hello("evil.test");
    let half = initials::initial(
        Version::One,
        b"two",
        b"two",
        0,
        &initials::crypto(0, &evil[..40]),
    );
    // A frame of two datagrams: more of the open connection follows.
    let frame = udp(
        (GUEST, GUEST_PORT),
        SERVER,
        &[&half[..], b"\x40data"].concat(),
    );
    let vnet = VirtioNetHdr {
        gso_type: VirtioNetHdr::GSO_UDP_L4,
        gso_size: half.len() as u16,
        hdr_len: 42,
        ..VirtioNetHdr::default()
    };
    rig.kernel.borrow_mut().guest_sends(1, vnet, &frame);
    rig.turn();
    rig.guest(1, &udp((GUEST, GUEST_PORT), SERVER, b"\x40more"));
    let sent = rig.at_world();
    assert_eq!(sent.len(), 1);
    assert!(sent[0].ends_with(b"more"));
    assert_eq!(
        rig.engine.core.inspected.counts(101),
        RefusedCounts::default()
    );
    rig.pass(tcp::SLOW_NS + SECOND_NS);
    assert_eq!(rig.engine.core.inspected.counts(101).slow, 1);
}

#[test]
fn quic_holds_no_more_of_a_vm_than_its_bound() {
    use super::super::inspected::MAX_HELD;
    let mut rig = Rig::with(Setup {
        slots: 8_192,
        max_flows: 8_000,
        ..setup()
    });
    tell(&rig, NAME);
    let far = |id: u8| {
        let payload = initials::crypto(32_000, b"x");
        initials::initial(Version::One, &[id; 8], &[id; 8], 0, &payload)
    };
    for n in 0..400 {
        rig.guest(1, &udp((GUEST, 1_024 + n), SERVER, &far(1)));
        if n < 4 {
            rig.guest(1, &udp((GUEST, 1_024 + n), SERVER, &far(2)));
        }
    }
    let (sessions, _, held) = rig.engine.core.inspected.sessions();
    assert!(sessions > 200);
    assert!(held > MAX_HELD / 2 && held <= MAX_HELD + 65_536, "{held}");
    assert!(rig.dropped(1, DropReason::EngineBusy) > 0);
    assert!(rig.at_world().is_empty());
    // What can't be kept for good is let go of.
    rig.pass(tcp::SLOW_NS + SECOND_NS);
    assert_eq!(rig.engine.core.inspected.sessions().2, 0);
}

#[test]
fn ping_can_say_no_name() {
    let mut rig = Rig::with(Setup {
        default: Action::Allow,
        rules: vec![Rule::parse(Action::Inspect, "198.51.100.0/24").unwrap()],
        ..Setup::default()
    });
    rig.guest(1, &echo(GUEST, PEER, true, 7, b"x"));
    assert!(rig.at_world().is_empty());
    assert_eq!(rig.refused(1, Refusal::Inspection), 1);
}

#[test]
fn a_rule_by_address_lets_in_what_was_asked_for() {
    let mut rig = Rig::with(Setup {
        default: Action::Allow,
        rules: vec![
            Rule::parse(Action::Inspect, "0.0.0.0/0:80/tcp").unwrap(),
            Rule::parse(Action::Deny, "evil.test").unwrap(),
        ],
        ..Setup::default()
    });
    rig = {
        let mut scene = Scene::at(rig, (PEER, 80));
        let request = |host: &str| format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n").into_bytes();
        let good = request(NAME);
        scene.guest(0, &good, 0);
        scene.settle();
        assert_eq!(scene.received(), good);
        scene.guest(good.len(), &request("never.asked.test"), 0);
        scene.assert_refused(Refused::Name);
        scene.rig
    };
    assert_eq!(rig.flows(), 0);
}
