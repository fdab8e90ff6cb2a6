//! Flows of a user-mode engine that is killed: their sockets end with it, and their records say what they
//! had counted last.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::{IpAddr, UdpSocket},
    process::{Child, Stdio},
    time::Duration,
};

use serde_json::Value;
use slipgate_testbed::{
    children_named,
    clients::{tcp, tcp::EchoSession, udp, udp::UdpOutcome},
    require_root_and_tun,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
    signal,
    world::SERVER_2,
};

use crate::{
    Cell, Stand, WAIT, eventually,
    matrix::matrix,
    stand::counts,
    unprivileged::{Attached, Place, flow_ends},
};

const ENGINE: &str = "slipgate-engine";
const ECHO: u16 = 7000;
const UDP_ECHO: u16 = 7003;

matrix! {
    flows_of_a_killed_engine_are_recorded_with_their_last_counts: [user_ipv4, user_ipv6],
        without [hybrid_ipv4, hybrid_ipv6]: "the kernel's flows outlive their engine";
}

fn flows_of_a_killed_engine_are_recorded_with_their_last_counts(cell: Cell) {
    let mut stand = Stand::of(cell, &[]);
    let [server, other] = [cell.server(), cell.server_2()];
    let world = &stand.world.net;
    let tcp = [server, other]
        .map(|ip: IpAddr| TcpServer::start(world, (ip, ECHO), TcpService::Echo).unwrap());
    let udp = UdpServer::start(world, (server, UDP_ECHO), UdpService::Echo).unwrap();
    let mut held = stand.run(|| tcp::connect(tcp[0].address(), WAIT)).unwrap();
    stand
        .run(|| EchoSession::new(&mut held).round(20_000))
        .unwrap();
    let socket = stand
        .run(|| UdpSocket::bind((cell.family.unspecified(), 0)))
        .unwrap();
    socket.set_read_timeout(Some(WAIT)).unwrap();
    for _ in 0..3 {
        socket.send_to(&[7; 500], udp.address()).unwrap();
        assert_eq!(socket.recv(&mut [0; 600]).unwrap(), 500);
    }
    // One that has ended before, and has its record: it gets no second one.
    let _cut = stand.run(|| tcp::connect(tcp[1].address(), WAIT)).unwrap();
    let id = stand.flow_to(tcp[1].address()).id;
    stand.slipgate.run(&["cut", &id]).unwrap();
    eventually("the record of one that was cut", || {
        (stand.records().len() == 1).then_some(())
    });
    let [stream, datagrams] = [tcp[0].address(), udp.address()].map(|to| stand.flow_to(to));

    stand.slipgate.kill_engine().unwrap();
    let said = stand.says("2 flows ended with it");
    assert!(said.contains("was killed by signal 9"), "{said}");
    eventually("slipgate ends with it", || {
        (!stand.slipgate.broker_runs()).then_some(())
    });

    let records = stand.records();
    assert_eq!(records.len(), 3, "{records:#?}");
    let of = |id: &str| -> &Value {
        let mut its = records.iter().filter(|record| record["id"] == id);
        let (first, second) = (its.next(), its.next());
        assert!(second.is_none(), "{records:#?}");
        first.unwrap_or_else(|| panic!("no record of {id}: {records:#?}"))
    };
    assert_eq!(of(&id)["end"], "cut");
    for flow in [&stream, &datagrams] {
        let record = of(&flow.id);
        assert_eq!(record["end"], "engine-died");
        assert_eq!(
            (&record["vm"], &record["path"]),
            (&"tap0".into(), &"sockets".into())
        );
        assert_eq!(record["remote"], flow.remote);
        assert!(record["rule_text"].is_string(), "{record}");
    }
    let recorded = |record: &Value| {
        let number = |key: &str| record[key].as_u64().unwrap();
        [
            (number("tx_packets"), number("tx_bytes")),
            (number("rx_packets"), number("rx_bytes")),
        ]
    };
    assert_eq!(recorded(of(&datagrams.id)), counts(&datagrams));
    assert_eq!(counts(&datagrams)[0].0, 3);
    // The guest may have acknowledged the last bytes meanwhile.
    for ((packets, bytes), (seen, seen_bytes)) in
        recorded(of(&stream.id)).into_iter().zip(counts(&stream))
    {
        assert!(packets >= seen && bytes >= seen_bytes && bytes > 20_000);
    }
    assert_eq!(of(&stream.id)["tcp"], "established");
}

/// The one line that a command says.
fn await_line(child: &mut Child, wanted: &str) {
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let said = lines.map_while(Result::ok).any(|line| line == wanted);
    assert!(said, "it ended before it said {wanted}");
}

