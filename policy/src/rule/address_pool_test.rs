use std::collections::BTreeMap;

use super::*;

fn pool(texts: &[&str]) -> AddressPool {
    AddressPool::parse(texts).unwrap()
}

#[test]
fn a_pool_has_addresses_and_all_of_a_prefix_once() {
    let pool = pool(&[
        "198.51.100.20",
        "198.51.100.8/30",
        "198.51.100.9",
        "2001:db8::8/127",
    ]);
    let all: Vec<String> = pool.addresses().map(|a| a.to_string()).collect();
    assert_eq!(
        all,
        [
            "198.51.100.8",
            "198.51.100.9",
            "198.51.100.10",
            "198.51.100.11",
            "198.51.100.20",
            "2001:db8::8",
            "2001:db8::9"
        ]
    );
    assert_eq!(
        pool.texts(),
        ["198.51.100.8/30", "198.51.100.20", "2001:db8::8/127"]
    );
    assert_eq!(AddressPool::parse(&pool.texts()), Ok(pool.clone()));
    assert!(pool.contains("198.51.100.11".parse().unwrap()));
    assert!(!pool.contains("198.51.100.12".parse().unwrap()));
    assert_eq!(pool.of_family(true).count(), 2);
    assert!(pool.has_family(false) && pool.has_family(true));
    assert!(!self::pool(&["198.51.100.8"]).has_family(true));
}

#[test]
fn what_no_packet_to_the_world_may_have_is_refused() {
    let cases = [
        ("here", PoolError::Text),
        ("198.51.100.9/30", PoolError::HostBits),
        ("127.0.0.1", PoolError::NotUnicast),
        ("0.0.0.0/0", PoolError::NotUnicast),
        ("224.0.0.1", PoolError::NotUnicast),
        ("255.255.255.255", PoolError::NotUnicast),
        ("fe80::1", PoolError::NotUnicast),
        ("::1", PoolError::NotUnicast),
        ("::ffff:198.51.100.1", PoolError::NotUnicast),
        ("198.51.0.0/16", PoolError::TooMany),
        ("2001:db8::/64", PoolError::TooMany),
    ];
    for (text, error) in cases {
        let parsed = AddressPool::parse(&["198.51.100.20", text]);
        assert_eq!(parsed, Err((1, error)), "{text}");
    }
    let halves = ["198.51.100.0/22", "198.51.104.0/32"];
    assert_eq!(AddressPool::parse(&halves), Err((1, PoolError::TooMany)));
    assert!(AddressPool::parse(&halves[..1]).is_ok());
}

#[test]
fn pools_tell_what_they_have_in_common() {
    let all = pool(&["198.51.100.8/30", "2001:db8::1"]);
    let common = |texts: &[&str]| all.common_with(&pool(texts)).map(|a| a.to_string());
    assert_eq!(common(&["198.51.100.10"]).as_deref(), Some("198.51.100.10"));
    assert_eq!(
        common(&["198.51.100.0/24"]).as_deref(),
        Some("198.51.100.8")
    );
    assert_eq!(common(&["198.51.100.12", "2001:db8::2"]), None);
}

#[test]
fn each_vm_has_one_address_and_all_addresses_have_vms() {
    let four = pool(&["198.51.100.8/30", "2001:db8::8/126"]);
    let names: Vec<String> = (0..1_000).map(|n| format!("vm{n}")).collect();
    for is_ipv6 in [false, true] {
        let mut counts = BTreeMap::<IpAddr, usize>::new();
        for name in &names {
            let paired = four.paired(name, is_ipv6, |_| true).unwrap();
            assert_eq!(four.paired(name, is_ipv6, |_| true), Some(paired));
            *counts.entry(paired).or_default() += 1;
        }
        assert_eq!(counts.len(), 4);
        assert!(
            counts.values().all(|n| (200..300).contains(n)),
            "{counts:?}"
        );
    }
}

#[test]
fn an_address_that_goes_or_comes_concerns_its_own_vms_only() {
    let four = pool(&["198.51.100.8/30"]);
    let gone: IpAddr = "198.51.100.9".parse().unwrap();
    for name in (0..1_000).map(|n| format!("vm{n}")) {
        let before = four.paired(&name, false, |_| true).unwrap();
        let after = four
            .paired(&name, false, |address| address != gone)
            .unwrap();
        assert_eq!(before == after, before != gone, "{name}");
    }
    assert_eq!(four.paired("a", false, |_| false), None);
    assert_eq!(four.paired("a", true, |_| true), None);
}

#[test]
fn the_choice_is_the_same_in_all_versions() {
    // Another address here means that an upgrade would give live VMs others.
    let pool = pool(&["198.51.100.8/30", "2001:db8::8/126"]);
    let paired = |vm| [false, true].map(|six| pool.paired(vm, six, |_| true).unwrap().to_string());
    assert_eq!(paired("web1"), ["198.51.100.8", "2001:db8::9"]);
}
