//! The clients' data of inspected connections. Each input is processed whole and in two pieces; the
//! cut must not change the result.
use slipgate_policy::Http;
use userspace_nat::{
    fake::{hellos, initials},
    inspection::{
        Refused,
        protocol_sniffer::{ProtocolSniffer, Step},
        quic::{Allowance, Effort, Flow, Version},
        reassembly::{MAX_LEN, Reassembly},
        tls,
    },
};

use crate::tape::Tape;

/// Completion of an input, one bit each.
pub(crate) mod dressed {
    /// The input is put into a handshake message, in records of a given length.
    pub(crate) const IN_RECORDS: u8 = 1;
    /// The server requests another hello.
    pub(crate) const RETRY: u8 = 2;
    /// Only the first request must comply with the rules.
    pub(crate) const FIRST: u8 = 4;
}

/// TLS data of a client. Input: `dress (1) | record length (1) | cut (2) | stream`.
pub fn tls(input: &[u8]) {
    let mut tape = Tape::new(input);
    let (dress, each, cut) = (tape.u8(), tape.u8(), tape.u16());
    let mut stream = tape.rest().to_vec();
    if dress & dressed::IN_RECORDS != 0 {
        let message = hellos::handshake(1, &stream);
        stream = hellos::records(&message, usize::from(each).max(1));
    }
    if let Ok(Some(hello)) = tls::client_hello(&stream) {
        assert!(hello.len <= stream.len() && hello.len >= 9);
        assert_eq!(
            tls::client_hello(&stream[..hello.len]),
            Ok(Some(hello.clone()))
        );
        for len in [hello.len - 1, hello.len / 2] {
            assert_eq!(tls::client_hello(&stream[..len]), Ok(None));
        }
    }
    for again in [false, true] {
        let _ = tls::server_answer(&stream, again);
    }
    let retry = dress & dressed::RETRY != 0;
    same_in_pieces(&stream, cut.into(), Http::Each, retry);
}

/// HTTP data of a client. Input: `dress (1) | cut (2) | stream`.
pub fn http(input: &[u8]) {
    let mut tape = Tape::new(input);
    let (dress, cut) = (tape.u8(), tape.u16());
    let mode = match dress & dressed::FIRST {
        0 => Http::Each,
        _ => Http::First,
    };
    same_in_pieces(tape.rest(), cut.into(), mode, false);
}

/// Result for a stream: the names, the number of bytes sent on, and the reason of its end.
type Followed = (Vec<String>, usize, Option<Refused>);

fn follow(sniffer: &mut ProtocolSniffer, stream: &[u8], retry: bool, so_far: &mut Followed) {
    let (names, at, refused) = so_far;
    while refused.is_none() {
        match sniffer.next(&stream[*at..]) {
            Ok(Step::Named(name, len)) => {
                assert!(len > 0);
                names.push(name.name().without_dot());
                *at += len;
            }
            Ok(Step::Pass(len)) => {
                assert!(len > 0);
                *at += len;
            }
            Ok(Step::Held) => {
                assert_eq!(
                    sniffer.server_answered(&hellos::server_hello(retry)),
                    Ok(true)
                );
                if stream[*at..].is_empty() {
                    return;
                }
            }
            Ok(Step::More) => return,
            Ok(Step::Rest) => {
                *at = stream.len();
                return;
            }
            Err(why) => *refused = Some(why),
        }
        assert!(*at <= stream.len());
    }
}

fn same_in_pieces(stream: &[u8], cut: usize, mode: Http, retry: bool) {
    let mut whole = Followed::default();
    follow(&mut ProtocolSniffer::new(mode), stream, retry, &mut whole);
    let (mut sniffer, mut pieces) = (ProtocolSniffer::new(mode), Followed::default());
    let begin = &stream[..cut.min(stream.len())];
    follow(&mut sniffer, begin, retry, &mut pieces);
    if pieces.2.is_none() {
        follow(&mut sniffer, stream, retry, &mut pieces);
        assert_eq!((&whole.0, whole.1), (&pieces.0, pieces.1));
        assert_eq!(whole.2.is_some(), pieces.2.is_some());
    } else {
        // What a part of it is refused for, all of it is.
        assert!(whole.2.is_some());
    }
}

/// Datagrams of a client. Input: any number of `how (1) | length (2) | bytes`: `how` 0 is a
/// datagram, 255 one of the server's; other values are the frames of an Initial of the connection
/// with this number.
pub fn quic(input: &[u8]) {
    let mut tape = Tape::new(input);
    let mut flow = Flow::default();
    let mut number = 0;
    while !tape.is_at_end() {
        let (how, bytes) = (tape.u8(), tape.bytes());
        let version = if how & 0x80 == 0 {
            Version::One
        } else {
            Version::Two
        };
        if how == 255 {
            let mut allowance = Allowance::default();
            flow.server_datagram(bytes, &mut Effort::new(&mut allowance, 0));
            continue;
        }
        let id = [how & 0x7f; 8];
        let sealed = initials::initial(version, &id, &id, number, bytes);
        let datagram = if how == 0 { bytes } else { &sealed };
        number += 1;
        let mut evil = false;
        let mut allowance = Allowance::default();
        let effort = &mut Effort::new(&mut allowance, 0);
        let passage = flow.datagram(datagram, effort, &mut |name| {
            evil |= name.name().without_dot() == "evil.test";
            !evil
        });
        assert!(!evil || passage == Err(Refused::Name));
        if passage.is_err() {
            return;
        }
    }
}

/// Compares the reassembly with the simplest model. Input: `first (4)`, then any number of `place
/// (2) | length (2) | bytes`.
pub fn reassembly(input: &[u8]) {
    let mut tape = Tape::new(input);
    let begin = u32::from_be_bytes(tape.array());
    let mut stream = Reassembly::new(begin);
    let mut model: Vec<Option<u8>> = vec![None; MAX_LEN + 65_536 + 4_096];
    let mut released = 0;
    while !tape.is_at_end() {
        let (at, bytes) = (usize::from(tape.u16()), tape.bytes());
        if bytes.is_empty() {
            let len = at.min(stream.whole().len());
            stream.release(len);
            released += len;
        } else if stream.insert(begin.wrapping_add(at as u32), bytes, false) {
            for (place, byte) in model[at..].iter_mut().zip(bytes) {
                place.get_or_insert(*byte);
            }
        } else {
            // As much as fits, or none of it.
            return;
        }
        let whole: Vec<u8> = model[released..].iter().map_while(|byte| *byte).collect();
        assert_eq!(stream.whole(), whole);
        assert!(stream.held() <= MAX_LEN + 4_096);
    }
}
