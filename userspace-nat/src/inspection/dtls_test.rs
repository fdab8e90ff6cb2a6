use super::*;

/// A record of this type, version and epoch.
fn record(kind: u8, version: u16, epoch: u16, content: &[u8]) -> Vec<u8> {
    let mut record = vec![kind];
    record.extend(version.to_be_bytes());
    record.extend(epoch.to_be_bytes());
    record.extend([0, 0, 0, 0, 0, 7]);
    record.extend((content.len() as u16).to_be_bytes());
    record.extend(content);
    record
}

/// A handshake record with the part of a ClientHello.
fn client_hello(version: u16) -> Vec<u8> {
    let mut part = vec![1, 0, 0, 200, 0, 0, 0, 0, 50, 0, 0, 60];
    part.extend([0xab; 60]);
    record(22, version, 0, &part)
}

#[test]
fn each_form_of_a_record_is_known() {
    for version in [0xfeff, 0xfefd, 0xfefc, 0x0100] {
        for kind in 20..=26 {
            for content in [&b""[..], &[1], &[7; 300]] {
                let record = record(kind, version, 1, content);
                assert!(is_in(&record), "{kind} {version:x}");
            }
            assert!(is_in(&[kind, (version >> 8) as u8, version as u8]));
        }
    }
    // Encrypted records of DTLS 1.3 that say their length, one and several.
    let short = [0x24, 5, 0, 3, 1, 2, 3];
    let long = [0x2f, 5, 6, 0, 2, 1, 2];
    assert!(is_in(&short) && is_in(&long));
    assert!(is_in(&[&short[..], &long].concat()));
    assert!(is_in(
        &[&long[..], &record(21, 0xfefd, 0, &[1, 0])].concat()
    ));
}

#[test]
fn a_client_hello_is_found_behind_whatever_a_server_passes_over() {
    let hello = client_hello(0xfefd);
    let before = [
        record(20, 0xfefd, 0, &[1]),
        record(21, 0xfeff, 0, &[1, 0]),
        record(23, 0x0100, 3, &[9; 40]),
        // Of a version that is none: its header is passed over, or all that it says it has.
        record(20, 0x0303, 0, b""),
        record(22, 0x0303, 0, &[9; 20]),
        vec![0x40; 13],
        vec![0x2c, 1, 2, 3],
        // What is long, and what begins like a hello and is none.
        vec![0xe0, 0, 0, 0, 1, 0, 0, 0],
        vec![22, 0xfe, 0xfd, 0, 0, 22],
        vec![22; 30],
    ];
    for before in before {
        let datagram = [&before[..], &hello].concat();
        assert!(is_in(&datagram), "{before:02x?}");
        // And with more behind it.
        assert!(is_in(&[&datagram[..], &[0; 40]].concat()));
    }
}

#[test]
fn packets_of_quic_are_none() {
    // Short headers, their fixed bit as it should be or greased (RFC 9287).
    for first in 0..0x80 {
        let mut packet: Vec<u8> = (0..=255).cycle().take(1_200).collect();
        packet[0] = first;
        assert!(!is_in(&packet), "{first:02x}");
    }
    for packet in [
        &b""[..],
        &[22],
        &[22, 1, 2, 3],
        &[0x20],
        &[0x24, 0, 9, 9, 1],
    ] {
        assert!(!is_in(packet), "{packet:02x?}");
    }
}

#[test]
fn nothing_panics_and_hardly_anything_is_taken_for_dtls() {
    use rand::RngExt as _;
    let mut packet = [0u8; 200];
    let mut taken = 0;
    for _ in 0..50_000 {
        rand::rng().fill(&mut packet[..]);
        let len = rand::rng().random_range(0..=packet.len());
        taken += u32::from(is_in(&packet[..len]));
    }
    assert!(taken < 20, "{taken} of 50,000");
}
