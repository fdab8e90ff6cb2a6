//! Uplinks that VMs of a daemon name for themselves.
use std::{io::Read as _, net::Ipv4Addr};

use serde_json::{Value, json};
use slipgate_testbed::{
    Guest, World,
    clients::{
        tcp,
        tcp::{ConnectOutcome, EchoSession},
    },
    require_root_and_tun,
    servers::{TcpServer, TcpService},
    world::{HOST, SERVER},
};

use crate::{BRIEFLY, GUEST, WAIT, api::Stand, at, eventually};

/// Name of the second uplink.
const OWN: &str = "up1";
/// The host's address there.
const OWN_ADDRESS: Ipv4Addr = Ipv4Addr::new(198, 18, 1, 2);

/// Gives the host a second uplink, with a default route that the host itself does not use.
fn add_uplink(world: &World) {
    let (host, net) = (&world.host, &world.net);
    let peer = net.path();
    host.ip(&format!(
        "link add {OWN} type veth peer name w1 netns {}",
        peer.display()
    ))
    .unwrap();
    net.ip("addr add 198.18.1.1/24 dev w1").unwrap();
    net.ip("link set w1 up").unwrap();
    host.ip(&format!("addr add {OWN_ADDRESS}/24 dev {OWN}"))
        .unwrap();
    host.ip(&format!("link set {OWN} up")).unwrap();
    host.ip(&format!(
        "route add default via 198.18.1.1 dev {OWN} metric 9000"
    ))
    .unwrap();
}

fn put(stand: &Stand, name: &str, tap: &str, uplink: Option<&str>) -> Value {
    let body = json!({ "tap": tap, "uplink": uplink });
    let (status, vm) = stand.ask("PUT", &format!("/v1/vms/{name}"), Some(body));
    assert!(matches!(status, 200 | 201), "{status} {vm}");
    vm
}

/// The address from which the server sees a new connection of the guest.
fn source(guest: &Guest, echo: &TcpServer) -> Ipv4Addr {
    let mut stream = guest.run(|| tcp::connect(echo.address(), WAIT)).unwrap();
    guest
        .run(|| EchoSession::new(&mut stream).round(1))
        .unwrap();
    *echo.peers().last().unwrap().ip()
}

#[test]
fn a_vm_leaves_by_its_own_uplink_and_others_by_the_daemons() {
    require_root_and_tun!();
    let stand = Stand::new();
    add_uplink(stand.world());
    let echo = TcpServer::start(&stand.world().net, (SERVER, 7000), TcpService::Echo).unwrap();
    let (own, other) = (stand.guest("tap0"), stand.guest("tap1"));
    assert_eq!(put(&stand, "a", "tap0", Some(OWN))["uplink"], OWN);
    put(&stand, "b", "tap1", None);

    let mut stream = own.run(|| tcp::connect(echo.address(), WAIT)).unwrap();
    let mut echoes = || own.run(|| EchoSession::new(&mut stream).round(10_000));
    echoes().unwrap();
    assert_eq!(source(&own, &echo), OWN_ADDRESS);
    let mut kept = other.run(|| tcp::connect(echo.address(), WAIT)).unwrap();
    assert_eq!(source(&other, &echo), HOST);
    let why = "/v1/vms/a/why?address=203.0.113.10&port=7000";
    let (_, why) = stand.ask("GET", why, None);
    assert!(
        why["via"]
            .as_str()
            .is_some_and(|via| via.starts_with("198.18.1.2 by 198.18.1.1 ")),
        "{why}"
    );
    // Another engine finds the flow and its VM's uplink.
    stand.signal_engine(libc::SIGKILL);
    echoes().unwrap();
    eventually("an engine", || {
        own.run(|| tcp::connect(echo.address(), BRIEFLY)).ok()
    });
    echoes().unwrap();
    assert_eq!(source(&own, &echo), OWN_ADDRESS);

    // Its flows don't go on by an uplink that it is not to use any more; others' do.
    let (status, vm) = stand.ask("PATCH", "/v1/vms/a", Some(json!({ "uplink": null })));
    assert_eq!((status, vm.get("uplink")), (200, None), "{vm}");
    let ended = own.run(|| stream.read(&mut [0; 16]));
    assert!(ended.is_err(), "{ended:?}");
    assert_eq!(source(&own, &echo), HOST);
    other
        .run(|| EchoSession::new(&mut kept).round(10_000))
        .unwrap();
}

