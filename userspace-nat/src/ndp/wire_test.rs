use proptest::prelude::*;

use super::*;

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 15];

fn ip(text: &str) -> Ipv6Addr {
    text.parse().unwrap()
}

/// A message with its checksum; `rest`: what follows type, code and checksum.
pub(crate) fn message(source: &str, to: &str, kind: u8, rest: &[u8]) -> Vec<u8> {
    let mut icmp = vec![kind, 0, 0, 0];
    icmp.extend(rest);
    finish(ip(source), ip(to), icmp)
}

/// The body of a solicitation for an address, with the sender's MAC.
pub(crate) fn solicitation(target: &str, mac: Option<[u8; 6]>) -> Vec<u8> {
    let mut rest = vec![0; 4];
    rest.extend(ip(target).octets());
    if let Some(mac) = mac {
        rest.extend([option::SOURCE_MAC, 1]);
        rest.extend(mac);
    }
    rest
}

fn change(mut packet: Vec<u8>, at: usize, byte: u8) -> Vec<u8> {
    packet[at] = byte;
    packet
}

#[test]
fn messages_are_read() {
    let read = |packet: &[u8]| parse(packet).map(|ndp| ndp.message);
    let solicits = message("fe80::5", "ff02::2", kind::ROUTER_SOLICITATION, &[0; 4]);
    let expected = Message::RouterSolicitation { mac: None };
    assert_eq!(read(&solicits), Ok(expected));
    let rest = solicitation("fd00::1", Some(MAC));
    let asks = message(
        "fe80::5",
        "ff02::1:ff00:1",
        kind::NEIGHBOUR_SOLICITATION,
        &rest,
    );
    let found = parse(&asks).unwrap();
    let target = ip("fd00::1");
    let mac = Some(MAC);
    assert_eq!(
        found.message,
        Message::NeighbourSolicitation { target, mac }
    );
    assert_eq!(
        (found.source, found.destination),
        (ip("fe80::5"), ip("ff02::1:ff00:1"))
    );
    // Bytes after the packet's end are padding of the frame.
    let padded = [asks.as_slice(), &[0; 9]].concat();
    assert_eq!(parse(&padded), parse(&asks));
    let answer = Answer {
        target,
        mac: MAC,
        to: ip("fe80::5"),
        is_solicited: true,
        overrides: true,
    };
    let answer = neighbour_advertisement(answer);
    assert_eq!(
        read(&answer),
        Ok(Message::NeighbourAdvertisement { target })
    );
    let router = message("fe80::5", "ff02::1", kind::ROUTER_ADVERTISEMENT, &[0; 12]);
    assert_eq!(read(&router), Ok(Message::RouterAdvertisement));
    let redirect = message("fe80::5", "fe80::6", kind::REDIRECT, &[0; 36]);
    assert_eq!(read(&redirect), Ok(Message::Redirect));
    let echo = message("fe80::5", "ff02::1", 128, &[0; 4]);
    assert_eq!(read(&echo), Ok(Message::Other));
    // A listener report, with the router alert option before it (RFC 3810 section 5).
    let mut report = header(ip("::"), ip("ff02::16"), HOP_BY_HOP, 8 + 8, 1);
    report.extend([ICMPV6, 0, 5, 2, 0, 0, 1, 0, 143, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(read(&report), Ok(Message::Listeners));
}

/// RFC 4861 sections 6.1.1, 7.1.1 and 7.1.2, check by check.
#[test]
fn rfc4861_invalid_messages_are_malformed() {
    let ns = |source: &str, to: &str, rest: &[u8]| {
        message(source, to, kind::NEIGHBOUR_SOLICITATION, rest)
    };
    let good = ns(
        "fe80::5",
        "ff02::1:ff00:1",
        &solicitation("fd00::1", Some(MAC)),
    );
    assert!(parse(&good).is_ok());
    let icmp = HEADER_LEN;
    let with_option = |option: &[u8]| {
        let mut rest = solicitation("fd00::1", None);
        rest.extend(option);
        ns("fe80::5", "ff02::1:ff00:1", &rest)
    };
    let na = |to: &str, flags: u8| {
        let rest = change(solicitation("fd00::1", None), 0, flags);
        message("fe80::5", to, kind::NEIGHBOUR_ADVERTISEMENT, &rest)
    };
    assert!(parse(&na("ff02::1", 0)).is_ok());
    let cases = [
        ("another link's", change(good.clone(), 7, 254)),
        (
            "checksum",
            change(good.clone(), icmp + 3, good[icmp + 3] ^ 1),
        ),
        ("code", ns_with_code(1)),
        ("short", good[..icmp + 8].to_vec()),
        (
            "too short a message",
            message(
                "fe80::5",
                "ff02::1:ff00:1",
                kind::NEIGHBOUR_SOLICITATION,
                &[0; 16],
            ),
        ),
        (
            "group as target",
            ns("fe80::5", "ff02::1:ff00:1", &solicitation("ff02::1", None)),
        ),
        (
            "option without length",
            with_option(&[1, 0, 0, 0, 0, 0, 0, 0]),
        ),
        (
            "option beyond the end",
            with_option(&[1, 2, 0, 0, 0, 0, 0, 0]),
        ),
        ("rest that is no option", with_option(&[1])),
        (
            "MAC of another length",
            with_option(&[1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        ),
        (
            "probe to no solicited-node group",
            ns("::", "ff02::1", &solicitation("fe80::5", None)),
        ),
        (
            "probe with a MAC",
            ns("::", "ff02::1:ff00:5", &solicitation("fe80::5", Some(MAC))),
        ),
        (
            "router solicitation of nobody with a MAC",
            message(
                "::",
                "ff02::2",
                kind::ROUTER_SOLICITATION,
                &[0, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 9],
            ),
        ),
        ("solicited answer to all", na("ff02::1", 0x40)),
        ("IPv4", change(good.clone(), 0, 0x45)),
        ("UDP", change(good.clone(), 6, 17)),
        ("length beyond the end", change(good.clone(), 5, 0xff)),
        ("options before it", behind_options(&good)),
        ("nothing", Vec::new()),
    ];
    for (what, packet) in cases {
        assert_eq!(parse(&packet), Err(Malformed), "{what}");
    }
}

fn ns_with_code(code: u8) -> Vec<u8> {
    let mut icmp = vec![kind::NEIGHBOUR_SOLICITATION, code, 0, 0];
    icmp.extend(solicitation("fd00::1", None));
    finish(ip("fe80::5"), ip("ff02::1:ff00:1"), icmp)
}

/// The same message behind a hop-by-hop header.
fn behind_options(packet: &[u8]) -> Vec<u8> {
    let icmp = &packet[HEADER_LEN..];
    let mut out = packet[..HEADER_LEN].to_vec();
    out[5] += 8;
    out[6] = HOP_BY_HOP;
    out.extend([ICMPV6, 0, 1, 4, 0, 0, 0, 0]);
    out.extend(icmp);
    out
}

#[test]
fn rfc4291_the_group_has_the_last_24_bits() {
    let group = solicited_node(ip("4037::1:800:200e:8c6c"));
    assert_eq!(group, ip("ff02::1:ff0e:8c6c"));
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(mut bytes in prop::collection::vec(any::<u8>(), 0..200), seems_right: bool) {
        if seems_right && bytes.len() > HEADER_LEN + 4 {
            let len = bytes.len() - HEADER_LEN;
            bytes[0] = 0x60;
            bytes[4..8].copy_from_slice(&[0, len as u8, ICMPV6, HOP_LIMIT]);
            bytes[HEADER_LEN] = 133 + bytes[HEADER_LEN] % 5;
            bytes[HEADER_LEN + 1] = 0;
            bytes[HEADER_LEN + 2..HEADER_LEN + 4].fill(0);
            let (source, to) = (address(&bytes[8..24]).unwrap(), address(&bytes[24..40]).unwrap());
            let sum = checksum(source, to, &bytes[HEADER_LEN..]);
            bytes[HEADER_LEN + 2..HEADER_LEN + 4].copy_from_slice(&sum.to_be_bytes());
        }
        if let Ok(Ndp { message: Message::NeighbourSolicitation { target, .. }, .. }) = parse(&bytes) {
            prop_assert!(!target.is_multicast());
        }
    }

    #[test]
    fn options_before_the_mac_are_passed_over(units in 1_u8..5, kind in 2_u8..=255) {
        let mut rest = solicitation("fd00::1", None);
        rest.extend([kind, units]);
        rest.extend(vec![0; 8 * usize::from(units) - 2]);
        rest.extend([option::SOURCE_MAC, 1, 2, 0, 0, 0, 0, 15]);
        let packet = message("fe80::5", "ff02::1:ff00:1", kind::NEIGHBOUR_SOLICITATION, &rest);
        let expected = Message::NeighbourSolicitation { target: ip("fd00::1"), mac: Some(MAC) };
        prop_assert_eq!(parse(&packet).unwrap().message, expected);
    }
}
