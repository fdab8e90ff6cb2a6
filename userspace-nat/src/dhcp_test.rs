use proptest::prelude::*;
use smoltcp::wire::DhcpMessageType as Kind;

use super::*;
use crate::test_vm;

const MAC: EthernetAddress = EthernetAddress([2, 0, 0, 0, 0, 15]);
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);
const NONE: Ipv4Addr = Ipv4Addr::UNSPECIFIED;

fn request(kind: Kind) -> DhcpRepr<'static> {
    DhcpRepr {
        message_type: kind,
        transaction_id: 0x1234_5678,
        secs: 3,
        client_hardware_address: MAC,
        client_ip: NONE,
        your_ip: NONE,
        server_ip: NONE,
        router: None,
        subnet_mask: None,
        relay_agent_ip: NONE,
        broadcast: false,
        requested_ip: None,
        client_identifier: None,
        server_identifier: None,
        parameter_request_list: Some(&[1, 3, 6, 26]),
        dns_servers: None,
        max_size: None,
        lease_duration: None,
        renew_duration: None,
        rebind_duration: None,
        additional_options: &[],
    }
}

fn packet(message: &DhcpRepr<'_>) -> Vec<u8> {
    let mut payload = vec![0; message.buffer_len()];
    message
        .emit(&mut DhcpPacket::new_unchecked(&mut payload[..]))
        .unwrap();
    around(&payload)
}

fn around(payload: &[u8]) -> Vec<u8> {
    let from = SocketAddr::new(NONE.into(), 68);
    Datagram {
        from,
        to: SocketAddr::new(Ipv4Addr::BROADCAST.into(), 67),
        payload,
    }
    .emit()
}

/// A reply taken apart: destination, fixed fields, and options by code.
struct Reply {
    to: SocketAddr,
    kind: Kind,
    yiaddr: Ipv4Addr,
    ciaddr: Ipv4Addr,
    options: std::collections::BTreeMap<u8, Vec<u8>>,
}

fn answer_of(vm: &VmNet, message: &DhcpRepr<'_>) -> Option<Reply> {
    let reply = handle(vm, &packet(message)).unwrap().reply?;
    let datagram = Datagram::parse(&reply).unwrap();
    assert_eq!(datagram.from, SocketAddr::new(GATEWAY.into(), 67));
    assert!(datagram.payload.len() >= 300, "RFC 1542 section 2.1");
    let dhcp = DhcpPacket::new_checked(datagram.payload).unwrap();
    assert_eq!(dhcp.transaction_id(), message.transaction_id);
    assert_eq!(dhcp.client_hardware_address(), MAC);
    assert_eq!(
        dhcp.flags().contains(DhcpFlags::BROADCAST),
        message.broadcast
    );
    let options: std::collections::BTreeMap<_, _> =
        dhcp.options().map(|o| (o.kind, o.data.to_vec())).collect();
    assert_eq!(options[&54], GATEWAY.octets(), "server id");
    Some(Reply {
        to: datagram.to,
        kind: DhcpRepr::parse(&dhcp).unwrap().message_type,
        yiaddr: dhcp.your_ip(),
        ciaddr: dhcp.client_ip(),
        options,
    })
}

fn answer(message: &DhcpRepr<'_>) -> Option<Reply> {
    answer_of(&test_vm::vm(1), message)
}

fn assert_configured(reply: &Reply) {
    assert_eq!(reply.options[&1], [255, 255, 255, 0], "mask");
    assert_eq!(reply.options[&3], GATEWAY.octets(), "router");
    assert_eq!(reply.options[&6], [10, 0, 2, 3], "DNS");
    assert_eq!(reply.options[&26], 1500u16.to_be_bytes(), "MTU");
    assert_eq!(reply.options[&28], [10, 0, 2, 255], "broadcast");
}

fn assert_leased(reply: &Reply) {
    assert_eq!(reply.yiaddr, GUEST);
    assert_eq!(reply.options[&51], 86_400u32.to_be_bytes());
    assert_eq!(reply.options[&58], 43_200u32.to_be_bytes(), "T1");
    assert_eq!(reply.options[&59], 75_600u32.to_be_bytes(), "T2");
}

