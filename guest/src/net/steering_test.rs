use super::*;

/// Returns Ethernet and IPv4 headers of 20 bytes, then `payload`.
fn ip4(protocol: u8, fragment: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = alloc::vec![0; ETHERNET + 20];
    frame[12..14].copy_from_slice(&[8, 0]);
    frame[ETHERNET] = 0x45;
    frame[ETHERNET + 6..ETHERNET + 8].copy_from_slice(&fragment.to_be_bytes());
    frame[ETHERNET + 9] = protocol;
    frame[ETHERNET + 16..ETHERNET + 20].copy_from_slice(&[192, 0, 2, 9]);
    frame.extend_from_slice(payload);
    frame
}

/// Returns Ethernet and IPv6 headers, then `payload`.
fn ip6(next_header: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = alloc::vec![0; ETHERNET + 40];
    frame[12..14].copy_from_slice(&IPV6);
    frame[ETHERNET] = 0x60;
    frame[ETHERNET + 6] = next_header;
    frame[ETHERNET + 24..].copy_from_slice(&REMOTE6.octets());
    frame.extend_from_slice(payload);
    frame
}

const REMOTE6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 9);

/// A frame of each family.
fn both(protocol: u8, payload: &[u8]) -> [Vec<u8>; 2] {
    [ip4(protocol, 0x4000, payload), ip6(protocol, payload)]
}

/// An ICMP error of each family, about a TCP segment from this port.
fn unreachable(code: u8, port: u16) -> [Vec<u8>; 2] {
    let [about, about6] = both(PROTOCOL_TCP, &ports_of(port, 443));
    let icmp = |kind, about: &[u8]| [&[kind, code, 0, 0, 0, 0, 0, 0], &about[ETHERNET..]].concat();
    [
        ip4(PROTOCOL_ICMP, 0, &icmp(3, &about)),
        ip6(PROTOCOL_ICMPV6, &icmp(1, &about6)),
    ]
}

fn ports_of(source: u16, destination: u16) -> [u8; 4] {
    let [a, b] = source.to_be_bytes();
    let [c, d] = destination.to_be_bytes();
    [a, b, c, d]
}

const CPUS: usize = 4;

#[test]
fn ports_say_whose_a_frame_is() {
    for cpu in 0..CPUS {
        let port = ports::range(cpu, CPUS).start;
        for protocol in [PROTOCOL_TCP, PROTOCOL_UDP] {
            for frame in both(protocol, &ports_of(80, port)) {
                assert_eq!(whose(&frame, CPUS), Whose::Of(cpu));
            }
        }
    }
    for lease in both(PROTOCOL_UDP, &ports_of(67, 68)) {
        assert_eq!(whose(&lease, CPUS), Whose::Of(0));
    }
    let port = ports::range(3, CPUS).start;
    let (options, fragment) = (0, 44);
    for frame in [
        ip4(PROTOCOL_UDP, 0x2000, &ports_of(80, port)),
        ip4(PROTOCOL_UDP, 0x0001, &ports_of(80, port)),
        ip6(fragment, &ports_of(80, port)),
        ip6(options, &ports_of(80, port)),
    ] {
        let what = "a fragment, or behind another header";
        assert_eq!(whose(&frame, CPUS), Whose::Of(0), "{what}");
    }
}

#[test]
fn an_icmp_error_is_whose_the_packet_was() {
    let port = ports::range(2, CPUS).start;
    let remotes = ["192.0.2.9:443", "[2001:db8::9]:443"];
    for ((frame, kind), remote) in unreachable(13, port).iter().zip([3, 1]).zip(remotes) {
        assert_eq!(whose(frame, CPUS), Whose::Of(2));
        let error = IcmpError {
            kind,
            code: 13,
            protocol: PROTOCOL_TCP,
            port,
            remote: remote.parse().unwrap(),
        };
        assert_eq!(icmp_error(frame), Some(error));
        assert!(error.is_unreachable());
    }
    for about in both(PROTOCOL_TCP, &ports_of(port, 443)) {
        assert_eq!(icmp_error(&about), None);
    }
    let too_big = ip6(PROTOCOL_ICMPV6, &{
        let [_, unreachable] = unreachable(0, port);
        [&[2], &unreachable[ETHERNET + 41..]].concat()
    });
    assert!(!icmp_error(&too_big).unwrap().is_unreachable());
    for reply in [
        ip4(PROTOCOL_ICMP, 0, &[0; 8]),
        ip6(PROTOCOL_ICMPV6, &[129; 8]),
    ] {
        assert_eq!(whose(&reply, CPUS), Whose::Of(0), "an echo reply");
    }
    let request = ip4(PROTOCOL_ICMP, 0, &[8; 8]);
    assert_eq!(whose(&request, CPUS), Whose::Anyones, "a request");
    // Only CPU 0 is sure to have an address.
    let request = ip6(PROTOCOL_ICMPV6, &[128; 8]);
    assert_eq!(whose(&request, CPUS), Whose::Of(0), "a request");
}

#[test]
fn answers_of_neighbours_are_everyones() {
    let mut frame = alloc::vec![0; 42];
    frame[12..14].copy_from_slice(&[8, 6]);
    frame[21] = 2;
    assert_eq!(whose(&frame, CPUS), Whose::Everyones);
    frame[21] = 1;
    assert_eq!(whose(&frame, CPUS), Whose::Anyones);
    let (router, solicitation, advertisement) = (134, 135, 136);
    for (kind, due) in [
        (router, Whose::Of(0)),
        (solicitation, Whose::Of(0)),
        (advertisement, Whose::Everyones),
    ] {
        let frame = ip6(PROTOCOL_ICMPV6, &[kind; 24]);
        assert_eq!(whose(&frame, CPUS), due, "{kind}");
    }
}

#[test]
fn a_frame_cut_short_anywhere_harms_nobody() {
    let port = ports::range(2, CPUS).start;
    let segments = both(PROTOCOL_TCP, &ports_of(80, port));
    for (whole, header) in unreachable(1, port)
        .iter()
        .zip([20, 40])
        .chain(segments.iter().zip([20, 40]))
    {
        for len in 0..whole.len() {
            let cut = &whole[..len];
            if len < ETHERNET + header + 4 {
                assert_eq!(whose(cut, CPUS), Whose::Anyones, "{len}");
            }
            assert_eq!(icmp_error(cut), None, "{len}");
            assert_eq!(advertised(cut, [2; 6]), None, "{len}");
        }
    }
    // Invalid versions and header lengths.
    for first in 0..=255u8 {
        for mut frame in both(PROTOCOL_TCP, &[]) {
            frame[ETHERNET] = first;
            assert_eq!(whose(&frame, CPUS), Whose::Anyones);
        }
    }
}
