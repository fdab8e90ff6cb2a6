//! One connection by itself, segment by segment.
use std::{
    io::Read as _,
    net::{Ipv4Addr, TcpListener, TcpStream},
    time::Duration,
};

use nix::sys::socket::{setsockopt, sockopt};
use slipgate_abi::{Ip4, tcp::Flags};

use super::super::{
    Limits,
    dns_stream::DnsStream,
    link::{Ends, Link, Packets, segment_of},
    stream::{Fate, Stream},
};
use crate::{
    fake::packets::{ack, syn, tcp},
    packet::{Version, transport::Tcp},
    poll::{Poller, Readiness, Subsystem, Token},
    tcp::{Connection, EarlyRoom},
    test_vm,
    vm::VmNet,
};

const GUEST: (Ip4, u16) = (
    Ip4 {
        octets: [10, 0, 2, 15],
    },
    40_000,
);
const OURS: (Ip4, u16) = (
    Ip4 {
        octets: [10, 0, 2, 2],
    },
    53,
);
const FIRST: u32 = 100;

/// What a connection is driven with.
struct Rig {
    vm: VmNet,
    early: EarlyRoom,
    packets: Packets,
}

impl Rig {
    fn new() -> Self {
        Self {
            vm: test_vm::vm(7),
            early: EarlyRoom::default(),
            packets: Packets::default(),
        }
    }

