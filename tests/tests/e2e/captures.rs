//! Captures of streams and datagrams, and of all that a VM has; of a command too.

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader, Write as _},
    net::{IpAddr, SocketAddr, UdpSocket},
    process::Stdio,
};

use serde_json::Value;
use slipgate_testbed::{
    clients::{tcp, tcp::EchoSession},
    require_root_and_tun,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    world::SERVER,
    world_ipv6::SERVER6,
};

use crate::{
    Cell, Stand, WAIT,
    changes::{folder, tcpdump, tcpdump_so_far},
    eventually,
    matrix::matrix,
    unprivileged::Place,
};

matrix! {
    a_capture_of_a_vm_has_each_byte_of_its_streams_and_its_datagrams: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
}

const ECHO: u16 = 7000;
/// None that tcpdump takes for a protocol of its own.
const UDP_ECHO: u16 = 20_007;
/// Bytes of a stream, each way: several frames with offloads.
const BYTES: usize = 300_000;

/// Payload bytes in a capture from one place to another, by what tcpdump says of each packet's length.
fn payload(lines: &[String], from: SocketAddr, to: SocketAddr) -> usize {
    let name = |at: SocketAddr| format!("{}.{}", at.ip(), at.port());
    let way = format!("{} > {}:", name(from), name(to));
    let of_way = lines.iter().filter(|line| line.contains(&way));
    let lengths =
        of_way.filter_map(|line| line.rsplit_once("length ")?.1.trim().parse::<usize>().ok());
    lengths.sum()
}

fn a_capture_of_a_vm_has_each_byte_of_its_streams_and_its_datagrams(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let server = cell.server();
    let world = &stand.world.net;
    let by_tcp = TcpServer::start(world, (server, ECHO), TcpService::Echo).unwrap();
    let by_udp = UdpServer::start(world, (server, UDP_ECHO), UdpService::Echo).unwrap();
    let mut before = stand.run(|| tcp::connect(by_tcp.address(), WAIT)).unwrap();
    stand
        .run(|| EchoSession::new(&mut before).round(1_000))
        .unwrap();
    let dir = folder();
    let file = dir.path().join("vm.pcapng");
    let text = file.to_str().unwrap();
    let any = cell.family.unspecified();
    let (mut during, datagrams) = std::thread::scope(|scope| {
        let args = ["capture", "--vm", "tap0", "-o", text];
        let mut command = stand.slipgate.command(&args).unwrap();
        command.stdin(Stdio::null()).stderr(Stdio::piped());
        let mut capture = stand.world.host.spawn(command).unwrap();
        eventually("the flow is the engine's", || {
            let flow = stand.flow_to(by_tcp.address());
            (flow.verdict == "engine").then_some(())
        });
        // One from before, and one that begins now.
        let mut during = stand.run(|| tcp::connect(by_tcp.address(), WAIT)).unwrap();
        for stream in [&mut before, &mut during] {
            stand.run(|| EchoSession::new(stream).round(BYTES)).unwrap();
        }
        let socket = stand.run(|| UdpSocket::bind((any, 0))).unwrap();
        socket.set_read_timeout(Some(WAIT)).unwrap();
        for _ in 0..5 {
            socket.send_to(&[7; 400], by_udp.address()).unwrap();
            assert_eq!(socket.recv(&mut [0; 500]).unwrap(), 400);
        }
        // What the engine saw last is in the file before the capture is told to end.
        let last = socket.local_addr().unwrap().port();
        let last = SocketAddr::new(cell.guest(), last);
        eventually("the last datagrams are in the file", || {
            let lines = tcpdump_so_far(&file);
            let seen = payload(&lines, by_udp.address(), last);
            (seen == 5 * 400).then_some(())
        });
        slipgate_testbed::signal(capture.id(), libc::SIGINT);
        let reader = scope.spawn(move || {
            let status = capture.wait().unwrap();
            let mut said = String::new();
            let _ = std::io::Read::read_to_string(&mut capture.stderr.unwrap(), &mut said);
            (status, said)
        });
        let (status, said) = reader.join().unwrap();
        assert!(
            status.success() && said.contains("packets"),
            "{status}: {said}"
        );
        (during, socket)
    });
    let lines = tcpdump(&file);
    let place = |at: SocketAddr| SocketAddr::new(cell.guest(), at.port());
    for stream in [&before, &during] {
        let guest = place(stream.local_addr().unwrap());
        for (from, to) in [(guest, by_tcp.address()), (by_tcp.address(), guest)] {
            let seen = payload(&lines, from, to);
            // Nothing is lost on the way, so nothing is sent twice but what a busy machine holds up.
            assert!(
                (BYTES..2 * BYTES).contains(&seen),
                "{from} > {to}: {seen} bytes"
            );
        }
    }
    let guest = place(datagrams.local_addr().unwrap());
    assert_eq!(
        payload(&lines, guest, by_udp.address()),
        5 * 400,
        "{lines:?}"
    );
    assert_eq!(
        payload(&lines, by_udp.address(), guest),
        5 * 400,
        "{lines:?}"
    );
    // As before.
    let path = if cell.is_hybrid() {
        "kernel"
    } else {
        "sockets"
    };
    eventually("they are no longer the engine's", || {
        let flows = stand.flows_to(by_tcp.address());
        let all = flows.len() == 2 && flows.iter().all(|flow| flow.verdict == "fast");
        all.then_some(())
    });
    let flows: Vec<Value> =
        serde_json::from_slice(&stand.slipgate.run(&["flows", "--json"]).unwrap().stdout).unwrap();
    assert!(flows.iter().all(|flow| flow["path"] == path), "{flows:#?}");
    for stream in [&mut before, &mut during] {
        stand.run(|| EchoSession::new(stream).round(1_000)).unwrap();
    }
}

