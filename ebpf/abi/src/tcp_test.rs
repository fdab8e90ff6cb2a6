use super::*;
use Direction::{Rx, Tx};

fn walk(segments: &[(Direction, u8)]) -> TcpBits {
    segments
        .iter()
        .fold(TcpBits::default(), |bits, &(direction, flags)| {
            let (add, clear) = bits.observe(direction, flags);
            TcpBits((bits.0 & !clear.0) | add.0)
        })
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

#[test]
fn close_by_either_side_ends_closed() {
    let guest_first = walk(&[(Tx, S), (Rx, SA), (Tx, FA), (Rx, FA), (Tx, A)]);
    assert_eq!(guest_first.phase(), Phase::Closed);
    assert_eq!(guest_first.0 & TcpBits::PEER_CLOSED_FIRST, 0);
    let peer_first = walk(&[(Tx, S), (Rx, SA), (Rx, FA), (Tx, A), (Tx, FA), (Rx, A)]);
    assert_eq!(peer_first.phase(), Phase::Closed);
    assert_ne!(peer_first.0 & TcpBits::PEER_CLOSED_FIRST, 0);
    // The second closer's own segments do not stand for the first closer's last ACK.
    assert_eq!(
        walk(&[(Tx, S), (Rx, SA), (Tx, FA), (Rx, FA), (Rx, A)]).phase(),
        Phase::Closing
    );
}

#[test]
fn rfc7857_a_segment_after_reset_revives() {
    assert_eq!(walk(&[(Tx, S), (Rx, SA), (Rx, R)]).phase(), Phase::Reset);
    assert_eq!(
        walk(&[(Tx, S), (Rx, SA), (Rx, R), (Tx, A)]).phase(),
        Phase::Established
    );
}
