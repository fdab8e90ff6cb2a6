use std::{
    io::{Read as _, Write as _},
    net::Shutdown,
    os::unix::net::UnixStream,
    sync::atomic::Ordering::Relaxed,
    time::Duration,
};

use proptest::prelude::*;

use super::*;
use crate::virtio::vsock::{
    Connector, WINDOW_BYTES,
    packet::{SHUTDOWN_RECEIVE, SHUTDOWN_SEND},
    requests::{ANSWERED_WITHIN, tests::Played},
};

const CID: u32 = 7;
const PORT: u32 = 80;
/// No packet is expected.
const NONE: [u16; 0] = [];
/// Credit that the guest gives.
const ROOM: u32 = 10_000;

/// A switch, its listening socket, and the guest's end.
struct Rig<'a> {
    switch: Switch<'a>,
    listener: UnixListener,
    path: std::path::PathBuf,
    counters: Arc<VsockCounters>,
    /// Connects the guest to programs, if there is a connector.
    programs: Played,
    _folder: tempfile::TempDir,
}

impl<'a> Rig<'a> {
    fn new(epoll: &'a Epoll) -> Rig<'a> {
        Rig::with(epoll, Played::new(), false)
    }

    /// With a connector.
    fn connected(epoll: &'a Epoll) -> Rig<'a> {
        Rig::with(epoll, Played::new(), true)
    }

    fn with(epoll: &'a Epoll, programs: Played, is_there: bool) -> Rig<'a> {
        let connector = is_there.then(|| Box::new(programs.clone()) as Box<dyn Connector>);
        let requests = Requests::new(connector, ANSWERED_WITHIN);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let counters: Arc<VsockCounters> = Arc::default();
        Rig {
            switch: Switch::new(CID, epoll, counters.clone(), Rc::new(requests)),
            listener,
            path,
            counters,
            programs,
            _folder: folder,
        }
    }

    /// Connects and says where to.
    fn connect(&mut self, line: &str) -> UnixStream {
        let mut stream = UnixStream::connect(&self.path).unwrap();
        stream.write_all(line.as_bytes()).unwrap();
        stream.set_nonblocking(true).unwrap();
        self.switch.accept(&self.listener);
        self.poll();
        stream
    }

    /// Takes the signals of the sockets.
    fn poll(&mut self) {
        let mut events = [EpollEvent::default(); 64];
        let ready = self.switch.epoll.wait(0, &mut events).unwrap();
        for event in &events[..ready] {
            self.switch
                .signalled(event.data() as usize, event.event_set());
        }
    }

    /// Returns the packets for the guest, in buffers of this length.
    fn packets_of(&mut self, buffer_bytes: usize) -> Vec<(Header, Vec<u8>)> {
        self.poll();
        let mut all = Vec::new();
        loop {
            let mut buffer = vec![0; buffer_bytes];
            let (head, body) = buffer.split_at_mut(HEADER_BYTES.min(20));
            let pieces = [head, body].map(|part| iovec {
                iov_base: part.as_mut_ptr().cast(),
                iov_len: part.len(),
            });
            // SAFETY: the pieces are the buffer's.
            let Some(written) = (unsafe { self.switch.next_packet(&pieces) }) else {
                return all;
            };
            let header = Header::from_bytes(buffer[..HEADER_BYTES].try_into().unwrap());
            assert_eq!(written, HEADER_BYTES + header.len as usize);
            assert_eq!(header.dst_cid, u64::from(CID));
            all.push((header, buffer[HEADER_BYTES..written].to_vec()));
        }
    }

    fn packets(&mut self) -> Vec<(Header, Vec<u8>)> {
        self.packets_of(4096)
    }

    fn operations(&mut self) -> Vec<u16> {
        self.packets().iter().map(|(header, _)| header.op).collect()
    }

    /// Sends a packet of the guest.
    fn send(&mut self, header: Header, data: &[u8]) {
        let len = data.len() as u32;
        let head = Header { len, ..header }.to_bytes();
        self.switch.take(&[
            sockets::piece(&head[..13]),
            sockets::piece(&head[13..]),
            sockets::piece(data),
        ]);
    }

    /// Connects to a port that accepts. Returns the program's socket, and a header from the guest.
    fn open(&mut self) -> (UnixStream, Header) {
        let mut stream = self.connect("CONNECT 80\n");
        let asked = self.packets();
        let [(request, _)] = asked.as_slice() else {
            panic!("{asked:?}");
        };
        assert_eq!((request.op, request.dst_port), (operation::REQUEST, PORT));
        assert_eq!((request.buf_alloc, request.fwd_cnt), (WINDOW_BYTES, 0));
        let header = Header {
            src_cid: CID.into(),
            dst_cid: HOST_CID,
            src_port: PORT,
            dst_port: request.src_port,
            kind: STREAM,
            buf_alloc: ROOM,
            ..Header::default()
        };
        self.send(of(operation::RESPONSE, header), &[]);
        let line = format!("OK {}\n", request.src_port);
        assert_eq!(read(&mut stream), line.as_bytes());
        (stream, header)
    }

    fn violations(&self) -> u64 {
        self.counters.violations.load(Relaxed)
    }
}

fn of(op: u16, header: Header) -> Header {
    Header { op, ..header }
}

/// Reads everything that is there.
fn read(stream: &mut UnixStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => {}
        Err(e) => assert_eq!(e.kind(), ErrorKind::WouldBlock),
    }
    bytes
}

/// Whether the other end is closed, or sends no more.
fn has_ended(stream: &mut UnixStream) -> bool {
    matches!(stream.read(&mut [0]), Ok(0))
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at / 251) as u8 ^ at as u8).collect()
}

