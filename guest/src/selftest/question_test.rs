use smoltcp::wire::{
    DhcpMessageType, DhcpPacket, DhcpRepr, EthernetFrame, IpAddress, Ipv4Packet, UdpPacket,
};

use super::*;

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];

#[test]
fn it_is_a_dhcp_discover() {
    let frame = ask(MAC, 0xABCD_1234);
    let ethernet = EthernetFrame::new_checked(&frame[..]).unwrap();
    assert!(ethernet.dst_addr().is_broadcast());
    assert_eq!(ethernet.src_addr().0, MAC);
    let ip = Ipv4Packet::new_checked(ethernet.payload()).unwrap();
    assert!(ip.verify_checksum());
    let udp = UdpPacket::new_checked(ip.payload()).unwrap();
    assert_eq!(
        (udp.src_port(), udp.dst_port(), udp.checksum()),
        (68, 67, 0)
    );
    let packet = DhcpPacket::new_checked(udp.payload()).unwrap();
    let dhcp = DhcpRepr::parse(&packet).unwrap();
    assert_eq!(dhcp.message_type, DhcpMessageType::Discover);
    assert_eq!(
        (dhcp.transaction_id, dhcp.client_hardware_address.0),
        (0xABCD_1234, MAC)
    );
    assert!(dhcp.broadcast);
}

#[test]
fn the_checksum_that_is_left_can_be_completed() {
    let mut frame = ask(MAC, 1);
    leave_checksum(&mut frame);
    let (start, offset) = (usize::from(CHECKSUM.0), usize::from(CHECKSUM.1));
    let value = !ones_complement(&frame[start..]);
    frame[start + offset..start + offset + 2].copy_from_slice(&value.to_be_bytes());
    let ip = Ipv4Packet::new_checked(&frame[14..]).unwrap();
    let udp = UdpPacket::new_checked(ip.payload()).unwrap();
    assert!(udp.verify_checksum(
        &IpAddress::Ipv4(ip.src_addr()),
        &IpAddress::Ipv4(ip.dst_addr())
    ));
}

#[test]
fn an_answer_is_told_from_others() {
    let mut answer = ask(MAC, 7).to_vec();
    assert!(!is_answer(&answer, 7), "a question");
    answer[42] = 2;
    answer[36..38].copy_from_slice(&[0, 68]);
    assert!(is_answer(&answer, 7));
    assert!(!is_answer(&answer, 8));
    for length in 0..BOOTP + 240 {
        assert!(!is_answer(&answer[..length], 7));
    }
}
