//! Changes while guests send: another policy, flows cut, VMs frozen, packets captured.

use std::{
    fs::{self, Permissions},
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, TcpStream, UdpSocket},
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Command, Output},
    time::Duration,
};

use slipgate_testbed::{
    clients::{tcp, tcp::EchoSession, udp, udp::UdpOutcome},
    require_root_and_tun,
    servers::{TcpServer, TcpService, UdpServer, UdpService},
};

use crate::{
    BRIEFLY, Cell, Stand, WAIT, eventually,
    matrix::{at, matrix, pings},
};

matrix! {
    a_flow_that_is_cut_ends_at_once_at_both_ends: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_former_generations_connections_end_at_both_ends_though_the_guest_is_paused: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_socket_of_a_former_generation_hears_that_its_peer_is_gone: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_frozen_vm_is_silent_until_it_is_thawed_over_a_crash_too: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_live_flow_is_captured_both_ways_and_loses_nothing: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    the_engines_packets_are_written_and_the_file_is_rotated: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    a_policy_is_put_in_force_whole_or_not_at_all: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    an_emptied_policy_file_changes_nothing_and_is_said: [hybrid_ipv4, hybrid_ipv6, user_ipv4, user_ipv6];
    what_was_applied_outlives_a_crash_and_what_the_command_line_names_is_read_again: [hybrid_ipv4, hybrid_ipv6],
        without [user_ipv4, user_ipv6]: "the policy is that of the process, and ends with it (exec.md)";
}

/// A folder that a user without privileges may use, too.
pub(crate) fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), Permissions::from_mode(0o777)).unwrap();
    folder
}

/// A server at the first address of the world's servers.
fn serve(stand: &Stand, service: TcpService) -> TcpServer<IpAddr> {
    TcpServer::start(&stand.world.net, (stand.cell.server(), 7000), service).unwrap()
}

/// The id of the one flow.
fn only_flow(stand: &Stand) -> String {
    let flows = stand.slipgate.flows().unwrap();
    assert_eq!(flows.len(), 1, "{flows:?}");
    flows[0].id.clone()
}

/// Lines that tcpdump prints for a file, one per packet; none for a file without packets.
pub(crate) fn tcpdump(file: &Path) -> Vec<String> {
    let (output, lines) = read_by_tcpdump(file);
    let errors = String::from_utf8_lossy(&output.stderr);
    let is_empty = errors.contains("no Interface Description Blocks");
    assert!(output.status.success() || is_empty, "{errors}");
    lines
}

/// The same of a file that is being written: its last packet may be there in part.
pub(crate) fn tcpdump_so_far(file: &Path) -> Vec<String> {
    read_by_tcpdump(file).1
}

fn read_by_tcpdump(file: &Path) -> (Output, Vec<String>) {
    let output = Command::new("tcpdump")
        .args(["-nnr"])
        .arg(file)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let lines = text.lines().map(str::to_owned).collect();
    (output, lines)
}

fn error_of(stand: &Stand, args: &[&str]) -> String {
    stand.slipgate.run(args).unwrap_err().to_string()
}

/// Sends SIGHUP to the broker.
fn hang_up(stand: &Stand) {
    slipgate_testbed::signal(stand.slipgate.broker_pid(), libc::SIGHUP);
}