#[test]
fn bytes_go_both_ways_and_the_line_is_not_among_them() {
    let epoll = Epoll::new().unwrap();
    let mut rig = Rig::new(&epoll);
    let (mut stream, header) = rig.open();
    rig.send(of(operation::RW, header), b"from the guest");
    assert_eq!(read(&mut stream), b"from the guest");
    stream.write_all(b"from the host").unwrap();
    let got = rig.packets();
    let (rw, data) = &got[0];
    assert_eq!(
        (rw.op, data.as_slice()),
        (operation::RW, &b"from the host"[..])
    );
    assert_eq!(rw.fwd_cnt, 14, "the guest's bytes went on");
    assert_eq!(got.len(), 1);

    // What a program sends behind its line at once is the guest's.
    let mut hasty = rig.connect("CONNECT 80\nhello");
    let request = rig.packets()[0].0;
    assert_ne!(request.src_port, header.dst_port, "a port of its own");
    let second = Header {
        dst_port: request.src_port,
        ..header
    };
    rig.send(of(operation::RESPONSE, second), &[]);
    assert_eq!(rig.packets()[0].1, b"hello");
    assert!(read(&mut hasty).starts_with(b"OK "));
    assert_eq!(rig.counters.opened_by_host.load(Relaxed), 2);
}

#[test]
fn a_program_that_says_nothing_of_sense_or_is_refused_is_disconnected() {
    let epoll = Epoll::new().unwrap();
    let mut rig = Rig::new(&epoll);
    for line in [
        "CONNECT\n",
        "CONNECT 4294967296\n",
        "connect 5\n",
        "\n",
        "CONNECT 000000000000000000000000000000000000080\n",
    ] {
        let mut stream = rig.connect(line);
        assert!(matches!(stream.read(&mut [0]), Ok(0) | Err(_)), "{line}");
        let gone = stream.write_all(b"x").is_err();
        assert!(gone, "{line}");
        assert_eq!(rig.operations(), NONE);
    }
    assert_eq!(rig.counters.refused_host.load(Relaxed), 5);

    let mut stream = rig.connect("CONNECT 81\n");
    let request = rig.packets()[0].0;
    rig.send(request.reset(), &[]);
    assert!(has_ended(&mut stream), "the guest refuses");

    // One that goes before the guest has answered: the guest is told.
    drop(rig.connect("CONNECT 82\n"));
    assert_eq!(rig.operations(), NONE);
    let mut stream = UnixStream::connect(&rig.path).unwrap();
    stream.write_all(b"CONNECT 82\n").unwrap();
    drop(stream);
    rig.switch.accept(&rig.listener);
    assert_eq!(rig.operations(), NONE, "gone before it was accepted");
    let stream = rig.connect("CONNECT 83\n");
    assert_eq!(rig.operations(), [operation::REQUEST]);
    drop(stream);
    assert_eq!(rig.operations(), [operation::RST]);
}

