use slipgate_control::netlink::Address;

use super::*;

fn network(addresses: &[(u32, [u8; 4], u8)]) -> Network {
    let addresses = addresses
        .iter()
        .map(|(ifindex, address, prefix_len)| Address {
            ifindex: IfIndex::new(*ifindex),
            address: (*address).into(),
            prefix_len: *prefix_len,
            broadcast: None,
            peer: None,
            state: slipgate_control::netlink::AddressState::default(),
        });
    Network {
        addresses: addresses.collect(),
        ..Network::default()
    }
}

#[test]
fn masquerading_takes_the_first_address_of_a_device_with_one_network() {
    let of = |addresses: &[_]| first_address(&network(addresses), IfIndex::new(2));
    let (first, second) = ([192, 0, 2, 1], [192, 0, 2, 2]);
    assert_eq!(of(&[]), None);
    assert_eq!(of(&[(1, first, 24)]), None);
    let both = [(1, [10, 0, 0, 1], 8), (2, first, 24), (2, second, 24)];
    assert_eq!(of(&both), Some(first.into()));
    assert_eq!(
        of(&[(2, first, 24), (2, [198, 51, 100, 9], 32)]),
        Some(first.into())
    );
    // By the next hop, which is not known here.
    assert_eq!(of(&[(2, first, 24), (2, [198, 51, 100, 9], 24)]), None);
}

#[test]
fn ipv6_flows_may_have_each_address_of_the_device_but_those_of_its_link() {
    let all = [(2, "2001:db8::1"), (2, "fe80::1"), (1, "2001:db8::2")];
    let addresses = all.map(|(ifindex, address)| Address {
        ifindex: IfIndex::new(ifindex),
        address: address.parse().unwrap(),
        prefix_len: 64,
        broadcast: None,
        peer: None,
        state: slipgate_control::netlink::AddressState::default(),
    });
    let network = Network {
        addresses: addresses.into(),
        ..Network::default()
    };
    let of = |has_ipv6| {
        let at = ("eth0", IfIndex::new(2));
        guests_tuples(at, &network, None, &(1..=2), has_ipv6).addresses6
    };
    assert_eq!(of(true), Some(vec!["2001:db8::1".parse().unwrap()]));
    assert_eq!(of(false), None);
}
