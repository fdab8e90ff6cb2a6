//! Uplinks that VMs of a daemon name for themselves.
use std::{io::Read as _, net::IpAddr};

use serde_json::{Value, json};
use slipgate_testbed::{
    Guest,
    clients::{
        tcp,
        tcp::{ConnectOutcome, EchoSession},
    },
    flow_log, require_root_and_tun,
    servers::{TcpServer, TcpService},
    world::UPLINK,
};

use crate::{
    BRIEFLY, Cell, WAIT,
    api::Stand,
    eventually,
    matrix::{at, matrix, pings},
    stand::SECOND,
};

matrix! {
    a_vm_leaves_by_its_own_uplink_and_others_by_the_daemons: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's routes choose the uplink of its sockets";
    a_forward_is_reached_by_its_vms_own_uplink_only: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's routes choose the uplink of its sockets";
    a_vm_whose_own_uplink_is_away_leaves_by_no_other: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the host's routes choose the uplink of its sockets";
}

fn put(stand: &Stand, name: &str, tap: &str, uplink: Option<&str>) -> Value {
    let body = json!({ "tap": tap, "uplink": uplink });
    let (status, vm) = stand.ask("PUT", &format!("/v1/vms/{name}"), Some(body));
    assert!(matches!(status, 200 | 201), "{status} {vm}");
    vm
}

/// The address from which the server sees a new connection of the guest.
fn source(guest: &Guest, echo: &TcpServer<IpAddr>) -> IpAddr {
    let mut stream = guest.run(|| tcp::connect(echo.address(), WAIT)).unwrap();
    guest
        .run(|| EchoSession::new(&mut stream).round(1))
        .unwrap();
    echo.peers().last().unwrap().ip()
}

fn a_vm_leaves_by_its_own_uplink_and_others_by_the_daemons(cell: Cell) {
    let scratch = tempfile::tempdir().unwrap();
    let log = scratch.path().join("flows.jsonl");
    let stand = Stand::of(cell, &["--flow-log", &log.display().to_string()]);
    cell.add_second_uplink(stand.world());
    let echo =
        TcpServer::start(&stand.world().net, (cell.server(), 7000), TcpService::Echo).unwrap();
    let (own, other) = (stand.guest("tap0"), stand.guest("tap1"));
    assert_eq!(put(&stand, "a", "tap0", Some(SECOND))["uplink"], SECOND);
    put(&stand, "b", "tap1", None);

    let mut stream = own.run(|| tcp::connect(echo.address(), WAIT)).unwrap();
    let mut echoes = || own.run(|| EchoSession::new(&mut stream).round(10_000));
    echoes().unwrap();
    assert_eq!(source(&own, &echo), cell.second_address());
    let mut kept = other.run(|| tcp::connect(echo.address(), WAIT)).unwrap();
    assert_eq!(source(&other, &echo), cell.host());
    let why = format!("/v1/vms/a/why?address={}&port=7000", cell.server());
    let (_, why) = stand.ask("GET", &why, None);
    let expected = format!("{} by {} ", cell.second_address(), cell.second_router());
    assert!(
        why["via"]
            .as_str()
            .is_some_and(|via| via.starts_with(&expected)),
        "{why}"
    );
    // Another engine finds the flow and its VM's uplink.
    stand.signal_engine(libc::SIGKILL);
    echoes().unwrap();
    eventually("an engine", || {
        own.run(|| tcp::connect(echo.address(), BRIEFLY)).ok()
    });
    echoes().unwrap();
    assert_eq!(source(&own, &echo), cell.second_address());

    let by = |name: &str, next_hop: IpAddr| {
        let index = stand.world().host.ifindex(name);
        json!({ "name": name, "index": index, "next_hop": next_hop })
    };
    let (second, first) = (by(SECOND, cell.second_router()), by(UPLINK, cell.router()));
    let said = stand.daemon.run(&["flows", "--json"]).unwrap().stdout;
    let flows: Vec<Value> = serde_json::from_slice(&said).unwrap();
    let live = |vm: &str| flows.iter().find(|flow| flow["vm"] == vm).unwrap();
    assert_eq!(live("a")["uplink"], second);
    assert_eq!(live("b")["uplink"], first);
    let table = stand.daemon.run(&["flows"]).unwrap().stdout;
    let table = String::from_utf8(table).unwrap();
    let head = table.lines().next().unwrap();
    assert!(head.ends_with("UPLINK  RULE"), "{head}");

    // Its flows don't go on by an uplink that it is not to use any more; others' do.
    let (status, vm) = stand.ask("PATCH", "/v1/vms/a", Some(json!({ "uplink": null })));
    assert_eq!((status, vm.get("uplink")), (200, None), "{vm}");
    let ended = own.run(|| stream.read(&mut [0; 16]));
    assert!(ended.is_err(), "{ended:?}");
    let end = eventually("its record", || {
        let records = flow_log::records(&log).unwrap();
        // Whichever is noticed first: that its VM leaves by another, or that the route is not its.
        records
            .into_iter()
            .find(|record| record["end"] == "uplink" || record["end"] == "route")
    });
    assert_eq!(
        (&end["uplink"], &end["moved_to"]),
        (&second, &first),
        "{end}"
    );
    assert_eq!(source(&own, &echo), cell.host());
    other
        .run(|| EchoSession::new(&mut kept).round(10_000))
        .unwrap();
}