fn a_flow_that_is_cut_ends_at_once_at_both_ends(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let server = serve(&stand, TcpService::Hold);
    // Neither says anything: both are told all the same.
    let mut stream: TcpStream = stand.run(|| tcp::connect(server.address(), WAIT)).unwrap();
    let id = only_flow(&stand);
    let said = stand.slipgate.run(&["cut", &id]).unwrap().stdout;
    assert_eq!(String::from_utf8_lossy(&said), "cut 1 flow\n");
    stream.set_read_timeout(Some(WAIT)).unwrap();
    let error = stream.read(&mut [0; 8]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    let closed = || {
        let ss = Command::new("ss")
            .args(["-Htn", "state", "established"])
            .output();
        let ss = ss.unwrap().stdout;
        (!String::from_utf8_lossy(&ss).contains(":7000")).then_some(())
    };
    stand
        .world
        .net
        .run(|| eventually("the server's end is closed", closed));
    let records = eventually("a record", || {
        let records = stand.records();
        (!records.is_empty()).then_some(records)
    });
    assert_eq!(records[0]["end"], "cut");
    let error = error_of(&stand, &["cut", &id]);
    assert!(error.contains("no flow"), "{error}");
    assert!(!error.contains("cut 0 flows"), "{error}");
    let error = error_of(&stand, &["cut", "--vm", "nobody"]);
    assert!(error.contains("there is tap0"), "{error}");
}

fn a_former_generations_connections_end_at_both_ends_though_the_guest_is_paused(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let server = serve(&stand, TcpService::Hold);
    let mut streams: Vec<TcpStream> = (0..8)
        .map(|_| stand.run(|| tcp::connect(server.address(), WAIT)).unwrap())
        .collect();
    let pause = "table inet paused {
        chain in { type filter hook input priority 0; drop; }
        chain out { type filter hook output priority 0; drop; }
    }";
    stand.guest.ns.nft(pause).unwrap();
    let said = stand.slipgate.run(&["generation", "tap0"]).unwrap().stdout;
    let said = String::from_utf8_lossy(&said);
    assert_eq!(said, "ended 8 flows of the former generation\n");
    let closed = || {
        let ss = Command::new("ss")
            .args(["-Htn", "state", "established"])
            .output();
        let ss = ss.unwrap().stdout;
        (!String::from_utf8_lossy(&ss).contains(":7000")).then_some(())
    };
    let world = &stand.world.net;
    world.run(|| eventually("the server's ends are closed", closed));

    stand.guest.ns.nft("delete table inet paused").unwrap();
    for stream in &mut streams {
        stream.set_read_timeout(Some(WAIT)).unwrap();
        // Its first segment is answered by a reset.
        stream.write_all(b"after the pause").unwrap();
        let error = stream.read(&mut [0; 8]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
    stand.run(|| tcp::connect(server.address(), WAIT)).unwrap();
    let records = eventually("the records", || {
        let records = stand.records();
        (records.len() == 8).then_some(records)
    });
    assert!(records.iter().all(|record| record["end"] == "generation"));
}

fn a_socket_of_a_former_generation_hears_that_its_peer_is_gone(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let echo = UdpServer::start(&stand.world.net, (cell.server(), 7), UdpService::Echo).unwrap();
    let any = cell.family.unspecified();
    let [connected, other] = [(); 2].map(|()| stand.run(|| UdpSocket::bind((any, 0))).unwrap());
    for socket in [&connected, &other] {
        socket.set_read_timeout(Some(WAIT)).unwrap();
    }
    connected.connect(echo.address()).unwrap();
    let exchange = |socket: &UdpSocket, is_connected: bool| {
        match is_connected {
            true => socket.send(b"?").unwrap(),
            false => socket.send_to(b"?", echo.address()).unwrap(),
        };
        assert_eq!(socket.recv(&mut [0; 8]).unwrap(), 1);
    };
    exchange(&connected, true);
    exchange(&other, false);
    let said = stand.slipgate.run(&["generation", "tap0"]).unwrap().stdout;
    let said = String::from_utf8_lossy(&said);
    assert_eq!(said, "ended 2 flows of the former generation\n");
    let error = connected.recv(&mut [0; 8]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    // One that is not connected asks nobody in particular.
    other.set_read_timeout(Some(BRIEFLY)).unwrap();
    let error = other.recv(&mut [0; 8]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    let records = eventually("the records", || {
        let records = stand.records();
        (records.len() == 2).then_some(records)
    });
    assert!(records.iter().all(|record| record["end"] == "generation"));
    // Both go on, by flows of their own.
    other.set_read_timeout(Some(WAIT)).unwrap();
    exchange(&connected, true);
    exchange(&other, false);
}

fn a_frozen_vm_is_silent_until_it_is_thawed_over_a_crash_too(cell: Cell) {
    let mut stand = Stand::of(cell, &[]);
    let echo = serve(&stand, TcpService::Echo);
    let mut stream = stand.run(|| tcp::connect(echo.address(), WAIT)).unwrap();
    stand
        .run(|| EchoSession::new(&mut stream).round(1_000))
        .unwrap();
    stand.slipgate.run(&["freeze", "tap0"]).unwrap();
    let silent = |stand: &Stand| {
        assert!(!pings(&stand.guest, cell.server(), BRIEFLY));
        let to = at(cell.server(), 7000).to_string();
        let why = stand.slipgate.why("tap0", &to, "tcp").unwrap();
        assert!(!why.0 && why.1.contains("frozen"), "{}", why.1);
    };
    silent(&stand);
    assert!(stand.dropped("frozen") > 0);
    assert_eq!(stand.slipgate.stats().unwrap()["vms"][0]["frozen"], true);
    // In user mode the tables end with the engine.
    if cell.is_hybrid() {
        stand.slipgate.kill_both().unwrap();
        eventually("their end", || {
            stand.slipgate.engine_pid().is_none().then_some(())
        });
        stand.again();
        stand.says("tap0 is frozen");
        silent(&stand);
    }
    stand.slipgate.run(&["thaw", "tap0"]).unwrap();
    stand
        .run(|| EchoSession::new(&mut stream).round(1_000))
        .unwrap();
    assert!(pings(&stand.guest, cell.server(), WAIT));
}

fn a_live_flow_is_captured_both_ways_and_loses_nothing(cell: Cell) {
    let stand = Stand::of(cell, &[]);
    let [echo, other] = [cell.server(), cell.server_2()]
        .map(|ip| UdpServer::start(&stand.world.net, (ip, 7), UdpService::Echo).unwrap());
    let any = cell.family.unspecified();
    let socket = stand.run(|| UdpSocket::bind((any, 5000))).unwrap();
    socket.set_read_timeout(Some(WAIT)).unwrap();
    let talk = |count: usize| {
        for n in 0..count {
            socket
                .send_to(format!("datagram {n}").as_bytes(), echo.address())
                .unwrap();
            socket.recv(&mut [0; 64]).unwrap();
        }
    };
    talk(1);
    let id = only_flow(&stand);
    stand
        .run(|| udp::probe(other.address(), b"another", WAIT))
        .unwrap();
    let dir = folder();
    let file = dir.path().join("flow.pcapng");
    let text = file.to_str().unwrap();
    std::thread::scope(|scope| {
        let capture = scope.spawn(|| {
            let args = ["capture", &id, "-o", text, "--count", "20"];
            stand.slipgate.run(&args).unwrap()
        });
        eventually("the flow is the engine's", || {
            let flows = stand.slipgate.flows().unwrap();
            flows
                .iter()
                .find(|flow| flow.id == id && flow.verdict == "engine")
                .map(drop)
        });
        talk(15);
        let said = capture.join().unwrap().stderr;
        let said = String::from_utf8_lossy(&said);
        assert!(said.contains("20 packets"), "{said}");
    });
    let lines = tcpdump(&file);
    assert_eq!(lines.len(), 20, "{lines:?}");
    let (guest, server) = (cell.guest(), cell.server());
    let ways = [
        format!("{guest}.5000 > {server}.7"),
        format!("{server}.7 > {guest}.5000"),
    ];
    let counts = ways.map(|way| lines.iter().filter(|line| line.contains(&way)).count());
    assert_eq!(counts, [10, 10], "{lines:?}");
    eventually("the kernel has it again", || {
        let flows = stand.slipgate.flows().unwrap();
        flows
            .iter()
            .find(|flow| flow.id == id && flow.verdict == "fast")
            .map(drop)
    });
    talk(5);
    let flow = stand.flow_to(echo.address());
    assert_eq!((flow.tx_packets, flow.rx_packets), (21, 21));
}

#[test]
fn a_capture_without_a_packet_is_a_file_that_can_be_read() {
    require_root_and_tun!();
    let stand = Stand::new(&[]);
    let server = serve(&stand, TcpService::Hold);
    let _silent = stand.run(|| tcp::connect(server.address(), WAIT)).unwrap();
    let id = only_flow(&stand);
    let dir = folder();
    let file = dir.path().join("flow.pcapng");
    let args = [
        "capture",
        &id,
        "-o",
        file.to_str().unwrap(),
        "--seconds",
        "1",
    ];
    let said = stand.slipgate.run(&args).unwrap().stderr;
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains("0 packets"), "{said}");
    let read = Command::new("tcpdump").arg("-nnr").arg(&file).output();
    let read = read.unwrap();
    let errors = String::from_utf8_lossy(&read.stderr);
    assert!(read.status.success() && read.stdout.is_empty(), "{errors}");
}

fn the_engines_packets_are_written_and_the_file_is_rotated(cell: Cell) {
    let dir = folder();
    let file = dir.path().join("port.pcapng");
    let stand = Stand::of(cell, &["--pcap", file.to_str().unwrap()]);
    let server = cell.server();
    let echo = UdpServer::start(&stand.world.net, (server, 7), UdpService::Echo).unwrap();
    let probe = || udp::probe(echo.address(), b"one", WAIT).unwrap();
    assert!(matches!(stand.run(probe), UdpOutcome::Answered(_)));
    let mentions = |file: &Path, what: &str| {
        let lines = tcpdump(file);
        lines.iter().any(|line| line.contains(what)).then_some(())
    };
    eventually("the first packet", || {
        mentions(&file, &format!("{server}.7: UDP"))
    });
    let old = dir.path().join("port.1.pcapng");
    fs::rename(&file, &old).unwrap();
    hang_up(&stand);
    // The engine's section header shows that it writes there: the broker only opens the file.
    eventually("the file again", || {
        let length = fs::metadata(&file).ok()?.len();
        (length > 0).then_some(())
    });
    assert!(pings(&stand.guest, server, WAIT));
    let ping = match cell.is_ipv6() {
        false => "ICMP echo request",
        true => "ICMP6, echo request",
    };
    eventually("the next packet", || mentions(&file, ping));
    assert!(mentions(&old, ping).is_none());
}

fn a_policy_is_put_in_force_whole_or_not_at_all(cell: Cell) {
    let dir = folder();
    let list = dir.path().join("deny.txt");
    fs::write(&list, "198.51.100.0/24\n").unwrap();
    let stand = Stand::of(cell, &["--deny-file", list.to_str().unwrap()]);
    let server = cell.server();
    let echo = serve(&stand, TcpService::Echo);
    let mut stream = stand.run(|| tcp::connect(echo.address(), WAIT)).unwrap();
    fs::write(&list, format!("{server}\nno address at all\n")).unwrap();
    let error = error_of(&stand, &["policy", "apply"]);
    assert!(error.contains("nothing has changed"), "{error}");
    assert!(error.contains("deny.txt:2"), "{error}");
    stand
        .run(|| EchoSession::new(&mut stream).round(1_000))
        .unwrap();
    stand.run(|| tcp::connect(echo.address(), WAIT)).unwrap();

    fs::write(&list, format!("{server}\n")).unwrap();
    let said = stand.slipgate.run(&["policy", "apply"]).unwrap().stdout;
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains("cut, 0 go on"), "{said}");
    stand.run(|| tcp::expect_refused(echo.address())).unwrap();
    stream.set_read_timeout(Some(WAIT)).unwrap();
    // Whichever call is the first to find out.
    let sent = stream.write_all(b"more").err();
    let error = sent.or_else(|| stream.read(&mut [0; 8]).err()).unwrap();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);

    // By SIGHUP, too.
    fs::write(&list, "198.51.100.0/24\n").unwrap();
    hang_up(&stand);
    eventually("the server is open again", || {
        stand
            .run(|| tcp::connect(echo.address(), Duration::from_secs(1)))
            .ok()
    });
}

fn an_emptied_policy_file_changes_nothing_and_is_said(cell: Cell) {
    let dir = folder();
    let file = dir.path().join("policy.toml");
    let only = |server| {
        let allowed = cell.destination(server, "7000");
        format!("default = \"deny\"\nrules = [{{ allow = \"{allowed}\" }}]\n")
    };
    fs::write(&file, only(cell.server())).unwrap();
    let stand = Stand::of(cell, &["--policy", file.to_str().unwrap()]);
    let serve = |server| {
        let net = &stand.world.net;
        TcpServer::start(net, (server, 7000), TcpService::Echo).unwrap()
    };
    let (allowed, denied) = (serve(cell.server()), serve(cell.server_2()));
    let mut stream = stand.run(|| tcp::connect(allowed.address(), WAIT)).unwrap();
    // Emptied by an editor or a full disk; or all of it a comment.
    for (times, text) in [(1, ""), (2, "# default = \"deny\"\n")] {
        fs::write(&file, text).unwrap();
        hang_up(&stand);
        let said = eventually("that it can't be used", || {
            let said = stand.slipgate.stderr();
            let count = said.matches("the policy stays as it was").count();
            (count == times).then_some(said)
        });
        assert!(
            said.contains("policy.toml") && said.contains("default"),
            "{said}"
        );
        // Nothing is open that was not, and nothing is shut.
        stand.run(|| tcp::expect_refused(denied.address())).unwrap();
        stand
            .run(|| EchoSession::new(&mut stream).round(1_000))
            .unwrap();
        stand
            .run(|| tcp::request_response(allowed.address(), 10, 1, WAIT))
            .unwrap();
    }
    assert_eq!(denied.accepted(), 0);
    // The control: one that can be used is put in force the same way.
    fs::write(&file, only(cell.server_2())).unwrap();
    hang_up(&stand);
    eventually("the other server is open", || {
        let patience = Duration::from_secs(1);
        stand.run(|| tcp::connect(denied.address(), patience)).ok()
    });
    stand
        .run(|| tcp::expect_refused(allowed.address()))
        .unwrap();
}

fn what_was_applied_outlives_a_crash_and_what_the_command_line_names_is_read_again(cell: Cell) {
    let dir = folder();
    let path = |name: &str| dir.path().join(name);
    let (given, link, other) = (path("given.toml"), path("now.toml"), path("other.toml"));
    fs::write(&given, "default = \"allow\"\n").unwrap();
    let denying = format!(
        "default = \"allow\"\nrules = [{{ deny = \"{}\" }}]\n",
        cell.server()
    );
    fs::write(&other, &denying).unwrap();
    std::os::unix::fs::symlink(&given, &link).unwrap();
    let mut stand = Stand::of(cell, &["--policy", link.to_str().unwrap()]);
    let echo = serve(&stand, TcpService::Echo);
    let restart = |stand: &mut Stand| {
        stand.slipgate.kill_both().unwrap();
        eventually("their end", || {
            stand.slipgate.engine_pid().is_none().then_some(())
        });
        stand.again();
    };
    let apply = |stand: &Stand, file: &Path| {
        let args = ["policy", "apply", file.to_str().unwrap()];
        stand.slipgate.run(&args).unwrap();
    };
    apply(&stand, &other);
    stand.run(|| tcp::expect_refused(echo.address())).unwrap();
    // As it was then, whatever became of the file.
    fs::write(&other, "no policy").unwrap();
    restart(&mut stand);
    stand.says("as it was applied");
    stand.run(|| tcp::expect_refused(echo.address())).unwrap();

    // By the name of the file that the link leads to: the command line's own.
    apply(&stand, &given);
    stand.run(|| tcp::connect(echo.address(), WAIT)).unwrap();
    fs::write(&given, &denying).unwrap();
    restart(&mut stand);
    stand.run(|| tcp::expect_refused(echo.address())).unwrap();
    let said = stand.slipgate.stderr();
    assert!(!said.contains("as it was applied"), "{said}");
}
