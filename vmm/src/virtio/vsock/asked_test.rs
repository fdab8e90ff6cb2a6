//! Connections that the guest asks for.
use super::*;
use crate::virtio::vsock::MAX_REQUESTS;

const PROGRAM: u32 = 52;

/// A packet of the guest to a program, by this port of the guest.
fn from(guest_port: u32) -> Header {
    Header {
        src_cid: CID.into(),
        dst_cid: HOST_CID,
        src_port: guest_port,
        dst_port: PROGRAM,
        kind: STREAM,
        buf_alloc: ROOM,
        ..Header::default()
    }
}

fn request(guest_port: u32) -> Header {
    of(operation::REQUEST, from(guest_port))
}

fn shutdown(flags: u32, header: Header) -> Header {
    Header {
        flags,
        ..of(operation::SHUTDOWN, header)
    }
}

impl Rig<'_> {
    /// Asks for a connection. Returns the request's number.
    fn ask(&mut self, guest_port: u32) -> u32 {
        self.send(request(guest_port), &[]);
        match self.programs.asked().as_slice() {
            [(id, PROGRAM)] => *id,
            asked => panic!("{asked:?}"),
        }
    }

    /// Has a request answered with a program. Returns the program's end.
    fn connect_program(&mut self, id: u32) -> UnixStream {
        let program = self.programs.connect(id);
        self.switch.answered();
        program
    }

    /// Has the guest connected to a program. Returns the program's end.
    fn open_program(&mut self, guest_port: u32) -> UnixStream {
        let id = self.ask(guest_port);
        assert_eq!(self.operations(), NONE, "there is no answer yet");
        let program = self.connect_program(id);
        let packets = self.packets();
        let [(response, _)] = packets.as_slice() else {
            panic!("{packets:?}");
        };
        let ports = (response.src_port, response.dst_port);
        assert_eq!(
            (response.op, ports),
            (operation::RESPONSE, (PROGRAM, guest_port))
        );
        assert_eq!(
            (response.buf_alloc, response.fwd_cnt, response.len),
            (WINDOW_BYTES, 0, 0)
        );
        program
    }

    /// What was opened, and refused for want of a program, of room, and of an answer.
    fn requests(&self) -> [u64; 4] {
        let counters = &self.counters;
        [
            &counters.opened_by_guest,
            &counters.refused_requests,
            &counters.refused_requests_full,
            &counters.refused_requests_silent,
        ]
        .map(|counter| counter.load(Relaxed))
    }

    #[track_caller]
    fn assert_nothing_is_left(&self) {
        assert!(self.switch.by_ports.is_empty());
        assert!(self.switch.pending.is_empty());
        let is_free = |slot: &Slot| matches!(slot, Slot::Free);
        assert!(self.switch.slots.iter().all(is_free));
    }
}

#[test]
fn a_guest_gets_the_program_that_listens_for_its_port_and_each_end_closes_its_direction() {
    let epoll = Epoll::new().unwrap();
    let mut rig = Rig::connected(&epoll);
    let mut program = rig.open_program(1000);
    rig.send(of(operation::RW, from(1000)), b"question");
    rig.send(shutdown(SHUTDOWN_SEND, from(1000)), &[]);
    assert_eq!(read(&mut program), b"question");
    assert!(has_ended(&mut program));
    program.write_all(b"answer").unwrap();
    drop(program);
    let packets = rig.packets();
    assert_eq!((packets[0].0.op, packets[0].0.fwd_cnt), (operation::RW, 8));
    assert_eq!(packets[0].1, b"answer");
    let end = packets[1].0;
    let both = SHUTDOWN_SEND | SHUTDOWN_RECEIVE;
    assert_eq!((end.op, end.flags), (operation::SHUTDOWN, both));
    rig.send(of(operation::RST, from(1000)), &[]);
    rig.assert_nothing_is_left();

    // The program first, by the same ports.
    let mut program = rig.open_program(1000);
    program.write_all(b"last").unwrap();
    program.shutdown(Shutdown::Write).unwrap();
    let packets = rig.packets();
    assert_eq!(packets[0].1, b"last");
    let end = packets[1].0;
    assert_eq!((end.op, end.flags), (operation::SHUTDOWN, SHUTDOWN_SEND));
    rig.send(of(operation::RW, from(1000)), b"answer");
    rig.send(shutdown(both, from(1000)), &[]);
    assert_eq!(read(&mut program), b"answer");
    assert!(has_ended(&mut program));
    assert_eq!(rig.operations(), [operation::RST]);
    rig.assert_nothing_is_left();
    assert_eq!(rig.requests(), [2, 0, 0, 0]);
    assert_eq!(rig.violations(), 0);
}

