use super::*;

/// Returns Ethernet and IPv4 headers of 20 bytes, then `payload`.
fn ip(protocol: u8, fragment: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = alloc::vec![0; ETHERNET + 20];
    frame[12..14].copy_from_slice(&[8, 0]);
    frame[ETHERNET] = 0x45;
    frame[ETHERNET + 6..ETHERNET + 8].copy_from_slice(&fragment.to_be_bytes());
    frame[ETHERNET + 9] = protocol;
    frame[ETHERNET + 16..ETHERNET + 20].copy_from_slice(&[192, 0, 2, 9]);
    frame.extend_from_slice(payload);
    frame
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
            let frame = ip(protocol, 0x4000, &ports_of(80, port));
            assert_eq!(whose(&frame, CPUS), Whose::Of(cpu));
        }
    }
    let lease = ip(PROTOCOL_UDP, 0, &ports_of(67, 68));
    assert_eq!(whose(&lease, CPUS), Whose::Of(0));
    let port = ports::range(3, CPUS).start;
    for fragment in [0x2000, 0x0001] {
        let frame = ip(PROTOCOL_UDP, fragment, &ports_of(80, port));
        assert_eq!(whose(&frame, CPUS), Whose::Of(0), "a fragment");
    }
}

#[test]
fn an_icmp_error_is_whose_the_packet_was() {
    let port = ports::range(2, CPUS).start;
    let about = ip(PROTOCOL_TCP, 0, &ports_of(port, 443));
    let mut icmp = alloc::vec![3, 13, 0, 0, 0, 0, 0, 0];
    icmp.extend_from_slice(&about[ETHERNET..]);
    let frame = ip(PROTOCOL_ICMP, 0, &icmp);
    assert_eq!(whose(&frame, CPUS), Whose::Of(2));
    let error = IcmpError {
        kind: 3,
        code: 13,
        protocol: PROTOCOL_TCP,
        port,
        remote: "192.0.2.9:443".parse().unwrap(),
    };
    assert_eq!(icmp_error(&frame), Some(error));
    assert_eq!(icmp_error(&about), None);
    assert_eq!(
        whose(&ip(PROTOCOL_ICMP, 0, &[0; 8]), CPUS),
        Whose::Of(0),
        "an echo reply"
    );
    assert_eq!(
        whose(&ip(PROTOCOL_ICMP, 0, &[8; 8]), CPUS),
        Whose::Anyones,
        "a request"
    );
}

#[test]
fn arp_answers_are_everyones() {
    let mut frame = alloc::vec![0; 42];
    frame[12..14].copy_from_slice(&[8, 6]);
    frame[21] = 2;
    assert_eq!(whose(&frame, CPUS), Whose::Everyones);
    frame[21] = 1;
    assert_eq!(whose(&frame, CPUS), Whose::Anyones);
}

#[test]
fn a_frame_cut_short_anywhere_harms_nobody() {
    let port = ports::range(2, CPUS).start;
    let mut icmp = alloc::vec![3, 1, 0, 0, 0, 0, 0, 0];
    icmp.extend_from_slice(&ip(PROTOCOL_TCP, 0, &ports_of(port, 80))[ETHERNET..]);
    for whole in [
        ip(PROTOCOL_ICMP, 0, &icmp),
        ip(PROTOCOL_TCP, 0, &ports_of(80, port)),
    ] {
        for len in 0..whole.len() {
            let cut = &whole[..len];
            if len < ETHERNET + 24 {
                assert_eq!(whose(cut, CPUS), Whose::Anyones, "{len}");
            }
            assert_eq!(icmp_error(cut), None, "{len}");
        }
    }
    // Invalid header lengths.
    for first in 0..=255u8 {
        let mut frame = ip(PROTOCOL_TCP, 0, &[]);
        frame[ETHERNET] = first;
        assert_eq!(whose(&frame, CPUS), Whose::Anyones);
    }
}
