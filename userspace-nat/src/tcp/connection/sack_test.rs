//! Selective acknowledgements of the guest's, segment by segment.
use slipgate_abi::tcp::Flags;

use super::*;
use crate::tcp::SynOptions;

const ISN: u32 = 40;
const OURS: u32 = u32::MAX - 2_500;
const MSS: u32 = 1_000;

fn syn(sack_permitted: bool) -> Segment {
    Segment {
        sequence: ISN,
        flags: Flags::SYN,
        window: 60_000,
        options: SynOptions {
            mss: Some(MSS as u16),
            sack_permitted,
            ..SynOptions::default()
        },
        ..Segment::default()
    }
}

/// An acknowledgement of `of_ours` bytes, and of blocks behind a gap.
fn acknowledges(of_ours: u32, blocks: &[(u32, u32)]) -> Segment {
    let numbered = |offset: u32| OURS.wrapping_add(1).wrapping_add(offset);
    let mut sack = SackBlocks::default();
    for (first, end) in blocks {
        sack.push((numbered(*first), numbered(*end)));
    }
    Segment {
        sequence: ISN + 1,
        acknowledgement: numbered(of_ours),
        flags: Flags::ACK,
        window: 60_000,
        sack,
        ..Segment::default()
    }
}

fn established(sack_permitted: bool) -> Connection {
    let mut connection = Connection::new(Version::V4, &syn(sack_permitted), OURS);
    let ours = connection.connected(60_000, 0);
    assert_eq!(ours.sack_permitted, sack_permitted);
    connection.receive(&acknowledges(0, &[]), 0);
    connection
}

/// Sends `left` bytes of data at most, as single segments, and returns where each is. What is sent again
/// costs none of them.
fn sends(connection: &mut Connection, mut left: u32, now_ns: u64) -> Vec<u32> {
    let mut sent = Vec::new();
    while let Some(place) = connection.sendable() {
        let is_new = place.offset == connection.sent.wrapping_sub(connection.unacknowledged);
        let most = if is_new { left } else { u32::MAX };
        let len = place.most.min(MSS).min(most);
        if len == 0 {
            break;
        }
        left -= if is_new { len } else { 0 };
        let header = connection.send(len, None, now_ns);
        sent.push(header.sequence.wrapping_sub(OURS).wrapping_sub(1));
    }
    sent
}

/// A guest that keeps what comes behind a gap. Returns how often the timer was needed until it had all
/// of 30 segments, of which the link lost some once.
fn timeouts(sack_permitted: bool, lost: &[u32]) -> u32 {
    let mut connection = established(sack_permitted);
    let mut has = [false; 30];
    let mut timeouts = 0;
    let mut way: Vec<u32> = sends(&mut connection, 30 * MSS, 0);
    way.retain(|at| !lost.contains(&(at / MSS)));
    let mut now_ns = 0;
    let mut sent_again = 0;
    while has.contains(&false) {
        if way.is_empty() {
            now_ns = connection.due_ns().expect("a timer");
            assert_eq!(connection.on_time(now_ns), Due::Resend);
            timeouts += 1;
            way = sends(&mut connection, 0, now_ns);
            continue;
        }
        // All that is under way comes, and each segment is answered.
        for at in std::mem::take(&mut way) {
            has[(at / MSS) as usize] = true;
            let next = has.iter().position(|has| !has).unwrap_or(30) as u32;
            let mut blocks = Vec::new();
            let behind = (next..30).filter(|nth| has[*nth as usize]);
            for nth in behind {
                match blocks.last_mut() {
                    Some((_, end)) if *end == nth * MSS => *end += MSS,
                    _ => blocks.push((nth * MSS, (nth + 1) * MSS)),
                }
            }
            // The newest ones first.
            blocks.reverse();
            blocks.truncate(if sack_permitted { 4 } else { 0 });
            connection.receive(&acknowledges(next * MSS, &blocks), now_ns);
            let again = sends(&mut connection, 0, now_ns);
            sent_again += again.len();
            way.extend(again);
        }
    }
    if sack_permitted {
        assert_eq!(sent_again + timeouts as usize, lost.len(), "each once");
    }
    timeouts
}

