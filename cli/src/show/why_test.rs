use super::*;

#[test]
fn destinations_are_host_and_port_but_for_ping() {
    let host = Host::Address([192, 0, 2, 1].into());
    let name = Host::Name("a.example".into());
    assert_eq!(
        destination("192.0.2.1:443", Protocol::Tcp).unwrap(),
        (host.clone(), 443)
    );
    assert_eq!(
        destination("192.0.2.1", Protocol::Icmp).unwrap(),
        (host.clone(), 0)
    );
    assert_eq!(
        destination("192.0.2.1:7", Protocol::Icmp).unwrap(),
        (host, 0)
    );
    assert_eq!(
        destination("a.example:443", Protocol::Tcp).unwrap(),
        (name.clone(), 443)
    );
    assert_eq!(destination("a.example", Protocol::Icmp).unwrap(), (name, 0));
    let host = Host::Address("2001:db8::1".parse().unwrap());
    for (text, protocol, port) in [
        ("[2001:db8::1]:443", Protocol::Tcp, 443),
        ("[2001:db8::1]", Protocol::Icmp, 0),
        ("2001:db8::1", Protocol::Icmp, 0),
    ] {
        let found = destination(text, protocol).unwrap();
        assert_eq!(found, (host.clone(), port), "{text}");
    }
    for (text, says) in [
        ("192.0.2.1", "no port"),
        ("192.0.2.1:0", "not one of 1 to 65535"),
        ("192.0.2.1:65536", "not one of 1 to 65535"),
        ("a.example:99999", "not one of 1 to 65535"),
        ("a.example:", "not one of 1 to 65535"),
        ("256.1.1.1:80", "neither an address"),
        ("192.0.2.1:http:", "give HOST:PORT"),
        ("[2001:db8::1]x:443", "neither an address"),
        ("2001:db8::1", "[HOST]:PORT with IPv6"),
        ("[2001:db8::g]:443", "neither an address"),
        ("https://a.example/", "leave the scheme out"),
    ] {
        let error = format!("{:#}", destination(text, Protocol::Udp).unwrap_err());
        assert!(error.contains(says), "{text}: {error}");
    }
}
