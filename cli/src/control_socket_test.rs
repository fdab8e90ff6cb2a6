use std::{io::Read as _, thread};

use super::*;

fn question() -> Request {
    Request::Why(WhyQuestion {
        vm: "a".into(),
        address: [192, 0, 2, 1].into(),
        port: 443,
        protocol: 6,
        name: None,
    })
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
        move || ask(&path, &question()).unwrap()
    });
    let answer = Answer::Why(WhyAnswer {
        admitted: false,
        rule: "--deny 192.0.2.0/24".into(),
        refusal: Some("rule".into()),
        outcome: "refused".into(),
        explanation: String::new(),
        via: None,
        lacks_address: false,
    });
    let Asked {
        client: id,
        request,
        ..
    } = loop {
        if let Some(found) = server.serve().pop() {
            break found;
        }
        thread::sleep(Duration::from_millis(1));
    };
    assert_eq!(request, question());
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
    let capture = Request::Capture {
        what: Target::Vm("a".into()),
        packets: None,
        seconds: Some(1),
    };
    let client = thread::spawn({
        let (path, capture) = (path.clone(), capture.clone());
        move || ask_with(&path, &capture, Some(theirs.as_fd())).unwrap()
    });
    let asked = loop {
        if let Some(found) = server.serve().pop() {
            break found;
        }
        thread::sleep(Duration::from_millis(1));
    };
    assert_eq!(asked.request, capture);
    let mut there = UnixStream::from(asked.descriptor.unwrap());
    server.answer(asked.client, &Answer::Done);
    assert_eq!(client.join().unwrap(), Answer::Done);
    there.write_all(b"x").unwrap();
    drop(there);
    let mut came = Vec::new();
    (&ours).read_to_end(&mut came).unwrap();
    assert_eq!(came, b"x");
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
    let mut line = serde_json::to_vec(&question()).unwrap();
    line.push(b'\n');
    let parts = [IoSlice::new(&line)];
    let flags = MsgFlags::empty();
    sendmsg::<()>(client.as_raw_fd(), &parts, &rights, flags, None).unwrap();
    drop(theirs);
    let asked = server.serve().pop().unwrap();
    assert!(asked.descriptor.is_none());
    assert_eq!(server.clients[0].fds.len(), MAX_WAITING_FDS);
    drop((client, asked));
    server.serve();
    // With the last of them, the other end is at its end.
    let mut came = Vec::new();
    (&ours).read_to_end(&mut came).unwrap();
}

#[test]
fn roles_follow_the_user() {
    assert_eq!(Role::of(0, 1000), Some(Role::Admin));
    assert_eq!(Role::of(1000, 1000), Some(Role::Reader));
    assert_eq!(Role::of(1001, 1000), None);
    assert!(Request::Stop { keep: true }.needs() > Role::Reader);
    for request in [
        Request::Freeze { vm: "a".into() },
        Request::Thaw { vm: "a".into() },
        Request::Cut {
            what: Target::Flow("1-2-3".into()),
        },
    ] {
        assert!(request.needs() > Role::Reader);
    }
    assert!(question().needs() <= Role::Reader);
}

/// However fast it asks, it can't fill the way to who answers.
#[test]
fn a_clients_next_request_waits_for_the_answer() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("0.sock");
    let mut server = ControlServer::bind(&path, 0).unwrap();
    let mut client = UnixStream::connect(&path).unwrap();
    let mut lines = Vec::new();
    for request in [Request::Vms, question(), Request::Machines] {
        lines.extend(serde_json::to_vec(&request).unwrap());
        lines.push(b'\n');
    }
    client.write_all(&lines).unwrap();
    for expected in [Request::Vms, question(), Request::Machines] {
        let [asked] = &server.serve()[..] else {
            panic!("one at a time");
        };
        assert_eq!(asked.request, expected);
        assert!(server.serve().is_empty() && !server.has_waiting());
        server.answer(asked.client, &Answer::Done);
        assert_eq!(server.has_waiting(), expected != Request::Machines);
    }
}
