use super::*;
use crate::frame::{Checksum, FrameBuilder};

fn counted(vnet: VnetHdr, frame: &[u8]) -> Counts {
    let mut counts = FlowCounts::default();
    counts.add(&vnet, Packet::of_ethernet(frame).as_ref());
    counts.sum(|_| true)
}

#[test]
fn a_gso_frame_counts_as_its_segments() {
    let (vnet, frame) = FrameBuilder::tcp("10.0.2.15:1000", "203.0.113.10:80")
        .payload(&[7; 3000])
        .gso(1448)
        .build();
    // 3000 = 1448 + 1448 + 104, each with 40 bytes of headers.
    assert_eq!(
        counted(vnet, &frame),
        Counts {
            packets: 3,
            bytes: 3000 + 3 * 40
        }
    );
}

#[test]
fn udp_segmentation_counts_udp_headers() {
    let (vnet, frame) = FrameBuilder::udp("10.0.2.15:1000", "203.0.113.10:80")
        .payload(&[7; 2401])
        .gso(1200)
        .build();
    assert_eq!(
        counted(vnet, &frame),
        Counts {
            packets: 3,
            bytes: 2401 + 3 * 28
        }
    );
}

#[test]
fn padding_does_not_count() {
    let (vnet, mut frame) = FrameBuilder::udp("10.0.2.15:1000", "203.0.113.10:80")
        .payload(b"x")
        .checksum(Checksum::Full)
        .build();
    frame.resize(60, 0);
    assert_eq!(
        counted(vnet, &frame),
        Counts {
            packets: 1,
            bytes: 29
        }
    );
}

#[test]
fn resets_are_counted_apart() {
    let mut counts = FlowCounts::default();
    for flags in [
        tcp_flags::RST,
        tcp_flags::RST | tcp_flags::ACK,
        tcp_flags::ACK,
    ] {
        let (vnet, frame) = FrameBuilder::tcp("10.0.2.15:1000", "203.0.113.10:80")
            .flags(flags)
            .build();
        counts.add(&vnet, Packet::of_ethernet(&frame).as_ref());
    }
    assert_eq!(counts.sum(|_| true).packets, 3);
    assert_eq!(counts.resets.values().sum::<u64>(), 2);
}

#[test]
fn both_families_count() {
    let (vnet, frame) = FrameBuilder::tcp("[2001:db8::1]:1000", "[2001:db8::2]:80")
        .payload(&[7; 3000])
        .gso(1428)
        .build();
    let counted = counted(vnet, &frame);
    assert_eq!((counted.packets, counted.bytes), (3, 3000 + 3 * 60));
}
