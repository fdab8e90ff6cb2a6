use super::*;

#[test]
fn only_what_makes_a_difference_is_set() {
    for (version, host) in [
        (
            Version::V4,
            std::net::IpAddr::from(std::net::Ipv4Addr::LOCALHOST),
        ),
        (Version::V6, std::net::Ipv6Addr::LOCALHOST.into()),
    ] {
        let socket: OwnedFd = std::net::UdpSocket::bind((host, 0)).unwrap().into();
        let least = version.least_mtu() as usize;
        let mut setting = None;
        let mut after = |wanted, len| {
            set(&socket, &mut setting, wanted, (version, len));
            setting
        };
        use IfTooLong::{InFragments, Refused};
        assert_eq!(after(Refused, least), None);
        assert_eq!(after(Refused, least + 1), Some(Refused));
        assert_eq!(after(InFragments, least), Some(InFragments));
        assert_eq!(
            after(Refused, least),
            Some(Refused),
            "it would be fragmented"
        );
    }
}