#[test]
fn the_guest_gets_no_more_than_its_credit() {
    let epoll = Epoll::new().unwrap();
    let mut rig = Rig::new(&epoll);
    let (mut stream, mut header) = rig.open();
    let sent = pattern(ROOM as usize * 2 + 5);
    stream.write_all(&sent).unwrap();
    let mut got = Vec::new();
    for round in 0..3 {
        let packets = rig.packets_of(1000);
        for (header, data) in &packets {
            match header.op {
                operation::RW => got.extend_from_slice(data),
                op => assert_eq!(op, operation::CREDIT_REQUEST, "{round}"),
            }
        }
        let due = (ROOM as usize * (round + 1)).min(sent.len());
        assert_eq!(got.len(), due, "{round}");
        // An answer without credit is not asked again.
        rig.send(of(operation::CREDIT_UPDATE, header), &[]);
        if round < 2 {
            assert_eq!(rig.operations(), NONE, "{round}");
        }
        header.fwd_cnt = got.len() as u32;
        rig.send(of(operation::CREDIT_UPDATE, header), &[]);
    }
    assert_eq!(got, sent);

    // A guest that claims more than it got harms itself.
    header.fwd_cnt += 1;
    rig.send(of(operation::CREDIT_UPDATE, header), &[]);
    stream.write_all(b"x").unwrap();
    assert_eq!(rig.operations(), [operation::CREDIT_REQUEST]);
}

#[test]
fn what_a_socket_does_not_take_is_held_within_the_window() {
    let epoll = Epoll::new().unwrap();
    let mut rig = Rig::new(&epoll);
    let (mut stream, header) = rig.open();
    // Nobody reads: the socket's buffer fills, then the window.
    let part = pattern(32 << 10);
    let mut sent = 0;
    let mut forwarded = 0;
    loop {
        for (packet, _) in rig.packets() {
            assert_eq!(packet.op, operation::CREDIT_UPDATE);
            forwarded = packet.fwd_cnt;
        }
        if sent + part.len() as u32 - forwarded > WINDOW_BYTES {
            break;
        }
        rig.send(of(operation::RW, header), &part);
        sent += part.len() as u32;
    }
    let held = rig.counters.held_bytes.load(Relaxed);
    assert!(held > 0 && held <= u64::from(WINDOW_BYTES), "{held}");
    assert_eq!(rig.violations(), 0);
    let mut got = Vec::new();
    while got.len() < sent as usize {
        let before = got.len();
        got.extend(read(&mut stream));
        assert!(got.len() > before, "what is held comes when there is room");
        rig.poll();
    }
    assert!(got.chunks(part.len()).all(|chunk| chunk == part));
    let told = rig.packets().last().map(|(packet, _)| packet.fwd_cnt);
    assert_eq!(told, Some(sent), "the guest has its whole credit again");
    rig.send(of(operation::CREDIT_REQUEST, header), &[]);
    assert_eq!(rig.operations(), [operation::CREDIT_UPDATE]);

    // More than the window in one go: the connection ends.
    rig.send(
        of(operation::RW, header),
        &pattern(WINDOW_BYTES as usize + 1),
    );
    assert_eq!(rig.operations(), [operation::RST]);
    assert!(has_ended(&mut stream));
    assert_eq!(rig.violations(), 1);
}

#[test]
fn each_end_closes_its_direction() {
    let epoll = Epoll::new().unwrap();
    let mut rig = Rig::new(&epoll);
    // The host's program first.
    let (mut stream, header) = rig.open();
    stream.write_all(b"last").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let packets = rig.packets();
    assert_eq!(packets[0].1, b"last");
    assert_eq!(packets[1].0.op, operation::SHUTDOWN);
    assert_eq!(packets[1].0.flags, SHUTDOWN_SEND);
    assert_eq!(packets.len(), 2);
    rig.send(of(operation::RW, header), b"answer");
    assert_eq!(read(&mut stream), b"answer");
    let flags = SHUTDOWN_SEND | SHUTDOWN_RECEIVE;
    rig.send(
        Header {
            flags,
            ..of(operation::SHUTDOWN, header)
        },
        &[],
    );
    assert!(has_ended(&mut stream));
    assert_eq!(rig.operations(), [operation::RST]);

    // The guest first.
    let (mut stream, header) = rig.open();
    let flags = SHUTDOWN_SEND;
    rig.send(of(operation::RW, header), b"question");
    rig.send(
        Header {
            flags,
            ..of(operation::SHUTDOWN, header)
        },
        &[],
    );
    assert_eq!(read(&mut stream), b"question");
    assert!(has_ended(&mut stream));
    stream.write_all(b"answer").unwrap();
    assert_eq!(rig.packets()[0].1, b"answer");
    // It must send no more.
    rig.send(of(operation::RW, header), b"more");
    assert_eq!(rig.operations(), [operation::RST]);
    assert_eq!(rig.violations(), 1);
}

