use super::*;

#[test]
fn pools_are_of_guests_space_and_of_32_bits_or_more() {
    for good in [
        "2001:db8::/56",
        "2001:db8:1:2::/64",
        "fd00::/32",
        "2001:db8::/65",
        "2001:db8::100/120",
        "2001:db8::1/128",
    ] {
        let pool = check_routed_pool("--ipv6", good).unwrap();
        assert_eq!(pool.to_string(), good);
    }
    for bad in [
        "2001:db8::1",
        "2001:db8::/31",
        "2001:db8::101/120",
        "2001:db8::/128",
        "fd73:6c69:7067::100/120",
        "2000::/3",
        "2001:db8::1/56",
        "fe80::/64",
        "2002::/48",
        "2001::/48",
        "10.0.0.0/8",
    ] {
        let error = check_routed_pool("--ipv6", bad).unwrap_err().to_string();
        assert!(error.contains("--ipv6") && error.contains(bad), "{error}");
    }
}

#[test]
fn a_name_gets_the_same_prefix_and_no_two_get_one() {
    let pool: Ipv6Net = "2001:db8:0:40::/58".parse().unwrap();
    // Of any build: a change of it would give VMs other addresses.
    let of_a = prefix_in_pool(pool, "a", |_| false).unwrap();
    assert_eq!(of_a.to_string(), "2001:db8:0:7e::/64");
    let mut taken = Vec::new();
    for vm in 1..64 {
        let name = format!("vm-{vm}");
        let prefix = prefix_in_pool(pool, &name, |prefix| taken.contains(&prefix)).unwrap();
        assert!(pool.contains(&prefix) && !taken.contains(&prefix));
        assert_eq!(prefix.prefix_len(), 64);
        assert_ne!(prefix.network(), pool.network(), "it is the host's");
        taken.push(prefix);
    }
    assert_eq!(
        prefix_in_pool(pool, "one more", |p| taken.contains(&p)),
        None
    );
    let one = "2001:db8:9::/64".parse().unwrap();
    assert_eq!(prefix_in_pool(one, "any", |_| false), Some(one));
}

#[test]
fn a_vm_has_a_prefix_of_64_bits_or_a_single_address() {
    for good in ["2001:db8:1:2::/64", "2001:db8::17/128", "fd00::17/128"] {
        let prefix = check_routed_prefix("ipv6_prefix", good).unwrap();
        assert_eq!(prefix.to_string(), good);
    }
    for bad in [
        "2001:db8::/56",
        "2001:db8::100/120",
        "2001:db8::17/64",
        "2001:db8::/128",
        "fd73:6c69:7067::17/128",
        "fe80::17/128",
        "::1/128",
        "2001:db8::17",
    ] {
        let error = check_routed_prefix("ipv6_prefix", bad).unwrap_err();
        assert!(error.to_string().contains(bad), "{error}");
    }
}

#[test]
fn a_pool_beyond_64_bits_has_an_address_for_each_name() {
    let pool: Ipv6Net = "2001:db8::40/122".parse().unwrap();
    // Of any build: a change of it would give VMs other addresses.
    let of_a = prefix_in_pool(pool, "a", |_| false).unwrap();
    assert_eq!(of_a.to_string(), "2001:db8::7e/128");
    let mut taken = Vec::new();
    for vm in 1..64 {
        let name = format!("vm-{vm}");
        let address = prefix_in_pool(pool, &name, |address| taken.contains(&address)).unwrap();
        assert!(pool.contains(&address) && !taken.contains(&address));
        assert_eq!(address.prefix_len(), 128);
        assert_ne!(address.network(), pool.network(), "it is the host's");
        taken.push(address);
    }
    let more = prefix_in_pool(pool, "one more", |p| taken.contains(&p));
    assert_eq!(more, None);
    let largest = "2001:db8:8000::/65".parse().unwrap();
    assert!(prefix_in_pool(largest, "any", |_| false).is_some());
    let one = "2001:db8::9/128".parse().unwrap();
    assert_eq!(prefix_in_pool(one, "any", |_| false), Some(one));
}