#[test]
fn a_program_that_speaks_and_goes_at_once_is_heard_within_the_credit_of_the_request() {
    let epoll = Epoll::new().unwrap();
    let mut rig = Rig::connected(&epoll);
    rig.send(
        Header {
            buf_alloc: 4,
            ..request(1000)
        },
        &[],
    );
    let (id, _) = rig.programs.asked()[0];
    let mut program = rig.programs.connect(id);
    program.write_all(b"greeting").unwrap();
    drop(program);
    rig.switch.answered();
    rig.poll();
    let packets = rig.packets();
    let operations: Vec<_> = packets.iter().map(|(header, _)| header.op).collect();
    let due = [
        operation::RESPONSE,
        operation::RW,
        operation::CREDIT_REQUEST,
    ];
    assert_eq!(operations, due);
    assert_eq!(packets[1].1, b"gree", "no more than it has credit for");
    let update = Header {
        fwd_cnt: 4,
        ..of(operation::CREDIT_UPDATE, from(1000))
    };
    rig.send(update, &[]);
    let packets = rig.packets();
    assert_eq!(packets[0].1, b"ting");
    assert_eq!(packets[1].0.op, operation::SHUTDOWN);

    // With bytes that it did not read, a program's end is a reset.
    let program = rig.open_program(1001);
    rig.send(of(operation::RW, from(1001)), b"unread");
    drop(program);
    assert_eq!(rig.operations(), [operation::RST]);
}

#[test]
fn a_request_without_a_program_is_reset_and_may_come_again() {
    let epoll = Epoll::new().unwrap();
    let mut rig = Rig::connected(&epoll);
    for round in 1..=3 {
        let id = rig.ask(1000);
        rig.programs.answer(id, None);
        rig.switch.answered();
        let packets = rig.packets();
        let [(reset, _)] = packets.as_slice() else {
            panic!("{packets:?}");
        };
        let ports = (reset.src_port, reset.dst_port);
        assert_eq!((reset.op, ports), (operation::RST, (PROGRAM, 1000)));
        assert_eq!(rig.requests(), [0, round, 0, 0]);
        rig.assert_nothing_is_left();
    }
    drop(rig.open_program(1000));
}

#[test]
fn a_request_that_is_not_answered_in_time_is_reset_and_a_late_answer_is_closed() {
    let epoll = Epoll::new().unwrap();
    let mut rig = Rig::connected(&epoll);
    let slow = rig.ask(1000);
    let until = rig.switch.next_expiry().unwrap();
    rig.switch.expire(until - Duration::from_nanos(1));
    assert_eq!(rig.operations(), NONE, "it has its time");
    rig.switch.expire(until);
    assert_eq!(rig.operations(), [operation::RST]);
    rig.assert_nothing_is_left();
    assert_eq!(rig.requests(), [0, 0, 0, 1]);
    let next = rig.ask(1000);
    let mut late = rig.connect_program(slow);
    assert!(has_ended(&mut late));
    assert_eq!(rig.operations(), NONE, "the next one waits on");
    let _program = rig.connect_program(next);
    assert_eq!(rig.operations(), [operation::RESPONSE]);
}

#[test]
fn requests_of_a_connector_that_is_gone_are_reset() {
    let epoll = Epoll::new().unwrap();
    let mut rig = Rig::connected(&epoll);
    let mut program = rig.open_program(1000);
    let (answered, _) = (rig.ask(1001), rig.ask(1002));
    rig.programs.answer(answered, None);
    rig.programs.go();
    rig.switch.answered();
    assert_eq!(rig.operations(), [operation::RST, operation::RST]);
    rig.send(request(1003), &[]);
    assert_eq!(rig.operations(), [operation::RST]);
    assert_eq!(rig.requests(), [1, 1, 0, 2]);
    // What is open goes on, and the other way too.
    rig.send(of(operation::RW, from(1000)), b"well");
    assert_eq!(read(&mut program), b"well");
    let (mut stream, header) = rig.open();
    rig.send(of(operation::RW, header), b"well");
    assert_eq!(read(&mut stream), b"well");
}

#[test]
fn a_flood_of_requests_is_refused_by_count() {
    let epoll = Epoll::new().unwrap();
    let mut rig = Rig::connected(&epoll);
    let mut resets = 0;
    for guest_port in 0..1000 {
        assert!(rig.switch.can_take());
        rig.send(request(guest_port), &[]);
        resets += rig.operations().len();
    }
    let asked = rig.programs.asked();
    assert_eq!(asked.len(), MAX_REQUESTS);
    assert_eq!(resets, 1000 - MAX_REQUESTS);
    assert_eq!(rig.requests(), [0, 0, resets as u64, 0]);
    // One that is not answered in time is still the connector's to answer: there are no more then.
    rig.switch.expire(Instant::now() + ANSWERED_WITHIN);
    assert_eq!(rig.operations().len(), MAX_REQUESTS);
    rig.assert_nothing_is_left();
    rig.send(request(1), &[]);
    assert_eq!(rig.operations(), [operation::RST]);
    assert_eq!(rig.programs.asked(), []);
    for (id, _) in asked {
        rig.programs.answer(id, None);
    }
    rig.switch.answered();
    assert_eq!(rig.operations(), NONE);
    drop(rig.open_program(1));
}

