//! The built-in guest: takes a lease, does its work, ends with its status.
use slipgate_testbed::{
    MicroVmEnd, require_kvm, require_root_and_tun,
    servers::{Answer, DnsServer, TcpServer, TcpService},
    world::SERVER,
};

use crate::{Bed, WAIT};

fn carried(end: &MicroVmEnd, pair: usize) -> (u64, u64) {
    let pair = &end.report["vmm"]["net"]["pairs"][pair];
    let of = |key: &str| pair[key].as_u64().unwrap();
    (of("tx_frames"), of("rx_frames"))
}

/// As many as are promised, on however few cores.
#[test]
fn sixteen_queue_pairs_carry_frames_each() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let close = TcpServer::start(&bed.world.net, (SERVER, 7001), TcpService::Close).unwrap();
    // The first vCPU has the fewest of them: it sees to the others besides.
    let work = format!("crr {} 640 x16 close", close.address());
    let vm = bed.start_with(&["--cpus", "16", "--cmdline", &work]);
    let end = vm.finish(2 * WAIT).unwrap();
    end.assert_success();
    let each: Vec<_> = (0..16).map(|pair| carried(&end, pair)).collect();
    let a_connection = |(tx, rx): &(u64, u64)| *tx >= 3 && *rx >= 3;
    assert!(each.iter().all(a_connection), "{each:?}");
    let frames: u64 = each.iter().map(|(tx, rx)| tx + rx).sum();
    assert!(frames >= 6 * 640, "{each:?}");
    println!("{each:?}");
}

#[test]
fn two_queue_pairs_carry_its_workloads_and_the_kernel_the_bulk() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let zone = [("a.test".to_owned(), Answer::a(SERVER, 60))].into();
    let names = DnsServer::start(&bed.world.net, (SERVER, 53), zone).unwrap();
    let close = TcpServer::start(&bed.world.net, (SERVER, 7001), TcpService::Close).unwrap();
    let streams = TcpServer::start(&bed.world.net, (SERVER, 7000), TcpService::Streams).unwrap();
    let work = format!(
        "dns a.test; crr {} 200 x4 close; stream {1} 16000000 up x2; stream {1} 16000000 down x2",
        close.address(),
        streams.address()
    );
    let resolver = names.address().to_string();
    let vm = bed.start_with(&["--cpus", "2", "--dns", &resolver, "--cmdline", &work]);
    let end = vm.finish(WAIT).unwrap();
    end.assert_success();
    let done: Vec<_> = end
        .said("workload")
        .iter()
        .map(|w| w["done"].clone())
        .collect();
    assert_eq!(
        done[2..],
        [200, 2, 2].map(serde_json::Value::from),
        "{done:?}"
    );
    assert_eq!(end.said("workload")[1]["addresses"][0], SERVER.to_string());
    for pair in 0..2 {
        let (tx, rx) = carried(&end, pair);
        assert!(tx > 50 && rx > 50, "pair {pair} carried {tx} and {rx}");
    }
    let nat = &end.report["nat"];
    assert_eq!(nat["admitted"], 204);
    let packets = |way: &str| nat["kernel"][way].as_u64().unwrap();
    let kernel = packets("tx_packets") + packets("rx_packets");
    let engine = nat["engine"]["from_guest"]["packets"].as_u64().unwrap();
    assert!(kernel > 50 * engine, "{nat:#}");
    bed.assert_nothing_is_left();
}

#[test]
fn its_selftest_passes_and_what_it_can_not_do_is_a_status() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let end = bed.start_with(&["--cpus", "2"]).finish(WAIT).unwrap();
    end.assert_success();
    let parts = end.said("selftest");
    assert!(
        parts.len() > 10 && parts.iter().all(|part| part["ok"] == true),
        "{parts:?}"
    );
    // Interrupts that nobody asked for are named here too.
    let mut lacks = parts.iter().filter_map(|part| part["lacks"].as_str());
    assert!(lacks.all(|lacks| lacks == "CTRL_VLAN"), "{parts:?}");
    let end = bed
        .start_with(&["--cmdline", "dance"])
        .finish(WAIT)
        .unwrap();
    assert_eq!(end.status.code(), Some(2), "{:#?}", end.lines);
    let end = bed
        .start_with(&["--cmdline", "crr 203.0.113.10:1 1"])
        .finish(WAIT)
        .unwrap();
    assert_eq!(end.status.code(), Some(1), "{:#?}", end.lines);
}
