//! Flows that the engine ends on both sides: forwards of the host's own, DNS over TCP, the host's
//! loopback. What people see of them, and can do to them.

use std::{
    io::{ErrorKind, Read as _},
    net::TcpStream,
};

use slipgate_testbed::{
    clients::{tcp, udp},
    servers::{TcpServer, TcpService, UdpServer, UdpService},
};

use crate::{
    Cell, Stand, WAIT, eventually,
    matrix::{at, matrix},
};

matrix! {
    relayed_flows_are_shown_counted_and_cut_as_others_are: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
}

fn relayed_flows_are_shown_counted_and_cut_as_others_are(cell: Cell) {
    let stand = Stand::with_known_guest(
        cell,
        &[
            "--dns",
            "none",
            "--forward",
            "tcp:8080:80",
            "--host-loopback",
            "9000/udp",
        ],
    );
    let tcp = |net, ip, port| TcpServer::start(net, (ip, port), TcpService::Echo).unwrap();
    let _inside = tcp(&stand.guest.ns, cell.guest(), 80);
    let service = (cell.loopback(), 9000);
    let _service = UdpServer::start(&stand.world.host, service, UdpService::Echo).unwrap();
    let world = tcp(&stand.world.net, cell.server(), 7000);
    let connect = |to| tcp::connect(to, WAIT).unwrap();
    let mut forwarded = stand.world.host.run(|| {
        let mut stream = connect(at(cell.loopback(), 8080));
        tcp::EchoSession::new(&mut stream).round(5_000).unwrap();
        stream
    });
    // DNS over TCP, which nothing is asked by yet.
    let resolver = at(cell.resolver_elsewhere(), 53);
    let (mut dns, mut translated) = stand.run(|| {
        udp::probe(at(cell.gateway(), 9000), b"x", WAIT).unwrap();
        (connect(resolver), connect(world.address()))
    });
    // Who connects is done when the answer has come: the ACK of it may be on its way yet.
    let flows = eventually("three and one, all open", || {
        let flows = stand.slipgate.flows().unwrap();
        let all_open = flows.iter().all(|flow| flow.state != "opening");
        (flows.len() == 4 && all_open).then_some(flows)
    });
    let relayed: Vec<_> = flows.iter().filter(|flow| flow.path == "relay").collect();
    let shown: Vec<_> = relayed
        .iter()
        .map(|flow| (flow.proto.as_str(), flow.rule.as_str(), flow.state.as_str()))
        .collect();
    let expected = [
        ("tcp", Some("--forward tcp:8080:80"), "established"),
        ("udp", Some("--host-loopback 9000/udp"), "both-ways"),
        ("tcp", None, "established"),
    ];
    assert_eq!(shown, expected);
    assert!(relayed[0].tx_bytes > 5_000 && relayed[0].rx_bytes > 5_000);
    assert_eq!(relayed[2].remote, resolver.to_string());
    let text = stand.slipgate.run(&["flows"]).unwrap().stdout;
    let text = String::from_utf8(text).unwrap();
    assert!(
        text.contains(&relayed[0].id) && text.contains("relay"),
        "{text}"
    );
    let top = stand.slipgate.run(&["top", "--once"]).unwrap().stdout;
    let top = String::from_utf8(top).unwrap();
    assert!(top.starts_with("slipgate top  1 VM  4 flows"), "{top}");
    let listed = at(cell.gateway(), 9000).to_string();
    assert!(top.contains(&listed), "{top}");
    let counts = |stand: &Stand| stand.slipgate.stats().unwrap()["vms"][0]["relayed"].clone();
    let before = counts(&stand);
    assert_eq!((&before["flows"], &before["begun"]), (&3.into(), &3.into()));
    let sum: u64 = relayed.iter().map(|flow| flow.tx_packets).sum();
    assert!(before["tx_packets"].as_u64() >= Some(sum), "{before}");

    let error = stand
        .slipgate
        .run(&["capture", &relayed[0].id])
        .unwrap_err();
    assert!(error.to_string().contains("--pcap"), "{error}");
    let said = stand.slipgate.run(&["cut", &relayed[0].id]).unwrap().stdout;
    assert_eq!(String::from_utf8_lossy(&said), "cut 1 flow\n");
    let reset = |stream: &mut TcpStream| {
        stream.set_read_timeout(Some(WAIT)).unwrap();
        let error = stream.read(&mut [0; 8]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    };
    reset(&mut forwarded);
    let again = stand.slipgate.run(&["cut", &relayed[0].id]).unwrap_err();
    assert!(again.to_string().contains("no flow"), "{again}");
    // The others were not meant.
    stand
        .run(|| tcp::EchoSession::new(&mut translated).round(100))
        .unwrap();
    assert_eq!(counts(&stand)["flows"], 2);
    // DNS over TCP is of the VM, too.
    let said = stand.slipgate.run(&["cut", "tap0"]).unwrap().stdout;
    assert_eq!(String::from_utf8_lossy(&said), "cut 3 flows\n");
    reset(&mut dns);
    reset(&mut translated);
    // A flow that was cut is there until its grace is over.
    eventually("all flows are gone", || {
        stand.slipgate.flows().unwrap().is_empty().then_some(())
    });
    let after = counts(&stand);
    assert_eq!((&after["flows"], &after["ended"]), (&0.into(), &3.into()));
}