#[test]
fn rfc6675_bursts_are_repaired_without_the_timer_and_nothing_else_is_sent_again() {
    for lost in [
        &[3_u32][..],
        &[0, 1, 2, 3, 4],
        &[4, 5, 6, 12, 13, 20],
        &[1, 3, 5, 7, 9, 11, 13, 15, 17, 19],
    ] {
        assert_eq!(timeouts(true, lost), 0, "{lost:?}");
    }
}

#[test]
fn without_it_all_behind_the_first_loss_is_sent_again() {
    let mut connection = established(false);
    sends(&mut connection, 10 * MSS, 0);
    for _ in 0..3 {
        connection.receive(&acknowledges(2 * MSS, &[(3 * MSS, 10 * MSS)]), 0);
        connection.receive(&acknowledges(2 * MSS, &[(3 * MSS, 10 * MSS)]), 0);
    }
    let again = sends(&mut connection, 0, 0);
    assert_eq!(again, (2..10).map(|nth| nth * MSS).collect::<Vec<_>>());
}

#[test]
fn a_gap_that_is_lost_again_is_sent_again_once_later_data_has_come() {
    let mut connection = established(true);
    sends(&mut connection, 10 * MSS, 0);
    connection.receive(&acknowledges(MSS, &[(2 * MSS, 10 * MSS)]), 0);
    assert_eq!(sends(&mut connection, 0, 0), [MSS]);
    // That is lost. New data is sent and comes.
    sends(&mut connection, 5 * MSS, 0);
    connection.receive(&acknowledges(MSS, &[(2 * MSS, 13 * MSS)]), 0);
    assert!(
        sends(&mut connection, 0, 0).is_empty(),
        "it may be reordered"
    );
    connection.receive(&acknowledges(MSS, &[(2 * MSS, 14 * MSS)]), 0);
    assert_eq!(sends(&mut connection, 0, 0), [MSS]);
    connection.receive(&acknowledges(MSS, &[(2 * MSS, 14 * MSS)]), 0);
    assert!(sends(&mut connection, 0, 0).is_empty(), "once");
}

#[test]
fn rfc2018_8_a_guest_that_forgets_gets_all_again_by_the_timer() {
    let mut connection = established(true);
    sends(&mut connection, 10 * MSS, 0);
    connection.receive(&acknowledges(MSS, &[(2 * MSS, 10 * MSS)]), 0);
    assert_eq!(sends(&mut connection, 0, 0), [MSS]);
    let due_ns = connection.due_ns().unwrap();
    assert_eq!(connection.on_time(due_ns), Due::Resend);
    let again = sends(&mut connection, 0, due_ns);
    assert_eq!(again, (1..10).map(|nth| nth * MSS).collect::<Vec<_>>());
}

#[test]
fn what_the_guest_has_is_not_sent_again_after_the_timer() {
    let mut connection = established(true);
    sends(&mut connection, 10 * MSS, 0);
    let due_ns = connection.due_ns().unwrap();
    assert_eq!(connection.on_time(due_ns), Due::Resend);
    connection.receive(&acknowledges(MSS, &[(3 * MSS, 8 * MSS)]), due_ns);
    let again = sends(&mut connection, 0, due_ns);
    assert_eq!(again, [MSS, 2 * MSS, 8 * MSS, 9 * MSS]);
}

#[test]
fn a_fin_behind_gaps_keeps_its_place() {
    let mut connection = established(true);
    sends(&mut connection, 10 * MSS, 0);
    let fin = connection.send_fin(0).unwrap();
    connection.receive(&acknowledges(0, &[(MSS, 10 * MSS + 1)]), 0);
    assert_eq!(sends(&mut connection, 0, 0), [0]);
    let due_ns = connection.due_ns().unwrap();
    assert_eq!(connection.on_time(due_ns), Due::Resend);
    sends(&mut connection, 0, due_ns);
    let again = connection.send_fin(due_ns).map(|fin| fin.sequence);
    assert!(again.is_none_or(|at| at == fin.sequence));
    let received = connection.receive(&acknowledges(10 * MSS + 1, &[]), due_ns);
    assert_eq!(received.acknowledged, 10 * MSS);
    assert_eq!(connection.state(), State::FinWait2);
}