#[test]
fn a_forward_is_reached_by_its_vms_own_uplink_only() {
    require_root_and_tun!();
    let stand = Stand::new();
    let net = &stand.world().net;
    add_uplink(stand.world());
    let guest = stand.guest("tap0");
    let _echo = TcpServer::start(&guest.ns, (GUEST, 80), TcpService::Echo).unwrap();
    let body = json!({ "tap": "tap0", "uplink": OWN, "forwards": ["tcp:8080:80"] });
    assert_eq!(stand.ask("PUT", "/v1/vms/a", Some(body)).0, 201);
    let mut stream = net
        .run(|| tcp::connect(at(OWN_ADDRESS, 8080), WAIT))
        .unwrap();
    EchoSession::new(&mut stream).round(10_000).unwrap();
    let by_other = net.run(|| tcp::connect_outcome(at(HOST, 8080), BRIEFLY));
    assert!(matches!(by_other.unwrap(), ConnectOutcome::TimedOut(_)));
    let (_, stats) = stand.ask("GET", "/v1/stats", None);
    assert_eq!(
        stats["vms"][0]["refused"]["no_route"].as_u64(),
        Some(1),
        "{stats}"
    );
}

#[test]
fn a_vm_whose_own_uplink_is_away_leaves_by_no_other() {
    require_root_and_tun!();
    let stand = Stand::new();
    let echo = TcpServer::start(&stand.world().net, (SERVER, 7000), TcpService::Echo).unwrap();
    let guest = stand.guest("tap0");
    assert_eq!(put(&stand, "a", "tap0", Some(OWN))["lacks_uplink"], true);
    let connects = || {
        let outcome = guest.run(|| tcp::connect_outcome(echo.address(), BRIEFLY));
        matches!(outcome.unwrap(), ConnectOutcome::Connected(_))
    };
    assert!(!connects());
    let why = "/v1/vms/a/why?address=203.0.113.10&port=7000";
    let (_, why) = stand.ask("GET", why, None);
    assert_eq!(why["outcome"], "the VM's uplink does not exist now");

    for _ in 0..2 {
        add_uplink(stand.world());
        eventually("the uplink", || connects().then_some(()));
        assert_eq!(source(&guest, &echo), OWN_ADDRESS);
        let vm = stand.ask("GET", "/v1/vms/a", None).1;
        assert_eq!(vm.get("lacks_uplink"), None, "{vm}");
        stand.world().host.ip(&format!("link del {OWN}")).unwrap();
        eventually("its end", || {
            let vm = stand.ask("GET", "/v1/vms/a", None).1;
            (vm["lacks_uplink"] == true).then_some(())
        });
        assert!(!connects());
    }
    assert!(echo.peers().iter().all(|peer| *peer.ip() == OWN_ADDRESS));
}

#[test]
fn a_device_that_leads_nowhere_is_refused_as_a_vms_uplink() {
    require_root_and_tun!();
    let stand = Stand::new();
    let _guests = [stand.guest("tap0"), stand.guest("tap1")];
    put(&stand, "a", "tap0", None);
    for (uplink, says) in [
        ("lo", "loopback"),
        ("tap0", "the TAP of a VM"),
        ("tap1", "its own TAP"),
        ("no/device", "can't be a network device"),
    ] {
        let body = json!({ "tap": "tap1", "uplink": uplink });
        let (status, problem) = stand.ask("PUT", "/v1/vms/b", Some(body));
        let detail = problem["detail"].as_str().unwrap_or_default();
        assert!(status == 422 && detail.contains(says), "{status} {problem}");
    }
    put(&stand, "b", "tap1", Some(OWN));
    let body = json!({ "tap": OWN });
    let (status, problem) = stand.ask("PUT", "/v1/vms/c", Some(body));
    assert_eq!(status, 422, "{problem}");
}