#[test]
fn connections_of_both_kinds_and_those_that_are_pending_are_bounded_together() {
    let epoll = Epoll::new().unwrap();
    let mut rig = Rig::connected(&epoll);
    let _streams: Vec<_> = (0..100).map(|_| rig.connect("CON")).collect();
    let mut programs = Vec::new();
    for guest_port in 0..150 {
        programs.push(rig.open_program(guest_port));
    }
    let left = (MAX_CONNECTIONS - 250) as u32;
    let pending: Vec<_> = (0..left).map(|port| rig.ask(1000 + port)).collect();
    rig.send(request(2000), &[]);
    assert_eq!(rig.operations(), [operation::RST]);
    assert_eq!(rig.requests(), [150, 0, 1, 0]);
    let mut beyond = rig.connect("");
    assert!(has_ended(&mut beyond), "the host's find no place either");
    // One that is refused makes room.
    rig.programs.answer(pending[0], None);
    rig.switch.answered();
    assert_eq!(rig.operations(), [operation::RST]);
    drop(rig.open_program(2000));
}

#[test]
fn a_second_request_or_anything_else_before_the_answer_is_reset() {
    let epoll = Epoll::new().unwrap();
    let mut rig = Rig::connected(&epoll);
    let both = SHUTDOWN_SEND | SHUTDOWN_RECEIVE;
    let early = [
        request(1000),
        of(operation::RW, from(1000)),
        shutdown(both, from(1000)),
        of(operation::RESPONSE, from(1000)),
        of(99, from(1000)),
    ];
    for (packet, count) in early.into_iter().zip(1..) {
        let id = rig.ask(1000);
        rig.send(packet, b"x");
        assert_eq!(rig.operations(), [operation::RST]);
        assert_eq!(rig.violations(), count);
        rig.assert_nothing_is_left();
        let mut program = rig.connect_program(id);
        assert!(has_ended(&mut program), "its answer comes too late");
        assert_eq!(rig.operations(), NONE);
    }
    // A guest that gives up says so by RST, which is not answered.
    let id = rig.ask(1000);
    rig.send(of(operation::RST, from(1000)), &[]);
    rig.assert_nothing_is_left();
    let mut program = rig.connect_program(id);
    assert!(has_ended(&mut program));
    assert_eq!(rig.operations(), NONE);
    // Between the answer and its packet.
    let id = rig.ask(1000);
    let mut program = rig.connect_program(id);
    rig.send(of(operation::RW, from(1000)), b"x");
    assert_eq!(rig.operations(), [operation::RST]);
    assert!(has_ended(&mut program));
    // On a pair that lives, whoever opened it.
    let mut program = rig.open_program(1000);
    rig.send(request(1000), &[]);
    assert_eq!(rig.operations(), [operation::RST]);
    assert!(has_ended(&mut program));
    let (mut stream, header) = rig.open();
    rig.send(of(operation::REQUEST, header), &[]);
    assert_eq!(rig.operations(), [operation::RST]);
    assert!(has_ended(&mut stream));
    assert_eq!(rig.violations(), 8);
    assert_eq!(rig.programs.asked(), []);
    rig.assert_nothing_is_left();
}

#[test]
fn requests_of_another_type_source_or_destination_reach_no_connector() {
    let epoll = Epoll::new().unwrap();
    let mut rig = Rig::connected(&epoll);
    for (kind, dst_cid) in [(2, HOST_CID), (0, HOST_CID), (STREAM, 3), (STREAM, 1 << 40)] {
        let packet = Header {
            kind,
            dst_cid,
            ..request(1000)
        };
        rig.send(packet, &[]);
        let reset = rig.packets()[0].0;
        assert_eq!((reset.op, reset.src_cid), (operation::RST, dst_cid));
    }
    for src_cid in [HOST_CID, 8, u64::from(CID) | 1 << 32] {
        rig.send(
            Header {
                src_cid,
                ..request(1000)
            },
            &[],
        );
        assert_eq!(rig.operations(), NONE);
    }
    assert_eq!(rig.counters.refused_guest.load(Relaxed), 4);
    assert_eq!(rig.counters.dropped.load(Relaxed), 3);
    assert_eq!(rig.programs.asked(), []);
    // Any port may be asked for, those of the host's own ends too, of which none is taken twice.
    let mut programs = Vec::new();
    for host_port in [0, FIRST_HOST_PORT, u32::MAX] {
        let packet = Header {
            dst_port: host_port,
            ..request(PORT)
        };
        rig.send(packet, &[]);
        let asked = rig.programs.asked();
        assert_eq!(asked[0].1, host_port);
        programs.push(rig.connect_program(asked[0].0));
        assert_eq!(rig.operations(), [operation::RESPONSE]);
    }
    let (_stream, header) = rig.open();
    assert_ne!(header.dst_port, FIRST_HOST_PORT);
}
