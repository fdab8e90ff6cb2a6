use super::*;
use Direction::{Rx, Tx};

/// Bits that a conversation leaves: direction, flags, sequence number, payload, acknowledgement.
fn talk(segments: &[(Direction, u8, u32, u32, u32)]) -> TcpBits {
    let mut bits = TcpBits::default();
    let mut ends = [0; 2];
    for &(direction, flags, sequence, payload_len, acknowledgement) in segments {
        let segment = Segment::new(flags, sequence, payload_len, acknowledgement, 0);
        let (add, clear) = bits.observe(direction, &segment, ends[direction.other() as usize]);
        if flags & Flags::FIN != 0 {
            ends[direction as usize] = segment.end;
        }
        bits = TcpBits((bits.0 & !clear.0) | add.0);
    }
    bits
}

fn walk(segments: &[(Direction, u8)]) -> TcpBits {
    let segments = segments
        .iter()
        .map(|&(direction, flags)| (direction, flags, 1, 0, 1));
    let mut all = [(Tx, 0, 0, 0, 0); 8];
    let mut count = 0;
    for (place, segment) in all.iter_mut().zip(segments) {
        *place = segment;
        count += 1;
    }
    talk(&all[..count])
}

const S: u8 = Flags::SYN;
const SA: u8 = Flags::SYN | Flags::ACK;
const A: u8 = Flags::ACK;
const FA: u8 = Flags::FIN | Flags::ACK;
const R: u8 = Flags::RST;

#[test]
fn handshake_establishes() {
    assert_eq!(walk(&[(Tx, S)]).phase(), Phase::Opening);
    assert_eq!(walk(&[(Tx, S), (Tx, S), (Tx, A)]).phase(), Phase::Opening);
    assert_eq!(walk(&[(Tx, S), (Rx, SA)]).phase(), Phase::Established);
    // RFC 5382 REQ-2: simultaneous open, and an inbound opener.
    assert_eq!(walk(&[(Tx, S), (Rx, S)]).phase(), Phase::Established);
    assert_eq!(walk(&[(Rx, S), (Tx, SA)]).phase(), Phase::Established);
}

#[test]
fn half_close_stays_established() {
    assert_eq!(
        walk(&[(Tx, S), (Rx, SA), (Tx, FA), (Rx, A), (Rx, A), (Tx, A)]).phase(),
        Phase::Established
    );
}

const G: u32 = 0xffff_fff0;
const P: u32 = 5_000;

#[test]
fn close_by_either_side_ends_closed_with_the_last_acknowledgement() {
    let guest_first = [
        (Tx, FA, G, 100, P),
        (Rx, A, P, 0, G.wrapping_add(101)),
        (Rx, FA, P, 10, G.wrapping_add(101)),
        (Tx, A, G.wrapping_add(101), 0, P + 11),
    ];
    assert_eq!(talk(&guest_first[..3]).phase(), Phase::Closing);
    let bits = talk(&guest_first);
    assert_eq!(bits.phase(), Phase::Closed);
    assert_eq!(bits.0 & TcpBits::PEER_TIME_WAIT, 0);
    let peer_first = [
        (Rx, FA, P, 10, G),
        (Tx, FA, G, 100, P + 11),
        (Rx, A, P + 11, 0, G.wrapping_add(101)),
    ];
    assert_eq!(talk(&peer_first[..2]).phase(), Phase::Closing);
    let bits = talk(&peer_first);
    assert_eq!(bits.phase(), Phase::Closed);
    assert_ne!(bits.0 & TcpBits::PEER_TIME_WAIT, 0);
}

#[test]
fn a_duplicate_acknowledgement_behind_both_fins_is_not_the_last() {
    let both = [(Tx, FA, G, 100, P), (Rx, FA, P, 1_000, G.wrapping_add(101))];
    for ack in [P, P + 500, P + 1_000, P + 1_002, G.wrapping_add(101)] {
        let lost = [both[0], both[1], (Tx, A, G.wrapping_add(101), 0, ack)];
        assert_eq!(talk(&lost).phase(), Phase::Closing, "{ack}");
    }
    // Sent again, with what was lost before it in front.
    let again = [
        both[0],
        both[1],
        (Tx, A, G.wrapping_add(101), 0, P),
        (Rx, FA, P, 1_000, G.wrapping_add(101)),
        (Tx, A, G.wrapping_add(101), 0, P + 1_001),
    ];
    assert_eq!(talk(&again).phase(), Phase::Closed);
}

#[test]
fn both_close_at_once() {
    let crossing = [
        (Tx, FA, G, 0, P),
        (Rx, FA, P, 0, G),
        (Tx, A, G.wrapping_add(1), 0, P + 1),
        (Rx, A, P + 1, 0, G.wrapping_add(1)),
    ];
    // The guest's FIN may still be lost behind us.
    assert_eq!(talk(&crossing[..3]).phase(), Phase::Closing);
    let bits = talk(&crossing);
    assert_eq!(bits.phase(), Phase::Closed);
    // Both have TIME-WAIT.
    assert_ne!(bits.0 & TcpBits::PEER_TIME_WAIT, 0);
}

#[test]
fn an_acknowledgement_without_its_flag_is_none() {
    let segments = [
        (Tx, FA, G, 0, P),
        (Rx, Flags::FIN, P, 0, G.wrapping_add(1)),
        (Rx, 0, P, 0, G.wrapping_add(1)),
        (Tx, A, G.wrapping_add(1), 0, P + 1),
    ];
    assert_eq!(talk(&segments).phase(), Phase::Closing);
}

#[test]
fn only_the_ends_of_a_connection_concern_it() {
    let established = walk(&[(Tx, S), (Rx, SA)]);
    assert!(!established.is_concerned_by(A));
    assert!(!established.is_concerned_by(A | 0x08));
    assert!(
        [S, SA, FA, R]
            .iter()
            .all(|flags| established.is_concerned_by(*flags))
    );
    assert!(walk(&[(Tx, S), (Rx, SA), (Tx, FA)]).is_concerned_by(A));
    assert!(walk(&[(Tx, S), (Rx, SA), (Rx, R)]).is_concerned_by(A));
    assert!(TcpBits(established.0 | TcpBits::QUIET).is_concerned_by(A));
}

#[test]
fn rfc7857_a_segment_after_reset_revives() {
    assert_eq!(walk(&[(Tx, S), (Rx, SA), (Rx, R)]).phase(), Phase::Reset);
    assert_eq!(
        walk(&[(Tx, S), (Rx, SA), (Rx, R), (Tx, A)]).phase(),
        Phase::Established
    );
}
