use super::*;

#[test]
fn pools_are_of_guests_space_and_of_32_to_64_bits() {
    for good in ["2001:db8::/56", "2001:db8:1:2::/64", "fd00::/32"] {
        let pool = check_routed_pool("--ipv6", good).unwrap();
        assert_eq!(pool.to_string(), good);
    }
    for bad in [
        "2001:db8::1",
        "2001:db8::/65",
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
