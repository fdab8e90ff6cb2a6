//! Options as they are on the wire.
use std::net::SocketAddr;

use super::*;
use crate::{
    packet::{Packet, Transport, Version, ip::Ip},
    tcp::{Header, Segment, write_headers},
};

/// A header as the guest reads it, and the length of its options.
fn read_back(header: &Header) -> (Segment, usize) {
    let at = |text: &str| text.parse::<SocketAddr>().unwrap();
    let mut l3 = vec![0; header.headers_len(Version::V4)];
    let vnet = write_headers(
        &mut l3,
        at("192.0.2.1:80"),
        at("10.0.2.15:4000"),
        header,
        1_000,
    );
    assert_eq!(usize::from(vnet.hdr_len), 14 + l3.len());
    let packet = Packet::parse(Ip::parse(&l3).unwrap()).unwrap();
    let Transport::Tcp(tcp) = packet.transport else {
        panic!("no segment");
    };
    let segment = Segment::read(&tcp, packet.ip.payload());
    assert_eq!((segment.payload_len, tcp.header_len + 20), (0, l3.len()));
    (segment, l3.len() - 40)
}

#[test]
fn each_set_of_options_is_read_as_it_was_written() {
    let timestamps = Some(Timestamps {
        value: 0x0102_0304,
        echo: 0xa0b0_c0d0,
    });
    let scales = [None, Some(None), Some(Some(8))];
    for (scale, timestamps, sack_permitted) in scales.into_iter().flat_map(|scale| {
        let both = [None, timestamps].into_iter();
        both.flat_map(move |times| [false, true].map(|sack| (scale, times, sack)))
    }) {
        let header = Header {
            flags: if scale.is_some() {
                Flags::SYN
            } else {
                Flags::ACK
            },
            window_scale: scale,
            timestamps,
            sack_permitted: sack_permitted && scale.is_some(),
            ..Header::default()
        };
        let (segment, len) = read_back(&header);
        assert_eq!(len % 4, 0);
        assert_eq!(segment.timestamps, timestamps);
        assert_eq!(segment.options.window_scale, scale.flatten());
        assert_eq!(segment.options.mss.is_some(), scale.is_some());
        assert_eq!(segment.options.sack_permitted, header.sack_permitted);
    }
}

#[test]
fn rfc2018_3_four_blocks_have_room_and_three_beside_timestamps() {
    let mut sack = SackBlocks::default();
    for nth in 0..4 {
        assert!(sack.push((100 * nth, 100 * nth + 50)));
    }
    assert!(!sack.push((900, 950)), "no fifth");
    let header = Header {
        flags: Flags::ACK,
        sack,
        ..Header::default()
    };
    let (segment, len) = read_back(&header);
    assert_eq!((segment.sack, len), (sack, 36));
    let timestamps = Some(Timestamps { value: 1, echo: 2 });
    let (segment, len) = read_back(&Header {
        timestamps,
        ..header
    });
    assert!(segment.sack.iter().eq(sack.iter().take(3)));
    assert_eq!((segment.timestamps, len), (timestamps, 40));
}
