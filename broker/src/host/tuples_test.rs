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
    let of = |addresses: &[_]| {
        let all = network(addresses).addresses;
        let own = all.iter().filter(|of| of.ifindex == IfIndex::new(2));
        first_address(own)
    };
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

/// Addresses of IPv6, each with its device and state.
fn network6(addresses: &[(u32, &str, AddressState)]) -> Network {
    let addresses = addresses.iter().map(|(ifindex, address, state)| Address {
        ifindex: IfIndex::new(*ifindex),
        address: address.parse().unwrap(),
        prefix_len: 64,
        broadcast: None,
        peer: None,
        state: *state,
    });
    Network {
        addresses: addresses.collect(),
        ..Network::default()
    }
}

fn parsed(all: &[&str]) -> Vec<IpAddr> {
    all.iter().map(|address| address.parse().unwrap()).collect()
}

#[test]
fn ipv6_flows_may_have_each_address_of_the_device_but_those_of_its_link() {
    use AddressState::{Deprecated, Preferred, Temporary, Unusable};
    let network = network6(&[
        (2, "2001:db8::1", Preferred),
        (2, "2001:db8::3", Deprecated),
        (2, "2001:db8::4", Temporary),
        (2, "2001:db8::5", Unusable),
        (2, "fe80::1", Preferred),
        (1, "2001:db8::2", Preferred),
    ]);
    let of = |has_ipv6| {
        let at = ("eth0", IfIndex::new(2));
        GuestsAt::new(at, has_ipv6).tuples(&network, &(1..=2)).ipv6
    };
    let sources = of(true).unwrap();
    let all = ["2001:db8::1", "2001:db8::3", "2001:db8::4"];
    assert_eq!(sources.of_guests, parsed(&all));
    // Masquerading prefers those that are not deprecated.
    assert_eq!(sources.by_masquerade, parsed(&[all[0], all[2]]));
    assert_eq!(of(false), None);
}

#[test]
fn a_pool_takes_the_place_of_the_addresses_of_its_families() {
    let network = network6(&[(2, "2001:db8::1", AddressState::Preferred)]);
    let at = ("eth0", IfIndex::new(2));
    let with = |pool: &[&str], has_ipv6| {
        let pool: Vec<String> = pool.iter().map(|it| (*it).to_owned()).collect();
        let pool = AddressPool::parse(&pool).unwrap();
        let guests = GuestsAt::new(at, has_ipv6).with(&pool);
        guests.tuples(&network, &(1..=2))
    };
    let own = |sources: Option<Sources>| sources.map(|sources| sources.of_guests);
    let both = with(&["192.0.2.8/31", "2001:db8:7::/127"], true);
    assert_eq!(own(both.ipv4), Some(parsed(&["192.0.2.8", "192.0.2.9"])));
    let of_pool = parsed(&["2001:db8:7::", "2001:db8:7::1"]);
    assert_eq!(own(both.ipv6), Some(of_pool));
    let of_ipv4 = with(&["192.0.2.8"], true);
    assert_eq!(own(of_ipv4.ipv6), Some(parsed(&["2001:db8::1"])));
    let no_ipv6 = with(&["2001:db8:7::1"], false);
    assert_eq!((own(no_ipv6.ipv4), no_ipv6.ipv6), (Some(vec![]), None));
}
