//! The ways by which a guest comes in without root: each has, in one session of a user without any
//! privilege, a policy by name, `flows`, `why`, a forward and a flow log.

use std::{
    collections::HashMap,
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Child, ChildStdout, Command, Stdio},
};

use serde_json::Value;
use slipgate_testbed::{
    builtin_guest::{self, Accelerator, Boot, Network, Qemu},
    clients::{tcp, tcp::EchoSession},
    flow_log, require_kvm,
    servers::{Answer, DnsServer, HttpServer, TcpServer, TcpService, Zone},
    signal, skipped,
    world::SERVER,
};

use crate::{
    Cell, WAIT, eventually,
    matrix::{at, matrix},
    unprivileged::{Attached, Place},
};

matrix! {
    a_vm_of_slipgates_own: [user_ipv4, user_ipv6],
        without [hybrid_ipv4, hybrid_ipv6]: "a guest that comes in without root is user mode's";
    a_command_by_curl: [user_ipv4, user_ipv6],
        without [hybrid_ipv4, hybrid_ipv6]: "a guest that comes in without root is user mode's";
    qemu_by_its_stream_socket: [user_ipv4, user_ipv6],
        without [hybrid_ipv4, hybrid_ipv6]: "a guest that comes in without root is user mode's";
    qemu_by_vhost_user: [user_ipv4, user_ipv6],
        without [hybrid_ipv4, hybrid_ipv6]: "a guest that comes in without root is user mode's";
}

const VM: &str = "web";
const ALLOWED: &str = "api.example.test";
const DENIED: &str = "evil.test";
const RULE: &str = "*.example.test";
const MTU: u32 = 1500;
const WEB: u16 = 80;
/// What is fetched here comes slowly, and does not end until the test says so.
const SLOW: u16 = 7000;
/// What connects here waits for an answer that does not come.
const SILENT: u16 = 7001;
const FORWARD: &str = "tcp:8080:80";
const FORWARDED: u16 = 8080;

/// A command by curl, which becomes one that serves ($@).
const COMMAND_LINE: &str = "curl -sS --max-time 20 http://api.example.test/; echo \"allowed: $?\"; \
    curl -sS --max-time 20 http://evil.test/; echo \"denied: $?\"; \
    curl -sS http://api.example.test:7001/ > /dev/null 2>&1 & exec \"$@\"";
/// What curl ends with when a name leads nowhere.
const CURL_NO_ADDRESS: &str = "denied: 6";

/// The built-in guest: a page of the allowed name, the denied name, a stream that is held, and a server for
/// the forward. A name in brackets is looked up by IPv6.
fn guest_line(cell: Cell) -> String {
    let (name, dns) = match cell.is_ipv6() {
        false => (ALLOWED.to_owned(), "dns"),
        true => (format!("[{ALLOWED}]"), "dns6"),
    };
    format!(
        "crr {name}:{WEB} 1 get; {dns} {DENIED}; stream {name}:{SLOW} 1000000 down; serve 80 120s"
    )
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// `slipgate run --mode userspace`.
    Run,
    /// `slipgate exec -- curl …`.
    Exec,
    /// QEMU's `-netdev stream` at `slipgate attach --socket`.
    Stream,
    /// QEMU's vhost-user at `slipgate attach --vhost-user`.
    VhostUser,
}

fn a_vm_of_slipgates_own(cell: Cell) {
    require_kvm!();
    has_names_flows_why_a_forward_and_records(cell, Way::Run);
}

fn a_command_by_curl(cell: Cell) {
    if let Err(error) = Command::new("curl").arg("--version").output() {
        return skipped!("it needs curl: {error}");
    }
    has_names_flows_why_a_forward_and_records(cell, Way::Exec);
}

fn qemu_by_its_stream_socket(cell: Cell) {
    require_kvm!();
    has_names_flows_why_a_forward_and_records(cell, Way::Stream);
}

fn qemu_by_vhost_user(cell: Cell) {
    require_kvm!();
    has_names_flows_why_a_forward_and_records(cell, Way::VhostUser);
}

