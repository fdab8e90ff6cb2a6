use super::*;

fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

#[test]
fn a_resolver_is_an_address_with_or_without_port() {
    for (given, meant) in [
        ("9.9.9.9", "9.9.9.9:53"),
        ("127.0.0.1:5353", "127.0.0.1:5353"),
        ("2620:fe::fe", "[2620:fe::fe]:53"),
        ("[2620:fe::fe]", "[2620:fe::fe]:53"),
        ("[::1]:54", "[::1]:54"),
        ("::ffff:192.0.2.53", "192.0.2.53:53"),
    ] {
        assert_eq!(parse_resolver(given), Some(at(meant)));
    }
    for bad in [
        "",
        "dns.example",
        "1.2.3",
        "1.2.3.4:",
        "1.2.3.4:0",
        "1.2.3.4:99999",
        "0.0.0.0",
        "::",
        "::ffff:0.0.0.0",
        "[2620:fe::fe]:0",
        "[2620:fe::fe",
        "ff02::fb",
        "224.0.0.251",
        "fe80::1%3",
        "[fe80::1%3]:53",
        "[2620:fe::fe%3]:53",
    ] {
        assert_eq!(parse_resolver(bad), None, "{bad}");
    }
}

#[test]
fn resolv_conf_is_read_as_its_readers_do() {
    let text = "# a comment\n\
                ; another\n\
                search example.com\n\
                nameserver fe80::1\n\
                nameserver 10.0.0.1\n\
                \tnameserver\t10.0.0.2  # behind\n\
                nameservers 10.0.0.9\n\
                nameserver bogus\n\
                nameserver\n\
                nameserver fe80::1%3\n\
                nameserver fe80::1%eth0\n\
                nameserver 2620:fe::fe\n\
                nameserver 10.0.0.4\n\
                options edns0\n";
    let expected = ["10.0.0.1:53", "10.0.0.2:53", "[2620:fe::fe]:53"].map(at);
    assert_eq!(parse_resolv_conf(text), expected);
    assert_eq!(parse_resolv_conf(""), []);
}
