use slipgate_abi::IfIndex;
use slipgate_model::{HostAddress, RouteSnapshot, SourceUse};

use super::*;

fn pool(text: &str) -> AddressPool {
    AddressPool::parse(&[text]).unwrap()
}

fn host_with(addresses: impl Iterator<Item = IpAddr>) -> RouteTable {
    let own = |address: IpAddr| HostAddress {
        ifindex: IfIndex::new(3),
        addr: address.into(),
        broadcast: None,
        source: SourceUse::Preferred,
    };
    RouteTable::new(&RouteSnapshot {
        addresses: addresses.map(own).collect(),
        ..RouteSnapshot::default()
    })
}

#[test]
fn an_address_is_kept_while_pool_and_host_have_it() {
    let all = pool("192.0.2.16/28");
    let routes = host_with(all.addresses());
    let mut pairing = Pairing::new("vm1", pool("192.0.2.16/30"));
    let own = pairing.address(false, &routes).unwrap();
    assert!(pairing.change(&all) && !pairing.change(&all));
    assert_eq!(pairing.address(false, &routes), Some(own));
    let without = host_with(all.addresses().filter(|address| *address != own));
    let other = pairing.address(false, &without).unwrap();
    assert_ne!(other, own);
    assert_eq!(
        pairing.address(false, &routes),
        Some(other),
        "it has flows by now"
    );
    assert_eq!(pairing.address(false, &host_with(std::iter::empty())), None);
}

#[test]
fn addresses_are_looked_for_again_only_when_the_host_may_have_others() {
    let all = pool("192.0.2.16/28");
    let pairing = Pairing::new("vm1", all.clone());
    assert_eq!(pairing.address(false, &host_with(std::iter::empty())), None);
    let routes = host_with(all.addresses());
    assert_eq!(pairing.address(false, &routes), None, "nobody looks");
    pairing.look_again();
    let own = pairing.address(false, &routes);
    assert!(own.is_some());
    pairing.look_again();
    assert_eq!(pairing.address(false, &routes), own);
}

#[test]
fn flows_of_a_predecessor_decide_only_for_the_pool_and_once() {
    let all = pool("192.0.2.16/28");
    let routes = host_with(all.addresses());
    let addresses: Vec<IpAddr> = all.addresses().collect();
    for own in &addresses {
        let pairing = Pairing::new("vm1", all.clone());
        pairing.keep("203.0.113.9".parse().unwrap());
        pairing.keep(*own);
        addresses.iter().for_each(|other| pairing.keep(*other));
        assert_eq!(pairing.address(false, &routes), Some(*own));
    }
}

#[test]
fn a_family_without_addresses_is_left_to_the_routes() {
    let pairing = Pairing::new("vm1", pool("192.0.2.16/30"));
    let routes = host_with(pool("192.0.2.16/30").addresses());
    let to = |source: &str| Route::Via {
        ifindex: IfIndex::new(3),
        next_hop: source.parse().unwrap(),
        source: source.parse().unwrap(),
        mtu: None,
    };
    let six = to("2001:db8::1");
    assert_eq!(pairing.applied_to(six, &routes), six);
    assert!(pairing.may_have("2001:db8::1".parse().unwrap()));
    assert!(!pairing.may_have("192.0.2.1".parse().unwrap()));
    let applied = pairing.applied_to(to("192.0.2.1"), &routes);
    assert_ne!(applied, to("192.0.2.1"));
    assert_eq!(
        pairing.applied_to(applied, &host_with(std::iter::empty())),
        Route::NoSource
    );
    let refused = Route::Unreachable;
    assert_eq!(pairing.applied_to(refused, &routes), refused);
}