fn has_names_flows_why_a_forward_and_records(cell: Cell, way: Way) {
    let place = Place::new();
    let ipv6 = cell.give(&place.world);
    let (host, net, server) = (&place.world.host, &place.world.net, cell.server_2());
    let zone = [ALLOWED, DENIED].map(|name| (name.to_owned(), Answer::address(server, 300)));
    let resolver = DnsServer::start(net, (SERVER, 53), Zone::from(zone)).unwrap();
    let tcp = |port, service| TcpServer::start(net, (server, port), service).unwrap();
    let pages = HashMap::from([("/".to_owned(), b"a page\n".to_vec())]);
    let _web = HttpServer::start(net, (server, WEB), pages).unwrap();
    let slow = tcp(SLOW, TcpService::HeldStreams);
    let silent = tcp(SILENT, TcpService::Hold);
    let log = place.file("run/flows.jsonl");
    let dns = SERVER.to_string();
    let flags = [
        "--dns",
        &dns,
        "--default",
        "deny",
        "--allow",
        RULE,
        "--forward",
        FORWARD,
        "--flow-log",
        log.to_str().unwrap(),
    ];
    let mut session = Session::start(cell, way, &place, &[&flags, ipv6].concat());

    // The allowed name leads to its server, and the denied one nowhere: nobody was asked for it.
    session.finds_the_allowed_name();
    session.finds_no_denied_name();
    assert_eq!(resolver.udp_queries(DENIED), 0);

    // Its flow, while it lives.
    let flow = eventually("a flow by its name", || {
        let is_held = |flow: &Value| flow["dns_name"] == ALLOWED && flow["state"] == "established";
        flows(&place).into_iter().find(is_held)
    });
    let seen = ["vm", "direction", "path", "rule"].map(|key| flow[key].as_str().unwrap_or("-"));
    assert_eq!(seen[..3], [VM, "outbound", "sockets"], "{flow:#}");
    assert!(seen[3].contains(RULE), "{flow:#}");
    let why = |to: &str| place.output(&["why", VM, to]);
    let (yes, no) = (why("api.example.test:80"), why("evil.test:80"));
    assert!(yes.starts_with("yes: ") && yes.contains(RULE), "{yes}");
    assert!(no.starts_with("no: "), "{no}");
    slow.release();
    drop(silent);

    // A port of the host.
    session.serves();
    let mut stream = eventually("the forward carries", || {
        let to = at(cell.loopback(), FORWARDED);
        let mut stream = host.run(|| tcp::connect(to, WAIT)).ok()?;
        EchoSession::new(&mut stream).round(1).ok()?;
        Some(stream)
    });
    EchoSession::new(&mut stream).round(200_000).unwrap();
    let local = stream.local_addr().unwrap().to_string();
    let inbound = flows(&place)
        .into_iter()
        .find(|flow| flow["direction"] == "inbound" && flow["remote"] == local);
    assert_eq!(inbound.unwrap()["vm"], VM);
    drop(stream);
    session.end(&place);

    let records = flow_log::records(&log).unwrap();
    let of = |event: &str| -> Vec<&Value> {
        let records = records.iter();
        records.filter(|record| record["event"] == event).collect()
    };
    let (starts, ends) = (of("flow_start"), of("flow_end"));
    assert_eq!(starts.len(), ends.len(), "{records:#?}");
    let has = |records: &[&Value], wanted: &[(&str, &str)]| {
        let is_it = |record: &&Value| wanted.iter().all(|(key, value)| record[*key] == *value);
        assert!(
            records.iter().any(is_it),
            "no record with {wanted:?} in {records:#?}"
        );
    };
    let rule_text = format!("--allow {RULE}");
    let of_name = [
        ("vm", VM),
        ("dns_name", ALLOWED),
        ("direction", "outbound"),
        ("rule_text", &rule_text),
        ("tcp", "closed"),
    ];
    has(&ends, &of_name);
    let rule_text = format!("--forward {FORWARD}");
    let of_forward = [
        ("vm", VM),
        ("direction", "inbound"),
        ("remote", &local),
        ("rule_text", &rule_text),
    ];
    has(&ends, &of_forward);
    has(&of("dns"), &[("name", ALLOWED), ("verdict", "allowed")]);
    has(&of("dns"), &[("name", DENIED), ("verdict", "refused")]);
}

fn flows(place: &Place) -> Vec<Value> {
    serde_json::from_str(&place.output(&["flows", "--json"])).unwrap()
}

