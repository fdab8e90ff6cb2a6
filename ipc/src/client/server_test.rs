use std::{
    io::{BufRead as _, BufReader, IoSlice, Read as _},
    os::fd::AsRawFd as _,
    thread,
    time::Duration,
};

use nix::sys::socket::{ControlMessage, sendmsg};

use super::*;
use crate::{
    client::{Target, ask},
    descriptors::Outbound,
    engine::{EngineReply, EngineRequest, FlowQuestion, WhyAnswer},
};

fn question<F>() -> ClientRequest<F> {
    ClientRequest::Engine {
        about: Some(Target::Vm("a".into())),
        ask: EngineRequest::Why(FlowQuestion {
            address: [192, 0, 2, 1].into(),
            port: 443,
            protocol: 6,
            name: None,
        }),
    }
}

/// The same without its descriptors, to be compared.
fn wire(request: ClientRequest) -> ClientRequest<Slot> {
    request.take_out(&mut Vec::new())
}

fn line(request: &ClientRequest<Slot>) -> Vec<u8> {
    let mut line = serde_json::to_vec(request).unwrap();
    line.push(b'\n');
    line
}

/// The next request that comes.
fn served(server: &mut ControlServer) -> PermittedRequest {
    loop {
        if let Some(found) = server.serve().pop() {
            return found;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_question_is_answered_on_its_own_connection() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("0.sock");
    let mut server = ControlServer::bind(&path, 0).unwrap();
    assert_eq!(
        fs::metadata(&path).unwrap().permissions().mode() & 0o777,
        0o600
    );
    let client = thread::spawn({
        let path = path.clone();
        move || ask(&path, question()).unwrap()
    });
    let reply = EngineReply::Why(WhyAnswer {
        admitted: false,
        rule: "--deny 192.0.2.0/24".into(),
        refusal: Some("rule".into()),
        outcome: "refused".into(),
        explanation: String::new(),
        via: None,
        lacks_address: false,
    });
    let answer = ClientAnswer::from(reply);
    let PermittedRequest {
        client: id,
        request,
    } = served(&mut server);
    assert_eq!(wire(request), question());
    server.answer(id, &answer);
    assert_eq!(client.join().unwrap(), answer);
    drop(server);
    assert!(!path.exists());
}

#[test]
fn what_a_predecessor_left_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("0.sock");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    ControlServer::bind(&path, 0).unwrap();
}

#[test]
fn nonsense_is_answered_and_floods_are_cut() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("0.sock");
    let mut server = ControlServer::bind(&path, 0).unwrap();
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(b"nonsense\n").unwrap();
    assert!(server.serve().is_empty());
    let mut answer = String::new();
    BufReader::new(client.try_clone().unwrap())
        .read_line(&mut answer)
        .unwrap();
    assert!(answer.contains("not a request"), "{answer}");

    client.write_all(&[b'x'; MAX_REQUEST + 1]).unwrap();
    server.serve();
    assert_eq!(server.clients.len(), 0);
}

#[test]
fn a_descriptor_comes_with_the_request_that_wants_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("0.sock");
    let mut server = ControlServer::bind(&path, u32::MAX).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let client = thread::spawn({
        let path = path.clone();
        move || {
            let capture = ClientRequest::Engine {
                about: Some(Target::Vm("a".into())),
                ask: EngineRequest::Capture {
                    to: theirs.as_fd(),
                    packets: None,
                    seconds: Some(1),
                },
            };
            ask(&path, capture).unwrap()
        }
    });
    let asked = served(&mut server);
    let ClientRequest::Engine {
        about: Some(Target::Vm(vm)),
        ask:
            EngineRequest::Capture {
                to,
                packets: None,
                seconds: Some(1),
            },
    } = asked.request
    else {
        panic!("{:?}", asked.request);
    };
    assert_eq!(vm, "a");
    let mut there = UnixStream::from(to);
    server.answer(asked.client, &ClientAnswer::Done);
    assert_eq!(client.join().unwrap(), ClientAnswer::Done);
    there.write_all(b"x").unwrap();
    drop(there);
    let mut came = Vec::new();
    (&ours).read_to_end(&mut came).unwrap();
    assert_eq!(came, b"x");
}

