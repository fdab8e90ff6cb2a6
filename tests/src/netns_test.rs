use super::route_with;

#[test]
fn a_route_is_given_back_as_it_was_shown_with_its_congestion_control() {
    for (shown, given) in [
        (
            "default via 198.18.0.1 dev up0 ",
            "default via 198.18.0.1 dev up0 congctl cubic",
        ),
        (
            "10.0.2.0/24 dev eth0 proto kernel scope link src 10.0.2.15 linkdown ",
            "10.0.2.0/24 dev eth0 proto kernel scope link src 10.0.2.15 congctl cubic",
        ),
        (
            "10.0.2.0/24 dev eth0 mtu 1300 congctl bbr advmss 1000",
            "10.0.2.0/24 dev eth0 mtu 1300 advmss 1000 congctl cubic",
        ),
    ] {
        assert_eq!(route_with(shown, "cubic").as_deref(), Some(given));
        assert_eq!(route_with(given, "cubic"), None);
    }
    for shown in [
        "default proto static ",
        "\tnexthop via 10.0.0.1 dev up0 weight 1 ",
        "blackhole 10.9.0.0/16",
    ] {
        assert_eq!(route_with(shown, "cubic"), None);
    }
}
