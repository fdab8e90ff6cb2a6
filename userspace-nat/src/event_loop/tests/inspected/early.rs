//! A server's answer before it has all of a request.
use slipgate_abi::tcp::Flags;

use super::scene::*;
use crate::{clock::SECOND_NS, inspection::Refused};

const HEAD: &[u8] = b"POST /slow HTTP/1.1\r\nHost: api.ok.test\r\nContent-Length: 60\r\n\r\n";
const EVIL: &[u8] = b"GET / HTTP/1.1\r\nHost: evil.test\r\nContent-Length: 7\r\n\r\n";
const ANSWER: &[u8] = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n";

/// A connection on which this much of a request was sent and taken.
fn begun(request: &[u8]) -> Scene {
    let mut scene = Scene::new();
    scene.guest(0, request, 0);
    scene.settle();
    assert_eq!(scene.received(), request);
    scene
}

#[test]
fn content_behind_an_answer_goes_nowhere() {
    for sent in [&b""[..], b"ten octets"] {
        let request = [HEAD, sent].concat();
        let mut scene = begun(&request);
        // The server tires of waiting, answers, and reads on.
        scene.server(ANSWER, 0);
        scene.settle();
        assert_eq!(scene.heard, ANSWER, "the answer is the guest's");
        assert_eq!(scene.guest_reset, None);
        scene.guest(request.len(), EVIL, 0);
        scene.assert_refused(Refused::Early);
        assert_eq!(scene.received(), request);
    }
}

#[test]
fn content_that_waits_for_a_window_is_kept_back() {
    let mut scene = Scene::new();
    // Room for the head, and no more.
    scene.server_window = 0;
    scene.guest(0, HEAD, 0);
    scene.settle();
    scene.guest(HEAD.len(), &[b"a=", EVIL].concat(), 0);
    scene.settle();
    assert_eq!(scene.received(), HEAD);
    scene.server(ANSWER, 0);
    scene.settle();
    assert_eq!(scene.heard, ANSWER);
    scene.rig.pass(20 * SECOND_NS);
    scene.settle();
    assert_eq!(scene.received(), HEAD);
}

#[test]
fn an_end_behind_an_answer_is_one() {
    let mut scene = begun(&[HEAD, b"ten octets"].concat());
    scene.server(ANSWER, 0);
    scene.settle();
    scene.guest(HEAD.len() + 10, b"", Flags::FIN);
    scene.settle();
    assert_eq!(scene.guest_reset, None);
    assert!(scene.server_fin);
}

#[test]
fn interim_answers_are_none() {
    let mut scene = begun(HEAD);
    let interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n";
    for octet in interim {
        scene.server(&[*octet], 0);
        scene.settle();
    }
    scene.guest(HEAD.len(), &[b'x'; 60], 0);
    scene.settle();
    assert_eq!(scene.received().len(), HEAD.len() + 60);
    scene.server(ANSWER, 0);
    scene.settle();
    // Behind the whole request another one may follow.
    let next = [HEAD, &[b'y'; 60], HEAD].concat();
    scene.guest(HEAD.len() + 60, &next, 0);
    scene.settle();
    assert_eq!(scene.received().len(), HEAD.len() + 60 + next.len());
    // Whose answer is early again, behind an interim one in the same segment.
    scene.server(&[&interim[..], ANSWER].concat(), 0);
    scene.settle();
    scene.guest(HEAD.len() + 60 + next.len(), b"more", 0);
    scene.assert_refused(Refused::Early);
}

#[test]
fn what_is_lost_before_an_answer_does_not_hide_it() {
    let mut scene = begun(HEAD);
    // The guest may have got what the engine never sees.
    scene.server_next += 1;
    scene.server(&ANSWER[1..], 0);
    scene.settle();
    scene.guest(HEAD.len(), EVIL, 0);
    scene.settle();
    assert_eq!(scene.received(), HEAD);
    assert!(scene.server_reset);
}

#[test]
fn requests_without_content_may_be_sent_ahead() {
    let get = b"GET / HTTP/1.1\r\nHost: api.ok.test\r\n\r\n";
    let mut scene = begun(&get.repeat(2));
    for _ in 0..2 {
        scene.server(ANSWER, 0);
    }
    scene.guest(2 * get.len(), get, 0);
    scene.settle();
    assert_eq!(scene.received(), get.repeat(3));
    assert_eq!(scene.guest_reset, None);
}

#[test]
fn content_that_begins_as_a_request_does_is_refused() {
    for before in [&b""[..], b"\r\n"] {
        let mut scene = begun(HEAD);
        scene.guest(HEAD.len(), &[before, EVIL].concat(), 0);
        scene.assert_refused(Refused::Malformed);
        // As far as it says nothing.
        let line = scene.received().len() - HEAD.len();
        assert!(line < before.len() + b"GET / HTTP/1.1\r\n".len());
    }
}