    fn with<R>(&mut self, may_send: usize, now_ns: u64, f: impl FnOnce(&mut Link<'_>) -> R) -> R {
        let ends = Ends {
            ours: (Ipv4Addr::from(OURS.0), OURS.1).into(),
            guest: (Ipv4Addr::from(GUEST.0), GUEST.1).into(),
        };
        let vm = (&self.vm, &self.early);
        let mut link = Link::to(vm, &mut self.packets, ends, may_send, now_ns);
        f(&mut link)
    }

    /// What was sent since the last look: headers, and lengths of payload.
    fn sent(&mut self) -> Vec<(Tcp, usize)> {
        let sent = self.packets.frames().map(|(_, packet, _)| {
            let (tcp, _, payload) = segment_of(packet).expect("a segment");
            (tcp, payload.len())
        });
        let sent = sent.collect();
        self.packets.clear();
        sent
    }
}

#[test]
fn answers_that_the_guest_has_but_for_the_first_bring_no_end() {
    const MSS: usize = 1_460;
    let (mut rig, limits) = (Rig::new(), Limits::default());
    let sack_permitted = [2, 4, 5, 0xb4, 4, 2];
    let opener = tcp(GUEST, OURS, Flags::SYN, FIRST, 0, &sack_permitted, &[]);
    let (_, opener, _) = segment_of(&opener).unwrap();
    let mut stream = rig.with(9, 0, |link| DnsStream::new(&opener, &limits, link));
    let ours = rig.sent()[0].0.sequence + 1;
    let questions = [0, 1, b'a', 0, 1, b'b', 0, 1, b'c'];
    let asks = tcp(GUEST, OURS, Flags::ACK, FIRST + 1, ours, &[], &questions);
    let mut asked = 0;
    let mut drive = |rig: &mut Rig, stream: &mut DnsStream, packet, may_send, now_ns| {
        let fate = rig.with(may_send, now_ns, |link| {
            stream.drive(packet, &limits, link, |_| asked += 1)
        });
        assert_eq!(fate, Fate::Alive);
        rig.sent()
    };
    drive(&mut rig, &mut stream, Some(&asks[..]), 9, 0);
    for _ in 0..3 {
        stream.answer(&[7; MSS - 2]);
    }
    let sent = drive(&mut rig, &mut stream, None, 9, 0);
    let len: usize = sent.iter().map(|(_, len)| len).sum();
    assert_eq!(len, 3 * MSS);
    let due_ns = stream.due_ns().expect("it waits for the guest");
    let again = drive(&mut rig, &mut stream, None, 1, due_ns);
    assert_eq!((again.len(), again[0].1), (1, MSS), "the first, again");
    let (from, to) = (ours + MSS as u32, ours + 3 * MSS as u32);
    let sack = [&[1, 1, 5, 10], &from.to_be_bytes()[..], &to.to_be_bytes()].concat();
    let next = FIRST + 1 + questions.len() as u32;
    let has_rest = tcp(GUEST, OURS, Flags::ACK, next, ours, &sack, &[]);
    let sent = drive(&mut rig, &mut stream, Some(&has_rest[..]), 9, due_ns);
    assert!(sent.is_empty(), "{sent:?}");
    // The connection goes on.
    let asks = tcp(GUEST, OURS, Flags::ACK, next, to, &[], &questions[..3]);
    drive(&mut rig, &mut stream, Some(&asks[..]), 9, due_ns);
    stream.answer(b"more");
    let sent = drive(&mut rig, &mut stream, None, 9, due_ns);
    assert_eq!((sent[0].0.sequence, sent[0].1), (to, 6));
    assert_eq!(asked, 4);
}

#[test]
fn what_the_guest_sent_early_counts_though_nothing_follows() {
    const PIECE: usize = 15_000;
    const GAP: usize = 500;
    const ALL: usize = GAP + 4 * PIECE;
    let (mut rig, limits, poller) = (Rig::new(), Limits::default(), Poller::new().unwrap());
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    setsockopt(&listener, sockopt::RcvBuf, &4_096).unwrap();
    let host = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    host.set_nonblocking(true).unwrap();
    let (mut service, _) = listener.accept().unwrap();
    service
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    let token = Token {
        subsystem: Subsystem::Relay,
        key: 3,
    };
    let opener = syn(GUEST, OURS, FIRST);
    let (_, opener, _) = segment_of(&opener).unwrap();
    let connection = Connection::new(Version::V4, &opener, 77);
    let mut stream = rig.with(9, 0, |link| {
        Stream::accepted(host, connection, token, &poller, link).unwrap()
    });
    let drive = |rig: &mut Rig, stream: &mut Stream, packet: Option<&[u8]>| {
        let (fate, moved) = rig.with(9, 0, |link| stream.drive(packet, &limits, &poller, link));
        assert_eq!(fate, Fate::Alive);
        moved.from_guest as usize
    };
    let opened = ack(GUEST, OURS, 0, FIRST + 1, 78);
    drive(&mut rig, &mut stream, Some(&opened));
    // The window is announced; now the queue gets small.
    setsockopt(stream.socket().unwrap(), sockopt::SndBuf, &4_096).unwrap();
    let send = |rig: &mut Rig, stream: &mut Stream, at: usize, len: usize| {
        let flags = match at + len {
            ALL => Flags::ACK | Flags::FIN,
            _ => Flags::ACK,
        };
        let sequence = FIRST + 1 + at as u32;
        let packet = tcp(GUEST, OURS, flags, sequence, 78, &[], &vec![7; len]);
        drive(rig, stream, Some(&packet))
    };
    for nth in 0..4 {
        assert_eq!(send(&mut rig, &mut stream, GAP + nth * PIECE, PIECE), 0);
    }
    let mut moved = send(&mut rig, &mut stream, 0, GAP);
    assert!((GAP..ALL).contains(&moved), "a part: {moved}");
    let (mut got, mut buffer) = (0, [0; 8_192]);
    loop {
        match service.read(&mut buffer).expect("the rest comes") {
            0 => break,
            some => got += some,
        }
        let ready = Readiness {
            token,
            readable: false,
            hung_up: false,
            writable: true,
            failed: false,
        };
        rig.with(9, 0, |link| stream.on_ready(ready, link));
        moved += drive(&mut rig, &mut stream, None);
    }
    assert_eq!((got, moved), (ALL, ALL));
}
