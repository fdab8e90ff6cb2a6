//! The addresses that guests may have: bound to their VMs, bounded, shown; and what a guest may not
//! say on its link.
use std::net::{SocketAddr, UdpSocket};

use serde_json::json;
use slipgate_testbed::{GUEST_DEVICE, require_root_and_tun};

use super::scene::*;
use crate::{BRIEFLY, WAIT, daemon};

#[test]
fn ipv6_guest_is_no_router() {
    require_root_and_tun!();
    let stand = stand6(&[]);
    for (kind, len) in [(134, 16), (137, 40)] {
        let mut message = vec![0; len];
        message[0] = kind;
        stand.run(|| {
            raw_socket()
                .send_to(&message, on_link("ff02::1", 0))
                .unwrap()
        });
    }
    until("dropped", || stand.dropped("router_advertisement") == 2);
}

#[test]
fn ipv6_addresses_of_a_guest_are_bounded() {
    require_root_and_tun!();
    let stand = stand6(&[]);
    let server = Echo::start(&stand.world, SERVER6, 7000);
    let own = |host: u32| SocketAddr::new(ip6(&format!("{PREFIX}1:{host:x}")).into(), 0);
    for host in 1..=12 {
        let address = own(host).ip();
        stand
            .guest
            .ns
            .ip(&format!(
                "-6 addr add {address}/64 dev {GUEST_DEVICE} nodad"
            ))
            .unwrap();
    }
    let reaches = |host: u32| {
        let socket = stand.run(|| UdpSocket::bind(own(host))).unwrap();
        socket.set_read_timeout(Some(BRIEFLY)).unwrap();
        socket.send_to(b"from", server.address()).unwrap();
        socket.recv(&mut [0; 16]).is_ok()
    };
    // One of the eight is the address that it made itself.
    let reached: Vec<u32> = (1..=12).filter(|host| reaches(*host)).collect();
    assert_eq!(reached, (1..=7).collect::<Vec<u32>>());
    assert!(stand.dropped("address_bound") >= 5, "{}", stand.total());
    // Addresses of others are nobody's.
    stand
        .guest
        .ns
        .ip(&format!(
            "-6 addr add 2001:db8:bad::1/128 dev {GUEST_DEVICE} nodad"
        ))
        .unwrap();
    let spoofed = stand.dropped("spoofed");
    let socket = stand
        .run(|| UdpSocket::bind("[2001:db8:bad::1]:0"))
        .unwrap();
    socket.send_to(b"from", server.address()).unwrap();
    until("spoofed", || stand.dropped("spoofed") > spoofed);
}

#[test]
fn ipv6_of_a_daemons_vm_is_its_own_and_shown() {
    require_root_and_tun!();
    let stand = daemon::Stand::new(&[]);
    give_world(&stand.world);
    let (guest, other) = (stand.guest("tap0"), stand.guest("tap1"));
    let prefix = "2001:db8:77::/64";
    stand.vm(&[
        "add",
        "a",
        "--tap",
        "tap0",
        "--ipv6",
        "nat",
        "--ipv6-prefix",
        prefix,
    ]);
    stand.vm(&["add", "b", "--tap", "tap1"]);
    for guest in [&guest, &other] {
        enable(&guest.ns, &[GUEST_DEVICE]);
    }
    let of = |name: &str| {
        let vms = stand.vms();
        vms.into_iter().find(|vm| vm["name"] == name).unwrap()
    };
    // Its kernel makes one of its link and one of its prefix, and is sure of them after a second.
    let bound = crate::eventually("two addresses", || {
        let bound = of("a")["guest_ipv6"]["addresses"].as_array()?.clone();
        (bound.len() == 2).then_some(bound)
    });
    let is_of = |at: usize, prefix: &str| bound[at].as_str().unwrap().starts_with(prefix);
    assert!(is_of(0, "fe80:") && is_of(1, "2001:db8:77:"), "{bound:?}");
    assert_eq!(of("a")["guest_ipv6"]["gateway"], "2001:db8:77::1");
    assert_eq!(of("a")["ipv6_prefix"], prefix);
    assert_eq!(
        of("b")["guest_ipv6"],
        json!(null),
        "the daemon's --ipv6 is off"
    );
    assert!(stand.vm(&["ls"]).contains("2001:db8:77:"));

    // Until then it would send from its link-local address.
    until("an address that it may use", || {
        address_in(&guest.ns).is_some()
    });
    let server = Echo::start(&stand.world, SERVER6, 7000);
    let to = server.address();
    let connected = guest.run(|| std::net::TcpStream::connect_timeout(&to, WAIT));
    assert!(connected.is_ok(), "{connected:?}");
    let error = stand.vm_error(&["set", "a", "--ipv6", "off"]);
    assert!(error.contains("remove it and add it again"), "{error}");
    let error = stand.vm_error(&["add", "c", "--tap", "tap2", "--ipv6-prefix", "fd00::/48"]);
    assert!(
        error.contains("ipv6_prefix") && error.contains("64 bits"),
        "{error}"
    );
}