/// A command runs on, and its flows are no flows any more.
#[test]
fn flows_of_a_command_whose_engine_is_killed_are_over_and_recorded() {
    require_root_and_tun!();
    let place = Place::new();
    let world = &place.world;
    let tcp = TcpServer::start(&world.net, (SERVER_2, ECHO), TcpService::Echo).unwrap();
    let _udp = UdpServer::start(&world.net, (SERVER_2, UDP_ECHO), UdpService::Echo).unwrap();
    let talks = format!(
        "exec 3<>/dev/tcp/{SERVER_2}/{ECHO} 4<>/dev/udp/{SERVER_2}/{UDP_ECHO}
        for n in {{1..100}}; do echo line $n >&3; read -ru3 line; done
        echo datagram >&4; dd bs=2048 count=1 status=none <&4 >/dev/null
        echo held; read -r; echo on"
    );
    let log = place.file("run/flows.jsonl");
    let flags = ["exec", "--name", "job", "--dns", "none", "--flow-log"];
    let command = [log.to_str().unwrap(), "--", "bash", "-c", &talks];
    let mut exec = place.slipgate(&[&flags[..], &command].concat());
    exec.stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut exec = world.host.spawn(exec).unwrap();
    await_line(&mut exec, "held");
    let flows = |place: &Place| -> Vec<Value> {
        serde_json::from_str(&place.output(&["flows", "--json"])).unwrap()
    };
    let live = flows(&place);
    assert_eq!(live.len(), 2, "{live:#?}");
    assert_eq!(tcp.accepted(), 1);

    let engines = children_named(exec.id(), ENGINE);
    assert_eq!(engines.len(), 1, "{engines:?}");
    signal(engines[0], libc::SIGKILL);
    eventually("no flow is shown", || {
        flows(&place).is_empty().then_some(())
    });
    let (records, ends) = flow_ends(&log);
    assert_eq!(ends.len(), 2, "{records}");
    for flow in &live {
        let end = ends.iter().find(|end| end["id"] == flow["id"]);
        let end = end.unwrap_or_else(|| panic!("{flow} has no record: {records}"));
        assert_eq!(end["end"], "engine-died");
        assert!(end["tx_bytes"].as_u64() >= flow["tx_bytes"].as_u64());
        assert!(end["rx_bytes"].as_u64() >= flow["rx_bytes"].as_u64());
    }
    // What they have counted is the VM's.
    let stats: Value = serde_json::from_str(&place.output(&["stats", "--json"])).unwrap();
    let counted = stats["vms"][0]["kernel"]["tx_packets"].as_u64().unwrap();
    let recorded = ends.iter().map(|end| end["tx_packets"].as_u64().unwrap());
    assert_eq!(counted, recorded.sum::<u64>(), "{stats:#}");
    exec.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    await_line(&mut exec, "on");
    let output = exec.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(
        said.contains("2 flows ended with it") && said.contains("no network any more"),
        "{said}"
    );
    assert!(place.user.has_nothing_left());
}

/// An engine that dies while it stops, or just before, has recorded nothing.
#[test]
fn flows_of_an_engine_that_is_killed_while_it_stops_are_recorded() {
    require_root_and_tun!();
    let place = Place::new();
    let net = &place.world.net;
    let udp = UdpServer::start(net, (SERVER_2, UDP_ECHO), UdpService::Echo).unwrap();
    let log = place.file("run/flows.jsonl");
    let flags = ["--dns", "none", "--flow-log", log.to_str().unwrap()];
    let attached = Attached::start(&place, &flags);
    let guest = attached.guest();
    guest.dhcp(WAIT).unwrap();
    let answered = guest.run(|| udp::probe(udp.address(), b"counted", WAIT));
    assert!(
        matches!(answered, Ok(UdpOutcome::Answered(_))),
        "{answered:?}"
    );

    let engines = children_named(attached.child.id(), ENGINE);
    assert_eq!(engines.len(), 1, "{engines:?}");
    signal(engines[0], libc::SIGSTOP);
    signal(attached.child.id(), libc::SIGTERM);
    // It waits for the engine to stop by then, or still serves: the flow is recorded either way.
    std::thread::sleep(Duration::from_millis(500));
    signal(engines[0], libc::SIGKILL);
    attached.end(&place);
    let (records, ends) = flow_ends(&log);
    assert_eq!(ends.len(), 1, "{records}");
    assert_eq!(ends[0]["end"], "engine-died");
}
