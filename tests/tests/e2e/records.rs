//! The flow log: one line for each flow at its end, with its final counts.

use std::{collections::HashSet, fs::Permissions, os::unix::fs::PermissionsExt as _};

use nix::mount::{MntFlags, MsFlags};
use slipgate_testbed::{
    clients::{tcp, udp},
    servers::{TcpServer, TcpService, UdpServer, UdpService},
};

use crate::{Cell, Stand, WAIT, eventually, matrix::matrix, stand::counts};

matrix! {
    an_orderly_stop_records_each_flow_once_with_its_final_counts_and_leaves_nothing: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    lines_that_a_full_disk_does_not_take_are_told_once_and_counted: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
}

fn an_orderly_stop_records_each_flow_once_with_its_final_counts_and_leaves_nothing(cell: Cell) {
    let mut stand = Stand::of(cell, &[]);
    let net = &stand.world.net;
    let server = TcpServer::start(net, (cell.server(), 7000), TcpService::Streams).unwrap();
    let echo = UdpServer::start(net, (cell.server(), 7), UdpService::Echo).unwrap();
    stand.run(|| {
        tcp::upload(server.address(), 2 << 20, 1, WAIT).unwrap();
        tcp::download(server.address(), 2 << 20, 1, WAIT).unwrap();
        udp::burst(echo.address(), 10, 500, WAIT).unwrap();
    });
    let look = || {
        let mut flows = stand.slipgate.flows().unwrap();
        flows.sort_by(|one, other| one.id.cmp(&other.id));
        let counted: Vec<_> = flows.iter().map(counts).collect();
        (flows, counted)
    };
    // Last acknowledgements are on their way.
    let flows = eventually("the counts to stand", || {
        let (flows, before) = look();
        std::thread::sleep(crate::BRIEFLY);
        (look().1 == before).then_some(flows)
    });
    assert_eq!(flows.len(), 3, "{flows:?}");
    assert!(stand.slipgate.stop().unwrap().success());
    let records = stand.records();
    let ids: HashSet<_> = records
        .iter()
        .map(|record| record["id"].to_string())
        .collect();
    assert_eq!((records.len(), ids.len()), (3, 3), "{records:?}");
    for flow in &flows {
        // TCP and UDP may have got the same port, each its own.
        let same = |record: &&serde_json::Value| {
            record["nat"] == flow.nat.as_str() && record["proto"] == flow.proto.as_str()
        };
        let record = records
            .iter()
            .find(same)
            .unwrap_or_else(|| panic!("no record of {flow:?}"));
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
    if !cell.is_hybrid() {
        let socket = stand.guest.config().socket.clone();
        assert!(socket.is_some_and(|path| !path.exists()));
        return;
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

/// A file system that is soon full. It is taken away when dropped.
struct Disk(tempfile::TempDir);

impl Disk {
    fn of_one_page() -> Self {
        let at = tempfile::tempdir().unwrap();
        let options = Some("size=4k");
        let kind = Some("tmpfs");
        // A user without privileges writes there, too.
        std::fs::set_permissions(at.path(), Permissions::from_mode(0o755)).unwrap();
        nix::mount::mount(kind, at.path(), kind, MsFlags::empty(), options).unwrap();
        Self(at)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Who still writes to it keeps it, and nobody else sees it.
        let _ = nix::mount::umount2(self.0.path(), MntFlags::MNT_DETACH);
    }
}

fn lines_that_a_full_disk_does_not_take_are_told_once_and_counted(cell: Cell) {
    // Before the start: a user's slipgate has the mounts of that moment.
    let disk = Disk::of_one_page();
    let stand = Stand::of(cell, &[]);
    let echo = UdpServer::start(&stand.world.net, (cell.server(), 7), UdpService::Echo).unwrap();
    let probe = || stand.run(|| udp::probe(echo.address(), b"x", WAIT).unwrap());
    probe();
    eventually("its start", || stand.events("flow_start").pop());
    assert!(!stand.slipgate.stderr().contains("flow log"));
    std::fs::remove_file(stand.log_path()).unwrap();
    std::os::unix::fs::symlink(disk.0.path().join("log"), stand.log_path()).unwrap();
    slipgate_testbed::signal(stand.slipgate.broker_pid(), libc::SIGHUP);
    let said = eventually("that a line is lost", || {
        probe();
        let said = stand.slipgate.stderr();
        said.contains("did not take").then_some(said)
    });
    assert!(said.contains("No space left on device"), "{said}");
    let lost = || stand.total()["records_lost"].as_u64().unwrap();
    let before = lost();
    assert!(before > 0);
    for _ in 0..5 {
        probe();
    }
    eventually("more are lost", || (lost() >= before + 5).then_some(()));
    let said = stand.slipgate.stderr();
    assert_eq!(said.matches("did not take").count(), 1, "{said}");
}
