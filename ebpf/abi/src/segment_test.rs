use super::*;

const UDP: u8 = Protocol::Udp as u8;
const TCP: u8 = Protocol::Tcp as u8;

#[test]
fn a_packet_is_sent_in_so_many_fragments() {
    for (len, mtu, expected) in [
        (1_500, 1_500, 1),
        (1_501, 1_500, 2),
        // 1,480 bytes of data each.
        (20 + 2 * 1_480, 1_500, 2),
        (20 + 2 * 1_480 + 1, 1_500, 3),
        (65_535, 1_500, 45),
        // 1,376: a multiple of eight.
        (20 + 1_377, 1_397, 1),
        (20 + 1_378, 1_397, 2),
        (20 + 1_376 * 2, 1_397, 2),
        (60, 0, 5),
        (0, 0, 1),
    ] {
        assert_eq!(fragments(len, mtu), expected, "{len} {mtu}");
    }
}

#[test]
fn a_frame_of_ipv6_is_never_fragmented_on_its_way() {
    for (len, protocol, gso_size, expected) in [
        (9_000, UDP, 0, 1),
        (60_000, TCP, 1_400, 1),
        (48 + 10 * 1_200, UDP, 1_200, 10),
        (48 + 10 * 1_200 + 1, UDP, 1_200, 11),
    ] {
        let taken = credits6(len, protocol, gso_size);
        assert_eq!(taken, expected, "{len} {protocol} {gso_size}");
    }
}

#[test]
fn a_frame_takes_credits_for_what_it_may_become() {
    for (len, protocol, gso_size, expected) in [
        (28, 0, 0, 1),
        (1_500, UDP, 0, 1),
        (9_000, UDP, 0, 7),
        (60_000, TCP, 0, 41),
        // Whole on the port, and on its way.
        (60_000, TCP, 1_400, 1),
        (28 + 10 * 1_200, UDP, 1_200, 10),
    ] {
        let taken = credits(len, protocol, gso_size);
        assert_eq!(taken, expected, "{len} {protocol} {gso_size}");
    }
}
