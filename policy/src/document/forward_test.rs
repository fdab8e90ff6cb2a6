use super::*;

fn parsed(spec: &str) -> Result<Vec<Forward>, String> {
    parse(&[spec.to_owned()], &["a"]).map_err(|e| e.to_string())
}

#[test]
fn an_ipv6_address_is_in_brackets() {
    let forwards = parsed("tcp:[2001:db8::1]:9000-9001:90-91").unwrap();
    let all: Vec<_> = forwards
        .iter()
        .map(|f| (f.host.to_string(), f.host_port, f.guest_port))
        .collect();
    let host = || "2001:db8::1".to_owned();
    assert_eq!(all, [(host(), 9_000, 90), (host(), 9_001, 91)]);
    assert!(forwards.iter().all(|f| !f.is_of_both));
    assert!(parsed("udp:[::1]:53:53").unwrap()[0].host.is_loopback());
    for (spec, problem) in [
        ("tcp:2001:db8::1:80:80", "not PROTOCOL:[ADDR:]PORT:PORT"),
        ("tcp:[2001:db8::1:80:80", "not PROTOCOL:[ADDR:]PORT:PORT"),
        ("tcp:[2001:db8::1]:80", "not PROTOCOL:[ADDR:]PORT:PORT"),
        ("tcp:[10.0.0.1]:80:80", "is not an IPv6 address"),
        ("tcp:[fe80::1]:80:80", "one link only"),
        ("tcp:[ff02::1]:80:80", "one link only"),
        ("tcp:[::ffff:192.0.2.1]:80:80", "an IPv4 address"),
    ] {
        let error = parsed(spec).unwrap_err();
        assert!(error.contains(problem), "{spec}: {error}");
    }
}

#[test]
fn a_forward_without_an_address_is_of_both_families() {
    let [forward] = &parsed("tcp:8080:80").unwrap()[..] else {
        panic!("one port");
    };
    assert!(forward.host.is_ipv4() && forward.host.is_unspecified());
    let other = forward.in_ipv6().unwrap();
    assert_eq!(other.host, IpAddr::from(Ipv6Addr::UNSPECIFIED));
    assert_eq!((other.host_port, other.guest_port), (8_080, 80));
    assert_eq!(other.in_ipv6(), None);
    for one in ["tcp:0.0.0.0:8080:80", "tcp:[::]:8080:80"] {
        assert_eq!(parsed(one).unwrap()[0].in_ipv6(), None);
    }
}

#[test]
fn a_port_is_given_once_in_each_family() {
    let both = |a: &str, b: &str| parse(&[a.to_owned(), b.to_owned()], &["a"]);
    for (a, b) in [
        ("tcp:8080:80", "tcp:[2001:db8::1]:8080:81"),
        ("tcp:[::]:8080:80", "tcp:[2001:db8::1]:8080:81"),
        ("tcp:[2001:db8::1]:8080:80", "tcp:8080:81"),
    ] {
        assert!(both(a, b).is_err(), "{a} {b}");
    }
    for (a, b) in [
        ("tcp:0.0.0.0:8080:80", "tcp:[::]:8080:81"),
        ("tcp:[2001:db8::2]:8080:80", "tcp:[2001:db8::1]:8080:81"),
        ("tcp:8080:80", "udp:[::]:8080:81"),
    ] {
        assert_eq!(both(a, b).unwrap().len(), 2, "{a} {b}");
    }
}
