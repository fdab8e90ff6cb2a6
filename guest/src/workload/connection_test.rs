use super::*;

const MS: u64 = 1_000_000;

/// A connection that was opened at 0, and is looked at at these times.
fn looked_at(times: &[u64]) -> Connection {
    let mut connection = Connection {
        handle: SocketHandle::default(),
        port: 49_152,
        opened_ns: 0,
        moved_ns: 0,
        looked_ns: 0,
        looked_before_ns: 0,
        moved_after_ns: 0,
        open: false,
        unreachable: false,
    };
    times.iter().for_each(|now_ns| connection.look(*now_ns));
    connection
}

#[test]
fn a_connection_that_times_out_by_a_packet_that_was_noticed_late_is_not_reset() {
    let mut connection = looked_at(&[MS, 9 * MS]);
    // The answer came after 1 ms.
    (connection.open, connection.moved_ns) = (true, 9 * MS);
    for now_ns in [10 * MS, 5_000 * MS, MS + STALL_NS] {
        connection.look(now_ns);
    }
    assert_eq!(connection.why_closed(MS + STALL_NS), Failure::TimedOut);
}

#[test]
fn a_connection_that_ends_before_its_time_is_reset_or_refused() {
    let mut connection = looked_at(&[MS, STALL_NS - 2 * MS, STALL_NS - MS]);
    assert_eq!(connection.why_closed(STALL_NS - MS), Failure::Refused);
    (connection.open, connection.moved_ns) = (true, STALL_NS - MS);
    connection.look(STALL_NS);
    connection.look(STALL_NS + MS);
    assert_eq!(connection.why_closed(STALL_NS + MS), Failure::Reset);
}
