use super::*;
use crate::{
    ndp::wire::{HEADER_LEN, Message, parse},
    test_vm,
};

/// Returns the options of an advertisement by their type, with what follows type and length.
fn options(packet: &[u8]) -> Vec<(u8, Vec<u8>)> {
    let mut rest = &packet[HEADER_LEN + 16..];
    let mut found = Vec::new();
    while !rest.is_empty() {
        let len = 8 * usize::from(rest[1]);
        found.push((rest[0], rest[2..len].to_vec()));
        rest = &rest[len..];
    }
    found
}

#[test]
fn it_says_what_a_guest_needs() {
    let vm = test_vm::vm6(1);
    let net = vm.ipv6.unwrap();
    let packet = build(&vm, &net, wire::ALL_NODES);
    let read = parse(&packet).expect("its own parser finds it valid");
    assert_eq!(read.message, Message::RouterAdvertisement);
    assert_eq!(read.source, net.gateway_link_local(vm.gateway_mac));
    assert_eq!(read.destination, wire::ALL_NODES);

    let fixed = &packet[HEADER_LEN + 4..HEADER_LEN + 16];
    assert_eq!(fixed[0], 64, "hop limit");
    assert_eq!(fixed[1], 0x40, "O, and not M");
    assert_eq!(fixed[2..4], [0xff, 0xff], "router lifetime");
    assert_eq!(fixed[4..], [0; 8]);

    let options = options(&packet);
    let of = |kind| &options.iter().find(|option| option.0 == kind).unwrap().1;
    assert_eq!(options.len(), 4);
    assert_eq!(of(option::SOURCE_MAC)[..], vm.gateway_mac);
    assert_eq!(of(option::MTU)[2..], 1_500_u32.to_be_bytes());
    let prefix = of(option::PREFIX);
    assert_eq!(prefix[..2], [64, 0x40], "autonomous, and not on link");
    assert_eq!(prefix[2..6], 2_592_000_u32.to_be_bytes());
    assert_eq!(prefix[6..10], 604_800_u32.to_be_bytes());
    assert_eq!(prefix[14..], net.prefix.network().octets());
    let resolvers = of(option::RESOLVERS);
    assert_eq!(resolvers[2..6], 65_535_u32.to_be_bytes());
    assert_eq!(resolvers[6..], net.gateway().octets());
}

/// RFC 4861 section 4.2, RFC 4862 section 5.5.3: without a prefix no address is made.
#[test]
fn it_sends_a_guest_with_a_single_address_to_dhcpv6() {
    let vm = test_vm::vm6(1);
    let net = GuestIpv6 {
        prefix: "2001:db8:7::17/128".parse().unwrap(),
        is_routed: true,
    };
    for (packet, lifetime) in [
        (build(&vm, &net, wire::ALL_NODES), [0xff, 0xff]),
        (end(&vm, &net), [0, 0]),
    ] {
        parse(&packet).expect("its own parser finds it valid");
        let fixed = &packet[HEADER_LEN + 4..HEADER_LEN + 16];
        assert_eq!(fixed[1], 0xc0, "M and O");
        assert_eq!(fixed[2..4], lifetime);
        let options = options(&packet);
        let kinds: Vec<u8> = options.iter().map(|option| option.0).collect();
        let expected = [option::SOURCE_MAC, option::MTU, option::RESOLVERS];
        assert_eq!(kinds, expected);
        let resolver: Ipv6Addr = "fd73:6c69:7067::1".parse().unwrap();
        assert_eq!(options[2].1[6..], resolver.octets());
    }
}
