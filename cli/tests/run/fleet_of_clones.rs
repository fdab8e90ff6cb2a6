//! A hundred clones of one snapshot at once, all with one address, under one daemon.
use std::net::SocketAddr;

use slipgate_testbed::{
    MicroVm, Slipgate,
    clients::{tcp, tcp::EchoSession},
    require_kvm, require_root_and_tun,
    servers::{Answer, DnsServer, TcpServer, TcpService},
    signal, slipgate,
    world::{HOST, SERVER, UPLINK},
};

use crate::{Bed, WAIT, eventually};

const CLONES: usize = 100;
/// Ports of two servers: each clone is denied one of them.
const PORTS: [u16; 2] = [7001, 7002];
/// Port of the host that leads to a clone's echo.
fn port_of(number: usize) -> u16 {
    20_000 + number as u16
}

/// Most memory of a clone's two processes, pages that several have divided among them, KiB. It is
/// some 5 MiB in a release build.
const MOST_KIB: u64 = 24 << 10;

/// Reads the reports of a clone's guest about its work.
fn said(vm: &mut MicroVm) -> Vec<serde_json::Value> {
    let mut lines = Vec::new();
    // The name, then a connection to each server.
    for _ in 0..3 {
        let line = vm.await_line("\"workload\"", 4 * WAIT).unwrap();
        lines.push(line.json().unwrap());
    }
    lines
}

#[test]
fn a_hundred_clones_of_one_address_have_answers_and_each_its_own_policy_and_forward() {
    require_root_and_tun!();
    require_kvm!();
    let bed = Bed::new();
    let host = &bed.world.host;
    let zone = [("a.test".to_owned(), Answer::a(SERVER, 60))].into();
    let names = DnsServer::start(&bed.world.net, (SERVER, 53), zone).unwrap();
    let _servers = PORTS
        .map(|port| TcpServer::start(&bed.world.net, (SERVER, port), TcpService::Close).unwrap());
    let resolver = names.address().to_string();
    let flags = ["--uplink", UPLINK, "--dns", &resolver];
    let daemon = Slipgate::serve(host, &bed.pins, &flags).unwrap();
    let [first, second] = PORTS.map(|port| format!("crr {SERVER}:{port} 1 close"));
    let work = format!("wait 1s; dns a.test; {first}; {second}; serve 7 600s");
    let base = ["--memory", "32", "--cmdline", &work, "--name", "base"];
    let mut base = bed.start_with(&base);
    base.await_line("10.0.2.15", WAIT).unwrap();
    let dir = bed.folder.path().join("warm");
    let mut command = std::process::Command::new(slipgate::binary().unwrap());
    command.args(["snapshot", "base"]).arg(&dir);
    host.output(command).unwrap();
    signal(base.broker_pid(), libc::SIGKILL);
    drop(base);
    // A clone may have the same TAP's name.
    eventually("the daemon has removed it", || {
        daemon.stats().unwrap()["vms"] == serde_json::json!([])
    });

    let dir = dir.display().to_string();
    let mut clones: Vec<MicroVm> = (0..CLONES)
        .map(|number| {
            let denied = format!("{SERVER}:{}/tcp", PORTS[number % 2]);
            let name = format!("clone{number}");
            let forward = format!("tcp:{}:7", port_of(number));
            let own = ["--name", &name, "--deny", &denied, "--forward", &forward];
            bed.start_with(&[&["--restore", &dir], &own[..]].concat())
        })
        .collect();
    for (number, vm) in clones.iter_mut().enumerate() {
        let waited = vm.await_line("\"wait\"", 4 * WAIT).unwrap();
        assert!(waited.json().is_some());
        let [name, connections @ ..] = &said(vm)[..] else {
            unreachable!("three lines")
        };
        assert_eq!(
            name["addresses"][0],
            SERVER.to_string(),
            "clone {number}: {name}"
        );
        for (which, connection) in connections.iter().enumerate() {
            let is_denied = which == number % 2;
            let all = format!("clone {number}: {connection}");
            assert_eq!(connection["done"], u64::from(!is_denied), "{all}");
            assert_eq!(connection["failures"]["refused"] == 1, is_denied, "{all}");
        }
        vm.await_line("\"serving\"", 4 * WAIT).unwrap();
    }
    // Each is reached by its own forward, and its guest answers: by the counts below, none twice.
    for number in 0..CLONES {
        let to = SocketAddr::from((HOST, port_of(number)));
        let echoed = bed.world.net.run(|| {
            let mut stream = tcp::connect(to, 4 * WAIT)?;
            EchoSession::new(&mut stream).round(1 + number)
        });
        echoed.unwrap_or_else(|e| panic!("clone {number}: {e}"));
    }
    // All are there at once, and the daemon tells them apart.
    let stats = daemon.stats().unwrap();
    let vms = stats["vms"].as_array().unwrap();
    assert_eq!(vms.len(), CLONES);
    for vm in vms {
        let (admitted, denied) = (&vm["admitted"], &vm["refused"]);
        // One of its own, and one by its forward.
        assert_eq!(admitted, 2, "{}: {denied}", vm["name"]);
    }
    let memory = clones.iter().map(|vm| vm.memory_kib().unwrap());
    let mean = memory.sum::<u64>() / CLONES as u64;
    println!("memory a clone: {mean} KiB");
    assert!(mean < MOST_KIB, "{mean} KiB a clone");
    for vm in &clones {
        signal(vm.broker_pid(), libc::SIGTERM);
    }
    for vm in clones {
        assert_eq!(vm.finish(4 * WAIT).unwrap().status.code(), Some(143));
    }
}
