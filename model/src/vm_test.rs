use super::*;

#[test]
fn the_gateways_ipv6_addresses_follow_from_prefix_and_mac() {
    let net = GuestIpv6 {
        prefix: "fd00:1:2:3::/64".parse().unwrap(),
        is_routed: false,
    };
    // RFC 4291 appendix A: the universal bit is inverted.
    let mac = [0x02, 0x34, 0x56, 0x78, 0x9a, 0xbc];
    let local: Ipv6Addr = "fe80::34:56ff:fe78:9abc".parse().unwrap();
    assert_eq!(net.gateway().to_string(), "fd00:1:2:3::1");
    assert_eq!(net.gateway_link_local(mac), local);
    assert!(net.is_gateways(local, mac) && net.is_gateways(net.gateway(), mac));
    assert!(!net.is_gateways("fd00:1:2:3::2".parse().unwrap(), mac));
}