#[test]
fn a_connection_that_the_guest_has_half_closed_is_at_rest() {
    let epoll = Epoll::new().unwrap();
    let mut rig = Rig::new(&epoll);
    let (mut stream, header) = rig.open();
    let sends_no_more = Header {
        flags: SHUTDOWN_SEND,
        ..of(operation::SHUTDOWN, header)
    };
    rig.send(sends_no_more, &[]);
    assert!(has_ended(&mut stream));
    let mut events = [EpollEvent::default(); 64];
    // The end itself is a signal, and what that has caused may be another.
    rig.poll();
    rig.poll();
    assert_eq!(epoll.wait(0, &mut events).unwrap(), 0);
    stream.write_all(b"still for the guest").unwrap();
    assert_eq!(rig.packets()[0].1, b"still for the guest");
    rig.poll();
    assert_eq!(epoll.wait(0, &mut events).unwrap(), 0);
}

#[test]
fn a_program_that_is_gone_is_told_to_the_guest_behind_its_last_bytes() {
    let epoll = Epoll::new().unwrap();
    let mut rig = Rig::new(&epoll);
    let (mut stream, header) = rig.open();
    stream.write_all(b"last").unwrap();
    drop(stream);
    let packets = rig.packets();
    assert_eq!(packets[0].1, b"last");
    assert_eq!(packets[1].0.op, operation::SHUTDOWN);
    assert_eq!(packets[1].0.flags, SHUTDOWN_SEND | SHUTDOWN_RECEIVE);
    // What it still sends goes nowhere, and does not use up its credit.
    for _ in 0..3 {
        rig.send(of(operation::RW, header), &pattern(WINDOW_BYTES as usize));
    }
    assert_eq!(rig.operations(), [operation::CREDIT_UPDATE]);
    assert_eq!(rig.violations(), 0);
    rig.send(of(operation::RST, header), &[]);
    assert!(rig.switch.by_ports.is_empty());
    assert_eq!(rig.operations(), NONE);
}

#[test]
fn a_program_that_does_not_read_to_the_end_is_told_to_the_guest() {
    let epoll = Epoll::new().unwrap();
    let mut rig = Rig::new(&epoll);
    let (mut stream, header) = rig.open();
    // Some of the guest's bytes are held.
    while rig.counters.held_bytes.load(Relaxed) == 0 {
        rig.send(of(operation::RW, header), &pattern(32 << 10));
    }
    rig.packets();
    stream.shutdown(Shutdown::Read).unwrap();
    // It takes what the socket has; what is held comes too late.
    read(&mut stream);
    let told = rig.packets()[0].0;
    assert_eq!(
        (told.op, told.flags),
        (operation::SHUTDOWN, SHUTDOWN_RECEIVE)
    );
    for _ in 0..3 {
        rig.send(of(operation::RW, header), &pattern(WINDOW_BYTES as usize));
    }
    stream.write_all(b"still here").unwrap();
    assert_eq!(rig.packets()[0].1, b"still here");
    assert_eq!(rig.violations(), 0);

    // With bytes that it did not read, a program's end is a reset.
    let (stream, header) = rig.open();
    rig.send(of(operation::RW, header), b"unread");
    drop(stream);
    assert_eq!(rig.operations(), [operation::RST]);
}