fn a_forward_is_reached_by_its_vms_own_uplink_only(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let net = &stand.world().net;
    cell.add_second_uplink(stand.world());
    let guest = stand.guest("tap0");
    let _echo = TcpServer::start(&guest.ns, (cell.guest(), 80), TcpService::Echo).unwrap();
    let body = json!({ "tap": "tap0", "uplink": SECOND, "forwards": ["tcp:8080:80"] });
    assert_eq!(stand.ask("PUT", "/v1/vms/a", Some(body)).0, 201);
    // It shows its address, to which the forward leads.
    assert!(pings(&guest, cell.gateway(), WAIT));
    let mut stream = net
        .run(|| tcp::connect(at(cell.second_address(), 8080), WAIT))
        .unwrap();
    EchoSession::new(&mut stream).round(10_000).unwrap();
    let by_other = net.run(|| tcp::connect_outcome(at(cell.host(), 8080), BRIEFLY));
    assert!(matches!(by_other.unwrap(), ConnectOutcome::TimedOut(_)));
    let (_, stats) = stand.ask("GET", "/v1/stats", None);
    assert_eq!(
        stats["vms"][0]["refused"]["no_route"].as_u64(),
        Some(1),
        "{stats}"
    );
}

fn a_vm_whose_own_uplink_is_away_leaves_by_no_other(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let echo =
        TcpServer::start(&stand.world().net, (cell.server(), 7000), TcpService::Echo).unwrap();
    let guest = stand.guest("tap0");
    assert_eq!(put(&stand, "a", "tap0", Some(SECOND))["lacks_uplink"], true);
    let connects = || {
        let outcome = guest.run(|| tcp::connect_outcome(echo.address(), BRIEFLY));
        matches!(outcome.unwrap(), ConnectOutcome::Connected(_))
    };
    assert!(!connects());
    let why = format!("/v1/vms/a/why?address={}&port=7000", cell.server());
    let (_, why) = stand.ask("GET", &why, None);
    assert_eq!(why["outcome"], "the VM's uplink does not exist now");

    for _ in 0..2 {
        cell.add_second_uplink(stand.world());
        eventually("the uplink", || connects().then_some(()));
        assert_eq!(source(&guest, &echo), cell.second_address());
        let vm = stand.ask("GET", "/v1/vms/a", None).1;
        assert_eq!(vm.get("lacks_uplink"), None, "{vm}");
        stand
            .world()
            .host
            .ip(&format!("link del {SECOND}"))
            .unwrap();
        eventually("its end", || {
            let vm = stand.ask("GET", "/v1/vms/a", None).1;
            (vm["lacks_uplink"] == true).then_some(())
        });
        assert!(!connects());
    }
    let own = cell.second_address();
    assert!(echo.peers().iter().all(|peer| peer.ip() == own));
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
    put(&stand, "b", "tap1", Some(SECOND));
    let body = json!({ "tap": SECOND });
    let (status, problem) = stand.ask("PUT", "/v1/vms/c", Some(body));
    assert_eq!(status, 422, "{problem}");
}
