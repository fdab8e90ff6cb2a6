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

#[test]
fn ports_of_the_guests_own_addresses_are_given_once() {
    let routed = "2001:db8:7::/64".parse().unwrap();
    let mut forwards = parsed("tcp:own:443-444").unwrap();
    for (at, forward) in (443..).zip(&mut forwards) {
        assert!(forward.is_own && !forward.is_of_both && forward.host.is_unspecified());
        assert_eq!((forward.host_port, forward.guest_port), (at, at));
        forward.settle_own(Some(routed)).unwrap();
        assert_eq!(forward.host.to_string(), "2001:db8:7::");
    }
    assert_eq!(parsed("udp:own:53:53").unwrap()[0].guest_port, 53);
    let error = parsed("tcp:own:443:8443").unwrap_err();
    assert!(error.contains("without translation"), "{error}");
    let error = forwards[0].settle_own(None).unwrap_err().to_string();
    assert!(error.contains("no addresses of its own"), "{error}");
    // An address of the prefix is one of the guest's, any other the host's.
    let settled = |spec: &str| {
        let mut forward = parsed(spec).unwrap().remove(0);
        forward.settle_own(Some(routed)).map(|()| forward)
    };
    assert!(settled("tcp:[2001:db8:7::9]:443:443").unwrap().is_own);
    assert!(!settled("tcp:[2001:db8:8::9]:443:80").unwrap().is_own);
    assert!(!settled("tcp:443:80").unwrap().is_own);
    let error = settled("tcp:[2001:db8:7::9]:443:80").unwrap_err();
    assert!(error.to_string().contains("own"), "{error}");
    // It would open all of the /64.
    let error = settled("tcp:[2001:db8:7::]:443:443").unwrap_err();
    assert!(error.to_string().contains("first address"), "{error}");
    let mut single = parsed("tcp:[2001:db8:7::]:443:443").unwrap().remove(0);
    single
        .settle_own(Some("2001:db8:7::/128".parse().unwrap()))
        .unwrap();
    assert!(single.is_own);
}

/// Which addresses are the guest's own is known when its prefix is.
#[test]
fn a_named_address_clashes_by_what_it_turns_out_to_be() {
    let settled = |specs: [&str; 2]| {
        let specs = specs.map(str::to_owned);
        let mut all = parse(&specs, &["a"])?;
        for forward in &mut all {
            forward.settle_own(Some("2001:db8:7::/64".parse().unwrap()))?;
        }
        check_clashes(&all, &["a"])
    };
    // Of the guest, and of the host.
    let (own, hosts) = ("tcp:[2001:db8:7::9]:443:443", "tcp:[2001:db8:8::9]:443:443");
    for (one, other, said) in [
        (
            "tcp:own:443",
            own,
            "port 443 of the guest's own address is open by tcp:own:443 already",
        ),
        (
            own,
            "tcp:own:440-450",
            "is open by tcp:[2001:db8:7::9]:443:443 already",
        ),
        (own, own, "2001:db8:7::9"),
        (
            "tcp:[::]:443:80",
            hosts,
            "port 443 leads to port 80 of the guest already",
        ),
        (hosts, "tcp:443:80", "port 443 leads to port 443"),
    ] {
        let error = settled([one, other]).unwrap_err().to_string();
        assert!(error.contains(said), "{one} {other}: {error}");
    }
    for (one, other) in [
        ("tcp:own:443", hosts),
        ("tcp:443:80", own),
        (own, "tcp:[::]:443:80"),
        (own, "udp:own:443"),
        (own, "tcp:[2001:db8:7::8]:443:443"),
        (own, hosts),
    ] {
        settled([one, other]).unwrap_or_else(|e| panic!("{one} {other}: {e}"));
    }
}

#[test]
fn own_ports_are_in_the_way_of_none_but_the_vms_own() {
    let specs = |all: &[&str]| {
        let all: Vec<String> = all.iter().map(|spec| (*spec).to_owned()).collect();
        parse(&all, &["a", "b"]).map(|all| all.len())
    };
    assert_eq!(
        specs(&["a=tcp:own:443", "b=tcp:own:443", "a=tcp:443:80"]).unwrap(),
        3
    );
    assert!(specs(&["a=tcp:own:443", "a=tcp:own:440-450"]).is_err());
}