/// Each flow of a command, of both families.
#[test]
fn flows_of_a_command_are_captured_both_ways() {
    require_root_and_tun!();
    let place = Place::new();
    let world = &place.world;
    world.give_ipv6().unwrap();
    let servers: [IpAddr; 2] = [SERVER.into(), SERVER6.into()];
    let _tcp =
        servers.map(|ip| TcpServer::start(&world.net, (ip, ECHO), TcpService::Echo).unwrap());
    let _udp =
        servers.map(|ip| UdpServer::start(&world.net, (ip, UDP_ECHO), UdpService::Echo).unwrap());
    // Each line of its input is a round by each of its four flows.
    let talks = format!(
        "exec 3<>/dev/tcp/{SERVER}/{ECHO} 4<>/dev/tcp/{SERVER6}/{ECHO} \
              5<>/dev/udp/{SERVER}/{UDP_ECHO} 6<>/dev/udp/{SERVER6}/{UDP_ECHO}
        while read -r _; do for fd in 3 4 5 6; do
            echo 0123456789 >&$fd; dd bs=2048 count=1 status=none <&$fd >/dev/null
        done; echo round; done"
    );
    let command = [
        "exec", "--name", "job", "--dns", "none", "--ipv6", "nat", "--", "bash", "-c", &talks,
    ];
    let mut exec = place.slipgate(&command);
    exec.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut exec = world.host.spawn(exec).unwrap();
    let mut input = exec.stdin.take().unwrap();
    let mut output = BufReader::new(exec.stdout.take().unwrap()).lines();
    let mut round = || {
        input.write_all(b"\n").unwrap();
        assert_eq!(output.next().unwrap().unwrap(), "round");
    };
    round();
    let flows =
        || -> Vec<Value> { serde_json::from_str(&place.output(&["flows", "--json"])).unwrap() };
    let live = flows();
    assert_eq!(live.len(), 4, "{live:#?}");
    let file = place.file("run/flow.pcapng");
    let mut seen = BTreeMap::new();
    for flow in &live {
        let id = flow["id"].as_str().unwrap();
        let text = file.to_str().unwrap();
        let mut command = place.slipgate(&["capture", id, "-o", text, "--count", "4"]);
        command.stdin(Stdio::null());
        let mut capture = world.host.spawn(command).unwrap();
        eventually("the flow is the engine's", || {
            let flows = flows();
            let is_its = |flow: &&Value| flow["id"] == id && flow["verdict"] == "engine";
            flows.iter().find(is_its).map(drop)
        });
        (0..4).for_each(|_| round());
        assert!(capture.wait().unwrap().success());
        let lines = tcpdump(&file);
        let at = |key: &str| flow[key].as_str().unwrap().parse::<SocketAddr>().unwrap();
        let (guest, remote) = (at("guest"), at("remote"));
        let name = |at: SocketAddr| format!("{}.{}", at.ip(), at.port());
        let ways = [(guest, remote), (remote, guest)].map(|(from, to)| {
            let way = format!("{} > {}:", name(from), name(to));
            lines.iter().filter(|line| line.contains(&way)).count()
        });
        assert!(
            ways[0] > 0 && ways[1] > 0 && ways[0] + ways[1] == 4,
            "{lines:?}"
        );
        seen.insert((flow["proto"].to_string(), remote.is_ipv6()), ());
        std::fs::remove_file(&file).unwrap();
    }
    assert_eq!(seen.len(), 4, "each protocol of each family: {live:#?}");
    round();
    drop(input);
    assert!(exec.wait().unwrap().success());
    assert!(place.user.has_nothing_left());
}