#[test]
fn packets_of_no_connection_are_refused_and_nonsense_is_dropped() {
    let epoll = Epoll::new().unwrap();
    let mut rig = Rig::new(&epoll);
    let header = Header {
        src_cid: CID.into(),
        dst_cid: HOST_CID,
        src_port: 1,
        dst_port: 2,
        kind: STREAM,
        ..Header::default()
    };
    for op in [
        operation::REQUEST,
        operation::RW,
        operation::SHUTDOWN,
        0,
        99,
    ] {
        rig.send(of(op, header), &[]);
        let packets = rig.packets();
        let [(reset, _)] = packets.as_slice() else {
            panic!("{packets:?}");
        };
        let ports = (reset.op, reset.src_port, reset.dst_port);
        assert_eq!(ports, (operation::RST, 2, 1));
    }
    rig.send(
        Header {
            kind: 2,
            ..of(operation::REQUEST, header)
        },
        &[],
    );
    assert_eq!(rig.operations(), [operation::RST], "no stream");
    rig.send(of(operation::RST, header), &[]);
    assert_eq!(rig.operations(), NONE, "an RST is not answered");
    assert_eq!(rig.counters.refused_guest.load(Relaxed), 5);
    assert_eq!(rig.counters.refused_requests.load(Relaxed), 1);

    rig.send(
        Header {
            src_cid: 8,
            ..of(operation::RW, header)
        },
        &[],
    );
    let bytes = of(operation::RW, header).to_bytes();
    rig.switch.take(&[sockets::piece(&bytes[..43])]);
    let long = Header { len: 2, ..header }.to_bytes();
    rig.switch
        .take(&[sockets::piece(&long), sockets::piece(b"x")]);
    rig.switch.take(&[]);
    assert_eq!(rig.operations(), NONE);
    assert_eq!(rig.counters.dropped.load(Relaxed), 4);

    // Nor is what has only the ports of a connection.
    let (mut stream, header) = rig.open();
    for (kind, dst_cid) in [(2, HOST_CID), (STREAM, 5)] {
        let other = Header {
            kind,
            dst_cid,
            ..header
        };
        rig.send(of(operation::RW, other), b"x");
        let reset = rig.packets()[0].0;
        assert_eq!((reset.op, reset.src_cid), (operation::RST, dst_cid));
    }
    assert_eq!(read(&mut stream), b"");

    // Answers that the driver does not fetch are bounded.
    let header = Header {
        dst_port: 2,
        ..header
    };
    let mut taken = 0;
    while rig.switch.can_take() && taken <= MAX_RESETS {
        rig.send(of(operation::RW, header), &[]);
        taken += 1;
    }
    assert_eq!(taken, MAX_RESETS);
    assert_eq!(rig.operations().len(), MAX_RESETS);
}

#[test]
fn connections_are_bounded_and_one_that_ends_makes_room() {
    let epoll = Epoll::new().unwrap();
    let mut rig = Rig::new(&epoll);
    let mut streams: Vec<_> = (0..MAX_CONNECTIONS).map(|_| rig.connect("CON")).collect();
    let mut beyond = rig.connect("");
    assert!(has_ended(&mut beyond));
    assert_eq!(rig.counters.refused_host.load(Relaxed), 1);
    drop(streams.pop());
    rig.poll();
    let mut stream = rig.connect("CONNECT 80\n");
    assert_eq!(rig.operations(), [operation::REQUEST]);
    assert_eq!(read(&mut stream), b"");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Any packets of a guest, and any answers to its requests: no panic, and no more held than the
    /// window.
    #[test]
    fn the_switch_outlives_any_guest(
        packets in prop::collection::vec(
            (
                prop_oneof![3 => Just(operation::REQUEST), 6 => 0_u16..9, 1 => any::<u16>()],
                prop_oneof![4 => Just(0_u32), 2 => 0_u32..4, 1 => any::<u32>()],
                prop_oneof![Just(ROOM), any::<u32>()],
                prop_oneof![Just(0), any::<u32>()],
                // Of the connection that is open, of few others, or of any.
                prop_oneof![4 => Just(0), 2 => 1_u32..4, 1 => any::<u32>()],
                // What becomes of the oldest request: an answer, none, or time.
                prop_oneof![2 => Just(None), 3 => (0_u8..3).prop_map(Some)],
                prop_oneof![4 => 0_usize..3000, 1 => Just(WINDOW_BYTES as usize), 1 => Just(0)],
            ),
            1..40,
        ),
    ) {
        let epoll = Epoll::new().unwrap();
        let mut rig = Rig::connected(&epoll);
        let (mut stream, header) = rig.open();
        let _ = stream.write_all(&pattern(5_000));
        let (mut asked, mut programs) = (VecDeque::new(), Vec::new());
        for (op, flags, buf_alloc, fwd_cnt, other, answer, bytes) in packets {
            asked.extend(rig.programs.asked());
            match answer {
                Some(0) => rig.switch.expire(Instant::now() + ANSWERED_WITHIN),
                Some(how) => if let Some((id, _)) = asked.pop_front() {
                    match how {
                        1 => rig.programs.answer(id, None),
                        _ => {
                            let mut program = rig.programs.connect(id);
                            let _ = program.write_all(&pattern(5_000));
                            programs.push(program);
                        }
                    }
                    rig.switch.answered();
                }
                None => {}
            }
            let dst_port = header.dst_port.wrapping_add(other);
            let packet = Header { op, flags, buf_alloc, fwd_cnt, dst_port, ..header };
            rig.send(packet, &pattern(bytes));
            for (_, data) in rig.packets() {
                prop_assert!(data.len() <= 5_000);
            }
        }
        // Another connection is served.
        let (mut other, header) = rig.open();
        rig.send(of(operation::RW, header), b"well");
        prop_assert_eq!(read(&mut other), b"well");
    }
}

#[path = "asked_test.rs"]
mod asked;
