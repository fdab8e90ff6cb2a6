use proptest::prelude::*;
use smoltcp::wire::{IpProtocol, Ipv4Packet, UdpPacket};

use super::*;

fn datagram(payload: &[u8]) -> Datagram<'_> {
    Datagram {
        from: "10.0.2.15:40000".parse().unwrap(),
        to: "10.0.2.3:53".parse().unwrap(),
        payload,
    }
}

fn datagram6(payload: &[u8]) -> Datagram<'_> {
    Datagram {
        from: "[fd00::5]:40000".parse().unwrap(),
        to: "[fd00::1]:53".parse().unwrap(),
        payload,
    }
}

#[test]
fn round_trip_with_right_checksums() {
    for payload in [&b""[..], b"x", b"payload", &[0xff; 1400]] {
        let packet = datagram(payload).emit();
        assert_eq!(Datagram::parse(&packet), Some(datagram(payload)));
        let udp = UdpPacket::new_checked(&packet[20..]).unwrap();
        let ip = Ipv4Packet::new_checked(&packet[..]).unwrap();
        assert!(ip.verify_checksum());
        assert!(udp.verify_checksum(&ip.src_addr().into(), &ip.dst_addr().into()));
        let packet = datagram6(payload).emit();
        assert_eq!(Datagram::parse(&packet), Some(datagram6(payload)));
        assert!(crate::fake::packets::is_right(&packet));
    }
}

#[test]
fn padding_behind_the_packet_is_no_payload() {
    let mut packet = datagram(b"abc").emit();
    packet.extend_from_slice(&[9; 20]);
    assert_eq!(Datagram::parse(&packet), Some(datagram(b"abc")));
}

#[test]
fn fragments_other_protocols_and_bad_headers_are_refused() {
    let whole = datagram(b"abcdefgh").emit();
    let changed = |change: &dyn Fn(&mut Ipv4Packet<&mut Vec<u8>>), fill: bool| {
        let mut packet = whole.clone();
        let mut ip = Ipv4Packet::new_unchecked(&mut packet);
        change(&mut ip);
        if fill {
            ip.fill_checksum();
        }
        Datagram::parse(&packet).is_some()
    };
    assert!(changed(&|_| {}, true));
    assert!(!changed(&|ip| ip.set_more_frags(true), true));
    assert!(!changed(&|ip| ip.set_frag_offset(8), true));
    assert!(!changed(&|ip| ip.set_next_header(IpProtocol::Tcp), true));
    assert!(!changed(&|ip| ip.set_hop_limit(3), false));
    assert!(!changed(&|ip| ip.set_total_len(2000), true));
}

#[test]
fn too_large_a_payload_is_cut() {
    assert_eq!(datagram(&[0; 70_000]).emit().len(), 65_535);
}

proptest! {
    #[test]
    fn hostile_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = Datagram::parse(&bytes);
    }

    #[test]
    fn hostile_changes_never_panic(at in 0usize..36, value: u8) {
        let mut packet = datagram(b"abcdefgh").emit();
        packet[at] = value;
        Ipv4Packet::new_unchecked(&mut packet).set_version(4);
        let _ = Datagram::parse(&packet);
        let mut packet = datagram6(b"abcdefgh").emit();
        packet[at] = value;
        packet[0] = 0x60;
        let _ = Datagram::parse(&packet);
    }
}