/// A guest or a command, what serves it, and what it says.
struct Session {
    cell: Cell,
    way: Way,
    /// `slipgate attach`, where the guest is not slipgate's own.
    attached: Option<Attached>,
    guest: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Session {
    fn start(cell: Cell, way: Way, place: &Place, flags: &[&str]) -> Self {
        let line = guest_line(cell);
        let (attached, mut command) = match way {
            Way::Run => {
                let run = ["run", "--mode", "userspace", "--name", VM];
                let args = [&run, flags, &["--cmdline", &line]].concat();
                (None, place.user.slipgate_with_kvm(&args))
            }
            Way::Exec => {
                let serves = place.file("tests");
                let serves = [
                    serves.to_str().unwrap(),
                    "unprivileged_forwards::a_command_that_serves",
                    "--exact",
                    "--ignored",
                    "--nocapture",
                ];
                let shell = ["--", "sh", "-c", COMMAND_LINE, "sh"];
                let args = [&["exec", "--name", VM], flags, &shell, &serves].concat();
                (None, place.slipgate(&args))
            }
            Way::Stream => {
                let attached = Attached::start_by("--socket", place, flags);
                let network = Network::Socket(attached.socket.clone(), MTU);
                (Some(attached), qemu(place, network, &line))
            }
            Way::VhostUser => {
                let attached = Attached::start_by("--vhost-user", place, flags);
                let network = Network::VhostUser(attached.socket.clone(), MTU);
                (Some(attached), qemu(place, network, &line))
            }
        };
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut guest = place.world.host.spawn(command).unwrap();
        let lines = BufReader::new(guest.stdout.take().unwrap()).lines();
        Self {
            cell,
            way,
            attached,
            guest,
            lines,
        }
    }

    fn finds_the_allowed_name(&mut self) {
        match self.way {
            Way::Exec => drop(self.says("allowed: 0")),
            _ => assert_eq!(self.result("crr")["done"], 1),
        }
    }

    fn finds_no_denied_name(&mut self) {
        match self.way {
            Way::Exec => drop(self.says(CURL_NO_ADDRESS)),
            _ => {
                let asked = self.result(["dns", "dns6"][usize::from(self.cell.is_ipv6())]);
                assert_eq!(asked["name"], DENIED, "{asked}");
                assert!(asked["addresses"][0].is_null(), "{asked}");
            }
        }
    }

    fn serves(&mut self) {
        match self.way {
            Way::Exec => drop(self.says("it listens")),
            _ => drop(self.says("\"serving\"")),
        }
    }

    /// The result of a workload of the built-in guest.
    fn result(&mut self, workload: &str) -> Value {
        let line = self.says(&format!("\"workload\":\"{workload}\""));
        serde_json::from_str(&line).unwrap()
    }

    /// The next line with this part.
    fn says(&mut self, part: &str) -> String {
        let mut before = Vec::new();
        for line in self.lines.by_ref().map_while(Result::ok) {
            if line.contains(part) {
                return line;
            }
            before.push(line);
        }
        panic!("it ended without {part:?}, but with {before:#?}");
    }

    /// Ends it in order, and looks whether anything is left.
    fn end(mut self, place: &Place) {
        match self.way {
            Way::Exec => drop(self.guest.stdin.take()),
            _ => signal(self.guest.id(), libc::SIGTERM),
        }
        let status = self.guest.wait().unwrap().code();
        match self.attached {
            Some(attached) => {
                signal(attached.child.id(), libc::SIGTERM);
                assert_eq!(attached.end(place), Some(0));
            }
            None if self.way == Way::Run => assert_eq!(status, Some(128 + libc::SIGTERM)),
            None => assert_eq!(status, Some(0)),
        }
        assert!(place.user.has_nothing_left());
    }
}

/// QEMU with the built-in guest, as the user has it.
fn qemu(place: &Place, network: Network, line: &str) -> Command {
    let qemu = Qemu {
        boot: Boot {
            cpus: 1,
            ..Boot::new(&place.world.host, line)
        },
        accelerator: Accelerator::Kvm,
        network,
    };
    // The tests' own image may be where the user may not look.
    let (image, theirs) = (builtin_guest::image().unwrap(), place.file("guest"));
    place.user.install(&image, "guest").unwrap();
    let command = qemu.command().unwrap();
    let args: Vec<_> = command
        .get_args()
        .map(|arg| {
            if arg == image {
                theirs.as_os_str()
            } else {
                arg
            }
        })
        .collect();
    let program = Path::new(command.get_program());
    place.user.command_with_kvm(program, &args)
}
