use super::*;

#[test]
fn a_bound_port_is_found_and_others_are_not() {
    let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = udp.local_addr().unwrap().port();
    assert!(
        bound([&(port..=port)])
            .unwrap()
            .contains(&(Protocol::Udp as u8, port))
    );
    drop(udp);
    assert!(
        !bound([&(port..=port)])
            .unwrap()
            .contains(&(Protocol::Udp as u8, port))
    );
}
