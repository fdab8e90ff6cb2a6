use proptest::prelude::*;

use super::*;

fn parse(text: &str) -> Pattern {
    text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))
}

#[test]
fn each_part_may_be_left_out_but_the_address() {
    let cases = [
        ("10.0.0.0/8", "10.0.0.0/8", None, None),
        ("1.2.3.4", "1.2.3.4/32", None, None),
        (
            "1.2.3.4:443/tcp",
            "1.2.3.4/32",
            Some((443, 443)),
            Some(Protocol::Tcp),
        ),
        ("0.0.0.0/0:25", "0.0.0.0/0", Some((25, 25)), None),
        (
            "0.0.0.0/0:8000-8010/udp",
            "0.0.0.0/0",
            Some((8000, 8010)),
            Some(Protocol::Udp),
        ),
        ("1.2.3.4/icmp", "1.2.3.4/32", None, Some(Protocol::Icmp)),
        (
            "198.51.100.0/24/TCP",
            "198.51.100.0/24",
            None,
            Some(Protocol::Tcp),
        ),
        ("  1.2.3.4:1-65535 ", "1.2.3.4/32", Some((1, 65535)), None),
        ("::/0", "::/0", None, None),
        ("2001:DB8::/32", "2001:db8::/32", None, None),
        ("2001:db8::1", "2001:db8::1/128", None, None),
        ("[2001:db8::1]", "2001:db8::1/128", None, None),
        (
            "2001:db8::/32/udp",
            "2001:db8::/32",
            None,
            Some(Protocol::Udp),
        ),
        (
            "[2001:db8::/32]:443/tcp",
            "2001:db8::/32",
            Some((443, 443)),
            Some(Protocol::Tcp),
        ),
        (
            "[2001:db8::1]/icmp",
            "2001:db8::1/128",
            None,
            Some(Protocol::Icmp),
        ),
        ("[::/0]:8000-8010", "::/0", Some((8000, 8010)), None),
        ("2001:db8::/32:25", "2001:db8::/32", Some((25, 25)), None),
    ];
    for (text, prefix, ports, protocol) in cases {
        let pattern = parse(text);
        assert_eq!(pattern.prefix(), prefix.parse::<IpNet>().unwrap(), "{text}");
        assert_eq!(pattern.ports(), ports, "{text}");
        assert_eq!(pattern.scope.protocol, protocol, "{text}");
    }
}

#[test]
fn an_error_says_what_was_given_and_what_would_do() {
    let cases = [
        ("", "nothing is given"),
        (":53", "\"\" in \":53\" is not an IPv4 address"),
        (
            "example.com:443",
            "\"example.com\" in \"example.com:443\" is not an IPv4 address: write four numbers",
        ),
        ("1.2.3", "\"1.2.3\" in"),
        ("1.2.3.4/33", "\"33\" in \"1.2.3.4/33\" is not one: 0 to 32"),
        ("1.2.3.4/8x", "\"8x\""),
        ("10.1.2.3/8", "10.0.0.0/8 is the network, 10.1.2.3 the host"),
        ("1.2.3.4:", "Port \"\""),
        ("1.2.3.4:0", "Port \"0\""),
        ("1.2.3.4:65536", "Port \"65536\""),
        ("1.2.3.4:+80", "Port \"+80\""),
        ("1.2.3.4:90-80", "Port \"90-80\""),
        ("1.2.3.4:80-", "Port \"80-\""),
        ("1.2.3.4:80/sctp", "Protocol \"sctp\""),
        ("1.2.3.4/", "Protocol \"\""),
        ("1.2.3.4/8/", "10"),
        ("1.2.3.4:8/icmp", "ICMP has no ports"),
        ("[2001:db8::1:80", "bracket"),
        ("2001:db8::1]:80", "not an IPv6 prefix"),
        ("2001:db8::1:80-90", "[2001:db8::/32]:443/tcp"),
        ("[2001:db8::1]80", "not an IPv6 prefix"),
        ("[2001:db8::1:443/tcp]", "not an IPv6 prefix"),
        ("[2001:db8::/32/tcp]", "not an IPv6 prefix"),
        ("[192.0.2.1]:80", "not an IPv6 prefix"),
        ("fe80::1%eth0", "not an IPv6 prefix"),
        ("2001:db8::/129", "0 to 128 would do"),
        (
            "2001:db8::1/32",
            "2001:db8::/32 is the network, 2001:db8::1 the host",
        ),
        ("[2001:db8::]/32:443", "[2001:db8::/32]:443/tcp"),
        ("::ffff:192.0.2.1", "write 192.0.2.1"),
    ];
    for (text, expected) in cases {
        match text.parse::<Pattern>() {
            Ok(pattern) => panic!("{text:?} was taken as {pattern}"),
            Err(error) if text == "1.2.3.4/8/" => {
                assert!(matches!(error, PatternError::HostBits { .. }), "{error}");
            }
            Err(error) => assert!(
                error.to_string().contains(expected),
                "{text:?}: {error} lacks {expected:?}"
            ),
        }
    }
}

