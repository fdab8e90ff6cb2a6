use super::*;

#[test]
fn a_prefix_of_guests_is_a_64_of_unicast_space() {
    for good in ["fd73:6c69:7067::/64", "2001:db8:1:2::/64", "fc00::/64"] {
        assert_eq!(
            check_ipv6_prefix("--ipv6-prefix", good)
                .unwrap()
                .to_string(),
            good
        );
    }
    for (bad, why) in [
        ("10.0.0.0/8", "not an IPv6 prefix"),
        ("fd00::", "not an IPv6 prefix"),
        ("fd00::/48", "64 bits"),
        ("fd00::1/64", "beyond the first 64"),
        ("fe80::/64", "neither a unique local"),
        ("ff02::/64", "neither a unique local"),
        ("::/64", "neither a unique local"),
        ("64:ff9b::/64", "neither a unique local"),
        ("2002:c000:201::/64", "6to4"),
        ("2001::/64", "Teredo"),
    ] {
        let error = check_ipv6_prefix("--ipv6-prefix", bad)
            .unwrap_err()
            .to_string();
        assert!(error.contains(why), "{bad}: {error}");
        assert!(error.contains("--ipv6-prefix"), "{error}");
    }
}
