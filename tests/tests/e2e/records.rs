//! The flow log: one line for each flow at its end, with its final counts.

use std::collections::HashSet;

use slipgate_testbed::{
    clients::{tcp, udp},
    require_root_and_tun,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    world::SERVER,
};

use crate::{Stand, WAIT};

#[test]
fn an_orderly_stop_records_each_flow_once_with_its_final_counts_and_leaves_nothing() {
    require_root_and_tun!();
    let mut stand = Stand::new(&[]);
    let net = &stand.world.net;
    let server = TcpServer::start(net, (SERVER, 7000), TcpService::Streams).unwrap();
    let echo = UdpServer::start(net, (SERVER, 7), UdpService::Echo).unwrap();
    stand.run(|| {
        tcp::upload(server.address(), 2 << 20, 1, WAIT).unwrap();
        tcp::download(server.address(), 2 << 20, 1, WAIT).unwrap();
        udp::burst(echo.address(), 10, 500, WAIT).unwrap();
    });
    std::thread::sleep(crate::BRIEFLY);
    let flows = stand.slipgate.flows().unwrap();
    assert_eq!(flows.len(), 3, "{flows:?}");
    assert!(stand.slipgate.stop().unwrap().success());
    let records = stand.records();
    let ids: HashSet<_> = records
        .iter()
        .map(|record| record["id"].to_string())
        .collect();
    assert_eq!((records.len(), ids.len()), (3, 3), "{records:?}");
    for flow in &flows {
        let same = |record: &&serde_json::Value| record["nat"] == flow.nat.as_str();
        let record = records
            .iter()
            .find(same)
            .unwrap_or_else(|| panic!("no record of {flow:?}"));
        assert_eq!(record["proto"], flow.proto.as_str());
        assert_eq!(record["vm"], "tap0");
        for (name, counted) in [
            ("tx_packets", flow.tx_packets),
            ("tx_bytes", flow.tx_bytes),
            ("rx_packets", flow.rx_packets),
            ("rx_bytes", flow.rx_bytes),
        ] {
            assert_eq!(record[name], counted, "{name} of {record}");
        }
    }
    assert!(
        stand.slipgate.pins().pins().is_empty(),
        "{:?}",
        stand.slipgate.pins().pins()
    );
    assert_eq!(stand.world.host.ifindex(stand.slipgate.engine_port()), None);
    let tap = stand.world.host.ip("link show tap0").unwrap();
    assert!(!tap.contains(",UP"), "the TAP is shut: {tap}");
    // It starts again from nothing.
    stand.again();
    stand
        .run(|| tcp::download(server.address(), 1 << 20, 1, WAIT))
        .unwrap();
}