#[test]
fn rfc2131_discover_is_offered_the_vms_address() {
    let vm = test_vm::vm(1);
    let reply = answer_of(&vm, &request(Kind::Discover)).unwrap();
    assert_eq!(reply.kind, Kind::Offer);
    assert_configured(&reply);
    assert_leased(&reply);
    assert_eq!(
        reply.to,
        SocketAddr::new(GUEST.into(), 68),
        "RFC 2131 section 4.1: unicast to yiaddr"
    );
    assert_eq!(vm.stats.snapshot().0.dhcp_messages, 1);
}

#[test]
fn rfc2131_the_broadcast_flag_is_obeyed() {
    let discover = DhcpRepr {
        broadcast: true,
        ..request(Kind::Discover)
    };
    assert_eq!(answer(&discover).unwrap().to.ip(), Ipv4Addr::BROADCAST);
    // ciaddr goes before the flag.
    let renew = DhcpRepr {
        broadcast: true,
        client_ip: GUEST,
        ..request(Kind::Request)
    };
    assert_eq!(answer(&renew).unwrap().to.ip(), GUEST);
}

#[test]
fn rfc2131_selecting_our_offer_is_acknowledged() {
    let select = DhcpRepr {
        server_identifier: Some(GATEWAY),
        requested_ip: Some(GUEST),
        ..request(Kind::Request)
    };
    let reply = answer(&select).unwrap();
    assert_eq!(reply.kind, Kind::Ack);
    assert_configured(&reply);
    assert_leased(&reply);
    let other = DhcpRepr {
        server_identifier: Some([10, 0, 2, 9].into()),
        ..select.clone()
    };
    assert!(answer(&other).is_none(), "another server's offer was taken");
    let wrong = DhcpRepr {
        requested_ip: Some([10, 0, 2, 16].into()),
        ..select
    };
    assert_nak(&answer(&wrong).unwrap());
}

fn assert_nak(reply: &Reply) {
    assert_eq!(reply.kind, Kind::Nak);
    assert_eq!(reply.to.ip(), Ipv4Addr::BROADCAST, "RFC 2131 section 4.1");
    assert_eq!((reply.yiaddr, reply.ciaddr), (NONE, NONE));
    for absent in [1, 3, 6, 26, 51, 58, 59] {
        assert!(
            !reply.options.contains_key(&absent),
            "table 3: no option {absent} in a NAK"
        );
    }
}

#[test]
fn rfc2131_init_reboot_is_checked() {
    let right = DhcpRepr {
        requested_ip: Some(GUEST),
        ..request(Kind::Request)
    };
    assert_eq!(answer(&right).unwrap().kind, Kind::Ack);
    let wrong = DhcpRepr {
        requested_ip: Some([192, 168, 0, 4].into()),
        ..right
    };
    assert_nak(&answer(&wrong).unwrap());
}

#[test]
fn rfc2131_renewing_and_rebinding_are_answered_to_ciaddr() {
    let renew = DhcpRepr {
        client_ip: GUEST,
        ..request(Kind::Request)
    };
    let reply = answer(&renew).unwrap();
    assert_eq!((reply.kind, reply.ciaddr), (Kind::Ack, GUEST));
    assert_eq!(reply.to.ip(), GUEST);
    assert_leased(&reply);
    let wrong = DhcpRepr {
        client_ip: [10, 0, 2, 99].into(),
        ..renew
    };
    assert_nak(&answer(&wrong).unwrap());
}

#[test]
fn rfc2131_inform_is_configured_without_lease() {
    let inform = DhcpRepr {
        client_ip: GUEST,
        ..request(Kind::Inform)
    };
    let reply = answer(&inform).unwrap();
    assert_eq!(reply.kind, Kind::Ack);
    assert_configured(&reply);
    assert_eq!((reply.yiaddr, reply.to.ip()), (NONE, GUEST.into()));
    assert!(!reply.options.contains_key(&51) && !reply.options.contains_key(&58));
    let stranger = packet(&DhcpRepr {
        client_ip: [10, 0, 2, 9].into(),
        ..inform
    });
    assert_eq!(
        handle(&test_vm::vm(1), &stranger),
        Err(DropReason::ServiceReject)
    );
}

#[test]
fn decline_and_release_are_counted_and_not_answered() {
    let vm = test_vm::vm(1);
    for kind in [Kind::Decline, Kind::Release] {
        let message = DhcpRepr {
            client_ip: GUEST,
            server_identifier: Some(GATEWAY),
            ..request(kind)
        };
        assert!(answer_of(&vm, &message).is_none());
    }
    assert_eq!(vm.stats.snapshot().0.dhcp_messages, 2);
}