#[test]
fn a_url_is_said_to_be_one_and_what_to_write() {
    for (url, instead) in [
        ("https://x/", "x:443/tcp"),
        (
            "HTTPS://api.example.com/v1?q=a:b",
            "api.example.com:443/tcp",
        ),
        ("http://example.com", "example.com:80/tcp"),
        (
            "http://user:secret@example.com:8080/",
            "example.com:8080/tcp",
        ),
        ("ssh://git.example.com", "git.example.com/tcp"),
        ("https://192.0.2.1#top", "192.0.2.1:443/tcp"),
        ("https://[2001:db8::1]/", "[2001:db8::1]:443/tcp"),
        ("http://[2001:db8::1]:8080/", "[2001:db8::1]:8080/tcp"),
        ("://", "example.com:443/tcp"),
    ] {
        let expected = format!(
            "{url:?} is a URL, and rules know neither schemes nor paths: write {instead:?}"
        );
        let by_address = url.parse::<Pattern>().map_err(|e| e.to_string());
        let by_name = url.parse::<NamePattern>().map_err(|e| e.to_string());
        assert_eq!(by_address, Err(expected.clone()));
        assert_eq!(by_name, Err(expected));
    }
}

#[test]
fn a_port_leaves_icmp_out_and_no_port_takes_it_in() {
    let to = |protocol, port| Destination {
        addr: IpAddr::from([1, 2, 3, 4]),
        port,
        protocol,
    };
    assert!(parse("1.2.3.4").matches(to(Protocol::Icmp, 0)));
    assert!(!parse("1.2.3.4:1-65535").matches(to(Protocol::Icmp, 0)));
    assert!(parse("1.2.3.4:53").matches(to(Protocol::Udp, 53)));
    assert!(parse("1.2.3.4:53").matches(to(Protocol::Tcp, 53)));
    assert!(!parse("1.2.3.4:53/tcp").matches(to(Protocol::Udp, 53)));
    assert!(!parse("1.2.3.5").matches(to(Protocol::Tcp, 53)));
}

proptest! {
    #[test]
    fn what_is_written_reads_back(
        addr in any::<IpAddr>(), len in 0_u8..=128, ports in prop::option::of((1_u16.., 1_u16..)), protocol in 0_usize..4,
    ) {
        prop_assume!(addr.is_ipv4() || addr.to_canonical() == addr);
        let protocol = [None, Some(Protocol::Tcp), Some(Protocol::Udp), Some(Protocol::Icmp)][protocol];
        let pattern = Pattern {
            prefix: IpNet::new_assert(addr, len.min(IpNet::from(addr).prefix_len())).trunc(),
            scope: Scope {
                ports: ports.filter(|_| protocol != Some(Protocol::Icmp)).map(|(a, b)| (a.min(b), a.max(b))),
                protocol,
            },
        };
        prop_assert_eq!(pattern.to_string().parse::<Pattern>(), Ok(pattern));
    }

    #[test]
    fn no_text_panics(text in "[0-9./:a-z\\[\\]-]{0,24}|.{0,24}") {
        if let Ok(pattern) = text.parse::<Pattern>() {
            prop_assert_eq!(pattern.to_string().parse::<Pattern>(), Ok(pattern));
        }
    }
}