#[test]
fn a_request_without_its_descriptor_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("0.sock");
    let mut server = ControlServer::bind(&path, u32::MAX).unwrap();
    let mut client = UnixStream::connect(&path).unwrap();
    let open = ClientRequest::Open {
        vm: "a".into(),
        lifeline: Slot,
    };
    client.write_all(&line(&open)).unwrap();
    assert!(server.serve().is_empty());
    let mut answer = String::new();
    BufReader::new(client).read_line(&mut answer).unwrap();
    assert!(answer.contains("no descriptor came with it"), "{answer}");
}

#[test]
fn descriptors_that_nobody_wants_are_closed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("0.sock");
    let mut server = ControlServer::bind(&path, u32::MAX).unwrap();
    let client = UnixStream::connect(&path).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let raw = [theirs.as_raw_fd(); MAX_FDS_AT_ONCE];
    let rights = [ControlMessage::ScmRights(&raw)];
    let line = line(&question());
    let parts = [IoSlice::new(&line)];
    let flags = MsgFlags::empty();
    sendmsg::<()>(client.as_raw_fd(), &parts, &rights, flags, None).unwrap();
    drop(theirs);
    let asked = server.serve().pop().unwrap();
    assert_eq!(server.clients[0].fds.len(), MAX_WAITING_FDS);
    drop((client, asked));
    server.serve();
    // With the last of them, the other end is at its end.
    let mut came = Vec::new();
    (&ours).read_to_end(&mut came).unwrap();
}

#[test]
fn roles_follow_the_user() {
    assert_eq!(Role::of(0, 1000, Role::Reader), Some(Role::Admin));
    assert_eq!(Role::of(1000, 1000, Role::Reader), Some(Role::Reader));
    assert_eq!(Role::of(1000, 1000, Role::Admin), Some(Role::Admin));
    assert_eq!(Role::of(1001, 1000, Role::Admin), None);
    let needs = |request: ClientRequest<Slot>| request.needs();
    assert!(needs(ClientRequest::Stop { keep: true }) > Role::Reader);
    assert!(needs(ClientRequest::Freeze { vm: "a".into() }) > Role::Reader);
    for ask in [EngineRequest::Thaw, EngineRequest::Cut] {
        let about = Some(Target::Flow("1-2-3".into()));
        assert!(needs(ClientRequest::Engine { about, ask }) > Role::Reader);
    }
    assert!(needs(question()) <= Role::Reader);
}

/// However fast it asks, it can't fill the way to who answers.
#[test]
fn a_clients_next_request_waits_for_the_answer() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("0.sock");
    let mut server = ControlServer::bind(&path, 0).unwrap();
    let mut client = UnixStream::connect(&path).unwrap();
    let requests = || [ClientRequest::Vms, question(), ClientRequest::Machines];
    let lines: Vec<u8> = requests().iter().flat_map(line).collect();
    client.write_all(&lines).unwrap();
    for expected in requests() {
        let [asked] = <[PermittedRequest; 1]>::try_from(server.serve()).expect("one at a time");
        assert_eq!(wire(asked.request), expected);
        assert!(server.serve().is_empty() && !server.has_waiting());
        server.answer(asked.client, &ClientAnswer::Done);
        assert_eq!(server.has_waiting(), expected != ClientRequest::Machines);
    }
}

/// As when many machines are started at once.
#[test]
fn more_clients_than_are_served_at_once_wait_for_their_turn() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("0.sock");
    let mut server = ControlServer::bind(&path, 0).unwrap();
    let clients: Vec<_> = (0..3 * MAX_CLIENTS)
        .map(|_| {
            let path = path.clone();
            thread::spawn(move || ask(&path, question()).unwrap())
        })
        .collect();
    // None is answered before no more are taken.
    let mut asked = Vec::new();
    while asked.len() < MAX_CLIENTS {
        asked.extend(server.serve());
    }
    assert_eq!(
        server.fds().count(),
        MAX_CLIENTS,
        "the listener is left alone"
    );
    assert!(server.serve().is_empty());
    let mut answered = 0;
    while answered < clients.len() {
        for request in asked.drain(..) {
            server.answer(request.client, &ClientAnswer::error("no"));
            answered += 1;
        }
        asked = server.serve();
    }
    for client in clients {
        assert!(matches!(client.join().unwrap(), ClientAnswer::Error { .. }));
    }
}