#[test]
fn rfc6842_the_client_id_comes_back_whatever_its_form() {
    // 7 octets of another type than Ethernet's, and a DUID (RFC 4361).
    for id in [&[0, 1, 2, 3, 4, 5, 6][..], &[0xff; 19]] {
        let options = [DhcpOption { kind: 61, data: id }];
        let message = DhcpRepr {
            additional_options: &options,
            ..request(Kind::Discover)
        };
        let reply = handle(&test_vm::vm(1), &packet(&message))
            .unwrap()
            .reply
            .unwrap();
        let dhcp = DhcpPacket::new_checked(Datagram::parse(&reply).unwrap().payload).unwrap();
        assert!(dhcp.options().any(|o| o == options[0]));
    }
}

#[test]
fn the_mac_is_learned_or_checked() {
    let discover = packet(&request(Kind::Discover));
    let mut vm = test_vm::vm(1);
    assert_eq!(handle(&vm, &discover).unwrap().guest_mac, Some(MAC.0));
    vm.guest_mac = Some(MAC.0);
    assert_eq!(handle(&vm, &discover).unwrap().guest_mac, None);
    vm.guest_mac = Some([2, 0, 0, 0, 0, 1]);
    assert_eq!(handle(&vm, &discover), Err(DropReason::Spoofed));
}

#[test]
fn the_vms_own_network_is_given() {
    let mut vm = test_vm::vm(1);
    (vm.guest, vm.prefix_len, vm.mtu) = ([172, 16, 5, 9].into(), 20, 9000);
    let reply = answer_of(&vm, &request(Kind::Discover)).unwrap();
    assert_eq!(reply.options[&1], [255, 255, 240, 0]);
    assert_eq!(reply.options[&26], 9000u16.to_be_bytes());
    assert_eq!(reply.options[&28], [172, 16, 15, 255]);
    assert_eq!(reply.yiaddr, vm.guest);
}

#[test]
fn malformed_messages_are_rejected() {
    let whole = packet(&request(Kind::Discover));
    let payload = Datagram::parse(&whole).unwrap().payload.to_vec();
    let rejected = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut payload = payload.clone();
        change(&mut payload);
        handle(&test_vm::vm(1), &around(&payload)) == Err(DropReason::ServiceReject)
    };
    assert!(!rejected(&|_| {}), "the control");
    assert!(rejected(&|p| p.truncate(239)), "short");
    assert!(rejected(&|p| p.truncate(240)), "no message type");
    assert!(rejected(&|p| p[0] = 2), "a reply");
    assert!(rejected(&|p| p[1] = 6), "hardware type");
    assert!(rejected(&|p| p[2] = 8), "hardware length");
    assert!(rejected(&|p| p[24] = 10), "giaddr");
    assert!(rejected(&|p| p[28] = 1), "group MAC");
    assert!(rejected(&|p| p[28..34].fill(0)), "no MAC");
    assert!(rejected(&|p| p[236] = 0), "magic");
    assert!(rejected(&|p| p[242] = 2), "an OFFER from a client");
    assert!(rejected(&|p| p[242] = 99), "unknown type");
    assert!(rejected(&|p| p[242] = 3), "REQUEST of nothing");
    assert_eq!(
        handle(&test_vm::vm(1), &whole[..20]),
        Err(DropReason::Malformed)
    );
}

proptest! {
    #[test]
    fn hostile_options_never_panic(
        options in prop::collection::vec(any::<u8>(), 0..700),
        ciaddr: [u8; 4], flags: u16, prefix in 0u8..=32,
    ) {
        let mut payload = vec![0; 240];
        payload[..3].copy_from_slice(&[1, 1, 6]);
        payload[10..12].copy_from_slice(&flags.to_be_bytes());
        payload[12..16].copy_from_slice(&ciaddr);
        payload[28..34].copy_from_slice(&MAC.0);
        payload[236..240].copy_from_slice(&MAGIC.to_be_bytes());
        for kind in 1..9 {
            let mut payload = payload.clone();
            payload.extend_from_slice(&[53, 1, kind]);
            payload.extend_from_slice(&options);
            let mut vm = test_vm::vm(1);
            vm.prefix_len = prefix;
            let _ = handle(&vm, &around(&payload));
        }
    }

    #[test]
    fn hostile_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = handle(&test_vm::vm(1), &bytes);
        let _ = handle(&test_vm::vm(1), &around(&bytes));
    }
}
